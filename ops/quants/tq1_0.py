"""TQ1_0: 256 weights in 54 bytes, 1.6875 bits a weight; weight = d * (q - 1).

| bytes | content |
|---|---|
| 0..31 | weights 0..159: byte k has weights k + 32 f as digits f = 0..4 |
| 32..47 | weights 160..239: byte 32 + k has weights 160 + k + 16 f as digits 0..4 |
| 48..51 | weights 240..255: byte 48 + k has weights 240 + k + 4 f as digits 0..3 |
| 52..53 | d, f16 |

Digits q of base 3, the first one the highest, make a number of 0..242 (the last digit of four is 0), and a byte is
256/243 of it, rounded up: so digit f is the integer part of 3 * (byte * 3^f mod 256) / 256.

Quantizing rounds x / max |x| to -1, 0 or 1. Panel block: see `ggjit.ops.quants.ternary`.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants import ternary
from ggjit.ops.quants.quant import Bytes, Floats, Panel, Quant, f16_bytes, from_bytes, load_f16, register
from ggjit.ops.quants.ternary import scale_and_inverse, ternary_code

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("TQ1_0")
SIZE, NBYTES, D = 256, 54, 52
assert (TYPE.blck_size, TYPE.type_size) == (SIZE, 32 + 16 + 4 + 2)
PLANES = ((0, 0, 32, 5), (160, 32, 16, 5), (240, 48, 4, 4))  # first weight, first byte, bytes, digits


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows: d = max |x|, q = x / d rounded, plus 1."""
    d, q = ternary.ternary(x)
    parts = []
    for first, _, width, digits in PLANES:
        plane = q[..., first : first + width * digits].reshape(*d.shape, digits, width).astype(np.int64)
        number = (plane * 3 ** np.arange(4, 4 - digits, -1)[:, None]).sum(2)
        parts.append(((number * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate([*parts, f16_bytes(d)], 2).reshape(len(d), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    parts = []
    for _, at, width, digits in PLANES:
        rest = b[..., None, at : at + width] * (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        parts.append((rest.astype(np.uint16) * 3 >> 8).reshape(*b.shape[:2], -1))
    q = np.concatenate(parts, 2).astype(np.float32) - 1
    return (load_f16(b[..., D:]) * q).reshape(len(b), -1)


@jitted
def quantize_row(src, src_offs, dst, dst_offs, n):
    """Quantize n f32 to blocks, as `quantize`."""
    for i in range(n // 256):
        x, y = src_offs + 1024 * i, dst_offs + 54 * i
        d, scale = scale_and_inverse(src, x, 256)
        memory.store_f16(dst, y + D, d)
        for first, at, width, digits in PLANES:
            for j in range(width):
                number = 0
                for f in range(5):
                    number *= 3
                    if f < digits:
                        number += ternary_code(memory.load_f32(src, x + 4 * (first + width * f + j)) * scale)
                memory.store_u8(dst, y + at + j, (number * 256 + 242) // 243)


def digit(e, q, f):
    """Digit f of bytes given as i32."""
    if f:
        q = e.and_i32(e.map(e.b.mul, q, e.i32_const(3**f)), 255)
    return e.shr_i32(e.map(e.b.mul, q, e.i32_const(3)), 8)


@emitted("src dst n")
def dequantize_blocks(e, src, dst, n):
    """Values of n blocks. The last plane's 4 bytes are repeated, one digit each time."""

    def body(i):
        x, y = e.add(src, e.mul(i, NBYTES)), e.add(dst, e.mul(i, 4 * SIZE))
        d = e.splat_f16(x, D)
        for part, (first, width) in enumerate(((0, 32), (16, 32), (160, 16))):
            q = e.load_u8_as_i32(x, 16 * part)
            for f in range(5):
                value = e.fmul(e.fsub(e.to_f32(digit(e, q, f)), e.f32_const(1.0)), d)
                e.store(y, value, 4 * (first + width * f))
        q = e.map(e.b.lshr, e.splat_i32(x, 48), e.i32_lanes([8 * (lane % 4) for lane in range(16)]))
        q = e.map(e.b.mul, e.and_i32(q, 255), e.i32_lanes([3 ** (lane // 4) for lane in range(16)]))
        e.store(y, e.fmul(e.fsub(e.to_f32(digit(e, e.and_i32(q, 255), 0)), e.f32_const(1.0)), d), 4 * 240)
        return []

    e.loop(n, [], body)


@jitted
def dequantize_row(src, src_offs, dst, dst_offs, n):
    """Values of blocks, n f32."""
    dequantize_blocks(memory.address(src) + src_offs, memory.address(dst) + dst_offs, n // 256)


def four_digits(e, word, f):
    """Digit f of the four bytes of words."""
    out = None
    for shift in (0, 8):
        x = e.and_i32(e.shr_i32(word, shift), 0x00FF00FF)
        x = e.and_i32(e.map(e.b.mul, x, e.i32_const(3**f)), 0x00FF00FF)
        x = e.and_i32(e.shr_i32(e.map(e.b.mul, x, e.i32_const(3)), 8), 0x00030003)
        out = x if out is None else e.or_(out, e.shl_i32(x, shift))
    return out


def pack_rows(e, rows, to):
    """A block of 16 rows to a panel block."""
    rows.store_halves(to, D)
    words = rows.words(0, 13)
    places = [(8 * f + j, j, f) for f in range(5) for j in range(8)]  # weight / 4, word, digit
    places += [(40 + 4 * f + j, 8 + j, f) for f in range(5) for j in range(4)]
    places += [(60 + f, 12, f) for f in range(4)]
    codes = {i: four_digits(e, words[j], f) for i, j, f in places}
    for h in range(2):
        for v in range(8):
            fields = [e.shl_i32(codes[32 * h + 8 * f + v], 2 * f) for f in range(4)]
            e.store(to, functools.reduce(e.or_, fields), 32 + 512 * h + 64 * v)


PANEL = Panel(256, ternary.NBYTES, 3, pack_rows, ternary.runs, steps=2, offset_shift=0)
register(Quant(TYPE, quantize, dequantize, quantize_row, dequantize_row, PANEL))
