"""ggjit beside llama.cpp and ik_llama.cpp: same file, tokens, threads, context and type of the KV cache, in one run.

Every engine has a process of its own (`bench_peer_worker`) that stays alive. They take turns: one computes while the
others wait and use no CPU, which is looked at before each turn and counted during it. The machine's limits take a turn
of their own. Factors are medians of ratios within a turn: rates of a shared machine change by the second, such ratios
hardly. Before anything is timed, each peer's logits are compared with ours.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.bench_crew import LIMITS, OURS, Crew, Worker

if TYPE_CHECKING:
    from ggjit.llm.context import DecodeContext

__all__ = ["Check", "Plan", "Result", "Row", "bench", "compare", "kv_nbytes"]

STEPS, PROMPT = 48, 8  # tokens of the comparison of logits: computed one by one, the first of them random
DECIDED = 4 * 2**0.5  # a gap so many times the noise of one logit is decided: 4 times that of a difference
LARGEST_NMSE = 0.02  # of logits between engines: beyond it they do not compute the same


# --- logits -----------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """A peer's logits beside ours.

    Attributes:
        peer: which one.
        threads: that computed.
        nmse: squared differences over squares of ours.
        n: tokens whose logits were compared.
        n_decided: those where our best logit leads by more than the noise, the root mean square of the differences.
        n_agree: those of them where the peer's best token is ours.
    """

    peer: str
    threads: int
    nmse: float
    n: int
    n_decided: int
    n_agree: int

    @property
    def passed(self) -> bool:
        """Both compute the same."""
        return self.n_agree == self.n_decided and self.nmse <= LARGEST_NMSE


def compare(peer: str, threads: int, ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> Check:
    """Compare logits [n, n_vocab]; see `Check`."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    noise = np.sqrt(np.mean((a - b) ** 2, 1))
    two = np.partition(a, -2, 1)[:, -2:]
    decided = two.max(1) - two.min(1) > DECIDED * noise
    same = a.argmax(1) == b.argmax(1)
    nmse = float(((a - b) ** 2).sum() / max((a**2).sum(), 1e-300))
    return Check(peer, threads, nmse, len(a), int(decided.sum()), int((decided & same).sum()))


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One measurement of all engines.

    Attributes:
        test: `pp512`, `tg128`, `tg128 @ 2048`, `load`, `start` or `memory`.
        threads: that computed.
        unit: of the samples: tokens/s, ms or MiB.
        samples: of each engine, one a turn.
        limit: "read" or "int8", or "" where none is looked at.
        limit_rates: beside ggjit in each turn: GB/s or 10^9 operations a second.
        need: bytes or operations of a token.
    """

    test: str
    threads: int
    unit: str
    samples: dict[str, list[float]]
    limit: str = ""
    limit_rates: list[float] = field(default_factory=list)
    need: float = 0.0

    def median(self, engine: str) -> float:
        """Median over the turns."""
        return statistics.median(self.samples[engine])

    @property
    def better_peer(self) -> str:
        """The peer with the better median."""
        choose = max if self.unit == "tokens/s" else min
        return choose((name for name in self.samples if name != OURS), key=self.median)

    def factor(self, peer: str | None = None) -> float:
        """Median of ratios within a turn beside a peer, by default the better one; above 1 ggjit is ahead."""
        pairs = zip(self.samples[OURS], self.samples[peer or self.better_peer], strict=True)
        return statistics.median(a / b if self.unit == "tokens/s" else b / a for a, b in pairs)

    def share(self, engine: str) -> float | None:
        """Median share of the limit beside it."""
        if not self.limit:
            return None
        pairs = zip(self.samples[engine], self.limit_rates, strict=True)
        return statistics.median(rate * self.need / (limit * 1e9) for rate, limit in pairs)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        names = list(self.samples)
        return {
            "test": self.test, "threads": self.threads, "unit": self.unit,
            "median": {n: self.median(n) for n in names},
            "better_peer": self.better_peer, "factor": self.factor(),
            "factors": {n: self.factor(n) for n in names if n != OURS},
            "limit": self.limit, "limit_rate": statistics.median(self.limit_rates) if self.limit_rates else None,
            "share": {n: self.share(n) for n in names}, "samples": self.samples, "limit_rates": self.limit_rates,
            "need": self.need,
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        path: GGUF file.
        threads: that compute.
        prompts: lengths of prefills, from an empty cache.
        n_gen: tokens that are generated one by one; 0 leaves that out.
        depths: tokens in the cache before them.
        turns: of each measurement.
        kv_type: "f16" or "f32".
        options: for each peer fields of its parameters and their values.
    """

    path: str
    threads: int
    prompts: Sequence[int] = (16, 128, 512)
    n_gen: int = 128
    depths: Sequence[int] = (0, 2048)
    turns: int = 9
    kv_type: str = "f16"
    options: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def n_ctx(self) -> int:
        """Tokens of context that all engines get."""
        deepest = max(self.depths, default=0) + self.n_gen if self.n_gen else 0
        return max(*self.prompts, deepest, STEPS) + 1 if self.prompts else max(deepest, STEPS) + 1

    def load(self, name: str) -> dict[str, Any]:
        """The request that loads the model."""
        given = dict(self.options.get(name, {}))
        return {"path": self.path, "n_ctx": self.n_ctx, "threads": self.threads, "kv_type": self.kv_type,
                "options": given}  # fmt: skip


@dataclass
class Result:
    """Of one model with one number of threads.

    Attributes:
        plan: what was asked for.
        rows: measurements.
        checks: each peer's logits.
        idle: for each engine the largest share of a CPU that it used while another computed; None: not known.
    """

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    idle: dict[str, float] | None = None


def kv_nbytes(context: DecodeContext, n_past: int) -> int:
    """Bytes of keys and values that a token reads behind `n_past` tokens, sliding windows considered."""
    total = 0
    for node in context.graph(1, context.cache.window(np.arange(1)), 1).graph.nodes:
        if node.op.name == "flash_attn_ext":
            k, v, mask = node.src[1:4]
            assert k is not None and v is not None
            name = "" if mask is None else mask.name.removeprefix("kq_mask").removeprefix("_")
            n = min(n_past, int(name)) if name.isdigit() else n_past
            total += n * k.ne[2] * (k.ne[0] * k.type.type_size + v.ne[0] * v.type.type_size)
    return total


def bench(plan: Plan, peers: Mapping[str, str], say: Callable[[str], None] = lambda text: None) -> Result:
    """Measure one model with one number of threads.

    Args:
        plan: what to measure.
        peers: the Python of each.
        say: told what begins.

    Returns:
        All rows, also where logits differ: look at `Check.passed`.

    Raises:
        OSError: an engine cannot load the model, or ended.
    """
    result = Result(plan)
    pythons = {OURS: sys.executable, **peers}
    say("kernels")
    prepared = _prepare(plan)
    if plan.turns:
        say("start")
        result.rows += _starts(plan, pythons)
    with Crew({**pythons, LIMITS: sys.executable}) as crew:
        say("load")
        for name in crew.workers:
            crew.ask(name, "load", **plan.load(name))
        say("logits")
        result.checks = _checks(crew, prepared, list(peers))
        for test, need in zip(prepared.tests, prepared.needs, strict=True):
            say(test.name)
            result.rows.append(_measure(crew, plan, test, need))
        peaks = {name: [_mib(crew.ask(name, "prefill", ids=prepared.ids[:1])["memory"])] for name in pythons}
        result.rows.append(Row("memory", plan.threads, "MiB", peaks))
        result.idle = dict(crew.idle) if crew.is_idle_known else None
    return result


def _mib(nbytes: float) -> float:
    return max(nbytes, 1) / (1 << 20)


def _starts(plan: Plan, pythons: Mapping[str, str]) -> list[Row]:
    """From the start of a process to its first token, again and again; one turn before them warms caches."""
    load: dict[str, list[float]] = {name: [] for name in pythons}
    start: dict[str, list[float]] = {name: [] for name in pythons}
    for turn in range(plan.turns + 1):
        for name in _order(list(pythons), turn):
            worker = Worker(name, pythons[name])
            try:
                seconds = worker.ask("load", **plan.load(name))["seconds"]
                worker.ask("prefill", ids=[1])
                passed = time.perf_counter() - worker.started
            finally:
                worker.close()
            if turn:
                load[name].append(1e3 * seconds)
                start[name].append(1e3 * passed)
    return [Row("load", plan.threads, "ms", load), Row("start", plan.threads, "ms", start)]


def _order(names: list[str], turn: int) -> list[str]:
    """Each engine goes first in its turn."""
    k = turn % len(names)
    return names[k:] + names[:k]


class _Test(NamedTuple):
    """A measurement: `n` tokens are timed, and compared with a limit; `n_past` are in the cache, on average."""

    name: str
    n: int
    limit: str
    n_past: int
    request: dict[str, Any]


class _Prepared(NamedTuple):
    """What all engines are asked for: `steps` are tokens of a greedy text, `needs` what a token of each test takes."""

    plan: Plan
    ids: list[int]
    steps: list[int]
    tests: list[_Test]
    needs: list[float]


def _prepare(plan: Plan) -> _Prepared:
    """Run everything once, and count, in a process of its own: neither is memory that the model takes."""
    with Crew({OURS: sys.executable}) as crew:
        n_vocab = crew.ask(OURS, "load", **plan.load(OURS))["n_vocab"]
        ids: list[int] = np.random.default_rng(0).integers(0, n_vocab, plan.n_ctx).tolist()
        steps = crew.ask(OURS, "greedy", ids=ids[:PROMPT], n=STEPS)["ids"]
        prepared = _Prepared(plan, ids, steps, _tests(plan, ids), [])
        _checks(crew, prepared, ())
        for test in prepared.tests:
            crew.ask(OURS, **test.request)
            cost = crew.ask(OURS, "cost", n_past=test.n_past, n=test.n)
            prepared.needs.append(cost["flops"] / test.n if test.limit == "int8" else cost["weights"] + cost["kv"])
    return prepared


def _tests(plan: Plan, ids: list[int]) -> list[_Test]:
    tests = [_Test(f"pp{n}", n, "int8", 0, {"do": "prefill", "ids": ids[:n]}) for n in plan.prompts]
    n = plan.n_gen
    for depth in plan.depths if n else ():
        request = {"do": "generate", "ids": ids[: depth + n], "n": n}
        tests.append(_Test(f"tg{n}" + (f" @ {depth}" if depth else ""), n, "read", depth + n // 2, request))
    return tests


def _checks(crew: Crew, prepared: _Prepared, peers: Sequence[str]) -> list[Check]:
    """Logits after the prompts that are measured and after each of some tokens one by one, mostly a greedy text."""
    plan, steps = prepared.plan, prepared.steps
    prompts = [prepared.ids[:n] for n in plan.prompts]
    found: dict[str, NDArray[np.float32]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OURS, *peers):
            file = Path(folder) / name
            crew.ask(name, "logits", prompts=prompts, steps=steps, file=str(file))
            found[name] = np.fromfile(file, np.float32).reshape(len(prompts) + len(steps), -1)
    return [compare(name, plan.threads, found[OURS], found[name]) for name in peers]


def _measure(crew: Crew, plan: Plan, test: _Test, need: float) -> Row:
    """Turns of all engines; the limit of a turn is the mean of the readings just before and after ggjit's."""
    names = [name for name in crew.workers if name != LIMITS]
    row = Row(test.name, plan.threads, "tokens/s", {name: [] for name in names}, test.limit, need=need)
    for name in names:  # makes what is made once, and fills the cache to its depth
        crew.ask(name, **test.request)
    for turn in range(plan.turns):
        for name in _order(names, turn):
            limit = [crew.ask(LIMITS, "turn", kind=test.limit)["rate"]] if name == OURS else []
            row.samples[name].append(test.n / crew.ask(name, **test.request)["seconds"])
            if limit:
                limit.append(crew.ask(LIMITS, "turn", kind=test.limit)["rate"])
                row.limit_rates.append(statistics.mean(limit))
    return row
