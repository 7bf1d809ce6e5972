"""`ggjit warmup MODEL`: compile the kernels that a model needs, for every number of tokens."""

from __future__ import annotations

import argparse
import sys
import time

from ggjit.cli import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `warmup`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    parser.add_argument("-t", "--threads", type=at_least(1), metavar="T", help="threads (as many as `ggjit info` says)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    parser.add_argument("--prec", choices=("default", "f32"), default="default", help="as of `ggjit run` (default)")
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="kernels for the mapped file")


def run(args: argparse.Namespace) -> int:
    """Load the model and build its graphs; what the cache lacks is compiled."""
    import ggjit as gg
    from ggjit.fetch import pull
    from ggjit.llm.hparams import MAX_DEFAULT_CTX

    progress = sys.stderr.isatty()
    start = time.perf_counter()
    path = pull(args.model, progress=progress)
    with gg.LLM(
        path, n_ctx=MAX_DEFAULT_CTX, n_threads=args.threads, kv_type=args.kv_type, repack=args.repack, prec=args.prec,
        progress=progress,
    ) as llm:  # fmt: skip
        llm.warmup()
    print(f"ready after {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0
