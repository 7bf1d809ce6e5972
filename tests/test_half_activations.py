"""The functions for F16 and BF16 at every value that these types have: rounded as well as results of float32."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_memory import TAIL

from ggjit.cpu import cpu_level
from ggjit.ops.unary import _HALF, FORMULAS, make_unary

EXACT = {  # where the op's reference cancels in float64
    "gelu": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)),
}
EVERY = np.arange(65536, dtype=np.uint16)
HALVES = [(f, t) for t in ("F16", "BF16") for f in _HALF]
QUICK = ("gelu_erf", "silu", "tanh")  # in BF16


def values(bits, type_name):
    """float64 of F16 or BF16 bits."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        if type_name == "F16":
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def computed(function, type_name):
    """Bits of a function of all values; 65536 + 3 elements, for a tail."""
    x = np.concatenate([EVERY, EVERY[:3]])
    out = np.zeros_like(x)
    ne, nb = (x.size, 1, 1, 1), (2, x.nbytes, x.nbytes, x.nbytes)
    make_unary(function, type_name, 2)(out.view(np.uint8), ne, nb, x.view(np.uint8), ne, nb, *TAIL)
    return out[:-3]


def unit(want, type_name):
    """Distance of neighbouring values of a type around float64."""
    digits, least = (10, -24) if type_name == "F16" else (7, -133)
    exponent = np.frexp(np.maximum(np.abs(want), 2.0**-300))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent - digits, least))


@pytest.mark.parametrize(
    ("function", "type_name"),
    [pytest.param(f, t, marks=pytest.mark.full if t == "BF16" and f not in QUICK else ()) for f, t in HALVES],
)
def test_every_value(function, type_name):
    """Of results that are not the nearest value there are less than 1 in 100, all of them close to the middle."""
    x = values(EVERY, type_name)
    keep = np.isfinite(x)
    with np.errstate(all="ignore"):
        want = EXACT.get(function, FORMULAS[function])(x)
    got = values(computed(function, type_name), type_name)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    top = 65520.0 if type_name == "F16" else 2.0**128 * (1 - 2.0**-9)
    keep &= np.abs(want) < top
    edges = ~keep & ~np.isnan(want)
    assert np.array_equal(got[edges], np.where(np.abs(want) < top, want, np.copysign(np.inf, want))[edges])
    # Where 1 + e^-x overflows in float32, below 1e-36, results are 0, as those of F32 are.
    keep &= (np.abs(want) > 1e-36) | (want == 0)
    error = np.abs(got[keep] - want[keep]) / unit(want[keep], type_name)
    assert error.max() < 0.53 and np.mean(error > 0.5) < 0.01


def digest():
    """All results of this process's CPU level."""
    h = hashlib.sha256()
    for function, type_name in HALVES:
        h.update(computed(function, type_name).tobytes())
    return h.hexdigest()


@pytest.mark.full
@pytest.mark.skipif(cpu_level() != "avx512", reason="needs AVX-512")
def test_avx2_and_avx512_give_the_same_bits():
    tests = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {tests!r}); import test_half_activations as t; print(t.digest())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], env={**os.environ, "GGJIT_CPU": "avx2"},
        check=True, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == digest()
