"""Lowering: steps, barriers, scratch with lifetimes, shared derived tensors, errors that name the node."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops
from ggjit.alloc import TensorAllocator
from ggjit.backends.cpu import PANEL
from ggjit.barriers import BARRIER
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.lower import Lowering, lower
from ggjit.op import Op
from ggjit.tensor import new_node

memory = lazy_module("ggjit.ops.lib.memory")


@jitted
def at(i):
    return 4 * i


@kernel
def fill_plus(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """dst = src0 + op_params[0], element by element."""
    for i in range(ith, dst_ne[0], nth):
        memory.store_f32(dst, at(i), memory.load_f32(src0, at(i)) + op_params[0])


@pytest.fixture
def op():
    """An op whose lowering goes over a derived tensor that all users of one source share."""
    made = Op("lower_test", params=(("a", "i32"),))

    @made.lower
    def _(low, node):
        (x,) = node.src
        y, is_new = low.derived(x, "plus 100", x.type, x.ne, x.nbytes)
        if is_new:
            low.emit(fill_plus, y, src=(x,), params=(100,))
        low.emit(fill_plus, node, src=(y,), params=(node.params.a,))

    yield made
    from ggjit import op as registry

    del registry.REGISTRY[made.name], registry._BY_ID[made.id]


def test_derived_tensors_are_shared_and_params_reach_the_kernel(op):
    with gg.Context(1 << 18):
        x = gg.from_numpy(np.arange(5, dtype=np.float32))
        a, b = (new_node(op, x.type, x.ne, (x,), (n,)) for n in (1, 2))
        graph = gg.build([a, b])
        executable = lower(graph, 2)
        executable.run()
    assert len(executable.steps) == 3
    assert a.numpy().ravel().tolist() == [101, 102, 103, 104, 105]
    assert b.numpy().ravel().tolist() == [102, 103, 104, 105, 106]


def test_what_was_derived_from_overwritten_bytes_is_made_again(op):
    with gg.Context(1 << 18):
        x = gg.from_numpy(np.arange(4, dtype=np.float32))
        first = new_node(op, x.type, x.ne, (x,), (0,))
        graph = gg.Graph().build_forward_expand(first)
        graph.build_forward_expand(ops.scale(x, 10.0, inplace=True))
        second = new_node(op, x.type, x.ne, (x,), (0,))
        graph.build_forward_expand(second)
        lower(graph, 2).run()
    assert first.numpy().ravel().tolist() == [100, 101, 102, 103]
    assert second.numpy().ravel().tolist() == [100, 110, 120, 130]


def test_scratch_is_reused_when_lifetimes_end():
    low = Lowering(1)
    with gg.Context(1 << 18):
        x = gg.new_tensor(gg.F32, 1024)
    one = low.scratch(gg.F32, (1024, 1, 1, 1), 4096)
    low.emit(fill_plus, one, src=(x,))
    two = low.scratch(gg.F32, (1024, 1, 1, 1), 4096)
    low.emit(fill_plus, two, src=(one,))
    three = low.scratch(gg.F32, (1024, 1, 1, 1), 4096)
    low.emit(fill_plus, three, src=(two,))
    assert low.place() == 8192
    low.set_data(1 << 20)
    assert one.data == three.data != two.data


def test_barriers_stand_only_where_steps_depend():
    with gg.Context(1 << 18):
        x, y = gg.from_numpy(np.ones(64, np.float32)), gg.from_numpy(np.ones(64, np.float32))
        a, b = ops.scale(x, 2.0), ops.scale(y, 3.0)  # independent
        c = ops.scale(a, 4.0)  # reads a
        rows = lower(gg.build([a, b, c]), 2).rows
    assert [bool(f & BARRIER) for f in rows[:, 3]] == [False, True, True]


def test_a_write_after_a_read_waits():
    with gg.Context(1 << 18):
        x = gg.from_numpy(np.ones(64, np.float32))
        a = ops.scale(x, 2.0)
        b = ops.scale(x, 3.0, inplace=True)
        rows = lower(gg.build([a, b]), 2).rows
    assert rows[0, 3] & BARRIER


def rows_of_a_layer(n_rows, n_threads):
    """x + y, normalised, times a quantized matrix: the kernels' names and where all threads meet behind them."""
    rng = np.random.default_rng(5)
    with gg.Context(1 << 22):
        x, y = (gg.from_numpy(rng.standard_normal((n_rows, 64), np.float32)) for _ in range(2))
        w = gg.from_numpy(np.ones(64, np.float32))
        m = gg.new_tensor(gg.Q8_0, 64, 32).set(rng.standard_normal((32, 64), np.float32))
        z = gg.mul_mat(m, gg.mul(gg.rms_norm(gg.add(x, y), 1e-5), w))
        graph = gg.build(z)
        executable = lower(graph, n_threads)
        results = []
        for _ in range(20):
            z.numpy()[...] = 0
            executable.run()
            results.append(z.numpy().copy())
    flags = [(s.kernel.function.__name__, bool(f & BARRIER)) for s, f in zip(executable.steps, executable.rows[:, 3])]
    return flags, results


@pytest.mark.parametrize("n_rows, n_threads", [(1, 2), (5, 2), (6, 2), (16, 2), (17, 2), (64, 3)])
def test_rows_of_one_thread_need_no_barrier(n_rows, n_threads):
    flags, results = rows_of_a_layer(n_rows, n_threads=n_threads)
    cut = n_rows < 8 * n_threads and n_rows % n_threads > 0  # the rows of sum and product are
    many = n_rows > 1  # one row is normalised and quantized by each thread for itself
    steps = [("binary", cut), ("norm_rows", cut and many), ("binary", cut), ("act_q8", many)]
    assert flags[:4] == steps
    one = rows_of_a_layer(n_rows, n_threads=1)[1][0]
    assert all(np.array_equal(r, one) for r in results)


def test_rows_that_other_rows_need_wait():
    with gg.Context(1 << 20):
        x, y = (gg.from_numpy(np.ones((16, 64), np.float32)) for _ in range(2))
        a = gg.add(x, y)
        shifted = gg.view_2d(a, 64, 8, 256, 8 * 256)  # rows of another thread
        b = gg.rms_norm(shifted, 1e-5)
        c = gg.add(gg.permute(a, 0, 2, 1, 3), gg.permute(a, 0, 2, 1, 3))
        rows = lower(gg.build([a, b, c]), 2).rows
    assert rows[0, 3] & BARRIER


def test_an_index_out_of_range_names_node_source_position_and_value():
    with gg.Context(1 << 18):
        table = gg.from_numpy(np.zeros((8, 4), np.float32), name="table")
        ids = gg.from_numpy(np.array([0, 7, 8, 1], np.int32), name="ids")
        rows = ops.get_rows(table, ids).set_name("picked")
        graph = gg.build(rows)
    for n_threads in (1, 3):
        with pytest.raises(IndexError, match=r"get_rows: node 'picked'.*'ids'.*got 8 at position 2"):
            graph.compute(n_threads)
    ids.set([0, 7, 2, 1])
    assert graph.compute(2).nodes[-1].numpy().shape == (1, 1, 4, 4)


def test_callback_sees_every_node_in_order_and_may_stop():
    with gg.Context(1 << 18):
        x = gg.from_numpy(np.ones(4, np.float32))
        a = ops.scale(x, 2.0).set_name("a")
        v = ops.reshape_2d(a, 2, 2).set_name("v")
        b = ops.scale(v, 3.0).set_name("b")
        executable = lower(gg.build(b), 2)
    seen = []
    executable.run(lambda t: seen.append((t.name, float(t.numpy().ravel()[0]))) or True)
    assert seen == [("a", 2.0), ("v", 2.0), ("b", 6.0)]
    seen.clear()
    executable.run(lambda t: seen.append(t.name) or t.name != "v")
    assert seen == ["a", "v"]


def test_a_tensor_without_data_is_named():
    with gg.Context(1 << 18, no_alloc=True):
        a = ops.scale(gg.new_tensor(gg.F32, 4, name="lost"), 2.0)
        with pytest.raises(ValueError, match=r"lower: tensors must have data.*'lost'"):
            lower(gg.build(a), 1)


def test_step_times_are_positive():
    with gg.Context(1 << 20):
        x = gg.from_numpy(np.ones(50000, np.float32))
        executable = lower(gg.build(ops.scale(ops.scale(x, 2.0), 2.0)), 2)
    times = executable.time()
    assert times.shape == (2,)
    assert (times > 0).all()


def test_read_only_memory_is_not_written_to(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    mapped = np.memmap(tmp_path / "file", np.float32, "r")  # a write would end the process
    frozen = np.zeros(1024, np.float32)
    frozen.flags.writeable = False
    with gg.Context(1 << 20, no_alloc=True):
        for array in (mapped, frozen):
            target = gg.from_numpy(array.reshape(16, 64), name="weights")
            rows, ids = gg.from_numpy(np.ones((1, 64), np.float32)), gg.from_numpy(np.int64([3]))
            for node in (
                ops.set_rows(target, rows, ids),
                ops.cpy(rows, ops.view_2d(target, 64, 1, target.nb[1], 0)),
            ):
                with pytest.raises(ValueError, match=r"bytes written to must be writable, got read-only .*'weights'"):
                    gg.build(node, 16).compute(1)
            assert not array.any()


def test_packed_weights_are_read_by_products_alone():
    with gg.Context(1 << 20, no_alloc=True) as context:
        w, x = gg.new_tensor(gg.F32, 32, 32, name="w"), gg.from_numpy(np.ones((2, 32), np.float32), name="x")
    buffer = PANEL.new_buffer(PANEL.padded_size(w))
    TensorAllocator(buffer).alloc(w)
    w.set(np.arange(1024).reshape(32, 32))
    with context:
        gg.build(ops.mul_mat(w, x), 16).compute(1)
        for node in (ops.add(w, w), ops.get_rows(w, gg.from_numpy(np.int32([1]))), ops.mul_mat(x, w), ops.cpy(w, w)):
            with pytest.raises(NotImplementedError, match="'w' must lie in host memory, got a panel buffer"):
                gg.build(node, 16).compute(1)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_products_of_the_same_source_need_no_barrier_between_them(n_threads):
    rng = np.random.default_rng(3)
    with gg.Context(1 << 20, no_alloc=True) as context:
        weights = [gg.new_tensor(gg.F32, 64, 400) for _ in range(3)]
    buffer = PANEL.new_buffer(sum(PANEL.padded_size(w) for w in weights))
    allocator, values = TensorAllocator(buffer), rng.standard_normal((3, 400, 64), np.float32)
    for w, v in zip(weights, values, strict=True):
        allocator.alloc(w)
        w.set(v)
    with gg.Context(1 << 20):
        x = gg.from_numpy(rng.standard_normal((1, 64), np.float32))
    with context:
        products = [ops.mul_mat(w, x) for w in weights]
        graph = gg.build(products, 16)
    graph.compute(n_threads)
    executable = lower(graph, n_threads)
    assert [int(row[3]) & BARRIER for row in executable.rows] == [0, 0, BARRIER]
    for _ in range(20):
        executable.run()
        for v, y in zip(values, products, strict=True):
            np.testing.assert_allclose(y.numpy()[0, 0, 0], v @ x.numpy()[0, 0, 0], rtol=1e-4, atol=1e-4)
            y.numpy()[...] = 0


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_products_of_many_columns_keep_to_their_threads_scratch(n_threads):
    """They follow each other without a barrier, though each thread prepares weights in the one work buffer."""
    rng = np.random.default_rng(4)
    values = [rng.integers(-8, 9, (n, 96)).astype(np.float32) for n in (400, 80, 208)]
    with gg.Context(1 << 20):
        weights = [gg.new_tensor(gg.F16, 96, len(v)) for v in values]
        for w, v in zip(weights, values, strict=True):
            w.set(v)
        x = gg.from_numpy(rng.integers(-8, 9, (40, 96)).astype(np.float32))
        products = [ops.mul_mat(w, x) for w in weights]
        graph = gg.build(products, 16)
    graph.compute(n_threads)
    executable = lower(graph, n_threads)
    assert [int(row[3]) & BARRIER for row in executable.rows[-3:]] == [0, 0, BARRIER]
    assert len({int(row[2]) for row in executable.rows[-3:]}) == 3  # a counter each
    for _ in range(20):
        executable.run()
        for v, y in zip(values, products, strict=True):
            np.testing.assert_array_equal(y.numpy()[0, 0], x.numpy()[0, 0] @ v.T)  # whole numbers: exact
            y.numpy()[...] = 0
