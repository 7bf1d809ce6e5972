"""`ggjit profile MODEL`: where the time of prefill or generation goes."""

from __future__ import annotations

import argparse
import json

from ggjit.cli import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `profile`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-p", "--n-prompt", type=at_least(1), metavar="N", help="profile the prefill of N tokens")
    what.add_argument("-n", "--n-gen", type=at_least(1), default=64, metavar="N", help="generate N tokens (64)")
    parser.add_argument(
        "-d", "--depth", type=at_least(0), default=0, metavar="D", help="tokens in the cache before generation (0)"
    )
    parser.add_argument("-t", "--threads", type=at_least(1), metavar="T", help="number of threads")
    parser.add_argument("-r", "--repetitions", type=at_least(1), default=3, metavar="R", help="turns (3)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    parser.add_argument("--json", action="store_true", help="print an object")
    parser.add_argument("--plot", metavar="FILE", help="draw times beside what the limits allow (.png, .svg, .pdf)")


def run(args: argparse.Namespace) -> int:
    """Profile and print; returns the exit status."""
    import ggjit as gg
    from ggjit.profile import profile

    if args.plot:
        from ggjit.show.axes import check_picture

        check_picture("profile", args.plot)
        import matplotlib

        matplotlib.use("agg")
    n_prompt = args.n_prompt or 0
    n_ctx = n_prompt or max(args.depth, 1) + args.n_gen + 1
    with gg.LLM(gg.pull(args.model), n_ctx=n_ctx, n_threads=args.threads, kv_type=args.kv_type) as llm:
        found = profile(llm, n_prompt, args.n_gen, args.depth, args.repetitions)
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    if args.plot:
        found.plot().figure.savefig(args.plot)
    return 0
