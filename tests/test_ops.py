"""Every case of every op: compiled kernels against the float64 reference, with the same bits for any threads."""

import pytest

from ggjit.dev.op_check import check_case
from ggjit.op import all_ops

CASES = [(op, name) for op in all_ops() for name in op.cases]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op.name}-{name}" for op, name in CASES])
def test_case(op, name):
    assert not check_case(op, name, gradient=False).problems  # tests/test_gradients.py has the gradients


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_has_cases_and_reference(op):
    if op.name != "none":
        assert op.cases, "an op must carry test cases"
        assert op.has_reference, "an op must carry a reference"
