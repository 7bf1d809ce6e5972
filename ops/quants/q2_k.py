"""Q2_K: 256 weights in 84 bytes, 2.625 bits a weight; weight = d * scale * q - dmin * minimum, a pair for each 16.

| bytes | content |
|---|---|
| 0..15 | of each 16 weights the scale in the low, the minimum in the high 4 bits |
| 16..79 | q, 2 bits: bits 2 j and 2 j + 1 of byte 16 + 32 h + k for weight 128 h + 32 j + k |
| 80..81 | d, f16 |
| 82..83 | dmin, f16 |

Panel block (1344 bytes): 16 d f16 | 16 dmin f16 | 4 quads of (4 planes of scale and minimum, 4 operands): bits 2 f and
2 f + 1 of operand v are group f of the quad (16 weights), k-group v (factor 4^f).
"""

from __future__ import annotations

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
TYPE = types.by_name("Q2_K")
SIZE, NBYTES = 256, 84
CODES, D, DMIN = 16, 80, 82
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 16 + 64 + 2 + 2)
SEARCH = search.Search(size=16, low=0, high=3, limit=15, n_steps=19, rounds=2)
fit_pairs = search_lanes.make_fit_pairs(SEARCH)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search for scales and minimums of `ggjit.ops.quants.search`."""
    rows = len(x)
    d, dmin, fitted, minimums, codes = search.by_chunks(search.fit_pairs, SEARCH, to_blocks(x, SIZE), imatrix)
    scales = fitted.astype(np.uint8) | minimums.astype(np.uint8) << 4
    q = search.join_two_bits(codes.astype(np.uint8))
    return np.concatenate([scales, q, f16_bytes(d), f16_bytes(dmin)], 1).reshape(rows, -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    scales = b[..., :CODES]
    step, minimum = load_f16(b[..., D:DMIN]) * (scales & 15), load_f16(b[..., DMIN:]) * (scales >> 4)
    q = search.split_two_bits(b[..., CODES:D])
    return (step[..., None] * q - minimum[..., None]).astype(np.float32).reshape(len(b), -1)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, and write the block."""
    zero, top = np.float32(0), np.float32(3)
    d, dmin = fit_pairs(found)
    memory.store_f16(dst, y + 80, d)
    memory.store_f16(dst, y + 82, dmin)
    for k in range(64):
        memory.store_u8(dst, y + 16 + k, 0)
    for g in range(16):
        scale, minimum = search_lanes.small(found, search_lanes.L, g), search_lanes.small(found, search_lanes.M, g)
        memory.store_u8(dst, y + g, np.int64(scale) | np.int64(minimum) << 4)
        to_code, minimum = search_lanes.reciprocal(d * scale), dmin * minimum
        for k in range(16):
            v = memory.load_f32(src, x + 64 * g + 4 * k) + minimum
            q = np.int64(search_lanes.code(v, to_code, zero, top))
            at = y + 16 + 32 * (g >> 3) + 16 * (g & 1) + k
            memory.store_u8(dst, at, np.int64(memory.load_u8(dst, at)) | q << (g & 6))


quantize_row, quantize_weighted = search_lanes.make_coders(SEARCH.size, NBYTES, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The products have 17 bits, so fma rounds as ggml does."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d, dmin = e.splat_f16(x, D), e.splat_f16(x, DMIN)
        for g in range(16):
            scales = e.splat_u8(x, g)
            step = e.fmul(d, e.to_f32(e.and_i32(scales, 15)))
            minimum = e.fneg(e.fmul(dmin, e.to_f32(e.shr_i32(scales, 4))))
            q = e.load_u8_as_i32(x, CODES + 32 * (g // 8) + 16 * (g & 1))
            q = e.and_i32(e.shr_i32(q, g & 6), 3)
            e.store(y, e.fma(e.to_f32(q), step, minimum), 64 * g)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 80)
    rows.store_halves(e.add(to, 32), 82)
    scales, q = rows.words(0, 4), rows.words(16)
    for u in range(4):
        quad, first = e.add(to, 64 + 320 * u), 8 * (u >> 1)
        for f in range(4):
            rows.store_bytes(e.add(quad, 16 * f), scales[u], f)
        for v in range(4):
            a, b = (e.shr_i32(x, 4 * (u & 1)) for x in (q[first + v], q[first + 4 + v]))
            low = e.or_(e.and_i32(a, 0x03030303), e.shl_i32(e.and_i32(b, 0x03030303), 2))
            high = e.or_(e.shl_i32(e.and_i32(a, 0x0C0C0C0C), 2), e.shl_i32(e.and_i32(b, 0x0C0C0C0C), 4))
            e.store(quad, e.or_(low, high), 64 + 64 * v)


def runs(e, w, step):
    """The two runs of quad `step` of a panel block."""
    d, dmin = e.load_f16(w), e.fneg(e.load_f16(w, 32))
    w = e.add(w, e.add(e.mul(step, 320), 64))
    scales = [e.load_u8_as_i32(w, 16 * f) for f in range(4)]
    x = [e.load_bytes(w, 64 + 64 * v) for v in range(4)]
    parts = []
    for f, both in enumerate(scales):
        factor = e.fmul(d, e.f32_const(4.0**-f)) if f else d
        scale = e.fmul(factor, e.to_f32(e.and_i32(both, 15)))
        minimum = e.fmul(dmin, e.to_f32(e.shr_i32(both, 4)))
        parts.append(Part([e.and_(v, 3 << 2 * f) for v in x], scale, None, minimum, 2 * f))
    return [parts[:2], parts[2:]]


PANEL = Panel(256, 1344, 3, pack_rows, runs, steps=4, parts=2, minimum=True)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
