"""A device in a child process: its bytes lie in memory that no pointer of this process reaches.

    device = ProcessDevice(ops={"mul_mat", "add"})
    backend = device.new_backend()
    scheduler = Scheduler([backend, cpu])

The child computes with the CPU's kernels, so results are those of the CPU bit by bit. It serves to try what must hold
for any device: that data moves by `Buffer.set_tensor` and `get_tensor` alone, that only supported ops get there, and
how much is copied (`ProcessDevice.counts`). Commands are sent without waiting for their end; the child does them in
order. What goes wrong there is raised here by the next call that waits.

Addresses of its tensors are numbers above all that a process can map: reading through one fails at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import ggjit
from ggjit.arguments import check_threads
from ggjit.backend import (
    Buffer,
    BufferType,
    Bytes,
    Event,
    Usage,
    as_bytes,
    buffer_of,
    check_range,
    host_buffer_type,
)
from ggjit.backends.wire import graph_from_records, graph_records, read_frame, write_frame
from ggjit.types import FIRST_USER_ID

if TYPE_CHECKING:
    from ggjit.graph import Graph
    from ggjit.tensor import Tensor

_FIRST_USER_OP = 1000
_OWN_KERNEL = ("map_custom1", "map_custom2", "map_custom3", "custom")  # a function of this process
_GAP = 4096  # between buffers: a tensor's end is never another's begin
_ERRORS = {e.__name__: e for e in (IndexError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError)}
_lock = threading.Lock()
_next_base = 1 << 60


# Ctrl-C goes to the terminal's whole process group: the child is none of it, from before it can ignore signals. The
# number is Windows' CREATE_NEW_PROCESS_GROUP.
_APART: dict[str, Any] = {"creationflags": 0x200} if sys.platform == "win32" else {"process_group": 0}


def _new_base(size: int) -> int:
    """An address range that no memory of this process has and no other buffer got."""
    global _next_base
    with _lock:
        base = _next_base
        _next_base += (size + 2 * _GAP) // _GAP * _GAP
    return base


class Channel:
    """Commands to a child, answered in order; a thread takes the answers.

    Args:
        name: for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        package = str(Path(ggjit.__file__).resolve().parent.parent)
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ggjit.backends.process_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path}, **_APART,
        )  # fmt: skip
        self._write = threading.Lock()
        self._changed = threading.Condition()
        self._sent = self._done = 0
        self._wanted: dict[int, tuple[dict[str, Any], bytearray] | None] = {}
        self._errors: deque[Exception] = deque()
        self._forgotten: deque[dict[str, Any]] = deque()
        self._dead = False
        self._thread = threading.Thread(target=self._listen, name=f"ggjit-{name}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                frame = read_frame(self.process.stdout)
            except (OSError, ValueError):
                frame = None
            with self._changed:
                if frame is None:
                    self._dead = True
                    self._changed.notify_all()
                    self.process.stdout.close()
                    return
                self._done += 1
                if "error" in frame[0]:
                    self._errors.append(_ERRORS.get(frame[0]["error"], RuntimeError)(frame[0]["text"]))
                if self._done in self._wanted:
                    self._wanted[self._done] = frame
                self._changed.notify_all()

    def _lost(self) -> RuntimeError:
        try:
            code: int | None = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        return RuntimeError(
            f"{self.name}: the child process must be alive, got exit status {code}; what its buffers held is lost"
        )

    def post(self, what: str, payload: Bytes = b"", wanted: bool = False, **fields: Any) -> int:
        """Send a command; returns its number.

        Raises:
            RuntimeError: the child is gone.
        """
        stdin = self.process.stdin
        assert stdin is not None
        with self._write:
            while self._forgotten:
                self._send(stdin, self._forgotten.popleft(), b"", False)
            return self._send(stdin, {"what": what, **fields}, payload, wanted)

    def _send(self, stdin: Any, fields: dict[str, Any], payload: Bytes, wanted: bool) -> int:
        if self._dead:
            raise self._lost()
        self._sent += 1
        if wanted:
            self._wanted[self._sent] = None
        try:
            write_frame(stdin, fields, payload)
        except (OSError, ValueError):  # ValueError: it was closed
            raise self._lost() from None
        except BaseException:  # Ctrl-C within a frame: the child would take the next one for its rest
            self.process.kill()
            raise
        return self._sent

    def forget(self, **fields: Any) -> None:
        """Send a command with the next one: safe while memory is being collected."""
        self._forgotten.append(fields)

    def wait(self, number: int | None = None) -> tuple[dict[str, Any], bytearray] | None:
        """Wait for the answer to a command, by default the last one.

        Raises:
            RuntimeError: the child is gone.
            Exception: what the child raised since the last call that waited.
        """
        last = self._sent if number is None else number
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self._done >= last)
            # Another thread's answer stays where that thread finds it.
            answer = None if number is None else self._wanted.pop(number, None)
            if self._errors:
                error = self._errors[0]
                self._errors.clear()
                raise error
            if self._done < last:
                raise self._lost()
        return answer

    def ask(self, what: str, payload: Bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytearray]:
        """Send a command and wait for its answer."""
        answer = self.wait(self.post(what, payload, wanted=True, **fields))
        assert answer is not None
        return answer

    def close(self) -> None:
        """Let the child end: its input does."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:  # it is computing
            self.process.kill()
            self.process.wait()
        self._thread.join(2)


@dataclass
class Counts:
    """What went between the host and a device.

    Attributes:
        to_device, from_device: copies of tensors.
        to_device_nbytes, from_device_nbytes: their bytes.
        on_device: copies from buffer to buffer of the device.
        graphs: graphs sent.
        runs: graphs computed.
    """

    to_device: int = 0
    to_device_nbytes: int = 0
    from_device: int = 0
    from_device_nbytes: int = 0
    on_device: int = 0
    graphs: int = 0
    runs: int = 0

    def clear(self) -> None:
        """Set all to 0."""
        self.__init__()  # type: ignore[misc]


class ProcessBufferType(BufferType):
    """Memory of a child process."""

    is_host = False

    def __init__(self, device: ProcessDevice) -> None:
        self.name, self.device = device.name, device

    def new_buffer(self, size: int, usage: Usage = "any") -> Buffer:
        """Allocate zeroed memory in the child."""
        return ProcessBuffer(self, max(size, self.alignment), usage)


class ProcessBuffer(Buffer):
    """A block of a child's memory, known here by a number."""

    __slots__ = ("channel", "counts", "id")

    def __init__(self, type: ProcessBufferType, size: int, usage: Usage) -> None:
        super().__init__(type, None, usage, _new_base(size), size)
        self.channel, self.counts, self.id = type.device.channel, type.device.counts, next(type.device.numbers)
        self.channel.ask("new_buffer", id=self.id, size=size, usage=usage)
        weakref.finalize(self, self.channel.forget, what="free_buffer", id=self.id).atexit = False

    def place(self, tensor: Tensor, nbytes: int, offset: int = 0) -> int:
        """Offset in the buffer of a tensor's bytes.

        Raises:
            ValueError: they do not lie in this buffer.
        """
        address = tensor.data + offset
        if not self.contains(address, nbytes):
            raise ValueError(
                f"Buffer: the data must lie in this {self.type.name} buffer of {self.size} bytes, got {nbytes} bytes "
                f"at offset {address - self.base} ('{tensor.name}')"
            )
        return address - self.base

    def set_tensor(self, tensor: Tensor, data: Bytes, offset: int = 0) -> None:
        """Send bytes of a tensor."""
        source = as_bytes(data)
        check_range("set_tensor", tensor, offset, source.nbytes)
        at = self.place(tensor, source.nbytes, offset)
        self.counts.to_device += 1
        self.counts.to_device_nbytes += source.nbytes
        self.channel.post("write", source, id=self.id, offset=at)

    def get_tensor(self, tensor: Tensor, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Fetch bytes of a tensor, when all that was started is done."""
        n = tensor.nbytes - offset if nbytes is None else nbytes
        check_range("get_tensor", tensor, offset, n)
        at = self.place(tensor, n, offset)
        self.counts.from_device += 1
        self.counts.from_device_nbytes += n
        return np.frombuffer(self.channel.ask("read", id=self.id, offset=at, nbytes=n)[1], np.uint8)

    def copy_tensor(self, src: Tensor, dst: Tensor) -> bool:
        """Copy within the child; False if `src` is not there."""
        source = buffer_of(src)
        if not isinstance(source, ProcessBuffer) or source.channel is not self.channel:
            return False
        n = src.nbytes
        places = source.place(src, n), self.place(dst, n)
        self.counts.on_device += 1
        self.channel.post("copy", src=source.id, src_offset=places[0], id=self.id, offset=places[1], nbytes=n)
        return True

    def clear(self, value: int = 0) -> None:
        """Set every byte."""
        self.channel.post("clear", id=self.id, value=value)


class ProcessEvent:
    """A point in the commands to a child."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.number = channel, 0

    def record(self) -> None:
        """Stand for all that was sent so far."""
        self.number = self.channel._sent

    def synchronize(self) -> None:
        """Wait until the child has got there."""
        if self.number:
            self.channel.wait(self.number)


class ProcessBackend:
    """Computes graphs in a child process.

    Args:
        device: the child.
        n_threads: threads of the child.
    """

    def __init__(self, device: ProcessDevice, n_threads: int | None = 1) -> None:
        self.device, self.name = device, device.name
        self.n_threads = None if n_threads is None else check_threads("ProcessBackend", n_threads)
        self._graphs: weakref.WeakKeyDictionary[Graph, tuple[int, list[int]]] = weakref.WeakKeyDictionary()

    def supports(self, node: Tensor) -> bool:
        """Is the op among the device's, and has it a kernel that the child knows too?"""
        op, chosen = node.op, self.device.ops
        if op.view:
            return True
        if (chosen is not None and op.name not in chosen) or op.id > _FIRST_USER_OP or op.name in _OWN_KERNEL:
            return False
        known = all(t is None or t.type.id < FIRST_USER_ID for t in (node, *node.src))
        return known and op.supported(node)

    def supports_buffer_type(self, type: BufferType) -> bool:
        """True for the device's own memory alone."""
        return type is self.device.buffer_type()

    def offloads(self, node: Tensor) -> bool:
        """Has the result as many columns as the device asks for? Those of experts are counted by tokens."""
        least = self.device.offload_columns
        return least is not None and node.ne[1 if node.op.picks is None else 2] >= least

    def compute(self, graph: Graph, fuse: bool | None = None) -> None:
        """Let the child compute a graph; it is sent the first time, and again if its tensors moved.

        Raises:
            NotImplementedError: a tensor does not lie in the device's memory.
        """
        channel, counts = self.device.channel, self.device.counts
        addresses = [t.data for t in (*graph.leafs, *graph.nodes)]
        known = self._graphs.get(graph)
        if known is None or known[1] != addresses:
            records, n_leafs, use_counts = graph_records(graph, self._place)
            if known is None:
                known = next(self.device.numbers), addresses
                weakref.finalize(graph, channel.forget, what="free_graph", id=known[0]).atexit = False
            channel.post(
                "graph", records.view(np.uint8), id=known[0], n_leafs=n_leafs, use_counts=use_counts
            )  # fmt: skip
            self._graphs[graph] = known[0], addresses
            counts.graphs += 1
        channel.post("run", id=known[0], n_threads=self.n_threads, fuse=fuse)
        counts.runs += 1

    def scratch_size(self, graph: Graph) -> int:
        """Bytes of scratch of the graph's program, which the child will make."""
        from ggjit.lower import scratch_size
        from ggjit.threadpool import default_threads

        stands_for: dict[int, Buffer] = {}  # the child's buffers: host memory there, none here

        def place(t: Tensor) -> tuple[int, int]:
            assert t.buffer is not None
            base, size = t.buffer.base, t.buffer.size
            stands_for[base] = Buffer(host_buffer_type(), None, t.buffer.usage, base, size)
            return base, t.data - base

        records, n_leafs, use_counts = graph_records(graph, place)
        child = graph_from_records(bytearray(records.view(np.uint8)), n_leafs, use_counts, stands_for)
        return scratch_size(child, default_threads() if self.n_threads is None else self.n_threads)

    def _place(self, t: Tensor) -> tuple[int, int]:
        buffer = t.buffer
        if not isinstance(buffer, ProcessBuffer) or buffer.channel is not self.device.channel:
            where = "memory of the host" if buffer is None else f"a {buffer.type.name} buffer"
            raise NotImplementedError(
                f"{self.name}: tensors must lie in a buffer of the device, got {where if t.data else 'no data'} "
                f"('{t.name}')"
            )
        return buffer.id, buffer.place(t, t.nbytes)

    def synchronize(self) -> None:
        """Wait until the child has done all; raises what went wrong there."""
        self.device.channel.wait()

    def record_event(self, event: Event) -> None:
        """Let an event of this device stand for all that was sent so far.

        Raises:
            TypeError: it is another device's.
        """
        if not isinstance(event, ProcessEvent) or event.channel is not self.device.channel:
            raise TypeError(f"{self.name}: the event must be one of the device's, got {event!r}")
        event.record()

    def wait_event(self, event: Event) -> None:
        """Wait for another device's event here; the device's own commands are in order anyway."""
        if not isinstance(event, ProcessEvent) or event.channel is not self.device.channel:
            event.synchronize()


class ProcessDevice:
    """A child process that holds buffers and computes. It starts now, and ends with the device or this process.

    Args:
        name: of the device, its backends and buffers.
        ops: names of the ops that it supports; None: all that the CPU computes. User's ops and types, which the child
            does not know, are never among them.
        offload_columns: with so many columns in its result a node is worth a copy of its weights; None: never.

    Attributes:
        counts: copies and runs so far.
        ops, offload_columns: as given.

    Raises:
        RuntimeError: the child does not start.
    """

    def __init__(
        self, name: str = "process0", ops: Collection[str] | None = None, offload_columns: int | None = None
    ) -> None:
        self.name, self.ops, self.offload_columns = name, None if ops is None else frozenset(ops), offload_columns
        self.counts, self.numbers = Counts(), itertools.count(1)
        self.channel = Channel(name)
        self._close = weakref.finalize(self, self.channel.close)
        self._type = ProcessBufferType(self)
        self.pid: int = self.channel.ask("hello")[0]["pid"]

    @property
    def description(self) -> str:
        """What computes."""
        return f"CPU kernels in process {self.pid}"

    def buffer_type(self) -> BufferType:
        """The child's memory."""
        return self._type

    def weight_buffer_types(self) -> tuple[BufferType, ...]:
        """The child's memory."""
        return (self._type,)

    def buffer_from_array(self, array: NDArray[np.uint8]) -> None:
        """None: the child cannot read this process's memory."""

    def new_backend(self, n_threads: int | None = 1) -> ProcessBackend:
        """Make a backend; all of a device's compute in one order."""
        return ProcessBackend(self, n_threads)

    def new_event(self) -> ProcessEvent:
        """Make an event."""
        return ProcessEvent(self.channel)

    def memory(self) -> tuple[int, int]:
        """Bytes that the child holds in buffers, and as scratch of graphs."""
        answer = self.channel.ask("memory")[0]
        return answer["buffers"], answer["scratch"]

    def close(self) -> None:
        """End the child; its buffers are lost."""
        self._close()

    def __repr__(self) -> str:
        return f"ProcessDevice({self.name}, process {self.pid})"
