"""cross_entropy_loss and its gradient.

    cross_entropy_loss       -sum(labels log(soft_max(logits))) / rows
    cross_entropy_loss_back  grad (soft_max(logits) sum(labels) - labels) / rows

log(soft_max(x)) is x - max - log(sum(exp(x - max))). A row is a float32 sum of 32 parts; rows are added in float64 by
one thread, in order. ggml takes the labels of a row to add up to 1; here their sum is in the gradient.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.binary import mul, sub
from ggjit.ops.lib.checks import require, require_type
from ggjit.ops.math import clamp, log
from ggjit.ops.norm import sum_of
from ggjit.ops.reduce import sum_rows
from ggjit.ops.scale import scale
from ggjit.ops.soft_max import soft_max
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["cross_entropy_loss", "cross_entropy_loss_back"]

CROSS_ENTROPY_LOSS = Op("cross_entropy_loss", id=96)
CROSS_ENTROPY_LOSS_BACK = Op("cross_entropy_loss_back", id=97, inplace=True)


def _check(where: str, a: Tensor, b: Tensor, names: tuple[str, str]) -> None:
    for name, t in zip(names, (a, b), strict=True):
        require_type(where, name, t, types.F32)
    require(where, a.ne == b.ne, f"{names[0]} and {names[1]} must have one shape", a, b)


@checked
def cross_entropy_loss(a: Tensor, b: Tensor) -> Tensor:
    """Average the cross entropy of rows: -sum(b log(soft_max(a))) / rows.

    Args:
        a: f32 [n_classes, ...], the logits, any strides.
        b: f32, the shape of `a`, the probabilities of the labels, any strides.

    Returns:
        f32 [1].

    Raises:
        TypeError: one is not f32.
        ValueError: the shapes differ.

    Source: ggml_cross_entropy_loss.
    """
    _check("cross_entropy_loss", a, b, ("a", "b"))
    return new_node(CROSS_ENTROPY_LOSS, a.type, (1, 1, 1, 1), (a, b))


@checked
def cross_entropy_loss_back(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Gradient of cross_entropy_loss by the logits: a (soft_max(b) sum(c) - c) / rows.

    Args:
        a: f32 [1], the gradient of the loss.
        b: f32 [n_classes, ...], the logits, any strides.
        c: f32, the shape of `b`, the probabilities of the labels, any strides.

    Returns:
        f32, the shape of `b`.

    Raises:
        TypeError: one is not f32.
        ValueError: the shapes differ, or `a` is more than one value.

    Source: ggml_cross_entropy_loss_back.
    """
    require_type("cross_entropy_loss_back", "a", a, types.F32)
    require("cross_entropy_loss_back", a.ne == (1, 1, 1, 1), "a must be one value", a)
    _check("cross_entropy_loss_back", b, c, ("b", "c"))
    return new_node(CROSS_ENTROPY_LOSS_BACK, b.type, b.ne, (a, b, c))


def _soft_max(x):
    e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


@CROSS_ENTROPY_LOSS.reference
def _(node, a, b):
    x = a - a.max(-1, keepdims=True, initial=-np.inf)
    return -(b * (x - np.log(np.exp(x).sum(-1, keepdims=True)))).sum() / node.src[0].nrows


@CROSS_ENTROPY_LOSS_BACK.reference
def _(node, a, b, c):
    return a.reshape(()) * (_soft_max(b) * c.sum(-1, keepdims=True) - c) / node.src[1].nrows


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def largest_of(src, at, n):
    """Largest of n contiguous f32."""
    top = vec.splat(np.float32(-np.inf))
    for i in range(0, n, 16):
        x = vec.load_first(src, at + 4 * i, n - i)
        top = vec.max(vec.select(vec.first(n - i), x, np.float32(-np.inf)), top)
    return vec.lane_max(top)


@jitted
def sum_of_exp(src, at, n, top):
    """Sum of exp(x - top) over n contiguous f32."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n, 32):
        x = vec.exp(vec.load_first(src, at + 4 * i, n - i) - top)
        y = vec.exp(vec.load_first(src, at + 4 * i + 64, n - i - 16) - top)
        even = even + vec.select(vec.first(n - i), x, np.float32(0))
        odd = odd + vec.select(vec.first(n - i - 16), y, np.float32(0))
    return vec.lane_sum(even + odd)


@jitted
def shifted_dot(src0, at, src1, by, n, shift):
    """Sum of (x + shift) y over n contiguous f32; y = 0 counts as 0 also where x is -inf."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n, 32):
        x = vec.load_first(src0, at + 4 * i, n - i) + shift
        y = vec.load_first(src1, by + 4 * i, n - i)
        even = even + vec.select(y == np.float32(0), np.float32(0), x * y)
        x = vec.load_first(src0, at + 4 * i + 64, n - i - 16) + shift
        y = vec.load_first(src1, by + 4 * i + 64, n - i - 16)
        odd = odd + vec.select(y == np.float32(0), np.float32(0), x * y)
    return vec.lane_sum(even + odd)


@kernel
def row_losses(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """dst[row] = sum(labels log(soft_max(logits))) of a row."""
    n = src0_ne[0]
    slot = COUNTER_LINE + 8 * n * ith
    first, last = rows.whole(src0_ne, ith, nth)
    i1, i2, i3 = rows.position(src0_ne, first)
    for row in range(first, last):
        x, at = staging.packed(src0, rows.offset(src0_nb, i1, i2, i3), src0_nb[0], n, work, slot)
        y, by = staging.packed(src1, rows.offset(src1_nb, i1, i2, i3), src1_nb[0], n, work, slot + 4 * n)
        top = largest_of(x, at, n)
        shift = -(top + vec.log(sum_of_exp(x, at, n, top)))
        memory.store_f32(dst, 4 * row, shifted_dot(x, at, y, by, n, shift))
        i1, i2, i3 = rows.following(src0_ne, i1, i2, i3)


@kernel
def total_loss(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Minus the mean of the rows; one thread does it."""
    if ith == 0:
        total = 0.0
        for i in range(src0_ne[0]):
            total += np.float64(memory.load_f32(src0, 4 * i))
        memory.store_f32(dst, 0, np.float32(-total / src0_ne[0]))


@kernel
def cross_entropy_loss_back_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne,
                                src2_nb, op_params, work, ith, nth):  # fmt: skip
    """A row: largest, sum of exp, sum of labels, then element by element (so the result may lie on a source)."""
    n = dst_ne[0]
    grad = memory.load_f32(src0, 0) / np.float32(dst_ne[1] * dst_ne[2] * dst_ne[3])
    slot = COUNTER_LINE + 8 * n * ith
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to = rows.offset(dst_nb, i1, i2, i3)
        x, at = staging.packed(src1, rows.offset(src1_nb, i1, i2, i3), src1_nb[0], n, work, slot)
        y, by = staging.packed(src2, rows.offset(src2_nb, i1, i2, i3), src2_nb[0], n, work, slot + 4 * n)
        top = largest_of(x, at, n)
        share = sum_of(y, by, n) / sum_of_exp(x, at, n, top)
        for i in range(0, n, 16):
            weight = vec.exp(vec.load_first(x, at + 4 * i, n - i) - top) * share
            label = vec.load_first(y, by + 4 * i, n - i)
            vec.store_first(dst, to + 4 * i, (weight - label) * grad, n - i)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


def _scratch(logits: Tensor, labels: Tensor, nth: int) -> int:
    return 0 if logits.is_contiguous_rows and labels.is_contiguous_rows else 8 * logits.ne[0] * nth


@CROSS_ENTROPY_LOSS.lower
def _(low, node):
    a, b = node.src
    n = a.nrows
    losses = low.scratch(types.F32, (n, 1, 1, 1), 4 * n)
    low.emit(row_losses, losses, src=(a, b), work=_scratch(a, b, low.n_threads))
    low.emit(total_loss, node, src=(losses,))


CROSS_ENTROPY_LOSS.supports(lambda node: True)
CROSS_ENTROPY_LOSS_BACK.kernel(lambda node: cross_entropy_loss_back_f32)


@CROSS_ENTROPY_LOSS_BACK.work_size
def _(node, nth):
    return _scratch(node.src[1], node.src[2], nth)


def _flops(node):
    return 8 * node.src[1].nelements


for _op in (CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK):
    _op.flops(_flops)


@CROSS_ENTROPY_LOSS.backward
def _(node, grad, need):
    a, b = node.src
    by_logits = cross_entropy_loss_back(grad, a, b) if need[0] else None
    return by_logits, mul(scale(_log_soft_max(as_contiguous(a)), -1.0 / a.nrows), grad) if need[1] else None


def _log_soft_max(x: Tensor) -> Tensor:
    """x less log(sum(exp(x))), which is x - log(y) for each y of soft_max(x); their mean by y, as y may be 0."""
    y = soft_max(x)
    return sub(x, sum_rows(mul(y, sub(x, log(clamp(y, 1e-30, 1.0))))))


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    def case(name, make):
        CROSS_ENTROPY_LOSS.case(name)(lambda t: cross_entropy_loss(*make(t)))
        CROSS_ENTROPY_LOSS_BACK.case(name)(lambda t: cross_entropy_loss_back(t("F32", 1), *make(t)))

    def labels(t, *ne):
        return t("F32", *ne, low=0, high=1)

    for n in (1, 10, 33, 200):
        case(f"rows of {n}", lambda t, n=n: (t("F32", n, 4, low=-5, high=5), labels(t, n, 4)))
    case("one class each", lambda t: (t("F32", 40, 7), t.array(np.eye(40, dtype=np.float32)[:7])))
    case("four dimensions", lambda t: (t("F32", 17, 3, 2, 2), labels(t, 17, 3, 2, 2)))
    case("large logits", lambda t: (t("F32", 20, 3, low=-90, high=300), labels(t, 20, 3)))
    case("padded", lambda t: (view_2d(t("F32", 50, 6), 34, 6, 200, 8), labels(t, 34, 6)))
    case("permuted", lambda t: (permute(t("F32", 9, 3, 4), 0, 2, 1, 3), permute(labels(t, 9, 3, 4), 0, 2, 1, 3)))
    case("transposed", lambda t: (transpose(t("F32", 6, 34)), transpose(labels(t, 6, 34))))


_cases()
