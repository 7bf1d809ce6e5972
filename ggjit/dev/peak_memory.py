"""`python -m ggjit.dev peak-memory --peer PYTHON MODEL...`: resident memory beside llama.cpp's.

A process loads a model and decodes a few tokens greedily; its peak (VmHWM) is read at its end. Another process imports
the modules that the first one had imported, and does nothing. The difference is what the model takes: weights, cache,
intermediates, linked code, Python's objects. PYTHON is one that has `llama_cpp`; the same is done there, with context,
ubatch, threads and the type of the cache alike.

Linux only: /proc/self/status.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ggjit.cli import at_least
from ggjit.cli.inspect import table

WORKER = Path(__file__).with_name("peak_memory_worker.py")
MIB = 1 << 20


@dataclass(frozen=True)
class Peak:
    """One program and one model.

    Attributes:
        who: "ggjit" or "llama.cpp".
        model: name of the file.
        peak: most bytes resident at a time.
        imports: bytes that its imports take.
        anon, file: bytes at the end that belong to no file, and to mapped files; those of the imports taken off.
        tokens: what was generated.
        compiled: did it compile kernels?
    """

    who: str
    model: str
    peak: int
    imports: int
    anon: int
    file: int
    tokens: list[int]
    compiled: bool

    @property
    def net(self) -> int:
        """The peak less the imports."""
        return self.peak - self.imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `peak-memory`."""
    one = at_least(1)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="GGUF files")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has llama_cpp")
    parser.add_argument("-c", "--ctx", type=one, default=2048, metavar="CTX", help="tokens of context (2048)")
    parser.add_argument("-b", "--ubatch", type=one, default=512, metavar="N", help="tokens computed together (512)")
    parser.add_argument("-t", "--threads", type=one, default=2, metavar="T", help="threads (2)")
    parser.add_argument("-p", "--prompt", type=one, default=16, metavar="N", help="tokens of the prompt (16)")
    parser.add_argument("-n", "--predict", type=one, default=8, metavar="N", help="tokens to generate (8)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a peak is above the peer's."""
    options = {
        "n_ctx": args.ctx, "n_ubatch": args.ubatch, "n_threads": args.threads, "n_prompt": args.prompt,
        "n_predict": args.predict,
    }  # fmt: skip
    found, above = [], False
    for model in args.models:
        _worker(sys.executable, "ours", {"model": model, **options})  # fills the kernel cache
        mine = measure("ggjit", sys.executable, "ours", model, options)
        found.append(mine)
        if args.peer:
            found.append(measure("llama.cpp", args.peer, "peer", model, options))
            above |= mine.net > found[-1].net
    if args.json:
        print(json.dumps([{**asdict(p), "net": p.net} for p in found], indent=1))
    else:
        print("\n".join(table([["model", "", "peak", "imports", "net", "anon", "file"], *map(_row, found)], "llrrrrr")))
        print("MiB; anon and file: at the end, less those of the imports")
    return int(above)


def measure(who: str, python: str, what: str, model: str, options: dict[str, int]) -> Peak:
    """Run a program and, apart, its imports.

    Raises:
        RuntimeError: a process failed.
    """
    found = _worker(python, what, {"model": model, **options})
    base = _worker(python, "imports", found["modules"])
    return Peak(
        who, Path(model).name, found["VmHWM"], base["VmRSS"], found["RssAnon"] - base["RssAnon"],
        found["RssFile"] - base["RssFile"], found["tokens"], "numba" in found["modules"],
    )  # fmt: skip


def _worker(python: str, what: str, given: Any) -> Any:
    command = [python, str(WORKER), what, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"peak-memory: {python} must end with 0, got {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _row(p: Peak) -> list[str]:
    name = p.who + (" (compiled)" if p.compiled else "")
    return [p.model, name, *(f"{n / MIB:.1f}" for n in (p.peak, p.imports, p.net, p.anon, p.file))]
