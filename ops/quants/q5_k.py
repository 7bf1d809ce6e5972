"""Q5_K: 256 weights in 176 bytes, 5.5 bits a weight; weight = d * scale * q - dmin * minimum, a pair for each 32.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | dmin, f16 |
| 4..15 | 8 scales and 8 minimums of 6 bits (see `ggjit.ops.quants.k_scales`) |
| 16..47 | high bits: bit r of byte 16 + k is the highest of weight 32 r + k |
| 48..175 | low 4 bits: byte 48 + 32 p + k has weight 64 p + k in the low and weight 64 p + 32 + k in the high half |

Panel block (2816 bytes): 16 d f16 | 16 dmin f16 | 192 bytes of scales | 4 pairs of runs, 10 operands each: 2 of single
bits, then 8: k-group g of run 2 p has its low 4 bits in the low, k-group g of run 2 p + 1 its top 4 bits in the high
half. The bits of k-group g lie in operand g / 4: bit 2 (g % 4) + 1 is the top bit of run 2 p, bit 2 (g % 4) the lowest
of run 2 p + 1. One shift brings both to bits 4 and 3, where they complete the values of factor 1 and 8.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import k_scales, search, search_lanes
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

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("Q5_K")
SIZE, NBYTES = 256, 176
SCALES, HIGH, CODES = 4, 16, 48
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 12 + 32 + 128)
SEARCH = search.Search(size=32, low=0, high=31, limit=63, n_steps=21, rounds=2)
fit_pairs = search_lanes.make_fit_pairs(SEARCH)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search for scales and minimums of `ggjit.ops.quants.search`."""
    rows = len(x)
    d, dmin, scales, minimums, fitted = search.by_chunks(search.fit_pairs, SEARCH, to_blocks(x, SIZE), imatrix)
    q = fitted.astype(np.uint8)
    packed = k_scales.join_scales(scales.astype(np.uint8), minimums.astype(np.uint8))
    high = (q >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    low = (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(len(d), -1)
    return np.concatenate([f16_bytes(d), f16_bytes(dmin), packed, high, low], 1).reshape(rows, -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    scales, minimums = k_scales.split_scales(b[..., SCALES:HIGH])
    step, minimum = load_f16(b[..., :2]) * scales, load_f16(b[..., 2:4]) * minimums
    q = b[..., CODES:].reshape(*b.shape[:2], 4, 1, 32) >> np.array([[0], [4]], np.uint8) & 15
    high = b[..., None, HIGH:CODES] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = q.reshape(*b.shape[:2], 8, 32) | high << 4
    return (step[..., None] * q - minimum[..., None]).astype(np.float32).reshape(len(b), -1)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, and write the block."""
    zero, top = np.float32(0), np.float32(31)
    d, dmin = fit_pairs(found)
    memory.store_f16(dst, y, d)
    memory.store_f16(dst, y + 2, dmin)
    for k in range(160):
        memory.store_u8(dst, y + 16 + k, 0)
    for g in range(8):
        scale, minimum = search_lanes.small(found, search_lanes.L, g), search_lanes.small(found, search_lanes.M, g)
        k_scales.store_scale(dst, y + 4, g, np.int64(scale), np.int64(minimum))
        to_code, minimum = search_lanes.reciprocal(d * scale), dmin * minimum
        for k in range(32):
            v = memory.load_f32(src, x + 128 * g + 4 * k) + minimum
            q = np.int64(search_lanes.code(v, to_code, zero, top))
            high, low = y + 16 + k, y + 48 + 32 * (g >> 1) + k
            memory.store_u8(dst, high, k_scales.byte(dst, high) | q >> 4 << g)
            memory.store_u8(dst, low, k_scales.byte(dst, low) | (q & 15) << 4 * (g & 1))


quantize_row, quantize_weighted = search_lanes.make_coders(SEARCH.size, NBYTES, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The products have 22 bits, so fma rounds as ggml does."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d, dmin = e.splat_f16(x), e.splat_f16(x, 2)
        for g in range(8):
            scale, minimum = k_scales.splat_scale(e, x, SCALES, g)
            step, minimum = e.fmul(d, scale), e.fneg(e.fmul(dmin, minimum))
            for half in range(2):
                q = e.load_u8_as_i32(x, CODES + 32 * (g // 2) + 16 * half)
                q = e.shr_i32(q, 4) if g & 1 else e.and_i32(q, 15)
                high = e.and_i32(e.shr_i32(e.load_u8_as_i32(x, HIGH + 16 * half), g), 1)
                q = e.or_(q, e.shl_i32(high, 4))
                e.store(y, e.fma(e.to_f32(q), step, minimum), 128 * g + 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    words = rows.words(0) + rows.words(64) + rows.words(112)[4:]
    rows.store_halves(to, 0)
    rows.store_halves(e.add(to, 32), 2)
    k_scales.pack_scales(e, rows, words[1:4], e.add(to, 64))
    for p in range(4):
        pair, bits = e.add(to, 256 + 640 * p), []
        for g in range(8):
            q, high = words[12 + 8 * p + g], e.shr_i32(words[4 + g], 2 * p)
            top = e.shl_i32(e.and_i32(e.shr_i32(high, 1), 0x01010101), 4)
            odd = e.or_(e.and_i32(e.shr_i32(q, 4), 0x0F0F0F0F), top)
            halves = e.or_(e.and_i32(q, 0x0F0F0F0F), e.shl_i32(e.and_i32(e.shr_i32(odd, 1), 0x0F0F0F0F), 4))
            e.store(pair, halves, 128 + 64 * g)
            both = e.or_(e.shl_i32(e.and_i32(high, 0x01010101), 1), e.and_i32(odd, 0x01010101))
            bits.append(e.shl_i32(both, 2 * (g & 3)))
        for i in range(2):
            e.store(pair, functools.reduce(e.or_, bits[4 * i : 4 * i + 4]), 64 * i)


def runs(e, w, step):
    """The runs of a panel block."""
    d, dmin = e.load_f16(w, ordered=True), e.load_f16(w, 32, ordered=True)
    factors, dmin = (d, e.fmul(d, e.f32_const(1 / 8))), e.fneg(dmin)
    scales, minimums = k_scales.load_scales(e, w, 64)
    for p in range(4):
        at = 256 + 640 * p
        bits, operands = [e.load_bytes(w, at), e.load_bytes(w, at + 64)], ([], [])
        for g in range(8):
            q, n = e.load_bytes(w, at + 128 + 64 * g), 2 * (g % 4)
            b = e.shl(bits[g // 4], 3 - n) if n <= 3 else e.shr(bits[g // 4], n - 3)
            operands[0].append(e.or_(e.and_(q, 0x0F), e.and_(b, 0x10)))
            operands[1].append(e.or_(e.and_(q, 0xF0), e.and_(b, 0x08)))
        for half in range(2):
            scale, minimum = k_scales.plane(e, scales, 2 * p + half), k_scales.plane(e, minimums, 2 * p + half)
            yield [Part(operands[half], e.fmul(factors[half], scale), None, e.fmul(dmin, minimum), 3 * half)]


PANEL = Panel(256, 2816, 31, pack_rows, runs, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
