"""pool_1d and pool_2d: the largest or the mean value of each window, and pool_2d's gradient.

    dst[x, y] = max or mean of a[x s0 - p0 + kx, y s1 - p1 + ky],  0 <= kx < k0, 0 <= ky < k1

Elements of the padding are no candidates for the maximum. The mean of pool_2d divides by k0 k1, padding included, that
of pool_1d by the number of elements of `a` in the window (so it is in ggml). A window without elements gives the lowest
f32, or 0 for the mean of pool_2d.

16 windows are reduced at once where all lie inside; those at the borders one by one. All strides are honoured.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.jit import kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.lib.checks import require, require_type
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["pool_1d", "pool_2d", "pool_2d_back"]

POOL_1D = Op("pool_1d", id=60, params=tuple((n, "i32") for n in ("pool", "k0", "s0", "p0")))
_PARAMS_2D = tuple((n, "i32") for n in ("pool", "k0", "k1", "s0", "s1", "p0", "p1"))
POOL_2D = Op("pool_2d", id=61, params=_PARAMS_2D)
POOL_2D_BACK = Op("pool_2d_back", id=62, params=_PARAMS_2D)
MAX, AVG = 0, 1
LOWEST = float(np.finfo(np.float32).min)


# --- builders ---------------------------------------------------------------------------------------------------------


def _size(where: str, a: Tensor, n: int, k: int, s: int, p: int) -> int:
    """Number of windows along a dimension of n elements."""
    require(where, k > 0 and s > 0 and p >= 0, f"kernel and stride must be positive and padding not negative, "
            f"got {k}, {s}, {p} for a", a)  # fmt: skip
    require(where, n + 2 * p >= k, f"the kernel ({k}) must fit a with its padding ({p})", a)
    return (n + 2 * p - k) // s + 1


def _padding(p: float) -> int:
    """A padding, which ggml takes as a float, as a whole number; -1 for one that is none."""
    return int(p) if math.isfinite(p) else -1


def _check_pool(where: str, a: Tensor, pool: int) -> None:
    if pool not in (MAX, AVG):
        raise ValueError(f"{where}: op must be 0 (max) or 1 (mean), got {pool}")
    require_type(where, "a", a, types.F32, types.F16)


@checked
def pool_1d(a: Tensor, op: int, k0: int, s0: int, p0: int) -> Tensor:
    """Reduce windows of each row.

    Args:
        a: f32 or f16 [ne0, ne1, ne2, ne3], any strides.
        op: 0 the maximum, 1 the mean of the elements in the window.
        k0: elements of a window.
        s0: elements from window to window.
        p0: padding on both sides.

    Returns:
        f32 [(ne0 + 2 p0 - k0) / s0 + 1, ne1, ne2, ne3].

    Raises:
        ValueError: no window fits, or `op` is another number.
        TypeError: `a` is neither f32 nor f16.

    Source: ggml_pool_1d.
    """
    _check_pool("pool_1d", a, op)
    return new_node(POOL_1D, types.F32, (_size("pool_1d", a, a.ne[0], k0, s0, p0), *a.ne[1:]), (a,), (op, k0, s0, p0))


@checked
def pool_2d(a: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> Tensor:
    """Reduce windows of each plane.

    Args:
        a: f32 or f16 [ne0, ne1, ne2, ne3], any strides.
        op: 0 the maximum, 1 the sum divided by k0 k1.
        k0: elements of a window along dimension 0.
        k1: elements of a window along dimension 1.
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.

    Returns:
        f32 [(ne0 + 2 p0 - k0) / s0 + 1, (ne1 + 2 p1 - k1) / s1 + 1, ne2, ne3].

    Raises:
        ValueError: no window fits, or `op` is another number.
        TypeError: `a` is neither f32 nor f16.

    Source: ggml_pool_2d.
    """
    _check_pool("pool_2d", a, op)
    ne0, ne1 = _size("pool_2d", a, a.ne[0], k0, s0, _padding(p0)), _size("pool_2d", a, a.ne[1], k1, s1, _padding(p1))
    return new_node(POOL_2D, types.F32, (ne0, ne1, *a.ne[2:]), (a,), (op, k0, k1, s0, s1, _padding(p0), _padding(p1)))


@checked
def pool_2d_back(a: Tensor, af: Tensor, op: int, k0: int, k1: int, s0: int, s1: int, p0: float, p1: float) -> Tensor:
    """Gradient of `pool_2d` with respect to its source.

    Of equal maxima the first one of a window gets the gradient.

    Args:
        a: f32, the gradient of the result.
        af: f32 or f16, the source of pool_2d.
        op: 0 the maximum, 1 the sum divided by k0 k1.
        k0: elements of a window along dimension 0.
        k1: elements of a window along dimension 1.
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.

    Returns:
        f32, the shape of `af`.

    Raises:
        ValueError: `a` has not the shape of pool_2d's result.
        TypeError: types do not fit.

    Source: ggml_pool_2d_back.
    """
    _check_pool("pool_2d_back", af, op)
    require_type("pool_2d_back", "a", a, types.F32)
    along = ((af.ne[0], k0, s0, _padding(p0)), (af.ne[1], k1, s1, _padding(p1)))
    sizes = [_size("pool_2d_back", af, *nksp) for nksp in along]
    require("pool_2d_back", a.ne == (*sizes, *af.ne[2:]), f"a must have ne {[*sizes, *af.ne[2:]]}", a, af)
    return new_node(POOL_2D_BACK, types.F32, af.ne, (a, af), (op, k0, k1, s0, s1, _padding(p0), _padding(p1)))


# --- references -------------------------------------------------------------------------------------------------------


def _windows(node, a, fill):
    """The windows of a, [..., out1, out0, k1 k0], padding filled; and how far each element lies in the padded plane."""
    p = node.params
    one = node.op is POOL_1D
    k1, s1, p1 = (1, 1, 0) if one else (p.k1, p.s1, p.p1)
    padded = np.pad(a, ((0, 0), (0, 0), (p1, p1), (p.p0, p.p0)), constant_values=fill)
    n1, n0 = (a.shape[2] + 2 * p1 - k1) // s1 + 1, (a.shape[3] + 2 * p.p0 - p.k0) // p.s0 + 1
    taps = [
        padded[:, :, ky : ky + s1 * n1 : s1, kx : kx + p.s0 * n0 : p.s0][:, :, :n1, :n0]
        for ky in range(k1)
        for kx in range(p.k0)
    ]
    return np.stack(taps, -1)


def _pool_reference(node, a):
    if node.params.pool == MAX:
        return np.maximum(_windows(node, a, -np.inf).max(-1), LOWEST)
    total = _windows(node, a, 0.0)
    if node.op is POOL_2D:
        return total.mean(-1)
    count = _windows(node, np.ones_like(a), 0.0).sum(-1)
    return total.sum(-1) / np.maximum(count, 1)


POOL_1D.reference(_pool_reference)
POOL_2D.reference(_pool_reference)


@POOL_2D_BACK.reference
def _(node, a, af):
    p = node.params
    out = np.zeros((*af.shape[:2], af.shape[2] + 2 * p.p1, af.shape[3] + 2 * p.p0))
    best = _windows(node, af, -np.inf).argmax(-1) if p.pool == MAX else None
    for i3, i2, i1, i0 in np.ndindex(*a.shape):
        window = out[i3, i2, i1 * p.s1 : i1 * p.s1 + p.k1, i0 * p.s0 : i0 * p.s0 + p.k0]
        if best is None:
            window += a[i3, i2, i1, i0] / (p.k0 * p.k1)
        else:
            window[divmod(best[i3, i2, i1, i0], p.k0)] += a[i3, i2, i1, i0]
    return out[:, :, p.p1 : p.p1 + af.shape[2], p.p0 : p.p0 + af.shape[3]]


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_pool(type_name: str, planes: bool, is_max: bool):
    """Kernel for one kind of pooling.

    Args:
        type_name: of the source.
        planes: windows of pool_2d, else of pool_1d.
        is_max: the maximum, else the mean.
    """
    load = memory.loader(type_name)
    in_vectors = type_name == "F32"

    @kernel
    def pool(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        k0, k1, s0, s1, p0, p1 = np.int64(op_params[1]), 1, np.int64(op_params[2]), 1, np.int64(op_params[3]), 0
        if planes:
            k1, s0, s1 = np.int64(op_params[2]), np.int64(op_params[3]), np.int64(op_params[4])
            p0, p1 = np.int64(op_params[5]), np.int64(op_params[6])
        nb0, n0, step = src0_nb[0], src0_ne[0], src0_nb[0] * s0
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            y = i1 * s1 - p1
            ky0, ky1 = 0 if y >= 0 else -y, k1 if y + k1 <= src0_ne[1] else src0_ne[1] - y
            plane, to = y * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3], rows.offset(dst_nb, i1, i2, i3)
            i = begin
            while i < end:
                x = i * s0 - p0
                if in_vectors and i + 16 <= end and x >= 0 and x + 15 * s0 + k0 <= n0:
                    v = vec.splat(np.float32(LOWEST if is_max else 0.0))
                    for ky in range(ky0, ky1):
                        for kx in range(k0):
                            at = plane + ky * src0_nb[1] + (x + kx) * nb0
                            tap = vec.load(src0, at) if step == 4 else vec.load_strided(src0, at, step)
                            v = vec.max(tap, v) if is_max else v + tap
                    if not is_max:
                        v = v / np.float32(k0 * k1)
                    vec.store(dst, to + 4 * i, v)
                    i += 16
                    continue
                kx0, kx1 = 0 if x >= 0 else -x, k0 if x + k0 <= n0 else n0 - x
                value = np.float32(LOWEST if is_max else 0.0)
                for ky in range(ky0, ky1):
                    for kx in range(kx0, kx1):
                        one = load(src0, plane + ky * src0_nb[1] + (x + kx) * nb0)
                        value = (one if one > value else value) if is_max else value + one
                if not is_max:
                    count = k0 * k1 if planes else kx1 - kx0
                    value = value / np.float32(count if count > 0 else 1)
                memory.store_f32(dst, to + 4 * i, value)
                i += 1
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return pool


@functools.cache
def make_pool_2d_back(type_name: str, is_max: bool):
    """Kernel of the gradient; a thread takes whole planes."""
    load = memory.loader(type_name)

    @kernel
    def pool_2d_back_planes(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
    ):
        k0, k1 = np.int64(op_params[1]), np.int64(op_params[2])
        s0, s1 = np.int64(op_params[3]), np.int64(op_params[4])
        p0, p1 = np.int64(op_params[5]), np.int64(op_params[6])
        n_planes = dst_ne[2] * dst_ne[3]
        share = np.float32(k0 * k1)
        for plane in range(n_planes * ith // nth, n_planes * (ith + 1) // nth):
            i2, i3 = plane % dst_ne[2], plane // dst_ne[2]
            to, grad = i2 * dst_nb[2] + i3 * dst_nb[3], i2 * src0_nb[2] + i3 * src0_nb[3]
            at = i2 * src1_nb[2] + i3 * src1_nb[3]
            for i in range(0, dst_nb[2], 4):
                memory.store_f32(dst, to + i, np.float32(0))
            for i1 in range(src0_ne[1]):
                y = i1 * s1 - p1
                y0, y1 = y if y > 0 else 0, y + k1 if y + k1 < dst_ne[1] else dst_ne[1]
                for i0 in range(src0_ne[0]):
                    x = i0 * s0 - p0
                    x0, x1 = x if x > 0 else 0, x + k0 if x + k0 < dst_ne[0] else dst_ne[0]
                    g = memory.load_f32(src0, grad + i0 * src0_nb[0] + i1 * src0_nb[1])
                    best, place = np.float32(-np.inf), np.int64(-1)
                    for iy in range(y0, y1):
                        for ix in range(x0, x1):
                            there = to + 4 * ix + iy * dst_nb[1]
                            if is_max:
                                value = load(src1, at + ix * src1_nb[0] + iy * src1_nb[1])
                                if value > best or place < 0:
                                    best, place = value, there
                            else:
                                memory.store_f32(dst, there, memory.load_f32(dst, there) + g / share)
                    if is_max and place >= 0:
                        memory.store_f32(dst, place, memory.load_f32(dst, place) + g)

    return pool_2d_back_planes


def _select(node):
    return make_pool(node.src[0].type.name, node.op is POOL_2D, node.params.pool == MAX)


POOL_1D.kernel(_select)
POOL_2D.kernel(_select)


@POOL_2D_BACK.kernel
def _(node):
    return make_pool_2d_back(node.src[1].type.name, node.params.pool == MAX)


@POOL_1D.flops
def _(node):
    return node.nelements * node.params.k0


@POOL_2D.flops
def _(node):
    return node.nelements * node.params.k0 * node.params.k1


@POOL_2D_BACK.flops
def _(node):
    return node.src[0].nelements * node.params.k0 * node.params.k1


# --- backward ---------------------------------------------------------------------------------------------------------


@POOL_2D.backward
def _(node, grad, need):
    p = node.params
    return (pool_2d_back(grad, node.src[0], p.pool, p.k0, p.k1, p.s0, p.s1, p.p0, p.p1),)


@POOL_1D.backward
def _(node, grad, need):
    a, p = node.src[0], node.params
    if p.pool == AVG and p.p0:  # pool_2d_back divides by k0: give back what windows at the borders lost
        ones = ops.fill(a if a.is_contiguous else ops.cont(a), 1.0)
        grad = ops.div(grad, pool_2d(ones, AVG, p.k0, 1, p.s0, 1, p.p0, 0))
    return (pool_2d_back(grad, a, p.pool, p.k0, 1, p.s0, 1, p.p0, 0),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_3d

    for name, pool in (("max", MAX), ("mean", AVG)):
        POOL_1D.case(f"{name}, padded")(lambda t, pool=pool: pool_1d(t("F32", 45, 3), pool, 3, 2, 1))
        POOL_1D.case(f"{name}, f16")(lambda t, pool=pool: pool_1d(t("F16", 20, 2, 2), pool, 4, 1, 0))
        POOL_1D.case(f"{name}, transposed")(lambda t, pool=pool: pool_1d(transpose(t("F32", 3, 40)), pool, 3, 1, 1))
        POOL_2D.case(f"{name}, padded")(lambda t, pool=pool: pool_2d(t("F32", 37, 9, 2, 2), pool, 3, 3, 1, 2, 1, 1))
        POOL_2D.case(f"{name}, f16")(lambda t, pool=pool: pool_2d(t("F16", 12, 6, 3), pool, 2, 3, 2, 3, 0, 1))
        POOL_2D.case(f"{name}, permuted")(
            lambda t, pool=pool: pool_2d(permute(t("F32", 9, 4, 23), 2, 0, 1, 3), pool, 2, 2, 1, 1, 0, 0)
        )
        POOL_2D.case(f"{name}, view")(
            lambda t, pool=pool: pool_2d(view_3d(t("F32", 40, 5, 3), 33, 4, 3, 160, 800, 8), pool, 2, 2, 2, 1, 0, 0)
        )
        for kind in ("F32", "F16"):
            POOL_2D_BACK.case(f"{name}, {kind}")(
                lambda t, pool=pool, kind=kind: pool_2d_back(
                    t("F32", 7, 5, 2, 2), t(kind, 7, 9, 2, 2), pool, 3, 3, 1, 2, 1, 1
                )
            )
        POOL_2D_BACK.case(f"{name}, permuted")(
            lambda t, pool=pool: pool_2d_back(
                permute(t("F32", 4, 2, 3), 1, 0, 2, 3), permute(t("F32", 8, 4, 3), 1, 0, 2, 3), pool, 2, 2, 2, 2, 0, 0
            )
        )


_cases()
