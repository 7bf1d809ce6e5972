"""IQ2_XXS: 256 weights in 66 bytes, 2.0625 bits a weight; weight = d / 8 * (2 * scale + 1) * sign * value.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..65 | 8 runs of 32 weights, each 4 indices of octets (a byte each), then a word of 32 bits |

The word has 4 x 7 signs (the eighth makes their number even) in bits 0..27 and the scale in bits 28..31. Values are 8,
25 and 43. Panel block (1632 bytes): codes of 3 bits, see `ggjit.ops.quants.codebook`.
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
from ggjit.ops.quants.quant import Bytes, Floats, f16_bytes, from_bytes, load_f16, need_imatrix, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ2_XXS")
NBYTES = 66
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 8 * (4 + 4))
OCTETS = np.array([0, 7, 14, 21], np.uint32)
SEARCH = GridSearch("IQ2_XXS", ((8, 25, 43),), 0.125, 4, 16, True, 0, geometric(28, 90, 8))


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    runs = np.concatenate([found.entries.astype(np.uint8).reshape(-1, 8, 4), sign_words(found).reshape(-1, 8, 4)], 2)
    return np.concatenate([f16_bytes(found.d), runs.reshape(len(found.d), -1)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    need_imatrix(TYPE, imatrix)
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    runs = b[..., 2:].reshape(*b.shape[:2], 8, 8)
    word = np.ascontiguousarray(runs[..., 4:]).view("<u4")
    value = np.array(IQ2_VALUES, np.float32)[grid("IQ2_XXS")[runs[..., :4]]]
    signs = sign_of(with_parity((word >> OCTETS & 127).astype(np.uint8)))
    step = load_f16(b[..., :2]) * np.float32(0.125) * (2 * (word[..., 0] >> 28) + 1).astype(np.float32)
    return (step[..., None, None] * value * signs).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    word, out = load_int(e, x, 6 + 8 * run, 4), []
    for o in range(4):
        codes = table.words(load_int(e, x, 2 + 8 * run + o))
        out += add_signs(e, codes, eight_signs(e, bits(e, word, 7 * o, 7)), 2)
    return out


def scales(e, x, run):
    """The scale of a run."""
    return [bits(e, load_int(e, x, 6 + 8 * run, 4), 28, 4)]


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for r in range(8):
        for o in range(4):
            memory.store_u8(dst, y + 2 + 8 * r + o, word(found, ENTRIES, 4 * r + o))
        store_sign_word(found, r, dst, y + 6 + 8 * r)


BOOK = Codebook("IQ2_XXS", NBYTES, table_of("IQ2_XXS"), 8, IQ2_VALUES, 0.125, words, scales, load_d, 1)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store), needs_imatrix=True)
