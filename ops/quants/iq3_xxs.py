"""IQ3_XXS: 256 weights in 98 bytes, 3.0625 bits a weight; weight = d / 4 * (2 * scale + 1) * sign * value.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..65 | indices of 64 quads, a byte each |
| 66..97 | a word of 32 bits for each run: 4 x 7 signs of octets (the eighth makes their number even), then the scale |

Values are 4, 12, 20, 28, 36, 44, 52 and 62. Panel block (2144 bytes): codes of 4 bits, see `ggjit.ops.quants.codebook`.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.codebook import (
    Codebook,
    add_signs,
    bits,
    eight_signs,
    load_d,
    load_int,
    register_codebook,
    sign_of,
    table_of,
    with_parity,
)  # fmt: skip
from ggjit.ops.quants.grid_search import Found, GridSearch, fit_blocks, geometric, sign_words
from ggjit.ops.quants.grid_search_rows import ENTRIES, make_quantize_weighted, store_sign_word, word
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, f16_bytes, from_bytes, load_f16, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ3_XXS")
NBYTES, WORDS = 98, 66
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 64 + 8 * 4)
MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62)
VALUES = (*MAGNITUDES, *(-v for v in MAGNITUDES))
OCTETS = np.array([0, 7, 14, 21], np.uint32)
SEARCH = GridSearch("IQ3_XXS", (MAGNITUDES,), 0.25, 4, 16, True, 0, geometric(36, 90, 8))


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    return np.concatenate([f16_bytes(found.d), found.entries.astype(np.uint8), sign_words(found)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    word = np.ascontiguousarray(b[..., WORDS:]).view("<u4")[..., None]
    value = np.array(VALUES, np.float32)[grid("IQ3_XXS")[b[..., 2:WORDS]]]
    signs = sign_of(with_parity((word >> OCTETS & 127).astype(np.uint8)))
    step = load_f16(b[..., :2]) * np.float32(0.25) * (2 * (word[..., 0] >> 28) + 1).astype(np.float32)
    return (step[..., None, None] * value.reshape(signs.shape) * signs).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    word, out = load_int(e, x, WORDS + 4 * run, 4), []
    for o in range(4):
        codes = [table.words(load_int(e, x, 2 + 8 * run + 2 * o + k))[0] for k in range(2)]
        out += add_signs(e, codes, eight_signs(e, bits(e, word, 7 * o, 7)), 3)
    return out


def scales(e, x, run):
    """The scale of a run."""
    return [bits(e, load_int(e, x, WORDS + 4 * run, 4), 28, 4)]


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for g in range(64):
        memory.store_u8(dst, y + 2 + g, word(found, ENTRIES, g))
    for r in range(8):
        store_sign_word(found, r, dst, y + WORDS + 4 * r)


BOOK = Codebook("IQ3_XXS", NBYTES, table_of("IQ3_XXS"), 4, VALUES, 0.25, words, scales, load_d, 1)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store))
