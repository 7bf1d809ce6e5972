"""IQ4_XS: 256 weights in 136 bytes, 4.25 bits a weight; weight = d * (scale - 32) * CURVE[q], a scale for each 32.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..3 | top 2 bits of the scales: scale r in bits 2 r and 2 r + 1 of the 16 |
| 4..7 | low 4 bits of the scales: scale r in byte 4 + r / 2, the low half for even r |
| 8..135 | q, 4 bits: 16 bytes a run of 32, byte k has weight k in the low and weight k + 16 in the high half |

Panel block (2176 bytes): 16 d f16 | 2 x (3 planes of scales, 4 runs of 4 operands): planes 0 to 2 have the scales of
runs 0 to 2 in bits 0..5 and that of run 3 in their top bits; operands as in Q4_0.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import curve, search, search_lanes
from ggjit.ops.quants.curve import curve_error, curve_sums, fit_curve
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
    inverse,
    largest,
    load_f16,
    register,
    to_blocks,
)  # fmt: skip

memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("IQ4_XS")
SIZE, NBYTES = 256, 136
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 2 + 4 + 128)
NEAR = (-1, 0, 1)  # scales that are tried around the nearest


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows.

    Each run is fitted by itself; d is the scale of largest magnitude / -32, and scales are those of least weighted
    squared error among the neighbours of the nearest. Then d is fitted to them and scales are chosen again.

    Args:
        x: f32 [rows, n].
        imatrix: f32 [n], mean squares of the activations, or None.
    """
    x = to_blocks(x, SIZE)
    rows, n = x.shape[:2]
    w = curve.weights_of(x, imatrix)
    columns, w = (np.moveaxis(v.reshape(rows, n, 8, 32), 3, 0) for v in (x, w))
    fitted = curve.fit(columns.reshape(32, -1), w.reshape(32, -1)).reshape(rows, n, 8)
    d = load_f16(f16_bytes(largest(fitted) / np.float32(-32)))
    scales, error = _choose(columns, w, d, fitted)
    v = curve.VALUES[curve.code(columns, d * scales)]
    xq, qq = _over_runs(search.total(w * v * columns) * scales), _over_runs(search.total(w * v * v) * scales * scales)
    refined = load_f16(f16_bytes(np.where(qq > 0, xq / np.where(qq > 0, qq, np.float32(1)), np.float32(0))))
    scales_2, error_2 = _choose(columns, w, refined, fitted)
    better = (error_2 < error)[..., None]
    d, scales = np.where(better, refined, d), np.where(better, scales_2, scales)
    q = join_nibbles(curve.code(x.reshape(rows, n, 8, 32), (d * scales)[..., None])).reshape(rows, n, 128)
    code = (scales + 32).astype(np.uint8)
    low, high = code[..., 0::2] & 15 | (code[..., 1::2] & 15) << 4, code.reshape(rows, n, 2, 4) >> 4
    high = (high << np.array([0, 2, 4, 6], np.uint8)).sum(3, dtype=np.uint8)
    return np.concatenate([f16_bytes(d[..., 0]), high, low, q], 2).reshape(rows, -1)


def _over_runs(x: Floats) -> Floats:
    """Sum over the 8 runs of blocks, one after the other."""
    return search.total(np.moveaxis(x, 2, 0))


def _choose(columns: Floats, w: Floats, d: Floats, fitted: Floats) -> tuple[Floats, Floats]:
    """Scales [rows, n, 8] of least error near fitted / d, and the error of blocks."""
    middle = np.rint(np.clip(fitted * inverse(d), -32, 31))
    best, scales = np.full_like(middle, np.inf), np.zeros_like(middle)
    for step in NEAR:
        scale = np.clip(middle + np.float32(step), -32, 31)
        error = curve.error(columns, w, d * scale)
        scales, best = np.where(error < best, scale, scales), np.where(error < best, error, best)
    return scales, _over_runs(best)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    rows, n = b.shape[:2]
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], 3).reshape(rows, n, 8)
    high = (b[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(rows, n, 8)
    step = load_f16(b[..., :2]) * ((low | high << 4).astype(np.float32) - 32)
    q = split_nibbles(b[..., 8:].reshape(rows, n, 8, 16))
    return (step[..., None] * curve.VALUES[q]).reshape(rows, -1)


@jitted
def choose(found, d, to):
    """Scales of a block of least error near fitted / d, to an array of the buffer, and their error."""
    low, high = np.float32(-32), np.float32(31)
    middle = search_lanes.codes(vec.load(found, search_lanes.SCALE), search_lanes.reciprocal(d), low, high)
    best, chosen = vec.zero() + np.float32(np.inf), vec.zero()
    for step in NEAR:
        scale = search_lanes.limited(middle + np.float32(step), low, high)
        error = curve_error(found, scale * d)
        better = error < best
        best, chosen = vec.select(better, error, best), vec.select(better, scale, chosen)
    vec.store(found, to, chosen)
    vec.store(found, search_lanes.ERROR, best)
    return search_lanes.sum_of(found, search_lanes.ERROR, 8)


@jitted
def refine(found, d):
    """The d of least squared error for the codes that d and the scales in L give."""
    scale = vec.load(found, search_lanes.L)
    xq, qq = curve_sums(found, search_lanes.inverse(scale * d))
    vec.store(found, search_lanes.ERROR, xq * scale)
    numerator = search_lanes.sum_of(found, search_lanes.ERROR, 8)
    vec.store(found, search_lanes.ERROR, qq * scale * scale)
    denominator = search_lanes.sum_of(found, search_lanes.ERROR, 8)
    return numerator / denominator if denominator > 0 else np.float32(0)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, and write the block."""
    fit_curve(found)
    top = np.float32(0)
    for r in range(8):
        fitted = search_lanes.small(found, search_lanes.SCALE, r)
        top = fitted if abs(fitted) > abs(top) else top
    for j in range(2, 8):
        memory.store_u8(dst, y + j, 0)
    memory.store_f16(dst, y, top / np.float32(-32))
    first = memory.load_f16(dst, y)
    error = choose(found, first, search_lanes.L)
    memory.store_f16(dst, y, refine(found, first))
    d, scales = memory.load_f16(dst, y), search_lanes.NEW_L
    if not choose(found, d, search_lanes.NEW_L) < error:
        memory.store_f16(dst, y, first)
        d, scales = first, search_lanes.L
    for r in range(8):
        scale = search_lanes.small(found, scales, r)
        store_run(src, x + 128 * r, dst, y, r, d * scale, np.int64(scale) + 32)


@jitted
def store_run(src, x, dst, y, r, step, scale):
    """Write run r of a block, whose scales held zeros."""
    to_code = search_lanes.reciprocal(step)
    high, low = y + 2 + r // 4, y + 4 + r // 2
    memory.store_u8(dst, high, memory.load_u8(dst, high) | scale >> 4 << 2 * (r % 4))
    memory.store_u8(dst, low, memory.load_u8(dst, low) | (scale & 15) << 4 * (r % 2))
    for j in range(16):
        a, b = memory.load_f32(src, x + 4 * j), memory.load_f32(src, x + 64 + 4 * j)
        memory.store_u8(dst, y + 8 + 16 * r + j, curve_code(a * to_code) | curve_code(b * to_code) << 4)


quantize_row, quantize_weighted = search_lanes.make_coders(32, NBYTES, block, plain=True)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for r in range(8):
            low = e.and_i32(e.shr_i32(e.splat_u8(x, 4 + r // 2), 4 * (r % 2)), 15)
            high = e.and_i32(e.shr_i32(e.splat_u8(x, 2 + r // 4), 2 * (r % 4)), 3)
            scale = e.fsub(e.to_f32(e.or_(low, e.shl_i32(high, 4))), e.f32_const(32.0))
            step = e.fmul(d, scale)
            for half, q in enumerate(nibble_values(e, x, 8 + 16 * r, CURVE)):
                e.store(y, e.fmul(q, step), 128 * r + 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 0)
    first, lows = rows.words(0, 2)[:2]
    for half in range(2):
        start = e.add(to, 32 + 1072 * half)
        low, high = e.shr_i32(lows, 16 * half), e.shr_i32(first, 16 + 8 * half)
        fourth = e.or_(e.and_i32(e.shr_i32(low, 12), 15), e.shl_i32(e.and_i32(e.shr_i32(high, 6), 3), 4))
        for r in range(3):
            scale = e.or_(e.and_i32(e.shr_i32(low, 4 * r), 15), e.shl_i32(e.and_i32(e.shr_i32(high, 2 * r), 3), 4))
            scale = e.or_(scale, e.shl_i32(e.and_i32(e.shr_i32(fourth, 2 * r), 3), 6))
            rows.store_bytes(e.add(start, 16 * r), scale, 0)
        for g, x in enumerate(rows.words(8 + 64 * half)):
            e.store(start, x, 48 + 64 * g)


def runs(e, w, step):
    """Four runs of a panel block."""
    d, w = e.load_f16(w), e.add(w, e.add(e.mul(step, 1072), 32))
    planes = [e.load_u8_as_i32(w, 16 * r) for r in range(3)]
    scales = [e.and_i32(p, 63) for p in planes]
    tops = [e.shl_i32(e.shr_i32(p, 6), 2 * r) for r, p in enumerate(planes)]
    scales.append(e.or_(e.or_(tops[0], tops[1]), tops[2]))
    out = []
    for r, scale in enumerate(scales):
        scale = e.fmul(d, e.fsub(e.to_f32(scale), e.f32_const(32.0)))
        out.append([Part(load_entries(e, w, 48 + 256 * r, CURVE, 128), scale, 7)])
    return out


PANEL = Panel(256, 2176, 255, pack_rows, runs, steps=2, offset_shift=7)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, True, quantize_weighted))
