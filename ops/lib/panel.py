"""Tiles of the matrix product over panels of quantized weights, for any type and number of columns.

A panel (see `ggjit.ops.quants.quant`) is multiplied by columns of activations quantized to int8 per 32 (see
`activations`). Order of the float operations of one output, the same in every tile and at every CPU level with fma:

    per run of 32 in k order:
        t = f32(s0) * scale0;   t = fma(f32(s1), scale1, t) if the type scales per 16
        acc = fma(t, d, acc);   acc = fma(minimum_j, d * sum_j, acc) for each minimum

The integer sums s are exact, so how they are split does not show in the bits. Activations of 16 bits are two records a
run: each has a sum acc of its own, added when the tile ends (after every slice of K, the same for all tiles).

Ladder (Q6_K, one Zen 4 core; share of plain reads at one column / of the dot peak at 512 columns, K = 4096):
    row-major dot products                          0.1-0.4 / 0.2
    panels, loads in the compiler's order           0.79-0.91
    loads in ascending order                        0.97-1.05 / 0.61 (decoded for each 8 columns)
    unpacked once for all columns, K in slices      - / 0.57, and four tiles serve all types
    activations' rows an odd number of lines apart  - / 0.64
"""

import functools
from typing import NamedTuple

from ggjit import types
from ggjit.cpu import cpu_level, has, has_int8_dot
from ggjit.jit import Jitted, jitted, lazy_module
from ggjit.ops.lib.emitted import ROWS, emitted
from ggjit.ops.lib.int8_sums import as_unpacked, part_sums
from ggjit.ops.lib.row_words import RowWords
from ggjit.ops.quants.quant import Part

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")

RUN, ACT = 32, 64  # k of a run; bytes of its activations
D, SUMS, SUM, NEG_SUMS, NEG_SUM, CODES = 0, 4, 12, 16, 24, 32  # offsets in the activations' record
AHEAD = 8192  # bytes of prefetch to L2 where arithmetic takes about as long as memory


# ---- tiles ---------------------------------------------------------------------------------------------------------


def accumulate(e, runs, cols, acc, limit, before_run=None, run_nbytes=ACT):
    """Add runs to the sums of columns.

    Args:
        e: the Emit.
        runs: iterable of runs.
        cols: for each column the address of the first run's activations.
        acc: f32 operand of each column.
        limit: largest operand byte.
        before_run: called with the run's number before its loads are emitted.
        run_nbytes: bytes from one run's activations to the next.

    Returns:
        The new acc.
    """
    acc, r = list(acc), 0
    runs = iter(runs)
    while True:
        if before_run is not None:
            before_run(r)
        parts = next(runs, None)
        if parts is None:
            return acc
        at, one, k = r * run_nbytes, len(parts) == 1, 0
        total = [None] * len(cols)
        for j, part in enumerate(parts):
            sums_at = at + (NEG_SUM if one else NEG_SUMS + 4 * j)
            sums = part_sums(e, part, cols, at + CODES + 4 * k, sums_at, limit)
            k += len(part.operands)
            for c, s in enumerate(sums):
                f = e.to_f32(s)
                total[c] = e.fmul(f, part.scale) if total[c] is None else e.fma(f, part.scale, total[c])
        for c, y in enumerate(cols):
            acc[c] = e.fma(total[c], e.splat_f32(y, at + D), acc[c])
        for j, part in enumerate(parts):
            if part.minimum is not None:
                for c, y in enumerate(cols):
                    acc[c] = e.fma(part.minimum, e.splat_f32(y, at + (SUM if one else SUMS + 4 * j)), acc[c])
        r += 1


class Outputs:
    """The result's columns of a tile and which part of the tile lies in them.

    Args:
        e: the Emit.
        out: address of the first row of the first column.
        stride: bytes from column to column.
        columns: of the tile.
        n_rows, n_cols: rows and columns that are there (i64; n_rows may exceed 16).
    """

    def __init__(self, e, out, stride, columns, n_rows, n_cols):
        b = e.b
        self.e, self.n_rows = e, n_rows
        self.whole = b.and_(b.icmp_signed(">=", n_rows, e.i64(ROWS)), b.icmp_signed(">=", n_cols, e.i64(columns)))
        self.at = [e.add(out, e.mul(stride, c)) if c else out for c in range(columns)]
        self.rows = [b.select(b.icmp_signed("<", e.i64(c), n_cols), n_rows, e.i64(0)) for c in range(columns)]

    def load(self, add):
        """The sums so far if add is 1, zeros if it is 0."""
        return [self.e.load_first(at, self.e.mul(n, add)) for at, n in zip(self.at, self.rows, strict=True)]

    def store(self, acc):
        """Store what is there of the tile's sums."""

        def all_of_it():
            for at, a in zip(self.at, acc, strict=True):
                self.e.store(at, a)

        def part():
            for at, a, n in zip(self.at, acc, self.rows, strict=True):
                self.e.store_first(at, a, n)

        self.e.if_else(self.whole, all_of_it, part)


def column_addresses(e, y, stride, columns, n_cols):
    """Addresses of the activations of a tile's columns; those that are not there repeat the last one."""
    last = e.sub(n_cols, 1)
    out = [y]
    for c in range(1, columns):
        there = e.b.icmp_signed("<", e.i64(c), n_cols)
        out.append(e.add(y, e.mul(stride, e.b.select(there, e.i64(c), last))))
    return out


def _tile(runs, size, nbytes, limit, steps, columns, ahead, records):
    n_runs, run_nbytes = size // RUN, ACT * records

    @emitted("w y y_stride out out_stride n n_rows n_cols add")
    def tile(e, w, y, y_stride, out, out_stride, n, n_rows, n_cols, add):
        """16 rows x columns: n panel blocks at w by activations at y; the old outputs are added if add is 1."""
        ys = column_addresses(e, y, y_stride, columns, n_cols)

        def block(i, *acc):
            wi, offset = e.add(w, e.mul(i, nbytes)), e.mul(i, n_runs * run_nbytes)
            cols = [e.add(e.add(a, offset), ACT * j) for a in ys for j in range(records)]

            def prefetch(r, count=1, base=wi):  # evenly, before the loads of a run; a line left out stalls all
                if r < n_runs:
                    for at in range(r * nbytes // n_runs // 64 * 64, (r + count) * nbytes // n_runs, 64):
                        e.prefetch(base, ahead + at)

            if steps == 1:
                return accumulate(e, runs(e, wi, 0), cols, acc, limit, prefetch if ahead else None, run_nbytes)

            def step(j, *acc):
                if ahead:
                    prefetch(0, n_runs // steps, e.add(wi, e.mul(j, nbytes // steps)))
                offset = e.mul(j, n_runs // steps * run_nbytes)
                return accumulate(e, runs(e, wi, j), [e.add(c, offset) for c in cols], acc, limit, None, run_nbytes)

            return e.loop(steps, list(acc), step)

        outputs = Outputs(e, out, out_stride, columns, n_rows, n_cols)
        before = outputs.load(add)
        acc = e.loop(n, [a if j == 0 else e.zero_f32() for a in before for j in range(records)], block)
        outputs.store(acc if records == 1 else [e.fadd(*both) for both in zip(acc[::2], acc[1::2], strict=True)])

    return tile


@functools.cache
def panel_tile(type_name, columns, records=1):
    """Emitted tile of a type's panels, fastest for exactly that many columns of 1 or 2 records a run.

    Prefetch is on where arithmetic takes about as long as memory: from 3 columns, or below 4 bits a weight.
    """
    p = types.by_name(type_name).quant.panel
    ahead = AHEAD if columns * records >= 3 or p.nbytes * 8 < 4 * ROWS * p.blck_size else 0
    return _tile(p.runs, p.blck_size, p.nbytes, p.limit, p.steps, columns, ahead, records)


# ---- unpacked panels: one form for all types -----------------------------------------------------------------------


class Unpacked(NamedTuple):
    """A run of 32: 8 operands of value + offset, then f32[16] scale (one or two), then as many minimums if there are.

    The offset is 128, so that types share their tiles. Where no instruction takes unsigned by signed bytes, types with
    values up to 127 keep their own: the smaller, the more of them vpmaddubsw can sum in 16 bits; sdot takes up to 127.

    Attributes:
        parts: scales of a run.
        minimum: are there minimums.
        offset_shift: log2 of the offset, None: no offset.
        limit: largest operand byte.
    """

    parts: int
    minimum: bool
    offset_shift: int | None = 7
    limit: int = 255

    @property
    def nbytes(self):
        """Bytes of a run."""
        return 512 + 64 * self.parts * (2 if self.minimum else 1)


def unpacked_form(type_name):
    """The unpacked form of a type."""
    p = types.by_name(type_name).quant.panel
    mixed_dot = cpu_level() == "sse2" or (has("i8mm") if cpu_level() == "neon" else has_int8_dot())
    if p.limit <= 127 and not mixed_dot:
        return Unpacked(p.parts, p.minimum, p.offset_shift, p.limit)
    return Unpacked(p.parts, p.minimum)


@functools.cache
def unpacked_tile(form, columns, records=1):
    """Emitted tile of unpacked runs by columns of 1 or 2 records a run."""
    parts, minimum, offset_shift, limit = form

    def operand(e, w, offset):
        if e.level == "avx512" or not e.int8_dot:
            return e.load_bytes(w, offset)
        codes = emit.vector(emit.I8, e.nbytes)
        return lambda p: e.load(w, offset + p * e.nbytes, codes)  # where it is used: registers are few

    def runs(e, w, step):
        out = []
        for j in range(parts):
            operands = [operand(e, w, 64 * g) for g in range(8 // parts * j, 8 // parts * (j + 1))]
            m = e.load_f32(w, 512 + 64 * (parts + j)) if minimum else None
            out.append(Part(operands, e.load_f32(w, 512 + 64 * j), offset_shift, m))
        yield out

    return _tile(runs, RUN, form.nbytes, limit, 1, columns, 0, records)


def _store_unpacked(e, at, parts, offset_shift):
    """One run in unpacked form: factors of operands divided out, offsets changed to the form's."""
    g = 0
    for j, part in enumerate(parts):
        more = _offset(offset_shift) - (_offset(part.offset_shift) >> part.factor)
        # Bits below the factor are zero: none come in from the neighbour.
        operands = [e.shr(x, part.factor) for x in part.operands]
        operands = [e.iadd(x, e.bytes_const(more)) for x in operands] if more else operands
        for i in range(0, len(operands), 2):
            for x in as_unpacked(e, operands[i : i + 2]):
                e.store(at, x, 64 * g)
                g += 1
        scale = e.fmul(part.scale, e.f32_const(2.0**part.factor)) if part.factor else part.scale
        e.store(at, scale, 512 + 64 * j)
        if part.minimum is not None:
            e.store(at, part.minimum, 512 + 64 * (len(parts) + j))


def _offset(shift):
    return 0 if shift is None else 1 << shift


@functools.cache
def unpack(type_name):
    """Emitted (w, u, n): n panel blocks at w to unpacked runs at u."""
    p = types.by_name(type_name).quant.panel
    runs, size, nbytes, steps = p.runs, p.blck_size, p.nbytes, p.steps
    form = unpacked_form(type_name)
    u_nbytes, offset_shift = form.nbytes, form.offset_shift

    @emitted("w u n")
    def unpack_blocks(e, w, u, n):
        def block(i):
            wi, at = e.add(w, e.mul(i, nbytes)), e.add(u, e.mul(i, size // RUN * u_nbytes))

            def step(j):
                base = e.add(at, e.mul(j, size // RUN // steps * u_nbytes)) if steps > 1 else at
                for r, parts in enumerate(runs(e, wi, j)):
                    _store_unpacked(e, e.add(base, r * u_nbytes), parts, offset_shift)
                return []

            if steps == 1:
                step(0)
            else:
                e.loop(steps, [], step)
            return []

        e.loop(n, [], block)

    return unpack_blocks


def check_panel(type_name):
    """Emit a type's panel block into a scrap function and compare it with what its `Panel` says.

    Raises:
        ValueError: parts, minimum or offset are not as said, or the runs do not cover the block.
    """
    p = types.by_name(type_name).quant.panel
    scrap = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [emit.I64]), "scrap")
    e = emit.Emit(ir.IRBuilder(scrap.append_basic_block()), "avx2")
    found = list(p.runs(e, scrap.args[0], 0 if p.steps == 1 else e.i64(0)))
    given = {
        (len(r), part.minimum is not None, _offset(part.offset_shift) >> part.factor, sum(len(q.operands) for q in r))
        for r in found
        for part in r
    }
    if given != {(p.parts, p.minimum, _offset(p.offset_shift), 8)} or len(found) * p.steps * RUN != p.blck_size:
        raise ValueError(f"check_panel: runs of {type_name} must be as its panel says, got {given}, {len(found)} runs")


# ---- packing -------------------------------------------------------------------------------------------------------


@functools.cache
def pack_panel(type_name):
    """Jitted (src, src_offs, src_row_stride, n_rows, dst, dst_offs, k): rows of file blocks to one panel.

    Rows that are missing (n_rows < 16) become zeros, and so do file blocks that the last panel block lacks. k is the
    number of weights in a row.
    """
    t = types.by_name(type_name)
    return _pack_blocks(t) if isinstance(t.quant.panel.pack, Jitted) else _pack_rows(t)


def _pack_blocks(t):
    """One block after another."""
    p = t.quant.panel
    size, nbytes = t.blck_size, p.nbytes
    file_nbytes, per = t.type_size, p.blck_size // t.blck_size
    place = p.pack if per > 1 else _only_part(p.pack)

    @jitted
    def pack(src, src_offs, src_row_stride, n_rows, dst, dst_offs, k):
        n = k // size
        for i in range(n):
            to, part = dst_offs + i // per * nbytes, i % per
            if part == 0 and (n_rows < 16 or i + per > n):
                for j in range(0, nbytes, 4):
                    memory.store_u32(dst, to + j, 0)
            for r in range(n_rows):
                place(src, src_offs + r * src_row_stride + i * file_nbytes, dst, to, r, part)

    return pack


def _only_part(pack_block):
    @jitted(inline="always")
    def place(src, src_offs, dst, dst_offs, row, part):
        pack_block(src, src_offs, dst, dst_offs, row)

    return place


def _pack_rows(t):
    """A block of 16 rows at a time."""
    p, size, file_nbytes = t.quant.panel, t.blck_size, t.type_size
    pack_block, nbytes = p.pack, p.nbytes
    assert p.blck_size == size

    @emitted("src stride n_rows dst n")
    def pack_rows(e, src, stride, n_rows, dst, n):
        rows = RowWords(e, src, stride, n_rows, file_nbytes)

        def block(i):
            rows.move(i)
            pack_block(e, rows, e.add(dst, e.mul(i, nbytes)))
            return []

        e.loop(n, [], block)

    @jitted
    def pack(src, src_offs, src_row_stride, n_rows, dst, dst_offs, k):
        pack_rows(memory.address(src) + src_offs, src_row_stride, n_rows, memory.address(dst) + dst_offs, k // size)

    return pack
