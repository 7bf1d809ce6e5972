"""Run the test cases that ops carry, and compare each with the op's float64 reference.

A case is a function of `CaseInputs` that builds one node:

    @ADD.case("broadcast")
    def _(t): return add(t("F32", 65, 3), t("F32", 65, 1))
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggjit import types as _types
from ggjit.context import Context
from ggjit.graph import Graph
from ggjit.op import NONE, Op
from ggjit.tensor import Tensor, from_numpy, new_tensor
from ggjit.types import Type

ARENA = 64 << 20
_PRECISION = {"F16": 1e-6, "BF16": 1e-5}  # least limit for results rounded to these types


class CaseInputs:
    """Makes the leafs of a case from seeded random numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, type: str, *ne: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """A leaf of uniform random values in [low, high)."""
        t = new_tensor(_types.by_name(type), *ne)
        values = self.rng.uniform(low, high, t.ne[::-1]).astype(np.float32)
        return t.set(values) if t.nelements else t

    def ints(self, type: str, *ne: int, low: int = 0, high: int = 10) -> Tensor:
        """A leaf of random integers in [low, high)."""
        t = new_tensor(_types.by_name(type), *ne)
        return t.set(self.rng.integers(low, high, t.ne[::-1]))

    def array(self, values: ArrayLike, type: str | None = None) -> Tensor:
        """A leaf of given values; dimension 0 is the last axis."""
        found: Type | None = None if type is None else _types.by_name(type)
        return from_numpy(np.asarray(values), found)


def values_of(t: Tensor) -> NDArray[Any]:
    """A tensor's values as a float64 copy (int64 for integer types)."""
    values = t.numpy()
    return values.astype(np.int64 if values.dtype.kind == "i" else np.float64)


def nmse(want: NDArray[Any], got: NDArray[Any]) -> float:
    """sum((want - got)^2) / sum(want^2) where `want` is finite; inf where the others differ or shapes do."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    finite = np.isfinite(want)
    if want.shape != got.shape or not np.array_equal(want[~finite], got[~finite], equal_nan=True):
        return float("inf")
    if not np.isfinite(got[finite]).all():
        return float("inf")
    error, scale = np.sum((want[finite] - got[finite]) ** 2), np.sum(want[finite] ** 2)
    return 0.0 if error == 0 else float(error / scale) if scale > 0 else float("inf")


def reference_of(node: Tensor, known: dict[Tensor, NDArray[Any]]) -> NDArray[Any]:
    """The float64 value of a node: references of all ops from the leafs (values in `known`) up."""
    if node not in known:
        if node.op is NONE:
            known[node] = values_of(node)
        else:
            sources = [None if s is None else reference_of(s, known) for s in node.src]
            known[node] = np.asarray(node.op.compute_reference(node, *sources)).reshape(node.ne[::-1])
    return known[node]


class CaseResult:
    """What a case gave: the error against the reference, its limit, and the computed bytes."""

    def __init__(self, node: Tensor, error: float, limit: float, result: NDArray[Any]) -> None:
        self.node, self.error, self.limit, self.result = node, error, limit, result

    @property
    def passed(self) -> bool:
        """Is the error within the limit?"""
        return self.error <= self.limit


def limit_of(node: Tensor) -> float:
    """Largest error that a node's result may have: its op's, or that of rounding to its type; 0 for integers."""
    if node.type.dtype is not None and node.type.dtype.kind == "i":
        return 0.0
    return max(node.op.nmse, _PRECISION.get(node.type.name, 0.0), 1e-2 if node.type.quant is not None else 0.0)


def error_of(node: Tensor, want: NDArray[Any], got: NDArray[Any]) -> float:
    """The error of a result, to compare with `limit_of`: of integers 0 or inf."""
    if got.dtype.kind == "i":
        return 0.0 if np.array_equal(want, got) else float("inf")
    return nmse(want, got)


def run_case(op: Op, name: str, n_threads: int = 1) -> CaseResult:
    """Build a case, compute it by the compiled program, and compare.

    Args:
        op: the op.
        name: one of `op.cases`.
        n_threads: threads that compute it.

    Returns:
        Error, limit and result.
    """
    with Context(ARENA):
        node = op.cases[name](CaseInputs(zlib.crc32(f"{op.name}/{name}".encode())))
        graph = Graph(64).build_forward_expand(node)
        known = {t: values_of(t) for t in graph.leafs if t.nelements}
        want = reference_of(node, dict(known))
        graph.compute(n_threads)
        got = node.numpy().copy()
    return CaseResult(node, error_of(node, want, got), limit_of(node), got)
