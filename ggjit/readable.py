"""Which values of computed graphs can still be read.

A planner gives the memory of a result to others when its last reader is done, and a fused kernel never writes what only
it would read. After a run the bytes of such a tensor are another's. `check` is called when a tensor in a planner's
memory is read, and names who wrote there. It knows the runs in a buffer since the planner last handed it out.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from ggjit.backend import Buffer, buffer_of
from ggjit.op import NONE

if TYPE_CHECKING:
    from ggjit.graph import Graph
    from ggjit.lower import Executable
    from ggjit.tensor import Tensor

_runs: weakref.WeakKeyDictionary[Buffer, list[weakref.ref[Executable]]] = weakref.WeakKeyDictionary()
state = object()  # another one whenever something changes, so that who ran last need not say it again


class Writers:
    """Who writes where, of a graph whose tensors have data.

    Args:
        graph: the graph.
        inner: results that a fused kernel keeps to itself.
    """

    def __init__(self, graph: Graph, inner: frozenset[Tensor] = frozenset()) -> None:
        self.nodes = graph.nodes
        self.at = {t: i for i, t in enumerate(graph.nodes)}
        self._ranges: NDArray[np.int64] = np.zeros((len(graph.nodes), 2), np.int64)
        for i, t in enumerate(graph.nodes):
            if t.view_src is None and t not in inner and t.op is not NONE:
                self._ranges[i] = t.data, t.data + t.nbytes

    def first_over(self, t: Tensor, after: int) -> Tensor | None:
        """The first node behind position `after` that writes over bytes of a tensor; None if none does."""
        low, high = t.data, t.data + t.nbytes
        found = np.flatnonzero((self._ranges[after + 1 :, 0] < high) & (self._ranges[after + 1 :, 1] > low))
        return self.nodes[after + 1 + int(found[0])] if len(found) else None


def memories(graph: Graph) -> tuple[Buffer, ...]:
    """The planners' buffers that a graph's results lie in."""
    found = {buffer: None for t in graph.nodes if (buffer := t.buffer) is not None and buffer.usage == "compute"}
    return tuple(found)


def ran(executable: Executable) -> object:
    """Note that a program has run to its end; returns the state, which is the same until another one runs."""
    global state
    mine = state = object()
    for buffer in executable.memories:
        runs = _runs.setdefault(buffer, [])
        if not runs or runs[-1]() is not executable:
            runs[:] = [r for r in runs if r() is not None and r() is not executable]
            runs.append(weakref.ref(executable))
    return mine


def forget(*buffers: Buffer) -> None:
    """Note that nothing is known of the bytes of buffers: tensors move in, or a run has begun."""
    global state
    state = object()
    for buffer in buffers:
        _runs.pop(buffer, None)


def check(t: Tensor) -> None:
    """Refuse a tensor of a computed graph whose values are gone.

    Raises:
        ValueError: its bytes were overwritten, or it was computed inside a kernel; names the node that did it.
    """
    buffer = buffer_of(t)
    runs = [] if buffer is None else [e for r in _runs.get(buffer, ()) if (e := r()) is not None]
    root = t if t.view_src is None else t.view_src
    k = next((k for k in reversed(range(len(runs))) if root in runs[k].writers.at), -1)
    if k < 0:
        return
    for chain in runs[k].fused:
        if root in chain[:-1] or t in chain[:-1]:
            _refuse(t, f"'{chain[-1].name}' computed it on the way without writing it")
    by = runs[k].writers.first_over(t, runs[k].writers.at[root])
    for later in runs[k + 1 :]:
        by = by or later.writers.first_over(t, -1)
    if by is not None:
        _refuse(t, f"'{by.name}' wrote over its memory")


def _refuse(t: Tensor, why: str) -> NoReturn:
    raise ValueError(
        f"Tensor: values must still be there to be read, got '{t.name}' when {why}; compute(keep=[...]) keeps it"
    )
