"""NVFP4: 64 weights in 36 bytes, 4.5 bits a weight; weight = scale * value, a scale for each 16.

| bytes | content |
|---|---|
| 0..3 | 4 scales, floats of 4 exponent and 3 mantissa bits without sign (UE4M3), halved for the doubled values |
| 4..35 | q, 4 bits (E2M1): byte 4 + 8 s + k has weight 16 s + k in the low, weight 16 s + k + 8 in the high half |

The scale byte 0x7F stands for 0 (a NaN in the format). Values are twice those of E2M1.

Panel block (576 bytes): 4 planes of 16 scales | 2 runs of 4 operands: of each 16 weights, k-groups 0 and 1 in the low,
2 and 3 in the high halves of two operands.

Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference".
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.lookup import E2M1, bytes_as_i32, e2m1_code, nearest_e2m1, values
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Part, Quant, clamp, from_bytes, register, to_blocks

emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("NVFP4")
SIZE, NBYTES = 64, 36
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 4 + 32)
TOP = 448  # largest scale
# The bits of a scale, 20 bits up, are an f32 with another bias: this factor corrects it, and halves.
REBIAS = 2.0**119


def scale_of(b: Bytes) -> Floats:
    """Half the value of UE4M3 bytes."""
    bits = (b & 0x7F).astype(np.uint32) << np.uint32(20)
    return np.where(b == 0x7F, np.float32(0), bits.view(np.float32) * np.float32(REBIAS))


def scale_bytes(x: Floats) -> Bytes:
    """The nearest UE4M3 bytes of values that are not negative, ties up; of the highest binade only 448, as ggml."""
    x = np.clip(np.nan_to_num(x), 0, TOP).astype(np.float32)
    bits = (x.view(np.uint32) + np.uint32(1 << 19) >> 20).astype(np.int64) - (120 << 3)
    small = np.minimum(x * np.float32(512) + np.float32(0.5), 7).astype(np.int64)
    return np.where(x.view(np.uint32) < 121 << 23, small, np.where(bits < 15 << 3, bits, 0x7E)).astype(np.uint8)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: scale = max |x| / 6 of each 16, then the nearest values."""
    x = to_blocks(x, SIZE)
    x = x.reshape(*x.shape[:2], 4, 16)
    scales = scale_bytes(np.abs(x).max(3) / np.float32(6))
    scale = scale_of(scales)[..., None]
    q = nearest_e2m1(x, scale)
    pairs = np.bitwise_or(q[..., :8], q[..., 8:] << 4, dtype=np.uint8)
    return np.concatenate([scales, pairs.reshape(*q.shape[:2], 32)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = b[..., 4:].reshape(*b.shape[:2], 4, 8)
    q = np.array(E2M1, np.float32)[np.concatenate([q & 15, q >> 4], 3)]
    return (scale_of(b[..., :4])[..., None] * q).reshape(len(b), -1)


@jitted
def scale_byte(x):
    """The nearest UE4M3 byte, as `scale_bytes`."""
    x = clamp(x, np.float32(0), np.float32(448))
    bits = memory.bits_f32(x)
    if bits < 121 << 23:
        small = np.int64(x * np.float32(512) + np.float32(0.5))
        return small if small < 7 else 7
    code = (np.int64(bits) + (1 << 19) >> 20) - (120 << 3)
    return code if code < 15 << 3 else 0x7E


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 16):
        x, block = src_offs + 64 * i, dst_offs + 36 * (i // 4)
        top = np.float32(0)
        for j in range(16):
            v = abs(memory.load_f32(src, x + 4 * j))
            top = v if v > top else top
        code = scale_byte(top / np.float32(6))
        scale = memory.f32_from_bits(np.int32(code << 20)) * np.float32(REBIAS)
        memory.store_u8(dst, block + i % 4, code)
        for j in range(8):
            low, high = memory.load_f32(src, x + 4 * j), memory.load_f32(src, x + 32 + 4 * j)
            q = e2m1_code(low, scale) | e2m1_code(high, scale) << 4 if code > 0 else 0
            memory.store_u8(dst, block + 4 + 8 * (i % 4) + j, q)


def scale_operand(e, x):
    """Half the values of UE4M3 bytes given as i32, as f32."""
    value = e.fmul(e.bits_to_f32(e.shl_i32(e.and_i32(x, 0x7F), 20)), e.f32_const(REBIAS))
    is_nan = e.map(lambda a, c: e.b.icmp_unsigned("==", a, c), x, e.i32_const(0x7F))
    return e.map(e.b.select, is_nan, e.zero_f32(), value)


def nibble_halves(e, x, offset):
    """The low, then the high halves of 8 bytes as 16 i32."""
    v = e.load(x, offset, emit.vector(emit.I8, 8))
    low, high = e.b.and_(v, emit.ir.Constant(v.type, [15] * 8)), e.b.lshr(v, emit.ir.Constant(v.type, [4] * 8))
    index = emit.ir.Constant(emit.vector(emit.I32, 16), list(range(16)))
    return bytes_as_i32(e, e.b.shuffle_vector(low, high, index))


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        for s in range(4):
            q = values(e, nibble_halves(e, x, 4 + 8 * s), E2M1)
            e.store(y, e.fmul(q, scale_operand(e, e.splat_u8(x, s))), 64 * s)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 64)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row):
    """A block of a row to its places in a panel block."""
    for s in range(4):
        memory.store_u8(dst, dst_offs + 16 * s + row, memory.load_u8(src, src_offs + s))
    for g in range(8):
        memory.store_u32(dst, dst_offs + 64 + 64 * g + 4 * row, memory.load_u32(src, src_offs + 4 + 4 * g))


def runs(e, w, step):
    """The two runs of a panel block."""
    table, out = [v + 16 for v in E2M1], []
    scales = e.load_bytes(w)
    for run in range(2):
        parts = []
        for s in (2 * run, 2 * run + 1):
            x = [e.load_bytes(w, 64 + 64 * (2 * s + g)) for g in range(2)]
            x = [*(e.and_(v, 15) for v in x), *(e.and_(e.shr(v, 4), 15) for v in x)]
            scale = scale_operand(e, e.plane_as_i32(scales, s))
            parts.append(Part([e.lookup16(v, table) for v in x], scale, 4))
        out.append(parts)
    return out


PANEL = Panel(64, 576, 28, pack_block, runs, parts=2, offset_shift=4)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
