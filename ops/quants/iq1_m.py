"""IQ1_M: 256 weights in 56 bytes, 1.75 bits a weight; weight = d / 8 * (2 * scale + 1) * (8 * q +- 1), q of -1, 0, 1.

| bytes | content |
|---|---|
| 0..31 | low 8 bits of the indices of 32 octets |
| 32..47 | 4 bits an octet (the low half first): high 3 bits of the index, and 1 for - |
| 48..55 | 4 words of 16 bits: scales 4 k to 4 k + 3, one for each 16 weights, 3 bits each; 4 bits of d above them |

Panel block (1696 bytes): codes of 3 bits, see `ggjit.ops.quants.codebook`.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.codebook import (
    IQ1_VALUES,
    Codebook,
    bits,
    emit,
    halves,
    joined,
    load_int,
    register_codebook,
    table_of,
)  # fmt: skip
from ggjit.ops.quants.grid_search import Found, GridSearch, fit_blocks, geometric, joined_halves
from ggjit.ops.quants.grid_search_rows import ENTRIES, MARKS, make_quantize_weighted, scale, word
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, f16_bytes, from_bytes, to_blocks

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ1_M")
NBYTES, HIGH, SCALES = 56, 32, 48
assert (TYPE.blck_size, TYPE.type_size) == (256, 32 + 16 + 8)
THREES = np.array([0, 3, 6, 9], np.uint16)
SEARCH = GridSearch("IQ1_S", ((-7, 1, 9), (-9, -1, 7)), 0.125, 2, 8, False, 1, geometric(8.4, 20.8, 4), factors=1)


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    low, high = found.entries.astype(np.uint8), (found.entries >> 8).astype(np.uint8) | found.marks << 3
    d = np.ascontiguousarray(f16_bytes(found.d)).view("<u2") >> np.array([0, 4, 8, 12], np.uint16) & 15
    words = d << 12 | (found.k.reshape(-1, 4, 4).astype(np.uint16) << THREES).sum(2, dtype=np.uint16)
    return np.concatenate([low, joined_halves(high.astype(np.uint8)), words.astype("<u2").view(np.uint8)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    high = halves(b[..., HIGH:SCALES])
    code = grid("IQ1_S")[b[..., :HIGH] | (high & 7).astype(np.uint16) << 8] | (high >> 3 << 2)[..., None]
    word = np.ascontiguousarray(b[..., SCALES:]).view("<u2")
    d = (word >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(2, dtype=np.uint16).view(np.float16)
    scale = (word[..., None] >> THREES & 7).reshape(*b.shape[:2], 16).repeat(2, 2)
    step = d.astype(np.float32)[..., None] * np.float32(0.125) * (2 * scale + 1).astype(np.float32)
    return (step[..., None] * np.array(IQ1_VALUES, np.float32)[code]).reshape(len(b), -1)


def words(e, x, run, table):
    """The codes of a run."""
    out = []
    for o in range(4):
        high = bits(e, load_int(e, x, HIGH + 2 * run + o // 2), 4 * (o % 2), 4)
        index = joined(e, load_int(e, x, 4 * run + o), bits(e, high, 0, 3), 8)
        minus = e.b.mul(bits(e, high, 3, 1), emit.I32(0x04040404))
        out += [e.b.or_(w, minus) for w in table.words(index)]
    return out


def scales(e, x, run):
    """The scales of the halves of a run."""
    word = load_int(e, x, SCALES + run // 2 * 2, 2)
    return [bits(e, word, 6 * (run % 2) + 3 * half, 3) for half in range(2)]


def d_bits(e, x):
    """The bits of d."""
    out = emit.I32(0)
    for k in range(4):
        out = joined(e, out, bits(e, load_int(e, x, SCALES + 2 * k, 2), 12, 4), 4 * k)
    return e.b.trunc(out, emit.I16)


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    for o in range(0, 32, 2):
        high = 0
        for k in range(2):
            entry = word(found, ENTRIES, o + k)
            memory.store_u8(dst, y + o + k, entry & 255)
            high |= (entry >> 8 | word(found, MARKS, o + k) << 3) << 4 * k
        memory.store_u8(dst, y + HIGH + o // 2, high)
    memory.store_f16(dst, y + SCALES, d)
    bits_of_d = np.int64(memory.load_u16(dst, y + SCALES))
    for k in range(4):
        scales = (bits_of_d >> 4 * k & 15) << 12
        for g in range(4):
            scales |= scale(found, 4 * k + g) << 3 * g
        memory.store_u16(dst, y + SCALES + 2 * k, scales)


BOOK = Codebook("IQ1_M", NBYTES, table_of("IQ1_S"), 8, IQ1_VALUES, 0.125, words, scales, d_bits, 2)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store))
