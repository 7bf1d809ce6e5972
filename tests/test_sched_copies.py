"""What the scheduler copies beyond whole tensors once: used experts alone, and several places for graphs under way."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from gpt2_headers import TINY, gpt2
from test_sched import BATCHES, CPU, HOST, counted, expected_copies, place_gpt2, put, set_inputs

import ggjit as gg
from ggjit import types
from ggjit.backends.process import ProcessDevice
from ggjit.examples.gpt2.graph import LOGITS, POSITIONS, TOKENS, graph_context
from ggjit.graph import Graph
from ggjit.sched import Scheduler
from ggjit.tensor import Tensor

N_EMBD, N_FF, N_EXPERT, N_USED = 32, 16, 10, 2


@pytest.fixture(scope="module")
def far() -> Iterator[ProcessDevice]:
    """Takes products of 3 tokens and more with weights of the host's memory."""
    made = ProcessDevice("far", offload_columns=3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessDevice]:
    made = ProcessDevice("other")
    yield made
    made.close()


@pytest.fixture
def sched(far: ProcessDevice) -> Scheduler:
    far.counts.clear()
    return Scheduler([far.new_backend(), CPU])


# -- used experts ------------------------------------------------------------------------------------------------------


def runs(ids: np.ndarray) -> list[int]:
    """How many neighbours there are in each run of the numbers that occur, by looking at each number."""
    found, last = [], -2
    for e in range(N_EXPERT):
        if (ids == e).any():
            if e != last + 1:
                found.append(0)
            found[-1] += 1
            last = e
    return found


def mixture(sizes: list[tuple[int, int]], make: str = "I32") -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights of all experts, ids of a token's experts, and tokens."""
    weights = [gg.new_tensor(types.F32, n_in, n_out, N_EXPERT, name=f"w{i}") for i, (n_in, n_out) in enumerate(sizes)]
    ids = gg.new_tensor(types.by_name(make), N_USED, 3, name="ids").set_input()
    return weights, ids, gg.new_tensor(types.F32, N_EMBD, 1, 3, name="x").set_input()


def fill(tensors: list[Tensor], seed: int = 0) -> None:
    for t in tensors:
        t.set(np.random.default_rng(seed + t.nelements).standard_normal(t.ne[::-1]).astype(np.float32))


@pytest.mark.parametrize("used", [[[3, 4], [4, 5], [9, 0]], [[7, 7], [7, 7], [7, 7]], [[0, 1], [2, 3], [4, 5]]])
def test_only_used_experts_are_copied(far: ProcessDevice, sched: Scheduler, used: list[list[int]]) -> None:
    with gg.Context(1 << 18, no_alloc=True):
        (w,), ids, x = mixture([(N_EMBD, N_FF)])
        put([w], HOST)
        y = gg.mul_mat_id(w, x, ids)
        graph = gg.build(y, 16)
    sched.alloc_graph(graph)
    fill([w, x])
    ids.set(used)
    got = counted(far, lambda: sched.compute(graph))
    parts = runs(np.array(used))
    assert got == [len(parts) + 2, sum(parts) * w.nb[2] + ids.nbytes + x.nbytes, 0, 0]
    values = w.numpy()[0].astype(np.float64)  # [expert, n_ff, n_embd]
    want = np.einsum("tkme,te->tkm", values[np.array(used)], x.numpy()[0, :, 0].astype(np.float64))
    assert np.abs(y.numpy()[0] - want).max() < 1e-4
    assert "copy   w0: at most 20480 bytes from cpu" in sched.current.describe()
    ids.set([[6, 6], [6, 8], [8, 6]])
    assert counted(far, lambda: sched.compute(graph))[1] == 2 * w.nb[2] + ids.nbytes + x.nbytes
    assert np.abs(y.numpy()[0, 2, 0] - values[8] @ x.numpy()[0, 2, 0].astype(np.float64)).max() < 1e-4


def block(router: Tensor, weights: list[Tensor], x: Tensor) -> Tensor:
    """A feed-forward block of experts that are chosen in the graph."""
    order = gg.argsort(gg.mul_mat(router, gg.reshape_2d(x, N_EMBD, 3)), 1)
    ids = gg.view_2d(order, N_USED, 3, order.nb[1], 0)
    gate, up, down = weights
    return gg.mul_mat_id(down, gg.swiglu_split(gg.mul_mat_id(gate, x, ids), gg.mul_mat_id(up, x, ids)), ids)


@pytest.mark.parametrize("given", [True, False])
def test_experts_that_the_device_chooses(far: ProcessDevice, sched: Scheduler, given: bool) -> None:
    """The ids are made there, so a split ends before their first use; they are fetched once for all three products."""
    results = []
    for on in (HOST, far.buffer_type()):
        with gg.Context(1 << 18, no_alloc=True):
            weights, _, x = mixture([(N_EMBD, N_FF), (N_EMBD, N_FF), (N_FF, N_EMBD)])
            router = gg.new_tensor(types.F32, N_EMBD, N_EXPERT, name="router")
            put([router], on)
            put(weights, HOST)
            if not given:
                put([x], on, "any")
            graph = gg.build(block(router, weights, x), 64)
        order = next(t for t in graph.nodes if t.op.name == "argsort")
        engine = sched if on is not HOST else Scheduler([CPU])
        graph.kept = frozenset([order])
        engine.alloc_graph(graph)
        fill([*weights, router, x])
        got = counted(far, lambda engine=engine, graph=graph: engine.compute(graph))
        results.append(graph.nodes[-1].numpy().copy())
        chosen = order.numpy()[0, 0, :, :N_USED]
    assert np.array_equal(*results) and np.ptp(results[0]) > 0
    assert [s.reason for s in sched.current.splits] == ["first", "weight" if given else "ids", "weight", "weight"]
    parts = runs(chosen)
    span = 4 * (2 * N_EXPERT + N_USED)
    want = sum(parts) * sum(t.nb[2] for t in weights) + 2 * given * x.nbytes
    assert got == [3 * len(parts) + 2 * given, want, 1, span]  # tokens as they are, and reshaped for the router
    assert all(n < N_EXPERT for n in parts)


def test_ids_that_change_are_read_again_and_a_copy_serves_one_node(far: ProcessDevice, sched: Scheduler) -> None:
    with gg.Context(1 << 18, no_alloc=True):
        (w,), ids, x = mixture([(N_EMBD, N_FF)])
        later = gg.new_tensor(types.I32, N_USED, 3, name="later").set_input()
        put([w], HOST)
        first = gg.mul_mat_id(w, x, ids).set_output()
        graph = Graph(32).build_forward_expand(first)
        graph.build_forward_expand(gg.cpy(later, ids))
        second = gg.mul_mat_id(w, x, ids).set_output()
        third = gg.mul_mat_id(w, gg.scale(x, 2.0), ids).set_output()
        graph.build_forward_expand(second).build_forward_expand(third)
    sched.alloc_graph(graph)
    fill([w, x])
    ids.set([[0, 1], [1, 0], [0, 0]])
    later.set([[4, 8], [8, 6], [4, 4]])
    got = counted(far, lambda: sched.compute(graph))
    # tokens and ids before and after; experts 0 and 1 together, then 4, 6 and 8 for each of two products
    assert got == [3 + 1 + 2 * 3, x.nbytes + 2 * ids.nbytes + (2 + 2 * 3) * w.nb[2], 0, 0]
    assert len(sched.current.picked) == 3
    values, tokens = w.numpy()[0].astype(np.float64), x.numpy()[0, :, 0].astype(np.float64)
    for y, numbers, factor in ((first, [[0, 1], [1, 0], [0, 0]], 1), (second, later, 1), (third, later, 2)):
        chosen = numbers.numpy()[0, 0] if isinstance(numbers, Tensor) else np.array(numbers)
        assert np.abs(y.numpy()[0] - factor * np.einsum("tkme,te->tkm", values[chosen], tokens)).max() < 1e-4


def test_experts_that_are_not_there_are_refused_by_the_kernel(far: ProcessDevice, sched: Scheduler) -> None:
    with gg.Context(1 << 18, no_alloc=True):
        (w,), ids, x = mixture([(N_EMBD, N_FF)])
        put([w], HOST)
        graph = gg.build(gg.mul_mat_id(w, x, ids), 16)
    sched.alloc_graph(graph)
    fill([w, x])
    ids.set([[0, 1], [N_EXPERT, 2], [3, -1]])
    with pytest.raises(IndexError, match=r"mul_mat_id: .* got 10 at position 2"):
        sched.compute(graph)


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures(far: ProcessDevice, sched: Scheduler, seed: int) -> None:
    """Weights on both sides, ids from either: the results are the CPU's."""
    r = random.Random(seed)
    sides = [r.random() < 0.5 for _ in range(4)]

    def run(engine: Scheduler, far_type: object) -> tuple[np.ndarray, list[int]]:
        with gg.Context(1 << 18, no_alloc=True):
            weights, _, x = mixture([(N_EMBD, N_FF), (N_EMBD, N_FF), (N_FF, N_EMBD)])
            router = gg.new_tensor(types.F32, N_EMBD, N_EXPERT, name="router")
            for t, side in zip([router, *weights], sides, strict=True):
                put([t], far_type if side else HOST)
            y = block(router, weights, x)
            for _ in range(2):
                second = gg.view_2d(y, N_EMBD, 3, y.nb[2], y.nb[1])
                y = block(router, weights, gg.cont_3d(second, N_EMBD, 1, 3))
            graph = gg.build(y, 128)
        engine.alloc_graph(graph)
        fill([*weights, router, x], seed)
        moved = counted(far, lambda: engine.compute(graph))
        return graph.nodes[-1].numpy().copy(), moved

    want, _ = run(Scheduler([CPU]), HOST)
    for n_copies in (1, 3):
        engine = Scheduler([far.new_backend(), CPU], n_copies=n_copies)
        for _ in range(2):
            got, moved = run(engine, far.buffer_type())
            assert np.array_equal(got, want)
        whole = 3 * 3 * N_EXPERT * N_EMBD * N_FF * 4
        assert moved[1] < whole


# -- several graphs under way ------------------------------------------------------------------------------------------


def gpt2_runs(device: ProcessDevice, n_gpu_layers: int, **options: int) -> tuple[list[np.ndarray], list[list[int]]]:
    """Logits of batches, each started before the one before is waited for, and the addresses of their inputs."""
    sched = Scheduler([device.new_backend(), CPU], **options)
    model, n_past = gpt2(sizes=TINY), 0
    place_gpt2(model, device.buffer_type(), n_gpu_layers)
    with graph_context():
        sizes = sched.reserve(model.graph(TINY.n_ctx - 8, 8))
    out, places = [], []
    for tokens in (*BATCHES, [1], [2], [3]):
        with graph_context():
            graph = model.graph(n_past, len(tokens))
        sched.alloc_graph(graph)
        set_inputs(graph, tokens, n_past)
        places.append([graph.get_tensor(name).data for name in (TOKENS, POSITIONS)])
        assert counted(device, lambda graph=graph: sched.compute_async(graph)) == expected_copies(sched, graph)
        out.append(graph.get_tensor(LOGITS).numpy().copy())
        n_past += len(tokens)
        assert sched.allocator.reason in (None, "nothing is planned yet"), "planned once, whichever place is used"
    assert [sched.get_buffer_size(b) for b in sched.backends] == sizes
    return out, places


@pytest.mark.parametrize("n_gpu_layers", [1, 3])
def test_n_copies_changes_places_and_no_bit(other: ProcessDevice, n_gpu_layers: int) -> None:
    want, fixed = gpt2_runs(other, n_gpu_layers)
    assert len({tuple(p) for p in fixed}) == 1
    for n in (2, 4):
        got, places = gpt2_runs(other, n_gpu_layers, n_copies=n)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert places == [places[i % n] for i in range(6)] and len({tuple(p) for p in places}) == n


def test_n_copies_must_be_1_to_4() -> None:
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"Scheduler: n_copies must be 1 to 4, got {n}"):
            Scheduler([CPU], n_copies=n)


def two_stages(first: ProcessDevice, second: ProcessDevice) -> tuple[list[Tensor], Graph, Tensor]:
    with gg.Context(1 << 18, no_alloc=True):
        w = [gg.new_tensor(types.F32, 8, 8, name=f"w{i}") for i in range(2)]
        x = gg.new_tensor(types.F32, 8, name="x").set_input()
        put([w[0]], first.buffer_type())
        put([w[1]], second.buffer_type())
        y = gg.mul_mat(w[1], gg.relu(gg.mul_mat(w[0], x)))
        graph = gg.build(y.set_output(), 16)
    w[0].set(1.0)
    w[1].set(0.5)
    return w, graph, x


class Watched:
    """A device's backend that notes who waits."""

    def __init__(self, inner: object, log: list[str]) -> None:
        self.inner, self.log, self.name, self.device = inner, log, inner.name, inner.device

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.inner.synchronize()

    def compute(self, graph: Graph, fuse: bool | None = None) -> None:
        self.log.append("compute")
        self.inner.compute(graph, fuse)

    def record_event(self, event: object) -> None:
        self.log.append("record")
        self.inner.record_event(event)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process")
def test_a_stage_goes_on_while_the_next_one_is_busy(other: ProcessDevice) -> None:
    """The second device stands still: with two places, two graphs can be given to both, and the first one computes."""
    first, second = other, ProcessDevice("second")
    log: list[str] = []
    sched = Scheduler([first.new_backend(), Watched(second.new_backend(), log), CPU], n_copies=2)  # type: ignore[list-item]
    sched.reserve(two_stages(first, second)[1])
    log.clear()
    stages = [two_stages(first, second) for _ in range(2)]
    second.channel.wait()
    os.kill(second.pid, signal.SIGSTOP)
    rescue = threading.Timer(30, os.kill, (second.pid, signal.SIGCONT))  # who waits for it would wait for ever
    rescue.start()
    try:
        for value, (_, graph, x) in enumerate(stages, 1):
            sched.alloc_graph(graph)
            x.set(value)
            assert sched.compute_async(graph)
            first.channel.wait()  # it is done with its part
    finally:
        rescue.cancel()
        os.kill(second.pid, signal.SIGCONT)
    assert log == ["compute", "record"] * 2 and second.counts.runs == 2
    sched.synchronize()
    assert (stages[1][1].nodes[-1].numpy() == 2 * 8 * 0.5 * 8).all()
    second.close()


def test_after_all_is_done_single_graphs_have_the_first_place(far: ProcessDevice, other: ProcessDevice) -> None:
    sched = Scheduler([far.new_backend(), other.new_backend(), CPU], n_copies=3)
    _, graph, x = two_stages(far, other)
    seen = []
    for wait in (False, True, False, False):
        sched.alloc_graph(graph)
        seen.append(x.data)
        sched.compute_async(graph)
        if wait:
            sched.reset()
            sched.synchronize()
    assert seen == [seen[0], seen[1], seen[0], seen[1]] and seen[0] != seen[1]
