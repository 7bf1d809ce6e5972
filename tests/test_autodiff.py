"""Backward graphs: structure, accumulators, losses, reset, and what is refused."""

import numpy as np
import pytest

import ggjit as gg
from ggjit.graph import Graph
from ggjit.op import Op
from ggjit.tensor import FLAG_OUTPUT, Tensor, new_node


@pytest.fixture
def ctx():
    with gg.Context(1 << 20) as context:
        yield context


def param(values, name=""):
    return gg.from_numpy(np.float32(values), name=name).set_param()


def constant(values):
    return gg.from_numpy(np.float32(values))


def total(t: Tensor) -> Tensor:
    loss = gg.sum(t)
    loss.set_loss()
    return loss


def differentiate(loss: Tensor, *more: Tensor, **options) -> Graph:
    graph = Graph(256, grads=True)
    for t in (loss, *more):
        graph.build_forward_expand(t)
    return graph.build_backward_expand(**options).reset().compute(1)


def quadratic():
    """f = a x^2 + b at x = 2, a = 3, b = 4."""
    x, a, b = param([2], "x"), constant([3]), constant([4])
    f = a * (x * x) + b
    f.set_loss()
    return x, f


def test_s100_the_guide_s_example(ctx):
    x, f = quadratic()
    graph = Graph(grads=True).build_forward_expand(f)
    assert graph.n_nodes == 4
    graph.build_backward_expand()
    assert graph.n_nodes == 8
    assert [t.op.name for t in graph.nodes[4:]] == ["mul", "mul", "mul", "add"]
    graph.reset().compute(1)
    assert f.numpy().item() == 16.0
    assert graph.grad(x).numpy().item() == 12.0


def test_s102_the_graph_is_static(ctx):
    x, f = quadratic()
    graph = differentiate(f)
    for value in (1.0, -3.0, 0.5):
        x.set(value)
        assert graph.compute(1).grad(x).numpy().item() == 6.0 * value
    assert graph.n_nodes == 8


def test_what_is_marked_and_named(ctx):
    x, f = quadratic()
    graph = differentiate(f)
    assert graph.grad(x).name == "grad for x"
    assert graph.grad(x).flags & FLAG_OUTPUT and f.flags & FLAG_OUTPUT
    assert graph.grad_acc(f).name == f"grad acc for {f.name}"
    assert graph.grad_acc(x) is None
    assert graph.grad(f.src[1]) is None, "constants have no gradient"


def test_memory_is_planned():
    with gg.Context(1 << 20, no_alloc=True):
        x = gg.from_numpy(np.float32([1, -2, 3]), name="x").set_param()
        graph = differentiate(total(x * x * x))
        assert np.allclose(graph.grad(x).numpy().ravel(), [3, 12, 27])
        assert np.allclose(graph.compute(2).grad(x).numpy().ravel(), [3, 12, 27])


def test_accumulators_sum_until_reset(ctx):
    x, f = quadratic()
    acc = gg.new_tensor(gg.F32, 1, name="acc")
    graph = differentiate(f, grad_accs={x: acc})
    assert graph.grad_acc(x) is acc
    assert acc.numpy().item() == 12.0
    graph.compute(1)
    assert acc.numpy().item() == 24.0 == graph.grad(x).numpy().item()
    assert graph.reset().grad_acc(x).numpy().item() == 0.0
    assert graph.compute(1).grad(x).numpy().item() == 12.0


def test_accumulator_as_the_start_of_the_walk(ctx):
    x = param([1, 2, 3])
    y = x * x
    start = constant([1, 10, 100])
    graph = Graph(grads=True).build_forward_expand(y).build_backward_expand({y: start})
    assert graph.compute(1).grad(x).numpy().ravel().tolist() == [2, 40, 600]


def test_several_losses(ctx):
    x, y = param([2.0]), param([5.0])
    first, second = total(x * y), total(x * x)
    graph = differentiate(first, second)
    assert graph.grad(x).numpy().item() == 9.0
    assert graph.grad(y).numpy().item() == 2.0


def test_a_loss_that_is_read(ctx):
    x = param([3.0])
    first = x * x
    first.set_loss()
    graph = differentiate(total(first * first))
    for _ in range(2):  # d(x^2 + x^4)/dx
        assert graph.compute(1).grad(x).numpy().item() == 6.0 + 4.0 * 27.0
    assert graph.grad_acc(first).numpy().item() == 1.0


def test_only_what_leads_to_a_parameter(ctx):
    x, c = param([1, 2, 3]), constant([4, 5, 6])
    inner = gg.sqr(c)
    graph = differentiate(total(x * inner))
    assert graph.grad(inner) is None
    assert graph.grad(x).numpy().ravel().tolist() == [16, 25, 36]
    unused = Graph(grads=True).build_forward_expand(total(x * c)).build_forward_expand(gg.sqr(param([1])))
    assert unused.build_backward_expand().grad(unused.nodes[-1]) is None


def test_zero_gradients_stop(ctx):
    x = param([-1.0, 2.0])
    graph = differentiate(total(gg.step(x)))
    assert graph.grad(x) is None


def test_gradient_through_integers_stops(ctx):
    x = param([[1.0, 3.0, 2.0]])
    graph = differentiate(total(gg.get_rows(constant([[5], [6], [7]]), gg.argmax(x)) * constant([2])), gg.sqr(x))
    assert graph.grad(x) is None


def test_repeated_use_and_views(ctx):
    x = param(np.arange(12).reshape(3, 4))
    left, right = gg.view_2d(x, 2, 3, 16, 0), gg.view_2d(x, 2, 3, 16, 8)
    graph = differentiate(total(gg.mul(left, right)), gg.scale(x, 2.0))
    want = x.numpy()[0, 0][:, [2, 3, 0, 1]]
    assert np.array_equal(graph.grad(x).numpy()[0, 0], want)
    assert graph.grad(x).is_contiguous


def test_gradient_of_a_parameter_is_contiguous(ctx):
    x = param(np.arange(6).reshape(2, 3))
    graph = differentiate(total(gg.mul(gg.transpose(x), constant([[1, 2], [3, 4], [5, 6]]))))
    assert graph.grad(x).is_contiguous
    assert np.array_equal(graph.grad(x).numpy()[0, 0], [[1, 3, 5], [2, 4, 6]])


def test_same_bits_for_any_threads(ctx):
    rng = np.random.default_rng(1)
    w, x = param(rng.normal(size=(33, 40))), constant(rng.normal(size=(70, 40)))
    graph = differentiate(total(gg.sqr(gg.gelu(gg.mul_mat(w, x)))))
    one = graph.grad(w).numpy().copy()
    for n_threads in (2, 3):
        assert np.array_equal(graph.compute(n_threads).grad(w).numpy(), one)


def test_moments_are_reset(ctx):
    step = Op("test_autodiff_step", params=(), state=(1,))
    moments = constant([5, 6])
    node = new_node(step, gg.F32, (2, 1, 1, 1), (constant([1, 2]), moments))
    _, f = quadratic()
    graph = Graph(grads=True).build_forward_expand(f).build_forward_expand(node).build_backward_expand()
    graph.reset()
    assert moments.numpy().ravel().tolist() == [0, 0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(loss: Tensor, *more: Tensor) -> str:
    graph = Graph(grads=True)
    for t in (loss, *more):
        graph.build_forward_expand(t)
    with pytest.raises(NotImplementedError) as error:
        graph.build_backward_expand()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_gradient(ctx):
    y = gg.floor(param([1.5, 2.5])).set_name("rounded")
    assert refused(total(y)) == "build_backward_expand: unary: floor has no gradient ('rounded')"


def test_no_rule(ctx):
    op = Op("test_autodiff_opaque")
    y = new_node(op, gg.F32, (1, 1, 1, 1), (param([1.0]),)).set_name("y")
    y.set_loss()
    assert (
        refused(y) == "build_backward_expand: test_autodiff_opaque: a backward rule must be registered, got none ('y')"
    )


def test_in_place_form(ctx):
    y = gg.scale(param([1.0, 2.0]), 3.0, inplace=True).set_name("y")
    assert refused(total(y)).startswith("build_backward_expand: scale: the source must be kept")


def test_in_place_form_without_gradient_is_fine(ctx):
    x = param([1.0, 2.0])
    graph = differentiate(total(x * gg.scale(constant([1.0, 2.0]), 3.0, inplace=True)))
    assert graph.grad(x).numpy().ravel().tolist() == [3, 6]


def test_overwritten_source(ctx):
    x, c = param([1.0, 2.0]), constant([3.0, 4.0])
    product = x * c
    overwritten = gg.scale(c, 0.0, inplace=True).set_name("zeroed")
    assert "must be kept for the backward pass, got overwritten by 'zeroed'" in refused(total(product), overwritten)


def test_read_past_the_edges(ctx):
    x, memory = param([1.0, 2.0]), constant([0.0, 0.0])
    written = gg.cpy(gg.scale(x, 2.0), memory).set_name("copy")
    graph = Graph(grads=True).build_forward_expand(written)
    loss = total(gg.sqr(memory) + x)
    graph.build_forward_expand(loss)
    with pytest.raises(NotImplementedError, match="must be read through its result"):
        graph.build_backward_expand()


def test_copy_read_through_its_result(ctx):
    x, memory = param([1.0, 2.0]), constant([0.0, 0.0])
    graph = differentiate(total(gg.sqr(gg.cpy(gg.scale(x, 2.0), memory))))
    assert graph.grad(x).numpy().ravel().tolist() == [8, 16]


def test_cache_of_a_decoder(ctx):
    """Rows written to one memory by two nodes, the second through the first's result, then read."""
    x, y = param([[1.0, 2.0]]), param([[3.0, 4.0]])
    cache = constant(np.zeros((4, 2)))
    once = gg.set_rows(cache, x, gg.from_numpy(np.int64([2])))
    twice = gg.set_rows(once, y, gg.from_numpy(np.int64([0])))
    graph = differentiate(total(gg.sqr(twice)))
    assert graph.grad(x).numpy().ravel().tolist() == [2, 4]
    assert graph.grad(y).numpy().ravel().tolist() == [6, 8]


def test_quantized_results(ctx):
    y = gg.cast(param(np.ones((1, 32))), gg.Q8_0).set_name("blocks")
    assert "must pass through F32, F16 or BF16, got Q8_0" in refused(total(gg.cast(y, gg.F32)))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda x: Graph().build_forward_expand(total(x)), ValueError, "room for gradients"),
        (lambda x: Graph(grads=True).build_forward_expand(gg.sqr(x)), ValueError, "set_loss"),
        (lambda x: Graph(grads=True).build_forward_expand(total(constant([1.0]))), ValueError, "set_param"),
    ],
)
def test_wrong_graphs(ctx, build, error, text):
    graph = build(param([1.0]))
    with pytest.raises(error, match=text):
        graph.build_backward_expand()


def test_wrong_calls(ctx):
    x, f = quadratic()
    graph = Graph(grads=True).build_forward_expand(f)
    with pytest.raises(ValueError, match="must be contiguous F32"):
        graph.build_backward_expand({x: constant([1.0, 2.0])})
    with pytest.raises(ValueError, match="must be in the graph"):
        graph.build_backward_expand({constant([1.0]): constant([1.0])})
    graph.build_backward_expand()
    with pytest.raises(ValueError, match="differentiated once"):
        graph.build_backward_expand()
    with pytest.raises(ValueError, match="set_loss: the tensor must be one F32"):
        constant([1.0, 2.0]).set_loss()
    ids = gg.from_numpy(np.int32([1])).set_param()
    with pytest.raises(TypeError, match="a parameter must be F32, F16 or BF16, got I32"):
        loss = total(gg.get_rows(constant([[1.0], [2.0]]), ids))
        Graph(grads=True).build_forward_expand(loss).build_backward_expand()


def test_wrong_rule(ctx):
    op = Op("test_autodiff_wrong")
    op.backward(lambda node, grad, need: (gg.repeat_4d(grad, 2, 1, 1, 1),))
    y = new_node(op, gg.F32, (1, 1, 1, 1), (param([1.0]),))
    y.set_loss()
    graph = Graph(grads=True).build_forward_expand(y)
    with pytest.raises(ValueError, match="must give F32 of its source's shape"):
        graph.build_backward_expand()
