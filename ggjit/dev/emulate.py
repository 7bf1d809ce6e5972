"""Run kernels that are compiled for AArch64 by QEMU's user-mode emulation: their arithmetic without such a machine.

    cpu.compile_for("aarch64-i8mm")     # before anything compiles
    emulate.install()                   # kernels called with arrays, and `Graph.compute`, run there

Needs the programs `qemu-aarch64` and `aarch64-linux-gnu-gcc` (Debian: qemu-user, gcc-aarch64-linux-gnu).

A call is one process: what the kernel reads lies in a file, in the order of this process's addresses, and is mapped at
another address there; afterwards what it wrote is copied back.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ggjit import cpu, jit
from ggjit.context import aligned_bytes
from ggjit.jit import Kernel
from ggjit.lower import Lowering, _lowering
from ggjit.op import COUNTER_LINE
from ggjit.tensor import Tensor

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_BASE, _PAGE = 1 << 40, 4096  # where the file lies there; its first page has the call
_RECORD, _NE, _PARAMS, _SRC, _DATA = 336, 16, 84, 152, 248
_MAIN = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
long ENTRY(long header, long task, long ith, long nth);
int main(int n, char **arguments) {
    int file = open(arguments[1], O_RDWR);
    long *at = mmap((void *)BASE, atol(arguments[2]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if ((long)at != BASE) return 2;
    at[0] = ENTRY(at[1], at[2], at[3], at[4]);
    return 0;
}
"""


def available() -> bool:
    """Are the programs there?"""
    return all(shutil.which(name) for name in (COMPILER, EMULATOR))


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="ggjit-emulate-")


@functools.cache
def _program(kernel: Kernel) -> Path:
    """An executable that calls the kernel's entry."""
    folder = Path(_folder().name)
    source, code, program = (folder / f"{kernel.entry}{end}" for end in (".c", ".o", ""))
    made = kernel.compile()
    assert isinstance(made, bytes)
    source.write_text(_MAIN)
    code.write_bytes(made)
    options = ["-static", "-no-pie", "-O1", f"-DENTRY={kernel.entry}", f"-DBASE={_BASE}L"]
    subprocess.run([COMPILER, *options, "-o", program, source, code, "-lm"], check=True)
    return program


class _Image:
    """Ranges of this process's memory and where they lie in the file."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.ranges: list[list[int]] = []  # address, end, offset in the file
        for address, nbytes in sorted(r for r in ranges if r[1] > 0):
            if self.ranges and address <= self.ranges[-1][1]:
                self.ranges[-1][1] = max(self.ranges[-1][1], address + nbytes)
            else:
                self.ranges.append([address, address + nbytes, 0])
        self.size = _PAGE * 4
        for r in self.ranges:
            r[2] = self.size + r[0] % _PAGE
            self.size = -(-(r[2] + r[1] - r[0]) // _PAGE) * _PAGE + _PAGE

    def there(self, address: int) -> int:
        """The address there of one here."""
        for start, end, offset in self.ranges:
            if start <= address < end:
                return _BASE + offset + address - start
        return _BASE + 3 * _PAGE  # nothing is read of an empty tensor

    def read(self, image: bytearray) -> None:
        for start, end, offset in self.ranges:
            image[offset : offset + end - start] = ctypes.string_at(start, end - start)

    def write(self, image: bytes) -> None:
        for start, end, offset in self.ranges:
            here = ctypes.string_at(start, end - start)
            new = image[offset : offset + end - start]
            if new != here:
                ctypes.memmove(start, new, end - start)


def call(
    kernel: Kernel, records: Sequence[bytes | None], ranges: Iterable[tuple[int, int]], work: tuple[int, int],
    ith: int = 0, nth: int = 1,
) -> int:  # fmt: skip
    """Call a kernel's entry; returns its status.

    Args:
        kernel: the kernel.
        records: of dst and its sources, 336 bytes each with addresses of this process; None: no source.
        ranges: address and size of the memory that they name.
        work: address and size of the scratch.
        ith: number of the thread.
        nth: how many there are.
    """
    image = _Image([*ranges, work])
    data = bytearray(image.size)
    image.read(data)
    struct.pack_into("<5q", data, 0, 0, _BASE + _PAGE, _BASE + 64, ith, nth)
    struct.pack_into("<2q", data, 64, image.there(work[0]), work[1])
    for i, record in enumerate(records):
        if record is None:
            continue
        moved = bytearray(record)
        struct.pack_into("<q", moved, _DATA, image.there(struct.unpack_from("<q", record, _DATA)[0]))
        struct.pack_into("<10q", moved, _SRC, *[0] * 10)
        at = _PAGE + _RECORD * i
        data[at : at + _RECORD] = moved
        if i:
            struct.pack_into("<q", data, _PAGE + _SRC + 8 * (i - 1), _BASE + at)
    with tempfile.NamedTemporaryFile(dir=_folder().name) as file:
        file.write(data)
        file.flush()
        command = [EMULATOR, "-cpu", "max", str(_program(kernel)), file.name, str(len(data))]
        subprocess.run(command, check=True)
        found = Path(file.name).read_bytes()
    image.write(found)
    return int(struct.unpack_from("<q", found)[0])


def _call_arrays(kernel: Kernel, entry: Any, args: Sequence[Any]) -> int:
    """In place of `jit._call_entry`."""
    n = 1 + kernel.n_src
    op_params, work, ith, nth = args[3 * n :]
    records: list[bytes | None] = []
    ranges = []
    for i in range(n):
        buffer, ne, nb = args[3 * i : 3 * i + 3]
        if buffer is None:
            records.append(None)
            continue
        address = jit._check_buffer(kernel, "buffer", buffer)
        record = bytearray(_RECORD)
        struct.pack_into("<8q", record, _NE, *ne, *nb)
        struct.pack_into("<q", record, _DATA, address)
        if i == 0:
            parameters = np.asarray(op_params, np.int32).tobytes()
            record[_PARAMS : _PARAMS + len(parameters)] = parameters
        records.append(bytes(record))
        ranges.append((address, buffer.nbytes))
    return call(kernel, records, ranges, (jit._check_buffer(kernel, "work", work), work.nbytes), ith, nth)


def _compute(graph: Any, n_threads: int | None = None, *args: Any, **options: Any) -> Any:
    """In place of `Graph.compute`, one thread."""
    if any(t.data == 0 for t in [*graph.leafs, *graph.nodes]):
        graph._allocate()
    lowering, _ = _lowering(graph, 1)
    derived = aligned_bytes(max(lowering.place(), 1))
    lowering.set_data(derived.ctypes.data)
    work = aligned_bytes(COUNTER_LINE + max((step.work for step in lowering.steps), default=0))
    for step in lowering.steps:
        work[:COUNTER_LINE] = 0
        tensors = [step.record, *step.record.src[: step.kernel.n_src]]
        records = [None if t is None else ctypes.string_at(t.address, _RECORD) for t in tensors]
        ranges = [(t.data, _nbytes(lowering, t)) for t in tensors if t is not None]
        status = call(step.kernel, records, ranges, (work.ctypes.data, work.nbytes))
        if status:
            raise RuntimeError(f"emulate: kernel {step.kernel.name} must give status 0, got {status}")
    return graph


def _nbytes(lowering: Lowering, t: Tensor) -> int:
    scratch = lowering._scratch.get(t)
    return scratch.nbytes if scratch is not None else t.nbytes


def install() -> None:
    """Let kernels called with arrays and graphs that are computed run in the emulator from here on.

    Raises:
        ValueError: code is compiled for another system, or a program is missing.
    """
    from ggjit.graph import Graph

    if not cpu.triple().startswith("aarch64") or cpu._host_level() == "neon":
        raise ValueError(f"emulate: code must be compiled for AArch64 on another machine, got {cpu.triple()}")
    if not available():
        raise ValueError(f"emulate: {COMPILER} and {EMULATOR} must be installed, got not both")
    for owner, name, value in (
        (jit, "_call_entry", _call_arrays), (Kernel, "address", lambda kernel: 1), (Graph, "compute", _compute),
    ):  # fmt: skip
        setattr(owner, name, value)
