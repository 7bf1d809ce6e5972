"""Q3_K: 256 weights in 110 bytes, 3.4375 bits a weight; weight = d * (scale - 32) * (q - 4), a scale for each 16.

| bytes | content |
|---|---|
| 0..31 | third bits: bit r of byte k is the highest of weight 32 r + k |
| 32..95 | low 2 bits: bits 2 j and 2 j + 1 of byte 32 + 32 h + k for weight 128 h + 32 j + k |
| 96..103 | low 4 bits of scales: byte 96 + i has scale i in the low and scale i + 8 in the high half |
| 104..107 | high 2 bits of scales: bits 2 j and 2 j + 1 of byte 104 + i for scale 4 j + i |
| 108..109 | d, f16 |

Panel block (1760 bytes): 16 d f16 | 4 quads of (3 planes of scales, 2 operands of single bits, 4 operands). A quad is
4 groups of 16 weights. Bits 2 f and 2 f + 1 of operand v hold two bits of group f, k-group v: the low ones for f = 0
and 1, whose third bit comes on top (factors 1 and 4), the top ones for f = 2 and 3, whose lowest comes below (factors 8
and 32). Single bits of k-group v lie in half v % 2 of operand v / 2, in the order of groups 0, 2, 1, 3, so that one
shift brings all four to their places. Planes: low bits of scales 0 and 2; of 1 and 3; two high bits of all.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import search, search_lanes
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
TYPE = types.by_name("Q3_K")
SIZE, NBYTES = 256, 110
CODES, SCALES, D = 32, 96, 108
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 32 + 64 + 12 + 2)
SEARCH = search.Search(size=16, low=-4, high=3, limit=32, n_steps=19, rounds=1)
fit_scales = search_lanes.make_fit_scales(SEARCH)
FIELDS = ((0, 4), (2, 16), (3, 8), (5, 32))  # of a quad's groups: log2 of the factor, place of the single bit


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search for scales of `ggjit.ops.quants.search`."""
    rows = len(x)
    d, fitted, codes = search.by_chunks(search.fit_scales, SEARCH, to_blocks(x, SIZE), imatrix)
    scales, q = (fitted + np.float32(32)).astype(np.uint8), (codes + np.float32(4)).astype(np.uint8)
    high = (q.reshape(-1, 8, 32) >> 2 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    low_scales = scales[:, :8] & 15 | scales[:, 8:] << 4
    high_scales = (scales.reshape(-1, 4, 4) >> 4 << search.PAIRS[:, None]).sum(1, dtype=np.uint8)
    parts = high, search.join_two_bits(q & np.uint8(3)), low_scales, high_scales, f16_bytes(d)
    return np.concatenate(parts, 1).reshape(rows, -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    low, high = b[..., SCALES : SCALES + 8], b[..., None, SCALES + 8 : D] >> search.PAIRS[:, None] & 3
    scales = np.concatenate([low & 15, low >> 4], -1) | high.reshape(*b.shape[:2], 16) << 4
    step = load_f16(b[..., D:]) * (scales.view(np.int8) - np.int8(32))
    third = b[..., None, :CODES] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = search.split_two_bits(b[..., CODES:SCALES]) | third.reshape(*b.shape[:2], 16, 16) << 2
    return (step[..., None] * (q.view(np.int8) - np.int8(4))).astype(np.float32).reshape(len(b), -1)


@jitted
def set_bits(dst, at, bits):
    """Set bits of a byte."""
    memory.store_u8(dst, at, np.int64(memory.load_u8(dst, at)) | bits)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, and write the block."""
    low, high = np.float32(-4), np.float32(3)
    d = fit_scales(found)
    for k in range(108):
        memory.store_u8(dst, y + k, 0)
    memory.store_f16(dst, y + 108, d)
    for g in range(16):
        scale = search_lanes.small(found, search_lanes.L, g)
        coded, to_code = np.int64(scale) + 32, search_lanes.reciprocal(d * scale)
        set_bits(dst, y + 96 + (g & 7), (coded & 15) << 4 * (g >> 3))
        set_bits(dst, y + 104 + (g & 3), coded >> 4 << 2 * (g >> 2))
        for k in range(16):
            q = np.int64(search_lanes.code(memory.load_f32(src, x + 64 * g + 4 * k), to_code, low, high)) + 4
            set_bits(dst, y + 16 * (g & 1) + k, q >> 2 << (g >> 1))
            set_bits(dst, y + 32 + 32 * (g >> 3) + 16 * (g & 1) + k, (q & 3) << (g & 6))


quantize_row, quantize_weighted = search_lanes.make_coders(SEARCH.size, NBYTES, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x, D)
        for g in range(16):
            low, high = e.splat_u8(x, SCALES + g % 8), e.splat_u8(x, SCALES + 8 + g % 4)
            low = e.shr_i32(low, 4) if g >= 8 else e.and_i32(low, 15)
            scale = e.or_(low, e.shl_i32(e.and_i32(e.shr_i32(high, 2 * (g // 4)), 3), 4))
            step = e.fmul(d, e.fsub(e.to_f32(scale), e.f32_const(32.0)))
            q = e.and_i32(e.shr_i32(e.load_u8_as_i32(x, CODES + 32 * (g // 8) + 16 * (g & 1)), g & 6), 3)
            third = e.and_i32(e.shr_i32(e.load_u8_as_i32(x, 16 * (g & 1)), g // 2), 1)
            q = e.fsub(e.to_f32(e.or_(q, e.shl_i32(third, 2))), e.f32_const(4.0))
            e.store(y, e.fmul(q, step), 64 * g)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 108)
    words = rows.words(0) + rows.words(44)[5:]

    def four(g, v):
        """Weights 4 v to 4 v + 3 of group g: 3-bit values in the bytes of words."""
        low = e.shr_i32(words[8 + 8 * (g >> 3) + 4 * (g & 1) + v], g & 6)
        high = e.shr_i32(words[4 * (g & 1) + v], g >> 1)
        return e.or_(e.and_i32(low, 0x03030303), e.shl_i32(e.and_i32(high, 0x01010101), 2))

    for u in range(4):
        quad = e.add(to, 32 + 432 * u)
        tops = [e.shl_i32(e.and_i32(e.shr_i32(words[26], 8 * f + 2 * u), 3), 2 * f) for f in range(4)]
        rows.store_bytes(e.add(quad, 32), functools.reduce(e.or_, tops), 0)
        for f in range(2):
            x = e.shr_i32(words[24 + (u & 1)], 8 * f + 4 * (u >> 1))
            both = e.or_(e.and_i32(x, 15), e.shl_i32(e.and_i32(e.shr_i32(x, 16), 15), 4))
            rows.store_bytes(e.add(quad, 16 * f), both, 0)
        singles = []
        for v in range(4):
            a, b, c, d = (four(4 * u + f, v) for f in range(4))
            fields = e.or_(e.and_i32(a, 0x03030303), e.shl_i32(e.and_i32(b, 0x03030303), 2))
            tops = e.or_(e.shl_i32(e.and_i32(c, 0x06060606), 3), e.shl_i32(e.and_i32(d, 0x06060606), 5))
            e.store(quad, e.or_(fields, tops), 176 + 64 * v)
            bits = e.or_(e.and_i32(e.shr_i32(a, 2), 0x01010101), e.and_i32(b, 0x04040404))
            more = e.or_(e.and_i32(c, 0x01010101), e.shl_i32(e.and_i32(d, 0x01010101), 2))
            singles.append(e.or_(bits, e.shl_i32(more, 1)))
        for v in (0, 2):
            e.store(quad, e.or_(singles[v], e.shl_i32(singles[v + 1], 4)), 48 + 32 * v)


def runs(e, w, step):
    """The two runs of quad `step` of a panel block."""
    d, w = e.load_f16(w), e.add(w, e.add(e.mul(step, 432), 32))
    low0, low1, tops = (e.load_u8_as_i32(w, 16 * i) for i in range(3))
    singles = [e.load_bytes(w, 48), e.load_bytes(w, 112)]
    x = [e.load_bytes(w, 176 + 64 * v) for v in range(4)]
    lows = e.and_i32(low0, 15), e.and_i32(low1, 15), e.shr_i32(low0, 4), e.shr_i32(low1, 4)
    bits = e.shl(singles[0], 2), e.shr(singles[0], 2), e.shl(singles[1], 2), e.shr(singles[1], 2)
    parts = []
    for f, (factor, place) in enumerate(FIELDS):
        scale = e.or_(lows[f], e.shl_i32(e.and_i32(e.shr_i32(tops, 2 * f), 3), 4))
        scale = e.fsub(e.to_f32(scale), e.f32_const(32.0))
        operands = [e.or_(e.and_(q, 3 << 2 * f), e.and_(b, place)) for q, b in zip(x, bits, strict=True)]
        step_size = e.fmul(d, e.f32_const(2.0**-factor)) if factor else d
        parts.append(Part(operands, e.fmul(step_size, scale), 2 + factor, None, factor))
    return [parts[:2], parts[2:]]


PANEL = Panel(256, 1760, 7, pack_rows, runs, steps=4, parts=2, offset_shift=2)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
