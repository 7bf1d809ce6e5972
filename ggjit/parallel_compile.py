"""Compile kernels in several processes: Numba's frontend holds one lock, so that threads do not help.

Children are forked after Numba has been imported, so they start at once and see every kernel, factories' too. Each
takes the next kernel's number from a pipe, compiles it and stores the object in the cache on disk; the parent takes
part. What a child could not do (an error, a kill) the parent does itself afterwards, so errors are raised in one place.
A process forks only if it has no other threads than workers of pools (`ggjit.threadpool`): while this thread compiles
they sleep in compiled code and hold no lock. A thread of somebody else's may hold one that a child would wait for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

MAX_PROCESSES = 16
WORKER = "ggjit-"  # what the names of a pool's threads begin with


def processes(n_kernels: int) -> int:
    """Return how many processes should compile: 1 where forking is not safe."""
    here = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not here and not t.name.startswith(WORKER)]
    if others or not sys.platform.startswith("linux"):
        return 1
    return max(min(len(os.sched_getaffinity(0)), n_kernels, MAX_PROCESSES), 1)


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
    children = []
    with contextlib.suppress(OSError):  # no memory for another process: fewer do it
        for _ in range(n_processes - 1):
            children.append(_fork(work_out, news_in, compile_one))
    os.close(news_in)
    try:
        for i in _numbers(work_out):
            compile_one(i)
            done()
            _report(news_out, done)
    finally:
        for _ in _numbers(work_out):  # after an error or an interrupt the children shall not go on
            pass
        os.close(work_out)
        for child in children:
            with contextlib.suppress(ChildProcessError):  # a program may have children reaped as they end
                os.waitpid(child, 0)
        _report(news_out, done)
        os.close(news_out)


def behind(task: Callable[[], None]) -> int:
    """Start a child that does a task with the CPU time that this process leaves; it ends with this process.

    Returns:
        The child's process id, which the caller waits for; 0 without a child, where forking is not safe or there is
        one CPU.
    """
    if processes(2) < 2:
        return 0
    parent = os.getpid()

    def run_task() -> None:
        os.nice(19)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        task()

    return _forked(run_task)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


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
    def compile_all() -> None:
        for i in _numbers(work):
            compile_one(i)
            os.write(news, b".")

    return _forked(compile_all)


def _forked(task: Callable[[], None]) -> int:
    """The process id of a child that does a task and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about threads: see above
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        task()
        status = 0
    finally:
        os._exit(status)
