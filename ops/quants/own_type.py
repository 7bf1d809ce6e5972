"""A quantized type of one's own: a block layout told by three functions, at the speed of the others.

    import numpy as np

    import ggjit as gg
    from ggjit.ops.lib import memory

    # 64 weights in 26 bytes: d f16 | 16 bytes with the two low bits of each code | 8 bytes with the third

    @gg.jitted
    def quantize(x, x_offs, block, offs):  # a block's f32 to its bytes; x and block are bytes, x_offs and offs of them
        top = np.float32(0)
        for k in range(64):
            v = memory.load_f32(x, x_offs + 4 * k)
            top = v if abs(v) > abs(top) else top
        d = top / np.float32(-4)
        inverse = np.float32(1) / d if d != 0 else np.float32(0)
        memory.store_f16(block, offs, d)
        for i in range(24):
            memory.store_u8(block, offs + 2 + i, 0)
        for k in range(64):
            q = min(max(int(np.floor(memory.load_f32(x, x_offs + 4 * k) * inverse + np.float32(4.5))), 0), 7)
            low, high = offs + 2 + k // 4, offs + 18 + k // 8
            memory.store_u8(block, low, memory.load_u8(block, low) | (q & 3) << 2 * (k % 4))
            memory.store_u8(block, high, memory.load_u8(block, high) | q >> 2 << k % 8)

    @gg.jitted
    def scale(block, offs, group):  # f32 that the weights of a group share
        return memory.load_f16(block, offs)

    @gg.jitted
    def code(block, offs, k):  # the unsigned number stored for weight k
        low = memory.load_u8(block, offs + 2 + k // 4) >> 2 * (k % 4) & 3
        return low | (memory.load_u8(block, offs + 18 + k // 8) >> k % 8 & 1) << 2

    Q3_64 = gg.register_type(
        "Q3_64", 64, 26, bits=3, offset=4, scale_type="F16", quantize=quantize, scale=scale, code=code
    )
    print(gg.check_type("Q3_64"))

A weight is scale * (code - offset), with a minimum added if there is one, or scale * table[code]. From that come the
rest: decoding of rows (get_rows, cpy), coding (cpy, set_rows, `GgufWriter`), and panels for products. How the bits lie
in a block of the file is no matter to a panel: it holds the codes as planes of bits, so it takes no more room than the
type:

    scales       16 rows f16 (or f32) a group; then the minimums likewise
    each run     of 32 weights: a plane for each of the powers of two that `bits` is a sum of, largest first; one of w
                 bits is w operands, each with 8 / w k-groups, k-group g in the bits from w * (g % (8 / w)) on

In a GGUF file the type has an id of 1000 or more, which the key `ggjit.type.<id>` explains; a reader finds the type by
name and layout, so it must be registered before the file is opened. Registering a name again replaces the type.

Ladder (3 bits with a scale for 64, one column, 2 threads, share of plain reads of the type's own bytes): 0.90.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ggjit import types
from ggjit.jit import Jitted, jitted, lazy_module
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Part, Quant, from_bytes, to_blocks
from ggjit.ops.quants.rows_kernel import convert_rows, rows_kernel
from ggjit.types import Type

memory = lazy_module("ggjit.ops.lib.memory")

__all__ = ["register_type"]

RUN, ROWS = 32, 16
SIZES = (32, 64, 128, 256)


def register_type(
    name: str,
    blck_size: int,
    type_size: int,
    *,
    bits: int,
    quantize: Jitted,
    scale: Jitted,
    code: Jitted,
    group: int | None = None,
    offset: int = 0,
    minimum: Jitted | None = None,
    table: Sequence[int] | None = None,
    scale_type: str = "F32",
) -> Type:
    """Make a type of one's own known, and return it.

    Args:
        name: of the type: printable, without blanks, not that of a type of ggml.
        blck_size: weights in a block: 32, 64, 128 or 256.
        type_size: bytes of a block.
        bits: of a code, 1 to 8.
        quantize: jitted (x, x_offs, block, offs): blck_size f32, at byte x_offs of the bytes x, to the type_size bytes
            of a block, at byte offs; it sets all of them. `gg.check_type` finds out if one of the functions goes wrong.
        scale: jitted (block, offs, group) -> f32; a block of zeros must have scales of zero.
        code: jitted (block, offs, k) -> integer below 2^bits.
        group: weights that share a scale: 16, or a multiple of 32 that divides the block; None: all of the block.
        offset: what is subtracted from codes: 0 or a power of two up to 128.
        minimum: jitted (block, offs, group) -> f32, added to all weights of a group; None: none.
        table: int8 values that codes stand for, 2^bits of them; for at most 4 bits, without offset.
        scale_type: "F16" if scales and minimums are f16, which panels then keep; else "F32".

    Raises:
        ValueError: the name belongs to ggml, or the sizes are none of these.
        TypeError: a function is not jitted, or takes other arguments.

    Source: the scheme of the panels, `ggjit.ops.quants.quant`.
    """
    group = blck_size if group is None else group
    _check_sizes(name, blck_size, type_size, bits, group, offset, table, scale_type)
    _check_functions(quantize=quantize, scale=scale, code=code, minimum=minimum)
    type = _new_type(name, blck_size, type_size)
    layout = _Layout(
        blck_size,
        type_size,
        bits,
        group,
        offset,
        minimum,
        scale,
        code,
        tuple(map(int, table)) if table else None,
        scale_type == "F16",
    )
    coder, decoder = quantize_row(blck_size, type_size, quantize), dequantize_row(layout)
    panel = Panel(
        blck_size,
        layout.panel_nbytes,
        255 if table else (1 << bits) - 1,
        pack_block(layout),
        panel_runs(layout),
        parts=2 if group == 16 else 1,
        minimum=minimum is not None,
        offset_shift=7 if table else offset.bit_length() - 1 if offset else None,
    )
    quantize_np, dequantize_np = _by_kernels(blck_size, type_size, coder, decoder)
    _forget()
    types.register(type, Quant(type, quantize_np, dequantize_np, coder, decoder, panel))
    return type


# ---- checks --------------------------------------------------------------------------------------------------------


def _check_sizes(name, blck_size, type_size, bits, group, offset, table, scale_type):
    def need(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise ValueError(f"register_type: {what}, got {got!r}")

    need(isinstance(name, str) and name.isprintable() and name != "" and " " not in name, "name must be a word", name)
    need(blck_size in SIZES, f"blck_size must be one of {SIZES}", blck_size)
    need(isinstance(type_size, int) and 0 < type_size < 1 << 20, "type_size must be positive", type_size)
    need(bits in range(1, 9), "bits must be 1 to 8", bits)
    whole = group == 16 or (group > 0 and group % RUN == 0)
    need(whole and blck_size % group == 0, "group must be 16 or a multiple of 32 that divides the block", group)
    need(offset in (0, 1, 2, 4, 8, 16, 32, 64, 128), "offset must be 0 or a power of two up to 128", offset)
    need(scale_type in ("F16", "F32"), "scale_type must be 'F16' or 'F32'", scale_type)
    if table is not None:
        need(bits <= 4 and offset == 0, "table must go with at most 4 bits and no offset", (bits, offset))
        good = len(table) == 1 << bits and all(-128 <= v <= 127 for v in table)
        need(good, f"table must be {1 << bits} int8 values", table)


def _check_functions(**functions):
    wanted = {"quantize": ("x", "x_offs", "block", "offs"), "code": ("block", "offs", "k")}
    for name, function in functions.items():
        if function is None:
            continue
        arguments = wanted.get(name, ("block", "offs", "group"))
        if not isinstance(function, Jitted):
            raise TypeError(f"register_type: {name} must be a @gg.jitted function, got {function!r}")
        found = tuple(inspect.signature(function.function).parameters)
        if len(found) != len(arguments):
            want = ", ".join(arguments)
            raise TypeError(f"register_type: {name} must take ({want}), got ({', '.join(found)})")


def _new_type(name: str, blck_size: int, type_size: int) -> Type:
    """The type of a name: a new one, or the one that had it."""
    try:
        known = types.by_name(name)
    except ValueError:
        ids = {t.id for t in types.all_types()}
        free = next(i for i in range(types.FIRST_USER_ID, 1 << 31) if i not in ids)
        return Type(name, free, blck_size, type_size)
    if known.id < types.FIRST_USER_ID:
        raise ValueError(f"register_type: name must not be that of a type of ggml, got {name!r}")
    if (known.blck_size, known.type_size) != (blck_size, type_size):
        sizes = f"{known.blck_size} weights in {known.type_size} bytes"
        raise ValueError(f"register_type: {name} must keep its layout, {sizes}, got {blck_size} in {type_size}")
    return known


def _forget() -> None:
    """Forget kernels that were made for a type that had the name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ggjit.ops"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


# ---- the code made from the layout ---------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What `register_type` was told of a type."""

    blck_size: int
    type_size: int
    bits: int
    group: int
    offset: int
    minimum: Jitted | None
    scale: Jitted
    code: Jitted
    table: tuple[int, ...] | None
    f16: bool

    @property
    def n_groups(self) -> int:
        """Scales of a block."""
        return self.blck_size // self.group

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane of codes, largest first."""
        return tuple(w for w in (8, 4, 2, 1) if self.bits & w)

    @property
    def group_nbytes(self) -> int:
        """Bytes of a scale of 16 rows."""
        return ROWS * (2 if self.f16 else 4)

    @property
    def codes_offs(self) -> int:
        """Where codes begin in a panel block."""
        return self.n_groups * self.group_nbytes * (1 if self.minimum is None else 2)

    @property
    def panel_nbytes(self) -> int:
        """Bytes of a panel block."""
        return self.codes_offs + self.blck_size * ROWS * self.bits // 8


def _operands(e, w, offset, planes):
    """The 8 operands of a run from its planes."""
    out, at, shift = [None] * 8, offset, sum(planes)
    for width in planes:
        shift -= width  # of the plane's bits in a code
        per, x = 8 // width, [e.load_bytes(w, at + 64 * i) for i in range(width)]
        at += 64 * width
        for g in range(8):
            low, v = width * (g % per), x[g // per]
            if width < 8:
                v = e.shr(v, low - shift) if low >= shift else e.shl(v, shift - low)
                v = e.and_(v, ((1 << width) - 1) << shift)
            out[g] = v if out[g] is None else e.or_(out[g], v)
    return out


def panel_runs(layout: _Layout) -> Callable[..., Any]:
    """Emit function (e, w, step): the runs of a panel block."""
    planes, group, group_nbytes, codes_offs = layout.planes, layout.group, layout.group_nbytes, layout.codes_offs
    n_runs, f16, minimum_offs = layout.blck_size // RUN, layout.f16, layout.n_groups * layout.group_nbytes
    has_minimum, n_parts = layout.minimum is not None, 2 if layout.group == 16 else 1
    shift = 7 if layout.table else layout.offset.bit_length() - 1 if layout.offset else None
    table = layout.table and [v + 128 for v in layout.table] + [0] * (16 - len(layout.table))

    def runs(e, w, step):
        load, out = e.load_f16 if f16 else e.load_f32, []
        for r in range(n_runs):
            operands = _operands(e, w, codes_offs + 64 * sum(planes) * r, planes)
            if table:
                operands = [e.lookup16(x, table) for x in operands]
            parts = []
            for j in range(n_parts):
                at = (RUN * r + 16 * j) // group * group_nbytes
                low = load(w, minimum_offs + at) if has_minimum else None
                n = 8 // n_parts
                parts.append(Part(operands[n * j : n * (j + 1)], load(w, at), shift, low))
            out.append(parts)
        return out

    return runs


def quantize_row(blck_size: int, type_size: int, quantize: Jitted) -> Jitted:
    """Jitted (src, src_offs, dst, dst_offs, n): n f32 to blocks."""

    @jitted
    def quantize_row(src, src_offs, dst, dst_offs, n):
        for i in range(n // blck_size):
            quantize(src, src_offs + 4 * blck_size * i, dst, dst_offs + type_size * i)

    return quantize_row


def dequantize_row(layout: _Layout) -> Jitted:
    """Jitted (src, src_offs, dst, dst_offs, n): blocks to n f32."""
    blck_size, type_size, group, offset = layout.blck_size, layout.type_size, layout.group, layout.offset
    scale, code, minimum, table = layout.scale, layout.code, layout.minimum, layout.table
    n_groups = layout.n_groups

    @jitted
    def value(q):
        if table is None:
            return np.float32(q - offset)
        return np.float32(table[q])

    @jitted
    def low(block, offs, group):
        if minimum is None:
            return np.float32(0)
        return np.float32(minimum(block, offs, group))

    @jitted
    def dequantize_row(src, src_offs, dst, dst_offs, n):
        for i in range(n // blck_size):
            x, y = src_offs + type_size * i, dst_offs + 4 * blck_size * i
            for j in range(n_groups):
                d, m = np.float32(scale(src, x, j)), low(src, x, j)
                for k in range(group * j, group * (j + 1)):
                    memory.store_f32(dst, y + 4 * k, d * value(code(src, x, k)) + m)

    return dequantize_row


def pack_block(layout: _Layout) -> Jitted:
    """Jitted (src, src_offs, dst, dst_offs, row): a block of a row to its places in a panel block."""
    blck_size, n_groups, group_nbytes, f16 = layout.blck_size, layout.n_groups, layout.group_nbytes, layout.f16
    scale, code, minimum, planes = layout.scale, layout.code, layout.minimum, layout.planes
    codes_offs, run_nbytes, total = layout.codes_offs, 64 * layout.bits, layout.bits

    @jitted
    def store(dst, at, value):
        if f16:
            memory.store_f16(dst, at, np.float32(value))
        else:
            memory.store_f32(dst, at, np.float32(value))

    @jitted
    def store_minimum(src, src_offs, dst, at, j):
        if minimum is not None:
            store(dst, at, minimum(src, src_offs, j))

    @jitted
    def pack_block(src, src_offs, dst, dst_offs, row):
        for j in range(n_groups):
            at = dst_offs + j * group_nbytes + row * (group_nbytes // 16)
            store(dst, at, scale(src, src_offs, j))
            store_minimum(src, src_offs, dst, at + n_groups * group_nbytes, j)
        for r in range(blck_size // 32):
            to, left = dst_offs + codes_offs + r * run_nbytes + 4 * row, total
            for width in planes:
                left -= width
                per = 8 // width
                for i in range(width):
                    word = np.int64(0)
                    for f in range(per):
                        for j in range(4):
                            q = np.int64(code(src, src_offs, 32 * r + 4 * (i * per + f) + j))
                            word |= (q >> left & (1 << width) - 1) << 8 * j + width * f
                    memory.store_u32(dst, to, word)
                    to += 64

    return pack_block


def _by_kernels(
    size: int, nbytes: int, coder: Jitted, decoder: Jitted
) -> tuple[Callable[..., Bytes], Callable[[Bytes], Floats]]:
    """The conversions of arrays: (quantize, dequantize)."""
    code_rows, decode_rows = rows_kernel(coder, size, 4 * size, nbytes), rows_kernel(decoder, size, nbytes, 4 * size)

    def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
        """Rows of values to rows of blocks; an importance matrix has no effect."""
        x = to_blocks(x, size)
        return convert_rows(code_rows, x.reshape(len(x), -1), x.shape[1] * size, x.shape[1] * nbytes)

    def dequantize(b: Bytes) -> Floats:
        """Rows of blocks to rows of values."""
        b = from_bytes(b, nbytes)
        n = b.shape[1] * size
        return convert_rows(decode_rows, b.reshape(len(b), -1), n, 4 * n).view(np.float32)

    return quantize, dequantize
