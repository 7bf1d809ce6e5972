"""Compare the gradients of ops' cases with central differences of the float64 references.

A case's node is differentiated with random weights in place of a loss: L = sum(weights * node). The compiled backward
graph gives dL/dleaf for every float leaf; the reference, evaluated at leafs moved by +-h, gives differences of L along
random directions (all elements at once, signs at random) and for single elements.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.autodiff import FLOATS
from ggjit.context import Context
from ggjit.dev.cases import ARENA, CaseInputs, reference_of, values_of
from ggjit.graph import Graph
from ggjit.op import NONE, Op
from ggjit.tensor import Tensor, new_tensor

STEP, LIMIT = 1e-6, 2e-5
ROUNDING, ROUNDED_STEP = (
    ("cpy", "set_rows"),
    0.25,
)  # references that round to f16 and bf16; but for that they are linear
LIMITS = {"F16": 2e-3, "BF16": 1e-2}  # of results of these types
N_DIRECTIONS, N_ELEMENTS = 3, 6


class GradientError(NamedTuple):
    """The largest difference of one leaf's gradient.

    Attributes:
        leaf: the leaf.
        error: relative to the gradient's norm (directions) or its largest value (elements).
        limit: what is allowed.
    """

    leaf: Tensor
    error: float
    limit: float


def leafs_of(node: Tensor) -> list[Tensor]:
    """The leafs that a node is made from, in order."""
    seen, stack = {node: None}, [node]
    while stack:
        for s in stack.pop().src:
            if s is not None and s not in seen:
                seen[s] = None
                stack.append(s)
    return [t for t in seen if t.op is NONE]


def gradient_errors(op: Op, name: str, without: tuple[int, ...] = (), n_threads: int = 1) -> list[GradientError]:
    """Differentiate a case and compare.

    Args:
        op: the op.
        name: one of `op.cases`.
        without: positions of sources that have no gradient.
        n_threads: threads that compute it.

    Returns:
        One entry for each float leaf; none if there is no such leaf or the result has NaN.

    Raises:
        NotImplementedError: the case has no gradient.
    """
    seed = zlib.crc32(f"{op.name}/{name}".encode())
    return graph_errors(op.cases[name], seed, without, n_threads, ROUNDED_STEP if op.name in ROUNDING else STEP)


def graph_errors(build: Callable[[CaseInputs], Tensor], seed: int = 0, without: tuple[int, ...] = (),
                 n_threads: int = 1, step: float = STEP) -> list[GradientError]:  # fmt: skip
    """Differentiate any graph and compare; see `gradient_errors`.

    Args:
        build: makes the result from leafs, as a case does.
        seed: of all random values.
        without: positions of the result's sources that have no gradient.
        n_threads: threads that compute it.
        step: of the differences.

    Returns:
        One entry for each float leaf.
    """
    with Context(ARENA):
        node = build(CaseInputs(seed))
        excluded = {leaf for i in without for s in node.src[i : i + 1] if s is not None for leaf in leafs_of(s)}
        params = [t for t in leafs_of(node) if t.type in FLOATS and t.nelements and t not in excluded]
        known = {t: values_of(t) for t in leafs_of(node) if t.nelements}  # a node may write into a leaf
        result = reference_of(node, dict(known))
        if not params or not result.size or np.isnan(result).any():
            return []
        rng = np.random.default_rng(seed + 1)
        weights = np.where(np.isfinite(result), rng.uniform(-1, 1, result.shape), 0).astype(np.float32)
        gradients = _gradients(node, params, weights, n_threads)

        def error_of(leaf: Tensor, gradient: NDArray[Any]) -> float:
            def loss(values: NDArray[Any]) -> float:
                y = reference_of(node, {**known, leaf: values})
                return float(np.sum(np.where(weights != 0, y, 0) * weights))

            return _error(gradient, known[leaf], step, loss, rng)

        limit = LIMITS.get(node.type.name, LIMIT)
        return [GradientError(t, error_of(t, g), limit) for t, g in zip(params, gradients, strict=True)]


def _gradients(
    node: Tensor, params: list[Tensor], weights: NDArray[np.float32], n_threads: int
) -> list[NDArray[np.float64]]:
    """The gradients of sum(weights * node) by the compiled graph."""
    for t in params:
        t.set_param()
    graph = Graph(1024, grads=True).build_forward_expand(node)
    start = new_tensor(types.F32, *node.ne).set(weights)
    graph.build_backward_expand({node: start}).compute(n_threads)
    found = [graph.grad(t) for t in params]
    return [np.zeros(t.ne[::-1]) if g is None else values_of(g) for t, g in zip(params, found, strict=True)]


def _error(
    gradient: NDArray[Any],
    at: NDArray[Any],
    step: float,
    loss: Callable[[NDArray[Any]], float],
    rng: np.random.Generator,
) -> float:
    """The largest error of a gradient against central differences."""
    if not np.isfinite(gradient).all():
        return float("inf")
    floor = 1e-6 * max(1.0, float(np.abs(at[np.isfinite(at)]).max(initial=0)))
    norm, top = max(float(np.linalg.norm(gradient)), floor), max(float(np.abs(gradient).max()), floor)
    directions = [(rng.choice([-1.0, 1.0], at.shape), norm) for _ in range(N_DIRECTIONS)]
    for i in rng.choice(at.size, min(N_ELEMENTS, at.size), replace=False):
        one = np.zeros(at.size)
        one[i] = 1.0
        directions.append((one.reshape(at.shape), top))
    worst = 0.0
    for direction, scale in directions:
        slope = (loss(at + step * direction) - loss(at - step * direction)) / (2 * step)
        worst = max(worst, abs(slope - float(np.sum(gradient * direction))) / scale)
    return worst
