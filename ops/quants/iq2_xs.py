"""IQ2_XS: 256 weights in 74 bytes, 2.3125 bits a weight; weight = d / 8 * (2 * scale + 1) * sign * value.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..65 | 32 octets, 16 bits each: index in bits 0..8, 7 signs in bits 9..15 (the eighth makes their number even) |
| 66..73 | 16 scales of 4 bits, one for each 16 weights: of run r in byte 66 + r, the first half's in the low bits |

Values are 8, 25 and 43. Panel block (1696 bytes): codes of 3 bits, see `ggjit.ops.quants.codebook`.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.ops.quants.codebook import (
    IQ2_VALUES,
    Codebook,
    add_signs,
    bits,
    eight_signs,
    halves,
    load_d,
    load_int,
    register_codebook,
    sign_of,
    table_of,
    with_parity,
)  # fmt: skip
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, from_bytes, load_f16

TYPE = types.by_name("IQ2_XS")
NBYTES, SCALES = 74, 66
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 32 * 2 + 8)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    octets = np.ascontiguousarray(b[..., 2:SCALES]).view("<u2")
    value = np.array(IQ2_VALUES, np.float32)[grid("IQ2_XS")[octets & 511]]
    signs = sign_of(with_parity((octets >> 9).astype(np.uint8)))
    scale = (2 * halves(b[..., SCALES:]) + 1).repeat(2, 2)
    step = load_f16(b[..., :2]) * np.float32(0.125) * scale.astype(np.float32)
    return (step[..., None] * value * signs).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    out = []
    for o in range(4):
        v = load_int(e, x, 2 + 8 * run + 2 * o, 2)
        out += add_signs(e, table.words(bits(e, v, 0, 9)), eight_signs(e, bits(e, v, 9, 7)), 2)
    return out


def scales(e, x, run):
    """The scales of the halves of a run."""
    v = load_int(e, x, SCALES + run)
    return [bits(e, v, 0, 4), bits(e, v, 4, 4)]


BOOK = Codebook("IQ2_XS", NBYTES, table_of("IQ2_XS"), 8, IQ2_VALUES, 0.125, words, scales, load_d, 2)
register_codebook(TYPE, BOOK, dequantize)
