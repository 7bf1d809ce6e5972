"""Typed loads and stores: every type, f16 and bf16 for all bit patterns, at every CPU level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggjit.cpu import LEVELS, cpu_level
from ggjit.jit import kernel
from ggjit.ops.lib import atomics, memory

TESTS = str(Path(__file__).parent)
TAIL = (np.zeros(16, np.int32), np.zeros(64, np.uint8), 0, 1)
DTYPES = {
    "F32": "f4",
    "F64": "f8",
    "F16": "f2",
    "I8": "i1",
    "I16": "i2",
    "I32": "i4",
    "I64": "i8",
    "U8": "u1",
    "U16": "u2",
    "U32": "u4",
}


def arg(x):
    return x.view(np.uint8).reshape(-1), (x.size, 1, 1, 1), (x.itemsize, x.nbytes, x.nbytes, x.nbytes)


def make_convert(load, store):
    @kernel
    def convert(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        for i in range(dst_ne[0]):
            store(dst, i * dst_nb[0], load(src0, i * src0_nb[0]))

    return convert


@pytest.mark.parametrize("name", DTYPES)
def test_load_and_store_keep_values(name):
    dtype = np.dtype(DTYPES[name])
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, 64 * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind == "f":
        x = rng.standard_normal(64).astype(dtype)
    load, store = getattr(memory, f"load_{name.lower()}"), getattr(memory, f"store_{name.lower()}")
    out = np.zeros_like(x)
    make_convert(load, store)(*arg(out), *arg(x), *TAIL)
    assert out.tobytes() == x.tobytes()
    small = rng.integers(0, 100, 64).astype(dtype)
    as_f32 = np.zeros(64, np.float32)
    make_convert(memory.loader(name), memory.store_f32)(*arg(as_f32), *arg(small), *TAIL)
    assert np.array_equal(as_f32, small.astype(np.float32))
    back = np.zeros_like(small)
    make_convert(memory.load_f32, memory.storer(name))(*arg(back), *arg(as_f32), *TAIL)
    assert np.array_equal(back, small)


def test_factories_refuse_unknown_types():
    for factory in (memory.loader, memory.storer):
        with pytest.raises(ValueError, match="F32, F16"):
            factory("Q4_0")


def f32_patterns():
    """float32 at, between and beside all f16 and bf16 values, and others at random; no NaN but a few quiet ones."""
    every = np.arange(65536, dtype=np.uint16)
    with np.errstate(all="ignore"):
        f16 = every.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    near = [f16 + d for d in (-0x1001, -0x1000, -0xFFF, -1, 0, 1, 0xFFF, 0x1000, 0x1001)]
    near += [(every.astype(np.int64) << 16) + d for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000)
    x = np.concatenate([*near, random]).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32("nan"), x)


def bf16_bits(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def check_halves():
    """Conversions of this process's CPU level against NumPy's."""
    bits = np.arange(65536, dtype=np.uint16)
    out = np.zeros(65536, np.float32)
    make_convert(memory.load_f16, memory.store_f32)(*arg(out), *arg(bits), *TAIL)
    want = bits.view(np.float16).astype(np.float32)
    nan = np.isnan(want)
    assert np.array_equal(out.view(np.uint32)[~nan], want.view(np.uint32)[~nan])
    assert np.isnan(out[nan]).all()
    make_convert(memory.load_bf16, memory.store_f32)(*arg(out), *arg(bits), *TAIL)
    assert np.array_equal(out.view(np.uint32), bits.astype(np.uint32) << 16)
    x = f32_patterns()
    half = np.zeros(x.size, np.uint16)
    make_convert(memory.load_f32, memory.store_f16)(*arg(half), *arg(x), *TAIL)
    with np.errstate(all="ignore"):
        assert np.array_equal(half, x.astype(np.float16).view(np.uint16))
    make_convert(memory.load_f32, memory.store_bf16)(*arg(half), *arg(x), *TAIL)
    nan = np.isnan(x)
    assert np.array_equal(half[~nan], bf16_bits(x)[~nan])
    assert ((half[nan] & 0x7FFF) > 0x7F80).all(), "a NaN must stay one"


@pytest.mark.skipif(cpu_level() == "neon", reason="one level")
@pytest.mark.parametrize("level", [x if x == cpu_level() else pytest.param(x, marks=pytest.mark.full) for x in LEVELS])
def test_halves_at_every_level(level):
    if LEVELS.index(level) > LEVELS.index(cpu_level()):
        pytest.skip(f"this machine has {cpu_level()}")
    if level == cpu_level():
        check_halves()
        return
    script = f"import sys; sys.path.insert(0, {TESTS!r}); import test_memory; test_memory.check_halves()"
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", script], cwd=root, env={**os.environ, "GGJIT_CPU": level}, check=True, timeout=120
    )


def test_address_and_bits():
    @kernel
    def tell(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        memory.store_i64(dst, 0, memory.address(dst))
        memory.store_f32(dst, 8, memory.f32_from_bits(op_params[0]))
        memory.store_i32(dst, 12, memory.bits_f32(memory.f32_from_bits(op_params[0])))

    out = np.zeros(2, np.int64)
    tell(*arg(out), np.array([1.5, 0], np.float32).view(np.int32), *TAIL[1:])
    assert out[0] == out.ctypes.data
    assert out.view(np.float32)[2] == 1.5
    assert out.view(np.int32)[3] == np.float32(1.5).view(np.int32)


def test_scalar_loops_vectorise():
    """A getelementptr on the buffer is what LLVM can vectorise."""

    @kernel
    def scale(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        for i in range(dst_ne[0]):
            memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) * np.float32(3))

    text = scale.asm()
    if cpu_level() != "neon":
        assert "vmulps" in text or "mulps" in text
    assert "gather" not in text


def test_fetch_add_counts():
    @kernel(counter=True)
    def count(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        for i in range(dst_ne[0]):
            memory.store_i64(dst, 8 * i, atomics.fetch_add(work, 0, 3))

    out, work = np.zeros(4, np.int64), np.zeros(64, np.uint8)
    count(*arg(out), TAIL[0], work, 0, 1)
    assert list(out) == [0, 3, 6, 9]
    assert work.view(np.int64)[0] == 12
