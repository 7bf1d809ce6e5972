"""The scheduler at work: the same results wherever nodes run, and no copy more than an independent count expects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gpt2_headers import TINY, Gpt2Headers, gpt2
from test_graph import mlp
from test_sched_passes import Fake

import ggjit as gg
from ggjit import types
from ggjit.alloc import GraphAllocator, TensorAllocator
from ggjit.backend import Buffer, BufferType, alloc_ctx_tensors, buffer_of, devices, host_buffer_type
from ggjit.backends.process import ProcessDevice
from ggjit.examples.gpt2.graph import LOGITS, POSITIONS, TOKENS, graph_context
from ggjit.examples.gpt2.main_sched import cache_on_device, on_device
from ggjit.graph import Graph
from ggjit.op import NONE
from ggjit.sched import Scheduler
from ggjit.tensor import BUFFER_AT, DATA_AT, Tensor

HOST = host_buffer_type()
CPU = devices()[-1].new_backend(1)


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessDevice]:
    device = ProcessDevice()
    yield device
    device.close()


@pytest.fixture
def sched(device: ProcessDevice) -> Scheduler:
    device.counts.clear()
    return Scheduler([device.new_backend(), CPU])


# -- an independent count of copies ------------------------------------------------------------------------------------


def expected_copies(sched: Scheduler, graph: Graph) -> list[tuple[int, int, int, int]]:
    """Copies that a run needs, from nothing but where tensors lie and where nodes run.

    Returns:
        (to the device, bytes, from the device, bytes)
    """

    def place(t: Tensor) -> bool:
        """Does the tensor lie on the device?"""
        buffer = buffer_of(t)
        return buffer is not None and not buffer.type.is_host

    counts = [0, 0, 0, 0]
    good: list[tuple[Tensor, bool]] = []  # what lies where it was copied to
    for t in graph.nodes:
        if t.op.view:
            continue
        runs = sched.get_tensor_backend(t).name != "cpu"
        for s in dict.fromkeys(s for s in t.src if s is not None):
            if place(s) != runs and (s, runs) not in good:
                good.append((s, runs))
                counts[0 if runs else 2] += 1
                counts[1 if runs else 3] += s.nbytes
        changed = t if t.view_src is None else t.view_src
        good = [(s, r) for s, r in good if (s if s.view_src is None else s.view_src) is not changed]
    return counts


def counted(device: ProcessDevice, run: Callable[[], object]) -> list[int]:
    device.counts.clear()
    run()
    c = device.counts
    return [c.to_device, c.to_device_nbytes, c.from_device, c.from_device_nbytes]


# -- running -----------------------------------------------------------------------------------------------------------


def put(tensors: list[Tensor], type: BufferType, usage: str = "weights") -> None:
    """Tensors in one buffer, as main-sched allocates them."""
    if tensors:
        buffer = type.new_buffer(sum(type.padded_size(t) for t in tensors) + 64, usage)
        allocator = TensorAllocator(buffer)
        for t in tensors:
            allocator.alloc(t)


@pytest.mark.parametrize("n_far", [0, 1, 2])
def test_s86_mlp_on_two_devices(device: ProcessDevice, sched: Scheduler, n_far: int) -> None:
    rng = np.random.default_rng(0)
    with gg.Context(1 << 20):
        y, leafs = mlp(3, (16, 32, 8))
        values = {n: rng.standard_normal(t.ne[::-1]).astype(np.float32) for n, t in leafs.items()}
        for n, t in leafs.items():
            t.set(values[n])
        want = gg.build(y).compute(1).nodes[-1].numpy().copy()
    with gg.Context(1 << 20, no_alloc=True):
        y, leafs = mlp(3, (16, 32, 8))
        graph = gg.build(y.set_output())
    leafs["x"].set_input()
    far = ["w2", "b2", "w1", "b1"][: 2 * n_far]
    put([leafs[n] for n in far], device.buffer_type())
    put([t for n, t in leafs.items() if n not in far and n != "x"], HOST)
    sched.alloc_graph(graph)
    for n, t in leafs.items():
        t.set(values[n])
    got = counted(device, lambda: sched.compute(graph))
    assert np.array_equal(y.numpy(), want)
    assert got == expected_copies(sched, graph) and sched.n_splits == [1, 2, 1][n_far]
    assert got[:2] == [[0, 0], [1, 3 * 32 * 4], [1, 3 * 16 * 4]][n_far]  # relu's result; or the input


def place_gpt2(model: Gpt2Headers, far: BufferType, n_gpu_layers: int) -> None:
    """The placement of main-sched."""
    n_layer, weights = model.sizes.n_layer, list(model.weights.tensors.values())
    on_far = {t for t in weights if on_device(t.name, n_layer, n_gpu_layers)}
    put([t for t in weights if t in on_far], far)
    put([t for t in weights if t not in on_far], HOST)
    alloc_ctx_tensors(model.kv, far if cache_on_device(n_layer, n_gpu_layers) else HOST)
    rng = np.random.default_rng(1)
    for t in weights:
        t.set(0.1 * rng.standard_normal(t.ne[::-1]).astype(np.float32))


BATCHES = ([5, 1, 7, 3, 9, 11, 2, 8], [4, 6, 10], [12])


@pytest.fixture(scope="module")
def gpt2_logits() -> list[np.ndarray]:
    """What the CPU alone computes, without a scheduler."""
    model, out, n_past = gpt2(sizes=TINY), [], 0
    place_gpt2(model, HOST, 0)
    for tokens in BATCHES:
        with graph_context():
            graph = model.graph(n_past, len(tokens))
        GraphAllocator(HOST).alloc_graph(graph)
        set_inputs(graph, tokens, n_past)
        graph.compute(1)
        out.append(graph.get_tensor(LOGITS).numpy().copy())
        n_past += len(tokens)
    return out


def set_inputs(graph: Graph, tokens: list[int], n_past: int) -> None:
    graph.get_tensor(TOKENS).set(tokens)
    graph.get_tensor(POSITIONS).set(range(n_past, n_past + len(tokens)))


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, 3])
def test_s82_s83_gpt2_by_layers(device, sched, gpt2_logits, n_gpu_layers: int) -> None:
    model, n_past = gpt2(sizes=TINY), 0
    place_gpt2(model, device.buffer_type(), n_gpu_layers)
    with graph_context():
        sizes = sched.reserve(model.graph(TINY.n_ctx - 8, 8))
    assert (sizes[0] > 0) == (n_gpu_layers > 0) and sizes[1] > 0
    for tokens, want in zip(BATCHES, gpt2_logits, strict=True):
        with graph_context():
            graph = model.graph(n_past, len(tokens))
        sched.reset()
        sched.alloc_graph(graph)
        set_inputs(graph, tokens, n_past)
        got = counted(device, lambda graph=graph: sched.compute(graph))
        assert got == expected_copies(sched, graph)
        assert np.array_equal(graph.get_tensor(LOGITS).numpy(), want)
        n_past += len(tokens)
    assert [sched.get_buffer_size(b) for b in sched.backends] == sizes  # the reserve was enough


def test_s82_sides_of_gpt2(device: ProcessDevice, sched: Scheduler) -> None:
    """Figure 15 in small: the last layer's weights are on the device, and what reads them runs there."""
    model = gpt2(sizes=TINY)
    place_gpt2(model, device.buffer_type(), 1)
    with graph_context():
        graph = model.graph(0, 4)
    sched.split_graph(graph)
    for t in graph.nodes:
        weights = [s for s in t.src if s is not None and s in model.tensors.values() and "memory" not in s.name]
        if weights and not t.op.view:
            far = any(s.name.startswith(("blk.1.", "output")) for s in weights)
            assert sched.get_tensor_backend(t) is sched.backends[0 if far else 1], t
    assert "1.wgt0" in sched.current.describe() and "split 0: cpu, nodes 0 to" in sched.current.describe()
    found = sched.graph_inputs()
    assert {t.name: [b.name for b in v] for t, v in found.items()} == {TOKENS: ["cpu"], POSITIONS: ["cpu"]}


def test_s82_figure_15() -> None:
    """GPT-2 small, 4 of 12 layers on the GPU: layers 8 to 11 run there, with the cache on the CPU's side."""
    model, gpu = gpt2(), Fake("gpu")
    cpu = Fake("cpu", type=HOST)
    sched = Scheduler([gpu, cpu])  # type: ignore[list-item]
    allocators = [TensorAllocator(Buffer(t, None, "weights", 1 << 40, 1 << 40)) for t in (gpu.type, HOST)]
    cache = TensorAllocator(Buffer(HOST, None, "any", 1 << 42, 1 << 40))
    for name, t in model.tensors.items():
        far = name.startswith(("blk.8.", "blk.9.", "blk.10.", "blk.11.", "output"))
        (cache if "memory" in name else allocators[0 if far else 1]).alloc(t)
    with graph_context():
        graph = model.graph(992, 32)
    sched.alloc_graph(graph)
    where = {t.name: sched.get_tensor_backend(t).name for t in graph.nodes}
    assert [where[f"KQ-{il}"] for il in range(12)] == ["cpu"] * 8 + ["gpu"] * 4 and where[LOGITS] == "gpu"
    assert [sched.get_tensor_backend(t).name for t in graph.nodes if t.op.name == "cpy"] == ["cpu"] * 24
    run = sched.current
    copies = [
        (run.copies[k].tensor, run.splits[j].backend_id) for j in range(sched.n_splits) for k in run.splits[j].inputs
    ]
    assert [[t.name for t, i in copies if i == side and "-9" in t.name] for side in (0, 1)] == [
        ["V-9", "K-9"], ["Kcur-9", "Vcur-9"],
    ]  # fmt: skip
    to_gpu, from_gpu = ([t.nbytes for t, i in copies if i == side] for side in (0, 1))
    want = [len(to_gpu), sum(to_gpu), len(from_gpu), sum(from_gpu)]
    assert want == expected_copies(sched, graph)
    assert [s.backend_id for s in run.splits] == [1, 0] + [1, 0] * 4


def test_s84_reserve(sched: Scheduler, device: ProcessDevice) -> None:
    model = gpt2(sizes=TINY)
    place_gpt2(model, device.buffer_type(), 1)
    with graph_context():
        worst = model.graph(TINY.n_ctx - 8, 8)
    want = sched.reserve_size(worst)
    assert sched.get_buffer_size(sched.backends[0]) == 0 and sched.current is None
    assert sched.reserve(worst) == want and sched.current is None and sched.n_splits == 0
    assert all(t.data == 0 for t in worst.nodes if t.view_src is None)  # nothing is placed yet
    buffers = [sched.allocator.buffers[0], sched.allocator.buffers[1]]
    with graph_context():
        graph = model.graph(0, 2)
    sched.alloc_graph(graph)
    assert [sched.allocator.buffers[0], sched.allocator.buffers[1]] == buffers and sched.n_splits > 1
    for t in graph.nodes:
        if t.view_src is None:
            assert t.buffer is buffers[sched.current.assignments.ids[t]] and t.buffer.usage == "compute"


def test_s77_all_on_the_cpu_is_planned_like_a_graph_allocator(sched: Scheduler, device: ProcessDevice) -> None:
    model = gpt2(sizes=TINY)
    place_gpt2(model, device.buffer_type(), 0)
    with graph_context():
        graph = model.graph(8, 8)
    assert sched.reserve_size(graph) == [0, *GraphAllocator(HOST).measure(graph).sizes]


def structure(context: gg.Context) -> bytes:
    """The arena's bytes, save data and buffer of each record."""
    data = bytearray(context.buffer[: context.end])
    for t in context.tensors.values():
        for at in (BUFFER_AT, DATA_AT):
            data[t.offset + at : t.offset + at + 8] = bytes(8)
    return bytes(data)


def test_the_graph_is_not_modified(sched: Scheduler, device: ProcessDevice) -> None:
    model = gpt2(sizes=TINY)
    place_gpt2(model, device.buffer_type(), 1)
    with graph_context() as context:
        graph = model.graph(0, 4)
    before, weights = structure(context), bytes(model.weights.buffer)
    nodes, uses, n = list(graph.nodes), dict(graph.use_counts), context.n_objects
    sources = [t.src for t in nodes]
    for _ in range(2):
        sched.alloc_graph(graph)
        set_inputs(graph, [1, 2, 3, 4], 0)
        sched.compute(graph)
    assert structure(context) == before and context.n_objects == n and bytes(model.weights.buffer) == weights
    assert graph.nodes == nodes and graph.use_counts == uses and [t.src for t in nodes] == sources


def test_same_graph_again_is_not_split_again(sched: Scheduler, device: ProcessDevice) -> None:
    graph, x, y = two_sides(device)
    sched.alloc_graph(graph)
    first = sched.current
    for value in (1.0, 2.0):
        x.set(value)
        sched.compute(graph)
        assert sched.current is first and (y.numpy() == relu_of_two_products(value)).all()
    assert device.counts.graphs == 1 and device.counts.runs == 2
    graph, x, y = two_sides(device)
    sched.compute(graph)  # another one, without alloc_graph
    assert sched.current is not first and sched.current.graph is graph


def two_sides(device: ProcessDevice) -> tuple[Graph, Tensor, Tensor]:
    """relu(w1 (w0 x)), w0 on the CPU, w1 on the device."""
    with gg.Context(1 << 18, no_alloc=True):
        w0, w1 = gg.new_tensor(types.F32, 4, 4, name="w0"), gg.new_tensor(types.F32, 4, 4, name="w1")
        x = gg.new_tensor(types.F32, 4, name="x").set_input()
        put([w0], HOST)
        put([w1], device.buffer_type())
        y = gg.relu(gg.mul_mat(w1, gg.mul_mat(w0, x)))
        graph = gg.build(y)
    w0.set(1.0)
    w1.set(0.5)
    return graph, x, y


def relu_of_two_products(value: float) -> float:
    return 4 * 0.5 * 4 * value


# -- placement by the user, callbacks ----------------------------------------------------------------------------------


def test_set_tensor_backend(sched: Scheduler, device: ProcessDevice) -> None:
    graph, x, y = two_sides(device)
    far, cpu = sched.backends
    sched.set_tensor_backend(y, cpu)
    assert sched.get_tensor_backend(y) is cpu
    sched.alloc_graph(graph)
    x.set(3.0)
    assert counted(device, lambda: sched.compute(graph)) == expected_copies(sched, graph) == [1, 16, 1, 16]
    assert sched.get_tensor_backend(y) is cpu and y.buffer.type is HOST and (y.numpy() == 24).all()
    assert sched.get_tensor_backend(graph.nodes[1]) is far and sched.n_splits == 3
    sched.reset()
    sched.alloc_graph(graph)
    assert sched.get_tensor_backend(y) is far and sched.n_splits == 2
    with pytest.raises(ValueError, match=r"Scheduler: the backend must be one of \['process0', 'cpu'\], got"):
        sched.set_tensor_backend(y, device.new_backend())


def test_eval_callback(sched: Scheduler, device: ProcessDevice) -> None:
    graph, x, y = two_sides(device)
    sched.alloc_graph(graph)
    x.set(1.0)
    seen: list[tuple[str, bool, float | None]] = []

    def watch(t: Tensor, ask: bool) -> bool:
        seen.append((t.op.name, ask, None if ask else float(t.numpy().ravel()[0])))
        return t.op.name == "mul_mat"

    sched.set_eval_callback(watch)
    assert sched.compute(graph)
    want = [("mul_mat", True, None), ("mul_mat", False, 4.0), ("mul_mat", True, None), ("mul_mat", False, 8.0)]
    assert seen == [*want, ("unary", True, None)] and (y.numpy() == 8).all()
    sched.set_eval_callback(lambda t, ask: ask)
    device.counts.clear()
    assert not sched.compute(graph) and device.counts.runs == 0  # ended after the first node
    sched.set_eval_callback(None)
    x.set(2.0)
    assert sched.compute(graph) and (y.numpy() == 16).all()


def test_callback_sees_nodes_that_are_fused_otherwise(sched: Scheduler, device: ProcessDevice) -> None:
    rng = np.random.default_rng(0)
    with gg.Context(1 << 18, no_alloc=True):
        x, g = gg.new_tensor(types.F32, 64, 2, name="x").set_input(), gg.new_tensor(types.F32, 64, name="g")
        norm = gg.rms_norm(x, 1e-5)
        y = gg.mul(norm, g)
        graph = gg.build(y)
    put([g], device.buffer_type())
    sched.alloc_graph(graph)
    values = rng.standard_normal((2, 64)).astype(np.float32)
    x.set(values)
    g.set(2.0)
    want = values / np.sqrt((values.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    seen = {}
    sched.set_eval_callback(lambda t, ask: ask or seen.update({t.op.name: t.numpy().copy()}) or True)
    sched.compute(graph)
    assert np.allclose(seen["rms_norm"], want, 1e-6, 1e-6) and np.allclose(seen["mul"], 2 * want, 1e-6, 1e-6)
    sched.set_eval_callback(None)
    sched.compute(graph)
    assert np.array_equal(y.numpy(), seen["mul"])


# -- what must not go wrong --------------------------------------------------------------------------------------------


def test_offloaded_weights(device: ProcessDevice) -> None:
    far = ProcessDevice("eager", offload_columns=4)
    sched = Scheduler([far.new_backend(), CPU])
    with gg.Context(1 << 18, no_alloc=True):
        w = [gg.new_tensor(types.F32, 16, 16, name=f"w{i}") for i in range(2)]
        put(w, HOST)
        results = {}
        for n in (3, 4):
            x = gg.new_tensor(types.F32, 16, n, name="x").set_input()
            graph = gg.build(gg.mul_mat(w[1], gg.relu(gg.mul_mat(w[0], x))))
            sched.alloc_graph(graph)
            for t in w:
                t.set(np.random.default_rng(0).standard_normal((16, 16)))
            x.set(np.ones((n, 16)))
            far.counts.clear()
            sched.compute(graph)
            results[n] = graph.nodes[-1].numpy().copy(), far.counts.to_device_nbytes
    assert results[3][1] == 0 and results[4][1] == 2 * 1024 + 256
    assert np.array_equal(results[4][0][0, 0, 0], results[3][0][0, 0, 0])
    far.close()


def test_leafs_without_marks_and_arenas(sched: Scheduler, device: ProcessDevice) -> None:
    """A leaf lies where it is read; tensors with data in an arena are the host's."""
    with gg.Context(1 << 18):
        a = gg.new_tensor(types.F32, 4, name="a").set([1, 2, 3, 4])
        with gg.Context(1 << 18, no_alloc=True):
            w, m = gg.new_tensor(types.F32, 4, name="w"), gg.new_tensor(types.F32, 4, name="m")
            y = gg.add(gg.mul(gg.mul(w, m), a), gg.from_numpy(np.float32([10, 10, 10, 10])))
            graph = gg.build(y)
    put([w], device.buffer_type())
    sched.alloc_graph(graph)
    assert m.buffer.type is device.buffer_type()
    w.set(2.0)
    m.set(3.0)
    sched.compute(graph)
    assert y.numpy().ravel().tolist() == [16, 22, 28, 34]
    assert sched.get_tensor_backend(a) is CPU and sched.n_splits == 1


def test_what_the_graph_keeps(sched: Scheduler, device: ProcessDevice) -> None:
    with gg.Context(1 << 18, no_alloc=True):
        w, x = gg.new_tensor(types.F32, 4, name="w"), gg.new_tensor(types.F32, 4, name="x").set_input()
        y = x
        for _ in range(4):
            y = gg.sqr(gg.add(y, w))
        graph = gg.build(y)
    put([w], device.buffer_type())
    w.set(1.0)
    results = {}
    for kept in ([], graph.nodes):
        graph.kept = frozenset(kept)
        sched.alloc_graph(graph)
        x.set(0.5)
        sched.compute(graph)
        results[len(kept)] = [float(t.numpy().ravel()[0]) for t in graph.nodes]
    value, want = 0.5, []
    for _ in range(4):
        want += [value + 1, (value + 1) ** 2]
        value = want[-1]
    assert np.allclose(results[8], want, 1e-6) and not np.allclose(results[0], want, 1e-6)
    assert results[0][-1] == results[8][-1]


def test_several_devices(device: ProcessDevice) -> None:
    other = ProcessDevice("process1")
    sched = Scheduler([device.new_backend(), other.new_backend(), CPU])
    with gg.Context(1 << 18, no_alloc=True):
        w = [gg.new_tensor(types.F32, 4, 4, name=f"w{i}") for i in range(3)]
        for t, type in zip(w, (other.buffer_type(), device.buffer_type(), other.buffer_type()), strict=True):
            put([t], type)
            t.set(0.5)
        x = gg.new_tensor(types.F32, 4, name="x").set_input()
        y = x
        for t in w:
            y = gg.mul_mat(t, y)
        graph = gg.build(y)
    sched.alloc_graph(graph)
    x.set(1.0)
    sched.compute(graph)
    assert (y.numpy() == 8).all() and sched.n_splits == 3
    other.close()


def test_lost_device(device: ProcessDevice) -> None:
    lost = ProcessDevice("lost")
    sched = Scheduler([lost.new_backend(), CPU])
    graph, x, _ = two_sides(lost)
    sched.alloc_graph(graph)
    x.set(1.0)
    lost.channel.process.kill()
    with pytest.raises(RuntimeError, match="lost: the child process must be alive"):
        sched.compute(graph)
    lost.close()


def test_arguments(device: ProcessDevice) -> None:
    far = device.new_backend()
    with pytest.raises(ValueError, match=r"backends must be 1 to 16, the last one the CPU, got \['process0'\]"):
        Scheduler([far])
    with pytest.raises(ValueError, match=r"backends must be 1 to 16, the last one the CPU, got \[\]"):
        Scheduler([])
    with pytest.raises(ValueError, match=r"got \['process0', 'process0'"):
        Scheduler([far] * 16 + [CPU])
    with pytest.raises(ValueError, match="each backend must have a buffer type that it reads, got"):
        Scheduler([far, CPU], [HOST, HOST])
    assert Scheduler([CPU]).n_copies == 1


# -- random graphs -----------------------------------------------------------------------------------------------------


def random_graph(seed: int) -> tuple[Graph, list[Tensor], dict[str, Tensor]]:
    """Products, sums, views, copies into a cache and in-place ops, in the innermost context."""
    r = random.Random(seed)
    weights = [gg.new_tensor(types.F32, 8, 8, name=f"w{i}") for i in range(5)]
    cache = gg.new_tensor(types.F32, 8, 8, name="cache")
    inputs = [gg.new_tensor(types.F32, 8, 8, name=f"x{i}") for i in range(2)]
    inputs[0].set_input()
    pool, graph = [*inputs], Graph(256)
    for _ in range(25):
        a, b = r.choice(pool), r.choice(pool)
        kind = r.choice(("mul_mat", "mul_mat", "add", "relu", "transpose", "view", "store", "load", "inplace", "norm"))
        if kind == "mul_mat":
            new = gg.mul_mat(r.choice(weights), a)
        elif kind == "add":
            new = gg.add(a, b)
        elif kind == "relu":
            new = gg.relu(a)
        elif kind == "norm":
            new = gg.mul(gg.rms_norm(a, 1e-5), gg.view_1d(r.choice(weights), 8, 32 * r.randrange(8)))
        elif kind == "transpose":
            new = gg.cont(gg.transpose(a))
        elif kind == "view":
            new = gg.add(a, gg.view_2d(b, 8, 1, 32, 32 * r.randrange(8)))
        elif kind == "store":
            row = r.randrange(8)
            graph.build_forward_expand(gg.cpy(gg.view_1d(a, 8, 32 * row), gg.view_1d(cache, 8, 32 * (7 - row))))
            continue
        elif kind == "load":
            new = gg.scale(gg.view_2d(cache, 8, 8, 32, 0), 0.5)
        else:
            new = gg.scale(gg.add(a, b), 0.5, inplace=True)
        graph.build_forward_expand(new)
        pool.append(new)
    graph.build_forward_expand(gg.add(pool[-1], pool[-2]).set_output())
    return graph, [*weights, cache], {t.name: t for t in inputs if t in graph.use_counts}


def fill(tensors: list[Tensor]) -> None:
    rng = np.random.default_rng(2)
    for t in sorted(tensors, key=lambda t: t.name):
        t.set(rng.standard_normal(t.ne[::-1]).astype(np.float32) * 0.4)


OPS = ("mul_mat", "add", "unary", "cont", "scale", "mul", "rms_norm", "cpy")


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_anywhere(device: ProcessDevice, seed: int) -> None:
    r = random.Random(1000 + seed)
    with gg.Context(1 << 20, no_alloc=True):
        graph, given, inputs = random_graph(seed)
    put(given, HOST)
    GraphAllocator(HOST).alloc_graph(graph)
    fill([*given, *inputs.values()])
    graph.compute(1, fuse=False)
    want, cache = graph.nodes[-1].numpy().copy(), given[-1].numpy().copy()

    device.ops = None if seed % 3 == 0 else frozenset(r.sample(OPS, 5))
    try:
        sched = Scheduler([device.new_backend(), CPU], max_inputs=r.choice((10, 30)))
        with gg.Context(1 << 20, no_alloc=True):
            graph, given, inputs = random_graph(seed)
        for t in given:
            is_cache = t.name == "cache"
            far = r.random() < 0.5 and not (is_cache and device.ops is not None and "cpy" not in device.ops)
            put([t], device.buffer_type() if far else HOST, "any" if is_cache else "weights")
        if seed % 2:
            for t in graph.nodes:
                if not t.op.view and r.random() < 0.3:
                    i = r.randrange(2)
                    if sched.backends[i].supports(t):
                        sched.set_tensor_backend(t, sched.backends[i])
        sched.alloc_graph(graph)
        for _ in range(2):
            fill([*given, *inputs.values()])
            got = counted(device, lambda: sched.compute(graph))
            assert got == expected_copies(sched, graph)
            assert np.array_equal(graph.nodes[-1].numpy(), want) and np.array_equal(given[-1].numpy(), cache)
    finally:
        device.ops = None
    assert all(t.op is not NONE for t in graph.nodes)
