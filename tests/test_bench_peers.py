"""`bench peers`: engines take turns, say what they measured, and must compute the same; peers are faked by ggjit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ggjit import bench_crew, bench_peers, cli
from ggjit.bench_crew import Crew, find_peers
from ggjit.bench_peers import Check, Plan, Row, compare

MODEL = Path(__file__).parent / "data" / "models" / "llama-headdim.gguf"
# A package that binds llama.cpp's functions as llama-cpp-python does, over a model of ggjit.
FAKE = """
import ctypes, os, sys
import numpy as np
import ggjit as gg
from ggjit.llm.batch import Batch

i32 = ctypes.c_int32


class llama_batch(ctypes.Structure):
    _fields_ = [("n_tokens", i32), ("token", ctypes.POINTER(i32)), ("pos", ctypes.POINTER(i32)),
                ("n_seq_id", ctypes.POINTER(i32)), ("seq_id", ctypes.POINTER(ctypes.POINTER(i32))),
                ("logits", ctypes.POINTER(ctypes.c_int8))]


class params(ctypes.Structure):
    _fields_ = [(n, i32) for n in ("n_gpu_layers", "n_ctx", "n_batch", "n_threads", "type_k", "type_v")]
    _fields_ += [("use_extra_bufts", ctypes.c_bool)]


llama_log_callback = lambda f: f
llama_log_set = llama_backend_init = lambda *_: None
llama_model_default_params = llama_context_default_params = params
llama_get_memory = lambda context: context
llama_model_get_vocab = lambda model: model
llama_vocab_n_tokens = lambda model: model["llm"].model.n_vocab


def llama_model_load_from_file(path, p):
    assert p.n_gpu_layers == 0
    print("loading", path)  # libraries print: that is no answer
    return {"path": os.fsdecode(path), "extra": p.use_extra_bufts} if os.path.exists(path) else None


def llama_init_from_model(model, p):
    assert (p.type_k, p.type_v) == (1, 1)
    model["llm"] = gg.LLM(model["path"], n_ctx=p.n_ctx, n_threads=p.n_threads, progress=False)
    return model


def llama_batch_init(n, embd, n_seq_max):
    b = llama_batch()
    keep = [(i32 * n)(), (i32 * n)(), (i32 * n)(), (ctypes.c_int8 * n)(), [(i32 * 1)() for _ in range(n)]]
    keep.append((ctypes.POINTER(i32) * n)(*[ctypes.cast(s, ctypes.POINTER(i32)) for s in keep[4]]))
    b.token, b.pos, b.n_seq_id, b.logits, b.seq_id = keep[0], keep[1], keep[2], keep[3], keep[5]
    b.keep = keep
    return b


def llama_decode(model, b):
    n = b.n_tokens
    assert [b.n_seq_id[i] for i in range(n)] == [1] * n and [b.logits[i] for i in range(n)] == [0] * (n - 1) + [1]
    assert [b.pos[i] for i in range(n)] == list(range(b.pos[0], b.pos[0] + n))
    logits = model["llm"].context.decode(Batch.of([b.token[i] for i in range(n)], b.pos[0]))[-1]
    model["logits"] = np.ascontiguousarray(logits[::-1] if model["extra"] else logits)
    return 0


def llama_get_logits_ith(model, i):
    return model["logits"].ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def llama_memory_seq_rm(model, seq, first, last):
    model["llm"].context.cache.remove(seq, first)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`--peer` for a package llama_cpp that only a child process finds."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return f"llama_cpp={sys.executable}"


def run(*words: str) -> int:
    buffer = ["--peer-option", f"limits.buffer_nbytes={1 << 20}"]
    lengths = ["-p", "5,20", "-n", "3", "-d", "0,30"]
    return cli.main(["bench", "peers", str(MODEL), "-t", "1", "-r", "1", *lengths, *buffer, *words])


@pytest.mark.full
def test_all_rows_of_all_engines(fake, capsys):
    assert run("--peer", fake, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["model"], found["threads"]) == ("llama-headdim.gguf", 1)
    rows = {r["test"]: r for r in found["rows"]}
    assert list(rows) == ["load", "start", "pp5", "pp20", "tg3", "tg3 @ 30", "memory"]
    for row in rows.values():
        assert list(row["samples"]) == ["ggjit", "llama_cpp"] and row["better_peer"] == "llama_cpp"
        assert all(len(s) == 1 and s[0] > 0 for s in row["samples"].values())
        a, b = (row["median"][name] for name in row["samples"])
        assert row["factor"] == pytest.approx(a / b if row["unit"] == "tokens/s" else b / a)
    assert (rows["pp5"]["limit"], rows["tg3"]["limit"], rows["load"]["limit"]) == ("int8", "read", "")
    assert rows["tg3 @ 30"]["need"] > rows["tg3"]["need"] > 0  # more keys and values are read
    (check,) = found["checks"]
    assert check["passed"] and check["nmse"] == 0 and check["n"] == 2 + bench_peers.STEPS
    assert check["n_decided"] == check["n"]


@pytest.mark.full
def test_other_logits_are_an_error_and_options_are_set(fake, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "_starts", lambda plan, pythons: [])
    assert run("--peer", fake, "--peer-option", "llama_cpp.use_extra_bufts=1") == 1
    out = capsys.readouterr().out
    assert "logits of llama_cpp: WRONG:" in out
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5 and all(line.count("|") == table[0].count("|") for line in table)


def test_options_are_checked_before_anything_is_measured(fake, capsys):
    assert run("--peer", fake, "--peer-option", "llama.n_batch=1") == 1
    assert "--peer-option must name one of llama_cpp, limits, got 'llama'" in capsys.readouterr().err
    assert run("--peer", fake, "--peer-option", "llama_cpp.n_bach=1") == 1
    error = capsys.readouterr().err
    assert "--peer-option llama_cpp.FIELD must be one of n_batch, n_ctx," in error and "got 'n_bach'" in error
    assert run("--peer", fake, "--peer-option", "limits.nbytes=1") == 1
    assert "limits.FIELD must be one of buffer_nbytes, got 'nbytes'" in capsys.readouterr().err


def test_an_engine_that_cannot_start_is_named(fake, capsys, tmp_path):
    (tmp_path / "llama_cpp" / "llama_cpp.py").write_text("raise ImportError('no such library')")
    assert run("--peer", fake) == 1
    assert "llama_cpp must keep running" in (error := capsys.readouterr().err) and "no such library" in error


def test_peers_must_be_known_and_there(capsys, monkeypatch):
    assert run("--peer", "vllm=python3") == 1
    assert "--peer must be NAME=PYTHON" in capsys.readouterr().err
    assert run("--peer-option", "llama_cpp.n_batch", "--peer", "llama_cpp=python3") == 1
    assert "--peer-option must be NAME.FIELD=NUMBER" in capsys.readouterr().err
    monkeypatch.setattr(bench_crew.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a peer must be installed here"):
        find_peers()
    assert find_peers(["ik_llama_cpp=/a/b"]) == {"ik_llama_cpp": "/a/b"}


def test_only_decided_tokens_must_agree():
    rng = np.random.default_rng(0)
    ours = rng.standard_normal((4, 1000)).astype(np.float32)
    theirs = ours + 0.01 * rng.standard_normal(ours.shape).astype(np.float32)
    for i, gap in enumerate((1.0, 1.0, 0.001, 0.001)):
        ours[i, 7], ours[i, 8] = 10 + gap, 10
        theirs[i, 7], theirs[i, 8] = 10 + gap, 10
    theirs[3, 8] = 10.002  # another token, within the noise
    check = compare("p", 1, ours, theirs)
    assert (check.n, check.n_decided, check.n_agree, check.passed) == (4, 2, 2, True)
    theirs[1, 8] = 11.02
    assert not compare("p", 1, ours, theirs).passed
    assert not compare("p", 1, ours, ours * 1.3).passed  # the same tokens, but not the same model
    assert Check("p", 1, float("nan"), 1, 0, 0).passed is False


def test_factors_are_medians_within_turns():
    rates = Row(
        "pp1", 1, "tokens/s", {"ggjit": [10, 20, 90], "a": [10, 10, 30], "b": [1, 1, 1]}, "int8", [1, 2, 3], 1e8
    )
    assert rates.better_peer == "a" and rates.factor() == 2 and rates.factor("b") == 20
    assert rates.share("ggjit") == 1 and rates.share("b") == pytest.approx(0.05)
    times = Row("load", 1, "ms", {"ggjit": [10, 10], "a": [30, 30], "b": [5, 5]})
    assert times.better_peer == "b" and times.factor() == 0.5 and times.share("a") is None


def test_waiting_processes_are_seen(monkeypatch):
    with Crew({"ggjit": sys.executable, "limits": sys.executable}) as crew:
        crew.ask("limits", "load", **Plan("", 1, options={"limits": {"buffer_nbytes": 1 << 20}}).load("limits"))
        used = iter(np.arange(1000) * 0.01)  # never quiet
        monkeypatch.setattr(bench_crew, "SETTLE", 0.05)
        monkeypatch.setattr(bench_crew, "cpu_seconds", lambda pid: next(used))
        crew.ask("limits", "turn", kind="read")
        assert crew.is_idle_known and crew.idle["ggjit"] > 0


def test_context_holds_what_is_measured():
    assert Plan("", 1).n_ctx == 2048 + 128 + 1
    assert Plan("", 1, prompts=(512,), n_gen=0).n_ctx == 513
    assert Plan("", 1, prompts=(), n_gen=5, depths=(0,)).n_ctx == bench_peers.STEPS + 1
