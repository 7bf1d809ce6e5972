"""Q8_1: 32 values in 36 bytes, a form of activations; value = d * q. No weights and no file have it.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | s, f16: d * (sum of q) |
| 4..35 | q, int8 |
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.quant import Bytes, Floats, Quant, f16_bytes, from_bytes, inverse, load_f16, register, to_blocks

memory, vec = lazy_module("ggjit.ops.lib.memory"), lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("Q8_1")
SIZE, NBYTES = 32, 36
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 32)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = max |x| / 127, q = x / d rounded, ties to even; the importance matrix has no effect."""
    x = to_blocks(x, SIZE)
    d = np.abs(x).max(2) / np.float32(127)
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.clip(np.nan_to_num(np.rint(x * inverse(d)[..., None]), nan=-128), -128, 127).astype(np.int8)
        s = f16_bytes(d * q.sum(2, dtype=np.int32).astype(np.float32))
    return np.concatenate([f16_bytes(d), s, q.view(np.uint8)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    return (load_f16(b[..., :2]) * b[..., 4:].view(np.int8)).astype(np.float32).reshape(len(b), -1)


@jitted
def codes(v):
    """Nearest integers as i32, ties to even; NaN gives -128."""
    return vec.round_i32(vec.min(vec.max(v, np.float32(-128)), np.float32(127)))


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 36 * i
        v, w = vec.load(src, x), vec.load(src, x + 64)
        d = vec.lane_max(vec.max(vec.abs(w), vec.max(vec.abs(v), np.float32(0)))) / np.float32(127)
        scale = np.float32(1) / d if d > 0 else np.float32(0)
        low, high = codes(v * scale), codes(w * scale)
        memory.store_f16(dst, y, d)
        memory.store_f16(dst, y + 2, d * np.float32(vec.lane_sum(low + high)))
        vec.store_i8(dst, y + 4, low)
        vec.store_i8(dst, y + 20, high)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for half in range(2):
            q = e.to_f32(e.load_u8_as_i32(x, 4 + 16 * half, signed=True))
            e.store(y, e.fmul(q, d), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, None))
