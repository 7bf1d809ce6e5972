"""Copies of tensor records, and parts of graphs.

What works on a graph but must leave it as it is (the scheduler, a device in another process, the comparison of two
backends) makes records of its own. They have the ops, parameters, layouts and names of the originals, and other sources
where that is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggjit.context import Context, tensor_overhead
from ggjit.graph import Graph
from ggjit.op import NONE, PARAM_BYTES, Op
from ggjit.tensor import PARAMS_AT, Dims, Tensor, new_node
from ggjit.types import Type


def new_record(op: Op, type: Type, ne: Dims, nb: Dims, src: tuple[Tensor | None, ...], params: bytes, flags: int,
               name: str, view_src: Tensor | None = None, view_offs: int = 0) -> Tensor:  # fmt: skip
    """Write a record whose every field is given into the innermost context, which is a no_alloc one."""
    t = new_node(op, type, ne, src, (), nb, view_src, view_offs)
    t.context.buffer[t.offset + PARAMS_AT : t.offset + PARAMS_AT + PARAM_BYTES] = params
    t.flags, t.name = flags, name
    return t


def copy_record(t: Tensor, src: tuple[Tensor | None, ...], view_src: Tensor | None) -> Tensor:
    """A copy of a record with given sources and viewed tensor, in the innermost context.

    Where its data lies is copied too, if it is not a view. The original's context must be kept alive by the caller.
    """
    copy = new_record(t.op, t.type, t.ne, t.nb, src, t.op_params, t.flags, t.name, view_src, t.view_offs)
    if view_src is None:
        copy.data, copy.buffer = t.data, t.buffer
        if t.data and t.buffer is None:  # an arena's memory, or an array's
            copy.context.keep(t.context.array)
            copy.context.kept.update(t.context.kept)
    return copy


def layout_of(t: Tensor, name: str) -> Tensor:
    """A leaf without data that has the type, sizes and strides of a tensor.

    Source: ggml_dup_tensor_layout.
    """
    return new_record(NONE, t.type, t.ne, t.nb, (), bytes(PARAM_BYTES), 0, name)


class GraphView(Graph):
    """Some nodes of a graph, to be computed by themselves.

    Args:
        nodes: in order of computing. What they read and is not among them counts as leafs.
        use_counts: how often each tensor is read in all of the graph: a result that something outside reads is never
            fused away.
        kept: of the graph's tensors those that must stay readable.

    Source: ggml_graph_view.
    """

    def __init__(
        self, nodes: Sequence[Tensor], use_counts: Mapping[Tensor, int], kept: frozenset[Tensor] = frozenset()
    ) -> None:
        inside, leafs = set(nodes), dict[Tensor, None]()
        for t in nodes:
            leafs.update(dict.fromkeys(s for s in (*t.src, t.view_src) if s is not None and s not in inside))
        self.nodes, self.leafs, self.size = list(nodes), list(leafs), len(nodes)
        self.use_counts = {t: use_counts.get(t, 0) for t in (*self.nodes, *self.leafs)}
        self.kept = kept
        self.has_grads, self.grads, self.grad_accs = False, {}, {}
        self._allocator, self._executables = None, {}

    def _allocate(self) -> None:
        """Leave it: the tensors' places are not this part's to choose."""

    def _warn_of_lost_writes(self) -> None:
        """Leave it: what is in no graph the whole graph knows."""


def context_for(n_records: int) -> Context:
    """A no_alloc context with room for some records."""
    return Context(n_records * tensor_overhead(), no_alloc=True)
