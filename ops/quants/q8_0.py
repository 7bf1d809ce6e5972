"""Q8_0: 32 weights in 34 bytes, 8.5 bits a weight; weight = d * q.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..33 | q, int8, weight k in byte 2 + k |

Panel block (544 bytes): 16 d f16 | 8 operands of q + 128.
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
    inverse,
    load_f16,
    register,
    round_away,
    to_blocks,
)  # fmt: skip

memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("Q8_0")
SIZE, NBYTES = 32, 34
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 32)


BELOW_HALF = np.float32(0.49999997)  # added to the float32 below 1/2 the sum must stay below 1


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = max |x| / 127, q = round(x / d), ties away from zero; the importance matrix has no effect."""
    x = to_blocks(x, SIZE)
    d = np.abs(x).max(2) / np.float32(127)
    with np.errstate(invalid="ignore", over="ignore"):
        q = round_away(x * inverse(d)[..., None])
    q = np.clip(np.nan_to_num(q), -128, 127).astype(np.int8)
    return np.concatenate([f16_bytes(d), q.view(np.uint8)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    return (load_f16(b[..., :2]) * b[..., 2:].view(np.int8)).astype(np.float32).reshape(len(b), -1)


@jitted
def codes(v):
    """Nearest integers as i32, ties away from zero; NaN gives -128."""
    v = vec.min(vec.max(v, np.float32(-128)), np.float32(127))
    return vec.trunc_i32(v + vec.copy_sign(vec.splat(BELOW_HALF), v))


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 34 * i
        v, w = vec.load(src, x), vec.load(src, x + 64)
        d = vec.lane_max(vec.max(vec.abs(w), vec.max(vec.abs(v), np.float32(0)))) / np.float32(127)
        scale = np.float32(1) / d if d > 0 else np.float32(0)
        memory.store_f16(dst, y, d)
        vec.store_i8(dst, y + 2, codes(v * scale))
        vec.store_i8(dst, y + 18, codes(w * scale))


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for half in range(2):
            q = e.to_f32(e.load_u8_as_i32(x, 2 + 16 * half, signed=True))
            e.store(y, e.fmul(q, d), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 0)
    for g, x in enumerate(rows.words(2, 8)[:8]):
        e.store(to, e.map(e.b.xor, x, e.i32_const(-0x7F7F7F80)), 32 + 64 * g)


def runs(e, w, step):
    """The run of a panel block."""
    d = e.load_f16(w, ordered=True)
    return [[Part([e.load_bytes(w, 32 + 64 * g) for g in range(8)], d, 7)]]


PANEL = Panel(32, 544, 255, pack_rows, runs, offset_shift=7)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
