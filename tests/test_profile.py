"""Profiles: they account for all of the time, and for the work that the model takes. No times are judged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import cli
from ggjit.cli.bench import prefill_flops, token_cost
from ggjit.limits import Meter
from ggjit.profile import profile

MODELS = Path(__file__).parent / "data" / "models"
QUICK = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limits of a small buffer, in no time."""
    measure = Meter.measure
    monkeypatch.setattr("ggjit.limits._buffer_nbytes", lambda: QUICK)
    monkeypatch.setattr(Meter, "measure", lambda self, *a, **k: measure(self, seconds=0.0))


@pytest.fixture(scope="module")
def llm():
    with gg.LLM(MODELS / "llama-q.Q4_1.gguf", n_ctx=256, n_threads=2, n_ubatch=32, progress=False) as model:
        yield model


def attention_flops(llm, pairs: int) -> int:
    """Operations of attention on so many pairs of a query and a visible key, in all layers."""
    hp = llm.model.hparams
    return 2 * (hp.head_dim + hp.head_dim_v) * hp.n_head(0) * hp.n_layer * pairs


def check_sums(p) -> None:
    assert sum(line.seconds for line in p.lines) + p.barriers + p.python == pytest.approx(p.wall)
    assert sum(line.wait for line in p.lines) == pytest.approx(p.barriers)
    assert all(line.seconds > 0 and line.wait >= 0 and line.least >= 0 for line in p.lines) and p.python > 0
    assert sum(line.seconds for line in p.ops()) == pytest.approx(sum(line.seconds for line in p.lines))


def test_generation_adds_up(llm):
    n = 8
    p = profile(llm, n_gen=n, depth=20, turns=2)
    check_sums(p)
    assert (p.test, p.n_steps, p.n_tokens, p.threads) == ("tg8 @ 20", 2 * n, 1, 2)
    graph = llm.context.graph(1, 256, 1)
    assert sum(line.calls for line in p.lines) == len(graph.executable.steps)
    nbytes, flops = token_cost(llm)
    products = [line for line in p.lines if "mul_mat" in line.op and "sources" not in line.op]
    assert sum(line.flops for line in products) == pytest.approx(flops, rel=0.05)  # the rest is what is fused to them
    assert nbytes < sum(line.nbytes for line in p.lines if "sources" not in line.op) < 2 * nbytes
    visible = sum(range(21, 21 + n)) / n  # first and last step are looked at: the mean of all
    (attention,) = (line for line in p.ops() if line.op == "flash_attn_ext")
    assert attention.flops == pytest.approx(attention_flops(llm, 1) * visible)
    assert list(p.python_us) == list(p.python_parts) == ["greedy", "top-k"] and min(p.python_us.values()) > 0
    assert any(name.startswith(("llm.", "sampling.", "context.")) for name, _ in p.python_parts["top-k"])
    assert graph.executable.program.ticks is None


@pytest.mark.full
def test_prefill_in_several_ubatches_adds_up(llm):
    n = 70
    p = profile(llm, n_prompt=n, turns=2)
    check_sums(p)
    assert (p.test, p.n_steps, p.n_tokens) == ("pp70", 2, n)
    steps = [len(llm.context.graph(k, 256, out).executable.steps) for k, out in ((32, 0), (6, 1))]
    assert sum(line.calls for line in p.lines) == 2 * steps[0] + steps[1]
    (attention,) = (line for line in p.ops() if line.op == "flash_attn_ext")
    first, all_ = 64 * 65 // 2, n * (n + 1) // 2  # without an output the last of 2 layers only fills the cache
    assert attention.flops == pytest.approx(attention_flops(llm, all_ - first) + attention_flops(llm, first) / 2)
    assert not p.python_us
    products = sum(line.flops for line in p.lines if "mul_mat" in line.op and "sources" not in line.op)
    assert products == pytest.approx(prefill_flops(llm, n), rel=0.05)
    assert prefill_flops(llm, n) < n * token_cost(llm)[1] and prefill_flops(llm, 1) == token_cost(llm)[1]


def test_results_do_not_change_while_recorded(llm):
    ids = [1, 5, 9, 2]
    want = llm.logits(ids)
    graph = llm.context.graph(4, 256, 4)
    graph.executable.program.ticks = np.zeros(2 * len(graph.executable.steps) + 1, np.int64)
    try:
        assert (llm.logits(ids) == want).all()
        ticks = graph.executable.program.ticks
        assert (ticks[1:] >= ticks[:-1]).all() and ticks[0] > 0
    finally:
        graph.executable.program.ticks = None


def test_lengths_must_fit(llm):
    for lengths in ({"n_prompt": 300}, {"n_gen": 250, "depth": 10}, {"n_gen": 0}, {"turns": 0}):
        with pytest.raises(ValueError, match="profile: lengths and turns must be positive and fit the context of 256"):
            profile(llm, **lengths)


def test_text_and_html(llm):
    p = profile(llm, n_gen=2, turns=1)
    text = str(p)
    assert "| barriers |" in text and "| Python |" in text and "| sum: wall time |" in text
    assert "Python per token, greedy:" in text and "limits of the same run: read" in text
    tables = [t.splitlines() for t in text.split("\n\n")[1:]]
    assert len(tables) == 2 and all(len({line.count("|") for line in t}) == 1 for t in tables)
    assert p._repr_html_().count("<tr>") == len(p.lines) + 4


def test_command_prints_json_and_draws(tmp_path, capsys):
    words = ["profile", str(MODELS / "llama-q.Q4_1.gguf"), "-n", "3", "-t", "1", "-r", "1", "--json"]
    has_plot = importlib.util.find_spec("matplotlib") is not None
    assert cli.main([*words, *(["--plot", str(tmp_path / "p.svg")] if has_plot else [])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["test"], found["threads"], found["barriers"]) == ("tg3", 1, 0.0)
    parts = sum(line["seconds"] for line in found["kernels"]) + found["barriers"] + found["python"]
    assert parts == pytest.approx(found["wall"])
    assert all(line["gb_per_second"] > 0 for line in found["ops"])
    if has_plot:
        assert "flash_attn_ext" in (tmp_path / "p.svg").read_text()
