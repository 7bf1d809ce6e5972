"""Writes small GGUF files, right and wrong ones, for tests."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from ggjit.gguf import ValueType

CODES = "BbHhIif?"
WIDE = {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
SCALARS = [
    (ValueType.UINT8, 200), (ValueType.INT8, -100), (ValueType.UINT16, 60000), (ValueType.INT16, -30000),
    (ValueType.UINT32, 4_000_000_000), (ValueType.INT32, -2_000_000_000), (ValueType.FLOAT32, 0.5),
    (ValueType.BOOL, True), (ValueType.STRING, "grüße"), (ValueType.UINT64, 1 << 63), (ValueType.INT64, -(1 << 62)),
    (ValueType.FLOAT64, 1e300),
]  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value without its type; an array's content is (element type, elements)."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        element, elements = content
        return struct.pack("<IQ", element, len(elements)) + b"".join(value(element, one) for one in elements)
    return struct.pack("<" + (CODES[kind] if kind < 8 else WIDE[kind]), content)


def entry(key: str | bytes, kind: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def tensor(name: str | bytes, ne: Sequence[int], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_id, offset)


def gguf(
    entries: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    entries, tensors = list(entries), list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data or tensors else head
