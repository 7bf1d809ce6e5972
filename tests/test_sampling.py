"""Sampling: the truncation steps against a plain float64 computation, and the distribution of what is drawn."""

import numpy as np
import pytest

from ggjit.llm.sampling import Sampler


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


def test_greedy_takes_the_lowest_id_of_equals():
    assert Sampler(temperature=0)(np.array([1, 3, 3, 2], np.float32)) == 1


def test_top_k_and_temperature():
    logits = np.array([0.0, 2.0, 1.0, 3.0, -1.0], np.float32)
    ids, p = Sampler(temperature=0.5, top_k=3, top_p=1, min_p=0).probabilities(logits)
    assert ids.tolist() == [3, 1, 2]
    np.testing.assert_allclose(p, softmax([3 / 0.5, 2 / 0.5, 1 / 0.5]), rtol=1e-12)


def test_top_p_keeps_the_token_that_crosses_the_sum():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(p).astype(np.float32)
    for top_p, n in ((0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (1.0, 4)):
        ids, _ = Sampler(1.0, 0, top_p, 0).probabilities(logits)
        assert len(ids) == n, top_p


def test_min_p_is_relative_to_the_best():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    for min_p, n in ((0.0, 4), (0.11, 3), (0.35, 2), (0.7, 1), (1.0, 1)):
        ids, _ = Sampler(1.0, 0, 1.0, min_p).probabilities(logits)
        assert len(ids) == n, min_p


def test_draws_follow_the_probabilities_and_the_seed():
    logits = np.log(np.array([0.6, 0.1, 0.3])).astype(np.float32)
    draw = [Sampler(1.0, 0, 1.0, 0.0, seed=7) for _ in range(2)]
    a, b = ([s(logits) for _ in range(4000)] for s in draw)
    assert a == b
    share = np.bincount(a, minlength=3) / len(a)
    np.testing.assert_allclose(share, [0.6, 0.1, 0.3], atol=0.03)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(40, 0.95, 0.05), (0, 1.0, 0.0), (7, 0.6, 0.0), (300, 1.0, 1e-3)]
)
def test_draws_are_those_of_a_plain_computation(top_k, top_p, min_p):
    rng = np.random.default_rng(3)
    sampler, draws = Sampler(0.7, top_k, top_p, min_p, seed=11), np.random.default_rng(11)
    for _ in range(90):  # more than random numbers are drawn at a time
        logits = rng.normal(0, 3, 1000).astype(np.float32)
        ids = np.argsort(-logits, kind="stable")[: top_k or None]
        p = softmax(logits[ids])
        n = min(np.count_nonzero(np.cumsum(p) - p < top_p), np.count_nonzero(p >= min_p * p[0]))
        p = softmax(logits[ids[:n]].astype(np.float64) / 0.7)
        assert sampler(logits) == ids[np.count_nonzero(np.cumsum(p) <= draws.random())]


def test_one_array_whose_values_change_and_arrays_of_other_sizes():
    sampler, logits = Sampler(temperature=0), np.zeros(100, np.float32)
    for best, n in ((5, 100), (70, 100), (3, 40), (60, 100), (0, 1)):
        logits[:] = 0
        logits[best] = 1
        assert sampler(logits if n == 100 else logits[:n]) == best
    wide = np.zeros((50, 2), np.float32)
    for best in (7, 30):  # not contiguous: its values are copied each time
        wide[:] = 0
        wide[best, 1] = 1
        assert sampler(column := wide[:, 1]) == best and column.base is wide


def test_bad_parameters_and_logits():
    with pytest.raises(ValueError, match="temperature must be between 0"):
        Sampler(temperature=-1)
    with pytest.raises(ValueError, match="top_p must be between"):
        Sampler(top_p=1.5)
    with pytest.raises(ValueError, match="logits must be finite"):
        Sampler()(np.full(4, np.nan, np.float32))
    with pytest.raises(ValueError, match="logits must be finite, got -inf for token 0"):
        Sampler(0)(np.full(4, -np.inf, np.float32))
    for shape in ((0,), (1, 4)):
        with pytest.raises(ValueError, match="logits must be one row of at least one value"):
            Sampler()(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("top_k", 2.5, "a whole number"), ("top_k", None, "a whole number"), ("seed", "1", "a whole number"),
     ("temperature", "0.5", "a number"), ("top_p", None, "a number"), ("min_p", [0.1], "a number"),
     ("top_k", True, "a whole number")],
)  # fmt: skip
def test_parameters_of_the_wrong_kind(name, value, kind):
    with pytest.raises(TypeError, match=f"Sampler: {name} must be {kind}, got "):
        Sampler(**{name: value})
    Sampler(top_k=np.int32(2), top_p=np.float32(0.5), seed=np.uint64(7))
