"""Python's collection of garbage, put off while many objects are made that stay.

Every 700 new objects it looks for garbage, now and then among all there are: a quarter of the time in which a graph of
2,000 headers is built and lowered, where none of it is garbage.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 100_000  # new objects, and with them the memory that garbage can hold, stay bounded
_lock = threading.Lock()
_inside = 0  # blocks that are being executed, by any thread
_limits = gc.get_threshold()


@contextmanager
def put_off() -> Iterator[None]:
    """Collect less often inside the block. Blocks may be nested and run in several threads at once."""
    global _inside, _limits
    with _lock:
        if _inside == 0:
            _limits = gc.get_threshold()
            if 0 < _limits[0] < _THRESHOLD:  # a user may have put it off further
                gc.set_threshold(_THRESHOLD, *_limits[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_limits)


def _after_fork() -> None:
    """In a child no other thread is left that could give the lock back."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
