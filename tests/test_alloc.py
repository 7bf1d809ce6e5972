from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from gpt2_headers import SMALL, Gpt2Headers, gpt2
from test_graph import mlp

import ggjit as gg
from ggjit import types
from ggjit.alloc import FreeBlocks, GraphAllocator, TensorAllocator
from ggjit.backend import Buffer, BufferType, alloc_ctx_tensors, host_buffer_type
from ggjit.dev.memory import place_elsewhere
from ggjit.examples.gpt2.graph import graph_context
from ggjit.graph import Graph
from ggjit.op import NONE
from ggjit.plan import Plan
from ggjit.tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor, view_tensor

HOST = host_buffer_type()


def room(n: int = 64, size: int = 64) -> gg.Context:
    return gg.Context(gg.tensor_overhead() * n + gg.graph_overhead(size), no_alloc=True)


def placed(graph: Graph, plan: Plan) -> dict[str, tuple[int, int, str | None]]:
    """(offset, size, name of the source it takes over) of each planned tensor."""
    tensors = [*graph.leafs, *graph.nodes]
    return {
        t.name: (p.offset, p.size, tensors[p.inplace].name if p.inplace >= 0 else None)
        for t, p in zip(tensors, plan.placements, strict=True)
        if p.kind == "planned"
    }


def fill(context: gg.Context) -> Buffer | None:
    return alloc_ctx_tensors(context, HOST)


@pytest.fixture(scope="module")
def model() -> Gpt2Headers:
    """GPT-2 small whose weights and cache have addresses but no memory."""
    model = gpt2()
    place_elsewhere(model.weights)
    place_elsewhere(model.kv)
    return model


# -- TensorAllocator ---------------------------------------------------------------------------------------------------


def test_s80_tensor_allocator() -> None:
    with room():
        a, b, c = (gg.new_tensor(types.F32, n, name=f"t{n}") for n in (3, 9, 40))
    allocator = TensorAllocator(HOST.new_buffer(128))
    allocator.alloc(a)
    allocator.alloc(b)
    assert allocator.offset == 96 and b.data - allocator.buffer.base == 32
    with pytest.raises(
        MemoryError,
        match=r"TensorAllocator: the tensor must fit the buffer, got 160 bytes and 32 left of 128 \('t40'\)",
    ):
        allocator.alloc(c)
    with pytest.raises(ValueError, match="tensor_alloc: the tensor must have no data"):
        allocator.alloc(a)


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_best_fit() -> None:
    free = FreeBlocks()
    sizes = (64, 32, 64, 32, 96, 32, 128)
    at = [free.take(n) for n in sizes]
    assert at == [0, 64, 96, 160, 192, 288, 320] and free.peak == 448
    for i in (0, 2, 4):
        free.give(at[i], sizes[i])
    assert free.take(64) == 96  # the smallest that is large enough, the last of equal ones
    assert free.take(32) == 0
    assert free.take(128) == 448  # only open memory is large enough
    assert free.take(96) == 192
    assert free.peak == 576


def test_blocks_join_their_neighbours() -> None:
    free = FreeBlocks()
    at = [free.take(32) for _ in range(5)]
    for i in (1, 3, 2):
        free.give(at[i], 32)
    assert (free.offsets, free.sizes[0]) == ([32, 160], 96)
    free.give(at[0], 32)
    free.give(at[4], 32)
    assert free.offsets == [0] and free.peak == 160
    assert free.take(500) == 0 and free.take(0) == 0


# -- the seeds' values -------------------------------------------------------------------------------------------------


def test_s74_mlp_in_two_blocks() -> None:
    with room() as context:
        result, leafs = mlp(4)
        fill(context)
        graph = gg.build(result, 16)
    # leafs have data: only the five intermediates are planned
    fresh = GraphAllocator(HOST)
    for t in graph.nodes:
        t.data, t.buffer = 0, None
    plan = fresh.reserve(graph)
    assert len(leafs) == 5
    assert plan.sizes == [20480] and fresh.get_buffer_size() == 20480
    assert [(p.offset, p.size) for p in plan.placements[5:]] == [(0, 16384)] * 3 + [(16384, 4096)] * 2
    assert [p.inplace - 5 for p in plan.placements[5:] if p.inplace >= 0] == [0, 1, 3]
    assert [(p.first, p.last) for p in plan.placements[5:]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("n", "peak", "least", "sum_mib"),
    [
        (1, 3210304, 3210304, 39.6),
        (8, 3661888, 3588160, 65.0),  # packed: best fit needs 2 % more than is ever live
        # Less than ggml: the last norm writes over its source, which ggml's planner does not allow.
        (32, 6629504, 6531456, 151.8),
        (512, 106072064, 104503296, 1889),
    ],
)
def test_s68_s70_peaks_of_gpt2(model: Gpt2Headers, n: int, peak: int, least: int, sum_mib: float) -> None:
    with graph_context():
        graph = model.graph(SMALL.n_ctx - n, n)
    plan = GraphAllocator(HOST).measure(graph)
    assert plan.sizes == [least] and least <= peak
    own = sum(t.nbytes for t in graph.nodes if not t.is_view)
    assert own / 2**20 == pytest.approx(sum_mib, abs=0.5)
    assert own / plan.sizes[0] > 12.9


def test_s72_a_prompt_of_70_tokens(model: Gpt2Headers) -> None:
    allocator = GraphAllocator(HOST)
    with graph_context():
        allocator.reserve(model.graph(SMALL.n_ctx - 32, 32))
    size = allocator.get_buffer_size()
    buffer = allocator.buffers[0]
    for n, n_past in ((32, 0), (32, 32), (6, 64)):
        with graph_context():
            graph = model.graph(n_past, n)
        assert not allocator.needs_realloc(graph) and allocator.alloc_graph(graph)
        assert all(t.data for t in (*graph.leafs, *graph.nodes))
    assert allocator.get_buffer_size() == size and allocator.buffers[0] is buffer
    with graph_context():
        one = model.graph(70, 1)
    with graph_context():
        many = model.graph(0, 33)
    assert not allocator.needs_realloc(one) and allocator.needs_realloc(many)


def test_s93_a_reserve_replaces_the_plan(model: Gpt2Headers) -> None:
    def graph(n: int) -> Graph:
        with graph_context():
            return model.graph(64, n)

    allocator = GraphAllocator(HOST)
    allocator.reserve(graph(16))
    allocator.reserve(graph(1))
    assert "bytes are planned for 'inp_tokens', got 64" in allocator.misfit(graph(16))
    allocator.reserve(graph(16))
    assert not allocator.needs_realloc(graph(16)) and not allocator.needs_realloc(graph(1))


def test_s61_all_memory_is_assigned_before_anything_runs() -> None:
    with room():
        result, leafs = mlp(2, (8, 16, 8))
        graph = gg.build(gg.transpose(result), 16)
    allocator = GraphAllocator(HOST)
    assert allocator.alloc_graph(graph)
    buffer = allocator.buffers[0]
    for t in (*graph.leafs, *graph.nodes):
        assert t.buffer is buffer and buffer.contains(t.data, t.nbytes) and (t.data - buffer.base) % 32 == 0
    assert graph.nodes[-1].data == result.data
    leafs["x"].set(1.0)
    assert leafs["x"].numpy().sum() == 16


def test_s50_the_same_plan_in_another_memory() -> None:
    with room():
        graph = gg.build(mlp(2, (8, 16, 8))[0], 16)
    places = []
    for _ in range(2):
        allocator = GraphAllocator(HOST)
        for t in (*graph.leafs, *graph.nodes):
            t.data, t.buffer = 0, None
        allocator.alloc_graph(graph)
        places.append([t.data - allocator.buffers[0].base for t in (*graph.leafs, *graph.nodes)])
    assert places[0] == places[1]


def test_s49_the_same_plan_every_time(model: Gpt2Headers) -> None:
    plans = []
    for _ in range(2):
        with graph_context():
            plans.append(GraphAllocator(HOST).measure(model.graph(10, 3)))
    assert plans[0].placements == plans[1].placements


def test_s77_reserve_n_over_two_buffer_types() -> None:
    class Other(type(HOST)):
        name, alignment = "other", 256

    other = Other()
    with room():
        x = gg.new_tensor(types.F32, 8, name="x")
        a = gg.cont(x).set_name("a")
        b = gg.cont(a).set_name("b")
        graph = gg.build(gg.add(b, b).set_name("c"), 16)
    allocator = GraphAllocator([HOST, other])
    assert allocator.misfit(graph) == "nothing is planned yet" and allocator.alloc_graph(graph) is False
    plan = allocator.reserve(graph, [0, 1, 1], [0])
    assert plan.sizes == [64, 512] and [b.usage for b in allocator.buffers] == ["compute", "compute"]
    assert [p.buffer_id for p in plan.placements] == [0, 0, 1, 1]
    assert allocator.alloc_graph(graph) and a.buffer is allocator.buffers[0] and b.buffer is allocator.buffers[1]
    kept = allocator.buffers[1]
    allocator.reserve(graph, [0, 0, 1], [0])
    assert allocator.buffers[1] is kept and allocator.get_buffer_size(1) == 512  # never shrinks
    for bad in ([0, 2, 1], [0, 1], [0, -1, 0]):
        with pytest.raises(ValueError, match="GraphAllocator: each node and leaf must have a buffer id below 2, got"):
            allocator.reserve(graph, bad, [0])
    with pytest.raises(ValueError, match="GraphAllocator: at least one buffer type must be given"):
        GraphAllocator([])


def test_s77_a_type_given_twice_has_one_buffer() -> None:
    with room():
        x = gg.new_tensor(types.F32, 8)
        graph = gg.build(gg.cont(gg.cont(x)), 16)
    allocator = GraphAllocator([HOST, HOST])
    allocator.reserve(graph, [0, 1], [1])
    assert allocator.get_buffer_size(0) > 0 and allocator.get_buffer_size(1) == 0
    assert allocator.alloc_graph(graph) and x.buffer is allocator.buffers[0]


def test_measure_allocates_nothing(model: Gpt2Headers) -> None:
    with graph_context():
        graph = model.graph(0, 512)
    allocator = GraphAllocator(HOST)
    assert allocator.measure(graph).sizes[0] > 1 << 26
    assert allocator.plan is None and allocator.buffers == [None] and allocator.get_buffer_size() == 0
    assert graph.nodes[0].data == 0


# -- in place ----------------------------------------------------------------------------------------------------------


def inplace_of(build: Callable[[Callable[..., Tensor]], Tensor | list[Tensor]]) -> str | None:
    """Name of the source that the tensor named "r" takes over."""
    with room() as context:
        graph = gg.build(build(lambda *ne, type=types.F32: gg.new_tensor(type, *ne)), 32)
    plan = GraphAllocator(HOST).measure(graph)
    assert context.n_objects
    return placed(graph, plan)["r"][2]


def test_inplace_over_the_first_source_that_allows_it() -> None:
    assert (
        inplace_of(lambda t: gg.add(gg.cont(t(8, 2)).set_name("a"), gg.cont(t(8, 2)).set_name("b")).set_name("r"))
        == "a"
    )
    assert inplace_of(lambda t: gg.add(t(8, 2), gg.cont(t(8, 2)).set_name("b")).set_name("r")) == "b"


def test_inplace_needs_the_same_layout() -> None:
    assert inplace_of(lambda t: gg.add(t(8, 2), gg.cont(t(8, 1)).set_name("b")).set_name("r")) is None
    assert inplace_of(lambda t: gg.add(gg.permute(gg.cont(t(8, 2, 4)), 0, 2, 1, 3), t(8, 4, 2)).set_name("r")) is None


def test_inplace_needs_a_single_reader() -> None:
    def twice(t):
        a = gg.cont(t(8)).set_name("a")
        return gg.add(a, a).set_name("r")

    def later(t):
        a = gg.cont(t(8)).set_name("a")
        r = gg.add(a, t(8)).set_name("r")
        return gg.mul(gg.cont(r), a)

    def before(t):
        a = gg.cont(t(8)).set_name("a")
        b = gg.cont(a)
        return gg.mul(b, gg.add(a, t(8)).set_name("r"))

    assert inplace_of(twice) is None and inplace_of(later) is None and inplace_of(before) == "a"


def test_inplace_never_over_leafs_outputs_or_data_of_others() -> None:
    assert inplace_of(lambda t: gg.add(t(8), t(8)).set_name("r")) is None
    assert inplace_of(lambda t: gg.add(t(8).set_input(), t(8)).set_name("r")) is None
    assert inplace_of(lambda t: gg.add(gg.cont(t(8)).set_output(), t(8)).set_name("r")) is None

    def external(t):
        a = gg.cont(t(8))
        a.data = 4096
        return gg.add(a, t(8)).set_name("r")

    assert inplace_of(external) is None


def test_inplace_never_where_a_view_is_left() -> None:
    def views(t):
        a = gg.cont(t(8))
        v = gg.view_1d(a, 4, 0)
        r = gg.add(a, t(8)).set_name("r")
        return gg.mul(gg.cont(gg.view_1d(r, 4, 0)), v)

    assert inplace_of(views) is None


def test_inplace_through_a_view() -> None:
    def whole(t):
        return gg.add(gg.reshape_2d(gg.cont(t(16)), 8, 2).set_name("v"), t(8, 2)).set_name("r")

    def chain(t):
        return gg.add(gg.reshape_2d(gg.reshape_1d(gg.cont(t(4, 4)), 16), 8, 2).set_name("v"), t(8, 2)).set_name("r")

    def shifted(t):
        return gg.add(gg.view_1d(gg.cont(t(16)), 8, 32), t(8)).set_name("r")

    def read_beside(t):
        a = gg.cont(t(16))
        return gg.mul(
            gg.cont(a), gg.reshape_1d(gg.add(gg.reshape_2d(a, 8, 2).set_name("v"), t(8, 2)).set_name("r"), 16)
        )

    def read_after(t):
        a = gg.cont(t(16))
        return gg.mul(gg.reshape_1d(gg.add(gg.reshape_2d(a, 8, 2), t(8, 2)).set_name("r"), 16), a)

    def output(t):
        return gg.add(gg.reshape_2d(gg.cont(t(16)).set_output(), 8, 2), t(8, 2)).set_name("r")

    def output_view(t):
        return gg.add(gg.reshape_2d(gg.cont(t(16)), 8, 2).set_output(), t(8, 2)).set_name("r")

    assert inplace_of(whole) == "v" and inplace_of(chain) == "v" and inplace_of(read_beside) == "v"
    for build in (shifted, read_after, output, output_view):
        assert inplace_of(build) is None


def test_inplace_over_part_of_a_block_frees_the_rest() -> None:
    with room():
        a = gg.cont(gg.new_tensor(types.F32, 64)).set_name("a")
        r = gg.add(gg.view_1d(a, 8, 0), gg.new_tensor(types.F32, 8)).set_name("r")
        c = gg.cont(gg.cont(r)).set_name("c")
        graph = gg.build(gg.mul(c, r), 16)
    plan = GraphAllocator(HOST).measure(graph)
    p = placed(graph, plan)
    assert p["r"][:2] == (p["a"][0], 32) and p["c"][0] < p["a"][0] + 256
    assert plan.sizes == [256 + 32 + 256]


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def test_inputs_lie_first_and_are_still_there_at_the_end() -> None:
    with room():
        x = gg.new_tensor(types.F32, 8, name="x").set_input()
        t = gg.cont(x)
        for _ in range(4):
            t = gg.cont(t)
        graph = gg.build(t, 16)
    plan = GraphAllocator(HOST).measure(graph)
    assert plan.placements[0][:4] == ("planned", 0, 0, 32) and plan.sizes == [96]
    assert all(p.offset >= 32 for p in plan.placements[1:])


def test_params_lie_where_no_node_writes() -> None:
    with room():
        a = gg.cont(gg.cont(gg.cont(gg.new_tensor(types.F32, 8))))
        w = gg.new_tensor(types.F32, 8, name="w").set_param()
        graph = gg.build(gg.mul(a, w), 16)
    plan = GraphAllocator(HOST).measure(graph)
    at = dict(zip([*graph.leafs, *graph.nodes], plan.placements, strict=True))
    assert w in graph.nodes and all(p.offset != at[w].offset for t, p in at.items() if t is not w)


def test_outputs_are_kept() -> None:
    def offsets(mark: bool) -> list[int]:
        with room():
            a = gg.cont(gg.new_tensor(types.F32, 8))
            if mark:
                a.set_output()
            graph = gg.build(gg.cont(gg.cont(gg.cont(a))), 16)
        return [p.offset for p in GraphAllocator(HOST).measure(graph).placements]

    assert offsets(False).count(32) == 2 and offsets(True).count(32) == 1


def test_results_that_nobody_reads_are_kept() -> None:
    with room():
        x = gg.new_tensor(types.F32, 8)
        results = [gg.cont(x) for _ in range(4)]
        graph = gg.build(results, 16)
    assert [p.offset for p in GraphAllocator(HOST).measure(graph).placements] == [0, 32, 64, 96, 128]


def test_what_a_view_shows_lives_as_long_as_the_view_is_read() -> None:
    with room():
        a = gg.cont(gg.new_tensor(types.F32, 8))
        v = gg.reshape_2d(gg.reshape_2d(a, 2, 4), 4, 2)
        b = gg.cont(gg.cont(gg.cont(gg.new_tensor(types.F32, 8))))
        graph = gg.build([a, b, gg.cont(v)], 16)
    plan = GraphAllocator(HOST).measure(graph)
    at = dict(zip([*graph.leafs, *graph.nodes], plan.placements, strict=True))
    assert at[v].kind == "view" and at[v].buffer_id == -1
    assert at[a].last == graph.nodes.index(v) + 1
    clash = [t for t, p in at.items() if p.kind == "planned" and t is not a and p.offset == at[a].offset]
    assert clash == [] or all(at[t].first > at[a].last for t in clash)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("cpu", "types must be a BufferType such as gg.backend.host_buffer_type(), got 'cpu'"),
        (5, "types must be a BufferType such as gg.backend.host_buffer_type(), got 5"),
        ([host_buffer_type(), None], "types[1] must be a BufferType such as gg.backend.host_buffer_type(), got None"),
    ],
)
def test_what_is_no_buffer_type(given: object, text: str) -> None:
    with pytest.raises(TypeError) as raised:
        GraphAllocator(given)
    assert str(raised.value) == f"GraphAllocator: {text}"
    with pytest.raises(TypeError, match=r"^TensorAllocator: buffer must be a Buffer such as"):
        TensorAllocator(given)
    with pytest.raises(TypeError, match=r"^GraphAllocator: graph must be a Graph, got"):
        GraphAllocator(host_buffer_type()).alloc_graph(given)


def test_a_view_of_something_unknown_is_an_error() -> None:
    with room():
        a = gg.new_tensor(types.F32, 8, name="hidden")
        v = view_tensor(gg.view_1d(a, 8, 0).op, a, (), (0,))
        graph = gg.build(gg.cont(v), 16)
    with pytest.raises(
        ValueError,
        match=r"GraphAllocator: a viewed tensor must be in the graph or have data of its own, got none \('hidden'\)",
    ):
        GraphAllocator(HOST).reserve(graph)


def test_a_view_of_something_in_another_graph_of_the_allocator_is_an_error() -> None:
    allocator = GraphAllocator(HOST)
    graph = chain()
    allocator.alloc_graph(graph)
    a = graph.nodes[0]
    with room():
        v = view_tensor(gg.view_1d(a, 8, 0).op, a, (), (0,))
        other = gg.build(gg.cont(v), 16)
    with pytest.raises(ValueError, match=r"must be in the graph or have data of its own, got none \('a'\)"):
        allocator.alloc_graph(other)
    assert GraphAllocator(HOST).alloc_graph(other)  # for another allocator it is data like any other


def test_empty_tensors() -> None:
    with room():
        x = gg.new_tensor(types.F32, 8, 0)
        graph = gg.build(gg.cont(gg.cont(x)), 16)
    allocator = GraphAllocator(HOST)
    assert allocator.reserve(graph).sizes == [0] and allocator.alloc_graph(graph)
    assert all(t.data for t in (x, *graph.nodes)) and graph.nodes[-1].numpy().shape == (1, 1, 0, 8)


def _random_graph(rng: random.Random) -> Graph:
    """Chains, broadcasts, views of views, writes through views, marks."""
    tensors: list[Tensor] = [gg.new_tensor(types.F32, 4, 4, name=f"x{i}") for i in range(3)]
    graph = Graph(128)
    for t in tensors:
        if rng.random() < 0.4:
            t.set_input()
    for _ in range(rng.randrange(6, 40)):
        a, b = rng.choice(tensors[-6:]), rng.choice(tensors)
        pick = rng.randrange(9)
        if pick == 0:
            t = gg.cont(a)
        elif pick in (1, 2) and a.ne == b.ne:
            t = gg.add(a, b)
        elif pick == 3 and a.is_contiguous:
            t = gg.reshape_2d(a, a.nelements // 2, 2)
        elif pick == 4:
            t = gg.permute(a, 1, 0, 2, 3)
        elif pick == 5:
            t = gg.view_1d(a, 4, 0) if a.is_contiguous else gg.cont(a)
        elif pick == 6 and a.ne == b.ne and a.view_src is None and a.op is not NONE:
            t = gg.cpy(b, gg.view_2d(a, *a.ne[:2], a.nb[1], 0))
            graph.build_forward_expand(t)
        elif pick == 7:
            t = gg.cont(a)
        else:
            t = gg.mul(a, a)
        if rng.random() < 0.1:
            t.set_output()
        tensors.append(t)
    results = [t for t in tensors if rng.random() < 0.2] + [tensors[-1]]
    for t in results:
        graph.build_forward_expand(t)
    return graph


def _check_plan(graph: Graph, plan: Plan) -> None:
    """Play the plan with a stamp on each byte: who wrote there last."""
    tensors = [*graph.leafs, *graph.nodes]
    index = {t: i for i, t in enumerate(tensors)}
    memory = np.full(plan.sizes[0], -1)

    def owner(t: Tensor) -> int:
        return index[t if t.view_src is None else t.view_src]

    def where(t: Tensor) -> slice:
        p = plan.placements[owner(t)]
        start = p.offset + t.view_offs
        assert t.view_offs + t.nbytes <= p.size
        return slice(start, start + t.nbytes)

    for t in graph.leafs:
        memory[where(t)] = owner(t)
    for t in graph.nodes:
        for s in t.src:
            assert (memory[where(s)] == owner(s)).all(), f"{s.name} was overwritten before {t.name} read it"
        if t.op is not NONE and not t.op.view:
            memory[where(t)] = owner(t)
    for t in tensors:
        if t.op is NONE or t.flags & FLAG_OUTPUT or graph.use_counts[t] == 0:
            assert (memory[where(t)] == owner(t)).all(), f"{t.name} was overwritten before the end"


def test_random_graphs() -> None:
    taken = 0
    for seed in range(150):
        with room(200, 128):
            graph = _random_graph(random.Random(seed))
        plan = GraphAllocator(HOST).measure(graph)
        _check_plan(graph, plan)
        taken += sum(p.inplace >= 0 for p in plan.placements)
    assert taken > 50


# -- when a plan serves ------------------------------------------------------------------------------------------------


def chain(n: int = 8, *, swap: bool = False, view: bool = False, out: bool = False, other: bool = False) -> Graph:
    with room():
        x, y = gg.new_tensor(types.F32, n, 2, name="x").set_input(), gg.new_tensor(types.F32, n, 2, name="y")
        a, b = gg.cont(x).set_name("a"), gg.cont(y).set_name("b")
        c = gg.mul(b, a) if swap else gg.mul(a, b)
        if out:
            a.set_output()
        d = gg.permute(c, 1, 0, 2, 3) if view else gg.cont(c)
        return gg.build(gg.relu(d) if other else gg.cont(d), 16)


def test_s76_a_smaller_graph_fits() -> None:
    allocator = GraphAllocator(HOST)
    allocator.reserve(chain(16))
    assert allocator.misfit(chain(16)) is None and allocator.misfit(chain(4)) is None
    assert allocator.misfit(chain(17)) == "128 bytes are planned for 'x', got 136"


@pytest.mark.parametrize("change", ["swap", "view", "out", "other"])
def test_s75_s76_another_structure_does_not_fit(change: str) -> None:
    allocator = GraphAllocator(HOST)
    allocator.reserve(chain(16))
    graph = chain(4, **{change: True})
    assert "is planned with" in allocator.misfit(graph) and allocator.needs_realloc(graph)
    assert allocator.alloc_graph(graph) and not allocator.needs_realloc(graph)


def test_s76_counts() -> None:
    allocator = GraphAllocator(HOST)
    allocator.reserve(chain())
    graph = chain()
    with room():
        graph.build_forward_expand(gg.cont(graph.nodes[-1]))
    assert allocator.misfit(graph) == "5 nodes and 2 leafs are planned, got 6 and 2"


def test_external_data_is_part_of_the_plan() -> None:
    allocator = GraphAllocator(HOST)
    allocator.reserve(chain())
    with_data = chain()
    memory = HOST.new_buffer(64)
    with_data.leafs[0].data, with_data.leafs[0].buffer = memory.base, memory
    assert allocator.misfit(with_data) == "'x' is planned with external False, got True"
    allocator.reserve(with_data)
    assert allocator.misfit(with_data) is None
    assert allocator.misfit(chain()) == "'x' is planned with external True, got False"
    assert allocator.alloc_graph(with_data) and with_data.leafs[0].data == memory.base


def test_the_layouts_of_inplace_nodes_are_part_of_the_plan() -> None:
    def graph(n: int) -> Graph:
        with room():
            a = gg.cont(gg.new_tensor(types.F32, n, 4)).set_name("a")
            v = gg.view_2d(a, 4, 4, a.nb[1], 0).set_name("v")
            return gg.build(gg.mul(v, gg.new_tensor(types.F32, 4, 4)).set_name("r"), 16)

    allocator = GraphAllocator(HOST)
    packed = graph(4)
    assert placed(packed, allocator.reserve(packed))["r"][2] == "v"
    allocator.plan.placements[:] = [p._replace(size=1 << 12) for p in allocator.plan.placements]
    assert allocator.misfit(graph(8)) == "'r' is planned in place of 'v', whose layout differs now"


def test_allocating_the_same_graph_again_moves_nothing() -> None:
    graph, allocator = chain(), GraphAllocator(HOST)
    allocator.alloc_graph(graph)
    places = [t.data for t in (*graph.leafs, *graph.nodes)]
    graph.leafs[0].set(3.0)
    assert not allocator.needs_realloc(graph) and allocator.alloc_graph(graph)
    assert [t.data for t in (*graph.leafs, *graph.nodes)] == places and graph.leafs[0].numpy().sum() == 48


def test_a_graph_moves_with_a_larger_plan() -> None:
    small, allocator = chain(4), GraphAllocator(HOST)
    allocator.alloc_graph(small)
    old = allocator.buffers[0]
    large = chain(64)
    allocator.alloc_graph(large)
    assert allocator.buffers[0] is not old and small.leafs[0].buffer is old  # old memory lives while it is pointed at
    small.leafs[0].numpy()
    allocator.alloc_graph(small)
    assert all(t.buffer is allocator.buffers[0] for t in (*small.leafs, *small.nodes))


def test_own_data_of_another_allocator_is_external() -> None:
    first, second = GraphAllocator(HOST), GraphAllocator(HOST)
    graph = chain()
    first.alloc_graph(graph)
    plan = second.measure(graph)
    assert {p.kind for p in plan.placements} == {"external"} and plan.sizes == [0]


def test_views_of_external_data_are_set() -> None:
    with room():
        w = gg.new_tensor(types.F32, 8, 4)
    with room():
        v = gg.view_2d(w, 8, 2, w.nb[1], 64)
        graph = gg.build(gg.cont(v), 16)
    fill(w.context)
    assert v.data == 0
    GraphAllocator(HOST).alloc_graph(graph)
    assert v.data == w.data + 64 and v.buffer is w.buffer


def test_out_of_memory_leaves_no_plan() -> None:
    class Full(type(HOST)):
        def new_buffer(self, size: int, usage: str = "any") -> Buffer:
            raise MemoryError

    allocator = GraphAllocator(Full())
    for _ in range(2):
        with pytest.raises(MemoryError):
            allocator.alloc_graph(chain())
    assert allocator.plan is None and allocator.needs_realloc(chain())


def test_buffers_are_reset_before_tensors_move_in() -> None:
    calls: list[str] = []

    class Watched(Buffer):
        __slots__ = ()

        def reset(self) -> None:
            calls.append("reset")

        def init_tensor(self, tensor: Tensor) -> None:
            calls.append(tensor.name)

    class WatchedType(BufferType):
        name = "watched"

        def new_buffer(self, size: int, usage: str = "any") -> Buffer:
            return Watched(self, HOST.new_buffer(size).array, usage)

    GraphAllocator(WatchedType()).alloc_graph(chain())
    assert calls[:3] == ["reset", "x", "y"] and len(calls) == 8


def test_tensors_keep_the_buffer_alive() -> None:
    def make() -> Tensor:
        graph = chain()
        GraphAllocator(HOST).alloc_graph(graph)
        return graph.leafs[0].set(np.arange(16).reshape(2, 8))

    x = make()
    gc.collect()
    junk = [np.full(512, 255, np.uint8) for _ in range(64)]
    assert x.numpy().ravel().tolist() == list(range(16)) and junk


def test_flags_are_part_of_the_plan() -> None:
    allocator = GraphAllocator(HOST)
    allocator.reserve(chain())
    graph = chain()
    graph.leafs[1].flags |= FLAG_INPUT
    assert allocator.misfit(graph) == "'y' is planned with marks 0, got 1"


def test_planning_is_fast(model: Gpt2Headers) -> None:
    """About 2 ms for 487 nodes; the limit leaves room for a busy machine."""
    with graph_context():
        graph = model.graph(0, 8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        GraphAllocator(HOST).measure(graph)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02
