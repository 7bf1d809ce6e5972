"""upscale, interpolate: resize dimensions.

Each dimension is a linear map on its own, from ne_in to ne_out places; place i of the result takes from the source

    nearest    the element floor(i / scale), scale = ne_out / ne_in, in float32 as in ggml: where i / scale is whole
               (corners, aligned) it may be the one before
    bilinear   the two beside x, weighted by nearness
    bicubic    the four around x, weighted by Keys' cubic with a = -0.75
    antialias  all in a triangle around x as wide as the scale when it shrinks, weights divided by their sum

with x = (i + 0.5) / scale - 0.5; with aligned corners scale is (ne_out - 1) / (ne_in - 1) and x = i / scale. Elements
beyond an edge are those at the edge. Dimensions 2 and 3 are always nearest.

The kernel makes a table of places and weights for dimension 0 once a thread; a row of the result is the weighted sum of
source rows, 16 elements at a time, then of elements of that sum. Nearest has a kernel of its own. The gradient is the
transposed map: mat-muls.
"""

from __future__ import annotations

import math

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.copy import cont
from ggjit.ops.lib.checks import require, require_type
from ggjit.ops.mul_mat import mul_mat
from ggjit.ops.views import permute
from ggjit.tensor import Tensor, from_numpy, new_node

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["interpolate", "upscale"]

UPSCALE = Op("upscale", id=63, params=(("mode", "i32"),))
NEAREST, BILINEAR, BICUBIC = 0, 1, 2
ALIGN_CORNERS, ANTIALIAS = 256, 512


@checked
def upscale(a: Tensor, scale_factor: int, mode: int) -> Tensor:
    """Enlarge dimensions 0 and 1 by a whole factor; see `interpolate`.

    Source: ggml_upscale.
    """
    if scale_factor <= 1:
        raise ValueError(f"upscale: scale_factor must be above 1, got {scale_factor} ('{a.name}')")
    return _resize("upscale", a, (a.ne[0] * scale_factor, a.ne[1] * scale_factor, *a.ne[2:]), mode)


@checked
def interpolate(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, mode: int) -> Tensor:
    """Resize to [ne0, ne1, ne2, ne3].

    Args:
        a: f32 [width, height, ne2, ne3], any strides, not empty.
        ne0: new width, positive.
        ne1: new height.
        ne2: new size of dimension 2.
        ne3: new size of dimension 3.
        mode: 0 nearest, 1 bilinear, 2 bicubic; plus 256: corners fall on corners; plus 512, bilinear only: antialias.

    Returns:
        f32 [ne0, ne1, ne2, ne3].

    Raises:
        TypeError: `a` is not f32.
        ValueError: sizes or mode do not fit.

    Source: Keys, Cubic convolution interpolation (1981); ggml_interpolate.
    """
    return _resize("interpolate", a, (ne0, ne1, ne2, ne3), mode)


def _resize(where: str, a: Tensor, ne: tuple[int, ...], mode: int) -> Tensor:
    require_type(where, "a", a, types.F32)
    kind, flags = mode & 0xFF, mode & ~0xFF
    if kind not in (NEAREST, BILINEAR, BICUBIC) or flags & ~(ALIGN_CORNERS | ANTIALIAS):
        raise ValueError(f"{where}: mode must be 0 to 2 plus flags 256 and 512, got {mode} ('{a.name}')")
    if flags & ANTIALIAS and kind != BILINEAR:
        raise ValueError(f"{where}: antialias (512) must come with bilinear (1), got mode {mode} ('{a.name}')")
    require(where, not a.is_empty and min(ne) > 0, f"a and the result {list(ne)} must not be empty", a)
    return new_node(UPSCALE, a.type, ne, (a,), (mode,))  # type: ignore[arg-type]


# --- reference --------------------------------------------------------------------------------------------------------


def weights(n_in: int, n_out: int, mode: int) -> np.ndarray:
    """The linear map of a dimension, float64 [n_out, n_in]."""
    w, kind, step = np.zeros((n_out, n_in)), mode & 0xFF, _step(n_in, n_out, mode)
    shift = 0.0 if mode & ALIGN_CORNERS else 0.5
    for i in range(n_out):
        if kind == NEAREST:
            w[i, _nearest(i, n_in, n_out, mode)] = 1
            continue
        x = (i + shift) * step - shift
        if mode & ANTIALIAS:
            near = np.maximum(0, 1 - np.abs(np.arange(n_in) - x) / max(1.0, step))
            w[i] = near / near.sum()
            continue
        first, t = math.floor(x), x - math.floor(x)
        taps = [1 - t, t] if kind == BILINEAR else [_cubic(t + 1), _cubic(t), _cubic(1 - t), _cubic(2 - t)]
        for k, tap in enumerate(taps, start=0 if kind == BILINEAR else -1):
            w[i, min(max(first + k, 0), n_in - 1)] += tap
    return w


def _step(n_in: int, n_out: int, mode: int) -> float:
    """How far x goes from a place to the next."""
    if mode & ALIGN_CORNERS and n_in > 1 and n_out > 1:
        return (n_in - 1) / (n_out - 1)
    return n_in / n_out


def _nearest(i: int, n_in: int, n_out: int, mode: int) -> int:
    if mode & ALIGN_CORNERS and n_in > 1 and n_out > 1:
        scale = np.float32(n_out - 1) / np.float32(n_in - 1)
    else:
        scale = np.float32(n_out) / np.float32(n_in)
    return min(int(np.float32(i) / scale), n_in - 1)


def _cubic(t: float) -> float:
    if t <= 1:
        return (1.25 * t - 2.25) * t * t + 1
    return ((-0.75 * t + 3.75) * t - 6.0) * t + 3.0


def _maps(node: Tensor) -> list[np.ndarray]:
    a, mode = node.src[0], node.params.mode
    assert a is not None
    return [weights(a.ne[d], node.ne[d], mode if d < 2 else NEAREST) for d in range(4)]


@UPSCALE.reference
def _(node, a):
    w0, w1, w2, w3 = _maps(node)
    return np.einsum("ijkl,ai,bj,ck,dl->abcd", a, w3, w2, w1, w0, optimize=True)


# --- kernel -----------------------------------------------------------------------------------------------------------


@jitted
def taps_of(mode, n_in, n_out):
    """The most elements that a place takes from."""
    kind = mode & 0xFF
    if mode & ANTIALIAS:
        return 2 * n_in // (n_out - 1 if n_out > 2 else np.int64(1)) + 4
    return np.int64(1 if kind == NEAREST else 2 if kind == BILINEAR else 4)


@jitted
def nearest(i, n_in, n_out):
    """Element of place i, for n_out / n_in places an element."""
    return np.int64(np.float32(i) / (np.float32(n_out) / np.float32(n_in)))


@jitted
def cubic(t):
    """Keys' cubic at a distance of 0 to 2, a = -0.75."""
    if t <= 1.0:
        return (1.25 * t - 2.25) * t * t + 1.0
    return ((-0.75 * t + 3.75) * t - 6.0) * t + 3.0


@jitted
def put_tap(work, at, k, index, weight, n_in):
    """Write a tap: element and weight."""
    index = 0 if index < 0 else n_in - 1 if index >= n_in else index
    memory.store_i32(work, at + 8 * k, np.int32(index))
    memory.store_f32(work, at + 8 * k + 4, np.float32(weight))


@jitted
def put_taps(work, at, i, n_in, n_out, mode):
    """Write the taps of place i; returns their number."""
    kind = mode & 0xFF
    less = np.int64(1 if mode & ALIGN_CORNERS != 0 and n_in > 1 and n_out > 1 else 0)
    if kind == NEAREST:
        put_tap(work, at, 0, nearest(i, n_in - less, n_out - less), 1.0, n_in)
        return 1
    shift = 0.0 if mode & ALIGN_CORNERS else 0.5
    step = np.float64(n_in - less) / (n_out - less)
    x = (i + shift) * step - shift
    first = np.int64(np.floor(x))
    t = x - first
    if mode & ANTIALIAS:
        support = step if step > 1.0 else 1.0
        begin, end = np.int64(np.ceil(x - support)), np.int64(np.floor(x + support))
        begin, end = begin if begin > 0 else 0, end if end < n_in - 1 else n_in - 1
        total = 0.0
        for j in range(begin, end + 1):
            total += 1.0 - abs(j - x) / support
        for j in range(begin, end + 1):
            put_tap(work, at, j - begin, j, (1.0 - abs(j - x) / support) / total, n_in)
        return end + 1 - begin
    if kind == BILINEAR:
        put_tap(work, at, 0, first, 1.0 - t, n_in)
        put_tap(work, at, 1, first + 1, t, n_in)
        return 2
    put_tap(work, at, 0, first - 1, cubic(t + 1.0), n_in)
    put_tap(work, at, 1, first, cubic(t), n_in)
    put_tap(work, at, 2, first + 1, cubic(1.0 - t), n_in)
    put_tap(work, at, 3, first + 2, cubic(2.0 - t), n_in)
    return 4


@jitted
def add_weighted(dst, to, src, at, weight, n, is_first):
    """dst = (dst +) src * weight of n contiguous f32."""
    for i in range(0, n, 16):
        x = vec.load_first(src, at + 4 * i, n - i)
        y = x * weight if is_first else vec.fma(x, weight, vec.load_first(dst, to + 4 * i, n - i))
        vec.store_first(dst, to + 4 * i, y, n - i)


@kernel
def upscale_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Scratch of a thread: two source rows, taps of the row, number and taps of each column."""
    mode, ne0, ne00, ne1, ne01 = np.int64(op_params[0]), dst_ne[0], src0_ne[0], dst_ne[1], src0_ne[1]
    x_taps, y_taps = taps_of(mode, ne00, ne0), taps_of(mode, ne01, ne1)
    size = 8 * ne00 + 8 * y_taps + ne0 * (8 + 8 * x_taps)
    sums = COUNTER_LINE + size * ith
    staged, y_at = sums + 4 * ne00, sums + 8 * ne00
    x_at, x_step = y_at + 8 * y_taps, 8 + 8 * x_taps
    for i0 in range(ne0):
        at = x_at + i0 * x_step
        memory.store_i64(work, at, put_taps(work, at + 8, i0, ne00, ne0, mode))
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        j2, j3 = nearest(i2, src0_ne[2], dst_ne[2]), nearest(i3, src0_ne[3], dst_ne[3])
        plane = (j2 if j2 < src0_ne[2] else j2 - 1) * src0_nb[2] + (j3 if j3 < src0_ne[3] else j3 - 1) * src0_nb[3]
        for k in range(put_taps(work, y_at, i1, ne01, ne1, mode)):
            at = plane + memory.load_i32(work, y_at + 8 * k) * src0_nb[1]
            x, by = staging.packed(src0, at, src0_nb[0], ne00, work, staged)
            add_weighted(work, sums, x, by, memory.load_f32(work, y_at + 8 * k + 4), ne00, k == 0)
        to = rows.offset(dst_nb, i1, i2, i3)
        for i0 in range(ne0):
            at, total = x_at + i0 * x_step, np.float32(0)
            for k in range(memory.load_i64(work, at)):
                index, weight = memory.load_i32(work, at + 8 + 8 * k), memory.load_f32(work, at + 12 + 8 * k)
                total += memory.load_f32(work, sums + 4 * index) * weight
            memory.store_f32(dst, to + 4 * i0, total)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@kernel
def upscale_nearest_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Scratch of a thread: offsets of a row's elements. A row that takes from the same one as that before is copied."""
    mode, ne0 = np.int64(op_params[0]), dst_ne[0]
    less_0 = np.int64(1 if mode & ALIGN_CORNERS != 0 and src0_ne[0] > 1 and ne0 > 1 else 0)
    less_1 = np.int64(1 if mode & ALIGN_CORNERS != 0 and src0_ne[1] > 1 and dst_ne[1] > 1 else 0)
    offsets, taken = COUNTER_LINE + 4 * ne0 * ith, np.int64(-1)
    for i0 in range(ne0):
        index = min(nearest(i0, src0_ne[0] - less_0, ne0 - less_0), src0_ne[0] - 1)
        memory.store_i32(work, offsets + 4 * i0, np.int32(index * src0_nb[0]))
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        j1 = min(nearest(i1, src0_ne[1] - less_1, dst_ne[1] - less_1), src0_ne[1] - 1)
        j2 = min(nearest(i2, src0_ne[2], dst_ne[2]), src0_ne[2] - 1)
        j3 = min(nearest(i3, src0_ne[3], dst_ne[3]), src0_ne[3] - 1)
        to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, j1, j2, j3)
        if at == taken:
            convert.move(dst, to, dst, to - dst_nb[1], 4 * ne0)
        else:
            for i0 in range(ne0):
                x = memory.load_f32(src0, at + memory.load_i32(work, offsets + 4 * i0))
                memory.store_f32(dst, to + 4 * i0, x)
        taken = at
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


def _is_nearest(node: Tensor) -> bool:
    """Is it plainly nearest, of a source whose rows span less than 2 GiB?"""
    a = node.src[0]
    assert a is not None
    return node.params.mode & 0xFF == NEAREST and not node.params.mode & ANTIALIAS and a.ne[0] * a.nb[0] < 1 << 31


UPSCALE.kernel(lambda node: upscale_nearest_f32 if _is_nearest(node) else upscale_f32)


def _n_taps(node: Tensor, d: int) -> int:
    a, mode = node.src[0], node.params.mode
    assert a is not None
    if mode & ANTIALIAS:
        return 2 * a.ne[d] // max(node.ne[d] - 1, 1) + 4
    return (1, 2, 4)[mode & 0xFF]


@UPSCALE.work_size
def _(node, nth):
    if _is_nearest(node):
        return 4 * node.ne[0] * nth
    ne00, ne0 = node.src[0].ne[0], node.ne[0]
    return nth * (8 * ne00 + 8 * _n_taps(node, 1) + ne0 * (8 + 8 * _n_taps(node, 0)))


@UPSCALE.flops
def _(node):
    return 2 * node.nelements * (_n_taps(node, 0) + _n_taps(node, 1))


@UPSCALE.backward
def _(node, grad, need):
    """Along each dimension that changes, the transposed map, with the dimension in front."""
    for d, w in enumerate(_maps(node)):
        if np.array_equal(w, np.eye(len(w))):
            continue
        axes = [1, 2, 3]
        axes.insert(d, 0)  # dimension d goes to the front
        front = grad if d == 0 else cont(permute(grad, *axes))
        grad = mul_mat(from_numpy(np.ascontiguousarray(w.T, np.float32)), front)
        if d:
            back = [axes.index(k) for k in range(4)]
            grad = cont(permute(grad, *back))
    return (grad,)


# --- cases ------------------------------------------------------------------------------------------------------------

MODES = {
    "nearest": NEAREST, "bilinear": BILINEAR, "bicubic": BICUBIC, "nearest, aligned": NEAREST | ALIGN_CORNERS,
    "bilinear, aligned": BILINEAR | ALIGN_CORNERS, "bicubic, aligned": BICUBIC | ALIGN_CORNERS,
    "antialias": BILINEAR | ANTIALIAS, "antialias, aligned": BILINEAR | ANTIALIAS | ALIGN_CORNERS,
}  # fmt: skip


def _cases():
    from ggjit.ops.views import transpose, view_2d

    for name, mode in MODES.items():
        UPSCALE.case(name)(lambda t, m=mode: upscale(t("F32", 5, 4, 3, 2), 2, m))
        UPSCALE.case(f"{name}, larger")(lambda t, m=mode: interpolate(t("F32", 20, 7), 33, 16, 1, 1, m))
        UPSCALE.case(f"{name}, smaller")(lambda t, m=mode: interpolate(t("F32", 33, 20, 2), 9, 3, 2, 1, m))
        UPSCALE.case(f"{name}, to and from one")(lambda t, m=mode: interpolate(t("F32", 4, 1), 1, 7, 1, 1, m))
    UPSCALE.case("planes")(lambda t: interpolate(t("F32", 4, 3, 2, 3), 8, 3, 4, 2, NEAREST))
    UPSCALE.case("padded rows")(lambda t: upscale(view_2d(t("F32", 50, 6), 34, 6, 200, 8), 3, BILINEAR))
    UPSCALE.case("transposed")(lambda t: upscale(transpose(t("F32", 6, 17)), 2, BICUBIC))


_cases()
