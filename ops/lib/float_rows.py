"""The product of float weights that lie in rows, by few columns: the bits of `float_panel.float_tile`.

A vector is loaded from each of 16 rows, and a transpose in registers makes operands of a panel of them, which are used
at once. Packed into scratch and multiplied then, one column takes 2 to 3 times as long: the tile's chain of sums waits
for the panel, where here it runs beside the next transpose.
"""

import functools

from ggjit.cpu import has_bf16_dot
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import ROWS, emitted
from ggjit.ops.lib.float_panel import SIZES, UNITS, float_tile, pack_float_panel
from ggjit.ops.lib.panel import Outputs, column_addresses

emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")


@functools.cache
def rows_product(type_name, columns, side_by_side=False):
    """Jitted (src, offs, stride, n_rows, k, work, scratch, y, y_stride, out, out_stride, n_cols): 16 rows by columns.

    Rows are k values at src[offs:], stride bytes apart; scratch is for their last values, fewer than 64 bytes of each.
    `columns` of the n_cols are computed at a time, y_stride apart (tiles of act_tiles if `side_by_side`).
    """
    size, unit, per_row = SIZES[type_name], UNITS[type_name], columns if side_by_side else 1
    rows, tile = rows_tile(type_name, columns, side_by_side), float_tile(type_name, columns, side_by_side)
    pack = pack_float_panel(type_name)

    @jitted
    def product(src, offs, stride, n_rows, k, work, scratch, y, y_stride, out, out_stride, n_cols):
        n = k * size // 64 * 16
        done = 4 * n // size
        rest = k - done
        if rest > 0:
            pack(src, offs + 4 * n, stride, n_rows if n_rows < 16 else 16, work, scratch, rest)
        for c in range(0, n_cols, columns):
            y_c, out_c = y + c // per_row * y_stride, out + c * out_stride
            rows(memory.address(src) + offs, stride, y_c, y_stride, out_c, out_stride, n, n_rows, n_cols - c, 0)
            if rest > 0:
                y_c += done // unit * 4 * per_row
                w, n_rest = memory.address(work) + scratch, (rest + unit - 1) // unit
                tile(w, y_c, y_stride, out_c, out_stride, n_rest, n_rows, n_cols - c, 1)

    return product


def _operands(e, kind, words):
    """The values of 16 words, one of each row: one operand, or two f32 where a word holds two values."""
    if kind == "F32":
        return [e.bits_to_f32(words)]
    if kind == "BF16 dot":
        return [words]
    if kind == "BF16":
        return [e.bits_to_f32(e.shl_i32(words, 16)), e.bits_to_f32(e.and_i32(words, -65536))]
    halves = [e.map(lambda v: e.b.trunc(v, emit.vector(emit.I16, e.lanes)), x) for x in (words, e.shr_i32(words, 16))]
    if e.portable:
        return [e.halves_to_f32(h) for h in halves]
    f16, f32 = emit.vector(emit.F16, e.lanes), emit.vector(emit.F32, e.lanes)
    return [e.map(lambda v: e.b.fpext(e.b.bitcast(v, f16), f32), h) for h in halves]


def _column(e, kind, y, word, at):
    """One column's values for a word of the rows, each in 16 lanes; `at` is the byte at which word 0 has its first."""
    if kind in ("F32", "F16"):
        n = 4 // SIZES[kind]
        return [e.splat_f32(y, at(n * word + i)) for i in range(n)]
    pair = e.splat_i32(y, at(word))
    return [pair] if kind == "BF16 dot" else _operands(e, kind, pair)


@functools.cache
def rows_tile(type_name, columns, side_by_side):
    """Emitted tile; n is a multiple of 16 words. Other arguments as in `float_panel.float_tile`."""
    kind = "BF16 dot" if type_name == "BF16" and has_bf16_dot() else type_name
    step = columns if side_by_side else 1  # words of y from k to k
    per_word = 2 if type_name == "F16" else 1

    @emitted("src stride y y_stride out out_stride n n_rows n_cols add")
    def tile(e, src, stride, y, y_stride, out, out_stride, n, n_rows, n_cols, add):
        """16 rows x columns: n words of rows `stride` bytes apart by activations at y; add as in `float_tile`."""
        ys = [y] if side_by_side else column_addresses(e, y, y_stride, columns, n_cols)
        starts = column_addresses(e, src, stride, ROWS, n_rows)  # missing rows repeat the last, and are not stored

        def words(i, *acc):
            acc, parts = list(acc), []
            for p in range(e.parts):
                rows = starts[p * e.lanes : (p + 1) * e.lanes]
                parts.append(
                    emit.transpose(e, [e.load(e.add(a, e.mul(i, 4)), 0, emit.vector(emit.I32, e.lanes)) for a in rows])
                )
            cols = [e.add(a, e.mul(i, 4 * step * per_word)) for a in ys]
            for j in range(e.lanes):
                operands = _operands(e, kind, [part[j] for part in parts])
                for c in range(columns):
                    base, first = (cols[0], c) if side_by_side else (cols[c], 0)
                    values = _column(e, kind, base, j, lambda k, f=first: 4 * (k * step + f))
                    for v, x in zip(operands, values, strict=True):
                        acc[c] = e.dot2_bf16(acc[c], v, x) if kind == "BF16 dot" else e.fma(v, x, acc[c])
            return acc

        outputs = Outputs(e, out, out_stride, columns, n_rows, n_cols)
        outputs.store(e.loop(n, outputs.load(add), words, step=e.lanes))

    return tile
