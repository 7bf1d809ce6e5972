"""The packed program and the compiled loop that runs it: no Python between steps.

A program is rows of four int64: the address of a kernel's C entry, of the record it computes, of its task (address and
size of its scratch), and flags. All threads walk the rows together; after a row with BARRIER they meet. The last thread
to arrive decides for all whether to go on, so that a kernel that fails, or an abort, stops all at the same barrier, and
zeroes the chunk counters (the first word of a row's scratch) of the rows with COUNTER up to the next barrier.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ggjit import placement
from ggjit import shared_state as shared
from ggjit.barriers import BARRIER, COUNTER, EACH, RECORDS
from ggjit.jit import Words, jitted, words
from ggjit.shared_state import (
    ABORT,
    ARRIVED,
    CPU,
    FAILED,
    FAILURES,
    FIRST,
    JOB,
    LAST,
    LINE,
    LOOK_SPINS,
    PARKED,
    PHASE,
    ROWS,
    SPINS,
    STOPPED,
    THREADS,
    TIMES,
    WAITING,
)

if TYPE_CHECKING:
    from ggjit.threadpool import Pool

DONE, FAILURE, ABORTED = 0, 1, 2  # results of a run
_ROW = 32  # bytes


class Aborted(RuntimeError):
    """The program was stopped by `Pool.abort` before its end."""


# --- compiled ---------------------------------------------------------------------------------------------------------


@jitted
def zero_counters(row, end):  # type: ignore[no-untyped-def]
    """Zero the chunk counters of the rows that use one, from a row to the next with BARRIER, at most to `end`."""
    while row < end:
        flags = shared.load(row + 24)
        if flags & COUNTER:
            shared.store(shared.load(shared.load(row + 16)), 0)
        row = end if flags & BARRIER else row + _ROW


@jitted
def barrier(state, ith, nth, job, following, end):  # type: ignore[no-untyped-def]
    """Wait for all threads; False if the program stops here. `following` is the address of the next row."""
    phase = shared.load_atomic(state + PHASE)
    if shared.fetch_add(state + ARRIVED, 1) == nth - 1:
        if shared.load_atomic(state + FAILED) + shared.load_atomic(state + ABORT) != 0:
            shared.store_atomic(state + STOPPED, job)
        zero_counters(following, end)
        shared.store_atomic(state + ARRIVED, 0)
        shared.fetch_add(state + PHASE, 1)
        if shared.load_atomic(state + WAITING) > 0:
            shared.wake(state, state + PHASE)
    else:
        spins, look = shared.load(state + SPINS), shared.load(state + LOOK_SPINS)
        n = 0
        while shared.load_atomic(state + PHASE) == phase:
            n += 1
            if n <= spins:
                shared.pause()
                if n == look:
                    placement.look(state, ith)
            else:
                shared.fetch_add(state + WAITING, 1)
                shared.sleep_while(state, state + PHASE, phase)
                shared.fetch_add(state + WAITING, -1)
    return shared.load_atomic(state + STOPPED) != job


@jitted
def note_failure(state, ith, row, status):  # type: ignore[no-untyped-def]
    """Keep the first failure of this thread."""
    mine = state + FAILURES + LINE * ith
    if shared.load(mine) == 0:
        shared.store(mine, 1)
        shared.store(mine + 8, row)
        shared.store(mine + 16, status)
        shared.fetch_add(state + FAILED, 1)


@jitted
def call(row, ith, nth):  # type: ignore[no-untyped-def]
    """One thread's part of a row."""
    header, flags = shared.load(row + 8), shared.load(row + 24)
    if flags & RECORDS:
        header = shared.load(header + 8 * ith)
    if flags & EACH:
        ith, nth = 0, 1
    return shared.call_entry(shared.load(row), header, shared.load(row + 16), ith, nth)


@jitted
def run_rows(state, ith, job):  # type: ignore[no-untyped-def]
    """This thread's share of a job."""
    rows, nth, last = shared.load(state + ROWS), shared.load(state + THREADS), shared.load(state + LAST)
    times, end = shared.load(state + TIMES) if ith == 0 else 0, rows + _ROW * last
    for i in range(shared.load(state + FIRST), last):
        row = rows + _ROW * i
        status = call(row, ith, nth)
        if status != 0:
            note_failure(state, ith, i, status)
        if times:
            shared.store(times + 16 * i + 8, shared.ticks())
        if (shared.load(row + 24) & BARRIER or i + 1 == last) and not barrier(state, ith, nth, job, row + _ROW, end):
            return
        if times:
            shared.store(times + 16 * i + 16, shared.ticks())


@jitted
def run_alone(state):  # type: ignore[no-untyped-def]
    """A job that the calling thread does by itself."""
    rows, last, times = shared.load(state + ROWS), shared.load(state + LAST), shared.load(state + TIMES)
    for i in range(shared.load(state + FIRST), last):
        row = rows + _ROW * i
        zero_counters(row, row + _ROW)
        status = call(row, 0, 1)
        if status != 0:
            note_failure(state, 0, i, status)
        if shared.load(row + 24) & BARRIER and shared.load(state + FAILED) + shared.load_atomic(state + ABORT) != 0:
            return
        if times:
            now = shared.ticks()
            shared.store(times + 16 * i + 8, now)
            shared.store(times + 16 * i + 16, now)


@jitted
def note_job(state, rows, first, last, times):  # type: ignore[no-untyped-def]
    """Write a job into the state; the workers look at it when its number is published."""
    nth = shared.load(state + THREADS)
    for ith in range(nth):
        shared.store(state + FAILURES + LINE * ith, 0)
        shared.store(state + FAILURES + LINE * ith + CPU, placement.NOT_BEGUN)
    shared.store_atomic(state + FAILED, 0)
    shared.store_atomic(state + ABORT, 0)
    shared.store_atomic(state + ROWS, rows)
    shared.store_atomic(state + FIRST, first)
    shared.store_atomic(state + LAST, last)
    shared.store_atomic(state + TIMES, times)


@jitted
def give_job(state, rows, first, last, times):  # type: ignore[no-untyped-def]
    """Hand a job to the workers and return its number; `last` < 0 tells them to end.

    Only one job is out at a time: all threads have met at its last row when the next is published.
    """
    note_job(state, rows, first, last, times)
    zero_counters(rows + _ROW * first, rows + _ROW * last)
    placement.publish_from(state)
    job = shared.fetch_add(state + JOB, 1) + 1
    if shared.load_atomic(state + PARKED) > 0:
        shared.wake(state, state + JOB)
    return job


@jitted
def begin(state):  # type: ignore[no-untyped-def]
    """Note the time at which thread 0 begins, where times are wanted."""
    times = shared.load(state + TIMES)
    if times:
        shared.store(times + 16 * shared.load(state + FIRST), shared.ticks())


@jitted
def outcome(state):  # type: ignore[no-untyped-def]
    """DONE, FAILURE or ABORTED."""
    if shared.load_atomic(state + FAILED) != 0:
        return FAILURE
    return ABORTED if shared.load_atomic(state + ABORT) != 0 else DONE


@jitted
def take_part(state, job):  # type: ignore[no-untyped-def]
    """The calling thread's share of the published job, as thread 0. Returns DONE, FAILURE or ABORTED."""
    begin(state)
    if shared.load(state + THREADS) == 1:
        run_alone(state)
    elif shared.load(state + FIRST) < shared.load(state + LAST):
        run_rows(state, 0, job)
    return outcome(state)


@words
def execute(state, rows, first, last, times):  # type: ignore[no-untyped-def]
    """Publish a job and take part in it: one call, so that the GIL is not needed in between."""
    return take_part(state, give_job(state, rows, first, last, times))


@words
def execute_alone(state, rows, first, last, times):  # type: ignore[no-untyped-def]
    """Do a job without the workers: no job is published, they stay where they are."""
    note_job(state, rows, first, last, times)
    begin(state)
    run_alone(state)
    return outcome(state)


@words
def publish(state, rows, first, last, times):  # type: ignore[no-untyped-def]
    """Publish a job; the first half of `execute`, for pools whose workers must be woken by Python."""
    return give_job(state, rows, first, last, times)


@words
def run(state, job):  # type: ignore[no-untyped-def]
    """Take part in a published job; the second half of `execute`."""
    return take_part(state, job)


@words
def read_ticks(_):  # type: ignore[no-untyped-def]
    """The CPU's time counter."""
    return shared.ticks()


COMPILED: tuple[Words, ...] = (execute, execute_alone, publish, run, read_ticks)


@functools.cache
def ns_per_tick() -> float:
    """Measure the time counter's rate once (2 ms)."""
    read_ticks(0)
    start, begin = time.perf_counter_ns(), read_ticks(0)
    while time.perf_counter_ns() - start < 2_000_000:
        pass
    return (time.perf_counter_ns() - start) / (read_ticks(0) - begin)


# --- Python -----------------------------------------------------------------------------------------------------------


class Program:
    """A packed program.

    Args:
        rows: int64 [n, 4]: entry, header, task, flags. The caller keeps what they point to.

    Attributes:
        ticks: None, or int64 [2 n + 1] that runs write thread 0's time counter to: at the start, and for each row when
            its kernel is done and when all threads have met behind it.
        job: all rows, as `Pool.execute` takes them.

    Raises:
        ValueError: wrong shape, or two rows with COUNTER and the same task without a barrier between them.
    """

    def __init__(self, rows: NDArray[np.int64]) -> None:
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 4 or not rows.flags.c_contiguous:
            raise ValueError(f"Program: rows must be contiguous int64 [n, 4], got {rows.dtype} {list(rows.shape)}")
        group = np.cumsum(rows[:, 3] & BARRIER) - (rows[:, 3] & BARRIER)  # barriers before the row
        counts = np.flatnonzero(rows[:, 3] & COUNTER)
        _, first = np.unique(np.stack([group[counts], rows[counts, 2]]), axis=1, return_index=True)
        if len(first) < len(counts):
            row = np.delete(counts, first)[0]
            raise ValueError(
                f"Program: a BARRIER must stand between rows with COUNTER and the same task, got none before row {row}"
            )
        self.rows = rows
        self._address = rows.ctypes.data
        self.ticks = None

    @property
    def ticks(self) -> NDArray[np.int64] | None:
        """Where times go."""
        return self._ticks

    @ticks.setter
    def ticks(self, ticks: NDArray[np.int64] | None) -> None:
        self._ticks = ticks
        self.job = self._address, 0, len(self.rows), 0 if ticks is None else ticks.ctypes.data

    def run(self, pool: Pool, first: int = 0, last: int | None = None, alone: bool = False) -> tuple[int, int] | None:
        """Run rows first to last on all threads of the pool, or on the calling thread `alone`.

        Returns:
            None, or (row, status) of the first row that failed, with the smallest status of any thread.

        Raises:
            Aborted: `pool.abort` was called.
        """
        n_rows = len(self.rows)
        last = n_rows if last is None else last
        if not 0 <= first <= last <= n_rows:
            raise ValueError(f"Program.run: rows must be within 0 to {n_rows}, got {first} to {last}")
        return pool.execute(self._address, first, last, self.job[3], alone)

    def time(self, pool: Pool) -> NDArray[np.int64]:
        """Run all rows and return the nanoseconds of each on thread 0, barriers included.

        Raises:
            RuntimeError: a row failed.
            Aborted: `pool.abort` was called.
        """
        rate = ns_per_tick()
        ticks = np.zeros(2 * len(self.rows) + 1, np.int64)
        failed = pool.execute(self._address, 0, len(self.rows), ticks.ctypes.data)
        if failed is not None:
            raise RuntimeError(f"Program.time: rows must not fail, got status {failed[1]} at row {failed[0]}")
        return np.rint(np.diff(ticks[::2]) * rate).astype(np.int64)
