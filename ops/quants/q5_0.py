"""Q5_0: 32 weights in 22 bytes, 5.5 bits a weight; weight = d * (q - 16).

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..5 | high bits: bit k of the word is the highest of weight k |
| 6..21 | low 4 bits: byte 6 + k has weight k in the low and weight k + 16 in the high half |

Panel block (352 bytes): 16 d f16 | operand of high bits, bit g for k-group g | 4 operands: k-group g in the low,
k-group g + 4 in the high halves.
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
    largest,
    load_f16,
    register,
    to_blocks,
)  # fmt: skip
from ggjit.ops.quants.search import Search, by_chunks, fit_signed

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("Q5_0")
SIZE, NBYTES = 32, 22
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 2 + 4 + 16)
SEARCH = Search(size=32, low=-16, high=15, limit=0, n_steps=29, rounds=0)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = (the value of largest magnitude) / -16, q = x / d + 16 rounded, at most 31.

    With an importance matrix, by the search of `ggjit.ops.quants.search`.
    """
    x = to_blocks(x, SIZE)
    if imatrix is not None:
        d, q = (v.reshape(*x.shape[:2], *v.shape[1:]) for v in by_chunks(fit_signed, SEARCH, x, imatrix))
        q = q + np.float32(16)
    else:
        d = largest(x) / np.float32(-16)
        with np.errstate(invalid="ignore", over="ignore"):
            q = np.clip(np.nan_to_num(x * inverse(d)[..., None] + np.float32(16.5)), 0, 31)
    return np.concatenate([f16_bytes(d), high_bits.join_five(q.astype(np.uint8))], 2).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    q = high_bits.split_five(b[..., 2:]).astype(np.int8) - np.int8(16)
    return (load_f16(b[..., :2]) * q).astype(np.float32).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize` without importance matrix."""
    for i in range(n // 32):
        x, y = src_offs + 128 * i, dst_offs + 22 * i
        top = np.float32(0)
        for j in range(32):
            v = memory.load_f32(src, x + 4 * j)
            top = v if abs(v) > abs(top) else top
        d = top / np.float32(-16)
        scale = np.float32(1) / d if d != 0 else np.float32(0)
        memory.store_f16(dst, y, d)
        memory.store_u32(dst, y + 2, 0)
        for j in range(16):
            low, high = memory.load_f32(src, x + 4 * j) * scale, memory.load_f32(src, x + 64 + 4 * j) * scale
            low = clamp(low + np.float32(16.5), np.float32(0), np.float32(31))
            high = clamp(high + np.float32(16.5), np.float32(0), np.float32(31))
            high_bits.store_five(dst, y + 2, j, np.int64(low), np.int64(high))


@jitted
def block(found, lane, dst, y):
    """Write the block of a lane, fitted with weights."""
    d = search_lanes.small(found, search_lanes.SCALE, lane)
    memory.store_f16(dst, y, d)
    to_code, low, high = search_lanes.reciprocal(d), np.float32(-16), np.float32(15)
    bits = 0
    for k in range(16):
        a, b = search_lanes.value(found, k, lane), search_lanes.value(found, k + 16, lane)
        p = np.int64(search_lanes.code(a, to_code, low, high)) + 16
        q = np.int64(search_lanes.code(b, to_code, low, high)) + 16
        memory.store_u8(dst, y + 6 + k, (p & 15) | (q & 15) << 4)
        bits |= p >> 4 << k | q >> 4 << k + 16
    memory.store_u32(dst, y + 2, bits)


fit = search_lanes.make_fit_signed(SEARCH)
quantize_weighted = search_lanes.make_weighted_coder(SIZE, NBYTES, fit, block)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x)
        for half, q in enumerate(high_bits.five_operands(e, x, 2)):
            e.store(y, e.fmul(e.fsub(q, e.f32_const(16.0)), d), 64 * half)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 32)


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, 0)
    high_bits.pack_five(e, rows, 2, e.add(to, 32))


def runs(e, w, step):
    """The run of a panel block."""
    d = e.load_f16(w, ordered=True)
    return [[Part(high_bits.load_five(e, w, 32), d, 4)]]


PANEL = Panel(32, 352, 31, pack_rows, runs, offset_shift=4)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL, False, quantize_weighted))
