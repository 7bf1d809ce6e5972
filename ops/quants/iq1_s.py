"""IQ1_S: 256 weights in 50 bytes, 1.5625 bits a weight; weight = d / 8 * (2 * scale + 1) * (8 * q +- 1), q of -1, 0, 1.

| bytes | content |
|---|---|
| 0..1 | d, f16 |
| 2..33 | low 8 bits of the indices of 32 octets |
| 34..49 | 16 bits a run: high 3 bits of the indices of its 4 octets, scale in bits 12..14, 1 for - in bit 15 |

Panel block (1120 bytes): 16 d f16 | 2 halves of (2 planes of scale and sign, 4 bits each: run 4 h + 2 p in the low, the
next one in the high bits of plane p; 8 operands of q + 1, see `ggjit.ops.quants.two_bits`). The shift of +-1/8 and the
offset of q make the minimum.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.codebook import (
    IQ1_VALUES,
    Codebook,
    Table,
    bits,
    emit,
    joined,
    load_d,
    load_int,
    register_codebook,
    table_of,
)  # fmt: skip
from ggjit.ops.quants.grid_search import Found, GridSearch, fit_blocks, geometric
from ggjit.ops.quants.grid_search_rows import ENTRIES, MARKS, make_quantize_weighted, scale, word
from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats, Panel, f16_bytes, from_bytes, load_f16, need_imatrix, to_blocks
from ggjit.ops.quants.two_bits import field_runs

memory = lazy_module("ggjit.ops.lib.memory")
TYPE = types.by_name("IQ1_S")
NBYTES, HIGH = 50, 34
assert (TYPE.blck_size, TYPE.type_size) == (256, 2 + 32 + 16)
TABLE = table_of("IQ1_S")
SEARCH = GridSearch("IQ1_S", ((-7, 1, 9), (-9, -1, 7)), 0.125, 4, 8, False, 4, geometric(8.4, 20.8, 4), factors=1)


def join(found: Found) -> Bytes:
    """Bytes of blocks."""
    low, high = found.entries.astype(np.uint8), (found.entries >> 8).reshape(-1, 8, 4)
    high = (high << np.array([0, 3, 6, 9], np.uint16)).sum(2, dtype=np.uint16)
    high |= (found.k.astype(np.uint16) | found.marks[:, ::4].astype(np.uint16) << 3) << 12
    return np.concatenate([f16_bytes(found.d), low, high.astype("<u2").view(np.uint8)], 1)


def quantize(x: Floats, imatrix: Floats | None = None) -> Bytes:
    """Quantize rows, by the search of `ggjit.ops.quants.grid_search`."""
    need_imatrix(TYPE, imatrix)
    return join(fit_blocks(SEARCH, to_blocks(x, 256), imatrix)).reshape(len(x), -1)


def dequantize(b: Bytes) -> Floats:
    """Values of rows of blocks."""
    b = from_bytes(b, NBYTES)
    word = np.ascontiguousarray(b[..., HIGH:]).view("<u2")[..., None]
    index = b[..., 2:HIGH].reshape(*b.shape[:2], 8, 4) | (word >> np.array([0, 3, 6, 9], np.uint16) & 7) << 8
    code = grid("IQ1_S")[index] | (word >> 15 << 2).astype(np.uint8)[..., None]
    step = load_f16(b[..., :2]) * np.float32(0.125) * (2 * (word[..., 0] >> 12 & 7) + 1).astype(np.float32)
    return (step[..., None, None] * np.array(IQ1_VALUES, np.float32)[code]).reshape(len(b), -1)


def points(e, x, run, table):
    """The values q + 1 of a run, four to a word."""
    word, out = load_int(e, x, HIGH + 2 * run, 2), []
    for o in range(4):
        out += table.words(joined(e, load_int(e, x, 2 + 4 * run + o), bits(e, word, 3 * o, 3), 8))
    return out


def words(e, x, run, table):
    """The codes of a run."""
    minus = e.b.mul(bits(e, load_int(e, x, HIGH + 2 * run, 2), 15, 1), emit.I32(0x04040404))
    return [e.b.or_(w, minus) for w in points(e, x, run, table)]


def scales(e, x, run):
    """The scale of a run."""
    return [bits(e, load_int(e, x, HIGH + 2 * run, 2), 12, 3)]


@emitted("x to row")
def pack(e, x, to, row):
    """The block at x to a row's places in the panel block at `to`."""
    table = Table(e, TABLE, 8)
    e.store_value(e.add(to, e.mul(row, 2)), 0, load_d(e, x))
    of_row, of_word = e.add(to, row), e.add(to, e.mul(row, 4))
    for half in range(2):
        at = 32 + 544 * half
        tops = [bits(e, load_int(e, x, HIGH + 2 * (4 * half + r), 2), 12, 4) for r in range(4)]
        for plane in range(2):
            pair = joined(e, tops[2 * plane], tops[2 * plane + 1], 4)
            e.store_value(of_row, at + 16 * plane, e.b.trunc(pair, emit.I8))
        operands = points(e, x, 4 * half, table)
        for f in range(1, 4):
            more = points(e, x, 4 * half + f, table)
            operands = [joined(e, q, w, 2 * f) for q, w in zip(operands, more, strict=True)]
        for g, operand in enumerate(operands):
            e.store_value(of_word, at + 32 + 64 * g, operand)


@jitted
def pack_block(src, src_offs, dst, dst_offs, row):
    """A block of a row to its places in a panel block."""
    pack(memory.address(src) + src_offs, memory.address(dst) + dst_offs, row)


def runs(e, w, step):
    """The 4 runs of half `step` of a panel block."""
    d, w = e.load_f16(w), e.add(w, e.add(e.mul(step, 544), 32))
    factors, minimums = [], []
    for plane in range(2):
        x = e.load_u8_as_i32(w, 16 * plane)
        for shift in (0, 4):
            scale = e.or_(e.and_i32(e.shr_i32(x, shift - 1) if shift else e.shl_i32(x, 1), 14), e.i32_const(1))
            scale = e.fmul(d, e.to_f32(scale))
            # -1 + 1/8 or -1 - 1/8
            shifted = e.fma(e.to_f32(e.and_i32(e.shr_i32(x, shift + 3), 1)), e.f32_const(-0.25), e.f32_const(-0.875))
            factors.append(scale)
            minimums.append(e.fmul(scale, shifted))
    return field_runs(e, w, 32, factors, None, minimums)


@jitted
def store(found, d, dst, y):
    """What was found to a block."""
    memory.store_f16(dst, y, d)
    for r in range(8):
        high = (scale(found, r) | word(found, MARKS, 4 * r) << 3) << 12
        for o in range(4):
            entry = word(found, ENTRIES, 4 * r + o)
            memory.store_u8(dst, y + 2 + 4 * r + o, entry & 255)
            high |= entry >> 8 << 3 * o
        memory.store_u16(dst, y + HIGH + 2 * r, high)


BOOK = Codebook("IQ1_S", NBYTES, TABLE, 8, IQ1_VALUES, 0.125, words, scales, load_d, 1)
PANEL = Panel(256, 1120, 3, pack_block, runs, steps=2, minimum=True)
register_codebook(TYPE, BOOK, quantize, dequantize, make_quantize_weighted(SEARCH, NBYTES, store), PANEL, True)
