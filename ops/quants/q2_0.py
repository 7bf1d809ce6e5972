"""Q2_0: 64 weights in 18 bytes, 2.25 bits a weight; weight = d * (q - 1).

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..17 | q, 2 bits: weight k in bits 2 (k % 4) and 2 (k % 4) + 1 of byte 2 + k / 4 |

Quantizing takes d = max |x|, so that q = 3 is not used. Panel block (576 bytes), of two file blocks: 2 x 16 d f16 | 8
operands (see `ggjit.ops.quants.two_bits`), run f in field f.
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
    Quant,
    f16_bytes,
    from_bytes,
    inverse,
    load_f16,
    register,
    round_away,
    to_blocks,
)  # fmt: skip
from ggjit.ops.quants.ternary import scale_and_inverse, ternary_code
from ggjit.ops.quants.two_bits import field_runs, spread

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("Q2_0")
SIZE, NBYTES = 64, 18
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 16)
SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = max |x|, q = x / d rounded, plus 1."""
    x = to_blocks(x, SIZE)
    d = np.abs(x).max(2)
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.nan_to_num(round_away(x * inverse(d)[..., None]))
    fields = (np.clip(q, -1, 1) + 1).astype(np.uint8).reshape(*d.shape, 16, 4) << SHIFTS
    return np.concatenate([f16_bytes(d), fields.sum(3, dtype=np.uint8)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = (b[..., 2:, None] >> SHIFTS & 3).reshape(*b.shape[:2], SIZE).astype(np.float32) - 1
    return (load_f16(b[..., :2]) * q).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 64):
        x, y = src_offs + 256 * i, dst_offs + 18 * i
        d, scale = scale_and_inverse(src, x, 64)
        memory.store_f16(dst, y, d)
        for j in range(16):
            q = 0
            for f in range(4):
                q |= ternary_code(memory.load_f32(src, x + 16 * j + 4 * f) * scale) << 2 * f
            memory.store_u8(dst, y + 2 + j, q)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for g in range(4):
            q = e.map(e.b.lshr, e.splat_i32(x, 2 + 4 * g), e.i32_lanes(range(0, 32, 2)))
            e.store(y, e.fmul(e.fsub(e.to_f32(e.and_i32(q, 3)), e.f32_const(1.0)), d), 64 * g)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 64)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row, part):
    """File block `part` (0 or 1) of a row to its places in a panel block."""
    memory.store_u16(dst, dst_offs + 32 * part + 2 * row, memory.load_u16(src, src_offs))
    for v in range(8):
        q = spread(memory.load_u8(src, src_offs + 2 + v)) | spread(memory.load_u8(src, src_offs + 10 + v)) << 2
        at = dst_offs + 64 + 64 * v + 4 * row
        memory.store_u32(dst, at, q if part == 0 else memory.load_u32(dst, at) | q << 4)


def runs(e, w, step):
    """The 4 runs of a panel block."""
    d = [e.load_f16(w), e.load_f16(w, 32)]
    return field_runs(e, w, 64, [d[0], d[0], d[1], d[1]], 0)


PANEL = Panel(128, 576, 3, pack_block, runs, offset_shift=0)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
