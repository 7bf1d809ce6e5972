"""Plans over several buffers of one type, where one may only hold so many bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from gpt2_headers import TINY, gpt2
from test_alloc import _check_plan, _random_graph, room
from test_sched import BATCHES, CPU, place_gpt2, set_inputs

import ggjit as gg
from ggjit import types
from ggjit.alloc import Chunks, GraphAllocator
from ggjit.backend import host_buffer_type
from ggjit.backends.process import ProcessDevice
from ggjit.dev import memory
from ggjit.examples.gpt2.graph import LOGITS, graph_context
from ggjit.plan import Plan
from ggjit.sched import Scheduler

HOST = host_buffer_type()


class Small(type(HOST)):
    """Host memory in small buffers."""

    name = "small"

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size

    def new_buffer(self, size: int, usage: str = "any"):
        assert size <= self.max_size
        return HOST.new_buffer(size, usage)


def test_blocks_in_chunks() -> None:
    free = Chunks(256)
    assert [free.take(n) for n in (128, 64, 128, 32, 256, 64)] == [
        (0, 0), (0, 128), (1, 0), (0, 192), (2, 0), (1, 128),  # open memory of the first chunk that has room
    ]  # fmt: skip
    free.give(1, 0, 128)
    free.give(0, 128, 64)
    assert free.take(64) == (0, 128)  # the smallest that is large enough, in whatever chunk
    assert free.take(96) == (1, 0) and free.peaks == [224, 192, 256]
    free.give(2, 0, 256)
    assert free.take(128) == (2, 0)  # no chunk grows
    with pytest.raises(MemoryError, match="must fit a buffer of at most 256 bytes, got 288"):
        free.take(288)


def check_chunks(plan: Plan, max_size: int) -> None:
    assert plan.sizes[0] == sum(plan.chunks[0]) and max(plan.chunks[0]) <= max_size
    for p in plan.placements:
        if p.kind == "planned" and p.size:
            assert 0 <= plan.offset_in_chunk(p) <= plan.chunks[0][p.chunk] - p.size


@pytest.mark.parametrize("max_size", [64, 160, 1 << 20])
def test_random_graphs_in_chunks(max_size: int) -> None:
    n_chunks = []
    for seed in range(25):
        with room(200, 128):
            graph = _random_graph(random.Random(seed))
        plan = GraphAllocator(Small(max_size)).measure(graph)
        check_chunks(plan, max_size)
        _check_plan(graph, plan)
        n_chunks.append(len(plan.chunks[0]))
        if len(plan.chunks[0]) == 1:
            assert plan.lower_bound() <= plan.sizes[0] <= plan.best_fit[0]
    assert max(n_chunks) > 2 or max_size > 160


def test_what_fits_one_buffer_when_packed_is_not_cut() -> None:
    model = gpt2(sizes=TINY)
    with graph_context():
        graph = model.graph(TINY.n_ctx - 5, 5)
    whole = GraphAllocator(HOST).measure(graph)
    for max_size in (whole.sizes[0], whole.sizes[0] - 32, whole.sizes[0] // 3):
        plan = GraphAllocator(Small(max_size)).measure(graph)
        check_chunks(plan, max_size)
        assert (len(plan.chunks[0]) == 1) == (max_size == whole.sizes[0])
    graph = memory.GRAPHS["SmolLM2 135M", 32]()
    whole = GraphAllocator(HOST).measure(graph)
    assert whole.sizes[0] < whole.best_fit[0]
    for max_size in (whole.sizes[0], whole.sizes[0] - 32, whole.sizes[0] // 2):
        check_chunks(GraphAllocator(Small(max_size)).measure(graph), max_size)


def test_a_graph_runs_in_chunks_which_grow_together() -> None:
    def build(n: int) -> tuple[gg.Graph, gg.Tensor, gg.Tensor]:
        with gg.Context(1 << 18, no_alloc=True):
            x = gg.new_tensor(types.F32, n, name="x").set_input()
            parts = [gg.scale(x, float(k)) for k in range(1, 7)]
            y = parts[0]
            for part in parts[1:]:
                y = gg.add(gg.sqr(y), part)
            for part in parts:  # all are alive to the end
                y = gg.add(y, part)
            return gg.build(y.set_output(), 64), x, y

    allocator = GraphAllocator(Small(2048))
    seen = []
    for n in (64, 128, 64):
        graph, x, y = build(n)
        assert allocator.alloc_graph(graph)
        x.set(0.25)
        graph.compute(2)
        value = 0.25
        for k in range(2, 7):
            value = value**2 + 0.25 * k
        assert np.allclose(y.numpy(), value + 0.25 * 21)
        seen.append([b.size for b in allocator.chunks[0]])
        assert allocator.get_buffer_size() == sum(seen[-1]) and allocator.buffers == [allocator.chunks[0][0]]
        assert all(any(b.contains(t.data, t.nbytes) for b in allocator.chunks[0]) for t in (*graph.leafs, *graph.nodes))
    assert len(seen[0]) == 1 and len(seen[1]) > 1 and seen[2] == seen[1]


def test_a_tensor_beyond_one_buffer_is_refused() -> None:
    with gg.Context(1 << 16, no_alloc=True):
        graph = gg.build(gg.sqr(gg.new_tensor(types.F32, 100, name="x")), 16)
    with pytest.raises(
        MemoryError, match=r"GraphAllocator: a tensor must fit a buffer of at most 256 bytes, got 416 \('x'\)"
    ):
        GraphAllocator(Small(256)).reserve(graph)


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessDevice]:
    made = ProcessDevice()
    yield made
    made.close()


@pytest.mark.full
@pytest.mark.parametrize("n_copies", [1, 2])
def test_chunks_on_a_device(device: ProcessDevice, n_copies: int) -> None:
    """GPT-2 whose results lie in many small buffers of another process: the same bits."""
    results = []
    for max_size in (1 << 62, 4096):
        model, n_past, out = gpt2(sizes=TINY), 0, []
        device.buffer_type().max_size = 1 << 62
        place_gpt2(model, device.buffer_type(), 2)
        device.buffer_type().max_size = max_size
        sched = Scheduler([device.new_backend(), CPU], n_copies=n_copies)
        with graph_context():
            sched.reserve(model.graph(TINY.n_ctx - 8, 8))
        for tokens in BATCHES:
            with graph_context():
                graph = model.graph(n_past, len(tokens))
            sched.alloc_graph(graph)
            set_inputs(graph, tokens, n_past)
            sched.compute(graph)
            out.append(graph.get_tensor(LOGITS).numpy().copy())
            n_past += len(tokens)
        results.append(out)
        chunks = sched.allocator.chunks[0]
        assert (len(chunks) > 1) == (max_size == 4096) and all(b.size <= max_size for b in chunks)
        assert sched.get_buffer_size(sched.backends[0]) == sum(b.size for b in chunks)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
