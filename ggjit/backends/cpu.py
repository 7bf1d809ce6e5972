"""The CPU: its buffer types, its device and its backend.

host     plain memory: activations, caches, weights as they are in the file
mapped   a read-only file mapping: weights used where they lie, read from the disk when first touched
panel    weights of matrix products, 16 rows interleaved (see `ggjit.ops.quants.quant`): bytes are repacked when they
         come in and cannot be had back
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.arguments import check_threads
from ggjit.backend import Buffer, BufferType, Bytes, Usage, as_bytes, buffer_from_array
from ggjit.context import Context, aligned_bytes, tensor_overhead
from ggjit.op import NONE
from ggjit.tensor import Dims, new_node
from ggjit.types import I8, Type

if TYPE_CHECKING:
    from ggjit.backend import Event
    from ggjit.graph import Graph
    from ggjit.jit import Kernel
    from ggjit.tensor import Tensor

BASE_ALIGN = 64
PANEL_ROWS = 16
SLICE = 4 << 20  # bytes of rows packed at a stretch: so much of a mapped file is in memory beside its panels


class HostBufferType(BufferType):
    """Plain host memory, zeroed, at a multiple of 64 bytes."""

    name = "host"

    def new_buffer(self, size: int, usage: Usage = "any") -> Buffer:
        """Allocate zeroed memory."""
        return Buffer(self, aligned_bytes(max(size, self.alignment), BASE_ALIGN), usage)


class MappedBufferType(BufferType):
    """Bytes of a mapped file; `ggjit.backend.buffer_from_array` wraps them."""

    name = "mapped"


class PanelBufferType(BufferType):
    """Weights of matrix products, repacked for the CPU's dot products."""

    name = "panel"
    alignment = 64
    is_host = False

    def supports(self, tensor: Tensor) -> bool:
        """True for rows without gaps of a type that has panels."""
        return tensor.view_src is None and tensor.is_contiguous and not tensor.is_empty and _has_panel(tensor.type)

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes of the tensor's panels, the last one filled up to 16 rows."""
        from ggjit.ops.lib.panel_kernels import panel_nbytes

        if not self.supports(tensor):  # `Buffer.init_tensor` refuses it
            return 0
        ne = tensor.ne
        return int(panel_nbytes(tensor.type, ne[0], ne[1])) * ne[2] * ne[3]  # type: ignore[no-untyped-call]

    def new_buffer(self, size: int, usage: Usage = "any") -> Buffer:
        """Allocate zeroed memory."""
        return PanelBuffer(self, aligned_bytes(max(size, self.alignment), BASE_ALIGN), usage)


class PanelBuffer(Buffer):
    """A buffer of panels."""

    __slots__ = ()

    def set_tensor(self, tensor: Tensor, data: Bytes, offset: int = 0) -> None:
        """Pack all rows of a tensor.

        Raises:
            ValueError: not all of the tensor's bytes are given.
        """
        rows = as_bytes(data)
        if offset or rows.nbytes != tensor.nbytes:
            raise ValueError(
                f"set_tensor: a panel buffer must get all {tensor.nbytes} bytes of a tensor at once, got {rows.nbytes} "
                f"at offset {offset} ('{tensor.name}')"
            )
        pack_tensors([(tensor, rows)], 1)

    def get_tensor(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Refuse: panels are not turned back into rows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "get_tensor: the tensor must lie in a host or mapped buffer to be read, got a panel buffer of repacked "
            f"weights ('{tensor.name}')"
        )


HOST = HostBufferType()
MAPPED = MappedBufferType()
PANEL = PanelBufferType()


@functools.cache
def _has_panel(type: Type) -> bool:
    from ggjit.ops.lib.float_panel import UNITS

    return type.name in UNITS or type.has_panel


# --- packing ----------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """Bytes [first, end) of a tensor's rows to pack: the record that the kernel reads, and the kernel."""

    tensor: Tensor
    first: int
    end: int
    record: Tensor
    kernel: Kernel


def pack_tensors(
    items: Sequence[tuple[Tensor, NDArray[np.uint8]]],
    n_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_packed: Callable[[Tensor, int, int], None] | None = None,
) -> None:
    """Pack rows into tensors of panel buffers, a slice after the other, each by all threads.

    Args:
        items: tensors and their bytes as in a GGUF file (a mapping of it is read only now).
        n_threads: by default as many as the process may use.
        progress: called after each slice with the bytes of rows packed so far and in all.
        on_packed: called after each slice with the tensor and [first, end) of its bytes: these rows are not needed any
            more, pages of a mapping may go.

    Raises:
        ValueError: a tensor does not lie in a panel buffer, or has not the bytes that are given.
    """
    from ggjit.barriers import BARRIER
    from ggjit.jit import compile_all
    from ggjit.program import Program
    from ggjit.threadpool import COMPILED, default_threads, get_pool

    if not items:
        return
    jobs = _jobs(items)
    kernels = list(dict.fromkeys(j.kernel for j in jobs))
    entries = dict(zip(kernels, compile_all([*kernels, *COMPILED]), strict=False))
    task = np.zeros(2, np.int64)  # no scratch
    steps = np.array([(entries[j.kernel], j.record.address, task.ctypes.data, BARRIER) for j in jobs], np.int64)
    program, pool = Program(steps), get_pool(n_threads if n_threads is not None else default_threads())
    done, total = 0, sum(rows.nbytes for _, rows in items)
    for i, job in enumerate(jobs):
        failed = program.run(pool, i, i + 1)
        if failed is not None:
            raise RuntimeError(
                f"pack_tensors: kernel {job.kernel.name} must return 0, got status {failed[1]} ('{job.tensor.name}')"
            )
        done += job.end - job.first
        if on_packed is not None:
            on_packed(job.tensor, job.first, job.end)
        if progress is not None:
            progress(done, total)


def _jobs(items: Sequence[tuple[Tensor, NDArray[np.uint8]]]) -> list[_Job]:
    jobs: list[_Job] = []
    for t, rows in items:
        if t.buffer is None or t.buffer.type is not PANEL:
            raise ValueError(f"pack_tensors: the tensor must lie in a panel buffer, got {t.buffer} ('{t.name}')")
        if rows.nbytes != t.nbytes or not rows.flags.c_contiguous:
            raise ValueError(
                f"pack_tensors: rows must be contiguous and of {t.nbytes} bytes, got {rows.nbytes} ('{t.name}')"
            )
    cuts = [_slices(t) for t, _ in items]
    with Context(2 * sum(map(len, cuts)) * tensor_overhead(), no_alloc=True):
        for (t, rows), slices in zip(items, cuts, strict=True):
            jobs += [_job(t, rows, *s) for s in slices]
    return jobs


def _slices(t: Tensor) -> list[tuple[int, Dims]]:
    """First row and sizes of the parts of a tensor that are packed at a stretch: whole panels of one matrix."""
    n_rows = max(SLICE // (PANEL_ROWS * t.nb[1]), 1) * PANEL_ROWS
    if t.nbytes <= SLICE:
        return [(0, t.ne)]
    parts = [(i, min(n_rows, t.ne[1] - i)) for i in range(0, t.ne[1], n_rows)]
    return [(m * t.ne[1] + i, (t.ne[0], n, 1, 1)) for m in range(t.ne[2] * t.ne[3]) for i, n in parts]


def _job(t: Tensor, rows: NDArray[np.uint8], first_row: int, ne: Dims) -> _Job:
    from ggjit.ops.lib.panel_kernels import pack_kernel, panel_nbytes

    matrix, row = divmod(first_row, t.ne[1])
    before = matrix * panel_nbytes(t.type, t.ne[0], t.ne[1]) + panel_nbytes(t.type, t.ne[0], row)  # type: ignore[no-untyped-call]
    source = new_node(NONE, t.type, ne)
    first = first_row * t.nb[1]
    source.data = rows.ctypes.data + first
    record = new_node(NONE, I8, (PANEL.alloc_size(source), 1, 1, 1), (source,))
    record.data = t.data + int(before)
    return _Job(t, first, first + source.nbytes, record, pack_kernel(t.type.name))


# --- device and backend -----------------------------------------------------------------------------------------------


class CpuBackend:
    """Computes graphs on the CPU.

    Args:
        device: the CPU.
        n_threads: by default as many as the process may use.
    """

    name = "cpu"

    def __init__(self, device: CpuDevice, n_threads: int | None = None) -> None:
        self.device = device
        self.n_threads = None if n_threads is None else check_threads("CpuBackend", n_threads)

    def supports(self, node: Tensor) -> bool:
        """Is there a kernel for the node's types and layout?"""
        return node.op.supported(node)

    def supports_buffer_type(self, type: BufferType) -> bool:
        """True for all memory of the host; only matrix products read panels."""
        return type in (HOST, MAPPED, PANEL)

    def offloads(self, node: Tensor) -> bool:
        """False: the host's memory is its own."""
        return False

    def compute(self, graph: Graph, fuse: bool | None = None) -> None:
        """Compute all nodes."""
        graph.compute(self.n_threads, fuse)

    def scratch_size(self, graph: Graph) -> int:
        """Bytes of scratch of the graph's program."""
        from ggjit.lower import scratch_size
        from ggjit.threadpool import default_threads

        return scratch_size(graph, default_threads() if self.n_threads is None else self.n_threads)

    def synchronize(self) -> None:
        """Return at once: `compute` returns when all is done."""

    def record_event(self, event: Event) -> None:
        """Do nothing: all that was started is done."""

    def wait_event(self, event: Event) -> None:
        """Wait here: what is started later begins later."""
        event.synchronize()


class CpuEvent:
    """A point in a CPU backend's stream, which is always reached."""

    def synchronize(self) -> None:
        """Return at once."""


class CpuDevice:
    """The CPU."""

    name = "cpu"

    @property
    def description(self) -> str:
        """LLVM's name of the CPU."""
        from ggjit.cpu import target

        return target()[0]

    def buffer_type(self) -> BufferType:
        """Plain host memory."""
        return HOST

    def weight_buffer_types(self) -> tuple[BufferType, ...]:
        """Panels, then plain memory."""
        return PANEL, HOST

    def buffer_from_array(self, array: NDArray[np.uint8]) -> Buffer:
        """Wrap host memory without a copy."""
        return buffer_from_array(array)

    def new_backend(self, n_threads: int | None = None) -> CpuBackend:
        """Make a backend that computes with some threads."""
        return CpuBackend(self, n_threads)

    def new_event(self) -> CpuEvent:
        """Make an event."""
        return CpuEvent()


DEVICE = CpuDevice()
