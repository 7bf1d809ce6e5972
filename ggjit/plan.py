"""The plan of a graph's memory: where each tensor lies, and whether another graph may lie there too.

A plan rests on the structure of a graph, not on its tensors: it serves every graph of the same structure whose tensors
are not larger. The structure is all that decided about a place: ops, sources, views, marks, which tensors have data of
their own, and the layouts that let a node write in place. `Plan.fit` compares all of it, so no stale plan is ever used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ggjit.backend import BufferType
from ggjit.packing import Link, lower_bound, pack
from ggjit.tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor

_MARKS = FLAG_INPUT | FLAG_OUTPUT


class Tensors(Protocol):
    """What is planned: a `Graph`, or a scheduler's copy of one. `Graph.kept` is honoured where there is one."""

    nodes: list[Tensor]
    leafs: list[Tensor]


class Placement(NamedTuple):
    """Where a plan puts one tensor.

    Attributes:
        kind: "planned", "view" (of what `inplace` tells) or "external" (it has data of its own).
        buffer_id: index of the buffer; -1 if not planned.
        offset: in the buffer, in all its chunks one behind the other.
        size: bytes of the slot, rounded up to the alignment.
        inplace: position of the source whose memory it takes over, -1 if none.
        first, last: positions of the nodes between which the slot is in use.
        chunk: which one of the buffer's it lies in.
    """

    kind: str
    buffer_id: int = -1
    offset: int = 0
    size: int = 0
    inplace: int = -1
    first: int = 0
    last: int = 0
    chunk: int = 0


class Shape(NamedTuple):
    """What a plan rests on for one tensor, its size aside; tensors are told by their positions.

    Attributes:
        op: its id.
        marks: FLAG_INPUT and FLAG_OUTPUT; what is to be kept counts as an output.
        external: has it data of its own.
        root: what a view shows; -1 if that is not in the graph.
        sources: of the op.
    """

    op: int
    marks: int
    external: bool
    root: int
    sources: tuple[int, ...]


@dataclass
class Plan:
    """Places of all tensors of a graph. Positions count the leafs, then the nodes.

    Attributes:
        placements: for each tensor.
        chunks: bytes of the chunks of each buffer: one, where that can hold all.
        n_leafs: number of leafs.
        buffer_ids: for each tensor the buffer that was asked for.
        best_fit: bytes that each buffer would need as the walk placed the tensors, before packing.
    """

    placements: list[Placement]
    chunks: list[list[int]]
    n_leafs: int
    shapes: list[Shape] = field(repr=False)
    buffer_ids: list[int] = field(repr=False)
    best_fit: list[int]

    @property
    def sizes(self) -> list[int]:
        """Bytes that each buffer needs."""
        return [sum(sizes) for sizes in self.chunks]

    def offset_in_chunk(self, p: Placement) -> int:
        """Offset of a planned tensor in its chunk."""
        return p.offset - sum(self.chunks[p.buffer_id][: p.chunk])

    def chains(self, buffer_id: int = 0) -> list[list[int]]:
        """Positions of the tensors that lie in a buffer, those that write over each other together, in order."""
        chains: list[list[int]] = []
        chain_of: dict[int, list[int]] = {}
        for i, p in enumerate(self.placements):
            if p.kind != "planned" or p.buffer_id != buffer_id or p.size == 0:
                continue
            if p.inplace < 0:
                chain_of[i] = [i]
                chains.append(chain_of[i])
            else:
                source = p.inplace if self.placements[p.inplace].kind == "planned" else self.shapes[p.inplace].root
                chain_of[i] = chain_of[source]
                chain_of[i].append(i)
        return chains

    def lower_bound(self, buffer_id: int = 0) -> int:
        """The most bytes that are live at one step in a buffer: no plan with the same in-place choices needs less."""
        return lower_bound([self._links(chain) for chain in self.chains(buffer_id)])

    def _links(self, chain: Sequence[int]) -> list[Link]:
        return [Link(p.first, p.last, p.size) for p in (self.placements[i] for i in chain)]

    def pack(self, max_sizes: Sequence[int]) -> None:
        """Move the tensors of each buffer where that lowers the peak; which tensors write in place stays as it is.

        Args:
            max_sizes: most bytes of a chunk of each buffer; what is packed lies in one.
        """
        for buffer_id, size in enumerate(self.sizes):
            chains = self.chains(buffer_id)
            links = [self._links(chain) for chain in chains]
            offsets = pack(links, size)
            peak = 0 if offsets is None else max(at + c[0].size for at, c in zip(offsets, links, strict=True))
            if offsets is None or peak > max_sizes[buffer_id]:
                continue
            for chain, offset in zip(chains, offsets, strict=True):
                for i in chain:
                    self.placements[i] = self.placements[i]._replace(offset=offset, chunk=0)
            self.chunks[buffer_id] = [peak]

    def fit(self, graph: Tensors, types: Sequence[BufferType], is_own: Callable[[Tensor], bool],
            buffer_ids: Sequence[int] | None = None) -> str | None:  # fmt: skip
        """Why the plan cannot serve a graph, None if it can.

        Args:
            graph: to serve.
            types: of the buffers.
            is_own: is a tensor's memory the allocator's, so that it may be placed anew?
            buffer_ids: for each tensor the buffer that is wanted, if that may have changed.
        """
        tensors = [*graph.leafs, *graph.nodes]
        if len(graph.leafs) != self.n_leafs or len(tensors) != len(self.placements):
            planned = len(self.placements) - self.n_leafs
            return (
                f"{planned} nodes and {self.n_leafs} leafs are planned, got {len(graph.nodes)} and {len(graph.leafs)}"
            )
        shapes = shapes_of(tensors, is_own, kept_of(graph))
        if shapes != self.shapes:
            i = next(i for i, (a, b) in enumerate(zip(shapes, self.shapes, strict=True)) if a != b)
            what = zip(Shape._fields, self.shapes[i], shapes[i], strict=True)
            name, had, has = next(w for w in what if w[1] != w[2])
            return f"'{tensors[i].name}' is planned with {name} {had}, got {has}"
        if buffer_ids is not None and list(buffer_ids) != self.buffer_ids:
            i = next(i for i, (a, b) in enumerate(zip(buffer_ids, self.buffer_ids, strict=True)) if a != b)
            return f"'{tensors[i].name}' is planned in buffer {self.buffer_ids[i]}, got {buffer_ids[i]}"
        for t, p in zip(tensors, self.placements, strict=True):
            if p.buffer_id < 0:
                continue
            size = types[p.buffer_id].alloc_size(t)
            if size > p.size:
                return f"{p.size} bytes are planned for '{t.name}', got {size}"
            if p.inplace >= 0 and not takes_over(t, tensors[p.inplace]):
                return f"'{t.name}' is planned in place of '{tensors[p.inplace].name}', whose layout differs now"
        return None


def takes_over(t: Tensor, source: Tensor) -> bool:
    """Do a node and a source have the same layout and begin at the same byte?"""
    same = t.ne == source.ne and t.nb == source.nb and t.type is source.type
    return same and (source.view_src is None or source.view_offs == 0)


def kept_of(graph: Tensors) -> Set[Tensor]:
    """What is to be readable after a run besides outputs."""
    kept: Set[Tensor] = getattr(graph, "kept", frozenset())
    return kept


def shapes_of(
    tensors: Sequence[Tensor], is_own: Callable[[Tensor], bool], kept: Set[Tensor] = frozenset()
) -> list[Shape]:
    """The structure of a graph.

    Raises:
        ValueError: a view shows a tensor that is neither in the graph nor has data.
    """
    index = {t: i for i, t in enumerate(tensors)}
    index_of, shapes = index.__getitem__, []
    for t in tensors:
        root, external = -1, False
        if t.view_src is not None:
            root = index.get(t.view_src, -1)
            if root < 0 and (t.view_src.data == 0 or is_own(t.view_src)):
                raise ValueError(
                    "GraphAllocator: a viewed tensor must be in the graph or have data of its own, got none "
                    f"('{t.view_src.name}')"
                )
        else:
            external = t.data != 0 and not is_own(t)
        sources = tuple([index_of(s) for s in t.src if s is not None])
        marks = t.flags & _MARKS | (FLAG_OUTPUT if t in kept else 0)
        shapes.append(Shape(t.op.id, marks, external, root, sources))
    return shapes
