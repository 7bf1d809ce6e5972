"""`ggjit bench peers MODEL...`: ggjit beside llama.cpp and ik_llama.cpp in one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from ggjit.cli import at_least, numbers
from ggjit.counts import counted

if TYPE_CHECKING:
    from ggjit.bench_peers import Result, Row


def add_arguments(parsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of `bench peers`."""
    text = "ggjit beside llama.cpp and ik_llama.cpp"
    parser = parsers.add_parser(
        "peers",
        help=text,
        description=f"Measure {text}: processes that take alternating turns with the same tokens, threads, context and "
        "type of the KV cache; each peer's logits are compared with ours. Factors are medians of ratios within a turn; "
        "above 1 ggjit is ahead.",
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="GGUF files, or names that `ggjit pull` knows")
    parser.add_argument("-t", "--threads", type=numbers(1), metavar="T,..", help="numbers of threads")
    parser.add_argument(
        "-p", "--n-prompt", type=numbers(0), default=[16, 128, 512], metavar="N,..", help="prefill lengths (16,128,512)"
    )
    parser.add_argument("-n", "--n-gen", type=at_least(0), default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument(
        "-d", "--depth", type=numbers(0), default=[0, 2048], metavar="D,..", help="tokens in the cache then (0,2048)"
    )
    parser.add_argument("-r", "--repetitions", type=at_least(1), default=9, metavar="R", help="turns of each test (9)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON",
        help="the Python that has llama_cpp or ik_llama_cpp (by default this one where it has them)",
    )  # fmt: skip
    parser.add_argument(
        "--peer-option", action="append", default=[], metavar="NAME.FIELD=N",
        help="set a field of a peer's model or context parameters, as in ik_llama_cpp.repack_tensors=1",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status: 1 if a peer computes something else."""
    from ggjit.bench_crew import check_options, find_peers
    from ggjit.bench_peers import Plan, bench
    from ggjit.fetch import pull
    from ggjit.threadpool import default_threads

    if not any(args.n_prompt) and not args.n_gen:
        raise ValueError("bench peers: -p or -n must give a length above 0, got 0 for both; leave one of them out")
    peers, options = find_peers(args.peer), _options(args.peer_option)
    check_options(peers, options)
    shown = sys.stderr.isatty() and not args.json
    results = []
    for model in args.models:
        path = os.path.abspath(pull(model))
        for threads in args.threads or [default_threads()]:
            plan = Plan(path, threads, [n for n in args.n_prompt if n], args.n_gen, args.depth, args.repetitions,
                        args.kv_type, options)  # fmt: skip
            result = bench(plan, peers, lambda text: _say(text) if shown else None)
            if shown:
                _say("")
            results.append(result)
            if not args.json:
                _print(result)
    if args.json:
        print(json.dumps([_as_dict(r) for r in results], indent=1))
    return 0 if all(check.passed for r in results for check in r.checks) else 1


def _options(texts: list[str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        name, _, rest = text.partition(".")
        key, _, value = rest.partition("=")
        try:
            found.setdefault(name, {})[key] = float(value)
        except ValueError:
            raise ValueError(f"bench peers: --peer-option must be NAME.FIELD=NUMBER, got {text!r}") from None
    return found


def _say(text: str) -> None:
    print(f"\r{text:20}", end="" if text else "\r", file=sys.stderr, flush=True)


def _print(result: Result) -> None:
    names = list(result.rows[0].samples)
    counts = counted(result.plan.threads, "thread"), counted(result.plan.turns, "turn")
    print(f"\n{os.path.basename(result.plan.path)}, {', '.join(counts)}\n")
    print(f"| test | {' | '.join(names)} | ahead of the better peer | share of the limit | limit of the same run |")
    print("|---" * (len(names) + 4) + "|")
    for row in result.rows:
        print(_line(row, names))
    print()
    for c in result.checks:
        verdict = "" if c.passed else " WRONG:"
        print(
            f"logits of {c.peer}:{verdict} nmse {c.nmse:.1e}, {c.n_agree} of {c.n_decided} decided tokens the same "
            f"({c.n} compared)"
        )
    if result.idle is not None:
        idle = ", ".join(f"{name} {share:.3f}" for name, share in result.idle.items())
        print(f"CPUs used while another computed, at most: {idle}", flush=True)


def _line(row: Row, names: list[str]) -> str:
    form = "{:.1f}" if row.unit == "tokens/s" else "{:.0f} " + row.unit
    values = " | ".join(form.format(row.median(name)) for name in names)
    share, limit = row.share("ggjit"), ""
    if row.limit:
        from ggjit.limits import UNITS

        limit = f"{row.limit} {row.as_dict()['limit_rate']:.1f} {UNITS[row.limit]}"
    return (
        f"| {row.test} | {values} | {row.factor():.2f} ({row.better_peer}) | "
        f"{'' if share is None else f'{share:.2f}'} | {limit} |"
    )


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "model": os.path.basename(result.plan.path),
        "threads": result.plan.threads,
        "plan": dataclasses.asdict(result.plan),
        "rows": [row.as_dict() for row in result.rows],
        "checks": [dataclasses.asdict(check) | {"passed": check.passed} for check in result.checks],
        "idle": result.idle,
    }
