"""Unary functions of every element: one op, the function's number in op_params.

    dst[i] = f(a[i])

Values are f32 in registers, rounded once to the type of `a`. One kernel for each function and type; the functions
themselves are vectors in, vectors out (ops/lib/activations.py). ggml looks gelu and gelu_quick of f32 up in a table of
f16 values; here they are computed, gelu with ggml's bound: 0 up to -10 in f32 (in f16 and bf16 -inf gives NaN). So
gelu_quick does not overflow beyond 65504, as the table does.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import refuse
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.tensor import Tensor, new_node, view_tensor

activations = lazy_module("ggjit.ops.lib.activations")
half_activations = lazy_module("ggjit.ops.lib.half_activations")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

FUNCTIONS = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
    "hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc",
)  # fmt: skip
"""Names in the order of ggml's numbers."""

__all__ = [
    "abs", "ceil", "elu", "exp", "expm1", "floor", "gelu", "gelu_erf", "gelu_quick", "hardsigmoid", "hardswish", "neg",
    "relu", "round", "sgn", "sigmoid", "silu", "softplus", "step", "tanh", "trunc", "unary", "xielu",
]  # fmt: skip

UNARY = Op(
    "unary",
    id=91,
    params=(("function", "i32"), ("alpha_n", "f32"), ("alpha_p", "f32"), ("beta", "f32"), ("eps", "f32")),
    inplace=True,
)


# --- builders (some hide names of Python's, as ggml's names do) -------------------------------------------------------


@checked
def unary(a: Tensor, function: str, *, inplace: bool = False) -> Tensor:
    """Apply a function to every element.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3], rows contiguous.
        function: one of `FUNCTIONS` but xielu, which has parameters.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: rows of `a` are not contiguous, or there is no such function.

    Source: ggml_unary.
    """
    if function not in FUNCTIONS or function == "xielu":
        names = ", ".join(f for f in FUNCTIONS if f != "xielu")
        raise ValueError(f"unary: function must be one of {names}, got {function!r}")
    return _unary(function, a, inplace)


def _unary(function: str, a: Tensor, inplace: bool, params: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)) -> Tensor:
    if not a.is_contiguous_rows:
        raise ValueError(f"{function}: rows of a must be contiguous, got ne {list(a.ne)}, nb {list(a.nb)} ('{a.name}')")
    values = (FUNCTIONS.index(function), *params)
    return view_tensor(UNARY, a, (a,), values) if inplace else new_node(UNARY, a.type, a.ne, (a,), values)


@checked
def abs(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the absolute value: |x|; arguments as for `unary`.

    Source: ggml_abs.
    """
    return _unary("abs", a, inplace)


@checked
def sgn(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the sign: -1, 0 or 1 by the sign of x; arguments as for `unary`.

    Source: ggml_sgn.
    """
    return _unary("sgn", a, inplace)


@checked
def neg(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Negate; arguments as for `unary`.

    Source: ggml_neg.
    """
    return _unary("neg", a, inplace)


@checked
def step(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take 1 for what is above 0, 0 for the rest; arguments as for `unary`.

    Source: ggml_step.
    """
    return _unary("step", a, inplace)


@checked
def tanh(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the hyperbolic tangent; arguments as for `unary`.

    Source: ggml_tanh.
    """
    return _unary("tanh", a, inplace)


@checked
def elu(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the exponential linear unit: x if x > 0, else e^x - 1; arguments as for `unary`.

    Source: ggml_elu.
    """
    return _unary("elu", a, inplace)


@checked
def relu(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Clear what is below 0: x if x > 0, else 0; arguments as for `unary`.

    Source: ggml_relu.
    """
    return _unary("relu", a, inplace)


@checked
def sigmoid(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the logistic function: 1 / (1 + e^-x); arguments as for `unary`.

    Source: ggml_sigmoid.
    """
    return _unary("sigmoid", a, inplace)


@checked
def gelu(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the Gaussian error linear unit in its tanh form; arguments as for `unary`.

    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    Source: ggml_gelu.
    """
    return _unary("gelu", a, inplace)


@checked
def gelu_quick(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the Gaussian error linear unit in its sigmoid form: x / (1 + e^(-1.702 x)); arguments as for `unary`.

    Source: ggml_gelu_quick.
    """
    return _unary("gelu_quick", a, inplace)


@checked
def silu(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the sigmoid linear unit: x / (1 + e^-x); arguments as for `unary`.

    Source: ggml_silu.
    """
    return _unary("silu", a, inplace)


@checked
def hardswish(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the piecewise form of silu: x relu6(x + 3) / 6; arguments as for `unary`.

    Source: ggml_hardswish.
    """
    return _unary("hardswish", a, inplace)


@checked
def hardsigmoid(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the piecewise form of sigmoid: relu6(x + 3) / 6; arguments as for `unary`.

    Source: ggml_hardsigmoid.
    """
    return _unary("hardsigmoid", a, inplace)


@checked
def exp(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the exponential: e^x; arguments as for `unary`.

    Source: ggml_exp.
    """
    return _unary("exp", a, inplace)


@checked
def expm1(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Take the exponential less 1: e^x - 1; arguments as for `unary`.

    Source: ggml_expm1.
    """
    return _unary("expm1", a, inplace)


@checked
def softplus(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply softplus: log(1 + e^x); arguments as for `unary`.

    Source: ggml_softplus.
    """
    return _unary("softplus", a, inplace)


@checked
def gelu_erf(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Apply the Gaussian error linear unit: 0.5 x (1 + erf(x / sqrt(2))); arguments as for `unary`.

    Source: ggml_gelu_erf.
    """
    return _unary("gelu_erf", a, inplace)


@checked
def floor(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Round down; arguments as for `unary`.

    Source: ggml_floor.
    """
    return _unary("floor", a, inplace)


@checked
def ceil(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Round up; arguments as for `unary`.

    Source: ggml_ceil.
    """
    return _unary("ceil", a, inplace)


@checked
def round(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Round to the nearest integer, ties away from zero; arguments as for `unary`.

    Source: ggml_round.
    """
    return _unary("round", a, inplace)


@checked
def trunc(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Round towards zero; arguments as for `unary`.

    Source: ggml_trunc.
    """
    return _unary("trunc", a, inplace)


@checked
def xielu(a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """Apply the expanded integral of the exponential linear unit.

    p x^2 + beta x if x > 0, else (expm1(min(x, eps)) - x) n + beta x, with p = softplus(alpha_p) and
    n = beta + softplus(alpha_n).

    Args:
        a: f32, f16 or bf16, contiguous but for gaps between rows.
        alpha_n: gives n, the weight of the exponential part.
        alpha_p: gives p, the weight of the square.
        beta: slope at 0.
        eps: bound of the exponent.

    Returns:
        The type and shape of `a`. The node's parameters alpha_n and alpha_p hold n and p.

    Raises:
        ValueError: dimensions of `a` above 1 are not contiguous.

    Source: Huang and Schlag, Deriving activation functions using integration (2024); ggml_xielu.
    """
    if not a.is_contiguous_1:
        raise ValueError(
            f"xielu: a must be contiguous above dimension 1, got ne {list(a.ne)}, nb {list(a.nb)} ('{a.name}')"
        )
    return _unary("xielu", a, False, (beta + _softplus(alpha_n), _softplus(alpha_p), beta, eps))


def _softplus(x: float) -> float:
    return x if x > 20.0 else math.log1p(math.exp(x))


# --- reference --------------------------------------------------------------------------------------------------------


def _xielu(x, p):
    with np.errstate(all="ignore"):
        negative = (np.expm1(np.minimum(x, p.eps)) - x) * p.alpha_n + p.beta * x
        return np.where(x > 0, p.alpha_p * x * x + p.beta * x, negative)


_erf = np.vectorize(math.erf, otypes=[np.float64])
FORMULAS = {
    "abs": np.abs,
    "sgn": np.sign,
    "neg": np.negative,
    "step": lambda x: (x > 0) * 1.0,
    "tanh": np.tanh,
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hardswish": lambda x: x * np.clip((x + 3) / 6, 0, 1),
    "hardsigmoid": lambda x: np.clip((x + 3) / 6, 0, 1),
    "exp": np.exp,
    "expm1": np.expm1,
    "softplus": lambda x: np.logaddexp(0, x),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": lambda x: np.trunc(x + np.copysign(0.5, x)),
    "trunc": np.trunc,
}
"""The functions in float64."""


@UNARY.reference
def _(node, a):
    name = FUNCTIONS[node.params.function]
    return _xielu(a, node.params) if name == "xielu" else FORMULAS[name](a)


# --- kernels ----------------------------------------------------------------------------------------------------------

_CHEAP = (
    "abs", "sgn", "neg", "step", "relu", "floor", "ceil", "trunc", "round", "hardswish", "hardsigmoid",
)  # fmt: skip
_DIRECT = ("abs", "tanh", "exp", "floor", "ceil", "trunc")  # functions of vec; "round" there would be another
_HALF = ("elu", "exp", "expm1", "gelu", "gelu_erf", "gelu_quick", "sigmoid", "silu", "softplus", "tanh")


def lanes_of(function: str, type_name: str):
    """Helper vector -> vector of a function without parameters."""
    if function in _HALF and type_name != "F32":
        return getattr(half_activations, function)
    if function in _DIRECT:
        return getattr(vec, function)
    return getattr(activations, "round_away" if function == "round" else function)


@functools.cache
def unary_row(function: str, type_name: str, size: int):
    """Jitted (dst, to, src, at, n, params): n elements of a contiguous row; params are the op_params."""
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)
    lanes = lanes_of(function, type_name)

    @jitted
    def row(dst, to, src, at, n, params):
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, lanes(load(src, at + size * i)))
        rest = n % 16
        if rest:
            i = size * (n - rest)
            store_first(dst, to + i, lanes(load_first(src, at + i, rest)), rest)

    return row


@functools.cache
def xielu_row(type_name: str, size: int):
    """Jitted (dst, to, src, at, n, params), as `unary_row`."""
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @jitted
    def row(dst, to, src, at, n, params):
        alpha_n, alpha_p = memory.f32_from_bits(params[1]), memory.f32_from_bits(params[2])
        beta, eps = memory.f32_from_bits(params[3]), memory.f32_from_bits(params[4])
        for i in range(0, n - 15, 16):
            x = load(src, at + size * i)
            store(dst, to + size * i, activations.xielu(x, alpha_n, alpha_p, beta, eps))
        rest = n % 16
        if rest:
            i = size * (n - rest)
            x = load_first(src, at + i, rest)
            store_first(dst, to + i, activations.xielu(x, alpha_n, alpha_p, beta, eps), rest)

    return row


@functools.cache
def make_unary(function: str, type_name: str, size: int):
    """Kernel of a function for contiguous rows."""
    row = xielu_row(type_name, size) if function == "xielu" else unary_row(function, type_name, size)

    @kernel(streams=function in _CHEAP and type_name == "F32")
    def unary_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            row(dst, to + size * begin, src0, at + size * begin, end - begin, op_params)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return unary_rows


@UNARY.kernel
def _(node):
    if node.type not in (types.F32, types.F16, types.BF16):
        return None
    return make_unary(FUNCTIONS[node.params.function], node.type.name, node.type.type_size)


# --- gradient ---------------------------------------------------------------------------------------------------------


@UNARY.backward
def _(node, grad, need):
    """ggml's gradients of sgn and step are 0; those of floor, ceil, round and trunc do not exist."""
    a, name, p = node.src[0], FUNCTIONS[node.params.function], node.params
    if name in ("floor", "ceil", "round", "trunc"):
        refuse(node, f"{name} has no gradient")
    if name in ("sgn", "step"):
        return (None,)
    if name == "neg":
        return (neg(grad),)
    if name == "silu" and a.type is types.F32:
        return (ops.silu_back(grad, a),)
    return (ops.unary_back(grad, a, name, (p.alpha_n, p.alpha_p, p.beta, p.eps)),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    for name in FUNCTIONS:
        if name == "xielu":
            continue
        UNARY.case(f"{name}")(lambda t, f=name: unary(t("F32", 65, 3, low=-6, high=6), f))
        UNARY.case(f"{name}, f16, in place")(lambda t, f=name: unary(t("F16", 37, 2, low=-6, high=6), f, inplace=True))
    for n in (1, 15, 16, 17, 577):
        UNARY.case(f"row of {n}")(lambda t, n=n: silu(t("F32", n, low=-8, high=8)))


_cases()


@UNARY.case("xielu")
def _(t):
    return xielu(t("F32", 65, 3, low=-6, high=6), 4.0, 20.0, 0.5, 1e-7)


@UNARY.case("xielu, bf16, padded rows")
def _(t):
    from ggjit.ops.views import view_2d

    return xielu(view_2d(t("BF16", 40, 3), 33, 3, 80, 6), -0.5, 0.8, 0.5, -1e-6)


@UNARY.case("rows permuted")
def _(t):
    from ggjit.ops.views import permute

    return gelu(permute(t("F32", 18, 4, 5, low=-4, high=4), 0, 2, 1, 3))
