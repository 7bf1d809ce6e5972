"""Q6_K: 256 weights in 210 bytes, 6.5625 bits a weight; weight = d * scale * (q - 32), a scale for each 16.

| bytes | content |
|---|---|
| 0..127 | ql, low 4 bits of q |
| 128..191 | qh, high 2 bits of q |
| 192..207 | 16 scales, int8 |
| 208..209 | d, f16 |

Weights 128 h + 32 j + k (h 0..1, j 0..3, k 0..31): low bits in byte 64 h + 32 (j & 1) + k of ql, low half for j < 2
and high half for j >= 2; high bits in bits 2 j and 2 j + 1 of byte 32 h + k of qh.

Panel block (3360 bytes): 16 d f16 | 8 runs of (16 scales, 16 scales, 6 operands). Three operands hold four k-groups:
groups 0 to 2 in bits 0..5, and group 3 two bits each in the top bits of the three.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import search_lanes
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
from ggjit.ops.quants.search import Search, by_chunks, fit_scales

memory, vec = lazy_module("ggjit.ops.lib.memory"), lazy_module("ggjit.ops.lib.vec")
TYPE = types.by_name("Q6_K")
SIZE, NBYTES = 256, 210
QH, SCALES, D = 128, 192, 208
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 128 + 64 + 16 + 2)
SEARCH = Search(size=16, low=-32, high=31, limit=128, n_steps=19, rounds=1)
fit_block = search_lanes.make_fit_scales(SEARCH)
TINY = np.float32(1e-15)  # magnitudes below it count as zero
FACTORS = search_lanes.MINIMUM  # where in the buffer what gave the codes is
STEPS = (0, *range(-9, 0), *range(1, 10))  # candidates: the largest value gets the code -(32 + step / 10)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows.

    The scale of 16 weights is the one of 19 candidates with the least error weighted by x^2, each refined by least
    squares; scales are then rounded to multiples of d and the codes chosen anew. With an importance matrix, by the
    search of `ggjit.ops.quants.search`.
    """
    x = to_blocks(x, SIZE)
    rows, n = x.shape[:2]
    if imatrix is not None:
        d, scales, q = by_chunks(fit_scales, SEARCH, x, imatrix)
        return _join(q.reshape(rows, n, -1) + np.float32(32), scales.reshape(rows, n, 16), d.reshape(rows, n))
    group = x.reshape(rows, n, 16, 16)
    scale, found = _best_scales(group.reshape(-1, 16))
    scale = scale.reshape(rows, n, 16)
    top = largest(scale)
    zero = np.abs(top) < TINY
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        to_code = np.where(zero, 0, np.float32(-128) / top).astype(np.float32)
        d = inverse(to_code)
        scales = np.minimum(np.rint(to_code[..., None] * scale), 127)
        step = load_f16(f16_bytes(d)) * scales
        code = np.clip(np.rint(group / step[..., None]), -32, 31)
    q = np.where(step[..., None] == 0, found.reshape(group.shape), np.nan_to_num(code) + 32)
    b = _join(q, scales, d).reshape(rows, n, -1)
    return np.where(zero[..., None], np.uint8(0), b).reshape(rows, -1)


def _join(q: Floats, scales: Floats, d: Floats) -> Bytes:
    """Rows of blocks of codes + 32, scales and d."""
    rows, n = d.shape
    coded = q.astype(np.uint8).reshape(rows, n, 2, 4, 32)
    low = coded[..., :2, :] & 15 | coded[..., 2:, :] << 4
    high = (coded >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(3, dtype=np.uint8)
    parts = low.reshape(rows, n, -1), high.reshape(rows, n, -1), scales.astype(np.int8).view(np.uint8), f16_bytes(d)
    return np.concatenate(parts, 2).reshape(rows, -1)


def _best_scales(x: Floats) -> tuple[Floats, Floats]:
    """The scale of each row of 16 and the codes that it was found with, zeros where all values are tiny."""
    top = largest(x)
    best, scale, found = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32), np.zeros(x.shape, np.float32)
    for step in STEPS:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            to_code = -(np.float32(32) + np.float32(0.1) * np.float32(step)) / top
            code = np.nan_to_num(np.clip(np.rint(x * to_code[:, None]), -32, 31))
        xq, qq = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
        for i in range(16):  # one after the other, as the compiled form sums
            w = x[:, i] * x[:, i]
            xq += w * x[:, i] * code[:, i]
            qq += w * code[:, i] * code[:, i]
        better = (qq > 0) & (xq * xq > best * qq)
        fitted = xq / np.where(qq > 0, qq, 1)
        scale, best = np.where(better, fitted, scale), np.where(better, fitted * xq, best)
        found = np.where(better[:, None], code + 32, found)
    tiny = np.abs(top) < TINY
    return np.where(tiny, np.float32(0), scale), np.where(tiny[:, None], np.float32(0), found)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    rows, n = b.shape[:2]
    low = b[..., :QH].reshape(rows, n, 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], 3)
    high = b[..., QH:SCALES].reshape(rows, n, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).view(np.int8) - np.int8(32)
    step = load_f16(b[..., D:]) * b[..., SCALES:D].view(np.int8)
    return (step[..., None] * q.reshape(rows, n, 16, 16)).astype(np.float32).reshape(rows, -1)


@jitted
def store_code(dst, y, g, k, q):
    """Write code k of group g into a block that held zeros."""
    h, j = g // 8, g // 2 % 4
    at = y + 64 * h + 32 * (j & 1) + 16 * (g & 1) + k
    memory.store_u8(dst, at, memory.load_u8(dst, at) | (q & 15) << 4 * (j >> 1))
    at = y + QH + 32 * h + 16 * (g & 1) + k
    memory.store_u8(dst, at, memory.load_u8(dst, at) | q >> 4 << 2 * j)


@jitted
def fit_lanes(found):
    """As `_best_scales`, of 16 groups: scales to SCALE, what they were multiplied by for their codes to FACTORS."""
    top = search_lanes.largest(found, 16)
    best = scale = factor = vec.zero()
    for k in range(19):
        step = k if k == 0 else (k - 10 if k < 10 else k - 9)
        to_code = -(np.float32(32) + np.float32(0.1) * np.float32(step)) / top
        xq = qq = vec.zero()
        for i in range(16):
            v = vec.load(found, search_lanes.X + 64 * i)
            code = search_lanes.codes(v, to_code, np.float32(-32), np.float32(31))
            w = v * v
            xq, qq = xq + w * v * code, qq + w * code * code
        better = (qq > np.float32(0)) & (xq * xq > best * qq)
        fitted = xq / vec.select(qq > np.float32(0), qq, np.float32(1))
        scale, best = vec.select(better, fitted, scale), vec.select(better, fitted * xq, best)
        factor = vec.select(better, to_code, factor)
    tiny = vec.abs(top) < TINY
    vec.store(found, search_lanes.SCALE, vec.select(tiny, np.float32(0), scale))
    vec.store(found, FACTORS, vec.select(tiny, np.float32(0), factor))


@jitted
def code_lanes(found, d):
    """Codes + 32 of 16 groups to Q, for d and the scales in L; by the factors of `fit_lanes` where that is 0."""
    step, factor = vec.load(found, search_lanes.L) * d, vec.load(found, FACTORS)
    is_zero = step == np.float32(0)
    for i in range(16):
        v = vec.load(found, search_lanes.X + 64 * i)
        v = vec.select(is_zero, v * factor, v / step)
        q = search_lanes.codes(v, np.float32(1), np.float32(-32), np.float32(31)) + np.float32(32)
        q = vec.select(is_zero & (factor == np.float32(0)), np.float32(0), q)
        vec.store(found, search_lanes.Q + 64 * i, q)


@jitted
def block(found, src, x, dst, y):
    """Fit 256 f32, loaded into the buffer, without weights and write the block."""
    fit_lanes(found)
    for j in range(210):
        memory.store_u8(dst, y + j, 0)
    top = np.float32(0)
    for g in range(16):
        s = search_lanes.small(found, search_lanes.SCALE, g)
        top = s if abs(s) > abs(top) else top
    if abs(top) >= TINY:
        to_code = np.float32(-128) / top
        memory.store_f16(dst, y + D, np.float32(1) / to_code)
        scales = search_lanes.codes(vec.load(found, search_lanes.SCALE), to_code, np.float32(-128), np.float32(127))
        vec.store(found, search_lanes.L, scales)
        code_lanes(found, memory.load_f16(dst, y + D))
        for g in range(16):
            memory.store_i8(dst, y + SCALES + g, np.int64(search_lanes.small(found, search_lanes.L, g)))
            for k in range(16):
                store_code(dst, y, g, k, np.int64(search_lanes.small(found, search_lanes.Q + 64 * k, g)))


@jitted
def weighted_block(found, src, x, dst, y):
    """Fit 256 f32 with their weights, loaded into the buffer, and write the block."""
    d = fit_block(found)
    for j in range(208):
        memory.store_u8(dst, y + j, 0)
    memory.store_f16(dst, y + D, d)
    for g in range(16):
        scale = search_lanes.small(found, search_lanes.L, g)
        memory.store_i8(dst, y + SCALES + g, np.int64(scale))
        to_code = search_lanes.reciprocal(d * scale)
        for k in range(16):
            v = memory.load_f32(src, x + 64 * g + 4 * k)
            store_code(dst, y, g, k, np.int64(search_lanes.code(v, to_code, np.float32(-32), np.float32(31))) + 32)


quantize_row, _ = search_lanes.make_coders(16, NBYTES, block)
_, quantize_weighted = search_lanes.make_coders(SEARCH.size, NBYTES, weighted_block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x, D)
        for g in range(16):
            h, j, part = g // 8, g // 2 % 4, 16 * (g & 1)
            low = e.load_u8_as_i32(x, 64 * h + 32 * (j & 1) + part)
            high = e.load_u8_as_i32(x, QH + 32 * h + part)
            low = e.shr_i32(low, 4) if j >= 2 else e.and_i32(low, 15)
            high = e.shl_i32(e.and_i32(e.shr_i32(high, 2 * j), 3), 4)
            step = e.fmul(d, e.splat_i8_as_f32(x, SCALES + g))
            q = e.fsub(e.to_f32(e.or_(low, high)), e.f32_const(32.0))
            e.store(y, e.fmul(q, step), 64 * g)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, D)
    low, high, scales = rows.words(0) + rows.words(64), rows.words(QH), rows.words(144)[12:]
    for g in range(16):
        h, j, part = g // 8, g // 2 % 4, 4 * (g & 1)

        def four(i, h=h, j=j, k=part):
            """Weights 4 i to 4 i + 3 of the group: 6-bit values in the bytes of words."""
            x = e.and_i32(e.shr_i32(low[16 * h + 8 * (j & 1) + k + i], 4 * (j >> 1)), 0x0F0F0F0F)
            y = e.and_i32(e.shr_i32(high[8 * h + k + i], 2 * j), 0x03030303)
            return e.or_(x, e.shl_i32(y, 4))

        run, fourth = e.add(to, 32 + 416 * (g // 2)), four(3)
        rows.store_bytes(e.add(run, 4 * part), scales[g // 4], g % 4)
        for i in range(3):
            top = e.shl_i32(e.and_i32(e.shr_i32(fourth, 4 - 2 * i), 0x03030303), 6)
            e.store(run, e.or_(four(i), top), 32 + 64 * (3 * (g & 1) + i))


def runs(e, w, step):
    """Run `step` of a panel block."""
    d, w = e.load_f16(w), e.add(w, e.add(e.mul(step, 416), 32))
    scales = [e.fmul(d, e.to_f32(e.load_u8_as_i32(w, 16 * s, signed=True))) for s in range(2)]
    parts = []
    for s in range(2):
        x = [e.load_bytes(w, 32 + 64 * (3 * s + i)) for i in range(3)]
        tops = e.or_(e.and_(e.shr(x[0], 2), 0x30), e.and_(e.shr(x[1], 4), 0x0C))
        tops = e.or_(tops, e.and_(e.shr(x[2], 6), 3))
        parts.append(Part([*(e.and_(v, 63) for v in x), tops], scales[s], 5))
    return [parts]


PANEL = Panel(256, 3360, 63, pack_rows, runs, steps=8, parts=2, offset_shift=5)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, False, quantize_weighted))
