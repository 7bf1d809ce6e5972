"""Choosing a token, by compiled code: see `ggjit.llm.sampling`, and `ggjit.llm.inputs` for why.

One block of words holds what a sampler was made with, and where its scratch lies: a histogram, keys of the best tokens
in falling order (`ggjit.ops.sort`), and behind them what they weigh.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from ggjit import shared_state as shared
from ggjit.jit import jitted, lazy_module, words
from ggjit.raw_memory import at

memory: Any = lazy_module("ggjit.ops.lib.memory")
sort: Any = lazy_module("ggjit.ops.sort")

# Byte offsets of words; the last four are written.
N_VOCAB, TOP_K, SCRATCH, TEMPERATURE, TOP_P, MIN_P = range(0, 48, 8)
KEPT, KEYS, TOTAL = range(48, 72, 8)  # how many tokens may be chosen, where their keys lie, what they weigh together
TICKS = 72  # all the time that was spent here
BLOCK = struct.Struct("=3q3d2qdq")
# Bytes of the scratch: a histogram at its start, then for each of TOP_K tokens keys and what it weighs.
HISTOGRAM_NBYTES, KEY_NBYTES, WEIGHT_NBYTES = 8 * 256, 16, 8
DRAWS = 1 << 53  # a draw is a number below it


@jitted
def id_at(scratch, keys, i):  # type: ignore[no-untyped-def]
    """The id of the i-th best token."""
    return memory.load_i64(scratch, keys + 8 * i) & 0x7FFFFFFF


@jitted
def truncated(block, scratch, weights, n, total):  # type: ignore[no-untyped-def]
    """How many of n tokens top-p and min-p leave; `weights` are in falling order, the first is 1."""
    top_p, min_p, kept, above = memory.load_f64(block, TOP_P), memory.load_f64(block, MIN_P), n, 0
    if top_p < 1.0:
        part, kept = 0.0, 0
        while kept < n and part < top_p * total:
            part += memory.load_f64(scratch, weights + 8 * kept)
            kept += 1
    while above < kept and memory.load_f64(scratch, weights + 8 * above) >= min_p:
        above += 1
    return max(1, above)


@jitted
def weigh(logits, scratch, keys, weights, n, temperature):  # type: ignore[no-untyped-def]
    """Write exp((logit - best logit) / temperature) of the n best tokens; returns their sum."""
    best, total = np.float64(memory.load_f32(logits, 4 * id_at(scratch, keys, 0))), 0.0
    for i in range(n):
        logit = np.float64(memory.load_f32(logits, 4 * id_at(scratch, keys, i)))
        weight = math.exp((logit - best) / temperature)
        memory.store_f64(scratch, weights + 8 * i, weight)
        total += weight
    return total


@jitted
def chosen(block, logits, draw):  # type: ignore[no-untyped-def]
    """See `choose`."""
    words, values = at(block), at(logits)
    n, k, scratch = memory.load_i64(words, N_VOCAB), memory.load_i64(words, TOP_K), at(memory.load_i64(words, SCRATCH))
    keys, weights = np.int64(HISTOGRAM_NBYTES), HISTOGRAM_NBYTES + KEY_NBYTES * k
    keys = sort.best_keys(values, 0, 4, n, k, scratch, 0, keys)
    best = id_at(scratch, keys, 0)
    if not np.isfinite(memory.load_f32(values, 4 * best)):
        return ~best
    total = weigh(values, scratch, keys, weights, k, 1.0)
    kept = truncated(words, scratch, weights, k, total)
    total = weigh(values, scratch, keys, weights, kept, memory.load_f64(words, TEMPERATURE))
    part, i = memory.load_f64(scratch, weights), 0
    while i + 1 < kept and part <= draw * total / DRAWS:
        i += 1
        part += memory.load_f64(scratch, weights + 8 * i)
    memory.store_i64(words, KEPT, kept)
    memory.store_i64(words, KEYS, keys)
    memory.store_f64(words, TOTAL, total)
    return id_at(scratch, keys, i)


@words
def choose(block, logits, draw):  # type: ignore[no-untyped-def]
    """Choose a token; its id, or ~id of the best one if its logit is not finite."""
    start = shared.ticks()
    id = chosen(block, logits, draw)
    shared.store(block + TICKS, shared.load(block + TICKS) + shared.ticks() - start)
    return id
