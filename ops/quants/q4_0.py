"""Q4_0: 32 weights in 18 bytes, 4.5 bits a weight; weight = d * (q - 8).

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..17 | q, 4 bits: byte 2 + k has weight k in the low and weight k + 16 in the high half |

Panel block (288 bytes): 16 d f16 | 4 operands: k-group g in the low, k-group g + 4 in the high halves.
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
    f16_bytes,
    from_bytes,
    inverse,
    largest,
    load_f16,
    register,
    to_blocks,
)  # fmt: skip
from ggjit.ops.quants.search import Search, by_chunks, fit_signed

memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("Q4_0")
SIZE, NBYTES = 32, 18
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 16)
SEARCH = Search(size=32, low=-8, high=7, limit=0, n_steps=29, rounds=0)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = (the value of largest magnitude) / -8, q = x / d + 8 rounded, at most 15.

    With an importance matrix, by the search of `ggjit.ops.quants.search`.
    """
    x = to_blocks(x, SIZE)
    if imatrix is not None:
        d, q = (v.reshape(*x.shape[:2], *v.shape[1:]) for v in by_chunks(fit_signed, SEARCH, x, imatrix))
        q = q + np.float32(8)
    else:
        d = largest(x) / np.float32(-8)
        with np.errstate(invalid="ignore", over="ignore"):
            q = np.clip(np.nan_to_num(x * inverse(d)[..., None] + np.float32(8.5)), 0, 15)
    return np.concatenate([f16_bytes(d), join_nibbles(q.astype(np.uint8))], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = split_nibbles(b[..., 2:]).astype(np.int8) - np.int8(8)
    return (load_f16(b[..., :2]) * q).astype(np.float32).reshape(len(b), -1)


@jitted
def top_of(v, w):
    """The first of 32 values whose magnitude is largest; 0 if none is above 0 (NaN is not)."""
    zero = np.float32(0)
    top = vec.lane_max(vec.max(vec.abs(w), vec.max(vec.abs(v), zero)))
    if not top > zero:
        return zero
    if vec.any_lane(vec.abs(v) == top):
        return first_of(v, top)
    return first_of(w, top)


@jitted
def first_of(v, top):
    """The first lane of magnitude top."""
    at = vec.lane_min(vec.select(vec.abs(v) == top, vec.lanes(), np.int32(15)))
    return vec.lane(v, np.int64(at))


@jitted
def codes(v):
    """Codes 0 to 15 of values in units of d, as i32; NaN gives 0."""
    return vec.trunc_i32(vec.min(vec.max(v + np.float32(8.5), np.float32(0)), np.float32(15)))


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize` without importance matrix."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 18 * i
        v, w = vec.load(src, x), vec.load(src, x + 64)
        top = top_of(v, w)
        d = top / np.float32(-8)
        scale = np.float32(1) / d if d != 0 else np.float32(0)
        memory.store_f16(dst, y, d)
        vec.store_i8(dst, y + 2, codes(v * scale) | (codes(w * scale) << np.int32(4)))


@jitted
def block(found, lane, dst, y):
    """Write the block of a lane, fitted with weights."""
    d = search_lanes.small(found, search_lanes.SCALE, lane)
    memory.store_f16(dst, y, d)
    to_code, low, high = search_lanes.reciprocal(d), np.float32(-8), np.float32(7)
    for k in range(16):
        a, b = search_lanes.value(found, k, lane), search_lanes.value(found, k + 16, lane)
        p = np.int64(search_lanes.code(a, to_code, low, high)) + 8
        q = np.int64(search_lanes.code(b, to_code, low, high)) + 8
        memory.store_u8(dst, y + 2 + k, p | q << 4)


fit = search_lanes.make_fit_signed(SEARCH)
quantize_weighted = search_lanes.make_weighted_coder(SIZE, NBYTES, fit, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for half, q in enumerate(nibble_operands(e, x, 2)):
            e.store(y, e.fmul(e.fsub(q, e.f32_const(8.0)), d), 64 * half)
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
    for g in range(4):
        memory.store_u32(dst, dst_offs + 32 + 64 * g + 4 * row, memory.load_u32(src, src_offs + 2 + 4 * g))


def runs(e, w, step):
    """The run of a panel block."""
    d = e.load_f16(w, ordered=True)
    return [[Part(load_nibbles(e, w, 32), d, 3)]]


PANEL = Panel(32, 288, 15, pack_block, runs, offset_shift=3)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, False, quantize_weighted))
