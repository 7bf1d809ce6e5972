"""Activations in the forms that the tiles of matrix products read, one copy for all users of a source.

act_q8: int8 per 32 along K, one cache line of 64 bytes for each 32:

| bytes | content |
|---|---|
| 0..3 | d, f32: the scale with the least squared error for these codes |
| 4..11 | d * sum of the codes of each half, f32 |
| 12..15 | d * sum of all codes, f32 |
| 16..23 | -128 * sum of the codes of each half, i32 |
| 24..27 | -128 * sum of all codes, i32 |
| 32..63 | codes rint(x 127 / m), int8 in -127..127, where m is the largest magnitude of the 32 values |

Given the codes q, d = sum(x q) / sum(q q), which differs little from m / 127 and takes a thirty-second off the squared
error. Values below 2^-128 count as 0.

act_q16: two records for each 32, the second one of what the first leaves of the values: about 16 bits.

Rows are filled up with records of zeros to a multiple of 256 values, since a panel block may be longer than the blocks
of its type. They are an odd number of lines apart, so that several columns do not meet in the same cache sets.

act_f32, act_f16 and act_bf16: the values as f32; as f32 rounded to f16 (as ggml does for f16 weights);
or as bf16 with K padded to even by a zero.

act_tiles: words of 32 bits (an f32, or a pair of bf16) of as many columns as a tile takes, side by side for each k, for
the tiles of floats from 3 columns on: one address to read at, and columns do not meet in the same cache sets.

The kernels split rows and K evenly between threads, so that one row is shared as well; act_q8 leaves short rows whole,
so that threads need not meet between what makes a row and its records.
"""

import functools

from ggjit import row_shares
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.ops.lib import activation_runs
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.lib.panel import ACT

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")

LOADS = {"F32": "load_f32", "F16": "load_f16", "BF16": "load_bf16"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2}
BLOCKS = {"Q8_0": (32, 34), "Q8_1": (32, 36), "Q8_K": (256, 292)}  # values and bytes of ggml's own int8 forms
CODES_AT = {"Q8_0": 2, "Q8_1": 4, "Q8_K": 4}  # offset of their codes
WHOLE = 256  # values that rows of records are filled up to
SHORT = 4096  # values of a row that is not worth two threads
CHUNK = 1024  # values that a thread takes at least in a conversion


def q8_row_nbytes(k, records=1):
    """Bytes from row to row of act_q8 records, or act_q16's with records 2."""
    return ACT * (records * -(-k // WHOLE) * (WHOLE // 32) | 1)


def q8_by_rows(dst, nth):
    """Has each thread whole rows of the act_q8 records dst?"""
    return dst.ne[0] <= q8_row_nbytes(SHORT) or row_shares.many(dst, nth)


@jitted
def q8_share(per_row, n, is_short, ith, nth):
    """A thread's part (from, to) of n rows of `per_row` pieces; see `q8_by_rows`."""
    if is_short or n >= 8 * nth or (n >= nth and n % nth == 0):
        return per_row * (n * ith // nth), per_row * (n * (ith + 1) // nth)
    return per_row * n * ith // nth, per_row * n * (ith + 1) // nth


@functools.cache
def quantize_kernel(type_name, records=1):
    """Kernel: src0 of a float type, or already int8 in ggml's Q8_0, Q8_1 or Q8_K, to act_q8 records in dst.

    With records 2 a float type to those of act_q16. src0 needs nb[0] equal to the type's size; dst is
    I8 {`q8_row_nbytes(ne0, records)`, ne1, ne2, ne3}, contiguous.
    """
    if type_name in BLOCKS:
        unit, unit_nbytes = BLOCKS[type_name]
        convert = activation_runs.copy_blocks(unit, unit_nbytes, CODES_AT[type_name], type_name == "Q8_K")
    else:
        convert = activation_runs.quantize_runs(LOADS[type_name], SIZES[type_name], records)
        unit, unit_nbytes = 32, 32 * SIZES[type_name]

    short, value_nbytes = q8_row_nbytes(SHORT), ACT * records // 32

    @kernel(by_rows=q8_by_rows)
    def act_q8(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        per_row = src0_ne[0] // unit
        n_rows = src0_ne[1] * src0_ne[2] * src0_ne[3]
        at, end = q8_share(per_row, n_rows, dst_ne[0] <= short, ith, nth)
        source, target = memory.address(src0), memory.address(dst)
        nbytes = unit * value_nbytes
        filled = (src0_ne[0] + WHOLE - 1) // WHOLE * (value_nbytes * WHOLE)
        while at < end:  # matrix after matrix
            row, first = at // per_row, at % per_row
            i1, i2, i3 = row % src0_ne[1], row // src0_ne[1] % src0_ne[2], row // (src0_ne[1] * src0_ne[2])
            n = (src0_ne[1] - i1) * per_row - first
            n = end - at if end - at < n else n
            convert(
                source + i1 * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3] + first * unit_nbytes,
                src0_nb[1] - per_row * unit_nbytes, target + row * dst_nb[1] + first * nbytes,
                dst_nb[1] - per_row * nbytes, per_row, per_row - first, n,
            )  # fmt: skip
            at += n
            for r in range(row, at // per_row):
                for i in range(src0_ne[0] * value_nbytes, filled, 8):
                    memory.store_i64(dst, r * dst_nb[1] + i, 0)

    return act_q8


@functools.cache
def convert_kernel(type_name, to):
    """Kernel: src0 of a float type to contiguous rows of F32 or BF16 in dst, its ne[0] rounded up to even for BF16.

    src0 needs nb[0] equal to the type's size.
    """
    load, store = memory.loader(type_name), memory.storer(to)
    size, to_size = SIZES[type_name], SIZES[to]

    @kernel
    def act_float(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        per_row = (dst_ne[0] + CHUNK - 1) // CHUNK
        total = per_row * src0_ne[1] * src0_ne[2] * src0_ne[3]
        for at in range(total * ith // nth, total * (ith + 1) // nth):
            row, first = at // per_row, at % per_row * CHUNK
            i1, i2, i3 = row % src0_ne[1], row // src0_ne[1] % src0_ne[2], row // (src0_ne[1] * src0_ne[2])
            offs = i1 * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3]
            target = row * dst_ne[0] * to_size
            end = first + CHUNK if first + CHUNK < src0_ne[0] else src0_ne[0]
            for i in range(first, end):
                store(dst, target + i * to_size, load(src0, offs + i * size))
            if end == src0_ne[0] and dst_ne[0] > end:
                store(dst, target + end * to_size, 0.0)

    return act_float


@functools.cache
def round_f16_kernel(type_name):
    """Kernel: src0 of a float type to contiguous rows of f32 in dst, rounded to what f16 can hold.

    src0 needs nb[0] equal to the type's size.
    """
    load, narrow, widen, store = vec.loader(type_name), vec.storer("F16"), vec.loader("F16"), vec.storer("F32")
    load_one, narrow_one, widen_one = memory.loader(type_name), memory.storer("F16"), memory.loader("F16")
    size = SIZES[type_name]

    @kernel
    def act_f16(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        per_row = (dst_ne[0] + CHUNK - 1) // CHUNK
        total = per_row * src0_ne[1] * src0_ne[2] * src0_ne[3]
        for at in range(total * ith // nth, total * (ith + 1) // nth):
            row, first = at // per_row, at % per_row * CHUNK
            i1, i2, i3 = row % src0_ne[1], row // src0_ne[1] % src0_ne[2], row // (src0_ne[1] * src0_ne[2])
            offs = i1 * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3]
            target = row * dst_ne[0] * 4
            end = first + CHUNK if first + CHUNK < src0_ne[0] else src0_ne[0]
            whole = first + (end - first) // 16 * 16
            for i in range(first, whole, 16):  # the halves go through the place of the result
                narrow(dst, target + 4 * i, load(src0, offs + i * size))
                store(dst, target + 4 * i, widen(dst, target + 4 * i))
            for i in range(whole, end):
                narrow_one(dst, target + 4 * i, load_one(src0, offs + i * size))
                memory.store_f32(dst, target + 4 * i, widen_one(dst, target + 4 * i))

    return act_f16


def _tile_words(columns):
    @emitted("src stride n_cols dst n")
    def tile_words(e, src, stride, n_cols, dst, n):
        """n words (a multiple of 16) of `columns` rows at src to one tile; rows that are not there repeat the last."""
        b, last = e.b, e.sub(n_cols, 1)
        there = [b.icmp_signed("<", e.i64(c), n_cols) for c in range(columns)]
        rows = [e.add(src, e.mul(stride, b.select(there[c], e.i64(c), last))) for c in range(columns)]

        def body(i):
            at = e.mul(i, 4)
            for g in range(0, columns, e.lanes):
                words = [e.load(e.add(r, at), 0, emit.vector(emit.I32, e.lanes)) for r in rows[g : g + e.lanes]]
                n_words = len(words)
                first = ir.Constant(emit.vector(emit.I32, n_words), list(range(n_words)))
                for j, v in enumerate(emit.transpose(e, words + words[-1:] * (e.lanes - n_words))):
                    to = e.add(dst, e.mul(e.add(i, j), 4 * columns))
                    e.store_value(to, 4 * g, b.shuffle_vector(v, v, first))
            return []

        e.loop(n, [], body, step=e.lanes)

    return tile_words


@functools.cache
def tile_kernel(columns):
    """Kernel: rows of 32-bit words in src0 (F32, or BF16 pairs) to act_tiles in dst.

    src0 needs nb[0] equal to the type's size. dst is I32 {words * columns, tiles, ne2, ne3}.
    """
    tile_words = _tile_words(columns)

    @kernel
    def act_tiles(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n_words = dst_ne[0] // columns
        whole = n_words // 16 * 16
        total = dst_ne[1] * dst_ne[2] * dst_ne[3]
        for at in range(total * ith // nth, total * (ith + 1) // nth):
            tile, i2, i3 = at % dst_ne[1], at // dst_ne[1] % dst_ne[2], at // (dst_ne[1] * dst_ne[2])
            c = tile * columns
            offs = c * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3]
            n_cols, to = src0_ne[1] - c, at * dst_nb[1]
            tile_words(memory.address(src0) + offs, src0_nb[1], n_cols, memory.address(dst) + to, whole)
            for i in range(whole, n_words):
                for j in range(columns):
                    row = j if j < n_cols else n_cols - 1
                    word = memory.load_u32(src0, offs + row * src0_nb[1] + 4 * i)
                    memory.store_u32(dst, to + 4 * (i * columns + j), word)

    return act_tiles
