"""`ggjit bench llm MODEL`: tokens a second, beside what the machine can do in the same run; `ggjit bench ops` and
`ggjit bench peers`: see `ggjit.cli.bench_ops` and `ggjit.cli.bench_peers`.

ppN is the prefill of N tokens into an empty cache, tgN the generation of N tokens one by one from an empty cache, as in
llama-bench. Every repetition takes turns with plain reads and the int8 peak on the same threads, and the shares are
medians of ratios of neighbouring turns: rates of a shared machine change by the second, such ratios hardly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ggjit import op as _op
from ggjit.cli import at_least, bench_ops, bench_peers, numbers

if TYPE_CHECKING:
    from ggjit.limits import Meter
    from ggjit.llm import LLM


@dataclass
class Row:
    """One measurement.

    Attributes:
        test: `pp512`, `tg128`, ...
        threads: that computed.
        tokens_per_second: median.
        samples: tokens a second of each repetition.
        share: median share of the limit: int8 peak for prefill, plain reads for generation.
        shares: of each repetition.
        read_gb_per_second: plain reads beside each repetition (generation).
        int8_gop_per_second: int8 peak beside each repetition (prefill).
        weight_nbytes: bytes of the file that a token needs.
        gop_per_token: operations in products, without attention; of prefill the mean, with the last token's output.
    """

    test: str
    threads: int
    weight_nbytes: int
    gop_per_token: float
    tokens_per_second: float = 0.0
    share: float = 0.0
    samples: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    read_gb_per_second: list[float] = field(default_factory=list)
    int8_gop_per_second: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    text = "prefill and generation of a model"
    llm = parsers.add_parser("llm", help=text, description=f"Measure {text}; 0 for a length leaves that out.")
    llm.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    llm.add_argument("-p", "--n-prompt", type=numbers(0), default=[512], metavar="N,..", help="prefill lengths (512)")
    llm.add_argument("-n", "--n-gen", type=numbers(0), default=[128], metavar="N,..", help="generation lengths (128)")
    llm.add_argument("-t", "--threads", type=numbers(1), metavar="T,..", help="numbers of threads")
    llm.add_argument("-r", "--repetitions", type=at_least(1), default=5, metavar="R", help="turns of each test (5)")
    llm.add_argument(
        "-b", "--batch", type=at_least(1), default=512, metavar="BATCH", help="tokens computed together (512)"
    )
    llm.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    llm.add_argument("--no-repack", dest="repack", action="store_false", help="compute from the mapped file")
    llm.add_argument("--json", action="store_true", help="print a list of objects")
    bench_ops.add_arguments(parsers)
    bench_peers.add_arguments(parsers)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if args.what == "ops":
        return bench_ops.run(args)
    if args.what == "peers":
        return bench_peers.run(args)
    from ggjit.fetch import pull
    from ggjit.threadpool import default_threads

    if not any(args.n_prompt + args.n_gen):
        raise ValueError("bench llm: -p or -n must give a length above 0, got 0 for both; leave one of them out")
    path = pull(args.model)
    rows = []
    for threads in args.threads or [default_threads()]:
        rows += bench_llm(path, threads, args)
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
        return 0
    print("| test | threads | tokens/s | limit of the same run | share of the limit |")
    print("|---|---|---|---|---|")
    for r in rows:
        limit = (
            f"reads {statistics.median(r.read_gb_per_second):.1f} GB/s"
            if r.read_gb_per_second
            else f"int8 {statistics.median(r.int8_gop_per_second):.0f} GOP/s"
        )
        print(f"| {r.test} | {r.threads} | {r.tokens_per_second:.1f} | {limit} | {r.share:.2f} |")
    return 0


def bench_llm(path: str | Path, threads: int, args: argparse.Namespace) -> list[Row]:
    """Measure one model with one number of threads."""
    import ggjit as gg
    from ggjit.limits import Meter

    n_ctx = max(args.n_prompt + args.n_gen, default=1) + 1
    rows = []
    with gg.LLM(
        path, n_ctx=n_ctx, n_threads=threads, kv_type=args.kv_type, n_ubatch=args.batch, repack=args.repack
    ) as llm:
        meter = Meter(threads)
        nbytes, flops = token_cost(llm)
        ids = np.random.default_rng(0).integers(0, llm.model.n_vocab, n_ctx).tolist()
        for kind, lengths in (("pp", args.n_prompt), ("tg", args.n_gen)):
            for n in filter(None, lengths):
                row = Row(f"{kind}{n}", threads, nbytes, (prefill_flops(llm, n) / n if kind == "pp" else flops) / 1e9)
                work = _prefill(llm, ids[:n]) if kind == "pp" else _generate(llm, ids[:n])
                _measure(row, n, work, meter, args.repetitions)
                rows.append(row)
    return rows


def _prefill(llm: LLM, ids: list[int]) -> Callable[[], None]:
    return lambda: llm.decode_from_empty([ids])


def _generate(llm: LLM, ids: list[int]) -> Callable[[], None]:
    return lambda: llm.decode_from_empty([[i] for i in ids])


def _measure(row: Row, n: int, work: Callable[[], None], meter: Meter, repetitions: int) -> None:
    """Turns of work and limit; the limit of a turn is the mean of the readings before and after it."""
    kind = "int8" if row.test.startswith("pp") else "read"
    need = row.gop_per_token * 1e9 if kind == "int8" else row.weight_nbytes
    work()
    before = meter.turn(kind)
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        rate = n / (time.perf_counter() - start)
        after = meter.turn(kind)
        limit = (before + after) / 2
        before = after
        row.samples.append(rate)
        row.shares.append(rate * need / (limit * 1e9))
        (row.int8_gop_per_second if kind == "int8" else row.read_gb_per_second).append(limit)
    row.tokens_per_second = statistics.median(row.samples)
    row.share = statistics.median(row.shares)


def token_cost(llm: LLM) -> tuple[int, float]:
    """Bytes of weights (as in the file) and operations in products that one token takes."""
    context = llm.context
    graph = context.graph(1, context.cache.window(np.arange(1)), 1).graph
    weights, flops = {}, 0.0
    for node in graph.nodes:
        if node.op is _op.by_name("mul_mat"):
            weight = node.src[0]
            assert weight is not None
            weights[weight] = weight.nbytes
            flops += node.op.flops_for(node)
        else:
            for s in node.src:
                if s is not None and s.name in llm.model.weights and s.nrows == 1:
                    weights[s] = s.nbytes
    return sum(weights.values()), flops


def prefill_flops(llm: LLM, n: int) -> float:
    """Operations in products that a prefill of n tokens from an empty cache takes: logits are those of the last one."""
    context, flops = llm.context, 0.0
    for at in range(0, n, context.n_ubatch):
        end = min(at + context.n_ubatch, n)
        graph = context.graph(end - at, context.cache.window(np.arange(end)), int(end == n)).graph
        flops += sum(node.op.flops_for(node) for node in graph.nodes if node.op.name in ("mul_mat", "mul_mat_id"))
    return flops
