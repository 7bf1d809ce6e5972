"""Ops whose kernel is the user's function."""

import gc
import textwrap

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops
from ggjit.ops.custom import make_custom
from ggjit.ops.lib import memory


@pytest.fixture(autouse=True)
def context():
    with gg.Context(1 << 20) as ctx:
        yield ctx


def scaled_by(factor):
    def scaled(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
        for i in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
            memory.store_f32(dst, 4 * i, factor * memory.load_f32(src0, 4 * i))

    return scaled


def count_calls(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
    memory.store_f32(dst, 4 * ith, nth)


def test_constants_are_user_data():
    x = gg.from_numpy(np.arange(5, dtype=np.float32))
    for factor in (2.0, 3.0):
        node = ops.map_custom1(x, scaled_by(factor))
        gc.collect()  # the node keeps its function
        gg.build(node).compute(2)
        assert np.array_equal(node.numpy().ravel(), factor * np.arange(5))


@pytest.mark.parametrize(("n_tasks", "want"), [(-1, [3, 3, 3]), (2, [2, 2, 0]), (1, [1, 0, 0]), (9, [3, 3, 3])])
def test_tasks(n_tasks, want):
    node = ops.map_custom1(gg.from_numpy(np.zeros(3, np.float32)), count_calls, n_tasks)
    gg.build(node).compute(3)
    assert node.numpy().ravel().tolist() == want


def test_found_by_source():
    """Equal source has one key, wherever it stands; another constant, another."""
    assert make_custom(scaled_by(2.0), 1, -1).key == make_custom(scaled_by(2.0), 1, -1).key
    assert make_custom(scaled_by(2.0), 1, -1).key != make_custom(scaled_by(3.0), 1, -1).key
    assert make_custom(scaled_by(2.0), 1, -1).key != make_custom(scaled_by(2.0), 1, 1).key


def test_function_without_a_file():
    """As in a notebook cell."""
    scope = {"memory": memory}
    exec(textwrap.dedent("""
        def plus(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, ith, nth):
            for i in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
                memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) + memory.load_f32(src1, 4 * i))
    """), scope)  # fmt: skip
    x = gg.from_numpy(np.arange(4, dtype=np.float32))
    node = ops.map_custom2(x, x, scope["plus"])
    gg.build(node).compute(2)
    assert node.numpy().ravel().tolist() == [0, 2, 4, 6]


def test_errors():
    x = gg.from_numpy(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"map_custom2: fun must take \(dst, .*src1_nb, ith, nth\), got \("):
        ops.map_custom2(x, x, count_calls)
    with pytest.raises(TypeError, match="map_custom1: fun must be a function, got 3"):
        ops.map_custom1(x, 3)
    with pytest.raises(ValueError, match="map_custom1: n_tasks must be positive, or -1"):
        ops.map_custom1(x, count_calls, 0)
    with pytest.raises(ValueError, match="custom_4d: a node must have at most 10 sources, got 11"):
        ops.custom_4d(gg.types.F32, 1, 1, 1, 1, [x] * 11, count_calls)
    with pytest.raises(NotImplementedError, match="map_custom1: a backward rule must be given"):
        node = ops.map_custom1(x, count_calls)
        node.op.backward_for(node, x, (True,))


def test_an_exception_in_a_function_is_told():
    def failing(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
        if dst_ne[0] == 3:
            raise KeyError("boom")

    with gg.Context(1 << 20):
        y = gg.map_custom1(gg.from_numpy(np.ones(3, np.float32)), failing)
        with pytest.raises(RuntimeError, match=r"kernel custom_function must return 0, got an exception raised in it"):
            gg.build(y).compute()
