"""Q1_0: 128 weights in 18 bytes, 1.125 bits a weight; weight = d or -d.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..17 | signs: weight k in bit k % 8 of byte 2 + k / 8, 1 for d |

Panel block (576 bytes), of two file blocks: 2 x 16 d f16 | 8 operands: bit r of operand v is run r, k-group v. With q
the bit, weight = 2 d * q - d.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.quant import (
    Bytes,
    Floats,
    Panel,
    Part,
    Quant,
    f16_bytes,
    from_bytes,
    load_f16,
    register,
    to_blocks,
)

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("Q1_0")
SIZE, NBYTES = 128, 18
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 16)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = mean |x|, and the sign of each value, + for zero."""
    x = to_blocks(x, SIZE)
    total = np.zeros(x.shape[:2], np.float32)
    with np.errstate(over="ignore"):
        for i in range(SIZE):  # one after the other, as the compiled form sums
            total += np.abs(x[..., i])
    signs = np.packbits(x >= 0, axis=2, bitorder="little")
    return np.concatenate([f16_bytes(total / np.float32(SIZE)), signs], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    d, q = load_f16(b[..., :2]), np.unpackbits(b[..., 2:], axis=2, bitorder="little")
    return np.where(q == 1, d, -d).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 128):
        x, y = src_offs + 512 * i, dst_offs + 18 * i
        total = np.float32(0)
        for j in range(16):
            q = 0
            for k in range(8):
                v = memory.load_f32(src, x + 32 * j + 4 * k)
                total += abs(v)
                q |= (1 if v >= 0 else 0) << k
            memory.store_u8(dst, y + 2 + j, q)
        memory.store_f16(dst, y, total / np.float32(128))


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks: the sign of d is changed where a bit is 0."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.f32_bits(e.splat_f16(x))
        for g in range(4):
            bits = e.map(e.b.not_, e.splat_i32(x, 2 + 4 * g))
            for half in range(2):
                up = e.map(e.b.shl, bits, e.i32_lanes([31 - 16 * half - lane for lane in range(16)]))
                sign = e.and_i32(up, -1 << 31)
                e.store(y, e.bits_to_f32(e.map(e.b.xor, d, sign)), 128 * g + 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 128)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row, part):
    """File block `part` (0 or 1) of a row to its places in a panel block."""
    memory.store_u16(dst, dst_offs + 32 * part + 2 * row, memory.load_u16(src, src_offs))
    for r in range(4):
        for v in range(8):
            q = memory.load_u8(src, src_offs + 2 + 4 * r + v // 2) >> 4 * (v & 1)
            spread = (q | q << 7 | q << 14 | q << 21) & 0x01010101
            at = dst_offs + 64 + 64 * v + 4 * row
            kept = 0 if part + r == 0 else memory.load_u32(dst, at)
            memory.store_u32(dst, at, kept | spread << r + 4 * part)


def runs(e, w, step):
    """The 8 runs of a panel block."""
    ds = [e.load_f16(w), e.load_f16(w, 32)]
    x = [e.load_bytes(w, 64 + 64 * v) for v in range(8)]
    out = []
    for r in range(8):
        d = ds[r // 4]
        scale = e.fmul(d, e.f32_const(2.0 ** (1 - r)))
        out.append([Part([e.and_(v, 1 << r) for v in x], scale, None, e.fneg(d), r)])
    return out


PANEL = Panel(256, 576, 1, pack_block, runs, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
