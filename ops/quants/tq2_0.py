"""TQ2_0: 256 weights in 66 bytes, 2.0625 bits a weight; weight = d * (q - 1).

| bytes | content |
|---|---|
| 0..63 | q, 2 bits: byte 32 h + k has weights 128 h + 32 f + k in bits 2 f and 2 f + 1 |
| 64..65 | d, f16 |

Quantizing rounds x / max |x| to -1, 0 or 1. Panel block: see `ggjit.ops.quants.ternary`.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import ternary
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Quant, f16_bytes, from_bytes, load_f16, register
from ggjit.ops.quants.ternary import scale_and_inverse, ternary_code

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("TQ2_0")
SIZE, NBYTES, D = 256, 66, 64
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 64 + 2)
SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = max |x|, q = x / d rounded, plus 1."""
    d, q = ternary.ternary(x)
    q = (q.reshape(*q.shape[:2], 2, 4, 32) << SHIFTS).sum(3, dtype=np.uint8)
    return np.concatenate([q.reshape(*d.shape, 64), f16_bytes(d)], 2).reshape(len(d), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = b[..., :D].reshape(*b.shape[:2], 2, 1, 32) >> SHIFTS & 3
    return (load_f16(b[..., D:]) * (q.astype(np.float32) - 1).reshape(*b.shape[:2], SIZE)).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 256):
        x, y = src_offs + 1024 * i, dst_offs + 66 * i
        d, scale = scale_and_inverse(src, x, 256)
        memory.store_f16(dst, y + D, d)
        for j in range(64):
            q = 0
            for f in range(4):
                v = memory.load_f32(src, x + 512 * (j // 32) + 128 * f + 4 * (j % 32))
                q |= ternary_code(v * scale) << 2 * f
            memory.store_u8(dst, y + j, q)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x, D)
        for part in range(4):
            bits = e.load_u8_as_i32(x, 16 * part)
            for f in range(4):
                q = e.fsub(e.to_f32(e.and_i32(e.shr_i32(bits, 2 * f), 3)), e.f32_const(1.0))
                e.store(y, e.fmul(q, d), 512 * (part // 2) + 128 * f + 64 * (part % 2))
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, D)
    for g, x in enumerate(rows.words(0)):
        e.store(to, x, 32 + 64 * g)


PANEL = Panel(256, ternary.NBYTES, 3, pack_rows, ternary.runs, steps=2, offset_shift=0)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
