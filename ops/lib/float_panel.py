"""Panels of float weights: packing of rows and the tiles of the matrix product.

A panel holds 16 rows, along K:

    F32    per k 16 f32 (64 bytes)
    F16    per k 16 f16 (32 bytes), made f32 by the load; activations stay f32
    BF16   per pair of k 16 x 2 bf16 (64 bytes): the operand of vdpbf16ps or bfdot with activations rounded to bf16
           where the CPU has one, else widened to f32. An odd K ends with a zero

One chain of multiply-adds in k order per output, in every tile.

Ladder (F32, one Zen 4 core, share of the FMA peak at 512 columns, K = 4096; OpenBLAS .80-.85):
    12 columns, K in slices of 256, sums kept in the result between slices, a group of panels in L2    .68
    columns side by side (act_tiles): they no longer meet in the same cache sets                        .87
"""

import functools

from ggjit.cpu import has_bf16_dot
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.lib.panel import Outputs, column_addresses

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")

UNITS = {"F32": 1, "F16": 1, "BF16": 2}  # k of a panel unit
NBYTES = {"F32": 64, "F16": 32, "BF16": 64}  # bytes of a panel unit
SIZES = {"F32": 4, "F16": 2, "BF16": 2}
UNROLL = 4


# ---- tiles ---------------------------------------------------------------------------------------------------------


def _weights(e, kind, w, offset):
    """The operands of one unit: one, or two f32 of a BF16 pair without the dot instruction."""
    if kind == "F32":
        return [e.load_f32(w, offset, ordered=True)]
    if kind == "F16":
        return [e.load_f16(w, offset, ordered=True)]
    pairs = e.load_i32(w, offset, ordered=True)
    if kind == "BF16 dot":
        return [pairs]
    return [e.bits_to_f32(e.shl_i32(pairs, 16)), e.bits_to_f32(e.and_i32(pairs, -65536))]


def _column(e, kind, y, offset):
    """One column's word of a unit: its values, each in 16 lanes."""
    if kind in ("F32", "F16"):
        return [e.splat_f32(y, offset)]
    pair = e.splat_i32(y, offset)
    if kind == "BF16 dot":
        return [pair]
    return [e.bits_to_f32(e.shl_i32(pair, 16)), e.bits_to_f32(e.and_i32(pair, -65536))]


@functools.cache
def float_tile(type_name, columns, side_by_side=False, ahead=0):
    """Emitted tile of a float type's panels; its arguments are those of `panel_tile`.

    Args:
        type_name: type of the panels.
        columns: how many it is made for.
        side_by_side: y is a tile of act_tiles, else rows y_stride apart.
        ahead: bytes of prefetch to L2, 0: none.
    """
    kind = "BF16 dot" if type_name == "BF16" and has_bf16_dot() else type_name
    nbytes, step = NBYTES[type_name], 4 * columns if side_by_side else 4

    @emitted("w y y_stride out out_stride n n_rows n_cols add")
    def tile(e, w, y, y_stride, out, out_stride, n, n_rows, n_cols, add):
        """16 rows x columns: n units at w by activations at y; the old outputs are added if add is 1."""
        ys = [y] if side_by_side else column_addresses(e, y, y_stride, columns, n_cols)

        def units(count):
            def body(i, *acc):
                acc, wi, offset = list(acc), e.add(w, e.mul(i, nbytes)), e.mul(i, step)
                cols = [e.add(a, offset) for a in ys]
                for at in range(0, count * nbytes if ahead else 0, 64):
                    e.prefetch(wi, ahead + at)
                for u in range(count):
                    operands = _weights(e, kind, wi, u * nbytes)
                    for c in range(columns):
                        at = (cols[0], u * step + 4 * c) if side_by_side else (cols[c], u * step)
                        for v, x in zip(operands, _column(e, kind, *at), strict=True):
                            acc[c] = e.dot2_bf16(acc[c], v, x) if kind == "BF16 dot" else e.fma(v, x, acc[c])
                return acc

            return body

        outputs = Outputs(e, out, out_stride, columns, n_rows, n_cols)
        whole = e.b.and_(n, e.i64(-UNROLL))
        acc = e.loop(whole, outputs.load(add), units(UNROLL), step=UNROLL)
        outputs.store(e.loop(n, acc, units(1), start=whole))

    return tile


@emitted("w u n")
def widen_f16(e, w, u, n):
    """n units of an F16 panel at w to an F32 panel at u."""
    e.loop(n, [], lambda i: e.store(e.add(u, e.mul(i, 64)), e.load_f16(e.add(w, e.mul(i, 32)))))


# ---- packing -------------------------------------------------------------------------------------------------------


def _pack_words(halves):
    @emitted("src stride dst n")
    def pack_words(e, src, stride, dst, n):
        """16 rows of n words (a multiple of 16) to a panel; f16 pairs are taken apart."""

        def body(i):
            for p in range(e.parts):
                first = e.add(src, e.add(e.mul(stride, p * e.lanes), e.mul(i, 4)))
                words = emit.vector(emit.I32, e.lanes)
                rows = [e.load(e.add(first, e.mul(stride, r)), 0, words) for r in range(e.lanes)]
                for j, v in enumerate(emit.transpose(e, rows)):
                    at = e.add(dst, e.mul(e.add(i, j), 64))
                    if not halves:
                        e.store_value(at, p * e.nbytes, v)
                        continue
                    half = emit.vector(emit.I16, e.lanes)
                    e.store_value(at, p * e.nbytes // 2, e.b.trunc(v, half))
                    high = e.b.lshr(v, ir.Constant(v.type, [16] * e.lanes))
                    e.store_value(at, 32 + p * e.nbytes // 2, e.b.trunc(high, half))
            return []

        e.loop(n, [], body, step=e.lanes)

    return pack_words


@functools.cache
def pack_float_panel(type_name):
    """Jitted (src, src_offs, src_row_stride, n_rows, dst, dst_offs, k): rows of floats to one panel.

    Rows that are missing (n_rows < 16) become zeros, and so does the last half of a BF16 pair if k is odd.
    """
    size, unit, nbytes = SIZES[type_name], UNITS[type_name], NBYTES[type_name]
    per_word = 4 // size
    pack_words = _pack_words(type_name == "F16")
    load, store = (memory.load_u32, memory.store_u32) if size == 4 else (memory.load_u16, memory.store_u16)

    @jitted
    def pack(src, src_offs, src_row_stride, n_rows, dst, dst_offs, k):
        done = 0
        if n_rows == 16:
            done = k // (16 * per_word) * (16 * per_word)
            pack_words(memory.address(src) + src_offs, src_row_stride, memory.address(dst) + dst_offs, done // per_word)
        for i in range(done // unit * nbytes, (k + unit - 1) // unit * nbytes, 4):
            memory.store_u32(dst, dst_offs + i, 0)
        for r in range(n_rows):
            for i in range(done, k):
                to = dst_offs + i // unit * nbytes + unit * size * r + i % unit * size
                store(dst, to, load(src, src_offs + r * src_row_stride + i * size))

    return pack
