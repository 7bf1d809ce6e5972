"""The scheduler: one graph on several backends.

    scheduler = Scheduler([gpu, cpu])      # the fastest first, the CPU last
    scheduler.reserve(largest_graph)       # once
    scheduler.alloc_graph(graph)           # then `set` the inputs
    scheduler.compute(graph)

Five passes (`ggjit.sched_passes`) give each node a backend and cut the graph into splits. Then the graph is copied:
nodes that read a tensor which their backend cannot reach get a copy of it as source, made when their split begins. One
`GraphAllocator` plans the copied graph with a buffer for each backend, so a copy's room is used again when its last
reader is done. The user's graph keeps its structure; as with a `GraphAllocator` its tensors get their data and
buffers, so inputs are set and results read there.

Of weights of experts that must be copied only those go over that the ids name.

With `n_copies` > 1 several graphs are under way at once: what is copied to a backend, and the tensors marked as inputs,
have so many places, of which each graph takes the next. A place is written again when the backend is done with the
graph that had it before:

    for batch in batches:
        graph = build(batch)
        scheduler.alloc_graph(graph)       # the next places
        set_inputs(graph, batch)
        scheduler.compute_async(graph)     # may still run while the next graph is built

Source: ggml_backend_sched.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit.alloc import GraphAllocator
from ggjit.backend import Backend, Buffer, BufferType, Event, buffer_of, copy_tensor
from ggjit.graph import Graph
from ggjit.graph_copy import GraphView, context_for, copy_record, new_record
from ggjit.op import NONE, PARAM_BYTES, by_name
from ggjit.sched_passes import (
    MAX_BACKENDS,
    MAX_COPIES,
    MAX_SPLIT_INPUTS,
    Assignments,
    Picked,
    Split,
    Splits,
    graph_inputs,
    root_of,
    split_graph,
)
from ggjit.tensor import FLAG_INPUT, Tensor, new_node
from ggjit.types import I8

EvalCallback = Callable[[Tensor, bool], bool]
_Picks = dict[Picked, list[tuple[int, int]]]  # what ids of the graph that is computed name


class SchedGraph:
    """A user's graph cut into splits, and the copy of it that is computed.

    Args:
        assignments: what passes 1 to 4 decided.
        found: what pass 5 decided.
        n_copies: places of each input and copy.
        place: which of them this graph uses.

    Attributes:
        graph: the user's.
        assignments: backend and reason of each of its tensors.
        splits, copies: what pass 5 decided.
        nodes, leafs: the copied graph. Copies of inputs are nodes of the op dup, before the nodes of their split;
            leafs are the user's own. If there are several places of a tensor, they are one leaf of bytes, and the
            tensor is a view of it: so the plan is the same whichever is used.
        copied: the record in the copied graph for each of the user's nodes.
        inputs: the record of each copy, by number.
        parts: for each split its nodes that compute something, to be given to its backend.
        node_ids, leaf_ids: backends of `nodes` and `leafs`.
        kept: records of what the graph keeps beside its outputs.
    """

    def __init__(self, assignments: Assignments, found: Splits, n_copies: int = 1, place: int = 0) -> None:
        self.graph, self.assignments = assignments.graph, assignments
        self.splits, self.copies, self.picked = found.splits, found.copies, found.picked
        self.n_copies, self.place = n_copies, place
        self.n_nodes = len(self.graph.nodes)
        self.leafs = list(self.graph.leafs)
        self.leaf_ids = [assignments.ids[t] for t in self.leafs]
        self.nodes: list[Tensor] = []
        self.node_ids: list[int] = []
        self.copied: dict[Tensor, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.parts: list[GraphView] = []
        n_places = len(self.leafs) + len(self.copies) if n_copies > 1 else 0
        with context_for(len(self.graph.nodes) + len(self.copies) + 2 * n_places):
            if n_copies > 1:
                self._give_inputs_places()
            self._copy(found)

    def _give_inputs_places(self) -> None:
        for n, t in enumerate(self.leafs):
            if t.flags & FLAG_INPUT and t.view_src is None and self.assignments.memory(t) is None:
                ring, offset = self._places(t, self.leaf_ids[n])
                self.leafs[n] = ring
                view = new_record(NONE, t.type, t.ne, t.nb, (), bytes(PARAM_BYTES), t.flags, t.name, ring, offset)
                self.copied[t] = view
                self._append(view, self.leaf_ids[n])

    def _places(self, t: Tensor, i: int) -> tuple[Tensor, int]:
        """Room for all places of a tensor in a backend's memory, and the offset of the one that is used."""
        size = self.assignments.types[i].padded_size(t)
        ring = new_node(NONE, I8, (self.n_copies * size, 1, 1, 1))
        ring.flags, ring.name = FLAG_INPUT, t.name
        return ring, self.place * size

    def _copy(self, found: Splits) -> None:
        parts: list[list[Tensor]] = []
        begins = {s.first: s for s in self.splits}
        for n, t in enumerate(self.graph.nodes):
            if n in begins:
                parts.append([])
                for k in begins[n].inputs:
                    self._copy_input(k, begins[n].backend_id)
            if t not in self.copied:
                self._copy_node(t, found.reads.get(t, {}))
            if not t.op.view:
                parts[-1].append(t)
        self.kept = frozenset(self.record(t) for t in getattr(self.graph, "kept", ()))
        self._uses = Counter(s for t in self.nodes for s in t.src if s is not None)
        self.parts = [self.view(p) for p in parts]

    def _append(self, t: Tensor, i: int) -> None:
        self.nodes.append(t)
        self.node_ids.append(i)

    def record(self, t: Tensor) -> Tensor:
        """The copied graph's record for a tensor; leafs and tensors outside the graph stand for themselves."""
        return self.copied.get(t, t)

    def _copy_node(self, t: Tensor, reads: dict[Tensor, int]) -> None:
        made = t
        if t.op is not NONE:
            src = tuple(None if s is None else self.inputs[reads[s]] if s in reads else self.record(s) for s in t.src)
            made = copy_record(t, src, None if t.view_src is None else self.record(t.view_src))
        self.copied[t] = made
        self._append(made, self.assignments.ids[t])

    def _copy_view(self, t: Tensor) -> None:
        """Let a view come before the split that takes a copy of it, wherever the user has it."""
        if t.op is NONE or t in self.copied:
            return
        for s in t.src:
            if s is not None:
                self._copy_view(s)
        self._copy_node(t, {})

    def _copy_input(self, k: int, i: int) -> None:
        t = self.copies[k].tensor
        self._copy_view(t)
        name = f"{self.assignments.backends[i].name}#{t.name}#{k}"
        assert k == len(self.inputs)
        ring, offset = None, 0
        if self.n_copies > 1:
            ring, offset = self._places(t, i)
            self.leafs.append(ring)
            self.leaf_ids.append(i)
        source = (self.record(t),)
        made = new_record(by_name("dup"), t.type, t.ne, t.nb, source, bytes(PARAM_BYTES), 0, name, ring, offset)
        self.inputs.append(made)
        self._append(made, i)

    def view(self, nodes: Sequence[Tensor]) -> GraphView:
        """Some of the user's nodes of one split as a graph for its backend, with the views that they read."""
        out: dict[Tensor, None] = {}

        def add(t: Tensor) -> None:
            for s in t.src:
                if s is not None and s.op.view and s.op is not NONE and s not in out:
                    add(s)
            out[t] = None

        for t in nodes:
            add(self.copied[t])
        return GraphView(list(out), self._uses, self.kept)

    def show_places(self) -> None:
        """Let the user's nodes have the data and buffers of their records."""
        for t, made in self.copied.items():
            if made is not t:
                t.data, t.buffer = made.data, made.buffer

    def describe(self) -> str:
        """Splits with their inputs, nodes with their reasons."""
        names = [b.name for b in self.assignments.backends]
        lines = []
        for k, s in enumerate(self.splits):
            lines.append(f"split {k}: {names[s.backend_id]}, nodes {s.first} to {s.end - 1}, begins for: {s.reason}")
            for i in s.inputs:
                t = self.copies[i].tensor
                most = "at most " if i in self.picked else ""
                lines.append(f"    copy   {t.name}: {most}{t.nbytes} bytes from {names[self.assignments.ids[t]]}")
            for t in self.graph.nodes[s.first : s.end]:
                if not t.op.view:
                    lines.append(f"    {t.op.name:<12} {t.name} [{self.assignments.reasons[t]}]")
        return "\n".join(lines)


def _backends(given: Sequence[Backend]) -> tuple[Backend, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(hasattr(one, "supports_buffer_type") for one in given):
        raise TypeError(
            f"Scheduler: backends must be a list of Backends, got {given!r}; `new_backend` of a device makes one"
        )
    return tuple(given)


class Scheduler:
    """Computes graphs on several backends.

    Args:
        backends: the fastest first; the last one must be the CPU.
        types: the buffer type for each one's results, by default that of its device.
        op_offload: let backends compute with weights of host memory where they want to (`Backend.offloads`).
        max_inputs: most copies that one split makes.
        n_copies: places of each input and copy, so that as many graphs can be under way at once; 1 to 4.

    Attributes:
        current: the graph split last, None after `reset`.

    Raises:
        TypeError: a backend is none.
        ValueError: no backend, too many, the last one is not the CPU, a type that its backend cannot read, or so many
            copies.

    Source: ggml_backend_sched_new.
    """

    def __init__(self, backends: Sequence[Backend], types: Sequence[BufferType] | None = None, op_offload: bool = True,
                 max_inputs: int = MAX_SPLIT_INPUTS, n_copies: int = 1) -> None:  # fmt: skip
        self.backends = _backends(backends)
        names = [b.name for b in self.backends]
        if not 1 <= len(names) <= MAX_BACKENDS or names[-1] != "cpu":
            raise ValueError(f"Scheduler: backends must be 1 to {MAX_BACKENDS}, the last one the CPU, got {names}")
        self.types = tuple(b.device.buffer_type() for b in self.backends) if types is None else tuple(types)
        if len(self.types) != len(names) or not all(
            b.supports_buffer_type(t) for b, t in zip(self.backends, self.types, strict=True)
        ):
            raise ValueError(
                f"Scheduler: each backend must have a buffer type that it reads, got {list(self.types)} for {names}"
            )
        if not 1 <= n_copies <= MAX_COPIES:
            raise ValueError(f"Scheduler: n_copies must be 1 to {MAX_COPIES}, got {n_copies}")
        self.op_offload, self.max_inputs, self.n_copies = op_offload, max_inputs, n_copies
        self._place = self._next_place = 0
        self._events: dict[tuple[int, int], Event] = {}
        if n_copies > 1:
            self._events = {(i, c): b.device.new_event() for i, b in enumerate(self.backends) for c in range(n_copies)}
        self._picks = _Picks()
        self.allocator = GraphAllocator(self.types)
        self.current: SchedGraph | None = None
        self._planned: tuple[list[int], list[int]] | None = None  # backends of nodes and leafs in the plan in force
        self._is_alloc = False
        self._user: dict[Tensor, int] = {}
        self._callback: EvalCallback | None = None
        self._made: weakref.WeakSet[Buffer] = weakref.WeakSet()

    # -- placement ---------------------------------------------------------------------------------------------------

    def set_tensor_backend(self, tensor: Tensor, backend: Backend) -> None:
        """Choose where a node is computed or a leaf lies, until `reset`.

        Raises:
            ValueError: the backend is not one of the scheduler's.
        """
        self._user[tensor] = self._index(backend)
        self.current, self._is_alloc = None, False

    def get_tensor_backend(self, tensor: Tensor) -> Backend | None:
        """Where a tensor of the current graph is computed or lies."""
        ids = self._user if self.current is None else self.current.assignments.ids
        return self.backends[ids[tensor]] if tensor in ids else None

    def _index(self, backend: Backend) -> int:
        for i, b in enumerate(self.backends):
            if b is backend:
                return i
        raise ValueError(f"Scheduler: the backend must be one of {[b.name for b in self.backends]}, got {backend!r}")

    def reset(self) -> None:
        """Forget placements and the current graph; its tensors' memory is used again by the next one.

        Source: ggml_backend_sched_reset.
        """
        self.current, self._is_alloc = None, False
        self._user.clear()

    # -- planning ----------------------------------------------------------------------------------------------------

    def split_graph(self, graph: Graph) -> SchedGraph:
        """Assign and split a graph; no memory is taken.

        Raises:
            NotImplementedError: no backend computes a node.
        """
        assignments = Assignments(graph, self.backends, self.types, self._user, self.op_offload, self._is_planned)
        found = split_graph(assignments.run(), self.max_inputs)
        self.current = SchedGraph(assignments, found, self.n_copies, self._place)
        self._is_alloc = False
        return self.current

    def _is_planned(self, buffer: Buffer) -> bool:
        return buffer in self._made

    def reserve(self, graph: Graph) -> list[int]:
        """Take memory for the largest graph that will come, then `reset`.

        Returns:
            Bytes of each backend's buffer; 0 for a type that a backend before has.

        Source: ggml_backend_sched_reserve.
        """
        self.synchronize()
        self._reserve(self.split_graph(graph))
        self.reset()
        return [self.get_buffer_size(b) for b in self.backends]

    def reserve_size(self, graph: Graph) -> list[int]:
        """Bytes that each backend's buffer would need for a graph, without taking them; then `reset`.

        Source: ggml_backend_sched_reserve_size.
        """
        split = self.split_graph(graph)
        sizes = list(self.allocator.measure(split, split.node_ids, split.leaf_ids).sizes)
        self.reset()
        return sizes

    def _reserve(self, split: SchedGraph) -> None:
        self._planned = None
        self.allocator.reserve(split, split.node_ids, split.leaf_ids)
        self._made.update(b for chunks in self.allocator.chunks for b in chunks)
        self._planned = split.node_ids, split.leaf_ids

    def alloc_graph(self, graph: Graph) -> SchedGraph:
        """Split a graph and give its tensors their places.

        A tensor of a graph before it may lose what it held. If the plan in force does not serve, all backends are
        waited for and memory is taken anew.

        Source: ggml_backend_sched_alloc_graph.
        """
        self._place = self._next_place
        self._next_place = (self._place + 1) % self.n_copies
        split = self.split_graph(graph)
        same = self._planned == (split.node_ids, split.leaf_ids)
        if not same or not self.allocator.alloc_graph(split):
            self._wait()
            self._reserve(split)
            if not self.allocator.alloc_graph(split):
                raise AssertionError(f"Scheduler: a plan must serve its own graph: {self.allocator.misfit(split)}")
        self._made.update(b for chunks in self.allocator.chunks for b in chunks)
        split.show_places()
        self._is_alloc = True
        return split

    def get_buffer_size(self, backend: Backend) -> int:
        """Bytes of a backend's buffer for results; 0 if a backend before shares its type."""
        return self.allocator.get_buffer_size(self._index(backend))

    @property
    def n_splits(self) -> int:
        """Splits of the current graph, 0 if there is none."""
        return 0 if self.current is None else len(self.current.splits)

    def graph_inputs(self) -> dict[Tensor, list[Backend]]:
        """The current graph's tensors marked as inputs, each with the backends that read it."""
        if self.current is None:
            return {}
        found = graph_inputs(self.current.assignments)
        return {t: [self.backends[i] for i in ids] for t, ids in found.items()}

    # -- computing ---------------------------------------------------------------------------------------------------

    def set_eval_callback(self, callback: EvalCallback | None) -> None:
        """Look at nodes while they are computed.

        Args:
            callback: f(node, ask). First called with ask=True: must the node be looked at? If so, it is called again
                with ask=False when the node is computed; False then ends the run. Nodes between two that are looked at
                are computed at a stretch, without fusion. None: no callback.

        Source: ggml_backend_sched_set_eval_callback.
        """
        self._callback = callback

    def compute(self, graph: Graph) -> bool:
        """Compute a graph and wait for its end; see `compute_async`."""
        done = self.compute_async(graph)
        self.synchronize()
        return done

    def compute_async(self, graph: Graph) -> bool:
        """Start computing a graph; its tensors get their places first, if `alloc_graph` was not called.

        Returns:
            False if a callback ended the run.

        Source: ggml_backend_sched_graph_compute_async.
        """
        split = self.current
        if not self._is_alloc or split is None or split.graph is not graph or split.n_nodes != len(graph.nodes):
            split = self.alloc_graph(graph)
        self._picks = _Picks()
        return all(self._compute_split(split, s, part) for s, part in zip(split.splits, split.parts, strict=True))

    def _compute_split(self, graph: SchedGraph, split: Split, part: GraphView) -> bool:
        backend = self.backends[split.backend_id]
        used = self._events.get((split.backend_id, graph.place))
        if split.inputs:  # earlier splits may still read what is overwritten now
            if used is None:
                backend.synchronize()
            else:
                used.synchronize()
        for k in split.inputs:
            copy = graph.inputs[k]
            source = copy.src[0]
            assert source is not None
            self._backend_of(graph, graph.copies[k].tensor).synchronize()
            if k in graph.picked:
                self._copy_picked(graph, source, copy, graph.picked[k])
            else:
                copy_tensor(source, copy)
        if self._callback is not None:
            return self._compute_watched(graph, split, backend)
        backend.compute(part)
        if used is not None and split.inputs:
            backend.record_event(used)
        return True

    def _backend_of(self, graph: SchedGraph, t: Tensor) -> Backend:
        return self.backends[graph.assignments.ids[root_of(t)]]

    def _copy_picked(self, graph: SchedGraph, source: Tensor, copy: Tensor, picked: Picked) -> None:
        """Copy the matrices of some weights that ids name, neighbours together."""
        target = buffer_of(copy)
        assert target is not None
        if picked not in self._picks:
            self._backend_of(graph, picked.ids).synchronize()
            self._picks[picked] = _runs(graph.record(picked.ids).numpy(), source.ne[2])
        data, step = source.bytes(), source.nb[2]
        for first, end in self._picks[picked]:
            target.set_tensor(copy, data[first * step : end * step], first * step)

    def _compute_watched(self, graph: SchedGraph, split: Split, backend: Backend) -> bool:
        """Compute a split up to each node that the callback wants to see."""
        assert self._callback is not None
        nodes = [t for t in graph.graph.nodes[split.first : split.end] if not t.op.view]
        first = 0
        for i, t in enumerate(nodes):
            wanted = self._callback(t, True)
            if not wanted and i + 1 < len(nodes):
                continue
            backend.compute(graph.view(nodes[first : i + 1]), fuse=False)
            backend.synchronize()
            if wanted and not self._callback(t, False):
                return False
            first = i + 1
        return True

    def synchronize(self) -> None:
        """Wait until all backends are done."""
        self._wait()
        if not self._is_alloc:  # all places are free: let single graphs always have the same one
            self._next_place = 0

    def _wait(self) -> None:
        for backend in self.backends:
            backend.synchronize()


def _runs(ids: NDArray[np.int32], n: int) -> list[tuple[int, int]]:
    """Numbers below `n` that are among ids, as runs [first, end); others the kernel will refuse."""
    used = np.unique(ids)
    used = used[(used >= 0) & (used < n)]
    parts = np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)
    return [(int(p[0]), int(p[-1]) + 1) for p in parts if len(p)]
