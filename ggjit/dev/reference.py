"""`python -m ggjit.dev reference PATH...`: run reference cases through builder, plan and compiled program.

    ops/<op>.npz                       one op: header, result and changed storages
    ops/quantize_<type>.npz            a quantizer: coder and decoder bit for bit, in NumPy and compiled
    models/NAME.{gguf,json,npz}        a model: logits, split prompts, intermediate tensors, its vocabulary
    vocab/NAME.cases.json              a vocabulary: tokenize, detokenize, chat
    models/real/NAME.json              a real model, if its file is found (`--model FILE`)

Every case runs with 1 and with 3 threads, whose results must be the same bits. One line is printed for each case that
fails, then `N passed, N failed, N unsupported` and the names of what is unsupported, that is, has no code registered.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ggjit.dev.reference_cases import Difference, is_case_file
from ggjit.dev.reference_ops import Unsupported, kernels, run_file
from ggjit.dev.warm import compile_together

THREADS = (1, 3)
Job = tuple[str, Callable[[], list[Difference]]]


class Tally:
    """Counts of what passed, failed and is unsupported, by name."""

    def __init__(self) -> None:
        self.passed, self.failed, self.n_unsupported = 0, 0, 0
        self.unsupported: dict[str, Counter[str]] = defaultdict(Counter)

    def lines(self) -> list[str]:
        """The closing lines."""
        out = [f"{self.passed} passed, {self.failed} failed, {self.n_unsupported} unsupported"]
        for kind, names in sorted(self.unsupported.items()):
            out.append(f"unsupported {kind}: " + ", ".join(f"{name} ({n})" for name, n in sorted(names.items())))
        return out


def find_jobs(path: Path, threads: Sequence[int], models: Sequence[Path]) -> Iterator[Job]:
    """The cases at a path, a file or a folder that is searched to its leaves.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        for inner in sorted(path.rglob("*")):
            described = inner.with_suffix(".json").exists()
            if inner.suffix == ".json" or (inner.suffix == ".npz" and not described):
                yield from find_jobs(inner, threads, models)
    elif not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    elif path.suffix == ".npz" and is_case_file(path):
        yield from run_file(path, threads)
    elif path.with_suffix(".json").exists():
        yield from _described(path.with_suffix(".json"), threads, models)


def _described(path: Path, threads: Sequence[int], models: Sequence[Path]) -> Iterator[Job]:
    """Cases of a model or a vocabulary that a JSON file describes."""
    from ggjit.dev import reference_models, reference_vocab

    facts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(facts, dict) or "file" not in facts:
        return
    file = _find_file(path.parent / facts["file"], models)
    if file is None:
        print(f"not run: {path.stem}, since {facts['file']} is not here; give it by --model", file=sys.stderr)
        return
    yield from reference_vocab.jobs(path, facts, file)
    yield from reference_models.jobs(path, facts, file, threads)


def _find_file(beside: Path, models: Sequence[Path]) -> Path | None:
    """A described file: beside its description, given by name, or fetched by `ggjit pull`."""
    from ggjit.fetch import models_folder

    fetched = models_folder()
    places = [beside, *(path for path in models if path.name == beside.name)]
    if fetched is not None:
        places += fetched.rglob(beside.name)
    return next((place for place in places if place.exists()), None)


def run_paths(
    paths: Sequence[Path], threads: Sequence[int] = THREADS, models: Sequence[Path] = (), verbose: bool = False
) -> Tally:
    """Run all cases under some paths; failing ones are printed.

    Args:
        paths: files and folders.
        threads: numbers of threads that each case runs with.
        models: files of real models that the folders describe.
        verbose: print every case with its time.

    Returns:
        The counts.
    """
    tally = Tally()
    progress = sys.stderr.isatty()
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.npz")))]
    op_files = [file for file in files if file.suffix == ".npz" and is_case_file(file)]
    compile_together(kernel for file in op_files for kernel in kernels(file, threads))
    for path in paths:
        for name, job in find_jobs(path, threads, models):
            if progress:
                print(f"\r{name[:100]:100}", end="\r", file=sys.stderr, flush=True)
            start = time.perf_counter()
            status = _run(name, job, tally)
            if verbose:
                print(f"{status} {name} {time.perf_counter() - start:.2f} s", flush=True)
    return tally


def _run(name: str, job: Callable[[], list[Difference]], tally: Tally) -> str:
    try:
        differences = job()
    except Unsupported as missing:
        tally.n_unsupported += 1
        tally.unsupported[missing.kind][missing.name] += 1
        return "unsupported"
    except Exception as error:  # a case that raises has failed; the others go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        what = f"{type(error).__name__} ({Path(where.filename).name}:{where.lineno}): {text:.300}"
        differences = [Difference(what, float("inf"), 0)]
    if not differences:
        tally.passed += 1
        return "passed"
    tally.failed += 1
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    print(f"FAILED {name}: {differences[0]}{more}", flush=True)
    return "failed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `reference`."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders with reference cases")
    parser.add_argument("--threads", default="1,3", help="numbers of threads, separated by commas (default: 1,3)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="file of a real model that the folders describe"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print every case with its time")


def run(args: argparse.Namespace) -> int:
    """Run the cases; 1 if one failed."""
    threads = tuple(int(n) for n in args.threads.split(","))
    tally = run_paths(args.paths, threads, args.model, args.verbose)
    print("\n".join(tally.lines()))
    return 1 if tally.failed else 0
