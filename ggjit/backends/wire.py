"""What a device in another process and its host say to each other: frames, and graphs as bytes.

A frame is two lengths, a JSON object and raw bytes. A graph is its tensor records, one after the other; where a record
in memory holds addresses these hold what means the same in any process:

    src, view_src    1 + position of the record, 0 for none
    buffer, data     number of the device's buffer (0: none yet, a view) and the offset in it

Records of tensors that the nodes read come before the nodes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ggjit import op as ops
from ggjit import types
from ggjit.backend import Buffer, Bytes, as_bytes
from ggjit.context import TENSOR_SIZE
from ggjit.graph import Graph
from ggjit.graph_copy import GraphView, context_for, new_record
from ggjit.tensor import MAX_NAME, NAME_AT, PARAMS_AT, RECORD, Tensor

_FRAME = struct.Struct("<IQ")


def write_frame(stream: IO[bytes], fields: Mapping[str, Any], payload: Bytes = b"") -> None:
    """Write one frame.

    Raises:
        OSError: the other side is gone.
    """
    head, body = json.dumps(fields).encode(), as_bytes(payload)
    stream.write(_FRAME.pack(len(head), body.nbytes) + head)
    if body.nbytes:
        stream.write(body.data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytearray] | None:
    """Read one frame; None if the other side is gone."""
    lengths = stream.read(_FRAME.size)
    if len(lengths) < _FRAME.size:
        return None
    n_head, n_body = _FRAME.unpack(lengths)
    head, body = stream.read(n_head), bytearray(n_body)
    at, view = 0, memoryview(body)
    while at < n_body:
        n = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not n:
            return None
        at += n
    return (json.loads(head), body) if len(head) == n_head else None


def graph_records(graph: Graph, place: Callable[[Tensor], tuple[int, int]]) -> tuple[NDArray[Any], int, list[int]]:
    """A graph's records for another process.

    Args:
        graph: its tensors have data. Views that no other node reads are left out.
        place: number of the buffer and offset of a tensor that is not a view.

    Returns:
        Records, how many of them come before the nodes, and how often each is read.
    """
    nodes = _needed(graph)
    leafs: dict[Tensor, None] = {}
    inside = set(nodes)
    for t in nodes:
        for s in (t.view_src, *t.src):
            if s is not None and s not in inside:
                if s.view_src is not None and s.view_src not in inside:
                    leafs.setdefault(s.view_src)
                leafs.setdefault(s)
    order = [*leafs, *nodes]
    index = {t: i + 1 for i, t in enumerate(order)}
    records = np.frombuffer(b"".join(_raw(t) for t in order), RECORD).copy()
    for t, r in zip(order, records, strict=True):
        if t in inside:
            r["src"][: len(t.src)] = [0 if s is None else index[s] for s in t.src]
        else:
            r["op"], r["src"] = ops.NONE.id, 0
        r["view_src"] = 0 if t.view_src is None else index[t.view_src]
        r["buffer"], r["data"] = (0, 0) if t.view_src is not None else place(t)
    return records, len(leafs), [graph.use_counts.get(t, 1) for t in order]


def _needed(graph: Graph) -> list[Tensor]:
    """The nodes that compute something, and the views that these read."""
    needed: set[Tensor] = set()
    for t in reversed(graph.nodes):
        if not t.op.view or t in needed:
            needed.add(t)
            needed.update(s for s in t.src if s is not None)
    return [t for t in graph.nodes if t in needed]


def _raw(t: Tensor) -> bytes:
    return bytes(t.context.buffer[t.offset : t.offset + TENSOR_SIZE])


def graph_from_records(
    data: bytearray, n_leafs: int, use_counts: list[int], buffers: Mapping[int, Buffer]
) -> GraphView:
    """The graph that such records describe, on this process's buffers."""
    records = np.frombuffer(data, RECORD)
    made: list[Tensor] = []
    with context_for(len(records)):
        for i, r in enumerate(records):
            raw = data[i * TENSOR_SIZE : (i + 1) * TENSOR_SIZE]
            src = [int(s) for s in r["src"]]
            while src and not src[-1]:
                src.pop()
            root = made[r["view_src"] - 1] if r["view_src"] else None
            t = new_record(
                ops.by_id(int(r["op"])), types.by_id(int(r["type"])), _dims(r["ne"]), _dims(r["nb"]),
                tuple(made[s - 1] if s else None for s in src), bytes(raw[PARAMS_AT : PARAMS_AT + ops.PARAM_BYTES]),
                int(r["flags"]), raw[NAME_AT : NAME_AT + MAX_NAME].split(b"\0", 1)[0].decode("utf-8", "replace"),
                root, int(r["view_offs"]),
            )  # fmt: skip
            if root is not None:
                t.buffer = root.buffer
            elif r["buffer"]:
                t.buffer = buffers[int(r["buffer"])]
                t.data = t.buffer.base + int(r["data"])
            made.append(t)
    return GraphView(made[n_leafs:], dict(zip(made, use_counts, strict=True)))


def _dims(values: NDArray[np.int64]) -> tuple[int, int, int, int]:
    a, b, c, d = values.tolist()
    return a, b, c, d
