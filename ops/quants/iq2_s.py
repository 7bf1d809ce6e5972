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
from ggjit.jit import jitted, lazy_module
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
from ggjit.ops.quants.grid_search import Found, GridSearch, fit_blocks, geometric, joined_halves
from ggjit.ops.quants.grid_search_rows import ENTRIES, MARKS, make_quantize_weighted, scale, word
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, f16_bytes, from_bytes, load_f16, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ2_S")
NBYTES, SIGNS, HIGH, SCALES = 82, 34, 66, 74
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 32 + 32 + 8 + 8)
SEARCH = GridSearch("IQ2_S", ((8, 25, 43),), 0.125, 2, 16, False, 0, geometric(28, 90, 8))


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    low, high = found.entries.astype(np.uint8), (found.entries >> 8).astype(np.uint8).reshape(-1, 8, 4)
    high = (high << np.array([0, 2, 4, 6], np.uint8)).sum(2, dtype=np.uint8)
    return np.concatenate([f16_bytes(found.d), low, found.marks, high, joined_halves(found.k)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


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


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for r in range(8):
        high = 0
        for o in range(4):
            entry = word(found, ENTRIES, 4 * r + o)
            memory.store_u8(dst, y + 2 + 4 * r + o, entry & 255)
            memory.store_u8(dst, y + SIGNS + 4 * r + o, word(found, MARKS, 4 * r + o))
            high |= entry >> 8 << 2 * o
        memory.store_u8(dst, y + HIGH + r, high)
        memory.store_u8(dst, y + SCALES + r, scale(found, 2 * r) | scale(found, 2 * r + 1) << 4)


BOOK = Codebook("IQ2_S", NBYTES, table_of("IQ2_S"), 8, IQ2_VALUES, 0.125, words, scales, load_d, 2)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store))
