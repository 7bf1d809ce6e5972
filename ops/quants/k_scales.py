"""The 6-bit scales and minimums of Q4_K and Q5_K: 8 of each in 12 bytes of a file block, 192 bytes of a panel block.

| file byte | bits 0..5 | bits 6..7 | | file byte | bits 0..3 | bits 4..7 |
|---|---|---|---|---|---|---|
| i < 4 | scale i | top bits of scale i + 4 | | 8 + i | low bits of scale i + 4 | low bits of minimum i + 4 |
| 4 + i | minimum i | top bits of minimum i + 4 | | | | |

In a panel block: 8 planes (16 rows each) of low 4 bits of scale and of minimum, then 4 planes of the top two bits of
both, plane i for group i in the low and group i + 4 in the high half.
"""

from __future__ import annotations

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.quant import Bytes

memory = lazy_module("ggjit.ops.lib.memory")


def split_scales(b: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes a block to 8 scales and 8 minimums."""
    first, second, low = b[..., :4], b[..., 4:8], b[..., 8:12]
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], -1)
    return scales, np.concatenate([second & 63, low >> 4 | second >> 6 << 4], -1)


def join_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """8 scales and 8 minimums a block to 12 bytes."""
    (s0, s1), (m0, m1) = ((v[..., :4], v[..., 4:]) for v in (scales, minimums))
    return np.concatenate([s0 | s1 >> 4 << 6, m0 | m1 >> 4 << 6, s1 & 15 | (m1 & 15) << 4], -1).astype(np.uint8)


@jitted
def byte(src, at):
    """A byte as int64: with constants, unsigned 64-bit numbers would become floats."""
    return np.int64(memory.load_u8(src, at))


@jitted
def store_scale(dst, at, i, scale, minimum):
    """Write scale and minimum i of the 12 bytes at `at`; for i in ascending order."""
    if i < 4:
        memory.store_u8(dst, at + i, scale)
        memory.store_u8(dst, at + 4 + i, minimum)
    else:
        memory.store_u8(dst, at + i - 4, byte(dst, at + i - 4) | scale >> 4 << 6)
        memory.store_u8(dst, at + i, byte(dst, at + i) | minimum >> 4 << 6)
        memory.store_u8(dst, at + 4 + i, scale & 15 | (minimum & 15) << 4)


def pack_scales(e, rows, words, to):
    """The 12 bytes of scales, three words of 16 rows, to the 192 bytes of a panel block at `to`."""
    a, b, c = words

    def high(x, n=6):
        return e.and_i32(e.shr_i32(x, n), 0x03030303)

    def halves(x, y):
        return e.or_(e.and_i32(x, 0x0F0F0F0F), e.shl_i32(e.and_i32(y, 0x0F0F0F0F), 4))

    first = halves(a, b)  # low bits of scales and minimums 0 to 3; c has those of 4 to 7
    tops = e.or_(high(a, 4), e.shl_i32(high(b, 4), 2))
    tops = e.or_(tops, e.or_(e.shl_i32(high(a), 4), e.shl_i32(high(b), 6)))
    for i in range(4):
        rows.store_bytes(e.add(to, 16 * i), first, i)
        rows.store_bytes(e.add(to, 64 + 16 * i), c, i)
        rows.store_bytes(e.add(to, 128 + 16 * i), tops, i)


def load_scales(e, w, offset):
    """Scales and minimums of a panel block as bytes: two operands each, of 4 planes."""
    low = [e.load_bytes(w, offset), e.load_bytes(w, offset + 64)]
    tops = e.load_bytes(w, offset + 128)
    tops = [tops, e.shr(tops, 4)]
    scales = [e.or_(e.and_(x, 15), e.and_(e.shl(t, 4), 0x30)) for x, t in zip(low, tops, strict=True)]
    minimums = [e.or_(e.and_(e.shr(x, 4), 15), e.and_(e.shl(t, 2), 0x30)) for x, t in zip(low, tops, strict=True)]
    return scales, minimums


def plane(e, x, i):
    """Plane i of `load_scales` as f32, one lane for each row."""
    return e.to_f32(e.plane_as_i32(x[i // 4], i % 4))


def splat_scale(e, x, offset, i):
    """Scale and minimum i of a file block at address x, whose 12 bytes lie at an offset, as f32 in 16 lanes."""
    if i < 4:
        return [e.to_f32(e.and_i32(e.splat_u8(x, offset + k + i), 63)) for k in (0, 4)]
    low, out = e.splat_u8(x, offset + 4 + i), []
    for k in (0, 4):
        top = e.and_i32(e.shr_i32(e.splat_u8(x, offset + k + i - 4), 2), 0x30)
        out.append(e.to_f32(e.or_(e.shr_i32(low, k), top) if k else e.or_(e.and_i32(low, 15), top)))
    return out
