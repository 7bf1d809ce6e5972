"""sin and cos of vectors: units in the last place, from denormals to the largest float32."""

import numpy as np
import pytest

from ggjit.jit import kernel, lazy_module

sine = lazy_module("ggjit.ops.lib.sine")
vec = lazy_module("ggjit.ops.lib.vec")


@kernel
def sines(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """sin, then cos."""
    for i in range(0, src0_ne[0], 16):
        x = vec.load(src0, 4 * i)
        vec.store(dst, 4 * i, sine.sin(x))
        vec.store(dst, 4 * (src0_ne[0] + i), sine.cos(x))


def computed(x):
    assert x.size % 16 == 0
    out = np.zeros((2, x.size), np.float32)
    ne, nb = np.array([x.size, 1, 1, 1]), np.array([4, 0, 0, 0])
    bytes_of = lambda a: a.reshape(-1).view(np.uint8)
    sines(bytes_of(out), ne, nb, bytes_of(x), ne, nb, np.zeros(16, np.int32), np.zeros(64, np.uint8), 0, 1)
    return out


def check(x, ulp):
    x = np.float32(x)
    want = np.stack([np.sin(x.astype(np.float64)), np.cos(x.astype(np.float64))])
    got = computed(x)
    assert np.abs((got - want) / np.spacing(np.abs(want).astype(np.float32))).max() < ulp


@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 2e4])
def test_near(size):
    check(np.random.default_rng(0).uniform(-size, size, 1 << 14), 2.0)


def test_far():
    rng = np.random.default_rng(1)
    check(10.0 ** rng.uniform(4.3, 38.5, 1 << 12) * rng.choice([-1.0, 1.0], 1 << 12), 2.0)
    check(np.float32([20000, 20001, 2.0**31, 2.0**127, 3.4028235e38, 1e22, 5.3e14, 65504] * 2), 2.0)


def test_near_multiples_of_half_pi():
    """The float32 nearest to k pi/2, where the sine or cosine is smallest."""
    k = np.arange(1, 8193)
    check(k * (np.pi / 2), 2.0)
    check((k + 1e5) * (np.pi / 2), 2.0)


def test_special():
    x = np.zeros(16, np.float32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    sin, cos = computed(x)
    assert np.isnan(sin[2:5]).all() and np.isnan(cos[2:5]).all()
    assert sin[0] == 0 and sin[5] == x[5] and cos[0] == cos[1] == cos[5] == 1
