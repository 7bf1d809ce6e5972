"""Constants and triangles: fill, arange, diag, tri, diag_mask_zero, timestep_embedding.

    fill                a constant in every place
    arange              start, start + step, ...
    diag                a row as the diagonal of a square
    tri                 one triangle of a square, 0 elsewhere
    diag_mask_zero      0 where the column is beyond n_past plus the row
    timestep_embedding  cos(t f_j), then sin(t f_j), f_j = max_period^(-j / half)

(diag_mask_inf is with soft_max, whose mask it is.) Angles are float64, so that they are right at any timestep.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.binary import mul, sub
from ggjit.ops.copy import cont
from ggjit.ops.lib.checks import require, require_contiguous, require_type
from ggjit.ops.reduce import sum_rows
from ggjit.ops.scale import scale
from ggjit.ops.unary import exp
from ggjit.ops.views import reshape_1d, reshape_4d, view_2d, view_4d
from ggjit.tensor import Tensor, new_node, view_tensor

angles = lazy_module("ggjit.ops.lib.angles")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["arange", "diag", "diag_mask_zero", "fill", "timestep_embedding", "tri"]

DIAG = Op("diag", id=43)
DIAG_MASK_ZERO = Op("diag_mask_zero", id=45, params=(("n_past", "i32"),), inplace=True)
ARANGE = Op("arange", id=67, params=(("start", "f32"), ("stop", "f32"), ("step", "f32")))
TIMESTEP_EMBEDDING = Op("timestep_embedding", id=68, params=(("dim", "i32"), ("max_period", "i32")))
TRI = Op("tri", id=72, params=(("type", "i32"),), inplace=True)
FILL = Op("fill", id=73, params=(("value", "f32"),), inplace=True, shape_only=(0,))

UPPER_DIAG, UPPER, LOWER_DIAG, LOWER = 0, 1, 2, 3
"""Triangles of tri: with the diagonal or strictly above (below) it."""


# --- fill -------------------------------------------------------------------------------------------------------------


@checked
def fill(a: Tensor, value: float, *, inplace: bool = False) -> Tensor:
    """Put a constant in every place.

    Args:
        a: f32 or f16, contiguous; gives type and shape, its values do not matter.
        value: the constant.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: `a` is of another type.
        ValueError: `a` is not contiguous.

    Source: ggml_fill.
    """
    require_type("fill", "a", a, types.F32, types.F16)
    require_contiguous("fill", "a", a)
    return view_tensor(FILL, a, (a,), (value,)) if inplace else new_node(FILL, a.type, a.ne, (a,), (value,))


@FILL.reference
def _(node, a):
    return np.full(a.shape, np.float32(node.params.value).astype(node.type.dtype), np.float64)


@functools.cache
def make_fill(type_name: str, size: int):
    """Kernel for contiguous tensors of a type."""
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @kernel
    def fill(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        begin, end = rows.part(dst_ne[0] * dst_ne[1] * dst_ne[2] * dst_ne[3], np.int64(64), ith, nth)
        x = vec.splat(memory.f32_from_bits(op_params[0]))
        for i in range(begin, end - 15, 16):
            store(dst, size * i, x)
        rest = (end - begin) % 16
        store_first(dst, size * (end - rest), x, rest)

    return fill


FILL.kernel(lambda node: make_fill(node.type.name, node.type.type_size))


# --- arange -----------------------------------------------------------------------------------------------------------


@checked
def arange(start: float, stop: float, step: float) -> Tensor:
    """Count from `start` up to `stop`, which is left out.

    Args:
        start: first value.
        stop: end, more than `start`.
        step: difference, positive.

    Returns:
        f32 [ceil((stop - start) / step)]: start + step * i.

    Raises:
        ValueError: `stop` is not above `start`, or `step` not above 0.

    Source: ggml_arange.
    """
    with np.errstate(all="ignore"):
        n = float((np.float32(stop) - np.float32(start)) / np.float32(step)) if step > 0 else math.nan
    if not 0 < n < math.inf:
        raise ValueError(f"arange: stop must be above start and step above 0, got {start}, {stop} and {step}")
    return new_node(ARANGE, types.F32, (math.ceil(n), 1, 1, 1), (), (start, stop, step))


@ARANGE.reference
def _(node):
    return node.params.start + node.params.step * np.arange(node.ne[0])


@kernel
def arange_f32(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    """Start + step * i, rounded once."""
    begin, end = rows.part(dst_ne[0], np.int64(64), ith, nth)
    start, step = np.float64(memory.f32_from_bits(op_params[0])), np.float64(memory.f32_from_bits(op_params[2]))
    for i in range(begin, end):
        memory.store_f32(dst, 4 * i, np.float32(start + step * i))


ARANGE.kernel(lambda node: arange_f32)


# --- diag -------------------------------------------------------------------------------------------------------------


@checked
def diag(a: Tensor) -> Tensor:
    """Put rows on the diagonals of squares, 0 elsewhere.

    Args:
        a: f32 [n, 1, ne2, ne3], any strides.

    Returns:
        f32 [n, n, ne2, ne3].

    Raises:
        TypeError: `a` is not f32.
        ValueError: ne[1] is not 1.

    Source: ggml_diag.
    """
    require_type("diag", "a", a, types.F32)
    require("diag", a.ne[1] == 1, "a.ne[1] must be 1", a)
    return new_node(DIAG, a.type, (a.ne[0], a.ne[0], *a.ne[2:]), (a,))


@DIAG.reference
def _(node, a):
    return np.eye(node.ne[0]) * a


@kernel
def diag_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Row i1: zeros, and element i1 of the source in its place."""
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to = rows.offset(dst_nb, i1, i2, i3)
        for i in range(0, dst_ne[0], 16):
            vec.store_first(dst, to + 4 * i, vec.zero(), dst_ne[0] - i)
        at = i1 * src0_nb[0] + i2 * src0_nb[2] + i3 * src0_nb[3]
        memory.store_f32(dst, to + 4 * i1, memory.load_f32(src0, at))
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


DIAG.kernel(lambda node: diag_f32)


@DIAG.backward
def _(node, grad, need):
    """The diagonal, seen as rows of one element."""
    n, _, ne2, ne3 = node.ne
    along = view_4d(grad, 1, n, ne2, ne3, grad.nb[1] + grad.nb[0], *grad.nb[2:], 0)
    return (reshape_4d(cont(along), n, 1, ne2, ne3),)


# --- tri and diag_mask_zero -------------------------------------------------------------------------------------------


@checked
def tri(a: Tensor, type: int) -> Tensor:
    """Keep one triangle, 0 elsewhere.

    Args:
        a: f32 [n, n, ne2, ne3], contiguous.
        type: 0: on and above the diagonal (column >= row); 1: above it; 2: on and below; 3: below.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is not square or not contiguous, or there is no such type.

    Source: ggml_tri.
    """
    require_type("tri", "a", a, types.F32)
    require_contiguous("tri", "a", a)
    require("tri", a.ne[0] == a.ne[1], "a must be square", a)
    if type not in (UPPER_DIAG, UPPER, LOWER_DIAG, LOWER):
        raise ValueError(f"tri: type must be 0 to 3, got {type} ('{a.name}')")
    return new_node(TRI, a.type, a.ne, (a,), (type,))


@TRI.reference
def _(node, a):
    cut = {UPPER_DIAG: (np.triu, 0), UPPER: (np.triu, 1), LOWER_DIAG: (np.tril, 0), LOWER: (np.tril, -1)}
    function, k = cut[node.params.type]
    return function(a, k)


@checked
def diag_mask_zero(a: Tensor, n_past: int, *, inplace: bool = False) -> Tensor:
    """Put 0 where the column is beyond n_past plus the row.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], contiguous.
        n_past: columns that the first row keeps besides its own, not negative.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is not contiguous, or n_past is negative.

    Source: ggml_diag_mask_zero.
    """
    require_type("diag_mask_zero", "a", a, types.F32)
    require_contiguous("diag_mask_zero", "a", a)
    if n_past < 0:
        raise ValueError(f"diag_mask_zero: n_past must not be negative, got {n_past} ('{a.name}')")
    if inplace:
        return view_tensor(DIAG_MASK_ZERO, a, (a,), (n_past,))
    return new_node(DIAG_MASK_ZERO, a.type, a.ne, (a,), (n_past,))


@DIAG_MASK_ZERO.reference
def _(node, a):
    rows, columns = a.shape[-2:]
    return np.where(np.arange(columns) > node.params.n_past + np.arange(rows)[:, None], 0.0, a)


@functools.cache
def make_triangle(is_tri: bool):
    """Kernel that keeps columns first to last of each row, 0 elsewhere."""

    @kernel
    def triangle(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n = dst_ne[0]
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            begin, end = np.int64(0), i1 + 1 + np.int64(op_params[0])
            if is_tri:
                type = op_params[0]
                begin = (i1 if type == UPPER_DIAG else i1 + 1) if type < LOWER_DIAG else np.int64(0)
                end = n if type < LOWER_DIAG else i1 + 1 if type == LOWER_DIAG else i1
            for i in range(0, n, 16):
                x = vec.load_first(src0, at + 4 * i, n - i)
                x = vec.select(vec.first(end - i) & ~vec.first(begin - i), x, np.float32(0))
                vec.store_first(dst, to + 4 * i, x, n - i)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return triangle


TRI.kernel(lambda node: make_triangle(True))
DIAG_MASK_ZERO.kernel(lambda node: make_triangle(False))


@TRI.backward
def _(node, grad, need):
    return (tri(grad, node.params.type),)


@DIAG_MASK_ZERO.backward
def _(node, grad, need):
    return (diag_mask_zero(grad, node.params.n_past),)


# --- timestep_embedding -----------------------------------------------------------------------------------------------


@checked
def timestep_embedding(timesteps: Tensor, dim: int, max_period: int) -> Tensor:
    """Embed numbers as cosines and sines of falling frequency.

    half = dim // 2; f_j = max_period^(-j / half); row i = cos(t_i f_0 ... f_half-1), sin(t_i f_0 ...), 0 if dim is odd

    Args:
        timesteps: f32 [n], any stride.
        dim: length of an embedding, at least 2.
        max_period: ratio of the first and the (left out) last frequency, at least 1.

    Returns:
        f32 [dim, n].

    Raises:
        TypeError: `timesteps` is not f32.
        ValueError: it has more than one dimension, or a parameter does not fit.

    Source: ggml_timestep_embedding.
    """
    require_type("timestep_embedding", "timesteps", timesteps, types.F32)
    require("timestep_embedding", timesteps.ne[1:] == (1, 1, 1), "timesteps must have one dimension", timesteps)
    if dim < 2 or max_period < 1:
        raise ValueError(f"timestep_embedding: dim must be at least 2 and max_period 1, got {dim} and {max_period}")
    return new_node(TIMESTEP_EMBEDDING, types.F32, (dim, timesteps.ne[0], 1, 1), (timesteps,), (dim, max_period))


@TIMESTEP_EMBEDDING.reference
def _(node, t):
    dim, half = node.params.dim, node.params.dim // 2
    angle = t.reshape(-1, 1) * float(node.params.max_period) ** (-np.arange(half) / half)
    return np.concatenate([np.cos(angle), np.sin(angle), np.zeros((len(angle), dim % 2))], 1)


@kernel
def timestep_embedding_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Threads share the frequencies, as timesteps are few."""
    dim, half = dst_ne[0], dst_ne[0] // 2
    for j in range(half * ith // nth, half * (ith + 1) // nth):
        frequency = angles.power(np.float64(op_params[1]), -np.float64(j) / half)
        for i in range(dst_ne[1]):
            sin, cos = angles.sin_cos(np.float64(memory.load_f32(src0, i * src0_nb[0])) * frequency)
            memory.store_f32(dst, i * dst_nb[1] + 4 * j, np.float32(cos))
            memory.store_f32(dst, i * dst_nb[1] + 4 * (j + half), np.float32(sin))
    if ith == 0 and dim % 2:
        for i in range(dst_ne[1]):
            memory.store_f32(dst, i * dst_nb[1] + 4 * (dim - 1), np.float32(0))


TIMESTEP_EMBEDDING.kernel(lambda node: timestep_embedding_f32)
TIMESTEP_EMBEDDING.flops(lambda node: 20 * node.nelements)


@TIMESTEP_EMBEDDING.backward
def _(node, grad, need):
    """The sum over j of f_j (d sin_j cos_j - d cos_j sin_j)."""
    half, n = node.params.dim // 2, node.ne[1]
    cos, sin = (cont(view_2d(node, half, n, node.nb[1], offset)) for offset in (0, 4 * half))
    d_cos, d_sin = (cont(view_2d(grad, half, n, grad.nb[1], offset)) for offset in (0, 4 * half))
    frequencies = exp(scale(arange(0, half, 1), -math.log(node.params.max_period) / half))
    return (reshape_1d(sum_rows(mul(sub(mul(d_sin, cos), mul(d_cos, sin)), frequencies)), n),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import view_1d

    FILL.case("f32")(lambda t: fill(t("F32", 77, 3, 2), 2.7))
    FILL.case("f16, in place")(lambda t: fill(t("F16", 33, 5), -0.3, inplace=True))
    FILL.case("infinity")(lambda t: fill(t("F32", 5), -math.inf))

    ARANGE.case("integers")(lambda t: arange(0, 100, 1))
    ARANGE.case("part of a step")(lambda t: arange(-5, 5, 0.7))
    ARANGE.case("less than a step")(lambda t: arange(0, 0.5, 1))

    DIAG.case("row")(lambda t: diag(t("F32", 37)))
    DIAG.case("batches")(lambda t: diag(t("F32", 7, 1, 3, 2)))
    DIAG.case("padded rows")(lambda t: diag(view_4d(t("F32", 10, 6), 7, 1, 3, 2, 40, 40, 120, 8)))
    DIAG.case("elements with gaps")(lambda t: diag(_column(t("F32", 5, 20))))

    for type, name in enumerate(("upper and diagonal", "upper", "lower and diagonal", "lower")):
        for n in (1, 5, 16, 37):
            TRI.case(f"{name}, {n}")(lambda t, k=type, n=n: tri(t("F32", n, n, 2), k))

    DIAG_MASK_ZERO.case("square")(lambda t: diag_mask_zero(t("F32", 33, 33, 2), 0))
    DIAG_MASK_ZERO.case("with past, in place")(lambda t: diag_mask_zero(t("F32", 40, 7, 2, 3), 20, inplace=True))

    TIMESTEP_EMBEDDING.case("even")(lambda t: timestep_embedding(t("F32", 5, low=0, high=1000), 320, 10000))
    TIMESTEP_EMBEDDING.case("odd")(lambda t: timestep_embedding(t("F32", 3, low=0, high=1000), 15, 1000))
    TIMESTEP_EMBEDDING.case("part of a row")(lambda t: timestep_embedding(view_1d(t("F32", 12), 7, 16), 2, 100))


def _column(a: Tensor) -> Tensor:
    """The first column, as a row."""
    from ggjit.ops.views import permute

    return permute(view_2d(a, 1, a.ne[1], a.nb[1], 0), 1, 0, 2, 3)


_cases()
