"""Running a program with all threads of a pool, or with one where all are slower.

Where other processes take CPUs, or there are more threads than CPUs, threads that meet at every step wait for each
other's time slices: 2 threads beside one busy process decode at a third of the speed of one. Results have the same bits
for any number of threads, so a program may change it from run to run. A run whose threads had too little CPU time is
compared with a run of the calling thread alone; the faster way is kept for a while, then compared again.
"""

from __future__ import annotations

import time

from ggjit.program import Program
from ggjit.threadpool import Pool

EVERY = 4  # of so many runs one is judged: the threads' CPU times are calls of the system
LOOK_NS = 20_000_000  # threads' time of runs judged one after the other before CPUs are said to be missing
JUDGED_NS = 1_000_000  # shorter runs say nothing about other processes
BUSY = 0.8  # share of their time that the threads spend on a CPU when they have the CPUs to themselves
PERIOD_NS = 20_000_000, 640_000_000  # time for which the faster way is kept: at first, and at most (doubled each time)


class Adaptive:
    """One program, run many times.

    Args:
        program: to run; the same work each time.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.is_alone = False  # the way of the next run
        self._unjudged = EVERY - 1  # the first run is judged
        self._is_trial = False  # that run is to be compared with the last one
        self._until = 0  # time until which the way is kept
        self._period = PERIOD_NS[0]
        self._shared_ns = self._alone_ns = 0  # wall times of the last runs that were compared
        self._cpu_ns = self._threads_ns = 0  # of runs judged one after the other

    def run(self, pool: Pool) -> tuple[int, int] | None:
        """Run the whole program; see `Pool.execute`."""
        job = self.program.job
        if pool.n_threads == 1:
            return pool.execute(*job)
        start = time.perf_counter_ns()
        if self.is_alone and (self._is_trial or start < self._until):
            failed = pool.execute(*job, alone=True)
            self._alone_ns = time.perf_counter_ns() - start
            if self._is_trial:
                self._is_trial = False
                self._keep_faster()
            return failed
        self._unjudged += 1
        if self._unjudged < EVERY and not self.is_alone:
            return pool.execute(*job)
        cpu = pool.cpu_ns()
        failed = pool.execute(*job)
        wall = time.perf_counter_ns() - start
        if wall >= JUDGED_NS:
            self._unjudged = 0
            self._cpu_ns += pool.cpu_ns() - cpu
            self._threads_ns += pool.n_threads * wall
            self._judge(start, wall)
        return failed

    def _judge(self, start: int, wall: int) -> None:
        """Choose the way of the next run after one with all threads."""
        is_busy = self._cpu_ns >= BUSY * self._threads_ns
        if not (is_busy or self.is_alone or self._threads_ns >= LOOK_NS):
            self._unjudged = EVERY - 1
            return
        self._cpu_ns = self._threads_ns = 0
        if is_busy:
            if self.is_alone:  # perhaps by luck, for one time slice: the next run is judged too
                self.is_alone, self._unjudged = False, EVERY - 1
            else:
                self._period = PERIOD_NS[0]
            return
        self._shared_ns = wall
        if self.is_alone:  # the time alone was over
            self._keep_faster()
        elif start >= self._until:
            self.is_alone = self._is_trial = True

    def _keep_faster(self) -> None:
        self.is_alone = self._alone_ns < self._shared_ns
        self._until = time.perf_counter_ns() + self._period
        self._period = min(2 * self._period, PERIOD_NS[1])
