"""The packed program: order, barriers, chunk counter, failures, abort, timing, and that nothing allocates."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time

import numpy as np
import pytest

from ggjit import program as program_module
from ggjit import threadpool
from ggjit.barriers import BARRIER, COUNTER
from ggjit.jit import kernel as make_kernel
from ggjit.jit import lazy_module
from ggjit.object_code import undefined_symbols
from ggjit.program import Aborted, Program
from ggjit.threadpool import get_pool

memory = lazy_module("ggjit.ops.lib.memory")
atomics = lazy_module("ggjit.ops.lib.atomics")

N = 64


@make_kernel
def mix(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """dst[i] = 3 src[n-1-i] + op_params[0]: each thread reads what another one wrote in the step before."""
    n = dst_ne[0]
    for i in range(ith, n, nth):
        memory.store_i64(dst, 8 * i, 3 * memory.load_i64(src0, 8 * (n - 1 - i)) + op_params[0])


@make_kernel(counter=True)
def take_chunks(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    """Add 1 to each element of dst, one chunk at a time."""
    while True:
        i = atomics.fetch_add(work, 0, 1)
        if i >= dst_ne[0]:
            return
        memory.store_i64(dst, 8 * i, memory.load_i64(dst, 8 * i) + 1)


@make_kernel
def fail_at(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    """Every thread at or after op_params[0] fails with position 10 - ith, source 1."""
    if ith >= op_params[0]:
        return ((10 - ith) << 4) | 2
    return 0


@make_kernel
def mark(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    atomics_word = memory.load_i64(dst, 8 * ith)
    memory.store_i64(dst, 8 * ith, atomics_word + 1)


@make_kernel
def burn(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    """Some work that the optimizer cannot remove."""
    x = dst_ne[0] + ith
    for _ in range(op_params[0]):
        x = x * 6364136223846793005 + 1442695040888963407
        x ^= x >> 17
    memory.store_i64(dst, 8 * ith, x)


class Build:
    """Rows and the memory they speak of."""

    def __init__(self):
        self.rows, self.keep = [], []
        self.work = np.full(16, 77, np.int64)  # the counter is not zero to begin with
        self.task = np.array([self.work.ctypes.data, self.work.nbytes], np.int64)

    def record(self, array, src=None, param=0):
        words = np.zeros(42, np.int64)
        words[2:6], words[6:10], words[31] = (
            (array.size, 1, 1, 1),
            (8, array.nbytes, array.nbytes, array.nbytes),
            array.ctypes.data,
        )
        words[19] = 0 if src is None else src.ctypes.data
        words.view(np.int32)[21] = param
        self.keep += [array, words]
        return words

    def add(self, kernel, record, flags=BARRIER):
        self.rows.append((kernel.address(), record.ctypes.data, self.task.ctypes.data, flags))

    def program(self):
        program = Program(np.array(self.rows, np.int64))
        program.build = self  # keeps what the rows point to
        return program


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_steps_run_in_order_and_meet_at_barriers(n_threads):
    build, start = Build(), np.arange(N, dtype=np.int64)
    values, want = start, start.copy()
    record = build.record(values)
    for i in range(30):
        values = np.zeros(N, np.int64)
        record = build.record(values, record, i)
        build.add(mix, record)
        want = 3 * want[::-1] + i
    program = build.program()
    for _ in range(20):
        values[:] = -1
        assert program.run(get_pool(n_threads)) is None
        assert np.array_equal(values, want)


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_the_counter_is_zero_before_each_step_that_uses_it(n_threads):
    build, values = Build(), np.zeros(N, np.int64)
    record = build.record(values)
    for _ in range(10):
        build.add(take_chunks, record, BARRIER | COUNTER)
    program = build.program()
    for replay in range(1, 6):
        assert program.run(get_pool(n_threads)) is None
        assert np.array_equal(values, np.full(N, 10 * replay))


@pytest.mark.parametrize("n_threads", [2, 4])
def test_a_program_without_rows_puts_no_worker_out_of_step(n_threads):
    build, counts = Build(), np.zeros(n_threads, np.int64)
    build.add(mark, build.record(counts))
    program, empty, pool = build.program(), Program(np.zeros((0, 4), np.int64)), get_pool(n_threads)
    for n in range(1, 2001):
        assert empty.run(pool) is None
        assert program.run(pool) is None
        assert counts.tolist() == [n] * n_threads
    assert empty.time(pool).size == 0


def test_rows_with_the_same_counter_need_a_barrier_between_them():
    rows = np.zeros((3, 4), np.int64)
    rows[0, 3] = rows[2, 3] = COUNTER
    with pytest.raises(ValueError, match="before row 2"):
        Program(rows)
    rows[2, 2] = 64  # another task
    Program(rows)
    rows[2, 2], rows[1, 3] = 0, BARRIER
    Program(rows)
    with pytest.raises(ValueError, match=r"int64 \[n, 4\]"):
        Program(np.zeros((3, 3), np.int64))


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_a_failing_step_stops_all_threads_at_its_barrier(n_threads):
    build, marks = Build(), np.zeros(8, np.int64)
    record = build.record(marks)
    failing = build.record(np.zeros(1, np.int64), param=99)  # no thread fails yet
    build.add(mark, record)
    build.add(fail_at, failing)
    build.add(mark, record)
    program, pool = build.program(), get_pool(n_threads)
    for first_failing in range(n_threads):
        failing.view(np.int32)[21] = first_failing
        for _ in range(30):
            marks[:] = 0
            # every thread from first_failing on fails; the smallest status is that of the last one
            assert program.run(pool) == (1, ((10 - (n_threads - 1)) << 4) | 2)
            assert np.array_equal(marks[:n_threads], np.ones(n_threads))
        failing.view(np.int32)[21] = 99
        assert program.run(pool) is None, "the pool must work after a failure"
        assert np.array_equal(marks[:n_threads], np.full(n_threads, 3))


def test_the_first_of_several_failing_rows_is_told():
    build = Build()
    build.add(fail_at, build.record(np.zeros(1, np.int64), param=1), 0)  # fails on thread 1
    build.add(fail_at, build.record(np.zeros(1, np.int64), param=0))  # fails on all
    for _ in range(50):
        assert build.program().run(get_pool(2)) == (0, (9 << 4) | 2)


def test_some_rows_alone():
    build, marks = Build(), np.zeros(8, np.int64)
    record = build.record(marks)
    for _ in range(5):
        build.add(mark, record, 0)
    program = build.program()
    for n_threads in (1, 2):
        marks[:] = 0
        program.run(get_pool(n_threads), 1, 3)
        program.run(get_pool(n_threads), 4, 4)
        assert np.array_equal(marks[:n_threads], np.full(n_threads, 2))
    with pytest.raises(ValueError, match="0 to 5, got 2 to 6"):
        program.run(get_pool(1), 2, 6)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_abort_stops_a_running_program(n_threads):
    build = Build()
    record = build.record(np.zeros(8, np.int64), param=200_000)
    for _ in range(20_000):  # minutes, if nothing stopped it
        build.add(burn, record)
    program, pool = build.program(), get_pool(n_threads)
    timer = threading.Timer(0.05, pool.abort)
    timer.start()
    start = time.perf_counter()
    with pytest.raises(Aborted):
        program.run(pool)
    assert time.perf_counter() - start < 10
    timer.join()
    assert program.run(pool, 0, 2) is None


@pytest.mark.parametrize("n_threads", [1, 2])
def test_times_are_of_their_steps(n_threads):
    build = Build()
    short, long = (build.record(np.zeros(8, np.int64), param=n) for n in (10, 3_000_000))
    for record in (short, long, short):
        build.add(burn, record)
    program, pool = build.program(), get_pool(n_threads)
    program.time(pool)  # the counter's rate is measured once
    start = time.perf_counter_ns()
    times = program.time(pool)
    total = time.perf_counter_ns() - start
    assert times.shape == (3,) and 0 < times.sum() < 1.01 * total
    assert any(t[1] > max(t[0], t[2]) for t in (program.time(pool) for _ in range(5)))  # unless others take the CPU


def test_a_program_runs_while_another_thread_holds_the_gil():
    """Workers sleep, another Python thread keeps the GIL; the program starts and ends nevertheless."""
    gate, done = np.zeros(1, np.int64), np.zeros(N, np.int64)

    @make_kernel
    def wait_for_gate(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        if ith == 0:
            while atomics.fetch_add(dst, 0, 0) == 0:
                pass

    wait_for_gate.uses_counter = True  # it uses atomics, but not on the counter
    build = Build()
    build.add(wait_for_gate, build.record(gate))
    record = build.record(np.ones(N, np.int64))
    for _ in range(10):
        last = build.record(np.zeros(N, np.int64), record)
        build.add(mix, last)
        record = last
    build.add(mix, build.record(done, record))
    program, pool = build.program(), get_pool(2)
    gate[0] = 1
    program.run(pool)
    gate[0], done[:] = 0, 0
    go, seen = threading.Event(), []
    gate_word, done_word = (ctypes.c_int64.from_address(a.ctypes.data) for a in (gate, done))

    def hold():
        go.wait()
        gate_word.value = 1  # from here on this thread never gives the GIL away
        end = time.perf_counter() + 20
        while done_word.value == 0 and time.perf_counter() < end:
            pass
        seen.append(done_word.value)

    holder = threading.Thread(target=hold)
    holder.start()
    time.sleep(0.02)  # the workers fall asleep
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(60)
        go.set()
        program.run(pool)
        holder.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [3**11]


def test_s55_s106_nothing_allocates():
    for function in (*program_module.COMPILED, threadpool.worker, mix, take_chunks):
        assert undefined_symbols(function.compile()) == [], f"{function.name} could call an allocator"
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the C library does not count its memory")

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        ]

    mallinfo.restype = Info
    build, values = Build(), np.zeros(N, np.int64)
    for _ in range(50):
        build.add(take_chunks, build.record(values), BARRIER | COUNTER)
    program, pool = build.program(), get_pool(2)

    def in_use():
        info = mallinfo()
        return info.uordblks + info.hblkhd

    program.run(pool)
    gc.collect()
    in_use()
    before = in_use()
    for _ in range(100):
        program.run(pool)
    assert in_use() - before <= 0
