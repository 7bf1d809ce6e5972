"""IQ2_S: 256 weights in 82 bytes, 2.5625 bits a weight; weight = d / 8 * (2 * scale + 1) * sign * value.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..33 | low 8 bits of the indices of 32 octets |
| 34..65 | signs, a byte an octet |
| 66..73 | high 2 bits of the indices: octet o of run r in bits 2 o and 2 o + 1 of byte 66 + r |
| 74..81 | 16 scales of 4 bits, one for each 16 weights: of run r in byte 74 + r, the first half's in the low bits |

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
    halves,
    joined,
    load_d,
    load_int,
    register_codebook,
    sign_of,
    table_of,
)  # fmt: skip
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, from_bytes, load_f16

TYPE = types.by_name("IQ2_S")
NBYTES, SIGNS, HIGH, SCALES = 82, 34, 66, 74
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 32 + 32 + 8 + 8)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    high = (b[..., HIGH:SCALES, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(*b.shape[:2], 32)
    index = b[..., 2:SIGNS] | high.astype(np.uint16) << 8
    value = np.array(IQ2_VALUES, np.float32)[grid("IQ2_S")[index]]
    scale = (2 * halves(b[..., SCALES:]) + 1).repeat(2, 2)
    step = load_f16(b[..., :2]) * np.float32(0.125) * scale.astype(np.float32)
    return (step[..., None] * value * sign_of(b[..., SIGNS:HIGH])).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    high, out = load_int(e, x, HIGH + run), []
    for o in range(4):
        index = joined(e, load_int(e, x, 2 + 4 * run + o), bits(e, high, 2 * o, 2), 8)
        out += add_signs(e, table.words(index), load_int(e, x, SIGNS + 4 * run + o), 2)
    return out


def scales(e, x, run):
    """The scales of the halves of a run."""
    v = load_int(e, x, SCALES + run)
    return [bits(e, v, 0, 4), bits(e, v, 4, 4)]


BOOK = Codebook("IQ2_S", NBYTES, table_of("IQ2_S"), 8, IQ2_VALUES, 0.125, words, scales, load_d, 2)
register_codebook(TYPE, BOOK, dequantize)
