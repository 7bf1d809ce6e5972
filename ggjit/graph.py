"""The compute graph: nodes in the order in which they are computed, leafs, and how often each tensor is read.

`build_forward_expand` walks from a result to its sources, left to right, and appends each tensor after its sources. A
tensor without an op that is not trainable is a leaf, everything else a node. Nothing is computed here.

The graph is an object of its context, as in ggml: its arrays of addresses lie in the arena.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from ggjit import context as _context
from ggjit.arguments import check_kinds, check_threads, tensors_of
from ggjit.context import GRAPH, OBJECT_SIZE
from ggjit.counts import counted
from ggjit.op import NONE
from ggjit.tensor import FLAG_COMPUTE, FLAG_PARAM, Tensor

if TYPE_CHECKING:
    from ggjit.alloc import GraphAllocator
    from ggjit.context import Context
    from ggjit.lower import Executable

DEFAULT_SIZE = 2048
_HEADER = 96  # sizes, array addresses, hash set, order and uid of ggml's cgraph
# Sizes of the hash set: the first prime that is not below twice the graph's size.
_PRIMES = (
    2, 3, 5, 11, 17, 37, 67, 131, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101, 262147, 524309,
    1048583, 2097169, 4194319, 8388617, 16777259, 33554467, 67108879, 134217757, 268435459, 536870923, 1073741827,
)  # fmt: skip


def hash_size(n: int) -> int:
    """Slots of the hash set of a graph with room for `n` nodes and `n` leafs."""
    return next(p for p in _PRIMES if p >= 2 * n)


def graph_nbytes(size: int = DEFAULT_SIZE, grads: bool = False) -> int:
    """Bytes of a graph's arrays: nodes, leafs, use counts, hash keys, gradients if wanted, used bits."""
    slots = hash_size(size)
    at = _HEADER + 16 * size + 4 * slots
    at = (at + 7) // 8 * 8 + 8 * slots
    if grads:
        at += 16 * slots
    return at + (slots + 31) // 32 * 4


def _check_size(where: str, size: int) -> None:
    check_kinds(where, Integral, "a whole number", size=size)
    if not 0 <= size <= _PRIMES[-1] // 2:
        raise ValueError(f"{where}: size must be 0 to {_PRIMES[-1] // 2}, got {size}")


def graph_overhead(size: int = DEFAULT_SIZE, grads: bool = False) -> int:
    """Bytes a graph takes in an arena: 82608 for the default size.

    Raises:
        TypeError: the size is no whole number.
        ValueError: it is negative, or absurd.
    """
    _check_size("graph_overhead", size)
    return OBJECT_SIZE + (graph_nbytes(size, grads) + 15) // 16 * 16


class Graph:
    """A static graph.

    Args:
        size: most nodes, and most leafs.
        grads: leave room for gradients.

    Attributes:
        nodes: tensors to compute, sources first.
        leafs: constants, weights and inputs.
        use_counts: for each tensor how many sources of nodes it is.
        grads: for each tensor that has one its gradient.
        grad_accs: for some tensors a leaf that their gradient is added to; those of losses among them.
        kept: tensors whose values stay readable after a run, besides outputs (`compute(keep=...)`).
        has_grads: is there room for gradients?

    Raises:
        RuntimeError: no context is open.
        OutOfArena: the arena is full.
        TypeError: the size is no whole number.
        ValueError: the size is negative, or absurd.

    Source: ggml_new_graph_custom.
    """

    kept: frozenset[Tensor] = frozenset()

    def __init__(self, size: int = DEFAULT_SIZE, grads: bool = False) -> None:
        self.context = _context.current("Graph")
        _check_size("Graph", size)
        self.size, self.has_grads = size, grads
        offset = self.context.new_object(graph_nbytes(size, grads), GRAPH)
        arrays = np.frombuffer(self.context.array, np.int64, 2 * size, offset + _HEADER)
        self._node_addresses, self._leaf_addresses = arrays[:size], arrays[size:]
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.use_counts: dict[Tensor, int] = {}
        self.grads: dict[Tensor, Tensor] = {}
        self.grad_accs: dict[Tensor, Tensor] = {}
        self._allocator: GraphAllocator | None = None
        self._executables: dict[tuple[int, bool | None], Executable] = {}

    # -- building ----------------------------------------------------------------------------------------------------

    def build_forward_expand(self, tensor: Tensor) -> Graph:
        """Append what `tensor` needs and is not in the graph yet, sources first, left to right.

        Returns:
            The graph.

        Raises:
            TypeError: `tensor` is no Tensor.
            ValueError: more nodes or leafs than the graph has room for.

        Source: ggml_build_forward_expand.
        """
        check_kinds("build_forward_expand", Tensor, "a Tensor", tensor=tensor)
        uses, before = self.use_counts, len(self.nodes)
        if tensor in uses:
            return self
        uses[tensor] = 0
        stack: list[tuple[Tensor, Iterator[Tensor | None]]] = [(tensor, iter(tensor.src))]
        while stack:
            t, sources = stack[-1]
            for s in sources:
                if s is None:
                    continue
                if s in uses:
                    uses[s] += 1
                    continue
                uses[s] = 1
                stack.append((s, iter(s.src)))
                break
            else:
                stack.pop()
                self._append(t)
        if len(self.nodes) > before and self.nodes[-1] is not tensor:
            raise AssertionError("build_forward_expand: the tensor itself must come last")
        self._executables.clear()
        return self

    def build_backward_expand(self, grad_accs: Mapping[Tensor, Tensor] | None = None) -> Graph:
        """Append what computes the gradients of the graph's parameters, by reverse-mode differentiation.

        Call it once, after `build_forward_expand` of all losses (`Tensor.set_loss`), in an open context; then `reset`
        before the first `compute`. Running the graph again computes the gradients again.

        Args:
            grad_accs: leafs, f32 of the shape of a tensor of the graph, that this tensor's gradient is added to at
                each run until `reset`: to sum gradients over batches. Of a tensor that nothing reads it is where the
                walk begins, as the gradient 1 of a loss is.

        Returns:
            The graph. `grad` of a parameter is marked as an output, so that it is there after a run.

        Raises:
            ValueError: the graph has no room for gradients, no parameter or no loss, or is differentiated already.
            NotImplementedError: no gradient exists for a node between a parameter and a loss, or what its backward
                rule reads is overwritten in place.

        Source: ggml_build_backward_expand.
        """
        from ggjit.autodiff import build_backward_expand

        build_backward_expand(self, grad_accs)
        return self

    def grad(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a tensor of the graph: a tensor of its shape, f32; None if it has none.

        Source: ggml_graph_get_grad.
        """
        return self.grads.get(tensor)

    def grad_acc(self, tensor: Tensor) -> Tensor | None:
        """The leaf that a tensor's gradient is added to; None if it has none.

        Source: ggml_graph_get_grad_acc.
        """
        return self.grad_accs.get(tensor)

    def reset(self) -> Graph:
        """Set accumulators to 0, those of losses to 1, and the moments of optimizer steps to 0.

        Returns:
            The graph.

        Source: ggml_graph_reset.
        """
        from ggjit.autodiff import reset

        if any(t.data == 0 for t in [*self.leafs, *self.nodes]):
            self._allocate()
        reset(self)
        return self

    def _append(self, t: Tensor) -> None:
        is_leaf = t.op is NONE and not t.flags & FLAG_PARAM
        into, addresses, kind = (
            (self.leafs, self._leaf_addresses, "leaf") if is_leaf else (self.nodes, self._node_addresses, "node")
        )
        n = len(into)
        if n >= self.size:
            raise ValueError(f"build_forward_expand: the graph must have room for its {kind}s, got size {self.size}")
        if not t.name:
            t.name = f"{kind}_{n}"
        if not is_leaf:
            t.flags |= FLAG_COMPUTE
        addresses[n] = t.address
        into.append(t)

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def n_leafs(self) -> int:
        """Number of leafs."""
        return len(self.leafs)

    def get_tensor(self, name: str) -> Tensor:
        """The last node, else the last leaf, of that name.

        Raises:
            KeyError: there is none.
        """
        for t in [*reversed(self.nodes), *reversed(self.leafs)]:
            if t.name == name:
                return t
        raise KeyError(f"get_tensor: the graph must hold a tensor of that name, got '{name}'")

    def __repr__(self) -> str:
        grads = f", {len(self.grads)} gradients" if self.has_grads else ""
        return f"Graph({counted(self.n_nodes, 'node')}, {counted(self.n_leafs, 'leaf')}{grads}, size {self.size})"

    def _repr_html_(self) -> str:
        from ggjit.show.html import graph_table

        return graph_table(self)

    def print(self) -> None:
        """Print nodes and leafs, a line each."""
        print(f"graph: {counted(self.n_nodes, 'node')}, {counted(self.n_leafs, 'leaf')}")
        for kind, tensors in (("node", self.nodes), ("leaf", self.leafs)):
            for i, t in enumerate(tensors):
                what = f"{t.op.name:>16} {t.type.name:>6} {list(t.ne)!s:>26}"
                print(f"  {kind} {i:4d} {what} uses {self.use_counts[t]}  {t.name}")

    def dot(self) -> str:
        """The graph in Graphviz' language."""
        lines = ["digraph ggjit {", "  node [shape=box, fontname=monospace];"]
        index = {t: f"t{i}" for i, t in enumerate([*self.leafs, *self.nodes])}
        for t, key in index.items():
            label = f"{t.name}\\n{t.op.name} {t.type.name} {list(t.ne[: t.n_dims])}".replace('"', "'")
            style = ', style=filled, fillcolor="#f4e7c5"' if t in self.leafs else ", style=dashed" if t.op.view else ""
            lines.append(f'  {key} [label="{label}"{style}];')
            lines += [f"  {index[s]} -> {key};" for s in t.src if s is not None]
        return "\n".join([*lines, "}"])

    # -- computing ---------------------------------------------------------------------------------------------------

    def compute(
        self, n_threads: int | None = None, fuse: bool | None = None, keep: Iterable[Tensor] = (), debug: bool = False
    ) -> Graph:
        """Compute all nodes.

        Results without data get memory from a graph allocator first, and so do leafs that are only written. The program
        is kept: computing the same graph again only runs it.

        Args:
            n_threads: by default as many as the process may use.
            fuse: compute chains of nodes in a planner's memory by one kernel where there is a rule for them; tensors
                inside a chain that are no outputs then get no values. By default yes, unless the variable GGJIT_FUSE
                is 0.
            keep: tensors of the graph whose values must be readable afterwards: their memory is not reused and no
                kernel skips them, in this run and in later ones. Without it that is so for outputs only.
            debug: keep all nodes.

        Returns:
            The graph.

        Raises:
            TypeError: `n_threads` is no whole number, or what to keep is no tensor.
            ValueError: `n_threads` is not 1 to 512; a leaf that is read has no data; a tensor to keep is not in the
                graph, or lies in memory that another allocator has planned to reuse.
            NotImplementedError: no kernel takes a node.
            IndexError: an index of a node is out of range.
        """
        from ggjit.threadpool import default_threads

        n = default_threads() if n_threads is None else check_threads("compute", n_threads)
        wanted = tensors_of("compute", "keep", keep)
        if wanted or debug:
            self._keep([*wanted, *(self.nodes if debug else ())])
        self._executable(n, fuse).run()
        return self

    def compute_with_ctx(self, context: Context, n_threads: int = 1) -> Graph:
        """Compute all nodes, with the scratch memory of their kernels taken from a context.

        Raises:
            TypeError: `context` is no Context, or `n_threads` no whole number.
            ValueError: `n_threads` is not 1 to 512.
            OutOfArena: the scratch memory does not fit.

        Source: ggml_graph_compute_with_ctx.
        """
        from ggjit.lower import lower

        check_kinds("compute_with_ctx", _context.Context, "a Context", context=context)
        lower(self, check_threads("compute_with_ctx", n_threads), work_context=context).run()
        return self

    def _executable(self, n_threads: int, fuse: bool | None = None) -> Executable:
        from ggjit.lower import lower

        if any(t.data == 0 for t in [*self.leafs, *self.nodes]):
            self._check_set()
            self._allocate()
        found = self._executables.get((n_threads, fuse))
        if found is None or found.is_stale():
            self._warn_of_lost_writes()
            found = self._executables[n_threads, fuse] = lower(self, n_threads, fuse=fuse)
        return found

    def _check_set(self) -> None:
        """Refuse leafs without memory whose values are read: nobody can have set them."""
        nodes = [t for t in self.nodes if t.op is not NONE and not t.op.view]
        written = {t.view_src for t in nodes}  # a cache, or what a copy fills
        for t in nodes:
            for i, s in enumerate(t.src):
                root = s if s is None or s.view_src is None else s.view_src
                if root is None or root in written or i in t.op.shape_only:
                    continue
                if root.op is NONE and root.data == 0 and root.nelements:
                    raise ValueError(
                        f"compute: a leaf must be set before {t.op.name} reads it, got no data ('{root.name}'); make "
                        "it by gg.from_numpy, or give it memory by a gg.GraphAllocator or TensorAllocator and set it"
                    )

    def _warn_of_lost_writes(self) -> None:
        """Warn of nodes that would write into a leaf, were built before nodes that read it, and are in no graph."""
        tensors = self.context.tensors.values()
        writes = [t for t in tensors if t.op is not NONE and t.view_src is not None and not t.op.view]
        lost = {t: t.view_src for t in writes if not t.flags & FLAG_COMPUTE and t.view_src in self.use_counts}
        if not lost:
            return
        sources = {s for t in tensors for s in t.src}
        readers: dict[Tensor, int] = {}  # for each leaf the youngest node that reads it
        for node in self.nodes:
            for s in node.src:
                if s is not None:
                    root = s if s.view_src is None else s.view_src
                    readers[root] = max(readers.get(root, 0), node.address)
        for t, root in lost.items():
            if root is not None and root.op is NONE and t not in sources and t.address < readers.get(root, 0):
                warnings.warn(
                    f"compute: {t.op.name} '{t.name}' would write into '{root.name}', which the graph reads, but is in "
                    "no graph; build_forward_expand adds it",
                    stacklevel=4,
                )

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Let values of tensors stay readable; where the graph has planned memory of its own, plan it anew."""
        for t in tensors:
            if t not in self.use_counts:
                raise ValueError(f"compute: a tensor to keep must be in the graph, got '{t.name}'")
        kept = self.kept.union(tensors)
        if kept == self.kept:
            return
        if self._allocator is not None:
            self.kept = kept
            own = [b for chunks in self._allocator.chunks for b in chunks]
            set_before = [t for t in (*self.leafs, *self.nodes) if t.op is NONE and t.buffer in own]
            values = [(t, t.bytes().copy()) for t in set_before]
            self._allocate()
            for t, data in values:
                t.bytes()[:] = data
        elif all(t.data for t in (*self.leafs, *self.nodes)):
            self._check_not_reused(tensors)
        self.kept = kept
        self._executables.clear()

    def _check_not_reused(self, tensors: Sequence[Tensor]) -> None:
        from ggjit.readable import Writers

        writers = Writers(self)
        for t in tensors:
            at = writers.at.get(t if t.view_src is None else t.view_src)
            by = None if at is None else writers.first_over(t, at)
            if by is not None:
                raise ValueError(
                    f"compute: a tensor to keep must have memory that no other node is given, got '{t.name}', planned "
                    f"by another allocator, and '{by.name}' written over it; mark it by set_output before planning"
                )

    def _allocate(self) -> None:
        from ggjit.alloc import GraphAllocator
        from ggjit.backend import host_buffer_type

        if self._allocator is None:
            self._allocator = GraphAllocator(host_buffer_type())
        self._allocator.alloc_graph(self)


def build(results: Sequence[Tensor] | Tensor, size: int = DEFAULT_SIZE) -> Graph:
    """A graph of some results, in the innermost context.

    Args:
        results: tensors to compute; with what they need, sources first, they are the graph's nodes.
        size: most nodes, and most leafs, that the graph has room for. It takes `graph_overhead(size)` bytes of the
            context: 82608 for the default 2048, so that `Context(1 << 20)` holds a dozen such graphs; a small graph
            that is built often, or in a small context, takes a small one.

    Returns:
        The graph; `compute` runs it.

    Raises:
        RuntimeError: no context is open.
        OutOfArena: the context has no room for it.
        TypeError: a result is no Tensor.
        ValueError: more nodes or leafs than `size`.
    """
    found = [results] if isinstance(results, Tensor) else tensors_of("build", "results", results)
    graph = Graph(size)
    for t in found:
        graph.build_forward_expand(t)
    return graph
