"""Garbage collection is put off where told, and only there."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from ggjit import garbage


@pytest.fixture
def limits():
    before = gc.get_threshold()
    gc.set_threshold(500, 7, 9)
    yield (500, 7, 9)
    gc.set_threshold(*before)


def test_limits_come_back_after_nested_blocks_and_errors(limits):
    with pytest.raises(KeyError), garbage.put_off():
        with garbage.put_off():
            assert gc.get_threshold()[0] > 50_000
        assert gc.get_threshold()[0] > 50_000
        raise KeyError
    assert gc.get_threshold() == limits


def test_limits_come_back_when_blocks_of_threads_overlap(limits):
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first():
        with garbage.put_off():
            first_in.set()
            second_in.wait(10)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_in.wait(10)
    with garbage.put_off():
        second_in.set()
        first_out.wait(10)
        assert gc.get_threshold()[0] > 50_000
    thread.join()
    assert gc.get_threshold() == limits


def test_what_a_user_put_off_further_stays(limits):
    gc.set_threshold(1_000_000, 7, 9)
    with garbage.put_off():
        assert gc.get_threshold() == (1_000_000, 7, 9)
    gc.set_threshold(0, 7, 9)  # no collections at all
    with garbage.put_off():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == (0, 7, 9)


def test_what_a_user_sets_inside_a_block_stays(limits):
    with garbage.put_off():
        gc.set_threshold(600, 5, 5)
    assert gc.get_threshold() == (600, 5, 5)
    with garbage.put_off():
        assert gc.get_threshold()[0] > 50_000
    assert gc.get_threshold() == (600, 5, 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_is_in_no_block_of_another_thread(limits):
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with garbage.put_off():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            outside = gc.get_threshold() == limits
            with garbage.put_off():
                code = not (outside and gc.get_threshold()[0] > 50_000)
            code = code or gc.get_threshold() != limits
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == limits
