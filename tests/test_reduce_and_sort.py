"""Reductions and sorting against NumPy: layouts, long rows, equal values, NaN."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops
from ggjit.ops.sort import FEW


@pytest.fixture(autouse=True)
def context():
    with gg.Context(16 << 20) as opened:
        yield opened


def computed(node, n_threads=2):
    gg.build(node).compute(n_threads)
    return node.numpy().copy()


@pytest.mark.parametrize("reduce", [ops.sum, ops.mean, ops.cumsum, ops.argmax])
def test_a_layout_does_not_change_the_bits(reduce):
    values = np.random.default_rng(0).normal(size=(7, 5000)).astype(np.float32)
    packed = gg.from_numpy(values)
    turned = ops.transpose(gg.from_numpy(np.ascontiguousarray(values.T)))
    wide = gg.new_tensor(gg.F32, 5010, 7).set(0.0)
    padded = ops.view_2d(wide, 5000, 7, 4 * 5010, 20)
    padded.set(values)
    results = [computed(reduce(t)) for t in (packed, turned, padded)]
    if reduce is ops.sum:  # the pieces of a packed tensor run over its rows
        assert np.allclose(results[0], results[1], rtol=1e-6)
        results = results[1:]
    for other in results[1:]:
        assert np.array_equal(results[0], other)


def test_a_long_sum_is_exact_to_float32():
    values = np.random.default_rng(1).uniform(0, 1, 1 << 20).astype(np.float32)
    total = computed(ops.sum(gg.from_numpy(values)), 3).item()
    assert abs(total / values.sum(dtype=np.float64) - 1) < 2e-7


def test_a_long_running_sum_does_not_drift():
    values = np.full(1 << 18, 0.1, np.float32)
    got = computed(ops.cumsum(gg.from_numpy(values))).ravel()
    assert np.array_equal(got, values.cumsum(dtype=np.float64).astype(np.float32))


def test_argmax_passes_over_nan_and_takes_the_last_of_equals():
    rows = np.zeros((4, 40), np.float32)
    rows[0, [3, 17, 38]] = 2.0
    rows[1] = np.nan
    rows[1, 5] = -7.0
    rows[2] = -np.inf
    rows[3, 39] = np.inf
    assert computed(ops.argmax(gg.from_numpy(rows))).ravel().tolist() == [38, 5, 39, 39]


def test_count_equal_of_four_dimensions():
    a, b = np.random.default_rng(2).integers(0, 3, (2, 2, 3, 5, 4), dtype=np.int32)[:2]
    assert computed(ops.count_equal(gg.from_numpy(a), gg.from_numpy(b))).item() == (a == b).sum()


@pytest.mark.parametrize("n", [1, 2, FEW - 1, FEW, FEW + 1, 255, 3000])
def test_argsort_is_stable(n):
    rng = np.random.default_rng(n)
    rows = np.concatenate([rng.integers(-3, 4, (2, n)), rng.normal(size=(2, n)) * 10.0 ** rng.integers(-30, 30, n)])
    rows = rows.astype(np.float32)
    rows[0, rows[0] == 0] *= np.where(rng.random((rows[0] == 0).sum()) < 0.5, -1, 1)  # both zeros
    t = gg.from_numpy(rows)
    assert np.array_equal(computed(ops.argsort(t, 0))[0, 0], np.argsort(rows, -1, "stable"))
    assert np.array_equal(computed(ops.argsort(t, 1))[0, 0], np.argsort(-rows, -1, "stable"))


def test_argsort_puts_nan_last():
    rows = np.float32([2, np.nan, -np.inf, 1, np.inf])
    assert computed(ops.argsort(gg.from_numpy(rows), 0)).ravel().tolist() == [2, 3, 0, 4, 1]


@pytest.mark.parametrize("k", [1, 5, FEW, FEW + 1, 500])
def test_top_k_of_equal_values_takes_the_first(k):
    rows = np.random.default_rng(k).integers(0, 9, (3, 500)).astype(np.float32)
    got = computed(ops.top_k(gg.from_numpy(rows), k))[0, 0]
    assert np.array_equal(got, np.argsort(-rows, -1, "stable")[:, :k])


def test_top_k_takes_nan_of_either_sign_first():
    x = np.arange(64, dtype=np.float32)
    x[[5, 40]] = np.array([0xFFC00000, 0x7FC00000], np.uint32).view(np.float32)
    with gg.Context(1 << 20):
        best = gg.top_k(gg.from_numpy(x), 4)
        gg.build(best).compute(1)
        assert best.numpy().ravel().tolist() == [5, 40, 63, 62]
