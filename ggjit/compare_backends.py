"""Comparing two backends node by node.

Source: ggml_backend_compare_graph_backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.backend import Backend, Buffer, alloc_ctx_tensors, copy_tensor
from ggjit.graph import Graph
from ggjit.graph_copy import GraphView, context_for, copy_record
from ggjit.tensor import Tensor


class NodeDifference(NamedTuple):
    """How far two backends' results for one node are apart.

    Attributes:
        position: of the node in the graph.
        node: the user's node.
        nmse: sum((a - b)^2) / sum(a^2); 0 if both are the same, infinite if a is 0 and b is not.
        largest: the largest absolute difference.
    """

    position: int
    node: Tensor
    nmse: float
    largest: float


class BackendCopy:
    """A graph with all of its data in one backend's memory, each tensor in a place of its own.

    Args:
        graph: its leafs have data that can be read.
        backend: computes the copy.

    Attributes:
        copied: the copy of each of the graph's tensors.

    Raises:
        ValueError: a leaf has no data.

    Source: ggml_backend_graph_copy.
    """

    def __init__(self, graph: Graph, backend: Backend) -> None:
        self.backend, self.copied = backend, dict[Tensor, Tensor]()
        tensors = [*graph.leafs, *graph.nodes]
        roots = dict.fromkeys(t.view_src for t in tensors if t.view_src is not None)
        outside = [t for t in roots if t not in graph.use_counts]
        given = [*outside, *(t for t in tensors if not t.src)]
        with context_for(len(tensors) + len(outside)) as context:
            for t in [*outside, *tensors]:
                src = tuple(None if s is None else self.copied[s] for s in t.src)
                made = copy_record(t, src, None if t.view_src is None else self.copied[t.view_src])
                made.data, made.buffer = 0, None
                self.copied[t] = made
        self.buffer: Buffer | None = alloc_ctx_tensors(context, backend.device.buffer_type())
        for t in given:
            if t.nbytes and t.view_src is None:
                copy_tensor(t, self.copied[t])

    def compute(self, node: Tensor) -> NDArray[Any]:
        """Compute one node of the graph and return its values."""
        made = self.copied[node]
        self.backend.compute(GraphView([made], {}), fuse=False)
        self.backend.synchronize()
        return made.numpy()


def compare_backends(
    first: Backend,
    second: Backend,
    graph: Graph,
    callback: Callable[[NodeDifference, NDArray[Any], NDArray[Any]], bool] | None = None,
    nodes: Sequence[Tensor] | None = None,
) -> list[NodeDifference]:
    """Compute a graph by two backends, each from its own results, and compare after every node.

    Args:
        first: the reference.
        second: compared with it.
        graph: its leafs have data; it is not changed and gets no results.
        callback: called with each difference and both values; False ends the comparison.
        nodes: those to compare, by default all that compute something.

    Returns:
        A difference for each node that was compared.

    Raises:
        NotImplementedError: a backend has no kernel for a node.
        ValueError: a leaf has no data.
    """
    copies = BackendCopy(graph, first), BackendCopy(graph, second)
    chosen = None if nodes is None else set(nodes)
    found = []
    for i, t in enumerate(graph.nodes):
        if t.op.view:
            continue
        for backend in (first, second):
            if not backend.supports(t):
                raise NotImplementedError(
                    f"compare_backends: both backends must compute {t.op.name}, got {backend.name} ('{t.name}')"
                )
        a, b = (copy.compute(t) for copy in copies)
        if chosen is not None and t not in chosen:
            continue
        found.append(NodeDifference(i, t, *_difference(a, b)))
        if callback is not None and not callback(found[-1], a, b):
            break
    return found


def _difference(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float]:
    if a.tobytes() == b.tobytes() or not a.size:
        return 0.0, 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))  # equal infinities too
    error = np.where(same, 0.0, x - y)
    squares = float(np.sum(np.where(np.isfinite(x), x, 0.0) ** 2))
    total = float(np.sum(error**2))
    return (total / squares if squares else np.inf) if total else 0.0, float(np.max(np.abs(error)))
