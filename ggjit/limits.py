"""What this machine can do at most: the rates that everything which reports a share divides by.

    read    plain reads: unrolled full-width loads of a buffer of 8 times the last-level cache, and nothing else
    copy    full-width loads and ordinary stores of such a buffer (each byte counted once)
    int8    the instructions of an int8 dot product in independent chains, without memory
    f32     f32 multiply-add, the same

All run as programs on the same worker threads that compute graphs, so a rate for n threads is what n threads of a graph
could reach. A `Meter` keeps its buffer, so that a benchmark can take turns with it: rates of a shared machine change by
the second, ratios of neighbouring turns hardly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import numpy as np

from ggjit import types
from ggjit.arguments import check_kinds, check_threads
from ggjit.context import Context, aligned_bytes, tensor_overhead
from ggjit.cpu import cpu_level
from ggjit.jit import Kernel, kernel, lazy_module
from ggjit.op import NONE
from ggjit.program import Program
from ggjit.tensor import Tensor, new_node
from ggjit.threadpool import default_threads, get_pool

__all__ = ["KINDS", "UNITS", "Limits", "Meter", "last_level_cache", "measure"]

UNITS = {"read": "GB/s", "copy": "GB/s each way", "int8": "GOP/s", "f32": "GFLOP/s"}  # of the rates of each kind
KINDS = tuple(UNITS)
CACHES = 8  # the buffer is that many times the last-level cache
DEFAULT_CACHE = 32 << 20  # where the system does not tell
STEP = 512  # bytes a turn of the loops
PAGE = 4096
TURNS = 1 << 18  # of the chains in one step of a program: about 2 ms

peak = lazy_module("ggjit.ops.lib.peak")
memory = lazy_module("ggjit.ops.lib.memory")


@kernel
def read_kernel(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):  # type: ignore[no-untyped-def]
    n = src0_ne[0] // nth // STEP * STEP
    peak.read_bytes(memory.address(src0) + ith * n, n, memory.address(dst) + ith * PAGE)


@kernel
def copy_kernel(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):  # type: ignore[no-untyped-def]
    n = dst_ne[0] // nth // STEP * STEP
    peak.copy_bytes(memory.address(src0) + ith * n, n, memory.address(dst) + ith * n)


@kernel
def int8_kernel(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):  # type: ignore[no-untyped-def]
    peak.dot_chains(memory.address(src0), TURNS, memory.address(dst) + ith * PAGE)


@kernel
def f32_kernel(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):  # type: ignore[no-untyped-def]
    peak.fma_chains(memory.address(src0), TURNS, memory.address(dst) + ith * PAGE)


_KERNELS: dict[str, Kernel] = {"read": read_kernel, "copy": copy_kernel, "int8": int8_kernel, "f32": f32_kernel}


@dataclass(frozen=True)
class Limits:
    """Rates of this machine; None for what was not measured.

    Attributes:
        threads: worker threads that took part.
        level: CPU level that the code was compiled for.
        buffer_nbytes: bytes that a read goes over.
        read, copy: GB/s.
        int8, f32: 10^9 operations a second, a product and a sum counted as two.
    """

    threads: int
    level: str
    buffer_nbytes: int
    read: float | None = None
    copy: float | None = None
    int8: float | None = None
    f32: float | None = None


def last_level_cache() -> int:
    """Bytes of the last-level cache of the first CPU; 32 MiB where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=DEFAULT_CACHE)


def _buffer_nbytes() -> int:
    """8 times the last-level cache, but at most a quarter of the memory that is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    except OSError:
        pass
    return max(min(CACHES * last_level_cache(), free // 4), 1 << 20) // PAGE * PAGE


class Meter:
    """Measures rates, one short turn at a time.

    Args:
        threads: worker threads; by default as many as graphs use.
        buffer_nbytes: bytes to read, by default 8 times the last-level cache.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: `threads` is not 1 to 512, or a buffer below 1 MiB.
    """

    def __init__(self, threads: int | None = None, buffer_nbytes: int | None = None) -> None:
        self.threads = default_threads() if threads is None else check_threads("Meter", threads, "threads")
        self.buffer_nbytes = _buffer_nbytes() if buffer_nbytes is None else buffer_nbytes
        check_kinds("Meter", Integral, "a whole number", buffer_nbytes=self.buffer_nbytes)
        if self.buffer_nbytes < 1 << 20:
            raise ValueError(f"Meter: buffer_nbytes must be at least {1 << 20}, got {self.buffer_nbytes}")
        self._buffer = aligned_bytes(self.buffer_nbytes, PAGE)
        self._buffer[::64] = 1  # a page of its own everywhere: untouched ones are all the same page of zeros
        self._small = aligned_bytes(PAGE * (self.threads + 1), PAGE)
        self._small[:128] = 63  # operands of the chains: 63 as int8, 0.747 as f32
        self._task = np.zeros(2, np.int64)
        self._context = Context(8 * tensor_overhead(), no_alloc=True)
        self._programs = {kind: self._program(kind) for kind in KINDS}

    def _header(self, offset: int, nbytes: int, big: bool, src: tuple[Tensor, ...] = ()) -> Tensor:
        with self._context:
            t = new_node(NONE, types.I8, (nbytes, 1, 1, 1), src)
        t.data = (self._buffer if big else self._small).ctypes.data + offset
        return t

    def _program(self, kind: str) -> Program:
        half = self.buffer_nbytes // 2
        source = self._header(0, self.buffer_nbytes if kind == "read" else half, kind in ("read", "copy"))
        target = self._header(half if kind == "copy" else PAGE, half, kind == "copy", (source,))
        return Program(np.array([[_KERNELS[kind].address(), target.address, self._task.ctypes.data, 0]], np.int64))

    def _amount(self, kind: str) -> int:
        """Bytes or operations of one run of the program."""
        if kind in ("read", "copy"):
            n = self.buffer_nbytes if kind == "read" else self.buffer_nbytes // 2
            return n // self.threads // STEP * STEP * self.threads
        ops = peak.dot_ops if kind == "int8" else peak.fma_ops
        return int(ops(cpu_level())) * TURNS * self.threads

    def turn(self, kind: str, seconds: float = 0.02) -> float:
        """One turn of at least `seconds`.

        Args:
            kind: "read", "copy", "int8" or "f32".
            seconds: shortest time of the turn.

        Returns:
            GB/s, or 10^9 operations a second.
        """
        program, pool, runs = self._programs[kind], get_pool(self.threads), 0
        start = time.perf_counter()
        while True:
            program.run(pool)
            runs += 1
            passed = time.perf_counter() - start
            if passed >= seconds:
                return self._amount(kind) * runs / passed / 1e9

    def measure(self, what: Sequence[str] = KINDS, seconds: float = 0.3) -> Limits:
        """The best of several turns of each kind, about `seconds` long in all."""
        rates = {}
        for kind in what:
            self.turn(kind, 0)  # wakes the workers and warms the clock
            rates[kind] = max(self.turn(kind, seconds / 10) for _ in range(10))
        return Limits(self.threads, cpu_level(), self.buffer_nbytes, **rates)


def measure(threads: int | None = None, what: Sequence[str] = KINDS, seconds: float = 0.3) -> Limits:
    """Measure this machine's rates with a number of threads.

    Args:
        threads: worker threads, by default as many as graphs use.
        what: some of "read", "copy", "int8", "f32".
        seconds: time for each.

    Returns:
        The best rate of several turns each.

    Raises:
        ValueError: an unknown kind.
    """
    unknown = [kind for kind in what if kind not in KINDS]
    if unknown:
        raise ValueError(f"limits.measure: what must be among {', '.join(KINDS)}, got {', '.join(unknown)}")
    return Meter(threads).measure(what, seconds)
