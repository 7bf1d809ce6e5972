"""The scheduler's passes by their rules, with backends that only answer questions."""

from __future__ import annotations

import pytest

import ggjit as gg
from ggjit import types
from ggjit.alloc import TensorAllocator
from ggjit.backend import Buffer, BufferType, host_buffer_type
from ggjit.graph import Graph
from ggjit.sched_passes import Assignments, assign_by_data, graph_inputs, split_graph
from ggjit.tensor import Tensor

HOST = host_buffer_type()


# -- backends that only answer -----------------------------------------------------------------------------------------


class FarType(BufferType):
    is_host = False

    def __init__(self, name: str) -> None:
        self.name = name

    def new_buffer(self, size: int, usage: str = "any") -> Buffer:
        return Buffer(self, None, usage, 1 << 60, size)  # type: ignore[arg-type]


class Fake:
    """A device and backend in one: a name, memory of its own, a set of ops (None: all)."""

    def __init__(self, name: str, ops: set[str] | None = None, type: BufferType | None = None) -> None:
        self.name, self.ops, self.device = name, ops, self
        self.type = type or FarType(name)
        self.also: set[BufferType] = set()
        self.wants: set[str] = set()

    def buffer_type(self) -> BufferType:
        return self.type

    def supports(self, node: Tensor) -> bool:
        return node.op.view or self.ops is None or node.op.name in self.ops

    def supports_buffer_type(self, type: BufferType) -> bool:
        return type is self.type or type in self.also

    def offloads(self, node: Tensor) -> bool:
        return node.op.name in self.wants

    def synchronize(self) -> None:
        pass


def fake_cpu() -> Fake:
    return Fake("cpu", type=HOST)


class Builder:
    """A graph whose weights lie where the test says."""

    def __init__(self) -> None:
        self.context = gg.Context(1 << 20, no_alloc=True)

    def weight(self, type: BufferType, *ne: int, name: str = "w", usage: str = "weights") -> Tensor:
        with self.context:
            t = gg.new_tensor(types.F32, *ne, name=name)
        TensorAllocator(type.new_buffer(type.padded_size(t), usage)).alloc(t)
        return t

    def leaf(self, *ne: int, name: str = "x", type: gg.Type = types.F32) -> Tensor:
        with self.context:
            return gg.new_tensor(type, *ne, name=name)

    def graph(self, *results: Tensor) -> Graph:
        with self.context:
            return gg.build(list(results), 128)


def passes(graph: Graph, *backends: Fake, **more) -> Assignments:
    return Assignments(graph, backends, [b.type for b in backends], **more).run()


def reason(a: Assignments, t: Tensor) -> tuple[str, str]:
    return a.backends[a.ids[t]].name, a.reasons[t]


# -- passes ------------------------------------------------------------------------------------------------------------


def test_s85_twelve_nodes() -> None:
    """As in figure 16: passes 3 and 4 place no node, two splits for each side, one tensor copied for each cut."""
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    ids = b.leaf(3, name="ids", type=types.I32).set_input()
    wte = b.weight(HOST, 8, 16, name="wte")
    w = [b.weight(t, 8, 8, name=f"w{i}") for i, t in enumerate((HOST, gpu.type, gpu.type, HOST))]
    g = [b.weight(t, 8, name=f"g{i}") for i, t in enumerate((HOST, gpu.type))]
    with b.context:
        x0 = gg.get_rows(wte, ids)
        x1 = gg.rms_norm(x0, 1e-5)
        x2 = gg.mul(x1, g[0])
        x3 = gg.mul_mat(w[0], x2)
        x4 = gg.relu(x3)
        x5 = gg.mul_mat(w[1], x4)
        x6 = gg.relu(x5)
        x7 = gg.mul_mat(w[2], x6)
        x8 = gg.mul(x7, g[1])
        x9 = gg.scale(x8, 2.0)
        x10 = gg.mul_mat(w[3], x9)
        x11 = gg.soft_max(x10)
    graph = b.graph(x11)
    assert graph.nodes == [x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11]
    a = passes(graph, gpu, cpu)
    node_ids = {name: [ids.get(t) for t in graph.nodes] for name, ids in a.history.items()}
    _, n = 0, None
    assert node_ids["assign_by_data"] == [1, n, 1, 1, n, 0, n, 0, 0, n, 1, n]
    assert node_ids["expand_assignments"] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert node_ids["upgrade_assignments"] == node_ids["assign_sources"] == node_ids["expand_assignments"]
    assert [a.reasons[t] for t in (x0, x1, x2, x4, x6, x9, x11)] == [
        "1.wgt0", "2.down", "1.wgt1", "2.gpu_up", "2.gpu_down", "2.gpu_down", "2.down",
    ]  # fmt: skip
    assert reason(a, ids) == ("cpu", "1.inp") and reason(a, w[1]) == ("gpu", "1.dst")
    found = split_graph(a)
    assert [(s.backend_id, s.first, s.end, s.reason) for s in found.splits] == [
        (1, 0, 4, "first"), (0, 4, 10, "backend"), (1, 10, 12, "backend"),
    ]  # fmt: skip
    assert [(c.tensor, c.backend_id) for c in found.copies] == [(x3, 0), (x9, 1)]
    assert found.reads == {x4: {x3: 0}, x10: {x9: 1}}


def test_s85_pass_1_rules() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    cache, w = b.weight(gpu.type, 8, 8, name="cache", usage="any"), b.weight(gpu.type, 8, 8)
    x, inp = b.leaf(8, 8), b.leaf(8, 8, name="inp").set_input()
    plain = b.weight(HOST, 8, 8, name="plain", usage="any")
    with b.context:
        view = gg.view_1d(cache, 8, 32)
        written = gg.cpy(gg.view_1d(x, 8, 0), view)
        marked = gg.scale(x, 2.0).set_input()
        product = gg.mul_mat(w, x)
        other = gg.mul_mat(plain, x)  # not weights: the rule says nothing
    a = Assignments(b.graph(written, marked, product, other, gg_add(b, inp, inp)), [gpu, cpu], [gpu.type, HOST])
    assign_by_data(a)
    assert reason(a, cache) == ("gpu", "1.dst") and reason(a, view) == ("gpu", "1.vsrc")
    assert reason(a, written) == ("gpu", "1.vsrc") and reason(a, marked) == ("cpu", "1.inp")
    assert reason(a, inp) == ("cpu", "1.inp") and reason(a, product) == ("gpu", "1.wgt0")
    assert other not in a.ids and x not in a.ids


def gg_add(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    with b.context:
        return gg.add(x, y)


def test_d7_user_placement_stays_and_rope_ignores_its_factors() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    w, factors = b.weight(gpu.type, 8, 8), b.weight(gpu.type, 4, name="factors")
    x, pos = b.leaf(8, 1, 3), b.leaf(3, name="pos", type=types.I32)
    with b.context:
        product = gg.mul_mat(w, gg.reshape_2d(x, 8, 3))
        turned = gg.rope_ext(x, pos, factors, 8, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    a = passes(b.graph(product), gpu, cpu, user={product: 1})
    assert reason(a, product) == ("cpu", "user")
    a = Assignments(b.graph(turned), [gpu, cpu], [gpu.type, HOST])
    a.run()
    assert turned not in a.history["assign_by_data"] and a.reasons[turned] == "3.best"


def test_d7_op_offload() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    gpu.wants = {"mul_mat"}
    b = Builder()
    w = b.weight(HOST, 8, 8)
    with b.context:
        product = gg.mul_mat(w, gg.relu(b.leaf(8, 3)))
    graph = b.graph(product)
    a = passes(graph, gpu, cpu)
    assert reason(a, product) == ("gpu", "1.off") and reason(a, w) == ("cpu", "1.dst")
    assert [c.tensor for c in split_graph(a).copies] == [w]
    assert reason(passes(graph, gpu, cpu, op_offload=False), product) == ("cpu", "1.wgt0")


def test_s85_pass_2_leaves_out_what_is_not_supported() -> None:
    gpu, cpu = Fake("gpu", {"mul_mat", "scale"}), fake_cpu()
    b = Builder()
    w = b.weight(gpu.type, 8, 8)
    with b.context:
        x0 = gg.scale(b.leaf(8, 3), 2.0)
        x1 = gg.mul_mat(w, x0)
        x2 = gg.relu(x1)
        x3 = gg.transpose(x2)
        x4 = gg.scale(gg.cont(x3), 2.0)
    graph = b.graph(x4)
    a = passes(graph, gpu, cpu)
    assert [a.history["expand_assignments"].get(t) for t in graph.nodes] == [0, 0, None, None, None, 0]
    # its one source lies on the gpu, where it has no kernel
    assert reason(a, x2) == ("cpu", "3.best") and reason(a, x3) == ("cpu", "4.vsrc")
    assert [reason(a, t)[1] for t in (x0, x1, x4)] == ["2.gpu_up", "1.wgt0", "2.gpu_down"]
    assert reason(a, graph.leafs[0])[0] == "gpu"


def test_d7_pass_3() -> None:
    """A faster backend of the same memory (BLAS beside the CPU) takes over; the unassigned follow most sources."""
    blas, cpu = Fake("blas", {"mul_mat"}, HOST), fake_cpu()
    b = Builder()
    w = b.weight(HOST, 8, 8)
    with b.context:
        y = gg.mul_mat(w, gg.relu(b.leaf(8, 3)))
        z = gg.mul_mat(gg.relu(y), y)
    graph = b.graph(z)
    a = passes(graph, blas, cpu)
    assert reason(a, y) == ("blas", "1.wgt0") and reason(a, z) == ("blas", "2.gpu_down")
    a = passes(graph, blas, cpu, user={y: 1, graph.nodes[0]: 1})
    assert reason(a, y) == ("cpu", "user") and reason(a, z) == ("blas", "3.upg")
    assert not split_graph(a).copies  # all is host memory

    one, two, cpu = Fake("one", {"mul_mat"}), Fake("two", {"mul_mat", "add"}), fake_cpu()
    b = Builder()
    w1, w2 = b.weight(one.type, 8, 8), b.weight(two.type, 8, 8)
    with b.context:
        x = b.leaf(8, 8)
        p, q = gg.mul_mat(w1, x), gg.mul_mat(w2, x)
        y = gg.add(q, q)
    a = Assignments(b.graph(p, y), [one, two, cpu], [one.type, two.type, HOST], user={p: 0})
    a.run()
    assert reason(a, y) == ("two", "2.gpu_down")


def test_s85_pass_4() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    w, x, unread = b.weight(gpu.type, 8, 8), b.leaf(8, 3), b.leaf(8, name="unread")
    with b.context:
        y = gg.mul_mat(w, gg.view_2d(x, 8, 2, 32, 32))
    a = passes(b.graph(y, unread), gpu, cpu)
    assert reason(a, x) == ("gpu", "4.cur") and a.reasons[unread] == "4.unread" and a.ids[unread] == 1
    b = Builder()
    with b.context:
        y = gg.relu(b.leaf(8, 3))
    assert reason(passes(b.graph(y), gpu, cpu), y) == ("gpu", "3.best")


def test_nodes_that_write_run_where_they_write() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    w = b.weight(HOST, 8, 8)
    with b.context:
        y = gg.mul_mat(w, b.leaf(8, 3))
        z = gg.scale(y, 2.0, inplace=True)
    a = passes(b.graph(z), gpu, cpu, user={z: 0})
    assert reason(a, y) == ("cpu", "1.wgt0") and reason(a, z) == ("cpu", "4.write")
    gpu = Fake("gpu", {"mul_mat"})
    a = passes(b.graph(z), gpu, cpu, user={y: 0})
    assert reason(a, y) == ("cpu", "4.write") and reason(a, z) == ("cpu", "3.best")
    gpu, cpu = Fake("gpu", {"scale"}), Fake("cpu", {"mul_mat"}, HOST)
    text = r"some backend must compute scale and all that writes where it writes, got \['gpu', 'cpu'\] \('z'\)"
    y.name, z.name = "y", "z"
    with pytest.raises(NotImplementedError, match=text):
        passes(b.graph(z), gpu, cpu)


def test_nodes_that_no_backend_computes() -> None:
    gpu, cpu = Fake("gpu", set()), Fake("cpu", {"add"}, HOST)
    b = Builder()
    with b.context:
        y = gg.relu(b.leaf(8)).set_name("y")
    with pytest.raises(
        NotImplementedError, match=r"Scheduler: some backend must compute unary, got \['gpu', 'cpu'\] \('y'\)"
    ):
        passes(b.graph(y), gpu, cpu)
    far = FarType("elsewhere")
    with b.context:
        z = gg.cpy(gg.view_1d(y, 4, 0), gg.view_1d(b.weight(far, 8), 4, 0)).set_name("z")
    with pytest.raises(
        NotImplementedError, match="Scheduler: some backend must read the memory of the tensor, got a else"
    ):
        passes(b.graph(z), gpu, cpu)


# -- splits ------------------------------------------------------------------------------------------------------------


def test_d7_a_foreign_weight_begins_a_split() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    gpu.wants = {"mul_mat"}
    b = Builder()
    w = [b.weight(HOST, 8, 8, name=f"w{i}") for i in range(3)]
    with b.context:
        x = b.leaf(8, 3)
        for each in w:
            x = gg.relu(gg.mul_mat(each, x))
    found = split_graph(passes(b.graph(x), gpu, cpu))
    assert [(s.first, s.end, s.reason) for s in found.splits] == [(0, 2, "first"), (2, 4, "weight"), (4, 6, "weight")]
    assert [c.tensor for c in found.copies] == w and [s.inputs for s in found.splits] == [[0], [1], [2]]


def test_d7_at_most_so_many_inputs_a_split() -> None:
    gpu, cpu = Fake("gpu"), fake_cpu()
    b = Builder()
    inputs = [b.leaf(8, name=f"x{i}").set_input() for i in range(35)]
    w = b.weight(gpu.type, 8, 8)
    with b.context:
        x = gg.mul_mat(w, inputs[0])
        for i in inputs[1:]:
            x = gg.add(x, i)
    a = passes(b.graph(x), gpu, cpu)
    for most in (30, 10):
        found = split_graph(a, most)
        assert [len(s.inputs) for s in found.splits] == [most] * (35 // most) + [5]
        assert [s.reason for s in found.splits] == ["first"] + ["inputs"] * (35 // most)
    assert graph_inputs(a) == {t: [0] for t in inputs}


def test_a_copy_serves_until_its_source_is_written() -> None:
    gpu, cpu = Fake("gpu", {"mul_mat"}), fake_cpu()
    b = Builder()
    cache = b.weight(HOST, 8, 8, name="cache", usage="any")
    w = b.weight(gpu.type, 8, 8)
    with b.context:
        past = gg.reshape_2d(cache, 8, 8)
        y0 = gg.mul_mat(past, gg.mul_mat(w, b.leaf(8)))
        y1 = gg.mul_mat(past, gg.relu(y0))
        stored = gg.cpy(gg.relu(y1), gg.view_1d(cache, 8, 0))
    graph = b.graph(y1, stored)
    with b.context:
        y2 = gg.mul_mat(past, gg.relu(y1))
    graph.build_forward_expand(y2)
    found = split_graph(passes(graph, gpu, cpu, user={y2: 0}))
    assert [c.tensor for c in found.copies].count(past) == 2
    assert found.reads[y0][past] == found.reads[y1][past] != found.reads[y2][past]
