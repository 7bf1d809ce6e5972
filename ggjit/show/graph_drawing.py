"""A graph as a drawing: sources above what reads them.

Nodes lie in layers, each below its lowest source; within a layer they are sorted by where their sources lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from ggjit.op import NONE
from ggjit.show.memory_plan import check_plan
from ggjit.show.svg import LEGEND_HEIGHT, Svg, colours_of, document, legend
from ggjit.tensor import FLAG_INPUT, FLAG_OUTPUT

if TYPE_CHECKING:
    from ggjit.graph import Graph
    from ggjit.plan import Plan
    from ggjit.tensor import Tensor

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 132, 38, 16, 30
_MOST = 400


def graph(g: Graph, plan: Plan | None = None, backends: Mapping[Tensor, str] | None = None) -> Svg:
    """Draw a graph.

    Args:
        g: at most 400 tensors.
        plan: of this graph; arrows into nodes that it lets write in place are green and thick.
        backends: for some tensors the name of what computes them; each name has a colour.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: more tensors than can be drawn.
    """
    if not hasattr(g, "leafs"):  # a `GraphView` will do
        raise TypeError(f"show.graph: g must be a Graph, got {type(g).__name__}; gg.build makes one")
    if plan is not None:
        check_plan("show.graph", plan)
    tensors = [*g.leafs, *g.nodes]
    if len(tensors) > _MOST:
        raise ValueError(f"show.graph: a graph to draw must have at most {_MOST} tensors, got {len(tensors)}")
    at = _positions(tensors)
    taken = _taken_over(tensors, plan)
    colours = colours_of((backends or {}).values())
    parts = [_edge(at[s], at[t], taken.get(t) is s) for t in g.nodes for s in dict.fromkeys(t.src) if s is not None]
    parts += [_box(t, *at[t], colours.get((backends or {}).get(t, ""))) for t in tensors]
    width = max((x for x, _ in at.values()), default=0) + _WIDTH + _GAP_X
    height = max((y for _, y in at.values()), default=0) + _HEIGHT + 22
    parts.append(legend(12, height, colours))
    return document(width, height + (LEGEND_HEIGHT if colours else 0), parts)


def _positions(tensors: list[Tensor]) -> dict[Tensor, tuple[int, int]]:
    """Upper left corners. A leaf lies just above the first node that reads it."""
    layer: dict[Tensor, int] = {}
    for t in tensors:
        if t.op is not NONE:
            layer[t] = 1 + max((layer.get(s, 0) for s in t.src if s is not None), default=0)
    for t in tensors:
        if t.op is NONE:
            layer[t] = min((layer[r] for r in tensors if r.op is not NONE and t in r.src), default=1) - 1
    rows: dict[int, list[Tensor]] = {}
    for t in tensors:
        rows.setdefault(layer[t], []).append(t)
    widest = max(map(len, rows.values()), default=1)
    at: dict[Tensor, tuple[int, int]] = {}
    for y, k in enumerate(sorted(rows)):
        row = rows[k]

        def middle(t: Tensor) -> float:
            xs = [at[s][0] for s in t.src if s is not None and s in at]
            return sum(xs) / len(xs) if xs else float(widest * _WIDTH)

        row.sort(key=middle)
        start = (widest - len(row)) * (_WIDTH + _GAP_X) // 2 + _GAP_X
        for x, t in enumerate(row):
            at[t] = (start + x * (_WIDTH + _GAP_X), 12 + y * (_HEIGHT + _GAP_Y))
    return at


def _taken_over(tensors: list[Tensor], plan: Plan | None) -> dict[Tensor, Tensor]:
    """For each node that writes in place the source whose memory it takes."""
    taken: dict[Tensor, Tensor] = {}
    for i, t in enumerate(tensors):
        if t.op is not NONE and not t.op.view and t.view_src is not None:
            taken.update((t, s) for s in t.src if s is not None and t.view_src in (s, s.view_src))
        elif plan is not None and plan.placements[i].inplace >= 0:
            taken[t] = tensors[plan.placements[i].inplace]
    return taken


def _edge(a: tuple[int, int], b: tuple[int, int], in_place: bool) -> str:
    x0, y0, x1, y1 = a[0] + _WIDTH // 2, a[1] + _HEIGHT, b[0] + _WIDTH // 2, b[1]
    look = 'stroke="#2e8b57" stroke-width="3"' if in_place else 'stroke="#888"'
    bend = max((y1 - y0) // 2, 12)
    return (
        f'<path d="M{x0},{y0} C{x0},{y0 + bend} {x1},{y1 - bend} {x1},{y1}" fill="none" {look} marker-end="url(#a)"/>'
    )


def _box(t: Tensor, x: int, y: int, colour: str | None) -> str:
    fill = colour or ("#f4e7c5" if t.op is NONE else "#eef3f8")
    dashed = ' stroke-dasharray="5 3"' if t.op.view and t.op is not NONE else ""
    width = 2 if t.flags & (FLAG_INPUT | FLAG_OUTPUT) else 1
    what = t.type.name if t.op is NONE else t.op.name
    ne = "{" + ", ".join(map(str, t.ne[: t.n_dims])) + "}"
    name = t.name if len(t.name) <= 19 else t.name[:18] + "…"
    middle = x + _WIDTH // 2
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{fill}" stroke="#555" '
        f'stroke-width="{width}"{dashed}/><text x="{middle}" y="{y + 16}" font-size="12" text-anchor="middle">'
        f'{escape(name)}</text><text x="{middle}" y="{y + 31}" font-size="10" fill="#555" text-anchor="middle">'
        f"{escape(what)} {ne}</text>"
    )
