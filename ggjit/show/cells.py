"""A KV cache as a drawing: which token each cell holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggjit.show.svg import GREY, INK, LEGEND_HEIGHT, PALE, Svg, box, colours_of, document, legend, line, text

if TYPE_CHECKING:
    from ggjit.llm.kv_cache import KVCache

_ACROSS, _CELL, _ROW, _LEFT = 32, 25, 22, 40


def cells(cache: KVCache, n: int | None = None, window: int = 0) -> Svg:
    """Draw the cells of a KV cache: the position of each one's token, in the colour of its sequence; free ones grey.

    Args:
        cache: keys and values.
        n: draw so many cells, by default all.
        window: cells that a graph sees, marked by a line at their end; 0: no line.

    Raises:
        TypeError: `cache` is none.
        ValueError: the cache has fewer cells.
    """
    if not hasattr(cache, "n_cells"):
        raise TypeError(f"show.cells: cache must be a KVCache, such as llm.context.cache, got {type(cache).__name__}")
    n = cache.n_cells if n is None else n
    if not 0 < n <= cache.n_cells:
        raise ValueError(f"show.cells: n must be 1 to {cache.n_cells}, the cells of the cache, got {n}")
    colours = colours_of(f"sequence {s}" for s in cache.seq.tolist() if s >= 0)
    parts = []
    for i, (pos, seq) in enumerate(zip(cache.pos[:n].tolist(), cache.seq[:n].tolist(), strict=True)):
        x, y = _LEFT + i % _ACROSS * _CELL, 8 + i // _ACROSS * _ROW
        if i % _ACROSS == 0:
            parts.append(text(_LEFT - 6, y + 15, str(i), 10, "end", GREY))
        parts.append(box(x, y, _CELL - 1, _ROW - 1, PALE if pos < 0 else colours[f"sequence {seq}"]))
        if pos >= 0:
            parts.append(text(x + _CELL / 2, y + 15, str(pos), 10, "middle"))
    if 0 < window <= n:
        end, y = _LEFT + ((window - 1) % _ACROSS + 1) * _CELL - 0.5, 8 + (window - 1) // _ACROSS * _ROW
        parts.append(line(end, y - 4, end, y + _ROW + 2, INK, 'stroke-width="2"'))
    height = 8 + -(-n // _ACROSS) * _ROW + 8
    parts.append(legend(_LEFT, height, colours))
    return document(_LEFT + min(n, _ACROSS) * _CELL + 12, height + (LEGEND_HEIGHT if colours else 0), parts)
