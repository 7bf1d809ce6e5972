"""The fifth bits of Q5_0 and Q5_1: 4 bytes a file block, bit k of the word for weight k.

In a panel block they are one operand: bit g of byte 4 r + j is that of row r, weight 4 g + j.
"""

from __future__ import annotations

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.nibbles import join_nibbles, load_nibbles, nibble_operands, split_nibbles
from ggjit.ops.quants.quant import Bytes

memory = lazy_module("ggjit.ops.lib.memory")


def join_five(q: Bytes) -> Bytes:
    """32 values of 5 bits a block to 4 bytes of high bits and 16 of nibbles."""
    return np.concatenate([np.packbits(q >> 4, axis=-1, bitorder="little"), join_nibbles(q & np.uint8(15))], -1)


def split_five(b: Bytes) -> Bytes:
    """20 bytes a block to 32 values of 5 bits."""
    high = np.unpackbits(b[..., :4], axis=-1, bitorder="little")
    return split_nibbles(b[..., 4:]) | high << np.uint8(4)


@jitted
def store_five(dst, at, k, low, high):
    """Write the values of weights k and k + 16 to the 20 bytes at `at`, whose high bits held zeros."""
    memory.store_u8(dst, at + 4 + k, low & 15 | (high & 15) << 4)
    bits = memory.load_u32(dst, at) | low >> 4 << k | high >> 4 << k + 16
    memory.store_u32(dst, at, bits)


def five_operands(e, x, offset):
    """The 32 values of a file block whose 20 bytes lie at an offset, as two f32 operands."""
    high, out = e.splat_i32(x, offset), []
    for half, q in enumerate(nibble_operands(e, x, offset + 4)):
        top = e.shl_i32(e.and_i32(e.shr_lanes(high, 16 * half), 1), 4)
        out.append(e.fadd(q, e.to_f32(top)))
    return out


def pack_five(e, rows, offset, to):
    """The 20 bytes at an offset of 16 rows to the 320 bytes of a panel block at `to`."""
    bits, *nibbles = rows.words(offset, 5)[:5]
    transposed = None
    for g in range(8):
        four = e.and_i32(e.shr_i32(bits, 4 * g), 15)
        spread = e.or_(e.or_(four, e.shl_i32(four, 7)), e.or_(e.shl_i32(four, 14), e.shl_i32(four, 21)))
        bit = e.shl_i32(e.and_i32(spread, 0x01010101), g)  # bit j of four in byte j
        transposed = bit if transposed is None else e.or_(transposed, bit)
    e.store(to, transposed)
    for g, x in enumerate(nibbles):
        e.store(to, x, 64 + 64 * g)


def load_five(e, w, offset):
    """The 8 operands of a run from the 5 of a panel block."""
    high, out = e.load_bytes(w, offset), []
    for g, x in enumerate(load_nibbles(e, w, offset + 64)):
        bit = e.shl(high, 4 - g) if g <= 4 else e.shr(high, g - 4)
        out.append(e.or_(x, e.and_(bit, 16)))
    return out
