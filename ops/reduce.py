"""sum, sum_rows, mean, cumsum, argmax, count_equal: many values to one.

    sum          all elements to one
    sum_rows     each row to one; mean: divided by the row's length
    cumsum       dst[i] = a[0] + ... + a[i] along dimension 0
    argmax       index of the largest element of a row, the last one of equals
    count_equal  number of positions where two tensors are equal

A row's sum has 32 partial sums, as in norm. sum cuts the tensor in fixed pieces, which threads share; one thread then
adds the sums of the pieces in float64. So bits depend on the shape alone. Elements with gaps are gathered to scratch
first and are added in the same order.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.binary import add, sub
from ggjit.ops.norm import sum_of
from ggjit.ops.repeat import repeat
from ggjit.ops.scale import scale
from ggjit.tensor import Tensor, new_node, same_shape

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["argmax", "count_equal", "cumsum", "mean", "sum", "sum_rows"]

SUM = Op("sum", id=14)
SUM_ROWS = Op("sum_rows", id=15)
CUMSUM = Op("cumsum", id=16, inplace=True)
MEAN = Op("mean", id=17)
ARGMAX = Op("argmax", id=18)
COUNT_EQUAL = Op("count_equal", id=19)
PIECE = 4096  # elements of a row that are summed at once


# --- builders (sum hides Python's own, as ggml's name does) -----------------------------------------------------------


@checked
def sum(a: Tensor) -> Tensor:
    """Add all elements.

    Args:
        a: f32, f16 or bf16, any shape and strides.

    Returns:
        [1], of the type of `a`.

    Raises:
        TypeError: `a` is of another type.

    Source: ggml_sum.
    """
    if a.type not in (types.F32, types.F16, types.BF16):
        raise TypeError(f"sum: a must be F32, F16 or BF16, got {a.type.name} ('{a.name}')")
    return new_node(SUM, a.type, (1, 1, 1, 1), (a,))


def _f32(op: Op, a: Tensor) -> None:
    if a.type is not types.F32:
        raise TypeError(f"{op.name}: a must be F32, got {a.type.name} ('{a.name}')")


@checked
def sum_rows(a: Tensor) -> Tensor:
    """Add the elements of each row.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], rows contiguous.

    Returns:
        f32 [1, ne1, ne2, ne3].

    Raises:
        TypeError: `a` is not f32.
        ValueError: rows of `a` are not contiguous.

    Source: ggml_sum_rows.
    """
    _f32(SUM_ROWS, a)
    if not a.is_contiguous_rows:
        raise ValueError(
            f"sum_rows: rows of a must be contiguous, got ne {list(a.ne)}, nb {list(a.nb)}; use cont first ('{a.name}')"
        )
    return new_node(SUM_ROWS, a.type, (1, *a.ne[1:]), (a,))


@checked
def mean(a: Tensor) -> Tensor:
    """Average the elements of each row.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.

    Returns:
        f32 [1, ne1, ne2, ne3].

    Raises:
        TypeError: `a` is not f32.

    Source: ggml_mean.
    """
    _f32(MEAN, a)
    return new_node(MEAN, a.type, (1, *a.ne[1:]), (a,))


@checked
def cumsum(a: Tensor) -> Tensor:
    """Add up along each row: dst[i] = a[0] + ... + a[i].

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.

    Source: ggml_cumsum.
    """
    _f32(CUMSUM, a)
    return new_node(CUMSUM, a.type, a.ne, (a,))


@checked
def argmax(a: Tensor) -> Tensor:
    """Find the largest element of each row.

    Args:
        a: f32 [ne0, ne1], any strides; ne0 at least 1.

    Returns:
        i32 [ne1], its index; of equals the last one.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is no matrix, or its rows are empty.

    Source: ggml_argmax.
    """
    _f32(ARGMAX, a)
    if a.ne[2:] != (1, 1) or a.ne[0] == 0:
        raise ValueError(f"argmax: a must be a matrix with ne[0] > 0, got ne {list(a.ne)} ('{a.name}')")
    return new_node(ARGMAX, types.I32, (a.ne[1], 1, 1, 1), (a,))


@checked
def count_equal(a: Tensor, b: Tensor) -> Tensor:
    """Count the positions where `a` and `b` are equal.

    Args:
        a: i32, any shape and strides.
        b: i32, the shape of `a`, any strides.

    Returns:
        i64 [1].

    Raises:
        TypeError: one is not i32.
        ValueError: the shapes differ.

    Source: ggml_count_equal.
    """
    names = f"('{a.name}', '{b.name}')"
    if a.type is not types.I32 or b.type is not types.I32:
        raise TypeError(f"count_equal: a and b must be I32, got {a.type.name} and {b.type.name} {names}")
    if not same_shape(a, b):
        raise ValueError(f"count_equal: a and b must have one shape, got {list(a.ne)} and {list(b.ne)} {names}")
    return new_node(COUNT_EQUAL, types.I64, (1, 1, 1, 1), (a, b))


# --- references -------------------------------------------------------------------------------------------------------


@SUM.reference
def _(node, a):
    return a.sum()


@SUM_ROWS.reference
def _(node, a):
    return a.sum(-1, keepdims=True)


@MEAN.reference
def _(node, a):
    return a.mean(-1, keepdims=True) if a.size else np.full(node.ne[::-1], np.nan)


@CUMSUM.reference
def _(node, a):
    return a.cumsum(-1)


@ARGMAX.reference
def _(node, a):
    return a.shape[-1] - 1 - a[..., ::-1].argmax(-1)


@COUNT_EQUAL.reference
def _(node, a, b):
    return np.int64((a == b).sum())


# --- kernels: sum and count_equal, pieces and their total -------------------------------------------------------------


@jitted
def piece_of(piece, pieces, n, ne):
    """Row (i1, i2, i3), first element and length of a piece."""
    begin = piece % pieces * PIECE
    i1, i2, i3 = rows.position(ne, piece // pieces)
    return i1, i2, i3, begin, PIECE if begin + PIECE < n else n - begin


@functools.cache
def make_sum_pieces(type_name: str, is_packed: bool):
    """Kernel dst[piece] = sum of a piece of src0, f32; a packed source is one row."""
    gather, size = staging.gather(type_name), types.by_name(type_name).type_size
    is_plain = type_name == "F32"

    @kernel
    def sum_pieces(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n, step, slot = src0_ne[0], src0_nb[0], COUNTER_LINE + 4 * PIECE * ith
        if is_packed:
            n, step = n * src0_ne[1] * src0_ne[2] * src0_ne[3], np.int64(size)
        pieces = (n + PIECE - 1) // PIECE
        for piece in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
            if is_packed:
                begin = piece * PIECE
                at, count = begin * step, PIECE if begin + PIECE < n else n - begin
            else:
                i1, i2, i3, begin, count = piece_of(piece, pieces, n, src0_ne)
                at = rows.offset(src0_nb, i1, i2, i3) + begin * step
            if is_plain and step == 4:
                total = sum_of(src0, at, count)
            else:
                gather(work, slot, src0, at, step, count)
                total = sum_of(work, slot, count)
            memory.store_f32(dst, 4 * piece, total)

    return sum_pieces


@functools.cache
def make_total(type_name: str):
    """Kernel dst = sum of src0, f32, in order and in float64; one thread does it."""
    store = memory.storer(type_name)

    @kernel
    def total(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        if ith == 0:
            total = 0.0
            for i in range(src0_ne[0]):
                total += np.float64(memory.load_f32(src0, 4 * i))
            store(dst, 0, np.float32(total))

    return total


@kernel
def count_pieces(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """dst[piece] = equal elements in a piece, i64."""
    pieces = (src0_ne[0] + PIECE - 1) // PIECE
    for piece in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
        i1, i2, i3, begin, n = piece_of(piece, pieces, src0_ne[0], src0_ne)
        at = rows.offset(src0_nb, i1, i2, i3) + begin * src0_nb[0]
        by = rows.offset(src1_nb, i1, i2, i3) + begin * src1_nb[0]
        total, i = 0, 0
        if src0_nb[0] == 4 and src1_nb[0] == 4:
            ones = vec.splat_i32(np.int32(0))
            for i in range(0, n - 15, 16):
                same = vec.load_i32(src0, at + 4 * i) == vec.load_i32(src1, by + 4 * i)
                ones = ones + vec.select(same, np.int32(1), vec.splat_i32(np.int32(0)))
            total, i = np.int64(vec.lane_sum(ones)), n - n % 16
        for j in range(i, n):
            if memory.load_i32(src0, at + j * src0_nb[0]) == memory.load_i32(src1, by + j * src1_nb[0]):
                total += 1
        memory.store_i64(dst, 8 * piece, total)


@kernel
def total_count(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """dst = sum of src0, i64; one thread does it."""
    if ith == 0:
        total = 0
        for i in range(src0_ne[0]):
            total += memory.load_i64(src0, 8 * i)
        memory.store_i64(dst, 0, total)


def _pieces(a: Tensor, is_packed: bool) -> int:
    n, n_rows = (a.nelements, 1) if is_packed else (a.ne[0], a.nrows)
    return (n + PIECE - 1) // PIECE * n_rows


@SUM.lower
def _(low, node):
    a = node.src[0]
    is_packed = a.is_contiguous
    n = _pieces(a, is_packed)
    parts = low.scratch(types.F32, (n, 1, 1, 1), 4 * n)
    if n:
        kernel = make_sum_pieces(a.type.name, is_packed)
        low.emit(kernel, parts, src=(a,), work=4 * PIECE * low.n_threads)
    low.emit(make_total(node.type.name), node, src=(parts,))


@COUNT_EQUAL.lower
def _(low, node):
    n = _pieces(node.src[0], False)
    parts = low.scratch(types.I64, (n, 1, 1, 1), 8 * n)
    if n:
        low.emit(count_pieces, parts, src=node.src)
    low.emit(total_count, node, src=(parts,))


def _flops(node):
    return node.src[0].nelements


for _op in (SUM, COUNT_EQUAL):
    _op.supports(lambda node: True)
    _op.flops(_flops)


# --- kernels: rows ----------------------------------------------------------------------------------------------------


@functools.cache
def make_sum_rows(is_mean: bool):
    """Kernel of sum_rows and mean."""

    @kernel
    def row_sums(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n = src0_ne[0]
        slot = COUNTER_LINE + 4 * n * ith
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            x, at = staging.packed(src0, rows.offset(src0_nb, i1, i2, i3), src0_nb[0], n, work, slot)
            total = sum_of(x, at, n)
            if is_mean:
                total = total / np.float32(n)
            memory.store_f32(dst, rows.offset(dst_nb, i1, i2, i3), total)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return row_sums


@kernel
def cumsum_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Running sums in float64, rounded at each element."""
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to, at, total = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3), 0.0
        for i in range(dst_ne[0]):
            total += np.float64(memory.load_f32(src0, at + i * src0_nb[0]))
            memory.store_f32(dst, to + i * dst_nb[0], np.float32(total))
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@kernel
def argmax_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Largest value and its last index in each of 16 lanes, then among the lanes; NaN is passed over."""
    n, minus = src0_ne[0], np.float32(-np.inf)
    slot = COUNTER_LINE + 4 * n * ith
    for row in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
        x, at = staging.packed(src0, row * src0_nb[1], src0_nb[0], n, work, slot)
        top, index = vec.splat(minus), vec.splat_i32(np.int32(0))
        here = vec.lanes()
        for i in range(0, n, 16):
            y = vec.load_first(x, at + 4 * i, n - i)
            better = (y >= top) & vec.first(n - i)
            top, index = vec.select(better, y, top), vec.select(better, here, index)
            here = here + np.int32(16)
        best = vec.lane_max(top)
        memory.store_i32(dst, 4 * row, vec.lane_max(vec.select(top == best, index, np.int32(0))))


def _work_size(node, nth):
    return 0 if node.src[0].is_contiguous_rows else 4 * node.src[0].ne[0] * nth


SUM_ROWS.kernel(lambda node: make_sum_rows(False))
MEAN.kernel(lambda node: make_sum_rows(True))
CUMSUM.kernel(lambda node: cumsum_f32)
ARGMAX.kernel(lambda node: argmax_f32)
for _op in (MEAN, ARGMAX):
    _op.work_size(_work_size)
for _op in (SUM_ROWS, MEAN, CUMSUM, ARGMAX):
    _op.flops(_flops)


# --- backward ---------------------------------------------------------------------------------------------------------


@SUM.backward
def _(node, grad, need):
    return (repeat(grad, node.src[0]),)


@SUM_ROWS.backward
def _(node, grad, need):
    return (repeat(grad, node.src[0]),)


@MEAN.backward
def _(node, grad, need):
    a = node.src[0]
    return (repeat(scale(grad, 1.0 / max(a.ne[0], 1)), a),)


@CUMSUM.backward
def _(node, grad, need):
    """The sum from each element on: the row's sum less what came before."""
    return (add(sub(repeat(sum_rows(grad), grad), cumsum(grad)), grad),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    for kind in ("F32", "F16", "BF16"):
        for n in (1, 33, 5000):
            SUM.case(f"{kind}, {n}")(lambda t, k=kind, n=n: sum(t(k, n, 3, low=0)))
        SUM.case(f"{kind}, padded rows")(lambda t, k=kind: sum(_padded(t(k, 50, 6, low=0))))
        SUM.case(f"{kind}, transposed")(lambda t, k=kind: sum(transpose(t(k, 6, 34, low=0))))
    SUM.case("empty")(lambda t: sum(t("F32", 8, 0)))
    for op, build in ((SUM_ROWS, sum_rows), (MEAN, mean), (CUMSUM, cumsum)):
        for n in (1, 16, 31, 65, 577):
            op.case(f"rows of {n}")(lambda t, f=build, n=n: f(t("F32", n, 3, low=0)))
        op.case("four dimensions")(lambda t, f=build: f(t("F32", 40, 3, 2, 2, low=0)))
        op.case("padded rows")(lambda t, f=build: f(_padded(t("F32", 50, 6, low=0))))
        op.case("permuted")(lambda t, f=build: f(permute(t("F32", 20, 3, 4, low=0), 0, 2, 1, 3)))
        op.case("no rows")(lambda t, f=build: f(t("F32", 8, 0)))
    for op, build in ((MEAN, mean), (CUMSUM, cumsum), (ARGMAX, argmax)):
        op.case("transposed")(lambda t, f=build: f(transpose(t("F32", 6, 34))))

    for n in (1, 16, 33, 577):
        ARGMAX.case(f"rows of {n}")(lambda t, n=n: argmax(t("F32", n, 4)))
    ARGMAX.case("equal values")(lambda t: argmax(t("F32", 40, 3, low=0, high=0)))
    ARGMAX.case("negative values")(lambda t: argmax(t("F32", 40, 3, low=-9, high=-8)))
    ARGMAX.case("padded rows")(lambda t: argmax(_padded(t("F32", 50, 6))))

    ints = {"low": 0, "high": 3}
    COUNT_EQUAL.case("matrix")(lambda t: count_equal(t.ints("I32", 33, 5, **ints), t.ints("I32", 33, 5, **ints)))
    COUNT_EQUAL.case("four dimensions")(
        lambda t: count_equal(t.ints("I32", 7, 3, 2, 2, **ints), t.ints("I32", 7, 3, 2, 2, **ints))
    )
    COUNT_EQUAL.case("long")(lambda t: count_equal(t.ints("I32", 9000, **ints), t.ints("I32", 9000, **ints)))
    COUNT_EQUAL.case("strides")(
        lambda t: count_equal(
            transpose(t.ints("I32", 5, 20, **ints)), view_2d(t.ints("I32", 24, 5, **ints), 20, 5, 96, 8)
        )
    )


def _padded(a: Tensor) -> Tensor:
    from ggjit.ops.views import view_2d

    return view_2d(a, a.ne[0] - 16, a.ne[1], a.nb[1], 4 * a.type.type_size)


_cases()
