"""Q8_K: 256 values in 292 bytes, a form of activations; value = d * q. No weights and no file have it.

| bytes | content |
|---|---|
| 0..3 | d, f32 |
| 4..259 | q, int8 |
| 260..291 | sums of 16 q each, int16 |
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.q8_1 import codes
from ggjit.ops.quants.quant import Bytes, Floats, Quant, from_bytes, inverse, largest, register, to_blocks

memory, vec = lazy_module("ggjit.ops.lib.memory"), lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("Q8_K")
SIZE, NBYTES, SUMS = 256, 292, 260
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 4 + 256 + 2 * 16)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = (the value of largest magnitude) / -127, q = x / d rounded, ties to even, at most 127.

    The importance matrix has no effect.
    """
    x = to_blocks(x, SIZE)
    top = largest(x)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        to_code = np.where(top != 0, np.float32(-127) / top, np.float32(0)).astype(np.float32)
        q = np.clip(np.nan_to_num(np.rint(x * to_code[..., None]), nan=-128), -128, 127).astype(np.int8)
    sums = q.reshape(*q.shape[:2], 16, 16).sum(3, dtype=np.int16).astype("<i2")
    parts = inverse(to_code).astype("<f4")[..., None].view(np.uint8), q.view(np.uint8), sums.view(np.uint8)
    return np.concatenate(parts, 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    d = np.ascontiguousarray(b[..., :4]).view("<f4")
    return (d * b[..., 4:SUMS].view(np.int8)).astype(np.float32).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 256):
        x, y = src_offs + 1024 * i, dst_offs + 292 * i
        top = np.float32(0)
        for j in range(256):
            v = memory.load_f32(src, x + 4 * j)
            top = v if abs(v) > abs(top) else top
        to_code = np.float32(-127) / top if top != 0 else np.float32(0)
        memory.store_f32(dst, y, np.float32(1) / to_code if to_code != 0 else np.float32(0))
        for j in range(16):
            q = codes(vec.load(src, x + 64 * j) * to_code)
            vec.store_i8(dst, y + 4 + 16 * j, q)
            memory.store_i16(dst, y + 260 + 2 * j, vec.lane_sum(q))


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f32(x)
        for part in range(16):
            q = e.to_f32(e.load_u8_as_i32(x, 4 + 16 * part, signed=True))
            e.store(y, e.fmul(q, d), 64 * part)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, None))
