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

_THRESHOLD = 100_003  # new objects, so that the memory of garbage stays bounded; a number that nobody else takes
_lock = threading.Lock()
_inside = 0  # blocks that are being executed, by any thread
_limits = gc.get_threshold()
_own = threading.local()  # `inside` of one thread


@contextmanager
def put_off() -> Iterator[None]:
    """Collect less often inside the block. Blocks may be nested and run in several threads at once."""
    global _inside, _limits
    with _lock:
        now = gc.get_threshold()
        if now[0] != _THRESHOLD:
            _limits = now
        if _inside == 0 and 0 < now[0] < _THRESHOLD:  # a user may have put it off further
            gc.set_threshold(_THRESHOLD, *now[1:])
        _inside += 1
        _own.inside = _inside_here() + 1
    try:
        yield
    finally:
        with _lock:
            if _inside == 1:  # looked at before it is counted: an interrupt between them loses no limits
                _restore()
            _inside -= 1
            _own.inside -= 1


def _inside_here() -> int:
    return getattr(_own, "inside", 0)


def _restore() -> None:
    if gc.get_threshold()[0] == _THRESHOLD:  # else a user has set others meanwhile
        gc.set_threshold(*_limits)


def _after_fork() -> None:
    """In a child no other thread is left that could give the lock back, or leave its blocks."""
    global _lock, _inside
    _lock, _inside = threading.Lock(), _inside_here()
    if _inside == 0:
        _restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
