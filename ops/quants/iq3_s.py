"""IQ3_S: 256 weights in 110 bytes, 3.4375 bits a weight; weight = d * (2 * scale + 1) * sign * value.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..65 | low 8 bits of the indices of 64 quads |
| 66..73 | high bits of the indices: quad g of run r in bit g of byte 66 + r |
| 74..105 | signs, a byte for 8 weights |
| 106..109 | scales of 4 bits: of run r in byte 106 + r / 2, the low half for even r |

Values are the odd numbers 1 to 15. Panel block (2144 bytes): codes of 4 bits, see `ggjit.ops.quants.codebook`.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.codebook import (
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
TYPE = types.by_name("IQ3_S")
NBYTES, HIGH, SIGNS, SCALES = 110, 66, 74, 106
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 64 + 8 + 32 + 4)
VALUES = (*range(1, 16, 2), *range(-1, -16, -2))
SEARCH = GridSearch("IQ3_S", (VALUES[:8],), 1.0, 4, 16, False, 0, geometric(9, 22, 8))


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    low, high = found.entries.astype(np.uint8), np.packbits(found.entries >> 8, axis=1, bitorder="little")
    return np.concatenate([f16_bytes(found.d), low, high, found.marks, joined_halves(found.k)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    index = b[..., 2:HIGH] | np.unpackbits(b[..., HIGH:SIGNS], axis=2, bitorder="little").astype(np.uint16) << 8
    value = np.array(VALUES, np.float32)[grid("IQ3_S")[index]].reshape(*b.shape[:2], 8, 32)
    signs = sign_of(b[..., SIGNS:SCALES]).reshape(value.shape)
    step = load_f16(b[..., :2]) * (2 * halves(b[..., SCALES:]) + 1).astype(np.float32)
    return (step[..., None] * value * signs).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    high, out = load_int(e, x, HIGH + run), []
    for o in range(4):
        codes = []
        for g in (2 * o, 2 * o + 1):
            index = joined(e, load_int(e, x, 2 + 8 * run + g), bits(e, high, g, 1), 8)
            codes.append(table.words(index)[0])
        out += add_signs(e, codes, load_int(e, x, SIGNS + 4 * run + o), 3)
    return out


def scales(e, x, run):
    """The scale of a run."""
    return [bits(e, load_int(e, x, SCALES + run // 2), 4 * (run % 2), 4)]


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for r in range(8):
        high = 0
        for g in range(8):
            entry = word(found, ENTRIES, 8 * r + g)
            memory.store_u8(dst, y + 2 + 8 * r + g, entry & 255)
            high |= entry >> 8 << g
        memory.store_u8(dst, y + HIGH + r, high)
    for o in range(32):
        memory.store_u8(dst, y + SIGNS + o, word(found, MARKS, o))
    for r in range(4):
        memory.store_u8(dst, y + SCALES + r, scale(found, 2 * r) | scale(found, 2 * r + 1) << 4)


BOOK = Codebook("IQ3_S", NBYTES, table_of("IQ3_S"), 4, VALUES, 1.0, words, scales, load_d, 1)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store))
