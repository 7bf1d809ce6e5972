"""`ggjit inspect --memory MODEL`: what a model and its context will take, before anything is allocated."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ggjit.cli import at_least, model_options
from ggjit.counts import counted

if TYPE_CHECKING:
    from ggjit.llm.memory import Estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that go with `--memory`."""
    one = at_least(1)
    parser.add_argument("--memory", action="store_true", help="tell how much memory a model will take, and take none")
    group = parser.add_argument_group("with --memory")
    model_options.add_context(group)
    group.add_argument("-b", "--ubatch", type=one, metavar="N", help="most tokens computed together (512)")
    group.add_argument("-t", "--threads", type=one, metavar="T", help="threads (as many as `ggjit info` says)")
    group.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    group.add_argument("--no-repack", dest="repack", action="store_false", help="compute from the mapped file")
    model_options.add_arguments(parser)


def run(args: argparse.Namespace, path: str) -> int:
    """Print a table, or JSON."""
    from ggjit.gguf import GgufFile
    from ggjit.llm.memory import estimate

    found = estimate(
        path, n_ctx=model_options.context_length(args, path), n_threads=args.threads, kv_type=args.kv_type,
        n_ubatch=args.ubatch, repack=args.repack, **model_options.options(args),
    )  # fmt: skip
    with GgufFile(path) as file:
        model_options.warn_of_overrides(args, file.tensors)
    print(json.dumps(asdict(found), indent=1) if args.json else "\n".join(_lines(path, found)))
    return 0


def _lines(path: str, found: Estimate) -> list[str]:
    from ggjit.cli.inspect import table

    n_ctx = counted(found.n_ctx, "token")
    lines = [f"{path}: bytes for a context of {n_ctx}, at most {found.n_ubatch} computed together", ""]
    rows = [["device", "weights", "kv", "compute", "scratch", "in all"]]
    for name, m in found.devices.items():
        rows.append([name, *(f"{n:,}" for n in (m.weights, m.kv, m.compute, m.scratch, m.total))])
    lines += table(rows, "lrrrrr")
    lines += ["", f"used in the mapped file: {found.mapped:,} bytes, of which memory holds what was read last"]
    lines.append("compute: logits of all tokens wanted; on the CPU alone it grows with what is computed")
    for what, (n_nodes, n_splits) in zip(("a prompt", "one token"), found.reserved.values(), strict=True):
        lines.append(f"graph of {what}: {counted(n_nodes, 'node')} in {counted(n_splits, 'split')}")
    return lines
