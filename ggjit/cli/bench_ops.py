"""`ggjit bench ops`: time of each op beside the limit that binds it, with its result checked in the same run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ggjit.cli import at_least

if TYPE_CHECKING:
    from ggjit.bench_ops import Row


def add_arguments(parsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of `bench ops`."""
    text = "single ops"
    parser = parsers.add_parser(
        "ops",
        help=text,
        description=f"Measure {text} beside the machine's limits, and check their results. With neither --op nor "
        "--type a handful of shapes for each op; data is larger than the last-level cache.",
    )
    parser.add_argument("--op", help="only this function (mul_mat, silu), or this op (unary, glu)")
    parser.add_argument("--type", help="only this type, as GGUF names it")
    parser.add_argument("-t", "--threads", type=at_least(1), metavar="T", help="number of threads")
    parser.add_argument("--turns", type=at_least(1), default=5, metavar="K", help="turns of each op and its limit (5)")
    parser.add_argument("--small", action="store_true", help="data that stays in a core's own cache")
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="weights as they lie in the file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status: 1 if a result is wrong."""
    from ggjit.bench_ops import WrongResult, measure
    from ggjit.bench_shapes import shapes
    from ggjit.limits import Meter

    chosen = shapes(args.op, _type(args.type), args.small)
    meter, rows, n_wrong = Meter(args.threads), [], 0
    if not args.json:
        print("| op | type | shape | ms | GFLOP/s | GB/s | limit of the same run | share of the limit |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for shape in chosen:
        try:
            row = measure(shape, meter, args.turns, repack=args.repack)
        except WrongResult as error:
            n_wrong += 1
            print(f"ggjit: error: {error}", file=sys.stderr)
            continue
        except NotImplementedError as error:
            if args.op is not None and args.type is not None:
                raise
            print(f"ggjit: left out: {error}", file=sys.stderr)
            continue
        rows.append(row)
        if not args.json:
            print(_line(row), flush=True)
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
    return 1 if n_wrong else 0


def _type(text: str | None) -> str | None:
    """A type in the case of its name; what is none stays as it was typed."""
    from ggjit import types

    return next((t.name for t in types.all_types() if text and t.name.upper() == text.upper()), text)


def _line(r: Row) -> str:
    from ggjit.limits import UNITS

    limit = f"{r.limit} {r.limit_rate:.1f} {UNITS[r.limit]}"
    rates = f"{r.milliseconds:.3g} | {r.gflops:.1f} | {r.gb_per_second:.1f}"
    return f"| {r.op} | {r.type} | {r.shape} | {rates} | {limit} | {r.share:.2f} |"
