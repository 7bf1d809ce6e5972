"""Which way a program runs when other processes take the CPUs; times are given by the test."""

import threading
import time

import numpy as np
import pytest

import ggjit as gg
from ggjit import adaptive
from ggjit.adaptive import Adaptive
from ggjit.lower import lower
from ggjit.ops.lib import memory


class Machine:
    """A clock, and a program that takes time on it; its own pool."""

    n_threads, job = 2, (0, 0, 1, 0)

    def __init__(self, monkeypatch):
        self.now, self.cpu = 1_000_000_000, 0.0
        self.shared, self.alone, self.busy = 4e6, 6e6, 1.0  # wall times of a run; share of the threads on a CPU
        self.ways = ""
        monkeypatch.setattr(time, "perf_counter_ns", lambda: int(self.now))

    def cpu_ns(self):
        return int(self.cpu)

    def execute(self, *job, alone=False):
        assert job == self.job
        wall = self.alone if alone else self.shared
        self.now += wall
        self.cpu += wall if alone else wall * self.busy * self.n_threads
        self.ways += "a" if alone else "s"

    def runs(self, program, n):
        self.ways = ""
        for _ in range(n):
            program.run(self)
        return self.ways


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_all_threads_are_used_on_a_quiet_machine(machine):
    assert machine.runs(Adaptive(machine), 16) == "s" * 16


def test_beside_a_busy_process_one_thread_goes_on_and_all_are_tried_again(machine):
    program = Adaptive(machine)
    machine.shared, machine.busy = 12e6, 0.6
    ways = machine.runs(program, 400)
    assert ways.startswith("sssaaa" + "aaaa" + "sssaaa")  # 20 ms of threads' time are looked at; 20 ms alone
    assert ways.count("s") < 30 and "ssss" not in ways
    machine.shared, machine.busy = 4e6, 1.0  # the other process ends
    ways = machine.runs(program, 200)
    assert ways.rstrip("s").count("a") <= 640 / 6 + 4 and ways.endswith("s" * 50)
    machine.shared, machine.busy = 12e6, 0.6
    ways = machine.runs(program, 20)
    assert ways.lstrip("s").startswith("aaa" + "aaaa" + "sssaaa"), "patience begins anew"


def test_a_lucky_time_slice_is_not_taken_for_a_quiet_machine(machine):
    program = Adaptive(machine)
    machine.shared, machine.busy = 12e6, 0.6
    machine.runs(program, 400)
    machine.shared, machine.busy = 4e6, 1.0
    while machine.runs(program, 1) != "s":
        pass
    assert machine.runs(program, 3) == "ssa"  # three times all threads are faster
    machine.shared, machine.busy = 12e6, 0.6
    assert machine.runs(program, 10).rstrip("a") == "sss"
    assert machine.runs(program, 50) == "a" * 50


def test_long_runs_are_compared_once(machine):
    machine.shared, machine.alone, machine.busy = 120e6, 60e6, 0.6
    assert machine.runs(Adaptive(machine), 9) == "saasaasaaa"[:9]


def test_threads_that_wait_but_help_are_kept(machine):
    machine.shared, machine.busy = 5e6, 0.6
    ways = machine.runs(Adaptive(machine), 1000)
    assert ways.startswith("ssssaaas") and 3 < ways.count("a") < 50


def test_one_thread_is_used_where_others_do_not_help(machine):
    """Short programs that run again and again, on a quiet machine; a clearly slower run is the only one."""
    machine.shared, machine.alone = 4e6, 3.9e6
    ways = machine.runs(Adaptive(machine), 2000)
    assert ways[:16] == "s" * 16 and ways.count("s") < 120
    machine.alone = 6e6
    ways = machine.runs(Adaptive(machine), 2000)
    assert ways.count("a") == 4 and "aa" not in ways  # 2 s apart
    machine.alone, machine.shared = 2e6, 21e6
    assert machine.runs(Adaptive(machine), 100) == "s" * 100, "not where trials take long"
    machine.shared = 4e6
    program = Adaptive(machine)
    for _ in range(20):
        assert machine.runs(program, 10) == "s" * 10, "nor where there are few in a row"
        machine.now += 100_000_000


def test_time_that_is_counted_late_is_not_missed(machine):
    """The system counts the time of a thread on a CPU at its ticks: a run lacks half of it, the next has too much."""
    program = Adaptive(machine)
    for i in range(200):
        machine.busy = (0.5, 1.5)[i % 2]
        program.run(machine)
    assert machine.ways.count("a") == 1, "the comparison of a quiet machine"


def test_short_runs_and_one_thread_are_not_judged(machine):
    machine.shared, machine.alone, machine.busy = adaptive.JUDGED_NS - 1, 1.0, 0.1
    assert machine.runs(Adaptive(machine), 20) == "s" * 20
    machine.n_threads, machine.shared = 1, 12e6
    assert machine.runs(Adaptive(machine), 20) == "s" * 20


def test_runs_of_several_threads_at_once_are_not_judged(machine):
    """What they take is waiting for each other; and the state is that of one comparison."""
    program = Adaptive(machine)
    machine.shared, machine.busy = 12e6, 0.6
    execute, inner = machine.execute, []

    def and_another(*job, alone=False):
        if not inner:
            inner.append(True)
            before = {k: v if not isinstance(v, list) else list(v) for k, v in vars(program).items()}
            program.run(machine)  # as a second thread does while the first one is inside
            assert before == vars(program)
            inner.clear()
        execute(*job, alone=alone)

    machine.execute = and_another
    for _ in range(200):
        program.run(machine)
    assert len(program._shared) <= adaptive.TURNS and len(program._alone) <= adaptive.TURNS
    assert "a" in machine.ways


def test_many_threads_compute_one_graph():
    with gg.Context(4 << 20):
        x = gg.from_numpy(np.ones((64, 512), np.float32))
        y = x
        for _ in range(8):
            y = gg.rms_norm(gg.scale(y, 1.1), 1e-5)
        executable = lower(gg.build(y), 2)
    errors = []

    def compute():
        try:
            for _ in range(300):
                executable.run()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [] and len(executable._adaptive._shared) <= adaptive.TURNS


def test_a_function_of_the_users_sees_the_same_number_of_threads_at_every_run():
    """It may keep a sum for each of them, as with ggml."""

    def sums(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
        s = np.float32(0)
        for r in range(src0_ne[1] * ith // nth, src0_ne[1] * (ith + 1) // nth):
            s += memory.load_f32(src0, r * src0_nb[1])
        memory.store_f32(dst, 4 * ith, s)

    with gg.Context(4 << 20):
        x = gg.from_numpy(np.ones((64, 128), np.float32))
        y = gg.custom_4d(gg.F32, 2, 1, 1, 1, [x], sums, 2)
        executable = lower(gg.build(y), 2)
    executable._adaptive.is_alone = True  # as where the other thread does not help
    executable.run()
    assert y.numpy().ravel().tolist() == [32, 32]
