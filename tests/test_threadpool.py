"""Pools: sharing, concurrent use, more threads than cores, fork, parking in Python; how many threads to use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_program import Build, mark, mix

import ggjit as gg
from ggjit import placement, shared_state, threadpool
from ggjit.backends.cpu import DEVICE
from ggjit.barriers import BARRIER
from ggjit.jit import words
from ggjit.limits import Meter
from ggjit.quantize import dequantize_rows
from ggjit.threadpool import Pool, default_threads, get_pool, threads_found


def chain(n_steps=20, n=64):
    """A program whose steps each read what other threads wrote, its output and what that must be."""
    build, want = Build(), np.arange(n, dtype=np.int64)
    out = want.copy()
    record = build.record(out)
    for i in range(n_steps):
        out = np.zeros(n, np.int64)
        record = build.record(out, record, i)
        build.add(mix, record)
        want = 3 * want[::-1] + i
    return build.program(), out, want


def test_a_pool_is_shared():
    assert get_pool(2) is get_pool(2)
    assert get_pool(2) is not get_pool(1)
    with pytest.raises(ValueError, match="1 to 512, got 0"):
        Pool(0)


@pytest.mark.parametrize("where", ["compute", "compute_with_ctx", "get_pool", "CpuBackend", "Meter", "dequantize_rows"])
def test_a_number_of_threads_is_checked_wherever_it_is_given(where):
    with gg.Context(1 << 16) as context:
        x = gg.new_tensor(gg.F32, 4).set(2.0)
        graph = gg.build(x * x, 8)
    call = {
        "compute": graph.compute,
        "compute_with_ctx": lambda n: graph.compute_with_ctx(context, n),
        "get_pool": get_pool,
        "CpuBackend": DEVICE.new_backend,
        "Meter": Meter,
        "dequantize_rows": lambda n: dequantize_rows(gg.F32, np.zeros((2, 8), np.uint8), n),
    }[where]
    name = "threads" if where == "Meter" else "n_threads"
    graph.compute(1)  # a program for one thread must not serve True
    for n in (0, -1, 513, 10**6):
        with pytest.raises(ValueError, match=rf"^{where}: {name} must be 1 to 512, got {n}$"):
            call(n)
    for n in (2.5, 1.0, "a", True, [1]):
        with pytest.raises(TypeError) as raised:
            call(n)
        assert str(raised.value) == f"{where}: {name} must be a whole number, got {n!r}"
    assert graph.compute(np.int64(1)) is graph and graph.nodes[0].numpy().ravel()[0] == 4


def test_programs_of_two_python_threads_run_one_after_the_other():
    jobs = [chain() for _ in range(2)]
    wrong = []

    def run(program, out, want):
        for _ in range(100):
            out[:] = 0
            program.run(get_pool(2))
            if not np.array_equal(out, want):
                wrong.append(out.copy())

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_more_threads_than_cores():
    program, out, want = chain(100)
    pool = get_pool(2 * max(2, len(threading.enumerate()), default_threads()))
    for _ in range(5):
        out[:] = 0
        program.run(pool)
        assert np.array_equal(out, want)


def test_workers_that_sleep_wake_up():
    program, out, want = chain()
    for _ in range(20):
        out[:] = 0
        time.sleep(0.003)
        program.run(get_pool(2))
        assert np.array_equal(out, want)


def test_a_system_without_waiting_on_addresses(monkeypatch):
    """Barriers use usleep, and idle workers return to Python."""
    found = shared_state.wait_functions
    monkeypatch.setattr(shared_state, "wait_functions", lambda: found(shared_state.NO_WAIT))
    pool = Pool(3)
    program, out, want = chain()
    for _ in range(20):
        out[:] = 0
        program.run(pool)
        assert np.array_equal(out, want)
    end = time.perf_counter() + 10
    while len(pool._parked) < 2 and time.perf_counter() < end:
        time.sleep(0.001)
    assert len(pool._parked) == 2
    out[:] = 0
    program.run(pool)
    assert np.array_equal(out, want)
    pool.close()
    assert not any(t.is_alive() for t in pool._threads)


@words
def moved(state, ith):
    """`placement.move` from Python."""
    placement.move(state, ith)
    return 0


@pytest.mark.skipif(sys.platform != "linux" or default_threads() < 2, reason="no affinity")
def test_a_worker_on_the_callers_cpu_moves_and_keeps_its_affinity():
    state = shared_state.new_state(2)
    line = (shared_state.FAILURES + shared_state.LINE) // 8
    assert state[shared_state.CPU_FUNCTION // 8]
    stop, ready = threading.Event(), threading.Event()

    def spin():
        state[line + shared_state.THREAD // 8] = threading.get_native_id()
        ready.set()
        while not stop.is_set():
            threadpool.pauses(10_000)

    def cpu(thread):
        return int(Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[36])

    thread = threading.Thread(target=spin)
    thread.start()
    ready.wait()
    try:
        number, n_moved = int(state[line + shared_state.THREAD // 8]), 0
        allowed = os.sched_getaffinity(number)
        for _ in range(20):
            was = state[(shared_state.FAILURES + shared_state.CPU) // 8] = cpu(number)
            moved(state.ctypes.data, 1)
            n_moved += cpu(number) != was
            assert os.sched_getaffinity(number) == allowed
        assert n_moved
        os.sched_setaffinity(number, {was})  # nowhere else to go
        moved(state.ctypes.data, 1)
        assert os.sched_getaffinity(number) == {was}
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="no affinity")
@pytest.mark.parametrize("n_threads", [2, 5])
def test_workers_have_their_affinity_after_programs(n_threads):
    program, out, want = chain()
    pool = Pool(n_threads)
    allowed = [os.sched_getaffinity(t.native_id) for t in pool._threads]
    for _ in range(30):
        out[:] = 0
        time.sleep(0.002)
        program.run(pool)
        assert np.array_equal(out, want)
    assert [os.sched_getaffinity(t.native_id) for t in pool._threads] == allowed
    pool.close()


def test_close_ends_the_workers():
    pool = Pool(3)
    program, out, want = chain()
    program.run(pool)
    assert np.array_equal(out, want)
    pool.close()
    assert not any(t.is_alive() for t in pool._threads)
    pool.close()
    with pytest.raises(RuntimeError, match=r"^Pool: the pool must be open to run a program, got a closed one$"):
        program.run(pool)


def test_a_graph_computes_after_its_pool_was_closed():
    with gg.Context(1 << 20):
        x = gg.from_numpy(np.arange(64, dtype=np.float32))
        graph = gg.build(gg.scale(x, 2.0))
    for _ in range(2):
        graph.compute(n_threads=5)
        get_pool(5).close()
    assert get_pool(5) is get_pool(5) and not get_pool(5).closed
    graph.compute(n_threads=5)
    assert np.array_equal(graph.nodes[-1].numpy().ravel(), 2 * np.arange(64))
    get_pool(5).close()


FORK = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from test_threadpool import chain, get_pool, np
program, out, want = chain()
for n in (1, 2):
    program.run(get_pool(n))
pid = os.fork()
signal.alarm(60)  # a hang ends here
out[:] = 0
for n in (2, 1, 2):
    program.run(get_pool(n))
good = np.array_equal(out, want)
if pid == 0:
    os._exit(0 if good else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or (0 if good else 4))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_has_its_own_workers():
    script = FORK.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=Path(__file__).parents[1], timeout=120, check=False
    )
    assert done.returncode == 0


def test_the_environment_gives_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("GGJIT_NUM_THREADS", "3")
    assert threads_found() == (3, "GGJIT_NUM_THREADS")
    assert default_threads() == 3
    for bad in ("0", "x", "-1", "9999"):
        monkeypatch.setenv("GGJIT_NUM_THREADS", bad)
        with pytest.raises(ValueError, match="GGJIT_NUM_THREADS"):
            threads_found()


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
def test_threads_found_on_machines(monkeypatch, tmp_path):
    monkeypatch.delenv("GGJIT_NUM_THREADS", raising=False)
    monkeypatch.setattr(threadpool.os, "sched_getaffinity", lambda pid: set(range(8)))
    topology = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)
    }
    assert threads_found(machine(tmp_path / "none", {})) == (8, "8 CPUs may be used")
    assert threads_found(machine(tmp_path / "smt", topology)) == (4, "4 physical cores")
    v2 = topology | {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "250000 100000",
    }
    assert threads_found(machine(tmp_path / "v2", v2)) == (2, "the control group allows 2.5 CPUs")
    v1 = {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
    }
    assert threads_found(machine(tmp_path / "v1", v1)) == (1, "the control group allows 0.5 CPUs")
    unlimited = topology | {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}
    assert threads_found(machine(tmp_path / "open", unlimited)) == (4, "4 physical cores")


def test_threads_found_here():
    n, reason = threads_found()
    assert 1 <= n <= threadpool.MAX_THREADS
    assert reason


def test_one_thread_needs_no_workers():
    build, marks = Build(), np.zeros(8, np.int64)
    build.add(mark, build.record(marks), BARRIER)
    assert build.program().run(get_pool(1)) is None
    assert list(marks[:2]) == [1, 0]
