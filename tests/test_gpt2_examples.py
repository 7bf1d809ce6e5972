"""The five GPT-2 programs: what each hands to the engine, and the tokens of the reference from all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpt2_headers import N_VOCAB, SMALL, f16_matrices, gpt2

import ggjit as gg
from ggjit.alloc import GraphAllocator
from ggjit.backend import alloc_ctx_tensors, ctx_tensors_size, host_buffer_type
from ggjit.backends.process import ProcessDevice
from ggjit.dev.memory import place_elsewhere
from ggjit.examples.gpt2 import main_alloc, main_backend, main_batched, main_ctx, main_sched
from ggjit.examples.gpt2.command import read_prompt
from ggjit.examples.gpt2.graph import Cache, gpt2_graph, graph_context, worst_case
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.models.gpt2 import Gpt2

HOST = host_buffer_type()
GAP = 0.02  # the reference looks GELU up in a table: nearer tokens may change places
LOGITS = 5e-3  # largest difference to the reference, for the same reason
PROGRAMS = (main_ctx, main_alloc, main_backend, main_sched, main_batched)


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(__file__).parent / "data" / "models" / "gpt2.gguf"


@pytest.fixture(scope="module")
def file(path: Path) -> Iterator[ModelFile]:
    opened = ModelFile(path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def want(path: Path) -> dict[str, np.ndarray]:
    with np.load(path.with_suffix(".npz")) as loaded:
        return {key: loaded[key] for key in loaded.files}


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessDevice]:
    """A device whose memory no pointer of this process reaches."""
    made = ProcessDevice()
    yield made
    made.close()


@pytest.fixture(scope="module")
def programs(file: ModelFile, device: ProcessDevice) -> dict[str, object]:
    return {
        "main_ctx": main_ctx.MainCtx(file, 1),
        "main_alloc": main_alloc.MainAlloc(file, 2),
        "main_backend": main_backend.MainBackend(file, 2),
        "main_sched": main_sched.MainSched(file, 2, 1, device),
        "main_batched": main_batched.MainBatched(file, 2),
    }


@pytest.fixture(scope="module")
def placed() -> tuple[Gpt2, Cache]:
    """GPT-2 small whose weights and cache have addresses but no memory."""
    small = gpt2()
    place_elsewhere(small.weights)
    place_elsewhere(small.kv)
    return small.model, small.cache


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["short", "medium", "long"])
def test_s64_the_programs_choose_the_reference_s_tokens_and_agree(programs, want, prompt) -> None:
    ids, greedy = want[f"{prompt}_ids"].tolist(), want[f"{prompt}_greedy"]
    fed = [*ids, *greedy[:-1].tolist()]
    results = {name: read_prompt(engine, fed, 32) for name, engine in programs.items()}
    for name, logits in results.items():
        assert np.array_equal(logits, results["main_ctx"]), name
    logits = results["main_ctx"]
    known = want[f"{prompt}_logits"].reshape(-1, logits.shape[1])
    assert np.abs(logits[len(ids) - len(known) : len(ids)] - known).max() <= LOGITS
    wrong = logits[len(ids) - 1 :].argmax(1) != greedy
    assert not (wrong & (want[f"{prompt}_greedy_gap"] > GAP)).any()


def test_s72_the_same_bits_however_a_prompt_is_split(programs, want) -> None:
    ids = want["long_ids"].tolist()
    for name, engine in programs.items():
        whole = read_prompt(engine, ids, 32)
        assert np.array_equal(read_prompt(engine, ids, 70), whole), name
        assert np.array_equal(read_prompt(engine, ids[:40], 13), whole[:40]), name
        assert np.array_equal(read_prompt(engine, ids[:10], 1), whole[:10]), name


@pytest.mark.full
def test_tokens_beyond_the_context_are_refused(programs) -> None:
    for name in ("main_ctx", "main_alloc", "main_backend", "main_sched"):
        with pytest.raises(ValueError, match="gpt2: tokens must fit the context of 256, got 2 behind 255"):
            programs[name].eval(255, [1, 2])
        with pytest.raises(IndexError, match=r"inp_tokens.* got 517 at position 1"):
            programs[name].eval(0, [1, 517])


# -- main_ctx ----------------------------------------------------------------------------------------------------------


def test_s65_the_context_s_size_is_summed_by_hand(file: ModelFile, programs) -> None:
    # S80's sizes of weights and cache, and 512 bytes for each of 150 objects
    assert main_ctx.context_size(SMALL, N_VOCAB[SMALL], f16_matrices) == 327889920 + 75497472 + (6 + 12 * 12) * 512
    engine = programs["main_ctx"]
    context = engine.ctx_w
    assert not context.no_alloc and context.used_mem() <= context.mem_size
    names = [t.name for t in context.tensors.values()]
    assert len(names) == 5 + 12 * file.sizes.n_layer + 2 and names[-2:] == ["memory_k", "memory_v"]
    for t in context.tensors.values():
        assert t.buffer is None and t.data == context.base + t.offset + 336  # right behind the header
    assert np.array_equal(engine.model.output.bytes(), file.file.data("token_embd.weight"))


def test_s66_every_run_has_a_context_of_its_own_on_one_block(file: ModelFile, want) -> None:
    engine = main_ctx.MainCtx(file, 1)
    block = engine.buf
    assert block.nbytes == 256 << 20
    for n_past in (0, 3):
        engine.eval(n_past, [1, 2, 3])
        assert engine.buf is block and engine.n_missed == 0 and engine.used > 0
    assert not block[: engine.used].any()  # the context is gone


def test_s67_the_block_grows_with_what_a_token_took_first(file: ModelFile, want, programs) -> None:
    ids = want["long_ids"].tolist()
    engine = main_ctx.MainCtx(file, 1, 400_000)
    assert engine.buf.nbytes == 400_000 and engine.mem_per_token == engine.used // 4
    engine.eval(0, ids[:32])
    assert engine.buf.nbytes == int(1.1 * engine.mem_per_token * 32) and engine.n_missed == 0
    # ggml issue 158: late in a context a token takes more than the first ones did, and the guess is too small
    engine, other = main_ctx.MainCtx(file, 1, 400_000), programs["main_alloc"]
    longer = (ids * 4)[:256]
    logits = read_prompt(other, longer, 32)[-1:]
    for mine, full in ((engine.cache.k, other.cache.k), (engine.cache.v, other.cache.v)):
        mine.bytes()[:] = full.bytes()
    assert np.array_equal(engine.eval(255, longer[255:]), logits)
    assert engine.n_missed == 1 and engine.buf.nbytes == 800_000


def test_s68_a_place_for_every_intermediate(placed, programs, want) -> None:
    """12.9 to 24 times the planned memory for GPT-2 small, and more than it for the tiny model."""
    for n, sum_mib in ((1, 39.6), (8, 65.0), (32, 151.8), (512, 1889)):
        with graph_context():
            graph = worst_case(*placed, n)
        own = sum(t.nbytes for t in graph.nodes if not t.is_view)
        assert own / 2**20 == pytest.approx(sum_mib, abs=0.5)
        assert own / GraphAllocator(HOST).measure(graph).sizes[0] > 12.9
    engine = programs["main_ctx"]
    engine.eval(0, want["long_ids"][:32].tolist())
    with graph_context() as context:
        graph = gpt2_graph(engine.model, engine.cache, 0, 32)
    own = engine.used - context.used_mem()
    assert own > 6 * GraphAllocator(HOST).measure(graph).sizes[0]


# -- main_alloc --------------------------------------------------------------------------------------------------------


def test_s69_the_run_s_context_holds_headers_only(programs) -> None:
    engine = programs["main_alloc"]
    assert not engine.ctx_w.no_alloc and engine.allocr.types == (HOST,)
    with graph_context() as context:
        graph = gpt2_graph(engine.model, engine.cache, 0, 4)
    assert context.no_alloc and all(t.data == 0 for t in graph.nodes if not t.is_view)
    engine.allocr.alloc_graph(graph)
    buffer = engine.allocr.buffers[0]
    for t in graph.nodes:
        inside = t if t.view_src is None else t.view_src
        assert t.data and (buffer.contains(t.data, t.nbytes) or inside in (engine.cache.k, engine.cache.v))


@pytest.mark.parametrize(("n", "peak"), [(1, 3210304), (8, 3661888), (32, 6629504), (512, 106072064)])
def test_s70_the_worst_case(placed, n: int, peak: int) -> None:
    with graph_context():
        graph = worst_case(*placed, n)
    kq = graph.get_tensor("KQ-0")
    assert kq.ne == (SMALL.n_ctx, n, SMALL.n_head, 1)  # n new tokens at the end of the context
    assert 0.9 * peak < GraphAllocator(HOST).measure(graph).sizes[0] <= peak


def test_s48_s71_counts(placed) -> None:
    with graph_context() as context:
        graph = gpt2_graph(*placed, 0, 32)
    views = sum(t.is_view for t in graph.nodes)
    assert (graph.n_nodes, graph.n_nodes - views, views) == (487, 307, 180)
    assert context.used_mem() == 345168 and graph.n_leafs == 148 + 1 + 2 + 2


def test_s72_s75_s76_a_prompt_of_70_tokens(file: ModelFile, want) -> None:
    runs, ids = [], want["long_ids"].tolist()
    assert len(ids) == 70

    class Watched(main_alloc.MainAlloc):
        def eval(self, n_past, tokens):
            runs.append((len(tokens), n_past))
            return super().eval(n_past, tokens)

    engine = Watched(file, 1, 32)
    buffer, plan = engine.allocr.buffers[0], engine.allocr.plan
    read_prompt(engine, ids, 32)
    assert runs == [(32, 0), (32, 32), (6, 64)]
    for n_past in (70, 224, 255):
        engine.eval(n_past, [1])
    assert engine.n_reserves == 0 and engine.allocr.plan is plan and engine.allocr.buffers[0] is buffer
    # a larger run does not fit: with one buffer the allocator plans anew, S75
    larger = engine.eval(0, ids[:40])
    assert engine.n_reserves == 1 and engine.allocr.plan is not plan
    assert np.array_equal(larger, read_prompt(engine, ids[:40], 32))


# -- main_backend ------------------------------------------------------------------------------------------------------


def test_s78_a_context_of_headers(file: ModelFile, programs) -> None:
    small = gpt2()
    assert main_backend.n_tensors(SMALL) == 152 and small.weights.n_objects == 149
    assert (small.weights.mem_size, small.weights.used_mem()) == (55936, 54832)
    assert small.kv.n_objects == 2
    loaded = programs["main_backend"].loaded
    assert loaded.ctx_w.no_alloc and loaded.ctx_w.mem_size == gg.tensor_overhead() * (8 + 12 * file.sizes.n_layer)
    with pytest.raises(ValueError, match=r"gpt2: the device must be one of \['cpu'.*, got 'tpu'"):
        main_backend.pick("tpu")


def test_s79_s80_s81_buffers(file: ModelFile, programs) -> None:
    small = gpt2(f16_matrices)
    assert (ctx_tensors_size(small.weights, HOST), ctx_tensors_size(small.kv, HOST)) == (327889920, 75497472)
    loaded = programs["main_backend"].loaded
    offset = 0
    for t in loaded.ctx_w.tensors.values():
        assert t.buffer is loaded.buffer_w and t.data - loaded.buffer_w.base == offset, t.name
        offset += HOST.padded_size(t)
        assert np.array_equal(loaded.buffer_w.get_tensor(t), file.data(t))
    assert loaded.buffer_w.size == offset and loaded.buffer_w.usage == "weights"
    assert loaded.ctx_kv is not loaded.ctx_w and loaded.buffer_kv is not loaded.buffer_w
    assert loaded.buffer_kv.size == sum(HOST.padded_size(t) for t in loaded.ctx_kv.tensors.values())
    assert alloc_ctx_tensors(loaded.ctx_w, HOST) is None  # all have their place


def test_s78_everything_on_a_device_without_host_pointers(file: ModelFile, device, programs, want) -> None:
    ids = want["medium_ids"].tolist()
    known = read_prompt(programs["main_alloc"], ids, 32)
    for engine in (main_backend.MainBackend(file, 1, 32, device), main_batched.MainBatched(file, 1, 32, 1, device)):
        assert np.array_equal(read_prompt(engine, ids, 32), known)
        assert engine.loaded.buffer_w.type is engine.loaded.buffer_kv.type is device.buffer_type()


def test_s94_without_a_mapping_each_tensor_is_read_into_its_place(file: ModelFile, device) -> None:
    device.counts.clear()
    loaded = main_backend.DeviceModel(file, device)
    weights = list(loaded.ctx_w.tensors.values())
    assert (device.counts.to_device, device.counts.to_device_nbytes) == (len(weights), sum(t.nbytes for t in weights))
    assert np.array_equal(loaded.model.layers[1].wo.buffer.get_tensor(loaded.model.layers[1].wo),
                          file.file.data("blk.1.attn_output.weight"))  # fmt: skip


# -- main_sched --------------------------------------------------------------------------------------------------------


def test_s82_figure_15_placement_by_name() -> None:
    names = [t.name for t in gpt2().weights.tensors.values()]
    for n_gpu_layers, layers, embd, output in ((0, (), 0, 0), (4, (8, 9, 10, 11), 0, 1), (12, range(12), 0, 1)):
        placed = {name for name in names if main_sched.on_device(name, 12, n_gpu_layers)}
        assert {name for name in placed if name.startswith("blk.")} == {
            name for name in names if name.startswith(tuple(f"blk.{il}." for il in layers))
        }
        assert ({"token_embd.weight", "position_embd.weight"} <= placed) == embd
        assert ({"output_norm.weight", "output_norm.bias", "output.weight"} <= placed) == output
    assert all(main_sched.on_device(name, 12, 13) for name in names)


def test_s83_one_buffer_for_each_backend(file: ModelFile, device, programs) -> None:
    assert [main_sched.cache_on_device(12, n) for n in (0, 5, 6, 12)] == [False, False, True, True]
    for n_gpu_layers, on in ((1, HOST), (2, device.buffer_type())):
        engine = main_sched.MainSched(file, 1, n_gpu_layers, device)
        assert engine.buffer_kv.type is on
        for backend, type in ((engine.gpu, device.buffer_type()), (engine.cpu, HOST)):
            buffer, offset = engine.backend_buffers[backend.name].buffer, 0
            assert buffer.type is type and buffer.usage == "weights"
            mine = [t for t in engine.ctx_w.tensors.values() if engine.tensor_backends[t.name] is backend]
            for t in mine:  # cut in order
                assert t.buffer is buffer and t.data - buffer.base == offset, t.name
                offset += type.padded_size(t)
                assert np.array_equal(buffer.get_tensor(t), file.data(t))
            assert buffer.size == offset + 512 * len(mine)


def expected_copies(sched, graph: gg.Graph) -> list[int]:
    """Tensors that must go to the device and back: read on the other side, since their bytes were written last.

    Counted from the side of each node and of each weight alone, with a list of all that was ever copied.
    """
    gpu, versions, done, counts = sched.backends[0], {}, [], [0, 0]

    def home(t) -> int:
        root = t if t.view_src is None else t.view_src
        if root.buffer is not None and root.buffer.usage != "compute":  # weights and cache
            return int(root.buffer.type is gpu.device.buffer_type())
        return int(sched.get_tensor_backend(root) is gpu)

    for node in graph.nodes:
        if node.op.view:
            continue
        side = int(sched.get_tensor_backend(node) is gpu)
        for t in node.src:
            if t is None or home(t) == side:
                continue
            copy = (t.name, side, versions.get(t.view_src or t, 0))
            if copy not in done:
                done.append(copy)
                counts[0 if side else 1] += 1
        root = node.view_src or node
        versions[root] = versions.get(root, 0) + 1
    return counts


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2, 3, 4])
def test_s82_s84_any_layers_give_the_same_bits_by_the_copies_that_must_be(
    file: ModelFile, device, programs, want, n_gpu_layers: int
) -> None:
    ids = want["long_ids"].tolist()
    known = read_prompt(programs["main_alloc"], ids, 32)
    engine = main_sched.MainSched(file, 2, n_gpu_layers, device)
    buffers = list(engine.sched.allocator.buffers)
    for n_past in (0, 32, 64):
        device.counts.clear()
        got = engine.eval(n_past, ids[n_past : n_past + 32])
        assert np.array_equal(got, known[n_past : n_past + 32])
        run = engine.sched.current
        for node in run.graph.nodes:  # where the weights are, there it is computed
            for t in node.src:
                if t is not None and t.name in engine.tensor_backends:
                    assert engine.sched.get_tensor_backend(node) is engine.tensor_backends[t.name]
        to_device, from_device = expected_copies(engine.sched, run.graph)
        logits = int(n_gpu_layers > 0)  # fetched by the program
        assert (device.counts.to_device, device.counts.from_device) == (to_device, from_device + logits)
        assert (to_device > 0) == (n_gpu_layers > 0) and (from_device > 0) == (0 < n_gpu_layers < 3)
        assert device.counts.on_device == 0
    assert engine.sched.allocator.buffers == buffers  # reserved once, for the largest run


# -- main_batched ------------------------------------------------------------------------------------------------------


def test_s64_several_sequences_in_one_run(file: ModelFile, programs, want) -> None:
    """Three prompts of different lengths, computed together: each gets the tokens it gets alone."""
    prompts = [want[f"{name}_ids"].tolist() for name in ("short", "medium", "long")]
    engine = main_batched.MainBatched(file, 2, 48, 3)
    flat = [(token, pos, seq) for seq, ids in enumerate(prompts) for pos, token in enumerate(ids)]
    np.random.default_rng(0).shuffle(flat)
    flat.sort(key=lambda entry: entry[1])  # tokens of all sequences by turns, each after those before it
    tokens, pos, seq = zip(*((int(a), int(b), int(c)) for a, b, c in flat), strict=True)
    logits = engine.decode(tokens, pos, seq)
    assert engine.n_runs == 3
    last = [logits[max(i for i, other in enumerate(seq) if other == s)] for s in range(3)]
    for step in range(16):
        for s, name in enumerate(("short", "medium", "long")):
            if want[f"{name}_greedy_gap"][step] > GAP:
                assert last[s].argmax() == want[f"{name}_greedy"][step], (name, step)
        chosen = [int(want[f"{name}_greedy"][step]) for name in ("short", "medium", "long")]
        last = engine.decode(chosen, [len(ids) + step for ids in prompts], [0, 1, 2])
    with pytest.raises(ValueError, match="gpt2: tokens must fit the 256 cells of the cache, got 48 with"):
        engine.decode([1] * 128, range(100, 228), [0] * 128)


def test_s64_a_shared_prompt_is_computed_once(file: ModelFile, programs, want) -> None:
    ids, greedy = want["short_ids"].tolist(), want["short_greedy"].tolist()
    engine = main_batched.MainBatched(file, 1, 32, 2)
    engine.eval(0, ids)
    engine.cells.share(0, 1)
    alone = programs["main_alloc"]
    alone.eval(0, ids)
    for step, token in enumerate(greedy[:6]):
        both = engine.decode([token, token], [len(ids) + step] * 2, [0, 1])
        one = alone.eval(len(ids) + step, [token])
        assert np.abs(both - one).max() < 1e-4 and both.argmax(1).tolist() == [one.argmax()] * 2
    assert engine.cells.head == len(ids) + 2 * 6


# -- command line ------------------------------------------------------------------------------------------------------

TEXT = "Alice looked at the White Rabbit"
CONTINUED = "el/chabbitabbitabbitout"  # the reference's first tokens


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.rpartition(".")[2])
def test_the_programs_print_text_and_what_they_handed_over(capsys, path: Path, program) -> None:
    argv = ["-m", str(path), "-p", TEXT, "-t", "2"]
    assert program.run([*argv, "-n", "7"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    if program is main_batched:
        assert [line[:12] for line in lines] == ["sequence 0: ", "sequence 1: "]
        lines = [line[12:] for line in lines]
    assert set(lines) == {f"{TEXT}{CONTINUED}"}
    assert "12 tokens of prompt" in err and ("compute buffer" in err or "mem_per_token" in err)
    assert program.run([*argv, "-n", "257"]) == 1
    assert "prompt and generated tokens must fit the context of 256, got 12 and 257" in capsys.readouterr().err
    assert program.run(["-m", str(path), "-p", ""]) == 1
    assert "the prompt must have at least one token, got none" in capsys.readouterr().err


def test_another_architecture_is_refused(capsys) -> None:
    other = Path(__file__).parent / "data" / "models" / "llama-f16.gguf"
    assert main_ctx.run(["-m", str(other), "-p", TEXT]) == 1
    assert "main_ctx: error: gpt2: the architecture must be gpt2, got 'llama'" in capsys.readouterr().err


def test_a_missing_package_is_one_line(capsys, path: Path, monkeypatch) -> None:
    def missing(*args, **options):
        raise ModuleNotFoundError("no tokenizers", name="tokenizers")

    monkeypatch.setattr("ggjit.examples.gpt2.command.ModelFile", missing)
    assert main_ctx.run(["-m", str(path), "-p", "a"]) == 1
    assert "needs the package tokenizers: pip install -e '.[llm]'" in capsys.readouterr().err
