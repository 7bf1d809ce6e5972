"""`ggjit warmup MODEL`: compile the kernels that a model needs."""

from __future__ import annotations

import argparse
import sys
import time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `warmup`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("-c", "--ctx", type=int, default=0, help="context length (default: min(model, 4096))")
    parser.add_argument("-t", "--threads", type=int, default=0, help="worker threads (default: as `ggjit info` says)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")


def run(args: argparse.Namespace) -> int:
    """Load the model and build its graphs of one and of many tokens; what is missing in the cache is compiled."""
    import ggjit as gg

    start = time.perf_counter()
    with gg.LLM(args.model, n_ctx=args.ctx or None, n_threads=args.threads or None, kv_type=args.kv_type) as llm:
        llm.warmup()
    print(f"ready after {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0
