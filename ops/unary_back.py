"""unary_back: the gradient of a unary function, dst[i] = a[i] f'(b[i]).

One pass over the rows, where a derivative made of other ops would take several. Values are f32; x may be of any float
type. The derivatives are vectors in, vectors out (ops/lib/derivatives.py). ggml has an op of this kind for silu alone.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.unary import FORMULAS, FUNCTIONS
from ggjit.tensor import Tensor, new_node

derivatives = lazy_module("ggjit.ops.lib.derivatives")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["unary_back"]

UNARY_BACK = Op(
    "unary_back",
    id=1005,
    params=(("function", "i32"), ("alpha_n", "f32"), ("alpha_p", "f32"), ("beta", "f32"), ("eps", "f32")),
    inplace=True,
)
SMOOTH = (
    "abs", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish", "hardsigmoid", "exp", "expm1",
    "softplus", "gelu_erf", "xielu",
)  # fmt: skip
"""Functions whose derivative depends on x and is not 0 nearly everywhere."""


@checked
def unary_back(a: Tensor, b: Tensor, function: str, params: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)) -> Tensor:
    """Multiply a gradient by the derivative of a unary function: a f'(b).

    Args:
        a: f32 [ne0, ne1, ne2, ne3], the gradient of f(b); rows contiguous.
        b: f32, f16 or bf16 of the shape of `a`, what f was applied to; rows contiguous.
        function: one of `SMOOTH`.
        params: those of xielu's node.

    Returns:
        f32, the shape of `a`.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes or layouts that do not fit, or there is no such function.
    """
    if function not in SMOOTH:
        raise ValueError(f"unary_back: function must be one of {', '.join(SMOOTH)}, got {function!r}")
    if a.type is not types.F32 or b.type not in (types.F32, types.F16, types.BF16):
        raise TypeError(
            f"unary_back: a must be F32 and b F32, F16 or BF16, got {a.type.name} and {b.type.name} "
            f"('{a.name}', '{b.name}')"
        )
    if a.ne != b.ne or not (a.is_contiguous_rows and b.is_contiguous_rows):
        raise ValueError(
            f"unary_back: a and b must have the same shape and contiguous rows, got ne {list(a.ne)} and {list(b.ne)}, "
            f"nb {list(a.nb)} and {list(b.nb)} ('{a.name}', '{b.name}')"
        )
    return new_node(UNARY_BACK, types.F32, a.ne, (a, b), (FUNCTIONS.index(function), *params))


# --- reference --------------------------------------------------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _xielu(x, p):
    with np.errstate(all="ignore"):
        inner = np.where(x < p.eps, np.exp(x), 0.0)
        return np.where(x > 0, 2 * p.alpha_p * x, (inner - 1) * p.alpha_n) + p.beta


def _gelu(x):
    u, du = (0.7978845608028654 * v for v in (x + 0.044715 * x**3, 1 + 0.134145 * x * x))
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x * (1 - np.tanh(u) ** 2) * du


def _gelu_erf(x):
    phi = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return np.divide(FORMULAS["gelu_erf"](x), x, out=np.full_like(x, 0.5), where=x != 0) + x * phi


DERIVATIVES = {
    "abs": np.sign,
    "tanh": lambda x: 1 - np.tanh(x) ** 2,
    "elu": lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0))),
    "relu": lambda x: (x > 0) * 1.0,
    "sigmoid": lambda x: _sigmoid(x) * _sigmoid(-x),
    "gelu": _gelu,
    "gelu_quick": lambda x: _sigmoid(1.702 * x) * (1 + 1.702 * x * _sigmoid(-1.702 * x)),
    "silu": lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x)),
    "hardswish": lambda x: np.where(np.abs(x) < 3, x / 3 + 0.5, (x > 0) * 1.0),
    "hardsigmoid": lambda x: (np.abs(x) < 3) / 6,
    "exp": np.exp,
    "expm1": np.exp,
    "softplus": _sigmoid,
    "gelu_erf": _gelu_erf,
}
"""The derivatives in float64."""


@UNARY_BACK.reference
def _(node, a, b):
    name = FUNCTIONS[node.params.function]
    return a * (_xielu(b, node.params) if name == "xielu" else DERIVATIVES[name](b))


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def unary_back_row(function: str, type_name: str, size: int):
    """Jitted (dst, to, src0, at, src1, by, n, params): n elements of contiguous rows; params are the op_params."""
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    derivative, is_xielu = getattr(derivatives, function), function == "xielu"

    @jitted
    def slope(x, params):
        if is_xielu:
            alpha_n, alpha_p = memory.f32_from_bits(params[1]), memory.f32_from_bits(params[2])
            return derivative(x, alpha_n, alpha_p, memory.f32_from_bits(params[3]), memory.f32_from_bits(params[4]))
        return derivative(x)

    @jitted
    def row(dst, to, src0, at, src1, by, n, params):
        for i in range(0, n - 15, 16):
            vec.store(dst, to + 4 * i, vec.load(src0, at + 4 * i) * slope(load(src1, by + size * i), params))
        rest = n % 16
        if rest:
            i = n - rest
            y = vec.load_first(src0, at + 4 * i, rest) * slope(load_first(src1, by + size * i, rest), params)
            vec.store_first(dst, to + 4 * i, y, rest)

    return row


@functools.cache
def make_unary_back(function: str, type_name: str, size: int):
    """Kernel of a function for contiguous rows."""
    row = unary_back_row(function, type_name, size)

    @kernel
    def unary_back_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3) + 4 * begin, rows.offset(src0_nb, i1, i2, i3) + 4 * begin
            row(dst, to, src0, at, src1, rows.offset(src1_nb, i1, i2, i3) + size * begin, end - begin, op_params)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return unary_back_rows


@UNARY_BACK.kernel
def _(node):
    b = node.src[1]
    return make_unary_back(FUNCTIONS[node.params.function], b.type.name, b.type.type_size)


@UNARY_BACK.flops
def _(node):
    return 4 * node.nelements


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute

    for name in SMOOTH:
        if name != "xielu":
            UNARY_BACK.case(name)(lambda t, f=name: unary_back(t("F32", 65, 3), t("F32", 65, 3, low=-6, high=6), f))
    UNARY_BACK.case("xielu")(
        lambda t: unary_back(t("F32", 37, 3), t("F32", 37, 3, low=-6, high=6), "xielu", (2.0, 3.0, 0.5, -1e-6))
    )
    UNARY_BACK.case("far tails")(lambda t: unary_back(t("F32", 60, 2), t("F32", 60, 2, low=-40, high=40), "gelu_erf"))
    UNARY_BACK.case("f16")(lambda t: unary_back(t("F32", 33, 2), t("F16", 33, 2, low=-3, high=3), "gelu"))
    UNARY_BACK.case("rows permuted")(
        lambda t: unary_back(t("F32", 18, 5, 4), permute(t("F32", 18, 4, 5), 0, 2, 1, 3), "silu")
    )


_cases()
