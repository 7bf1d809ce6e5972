"""norm and rms_norm over dimension 0.

    norm      y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
    rms_norm  y = x / sqrt(mean(x^2) + eps)

A sum has 32 partial sums, element i going to lane i % 16 of accumulator i // 16 % 2, and a fixed tree adds them: its
bits depend neither on the threads nor on what surrounds the row. A row belongs to one thread.

| version | one row of 576 f32, one Zen 4 core |
|---|---|
| scalar sum | 10 times slower: the compiler may not reorder it |
| 32 partial sums | as fast as the row is read from the first cache |
| the next row is read while this one is written | rows from memory: .66 of plain copy becomes .92 |

With the product by a weight that follows it in every model (and the sum with a bias) it is one step: the row is still
in the first cache.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, row_shares, types
from ggjit.arguments import checked
from ggjit.fusion import Fused
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.tensor import Tensor, new_node, view_tensor

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["norm", "rms_norm"]

NORM = Op("norm", id=24, params=(("eps", "f32"),), inplace=True)
RMS_NORM = Op("rms_norm", id=25, params=(("eps", "f32"),), inplace=True)


def _norm(op: Op, a: Tensor, eps: float, inplace: bool) -> Tensor:
    if not eps >= 0:
        raise ValueError(f"{op.name}: eps must not be negative, got {eps} ('{a.name}')")
    return view_tensor(op, a, (a,), (eps,)) if inplace else new_node(op, a.type, a.ne, (a,), (eps,))


@checked
def norm(a: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """Normalise each row to mean 0 and variance 1.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        eps: added to the variance, not negative.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        ValueError: `eps` is negative.

    Source: Ba et al., Layer normalization (2016); ggml_norm.
    """
    return _norm(NORM, a, eps, inplace)


@checked
def rms_norm(a: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """Scale each row to mean square 1.

    y = x / sqrt(mean(x^2) + eps)

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        eps: added to the mean square, not negative.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        ValueError: `eps` is negative.

    Source: Zhang and Sennrich, Root mean square layer normalization (2019); ggml_rms_norm.
    """
    return _norm(RMS_NORM, a, eps, inplace)


@NORM.reference
def _(node, a):
    if not a.size:
        return a
    return (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + node.params.eps)


@RMS_NORM.reference
def _(node, a):
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + node.params.eps) if a.size else a


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def sum_of_squares(src, at, n):
    """Sum of x^2 over n contiguous f32."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n - 31, 32):
        x, y = vec.load(src, at + 4 * i), vec.load(src, at + 4 * i + 64)
        even, odd = vec.fma(x, x, even), vec.fma(y, y, odd)
    rest = n % 32
    if rest:
        i = at + 4 * (n - rest)
        x, y = vec.load_first(src, i, rest), vec.load_first(src, i + 64, rest - 16)
        even, odd = vec.fma(x, x, even), vec.fma(y, y, odd)
    return vec.lane_sum(even + odd)


@jitted
def sum_of(src, at, n):
    """Sum of n contiguous f32."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n - 31, 32):
        even, odd = even + vec.load(src, at + 4 * i), odd + vec.load(src, at + 4 * i + 64)
    rest = n % 32
    if rest:
        i = at + 4 * (n - rest)
        even, odd = even + vec.load_first(src, i, rest), odd + vec.load_first(src, i + 64, rest - 16)
    return vec.lane_sum(even + odd)


@jitted
def sum_of_squares_around(src, at, n, mean):
    """Sum of (x - mean)^2 over n contiguous f32."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n - 31, 32):
        x, y = vec.load(src, at + 4 * i) - mean, vec.load(src, at + 4 * i + 64) - mean
        even, odd = vec.fma(x, x, even), vec.fma(y, y, odd)
    rest = n % 32
    if rest:
        i = at + 4 * (n - rest)
        x = vec.select(vec.first(rest), vec.load_first(src, i, rest) - mean, np.float32(0))
        y = vec.select(vec.first(rest - 16), vec.load_first(src, i + 64, rest - 16) - mean, np.float32(0))
        even, odd = vec.fma(x, x, even), vec.fma(y, y, odd)
    return vec.lane_sum(even + odd)


@jitted
def affine_row(dst, to, src, at, n, shift, scale):
    """(x + shift) * scale of n contiguous f32."""
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, (vec.load(src, at + 4 * i) + shift) * scale)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        vec.store_first(dst, to + i, (vec.load_first(src, at + i, rest) + shift) * scale, rest)


@jitted
def rms_norm_scale(src, at, n, eps):
    """1 / sqrt(mean square + eps) of n contiguous f32."""
    return np.float32(1) / vec.sqrt(sum_of_squares(src, at, n) / np.float32(n) + eps)


@functools.cache
def write_row(is_norm: bool, is_scaled: bool):
    """Jitted that writes a row and reads the next one, whose first sum it returns.

    (dst, to, src, at, n, shift, scale, after, weight, by, bias, plus, has_bias): (x + shift) * scale of the row at
    `at`, then times the weight and plus the bias if it is scaled; the sum (norm) or sum of squares (rms_norm, which has
    no shift) of the row at `after`.
    """

    @jitted
    def finished(x, shift, scale, weight, by, bias, plus, has_bias, n):
        y = (x + shift) * scale if is_norm else x * scale
        if is_scaled:
            y = y * vec.load_first(weight, by, n) if n < 16 else y * vec.load(weight, by)
            if has_bias:
                y = y + vec.load_first(bias, plus, n) if n < 16 else y + vec.load(bias, plus)
        return y

    @jitted
    def added(total, x):
        return total + x if is_norm else vec.fma(x, x, total)

    @jitted
    def write(dst, to, src, at, n, shift, scale, after, weight, by, bias, plus, has_bias):
        even, odd = vec.zero(), vec.zero()
        for i in range(0, 4 * n - 127, 128):
            j = i + 64
            even, odd = added(even, vec.load(src, after + i)), added(odd, vec.load(src, after + j))
            x, y = vec.load(src, at + i), vec.load(src, at + j)
            vec.store(dst, to + i, finished(x, shift, scale, weight, by + i, bias, plus + i, has_bias, 16))
            vec.store(dst, to + j, finished(y, shift, scale, weight, by + j, bias, plus + j, has_bias, 16))
        rest = n % 32
        if rest:
            i, more = 4 * (n - rest), rest - 16
            j = i + 64
            even = added(even, vec.load_first(src, after + i, rest))
            odd = added(odd, vec.load_first(src, after + j, more))
            x, y = vec.load_first(src, at + i, rest), vec.load_first(src, at + j, more)
            x = finished(x, shift, scale, weight, by + i, bias, plus + i, has_bias, rest)
            vec.store_first(dst, to + i, x, rest)
            if more > 0:
                y = finished(y, shift, scale, weight, by + j, bias, plus + j, has_bias, more)
                vec.store_first(dst, to + j, y, more)
        return vec.lane_sum(even + odd)

    return write


@functools.cache
def row_factors(is_norm: bool):
    """Jitted (src, at, n, total, eps) -> shift and scale of a row from its first sum."""

    @jitted
    def factors(src, at, n, total, eps):
        shift, squares = np.float32(0), total
        if is_norm:
            mean = total / np.float32(n)
            shift, squares = -mean, sum_of_squares_around(src, at, n, mean)
        return shift, np.float32(1) / vec.sqrt(squares / np.float32(n) + eps)

    return factors


@functools.cache
def make_norm(name: str, is_scaled: bool = False):
    """Kernel for contiguous rows; if it is scaled norm(src0) * src1, plus src2 if that is there."""
    is_norm = name == "norm"
    write, factors = write_row(is_norm, is_scaled), row_factors(is_norm)
    first_sum = sum_of if is_norm else sum_of_squares

    @kernel(by_rows=row_shares.always, n_optional=2)
    def norm_rows(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
        ith, nth,
    ):  # fmt: skip
        eps, n, has_bias = memory.f32_from_bits(op_params[0]), dst_ne[0], src2_ne[0] > 0
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        after = rows.offset(src0_nb, i1, i2, i3)
        total = first_sum(src0, after, n) if first < last else np.float32(0)
        for k in range(first, last):
            to, at, by, plus = rows.offset(dst_nb, i1, i2, i3), after, np.int64(0), np.int64(0)
            if is_scaled:
                by = rows.repeated(src1_ne, src1_nb, i1, i2, i3)
                if has_bias:
                    plus = rows.repeated(src2_ne, src2_nb, i1, i2, i3)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
            if k + 1 < last:
                after = rows.offset(src0_nb, i1, i2, i3)
            shift, scale = factors(src0, at, n, total, eps)
            total = write(dst, to, src0, at, n, shift, scale, after, src1, by, src2, plus, has_bias)

    return norm_rows


@functools.cache
def make_norm_strided(name: str):
    """Kernel for elements with gaps: a row is gathered into the scratch, normalised there and scattered."""
    is_norm = name == "norm"
    factors, first_sum = row_factors(is_norm), sum_of if is_norm else sum_of_squares

    @kernel
    def norm_strided(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        eps, n = memory.f32_from_bits(op_params[0]), dst_ne[0]
        x = COUNTER_LINE + 4 * n * ith
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            for i in range(n):
                memory.store_f32(work, x + 4 * i, memory.load_f32(src0, at + i * src0_nb[0]))
            shift, scale = factors(work, x, n, first_sum(work, x, n), eps)
            affine_row(work, x, work, x, n, shift, scale)
            for i in range(n):
                memory.store_f32(dst, to + i * dst_nb[0], memory.load_f32(work, x + 4 * i))
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return norm_strided


def _is_strided(node):
    return not (node.is_contiguous_rows and node.src[0].is_contiguous_rows)


def _select(node):
    if node.type is not types.F32:
        return None
    return (make_norm_strided if _is_strided(node) else make_norm)(node.op.name)


def _work_size(node, nth):
    return 4 * node.ne[0] * nth if _is_strided(node) else 0


def _flops(node):
    return (8 if node.op is NORM else 4) * node.nelements


for _op in (NORM, RMS_NORM):
    _op.kernel(_select)
    _op.work_size(_work_size)
    _op.flops(_flops)


# --- fusion with the weight and the bias that follow ------------------------------------------------------------------


def _operand(node, x, name):
    """The f32 rows that `node` multiplies x by or adds to it; None if it does something else."""
    if node is None or node.op.name != name or node.src[0] is not x:
        return None
    other = node.src[1]
    plain = all(t.type is types.F32 and t.is_contiguous_rows for t in (node, other))
    return other if plain and other.ne[0] == node.ne[0] else None


def _fuse(match, node):
    """[rms_]norm, mul by a weight, add of a bias; or without the last."""
    if node.type is not types.F32 or _is_strided(node):
        return None
    mul = match.reader(node)
    weight = _operand(mul, node, "mul")
    if weight is None:
        return None
    chain, (x,) = (node, mul), node.src
    add = match.reader(mul)
    bias = _operand(add, mul, "add")
    if bias is not None:
        chain = (*chain, add)
    reads = (x, weight) if bias is None else (x, weight, bias)
    sources = (x, weight, bias)

    def emit(low):
        low.emit(make_norm(node.op.name, True), chain[-1], src=sources, params=bytes(node.op_params))

    return Fused(chain, reads, (x,), emit)


for _op in (NORM, RMS_NORM):
    _op.fusion(_fuse)


# --- gradients --------------------------------------------------------------------------------------------------------


def centered(a: Tensor) -> Tensor:
    """a less the mean of each row."""
    return ops.sub(a, ops.mean(a))


@NORM.backward
def _(node, grad, need):
    """norm(x) is rms_norm of the differences from the mean."""
    x = centered(node.src[0])
    return (centered(ops.rms_norm_back(grad, x, node.params.eps)),)


@RMS_NORM.backward
def _(node, grad, need):
    return (ops.rms_norm_back(grad, node.src[0], node.params.eps),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(op, build):
    from ggjit.ops.views import permute, transpose, view_2d

    for n in (1, 15, 16, 17, 33, 65, 576):
        op.case(f"rows of {n}")(lambda t, n=n: build(t("F32", n, 3), 1e-5))
    op.case("offset and large")(lambda t: build(t("F32", 1000, 2, low=5, high=9), 1e-6))
    op.case("four dimensions")(lambda t: build(t("F32", 40, 3, 2, 2), 0.1))
    op.case("zeros")(lambda t: build(t("F32", 40, 2, low=0, high=0), 1e-5))
    op.case("heads of a permuted tensor")(lambda t: build(permute(t("F32", 64, 3, 5), 0, 2, 1, 3), 1e-5))
    op.case("padded rows")(lambda t: build(view_2d(t("F32", 48, 5), 37, 5, 192, 12), 1e-5))
    op.case("transposed")(lambda t: build(transpose(t("F32", 5, 33)), 1e-5))
    op.case("in place")(lambda t: build(t("F32", 65, 4), 1e-5, inplace=True))
    op.case("transposed, in place")(lambda t: build(transpose(t("F32", 5, 33)), 1e-5, inplace=True))


_cases(NORM, norm)
_cases(RMS_NORM, rms_norm)


def _fused_cases(op, build):
    from ggjit.ops.binary import add, mul

    def scaled(t, *ne):
        return mul(build(t("F32", *ne), 1e-5), t("F32", ne[0]))

    op.fused_case("weight")(lambda t: scaled(t, 65, 5))
    op.fused_case("weight and bias")(lambda t: add(scaled(t, 48, 3, 2), t("F32", 48)))
    op.fused_case("weight of each row, twice")(
        lambda t: add(mul(build(scaled(t, 37, 4), 1e-6), t("F32", 37, 4)), t("F32", 37, 2))
    )


_fused_cases(NORM, norm)
_fused_cases(RMS_NORM, rms_norm)
