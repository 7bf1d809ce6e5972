"""The arena: one byte buffer in which headers, data and graphs are laid one after the other.

Each object is a 32-byte object header (offset of its body, size of its body, offset of the next object header, kind)
followed by its body. A cursor moves forward and never back but by `reset`, so the same code makes the same layout in
every run. Nothing is ever moved and the arena never grows.

    offset   0              32                    368
             | object header | tensor record (336) | data, if not no_alloc, padded to 16 | object header | ...
"""

from __future__ import annotations

import contextvars
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.errors import OutOfArena
from ggjit.types import Type

if TYPE_CHECKING:
    from ggjit.backend import Buffer
    from ggjit.tensor import Tensor

MEM_ALIGN = 16
OBJECT_SIZE = 32
TENSOR_SIZE = 336
TENSOR, GRAPH, WORK_BUFFER = 0, 1, 2
KINDS = ("tensor", "graph", "work_buffer")

_OBJECT = struct.Struct("<4q")
_NEXT = struct.Struct("<q")
_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("ggjit_context", default=None)


class Object(NamedTuple):
    """One object of an arena: where its body is, its size, and what it is."""

    offset: int
    size: int
    kind: str


def tensor_overhead() -> int:
    """Bytes a tensor takes in an arena without its data: 368."""
    return OBJECT_SIZE + TENSOR_SIZE


def aligned_bytes(size: int, align: int = 64) -> NDArray[np.uint8]:
    """Zeroed uint8 memory of `size` bytes whose address is a multiple of `align`.

    Raises:
        MemoryError: there is not as much.
    """
    try:
        raw = np.zeros(size + align, np.uint8)
    except (MemoryError, ValueError, OverflowError):  # NumPy's own limits are below 2^63
        raise MemoryError(f"memory: {size} bytes must be available, got no block as large") from None
    skip = -raw.ctypes.data % align
    return raw[skip : skip + size]


class Context:
    """An arena for tensor headers, their data and graphs.

    As a context manager it becomes the place where op functions put their results; contexts nest.

    Args:
        mem_size: bytes of the arena.
        mem_buffer: uint8 memory to use instead of an own block; it must be writable, hold `mem_size` bytes and lie at
            a multiple of 16.
        no_alloc: put headers only; data comes from a buffer or an allocator later (`from_numpy`: from the array).
        prec: 0, or 10 for GGML_PREC_F32: of the products made in it whose builder is given none.

    Raises:
        TypeError: `mem_size` or `prec` is no whole number, or `mem_buffer` no bytes.
        ValueError: `prec` is neither, `mem_size` is negative, or `mem_buffer` is too small, read-only or not aligned.
        MemoryError: there is not as much memory.

    Source: ggml_init.
    """

    def __init__(self, mem_size: int, mem_buffer: Any = None, no_alloc: bool = False, prec: int = 0) -> None:
        if not hasattr(prec, "__index__") or isinstance(prec, bool):
            raise TypeError(f"Context: prec must be a whole number, got {prec!r}")
        if prec not in (0, 10):  # GGML_PREC_DEFAULT, GGML_PREC_F32
            raise ValueError(f"Context: prec must be 0 or 10, got {prec}")
        if not hasattr(mem_size, "__index__") or isinstance(mem_size, bool):
            raise TypeError(f"Context: mem_size must be a whole number of bytes, got {mem_size!r}")
        if mem_size < 0:
            raise ValueError(f"Context: mem_size must not be negative, got {mem_size}")
        if mem_buffer is None:
            array = aligned_bytes(int(mem_size))
        else:
            try:
                array = np.frombuffer(mem_buffer, np.uint8)
            except (AttributeError, TypeError, ValueError) as error:
                text = f"Context: mem_buffer must be bytes without gaps, got {type(mem_buffer).__name__} ({error})"
                raise TypeError(text) from None
            if not array.flags.writeable or array.nbytes < mem_size or array.ctypes.data % MEM_ALIGN:
                given = (
                    f"{array.nbytes} bytes at {array.ctypes.data:#x}{'' if array.flags.writeable else ', read-only'}"
                )
                raise ValueError(
                    f"Context: mem_buffer must be writable, hold {mem_size} bytes and lie at a multiple of "
                    f"{MEM_ALIGN}, got {given}"
                )
            array = array[:mem_size]
        self.array = array
        self.mem_buffer_owned = mem_buffer is None
        self.no_alloc, self.prec = no_alloc, int(prec)
        self.mem_size = int(mem_size)
        self._open(array)

    def _open(self, array: NDArray[np.uint8]) -> None:
        self.buffer = memoryview(array)
        self.base = array.ctypes.data
        self.end = 0  # the cursor: first free byte
        self._last = -1  # offset of the last object header
        self.n_objects = 0
        self.tensors: dict[int, Tensor] = {}  # record address -> its one handle
        self.kept: dict[int, Any] = {}  # what the records' addresses point into: buffers and arrays, by id

    # -- scope -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Context:
        self._tokens: list[contextvars.Token[Context | None]] = getattr(self, "_tokens", [])
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())

    # -- objects -----------------------------------------------------------------------------------------------------

    def new_object(self, nbytes: int, kind: int) -> int:
        """Append an object of `nbytes` (rounded up to 16) and return the offset of its body.

        Raises:
            OutOfArena: the arena has no room.
        """
        at = self.end
        nbytes = (nbytes + 15) & ~15
        end = at + OBJECT_SIZE + nbytes
        if end > self.mem_size:
            raise OutOfArena(
                f"Context: an object of {OBJECT_SIZE + nbytes} bytes must fit, got {self.mem_size - at} bytes left of "
                f"{self.mem_size} ({end - self.mem_size} too few)"
            )
        if self._last >= 0:
            _NEXT.pack_into(self.buffer, self._last + 16, at)
        _OBJECT.pack_into(self.buffer, at, at + OBJECT_SIZE, nbytes, -1, kind)
        self._last, self.end = at, end
        self.n_objects += 1
        return at + OBJECT_SIZE

    def objects(self) -> Iterator[Object]:
        """The objects in order, read from the arena's bytes."""
        at = 0 if self.n_objects else -1
        while at >= 0:
            offset, size, following, kind = _OBJECT.unpack_from(self.buffer, at)
            yield Object(offset, size, KINDS[kind])
            at = following

    def used_mem(self) -> int:
        """Bytes used so far. Run once with plenty, then give `mem_size` this number."""
        return self.end

    def reset(self) -> None:
        """Forget all objects and begin again at the arena's start.

        Tensors made before keep the bytes of an own arena, which gets a fresh block; in given memory they are gone, and
        touching one is an error.
        """
        if not self.mem_buffer_owned:
            for t in self.tensors.values():
                t.context = _GONE  # type: ignore[assignment]
            self.array[: self.end] = 0
        elif self.tensors:
            former = Context.__new__(Context)
            former.__dict__.update(self.__dict__)
            for t in self.tensors.values():
                t.context = former
            self.array = aligned_bytes(self.mem_size)
        self._open(self.array)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def new_tensor(self, type: Type, *ne: int, name: str = "") -> Tensor:
        """A leaf of this arena; see `ggjit.tensor.new_tensor`."""
        from ggjit.tensor import new_tensor

        with self:
            return new_tensor(type, *ne, name=name)

    def keep(self, thing: Buffer | NDArray[Any]) -> None:
        """Hold on to memory that a record of this arena points into."""
        self.kept[id(thing)] = thing

    def __repr__(self) -> str:
        kind = ", no_alloc" if self.no_alloc else ""
        return f"Context({self.end} of {self.mem_size} bytes used, {self.n_objects} objects{kind})"


class _Gone:
    """The context of tensors whose bytes are in use for something else."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Tensor: its context must not have been reset, got a tensor from before the reset")


_GONE = _Gone()


def current(what: str) -> Context:
    """The innermost `with Context(...)`.

    Raises:
        RuntimeError: there is none; `what` is named in the error.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError(f"{what}: a context must be open, got none; build inside `with gg.Context(size):`")
    return context
