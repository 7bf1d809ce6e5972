"""Compile kernels in several processes: Numba's frontend holds one lock, so that threads do not help.

Children are forked after Numba has been imported, so they start at once and see every kernel, factories' too. Each
takes the next kernel's number from a pipe, compiles it and stores the object in the cache on disk; the parent takes
part. What a child could not do (an error, a kill) the parent does itself afterwards, so errors are raised in one place.
Only a process without other threads forks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

LEAST = 6  # kernels; fewer are not worth a process
MAX_PROCESSES = 16


def processes(n_kernels: int) -> int:
    """Return how many processes should compile: 1 where forking is not safe or does not pay."""
    if n_kernels < LEAST or not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 1
    return min(len(os.sched_getaffinity(0)), n_kernels // (LEAST // 2), MAX_PROCESSES)


def run(n_kernels: int, n_processes: int, compile_one: Callable[[int], None], done: Callable[[], None]) -> None:
    """Call compile_one(i) for each i below n_kernels, in this process and in n_processes - 1 children.

    Args:
        n_kernels: how many; at most 1024 (the pipe holds them all).
        n_processes: processes in all.
        compile_one: compiles and stores kernel i; an exception in a child only ends the child.
        done: called in the parent once for each kernel that is done anywhere.
    """
    work_out, work_in = os.pipe()
    news_out, news_in = os.pipe()
    os.write(work_in, b"".join(i.to_bytes(4, "little") for i in range(n_kernels)))
    os.close(work_in)
    os.set_blocking(news_out, False)
    children = [_fork(work_out, news_in, compile_one) for _ in range(n_processes - 1)]
    os.close(news_in)
    try:
        for i in _numbers(work_out):
            compile_one(i)
            done()
            _report(news_out, done)
    finally:
        os.close(work_out)
        for child in children:
            os.waitpid(child, 0)
        _report(news_out, done)
        os.close(news_out)


def _numbers(pipe: int) -> Iterator[int]:
    """The numbers left in the pipe, one at a time."""
    while data := os.read(pipe, 4):
        yield int.from_bytes(data, "little")


def _report(news: int, done: Callable[[], None]) -> None:
    with contextlib.suppress(BlockingIOError):
        while data := os.read(news, 1024):
            for _ in data:
                done()


def _fork(work: int, news: int, compile_one: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for i in _numbers(work):
            compile_one(i)
            os.write(news, b".")
        status = 0
    finally:
        os._exit(status)
