"""Composed convolutions against the direct ones, and what builders of convolutions refuse."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.dev.cases import nmse
from ggjit.lower import lower


@pytest.fixture(autouse=True)
def context():
    with gg.Context(16 << 20) as ctx:
        yield ctx


def leaf(*ne, type=types.F32, seed=0):
    values = np.random.default_rng(seed).uniform(-1, 1, ne[::-1]).astype(np.float32)
    return gg.new_tensor(type, *ne).set(values)


def same(a, b, limit):
    """Both nodes have the same shape and values."""
    for node in (a, b):
        gg.build(node).compute(2)
    assert a.ne == b.ne
    assert nmse(b.numpy(), a.numpy()) <= limit


@pytest.mark.parametrize(("type", "limit"), [(types.F32, 1e-12), (types.F16, 1e-6)])
def test_conv_2d(type, limit):
    a, b = leaf(3, 2, 4, 5, type=type), leaf(9, 6, 4, 2, seed=1)
    walked = (2, 1, 1, 1, 1, 2)
    same(ops.conv_2d(a, b, *walked), ops.conv_2d_direct(a, b, *walked), limit)
    same(ops.conv_2d_s1_ph(a, b), ops.conv_2d_direct(a, b, 1, 1, 1, 1, 1, 1), limit)
    same(ops.conv_2d_sk_p0(a, b), ops.conv_2d_direct(a, b, 3, 2, 0, 0, 1, 1), limit)


@pytest.mark.parametrize("type", [types.F32, types.F16])
def test_conv_2d_dw(type):
    a, b = leaf(3, 3, 1, 4, type=type), leaf(9, 6, 4, 2, seed=1)
    walked = (2, 1, 1, 1, 1, 1)
    same(ops.conv_2d_dw(a, b, *walked), ops.conv_2d_dw_direct(a, b, *walked), 1e-6)


def test_conv_3d():
    a, b = leaf(2, 2, 3, 6), leaf(6, 5, 5, 4, seed=1)
    walked = (2, 1, 1, 1, 0, 1, 1, 1, 1)
    same(ops.conv_3d(a, b, 2, *walked), ops.conv_3d_direct(a, b, *walked, 2, 2, 3), 1e-12)


@pytest.mark.parametrize("n", [1, 3])
def test_conv_1d(n):
    a, b = leaf(3, 4, 5), leaf(21, 4, n, seed=1)
    plane = ops.conv_2d_direct(ops.reshape_4d(a, 3, 1, 4, 5), ops.reshape_4d(b, 21, 1, 4, n), 2, 1, 1, 0, 2, 1)
    same(ops.conv_1d(a, b, 2, 1, 2), ops.reshape_3d(plane, plane.ne[0], 5, n), 1e-6)
    plane = ops.conv_2d_direct(ops.reshape_4d(a, 3, 1, 4, 5), ops.reshape_4d(b, 21, 1, 4, n), 1, 1, 1, 0, 1, 1)
    same(ops.conv_1d_ph(a, b, 1, 1), ops.reshape_3d(plane, plane.ne[0], 5, n), 1e-6)


def test_conv_1d_dw():
    a, b = leaf(3, 1, 4), leaf(21, 4, seed=1)
    plane = ops.conv_2d_dw_direct(ops.reshape_4d(a, 3, 1, 1, 4), ops.reshape_4d(b, 21, 1, 4, 1), 1, 1, 1, 0, 1, 1)
    same(ops.conv_1d_dw(a, b, 1, 1, 1), ops.reshape_3d(plane, 21, 4, 1), 1e-6)
    same(ops.conv_1d_dw_ph(a, b, 1, 1), ops.reshape_3d(plane, 21, 4, 1), 1e-6)


def test_weights_are_widened_once():
    a, b = leaf(3, 3, 2, 4, type=types.F16), leaf(9, 6, 2)
    both = ops.add(*(ops.conv_2d_direct(a, x, 1, 1, 1, 1, 1, 1) for x in (b, ops.scale(b, 2.0))))
    steps = lower(gg.build(both), 1).steps
    assert sum(s.record.type is types.F32 and s.record.ne == a.ne for s in steps) == 1


REFUSED = {
    r"conv_2d: a\.ne\[2\] must equal b\.ne\[2\]": lambda: conv_2d(leaf(3, 3, 2, 1), leaf(8, 8, 3)),
    "conv_2d: b with padding 0 must be as large": lambda: conv_2d(leaf(9, 9, 2, 1), leaf(8, 8, 2)),
    "conv_2d: strides and dilations must be positive": lambda: conv_2d(leaf(3, 3, 2, 1), leaf(8, 8, 2), 0),
    "conv_2d: a must be contiguous": lambda: conv_2d(ops.transpose(leaf(3, 3, 2, 1)), leaf(8, 8, 2)),
    "conv_2d: b must be F32, got F16": lambda: conv_2d(leaf(3, 3, 2, 1), leaf(8, 8, 2, type=types.F16)),
    "conv_3d: dimension 3 must be 2 channels": lambda: ops.conv_3d_direct(
        leaf(2, 2, 2, 3), leaf(4, 4, 4, 2), *(1,) * 3, *(0,) * 3, *(1,) * 3, 2, 1, 1
    ),
    "conv_2d_dw: b must be contiguous, or with channels": lambda: ops.conv_2d_dw_direct(
        leaf(3, 3, 1, 2), ops.transpose(leaf(8, 9, 2)), 1, 1, 0, 0, 1, 1
    ),
    "im2col_3d: the 3 channels must divide": lambda: ops.im2col_3d(
        leaf(2, 2, 2, 4), leaf(4, 4, 4, 4), 3, *(1,) * 3, *(0,) * 3, *(1,) * 3
    ),
    "col2im_1d: a must have 2 dimensions and 5 channels": lambda: ops.col2im_1d(leaf(12, 7), 2, 5, 0),
    "conv_transpose_2d: the stride": lambda: ops.conv_transpose_2d_p0(leaf(3, 3, 2, 2), leaf(4, 4, 2), 0),
    "pool_1d: the kernel": lambda: ops.pool_1d(leaf(3, 2), 0, 5, 1, 0),
    "pool_2d: op must be 0": lambda: ops.pool_2d(leaf(3, 2), 2, 1, 1, 1, 1, 0, 0),
}


def conv_2d(a, b, s0=1):
    return ops.conv_2d_direct(a, b, s0, 1, 0, 0, 1, 1)


@pytest.mark.parametrize("error", REFUSED)
def test_checks(error):
    with pytest.raises((ValueError, TypeError), match=error):
        REFUSED[error]()


@pytest.mark.parametrize("n_channels", [0, -1, 4])
def test_channels_of_a_volume(n_channels):
    with gg.Context(1 << 16):
        a, b = gg.new_tensor(gg.F32, 8, 1, 1, 1), gg.new_tensor(gg.F32, 2, 2, 2, 1)
        with pytest.raises(ValueError, match=r"im2col_3d_back: the .* channels must divide those of the volume"):
            gg.im2col_3d_back(a, b, (2, 2, 2, 3), n_channels, 1, 1, 1, 0, 0, 0, 1, 1, 1)
