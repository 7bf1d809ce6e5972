"""Running a program with all threads of a pool, or with one where all are slower.

Where other processes take CPUs, or there are more threads than CPUs, threads that meet at every step wait for each
other's time slices: 2 threads beside one busy process decode at a third of the speed of one. And where one thread alone
reads as fast as memory allows, the others only add barriers. Results have the same bits for any number of threads, so a
program may change it from run to run: some runs of both ways are compared, the faster one is kept for a while, then
they are compared again. That begins where threads had too little CPU time, and now and then with short programs that
run again and again.
"""

from __future__ import annotations

import threading
import time

from ggjit.program import Program
from ggjit.threadpool import Pool

EVERY = 4  # of so many runs one is judged: the threads' CPU times are calls of the system
LOOK_NS = 20_000_000  # threads' time of runs judged one after the other before CPUs are said to be missing
JUDGED_NS = 1_000_000  # shorter runs say nothing about other processes
BUSY = 0.8  # share of their time that the threads spend on a CPU when they have the CPUs to themselves
PERIOD_NS = 20_000_000, 640_000_000  # time for which one thread is kept: at first, and at most (doubled each time)
SHORT_NS = 20_000_000  # runs of which several are compared, also where no CPU is missing
TURNS = 3  # of either way; the same of longer runs
CLEARLY = 1.25  # so many times as slow one run says enough
QUIET_NS = 2_000_000_000  # time between two comparisons where no CPU is missing
IN_A_ROW = 16  # runs before one
PAUSE_NS = 20_000_000  # that ends a row


class Adaptive:
    """One program, run many times. Runs of several Python threads at once are not judged: they wait for each other.

    Args:
        program: to run; the same work each time.
        fixed: all threads at every run: something in it may look at their number.
    """

    def __init__(self, program: Program, fixed: bool = False) -> None:
        self.program, self.fixed = program, fixed
        self._judging = threading.Lock()
        self.is_alone = False  # the way that is kept
        self._until = 0  # time until which it is kept, if other processes take CPUs or one thread is faster
        self._period = PERIOD_NS[0]
        self._quiet_until = 0
        self._turns = 0  # of the comparison under way
        self._shared: list[int] = []  # wall times of its runs
        self._alone: list[int] = []
        self._unjudged = EVERY - 1  # the first run is judged
        self._cpu_ns = self._threads_ns = 0  # of runs judged one after the other
        self._n_in_a_row = self._end = 0

    def run(self, pool: Pool) -> tuple[int, int] | None:
        """Run the whole program; see `Pool.execute`."""
        job = self.program.job
        if pool.n_threads == 1 or self.fixed or not self._judging.acquire(blocking=False):
            return pool.execute(*job)
        try:
            return self._run(pool, job)
        finally:
            self._judging.release()

    def _run(self, pool: Pool, job: tuple[int, int, int, int]) -> tuple[int, int] | None:
        start = time.perf_counter_ns()
        self._n_in_a_row = self._n_in_a_row + 1 if start - self._end < PAUSE_NS else 0
        if self.is_alone if self._turns == 0 else len(self._shared) == self._turns:
            failed = pool.execute(*job, alone=True)
            self._end = time.perf_counter_ns()
            self._after_alone(self._end - start)
            return failed
        self._unjudged += 1
        is_judged = self._unjudged >= EVERY
        cpu = pool.cpu_ns() if is_judged else 0
        failed = pool.execute(*job)
        self._end = time.perf_counter_ns()
        wall = self._end - start
        if self._turns:
            self._shared.append(wall)
        elif is_judged and wall >= JUDGED_NS:
            self._cpu_ns += pool.cpu_ns() - cpu
            self._threads_ns += pool.n_threads * wall
            self._judge(wall)
        return failed

    def _judge(self, wall: int) -> None:
        """Begin a comparison after a run with all threads, or not."""
        self._unjudged = 0
        if self._cpu_ns >= BUSY * self._threads_ns:
            self._cpu_ns = self._threads_ns = 0
            if self._end >= self._until:
                self._period = PERIOD_NS[0]
            if wall < SHORT_NS and self._n_in_a_row >= IN_A_ROW and self._end >= self._quiet_until:
                self._compare(wall, [wall])
        elif self._threads_ns < LOOK_NS:
            self._unjudged = EVERY - 1
        else:
            self._cpu_ns = self._threads_ns = 0
            if self._end >= self._until:
                self._compare(wall, [wall])

    def _compare(self, wall: int, shared: list[int]) -> None:
        """Begin a comparison of runs that take about as long as `wall`; those with all threads so far."""
        self._turns = TURNS if wall < SHORT_NS else 1
        self._shared, self._alone = shared, []

    def _after_alone(self, wall: int) -> None:
        if self._turns:
            self._alone.append(wall)
            if len(self._alone) == self._turns or wall > CLEARLY * max(self._shared):
                self._keep_faster()
        elif self._end >= self._until:
            self._compare(wall, [])

    def _keep_faster(self) -> None:
        was_alone = self.is_alone
        self.is_alone = sum(self._alone) * self._turns < sum(self._shared) * len(self._alone)
        self._turns = 0
        self._quiet_until = self._end + QUIET_NS
        if self.is_alone or not was_alone:  # else it may be luck, for some time slices: the next run is judged
            self._until = self._end + self._period
            self._period = min(2 * self._period, PERIOD_NS[1])
        self._unjudged = EVERY - 1
