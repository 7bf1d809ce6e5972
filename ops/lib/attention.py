"""Tiles of attention: scores, online soft-max in base 2 and weighted sums of values, emitted whole.

Two layouts compute the same bits. In both a tile is 16 KV rows, on a grid that starts at row 0.

    lanes   one lane is one query: maxima and sums need no horizontal step (prompts)
    rows    one lane is one element of a head: K and V are read as they lie, once for several heads (single tokens)

Order of every float operation, for one query of one head; x is q scaled, so that scores are in base 2:

    p[j]  = x[j] * k[j], then fma over d = j + 16, j + 32, ...          j = 0 .. 15
    s     = tree(p)      tree: t[j] = p[j] + p[j+8]; t[j] += t[j+4]; t[j] += t[j+2]; t[0] + t[1]
    s     = softcap(s); s = fma(mask, slope, s)
    m'    = max(m, s of the tile's rows); c = exp2(m - m'); w = exp2(s - m')
    l     = fma(l, c, tree(w))
    o[d]  = o[d] * c, then fma(v[d], w) over the tile's rows

A state is (m, l, o). A row whose mask is -inf has weight exactly 0, and a tile of such rows has c = 1: it changes
nothing, so it may be skipped. States of chunks of 512 rows are merged in order; merging an empty one changes nothing.

A state in memory is m and l (16 f32 each), then o as n vectors of 16 f32: in layout "lanes" one vector for each element
of the head, in layout "rows" the elements themselves, m and l being the same in all lanes. So merging is the same code.
"""

import functools

from ggjit.jit import lazy_module
from ggjit.ops.lib.emitted import emitted

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

TILE = 16  # KV rows
CHUNK = 512  # KV rows of one state
HEAD = 128  # bytes of m and l before o in a state
FLOOR = -1e30  # maximum of no row; below all scores
LOG2E = 1.4426950408889634
MINUS_INF = 0xFC00  # f16 bits
MIXED, OPEN, CLOSED = 0, 1, 2  # what the mask does in a tile: look at it; all 0; all -inf
# 2^r on [-0.5, 0.5], least relative error (1.1e-7) with the constant term 1
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472032815218)
ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
TREE = (0, 2, 1, 3)  # groups of partial sums (j, j+8, j+4, j+12) in the order the tree adds them
BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def padded(n):
    """Return n rounded up to a multiple of 16; rows without elements have 16 zeros."""
    return max((n + 15) // 16, 1) * 16


# ---- values ---------------------------------------------------------------------------------------------------------


def exp2(e, x):
    """2^x for x <= 0: exactly 1 at 0, exactly 0 from -127 downwards (-inf included), NaN for NaN."""
    return e.map(lambda v: _exp2(e, v), x)


def _exp2(e, x):
    b, t = e.b, x.type
    const = lambda value: ir.Constant(t, [value] * t.count)  # noqa: E731
    low = const(-127.0)
    x = b.select(b.fcmp_ordered(">", low, x), low, x)
    big = b.fadd(x, const(ROUND))
    r = b.fsub(x, b.fsub(big, const(ROUND)))
    p = const(EXP2[-1])
    for c in EXP2[-2::-1]:
        p = fma(e, p, r, const(c))
    bits = emit.vector(emit.I32, t.count)
    shift = b.shl(b.bitcast(big, bits), ir.Constant(bits, [23] * t.count))
    return b.bitcast(b.add(b.bitcast(p, bits), shift), t)


def fma(e, x, y, z):
    """Emit.fma on single vectors of any width."""
    return e.call(f"llvm.{'fmuladd' if e.level == 'sse2' else 'fma'}.v{x.type.count}f32", x.type, x, y, z)


def capped(e, s, cap):
    """Cap * tanh(x), where s = 2 * log2(e) * x."""
    t = exp2(e, e.fneg(e.fabs(s)))
    one = e.f32_const(1.0)
    size = e.fmul(cap, e.map(e.b.fdiv, e.fsub(one, t), e.fadd(one, t)))
    sign = e.and_i32(e.f32_bits(s), -0x80000000)
    return e.bits_to_f32(e.map(e.b.or_, e.f32_bits(size), sign))


def join(e, parts):
    """An operand as one LLVM vector of 16, which LLVM splits again: for shuffles over the whole width."""
    parts = list(parts)
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        index = ir.Constant(emit.vector(emit.I32, n), list(range(n)))
        parts = [e.b.shuffle_vector(a, c, index) for a, c in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def split(e, v):
    """The operand of a vector of 16."""
    n = 16 // e.parts
    index = [ir.Constant(emit.vector(emit.I32, n), list(range(p * n, p * n + n))) for p in range(e.parts)]
    return [v] if e.parts == 1 else [e.b.shuffle_vector(v, v, i) for i in index]


def shuffle(e, x, y, lanes):
    """Lanes of two vectors of 16: 0 to 15 from x, 16 to 31 from y."""
    return e.b.shuffle_vector(x, y, ir.Constant(emit.vector(emit.I32, 16), list(lanes)))


def transpose(e, rows):
    """16 vectors of 16 with rows and lanes exchanged."""
    rows = list(rows)
    for w in (8, 4, 2, 1):
        for i in range(16):
            if i & w == 0:
                x, y = rows[i], rows[i + w]
                rows[i] = shuffle(e, x, y, [16 + j - w if j & w else j for j in range(16)])
                rows[i + w] = shuffle(e, x, y, [16 + j if j & w else j + w for j in range(16)])
    return rows


def fold(e, x, y, lanes):
    """Two vectors whose pairs of partial sums, named by lanes (of x, +16 for y) and their partners, are added."""
    low, high = lanes
    return e.b.fadd(shuffle(e, x, y, low), shuffle(e, x, y, high))


# Lanes of the four folds. After the first two a vector holds four partial sums of four rows, after all four lane
# 4 * (r % 4) + r // 4 holds the sum of row r.
FOLDS = (
    ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]),
    (
        [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)],
        [*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32)],
    ),
    tuple([[4 * q + a + c for q in range(4) for a in (0, 16) for c in (k, k + 1)] for k in (0, 2)]),
    tuple([[4 * q + a + c for q in range(4) for a in (0, 16) for c in (k, k + 2)] for k in (0, 1)]),
)
ROW_ORDER = [4 * (r % 4) + r // 4 for r in range(16)]


def across(e, v, op):
    """The tree over the lanes of one vector of 16; the result is in all lanes."""
    for w in (8, 4, 2, 1):
        v = op(v, shuffle(e, v, v, [j ^ w for j in range(16)]))
    return v


def tree(values, add):
    """The tree over 16 values."""
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        values = [add(values[i], values[i + half]) for i in range(half)]
    return values[0]


def pointer(e, address, offset=0):
    """The start of many loads at constant offsets: two instructions of IR for each less than from an address."""
    return e.b.inttoptr(e.add(address, offset), ir.PointerType())


def read(e, start, offset, t):
    """Load of LLVM type t at a pointer + offset."""
    at = start if offset == 0 else e.b.gep(start, [e.i64(offset)], source_etype=ir.IntType(8))
    return e.b.load(at, align=1, typ=t)


def load_values(e, kind, address, offset, count=16):
    """Load the first `count` of 16 values of a plain type as f32, zeros after; offset in bytes."""
    if count >= 16:
        return {"F32": e.load_f32, "F16": e.load_f16, "BF16": e.load_bf16}[kind](address, offset)
    element = emit.F32 if kind == "F32" else emit.I16
    v = ir.Constant(emit.vector(element, 16), None)
    at = 0
    for size in (8, 4, 2, 1):
        if count & size:
            piece = e.load(address, e.add(offset, at * BYTES[kind]), emit.vector(element, size))
            wide = e.b.shuffle_vector(
                piece, piece, ir.Constant(emit.vector(emit.I32, 16), [min(j, size - 1) for j in range(16)])
            )
            v = shuffle(e, v, wide, [16 + j - at if at <= j < at + size else j for j in range(16)])
            at += size
    parts = split(e, v)
    if kind == "F32":
        return parts
    if kind == "BF16":
        wide = e.map(lambda p: e.b.zext(p, emit.vector(emit.I32, e.lanes)), parts)
        return e.bits_to_f32(e.shl_i32(wide, 16))
    if not e.portable:
        return e.map(
            lambda p: e.b.fpext(e.b.bitcast(p, emit.vector(emit.F16, e.lanes)), emit.vector(emit.F32, e.lanes)), parts
        )
    return e.halves_to_f32(parts)


# ---- both layouts ---------------------------------------------------------------------------------------------------


@emitted("state n")
def reset(e, state, n):
    """State of no row."""
    e.store(state, e.f32_const(FLOOR))
    e.store(state, e.zero_f32(), 64)
    e.loop(n, [], lambda i: e.store(e.add(state, e.mul(i, 64)), e.zero_f32(), HEAD))


@emitted("total part n")
def merge(e, total, part, n):
    """Merge the state of the next chunk into the state of all before it."""
    m0, m1 = e.load_f32(total), e.load_f32(part)
    m = e.fmax(m0, m1)
    c0, c1 = exp2(e, e.fsub(m0, m)), exp2(e, e.fsub(m1, m))
    e.store(total, m)

    def one(i):
        a, c = (e.add(x, e.mul(i, 64)) for x in (total, part))
        e.store(a, e.fma(e.load_f32(a, 64), c0, e.fmul(e.load_f32(c, 64), c1)), 64)

    e.loop(e.add(n, 1), [], one)  # l lies before o


@emitted("state sink n")
def finish(e, state, sink, n):
    """o / l, where the sink (16 f32 in base 2, -inf for none) is one more score without a value; 0 if l is 0."""
    m, s = e.load_f32(state), e.load_f32(sink)
    top = e.fmax(m, s)
    c = exp2(e, e.fsub(m, top))
    total = e.fma(e.load_f32(state, 64), c, exp2(e, e.fsub(s, top)))
    zero = e.zero_f32()
    inverse = e.map(
        lambda t, z: e.b.select(e.b.fcmp_ordered("==", t, z), z, e.b.fdiv(e.f32_const(1.0)[0], t)), total, zero
    )
    factor = e.fmul(c, inverse)

    def one(i):
        at = e.add(state, e.mul(i, 64))
        e.store(at, e.fmul(e.load_f32(at, HEAD), factor), HEAD)

    e.loop(n, [], one)


@emitted("x n")
def exp2_values(e, x, n):
    """2^x of 16 * n f32 in place, all <= 0."""
    e.loop(n, [], lambda i: e.store(e.add(x, e.mul(i, 64)), exp2(e, e.load_f32(e.add(x, e.mul(i, 64))))))


@functools.cache
def make_read_rows(kind, n):
    """Emitted (src, stride, n_rows, dst): rows of n values of a plain type to a tile of 16 rows of padded(n) f32."""

    @emitted("src stride n_rows dst")
    def read_rows(e, src, stride, n_rows, dst):
        def one(r):
            row, out = e.add(src, e.mul(r, stride)), e.add(dst, e.mul(r, 4 * padded(n)))
            e.loop(n // 16, [], lambda i: e.store(
                e.add(out, e.mul(i, 64)), load_values(e, kind, e.add(row, e.mul(i, 16 * BYTES[kind])), 0)))  # fmt: skip
            if padded(n) > n // 16 * 16:
                e.store(out, load_values(e, kind, row, n // 16 * 16 * BYTES[kind], n % 16), n // 16 * 64)

        e.loop(n_rows, [], one)
        end = padded(n) // 16
        e.loop(16 * end, [], lambda i: e.store(e.add(dst, e.mul(i, 64)), e.zero_f32()), start=e.mul(n_rows, end))

    return read_rows


# ---- layout "lanes" -------------------------------------------------------------------------------------------------


def row_at(e, rows, i):
    """Address i of a table."""
    return e.load(rows, 8 * i, emit.I64)


@functools.cache
def make_load_queries(n):
    """Emitted (rows, scale, out): 16 rows of n f32 at a table of addresses, scaled, to [padded(n)][16]."""

    @emitted("rows scale out")
    def load_queries(e, rows, scale, out):
        factor = e.splat_f32(scale)

        def block(i, count=16):
            offset = e.mul(i, 64)
            q = [join(e, e.fmul(load_values(e, "F32", row_at(e, rows, r), offset, count), factor)) for r in range(16)]
            for d, v in enumerate(transpose(e, q)):
                e.store(e.add(out, e.mul(i, 1024)), split(e, v), 64 * d)

        e.loop(n // 16, [], block)
        if padded(n) > n // 16 * 16:
            block(e.i64(n // 16), n % 16)

    return load_queries


@functools.cache
def make_store_results(n):
    """Emitted (o, rows): [padded(n)][16] f32 to 16 rows of n at a table of addresses."""

    @emitted("o rows")
    def store_results(e, o, rows):
        def block(i, count=16):
            at, offset = e.add(o, e.mul(i, 1024)), e.mul(i, 64)
            for r, v in enumerate(transpose(e, [join(e, e.load_f32(at, 64 * d)) for d in range(16)])):
                if count == 16:
                    e.store(row_at(e, rows, r), split(e, v), offset)
                else:
                    e.store_first(row_at(e, rows, r), split(e, v), e.i64(count), offset)

        e.loop(n // 16, [], block)
        if n % 16:
            block(e.i64(n // 16), n % 16)

    return store_results


@emitted("rows offset n_tiles out")
def classify(e, rows, offset, n_tiles, out):
    """Look at the f16 masks of 16 rows, at an offset of bytes, and store MIXED, OPEN or CLOSED for each tile."""
    half = emit.vector(emit.I16, 16)
    bits = ir.IntType(256)

    def one(i):
        some = other = ir.Constant(half, None)
        for r in range(16):
            x = e.load(row_at(e, rows, r), e.add(offset, e.mul(i, 2 * TILE)), half)
            some = e.b.or_(some, x)
            other = e.b.or_(other, e.b.xor(x, ir.Constant(half, [MINUS_INF] * 16)))
        is_open, is_closed = (
            e.b.icmp_unsigned("==", e.b.bitcast(v, bits), ir.Constant(bits, 0)) for v in (some, other)
        )
        value = e.b.select(is_open, e.i64(OPEN), e.b.select(is_closed, e.i64(CLOSED), e.i64(MIXED)))
        e.store_value(e.add(out, e.mul(i, 8)), 0, value)

    e.loop(n_tiles, [], one)


@emitted("rows offset out")
def load_masks(e, rows, offset, out):
    """The f16 masks of 16 rows for one tile, at an offset of bytes, as [16 KV rows][16] f32."""
    masks = [join(e, e.load_f16(row_at(e, rows, r), offset)) for r in range(16)]
    for j, v in enumerate(transpose(e, masks)):
        e.store(out, split(e, v), 64 * j)


@emitted("s cap")
def cap_scores(e, s, cap):
    """Softcap of a tile of scores."""
    c = e.splat_f32(cap)
    e.loop(16, [], lambda j: e.store(e.add(s, e.mul(j, 64)), capped(e, e.load_f32(e.add(s, e.mul(j, 64))), c)))


@emitted("s masks slopes")
def mask_scores(e, s, masks, slopes):
    """Add mask * slope to a tile of scores."""
    slope = e.load_f32(slopes)

    def one(j):
        at, mask = e.add(s, e.mul(j, 64)), e.add(masks, e.mul(j, 64))
        e.store(at, e.fma(e.load_f32(mask), slope, e.load_f32(at)))

    e.loop(16, [], one)


@functools.cache
def make_scores(dk):
    """Emitted (q, k, s): [padded(dk)][16] queries and a tile of K rows to [16 KV rows][16] scores."""
    n = padded(dk) // 16
    step = 16 * n * 4  # bytes of a K row

    @emitted("q k s")
    def scores(e, q, k, s):
        block = (
            4 if e.level == "avx512" else 2
        )  # KV rows: 16 or 8 sums in registers, and a query vector serves them all

        def lanes(p):
            q_lanes, sp = (e.add(x, e.mul(p, e.nbytes)) for x in (q, s))

            def products(kr, partials, i, sums):
                out = []
                qi, ki = (i * 1024, i * 64) if isinstance(i, int) else (e.mul(i, 1024), e.mul(i, 64))
                qp, kp = pointer(e, q_lanes, qi), pointer(e, kr, ki)
                for u, j in enumerate(partials):
                    x = [read(e, qp, 64 * j, emit.vector(emit.F32, e.lanes))]
                    for r in range(block):
                        y = [e.splat(read(e, kp, step * r + 4 * j, emit.F32))]
                        out.append(e.fmul(x, y) if sums is None else e.fma(x, y, sums[u * block + r]))
                return out

            def rows(r0):
                kr = e.add(k, e.mul(r0, step))
                totals = {}
                for g in TREE:
                    partials = (g, g + 8, g + 4, g + 12)
                    sums = products(kr, partials, 0, None)
                    if n <= 8:
                        for i in range(1, n):
                            sums = products(kr, partials, i, sums)
                    else:
                        sums = e.loop(n, sums, lambda i, *a, p=partials: products(kr, p, i, a), start=1)
                    u = [sums[x * block : (x + 1) * block] for x in range(4)]
                    b = [e.fadd(e.fadd(u[0][r], u[1][r]), e.fadd(u[2][r], u[3][r])) for r in range(block)]
                    totals[g] = [e.fadd(totals[g - 2][r], b[r]) for r in range(block)] if g > 1 else b
                for r in range(block):
                    e.store(e.add(sp, e.mul(r0, 64)), e.fadd(totals[2][r], totals[3][r]), 64 * r)

            e.loop(16, [], rows, step=block)

        e.loop(e.parts, [], lanes)

    return scores


@functools.cache
def make_values(dv):
    """Emitted (s, v, state): soft-max step over a tile of scores, then the weighted sum of its V rows."""
    step = 4 * padded(dv)

    @emitted("s v state")
    def values(e, s, v, state):
        width = emit.vector(emit.F32, e.lanes)
        block = 8  # elements of a head: sums in registers beside the 16 weights

        def lanes(p):
            sp, tp = (e.add(x, e.mul(p, e.nbytes)) for x in (s, state))
            load = lambda at, offset: [e.load(at, offset, width)]  # noqa: E731
            x = [load(sp, 64 * j) for j in range(16)]
            old = load(tp, 0)
            top = e.fmax(old, tree(x, e.fmax))
            corr = exp2(e, e.fsub(old, top))
            w = [exp2(e, e.fsub(x[j], top)) for j in range(16)]
            e.store(tp, top)
            e.store(tp, e.fma(load(tp, 64), corr, tree(w, e.fadd)), 64)
            in_registers = e.level == "avx512"
            if not in_registers:
                for j in range(16):
                    e.store(sp, w[j], 64 * j)

            def elements(d):
                o, vd = e.add(tp, e.mul(d, 64)), pointer(e, v, e.mul(d, 4))
                sums = [e.fmul(load(o, HEAD + 64 * i), corr) for i in range(block)]
                for j in range(16):
                    wj = w[j] if in_registers else load(sp, 64 * j)
                    for i in range(block):
                        sums[i] = e.fma(wj, [e.splat(read(e, vd, step * j + 4 * i, emit.F32))], sums[i])
                for i in range(block):
                    e.store(o, sums[i], HEAD + 64 * i)

            e.loop(padded(dv), [], elements, step=block)

        e.loop(e.parts, [], lanes)

    return values
