"""What the threads of a pool share: a block of int64 words, atomic operations, waiting for a word to change.

Compiled code knows the operating system only by function addresses in the state, so that it has no symbol to link and
the same code serves every system. Words that are written while a program runs have a cache line each.

A wait spins for a bounded time (a time, not a count: one pause takes 1 to 60 ns), then sleeps in the kernel: a futex on
Linux, WaitOnAddress on Windows, os_sync_wait_on_address on macOS, else usleep. Spinning alone collapses with more
threads than cores; yielding gives a busy process beside us its whole time slice.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit.jit import intrinsic, jitted, lazy_module

ir: Any = lazy_module("llvmlite.ir")
types: Any = lazy_module("numba.core.types")
cgutils: Any = lazy_module("numba.core.cgutils")

# Byte offsets of the state's words.
ARRIVED, PHASE, WAITING = 0, 64, 128  # the barrier
JOB, PARKED = 192, 256  # the number of the last job published, and how many workers sleep until the next
FAILED, ABORT, STOPPED = 320, 384, 448  # kernel calls that failed; asked to stop; the job that was stopped
ROWS, FIRST, LAST, TIMES = 512, 520, 528, 536  # the job, written when it is published
THREADS, SPINS, IDLE_SPINS, WAIT_KIND, WAIT_FUNCTION, WAKE_FUNCTION, NUMBER = (
    576 + 8 * i for i in range(7)
)  # constant
CPU_FUNCTION, GET_AFFINITY, SET_AFFINITY, MOVING, LOOK_SPINS = (640 + 8 * i for i in range(5))  # see ggjit.placement
FAILURES = 704  # a line for each thread: failed or not, row, status, and what follows
LINE = 64
CPU, THREAD = 24, 32  # in that line: on which CPU the thread was last, and the system's number of a worker

NO_WAIT, FUTEX, WIN32, MACOS = 0, 1, 2, 3  # WAIT_KIND; WAIT_FUNCTION is usleep if there is none
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_FUTEX_NUMBER = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}
_AFFINITY_NUMBERS = {"x86_64": (204, 203), "amd64": (204, 203), "aarch64": (123, 122), "arm64": (123, 122)}


def new_state(n_threads: int) -> NDArray[np.int64]:
    """Make the words of a pool, aligned to a cache line."""
    n = FAILURES // 8 + 8 * n_threads
    raw = np.zeros(n + 8, np.int64)
    skip = -raw.ctypes.data % LINE // 8
    words = raw[skip : skip + n]
    words[THREADS // 8] = n_threads
    kind, wait, wake, number = wait_functions()
    words[WAIT_KIND // 8], words[WAIT_FUNCTION // 8], words[WAKE_FUNCTION // 8] = kind, wait, wake
    words[NUMBER // 8] = number
    words[CPU_FUNCTION // 8], words[GET_AFFINITY // 8], words[SET_AFFINITY // 8] = affinity_functions(kind)
    return words


def _address(library: Any, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def wait_functions(kind: int | None = None) -> tuple[int, int, int, int]:
    """Return how this system waits: the kind, addresses of the functions, number of the system call."""
    number = _FUTEX_NUMBER.get(platform.machine().lower(), 0)
    try:
        if sys.platform == "linux" and number and kind != NO_WAIT:
            function = _address(ctypes.CDLL(None), "syscall")
            return FUTEX, function, function, number
        if sys.platform == "win32":
            library = ctypes.WinDLL("KernelBase")
            return WIN32, _address(library, "WaitOnAddress"), _address(library, "WakeByAddressAll"), 0
        if sys.platform == "darwin" and kind != NO_WAIT:
            library = ctypes.CDLL(None)
            wake = _address(library, "os_sync_wake_by_address_all")
            return MACOS, _address(library, "os_sync_wait_on_address"), wake, 0
    except (AttributeError, OSError):  # an older system
        pass
    return NO_WAIT, _address(ctypes.CDLL(None), "usleep"), 0, 0


def affinity_functions(kind: int) -> tuple[int, int, int]:
    """Address of sched_getcpu, numbers of the calls that get and set affinity; zeros where there is no futex."""
    numbers = _AFFINITY_NUMBERS.get(platform.machine().lower())
    try:
        if kind == FUTEX and numbers is not None:
            return _address(ctypes.CDLL(None), "sched_getcpu"), *numbers
    except AttributeError:  # another C library
        pass
    return 0, 0, 0


# --- words by address -------------------------------------------------------------------------------------------------


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def fetch_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to a word; returns what it was."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.atomic_rmw("add", _word(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_atomic(typingctx, address):  # type: ignore[no-untyped-def]
    """Read a word that other threads write."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.load_atomic(_word(b, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_atomic(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Write a word that other threads read."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        b.store_atomic(args[1], _word(b, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load(typingctx, address):  # type: ignore[no-untyped-def]
    """Read a word that nobody writes now."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.load(_word(b, args[0]), align=8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Write a word that nobody reads now."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        b.store(args[1], _word(b, args[0]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_entry(typingctx, entry, header, task, ith, nth):  # type: ignore[no-untyped-def]
    """Call a kernel's C entry."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        function = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 4)
        return b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.int64(*[types.int64] * 5), codegen


# --- time and the system ----------------------------------------------------------------------------------------------


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the CPU that this is a spin loop."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        from ggjit.cpu import cpu_level  # here, since the key of a kernel is made of what its globals name

        arm = cpu_level() == "neon"
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] if arm else [])
        name = "llvm.aarch64.hint" if arm else "llvm.x86.sse2.pause"
        b.call(cgutils.get_or_insert_function(b.module, function, name), [ir.IntType(32)(1)] if arm else [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def ticks(typingctx):  # type: ignore[no-untyped-def]
    """The CPU's time counter, of a constant but unknown rate."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        from ggjit.cpu import cpu_level

        name = "llvm.readsteadycounter" if cpu_level() == "neon" else "llvm.readcyclecounter"
        return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.IntType(64), []), name), [])

    return types.int64(), codegen


@intrinsic
def call_system(typingctx, function, a, c, d, e):  # type: ignore[no-untyped-def]
    """Call a function of the C library with four integers and two zeros."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        i64 = ir.IntType(64)
        function = b.inttoptr(args[0], ir.FunctionType(i64, [i64] * 6).as_pointer())
        return b.call(function, [*args[1:], i64(0), i64(0)])

    return types.int64(*[types.int64] * 5), codegen


@intrinsic
def stack_words(typingctx, n):  # type: ignore[no-untyped-def]
    """Address of n words, a constant, on the stack of the calling function."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    size = n.literal_value

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(ir.IntType(64), size)), ir.IntType(64))

    return types.int64(n), codegen


@intrinsic
def _address_of(typingctx, value):  # type: ignore[no-untyped-def]
    """Address of a stack slot that holds the value (WaitOnAddress compares through a pointer)."""

    def codegen(context, b, sig, args):  # type: ignore[no-untyped-def]
        return b.ptrtoint(cgutils.alloca_once_value(b, args[0]), ir.IntType(64))

    return types.int64(types.int64), codegen


@jitted
def sleep_while(state, word, value):  # type: ignore[no-untyped-def]
    """Sleep until another thread wakes those who wait for the word, unless it has changed already. May wake early."""
    kind, function = load(state + WAIT_KIND), load(state + WAIT_FUNCTION)
    if kind == FUTEX:
        call_system(function, load(state + NUMBER), word, _FUTEX_WAIT_PRIVATE, value & 0xFFFFFFFF)
    elif kind == WIN32:
        call_system(function, word, _address_of(value), 8, 0xFFFFFFFF)
    elif kind == MACOS:
        call_system(function, word, value, 8, 0)
    else:
        call_system(function, 50, 0, 0, 0)


@jitted
def wake(state, word):  # type: ignore[no-untyped-def]
    """Wake all threads that sleep on the word."""
    kind, function = load(state + WAIT_KIND), load(state + WAKE_FUNCTION)
    if kind == FUTEX:
        call_system(function, load(state + NUMBER), word, _FUTEX_WAKE_PRIVATE, 0x7FFFFFFF)
    elif kind == WIN32:
        call_system(function, word, 0, 0, 0)
    elif kind == MACOS:
        call_system(function, word, 8, 0, 0)
