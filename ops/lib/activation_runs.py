"""Runs of 32 activations to the records of `panel_activations`, as many at a time as a vector has lanes.

A run alone needs five sums or maxima of its lanes, a division and a dozen scalars: 71 cycles on Zen 4, and 37 if many
are done together: two runs become one vector at every step, so that in the end each lane holds one run and the rest is
done for all at once. The order of additions is that of a tree of halves at every CPU level.
"""

from ggjit.jit import lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.lib.int8_sums import OFFSET_SHIFT
from ggjit.ops.lib.panel import ACT, CODES, NEG_SUM, NEG_SUMS, SUM, SUMS, D

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

LARGEST = 2.0**127  # that values are multiplied by
LANE = 4  # words of 128 bits: shuffles within them are cheap


class Runs:
    """Addresses of runs in rows, one after the other: `x` and `out`, and `left` runs in the row.

    Args:
        e: the Emit.
        nbytes: bytes of a run at x and at out.
        gaps: bytes between rows, more than those of their runs.
        per_row: runs in a row.
        n: runs in all; the last one is repeated.
    """

    def __init__(self, e, nbytes, gaps, per_row, n):
        self.e, self.nbytes, self.gaps, self.per_row, self.n = e, nbytes, gaps, per_row, n

    def next(self, i, at, left):
        """After run i at addresses `at`: (new addresses, new left)."""
        e, b = self.e, self.e.b
        more = b.icmp_signed("<", e.add(i, 1), self.n)
        ends = b.icmp_signed("==", left, e.i64(1))
        steps = (b.select(ends, e.add(gap, nbytes), e.i64(nbytes)) for gap, nbytes in zip(self.gaps, self.nbytes))
        at = [e.add(a, b.select(more, step, e.i64(0))) for a, step in zip(at, steps)]
        return at, b.select(ends, self.per_row, e.sub(left, 1))


def _halves(lanes, width):
    """Lanes of two vectors that hold runs of `width` lanes: the lower half of each run, the upper half of each."""
    block, half = (LANE, width // 2) if width <= LANE else (lanes, width // 2)
    low = [v + at + run + i for at in range(0, lanes, block) for v in (0, lanes) for run in range(0, block, width)
           for i in range(half)]  # fmt: skip
    return low, [i + half for i in low]


def _folded(e, leaf, ops, n=None, first=0):
    """The lanes of as many runs as a vector has lanes, reduced.

    Args:
        e: the Emit.
        leaf: (run) to vectors.
        ops: for each of them how two are put together.
        n: runs to do.
        first: of them.

    Returns:
        The vectors, each lane one run, and the runs' numbers in that order.
    """
    n = e.lanes if n is None else n
    if n == 1:
        return leaf(first), [first] * e.lanes
    half = n // 2
    x, of_x = _folded(e, leaf, ops, half, first)
    y, of_y = _folded(e, leaf, ops, half, first + half)
    low, high = _halves(e.lanes, e.lanes // half)
    masks = [ir.Constant(emit.vector(emit.I32, e.lanes), lanes) for lanes in (low, high)]
    both = [op(*(e.b.shuffle_vector(u, v, m) for m in masks)) for op, u, v in zip(ops, x, y, strict=True)]
    return both, [(of_x + of_y)[i] for i in low]


def _joined(op, parts):
    """The vectors of an operand, put together by halves."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [op(u, v) for u, v in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _quantize(e, values, outs):
    """Write the records of runs.

    Args:
        e: the Emit.
        values: (run) to f32 operands of its halves, emitted anew at every call.
        outs: address of each record.

    Returns:
        (run) to what the record leaves of the values.
    """
    b, f32s = e.b, emit.vector(emit.F32, e.lanes)

    def const(x):
        return ir.Constant(f32s, [x] * e.lanes)

    def largest(u, v):  # magnitudes are compared as integers: a NaN is larger than all numbers
        return b.select(b.icmp_signed(">", u, v), u, v)

    def top_of(run):
        magnitudes = [e.and_i32(e.f32_bits(v), 0x7FFFFFFF) for v in values(run)]
        return [_joined(largest, e.map(largest, *magnitudes))]

    (top,), order = _folded(e, top_of, [largest])
    top = b.bitcast(top, f32s)
    factor = b.fdiv(const(127.0), top)
    is_tiny = b.fcmp_ordered(">", factor, const(LARGEST))
    factor = b.select(is_tiny, const(LARGEST), factor)
    lane_of = {run: lane for lane, run in enumerate(order)}

    def of_run(v, run):
        return [b.shuffle_vector(v, v, ir.Constant(emit.vector(emit.I32, e.lanes), [lane_of[run]] * e.lanes))] * e.parts

    def codes_of(run):
        scaled = [e.fmul(v, of_run(factor, run)) for v in values(run)]
        return scaled, [e.rint_i32(u) for u in scaled]

    def sums_of(run):
        scaled, codes = codes_of(run)
        for p, v in enumerate(v for q in codes for v in q):
            e.store_value(outs[run], CODES + p * e.lanes, b.trunc(v, emit.vector(emit.I8, e.lanes)))
        f = [e.to_f32(q) for q in codes]
        rest = e.fadd(*(e.fmul(e.fsub(u, v), v) for u, v in zip(scaled, f, strict=True)))
        squares = e.fadd(*(e.fmul(v, v) for v in f))  # exact
        return [_joined(b.fadd, rest), _joined(b.fadd, squares), *(_joined(b.add, q) for q in codes)]

    (rest, squares, *sums), _ = _folded(e, sums_of, [b.fadd, b.fadd, b.add, b.add])
    # d (1 + sum((u - q) q) / sum(q q)) of u = x / d and codes q: least squares, from small differences
    total = b.select(b.fcmp_ordered(">", squares, const(0.0)), squares, const(1.0))
    d = b.select(is_tiny, const(1 / LARGEST), b.fmul(top, const(1 / 127)))
    d = b.fadd(d, b.fmul(d, b.fdiv(rest, total)))
    _store_heads(e, d, sums, [outs[run] for run in order])

    def left(run):
        _, codes = codes_of(run)
        d_run = of_run(d, run)
        return [e.fsub(v, e.fmul(d_run, e.to_f32(q))) for v, q in zip(values(run), codes, strict=True)]

    return left


def _store_heads(e, d, sums, outs):
    """The first 32 bytes of records: of each lane d and the sums of its halves' codes."""
    b, i32s = e.b, emit.vector(emit.I32, e.lanes)
    words = [ir.Constant(i32s, [0] * e.lanes)] * 8
    words[D // 4] = b.bitcast(d, i32s)
    for s, at, negative_at in zip(
        (*sums, b.add(*sums)), (SUMS, SUMS + 4, SUM), (NEG_SUMS, NEG_SUMS + 4, NEG_SUM), strict=True
    ):
        words[at // 4] = b.bitcast(b.fmul(d, b.sitofp(s, d.type)), i32s)
        words[negative_at // 4] = b.mul(s, ir.Constant(i32s, [-1 << OFFSET_SHIFT] * e.lanes))
    n = min(e.lanes, 8)
    first = ir.Constant(emit.vector(emit.I32, n), list(range(n)))
    for g in range(0, 8, n):
        rows = words[g : g + n] + [ir.Constant(i32s, ir.Undefined)] * (e.lanes - n)
        for out, row in zip(outs, emit.transpose(e, rows), strict=True):
            e.store_value(out, 4 * g, b.shuffle_vector(row, row, first))


def quantize_runs(load, size, records):
    """Emitted (x, x_gap, out, out_gap, per_row, left, n): records of n runs of floats.

    Args:
        load: the Emit's way to load 16 of them.
        size: their bytes.
        records: of a run: 1, or 2 for act_q16.
    """

    @emitted("x x_gap out out_gap per_row left n")
    def quantize(e, x, x_gap, out, out_gap, per_row, left, n):
        """Rows of per_row runs, `left` of them in the first; x_gap and out_gap bytes more than those between rows."""
        runs = Runs(e, (32 * size, ACT * records), (x_gap, out_gap), per_row, n)

        def batch(i, x, out, left):
            at, places = [x, out], []
            for j in range(e.lanes):
                places.append(at)
                at, left = runs.next(e.add(i, j), at, left)

            def values(run):
                return [getattr(e, load)(places[run][0], 16 * size * half) for half in range(2)]

            rest = _quantize(e, values, [out for _, out in places])
            if records == 2:
                _quantize(e, rest, [e.add(out, ACT) for _, out in places])
            return [*at, left]

        e.loop(n, [x, out, left], batch, step=e.lanes)

    return quantize


def copy_blocks(values, nbytes, codes_at, is_f32):
    """Emitted (x, x_gap, out, out_gap, per_row, left, n): records of n int8 blocks.

    Args:
        values: of a block.
        nbytes: of a block.
        codes_at: offset of the codes.
        is_f32: is the scale f32, not f16?
    """

    @emitted("x x_gap out out_gap per_row left n")
    def copy(e, x, x_gap, out, out_gap, per_row, left, n):
        """Rows of per_row blocks, `left` of them in the first; x_gap and out_gap bytes more than those between rows."""
        runs = Runs(e, (nbytes, values // 32 * ACT), (x_gap, out_gap), per_row, n)

        def block(i, x, out, left):
            d = e.splat_f32(x) if is_f32 else e.splat_f16(x)
            for r in range(values // 32):
                codes = [e.load_u8_as_i32(x, codes_at + 32 * r + 16 * h, signed=True) for h in range(2)]
                _store_record(e, e.add(out, r * ACT), d, codes)
            at, left = runs.next(i, [x, out], left)
            return [*at, left]

        e.loop(n, [x, out, left], block)

    return copy


def _store_record(e, out, d, codes):
    """Write a record: d in 16 lanes, codes as two i32 operands."""
    b, sums = e.b, []
    for half, q in enumerate(codes):
        sums.append(e.call(f"llvm.vector.reduce.add.v{e.lanes}i32", emit.I32, _joined(b.add, q)))
        for p, v in enumerate(q):
            e.store_value(out, CODES + 16 * half + p * e.lanes, b.trunc(v, emit.vector(emit.I8, e.lanes)))
    sums.append(b.add(*sums))
    scale = b.extract_element(d[0], emit.I32(0))
    e.store_value(out, D, scale)
    for s, at, negative_at in zip(sums, (SUMS, SUMS + 4, SUM), (NEG_SUMS, NEG_SUMS + 4, NEG_SUM), strict=True):
        e.store_value(out, at, b.fmul(scale, b.sitofp(s, scale.type)))
        e.store_value(out, negative_at, b.mul(s, emit.I32(-1 << OFFSET_SHIFT)))
    e.store_value(out, NEG_SUM + 4, emit.I32(0))
