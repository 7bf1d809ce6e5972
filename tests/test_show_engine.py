"""Pictures of splits, files and caches: what they say is what the engine says."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sched_passes import Builder, Fake, fake_cpu

import ggjit as gg
from ggjit.llm import Batch
from ggjit.sched import SchedGraph, Scheduler
from ggjit.show.files import sections

SVG = "{http://www.w3.org/2000/svg}"
FILE = Path(__file__).parent / "data" / "models" / "llama-q.Q4_1.gguf"


def words(drawing: str) -> list[str]:
    return [e.text for e in ET.fromstring(drawing).iter(f"{SVG}text")]


def fills(drawing: str) -> list[str]:
    return [e.get("fill") for e in ET.fromstring(drawing).iter(f"{SVG}rect")]


# -- splits ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> SchedGraph:
    """relu(w1 relu(w0 x)), w0 at the CPU, w1 at another backend; a view in between."""
    gpu, cpu, b = Fake("gpu"), fake_cpu(), Builder()
    w0, w1 = b.weight(cpu.type, 8, 8, name="w0"), b.weight(gpu.type, 8, 8, name="w1")
    x = b.leaf(8, name="x").set_input()
    with b.context:
        first = gg.relu(gg.mul_mat(w0, x).set_name("low")).set_name("low relu")
        last = gg.relu(gg.mul_mat(w1, gg.reshape_2d(first, 8, 1).set_name("as rows")).set_name("high"))
    graph = b.graph(last.set_name("high relu"))
    return Scheduler([gpu, cpu]).split_graph(graph)  # type: ignore[list-item]


def test_s85_passes_one_by_one(run: SchedGraph) -> None:
    drawing = gg.show.passes(run)
    found = words(drawing)
    for name in ("low", "low relu", "high", "high relu", "1.wgt0", "split 1: gpu, begins for: backend"):
        assert name in found
    assert "as rows" not in found and "as rows" in words(gg.show.passes(run, views=True))
    assert [w for w in found if w.startswith("copy")] == ["copy low: 32 bytes"]
    assert found.count("1.wgt0") == 2 and found.count("2.gpu_up") == found.count("2.gpu_down") == 1
    cpu, gpu = fills(drawing)[-2:]  # the legend
    cells = [f for f in fills(drawing) if f in (cpu, gpu)]
    assert (cells.count(cpu), cells.count(gpu)) == (4 + 1 + 1, 3 * 4 - 2 + 1 + 1)  # nodes after passes, split, legend


def test_splits_and_copies(run: SchedGraph) -> None:
    drawing = gg.show.splits(run)
    found = words(drawing)
    assert [w for w in found if w.startswith("split")] == ["split 0", "split 1"]
    assert "1 node" in found and "3 nodes" in found
    arrows = [e for e in ET.fromstring(drawing).iter(f"{SVG}path") if e.get("marker-end")]
    assert len(arrows) == 1 and "low" in found and "32 B" in found


def test_too_many_nodes_are_refused() -> None:
    cpu, b = fake_cpu(), Builder()
    x = b.leaf(8)
    b.context = gg.Context(1 << 20, no_alloc=True)
    with b.context:
        for _ in range(201):
            x = gg.relu(x)
        graph = gg.build(x)
    run = Scheduler([cpu]).split_graph(graph)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"show.passes: at most 200 nodes can be drawn, got 201"):
        gg.show.passes(run)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[gg.LLM]:
    with gg.LLM(FILE, n_ctx=256, n_threads=1, progress=False) as opened:
        yield opened


def test_s97_a_file_s_parts(llm: gg.LLM) -> None:
    file, raw = llm.model.file, FILE.read_bytes()
    parts = sections(file)
    assert [first for first, _ in parts.values()] == [0, *(last for _, last in parts.values())][:5]
    assert parts["data"] == (file.data_offset, len(raw))
    first = next(iter(file.tensors.values()))
    at = parts["tensor list"][0]
    assert raw[at + 8 : at + 8 + len(first.name)] == first.name.encode()
    assert parts["metadata"][0] == file.kv.offset("general.architecture")
    assert not any(raw[slice(*parts["padding"])]) and parts["padding"][1] % file.alignment == 0
    found = words(gg.show.gguf(file))
    assert gg.show.gguf(file.path) == gg.show.gguf(file)  # a path will do
    for name in ("header", "metadata", "tensor list", "padding"):
        assert f"{name}: {parts[name][1] - parts[name][0]} bytes" in found
    assert {"token_embd", "Q4_1", "Q6_K", "F32", str(file.data_offset), str(file.nbytes)} <= set(found)


def test_s98_where_weights_are(llm: gg.LLM) -> None:
    weights = llm.model.weights
    drawing = gg.show.loaded(llm.model.file, weights.values())
    found = words(drawing)
    assert "mapped buffer" in found and "panel buffer" in found
    mapped, panel = fills(drawing)[-2:]
    for colour, name in ((mapped, "mapped"), (panel, "panel")):  # in the file, in its buffer, and in the legend
        assert fills(drawing).count(colour) == 2 * sum(t.buffer.type.name == name for t in weights.values()) + 1


def test_split_models_are_refused(llm: gg.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.model.file, "mappings", llm.model.file.mappings * 2)
    for draw in (gg.show.gguf, lambda file: gg.show.loaded(file, [])):
        with pytest.raises(ValueError, match=r"show\.\w+: the model must be one file to be drawn, got 2 parts"):
            draw(llm.model.file)


def test_cells(llm: gg.LLM) -> None:
    cache = llm.context.cache
    cache.take(Batch.of([1, 2, 3]), 10)
    cache.take(Batch.of([1, 2], seq=1), 10)
    drawing = gg.show.cells(cache, 40, window=5)
    assert words(drawing) == ["0", "0", "1", "2", "0", "1", "32", "sequence 0", "sequence 1"]
    one, two = fills(drawing)[-2:]
    assert fills(drawing)[1:41] == [one] * 3 + [two] * 2 + [fills(drawing)[40]] * 35
    assert drawing.count("<path") == 1 + 1  # the window's end, and an arrow's head that nothing uses
    with pytest.raises(ValueError, match=r"show.cells: n must be 1 to 256, the cells of the cache, got 257"):
        gg.show.cells(cache, 257)
    cache.clear()
    assert len(words(gg.show.cells(cache))) == 8
