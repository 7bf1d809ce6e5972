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


def test_bad_parameters_and_logits():
    with pytest.raises(ValueError, match="temperature must be between 0"):
        Sampler(temperature=-1)
    with pytest.raises(ValueError, match="top_p must be between"):
        Sampler(top_p=1.5)
    with pytest.raises(ValueError, match="logits must be finite"):
        Sampler()(np.full(4, np.nan, np.float32))
