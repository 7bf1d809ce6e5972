"""sqr, sqrt, log, sin, cos, clamp, leaky_relu: functions of every element that are ops of their own.

    dst[i] = f(a[i])

Values are f32 in registers, rounded once to the type of `a`; one kernel for each function and type. sin and cos are
right for every f32 (ops/lib/sine.py).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, as_f32
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.binary import div, mul
from ggjit.ops.scale import scale, scale_bias
from ggjit.ops.unary import step
from ggjit.tensor import Tensor, new_node, view_tensor
from ggjit.types import Type

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
sine = lazy_module("ggjit.ops.lib.sine")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["clamp", "cos", "leaky_relu", "log", "sin", "sqr", "sqrt"]

SQR = Op("sqr", id=9, inplace=True)
SQRT = Op("sqrt", id=10, inplace=True)
LOG = Op("log", id=11, inplace=True)
SIN = Op("sin", id=12, inplace=True)
COS = Op("cos", id=13, inplace=True)
CLAMP = Op("clamp", id=50, params=(("min", "f32"), ("max", "f32")), inplace=True)
LEAKY_RELU = Op("leaky_relu", id=71, params=(("negative_slope", "f32"),), inplace=True)


# --- builders ---------------------------------------------------------------------------------------------------------


def _function(op: Op, a: Tensor, inplace: bool, params: tuple[float, ...] = ()) -> Tensor:
    allowed = _types(op)
    if a.type not in allowed:
        raise TypeError(f"{op.name}: a must be {' or '.join(t.name for t in allowed)}, got {a.type.name} ('{a.name}')")
    if not a.is_contiguous_rows:
        raise ValueError(
            f"{op.name}: rows of a must be contiguous, got ne {list(a.ne)}, nb {list(a.nb)}; use cont first "
            f"('{a.name}')"
        )
    return view_tensor(op, a, (a,), params) if inplace else new_node(op, a.type, a.ne, (a,), params)


def _types(op: Op) -> tuple[Type, ...]:
    return (types.F32, types.F16) if op in (CLAMP, LEAKY_RELU) else (types.F32, types.F16, types.BF16)


@checked
def sqr(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Square: x^2.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3], rows contiguous.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: `a` is of another type.
        ValueError: rows of `a` are not contiguous.

    Source: ggml_sqr.
    """
    return _function(SQR, a, inplace)


@checked
def sqrt(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the square root, NaN below 0; arguments as for `sqr`.

    Source: ggml_sqrt.
    """
    return _function(SQRT, a, inplace)


@checked
def log(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the natural logarithm, -inf of 0, NaN below; arguments as for `sqr`.

    Source: ggml_log.
    """
    return _function(LOG, a, inplace)


@checked
def sin(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the sine; arguments as for `sqr`.

    Source: ggml_sin.
    """
    return _function(SIN, a, inplace)


@checked
def cos(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the cosine; arguments as for `sqr`.

    Source: ggml_cos.
    """
    return _function(COS, a, inplace)


@checked
def clamp(a: Tensor, min: float, max: float, *, inplace: bool = False) -> Tensor:
    """Limit to a range: max(min(x, max), min).

    Args:
        a: f32 or f16 [ne0, ne1, ne2, ne3], rows contiguous.
        min: lower limit.
        max: upper limit.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: `a` is of another type.
        ValueError: rows of `a` are not contiguous.

    Source: ggml_clamp.
    """
    return _function(CLAMP, a, inplace, (float(min), float(max)))


@checked
def leaky_relu(a: Tensor, negative_slope: float, inplace: bool = False) -> Tensor:
    """Scale what is below 0: x if x > 0, else negative_slope * x.

    Args:
        a: f32 or f16 [ne0, ne1, ne2, ne3], rows contiguous.
        negative_slope: factor below 0.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: `a` is of another type.
        ValueError: rows of `a` are not contiguous.

    Source: ggml_leaky_relu.
    """
    return _function(LEAKY_RELU, a, inplace, (float(negative_slope),))


# --- references -------------------------------------------------------------------------------------------------------


@SQR.reference
def _(node, a):
    return a * a


@SQRT.reference
def _(node, a):
    with np.errstate(invalid="ignore"):
        return np.sqrt(a)


@LOG.reference
def _(node, a):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(a)


@SIN.reference
def _(node, a):
    return np.sin(a)


@COS.reference
def _(node, a):
    return np.cos(a)


@CLAMP.reference
def _(node, a):
    return np.clip(a, node.params.min, node.params.max)


@LEAKY_RELU.reference
def _(node, a):
    return np.where(a > 0, a, a * node.params.negative_slope)


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def sqr_lanes(x, p, q):
    """x^2."""
    return x * x


@jitted
def sqrt_lanes(x, p, q):
    """Square root."""
    return vec.sqrt(x)


@jitted
def log_lanes(x, p, q):
    """Natural logarithm."""
    return vec.log(x)


@jitted
def sin_lanes(x, p, q):
    """Sine."""
    return sine.sin(x)


@jitted
def cos_lanes(x, p, q):
    """Cosine."""
    return sine.cos(x)


@jitted
def clamp_lanes(x, p, q):
    """x within p and q."""
    return vec.max(vec.min(x, q), p)


@jitted
def leaky_relu_lanes(x, p, q):
    """x above 0, p * x below; 0 for NaN."""
    return vec.max(x, 0.0) + vec.min(x, 0.0) * p


LANES = {
    SQR: sqr_lanes, SQRT: sqrt_lanes, LOG: log_lanes, SIN: sin_lanes, COS: cos_lanes, CLAMP: clamp_lanes,
    LEAKY_RELU: leaky_relu_lanes,
}  # fmt: skip
"""The functions as helpers (vector, first parameter, second parameter) -> vector."""


@functools.cache
def make_function(op: Op, type_name: str, size: int):
    """Kernel of a function for contiguous rows of a type."""
    lanes = LANES[op]
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @kernel(streams=op in (SQR, SQRT, CLAMP, LEAKY_RELU) and type_name == "F32")
    def function_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        p, q = memory.f32_from_bits(op_params[0]), memory.f32_from_bits(op_params[1])
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        n = end - begin
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3) + size * begin, rows.offset(src0_nb, i1, i2, i3) + size * begin
            for i in range(0, n - 15, 16):
                store(dst, to + size * i, lanes(load(src0, at + size * i), p, q))
            rest = n % 16
            if rest:
                i = size * (n - rest)
                store_first(dst, to + i, lanes(load_first(src0, at + i, rest), p, q), rest)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return function_rows


def _select(node):
    return make_function(node.op, node.type.name, node.type.type_size)


for _op in LANES:
    _op.kernel(_select)


# --- backward ---------------------------------------------------------------------------------------------------------


def _values(a: Tensor) -> Tensor:
    """As contiguous f32."""
    return as_contiguous(as_f32(a))


@SQR.backward
def _(node, grad, need):
    return (mul(grad, scale(_values(node.src[0]), 2.0)),)


@SQRT.backward
def _(node, grad, need):
    return (div(scale(grad, 0.5), as_f32(node)),)


@LOG.backward
def _(node, grad, need):
    return (div(grad, as_f32(node.src[0])),)


@SIN.backward
def _(node, grad, need):
    return (mul(grad, cos(as_f32(node.src[0]))),)


@COS.backward
def _(node, grad, need):
    return (mul(grad, scale(sin(as_f32(node.src[0])), -1.0)),)


@CLAMP.backward
def _(node, grad, need):
    a = _values(node.src[0])
    above = step(scale_bias(a, 1.0, -node.params.min))
    below = step(scale_bias(a, -1.0, node.params.max))
    return (mul(mul(grad, above), below),)


@LEAKY_RELU.backward
def _(node, grad, need):
    slope = node.params.negative_slope
    return (mul(grad, scale_bias(step(as_f32(node.src[0])), 1.0 - slope, slope)),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(op, build, low=-4.0):
    from ggjit.ops.views import permute, view_2d

    kinds = [t.name for t in _types(op)]
    for n in (1, 15, 17, 577):
        op.case(f"row of {n}")(lambda t, n=n: build(t("F32", n, low=low, high=4)))
    for kind in kinds:
        op.case(f"{kind}")(lambda t, k=kind: build(t(k, 65, 3, low=low, high=4)))
    op.case("padded rows")(lambda t: build(view_2d(t("F32", 40, 5, low=low, high=4), 33, 5, 160, 12)))
    op.case("permuted")(lambda t: build(permute(t("F16", 18, 4, 5, low=low, high=4), 0, 2, 1, 3)))
    op.case("in place")(lambda t: build(t("F32", 37, 3, low=low, high=4), inplace=True))


_cases(SQR, sqr)
_cases(SQRT, sqrt, 0.0)
_cases(LOG, log, 0.01)
_cases(SIN, sin)
_cases(COS, cos)
_cases(CLAMP, lambda a, **k: clamp(a, -1.5, 2.25, **k))
_cases(LEAKY_RELU, lambda a, **k: leaky_relu(a, 0.1, **k))


@SIN.case("large")
def _(t):
    return sin(t("F32", 65, 2, low=-1e5, high=1e5))


@COS.case("huge")
def _(t):
    return cos(t("F32", 65, 2, low=-1e30, high=1e30))
