"""Lowering: from a graph whose tensors have data to a packed program of kernel calls.

Each node becomes one step, or what its op's `lower` emits; where a fusion rule fits, a chain of nodes becomes one step
(`ggjit.fusion`). Kernels may share work that several nodes need (quantized activations), made once as a step of its
own. A step is a row of four int64:

    entry     address of the kernel's C entry
    header    address of the tensor record that the kernel computes
    task      address of two int64: scratch memory and its size
    flags     BARRIER: all threads meet after the step; COUNTER: the step shares work by the counter in its scratch;
              EACH: each thread computes the step whole; RECORDS: header is the address of a table, of each thread's

Nothing of the user's graph is changed: records that are needed besides its own lie in contexts of the lowering. Scratch
has two parts: derived tensors, placed by their lifetimes, and one work buffer that all steps use in turn; its first 64
bytes hold the chunk counter. Steps that share work by a counter and need no scratch, or whose threads keep to their
own parts of it, have a counter of their own each, so that they can follow each other without a barrier.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import readable
from ggjit.barriers import COUNTER, EACH, RECORDS, set_barriers
from ggjit.context import WORK_BUFFER, Context, aligned_bytes, tensor_overhead
from ggjit.fusion import Fused, Match
from ggjit.op import COUNTER_LINE, NONE, PARAM_BYTES
from ggjit.replicas import Replicas
from ggjit.tensor import PARAMS_AT, Dims, Tensor, new_node
from ggjit.tensor_values import memory_of
from ggjit.types import I8, Type

if TYPE_CHECKING:
    from ggjit.graph import Graph
    from ggjit.jit import Kernel
    from ggjit.threadpool import Pool

SCRATCH_ALIGN = 64
_RECORDS = 256  # headers in each context of a lowering


class Scratch:
    """Scratch memory that several programs use in turn.

    Attributes:
        nbytes: of the block in force.
    """

    def __init__(self) -> None:
        self._block = aligned_bytes(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the block in force."""
        return self._block.nbytes

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes of the block. If it is too small it is made anew; programs that have the old one keep it."""
        if nbytes > self.nbytes:
            self._block = aligned_bytes(nbytes)
        return self._block[:nbytes]


class Step(NamedTuple):
    """One kernel call: `record` is the header it reads, `node` the graph's node it works for."""

    kernel: Kernel
    record: Tensor
    node: Tensor
    work: int


class _Scratch:
    """A tensor of the lowering: its size and the steps between which it lives."""

    __slots__ = ("first", "last", "nbytes", "offset", "tensor")

    def __init__(self, tensor: Tensor, nbytes: int, step: int) -> None:
        self.tensor, self.nbytes, self.first, self.last, self.offset = tensor, nbytes, step, step, -1


class Lowering:
    """What an op's `lower` works with.

    Args:
        n_threads: threads that will run the program.
        nodes: of the graph.

    Attributes:
        readers: the nodes that read a tensor.
        replicas: the steps that each thread computes for itself; known when all are emitted.
    """

    def __init__(self, n_threads: int, nodes: Sequence[Tensor] = ()) -> None:
        self.n_threads = n_threads
        self.readers: dict[Tensor | None, list[Tensor]] = {}
        for node in nodes:
            for t in node.src:
                self.readers.setdefault(t, []).append(node)
        self.steps: list[Step] = []
        self.node: Tensor | None = None  # the graph's node that is being lowered
        self._contexts: list[Context] = []
        self._scratch: dict[Tensor, _Scratch] = {}
        self._derived: dict[tuple[Any, ...], Tensor] = {}
        self._copies: dict[Tensor, Tensor] = {}  # fresh record: tensor whose data it writes
        self.replicas: Replicas

    # -- what ops call -----------------------------------------------------------------------------------------------

    def emit(
        self,
        kernel: Kernel,
        dst: Tensor,
        src: tuple[Tensor | None, ...] | None = None,
        params: Sequence[int] | bytes | None = None,
        work: int = 0,
    ) -> None:
        """Append a step that computes `dst`.

        Args:
            kernel: what runs.
            dst: a node of the graph, or a tensor of this lowering.
            src: sources the kernel reads, by default those of `dst`.
            params: op_params as int32 words or 64 bytes, by default those of `dst`.
            work: bytes of scratch beyond the chunk counter's line.
        """
        record = dst
        if src is not None or params is not None:
            record = self._record(dst.type, dst.ne, dst.nb, dst.src if src is None else src)
            record.data = dst.data
            data = dst.op_params if params is None else bytes(params) if isinstance(params, bytes) else _words(params)
            record.context.buffer[record.offset + PARAMS_AT : record.offset + PARAMS_AT + PARAM_BYTES] = data
            self._copies[record] = dst
        if len(record.src) < kernel.n_src - kernel.n_optional:
            node = self.node if self.node is not None else dst
            raise TypeError(
                f"{node.op.name}: a kernel must take no more sources than the node has, got {kernel.name} with "
                f"{kernel.n_src} and {len(record.src)} ('{node.name}')"
            )
        at = len(self.steps)
        for t in (dst, *record.src):
            if t is not None and t in self._scratch:
                self._scratch[t].last = at
        self.steps.append(Step(kernel, record, self.node if self.node is not None else dst, work))

    def derived(self, source: Tensor, kind: str, type: Type, ne: Dims, nbytes: int) -> tuple[Tensor, bool]:
        """A tensor computed from `source` that all users of the same kind share.

        Args:
            source: what it is made from.
            kind: what it is; with the source's bytes and layout the key of sharing.
            type: for its header.
            ne: for its header.
            nbytes: its size.

        Returns:
            The tensor, and True if it is new: then emit the step that fills it.
        """
        root = source.view_src if source.view_src is not None else source
        key = (root, source.view_offs, source.type, source.ne, source.nb, kind)
        found = self._derived.get(key)
        if found is not None:
            return found, False
        made = self._derived[key] = self.scratch(type, ne, nbytes)
        return made, True

    def scratch(self, type: Type, ne: Dims, nbytes: int) -> Tensor:
        """A tensor of `nbytes` in the program's scratch memory, alive until the last step that names it."""
        tensor = self._record(type, ne, None, ())
        self._scratch[tensor] = _Scratch(tensor, nbytes, len(self.steps))
        return tensor

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def result_of(self, step: Step) -> Tensor:
        """The tensor that a step computes: a node, or one of the lowering."""
        return self._copies.get(step.record, step.record)

    def is_scratch(self, t: Tensor) -> bool:
        """Is a tensor one of the lowering?"""
        return t in self._scratch

    def block(self, nbytes: int, step: int) -> Tensor:
        """Scratch for a step that is emitted already, and for the following ones that are told to `keep`."""
        tensor = self.scratch(I8, (nbytes, 1, 1, 1), nbytes)
        self._scratch[tensor].first = self._scratch[tensor].last = step
        return tensor

    def keep(self, t: Tensor, step: int) -> None:
        """Let a block live until a step."""
        self._scratch[t].last = step

    def lower_node(self, node: Tensor, fused: Fused | None = None) -> None:
        """Emit the steps of one node of the graph, or of a chain of nodes that ends in it."""
        if node.op.view or node.is_empty:
            return
        for t in fused.nodes if fused is not None else (node,):
            _check_memory(t)
        self.node = node
        if fused is not None:
            fused.emit(self)
        else:
            node.op.lower_node(self, node)
        if node.view_src is not None:  # it wrote into existing bytes: what was derived from them is stale
            root = node.view_src
            for key in [k for k in self._derived if k[0] is root]:
                del self._derived[key]

    def _record(self, type: Type, ne: Dims, nb: Dims | None, src: tuple[Tensor | None, ...]) -> Tensor:
        if not self._contexts or self._contexts[-1].end + tensor_overhead() > self._contexts[-1].mem_size:
            self._contexts.append(Context(_RECORDS * tensor_overhead(), no_alloc=True))
        context = self._contexts[-1]
        with context:
            return new_node(NONE, type, ne, src, nb=nb)

    def place(self) -> int:
        """Give each scratch tensor an offset, by first fit over lifetimes; returns the bytes needed."""
        placed: list[_Scratch] = []
        total = 0
        for s in sorted(self._scratch.values(), key=lambda s: -s.nbytes):
            size = _align(s.nbytes)
            busy = sorted(
                (p.offset, p.offset + _align(p.nbytes)) for p in placed if p.first <= s.last and s.first <= p.last
            )
            at = 0
            for low, high in busy:
                if at + size <= low:
                    break
                at = max(at, high)
            s.offset = at
            placed.append(s)
            total = max(total, at + size)
        return total

    def scratch_nbytes(self) -> int:
        """Bytes of derived tensors, counter's line and work buffer together."""
        return self.place() + COUNTER_LINE + max((s.work for s in self.steps), default=0)

    def set_data(self, base: int) -> None:
        """Write addresses into the lowering's records."""
        for s in self._scratch.values():
            s.tensor.data = base + s.offset
        for record, dst in self._copies.items():
            record.data = dst.data


def _check_memory(node: Tensor) -> None:
    """Kernels go through plain pointers: panels are for ops that know them, a mapped file is not for writing."""
    if node.op.view:
        return
    for i, t in enumerate((node, *node.src)):
        root = t if t is None or t.view_src is None else t.view_src
        buffer = None if root is None else root.buffer
        if root is not None and buffer is not None and not buffer.type.is_host and i - 1 not in node.op.packed:
            raise NotImplementedError(
                f"{node.op.name}: '{root.name}' must lie in host memory, got a {buffer.type.name} buffer "
                f"('{node.name}'); load with repack=False"
            )
    written = node.view_src
    if written is not None and not _is_unbacked(written) and not memory_of(written).flags.writeable:
        raise ValueError(
            f"{node.op.name}: the bytes written to must be writable, got read-only memory of '{written.name}' "
            f"('{node.name}')"
        )


def _is_unbacked(t: Tensor) -> bool:
    return t.buffer is not None and t.buffer.array is None


def _words(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values) + bytes(PARAM_BYTES - 4 * len(values))


def _align(n: int) -> int:
    return (n + SCRATCH_ALIGN - 1) // SCRATCH_ALIGN * SCRATCH_ALIGN


class Executable:
    """A lowered graph, ready to run any number of times.

    Attributes:
        steps: the kernel calls, in order.
        fused: the chains of nodes that one step computes.
        rows: the packed program, int64 [n_steps, 4].
        program: runs them.
        scratch_nbytes: bytes of derived tensors and of the work buffer.
    """

    def __init__(
        self,
        graph: Graph,
        n_threads: int,
        lowering: Lowering,
        work_context: Context | None,
        fused: Sequence[tuple[Tensor, ...]] = (),
        scratch: Scratch | None = None,
    ) -> None:
        from ggjit.adaptive import Adaptive
        from ggjit.jit import compile_all
        from ggjit.program import Program

        self.graph, self.n_threads, self.steps, self.fused = graph, n_threads, lowering.steps, list(fused)
        self._apart: Executable | None = None  # for callbacks
        derived = lowering.place()
        work = max((s.work for s in self.steps), default=0)
        self.work_nbytes = work
        self.scratch_nbytes = derived + COUNTER_LINE + work
        if scratch is None:
            self._scratch, self._work = aligned_bytes(derived), _work_buffer(work, work_context)
        else:
            block = scratch.take(self.scratch_nbytes)
            self._scratch, self._work = block[:derived], block[derived:]
        lowering.set_data(self._scratch.ctypes.data)
        kernels = list(dict.fromkeys(s.kernel for s in self.steps))
        entries = dict(zip(kernels, compile_all(kernels), strict=True))
        rows = np.zeros((len(self.steps), 4), np.int64)
        for i, s in enumerate(self.steps):
            rows[i] = entries[s.kernel], s.record.address, 0, COUNTER if s.kernel.uses_counter else 0
        self.replicas = lowering.replicas
        for i, table in self.replicas.tables(self.steps).items():
            rows[i, 1] = table
            rows[i, 3] |= RECORDS | (EACH if self.replicas.steps[i].result is not None else 0)
        self.rows: NDArray[np.int64] = rows
        place = self._work.ctypes.data, self._work.ctypes.data + self._work.nbytes
        lines = set_barriers(self.steps, rows, place, n_threads, self.replicas)
        self._counters = aligned_bytes(COUNTER_LINE * max(lines, default=0))
        own = self._counters.view(np.int64).reshape(-1, COUNTER_LINE // 8)  # each with the way to the scratch
        own[:, 1] = self._work.ctypes.data - self._counters.ctypes.data - COUNTER_LINE * np.arange(len(own))
        self._tasks = np.zeros((1 + max(lines, default=0), 2), np.int64)  # address and size of the scratch
        self._tasks[0] = self._work.ctypes.data, self._work.nbytes
        for i in range(1, len(self._tasks)):
            self._tasks[i] = self._counters.ctypes.data + COUNTER_LINE * (i - 1), COUNTER_LINE
        rows[:, 2] = [self._tasks.ctypes.data + 16 * line for line in lines]
        self.program = Program(rows)
        self.memories = readable.memories(graph)
        self._writers: readable.Writers | None = None
        self._adaptive = Adaptive(self.program, any(k.counts_threads for k in kernels))
        self._pool: Pool | None = None
        self._ran: object = None  # the state of what is readable after the last run
        self._addresses = [t.data for t in [*graph.leafs, *graph.nodes]]

    @property
    def writers(self) -> readable.Writers:
        """Who writes where when the program runs."""
        if self._writers is None:
            inner = frozenset(t for chain in self.fused for t in chain[:-1])
            self._writers = readable.Writers(self.graph, inner)
        return self._writers

    def is_stale(self) -> bool:
        """Has the data of a tensor moved since the graph was lowered?"""
        return self._addresses != [t.data for t in [*self.graph.leafs, *self.graph.nodes]]

    def run(self, callback: Callable[[Tensor], bool] | None = None) -> bool:
        """Compute the graph; False if the callback stopped it.

        Args:
            callback: called with each node, views too, when it is computed; False stops the run. Without it no Python
                runs between nodes.

        Raises:
            IndexError: an index is out of range; names node, source, position and value.
            RuntimeError: a kernel failed otherwise.
        """
        pool = self._pool
        if pool is None or pool.closed:
            from ggjit.threadpool import get_pool

            pool = self._pool = get_pool(self.n_threads)
        if callback is None:
            failed = self._adaptive.run(pool)
            if failed is not None:
                raise self.error(*failed)
            if readable.state is not self._ran:
                self._ran = readable.ran(self)
            return True
        if self.fused or self.replicas.steps:  # it wants to see every node, and may change it for all threads
            self._apart = self._apart or _lower_apart(self.graph, self.n_threads)
            return self._apart.run(callback)
        readable.forget(*self.memories)  # each node may be looked at as it is computed
        at = 0
        for node in self.graph.nodes:
            first = at
            while at < len(self.steps) and self.steps[at].node is node:
                at += 1
            failed = self.program.run(pool, first, at) if at > first else None
            if failed is not None:
                raise self.error(*failed)
            if not callback(node):
                return False
        self._ran = readable.ran(self)
        return True

    def time(self) -> NDArray[np.int64]:
        """Run once and return the nanoseconds of each step (of the first thread, barrier included)."""
        from ggjit.threadpool import get_pool

        return self.program.time(get_pool(self.n_threads))

    def error(self, row: int, status: int) -> Exception:
        """The exception for a step that returned a status other than 0."""
        step = self.steps[row]
        node = step.node
        readable.forget(*self.memories)
        where = f"{node.op.name}: node '{node.name}'"
        source = step.record.src[(status & 15) - 1] if 0 < status and (status & 15) <= len(step.record.src) else None
        if source is None:
            got = "an exception raised in it" if status == -1 else f"status {status}"
            return RuntimeError(f"{where}: kernel {step.kernel.name} must return 0, got {got}")
        position = status >> 4
        value = source.numpy().reshape(-1)[position]
        return IndexError(
            f"{where}: indices in source '{source.name}' must be valid rows, got {value} at position {position} "
            f"of {list(source.ne)}"
        )


def _work_buffer(work: int, context: Context | None) -> NDArray[np.uint8]:
    """The counter's line and the scratch behind it; in a context it is an object of it."""
    if context is None or work == 0:
        if context is not None:
            context.new_object(0, WORK_BUFFER)
        return aligned_bytes(COUNTER_LINE + work)
    size = COUNTER_LINE + work + SCRATCH_ALIGN
    offset = context.new_object(size, WORK_BUFFER)
    skip = -(context.base + offset) % SCRATCH_ALIGN
    return context.array[offset + skip : offset + skip + COUNTER_LINE + work]


def lower(
    graph: Graph,
    n_threads: int,
    work_context: Context | None = None,
    fuse: bool | None = None,
    scratch: Scratch | None = None,
) -> Executable:
    """Make a graph whose tensors all have data ready to run.

    Args:
        graph: the graph.
        n_threads: threads that will run it.
        work_context: where the work buffer goes, by default memory of its own.
        fuse: compute chains of nodes by one kernel where there is a rule (see `ggjit.fusion`); by default yes, unless
            the variable GGJIT_FUSE is 0.
        scratch: memory that the program shares with others which never run at the same time.

    Raises:
        ValueError: a tensor has no data, or GGJIT_FUSE is neither 0 nor 1.
        NotImplementedError: no kernel takes a node.
    """
    lowering, chains = _lowering(graph, n_threads, fuse)
    return Executable(graph, n_threads, lowering, work_context, chains, scratch)


def _lower_apart(graph: Graph, n_threads: int) -> Executable:
    """Every node by itself, and once for all threads."""
    return Executable(graph, n_threads, _lowering(graph, n_threads, fuse=False, replicate=False)[0], None)


def kernels_of(graph: Graph, n_threads: int) -> list[Kernel]:
    """The kernels that a graph's program runs; nothing is compiled and no data looked at."""
    return [step.kernel for step in _lowering(graph, n_threads)[0].steps]


def scratch_size(graph: Graph, n_threads: int) -> int:
    """Bytes of scratch that a graph's program needs; nothing is compiled and no data looked at."""
    return _lowering(graph, n_threads)[0].scratch_nbytes()


def _lowering(
    graph: Graph, n_threads: int, fuse: bool | None = None, replicate: bool = True
) -> tuple[Lowering, list[tuple[Tensor, ...]]]:
    lowering = Lowering(n_threads, graph.nodes)
    for t in [*graph.leafs, *graph.nodes]:
        if t.data == 0 and t.nbytes:
            raise ValueError(f"lower: tensors must have data before they are computed, got none ('{t.name}')")
    if fuse is None:
        asked = os.environ.get("GGJIT_FUSE", "1")
        if asked not in ("0", "1"):
            raise ValueError(f"GGJIT_FUSE: must be 0 or 1, got {asked!r}")
        fuse = asked == "1"
    found = Match(graph).find() if fuse else {}
    for node in graph.nodes:
        if node not in found:
            lowering.lower_node(node)
        elif (fused := found[node]) is not None:
            lowering.lower_node(node, fused)
    lowering.replicas = Replicas(lowering, graph.nodes if replicate else None)
    return lowering, [f.nodes for f in found.values() if f is not None]
