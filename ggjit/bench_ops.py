"""How fast ops are beside what the machine can do in the same run, and whether their results are right.

    meter = Meter(threads=2)
    for shape in shapes("mul_mat", "Q4_0"):
        print(measure(shape, meter).share)

An op takes turns with the limit that binds it: plain copy, plain reads, or the rate of the instructions that it is made
of; its share is the median of ratios of neighbouring turns, since rates of a shared machine change by the second. Bytes
are those of sources and result, each once (weights as in their file). The limit at which the op would take longest
counts:

    copy    read + written bytes at twice the rate of plain copy, which counts each byte once
    read    the same at the rate of plain reads, where less than an eighth is written
    int8    operations at the peak of int8 dot products, where a source has a block type
    f32     operations at the peak of f32 multiply-add
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggjit import types
from ggjit.backend import host_buffer_type, tensor_alloc
from ggjit.barriers import BARRIER
from ggjit.bench_shapes import WHOLE, Shape
from ggjit.context import Context, tensor_overhead
from ggjit.dev.cases import CaseInputs, error_of, limit_of, reference_of
from ggjit.graph import Graph, graph_overhead
from ggjit.limits import Meter
from ggjit.program import Program
from ggjit.tensor import Tensor, new_tensor
from ggjit.tensor_values import encode
from ggjit.threadpool import get_pool
from ggjit.types import Type

if TYPE_CHECKING:
    from ggjit.backend import BufferType

__all__ = ["Bench", "Leafs", "Row", "WrongResult", "measure"]

WHOLE_ELEMENTS = 1 << 19  # up to so many the result is checked as a whole
N_SAMPLES = 24  # indices of the sampled dimension
SMALL, REPEATS = 4 << 20, 32  # what touches fewer bytes is run so many times by one program
PATTERN = 1 << 18  # elements of a block type that are made and then repeated
_ARENA = 64 * tensor_overhead() + graph_overhead(64)


class WrongResult(ArithmeticError):
    """An op's result differs from its float64 reference by more than its limit."""


@dataclass
class Row:
    """One measurement.

    Attributes:
        op: function that built the node.
        type: of the weights, table or cache, else of the first source.
        shape: sizes and layout.
        threads: that computed.
        milliseconds: of a run, median.
        gflops: 10^9 operations a second.
        gb_per_second: bytes of sources and result a second.
        limit: "copy", "read", "int8" or "f32".
        limit_rate: of the limit beside it, GB/s or 10^9 operations a second (median).
        share: median share of the limit.
        shares: of each turn.
        error: nmse against the float64 reference, of the elements that were checked.
        n_checked: elements that were checked.
    """

    op: str
    type: str
    shape: str
    threads: int
    milliseconds: float = 0.0
    gflops: float = 0.0
    gb_per_second: float = 0.0
    limit: str = ""
    limit_rate: float = 0.0
    share: float = 0.0
    shares: list[float] = field(default_factory=list)
    error: float = 0.0
    n_checked: int = 0


class _Leaf(NamedTuple):
    """A leaf and its rows as they were made, bytes [ne3, ne2, ne1, row] (packed weights cannot be read back)."""

    tensor: Tensor
    rows: NDArray[np.uint8]


class Leafs(CaseInputs):
    """Makes the leafs of a shape, each in a buffer of its own, and keeps them.

    Args:
        seed: of the random values.
        weights: where weights of products lie: "panel", repacked as models do by default, or "host".
    """

    def __init__(self, seed: int, weights: BufferType) -> None:
        super().__init__(seed)
        self.made: list[_Leaf] = []
        self._weights = weights

    def __call__(self, type: str, *ne: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """A leaf of uniform random values in [low, high)."""
        return self._leaf(types.by_name(type), ne, self._rows(type, ne, low, high))

    def weights(self, type: str, *ne: int) -> Tensor:
        """A leaf of random weights of a product."""
        return self._leaf(types.by_name(type), ne, self._rows(type, ne, -1.0, 1.0), self._weights)

    def ints(self, type: str, *ne: int, low: int = 0, high: int = 10) -> Tensor:
        """A leaf of random integers in [low, high)."""
        found = types.by_name(type)
        return self._leaf(found, ne, self.rng.integers(low, high, ne[::-1], found.dtype))

    def array(self, values: ArrayLike, type: str | None = None) -> Tensor:
        """A leaf of given values."""
        array = np.asarray(values)
        found = types.from_dtype(array.dtype) if type is None else types.by_name(type)
        return self._leaf(found, array.shape[::-1], encode(array, found))

    def _rows(self, type: str, ne: Sequence[int], low: float, high: float) -> NDArray[Any]:
        """Encoded values; of block types a prime number of rows, again and again: encoding takes long."""
        found, shape = types.by_name(type), ne[::-1]
        n_rows = int(np.prod(ne[1:]))
        made = n_rows
        if found.is_quantized and n_rows * ne[0] > PATTERN:
            made = next(p for p in (61, 31, 13, 7, 5, 3, 2, 1) if p * ne[0] <= PATTERN or p == 1)
        values = self.rng.random((made, ne[0]), np.float32) * np.float32(high - low) + np.float32(low)
        try:
            rows = encode(values, found)
        except ValueError:  # types that are made for a given importance only
            assert found.quant is not None
            rows = found.quant.quantize(values, imatrix=np.ones(ne[0], np.float32))
        rows = rows.view(np.uint8).reshape(made, -1)
        if made < n_rows:
            rows = np.tile(rows, (-(-n_rows // made), 1))[:n_rows]
        return rows.reshape(*shape[:-1], -1)

    def _leaf(self, type: Type, ne: Sequence[int], rows: NDArray[Any], memory: BufferType | None = None) -> Tensor:
        t = new_tensor(type, *ne)
        place = memory if memory is not None and memory.supports(t) else host_buffer_type()
        buffer = place.new_buffer(place.padded_size(t))
        tensor_alloc(buffer, t, buffer.base)
        rows = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        buffer.set_tensor(t, rows)
        self.made.append(_Leaf(t, rows.reshape(*t.ne[:0:-1], -1)))
        return t


class _Sampled(Leafs):
    """Makes the leafs of a shape again, cut to some indices.

    Args:
        leafs: what was made.
        cut: dimension that is cut, by the leaf's position.
        indices: what is left of it.
    """

    def __init__(self, leafs: Sequence[_Leaf], cut: Mapping[int, int], indices: NDArray[np.int64]) -> None:
        super().__init__(0, host_buffer_type())
        self._leafs, self._cut, self._indices = leafs, cut, indices

    def _next(self, *_: Any, **__: Any) -> Tensor:
        at = len(self.made)
        (t, rows), dim = self._leafs[at], self._cut.get(at)
        if dim is not None:
            rows = _taken(rows, t.type, dim, self._indices)
        return self._leaf(t.type, [n if d != dim else len(self._indices) for d, n in enumerate(t.ne)], rows)

    __call__ = weights = ints = array = _next


def _taken(rows: NDArray[np.uint8], type: Type, dim: int, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Rows [ne3, ne2, ne1, row bytes] with only some indices of a dimension."""
    if dim > 0:
        return rows.take(indices, 3 - dim)
    size = type.type_size
    cut = rows.reshape(*rows.shape[:3], -1, size).take(indices, 3)
    return cut.reshape(*rows.shape[:3], -1)


def _is_host(t: Tensor) -> bool:
    return t.buffer is not None and t.buffer.type.is_host


class Bench:
    """A shape made ready: leafs, graph, and what its result must be.

    Args:
        shape: what to measure.
        repack: pack weights of products into panels.

    Attributes:
        node: the result.
        weight_rows: the bytes, as in a file, of weights that are packed.
        graph: computes it.
    """

    def __init__(self, shape: Shape, repack: bool = True) -> None:
        from ggjit.backends.cpu import PANEL

        self.shape = shape
        seed = zlib.crc32(f"{shape.name}/{shape.label}".encode())
        with Context(_ARENA, no_alloc=True):
            self.leafs = Leafs(seed, PANEL if repack else host_buffer_type())
            self.node = shape.build(self.leafs)
            self.graph = Graph(64).build_forward_expand(self.node)
        self._dim, cut = self._sample()
        n = 1 if self._dim == 4 else self.node.ne[self._dim]
        # The last, and others not evenly spaced: repeated rows would be met at the same phase again and again.
        others = np.random.default_rng(seed).choice(n - 1, min(n, N_SAMPLES) - 1, replace=False)
        self._indices = np.sort(np.append(others, n - 1))
        self.want = self._reference(cut)
        self.weight_rows = {leaf.tensor: leaf.rows for leaf in self.leafs.made if not _is_host(leaf.tensor)}
        self.leafs.made.clear()

    def _sample(self) -> tuple[int, Mapping[int, int]]:
        """Dimension of the result that is sampled, 4 for none, and what is cut with it."""
        node, made = self.node, self.leafs.made
        if node.nelements + sum(leaf.tensor.nelements for leaf in made) <= WHOLE_ELEMENTS:
            return WHOLE
        if self.shape.sample is not None:
            return self.shape.sample
        dim = node.n_dims - 1
        cut = {i: dim for i, leaf in enumerate(made) if leaf.tensor.ne[dim] == node.ne[dim]}
        return (dim, cut) if cut and node.ne[dim] > 1 else WHOLE

    def _reference(self, cut: Mapping[int, int]) -> NDArray[Any]:
        with Context(_ARENA, no_alloc=True):
            return reference_of(self.shape.build(_Sampled(self.leafs.made, cut, self._indices)), {})

    def taken(self) -> NDArray[Any]:
        """The values of the result that are checked, as they are now."""
        values = self.node.numpy()
        return values if self._dim == 4 else values.take(self._indices, 3 - self._dim)

    def check(self) -> tuple[float, int]:
        """Compare the result, computed once, with the reference.

        Returns:
            The error, and the number of elements that were compared.

        Raises:
            WrongResult: the error is beyond the op's limit.
        """
        node, got = self.node, self.taken()
        error, limit = error_of(node, self.want, got), limit_of(node)
        if not error <= limit:
            raise WrongResult(
                f"bench: the result of {self.shape.name} {self.shape.type} {self.shape.label} must be within {limit:g} "
                f"of its float64 reference, got nmse {error:g}"
            )
        return error, got.size

    def run(self, threads: int) -> None:
        """Compute the graph once."""
        self.graph.compute(threads)

    def program(self, threads: int, repeats: int = 1) -> Callable[[], None]:
        """A function that computes the graph `repeats` times in one program, without Python in between."""
        rows = np.tile(self.graph._executable(threads).rows, (repeats, 1))
        rows[:, 3] |= BARRIER
        program, pool = Program(rows), get_pool(threads)

        def run() -> None:
            failed = program.run(pool)
            if failed is not None:
                raise self.graph._executable(threads).error(*failed)

        return run

    def amount(self, limit: str) -> float:
        """What a run takes of a limit: bytes or operations."""
        if limit in ("int8", "f32"):
            return self.node.op.flops_for(self.node)
        return sum(self.node.op.traffic_for(self.node)) / (2 if limit == "copy" else 1)

    def limit(self, meter: Meter) -> str:
        """The limit at which a run would take longest."""
        read, written = self.node.op.traffic_for(self.node)
        memory = "copy" if written * 8 >= read + written else "read"
        is_packed = any(t is not None and t.type.is_quantized for t in self.node.src)
        kinds = (memory, "int8" if is_packed and "mul_mat" in self.node.op.name else "f32")
        return max(kinds, key=lambda kind: self.amount(kind) / meter.turn(kind, 0.005))


def turn(work: Callable[[], None], seconds: float) -> float:
    """Seconds of one run, from as many runs as take at least `seconds`."""
    runs, start = 0, time.perf_counter()
    while True:
        work()
        runs += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            return passed / runs


def measure(shape: Shape, meter: Meter, turns: int = 5, seconds: float = 0.02, repack: bool = True) -> Row:
    """Measure one shape, in turns with its limit.

    Args:
        shape: what to measure.
        meter: measures the limits, with the threads that compute.
        turns: of the op; one more of the limit.
        seconds: shortest time of a turn.
        repack: pack weights of products into panels.

    Returns:
        Times, rates and shares.

    Raises:
        WrongResult: the op's result is wrong.
        NotImplementedError: no kernel takes the types.
    """
    bench = Bench(shape, repack)
    bench.run(meter.threads)
    repeats = 1 if bench.amount("read") > SMALL else REPEATS
    work = bench.program(meter.threads, repeats)
    row = Row(shape.name, shape.type, shape.label, meter.threads)
    row.error, row.n_checked = bench.check()
    row.limit = bench.limit(meter)
    need = bench.amount(row.limit)
    times, rates = [], []
    before = meter.turn(row.limit, seconds)
    for _ in range(turns):
        times.append(turn(work, seconds) / repeats)
        after = meter.turn(row.limit, seconds)
        rates.append((before + after) / 2)
        row.shares.append(need / times[-1] / 1e9 / rates[-1])
        before = after
    passed = statistics.median(times)
    row.milliseconds = 1e3 * passed
    row.gflops = bench.amount("f32") / passed / 1e9
    row.gb_per_second = bench.amount("read") / passed / 1e9
    row.limit_rate, row.share = statistics.median(rates), statistics.median(row.shares)
    return row
