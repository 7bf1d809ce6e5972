"""Worker threads that run programs, and how many there should be.

Workers are daemon Python threads that stay inside one compiled function with the GIL released. An idle worker spins
half a millisecond, then sleeps in the kernel; a program therefore starts and ends even while another Python thread
holds the GIL. On systems without a way to sleep on an address an idle worker returns to Python and waits on a lock.

A pool runs one program at a time; `get_pool(n)` gives the process's pool of n threads. In a forked child the pools
start anew.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggjit import placement, program
from ggjit import shared_state as shared
from ggjit.arguments import MAX_THREADS, check_threads
from ggjit.jit import compile_all, words
from ggjit.parallel_compile import WORKER
from ggjit.shared_state import (
    ABORT,
    FAILURES,
    IDLE_SPINS,
    JOB,
    LAST,
    LINE,
    LOOK_SPINS,
    PARKED,
    SPINS,
    THREAD,
    WAIT_KIND,
)

# Longer is paid at every barrier when threads share a core. Shorter lets threads sleep over small differences, and
# where waking takes long (an idle CPU of a virtual machine) each then makes the other one sleep: with 10 us a prompt
# of 128 tokens after a pause takes half as long again.
BARRIER_SPIN_NS = 200_000
LOOK_SPIN_NS = 100_000  # waiting so long threads look whether they share a CPU
IDLE_SPIN_NS = 500_000
_STOP = -1


@words
def worker(state, ith, job):  # type: ignore[no-untyped-def]
    """Serve jobs after number `job`. Returns -1 when told to end, else the last job served: time to wait in Python."""
    while True:
        n, idle = 0, shared.load(state + IDLE_SPINS)
        while shared.load_atomic(state + JOB) == job:
            n += 1
            if n <= idle:
                shared.pause()
            elif shared.load(state + WAIT_KIND) == shared.NO_WAIT:
                return job
            else:
                shared.fetch_add(state + PARKED, 1)
                shared.sleep_while(state, state + JOB, job)
                shared.fetch_add(state + PARKED, -1)
        job += 1
        if shared.load_atomic(state + LAST) < 0:
            return _STOP
        placement.begin_apart(state, ith)
        program.run_rows(state, ith, job)


@words
def pauses(n):  # type: ignore[no-untyped-def]
    """Spin n times."""
    for _ in range(n):
        shared.pause()
    return n


COMPILED = *program.COMPILED, worker, pauses


@functools.cache
def pause_ns() -> float:
    """Nanoseconds of one spin on this machine, measured once."""
    best = float("inf")
    pauses(1)
    for _ in range(5):
        start = time.perf_counter_ns()
        pauses(2000)
        best = min(best, (time.perf_counter_ns() - start) / 2000)
    return max(best, 0.1)


class Pool:
    """n_threads - 1 workers; the thread that runs a program is thread 0.

    Args:
        n_threads: threads in all.

    Raises:
        TypeError: `n_threads` is no whole number.
        ValueError: it is not 1 to 512.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = check_threads("Pool", n_threads)
        compile_all(COMPILED)
        self._worker = worker.c_function
        self._start()

    def _start(self) -> None:
        """Fresh state and fresh workers."""
        self._busy = threading.Lock()  # one program at a time
        self._words = shared.new_state(self.n_threads)
        self._words[SPINS // 8] = int(BARRIER_SPIN_NS / pause_ns())
        self._words[LOOK_SPINS // 8] = int(LOOK_SPIN_NS / pause_ns())
        self._words[IDLE_SPINS // 8] = int(IDLE_SPIN_NS / pause_ns())
        self._state = self._words.ctypes.data
        self._parking = threading.Lock()
        self._parked: list[threading.Lock] = []  # workers that wait in Python
        in_python = self._words[WAIT_KIND // 8] == shared.NO_WAIT
        self._job: Callable[..., int] = self._publish_and_run if in_python else program.execute.c_function
        self._threads = [
            threading.Thread(target=self._serve, args=(self._words, i), name=f"{WORKER}{i}", daemon=True)
            for i in range(1, self.n_threads)
        ]
        for thread in self._threads:
            thread.start()
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clocks: list[int] = [] if clock_of is None else [clock_of(thread.ident) for thread in self._threads]

    def _serve(self, state_words: NDArray[np.int64], ith: int) -> None:
        state, job = state_words.ctypes.data, 0
        state_words[(FAILURES + LINE * ith + THREAD) // 8] = threading.get_native_id()
        while (job := self._worker(state, ith, job)) != _STOP:
            with self._parking:  # a job is published before `_parked` is looked at, so none is missed
                if state_words[JOB // 8] != job:
                    continue
                sleep = threading.Lock()
                sleep.acquire()
                self._parked.append(sleep)
            sleep.acquire()

    def execute(self, rows: int, first: int, last: int, times: int, alone: bool = False) -> tuple[int, int] | None:
        """Run rows (by address) on all threads; see Program.run. Waits while another thread runs a program.

        `alone` leaves the workers where they are: the calling thread does everything, with the same bits.

        No rows are no job: without a barrier at its end a worker could still be on its way to it when the next one is
        published, and would run that one twice.
        """
        if first == last:
            return None
        with self._busy:
            job = program.execute_alone.c_function if alone else self._job
            result = job(self._state, rows, first, last, times)
            if not result:
                return None
            if result == program.FAILURE:
                return self._failure()
        raise program.Aborted(f"program: stopped by abort, got rows {first} to {last} only in part")

    def cpu_ns(self) -> int:
        """CPU time that the calling thread and the workers have had.

        Each thread is asked: of the process as a whole the system may know it at its ticks only, and not what threads
        that run have had since.
        """
        if not self._clocks:
            return time.process_time_ns()
        return time.thread_time_ns() + sum(map(time.clock_gettime_ns, self._clocks))

    def _publish_and_run(self, state: int, rows: int, first: int, last: int, times: int) -> int:
        """What `program.execute` does, where workers wait in Python."""
        job = program.publish(state, rows, first, last, times)
        with self._parking:
            for sleep in self._parked:
                sleep.release()
            self._parked.clear()
        return program.run(state, job)

    def _failure(self) -> tuple[int, int]:
        lines = self._words[FAILURES // 8 :].reshape(-1, 8)
        return min((int(row), int(status)) for failed, row, status, *_ in lines if failed)

    def abort(self) -> None:
        """Stop the running program at its next barrier; for other threads. Nothing happens if none runs."""
        self._words[ABORT // 8] = 1

    @property
    def closed(self) -> bool:
        """Has `close` been called?"""
        return self._job is _closed

    def close(self) -> None:
        """End the workers; the pool cannot be used afterwards, and `get_pool` makes another one."""
        with _pools_lock:
            if _pools.get(self.n_threads) is self:
                del _pools[self.n_threads]
        with self._busy:
            if self.closed:
                return
            self._job(self._state, 0, 0, _STOP, 0)
            self._job, self._clocks = _closed, []
            for thread in self._threads:
                thread.join()


def _closed(*job: int) -> int:
    raise RuntimeError("Pool: the pool must be open to run a program, got a closed one")


_pools: dict[int, Pool] = {}
_pools_lock = threading.Lock()


def get_pool(n_threads: int) -> Pool:
    """Return the process's pool of n threads; made at the first call.

    Raises:
        TypeError: `n_threads` is no whole number.
        ValueError: it is not 1 to 512.
    """
    n_threads = check_threads("get_pool", n_threads)
    with _pools_lock:
        if n_threads not in _pools:
            _pools[n_threads] = Pool(n_threads)
        return _pools[n_threads]


def _after_fork() -> None:
    """The child has none of the workers."""
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        pool._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- how many threads -------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroup_limit(root: Path) -> float | None:
    """CPUs that the control groups of this process allow, or None."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            quota, period = (_read(place / "cpu.max").split() or ["max", "0"])[:2]
            if controllers:
                quota, period = _read(place / "cpu.cfs_quota_us") or "max", _read(place / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _physical_cores(root: Path, cpus: set[int]) -> int | None:
    """Cores that the CPUs belong to, or None if the system does not tell."""
    siblings = {_read(root / f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") for i in cpus}
    return None if not siblings or "" in siblings else len(siblings)


def threads_found(root: Path = Path("/")) -> tuple[int, str]:
    """Return how many threads programs should use here, and why.

    GGJIT_NUM_THREADS, else the least of: CPUs this process may use, CPU time its control groups allow, physical cores.

    Raises:
        ValueError: GGJIT_NUM_THREADS is no number from 1 to 512.
    """
    asked = os.environ.get("GGJIT_NUM_THREADS")
    if asked:
        if not asked.isdigit() or not 1 <= int(asked) <= MAX_THREADS:
            raise ValueError(f"GGJIT_NUM_THREADS: must be 1 to {MAX_THREADS}, got {asked!r}")
        return int(asked), "GGJIT_NUM_THREADS"
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
        found = [(len(cpus), f"{len(cpus)} CPUs may be used")]
        cores, limit = _physical_cores(root, cpus), _cgroup_limit(root)
        if cores is not None:
            found.append((cores, f"{cores} physical cores"))
        if limit is not None:
            found.append((max(1, int(limit)), f"the control group allows {limit:g} CPUs"))
        return min(found, key=lambda f: f[0])
    n = os.cpu_count() or 1
    return min(n, MAX_THREADS), f"{n} CPUs"


def default_threads() -> int:
    """Return how many threads programs should use here (see threads_found)."""
    return threads_found()[0]
