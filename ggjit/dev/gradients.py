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
ROUNDED_STEP = 0.25  # of references that round to the result's type: they are linear but for that
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
    found: dict[Tensor, None] = {}
    stack = [node]
    while stack:
        t = stack.pop()
        if t.op is NONE:
            found[t] = None
        stack += [s for s in reversed(t.src) if s is not None]
    return list(found)


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
    with Context(ARENA):
        node = op.cases[name](CaseInputs(seed))
        excluded = {leaf for i in without if i < len(node.src) for leaf in leafs_of(node.src[i])}  # type: ignore[arg-type]
        params = [t for t in leafs_of(node) if t.type in FLOATS and t.nelements and t not in excluded]
        known = {t: values_of(t) for t in leafs_of(node) if t.nelements}  # a node may write into a leaf
        result = reference_of(node, dict(known))
        if not params or not result.size or np.isnan(result).any():
            return []
        for t in params:
            t.set_param()
        rng = np.random.default_rng(seed + 1)
        weights = np.where(np.isfinite(result), rng.uniform(-1, 1, result.shape), 0).astype(np.float32)
        graph = Graph(1024, grads=True).build_forward_expand(node)
        seeded = new_tensor(types.F32, *node.ne).set(weights)
        graph.build_backward_expand({node: seeded})
        seeded.set(weights)
        graph.compute(n_threads)
        found = [graph.grad(t) for t in params]
        gradients = [np.zeros(t.ne[::-1]) if g is None else values_of(g) for t, g in zip(params, found, strict=True)]

        def error_of(leaf: Tensor, gradient: NDArray[Any]) -> float:
            def loss(values: NDArray[Any]) -> float:
                y = reference_of(node, {**known, leaf: values})
                return float(np.sum(np.where(weights != 0, y, 0) * weights))

            return _error(gradient, known[leaf], step, loss, rng)

        step, limit = ROUNDED_STEP if op.name in ("cpy", "set_rows") else STEP, LIMITS.get(node.type.name, LIMIT)
        return [GradientError(t, error_of(t, g), limit) for t, g in zip(params, gradients, strict=True)]


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
