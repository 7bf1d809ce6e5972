"""The generic check of an op finds what is wrong with it."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import op as registry
from ggjit.ops.lib import memory


@gg.kernel
def twice_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    for i in range(ith, dst_ne[0], nth):
        memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) * 2)


@gg.kernel
def twice_and_threads_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    for i in range(ith, dst_ne[0], nth):
        memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) * 2 + (nth - 1) * np.float32(1e-6))


@pytest.fixture
def make():
    made = []

    def op(kernel, factor=2, gradient=None):
        one = gg.Op(f"check_test_{len(made)}")
        made.append(one)
        one.reference(lambda node, a: a * factor)
        one.kernel(lambda node: kernel)
        if gradient is not None:
            one.backward(lambda node, grad, need: (grad * gradient,))
        one.case("values")(lambda t: gg.new_node(one, gg.F32, (37, 1, 1, 1), (t("F32", 37),)))
        return one

    yield op
    for one in made:
        del registry.REGISTRY[one.name], registry._BY_ID[one.id]


def test_a_sound_op_passes(make):
    report = gg.check_op(make(twice_f32, gradient=2.0).name)
    (case,) = report.cases
    assert report.passed and case.error == 0 and case.gradient <= case.gradient_limit
    assert str(report).splitlines()[-1] == "all passed"


def test_without_a_rule_the_report_says_so(make):
    report = gg.check_op(make(twice_f32))
    assert report.passed and report.cases[0].gradient is None and "no backward rule" in str(report)


@pytest.mark.parametrize(
    ("kernel", "factor", "gradient", "problem"),
    [
        (twice_f32, 3, None, "exceeds the limit 1e-07"),
        (twice_and_threads_f32, 2, None, "2 threads change the bits"),
        (twice_f32, 2, 2.1, "of a gradient exceeds the limit"),
    ],
    ids=["value", "threads", "gradient"],
)
def test_mistakes_are_found(make, kernel, factor, gradient, problem):
    report = gg.check_op(make(kernel, factor, gradient))
    assert not report.passed and any(problem in text for text in report.problems)


def test_an_op_without_cases_is_refused(make):
    op = make(twice_f32)
    op.cases.clear()
    with pytest.raises(ValueError, match=r"check_op: an op must carry cases and a reference, got no cases"):
        gg.check_op(op)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("no such op", ""),
        ("soft_mx", "; closest: soft_max, soft_max_ext, soft_max_back"),
        ("softmax", "; closest: soft_max"),
        ("silu", "; silu is checked as 'unary'"),
        ("swiglu", "; swiglu is checked as 'glu'"),
    ],
)
def test_a_name_that_is_no_op_s_says_what_is(name, hint):
    with pytest.raises(ValueError) as raised:
        gg.check_op(name)
    assert str(raised.value) == f"check_op: op must be an Op or the name of one, got {name!r}{hint}"


def test_numbers_of_threads_are_checked():
    for threads, text in ((0, "0"), ((1, 0), "0")):
        with pytest.raises(ValueError, match=rf"^check_op: threads must be 1 to 512, got {text}$"):
            gg.check_op("sqr", threads=threads)
    with pytest.raises(ValueError, match=r"^check_op: threads must be some numbers of threads, got none$"):
        gg.check_op("sqr", threads=())


@gg.kernel
def sum_of_two_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
):  # fmt: skip
    for i in range(ith, dst_ne[0], nth):
        memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) + memory.load_f32(src1, 4 * i))


def test_a_kernel_of_more_sources_than_the_node_has_is_an_error(make):
    op = make(sum_of_two_f32)
    with gg.Context(1 << 20):
        y = gg.new_node(op, gg.F32, (3, 1, 1, 1), (gg.from_numpy(np.float32([1, 2, 3])),))
        with pytest.raises(TypeError, match=r"no more sources than the node has, got sum_of_two_f32 with 2 and 1"):
            gg.build(y).compute()
