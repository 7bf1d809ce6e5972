"""Pictures: what they say is what the tensors say."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from test_graph import mlp

import ggjit as gg
from ggjit import types
from ggjit.alloc import GraphAllocator
from ggjit.backend import host_buffer_type

SVG = "{http://www.w3.org/2000/svg}"


def planned_mlp() -> tuple[gg.Graph, GraphAllocator]:
    with gg.Context(1 << 20, no_alloc=True):
        graph = gg.build(mlp()[0], 16)
    allocator = GraphAllocator(host_buffer_type())
    allocator.alloc_graph(graph)
    return graph, allocator


def test_tensor_table_has_both_orders_and_the_place() -> None:
    with gg.Context(1 << 16):
        a = gg.new_tensor(types.F32, 3, 2, name="<a>")
        v = gg.transpose(a).set_name("v")
    table = gg.show.tensor(a)
    assert "{3, 2, 1, 1}" in table and "(2, 3)" in table and "{4, 12, 24, 24}" in table and "&lt;a&gt;" in table
    assert f"arena of {1 << 16} bytes, offset {a.data - a.context.base}" in table
    assert ">contiguous" in table and a._repr_html_() == table
    table = gg.show.tensor(v)
    assert "not contiguous, transposed, permuted, a view" in table and "byte 0 of &#x27;&lt;a&gt;&#x27;" in table


def test_places_in_words() -> None:
    graph, allocator = planned_mlp()
    node = graph.nodes[-1]
    offset = node.data - allocator.buffers[0].base
    assert f"host buffer (compute) of {allocator.get_buffer_size()} bytes, offset {offset}" in gg.show.tensor(node)
    with gg.Context(1 << 12, no_alloc=True):
        assert "no data yet" in gg.show.tensor(gg.new_tensor(types.F32, 4))


def test_graph_table_and_drawing() -> None:
    graph, allocator = planned_mlp()
    assert graph._repr_html_().count("<tr>") == graph.n_nodes + 1
    names = {t: "cpu" if i % 2 else "gpu" for i, t in enumerate(graph.nodes)}
    root = ET.fromstring(gg.show.graph(graph, allocator.plan, names))
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {t.name for t in (*graph.nodes, *graph.leafs)} <= set(texts) and texts[-2:] == ["cpu", "gpu"]
    edges = [e for e in root.iter(f"{SVG}path") if e.get("marker-end")]
    assert len(edges) == sum(len(t.src) for t in graph.nodes)
    in_place = [e for e in edges if e.get("stroke-width") == "3"]
    assert len(in_place) == sum(p.inplace >= 0 for p in allocator.plan.placements) == 3


def test_views_are_dashed_and_large_graphs_refused() -> None:
    with gg.Context(1 << 20, no_alloc=True):
        t = gg.transpose(gg.new_tensor(types.F32, 3, 2))
        drawing = gg.show.graph(gg.build(gg.cont(t), 16))
        assert drawing.count("stroke-dasharray") == 1
        for _ in range(400):
            t = gg.transpose(t)
        with pytest.raises(ValueError, match=r"show.graph: a graph to draw must have at most 400 tensors, got 402"):
            gg.show.graph(gg.build(t))


def test_s74_plan_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    graph, allocator = planned_mlp()
    ax = gg.show.plan(allocator.plan, graph)
    assert {t.get_text() for t in ax.texts} <= {t.name for t in (*graph.leafs, *graph.nodes)}
    assert [line.get_ydata()[0] for line in ax.lines] == [allocator.plan.sizes[0], allocator.plan.lower_bound()]
    matplotlib.pyplot.close(ax.figure)


def test_what_cannot_be_shown_is_named() -> None:
    with gg.Context(1 << 16):
        x = gg.new_tensor(types.F32, 4)
        graph = gg.build(x * x, 8)
    plan = GraphAllocator(host_buffer_type()).measure(graph)
    run = "run must be what `Scheduler.split_graph` or `alloc_graph` gives, got NoneType"
    for call, text in (
        (lambda: gg.show.graph(5), "show.graph: g must be a Graph, got int; gg.build makes one"),
        (lambda: gg.show.graph(x), "show.graph: g must be a Graph, got Tensor; gg.build makes one"),
        (lambda: gg.show.graph(graph, 5), "show.graph: plan must be a Plan such as `GraphAllocator.reserve` makes"),
        (lambda: gg.show.tensor(5), "show.tensor: t must be a Tensor, got 5"),
        (lambda: gg.show.gguf(5), "show.gguf: file must be a GgufFile, got 5; gg.GgufFile(path) opens one"),
        (lambda: gg.show.loaded(None, []), "show.loaded: file must be a GgufFile, got None; gg.GgufFile(path) "),
        (lambda: gg.show.plan(None, graph), "show.plan: there must be a plan, got None; `GraphAllocator.reserve` "),
        (lambda: gg.show.plan(plan, 5), "show.plan: graph must be a Graph, got int; gg.build makes one"),
        (lambda: gg.show.cells(5), "show.cells: cache must be a KVCache, such as llm.context.cache, got int"),
        (lambda: gg.show.passes(None), f"show.passes: {run}"),
        (lambda: gg.show.splits(None), f"show.splits: {run}"),
    ):  # fmt: skip
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value).startswith(text)
    with pytest.raises(ValueError, match=r"^show.plan: buffer_id must be 0 to 0, got 1$"):
        gg.show.plan(plan, graph, 1)


def test_nothing_is_imported_at_start() -> None:
    code = "import sys, ggjit; assert not [m for m in sys.modules if m.startswith(('ggjit.show', 'matplotlib'))]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_show_is_listed_and_counts_are_in_the_singular():
    assert "show" in dir(gg)
    with gg.Context(1 << 20):
        graph = gg.build(gg.sqr(gg.new_tensor(types.F32, 4)))
        assert repr(graph).startswith("Graph(1 node, 1 leaf")
        assert repr(gg.build(gg.sqr(gg.sqr(graph.nodes[0])))).startswith("Graph(3 nodes, 1 leaf")
