"""MXFP4: 32 weights in 17 bytes, 4.25 bits a weight; weight = 2^(e - 128) * value, values being twice those of E2M1.

| bytes | content |
|---|---|
| 0 | e, exponent with bias 127 (E8M0), one more for the doubled values |
| 1..16 | q, 4 bits (sign, 2 of exponent, 1 of mantissa): byte 1 + k has weight k in the low, k + 16 in the high half |

Panel block (272 bytes): 16 e | 4 operands: k-group g in the low, k-group g + 4 in the high halves.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.lookup import E2M1, e2m1_code, load_entries, nearest_e2m1, nibble_values
from ggjit.ops.quants.nibbles import join_nibbles, split_nibbles
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Part, Quant, from_bytes, register, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("MXFP4")
SIZE, NBYTES = 32, 17
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 1 + 16)


def scale_of(e: Bytes) -> Floats:
    """2^(e - 128), for e = 0 and 1 a subnormal number."""
    e = e.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x200000) << e, (e - np.uint32(1)) << np.uint32(23)).view(np.float32)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: e so that the largest magnitude lies in 4 to 8 times 2^(e - 127), then the nearest values.

    Blocks whose e would be negative (all magnitudes below 2^-125) become zeros, as ggml's do.
    """
    x = to_blocks(x, SIZE)
    top = np.abs(x).max(2)
    exponent = (top.view(np.uint32) >> 23).astype(np.int64) - 2
    e = np.maximum(exponent, 0).astype(np.uint8)
    q = nearest_e2m1(x, np.where(exponent < 0, np.float32(0), scale_of(e))[..., None])
    return np.concatenate([e[..., None], join_nibbles(q)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = np.array(E2M1, np.float32)[split_nibbles(b[..., 1:])]
    return (scale_of(b[..., :1]) * q).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 17 * i
        top = 0
        for j in range(32):
            bits = memory.load_i32(src, x + 4 * j) & 0x7FFFFFFF
            top = bits if bits > top else top
        e = (top >> 23) - 2
        if e < 0:
            for j in range(17):
                memory.store_u8(dst, y + j, 0)
            continue
        scale = memory.f32_from_bits(np.int32(0x200000 << e if e < 2 else (e - 1) << 23))
        memory.store_u8(dst, y, e)
        for j in range(16):
            low, high = memory.load_f32(src, x + 4 * j), memory.load_f32(src, x + 64 + 4 * j)
            memory.store_u8(dst, y + 1 + j, e2m1_code(low, scale) | e2m1_code(high, scale) << 4)


def scale_operand(e, x):
    """2^(x - 128) as f32 of exponents as i32."""
    normal = e.shl_i32(e.map(e.b.sub, x, e.i32_const(1)), 23)
    tiny = e.map(e.b.shl, e.i32_const(0x200000), x)
    is_tiny = e.map(lambda a, c: e.b.icmp_unsigned("<", a, c), x, e.i32_const(2))
    return e.bits_to_f32(e.map(e.b.select, is_tiny, tiny, normal))


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        scale = scale_operand(e, e.splat_u8(x))
        for half, q in enumerate(nibble_values(e, x, 1, E2M1)):
            e.store(y, e.fmul(q, scale), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row):
    """A block of a row to its places in a panel block."""
    memory.store_u8(dst, dst_offs + row, memory.load_u8(src, src_offs))
    for g in range(4):
        memory.store_u32(dst, dst_offs + 16 + 64 * g + 4 * row, memory.load_u32(src, src_offs + 1 + 4 * g))


def runs(e, w, step):
    """The run of a panel block."""
    scale = scale_operand(e, e.load_u8_as_i32(w))
    return [[Part(load_entries(e, w, 16, E2M1, 16), scale, 4)]]


PANEL = Panel(32, 272, 28, pack_block, runs, offset_shift=4)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
