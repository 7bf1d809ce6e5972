"""Q4_K: 256 weights in 144 bytes, 4.5 bits a weight; weight = d * scale * q - dmin * minimum, a pair for each 32.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | dmin, f16 |
| 4..15 | 8 scales and 8 minimums of 6 bits (see `ggjit.ops.quants.k_scales`) |
| 16..143 | q, 4 bits: byte 16 + 32 p + k has weight 64 p + k in the low and weight 64 p + 32 + k in the high half |

Panel block (2304 bytes): 16 d f16 | 16 dmin f16 | 192 bytes of scales | 4 pairs of runs, 8 operands each: k-group g of
run 2 p in the low, of run 2 p + 1 in the high halves (factor 16).
"""

from __future__ import annotations

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
TYPE = types.by_name("Q4_K")
SIZE, NBYTES = 256, 144
SCALES, CODES = 4, 16
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 12 + 128)
SEARCH = search.Search(size=32, low=0, high=15, limit=63, n_steps=21, rounds=2)
fit_pairs = search_lanes.make_fit_pairs(SEARCH)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search for scales and minimums of `ggjit.ops.quants.search`."""
    rows = len(x)
    d, dmin, scales, minimums, fitted = search.by_chunks(search.fit_pairs, SEARCH, to_blocks(x, SIZE), imatrix)
    q = fitted.astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = k_scales.join_scales(scales.astype(np.uint8), minimums.astype(np.uint8))
    joined = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(d), -1)
    return np.concatenate([f16_bytes(d), f16_bytes(dmin), packed, joined], 1).reshape(rows, -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    scales, minimums = k_scales.split_scales(b[..., SCALES:CODES])
    step, minimum = load_f16(b[..., :2]) * scales, load_f16(b[..., 2:4]) * minimums
    q = b[..., CODES:].reshape(*b.shape[:2], 4, 1, 32) >> np.array([[0], [4]], np.uint8) & 15
    q = q.reshape(*b.shape[:2], 8, 32)
    return (step[..., None] * q - minimum[..., None]).astype(np.float32).reshape(len(b), -1)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, and write the block."""
    zero, top = np.float32(0), np.float32(15)
    d, dmin = fit_pairs(found)
    memory.store_f16(dst, y, d)
    memory.store_f16(dst, y + 2, dmin)
    for g in range(8):
        scale, minimum = search_lanes.small(found, search_lanes.L, g), search_lanes.small(found, search_lanes.M, g)
        k_scales.store_scale(dst, y + 4, g, np.int64(scale), np.int64(minimum))
        to_code, minimum = search_lanes.reciprocal(d * scale), dmin * minimum
        for k in range(32):
            q = search_lanes.code(memory.load_f32(src, x + 128 * g + 4 * k) + minimum, to_code, zero, top)
            at = y + 16 + 32 * (g >> 1) + k
            memory.store_u8(dst, at, np.int64(q) << 4 | memory.load_u8(dst, at) if g & 1 else np.int64(q))


quantize_row, quantize_weighted = search_lanes.make_coders(SEARCH.size, NBYTES, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The products have 21 bits, so fma rounds as ggml does."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d, dmin = e.splat_f16(x), e.splat_f16(x, 2)
        for g in range(8):
            scale, minimum = k_scales.splat_scale(e, x, SCALES, g)
            step, minimum = e.fmul(d, scale), e.fneg(e.fmul(dmin, minimum))
            for half in range(2):
                q = e.load_u8_as_i32(x, CODES + 32 * (g // 2) + 16 * half)
                q = e.shr_i32(q, 4) if g & 1 else e.and_i32(q, 15)
                e.store(y, e.fma(e.to_f32(q), step, minimum), 128 * g + 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    words = rows.words(0) + rows.words(64) + rows.words(80)[12:]
    rows.store_halves(to, 0)
    rows.store_halves(e.add(to, 32), 2)
    k_scales.pack_scales(e, rows, words[1:4], e.add(to, 64))
    for g in range(32):
        e.store(to, words[4 + g], 256 + 64 * g)


def runs(e, w, step):
    """The runs of a panel block."""
    d, dmin = e.load_f16(w, ordered=True), e.load_f16(w, 32, ordered=True)
    factors, dmin = (d, e.fmul(d, e.f32_const(1 / 16))), e.fneg(dmin)
    scales, minimums = k_scales.load_scales(e, w, 64)
    for p in range(4):
        q = [e.load_bytes(w, 256 + 512 * p + 64 * g) for g in range(8)]
        for half in range(2):
            scale, minimum = k_scales.plane(e, scales, 2 * p + half), k_scales.plane(e, minimums, 2 * p + half)
            operands = [e.and_(x, 0xF0 if half else 0x0F) for x in q]
            yield [Part(operands, e.fmul(factors[half], scale), None, e.fmul(dmin, minimum), 4 * half)]


PANEL = Panel(256, 2304, 15, pack_rows, runs, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
