"""Where tensors' data lies: buffer types, buffers, and the protocols of backends and devices.

A buffer type knows the rules of one kind of memory (alignment, bytes a tensor takes) and makes buffers of it; a buffer
is one block of that memory. A tensor's header points into a buffer: `tensor.buffer` and `tensor.data`.

    BufferType ──new_buffer(size)──> Buffer ──tensor_alloc / TensorAllocator / GraphAllocator──> tensor.data

Bytes go in and out by `Buffer.set_tensor` and `Buffer.get_tensor`, which every kind of memory can do; only a buffer
whose type `is_host` may be read through `tensor.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ggjit.context import Context
    from ggjit.graph import Graph
    from ggjit.tensor import Tensor

Bytes = bytes | bytearray | memoryview | NDArray[Any]
Usage = Literal["any", "weights", "compute"]


class BufferType:
    """The rules of one kind of memory.

    Attributes:
        name: "host", "mapped", "panel", ...
        alignment: tensors lie at multiples of this many bytes from a buffer's base.
        is_host: a tensor's bytes lie in host memory in the layout that its header tells.
        max_size: most bytes of one buffer; a `GraphAllocator` takes several where it needs more.
    """

    name: str = ""
    alignment: int = 32
    max_size: int = 1 << 62
    is_host: bool = True

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes here."""
        return tensor.nbytes

    def padded_size(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes here, rounded up to the alignment."""
        return -(-self.alloc_size(tensor) // self.alignment) * self.alignment

    def supports(self, tensor: Tensor) -> bool:
        """Can a tensor's data lie here?"""
        return True

    def new_buffer(self, size: int, usage: Usage = "any") -> Buffer:
        """Allocate one block.

        Raises:
            NotImplementedError: this kind of memory comes from outside and cannot be allocated.
            MemoryError: there is not enough.
        """
        raise NotImplementedError(
            f"{self.name} buffer type: memory must come from outside, got a wish for {size} bytes"
        )

    def __repr__(self) -> str:
        return f"BufferType({self.name})"


class Buffer:
    """One block of memory of one type.

    Args:
        type: the rules of the memory.
        array: its bytes where they are host memory; kept alive.
        usage: "weights", "compute" or "any".
        base, size: address and size where there is no array.

    Attributes:
        base: address of the first byte.
        size: bytes.
    """

    __slots__ = ("__weakref__", "array", "base", "size", "type", "usage")

    def __init__(
        self, type: BufferType, array: NDArray[np.uint8] | None, usage: Usage = "any", base: int = 0, size: int = 0
    ) -> None:
        self.type, self.array, self.usage = type, array, usage
        self.base = base if array is None else array.ctypes.data
        self.size = size if array is None else array.nbytes

    def contains(self, address: int, size: int) -> bool:
        """Do [address, address + size) lie inside?"""
        return self.base <= address and address + size <= self.base + self.size

    def bytes_of(self, tensor: Tensor, nbytes: int, offset: int = 0) -> NDArray[np.uint8]:
        """`nbytes` of the buffer from byte `offset` of a tensor's data, as a live view.

        Raises:
            ValueError: they do not lie in this buffer, or it is not host memory.
        """
        address = tensor.data + offset
        if self.array is None or tensor.data == 0 or not self.contains(address, nbytes):
            raise ValueError(
                f"Buffer: the data must lie in this {self.type.name} buffer of {self.size} bytes, got {nbytes} bytes "
                f"at offset {address - self.base} ('{tensor.name}')"
            )
        return self.array[address - self.base : address - self.base + nbytes]

    def init_tensor(self, tensor: Tensor) -> None:
        """Called once when a tensor has got its place here.

        Raises:
            NotImplementedError: the buffer type cannot hold the tensor.
        """
        if not self.type.supports(tensor):
            raise NotImplementedError(
                f"{self.type.name} buffer: the tensor must be of a type and shape that it supports, got "
                f"{tensor.type.name}{list(tensor.ne)} ('{tensor.name}')"
            )

    def set_tensor(self, tensor: Tensor, data: Bytes, offset: int = 0) -> None:
        """Write bytes in a tensor's memory order (as in a GGUF file).

        Args:
            tensor: lies in this buffer.
            data: at most the tensor's nbytes.
            offset: first byte within the tensor.

        Raises:
            ValueError: more bytes than the tensor has, or the memory is read-only.
        """
        source = as_bytes(data)
        check_range("set_tensor", tensor, offset, source.nbytes)
        target = self.bytes_of(tensor, source.nbytes, offset)
        if not target.flags.writeable:
            raise ValueError(
                f"set_tensor: the buffer must be writable, got a read-only {self.type.name} buffer ('{tensor.name}')"
            )
        target[:] = source

    def get_tensor(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """A copy of a tensor's bytes in memory order.

        Args:
            tensor: lies in this buffer.
            offset: first byte within the tensor.
            nbytes: by default all from `offset` on.

        Raises:
            ValueError: more bytes than the tensor has.
            NotImplementedError: the memory does not keep the bytes as they were.
        """
        n = tensor.nbytes - offset if nbytes is None else nbytes
        check_range("get_tensor", tensor, offset, n)
        return self.bytes_of(tensor, n, offset).copy()

    def copy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        """Copy a tensor's bytes into this buffer without the host in between, if that is possible.

        Args:
            src: of the same layout, in memory that is not the host's.
            dst: lies in this buffer.

        Returns:
            False if nothing was done; see `copy_tensor`.

        Source: ggml_backend_buffer_copy_tensor.
        """
        return False

    def clear(self, value: int = 0) -> None:
        """Set every byte.

        Raises:
            ValueError: the memory is read-only or not host memory.
        """
        if self.array is None or not self.array.flags.writeable:
            raise ValueError(f"clear: the buffer must be writable host memory, got a {self.type.name} buffer")
        self.array[:] = value

    def reset(self) -> None:
        """Forget what belongs to the tensors that lay here; called before new ones move in."""

    def __repr__(self) -> str:
        return f"Buffer({self.type.name}, {self.size} bytes at {self.base:#x}, {self.usage})"


def new_buffer(type: BufferType, size: int, usage: Usage) -> Buffer:
    """Allocate a buffer: what a `NewBuffer` does where memory is wanted."""
    return type.new_buffer(size, usage)


NewBuffer = Callable[[BufferType, int, Usage], Buffer]


def as_bytes(data: Bytes) -> NDArray[np.uint8]:
    """Any contiguous memory as a flat uint8 array, without a copy."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def check_range(what: str, tensor: Tensor, offset: int, nbytes: int) -> None:
    """Raise ValueError if bytes do not lie inside a tensor."""
    if offset < 0 or nbytes < 0 or offset + nbytes > tensor.nbytes:
        raise ValueError(
            f"{what}: the bytes must lie inside the tensor of {tensor.nbytes}, got {nbytes} at offset {offset} "
            f"('{tensor.name}')"
        )


class Event(Protocol):
    """A point in a backend's stream: reached when all that was started before it is done."""

    def synchronize(self) -> None:
        """Wait until the point is reached; at once if the event was never recorded."""


class Backend(Protocol):
    """One stream of computation on one device.

    Nothing here takes host pointers: data moves by `Buffer.set_tensor` and `Buffer.get_tensor`, so that a backend may
    be another process or machine.
    """

    @property
    def name(self) -> str:
        """As its device's."""

    @property
    def device(self) -> Device:
        """What computes."""

    def supports(self, node: Tensor) -> bool:
        """Is there a kernel for the node's types and layout?"""

    def supports_buffer_type(self, type: BufferType) -> bool:
        """Can kernels read data in buffers of this type?"""

    def offloads(self, node: Tensor) -> bool:
        """Is the node worth computing here although its weights must be copied from the host first?"""

    def compute(self, graph: Graph, fuse: bool | None = None) -> None:
        """Start computing all nodes; every tensor has its place already.

        Args:
            graph: may be a part of a larger one (`ggjit.graph_copy.GraphView`).
            fuse: as in `Graph.compute`; False to look at every node's result.
        """

    def scratch_size(self, graph: Graph) -> int:
        """Bytes that computing a graph takes beside its tensors."""

    def synchronize(self) -> None:
        """Wait until all that was started is done.

        Raises:
            RuntimeError: something that was started has failed, or the device is lost.
        """

    def record_event(self, event: Event) -> None:
        """Let an event of this device stand for all that was started so far."""

    def wait_event(self, event: Event) -> None:
        """Let nothing that is started from now on begin before the event, which may be another device's."""


class Device(Protocol):
    """One thing that computes."""

    @property
    def name(self) -> str:
        """Short name: "cpu", "cuda0", ..."""

    @property
    def description(self) -> str:
        """The hardware's name."""

    def buffer_type(self) -> BufferType:
        """The type for activations and for weights that are not repacked."""

    def weight_buffer_types(self) -> tuple[BufferType, ...]:
        """Types that may hold weights, the fastest first; the first one that supports a weight takes it."""

    def buffer_from_array(self, array: NDArray[np.uint8]) -> Buffer | None:
        """Host memory as a buffer of the device, without a copy; None if the device cannot read it."""

    def new_backend(self) -> Backend:
        """Make a stream of computation."""

    def new_event(self) -> Event:
        """Make an event for this device's backends."""


def devices() -> tuple[Device, ...]:
    """The devices of this machine, the CPU last."""
    from ggjit.backends.cpu import DEVICE

    return (DEVICE,)


def host_buffer_type() -> BufferType:
    """Plain host memory."""
    from ggjit.backends.cpu import HOST

    return HOST


def buffer_from_array(array: NDArray[Any]) -> Buffer:
    """Wrap contiguous host memory as a buffer without a copy; the array is kept alive.

    Args:
        array: any dtype; read-only memory (a mapped file) makes a buffer of type "mapped".

    Raises:
        ValueError: the array is not contiguous.

    Source: ggml_backend_dev_buffer_from_host_ptr.
    """
    from ggjit.backends.cpu import HOST, MAPPED

    if not array.flags.c_contiguous:
        raise ValueError(
            f"buffer_from_array: the array must be contiguous, got shape {array.shape} and strides {array.strides}"
        )
    flat = array.reshape(-1).view(np.uint8)
    return Buffer(HOST, flat) if flat.flags.writeable else Buffer(MAPPED, flat, "weights")


def tensor_alloc(buffer: Buffer, tensor: Tensor, address: int) -> None:
    """Give a tensor a place that the caller chose.

    Args:
        buffer: holds the place.
        tensor: has no data yet and is not a view.
        address: of the first byte.

    Raises:
        ValueError: the tensor has data or is a view, or its bytes do not lie inside the buffer.
        NotImplementedError: the buffer's type cannot hold the tensor.

    Source: ggml_backend_tensor_alloc.
    """
    if tensor.view_src is not None:
        raise ValueError(
            f"tensor_alloc: the tensor must not be a view, got a view of '{tensor.view_src.name}' ('{tensor.name}')"
        )
    if tensor.data or tensor.buffer is not None:
        raise ValueError(f"tensor_alloc: the tensor must have no data, got data at {tensor.data:#x} ('{tensor.name}')")
    size = buffer.type.alloc_size(tensor)
    if not buffer.contains(address, size):
        raise ValueError(
            f"tensor_alloc: the tensor must lie inside the buffer of {buffer.size} bytes, got {size} bytes at offset "
            f"{address - buffer.base} ('{tensor.name}')"
        )
    buffer.init_tensor(tensor)
    tensor.buffer = buffer
    tensor.data = address


def init_view(tensor: Tensor) -> None:
    """Let a view point into its source's memory.

    Raises:
        ValueError: the source has no data.

    Source: ggml_backend_view_init.
    """
    root = tensor.view_src
    if root is None or root.data == 0:
        raise ValueError(f"init_view: the viewed tensor must have data, got none ('{tensor.name}')")
    tensor.buffer = root.buffer
    tensor.data = root.data + tensor.view_offs


def buffer_of(tensor: Tensor) -> Buffer | None:
    """The buffer that holds a tensor's bytes, a view's source's; None for data in an arena or an array, or none."""
    return tensor.buffer if tensor.view_src is None else tensor.view_src.buffer


def copy_tensor(src: Tensor, dst: Tensor) -> None:
    """Copy a tensor's bytes between any two kinds of memory, gaps of its layout included.

    Args:
        src: has data.
        dst: has data; of the same type, sizes and strides.

    Raises:
        ValueError: the layouts differ, or a tensor has no data.
        NotImplementedError: the memory of `src` cannot be read back (panels).

    Source: ggml_backend_tensor_copy.
    """
    if (src.type, src.ne, src.nb) != (dst.type, dst.ne, dst.nb):
        raise ValueError(
            f"copy_tensor: the tensors must have one type and layout, got {src.type.name} {list(src.ne)} nb "
            f"{list(src.nb)} and {dst.type.name} {list(dst.ne)} nb {list(dst.nb)} ('{src.name}', '{dst.name}')"
        )
    source, target = buffer_of(src), buffer_of(dst)
    if source is not None and target is not None and not source.type.is_host and target.copy_tensor(src, dst):
        return
    data = src.bytes()
    if target is None:
        dst.bytes()[:] = data
    else:
        target.set_tensor(dst, data)


def _without_data(context: Context) -> Iterator[Tensor]:
    return (t for t in context.tensors.values() if t.view_src is None and t.data == 0)


def ctx_tensors_size(context: Context, buffer_type: BufferType) -> int:
    """Bytes that `alloc_ctx_tensors` will allocate."""
    return sum(buffer_type.padded_size(t) for t in _without_data(context))


def alloc_ctx_tensors(
    context: Context, buffer_type: BufferType, usage: Usage = "any", new_buffer: NewBuffer = new_buffer
) -> Buffer | None:
    """Allocate one buffer for all tensors of a context that have no data yet, and cut it in order of creation.

    Args:
        context: a no_alloc context.
        buffer_type: of the buffer.
        usage: of the buffer.
        new_buffer: makes it.

    Returns:
        The buffer; None if no tensor needs memory. Views of the tensors get their data too.

    Raises:
        NotImplementedError: the buffer type cannot hold a tensor.
        MemoryError: there is not enough memory.

    Source: ggml_backend_alloc_ctx_tensors_from_buft.
    """
    from ggjit.alloc import TensorAllocator

    tensors = list(_without_data(context))
    buffer = None
    if tensors:
        buffer = new_buffer(buffer_type, ctx_tensors_size(context, buffer_type), usage)
        allocator = TensorAllocator(buffer)
        for t in tensors:
            allocator.alloc(t)
    for t in context.tensors.values():
        if t.view_src is not None and t.buffer is None and t.view_src.data:
            init_view(t)
    return buffer
