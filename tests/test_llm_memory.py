"""Where a model's parts lie: layers on devices, mapped or read, locked; and that its memory is known before."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_real_model import path as real_model  # noqa: F401 - a fixture

import ggjit as gg
from ggjit import pages
from ggjit.backend import devices
from ggjit.backends import cpu
from ggjit.backends.process import ProcessDevice
from ggjit.cli import main
from ggjit.context import Context, tensor_overhead
from ggjit.gguf.rows import FileRows
from ggjit.llm import Sampler, loader
from ggjit.llm.context import DecodeContext
from ggjit.llm.memory import estimate
from ggjit.llm.model import Model
from ggjit.llm.placement import Placement, parse_overrides
from ggjit.progress import ByteBar
from ggjit.tensor import Tensor

MODELS = Path(__file__).parent / "data" / "models"
LLAMA = MODELS / "llama-headdim.gguf"  # 3 layers
CPU = devices()[-1]
N = 32  # tokens of a ubatch
PLACES = {
    "none": {"n_gpu_layers": 0},
    "output": {"n_gpu_layers": 1},
    "some": {"n_gpu_layers": 2},
    "all": {},
    "attention alone": {"overrides": {"ffn": "cpu", "^output": "cpu"}},
    "one matrix": {"n_gpu_layers": 0, "overrides": {r"blk\.1\.ffn_up": "process0"}},
}


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessDevice]:
    device = ProcessDevice()
    yield device
    device.close()


@pytest.fixture
def device(child: ProcessDevice) -> ProcessDevice:
    gc.collect()
    assert child.memory() == (0, 0), "what the test before had there is free again"
    return child


def load(name, **options):
    return gg.LLM(MODELS / f"{name}.gguf", progress=False, **{"n_ctx": 256, "n_threads": 2, "n_ubatch": N, **options})


def ids_of(name):
    return np.load(MODELS / f"{name}.npz")["medium_ids"].tolist()


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama-q.Q4_1", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama-headdim", "gpt2"))]
)
def test_s86_s91_results_have_the_same_bits_wherever_layers_are(name: str, device: ProcessDevice) -> None:
    ids = ids_of(name)[:40]
    with load(name) as llm:
        want, tokens = llm.logits(ids), list(llm.raw_tokens(ids, 6, Sampler(0)))
    for what, options in PLACES.items():
        with load(name, devices=[device], **options) as llm:
            assert np.array_equal(llm.logits(ids), want), what
            assert list(llm.raw_tokens(ids, 6, Sampler(0))) == tokens, what
            assert (llm.context.scheduler is None) == (what == "none")


def test_s90_s91_weights_and_cache_lie_on_the_devices_of_their_layers(device: ProcessDevice) -> None:
    with load("llama-headdim", devices=[device], n_gpu_layers=3, overrides={r"blk\.2\.ffn_(up|gate)": "cpu"}) as llm:
        on_device = {n for n, t in llm.model.weights.items() if t.buffer.type.name == "process0"}
        cache = [t.buffer.type.name for pair in zip(llm.context.cache.k, llm.context.cache.v) for t in pair]
        assert llm.model.placement.layers == [CPU, device, device] and llm.model.placement.output is device
    assert cache == ["host"] * 2 + ["process0"] * 4
    names = {n for n in llm_names() if re.match(r"blk\.[12]\.|output", n)}
    assert on_device == names - {"blk.2.ffn_up.weight", "blk.2.ffn_gate.weight"}


def llm_names() -> set[str]:
    model = Model(LLAMA, no_alloc=True)
    names = set(model.weights)
    model.close()
    return names


def test_placement_counts_from_the_output() -> None:
    a, b = (Named(name) for name in "ab")
    assert Placement(3).layers == [CPU] * 3 and Placement(3).is_cpu_only
    p = Placement(4, [a, b])
    assert p.layers == [a, a, a, b] and p.output is b and p.input is CPU and not p.is_cpu_only
    p = Placement(4, [a, b], 2)
    assert p.layers == [CPU, CPU, CPU, a] and p.output is b
    names = ("token_embd.weight", "blk.3.x", "output.weight", "output_norm.weight", "rope_freqs.weight")
    assert [p.weight(n) for n in names] == [CPU, a, b, b, CPU]
    assert p.weight("blk.3.attn_q.weight") is a and p.weight("blk.0.attn_q.weight") is CPU
    assert Placement(4, [a], 99).layers == [a] * 4 and Placement(4, [a], 0, {"x": CPU}).is_cpu_only
    p = Placement(1, [a, b], 0, {"ffn": "b", "ffn_up": "a"})
    assert p.weight("blk.0.ffn_up.weight") is b and p.weight("blk.0.attn_q.weight") is CPU


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_placement_errors() -> None:
    for given, text in (
        ((4, [], 1.5), "n_gpu_layers must be a whole number or None, got 1.5"),
        ((4, [], True), "n_gpu_layers must be a whole number or None, got True"),
        ((4, [], None, ["ffn"]), "overrides must be a dict of regular expressions, got .'ffn'."),
        ((4, [], None, {5: "CPU"}), "an override must be a regular expression as a str, got 5"),
        ((4, [], None, {"ffn": 5}), "an override must name a device or be one, got 5"),
    ):
        with pytest.raises(TypeError, match=f"Placement: {text}"):
            Placement(*given)
    with pytest.raises(ValueError, match="Placement: n_gpu_layers must not be negative, got -1"):
        Placement(1, (), -1)
    with pytest.raises(ValueError, match=r"Placement: a device must be one of \['cpu'\], got 'cuda7'"):
        Placement(1, (), None, {"x": "cuda7"})
    with pytest.raises(ValueError, match=r"Placement: an override must be a regular expression, got '\('"):
        Placement(1, (), None, {"(": "cpu"})
    assert parse_overrides(r"ffn=cpu,blk\.1\.=a=b") == {"ffn": "cpu", r"blk\.1\.=a": "b"}
    for bad in ("ffn", "=cpu", "ffn=", "ffn=cpu,"):
        with pytest.raises(ValueError, match="override: must be REGEX=DEVICE, several divided by commas, got"):
            parse_overrides(bad)


def test_callback_and_trace_on_devices(device: ProcessDevice) -> None:
    ids = ids_of("llama-headdim")[:5]
    with load("llama-headdim") as llm:
        want = llm.trace(ids, ["l_out-1", "result_norm"])
    with load("llama-headdim", devices=[device], n_gpu_layers=2) as llm:
        got = llm.trace(ids, ["l_out-1", "result_norm"])
    for name, x in want.items():
        assert np.allclose(x, got[name], rtol=0, atol=1e-4), name  # without fusion


# -- memory ------------------------------------------------------------------------------------------------------------


def test_s93_three_reserves(device: ProcessDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, one token, a prompt again; then no graph needs more."""
    made = []
    largest = DecodeContext._largest
    monkeypatch.setattr(DecodeContext, "_largest", lambda self, n: made.append(n) or largest(self, n))
    with load("llama-headdim", devices=[device], n_gpu_layers=2) as llm:
        assert made == [N, 1, N]
        assert {what: n for what, (_, n) in llm.context.reserved.items()} == {"prompt": 2, "decode": 2}
        buffers = list(llm.context.scheduler.allocator.buffers)
        list(llm.raw_tokens(ids_of("llama-headdim")[: N + 3], 3, Sampler(0)))
        assert all(a is b for a, b in zip(buffers, llm.context.scheduler.allocator.buffers, strict=True))
    made.clear()
    with load("llama-headdim") as llm:
        assert made == [] and llm.context.reserved == {}, "on the CPU alone a start need not wait for it"
        llm.context.reserve()
        assert made == [N, 1, N] and llm.context.reserved["prompt"][1] == 1
        memory = llm.context.memory()
        llm.logits(ids_of("llama-headdim")[: N + 3])
        assert llm.context.memory() == memory


@pytest.mark.parametrize(
    "name",
    ["llama-headdim", "llama-q.Q4_1", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama-bf16", "gpt2"))],
)
def test_memory_of_the_cpu_is_known_before(name: str) -> None:
    for options in ({}, {"repack": False}, {"mmap": False}, {"kv_type": "f32", "n_ubatch": 7, "n_ctx": 300}):
        with load(name, **options) as llm:
            llm.context.reserve()
            model, context = llm.model, llm.context
            found = estimate(model.path, **{"n_ctx": 256, "n_threads": 2, "n_ubatch": N, **options})
            own = [b.size for b in model.buffers if b.type.name != "mapped"]
            kv = sum(t.nbytes for t in (*context.cache.k, *context.cache.v))
            compute, scratch = context.allocator.buffers[0].size, context.scratch.nbytes
            memory = found.devices["cpu"]
            assert (memory.weights, memory.kv, memory.compute, memory.scratch) == (sum(own), kv, compute, scratch)
            assert memory.total == sum(own) + kv + compute + scratch
            assert found.mapped == model.mapped_nbytes and (found.mapped == 0) == (options.get("mmap") is False)
            n = min(len(ids_of(name)), found.n_ubatch)
            graph = context.graph(n, context.cache.n_cells, n)
            assert graph.executable.scratch_nbytes <= scratch and (context.memory(), scratch) == (
                found.devices,
                scratch,
            )


@pytest.mark.parametrize("name", [pytest.param("llama-headdim", marks=pytest.mark.full), "llama-q.Q4_1"])
@pytest.mark.parametrize("where", PLACES)
def test_memory_of_devices_is_known_before(name: str, where: str, device: ProcessDevice) -> None:
    """The device itself tells what it holds; scratch is made when it computes the largest graph."""
    options = {"devices": [device], **PLACES[where]}
    found = estimate(MODELS / f"{name}.gguf", n_ctx=256, n_threads=2, n_ubatch=N, **options)
    assert device.memory() == (0, 0), "nothing is allocated"
    with load(name, **options) as llm:
        m = found.devices["process0"]
        held = device.memory()[0]
        assert held == m.weights + m.kv + m.compute
        if where == "none":
            return
        assert llm.context.memory() == found.devices
        llm.logits((ids_of(name) * N)[:N])  # 32 tokens, 32 logits, and a window of all 256 cells
        assert device.memory() == (held, m.scratch)
        split = llm.context.scheduler.current
        parts = [p for s, p in zip(split.splits, split.parts, strict=True) if s.backend_id == 1]
        assert sum(e.scratch_nbytes for p in parts for e in p._executables.values()) == found.devices["cpu"].scratch


def test_memory_of_a_real_model_is_known_before(real_model: Path, device: ProcessDevice) -> None:  # noqa: F811
    found = estimate(real_model, n_ctx=512, n_threads=2, devices=[device], n_gpu_layers=10)
    with gg.LLM(real_model, n_ctx=512, n_threads=2, devices=[device], n_gpu_layers=10, progress=False) as llm:
        assert llm.context.memory() == found.devices
        assert device.memory()[0] == found.devices["process0"].total - found.devices["process0"].scratch


def test_inspect_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "--memory", str(LLAMA), "-c", "300", "--ubatch", "32", "-t", "2"]
    assert main([*words, "--device", "process", "--n-gpu-layers", "2", "-ot", "ffn=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{LLAMA}: bytes for a context of 300 tokens, at most 32 computed together"
    assert lines[2].split() == ["device", "weights", "kv", "compute", "scratch", "in", "all"]
    rows = {line.split()[0]: [int(x.replace(",", "")) for x in line.split()[1:]] for line in lines[3:5]}
    assert list(rows) == ["process0", "cpu"] and all(sum(r[:4]) == r[4] for r in rows.values())
    assert rows["process0"][1] == rows["cpu"][1] // 2 > 0
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["n_ctx"] == 300 and list(facts["devices"]) == ["cpu"] and facts["devices"]["cpu"]["kv"] > 0
    assert main([*words, "-ot", "fnn=cpu"]) == 0
    assert "--override-tensor: a regular expression must be found in" in capsys.readouterr().err
    assert main([*words, "-ot", "(=cpu"]) == 1
    assert capsys.readouterr().err.startswith("ggjit: error: Placement: ")
    assert main([*words, "--device", "nope"]) == 1
    assert "--device: must be one of ['process'], got 'nope'" in capsys.readouterr().err


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repack", [True, False])
def test_s94_without_mapping_each_tensor_is_read(repack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    fromfile = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *a, **k: read.append(k["offset"]) or fromfile(*a, **k))
    model = Model(LLAMA, mmap=False, repack=repack)
    assert len(read) == len(model.weights) and model.mapped_nbytes == 0
    assert {b.type.name for b in model.buffers} == ({"host", "panel"} if repack else {"host"})
    for name, t in model.weights.items():
        if t.buffer.type.name == "host":
            assert np.array_equal(t.bytes(), model.file.data(name)), name
    model.close()
    ids = ids_of("llama-headdim")
    with load("llama-headdim", mmap=False, repack=repack) as a, load("llama-headdim") as b:
        assert np.array_equal(a.logits(ids), b.logits(ids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("repack", [True, False])
def test_without_mapping_the_file_may_end_early(repack: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LLAMA.read_bytes())
    with load("llama-headdim") as llm:
        want = list(llm.generate("Alice looked", 8, temperature=0))
    with gg.LLM(path, n_ctx=256, n_threads=2, n_ubatch=N, repack=repack, mmap=False, progress=False) as llm:
        assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
        os.truncate(path, 100)
        assert list(llm.generate("Alice looked", 8, temperature=0)) == want
        assert llm.model.file.kv["general.architecture"] == "llama"
        with pytest.raises(gg.GgufError, match=r"tensor 'output_norm\.weight' must have \d+ bytes, got 0"):
            llm.model.file.data("output_norm.weight")


def test_s98_the_file_is_given_back_as_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of the file than GIVE_BACK and a slice is read between two times that its pages go."""
    read, given = [0], []
    pack = loader.pack_tensors

    def counted(items: list[tuple[Tensor, np.ndarray]], n: int, bar: ByteBar, on_packed: Callable[..., None]) -> None:
        def note(t: Tensor, first: int, end: int) -> None:
            read[-1] += end - first
            on_packed(t, first, end)

        pack(items, n, bar, note)

    def give_back(self: object, at: int, n: int) -> None:
        given.append((at, n))
        read.append(0)

    monkeypatch.setattr(loader, "pack_tensors", counted)
    monkeypatch.setattr("ggjit.gguf.Mapping.advise_dontneed", give_back)
    for batch in (1, 30_000, 1 << 30):
        monkeypatch.setattr(loader, "GIVE_BACK", batch)
        read[:], given[:] = [0], []
        model = Model(LLAMA)
        size, packed = model.file.mappings[0].size, sum(read)
        assert set(given) == {(0, size)} and read[-1] == 0, "the whole file, at the end too"
        assert packed > 100_000 and max(read) < batch + max(w.nbytes for w in model.weights.values())
        assert (len(given) == 1) == (batch > packed)
        model.close()
    given.clear()
    Model(LLAMA, repack=False).close()
    assert given == [], "what is used where it lies stays"


def test_slices_are_packed_as_whole_matrices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (cpu.SLICE, 1):
        monkeypatch.setattr(cpu, "SLICE", size)
        for type, ne in ((gg.types.Q8_0, (64, 40, 3)), (gg.types.F32, (8, 17)), (gg.types.Q4_1, (32, 16))):
            rng = np.random.default_rng(1)
            with Context(tensor_overhead(), no_alloc=True):
                t = gg.new_tensor(type, *ne)
            buffer = cpu.PANEL.new_buffer(cpu.PANEL.padded_size(t), "weights")
            gg.backend.tensor_alloc(buffer, t, buffer.base)
            rows = rng.integers(0, 60, t.nbytes, np.uint8)
            seen: list[tuple[int, int]] = []
            note = functools.partial(lambda to, t, *part: to.append(part), seen)
            cpu.pack_tensors([(t, rows)], 2, on_packed=note)
            assert [a for a, _ in seen] == [0, *(b for _, b in seen[:-1])] and seen[-1][1] == t.nbytes
            found.append((len(seen), buffer.array[: cpu.PANEL.alloc_size(t)].copy()))
    assert [n for n, _ in found] == [1, 1, 1, 9, 2, 1]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(found[:3], found[3:], strict=True))


def test_mlock(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = []
    monkeypatch.setattr(pages, "_lock", lambda address, nbytes: ranges.append((address, nbytes)) or 0)
    model = Model(LLAMA, mlock=True)
    assert model.is_locked and model.file_rows == {}
    for t in model.weights.values():
        assert any(a <= t.data and t.data + t.buffer.type.alloc_size(t) <= a + n for a, n in ranges), t.name
    model.close()
    monkeypatch.setattr(pages, "_lock", lambda address, nbytes: 12)
    with pytest.warns(RuntimeWarning, match=r"mlock: memory must be lockable, got 'Cannot allocate memory' for \d+ by"):
        model = Model(LLAMA, mlock=True)
    assert not model.is_locked
    model.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mlock_is_seen_by_the_system() -> None:
    array = np.zeros(1 << 16, np.uint8)
    if pages._lock(array.ctypes.data, array.nbytes):
        pytest.skip("the system allows none")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    assert int(next(line for line in lines if line.startswith("VmLck")).split()[1]) >= 64


def test_s99_rows_of_the_embedding_are_read_when_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(100)))
    rows, out = FileRows(str(path), 10, 9), np.zeros((3, 9), np.uint8)
    rows.read([4, 0, 9], map(memoryview, out))
    assert out[:, 0].tolist() == [46, 10, 91] and out[0].tolist() == list(range(46, 55))
    with pytest.raises(OSError, match=r"rows: row 10 must have 9 bytes, got 0"):
        rows.read([10], [memoryview(out[0])])
    with load("llama-headdim") as a, load("llama-headdim", repack=False) as b:
        assert set(a.model.file_rows) == {a.model.weights["token_embd.weight"]} and not b.model.file_rows
        ids = ids_of("llama-headdim")
        assert np.array_equal(want := a.logits(ids), b.logits(ids))
    monkeypatch.setattr("ggjit.gguf.rows.pread_address", lambda: 0)  # a system that has none
    with load("llama-headdim") as c:
        assert np.array_equal(c.logits(ids), want)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_command(capsys: pytest.CaptureFixture[str]) -> None:
    from ggjit.dev.__main__ import main as dev

    assert dev(["peak-memory", str(LLAMA), "--json", "-c", "256", "-p", "4", "-n", "3"]) == 0
    (peak,) = json.loads(capsys.readouterr().out)
    assert peak["peak"] > peak["imports"] > 1 << 20 and len(peak["tokens"]) == 3 and not peak["compiled"]


@pytest.mark.parametrize("devices", ["process", ["process"], ProcessDevice])
def test_devices_are_a_list_of_devices(devices: object) -> None:
    with pytest.raises(TypeError, match="Placement: devices must be a list of devices"):
        load("llama-headdim", devices=devices)
