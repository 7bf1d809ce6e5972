"""What a decode step writes before it computes, by compiled code: cells of the cache, inputs of the graph, masks.

A call of Python or NumPy costs 5 to 25 us here, not the fraction of one that it costs in a loop of its own: the weights
that have just streamed through the caches leave neither its code nor its data there. So what a step must look at or
write is done by few calls, which find it by the addresses in three blocks of int64 words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ggjit import shared_state as shared
from ggjit.jit import jitted, lazy_module, words
from ggjit.llm.masks import fill_mask
from ggjit.raw_memory import at, call_system

memory: Any = lazy_module("ggjit.ops.lib.memory")

# Byte offsets of words; names of arrays stand for their addresses.
N_TOKENS, TOKENS, POS, SEQ, OUTPUT = range(0, 40, 8)  # of a batch
N_CELLS, CELL_POS, CELL_SEQ, CELLS, TICKS = range(0, 40, 8)  # of a cache; the last is all the time spent here
N_KV, TO_TOKENS, TO_POS, TO_CELLS, TO_OUT_IDS, TO_ROW_IDS = range(0, 48, 8)  # of a graph's inputs
PREAD, FILE, TO_ROWS, ROW_NBYTES, FIRST_ROW, N_MASKS, MASKS = range(48, 104, 8)
NONE_FREE, BAD_ID, BAD_POS, BAD_SEQ = -1, -2, -3, -4


@jitted
def word(block, offset):  # type: ignore[no-untyped-def]
    """A word of a block."""
    return memory.load_i64(at(block), offset)


@jitted
def fault(batch, n_vocab):  # type: ignore[no-untyped-def]
    """0, or what is wrong with a batch."""
    tokens, pos, seq = at(word(batch, TOKENS)), at(word(batch, POS)), at(word(batch, SEQ))
    for i in range(0, 4 * word(batch, N_TOKENS), 4):
        if not 0 <= memory.load_i32(tokens, i) < n_vocab:
            return BAD_ID
        if memory.load_i32(pos, i) < 0:
            return BAD_POS
        if memory.load_i32(seq, i) < 0:
            return BAD_SEQ
    return 0


@jitted
def list_free(cache, n, start):  # type: ignore[no-untyped-def]
    """List the first n free cells from `start` on in the cache's array of cells; returns how many there are."""
    cell_pos, cells, found = at(word(cache, CELL_POS)), at(word(cache, CELLS)), 0
    for cell in range(start, word(cache, N_CELLS)):
        if found == n:
            break
        if memory.load_i32(cell_pos, 4 * cell) < 0:
            memory.store_i64(cells, 8 * found, cell)
            found += 1
    return found


@words
def check(batch, n_vocab):  # type: ignore[no-untyped-def]
    """See `fault`."""
    return fault(batch, n_vocab)


@words
def find(cache, n, start):  # type: ignore[no-untyped-def]
    """See `list_free`."""
    return list_free(cache, n, start)


@jitted
def taken(cache, batch, n_vocab, start):  # type: ignore[no-untyped-def]
    """See `take`."""
    wrong, n = fault(batch, n_vocab), word(batch, N_TOKENS)
    if wrong != 0:
        return wrong
    if list_free(cache, n, start) < n:
        return NONE_FREE
    cells, cell_pos, cell_seq = at(word(cache, CELLS)), at(word(cache, CELL_POS)), at(word(cache, CELL_SEQ))
    pos, seq, output = at(word(batch, POS)), at(word(batch, SEQ)), at(word(batch, OUTPUT))
    n_outputs, end = 0, 0
    for i in range(n):
        cell = memory.load_i64(cells, 8 * i)
        memory.store_i32(cell_pos, 4 * cell, memory.load_i32(pos, 4 * i))
        memory.store_i32(cell_seq, 4 * cell, memory.load_i32(seq, 4 * i))
        n_outputs += memory.load_u8(output, i) != 0
        end = cell + 1
    return end << 32 | n_outputs


@jitted
def filled(inputs, batch, cache):  # type: ignore[no-untyped-def]
    """See `fill`."""
    n, n_kv = word(batch, N_TOKENS), word(inputs, N_KV)
    tokens, pos, cells, output = (
        at(word(batch, TOKENS)),
        at(word(batch, POS)),
        at(word(cache, CELLS)),
        at(word(batch, OUTPUT)),
    )
    n_outputs, failed = 0, False
    for i in range(n):
        if word(inputs, TO_TOKENS) != 0:
            memory.store_i32(at(word(inputs, TO_TOKENS)), 4 * i, memory.load_i32(tokens, 4 * i))
        if word(inputs, TO_POS) != 0:
            memory.store_i32(at(word(inputs, TO_POS)), 4 * i, memory.load_i32(pos, 4 * i))
        if word(inputs, TO_CELLS) != 0:
            memory.store_i64(at(word(inputs, TO_CELLS)), 8 * i, memory.load_i64(cells, 8 * i))
        if word(inputs, TO_ROW_IDS) != 0:
            memory.store_i32(at(word(inputs, TO_ROW_IDS)), 4 * i, i)
        if word(inputs, TO_OUT_IDS) != 0 and memory.load_u8(output, i) != 0:
            memory.store_i32(at(word(inputs, TO_OUT_IDS)), 4 * n_outputs, i)
            n_outputs += 1
        if word(inputs, TO_ROWS) != 0 and not failed:
            row, id = word(inputs, ROW_NBYTES), np.int64(memory.load_i32(tokens, 4 * i))
            place, offset = word(inputs, TO_ROWS) + row * i, word(inputs, FIRST_ROW) + row * id
            pread = word(inputs, PREAD)
            failed = pread == 0 or call_system(pread, word(inputs, FILE), place, row, offset) != row
    for i in range(word(inputs, N_MASKS)):
        mask, window = word(inputs, MASKS + 16 * i), word(inputs, MASKS + 16 * i + 8)
        of_cells, of_tokens = (word(cache, CELL_POS), word(cache, CELL_SEQ)), (word(batch, POS), word(batch, SEQ))
        fill_mask(mask, n_kv, n, of_cells[0], of_cells[1], of_tokens[0], of_tokens[1], window)
    return int(failed)


@words
def take(cache, batch, n_vocab, start):  # type: ignore[no-untyped-def]
    """Give the tokens of a batch the first free cells from `start` on.

    Returns what is wrong, and nothing is taken; or (the last cell + 1) << 32 | tokens whose logits are wanted.
    """
    begin = shared.ticks()
    found = taken(cache, batch, n_vocab, start)
    shared.store(cache + TICKS, shared.load(cache + TICKS) + shared.ticks() - begin)
    return found


@words
def fill(inputs, batch, cache):  # type: ignore[no-untyped-def]
    """Write the inputs of a graph for a batch that has its cells; those without an address are not in the graph.

    Rows of a file are read by the C library's pread. Returns 1 if that cannot be, else 0.
    """
    begin = shared.ticks()
    failed = filled(inputs, batch, cache)
    shared.store(cache + TICKS, shared.load(cache + TICKS) + shared.ticks() - begin)
    return failed
