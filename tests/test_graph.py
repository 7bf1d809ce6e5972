from __future__ import annotations

import numpy as np
import pytest

import ggjit as gg
from ggjit import types
from ggjit.context import OBJECT_SIZE
from ggjit.graph import Graph, hash_size
from ggjit.tensor import FLAG_COMPUTE


def mlp(n: int = 4, sizes: tuple[int, int, int] = (256, 1024, 256)) -> tuple[gg.Tensor, dict[str, gg.Tensor]]:
    """Figure 8: two layers, relu between; the result and the leafs by name."""
    n_in, n_hidden, n_out = sizes
    shapes = {"x": (n_in, n), "w1": (n_in, n_hidden), "b1": (n_hidden,), "w2": (n_hidden, n_out), "b2": (n_out,)}
    leafs = {name: gg.new_tensor(types.F32, *ne, name=name) for name, ne in shapes.items()}
    hidden = gg.relu(gg.add(gg.mul_mat(leafs["w1"], leafs["x"]), leafs["b1"]))
    return gg.add(gg.mul_mat(leafs["w2"], hidden), leafs["b2"]), leafs


@pytest.fixture
def context():
    with gg.Context(1 << 22) as c:
        yield c


def test_s59_leafs_and_nodes_of_figure_8() -> None:
    with gg.Context(1 << 20, no_alloc=True):
        result, leafs = mlp()
        graph = gg.build(result)
    assert [t.name for t in graph.leafs] == ["w2", "w1", "x", "b1", "b2"] and set(graph.leafs) == set(leafs.values())
    assert [t.op.name for t in graph.nodes][::2] == ["mul_mat", graph.nodes[2].op.name, "add"]
    assert [graph.use_counts[t] for t in graph.nodes] == [1, 1, 1, 1, 0]
    assert (graph.n_nodes, graph.n_leafs) == (5, 5)


def test_s59_names(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4), gg.new_tensor(types.F32, 4, name="b")
    graph = gg.build(gg.add(gg.add(a, b), a))
    assert [t.name for t in graph.leafs] == ["leaf_0", "b"] and [t.name for t in graph.nodes] == ["node_0", "node_1"]


def test_s59_params_are_nodes(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4), gg.new_tensor(types.F32, 4).set_param()
    graph = gg.build(gg.add(a, b))
    assert graph.leafs == [a] and graph.nodes[0] is b and graph.n_nodes == 2


def test_s60_overheads(context: gg.Context) -> None:
    assert Graph().size == 2048
    assert gg.graph_overhead() == 82608
    assert gg.graph_overhead(4096) == 165216
    assert gg.graph_overhead(4096, True) == 296560
    assert hash_size(2048) == 4099
    used = context.used_mem()
    graph = Graph(64)
    assert context.used_mem() - used == gg.graph_overhead(64)
    assert graph.nodes == [] and graph.leafs == [] and graph.use_counts == {}


def test_s60_addresses_lie_in_the_arena(context: gg.Context) -> None:
    start = context.used_mem() + OBJECT_SIZE + 96
    graph = Graph(16)
    a, b = gg.new_tensor(types.F32, 4), gg.new_tensor(types.F32, 4)
    c = gg.add(a, b)
    graph.build_forward_expand(c)
    arrays = context.array[start : start + 2 * 16 * 8].view(np.int64)
    assert arrays[0] == c.address and arrays[16:18].tolist() == [a.address, b.address]


def test_s60_use_counts(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 4)
    b = gg.mul(a, a)
    c = gg.add(gg.add(b, a), b)
    graph = gg.build(c)
    assert (graph.use_counts[a], graph.use_counts[b], graph.use_counts[c]) == (3, 2, 0)


def test_order_is_left_to_right_depth_first(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4, name="a"), gg.new_tensor(types.F32, 4, name="b")
    left, right = gg.mul(a, b).set_name("left"), gg.mul(b, b).set_name("right")
    total = gg.add(gg.add(left, right).set_name("sum"), left).set_name("total")
    graph = gg.build(total)
    assert [t.name for t in graph.nodes] == ["left", "right", "sum", "total"]
    assert [t.name for t in graph.leafs] == ["a", "b"]
    assert all(t.flags & FLAG_COMPUTE for t in graph.nodes) and not any(t.flags & FLAG_COMPUTE for t in graph.leafs)


def test_expanding_twice_adds_only_what_is_new(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4), gg.new_tensor(types.F32, 4)
    c = gg.add(a, b)
    graph = Graph(8).build_forward_expand(c)
    assert graph.build_forward_expand(c) is graph and graph.n_nodes == 1
    d = gg.mul(c, b)
    graph.build_forward_expand(d)
    assert graph.nodes == [c, d] and graph.leafs == [a, b] and graph.use_counts[b] == 2


def test_deep_graph_needs_no_recursion() -> None:
    with gg.Context(gg.tensor_overhead() * 5010 + gg.graph_overhead(5000), no_alloc=True):
        t = gg.new_tensor(types.F32, 1)
        b = gg.new_tensor(types.F32, 1)
        for _ in range(5000):
            t = gg.add(t, b)
        assert gg.build(t, 5000).n_nodes == 5000


def test_full_graph_is_an_error(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4), gg.new_tensor(types.F32, 4)
    t = gg.add(gg.add(gg.add(a, b), b), b)
    with pytest.raises(ValueError, match="build_forward_expand: the graph must have room for its nodes, got size 2"):
        Graph(2).build_forward_expand(t)
    with pytest.raises(ValueError, match="the graph must have room for its leafs, got size 1"):
        Graph(1).build_forward_expand(gg.add(a, b))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.ones(3), "results must be a list of Tensors, got an array of shape (3,); use gg.from_numpy"),
        ("a", "results must be a list of Tensors, got 'a'"),
        (None, "results must be a list of Tensors, got None"),
        (5, "results must be a list of Tensors, got 5"),
        ([None], "results[0] must be a Tensor, got None"),
        ([np.ones((2, 2))], "results[0] must be a Tensor, got an array of shape (2, 2); use gg.from_numpy"),
    ],
)
def test_results_are_tensors(context: gg.Context, given: object, text: str) -> None:
    used = context.used_mem()
    with pytest.raises(TypeError) as raised:
        gg.build(given)
    assert str(raised.value) == f"build: {text}" and context.used_mem() == used
    x = gg.new_tensor(gg.F32, 2).set(2.0)
    graph = gg.build((t for t in [x * x]), 8)
    with pytest.raises(TypeError, match=r"^compute: keep"):
        graph.compute(keep=given)
    with pytest.raises(TypeError, match=r"^build_forward_expand: tensor must be a Tensor, got"):
        graph.build_forward_expand(given)
    with pytest.raises(TypeError, match=r"^Graph: size must be a whole number, got 2\.5$"):
        gg.Graph(2.5)
    with pytest.raises(TypeError, match=r"^graph_overhead: size must be a whole number, got 'a'$"):
        gg.graph_overhead("a")


def test_a_leaf_that_nobody_can_have_set_is_an_error() -> None:
    with gg.Context(1 << 20, no_alloc=True):
        x, y = (gg.new_tensor(gg.F32, 4, 2, name=name) for name in "xy")
        for made in (x * 2.0, gg.add(gg.from_numpy(np.ones((2, 4), np.float32)), gg.reshape_2d(x, 4, 2)), x / x):
            with pytest.raises(
                ValueError, match=r"^compute: a leaf must be set before \w+ reads it, got no data \('x'\)"
            ):
                gg.build(made, 16).compute(1)
        with pytest.raises(ValueError, match=r"got no data \('x'\)"):
            gg.build(gg.new_tensor(gg.F32, 4, 2, name="x").set_param() * 2.0, 16).compute(1)
        ones, empty = gg.fill(x, 1.0), gg.new_tensor(gg.F32, 0, 4)
        stored = gg.cpy(ones, y)  # what is written needs no values, as a cache
        graph = gg.build([gg.scale(stored, 3.0), gg.scale(empty, 2.0)], 16).compute(1)
        assert (graph.nodes[2].numpy() == 3).all()
        product = x * 2.0
    with gg.Context(1 << 20):
        graph = gg.build(product, 16)
    gg.GraphAllocator(gg.backend.host_buffer_type()).alloc_graph(graph)
    x.set(3.0)
    assert (graph.compute(1).nodes[0].numpy() == 6).all()


def test_get_tensor(context: gg.Context) -> None:
    a, b = gg.new_tensor(types.F32, 4, name="a"), gg.new_tensor(types.F32, 4, name="b")
    c = gg.add(a, b).set_name("a")
    graph = gg.build(c)
    assert graph.get_tensor("a") is c and graph.get_tensor("b") is b
    with pytest.raises(KeyError, match="get_tensor: the graph must hold a tensor of that name, got 'z'"):
        graph.get_tensor("z")


def test_print_and_dot(context: gg.Context, capsys: pytest.CaptureFixture[str]) -> None:
    a = gg.new_tensor(types.F32, 4, 2, name='a"b')
    graph = gg.build(gg.add(gg.transpose(gg.transpose(a)), a).set_name("sum"))
    assert repr(graph) == "Graph(3 nodes, 1 leaf, size 2048)"
    graph.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "graph: 3 nodes, 1 leaf" and len(lines) == 5
    assert lines[3].split()[:4] == ["node", "2", "add", "F32"] and lines[3].endswith("uses 0  sum")
    dot = graph.dot()
    assert dot.startswith("digraph ggjit {") and dot.endswith("}") and dot.count("->") == 4
    assert "t0 -> t1;" in dot and "a'b" in dot and dot.count("dashed") == 2


def test_s56_nothing_is_computed_while_building(context: gg.Context) -> None:
    x = gg.new_tensor(types.F32, 1).set(2.0)
    f = gg.add(gg.mul(x, x), x)
    gg.build(f)
    assert f.numpy().item() == 0.0
