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
from ggjit.jit import jitted, lazy_module
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
from ggjit.ops.quants.grid_search import Found, GridSearch, fit_blocks, geometric, joined_halves
from ggjit.ops.quants.grid_search_rows import ENTRIES, MARKS, make_quantize_weighted, scale, word
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, f16_bytes, from_bytes, load_f16, need_imatrix, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ2_XS")
NBYTES, SCALES = 74, 66
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 32 * 2 + 8)
SEARCH = GridSearch("IQ2_XS", ((8, 25, 43),), 0.125, 2, 16, True, 0, geometric(28, 90, 8))


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    octets = (found.entries | found.marks.astype(np.uint16) << 9).astype("<u2").view(np.uint8)
    return np.concatenate([f16_bytes(found.d), octets, joined_halves(found.k)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    need_imatrix(TYPE, imatrix)
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


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


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for o in range(32):
        memory.store_u16(dst, y + 2 + 2 * o, word(found, ENTRIES, o) | (word(found, MARKS, o) & 127) << 9)
    for r in range(8):
        memory.store_u8(dst, y + SCALES + r, scale(found, 2 * r) | scale(found, 2 * r + 1) << 4)


BOOK = Codebook("IQ2_XS", NBYTES, table_of("IQ2_XS"), 8, IQ2_VALUES, 0.125, words, scales, load_d, 2)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store), needs_imatrix=True)
