"""Every case of every op: compiled kernels against the float64 reference, with the same bits for any threads."""

import numpy as np
import pytest

from ggjit import ops  # noqa: F401  (fills the registry)
from ggjit.dev.cases import run_case
from ggjit.op import REGISTRY

CASES = [(op, name) for op in REGISTRY.values() for name in op.cases]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op.name}-{name}" for op, name in CASES])
def test_case(op, name):
    one = run_case(op, name, 1)
    assert one.passed, f"{one.node}: error {one.error:.3g}, limit {one.limit:.3g}"
    for n_threads in (2, 3):
        more = run_case(op, name, n_threads)
        assert np.array_equal(one.result.view(np.uint8), more.result.view(np.uint8)), (
            f"{n_threads} threads change the bits"
        )


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_has_cases_and_reference(op):
    if op.name != "none":
        assert op.cases, "an op must carry test cases"
        assert op.has_reference, "an op must carry a reference"
