"""The mask that compiled code writes, against its definition."""

import numpy as np
import pytest

from ggjit.llm.kv_cache import KVCache
from ggjit.llm.masks import fill_mask
from ggjit.types import F32


@pytest.mark.parametrize("window", [0, 1, 7, 300])
def test_mask(window):
    rng = np.random.default_rng(window)
    n_kv, n = 512, 5
    cell_pos, cell_seq = (rng.integers(-1, high, n_kv).astype(np.int32) for high in (400, 3))
    pos, seq = (rng.integers(0, high, n).astype(np.int32) for high in (400, 3))
    got = np.full((n + 1, n_kv), 7, np.uint16)
    fill_mask(*(int(a.ctypes.data) if isinstance(a, np.ndarray) else a
                for a in (got, n_kv, n, cell_pos, cell_seq, pos, seq, window)))  # fmt: skip
    seen = (cell_pos <= pos[:, None]) & (cell_seq == seq[:, None]) & (cell_pos >= 0)
    if window:
        seen &= cell_pos > pos[:, None] - window
    free = (cell_pos < 0) & (cell_seq >= 0)  # not what a cache holds: a free cell has no sequence
    assert np.array_equal(got[:n, ~free].view(np.float16), np.where(seen, 0, -np.inf)[:, ~free].astype(np.float16))
    assert (got[n] == 7).all(), "no more rows than asked for"


def test_cells_in_use_are_counted():
    cache = KVCache(256, F32, [4], [4])
    for n, end in ((3, 3), (2, 5)):
        cells = cache.find_cells(n)
        assert cells.tolist() == list(range(end - n, end))
        cache.take(cells, np.arange(n, dtype=np.int32), np.full(n, n, np.int32))
    assert cache.n_used == 5
    cache.remove(3, first=1)  # cells 1 and 2
    assert cache.n_used == 3 and cache.find_cells(3).tolist() == [1, 2, 5]
    cache.remove(2)
    assert cache.n_used == 1 and cache.find_cells(2).tolist() == [1, 2]
    cache.take(cells := cache.find_cells(255), np.arange(255, dtype=np.int32), np.zeros(255, np.int32))
    assert cache.n_used == 256 and cache.window(cells) == 256
    with pytest.raises(ValueError, match="got 1 with 0 free"):
        cache.find_cells(1)
    cache.free(cells)
    assert cache.n_used == 1 and cache.window(np.arange(0)) == 256
    cache.clear()
    assert cache.n_used == 0 and cache.find_cells(1).tolist() == [0]
