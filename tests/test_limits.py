"""The machine's limits: the loops do what they say, and nothing else."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ggjit import limits
from ggjit.cpu import cpu_level, has_int8_dot

SMALL = 1 << 20


def loop(kernel) -> list[str]:
    """Instructions of the longest loop of a kernel without a branch inside."""
    text = re.sub(r"^[ \t]*(#|\.p2align).*\n", "", kernel.asm(), flags=re.M)
    loops = re.findall(r"^(\.L\w+):\n((?:(?!\.L\w+:).*\n)*?)\s+j\w+\s+\1$", text, re.M)
    return max((body for _, body in loops), key=len).splitlines()


AVX2_DOT = ("vpdpbusd",) if has_int8_dot() else ("vpmaddubsw", "vpmaddwd", "vpaddd")


@pytest.mark.skipif(cpu_level() == "neon", reason="reads x86 assembly")
@pytest.mark.parametrize(("name", "n_streams"), [("read", 1), ("copy", 2)])
def test_memory_loops_keep_every_access(name, n_streams):
    found = [line for line in loop(limits._KERNELS[name]) if "(%r" in line]
    width = {"avx512": 64, "avx2": 32, "sse2": 16}[cpu_level()]
    register = {"avx512": "%zmm", "avx2": "%ymm", "sse2": "%xmm"}[cpu_level()]
    assert all(register in line for line in found)
    assert len(found) >= n_streams * limits.STEP // width and len(found) % (n_streams * limits.STEP // width) == 0


@pytest.mark.skipif(cpu_level() == "neon", reason="reads x86 assembly")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8", {"avx512": ("vpdpbusd",), "avx2": AVX2_DOT, "sse2": ("pmaddwd", "paddd")}),
        ("f32", {"avx512": ("vfmadd231ps",), "avx2": ("vfmadd231ps",), "sse2": ("mulps", "addps")}),
    ],
)
def test_chains_keep_their_instructions(name, words):
    found = [line.replace("{vex}", "").split()[0] for line in loop(limits._KERNELS[name])]
    chains = {"avx512": 24, "avx2": 12}.get(cpu_level(), 10)
    for word in words[cpu_level()]:
        assert found.count(word) >= chains and found.count(word) % chains == 0
    # nothing but those, moves between registers and the loop's own count
    assert set(found) <= {*words[cpu_level()], "addq", "decq", "incq", "subq", "cmpq", "movdqa", "movaps"}


def test_read_reads_every_byte():
    data = np.random.default_rng(1).integers(0, 256, SMALL, np.uint8)
    out = np.zeros(limits.PAGE * 2, np.uint8)
    for ith in range(2):
        limits.read_kernel(
            out,
            (out.size, 1, 1, 1),
            (1, 0, 0, 0),
            data,
            (SMALL, 1, 1, 1),
            (1, 0, 0, 0),
            np.zeros(16, np.int32),
            np.zeros(8, np.uint8),
            ith,
            2,
        )
    want = np.bitwise_xor.reduce(data.reshape(2, -1, 64), 1)
    assert (out.reshape(2, -1)[:, :64] == want).all()


def test_copy_copies_every_byte():
    data = np.random.default_rng(1).integers(0, 256, SMALL, np.uint8)
    out = np.zeros_like(data)
    limits.copy_kernel(
        out,
        (SMALL, 1, 1, 1),
        (1, 0, 0, 0),
        data,
        (SMALL, 1, 1, 1),
        (1, 0, 0, 0),
        np.zeros(16, np.int32),
        np.zeros(8, np.uint8),
        0,
        1,
    )
    assert (out == data).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_measure(threads):
    meter = limits.Meter(threads, SMALL)
    found = meter.measure(seconds=0.02)
    assert found.threads == threads and found.level == cpu_level()
    for kind in limits.KINDS:
        assert 0.05 < getattr(found, kind) < 1e5, kind


def test_only_what_was_asked():
    found = limits.Meter(1, SMALL).measure(["f32"], 0.01)
    assert found.read is None and found.f32 is not None


def test_buffer_exceeds_the_cache():
    free = 2 << 30
    assert limits._buffer_nbytes() >= min(8 * limits.last_level_cache(), free // 8)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^Meter: threads must be 1 to 512, got 0$"):
        limits.Meter(0)
    with pytest.raises(ValueError, match=r"^Meter: buffer_nbytes must be at least 1048576, got 5$"):
        limits.Meter(1, 5)
    with pytest.raises(ValueError, match="what must be among"):
        limits.measure(1, ["writes"])
