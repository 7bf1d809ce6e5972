"""Fusion: which nodes of a graph one kernel computes together.

The rules stand in the op files. A rule looks at a node and at what reads it, and gives a `Fused`, or None:

    @RMS_NORM.fusion
    def _(match, node):
        mul = match.reader(node)
        if mul is None or mul.op is not MUL or not ...:
            return None
        return Fused((node, mul), reads=(x, w), over=(x,), emit=lambda low: low.emit(kernel, mul, src=(x, w)))

The results of all its nodes but the last are never written. That is allowed only for tensors that nothing else can see:
read by one node, not marked as an output, and lying in a planner's memory. The step runs where the last node stands, so
what it reads must still be there by then, and its result must not overwrite what it still has to read; the plan, made
for separate nodes, does not ensure that. So each match is checked against the addresses, and dropped where they do not
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ggjit.tensor import FLAG_INPUT, FLAG_LOSS, FLAG_OUTPUT, FLAG_PARAM, Tensor

if TYPE_CHECKING:
    from ggjit.graph import Graph
    from ggjit.lower import Lowering

_SEEN = FLAG_INPUT | FLAG_LOSS | FLAG_OUTPUT | FLAG_PARAM


class Fused(NamedTuple):
    """Nodes to compute together.

    Attributes:
        nodes: in graph order; the last one is the result.
        reads: all tensors that its steps read.
        over: those of them that the result may lie upon, byte for byte: each row is read before it is written.
        emit: emits the steps.
    """

    nodes: tuple[Tensor, ...]
    reads: tuple[Tensor, ...]
    over: tuple[Tensor, ...]
    emit: Callable[[Lowering], None]


class Match:
    """What rules ask about a graph whose tensors have data.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self._uses, self._nodes, self._kept = graph.use_counts, graph.nodes, graph.kept
        self._at = {t: i for i, t in enumerate(graph.nodes)}
        self._readers = {s: t for t in graph.nodes for s in t.src if s is not None}

    def reader(self, t: Tensor) -> Tensor | None:
        """The one node that reads `t`; None if there are more, or if the values of `t` can be seen otherwise."""
        root = t if t.view_src is None else t.view_src
        buffer = root.buffer
        hidden = buffer is not None and buffer.usage == "compute" and not (t.flags | root.flags) & _SEEN
        if not hidden or t in self._kept or root in self._kept or self._uses[t] != 1 or self._uses.get(root) != 1:
            return None
        return self._readers.get(t)

    def find(self) -> dict[Tensor, Fused | None]:
        """For each node that is part of a match the match if the node is its last one, else None."""
        found: dict[Tensor, Fused | None] = {}
        for node in self._nodes:
            for rule in node.op.fusions:
                fused = None if node in found else rule(self, node)
                if fused is not None and not any(t in found for t in fused.nodes) and self._is_safe(fused):
                    found.update(dict.fromkeys(fused.nodes))
                    found[fused.nodes[-1]] = fused
        return found

    def _is_safe(self, fused: Fused) -> bool:
        """Are all bytes that are read still there where the last node stands, and not under its result?"""
        result = fused.nodes[-1]
        for t in fused.reads:
            if _meet(result, t) and not (t in fused.over and _same(result, t)):
                return False
        first, last = self._at[fused.nodes[0]], self._at[result]
        between = [t for t in self._nodes[first + 1 : last] if t not in fused.nodes and not t.op.view]
        for t in fused.reads:
            made = self._at.get(t, -1)
            if any(self._at[q] > made and _meet(w, t) for q in between for w in _written(q)):
                return False
        return True


def _written(node: Tensor) -> Iterable[Tensor]:
    """The tensors whose bytes a node changes."""
    yield node
    for i in node.op.state:
        s = node.src[i]
        if s is not None:
            yield s


def _meet(a: Tensor, b: Tensor) -> bool:
    """Do the ranges of bytes overlap?"""
    if a.nbytes == 0 or b.nbytes == 0:
        return False
    return a.data < b.data + b.nbytes and b.data < a.data + a.nbytes


def _same(a: Tensor, b: Tensor) -> bool:
    """Are they the same bytes in the same layout?"""
    return a.data == b.data and a.ne == b.ne and a.nb == b.nb and a.type is b.type
