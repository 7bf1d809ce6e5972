"""Two 4-bit values a byte in the order of Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4.

Of 32 values, byte k of 16 has value k in its low and value k + 16 in its high half. In a panel these 16 bytes of 16
rows are 4 operands: k-groups 0 to 3 in the low, 4 to 7 in the high halves, so packing moves whole 32-bit words.
"""

from __future__ import annotations

import numpy as np

from ggjit.ops.quants.quant import Bytes


def join_nibbles(q: Bytes) -> Bytes:
    """32 values of 4 bits a block to 16 bytes."""
    return np.bitwise_or(q[..., :16], q[..., 16:] << 4, dtype=np.uint8)


def split_nibbles(b: Bytes) -> Bytes:
    """16 bytes a block to 32 values of 4 bits."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def load_nibbles(e, w, offset):
    """The 8 operands of a run from the 4 of a panel block."""
    q = [e.load_bytes(w, offset + 64 * g) for g in range(4)]
    return [e.and_(x, 15) for x in q] + [e.and_(e.shr(x, 4), 15) for x in q]


def nibble_operands(e, x, offset):
    """The low and the high halves of 16 bytes of a file block, as f32."""
    q = e.load_u8_as_i32(x, offset)
    return [e.to_f32(e.and_i32(q, 15)), e.to_f32(e.shr_i32(q, 4))]
