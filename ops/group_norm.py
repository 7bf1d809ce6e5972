"""group_norm and l2_norm, beside norm and rms_norm.

    group_norm  y = (x - mean) / sqrt(variance + eps) over ne0, ne1 and the channels (dimension 2) of a group
    l2_norm     y = x / max(sqrt(sum x^2), eps) over rows

Sums of rows are those of norm; group_norm adds its rows in float64, in order. A row (a group) belongs to one thread.
"""

from __future__ import annotations

import math

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.binary import div, mul, sub
from ggjit.ops.copy import cont
from ggjit.ops.lib.checks import require_type
from ggjit.ops.math import clamp, sqr, sqrt
from ggjit.ops.norm import affine_row, sum_of, sum_of_squares, sum_of_squares_around
from ggjit.ops.reduce import mean, sum_rows
from ggjit.ops.repeat import concat
from ggjit.ops.scale import scale_bias
from ggjit.ops.unary import step
from ggjit.ops.views import reshape_3d, reshape_4d, view_4d
from ggjit.tensor import Tensor, new_node, view_tensor

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["group_norm", "l2_norm"]

GROUP_NORM = Op("group_norm", id=27, params=(("n_groups", "i32"), ("eps", "f32")), inplace=True)
L2_NORM = Op("l2_norm", id=28, params=(("eps", "f32"),), inplace=True)


# --- group_norm -------------------------------------------------------------------------------------------------------


@checked
def group_norm(a: Tensor, n_groups: int, eps: float, *, inplace: bool = False) -> Tensor:
    """Normalise groups of channels to mean 0 and variance 1.

    y = (x - mean) / sqrt(mean((x - mean)^2) + eps) over all elements of a group

    Args:
        a: f32 [width, height, n_channels, ne3], any strides.
        n_groups: of ceil(n_channels / n_groups) channels each, the last with what is left.
        eps: added to the variance, not negative.
        inplace: put the result where `a` lies; its rows are then contiguous.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: parameters are out of range, or rows of `a` have gaps in place.

    Source: Wu and He, Group normalization (2018); ggml_group_norm.
    """
    require_type("group_norm", "a", a, types.F32)
    if n_groups < 1 or not eps >= 0:
        raise ValueError(
            f"group_norm: n_groups must be positive and eps not negative, got {n_groups} and {eps} ('{a.name}')"
        )
    if not inplace:
        return new_node(GROUP_NORM, a.type, a.ne, (a,), (n_groups, eps))
    if not a.is_contiguous_rows:
        raise ValueError(f"group_norm: rows of a must be contiguous in place, got nb {list(a.nb)} ('{a.name}')")
    return view_tensor(GROUP_NORM, a, (a,), (n_groups, eps))


def _groups(node: Tensor) -> list[tuple[int, int]]:
    """First and last channel of each group that has any."""
    n, size = node.ne[2], -(-node.ne[2] // node.params.n_groups)
    return [(first, min(first + size, n)) for first in range(0, n, size or 1)]


@GROUP_NORM.reference
def _(node, a):
    out = np.array(a)
    for first, last in _groups(node) if a.size else ():
        x = a[:, first:last]
        mean, variance = x.mean((1, 2, 3), keepdims=True), x.var((1, 2, 3), keepdims=True)
        out[:, first:last] = (x - mean) / np.sqrt(variance + node.params.eps)
    return out


@kernel
def group_norm_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Three passes over a group: the mean, the differences and their squares, the scale."""
    n, n_rows, n_channels, n_groups = dst_ne[0], dst_ne[1], dst_ne[2], np.int64(op_params[0])
    eps, slot = np.float64(memory.f32_from_bits(op_params[1])), COUNTER_LINE + 4 * n * ith
    size = (n_channels + n_groups - 1) // n_groups
    n_groups = (n_channels + size - 1) // size  # the others have no channels
    all_groups = n_groups * dst_ne[3]
    for group in range(all_groups * ith // nth, all_groups * (ith + 1) // nth):
        i3, first = group // n_groups, group % n_groups * size
        last = first + size if first + size < n_channels else n_channels
        if first >= last:
            continue
        total, count = 0.0, np.float64(n * n_rows * (last - first))
        for i2 in range(first, last):
            for i1 in range(n_rows):
                at = rows.offset(src0_nb, i1, i2, i3)
                x, x_at = staging.packed(src0, at, src0_nb[0], n, work, slot)
                total += np.float64(sum_of(x, x_at, n))
        shift, squares = -np.float32(total / count), 0.0
        for i2 in range(first, last):
            for i1 in range(n_rows):
                at = rows.offset(src0_nb, i1, i2, i3)
                x, x_at = staging.packed(src0, at, src0_nb[0], n, work, slot)
                squares += np.float64(sum_of_squares_around(x, x_at, n, -shift))
        scale = np.float32(1) / vec.sqrt(np.float32(squares / count + eps))
        for i2 in range(first, last):
            for i1 in range(n_rows):
                to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
                x, x_at = staging.packed(src0, at, src0_nb[0], n, work, slot)
                affine_row(dst, to, x, x_at, n, shift, scale)


GROUP_NORM.kernel(lambda node: group_norm_f32)


@GROUP_NORM.work_size
def _(node, nth):
    return 0 if node.src[0].is_contiguous_rows else 4 * node.ne[0] * nth


@GROUP_NORM.backward
def _(node, grad, need):
    """dx = (dy - mean(dy) - y mean(dy y)) / sqrt(variance + eps), the groups laid out as rows.

    A last group of fewer channels is done apart.
    """
    a, groups = node.src[0], _groups(node)
    size = groups[0][1]
    n_even = sum(last - first == size for first, last in groups)
    parts = [(0, n_even * size, n_even)]
    if n_even < len(groups):
        parts.append((n_even * size, a.ne[2], 1))
    out = None
    for first, last, n_groups in parts:
        made = _group_norm_back(node, grad, first, last, n_groups)
        out = made if out is None else concat(out, made, 2)
    return (out,)


def _group_norm_back(node, grad, first, last, n_groups):
    """The gradient of channels first to last, which are n_groups groups."""
    ne0, ne1, _, ne3 = node.ne

    def grouped(t):
        part = view_4d(t, ne0, ne1, last - first, ne3, *t.nb[1:], first * t.nb[2])
        return reshape_3d(cont(part), ne0 * ne1 * (last - first) // n_groups, n_groups, ne3)

    x, y, dy = grouped(as_contiguous(node.src[0])), grouped(node), grouped(grad)
    variance = mean(sqr(sub(x, mean(x))))
    inner = sub(sub(dy, mean(dy)), mul(y, mean(mul(dy, y))))
    dx = div(inner, sqrt(scale_bias(variance, 1.0, node.params.eps)))
    return reshape_4d(dx, ne0, ne1, last - first, ne3)


# --- l2_norm ----------------------------------------------------------------------------------------------------------


@checked
def l2_norm(a: Tensor, eps: float, *, inplace: bool = False) -> Tensor:
    """Scale each row to length 1.

    y = x / max(sqrt(sum(x^2)), eps)

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        eps: least length that is divided by, not negative.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `eps` is negative.

    Source: ggml_l2_norm.
    """
    require_type("l2_norm", "a", a, types.F32)
    if not eps >= 0:
        raise ValueError(f"l2_norm: eps must not be negative, got {eps} ('{a.name}')")
    return view_tensor(L2_NORM, a, (a,), (eps,)) if inplace else new_node(L2_NORM, a.type, a.ne, (a,), (eps,))


@L2_NORM.reference
def _(node, a):
    return a / np.maximum(np.sqrt((a * a).sum(-1, keepdims=True)), node.params.eps)


@kernel
def l2_norm_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """The length of a row, then the row divided by it."""
    n, eps = dst_ne[0], memory.f32_from_bits(op_params[0])
    slot = COUNTER_LINE + 4 * n * ith
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to = rows.offset(dst_nb, i1, i2, i3)
        x, at = staging.packed(src0, rows.offset(src0_nb, i1, i2, i3), src0_nb[0], n, work, slot)
        scale = np.float32(1) / vec.max(vec.sqrt(sum_of_squares(x, at, n)), eps)
        if dst_nb[0] == 4 or n == 1:
            affine_row(dst, to, x, at, n, np.float32(0), scale)
        else:
            affine_row(work, slot, x, at, n, np.float32(0), scale)
            staging.scatter(dst, to, dst_nb[0], work, slot, n)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


L2_NORM.kernel(lambda node: l2_norm_f32)


@L2_NORM.work_size
def _(node, nth):
    return 0 if node.is_contiguous_rows and node.src[0].is_contiguous_rows else 4 * node.ne[0] * nth


for _op in (GROUP_NORM, L2_NORM):
    _op.flops(lambda node: (8 if node.op is GROUP_NORM else 4) * node.nelements)


@L2_NORM.backward
def _(node, grad, need):
    """dx = (dy - y sum(dy y)) / length; the sum is left out where eps takes the place of the length."""
    a, eps = as_contiguous(node.src[0]), node.params.eps
    length = sqrt(sum_rows(sqr(a)))
    along = mul(sum_rows(mul(grad, node)), step(scale_bias(length, 1.0, -eps)))
    return (div(sub(grad, mul(node, along)), clamp(length, eps, math.inf)),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    GROUP_NORM.case("even groups")(lambda t: group_norm(t("F32", 8, 6, 12, 2), 4, 1e-6))
    GROUP_NORM.case("smaller last group")(lambda t: group_norm(t("F32", 7, 3, 10), 3, 1e-5))
    GROUP_NORM.case("many empty groups")(lambda t: group_norm(t("F32", 7, 3, 6), 1 << 30, 1e-5))
    GROUP_NORM.case("empty last group")(lambda t: group_norm(t("F32", 7, 3, 6), 4, 1e-5))
    GROUP_NORM.case("one group")(lambda t: group_norm(t("F32", 37, 4, 6, low=4, high=6), 1, 1e-5))
    GROUP_NORM.case("one channel each")(lambda t: group_norm(t("F32", 5, 1, 8), 8, 1e-5))
    GROUP_NORM.case("permuted")(lambda t: group_norm(permute(t("F32", 9, 6, 4), 0, 2, 1, 3), 2, 1e-5))
    GROUP_NORM.case("transposed")(lambda t: group_norm(transpose(t("F32", 6, 20, 4)), 2, 1e-5))
    GROUP_NORM.case("in place")(lambda t: group_norm(t("F32", 17, 4, 6), 2, 1e-5, inplace=True))

    for n in (1, 16, 33, 577):
        L2_NORM.case(f"rows of {n}")(lambda t, n=n: l2_norm(t("F32", n, 3), 1e-5))
    L2_NORM.case("short rows")(lambda t: l2_norm(t("F32", 64, 3, low=-0.01, high=0.01), 0.1))
    L2_NORM.case("zeros")(lambda t: l2_norm(t("F32", 40, 2, low=0, high=0), 1e-5))
    L2_NORM.case("padded rows")(lambda t: l2_norm(view_2d(t("F32", 50, 6), 34, 6, 200, 8), 1e-5))
    L2_NORM.case("transposed")(lambda t: l2_norm(transpose(t("F32", 7, 36)), 1e-5))
    L2_NORM.case("transposed, in place")(lambda t: l2_norm(transpose(t("F32", 7, 36)), 1e-5, inplace=True))


_cases()
