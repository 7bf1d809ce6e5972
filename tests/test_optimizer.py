"""Optimizer steps: the moments, several steps, what the program knows of them."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops

N = 70
BETA1, BETA2 = 0.9, 0.999


@pytest.fixture(autouse=True)
def context():
    with gg.Context(1 << 20) as opened:
        yield opened


def adamw_params(step):
    return np.float32([0.01, BETA1, BETA2, 1e-8, 0.1, 1 / (1 - BETA1**step), 1 / (1 - BETA2**step)])


@pytest.mark.parametrize("n_threads", [1, 3])
def test_adamw_follows_the_formula_over_steps(n_threads):
    rng = np.random.default_rng(0)
    start, slope = rng.normal(size=N), rng.normal(size=N)
    w = gg.from_numpy(np.float32(start)).set_param()
    grad, m, v = (gg.new_tensor(gg.F32, N).set(0.0) for _ in range(3))
    params = gg.new_tensor(gg.F32, 7)
    graph = gg.build(ops.opt_step_adamw(w, grad, m, v, params))
    want, m_want, v_want = start.copy(), np.zeros(N), np.zeros(N)
    for step in range(1, 6):
        g = slope * step
        grad.set(g)
        params.set(adamw_params(step))
        graph.compute(n_threads)
        m_want, v_want = BETA1 * m_want + (1 - BETA1) * g, BETA2 * v_want + (1 - BETA2) * g * g
        step_size = m_want / (1 - BETA1**step) / (np.sqrt(v_want / (1 - BETA2**step)) + 1e-8)
        want = want * (1 - 0.01 * 0.1) - 0.01 * step_size
    for got, expected in ((w, want), (m, m_want), (v, v_want)):
        assert np.allclose(got.numpy().ravel(), expected, rtol=2e-5, atol=1e-6)


def test_what_reads_moments_waits_for_the_step():
    """A barrier stands between the step and a node that reads a moment, though that is only a source of the step."""
    n = 64 * 256
    w = gg.from_numpy(np.ones(n, np.float32)).set_param()
    grad, m, v = (gg.new_tensor(gg.F32, n).set(value) for value in (1.0, 0.0, 0.0))
    step = ops.opt_step_adamw(w, grad, m, v, gg.from_numpy(adamw_params(1)))
    read = ops.sum(m)
    gg.build([step, read]).compute(3)
    assert np.isclose(read.numpy().item(), n * (1 - BETA1), rtol=1e-5)


def test_sgd_reaches_the_minimum_of_a_graph():
    """w -> (w - 3)^2, gradient by autodiff."""
    w = gg.from_numpy(np.zeros(5, np.float32)).set_param()
    loss = ops.sum(ops.sqr(w - 3.0))
    loss.set_loss()
    graph = gg.Graph(256, grads=True).build_forward_expand(loss).build_backward_expand()
    graph.build_forward_expand(ops.opt_step_sgd(w, graph.grad(w), gg.from_numpy(np.float32([0.2, 0.0]))))
    for _ in range(40):
        graph.reset()
        graph.compute(2)
    assert np.allclose(w.numpy(), 3.0, atol=1e-5) and loss.numpy().item() < 1e-8


def test_weights_must_be_parameters():
    w, params = gg.new_tensor(gg.F32, 8, name="w"), gg.new_tensor(gg.F32, 2)
    with pytest.raises(ValueError, match=r"opt_step_sgd: a must be a parameter \(set_param\), got 'w'"):
        ops.opt_step_sgd(w, w, params)


def test_shapes_and_types():
    w = gg.new_tensor(gg.F32, 8, name="w").set_param()
    other, params = gg.new_tensor(gg.F32, 9), gg.new_tensor(gg.F32, 7)
    with pytest.raises(ValueError, match="gradient and moments must have the shape of a"):
        ops.opt_step_adamw(w, w, w, other, params)
    with pytest.raises(ValueError, match=r"params must be contiguous \[7\]"):
        ops.opt_step_adamw(w, w, w, w, other)
    with pytest.raises(TypeError, match="grad must be F32"):
        ops.opt_step_sgd(w, gg.new_tensor(gg.F16, 8), params)
