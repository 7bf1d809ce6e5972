"""What ggml's memory and graph are described to do, where it takes several modules: values measured on ggml itself."""

from __future__ import annotations

import gc
import tomllib
import weakref
from pathlib import Path

import numpy as np
import pytest
from gpt2_headers import SMALL, TINY, Gpt2Headers, f16_matrices, f32, gpt2

import ggjit as gg
from ggjit import types
from ggjit.alloc import GraphAllocator
from ggjit.backend import Buffer, alloc_ctx_tensors, devices, host_buffer_type
from ggjit.examples.gpt2 import main_backend
from ggjit.examples.gpt2.graph import POSITIONS, TOKENS, graph_context
from ggjit.examples.gpt2.model_file import ModelFile

HOST = host_buffer_type()


@pytest.fixture(scope="module")
def table_2() -> gg.Graph:
    """GPT-2 small with N = 5 new tokens after 3: L = 8."""
    with graph_context():
        return gpt2().graph(3, 5)


@pytest.mark.parametrize(
    ("name", "ne", "nb", "contiguous"),
    [
        ("Qcur-0", (768, 5, 1, 1), (4, 9216, 46080, 46080), False),  # S32
        ("Q-0", (64, 5, 12, 1), (4, 3072, 256, 15360), False),  # S33
        ("K-0", (64, 8, 12, 1), (4, 3072, 256, 24576), False),  # S34
        ("V-0", (8, 64, 12, 1), (3072, 4, 256, 24576), False),  # S35
        ("V_trans-0", (8, 64, 12, 1), (4, 32, 2048, 24576), True),  # S36
        ("KQ-0", (8, 5, 12, 1), (4, 32, 160, 1920), True),  # S37
        ("KQV-0", (64, 5, 12, 1), (4, 256, 1280, 15360), True),  # S39
        ("KQV_merged-0", (64, 12, 5, 1), (4, 1280, 256, 15360), False),  # S39
        ("kqv_out-0", (768, 5, 1, 1), (4, 3072, 15360, 15360), True),  # S39
    ],
)
def test_s32_to_s39_table_2(
    table_2: gg.Graph, name: str, ne: tuple[int, ...], nb: tuple[int, ...], contiguous: bool
) -> None:
    t = table_2.get_tensor(name)
    assert (t.ne, t.nb, t.is_contiguous) == (ne, nb, contiguous)
    assert t.is_transposed == (name == "V-0")


def test_s22_s34_offsets_into_the_cache() -> None:
    with graph_context():
        graph = gpt2().graph(3, 5)
    il, row = 7, 4 * SMALL.n_embd
    k = graph.get_tensor(f"K-{il}")
    assert k.view_src.name == "memory_k" and k.view_offs == row * il * SMALL.n_ctx
    writes = [t for t in graph.nodes if t.op.name == "cpy" and t.view_src.name == "memory_v"]
    assert [t.view_offs for t in writes] == [row * (il * SMALL.n_ctx + 3) for il in range(12)]


def test_s38_v_is_refused_until_it_is_copied() -> None:
    with graph_context():
        for length in (8, 1):
            cache = gg.new_tensor(types.F32, 64, 12, length)
            v = gg.permute(cache, 1, 2, 0, 3)
            weights = gg.new_tensor(types.F32, length, 5, 12)
            assert v.is_transposed and v.is_contiguous == (length == 1)
            with pytest.raises(ValueError, match="mul_mat: src0 must not be transposed, got nb"):
                gg.mul_mat(v, weights)
            assert gg.mul_mat(gg.cont(v), weights).ne == (64, 5, 12, 1)


def test_s40_the_chain_between_kq_and_kqv(table_2: gg.Graph) -> None:
    t, ops = table_2.get_tensor("KQV-0").src[1], []
    while t.name != "KQ-0":
        ops.append(t.op.name)
        t = t.src[0]
    assert ops == ["soft_max", "diag_mask_inf", "scale"]


def test_s48_s71_s78_counts_and_sizes() -> None:
    model = gpt2()
    assert model.weights.mem_size == 55936 and model.weights.used_mem() == 54832
    assert main_backend.n_tensors(SMALL) == 152 and model.weights.n_objects == 149
    with graph_context() as context:
        graph = model.graph(0, 32)
    assert context.used_mem() == 345168
    views = [t for t in graph.nodes if t.is_view]
    assert (graph.n_nodes, len(views), graph.n_nodes - len(views)) == (487, 180, 307)
    assert graph.n_leafs == 149 - 1 + 2 + 2 + 1  # weights, cache, inputs


def test_s107_light_metadata_heavy_data() -> None:
    model = gpt2(f16_matrices)
    headers = model.weights.used_mem() + model.kv.used_mem()
    data = sum(t.nbytes for t in model.tensors.values())
    assert headers < data / 5000


def test_s57_the_guide_s_example() -> None:
    with gg.Context(16 << 20) as context:
        x, a, b = (gg.new_tensor(types.F32, 1) for _ in range(3))
        x.set_param()
        f = gg.add(gg.mul(a, gg.mul(x, x)), b)
        graph = gg.Graph()
        graph.build_forward_expand(f)
        for t, value in ((x, 2), (a, 3), (b, 4)):
            t.set(value)
        assert graph.n_nodes == 4 and graph.n_leafs == 2
        assert f.numpy().item() == 0  # S56: nothing is computed before it is asked for
        graph.compute_with_ctx(context, 1)
        assert context.used_mem() == 84944  # S53
    assert f.numpy().item() == 16
    assert [o.kind for o in context.objects()] == ["tensor"] * 6 + ["graph", "work_buffer"]


def test_s55_s102_a_graph_runs_many_times_in_the_same_memory() -> None:
    with gg.Context(1 << 20) as context:
        x = gg.new_tensor(types.F32, 8)
        f = gg.add(gg.mul(x, x), x)
        graph = gg.build(f, 16)
    used = context.used_mem()
    for value in range(5):
        x.set(value)
        graph.compute(1)
        assert f.numpy().ravel().tolist() == [value * value + value] * 8
    assert context.used_mem() == used


def test_s69_headers_in_an_arena_data_from_an_allocator() -> None:
    with gg.Context(1 << 20, no_alloc=True):
        x = gg.new_tensor(types.F32, 8).set_input()
        f = gg.add(gg.mul(x, x), x)
        graph = gg.build(f, 16)
    allocator = GraphAllocator(HOST)
    assert allocator.alloc_graph(graph)
    x.set(3.0)
    for _ in range(2):  # inputs are still there for the second run
        graph.compute(2)
        assert f.numpy().ravel().tolist() == [12.0] * 8


def test_compute_allocates_what_has_no_data_and_what_is_added_later() -> None:
    with gg.Context(1 << 20, no_alloc=True):
        x = gg.from_numpy(np.arange(8, dtype=np.float32))
        f = gg.mul(x, x)
        graph = gg.build(f, 16)
        graph.compute(1)
        assert f.numpy().ravel().tolist() == [i * i for i in range(8)]
        g = gg.add(f, x)
        graph.build_forward_expand(g)
    graph.compute(1)
    assert g.numpy().ravel().tolist() == [i * i + i for i in range(8)]


def test_s54_an_arena_for_the_file_s_tensors_and_one_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parent / "data" / "models" / "gpt2.gguf"
    contexts: list[weakref.ref[gg.Context]] = []

    def made() -> gg.Context:
        context = graph_context()
        contexts.append(weakref.ref(context))
        return context

    file = ModelFile(path)
    monkeypatch.setattr(main_backend, "graph_context", made)
    engine = main_backend.MainBackend(file, 1)
    # one header for each tensor of the file and one for the output, which the file ties; ggml's count has three more
    headers, used = engine.loaded.ctx_w, (len(file.file.tensors) + 1) * gg.tensor_overhead()
    assert headers.used_mem() == used and headers.mem_size == used + 3 * gg.tensor_overhead()
    for n_past in (0, 2):
        engine.eval(n_past, [1, 2])
    gc.collect()
    assert len(contexts) == 3 and [c() for c in contexts] == [None] * 3  # the reserve's and two runs'
    assert headers.used_mem() == used
    file.close()


def test_s58_a_graph_is_a_list_without_loops(table_2: gg.Graph) -> None:
    before = [(t, t.src, t.op_params) for t in table_2.nodes]
    place = {t: i for i, t in enumerate(table_2.nodes)}
    for t in table_2.nodes:
        assert all(place.get(s, -1) < place[t] for s in (*t.src, t.view_src) if s is not None)
    GraphAllocator(HOST).measure(table_2)
    assert [(t, t.src, t.op_params) for t in table_2.nodes] == before


def test_s63_the_objects_and_how_they_know_each_other() -> None:
    """Fig. 7: context -> tensor -> buffer -> type; backend -> device -> type; graph -> tensors."""
    device = devices()[-1]
    backend = device.new_backend(1)
    with gg.Context(1 << 16, no_alloc=True) as context:
        a = gg.new_tensor(types.F32, 4, name="a")
        graph = gg.build(gg.sqr(a), 16)
    buffer = alloc_ctx_tensors(context, device.buffer_type())
    assert a.context is context and a in context.tensors.values() and graph.leafs == [a]
    assert a.buffer is buffer and isinstance(buffer, Buffer) and buffer.type is device.buffer_type()
    assert backend.device is device and backend.supports_buffer_type(buffer.type) and buffer.contains(a.data, 16)
    a.set([1, 2, 3, 4])
    backend.compute(graph)
    backend.synchronize()
    assert graph.nodes[0].numpy().ravel().tolist() == [1, 4, 9, 16]


def test_s62_lifetimes_weights_cache_intermediates(tiny: Gpt2Headers) -> None:
    """Weights and the cache outlive the graph's memory; intermediates share bytes."""
    with graph_context():
        graph = tiny.graph(0, 4)
    plan = GraphAllocator(HOST).measure(graph)
    tensors = [*graph.leafs, *graph.nodes]
    kinds = {t.name: p.kind for t, p in zip(tensors, plan.placements, strict=True)}
    assert {kinds[name] for name in tiny.tensors if name in kinds} == {"external"}
    planned = [p.size for t, p in zip(tensors, plan.placements, strict=True) if p.kind == "planned"]
    assert sum(planned) > 3 * plan.sizes[0]


# -- planned memory gives the same bits as a place for everything ------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Gpt2Headers:
    model = gpt2(f32, TINY)
    rng = np.random.default_rng(0)
    for context in (model.weights, model.kv):
        alloc_ctx_tensors(context, HOST)
        for t in context.tensors.values():
            t.set(rng.standard_normal(t.ne[::-1]) * 0.2 if context is model.weights else 0.0)
    return model


def evaluate(model: Gpt2Headers, graph: gg.Graph, tokens: list[int], n_past: int) -> np.ndarray:
    graph.get_tensor(TOKENS).set(tokens)
    graph.get_tensor(POSITIONS).set(range(n_past, n_past + len(tokens)))
    graph.compute(2)
    return graph.nodes[-1].numpy()[0, 0].copy()


def prompt_runs(model: Gpt2Headers, allocator: GraphAllocator | None, sizes: list[int]) -> np.ndarray:
    """Logits of a prompt of 14 tokens, given in runs."""
    for t in model.kv.tensors.values():
        t.set(0.0)
    tokens, n_past, logits = list(range(3, 17)), 0, []
    for n in sizes:
        with graph_context() if allocator is not None else gg.Context(1 << 23):
            graph = model.graph(n_past, n)
        if allocator is not None:
            assert allocator.alloc_graph(graph)
        logits.append(evaluate(model, graph, tokens[n_past : n_past + n], n_past))
        n_past += n
    return np.concatenate(logits)


def test_s68_s72_planned_memory_gives_the_same_bits(tiny: Gpt2Headers) -> None:
    own = prompt_runs(tiny, None, [14])
    allocator = GraphAllocator(HOST)
    with graph_context():
        allocator.reserve(tiny.graph(TINY.n_ctx - 6, 6))
    size = allocator.get_buffer_size()
    assert np.isfinite(own).all() and np.ptp(own) > 1
    assert np.array_equal(prompt_runs(tiny, allocator, [6, 6, 2]), own)
    assert allocator.get_buffer_size() == size
    assert np.array_equal(prompt_runs(tiny, allocator, [14]), own)
    assert allocator.get_buffer_size() > size


def test_s106_few_dependencies() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert len(tomllib.loads(text)["project"]["dependencies"]) == 3


def test_s105_weights_have_llama_cpp_s_names() -> None:
    """The package `gguf` comes from where ggml is developed."""
    with gg.LLM(Path(__file__).parent / "data" / "models" / "llama-headdim.gguf", progress=False) as llm:
        gguf = pytest.importorskip("gguf")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, llm.model.hparams.n_layer)
        assert len(llm.model.weights) > 10
        for name in (w.removesuffix(".weight") for w in llm.model.weights):
            assert names.get_name(name) == name
