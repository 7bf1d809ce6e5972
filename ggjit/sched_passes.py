"""Which backend computes what: the scheduler's passes, one function each.

    1  assign_by_data       nodes whose data or weights lie somewhere are computed there
    2  expand_assignments   their neighbours in the order of computing join them, those of fast backends first
    3  upgrade_assignments  nodes go to a faster backend of the same memory; the unassigned where most sources are
    4  assign_sources       leafs and views go where they are read
    5  split_graph          the graph is cut where the backend changes; sources that it cannot read are copied

Backends are given by their positions, the fastest first; the last one is the CPU, which computes everything. A pass
looks at the user's tensors and changes none of them: assignments, with the reason for each, are kept beside them.

Source: ggml_backend_sched_split_graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ggjit.backend import Backend, Buffer, BufferType, buffer_of, host_buffer_type
from ggjit.graph import Graph
from ggjit.op import NONE
from ggjit.tensor import FLAG_INPUT, Tensor

MAX_BACKENDS = 16
MAX_SPLIT_INPUTS = 30
MAX_COPIES = 4
_NO_WEIGHT_RULE = ("rope", "flash_attn_ext")  # their weights (factors, sinks) are too small to decide where they run


class Assignments:
    """The backend of each tensor of a graph, and why.

    Args:
        graph: the user's graph.
        backends: the fastest first.
        types: the buffer type for each backend's results.
        user: tensors that the user has placed.
        op_offload: may a backend compute nodes whose weights lie in host memory (`Backend.offloads`)?
        is_planned: is a buffer one that the scheduler makes for results? What lies there may move.

    Attributes:
        ids: position of the backend of each tensor that has one.
        reasons: for each of them the rule, as "pass.rule": "1.wgt0", "2.down", ...
        history: `ids` after each pass, by the pass's name.
    """

    def __init__(
        self,
        graph: Graph,
        backends: Sequence[Backend],
        types: Sequence[BufferType],
        user: Mapping[Tensor, int] | None = None,
        op_offload: bool = True,
        is_planned: Callable[[Buffer], bool] = lambda _: False,
    ) -> None:
        self.graph, self.backends, self.types, self.op_offload = graph, backends, types, op_offload
        self.ids: dict[Tensor, int] = {}
        self.reasons: dict[Tensor, str] = {}
        self.history: dict[str, dict[Tensor, int]] = {}
        self._is_planned = is_planned
        self._supported: dict[tuple[Tensor, int], bool] = {}
        for t, i in (user or {}).items():
            self.assign(t, i, "user")

    @property
    def last(self) -> int:
        """The CPU's position."""
        return len(self.backends) - 1

    def assign(self, t: Tensor, i: int, reason: str) -> None:
        """Give a tensor its backend."""
        self.ids[t], self.reasons[t] = i, reason

    def assign_if_supported(self, t: Tensor, i: int, reason: str) -> bool:
        """Give a node to a backend that has a kernel for it; False if it has none."""
        if self.supports(i, t):
            self.assign(t, i, reason)
            return True
        return False

    def supports(self, i: int, node: Tensor) -> bool:
        """Has backend `i` a kernel for the node?"""
        key = node, i
        if key not in self._supported:
            self._supported[key] = self.backends[i].supports(node)
        return self._supported[key]

    def memory(self, t: Tensor) -> BufferType | None:
        """The type of the memory that a tensor's data has before the graph is planned, None if it has none."""
        root, buffer = t if t.view_src is None else t.view_src, buffer_of(t)
        if buffer is None:
            return host_buffer_type() if root.data else None  # an arena's or an array's
        return None if self._is_planned(buffer) else buffer.type

    def is_weight(self, t: Tensor) -> bool:
        """Does the tensor lie in a buffer of weights?"""
        buffer = buffer_of(t)
        return buffer is not None and buffer.usage == "weights"

    def reads(self, i: int, t: Tensor) -> bool:
        """Can backend `i` read a tensor where it lies, or where its backend will put it?"""
        type = self.memory(t)
        if type is None:
            owner = self.ids.get(t if t.view_src is None else t.view_src)
            type = None if owner is None else self.types[owner]
        return type is not None and self.backends[i].supports_buffer_type(type)

    def computed(self) -> Iterable[Tensor]:
        """The nodes that compute something, views left out."""
        return (t for t in self.graph.nodes if not t.op.view)

    def run(self) -> Assignments:
        """Do passes 1 to 4.

        Raises:
            NotImplementedError: no backend computes a node where its data lies.
        """
        for each in (assign_by_data, expand_assignments, upgrade_assignments, assign_sources):
            each(self)
            self.history[each.__name__] = dict(self.ids)
        return self


# --- pass 1 -----------------------------------------------------------------------------------------------------------


def assign_by_data(a: Assignments) -> None:
    """Pass 1: tensors with data go where it lies, inputs to the CPU, nodes with weights to the weights.

    What the user has placed stays. Rules, in this order:

        1.dst    the result's memory is given: the first backend that can use it and has a kernel
        1.vsrc   the same for the memory that a view shows
        1.inp    marked as an input: the CPU
        1.off    source weights lie in host memory, and a faster backend takes the trouble of copying them
        1.wgtN   source N is a weight: the first backend that reads its memory and has a kernel
    """
    for t in (*a.graph.leafs, *a.graph.nodes):
        if t not in a.ids:
            found = _by_data(a, t)
            if found is not None:
                a.assign(t, *found)


def _by_data(a: Assignments, t: Tensor) -> tuple[int, str] | None:
    type = a.memory(t)
    if type is not None:
        i = _first(a, type, t)
        if i is None:
            what = "read" if t.op is NONE else f"compute {t.op.name} in"
            raise NotImplementedError(
                f"Scheduler: some backend must {what} the memory of the tensor, got a {type.name} buffer and backends "
                f"{[b.name for b in a.backends]} ('{t.name}')"
            )
        return i, "1.dst" if t.view_src is None else "1.vsrc"
    if t.flags & FLAG_INPUT:
        return a.last, "1.inp"
    if t.op.name in _NO_WEIGHT_RULE:
        return None
    for k, s in enumerate(t.src):
        if s is None or not a.is_weight(s):
            continue
        memory = a.memory(s)
        i = None if memory is None else _first(a, memory, t)
        if a.op_offload and i == a.last and memory is not None and memory.is_host:
            for b in range(a.last):
                if a.supports(b, t) and a.backends[b].offloads(t):
                    return b, "1.off"
        return None if i is None else (i, f"1.wgt{k}")
    return None


def _first(a: Assignments, type: BufferType, node: Tensor) -> int | None:
    """The first backend that uses memory of a type and computes a node."""
    for i, backend in enumerate(a.backends):
        if backend.supports_buffer_type(type) and a.supports(i, node):
            return i
    return None


# --- pass 2 -----------------------------------------------------------------------------------------------------------


def expand_assignments(a: Assignments) -> None:
    """Pass 2: unassigned nodes join the node before them, else the one after them.

    Four walks: down and up for all backends but the CPU, whose nodes end a run; then down and up for all. So the CPU
    gets nothing between two nodes of a faster backend but what it cannot compute.

        2.gpu_down, 2.gpu_up, 2.down, 2.up
    """
    nodes = list(a.computed())
    for reason, order, skips_cpu in (
        ("2.gpu_down", nodes, True),
        ("2.gpu_up", nodes[::-1], True),
        ("2.down", nodes, False),
        ("2.up", nodes[::-1], False),
    ):
        current: int | None = None
        for t in order:
            i = a.ids.get(t)
            if i is not None:
                current = None if skips_cpu and i == a.last else i
            elif current is not None:
                a.assign_if_supported(t, current, reason)


# --- pass 3 -----------------------------------------------------------------------------------------------------------


def upgrade_assignments(a: Assignments) -> None:
    """Pass 3: nodes move to a faster backend of the same memory, the unassigned to where most sources can be read.

    3.upg    a faster backend has the same buffer type, a kernel, and reads all sources
    3.best   of the backends with a kernel the first that reads most of the sources that have a place
    """
    for t in a.computed():
        i = a.ids.get(t)
        sources = [s for s in t.src if s is not None]
        if i is None:
            placed = [s for s in sources if s in a.ids or s.view_src in a.ids]
            able = [b for b in range(len(a.backends)) if a.supports(b, t)]
            if able:
                a.assign(t, max(able, key=lambda b: sum(a.reads(b, s) for s in placed)), "3.best")
            continue
        if a.reasons[t] == "user":
            continue
        for b in range(i):
            if a.types[b] is a.types[i] and a.supports(b, t) and all(a.reads(b, s) for s in sources):
                a.assign(t, b, "3.upg")
                break


# --- pass 4 -----------------------------------------------------------------------------------------------------------


def assign_sources(a: Assignments) -> None:
    """Pass 4: views go with what they show, other sources with their first reader.

        4.vsrc    a view: the backend of what it shows
        4.cur     a source that nothing else placed: the reader's backend
        4.first   a node that is still left: the first backend with a kernel
        4.write   a node that writes where its backend cannot: a backend that can; what is written may follow
        4.unread  a leaf that nothing reads: the CPU

    Raises:
        NotImplementedError: no backend computes a node, or none where it writes.
    """
    writers: dict[Tensor, list[Tensor]] = {}
    for t in a.computed():
        for w in written_by(t):
            writers.setdefault(w, []).append(t)
    for t in a.graph.nodes:
        if t not in a.ids and t.view_src is not None and t.view_src in a.ids:
            a.assign(t, a.ids[t.view_src], "4.vsrc")
        if t not in a.ids and not any(a.assign_if_supported(t, i, "4.first") for i in range(len(a.backends))):
            raise NotImplementedError(
                f"Scheduler: some backend must compute {t.op.name}, got {[b.name for b in a.backends]} ('{t.name}')"
            )
        if not t.op.view:
            _assign_where_written(a, t, writers)
        for s in t.src:
            if s is not None and s not in a.ids:
                root = s.view_src
                if root is not None and root in a.ids:
                    a.assign(s, a.ids[root], "4.vsrc")
                else:
                    a.assign(s, a.ids[t], "4.cur")
    for t in a.graph.leafs:
        if t not in a.ids:
            a.assign(t, a.last, "4.unread")


def _assign_where_written(a: Assignments, t: Tensor, writers: Mapping[Tensor, list[Tensor]]) -> None:
    """A result that lies in another tensor's bytes must be written by a backend that reaches them.

    If that tensor is a planned one, it and all that write into it go to one backend that computes them all.
    """
    if all(w not in a.ids or a.reads(a.ids[t], w) for w in written_by(t)):
        return
    group, pending = dict.fromkeys([t]), [t]
    while pending:
        for w in written_by(pending.pop()):
            new = [g for g in (w, *writers[w]) if a.memory(w) is None and g not in group]
            group.update(dict.fromkeys(new))
            pending += new
    fixed = [m for g in group for w in written_by(g) if (m := a.memory(w)) is not None]
    able = [
        i
        for i, b in enumerate(a.backends)
        if all(a.supports(i, g) for g in group) and all(map(b.supports_buffer_type, fixed))
    ]
    if not able:
        raise NotImplementedError(
            f"Scheduler: some backend must compute {t.op.name} and all that writes where it writes, got "
            f"{[b.name for b in a.backends]} ('{t.name}')"
        )
    i = min(able, key=lambda i: (i != a.ids.get(written_by(t)[0], i), i != a.ids[t], i))
    for g in group:
        if a.ids.get(g) != i:
            a.assign(g, i, "4.write")


def written_by(t: Tensor) -> list[Tensor]:
    """The tensors, no views, whose bytes a node changes."""
    if t.op.view:
        return []
    changed = [t, *(s for s in (t.src[i] for i in t.op.state if i < len(t.src)) if s is not None)]
    return [c if c.view_src is None else c.view_src for c in changed]


# --- pass 5 -----------------------------------------------------------------------------------------------------------


class InputCopy(NamedTuple):
    """A tensor that a split reads from a copy in its own backend's memory."""

    tensor: Tensor
    backend_id: int


@dataclass
class Split:
    """Nodes that one backend computes at a stretch.

    Attributes:
        backend_id: position of the backend.
        first, end: the nodes [first, end) of the user's graph.
        reason: why it begins: "first", "backend", "weight" (of memory that must be copied: its room can be used again),
            "inputs" (the split before has as many as it may) or "ids" (they tell which experts must be copied, and the
            split before computes them).
        inputs: numbers of the copies made when it begins.
    """

    backend_id: int
    first: int
    end: int
    reason: str
    inputs: list[int] = field(default_factory=list)


class Picked(NamedTuple):
    """What tells which parts of a copy are needed.

    Attributes:
        ids: numbers of the matrices that are read.
        version: how often the graph has written to `ids` before.
    """

    ids: Tensor
    version: int


@dataclass
class Splits:
    """What pass 5 decides.

    Attributes:
        splits: in order.
        copies: all copies, by number.
        reads: for each node that reads copies their numbers by the tensors that they stand for.
        picked: numbers of the copies of which only the used matrices are made.
    """

    splits: list[Split] = field(default_factory=list)
    copies: list[InputCopy] = field(default_factory=list)
    reads: dict[Tensor, dict[Tensor, int]] = field(default_factory=dict)
    picked: dict[int, Picked] = field(default_factory=dict)


def split_graph(a: Assignments, max_inputs: int = MAX_SPLIT_INPUTS) -> Splits:
    """Pass 5: cut the graph and find what must be copied.

    A copy serves all later splits of its backend, until a node writes into what was copied; one of which only the used
    matrices are made serves its reader alone.
    """
    out, nodes = Splits(), a.graph.nodes
    here: dict[InputCopy, int] = {}  # copies that hold what their tensors hold now
    writes: Counter[Tensor] = Counter()
    made: set[Tensor] = set()  # what the split has written so far
    split: Split | None = None
    for n, t in enumerate(nodes):
        if t.op.view:
            continue
        i, picked = a.ids[t], _picked_ids(a, t)
        reason = _begins(a, t, split, here, made, max_inputs)
        if reason:
            split, made = Split(i, 0 if split is None else n, len(nodes), reason), set()
            if out.splits:
                out.splits[-1].end = n
            out.splits.append(split)
        assert split is not None
        for s in t.src:
            if s is None or a.reads(i, s):
                continue
            copy = InputCopy(s, i)
            if copy not in here:
                here[copy] = len(out.copies)
                split.inputs.append(len(out.copies))
                if picked is not None and s is _picked(t):
                    out.picked[len(out.copies)] = Picked(picked, writes[root_of(picked)])
                out.copies.append(copy)
            out.reads.setdefault(t, {})[s] = here[copy]
        changed = set(written_by(t))
        made |= changed
        writes.update(changed)
        for c in [c for c, k in here.items() if root_of(c.tensor) in changed or k in out.picked]:
            del here[c]
    return out


def root_of(t: Tensor) -> Tensor:
    """The tensor whose bytes a view shows, or the tensor itself."""
    return t if t.view_src is None else t.view_src


def _picked(t: Tensor) -> Tensor:
    """The source of a node of which it reads only some matrices."""
    assert t.op.picks is not None
    source = t.src[t.op.picks[0]]
    assert source is not None
    return source


def _picked_ids(a: Assignments, t: Tensor) -> Tensor | None:
    """What tells which of a node's weights must be copied to its backend; None if all or none must."""
    if t.op.picks is None:
        return None
    weights, ids = _picked(t), t.src[t.op.picks[1]]
    memory = a.memory(weights)
    if ids is None or memory is None or not memory.is_host or not a.is_weight(weights) or a.reads(a.ids[t], weights):
        return None
    return ids if weights.is_contiguous else None


def _begins(a: Assignments, t: Tensor, split: Split | None, here: Mapping[InputCopy, int], made: Set[Tensor],
            max_inputs: int) -> str:  # fmt: skip
    """Why a node begins a new split; "" if it does not."""
    if split is None:
        return "first"
    i = split.backend_id
    if a.ids[t] != i:
        return "backend"
    new = {s for s in t.src if s is not None and not a.reads(i, s) and InputCopy(s, i) not in here}
    if split.inputs and any(a.is_weight(s) for s in new):
        return "weight"
    picked = _picked_ids(a, t)
    if picked is not None and root_of(picked) in made and _picked(t) in new:
        return "ids"
    return "inputs" if split.inputs and new and len(split.inputs) + len(new) > max_inputs else ""


def graph_inputs(a: Assignments) -> dict[Tensor, list[int]]:
    """The tensors marked as inputs, each with the backends that read it."""
    readers: dict[Tensor, list[int]] = {}
    for t in a.computed():
        for s in t.src:
            if s is not None and s.flags & FLAG_INPUT:
                found = readers.setdefault(s, [])
                if a.ids[t] not in found:
                    found.append(a.ids[t])
    return readers
