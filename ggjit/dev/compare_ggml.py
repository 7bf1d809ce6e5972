"""`python -m ggjit.dev compare-ggml --lib DIR`: ops beside ggml's own CPU kernels, one thread, same shapes, same run.

A node's record has the bytes of ggml's tensor, and its op, parameters and types ggml's numbers. So ggml computes the
very node that is measured here: its header is copied into a ggml context and a graph of it given to ggml's CPU backend.
Both read the same sources and write to the same place, since speeds depend on where memory lies; results must agree.

Both sides take turns; the factor is the median of the ratios of neighbouring turns, ggml's time by this one's: above 1
ggjit is faster. ggml's weights lie in rows; with `--repack` those of ggjit lie in panels, as when it runs a model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit.bench_ops import REPEATS, SMALL, Bench, WrongResult, turn
from ggjit.bench_shapes import Shape, shapes
from ggjit.cli import at_least
from ggjit.context import TENSOR_SIZE
from ggjit.dev.cases import limit_of, nmse
from ggjit.op import NONE
from ggjit.ops.copy import CPY
from ggjit.tensor import RECORD, Tensor

LIBRARIES = ("ggml-base", "ggml-cpu")
ARENA = 1 << 20  # bytes of a ggml context: headers and a graph
ABOVE = 1e-3  # nmse of both results at most, where the op's own limit is lower


class _InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@dataclass
class Pair:
    """One comparison.

    Attributes:
        op: function that built the node.
        type: of the weights, table or cache, else of the first source.
        shape: sizes and layout.
        microseconds: of ggjit, median.
        ggml_microseconds: of ggml, median.
        factor: median of ggml's time by ggjit's.
        factors: of each turn.
        error: nmse of both results; None where they may differ (ties of a sort).
    """

    op: str
    type: str
    shape: str
    microseconds: float = 0.0
    ggml_microseconds: float = 0.0
    factor: float = 0.0
    factors: list[float] = field(default_factory=list)
    error: float | None = None


class Ggml:
    """ggml's libraries.

    Args:
        folder: holds libggml-base and libggml-cpu.
        threads: that compute.

    Raises:
        OSError: a library is missing or cannot be loaded.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        base, cpu = (_load(folder, name) for name in LIBRARIES)
        self.base = base
        address, size = ctypes.c_void_p, ctypes.c_size_t
        for library, name, result, arguments in (
            (base, "ggml_init", address, [_InitParams]),
            (base, "ggml_free", None, [address]),
            (base, "ggml_new_tensor_4d", address, [address, ctypes.c_int, *[ctypes.c_int64] * 4]),
            (base, "ggml_new_graph", address, [address]),
            (base, "ggml_build_forward_expand", None, [address, address]),
            (base, "ggml_tensor_overhead", size, []),
            (base, "ggml_backend_graph_compute", ctypes.c_int, [address, address]),
            (cpu, "ggml_backend_cpu_init", address, []),
            (cpu, "ggml_backend_cpu_set_n_threads", None, [address, ctypes.c_int]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if base.ggml_tensor_overhead() != TENSOR_SIZE + 32:
            raise OSError(
                f"compare-ggml: ggml's tensors must have {TENSOR_SIZE} bytes, got {base.ggml_tensor_overhead() - 32}"
            )
        self._backend = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def graph(self, node: Tensor, rows: Mapping[Tensor, NDArray[np.uint8]], repeats: int = 1) -> Callable[[], None]:
        """A function by which ggml computes a node, `repeats` times in one graph.

        Args:
            node: what ggjit computes; it and its sources have data.
            rows: the bytes of sources that are packed.
            repeats: how often.
        """
        base, context = self.base, self.base.ggml_init(_InitParams(ARENA, None, True))
        made: dict[Tensor, int] = {}

        def header(t: Tensor, data: int, sources: Sequence[int] = ()) -> int:
            address = int(base.ggml_new_tensor_4d(context, t.type.id, *t.ne))
            record = np.frombuffer((ctypes.c_char * TENSOR_SIZE).from_address(address), RECORD, 1)
            record["nb"], record["data"] = t.nb, data
            record["op"], record["src"][0, : len(sources)] = t.op.id, sources
            record["op_params"] = np.frombuffer(t.op_params, np.int32)
            if t.op is CPY and len(sources) == 1:
                record["src"][0, 1] = address  # as ggml_cast does
            return address

        for s in node.src:
            if s is not None and s not in made:
                made[s] = header(s, rows[s].ctypes.data if s in rows else s.data)
        graph = base.ggml_new_graph(context)
        for _ in range(repeats):
            root = header(node, node.data, [0 if s is None else made[s] for s in node.src])
            base.ggml_build_forward_expand(graph, root)

        def compute() -> None:
            status = base.ggml_backend_graph_compute(self._backend, graph)
            if status:
                raise RuntimeError(f"compare-ggml: ggml must compute the node, got status {status} ('{node.name}')")

        return compute


def _load(folder: Path, name: str) -> ctypes.CDLL:
    for pattern in (f"lib{name}.so*", f"lib{name}.dylib", f"{name}.dll"):
        for path in sorted(folder.glob(pattern)):
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    raise FileNotFoundError(2, f"compare-ggml: the folder must hold lib{name}", str(folder))


def compare(shape: Shape, ggml: Ggml, turns: int = 5, seconds: float = 0.01, repack: bool = False) -> Pair:
    """Measure one shape on both sides, in turns.

    Args:
        shape: what to measure.
        ggml: the libraries.
        turns: of each side.
        seconds: shortest time of a turn.
        repack: ggjit's weights of products lie in panels.

    Returns:
        The comparison.

    Raises:
        WrongResult: ggjit's result is wrong, or the two differ.
        NotImplementedError: ggjit has no kernel for the types, or the op is none of ggml's.
    """
    bench = Bench(shape, repack)
    node, pair = bench.node, Pair(shape.name, shape.type, shape.label)
    if node.op.id >= 1000 or node.op is NONE:
        raise NotImplementedError(f"compare-ggml: the op must be one of ggml's, got {node.op.name}")
    bench.run(1)
    bench.check()
    repeats = 1 if bench.amount("read") > SMALL else REPEATS
    compute = ggml.graph(node, bench.weight_rows, repeats)
    mine = bench.taken().copy()
    if node.view_src is None:
        node.bytes()[:] = 0
        compute()
        pair.error = _difference(bench, mine)
    work = bench.program(1, repeats)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(turns):
        ours.append(turn(work, seconds) / repeats)
        theirs.append(turn(compute, seconds) / repeats)
    pair.microseconds, pair.ggml_microseconds = (1e6 * statistics.median(t) for t in (ours, theirs))
    pair.factors = [b / a for a, b in zip(ours, theirs, strict=True)]
    pair.factor = statistics.median(pair.factors)
    return pair


def _difference(bench: Bench, mine: NDArray[Any]) -> float:
    """nmse of both results in the elements that are checked; of indices in any order.

    Raises:
        WrongResult: they differ.
    """
    theirs, shape = bench.taken(), bench.shape
    if mine.dtype.kind == "i":
        mine, theirs = np.sort(mine, -1), np.sort(theirs, -1)
    error = nmse(mine, theirs)
    if error > max(ABOVE, limit_of(bench.node)):
        raise WrongResult(
            f"compare-ggml: both results of {shape.name} {shape.type} {shape.label} must agree, got nmse {error:g}"
        )
    return error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--lib", type=Path, required=True, help="folder of libggml-base and libggml-cpu")
    parser.add_argument("--op", help="only this function, or this op")
    parser.add_argument("--type", help="only this type")
    parser.add_argument("--size", choices=("large", "small", "both"), default="both", help="of the data (both)")
    parser.add_argument("--turns", type=at_least(1), default=5, metavar="K", help="turns of each side (5)")
    parser.add_argument("--repack", action="store_true", help="weights of products in panels on this side")
    parser.add_argument("--below", type=float, metavar="F", help="print only factors below this")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns the exit status: 1 if results differ."""
    ggml, pairs, n_wrong = Ggml(args.lib), [], 0
    sizes = {"large": (False,), "small": (True,), "both": (True, False)}[args.size]
    if not args.json:
        print("| op | type | shape | us | us of ggml | factor |")
        print("|---|---|---|---|---|---|", flush=True)
    for shape in (s for small in sizes for s in shapes(args.op, args.type and args.type.upper(), small)):
        try:
            pair = compare(shape, ggml, args.turns, repack=args.repack)
        except WrongResult as error:
            n_wrong += 1
            print(error, file=sys.stderr)
            continue
        except NotImplementedError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        pairs.append(pair)
        if not args.json and (args.below is None or pair.factor < args.below):
            p = pair
            times = f"{p.microseconds:.4g} | {p.ggml_microseconds:.4g} | {p.factor:.2f}"
            print(f"| {p.op} | {p.type} | {p.shape} | {times} |", flush=True)
    if args.json:
        print(json.dumps([asdict(p) for p in pairs], indent=1))
    return 1 if n_wrong else 0
