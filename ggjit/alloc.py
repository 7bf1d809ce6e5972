"""Memory for tensors: cutting a buffer in order, and planning a graph's intermediates.

`TensorAllocator` hands out pieces of one buffer, one after the other. `GraphAllocator` gives every tensor of a graph an
offset before anything runs. It walks the nodes in execution order; a node takes the best fitting free block, or writes
over a source that nobody reads after it, and a block is free again once its last reader has its place:

    MLP 256 -> 1024 -> 256, 4 tokens     offset 0            16384     20480
      mul_mat  up                        [ 16384           ]
      add      bias   in place           [ 16384           ]
      relu            in place           [ 16384           ]
      mul_mat  down                      [ 16384           ] [ 4096 ]
      add      bias   in place                               [ 4096 ]

Three kinds of tensors are not planned: those that have data of their own (weights, caches), views (they lie where the
tensor that they show lies), and leafs are planned but never given away, so what was put in an input is still there
after a run. Results that no node reads and tensors marked as outputs are never given away either.

When the walk is over all lifetimes are known, and where its peak is above the bytes that are live at one time, the
blocks are packed anew (`ggjit.packing`); the lower of the two peaks is taken. A plan serves any graph of the same
structure whose tensors are not larger (`ggjit.plan`).

Where one buffer can only hold so many bytes (`BufferType.max_size`), a plan has several, called chunks; a tensor lies
in one of them.

Source: ggml_tallocr and ggml_gallocr.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ggjit.arguments import check_kinds
from ggjit.backend import Buffer, BufferType, init_view, tensor_alloc
from ggjit.op import NONE
from ggjit.plan import Placement, Plan, Tensors, kept_of, shapes_of, takes_over
from ggjit.readable import forget
from ggjit.tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor

_BUFFER_TYPE = "a BufferType such as gg.backend.host_buffer_type()"
_OPEN = 1 << 62  # size of the last free block: memory that no tensor has reached yet


class TensorAllocator:
    """Hands out pieces of one buffer in order.

    Args:
        buffer: to cut.

    Attributes:
        offset: bytes handed out.

    Source: ggml_tallocr.
    """

    def __init__(self, buffer: Buffer) -> None:
        check_kinds("TensorAllocator", Buffer, "a Buffer such as BufferType.new_buffer makes", buffer=buffer)
        self.buffer = buffer
        self.offset = -buffer.base % buffer.type.alignment

    def alloc(self, tensor: Tensor) -> None:
        """Give a tensor the next piece.

        Raises:
            MemoryError: the rest of the buffer is too small.
            ValueError: the tensor has data, or is a view.
        """
        size, left = self.buffer.type.padded_size(tensor), self.buffer.size - self.offset
        if size > left:
            raise MemoryError(
                f"TensorAllocator: the tensor must fit the buffer, got {size} bytes and {left} left of "
                f"{self.buffer.size} ('{tensor.name}')"
            )
        tensor_alloc(self.buffer, tensor, self.buffer.base + self.offset)
        self.offset += size


class FreeBlocks:
    """The free blocks of one buffer, by offset; the last one has no end.

    Attributes:
        peak: highest byte that was ever taken.
    """

    def __init__(self) -> None:
        self.offsets, self.sizes, self.peak = [0], [_OPEN], 0

    def take(self, size: int) -> int:
        """Take the smallest block that is large enough (the last of equal ones); open memory only if none is."""
        return 0 if size == 0 else self.cut(self.best(size), size)

    def best(self, size: int) -> int:
        """Position of the block that `take` would take."""
        sizes = self.sizes
        found, least = len(sizes) - 1, _OPEN - 1
        for i in range(len(sizes) - 1):
            if size <= sizes[i] <= least:
                found, least = i, sizes[i]
        return found

    def cut(self, found: int, size: int) -> int:
        """Take the begin of a block."""
        offset = self.offsets[found]
        if self.sizes[found] == size:
            del self.offsets[found], self.sizes[found]
        else:
            self.offsets[found] += size
            self.sizes[found] -= size
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Give a block back; it joins its free neighbours."""
        if size == 0:
            return
        offsets, sizes = self.offsets, self.sizes
        i = bisect_left(offsets, offset)
        if offset + size == offsets[i]:  # the last block is above every offset that was taken
            offsets[i], sizes[i] = offset, sizes[i] + size
        else:
            offsets.insert(i, offset)
            sizes.insert(i, size)
        if i and offsets[i - 1] + sizes[i - 1] == offset:
            sizes[i - 1] += sizes[i]
            del offsets[i], sizes[i]


class Chunks:
    """The free blocks of one type's memory, which comes in chunks of at most `max_size` bytes.

    Source: ggml_dyn_tallocr.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.chunks = [FreeBlocks()]

    def take(self, size: int) -> tuple[int, int]:
        """Take the smallest block that is large enough, else open memory of the chunk that grows least, else a chunk.

        Returns:
            Number of the chunk, and the offset in it.

        Raises:
            MemoryError: it is more than a chunk.
        """
        if size > self.max_size:
            raise MemoryError(f"must fit a buffer of at most {self.max_size} bytes, got {size}")
        if size == 0:
            return 0, 0
        blocks = [(c, f, f.best(size)) for c, f in enumerate(self.chunks)]
        closed = [(f.sizes[i], -c, f, i) for c, f, i in blocks if i < len(f.sizes) - 1]
        if closed:
            _, c, free, i = min(closed, key=lambda b: b[:2])
            return -c, free.cut(i, size)
        ends = [(f.offsets[-1] + size, c, f) for c, f, _ in blocks]
        grown = [(max(0, end - f.peak), c, f) for end, c, f in ends if end <= self.max_size]
        if not grown:
            self.chunks.append(FreeBlocks())
            return len(self.chunks) - 1, self.chunks[-1].take(size)
        _, c, free = min(grown, key=lambda g: g[:2])
        return c, free.cut(len(free.sizes) - 1, size)

    def give(self, chunk: int, offset: int, size: int) -> None:
        """Give a block back."""
        self.chunks[chunk].give(offset, size)

    @property
    def peaks(self) -> list[int]:
        """Bytes that each chunk needs."""
        return [f.peak for f in self.chunks]


class _Planner:
    """One walk over a graph."""

    def __init__(self, graph: Tensors, types: Sequence[BufferType], is_own: Callable[[Tensor], bool],
                 node_ids: Sequence[int] | None, leaf_ids: Sequence[int] | None) -> None:  # fmt: skip
        self.types = types
        self.tensors = tensors = [*graph.leafs, *graph.nodes]
        self.n_leafs, n = len(graph.leafs), len(tensors)
        self.buffer_ids = [*(leaf_ids or [0] * self.n_leafs), *(node_ids or [0] * (n - self.n_leafs))]
        if len(self.buffer_ids) != n or not all(0 <= b < len(types) for b in self.buffer_ids):
            raise ValueError(
                f"GraphAllocator: each node and leaf must have a buffer id below {len(types)}, got {self.buffer_ids}"
            )
        self.wanted_ids = self.buffer_ids
        # A type that is given twice has one block list: its later indices stand for the first one.
        self.buffer_ids = [types.index(types[b]) for b in self.buffer_ids]
        self.shapes = shapes_of(tensors, is_own, kept_of(graph))
        self.free = [Chunks(type.max_size) for type in types]
        self.children, self.views = [0] * n, [0] * n
        self.kept = [s.op == NONE.id or bool(s.marks & FLAG_OUTPUT) for s in self.shapes]
        self.taken = [False] * n  # does the tensor own its slot now?
        self.chunk, self.offsets, self.sizes, self.inplace = [0] * n, [0] * n, [0] * n, [-1] * n
        self.first, self.last = [0] * n, [max(n - self.n_leafs - 1, 0)] * n

    def run(self) -> Plan:
        """Place all tensors."""
        shapes, n_leafs = self.shapes, self.n_leafs
        children, views = self.children, self.views
        for i, s in enumerate(shapes):
            if s.root >= 0:
                views[s.root] += 1
                self.kept[s.root] |= self.kept[i]
            if i >= n_leafs:
                for j in s.sources:
                    children[j] += 1
        for i in range(n_leafs):
            self.place(i, 0)
        for i, s in enumerate(shapes):
            # What is set before the run must not lie where an earlier node writes.
            if i >= n_leafs and (s.marks & FLAG_INPUT or s.op == NONE.id):
                self.place(i, 0)
        for i in range(n_leafs, len(shapes)):
            step = i - n_leafs
            self.place(i, step)
            for j in shapes[i].sources:
                children[j] -= 1
                if children[j] == 0 and views[j] == 0:
                    self.release(j, step)
        return self.plan()

    def place(self, i: int, step: int) -> None:
        """Give tensor `i` its offset, if it needs one and has none."""
        shape = self.shapes[i]
        if shape.external or self.tensors[i].view_src is not None or self.taken[i]:
            return
        self.taken[i], self.first[i] = True, step
        if self.tensors[i].op.inplace and self.take_over(i, step):
            return
        self.sizes[i] = self.types[self.buffer_ids[i]].padded_size(self.tensors[i])
        try:
            self.chunk[i], self.offsets[i] = self.free[self.buffer_ids[i]].take(self.sizes[i])
        except MemoryError as error:
            raise MemoryError(f"GraphAllocator: a tensor {error} ('{self.tensors[i].name}')") from None

    def take_over(self, i: int, step: int) -> bool:
        """Put node `i` where a source lies that only this node still reads."""
        tensors, shapes, children, views = self.tensors, self.shapes, self.children, self.views
        for j in shapes[i].sources:
            if children[j] != 1 or views[j]:
                continue
            owner = j
            if tensors[j].view_src is not None:
                owner = shapes[j].root
                if owner < 0 or views[owner] != 1 or children[owner]:
                    continue
            if not self.taken[owner] or self.kept[owner] or self.buffer_ids[owner] != self.buffer_ids[i]:
                continue
            if not takes_over(tensors[i], tensors[j]):
                continue
            size = self.types[self.buffer_ids[i]].padded_size(tensors[i])
            if size > self.sizes[owner]:
                continue
            self.offsets[i], self.sizes[i], self.inplace[i] = self.offsets[owner], size, j
            self.chunk[i] = self.chunk[owner]
            self.free[self.buffer_ids[i]].give(self.chunk[i], self.offsets[i] + size, self.sizes[owner] - size)
            self.taken[owner], self.last[owner] = False, step
            return True
        return False

    def release(self, j: int, step: int) -> None:
        """Free what tensor `j`, which has no reader left, holds: its own slot or its share in what it shows."""
        if self.tensors[j].view_src is not None:
            j = self.shapes[j].root
            if j < 0:
                return
            self.views[j] -= 1
            if self.views[j] or self.children[j]:
                return
        if self.taken[j] and not self.kept[j]:
            self.taken[j], self.last[j] = False, step
            self.free[self.buffer_ids[j]].give(self.chunk[j], self.offsets[j], self.sizes[j])

    def plan(self) -> Plan:
        """What was decided."""
        placements = []
        for i, s in enumerate(self.shapes):
            if s.external:
                placements.append(Placement("external"))
            elif self.tensors[i].view_src is not None:
                placements.append(Placement("view"))
            else:
                b, c = self.buffer_ids[i], self.chunk[i]
                at = (b, sum(self.free[b].peaks[:c]) + self.offsets[i], self.sizes[i])
                placements.append(Placement("planned", *at, self.inplace[i], self.first[i], self.last[i], c))
        chunks = [f.peaks for f in self.free]
        best_fit = [sum(peaks) for peaks in chunks]
        return Plan(placements, chunks, self.n_leafs, self.shapes, self.wanted_ids, best_fit)


def _listed(types: Any) -> Iterable[Any]:
    if not isinstance(types, Iterable) or isinstance(types, str):
        check_kinds("GraphAllocator", BufferType, _BUFFER_TYPE, types=types)
    return types  # type: ignore[no-any-return]


def _check_graph(graph: Any) -> None:
    if not hasattr(graph, "leafs"):  # a `GraphView` will do
        raise TypeError(f"GraphAllocator: graph must be a Graph, got {type(graph).__name__}; gg.build makes one")


class GraphAllocator:
    """Plans and holds the memory of graphs' intermediates.

    Args:
        types: the buffer type, or one for each backend. A type given twice has one buffer.

    Attributes:
        plan: the plan in force, None before the first `reserve`.
        reason: why the last graph that the plan did not serve had to be planned anew: which tensor, which rule.
        chunks: for each type its buffers: none where a plan needs no memory, several where it needs more than one may
            hold.

    Raises:
        TypeError: a type is no BufferType.
        ValueError: no type is given.

    Source: ggml_gallocr.
    """

    def __init__(self, types: BufferType | Sequence[BufferType]) -> None:
        self.types: tuple[BufferType, ...] = (types,) if isinstance(types, BufferType) else tuple(_listed(types))
        for i, one in enumerate(self.types):
            check_kinds("GraphAllocator", BufferType, _BUFFER_TYPE, **{f"types[{i}]": one})
        if not self.types:
            raise ValueError("GraphAllocator: at least one buffer type must be given, got none")
        self.chunks: list[list[Buffer]] = [[] for _ in self.types]
        self.plan: Plan | None = None
        self.reason: str | None = None
        self._made: weakref.WeakSet[Buffer] = weakref.WeakSet()

    @property
    def buffers(self) -> list[Buffer | None]:
        """The first chunk of each type, None where there is none."""
        return [chunks[0] if chunks else None for chunks in self.chunks]

    def _is_own(self, t: Tensor) -> bool:
        """Did this allocator place the tensor?"""
        buffer = t.buffer
        return buffer is not None and buffer in self._made

    def _new_buffer(self, type: BufferType, size: int) -> Buffer:
        return type.new_buffer(size, "compute")

    def _add_chunk(self, i: int, size: int) -> None:
        new = self._new_buffer(self.types[i], size)
        self._made.add(new)
        self.chunks[i].append(new)

    def measure(
        self, graph: Tensors, node_ids: Sequence[int] | None = None, leaf_ids: Sequence[int] | None = None
    ) -> Plan:
        """Plan a graph without keeping the plan or allocating anything; see `reserve`."""
        _check_graph(graph)
        plan = _Planner(graph, self.types, self._is_own, node_ids, leaf_ids).run()
        plan.pack([type.max_size for type in self.types])
        return plan

    def reserve(
        self, graph: Tensors, node_ids: Sequence[int] | None = None, leaf_ids: Sequence[int] | None = None
    ) -> Plan:
        """Plan a graph and allocate the buffers that became too small; no tensor is touched.

        Args:
            graph: usually the largest that will come.
            node_ids: index of the buffer for each node, by default 0.
            leaf_ids: the same for each leaf.

        Returns:
            The plan, which replaces the one before.

        Raises:
            ValueError: bad buffer ids, or a view whose source is not in the graph and has no data.
            MemoryError: there is not enough memory.

        Source: ggml_gallocr_reserve_n.
        """
        plan = self.measure(graph, node_ids, leaf_ids)
        self.plan = None  # if memory runs out, nothing is planned
        for i, sizes in enumerate(plan.chunks):
            have = [b.size for b in self.chunks[i]] + [0] * len(sizes)
            if any(size > h for size, h in zip(sizes, have, strict=False)):
                self.chunks[i] = []  # the old ones may go before the new ones come
                for size in sizes:
                    self._add_chunk(i, size)
        self.plan = plan
        return plan

    def misfit(
        self, graph: Tensors, node_ids: Sequence[int] | None = None, leaf_ids: Sequence[int] | None = None
    ) -> str | None:
        """Why the plan in force cannot serve a graph, in words; None if it can.

        Args:
            graph: to serve.
            node_ids: as in `reserve`; by default those of the plan.
            leaf_ids: the same for each leaf.
        """
        _check_graph(graph)
        if self.plan is None:
            return "nothing is planned yet"
        ids = None
        if node_ids is not None or leaf_ids is not None:
            ids = [*(leaf_ids or [0] * len(graph.leafs)), *(node_ids or [0] * len(graph.nodes))]
        return self.plan.fit(graph, self.types, self._is_own, ids)

    def needs_realloc(
        self, graph: Tensors, node_ids: Sequence[int] | None = None, leaf_ids: Sequence[int] | None = None
    ) -> bool:
        """Must the graph be planned anew? Why is then in `reason`.

        Source: ggml_gallocr_needs_realloc.
        """
        misfit = self.misfit(graph, node_ids, leaf_ids)
        if misfit is not None:
            self.reason = misfit
        return misfit is not None

    def alloc_graph(self, graph: Tensors) -> bool:
        """Give every tensor of a graph its data and buffer.

        What tensors of other graphs held in this allocator's memory is lost.

        Args:
            graph: one that the plan in force serves; with one buffer type any graph, which is then planned first.

        Returns:
            False if the graph must be planned anew and there are several buffer types: call `reserve` with the buffer
            ids of this graph.

        Raises:
            ValueError: a view whose source is not in the graph and has no data.
            MemoryError: there is not enough memory.

        Source: ggml_gallocr_alloc_graph.
        """
        if self.needs_realloc(graph):
            if len(self.types) > 1:
                return False
            self.reserve(graph)
        assert self.plan is not None
        for buffer in [b for chunks in self.chunks for b in chunks]:
            buffer.reset()
            forget(buffer)
        views = []
        for t, p in zip([*graph.leafs, *graph.nodes], self.plan.placements, strict=True):
            if p.kind == "view":
                views.append(t)
            elif p.kind == "planned":
                if not self.chunks[p.buffer_id]:  # a plan of nothing but empty tensors
                    self._add_chunk(p.buffer_id, 0)
                buffer = self.chunks[p.buffer_id][p.chunk]
                t.buffer, t.data = buffer, buffer.base + self.plan.offset_in_chunk(p)
                buffer.init_tensor(t)
        for t in views:
            init_view(t)
        return True

    def get_buffer_size(self, buffer_id: int = 0) -> int:
        """Bytes of a type's chunks; 0 for a type that an earlier index has.

        Source: ggml_gallocr_get_buffer_size.
        """
        return sum(b.size for b in self.chunks[buffer_id])
