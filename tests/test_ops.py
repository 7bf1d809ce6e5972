"""Every case of every op: compiled kernels against the float64 reference, with the same bits for any threads."""

import pytest

from ggjit import ops  # noqa: F401  (fills the registry)
from ggjit.dev.op_check import check_case
from ggjit.op import REGISTRY

CASES = [(op, name) for op in REGISTRY.values() for name in op.cases]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op.name}-{name}" for op, name in CASES])
def test_case(op, name):
    assert not check_case(op, name, gradient=False).problems  # tests/test_gradients.py has the gradients


@pytest.mark.parametrize("op", REGISTRY.values(), ids=REGISTRY)
def test_has_cases_and_reference(op):
    if op.name != "none":
        assert op.cases, "an op must carry test cases"
        assert op.has_reference, "an op must carry a reference"
