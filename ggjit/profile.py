"""Where the time of a model goes: per op and per kernel, beside what the machine could do in the same run.

    with gg.LLM("model.gguf") as llm:
        p = profile(llm, n_gen=64)
    p.lines, p.python, p.share

The profile is of the program that always runs: its fused steps, its threads. Thread 0 notes the CPU's time counter
after each kernel and after each wait for the other threads, some 10 ns a step. Three sums make up the wall time:

    kernels     time of thread 0 in them
    barriers    its waits for the other threads: work that is not split evenly, and the barriers themselves
    Python      all else: what decides, fills inputs, hands the program out, copies results and samples; of a token
                `python_us` tells how much of it is Python, without the compiled code that does such things for it

A kernel's share is the least time that the limits allow over its time: bytes of weights and of the KV cache (and of
what is larger than the last-level cache) at the rate of plain reads, or its operations at the peak. Bytes are those of
the file that are needed, each once; of attention what the mask lets through.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.limits import Limits, Meter, last_level_cache
from ggjit.llm.batch import Batch
from ggjit.llm.sampling import Sampler
from ggjit.op import element_nbytes
from ggjit.program import ns_per_tick

if TYPE_CHECKING:
    from ggjit.llm import LLM
    from ggjit.llm.context import DecodeGraph
    from ggjit.lower import Executable, Step
    from ggjit.tensor import Tensor

__all__ = ["Line", "Profile", "profile"]

PARTS = 8  # Python functions that are named
LOOK = 16  # steps of generation between looks at the masks


@dataclass
class Line:
    """A kernel, or an op: means of a step.

    Attributes:
        op: ops that it computes, or "sources of ..." for what a kernel needs in another form.
        kernel: name of the kernel; of an op all names.
        type: of the weights, table or cache, else of the first source.
        calls: in a step.
        seconds: of thread 0 in the kernel.
        wait: seconds of thread 0 at the barriers behind it.
        nbytes: read and written.
        flops: operations.
        least: seconds that the limits allow.
    """

    op: str
    kernel: str
    type: str
    calls: float = 0.0
    seconds: float = 0.0
    wait: float = 0.0
    nbytes: float = 0.0
    flops: float = 0.0
    least: float = 0.0

    def add(self, other: Line) -> None:
        """Count another one in."""
        for name in ("calls", "seconds", "wait", "nbytes", "flops", "least"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def share(self) -> float:
        """Share of the limit, the wait left out."""
        return self.least / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The attributes and rates."""
        return asdict(self) | {
            "gb_per_second": self.nbytes / self.seconds / 1e9 if self.seconds else 0.0,
            "gop_per_second": self.flops / self.seconds / 1e9 if self.seconds else 0.0,
            "share": self.share,
        }


@dataclass
class Profile:
    """Of prefills or of generated tokens; times are means of a step: a prefill, or a token.

    Attributes:
        test: `pp512`, `tg64`, `tg64 @ 1024`.
        threads: that computed.
        n_tokens: of a step.
        n_steps: that were recorded.
        wall: seconds of a step.
        lines: one for each kernel, op and type; the longest first.
        barriers: seconds of thread 0 at barriers.
        python: seconds of Python, and of compiled code beside the program.
        limits: of the same run.
        plain: median seconds of steps that were not recorded, in turns with those that were.
        recorded: median seconds of the recorded ones.
        python_us: of generation, microseconds of Python in a step by how tokens are chosen, medians.
        python_parts: the functions that they are spent in, by a profiler's shares: (function, microseconds).
    """

    test: str
    threads: int
    n_tokens: int
    n_steps: int
    wall: float
    lines: list[Line]
    barriers: float
    python: float
    limits: Limits
    plain: float
    recorded: float
    python_us: dict[str, float] = field(default_factory=dict)
    python_parts: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Least time that the limits allow over the wall time."""
        return sum(line.least for line in self.lines) / self.wall

    def ops(self) -> list[Line]:
        """A line for each op, the longest first."""
        found: dict[str, Line] = {}
        for line in self.lines:
            mine = found.setdefault(line.op, Line(line.op, "", ""))
            mine.add(line)
            mine.kernel = ", ".join(dict.fromkeys([*filter(None, mine.kernel.split(", ")), line.kernel]))
            mine.type = ", ".join(dict.fromkeys([*filter(None, mine.type.split(", ")), line.type]))
        return sorted(found.values(), key=lambda line: -line.seconds)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "test": self.test, "threads": self.threads, "n_tokens": self.n_tokens, "n_steps": self.n_steps,
            "wall": self.wall, "tokens_per_second": self.n_tokens / self.wall, "share": self.share,
            "ops": [line.as_dict() for line in self.ops()], "kernels": [line.as_dict() for line in self.lines],
            "barriers": self.barriers, "python": self.python, "limits": asdict(self.limits),
            "plain": self.plain, "recorded": self.recorded, "python_us": self.python_us,
            "python_parts": self.python_parts,
        }  # fmt: skip

    def rows(self, lines: Iterable[Line], names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Lines as texts, then barriers, Python and their sum; `names` are the attributes that name a line."""
        texts = [(*names, "calls", "us", "%", "GB/s", "GOP/s", "share of the limit", "wait us")]
        blank = ("",) * (len(names) - 1)
        for line in lines:
            d = line.as_dict()
            rates = f"{d['gb_per_second']:.1f}", f"{d['gop_per_second']:.1f}", f"{line.share:.2f}"
            head = tuple(str(d[name]) for name in names)
            texts.append((*head, f"{line.calls:g}", *self._time(line.seconds), *rates, f"{1e6 * line.wait:.1f}"))
        for name, seconds in (("barriers", self.barriers), ("Python", self.python)):
            texts.append((name, *blank, "", *self._time(seconds), "", "", "", ""))
        share = f"{self.share:.2f}"
        texts.append(("sum: wall time", *blank, "", *self._time(self.wall), "", "", share, ""))
        return texts

    def _time(self, seconds: float) -> tuple[str, str]:
        return f"{1e6 * seconds:.1f}", f"{100 * seconds / self.wall:.1f}"

    def notes(self) -> list[str]:
        """What is measured, the limits, and where Python's time goes, in lines of text."""
        limits = self.limits
        threads, rate = f"{self.threads} thread{'s' * (self.threads > 1)}", self.n_tokens / self.wall
        share = self.recorded / self.plain - 1
        cost = f"recording took {100 * share:.1f} %" if share > 0 else "recording took nothing that can be measured"
        peaks = f"int8 {limits.int8:.0f} GOP/s, f32 {limits.f32:.0f} GFLOP/s"
        found = [
            f"{self.test}, {threads}: {rate:.1f} tokens/s, means of {self.n_steps} steps; {cost}",
            f"limits of the same run: read {limits.read:.1f} GB/s, {peaks}",
        ]
        for how, value in self.python_us.items():
            parts = ", ".join(f"{name} {part:.0f}" for name, part in self.python_parts.get(how, []))
            found.append(f"Python per token, {how}: {value:.0f} us{f' ({parts})' if parts else ''}")
        return found

    def plot(self, ax: Any = None) -> Any:
        """Draw it with matplotlib; returns the axes."""
        from ggjit.show.profile_plot import profile_plot

        return profile_plot(self, ax)

    def __str__(self) -> str:
        tables = [self.rows(self.ops(), ("op",)), self.rows(self.lines, ("kernel", "op", "type"))]
        return "\n\n".join(["\n".join(self.notes()), *("\n".join(_markdown(t)) for t in tables)])

    def _repr_html_(self) -> str:
        from ggjit.show.html import table

        return str(table(self.rows(self.lines, ("kernel", "op", "type")), "; ".join(self.notes())))


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


# --- what a step's kernels have to do -------------------------------------------------------------------------------


class _Cost(NamedTuple):
    """Of a kernel call: what it is called, and its amounts."""

    line: Line
    memory: float  # bytes that must come from memory, or go there
    is_int8: bool
    mask: Tensor | None  # of attention: scales `kv` and the operations
    kv: float  # bytes of keys and values


def _root(t: Tensor) -> Tensor:
    return t if t.view_src is None else t.view_src


def _is_far(t: Tensor) -> bool:
    """Must a tensor's bytes come from memory: weights, the KV cache, what is larger than the last-level cache?"""
    buffer = _root(t).buffer
    return (buffer is not None and buffer.usage != "compute") or element_nbytes(t) > last_level_cache()


def _costs(executable: Executable) -> list[_Cost]:
    """What each step has to do: the step that writes a node's bytes does the node's work, others prepare for it."""
    chains = {chain[-1]: chain for chain in executable.fused}
    seen: set[Tensor] = set()
    found = []
    for step in executable.steps:
        chain = chains.get(step.node, (step.node,))
        is_main = step.record.data == step.node.data and step.node not in seen
        if is_main:
            seen.add(step.node)
        found.append(_main_cost(step, chain) if is_main else _other_cost(step, chain))
    return found


def _name(chain: tuple[Tensor, ...]) -> str:
    return " + ".join(t.op.name for t in chain if not t.op.view)


def _other_cost(step: Step, chain: tuple[Tensor, ...]) -> _Cost:
    sources = [t for t in step.record.src if t is not None]
    name = _name(chain[:1]) if step.record.data != step.node.data else _name(chain)
    line = Line(
        name if step.record.data == step.node.data else f"sources of {name}",
        step.kernel.name, sources[0].type.name if sources else step.record.type.name, 1,
        nbytes=sum(map(element_nbytes, sources)) + element_nbytes(step.record), flops=step.record.nelements,
    )  # fmt: skip
    return _Cost(line, 0.0, False, None, 0.0)


def _main_cost(step: Step, chain: tuple[Tensor, ...]) -> _Cost:
    first = chain[0].src[0]
    far = next((s for t in chain for s in t.src if s is not None and _is_far(s)), first)
    line = Line(_name(chain), step.kernel.name, chain[0].type.name if far is None else far.type.name, 1)
    inner, memory, kv, mask, is_int8 = set(chain[:-1]), 0.0, 0.0, None, False
    for node in chain:
        if node.op.view:
            continue
        read, written = node.op.traffic_for(node)
        sources = {s for s in node.src if s is not None}
        near = sum(element_nbytes(s) for s in sources if not _is_far(s))
        read -= sum(element_nbytes(s) for s in sources if s in inner or _root(s) in inner)
        line.flops += node.op.flops_for(node)
        written = 0 if node in inner and node.view_src is None else written
        line.nbytes += max(0, read) + written
        memory += max(0, node.op.traffic_for(node)[0] - near) + (written if _is_far(node) else 0)
        is_int8 |= "mul_mat" in node.op.name and any(s.type.is_quantized for s in sources)
        if node.op.name == "flash_attn_ext":
            mask, kv = node.src[3], sum(element_nbytes(s) for s in node.src[1:3])
    return _Cost(line, memory, is_int8, mask, kv)


class _Graph:
    """A graph that is recorded.

    Args:
        graph: of an ubatch.
    """

    def __init__(self, graph: DecodeGraph) -> None:
        self.program = graph.executable.program
        self.costs = _costs(graph.executable)
        self.ticks = np.zeros(2 * len(self.costs) + 1, np.int64)
        self.samples: list[NDArray[np.int64]] = []
        self.seen: dict[Tensor, list[tuple[float, float]]] = {c.mask: [] for c in self.costs if c.mask is not None}

    def record(self, on: bool) -> None:
        """Let later runs write their times, or not."""
        self.program.ticks = self.ticks if on else None

    def look(self) -> None:
        """Note which part of the masks of the last run lets through: of pairs, and of rows of keys."""
        for mask, seen in self.seen.items():
            is_open = mask.numpy() == 0
            seen.append((float(is_open.mean()), float(is_open.any(-2).mean())))

    def take(self) -> float:
        """Keep the times of the last run; returns its seconds."""
        self.samples.append(self.ticks.copy())
        return float((self.ticks[-1] - self.ticks[0]) * ns_per_tick() / 1e9)

    def lines(self, limits: Limits, n_steps: int) -> Iterable[Line]:
        """A line for each step of the program; means of `n_steps`."""
        assert limits.read and limits.int8 and limits.f32
        if not self.samples:
            return
        passed = np.diff(np.array(self.samples)).sum(0) * (ns_per_tick() / 1e9 / n_steps)
        n = len(self.samples) / n_steps
        for i, cost in enumerate(self.costs):
            pairs, rows = np.mean(self.seen[cost.mask], 0) if cost.mask is not None else (1.0, 1.0)
            hidden = cost.kv * (1 - rows)
            flops = cost.line.flops * pairs
            peak = limits.int8 if cost.is_int8 else limits.f32
            least = max((cost.memory - hidden) / limits.read, flops / peak) / 1e9
            line = cost.line
            amounts = (n * float(x) for x in (line.nbytes - hidden, flops, least))
            yield Line(line.op, line.kernel, line.type, n, *map(float, passed[2 * i : 2 * i + 2]), *amounts)


# --- running ----------------------------------------------------------------------------------------------------------


class _Recorder:
    """Runs a model and notes wall times, and the times of its programs.

    Args:
        llm: the model.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.graphs: dict[DecodeGraph, _Graph] = {}
        self.walls: dict[bool, list[float]] = {False: [], True: []}  # of steps, recorded or not

    def graph(self, n_tokens: int, n_outputs: int, on: bool) -> _Graph:
        """The graph that the next ubatch will use."""
        context = self.llm.context
        window = context.cache.window(context.cache.find_cells(n_tokens))
        key = context.graph(n_tokens, window, n_outputs)
        if key not in self.graphs:
            self.graphs[key] = _Graph(key)
        self.graphs[key].record(on)
        return self.graphs[key]

    def prefill(self, ids: list[int], on: bool) -> None:
        """One prefill from an empty cache."""
        context, n = self.llm.context, self.llm.context.n_ubatch
        context.cache.clear()
        wall = 0.0
        for at in range(0, len(ids), n):
            part, is_last = ids[at : at + n], at + n >= len(ids)
            graph = self.graph(len(part), int(is_last), on)
            start = time.perf_counter()
            context.decode(Batch.of(part, at, outputs="last" if is_last else "none"))
            wall += time.perf_counter() - start
            if on:
                graph.take()
                graph.look()
        self.walls[on].append(wall)

    def generate(self, ids: list[int], n: int, sampler: Sampler, on: bool) -> list[float]:
        """Generate n tokens behind a prompt; returns each step's seconds outside of compiled code.

        Cells, inputs and the choice of a token are compiled code too, beside the program.
        """
        self.llm.decode_from_empty([ids[:1]])  # nothing of the prompt is there from the time before but its first token
        tokens = self.llm.raw_tokens(ids, n + 1, sampler)
        next(tokens)
        outside = []
        for i in range(n):
            graph = self.graph(1, 1, on)
            beside = self.llm.context.cache.ticks + sampler.ticks
            start = time.perf_counter()
            next(tokens)
            wall = time.perf_counter() - start
            self.walls[on].append(wall)
            if on:
                beside = self.llm.context.cache.ticks + sampler.ticks - beside
                outside.append(wall - graph.take() - beside * ns_per_tick() / 1e9)
                if i % LOOK == 0 or i + 1 == n:  # not always: waiting threads go to sleep after half a millisecond
                    graph.look()
        return outside

    def stop(self) -> None:
        """Let the programs run as before."""
        for graph in self.graphs.values():
            graph.record(False)


def profile(llm: LLM, n_prompt: int = 0, n_gen: int = 64, depth: int = 0, turns: int = 3) -> Profile:
    """Record prefills, or the generation of tokens.

    Args:
        llm: the model; its cache is used.
        n_prompt: tokens of a prefill from an empty cache; 0 records generation.
        n_gen: tokens to generate, one by one.
        depth: tokens in the cache before them.
        turns: prefills or generations, each in turns with one that is not recorded, and with the limits.

    Returns:
        Means over all steps.

    Raises:
        ValueError: the context is too short, or nothing is asked for.
    """
    need = n_prompt or max(depth, 1) + n_gen + 1
    if need > llm.n_ctx or max(n_prompt, n_gen) < 1 or turns < 1:
        raise ValueError(
            f"profile: lengths and turns must be positive and fit the context of {llm.n_ctx} tokens, got n_prompt "
            f"{n_prompt}, n_gen {n_gen}, depth {depth} and {turns} turns"
        )
    threads = llm.context.n_threads
    recorder, meter, limits = _Recorder(llm), Meter(threads), []
    ids = np.random.default_rng(0).integers(0, llm.model.n_vocab, max(need, 1)).tolist()
    greedy, outside = Sampler(temperature=0), []
    try:
        for turn in range(turns + 1):
            for on in (False, True):
                if n_prompt:
                    recorder.prefill(ids[:n_prompt], on)
                else:
                    outside += recorder.generate(ids[: max(depth, 1)], n_gen, greedy, on)
            if turn == 0:  # compiles, warms
                recorder.walls[False].clear()
                recorder.walls[True].clear()
                for graph in recorder.graphs.values():
                    graph.samples.clear()
                outside.clear()
            limits.append(meter.measure(seconds=0.1))
        found = _summary(recorder, limits, n_prompt or 1)
        found.test = f"pp{n_prompt}" if n_prompt else f"tg{n_gen}" + (f" @ {depth}" if depth else "")
        if not n_prompt:
            _python(found, recorder, ids[: max(depth, 1)], n_gen, outside)
    finally:
        recorder.stop()
    return found


def _summary(recorder: _Recorder, limits: list[Limits], n_tokens: int) -> Profile:
    walls = recorder.walls[True]
    rates = {k: statistics.median(getattr(one, k) for one in limits) for k in ("read", "copy", "int8", "f32")}
    limit = Limits(limits[0].threads, limits[0].level, limits[0].buffer_nbytes, **rates)
    lines: dict[tuple[str, str, str], Line] = {}
    for graph in recorder.graphs.values():
        for line in graph.lines(limit, len(walls)):
            key = (line.op, line.kernel, line.type)
            lines.setdefault(key, Line(*key)).add(line)
    wall = sum(walls) / len(walls)
    barriers = sum(line.wait for line in lines.values())
    python = wall - barriers - sum(line.seconds for line in lines.values())
    return Profile(
        "", limit.threads, n_tokens, len(walls), wall, sorted(lines.values(), key=lambda line: -line.seconds), barriers,
        python, limit, statistics.median(recorder.walls[False]), statistics.median(walls),
    )  # fmt: skip


def _python(found: Profile, recorder: _Recorder, prompt: list[int], n: int, greedy: list[float]) -> None:
    """Python's time by how tokens are chosen; its parts by a profiler, whose own cost is taken out by scaling."""
    import cProfile

    top_k = recorder.generate(prompt, n, Sampler(seed=0), True)
    for how, sampler, outside in (("greedy", Sampler(temperature=0), greedy), ("top-k", Sampler(seed=0), top_k)):
        found.python_us[how] = 1e6 * statistics.median(outside)
        cache, compiled = recorder.llm.context.cache, 0.0
        recorder.llm.decode_from_empty([prompt[:1]])
        tokens = recorder.llm.raw_tokens(prompt, n + 1, sampler)
        next(tokens)
        profiler, beside = cProfile.Profile(), (cache.ticks, sampler.ticks)
        for _ in range(n):
            graph = recorder.graph(1, 1, True)
            profiler.enable()
            next(tokens)
            profiler.disable()
            compiled += graph.take()
        inside = {"threadpool.execute": compiled}
        for name, ticks in (("context.run", cache.ticks - beside[0]), ("sampling._choose", sampler.ticks - beside[1])):
            inside[name] = ticks * ns_per_tick() / 1e9
        found.python_parts[how] = _parts(profiler, inside, found.python_us[how])


def _parts(profiler: Any, inside: dict[str, float], total: float) -> list[tuple[str, float]]:
    """The functions that most of the time is spent in, scaled to a total.

    Args:
        profiler: of all steps.
        inside: seconds in compiled code by the function that calls it; they are left out.
        total: microseconds of a step.
    """
    import pstats

    times: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = "" if file == "~" else f"{Path(file).stem}."
        name = where + name.strip("<>").removeprefix("built-in method ").removeprefix("method ")
        times[name] = times.get(name, 0.0) + own
    for name, seconds in inside.items():
        times[name] = max(0.0, times.get(name, 0.0) - seconds)
    scale = total / max(sum(times.values()), 1e-12)
    best = sorted(times.items(), key=lambda item: -item[1])[:PARTS]
    rest = sum(times.values()) - sum(own for _, own in best)
    return [(name, scale * own) for name, own in [*best, (f"{len(times) - len(best)} others", rest)]]
