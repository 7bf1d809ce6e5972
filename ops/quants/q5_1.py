"""Q5_1: 32 weights in 24 bytes, 6 bits a weight; weight = d * q + m.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | m, f16 |
| 4..7 | high bits: bit k of the word is the highest of weight k |
| 8..23 | low 4 bits: byte 8 + k has weight k in the low and weight k + 16 in the high half |

Panel block (384 bytes): 16 d f16 | 16 m f16 | operand of high bits, bit g for k-group g | 4 operands: k-group g in the
low, k-group g + 4 in the high halves.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import high_bits, search_lanes
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
TYPE = types.by_name("Q5_1")
SIZE, NBYTES = 32, 24
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 4 + 16)
SEARCH = Search(size=32, low=0, high=31, limit=0, n_steps=45, rounds=0)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: m = min x, d = (max x - m) / 31, q = (x - m) / d rounded.

    With an importance matrix, by the search of `ggjit.ops.quants.search`.
    """
    x = to_blocks(x, SIZE)
    if imatrix is not None:
        d, m, q = (v.reshape(*x.shape[:2], *v.shape[1:]) for v in by_chunks(fit_range, SEARCH, x, imatrix))
    else:
        m = x.min(2)
        with np.errstate(invalid="ignore", over="ignore"):
            d = (x.max(2) - m) / np.float32(31)
            q = np.clip(np.nan_to_num((x - m[..., None]) * inverse(d)[..., None] + np.float32(0.5)), 0, 31)
    parts = f16_bytes(d), f16_bytes(m), high_bits.join_five(q.astype(np.uint8))
    return np.concatenate(parts, 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    d, m = load_f16(b[..., :2]), load_f16(b[..., 2:4])
    return (d * high_bits.split_five(b[..., 4:]) + m).astype(np.float32).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize` without importance matrix."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 24 * i
        low = high = memory.load_f32(src, x)
        for j in range(1, 32):
            v = memory.load_f32(src, x + 4 * j)
            low, high = v if v < low else low, v if v > high else high
        d = (high - low) / np.float32(31)
        scale = np.float32(1) / d if d != 0 else np.float32(0)
        memory.store_f16(dst, y, d)
        memory.store_f16(dst, y + 2, low)
        memory.store_u32(dst, y + 4, 0)
        for j in range(16):
            a, c = memory.load_f32(src, x + 4 * j) - low, memory.load_f32(src, x + 64 + 4 * j) - low
            a = clamp(a * scale + np.float32(0.5), np.float32(0), np.float32(31))
            c = clamp(c * scale + np.float32(0.5), np.float32(0), np.float32(31))
            high_bits.store_five(dst, y + 4, j, np.int64(a), np.int64(c))


@jitted
def block(found, lane, dst, y):
    """Write the block of a lane, fitted with weights."""
    d = search_lanes.small(found, search_lanes.SCALE, lane)
    memory.store_f16(dst, y, d)
    m = search_lanes.small(found, search_lanes.MINIMUM, lane)
    memory.store_f16(dst, y + 2, m)
    to_code, low, high = search_lanes.reciprocal(d), np.float32(0), np.float32(31)
    bits = 0
    for k in range(16):
        a, b = search_lanes.value(found, k, lane) - m, search_lanes.value(found, k + 16, lane) - m
        p = np.int64(search_lanes.code(a, to_code, low, high))
        q = np.int64(search_lanes.code(b, to_code, low, high))
        memory.store_u8(dst, y + 8 + k, (p & 15) | (q & 15) << 4)
        bits |= p >> 4 << k | q >> 4 << k + 16
    memory.store_u32(dst, y + 4, bits)


fit = search_lanes.make_fit_range(SEARCH)
quantize_weighted = search_lanes.make_weighted_coder(SIZE, NBYTES, fit, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The product of d (11 bits) and q (5 bits) is exact, so fma rounds as ggml does."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d, m = e.splat_f16(x), e.splat_f16(x, 2)
        for half, q in enumerate(high_bits.five_operands(e, x, 4)):
            e.store(y, e.fma(q, d, m), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 0)
    rows.store_halves(e.add(to, 32), 2)
    high_bits.pack_five(e, rows, 4, e.add(to, 64))


def runs(e, w, step):
    """The run of a panel block."""
    d, m = e.load_f16(w, ordered=True), e.load_f16(w, 32, ordered=True)
    return [[Part(high_bits.load_five(e, w, 64), d, None, m)]]


PANEL = Panel(32, 384, 31, pack_rows, runs, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, False, quantize_weighted))
