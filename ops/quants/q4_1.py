"""Q4_1: 32 weights in 20 bytes, 5 bits a weight; weight = d * q + m.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | m, f16 |
| 4..19 | q, 4 bits: byte 4 + k has weight k in the low and weight k + 16 in the high half |

Panel block (320 bytes): 16 d f16 | 16 m f16 | 4 operands: k-group g in the low, k-group g + 4 in the high halves.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import search_lanes
from ggjit.ops.quants.nibbles import join_nibbles, load_nibbles, nibble_operands, split_nibbles
from ggjit.ops.quants.quant import (
    Bytes,
    Floats,
    Panel,
    Part,
    Quant,
    clamp,
    f16_bytes,
    from_bytes,
    inverse,
    load_f16,
    register,
    to_blocks,
)  # fmt: skip
from ggjit.ops.quants.search import Search, by_chunks, fit_range

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("Q4_1")
SIZE, NBYTES = 32, 20
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 16)
SEARCH = Search(size=32, low=0, high=15, limit=0, n_steps=45, rounds=0)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: m = min x, d = (max x - m) / 15, q = (x - m) / d rounded.

    With an importance matrix, by the search of `ggjit.ops.quants.search`.
    """
    x = to_blocks(x, SIZE)
    if imatrix is not None:
        d, m, q = (v.reshape(*x.shape[:2], *v.shape[1:]) for v in by_chunks(fit_range, SEARCH, x, imatrix))
    else:
        m = x.min(2)
        with np.errstate(invalid="ignore", over="ignore"):
            d = (x.max(2) - m) / np.float32(15)
            q = np.clip(np.nan_to_num((x - m[..., None]) * inverse(d)[..., None] + np.float32(0.5)), 0, 15)
    parts = f16_bytes(d), f16_bytes(m), join_nibbles(q.astype(np.uint8))
    return np.concatenate(parts, 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    d, m = load_f16(b[..., :2]), load_f16(b[..., 2:4])
    return (d * split_nibbles(b[..., 4:]) + m).astype(np.float32).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize` without importance matrix."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 20 * i
        low = high = memory.load_f32(src, x)
        for j in range(1, 32):
            v = memory.load_f32(src, x + 4 * j)
            low, high = v if v < low else low, v if v > high else high
        d = (high - low) / np.float32(15)
        scale = np.float32(1) / d if d != 0 else np.float32(0)
        memory.store_f16(dst, y, d)
        memory.store_f16(dst, y + 2, low)
        for j in range(16):
            a, c = memory.load_f32(src, x + 4 * j) - low, memory.load_f32(src, x + 64 + 4 * j) - low
            a = clamp(a * scale + np.float32(0.5), np.float32(0), np.float32(15))
            c = clamp(c * scale + np.float32(0.5), np.float32(0), np.float32(15))
            memory.store_u8(dst, y + 4 + j, np.int64(a) | np.int64(c) << 4)


@jitted
def block(found, lane, dst, y):
    """Write the block of a lane, fitted with weights."""
    d = search_lanes.small(found, search_lanes.SCALE, lane)
    memory.store_f16(dst, y, d)
    m = search_lanes.small(found, search_lanes.MINIMUM, lane)
    memory.store_f16(dst, y + 2, m)
    to_code, low, high = search_lanes.reciprocal(d), np.float32(0), np.float32(15)
    for k in range(16):
        a, b = search_lanes.value(found, k, lane) - m, search_lanes.value(found, k + 16, lane) - m
        p = np.int64(search_lanes.code(a, to_code, low, high))
        q = np.int64(search_lanes.code(b, to_code, low, high))
        memory.store_u8(dst, y + 4 + k, p | q << 4)


fit = search_lanes.make_fit_range(SEARCH)
quantize_weighted = search_lanes.make_weighted_coder(SIZE, NBYTES, fit, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The product of d (11 bits) and q (4 bits) is exact, so fma rounds as ggml does."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d, m = e.splat_f16(x), e.splat_f16(x, 2)
        for half, q in enumerate(nibble_operands(e, x, 4)):
            e.store(y, e.fma(q, d, m), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row):
    """A block of a row to its places in a panel block."""
    memory.store_u16(dst, dst_offs + 2 * row, memory.load_u16(src, src_offs))
    memory.store_u16(dst, dst_offs + 32 + 2 * row, memory.load_u16(src, src_offs + 2))
    for g in range(4):
        memory.store_u32(dst, dst_offs + 64 + 64 * g + 4 * row, memory.load_u32(src, src_offs + 4 + 4 * g))


def runs(e, w, step):
    """The run of a panel block."""
    d, m = e.load_f16(w, ordered=True), e.load_f16(w, 32, ordered=True)
    return [[Part(load_nibbles(e, w, 64), d, None, m)]]


PANEL = Panel(32, 320, 15, pack_block, runs, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, False, quantize_weighted))
