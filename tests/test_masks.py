"""What a decode step writes before it computes: the mask against its definition, cells of the cache, inputs."""

import numpy as np
import pytest

from ggjit.llm import inputs
from ggjit.llm.batch import Batch
from ggjit.llm.kv_cache import KVCache
from ggjit.types import F32


def batch(pos, seq):
    n = len(pos)
    return Batch(np.arange(n, dtype=np.int32), np.int32(pos), np.int32(seq), np.zeros(n, np.bool_))


@pytest.mark.parametrize("window", [0, 1, 7, 300])
def test_mask(window):
    rng = np.random.default_rng(window)
    n_kv, n = 512, 5
    cache = KVCache(n_kv, F32, [4], [4])
    cache.pos[:], cache.seq[:] = (rng.integers(-1, high, n_kv) for high in (400, 3))
    cell_pos, cell_seq = cache.pos, cache.seq
    pos, seq = (rng.integers(0, high, n).astype(np.int32) for high in (400, 3))
    got = np.full((n + 1, n_kv), 7, np.uint16)
    where = np.array([n_kv, *[0] * 10, 1, got.ctypes.data, window])
    inputs.fill(where.ctypes.data, (tokens := batch(pos, seq)).address, cache.address)
    assert tokens.n_tokens == n
    seen = (cell_pos <= pos[:, None]) & (cell_seq == seq[:, None]) & (cell_pos >= 0)
    if window:
        seen &= cell_pos > pos[:, None] - window
    free = (cell_pos < 0) & (cell_seq >= 0)  # not what a cache holds: a free cell has no sequence
    assert np.array_equal(got[:n, ~free].view(np.float16), np.where(seen, 0, -np.inf)[:, ~free].astype(np.float16))
    assert (got[n] == 7).all(), "no more rows than asked for"


def test_inputs():
    cache, tokens = KVCache(256, F32, [4], [4]), batch([5, 6, 7, 8], [2] * 4)
    tokens.output[[1, 3]] = True
    cache.take(batch([0], [0]), 10)
    assert cache.take(tokens, 10) == 2
    ids, pos, out_ids, rows = (np.full(5, 99, np.int32) for _ in range(4))
    cells = np.full(5, 99)
    where = np.array([256, *(a.ctypes.data for a in (ids, pos, cells, out_ids, rows)), *[0] * 6])
    inputs.fill(where.ctypes.data, tokens.address, cache.address)
    assert ids.tolist() == rows.tolist() == [0, 1, 2, 3, 99] and pos.tolist() == [5, 6, 7, 8, 99]
    assert cells.tolist() == [1, 2, 3, 4, 99] and out_ids.tolist() == [1, 3, 99, 99, 99]
    assert cache.pos[:6].tolist() == [0, 5, 6, 7, 8, -1] and cache.seq[:6].tolist() == [0, 2, 2, 2, 2, -1]


def test_cells_in_use_are_counted():
    cache = KVCache(256, F32, [4], [4])
    for n, end in ((3, 3), (2, 5)):
        cells = cache.find_cells(n)
        assert cells.tolist() == list(range(end - n, end))
        assert cache.take(batch(range(n), [n] * n), 10) == 0
    assert cache.n_used == 5
    cache.remove(3, first=1)  # cells 1 and 2
    assert cache.n_used == 3 and cache.find_cells(3).tolist() == [1, 2, 5]
    cache.remove(2)
    assert cache.n_used == 1 and cache.find_cells(2).tolist() == [1, 2]
    last = batch(range(255), [0] * 255)
    cells = cache.find_cells(255)
    cache.take(last, 255)
    assert cache.n_used == 256 and cache.window(cells) == cache.n_seen == 256
    for take in (lambda: cache.find_cells(1), lambda: cache.take(batch([0], [0]), 10)):
        with pytest.raises(ValueError, match="got 1 with 0 free"):
            take()
    cache.give_back(last)
    assert cache.n_used == 1 and cache.window(np.arange(0)) == 256
    cache.clear()
    assert cache.n_used == 0 and cache.find_cells(1).tolist() == [0]


def test_cells_that_a_graph_must_see():
    cache = KVCache(1024, F32, [4], [4])
    cache.take(batch(range(256), [0] * 256), 256)
    assert cache.n_seen == 256
    cache.take(more := batch([256], [0]), 256)
    assert cache.n_seen == 512
    cache.give_back(more)
    assert cache.n_seen == 256 and cache.window(cache.find_cells(1)) == 512
    with pytest.raises(ValueError, match="token ids must be in"):
        cache.take(batch(range(3), [0] * 3), 2)
    assert cache.n_used == 256, "nothing is taken"
