"""What the scheduler decided, as drawings: its passes one by one, and the splits with their copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggjit.show.svg import GREY, INK, LEGEND_HEIGHT, PALE, PALETTE, Svg, box, document, legend, line, text

if TYPE_CHECKING:
    from ggjit.sched import SchedGraph
    from ggjit.tensor import Tensor

_PASSES = {
    "assign_by_data": "1 by data",
    "expand_assignments": "2 neighbours",
    "upgrade_assignments": "3 upgrade",
    "assign_sources": "4 sources",
}
_ROW, _OP, _NAME, _CELL, _SPLIT, _HEAD = 20, 100, 220, 86, 280, 30
_MOST = 200
_LANE, _GAP, _LANE_WIDTH, _LEAST, _MARGIN = 40, 46, 700, 70, 80


def _name(t: Tensor, longest: int = 20) -> str:
    return t.name if len(t.name) <= longest else t.name[: longest - 1] + "…"


def _colours(names: list[str]) -> dict[str, str]:
    """The CPU, which comes last, has the same colour in all drawings."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(reversed(names))}


def _check_run(where: str, run: SchedGraph) -> None:
    if not hasattr(run, "assignments"):
        text = f"{where}: run must be what `Scheduler.split_graph` or `alloc_graph` gives, got {type(run).__name__}"
        raise TypeError(f"{text}; `Scheduler.current` is the last one, None before the first")


def passes(run: SchedGraph, views: bool = False) -> Svg:
    """Draw what each of the five passes did with each node.

    A cell has the colour of the backend that the node has after the pass; where the pass gave it, with the rule
    (`ggjit.sched_passes`). A last column shows the splits, why each begins, and what is copied for it.

    Args:
        run: what `Scheduler.split_graph` or `alloc_graph` gives.
        views: show views too, which compute nothing.

    Raises:
        TypeError: `run` is something else.
        ValueError: more than 200 nodes to show.
    """
    _check_run("show.passes", run)
    names = [b.name for b in run.assignments.backends]
    nodes = [t for t in run.graph.nodes if views or not t.op.view]
    if len(nodes) > _MOST:
        raise ValueError(f"show.passes: at most {_MOST} nodes can be drawn, got {len(nodes)}")
    colours, rows = _colours(names), {t: _HEAD + _ROW * i for i, t in enumerate(nodes)}
    parts = [text(6, 20, "node"), text(_NAME + 4 * _CELL + 8, 20, "5 splits")]
    for k, title in enumerate(_PASSES.values()):
        parts.append(text(_NAME + _CELL * (k + 0.5), 20, title, anchor="middle"))
    for t, y in rows.items():
        parts.append(text(6, y + 14, t.op.name, 11, fill=GREY) + text(_OP, y + 14, _name(t, 16)))
        parts += _cells(run, t, y, [colours[n] for n in names])
    parts += _split_column(run, rows, [colours[n] for n in names])
    height = _HEAD + _ROW * len(nodes) + 10
    parts.append(legend(6, height, colours))
    return document(_NAME + 4 * _CELL + _SPLIT, height + LEGEND_HEIGHT, parts)


def _cells(run: SchedGraph, t: Tensor, y: float, colours: list[str]) -> list[str]:
    """A node's backend after passes 1 to 4."""
    a, parts, before = run.assignments, [], None
    for k, name in enumerate(_PASSES):
        now, x = a.history[name].get(t), _NAME + _CELL * k
        parts.append(box(x + 1, y + 1, _CELL - 2, _ROW - 2, PALE if now is None else colours[now]))
        if now != before and now is not None:
            reason = a.reasons[t]
            given_here = reason.startswith(f"{k + 1}.") or (reason == "user" and k == 0)
            words = reason if given_here else a.backends[now].name
            parts.append(text(x + _CELL / 2, y + 14, words, 10, "middle", INK))
        before = now
    return parts


def _split_column(run: SchedGraph, rows: dict[Tensor, int], colours: list[str]) -> list[str]:
    x, parts, nodes = _NAME + 4 * _CELL + 4, [], run.graph.nodes
    for k, s in enumerate(run.splits):
        mine = [rows[t] for t in nodes[s.first : s.end] if t in rows]
        if not mine:
            continue
        y, height = mine[0], mine[-1] - mine[0] + _ROW
        parts.append(box(x, y + 1, _SPLIT - 10, height - 2, colours[s.backend_id]))
        if k:
            parts.append(line(0, y, x + _SPLIT - 10, y, INK, 'stroke-dasharray="5 3"'))
        copied = [run.copies[i].tensor for i in s.inputs]
        words = [f"split {k}: {run.assignments.backends[s.backend_id].name}, begins for: {s.reason}"]
        words += [f"copy {_name(t)}: {t.nbytes} bytes" for t in copied]
        room = max(int(height // 15), 1)
        if len(words) > room:
            more = f"{len(words) - room} more"
            words = [*words[: room - 1], f"{words[room - 1]}, {more}"]
        parts += [text(x + 6, y + 14 + 15 * i, w, 10) for i, w in enumerate(words)]
    return parts


def splits(run: SchedGraph) -> Svg:
    """Draw the splits of a graph in the order of computing, a lane for each backend, and what is copied between them.

    A split is as wide as it has nodes that compute something, but no narrower than its words. An arrow goes from the
    lane where the copied tensors are to the split that needs them.

    Args:
        run: what `Scheduler.split_graph` or `alloc_graph` gives.

    Raises:
        TypeError: `run` is something else.
    """
    _check_run("show.splits", run)
    a = run.assignments
    names = [b.name for b in a.backends]
    colours, lanes = _colours(names), {i: 24 + (_LANE + _GAP) * i for i in range(len(names))}
    counts = [sum(not t.op.view for t in run.graph.nodes[s.first : s.end]) for s in run.splits]
    widths = [max(n * _LANE_WIDTH / max(sum(counts), 1), _LEAST) for n in counts]
    parts = []
    for i, name in enumerate(names):
        parts.append(box(_MARGIN, lanes[i], sum(widths), _LANE, PALE) + text(6, lanes[i] + 24, name))
    x = float(_MARGIN)
    for k, (s, n, width) in enumerate(zip(run.splits, counts, widths, strict=True)):
        y, middle = lanes[s.backend_id], x + width / 2
        parts.append(box(x, y, width, _LANE, colours[names[s.backend_id]], INK))
        parts.append(text(middle, y + 24, f"{n} node{'s' * (n > 1)}", 10, "middle"))
        parts.append(text(middle, 14, f"split {k}", 10, "middle", GREY))
        parts += _arrows(run, k, x + 8, lanes)
        x += width
    return document(x + 10, lanes[len(names) - 1] + _LANE + 10, parts)


def _arrows(run: SchedGraph, k: int, x: float, lanes: dict[int, int]) -> list[str]:
    """An arrow to split `k` from each backend that it takes copies from, with their number and bytes."""
    s = run.splits[k]
    found: dict[int, list[Tensor]] = {}
    for i in s.inputs:
        t = run.copies[i].tensor
        found.setdefault(run.assignments.ids[t if t.view_src is None else t.view_src], []).append(t)
    parts = []
    for owner, copied in found.items():  # side by side
        down = owner < s.backend_id
        y0 = lanes[owner] + (_LANE if down else 0)
        y1 = lanes[s.backend_id] + (0 if down else _LANE)
        parts.append(line(x, y0, x, y1, "#666", 'stroke-width="1.5" marker-end="url(#a)"'))
        middle = (y0 + y1) / 2
        what = _name(copied[0], 12) if len(copied) == 1 else f"{len(copied)} copies"
        parts.append(text(x + 5, middle, what, 9))
        parts.append(text(x + 5, middle + 11, f"{sum(t.nbytes for t in copied)} B", 9, fill=GREY))
        x += _LEAST
    return parts
