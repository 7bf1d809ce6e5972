"""The frame of the command line: help, errors, exit statuses; `info`."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ggjit import cli
from ggjit.errors import GgufError

MODEL = str(Path(__file__).parent / "data" / "models" / "llama-headdim.gguf")


@pytest.fixture
def command(monkeypatch):
    """A command `boom` that raises what it is given."""

    def make(error):
        def run(args):
            print("before")
            raise error

        module = types.SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--n"), run=run)
        monkeypatch.setitem(sys.modules, "ggjit.cli.boom", module)
        monkeypatch.setitem(cli.COMMANDS, "boom", "raise")

    return make


def test_help_names_every_command_and_imports_no_numpy():
    code = (
        "import sys, ggjit.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'llvmlite', 'ggjit.jit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout.replace("\n", " ")


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_version(capsys):
    from ggjit import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ggjit {__version__}\n"


@pytest.mark.parametrize(
    ("words", "low"),
    [
        ("run x -p y -n -2", 1), ("run x -p y -c -1", 1),
        ("run x -p y -t 0", 1), ("run x -p y --top-k 1.5", 0), ("bench llm x -r 0", 1),
        ("bench llm x -p 1,a", 0), ("bench llm x -n -1", 0), ("warmup x -t two", 1), ("info --limits -t 1,0", 1),
    ],
)  # fmt: skip
def test_numbers_are_checked(capsys, words, low):
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    assert stop.value.code == 2
    assert re.search(f"must be a whole number of at least {low}(, or -?[01] for .*)?, got ", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    ["run MODEL -p x", "inspect MODEL", "inspect MODEL --memory", "quantize MODEL out.gguf Q8_0", "warmup MODEL",
     "imatrix MODEL -f TEXT -o out.gguf", "perplexity MODEL -f TEXT -c 64", "bench llm MODEL", "profile MODEL",
     "pull MODEL"],
)  # fmt: skip
@pytest.mark.parametrize("model", ["missing.gguf", "no/such/model"])
def test_a_model_that_is_not_there_is_named(capsys, tmp_path, words, model):
    text = tmp_path / "text"
    text.write_text("some words", "utf-8")
    assert cli.main(words.replace("MODEL", model).replace("TEXT", str(text)).split()) == 1
    assert capsys.readouterr().err == f"ggjit: error: {model}: No such file or directory\n"


def test_unknown_command():
    with pytest.raises(SystemExit) as stop:
        cli.main(["nonsense"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("run: n must be positive,\n got -1"), "run: n must be positive, got -1"),
        (GgufError("a.gguf", 4, "version must be 2 or 3, got 9"), "a.gguf, byte 4: version must be 2 or 3, got 9"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "x.gguf: No such file or directory"),
        (NotImplementedError("no kernel"), "no kernel"),
        (MemoryError(), "MemoryError"),
        (
            ModuleNotFoundError("no", name="tokenizers.models"),
            "boom needs the package tokenizers.models: pip install -e '.[llm]' in a clone of ggjit",
        ),
    ],
)
def test_errors_are_one_line(command, capsys, error, line):
    command(error)
    assert cli.main(["boom"]) == 1
    out, err = capsys.readouterr()
    assert out == "before\n" and err == f"ggjit: error: {line}\n"


def test_debug_shows_the_traceback(command, monkeypatch):
    command(ValueError("x"))
    monkeypatch.setenv("GGJIT_DEBUG", "1")
    with pytest.raises(ValueError, match="x"):
        cli.main(["boom"])


@pytest.mark.parametrize("error", [TypeError("a bug"), ModuleNotFoundError("no", name="nonsense")])
def test_bugs_are_not_hidden(command, error):
    command(error)
    with pytest.raises(type(error)):
        cli.main(["boom"])


def test_interrupt(command, capsys):
    command(KeyboardInterrupt())
    assert cli.main(["boom"]) == 130


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m ggjit info --json | head -c 1", shell=True, capture_output=True, text=True
    )
    assert done.stdout == "{" and "Traceback" not in done.stderr


def test_info():
    done = subprocess.run([sys.executable, "-m", "ggjit", "info"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("numba", "level", "threads", "kernel cache", "models"):
        assert word in done.stdout


def test_info_json(tmp_path, monkeypatch):
    (tmp_path / "x.o").write_bytes(bytes(100))
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "ggjit", "info", "--json"], capture_output=True, text=True)
    facts = json.loads(done.stdout)
    assert facts["kernel_cache"]["path"] == str(tmp_path) and facts["kernel_cache"]["nbytes"] == 100
    assert facts["threads"]["default"] >= 1 and facts["threads"]["why"]
    assert facts["cpu"]["level"] in ("avx512", "avx2", "sse2", "neon")


TINY = Path(__file__).parent / "data" / "models" / "llama-headdim.gguf"
RUN = f"{sys.executable} -m ggjit run {TINY} -n 4 --temp 0 -t 1"


def shell(command, **variables):
    return subprocess.run(command, shell=True, capture_output=True, env={**os.environ, **variables})


@pytest.mark.skipif(os.name == "nt", reason="a shell of its own")
@pytest.mark.parametrize(
    "streams",
    [
        "-p Alice 1>&-",
        "-p Alice 0<&- 1>&- 2>&-",
        *(
            pytest.param(s, marks=pytest.mark.full)
            for s in ("-p Alice 0<&-", "-p Alice 2>&-", "--chat 0<&-", "-f - 0<&-")
        ),
    ],
)
def test_closed_streams(streams):
    done = shell(f"{RUN} {streams}")
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="a shell of its own")
def test_bytes_and_characters_that_no_encoding_has(tmp_path):
    (tmp_path / "prompt").write_bytes(b"Alice \xff\xfe")
    for prompt in (f"-f {tmp_path}/prompt", f"-f - < {tmp_path}/prompt"):
        outs = {e: shell(f"{RUN} {prompt}", PYTHONIOENCODING=e) for e in ("utf-8", "ascii", "latin-1")}
        for done in outs.values():
            assert done.returncode == 0 and done.stdout, done.stderr
        text = outs["utf-8"].stdout.decode()
        assert outs["ascii"].stdout == text.encode("ascii", "backslashreplace")


def test_a_cache_folder_of_no_user_is_no_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ggjit", "info"], capture_output=True, cwd=tmp_path,
        env={**os.environ, "GGJIT_CACHE_DIR": "~nobody-of-that-name/x", "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/null")
def test_a_cache_folder_that_cannot_be_made_is_named():
    done = shell(f"{sys.executable} -m ggjit info", GGJIT_CACHE_DIR="/dev/null")
    assert done.returncode == 0 and b"instead of /dev/null, which cannot be written" in done.stdout
    done = shell(f"{sys.executable} -m ggjit pull {TINY}", GGJIT_CACHE_DIR="/dev/null")
    must = b"ggjit: warning: GGJIT_CACHE_DIR: must be a folder that can be written, got /dev/null; kernels "
    assert done.returncode == 0 and done.stderr.startswith(must) and done.stderr.count(b"\n") == 1


def test_more_threads_than_cpus_and_layers_without_a_device(capsys, monkeypatch):
    monkeypatch.setattr("ggjit.llm.LLM.__init__", lambda *args, **options: pytest.fail("far enough"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with pytest.raises(pytest.fail.Exception, match="far enough"):
        cli.main(["run", MODEL, "-p", "x", "-t", "64", "-ngl", "3"])
    threads, layers = capsys.readouterr().err.splitlines()
    assert threads == "ggjit: warning: --threads: each thread should have a CPU of its own, got 64 for 2"
    must = "--n-gpu-layers: there must be a device for layers to lie on, got 3 and none"
    assert layers == f"ggjit: warning: {must}: all stay on the CPU"


@pytest.mark.parametrize("words", [f"llm {MODEL}", f"peers {MODEL}"])
def test_a_bench_of_nothing(words, capsys):
    assert cli.main(["bench", *words.split(), "-p", "0", "-n", "0"]) == 1
    assert "-p or -n must give a length above 0, got 0 for both" in capsys.readouterr().err


def test_progress_of_limits_is_for_terminals(capsys, monkeypatch):
    from ggjit.cli.info import _limits
    from ggjit.limits import Limits

    monkeypatch.setattr("ggjit.limits.measure", lambda n: Limits(**dict.fromkeys(Limits.__annotations__, n)))
    assert len(_limits([1, 2], False)) == 2
    out, err = capsys.readouterr()
    assert out.count("limits, ") == 2 and err == ""


@pytest.mark.parametrize(
    ("words", "limits"), [("-n -1 -c 0", (None, 256)), ("-n 3 -c 64", (3, 64)), ("", (None, None))]
)
def test_no_limit_and_the_context_of_the_model(words, limits, monkeypatch):
    found = []

    class Loaded(TypedLLM):
        def __init__(self, path, **options):
            found.append(options["n_ctx"])

        def generate(self, ids, max_tokens, **options):
            found.insert(0, max_tokens)
            return iter(())

    monkeypatch.setattr("ggjit.llm.LLM", Loaded)
    assert cli.main(["run", MODEL, "-p", "x", *words.split()]) == 0
    assert tuple(found) == limits


class TypedLLM:
    """What `run` uses of a model, with the ids of a text its letters."""

    model = types.SimpleNamespace(hparams=types.SimpleNamespace(n_ctx_train=256), weights=())
    context = types.SimpleNamespace(n_threads=1)
    n_ctx = 256

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def tokenize(self, text, add_special=True):
        return list(text.encode())

    def n_shared(self, ids):
        return 0


def test_ctrl_c_stops_an_answer_and_ends_at_the_prompt(monkeypatch, capsys):
    seen, lines = [], iter(["one", "two"])

    class Loaded(TypedLLM):
        def render_chat(self, messages):
            seen.append([m["content"] for m in messages])
            return "x"

        def generate(self, ids, max_tokens, **options):
            yield "first "
            yield "second"
            raise KeyboardInterrupt

    def ask(prompt):
        line = next(lines, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("ggjit.llm.LLM", Loaded)
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["run", MODEL, "--chat"]) == 130
    assert seen == [["one"], ["one", "first second", "two"]]
    out, err = capsys.readouterr()
    assert out == "first second\nfirst second\n" and err.startswith("Ctrl-D ends, Ctrl-C stops an answer\n")
    assert cli.main(["run", MODEL, "--chat", "-p", "one"]) == 130  # one answer has nothing to return to


def test_readme_and_errors_name_one_way_to_install():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    ways = set(re.findall(r"pip install .*?'", readme))
    assert ways and all(way.removeprefix("pip install ").removeprefix("-q ") == "-e '" for way in ways)


def test_a_conversation_longer_than_the_context_loses_its_oldest_turns(capsys):
    from types import SimpleNamespace

    from ggjit.cli.run import _fit

    llm = SimpleNamespace(
        n_ctx=40,
        render_chat=lambda messages: "".join(m["content"] for m in messages),
        tokenize=lambda text, add_special: list(text.encode()),
    )
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": r, "content": c * 10} for r, c in zip(roles, "Sabcde", strict=True)]
    assert bytes(_fit(llm, messages)) == b"S" * 10 + b"e" * 10  # 40 tokens would leave no room for an answer
    assert [m["content"][0] for m in messages] == ["S", "e"]
    assert "oldest turns dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile", MODEL, "--plot", "there/is/no/folder.png"], "there/is/no/folder.png: No such file or directory"),
        (["profile", MODEL, "--plot", "times.xyz"], "profile: a picture's name must end with one of ."),
        (["imatrix", MODEL, "-f", MODEL, "-o", "no/folder.gguf"], "no/folder.gguf: No such file or directory"),
        (["imatrix", MODEL, "-f", MODEL, "-o", "/"], "/: Is a directory"),
    ],
)
def test_outputs_are_checked_before_the_work(words, text, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("ggjit.llm.LLM.__init__", lambda *args, **options: pytest.fail("the model was loaded"))
    assert cli.main(words) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"), [("run", ["-p", "a", "-ot", "atn=cpu,attn=cpu"]), ("perplexity", ["-f", "-"])]
)
def test_what_may_not_be_meant_is_told(command, words, capsys, monkeypatch):
    class Model:
        hparams, weights = types.SimpleNamespace(n_ctx_train=64), ("blk.0.attn_q.weight",)

    class Loaded:
        model, n_ctx = Model(), 128

        def __init__(self, *args, **options):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def tokenize(self, text):
            raise ValueError("far enough")

    monkeypatch.setattr("ggjit.llm.LLM", Loaded)
    monkeypatch.setattr("ggjit.llm.perplexity.perplexity", lambda llm, *args: llm.tokenize(""))
    monkeypatch.setattr(sys, "stdin", io.StringIO("text"))
    assert cli.main([command, MODEL, "-c", "128", *words]) == 1
    error = capsys.readouterr().err
    must = "--override-tensor: a regular expression must be found in the name of a tensor"
    assert error.count("--override-tensor") == (command == "run")
    assert f"warning: {must}, got 'atn', found in none" in error or command != "run"
    assert "warning: the model was trained for contexts of 64 tokens, got 128" in error and "far enough" in error


def test_pictures_without_matplotlib_name_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert cli.main(["profile", MODEL, "--plot", "a.png"]) == 1
    assert "profile needs the package matplotlib" in capsys.readouterr().err
