"""IQ4_NL: 32 weights in 18 bytes, 4.5 bits a weight; weight = d * CURVE[q] (see `ggjit.ops.quants.lookup`).

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..17 | q, 4 bits: byte 2 + k has weight k in the low and weight k + 16 in the high half |

`quantize` and `quantize_weighted` search for d; `quantize_row`, which a graph calls for every token of a KV cache,
takes one candidate.
Panel block (288 bytes): as Q4_0.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import curve, q4_0, search_lanes
from ggjit.ops.quants.lookup import CURVE, curve_code, load_entries, nibble_values
from ggjit.ops.quants.nibbles import join_nibbles, split_nibbles
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
)  # fmt: skip
from ggjit.ops.quants.search_lanes import reciprocal

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ4_NL")
SIZE, NBYTES = 32, 18
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 16)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: the d of least weighted squared error among candidates, and the nearest codes.

    Args:
        x: f32 [rows, n].
        imatrix: f32 [n], mean squares of the activations, or None.
    """
    x = to_blocks(x, SIZE)
    w = curve.weights_of(x, imatrix)
    columns = np.moveaxis(x, 2, 0).reshape(SIZE, -1)
    d = f16_bytes(curve.fit(columns, np.moveaxis(w, 2, 0).reshape(SIZE, -1)).reshape(x.shape[:2]))
    q = curve.code(x, load_f16(d))
    return np.concatenate([d, join_nibbles(q)], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    return (load_f16(b[..., :2]) * curve.VALUES[split_nibbles(b[..., 2:])]).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks: codes for the value of largest magnitude at -127, then the best d for them."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 18 * i
        top = np.float32(0)
        for j in range(32):
            v = memory.load_f32(src, x + 4 * j)
            top = v if abs(v) > abs(top) else top
        to_code = reciprocal(top / np.float32(-127))
        xq = qq = np.float32(0)
        for j in range(16):
            a, b = memory.load_f32(src, x + 4 * j), memory.load_f32(src, x + 64 + 4 * j)
            low, high = curve_code(a * to_code), curve_code(b * to_code)
            memory.store_u8(dst, y + 2 + j, low | high << 4)
            p, q = np.float32(CURVE[low]), np.float32(CURVE[high])
            xq += a * a * p * a + b * b * q * b
            qq += a * a * p * p + b * b * q * q
        memory.store_f16(dst, y, xq / qq if qq > 0 else np.float32(0))


@jitted
def block(found, lane, dst, y):
    """Write the block of a lane that was fitted."""
    memory.store_f16(dst, y, search_lanes.small(found, search_lanes.SCALE, lane))
    to_code = reciprocal(memory.load_f16(dst, y))
    for k in range(16):
        low = curve_code(search_lanes.value(found, k, lane) * to_code)
        high = curve_code(search_lanes.value(found, k + 16, lane) * to_code)
        memory.store_u8(dst, y + 2 + k, low | high << 4)


quantize_weighted = search_lanes.make_weighted_coder(SIZE, NBYTES, curve.fit_curve, block, plain=True)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for half, q in enumerate(nibble_values(e, x, 2, CURVE)):
            e.store(y, e.fmul(q, d), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


def runs(e, w, step):
    """The run of a panel block."""
    d = e.load_f16(w, ordered=True)
    return [[Part(load_entries(e, w, 32, CURVE, 128), d, 7)]]


PANEL = Panel(32, 288, 255, q4_0.pack_block, runs, offset_shift=7)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
