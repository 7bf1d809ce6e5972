"""`ggjit info`: what ggjit found on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ggjit.cli import cache_folders, numbers
from ggjit.counts import counted

PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "tqdm", "huggingface_hub")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `info`."""
    parser.add_argument("--limits", action="store_true", help="also measure plain reads and copies, int8 and f32 peaks")
    parser.add_argument("-t", "--threads", type=numbers(1), metavar="T,..", help="numbers of threads for --limits")
    parser.add_argument("--json", action="store_true", help="print JSON")


def package_version(name: str) -> str:
    """The version of an installed package, found without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def folder_size(folder: Path | None, pattern: str) -> tuple[int, int]:
    """Number and bytes of the files in a folder whose names match; (0, 0) if there is no folder."""
    files = list(folder.glob(pattern)) if folder is not None and folder.is_dir() else []
    return len(files), sum(path.stat().st_size for path in files)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _folder(path: Path | None, pattern: str) -> dict[str, Any]:
    n, nbytes = folder_size(path, pattern)
    return {"path": None if path is None else str(path), "files": n, "nbytes": nbytes}


def collect() -> dict[str, Any]:
    """Everything that `info` shows but the limits."""
    from ggjit import __version__, cpu, fetch, kernel_cache, threadpool

    wanted, used = cache_folders()

    name, features = cpu.target()
    threads, why = threadpool.threads_found()
    return {
        "ggjit": __version__,
        "python": platform.python_version(),
        "packages": {package: package_version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"name": _cpu_name(), "level": cpu.cpu_level(), "llvm_name": name, "features": features.split(",")},
        "threads": {"default": threads, "why": why, "cpus": os.cpu_count()},
        "kernel_cache": _folder(used, "*.o")
        | {"limit": kernel_cache.LIMIT, "wanted": None if wanted is None else str(wanted)},
        "models": _folder(fetch.models_folder(), "**/*.gguf"),
    }


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def _print(facts: dict[str, Any]) -> None:
    cpu, threads, cache, models = (facts[key] for key in ("cpu", "threads", "kernel_cache", "models"))
    features = [name.removeprefix("+") for name in cpu["features"] if name.startswith("+")]
    kept = f"{counted(cache['files'], 'kernel')}, {_mib(cache['nbytes'])} of {_mib(cache['limit'])}"
    rows = [
        ("ggjit", f"{facts['ggjit']}, Python {facts['python']}, {facts['system']}"),
        ("packages", ", ".join(f"{name} {number}" for name, number in facts["packages"].items())),
        ("CPU", f"{cpu['name']} ({cpu['llvm_name']})"),
        ("level", cpu["level"] + (" (GGJIT_CPU)" if os.environ.get("GGJIT_CPU") else "")),
        ("features", " ".join(features)),
        ("threads", f"{threads['default']}: {threads['why']}"),
        ("kernel cache", f"{cache['path']}, {kept}" if cache["path"] else "none: no folder can be written"),
        *([] if cache["path"] == cache["wanted"] else [("", f"instead of {cache['wanted']}, which cannot be written")]),
        ("models", f"{models['path']}, {counted(models['files'], 'file')}, {_mib(models['nbytes'])}"),
    ]
    for name, value in rows:
        print(f"{name:13} {value}")


def _limits(counts: list[int] | None, as_json: bool) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from ggjit import limits, threadpool

    found, shown = [], not as_json and sys.stderr.isatty()
    for n in counts or sorted({1, threadpool.default_threads()}):
        if shown:
            print(f"measuring with {counted(n, 'thread')} ...", file=sys.stderr, end="\r", flush=True)
        found.append(limits.measure(n))
        if shown:
            print(" " * 40, file=sys.stderr, end="\r", flush=True)
        if not as_json:
            one = found[-1]
            print(
                f"limits, {n:3}T   read {one.read:.1f} GB/s, copy {one.copy:.1f} GB/s ({_mib(one.buffer_nbytes)}), "
                f"int8 {one.int8:.0f} GOP/s, f32 {one.f32:.0f} GFLOP/s"
            )
    return [asdict(one) for one in found]


def run(args: argparse.Namespace) -> int:
    """Print what was found."""
    facts = collect()
    if not args.json:
        _print(facts)
    if args.limits:
        facts["limits"] = _limits(args.threads, args.json)
    if args.json:
        print(json.dumps(facts, indent=2))
    return 0
