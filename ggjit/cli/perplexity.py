"""`ggjit perplexity MODEL -f TEXT`: how well a model predicts a text, as llama-perplexity measures it."""

from __future__ import annotations

import argparse
import sys
import time

from ggjit.cli import at_least, model_options, read_text, tell_of_long
from ggjit.counts import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `perplexity`."""
    one = at_least(1)
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="the text; `-` is stdin")
    parser.add_argument("-c", "--ctx", type=at_least(4), default=512, metavar="CTX", help="tokens of a chunk (512)")
    parser.add_argument("--chunks", type=one, metavar="N", help="most chunks to compute (all)")
    parser.add_argument("-b", "--batch", type=one, default=512, metavar="BATCH", help="tokens computed together (512)")
    parser.add_argument("-t", "--threads", type=one, metavar="T", help="threads (as many as `ggjit info` says)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    parser.add_argument(
        "--prec", choices=("default", "f32"), default="default",
        help="f32: of the weights alone, with activations of 16 bits, as to compare quantizations (as `ggjit run`)",
    )  # fmt: skip
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="compute from the mapped file")


def run(args: argparse.Namespace) -> int:
    """Compute and print the running values and the final one; returns the exit status."""
    import ggjit as gg
    from ggjit.fetch import pull
    from ggjit.llm.perplexity import perplexity

    text, progress = read_text(args.file), sys.stderr.isatty()
    path = pull(args.model, progress=progress)
    with gg.LLM(
        path, n_ctx=args.ctx, n_threads=args.threads, kv_type=args.kv_type, n_ubatch=args.batch, repack=args.repack,
        prec=args.prec, progress=progress,
    ) as llm:  # fmt: skip
        model_options.warn_of_context(llm)
        start = time.perf_counter()
        tell_of_long(text)
        for estimate in perplexity(llm, text, args.ctx, args.chunks):
            print(f"[{estimate.n_chunks}]{estimate.ppl:.4f},", end="", flush=True)
        seconds = time.perf_counter() - start
        n_threads = llm.context.n_threads
    print(f"\nFinal estimate: PPL = {estimate.ppl:.4f} +/- {estimate.stderr:.5f}")
    rate = estimate.n_chunks * args.ctx / seconds
    chunks, threads = counted(estimate.n_chunks, "chunk"), counted(n_threads, "thread")
    print(f"{chunks} of {args.ctx} tokens, {rate:.1f} t/s ({threads})", file=sys.stderr)
    return 0
