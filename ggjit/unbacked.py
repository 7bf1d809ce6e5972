"""Buffers without memory: all of a model's and a context's planning without an allocation, to know its size before.

Places in them are addresses that no process maps, so whoever would read or write through one fails at once.
"""

from __future__ import annotations

import itertools

from ggjit.alloc import GraphAllocator
from ggjit.backend import Buffer, BufferType, Usage

_numbers = itertools.count(1)


def unbacked_buffer(type: BufferType, size: int, usage: Usage = "any") -> Buffer:
    """A buffer of a type that has addresses and no memory."""
    base = (1 << 62) + (next(_numbers) << 44)
    return Buffer(type, None, usage, base, max(size, type.alignment))


class UnbackedAllocator(GraphAllocator):
    """A `GraphAllocator` whose buffers have no memory."""

    def _new_buffer(self, type: BufferType, size: int) -> Buffer:
        return unbacked_buffer(type, size, "compute")
