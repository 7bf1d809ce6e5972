"""Vectors: loads and stores that stay inside, operators, elementary functions, same bits at AVX2 and AVX-512."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_memory import TAIL, arg, bf16_bits

from ggjit.cpu import LEVELS, cpu_level, has
from ggjit.jit import jitted, kernel
from ggjit.ops.lib import vec

LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 100)


def make_map(function, load=vec.load, load_first=vec.load_first, store=vec.store, store_first=vec.store_first):
    """dst[i] = function(src0[i]), vectors with a masked tail."""

    @kernel
    def mapped(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n, to, at = dst_ne[0], dst_nb[0], src0_nb[0]
        for i in range(0, n - 15, 16):
            store(dst, to * i, function(load(src0, at * i)))
        rest = n % 16
        if rest:
            i = n - rest
            store_first(dst, to * i, function(load_first(src0, at * i, rest)), rest)

    return mapped


def apply(function, x, dtype="f4", **how):
    x = np.ascontiguousarray(x)
    out = np.zeros(x.size, dtype)
    make_map(function, **how)(*arg(out), *arg(x), *TAIL)
    return out


def make_expression(expression):
    """A kernel that computes an expression of x, y (f32 vectors), i, j (i32 vectors) into an f32 or i32 vector."""
    scope = {"vec": vec, "np": np}
    exec(
        "def expression(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work,"
        "               ith, nth):\n"
        "    x, y = vec.load(src0, 0), vec.load(src0, 64)\n"
        "    i, j = vec.load_i32(src1, 0), vec.load_i32(src1, 64)\n"
        f"    {expression}\n",
        scope,
    )
    return kernel(scope["expression"])


RNG = np.random.default_rng(1)
X, Y = RNG.standard_normal((2, 16)).astype(np.float32)
Y[3], X[5] = X[3], 0
IX, JX = RNG.integers(-1000, 1000, (2, 16)).astype(np.int32)
JX[2], JX[4] = IX[2], 3
F = np.float32
EXPRESSIONS = {
    "vec.store(dst, 0, x + y)": X + Y,
    "vec.store(dst, 0, x - 2)": X - F(2),
    "vec.store(dst, 0, 0.5 * x)": F(0.5) * X,
    "vec.store(dst, 0, x / y)": X / Y,
    "vec.store(dst, 0, 1 / y)": F(1) / Y,
    "vec.store(dst, 0, -x)": -X,
    "z = x; z += y; vec.store(dst, 0, z)": X + Y,
    "vec.store(dst, 0, vec.select(x < y, x, y))": np.where(X < Y, X, Y),
    "vec.store(dst, 0, vec.select((x <= 0) & ~(y > x), 1, y))": np.where((X <= 0) & ~(Y > X), F(1), Y),
    "vec.store(dst, 0, vec.select((x >= y) | (x != y), x, 0.0))": np.where((X >= Y) | (X != Y), X, F(0)),
    "vec.store(dst, 0, vec.select(x == y, x, 7.0))": np.where(X == Y, X, F(7)),
    "vec.store(dst, 0, vec.select(vec.first(5), x, y))": np.where(np.arange(16) < 5, X, Y),
    "vec.store_i32(dst, 0, i + j * 3 - 1)": IX + JX * 3 - 1,
    "vec.store_i32(dst, 0, (i << 2) ^ (j >> 1) & 255 | 1)": (IX << 2) ^ (JX >> 1) & 255 | 1,
    "vec.store_i32(dst, 0, vec.select(i == j, i, -j))": np.where(IX == JX, IX, -JX),
    "vec.store_i32(dst, 0, vec.select(i < j, ~i, vec.lanes()))": np.where(IX < JX, ~IX, np.arange(16, dtype=np.int32)),
    "vec.store(dst, 0, vec.to_f32(i) + vec.zero())": IX.astype(F),
    "vec.store(dst, 0, vec.splat(np.float32(2)) * vec.to_f32(vec.splat_i32(3)))": np.full(16, F(6)),
    "vec.store_i32(dst, 0, vec.round_i32(x * 2.5))": np.rint(X * F(2.5)).astype(np.int32),
    "vec.store_i32(dst, 0, vec.trunc_i32(x * 10))": (X * F(10)).astype(np.int32),
    "vec.store_i32(dst, 0, vec.bits_i32(x))": X.view(np.int32),
    "vec.store(dst, 0, vec.bits_f32(vec.bits_i32(x) & 0x7fffffff))": np.abs(X),
    "vec.store(dst, 0, vec.min(x, y) + vec.max(x, 0.25))": np.minimum(X, Y) + np.maximum(X, F(0.25)),
    "vec.store(dst, 0, vec.sqrt(vec.abs(x)))": np.sqrt(np.abs(X)),
    "vec.store(dst, 0, vec.copy_sign(vec.abs(x), y))": np.copysign(X, Y),
    "vec.store(dst, 0, vec.floor(x * 3) + vec.ceil(y * 3))": np.floor(X * F(3)) + np.ceil(Y * F(3)),
    "vec.store(dst, 0, vec.trunc(x * 3) + vec.rint(y * 3))": np.trunc(X * F(3)) + np.rint(Y * F(3)),
    "vec.store(dst, 0, vec.splat(vec.lane_max(x) + vec.lane_min(y)))": np.full(16, X.max() + Y.min()),
    "vec.store_i32(dst, 0, vec.splat_i32(vec.lane_sum(i) + vec.lane_max(j)))": np.full(
        16, IX.sum() + JX.max(), np.int32
    ),
    "vec.store(dst, 0, vec.splat(vec.lane(x, 3)))": np.full(16, X[3]),
    "vec.store_i32(dst, 0, vec.splat_i32(vec.any_lane(x == y) + 2 * vec.all_lanes(x == y)))": np.full(16, 1, np.int32),
}


def test_expressions():
    """All in a few kernels: compiling costs more than running."""
    xy, ij = np.concatenate([X, Y]), np.concatenate([IX, JX])
    expressions = list(EXPRESSIONS.items())
    text = "\n    ".join(e.replace("(dst, 0,", f"(dst, {64 * k},") for k, (e, _) in enumerate(expressions))
    out = np.zeros(16 * len(expressions), np.float32)
    make_expression(text)(*arg(out), *arg(xy), *arg(ij), *TAIL)
    for k, (e, want) in enumerate(expressions):
        got = out[16 * k : 16 * k + 16].view(want.dtype)
        assert np.array_equal(got, want), e


def test_comparisons_with_nan():
    x = np.array([np.nan, 1, np.nan, 2] * 8, np.float32)
    y = np.zeros(32, np.int32)
    out = np.zeros(16, np.int32)
    count = make_expression(
        "one = vec.splat_i32(1); z = vec.splat_i32(0)\n    "
        "vec.store_i32(dst, 0, vec.select(x == x, z, one) + 2 * vec.select(x != x, one, z)"
        " + 4 * vec.select(x < 5, one, z))"
    )
    count(*arg(out), *arg(x), *arg(y), *TAIL)
    assert list(out[:4]) == [3, 4, 3, 4]


@functools.cache
def guarded_page():
    """A page whose end is followed by memory that must not be touched."""
    import ctypes
    import mmap

    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    array = np.frombuffer(memory, np.uint8)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    assert mprotect(ctypes.c_void_p(array.ctypes.data + size), ctypes.c_size_t(size), 0) == 0
    return array[:size]


TYPES = {"F32": "f4", "F16": "f2", "BF16": "u2", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def check_tails(name):
    """Lengths 0 to 33 against the end of a page: nothing beyond is read or written."""
    page, dtype = guarded_page(), np.dtype(TYPES[name])
    if name in ("F32", "F16", "BF16"):
        how = {
            "load": vec.loader(name),
            "load_first": vec.loader_first(name),
            "store": vec.storer(name),
            "store_first": vec.storer_first(name),
        }
        mapped = make_map(vec.abs, **how)
    else:
        mapped = make_map(vec.abs, load=vec.loader(name), load_first=vec.loader_first(name))
    for n in range(34):
        values = (RNG.integers(0, 100, n)).astype(dtype)
        if name == "BF16":
            values = bf16_bits(RNG.integers(0, 100, n).astype(np.float32))
        x = page[page.size - n * dtype.itemsize :]
        x[:] = values.view(np.uint8)
        ne, nb = (n, 1, 1, 1), (dtype.itemsize, x.size, x.size, x.size)
        if name in ("F32", "F16", "BF16"):
            before = page[: page.size - x.size].copy()
            mapped(x, ne, nb, x, ne, nb, *TAIL)
            assert x.tobytes() == values.tobytes()
            assert np.array_equal(page[: page.size - x.size], before)
        else:
            out = np.zeros(n, np.float32)
            mapped(*arg(out), x, ne, nb, *TAIL)
            assert np.array_equal(out, values.astype(np.float32))


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize("name", TYPES)
def test_tails_stay_inside(name):
    check_tails(name)


@jitted
def same(x):
    return x


def bf16_cases():
    """float32 of every kind: denormals alone and among others, ties, infinities, NaN quiet and signalling."""
    tops = np.arange(65536, dtype=np.uint32) << 16
    ties = np.concatenate([tops + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])  # in turn: one kind a vector
    return np.concatenate([ties, np.random.default_rng(2).permutation(ties), ties[-5:]]).astype(np.uint32)


def test_bf16_is_rounded_alike_whatever_the_vector_holds():
    bits = bf16_cases()
    want = np.where(bits & 0x7FFFFFFF > 0x7F800000, bits >> 16 | 64, bf16_bits(bits.view(np.float32)))
    how = {"store": vec.storer("BF16"), "store_first": vec.storer_first("BF16")}
    got = apply(same, bits.view(np.float32), "u2", **how)
    assert np.array_equal(got, want)


def test_integer_loads_and_stores():
    for bits in (8, 16, 32):
        x = RNG.integers(-100, 100, 37).astype(f"i{bits // 8}")
        names = {
            k: getattr(vec, k.replace("N", str(bits)))
            for k in ("load_iN", "load_iN_first", "store_iN", "store_iN_first")
        }
        doubled = make_expression_map("i + i", *names.values())
        out = np.zeros_like(x)
        doubled(*arg(out), *arg(x), *TAIL)
        assert np.array_equal(out, (2 * x.astype(np.int64)).astype(x.dtype))
    x = RNG.integers(0, 256, 37).astype(np.uint8)
    out = np.zeros(37, np.int32)
    make_expression_map("i + i", vec.load_u8, vec.load_u8_first, vec.store_i32, vec.store_i32_first)(
        *arg(out), *arg(x), *TAIL
    )
    assert np.array_equal(out, 2 * x.astype(np.int32))


def make_expression_map(expression, load, load_first, store, store_first):
    scope = {"load": load, "load_first": load_first, "store": store, "store_first": store_first}
    exec(
        "def mapped(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):\n"
        "    for k in range(0, dst_ne[0], 16):\n"
        "        n = dst_ne[0] - k\n"
        "        i = load(src0, k * src0_nb[0]) if n >= 16 else load_first(src0, k * src0_nb[0], n)\n"
        "        if n >= 16:\n"
        f"            store(dst, k * dst_nb[0], {expression})\n"
        "        else:\n"
        f"            store_first(dst, k * dst_nb[0], {expression}, n)\n",
        scope,
    )
    return kernel(scope["mapped"])


def test_strided_loads():
    @kernel
    def column(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        vec.store(dst, 0, vec.load_strided(src0, 4, src0_nb[1]))
        vec.store(dst, 64, vec.load_strided_first(src0, 8, src0_nb[1], 5))

    x = RNG.standard_normal((16, 7)).astype(np.float32)
    out = np.zeros(32, np.float32)
    column(*arg(out), x.view(np.uint8).reshape(-1), (7, 16, 1, 1), (4, 28, x.nbytes, x.nbytes), *TAIL)
    assert np.array_equal(out[:16], x[:, 1])
    assert np.array_equal(out[16:], np.where(np.arange(16) < 5, x[:, 2], F(0)))


def tree(x):
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0]


def test_lane_sum_is_a_fixed_tree():
    sums = make_expression("vec.store(dst, 0, vec.splat(vec.lane_sum(x)))")
    for seed in range(20):
        x = (np.random.default_rng(seed).standard_normal(32) * 10.0 ** np.arange(32)).astype(np.float32)
        out = np.zeros(16, np.float32)
        sums(*arg(out), *arg(x), *arg(np.zeros(32, np.int32)), *TAIL)
        assert out[0] == tree(x[:16])


# --- elementary functions ---------------------------------------------------------------------------------------------

DOMAINS = {
    "exp": np.concatenate([RNG.uniform(-104, 89, 200_000), np.linspace(-1, 1, 20_001), np.linspace(88.7, 88.73, 1000)]),
    "exp2": np.concatenate([RNG.uniform(-150, 128, 200_000), np.linspace(-1, 1, 20_001), np.arange(-149, 128)]),
    "log": np.concatenate([np.exp(RNG.uniform(-103, 88, 200_000)), np.linspace(0.5, 2, 20_001)]),
    "tanh": np.concatenate(
        [RNG.uniform(-10, 10, 200_000), np.linspace(-1, 1, 20_001), RNG.uniform(-1e-20, 1e-20, 100)]
    ),
}
SPECIAL = {
    "exp": [(-np.inf, 0), (np.inf, np.inf), (0, 1), (-0.0, 1), (-200, 0), (200, np.inf), (3e38, np.inf), (-3e38, 0)],
    "exp2": [(-np.inf, 0), (np.inf, np.inf), (0, 1), (-0.0, 1), (-151, 0), (128, np.inf), (3e38, np.inf), (-3e38, 0)],
    "log": [(0, -np.inf), (-0.0, -np.inf), (np.inf, np.inf), (1, 0), (-1, np.nan), (-np.inf, np.nan)],
    "tanh": [(np.inf, 1), (-np.inf, -1), (0, 0), (100, 1), (-100, -1)],
}
FUNCTIONS = {"exp": vec.exp, "exp2": vec.exp2, "log": vec.log, "tanh": vec.tanh}


def ulps(got, want):
    """Error in units of the last place; infinities must be equal."""
    with np.errstate(over="ignore"):
        nearest = want.astype(np.float32)
    finite = np.isfinite(nearest)
    assert np.array_equal(got[~finite], nearest[~finite])
    return np.max(np.abs(got[finite].astype(np.float64) - want[finite]) / np.spacing(np.abs(nearest[finite])))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_are_accurate(name):
    x = DOMAINS[name].astype(np.float32)
    with np.errstate(over="ignore"):
        want = getattr(np, name)(x.astype(np.float64))
    assert ulps(apply(FUNCTIONS[name], x), want) <= (1 if name == "exp" else 1.5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_at_the_edges(name):
    x, want = (np.array(v, np.float32) for v in zip(*SPECIAL[name], (np.nan, np.nan), strict=True))
    assert np.array_equal(apply(FUNCTIONS[name], x), want, equal_nan=True)


def test_scalars_have_the_bits_of_vectors():
    @kernel
    def scalar(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        for i in range(dst_ne[0]):
            memory.store_f32(dst, 4 * i, vec.exp(memory.load_f32(src0, 4 * i)))

    from ggjit.ops.lib import memory

    scalar.function.__globals__["memory"] = memory
    x = RNG.uniform(-100, 89, 1000).astype(np.float32)
    out = np.zeros_like(x)
    scalar(*arg(out), *arg(x), *TAIL)
    assert np.array_equal(out, apply(vec.exp, x))


def digest():
    """Everything that must have the same bits at AVX2 and AVX-512, and memory safety at this level."""
    h = hashlib.sha256()
    for name, function in FUNCTIONS.items():
        h.update(apply(function, DOMAINS[name].astype(np.float32)).tobytes())
    how = {"store": vec.storer("BF16"), "store_first": vec.storer_first("BF16")}
    h.update(apply(same, bf16_cases().view(np.float32), "u2", **how).tobytes())
    x = (np.random.default_rng(5).standard_normal(1003) * 300).astype(np.float32)
    for name, dtype in (("F16", "u2"), ("BF16", "u2")):
        how = {"store": vec.storer(name), "store_first": vec.storer_first(name)}
        half = apply(vec.abs, x, dtype, **how)
        h.update(half.tobytes())
        h.update(apply(vec.sqrt, half, load=vec.loader(name), load_first=vec.loader_first(name)).tobytes())
    out = np.zeros(16 * len(EXPRESSIONS), np.float32)
    text = "\n    ".join(e.replace("(dst, 0,", f"(dst, {64 * k},") for k, e in enumerate(EXPRESSIONS))
    text += "\n    vec.store(dst, 0, vec.splat(vec.lane_sum(vec.fma(x, y, x))))"
    make_expression(text)(*arg(out), *arg(np.concatenate([X, Y])), *arg(np.concatenate([IX, JX])), *TAIL)
    h.update(out.tobytes())
    for name in TYPES:
        check_tails(name)
    return h.hexdigest()


def digest_at(level):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_vec; print(test_vec.digest())"
    )
    root, env = Path(__file__).parents[1], {**os.environ, "GGJIT_CPU": level}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=env, check=True, timeout=300, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.full
@pytest.mark.skipif(cpu_level() not in ("avx2", "avx512"), reason="needs AVX2")
def test_avx2_and_avx512_give_the_same_bits():
    assert digest_at("avx2") == digest()


@pytest.mark.full
@pytest.mark.skipif(cpu_level() == "neon", reason="one level")
def test_the_portable_level_works():
    assert len(digest_at("sse2")) == 64


# --- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(cpu_level() == "neon", reason="x86 registers")
def test_vectors_are_wide_registers():
    text = make_map(vec.exp).asm()
    wide = cpu_level() if not has("avx512f") else "avx512"  # GGJIT_CPU=avxvnni on a machine with AVX-512
    register = {"avx512": "%zmm", "avx2": "%ymm", "sse2": "%xmm"}[wide]
    assert text.count(register) > 50
    assert "call" not in text
    if cpu_level() != "sse2":
        assert "vfmadd" in text
        assert "masked" not in text
    for level in LEVELS[LEVELS.index(wide) + 1 :]:
        assert {"avx512": "%zmm", "avx2": "%ymm"}[level] not in text
