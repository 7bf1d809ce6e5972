"""Integer sums of a panel's operands with activations, by the dot product that the CPU has.

    vpdpbusd    AVX-512 VNNI, AVX-VNNI: unsigned by signed bytes, four to an i32
    vpmaddubsw  AVX2: pairs to i16, added there as long as no sum can leave it, then vpmaddwd
    usmmla      AArch64 with i8mm: 2 rows by 2 columns, 8 of k
    usdot       the same, for a column that has no other beside it
    sdot        AArch64 with dotprod: signed by signed bytes
    portable    products of i16

All give the same sums. An operand may be a function of the part's number that loads it: it is called where the operand
is used, so that few registers are taken.
"""

from ggjit.jit import lazy_module

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

OFFSET_SHIFT = 7  # activations' records hold -sum << 7, the start of a sum whose weights have 128 added


def part_sums(e, part, cols, at, sums_at, limit):
    """For each column the i32 sums of 16 rows: the operands of a part times codes, less what the offset adds.

    Args:
        e: the Emit.
        part: the Part.
        cols: address of each column's records.
        at: offset of the part's codes.
        sums_at: offset of their -128 * sum.
        limit: largest operand byte, without the factor.
    """
    signed = e.int8_dot and not e.mixed_dot and limit << part.factor > 127
    init = [_start(e, part, signed, y, sums_at) for y in cols]
    if e.level == "neon" and e.int8_dot:
        return _sums_neon(e, part, signed, init, cols, at)
    if e.level == "avx2" and not e.int8_dot:
        return _sums_avx2(e, part, init, cols, at, limit)
    for i, operand in enumerate(part.operands):
        x = list(map(operand, range(e.parts))) if callable(operand) else operand
        for c, y in enumerate(cols):
            init[c] = e.dot4(init[c], x, e.splat4(y, at + 4 * i))
    return init


def _start(e, part, signed, y, at):
    """-offset * sum of the codes; 128 * sum more if the operands lose 128 to be signed."""
    start = e.zero_i32()
    if part.offset_shift == (OFFSET_SHIFT if signed else None):
        return start
    sums = e.splat_i32(y, at)
    if part.offset_shift is not None:
        start = e.sar_i32(sums, OFFSET_SHIFT - part.offset_shift)
    return e.map(e.b.sub, start, sums) if signed else start


# ---- AArch64 -------------------------------------------------------------------------------------------------------


def _sums_neon(e, part, signed, init, cols, at):
    """4 rows after the other: the codes of all columns stay in registers, one lane of them is a right operand."""
    n = len(part.operands)
    words = [[e.load(y, at + 4 * i, emit.vector(emit.I32, 4)) for i in range(0, n, 4)] for y in cols]
    paired = len(cols) // 2 * 2 if e.mixed_dot else 0
    pairs = [_column_pairs(e, words[c], words[c + 1]) for c in range(0, paired, 2)]
    sums = [list(s) for s in init]
    for p in range(e.parts):
        unpacked = callable(part.operands[0])
        x = [operand(p) if unpacked else operand[p] for operand in part.operands]
        if signed:
            x = [e.b.xor(v, e.bytes_const(128)[0]) for v in x]
        if paired:
            rows = list(zip(x[::2], x[1::2], strict=True)) if unpacked else _row_pairs(e, x)
            for c, codes in enumerate(pairs):
                sums[2 * c][p], sums[2 * c + 1][p] = _products(e, rows, codes, sums[2 * c][p], sums[2 * c + 1][p])
        for c in range(paired, len(cols)):
            for i, v in enumerate(x):
                w = words[c][i // 4]
                codes = e.b.shuffle_vector(w, w, ir.Constant(emit.vector(emit.I32, 4), [i % 4] * 4))
                (sums[c][p],) = e.dot4([sums[c][p]], [v], [e.b.bitcast(codes, emit.vector(emit.I8, 16))])
    return sums


def _shuffled(e, x, y, lanes):
    """Words (i32) of two vectors by their numbers, as bytes."""
    words = emit.vector(emit.I32, 4)
    both = e.b.shuffle_vector(e.b.bitcast(x, words), e.b.bitcast(y, words), ir.Constant(words, lanes))
    return e.b.bitcast(both, emit.vector(emit.I8, 16))


def _column_pairs(e, x, y):
    """For every 8 of k the codes of two columns: the right operands of usmmla."""
    return [_shuffled(e, u, v, [k, k + 1, k + 4, k + 5]) for u, v in zip(x, y, strict=True) for k in (0, 2)]


def as_unpacked(e, operands):
    """Two operands next to each other in k as an unpacked panel has them: tiles have an even number of columns."""
    if e.level != "neon" or not e.mixed_dot:
        return operands
    return list(zip(*(_row_pairs(e, x)[0] for x in zip(*operands, strict=True)), strict=True))


def _row_pairs(e, x):
    """For every 8 of k rows 0 and 1, rows 2 and 3: the left operands of usmmla."""
    both = [(x[i], x[i + 1]) for i in range(0, len(x), 2)]
    return [(_shuffled(e, u, v, [0, 4, 1, 5]), _shuffled(e, u, v, [2, 6, 3, 7])) for u, v in both]


def _products(e, rows, codes, init0, init1):
    """The sums of 4 rows for two columns: 2 by 2 products, taken apart at the end."""
    words = emit.vector(emit.I32, 4)
    first = e.b.shuffle_vector(init0, init1, ir.Constant(words, [0, 4, 1, 5]))
    second = e.b.shuffle_vector(init0, init1, ir.Constant(words, [2, 6, 3, 7]))
    for (low, high), y in zip(rows, codes, strict=True):
        first, second = (
            e.call("llvm.aarch64.neon.usmmla.v4i32.v16i8", words, s, x, y) for s, x in ((first, low), (second, high))
        )
    return tuple(e.b.shuffle_vector(first, second, ir.Constant(words, [c, c + 2, c + 4, c + 6])) for c in (0, 1))


# ---- AVX2 ----------------------------------------------------------------------------------------------------------


def _sums_avx2(e, part, init, cols, at, limit):
    """Operands are shifted down first (limit is without the factor); values above 127 are split into halves."""
    operands = part.operands
    if part.factor:
        operands = [e.and_(e.shr(x, part.factor), (1 << limit.bit_length()) - 1) for x in operands]
    planes = [(operands, 0, limit)]
    if limit > 127:
        low = [e.and_(x, 15) for x in operands]
        planes = [(low, 0, 15), ([e.and_(e.shr(x, 4), 15) for x in operands], 4, 15)]
    sums = []
    for c, y in enumerate(cols):
        total = None
        for plane, shift, top in planes:
            plane_sum = e.shl_i32(_plane_sum(e, plane, y, at, 32767 // (2 * top * 127)), shift)
            total = plane_sum if total is None else e.iadd(total, plane_sum)
        sums.append(e.iadd(init[c], e.shl_i32(total, part.factor)))
    return sums


def _plane_sum(e, plane, y, at, n):
    """Dot products of operands with codes; n pair sums fit 16 bits."""
    total, pending = None, None
    for i, operand in enumerate(plane):
        pairs = e.pairs(operand, e.splat4(y, at + 4 * i))
        pending = pairs if pending is None else e.iadd(pending, pairs)
        if (i + 1) % n == 0 or i + 1 == len(plane):
            wide = e.pairs_to_i32(pending)
            total, pending = wide if total is None else e.iadd(total, wide), None
    return total
