"""On which CPUs the threads of a pool run: no two on one while another is free. Linux only.

The system may put a thread that another one wakes on the CPU of that one although others are idle: where it keeps tasks
together, or takes virtual CPUs for busy that the host has put to sleep. The two then take turns for 10 ms and more,
until it balances load. So threads compare CPUs (each writes its own into its line of the state): a worker when it
begins a job, and any thread when it has waited for long at a barrier. Of two on one CPU a worker moves: for a moment
its affinity leaves out the CPUs of the pool's other threads, then it is what it was. A worker for which that leaves
none stays where it is, as with more threads than CPUs. The calling thread is never moved.
"""

from __future__ import annotations

from ggjit import shared_state as shared
from ggjit.jit import jitted
from ggjit.shared_state import (
    CPU,
    CPU_FUNCTION,
    FAILURES,
    GET_AFFINITY,
    LINE,
    MOVING,
    SET_AFFINITY,
    THREAD,
    THREADS,
    WAIT_FUNCTION,
)

NOT_BEGUN, MOVED = -1, -2  # in place of a CPU: the worker has not begun the job; another thread has moved it
_WORDS = 128  # of an affinity mask: 8192 CPUs


@jitted
def note_cpu(state, ith):  # type: ignore[no-untyped-def]
    """Write down and return on which CPU this thread is."""
    cpu = shared.call_system(shared.load(state + CPU_FUNCTION), 0, 0, 0, 0) & 0xFFFFFFFF
    shared.store_atomic(state + FAILURES + LINE * ith + CPU, cpu)
    return cpu


@jitted
def leave_out(state, ith, mask):  # type: ignore[no-untyped-def]
    """Take the CPUs of all threads but `ith` out of a mask; False if none is left."""
    for i in range(shared.load(state + THREADS)):
        cpu = shared.load_atomic(state + FAILURES + LINE * i + CPU)
        if i != ith and 0 <= cpu < 64 * _WORDS:
            word = mask + (cpu >> 6) * 8
            shared.store(word, shared.load(word) & ~(1 << (cpu & 63)))
    left = 0
    for i in range(_WORDS):
        left |= shared.load(mask + 8 * i)
    return left != 0


@jitted
def leave(state, ith):  # type: ignore[no-untyped-def]
    """Set worker `ith`'s affinity to CPUs of no other thread, and back."""
    system = shared.load(state + WAIT_FUNCTION)
    thread = shared.load(state + FAILURES + LINE * ith + THREAD)
    mask, others = shared.stack_words(_WORDS), shared.stack_words(_WORDS)
    for i in range(_WORDS):
        shared.store(mask + 8 * i, 0)
    size = shared.call_system(system, shared.load(state + GET_AFFINITY), thread, 8 * _WORDS, mask)
    if size <= 0 or thread == 0:  # not allowed to ask, or not started
        return
    for i in range(_WORDS):
        shared.store(others + 8 * i, shared.load(mask + 8 * i))
    if leave_out(state, ith, others):
        shared.call_system(system, shared.load(state + SET_AFFINITY), thread, size, others)
        shared.call_system(system, shared.load(state + SET_AFFINITY), thread, size, mask)
        shared.store_atomic(state + FAILURES + LINE * ith + CPU, MOVED)


@jitted
def move(state, ith):  # type: ignore[no-untyped-def]
    """Move worker `ith` if it is on a CPU of another thread of the pool and may run elsewhere.

    One thread at a time: another one would take the affinity of that moment for the worker's own.
    """
    if shared.fetch_add(state + MOVING, 1) == 0:
        leave(state, ith)
    shared.fetch_add(state + MOVING, -1)


@jitted
def publish_from(state):  # type: ignore[no-untyped-def]
    """The calling thread, thread 0, publishes a job."""
    if shared.load(state + CPU_FUNCTION) != 0:
        note_cpu(state, 0)


@jitted
def begin_apart(state, ith):  # type: ignore[no-untyped-def]
    """Worker `ith` begins a job: not on the caller's CPU."""
    if shared.load(state + CPU_FUNCTION) == 0:
        return
    if note_cpu(state, ith) == shared.load_atomic(state + FAILURES + CPU):
        move(state, ith)
        note_cpu(state, ith)


@jitted
def look(state, ith):  # type: ignore[no-untyped-def]
    """Thread `ith` has waited for long: move a worker that shares a CPU with it, or itself.

    The caller also moves a worker that has not begun: it may wait for the very CPU on which the caller waits for it.
    """
    if shared.load(state + CPU_FUNCTION) == 0:
        return
    mine = note_cpu(state, ith)
    for i in range(shared.load(state + THREADS)):
        cpu = shared.load_atomic(state + FAILURES + LINE * i + CPU)
        if i != ith and (cpu == mine or (cpu == NOT_BEGUN and ith == 0)):
            move(state, max(i, ith))
            return
