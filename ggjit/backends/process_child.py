"""The child of `ggjit.backends.process`: holds buffers and computes graphs, told by frames on its standard input.

It answers each frame in order, and ends when its input does: with the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ggjit.ops  # noqa: F401 - registers them
from ggjit.backend import Buffer, host_buffer_type
from ggjit.backends.wire import graph_from_records, read_frame, write_frame
from ggjit.graph_copy import GraphView

Answer = tuple[dict[str, Any], Any]


class Child:
    """The state of one device: buffers and graphs by number."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.graphs: dict[int, GraphView] = {}

    def bytes_at(self, buffer: int, offset: int, nbytes: int) -> Any:
        """Bytes of a buffer, as a live view."""
        array = self.buffers[buffer].array
        assert array is not None and 0 <= offset and offset + nbytes <= array.nbytes
        return array[offset : offset + nbytes]

    def hello(self, _: bytearray) -> Answer:
        """Say that the child runs."""
        return {"pid": os.getpid()}, b""

    def memory(self, _: bytearray) -> Answer:
        """Tell how many bytes buffers hold, and graphs beside them."""
        executables = [e for g in self.graphs.values() for e in g._executables.values()]
        scratch = sum(e.scratch_nbytes for e in executables)
        return {"buffers": sum(b.size for b in self.buffers.values()), "scratch": scratch}, b""

    def new_buffer(self, _: bytearray, id: int, size: int, usage: Any) -> None:
        """Allocate a buffer."""
        self.buffers[id] = host_buffer_type().new_buffer(size, usage)

    def free_buffer(self, _: bytearray, id: int) -> None:
        """Free a buffer; graphs whose tensors lie in it keep its memory."""
        self.buffers.pop(id, None)

    def write(self, payload: bytearray, id: int, offset: int) -> None:
        """Write bytes."""
        self.bytes_at(id, offset, len(payload))[:] = memoryview(payload)

    def read(self, _: bytearray, id: int, offset: int, nbytes: int) -> Answer:
        """Read bytes."""
        return {}, self.bytes_at(id, offset, nbytes)

    def copy(self, _: bytearray, src: int, src_offset: int, id: int, offset: int, nbytes: int) -> None:
        """Copy bytes from buffer to buffer."""
        self.bytes_at(id, offset, nbytes)[:] = self.bytes_at(src, src_offset, nbytes).copy()

    def clear(self, _: bytearray, id: int, value: int) -> None:
        """Set all bytes of a buffer."""
        self.buffers[id].clear(value)

    def graph(self, payload: bytearray, id: int, n_leafs: int, use_counts: list[int]) -> None:
        """Take a graph."""
        self.graphs[id] = graph_from_records(payload, n_leafs, use_counts, self.buffers)

    def free_graph(self, _: bytearray, id: int) -> None:
        """Forget a graph."""
        self.graphs.pop(id, None)

    def run(self, _: bytearray, id: int, n_threads: int | None, fuse: bool | None) -> None:
        """Compute a graph."""
        self.graphs[id].compute(n_threads, fuse)


def _answer(child: Child, fields: dict[str, Any], payload: bytearray) -> Answer:
    what = fields.pop("what")
    try:
        return getattr(child, what)(payload, **fields) or ({}, b"")
    except Exception as error:  # the host raises it where it waits
        return {"error": type(error).__name__, "text": str(error) or repr(error)}, b""


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not get among the answers
    child = Child()
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        fields, data = _answer(child, *frame)
        try:
            write_frame(answers, fields, data)
        except OSError:  # the host is gone
            return


if __name__ == "__main__":
    main()
