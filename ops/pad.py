"""pad, pad_reflect_1d, roll: tensors moved in a larger frame, or around.

    pad             zeros, or the tensor over again (circular), on both sides of each dimension
    pad_reflect_1d  the row mirrored at both ends, the ends not repeated
    roll            dst[i] = a[(i - shift) mod ne] in each dimension: a circular frame of the same size

A row of the result is made of runs of a row of the source, which are moved as bytes.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.back import get_rows_back
from ggjit.ops.copy import cast, cont
from ggjit.ops.fill import arange
from ggjit.ops.lib.checks import require, require_contiguous, require_type
from ggjit.ops.scale import scale_bias
from ggjit.ops.set import acc
from ggjit.ops.unary import abs
from ggjit.ops.views import reshape_2d, reshape_4d, transpose, view_4d
from ggjit.tensor import Tensor, new_node

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["pad", "pad_circular", "pad_ext", "pad_ext_circular", "pad_reflect_1d", "roll"]

_SIDES = tuple((f"{side}{d}", "i32") for d in range(4) for side in ("lp", "rp"))
PAD = Op("pad", id=64, params=(*_SIDES, ("circular", "i32")))
PAD_REFLECT_1D = Op("pad_reflect_1d", id=65, params=(("p0", "i32"), ("p1", "i32")))
ROLL = Op("roll", id=66, params=tuple((f"shift{d}", "i32") for d in range(4)))


# --- pad --------------------------------------------------------------------------------------------------------------


@checked
def pad(a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """Add zeros after each dimension; see `pad_ext`.

    Source: ggml_pad.
    """
    return _pad("pad", a, (0, p0, 0, p1, 0, p2, 0, p3), 0)


@checked
def pad_circular(a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
    """Repeat the tensor after each dimension; see `pad_ext_circular`.

    Source: ggml_pad_circular.
    """
    return _pad("pad_circular", a, (0, p0, 0, p1, 0, p2, 0, p3), 1)


@checked
def pad_ext(a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int) -> Tensor:
    """Add zeros before and after each dimension.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        lp0: number before dimension 0, not negative, as all that follow.
        rp0: after it.
        lp1: before dimension 1.
        rp1: after it.
        lp2: before dimension 2.
        rp2: after it.
        lp3: before dimension 3.
        rp3: after it.

    Returns:
        f32 [lp0 + ne0 + rp0, ...].

    Raises:
        TypeError: `a` is not f32.
        ValueError: a number is negative.

    Source: ggml_pad_ext.
    """
    return _pad("pad_ext", a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3), 0)


@checked
def pad_ext_circular(a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int,
                     rp3: int) -> Tensor:  # fmt: skip
    """Repeat the tensor before and after each dimension; arguments as for `pad_ext`, `a` not empty.

    Source: ggml_pad_ext_circular.
    """
    return _pad("pad_ext_circular", a, (lp0, rp0, lp1, rp1, lp2, rp2, lp3, rp3), 1)


def _pad(where: str, a: Tensor, sides: tuple[int, ...], circular: int) -> Tensor:
    require_type(where, "a", a, types.F32)
    if min(sides) < 0:
        raise ValueError(f"{where}: paddings must not be negative, got {list(sides)} ('{a.name}')")
    require(where, not (circular and a.is_empty), "a must not be empty to be repeated", a)
    ne = tuple(sides[2 * d] + a.ne[d] + sides[2 * d + 1] for d in range(4))
    return new_node(PAD, a.type, ne, (a,), (*sides, circular))  # type: ignore[arg-type]


def _sides(node: Tensor) -> list[tuple[int, int]]:
    """Padding before and after each dimension."""
    p = node.params
    return [(p.lp0, p.rp0), (p.lp1, p.rp1), (p.lp2, p.rp2), (p.lp3, p.rp3)]


@PAD.reference
def _(node, a):
    return np.pad(a, _sides(node)[::-1], mode="wrap" if node.params.circular else "constant")


@jitted
def run(dst, to, src, at, step, n):
    """Move n f32, `step` bytes apart, to contiguous ones."""
    if step == 4:
        convert.move(dst, to, src, at, 4 * n)
    else:
        for i in range(n):
            memory.store_f32(dst, to + 4 * i, memory.load_f32(src, at + i * step))


@jitted
def zeros(dst, to, n):
    """n zeros."""
    for i in range(0, n, 16):
        vec.store_first(dst, to + 4 * i, vec.zero(), n - i)


@kernel
def pad_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Zeros, the row, zeros; rows outside are zeros."""
    ne00, lp0 = src0_ne[0], np.int64(op_params[0])
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to = rows.offset(dst_nb, i1, i2, i3)
        j1, j2, j3 = i1 - op_params[2], i2 - op_params[4], i3 - op_params[6]
        if 0 <= j1 < src0_ne[1] and 0 <= j2 < src0_ne[2] and 0 <= j3 < src0_ne[3]:
            zeros(dst, to, lp0)
            run(dst, to + 4 * lp0, src0, rows.offset(src0_nb, j1, j2, j3), src0_nb[0], ne00)
            zeros(dst, to + 4 * (lp0 + ne00), dst_ne[0] - lp0 - ne00)
        else:
            zeros(dst, to, dst_ne[0])
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@functools.cache
def make_wrap(step: int):
    """Kernel of circular frames; the shift of dimension d is parameter d * step."""

    @kernel(streams=True)
    def wrap(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        ne00 = src0_ne[0]
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to = rows.offset(dst_nb, i1, i2, i3)
            j1, j2 = (i1 - op_params[step]) % src0_ne[1], (i2 - op_params[2 * step]) % src0_ne[2]
            at = rows.offset(src0_nb, j1, j2, (i3 - op_params[3 * step]) % src0_ne[3])
            i, j = begin, (begin - op_params[0]) % ne00
            while i < end:
                n = ne00 - j if ne00 - j < end - i else end - i
                run(dst, to + 4 * i, src0, at + j * src0_nb[0], src0_nb[0], n)
                i, j = i + n, 0
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return wrap


@PAD.kernel
def _(node):
    return make_wrap(2) if node.params.circular else pad_f32


def _slice(t: Tensor, dim: int, start: int, n: int) -> Tensor:
    """A copy of n places of a dimension."""
    ne0, ne1, ne2, ne3 = (n if d == dim else t.ne[d] for d in range(4))
    return cont(view_4d(t, ne0, ne1, ne2, ne3, *t.nb[1:], start * t.nb[dim]))


def _fold(grad: Tensor, dim: int, n: int, before: int) -> Tensor:
    """Add the repeats of a circular dimension onto its n places."""
    total, end = _slice(grad, dim, before, n), grad.ne[dim]
    for block in range(before % n - n, end, n):  # where each repeat begins
        start, stop = max(block, 0), min(block + n, end)
        if block != before and start < stop:
            part = _slice(grad, dim, start, stop - start)
            total = acc(total, part, *total.nb[1:], (start - block) * total.nb[dim])
    return total


@PAD.backward
def _(node, grad, need):
    a, sides = node.src[0], _sides(node)
    if node.params.circular:
        for dim in range(3, -1, -1):
            if sides[dim] != (0, 0):
                grad = _fold(grad, dim, a.ne[dim], sides[dim][0])
        return (grad,)
    offset = sum(before * step for (before, _), step in zip(sides, grad.nb, strict=True))
    return (cont(view_4d(grad, *a.ne, *grad.nb[1:], offset)),)


# --- pad_reflect_1d ---------------------------------------------------------------------------------------------------


@checked
def pad_reflect_1d(a: Tensor, p0: int, p1: int) -> Tensor:
    """Continue rows by their mirror images: a b c with p0 = 2, p1 = 1 gives c b a b c b.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], contiguous.
        p0: elements before, 0 to ne0 - 1.
        p1: elements after, 0 to ne0 - 1.

    Returns:
        f32 [p0 + ne0 + p1, ne1, ne2, ne3].

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is not contiguous, or a padding is out of range.

    Source: ggml_pad_reflect_1d.
    """
    require_type("pad_reflect_1d", "a", a, types.F32)
    require_contiguous("pad_reflect_1d", "a", a)
    if not (0 <= p0 < a.ne[0] and 0 <= p1 < a.ne[0]):
        raise ValueError(
            f"pad_reflect_1d: paddings must be 0 to ne[0] - 1 = {a.ne[0] - 1}, got {p0}, {p1} ('{a.name}')"
        )
    return new_node(PAD_REFLECT_1D, a.type, (p0 + a.ne[0] + p1, *a.ne[1:]), (a,), (p0, p1))


@PAD_REFLECT_1D.reference
def _(node, a):
    return np.pad(a, [(0, 0)] * 3 + [(node.params.p0, node.params.p1)], mode="reflect")


@kernel
def pad_reflect_1d_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """The row, then the mirrored ends."""
    n, p0, p1 = src0_ne[0], np.int64(op_params[0]), np.int64(op_params[1])
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to, at = rows.offset(dst_nb, i1, i2, i3) + 4 * p0, rows.offset(src0_nb, i1, i2, i3)
        run(dst, to, src0, at, src0_nb[0], n)
        for i in range(1, p0 + 1):
            memory.store_f32(dst, to - 4 * i, memory.load_f32(src0, at + 4 * i))
        for i in range(p1):
            memory.store_f32(dst, to + 4 * (n + i), memory.load_f32(src0, at + 4 * (n - 2 - i)))
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


PAD_REFLECT_1D.kernel(lambda node: pad_reflect_1d_f32)


@PAD_REFLECT_1D.backward
def _(node, grad, need):
    """Places i of the result came from (n - 1) - |(n - 1) - |i - p0||: added there as rows of the transposed."""
    a, n = node.src[0], node.src[0].ne[0]
    place = abs(arange(-node.params.p0, n + node.params.p1, 1))
    for _ in range(2):
        place = scale_bias(abs(place), -1.0, n - 1.0)
    ids = cast(abs(place), types.I32)
    columns = transpose(reshape_2d(grad, grad.ne[0], a.nrows))
    summed = get_rows_back(columns, ids, transpose(reshape_2d(a, n, a.nrows)))
    return (reshape_4d(cont(transpose(summed)), *a.ne),)


# --- roll -------------------------------------------------------------------------------------------------------------


@checked
def roll(a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
    """Shift each dimension around: dst[i] = a[(i - shift) mod ne].

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        shift0: of dimension 0, less than ne0 in size.
        shift1: of dimension 1.
        shift2: of dimension 2.
        shift3: of dimension 3.

    Returns:
        f32, the shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: a shift is too large.

    Source: ggml_roll.
    """
    require_type("roll", "a", a, types.F32)
    shifts = (shift0, shift1, shift2, shift3)
    if any(not -n < s < n for s, n in zip(shifts, a.ne, strict=True)):
        raise ValueError(f"roll: shifts must be smaller than the sizes {list(a.ne)}, got {list(shifts)} ('{a.name}')")
    return new_node(ROLL, a.type, a.ne, (a,), shifts)


def _shifts(node: Tensor) -> tuple[int, int, int, int]:
    p = node.params
    return p.shift0, p.shift1, p.shift2, p.shift3


@ROLL.reference
def _(node, a):
    return np.roll(a, _shifts(node)[::-1], (0, 1, 2, 3))


ROLL.kernel(lambda node: make_wrap(1))


@ROLL.backward
def _(node, grad, need):
    return (roll(grad, *(-s for s in _shifts(node))),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, view_2d

    for circular, build in enumerate((pad_ext, pad_ext_circular)):
        name = ("zeros", "circular")[circular]
        PAD.case(f"{name}, all sides")(lambda t, f=build: f(t("F32", 7, 5, 3, 2), 1, 2, 0, 1, 2, 0, 1, 1))
        PAD.case(f"{name}, rows")(lambda t, f=build: f(t("F32", 40, 3), 3, 17, 0, 0, 0, 0, 0, 0))
        PAD.case(f"{name}, padded rows")(
            lambda t, f=build: f(view_2d(t("F32", 50, 6), 34, 6, 200, 8), 1, 1, 2, 0, 0, 0, 0, 0)
        )
        PAD.case(f"{name}, permuted")(
            lambda t, f=build: f(permute(t("F32", 6, 4, 5), 2, 0, 1, 3), 1, 1, 2, 0, 0, 1, 0, 0)
        )
    PAD.case("none")(lambda t: pad(t("F32", 9, 2), 0, 0, 0, 0))
    PAD.case("after")(lambda t: pad(t("F32", 9, 2), 3, 2, 1, 1))
    PAD.case("circular, after")(lambda t: pad_circular(t("F32", 9, 2), 3, 1, 0, 0))
    PAD.case("many repeats")(lambda t: pad_ext_circular(t("F32", 3, 2), 7, 5, 3, 3, 0, 0, 0, 0))

    for n, p0, p1 in ((10, 3, 2), (5, 4, 4), (2, 1, 1), (40, 0, 39)):
        PAD_REFLECT_1D.case(f"{p0}, {n}, {p1}")(lambda t, n=n, p=(p0, p1): pad_reflect_1d(t("F32", n, 3, 2), *p))

    ROLL.case("all dimensions")(lambda t: roll(t("F32", 7, 5, 3, 2), 2, 1, -1, 1))
    ROLL.case("long row")(lambda t: roll(t("F32", 577), -300, 0, 0, 0))
    ROLL.case("permuted")(lambda t: roll(permute(t("F32", 9, 3, 4), 0, 2, 1, 3), 1, -1, 1, 0))
    ROLL.case("transposed")(lambda t: roll(transpose(t("F32", 5, 21)), 20, -4, 0, 0))


_cases()
