"""Which way a program runs when other processes take the CPUs; times are given by the test."""

import time

import pytest

from ggjit import adaptive
from ggjit.adaptive import Adaptive


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
    assert machine.runs(Adaptive(machine), 50) == "s" * 50


def test_beside_a_busy_process_one_thread_goes_on_and_all_are_tried_again(machine):
    program = Adaptive(machine)
    machine.shared, machine.busy = 12e6, 0.6
    ways = machine.runs(program, 400)
    assert ways.startswith("saaaaas")  # 20 ms of threads' time are looked at; a trial, 20 ms alone, a comparison
    assert ways.count("s") < 20 and "ss" not in ways
    machine.shared, machine.busy = 4e6, 1.0  # the other process ends
    ways = machine.runs(program, 200)
    assert ways.rstrip("s").count("a") <= 640 / 6 + 1 and ways.endswith("s" * 50)
    machine.shared, machine.busy = 12e6, 0.6
    assert machine.runs(program, 12).lstrip("s").startswith("aaaaas"), "patience begins anew"


def test_threads_that_wait_but_help_are_kept(machine):
    machine.shared, machine.busy = 5e6, 0.6
    ways = machine.runs(Adaptive(machine), 1000)
    assert ways.startswith("ssas") and 3 < ways.count("a") < 20


def test_time_that_is_counted_late_is_not_missed(machine):
    """The system counts the time of a thread on a CPU at its ticks: a run lacks half of it, the next has too much."""
    program = Adaptive(machine)
    for i in range(200):
        machine.busy = (0.5, 1.5)[i % 2]
        program.run(machine)
    assert machine.ways == "s" * 200


def test_short_runs_and_one_thread_are_not_judged(machine):
    machine.shared, machine.alone, machine.busy = adaptive.JUDGED_NS - 1, 1.0, 0.1
    assert machine.runs(Adaptive(machine), 20) == "s" * 20
    machine.n_threads, machine.shared = 1, 12e6
    assert machine.runs(Adaptive(machine), 20) == "s" * 20
