"""Gated linear units: an activation of one half times the other half.

    dst = f(x) * g

One source holds x and g in the two halves of each row (swapped: g and x), or two sources hold one each. The function's
number is in op_params. The rows are read and written once; the functions are those of the unary ops
(ops/lib/activations.py). One kernel for each function, type and form.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, row_shares, types
from ggjit.arguments import checked
from ggjit.autodiff import as_f32
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.unary import FORMULAS, lanes_of
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = [
    "geglu", "geglu_erf", "geglu_erf_split", "geglu_quick", "geglu_quick_split", "geglu_split", "glu", "reglu",
    "reglu_split", "swiglu", "swiglu_clamp", "swiglu_oai", "swiglu_split",
]  # fmt: skip

FUNCTIONS = ("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick", "swiglu_clamp")
"""Names in the order of ggml's numbers."""
GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu", "geglu_erf": "gelu_erf", "geglu_quick": "gelu_quick"}

GLU = Op("glu", id=100, params=(("function", "i32"), ("swapped", "i32"), ("alpha", "f32"), ("limit", "f32")))


def _glu(
    function: str, a: Tensor, b: Tensor | None, swapped: bool = False, alpha: float = 0.0, limit: float = 0.0
) -> Tensor:
    params = (FUNCTIONS.index(function), int(swapped), alpha, limit)
    for t in (a, b):
        if t is not None and not t.is_contiguous_1:
            raise ValueError(
                f"{function}: sources must be contiguous above dimension 1, got ne {list(t.ne)}, nb {list(t.nb)} "
                f"('{t.name}')"
            )
    if b is None:
        if a.ne[0] % 2:
            raise ValueError(f"{function}: ne[0] of a must be even, got {list(a.ne)} ('{a.name}')")
        return new_node(GLU, a.type, (a.ne[0] // 2, a.ne[1], a.ne[2], a.ne[3]), (a,), params)
    if swapped:
        raise ValueError(f"{function}: swapped must be False with two sources, got True")
    if a.ne != b.ne or a.type is not b.type:
        raise ValueError(
            f"{function}: a and b must have the same type and shape, got {a.type.name}{list(a.ne)} and "
            f"{b.type.name}{list(b.ne)} ('{a.name}', '{b.name}')"
        )
    return new_node(GLU, a.type, a.ne, (a, b), params)


def _second(where: str, b: Tensor) -> Tensor:
    if b is None:
        raise TypeError(f"{where}: b must be a Tensor, got None")
    return b


@checked
def glu(a: Tensor, b: Tensor | None, function: str, *, swapped: bool = False) -> Tensor:
    """Multiply an activation of one half by the other half: f(x) * g.

    Args:
        a: f32, f16 or bf16, contiguous but for gaps between rows. Without `b` [2 n, ne1, ne2, ne3]: x is the first
            half of each row and g the second; with `b` [n, ne1, ne2, ne3]: x.
        b: None, or g with the type and shape of `a`.
        function: reglu (f is relu), geglu (gelu), swiglu (silu), geglu_erf (gelu_erf) or geglu_quick (gelu_quick).
        swapped: x is the second half and g the first.

    Returns:
        [n, ne1, ne2, ne3] of the type of `a`, contiguous.

    Raises:
        ValueError: shapes, types or layouts do not fit, or there is no such function.

    Source: Shazeer, GLU variants improve transformer (2020); ggml_glu, ggml_glu_split.
    """
    if function not in GATES:
        raise ValueError(f"glu: function must be one of {', '.join(GATES)}, got {function!r}")
    return _glu(function, a, b, swapped)


@checked
def reglu(a: Tensor, b: Tensor | None = None, *, swapped: bool = False) -> Tensor:
    """Gate by relu: max(x, 0) * g; arguments as for `glu`.

    Source: ggml_reglu.
    """
    return _glu("reglu", a, b, swapped)


@checked
def geglu(a: Tensor, b: Tensor | None = None, *, swapped: bool = False) -> Tensor:
    """Gate by gelu in its tanh form; arguments as for `glu`.

    Source: ggml_geglu.
    """
    return _glu("geglu", a, b, swapped)


@checked
def swiglu(a: Tensor, b: Tensor | None = None, *, swapped: bool = False) -> Tensor:
    """Gate by silu: x / (1 + e^-x) * g; arguments as for `glu`.

    Source: ggml_swiglu.
    """
    return _glu("swiglu", a, b, swapped)


@checked
def geglu_erf(a: Tensor, b: Tensor | None = None, *, swapped: bool = False) -> Tensor:
    """Gate by gelu; arguments as for `glu`.

    Source: ggml_geglu_erf.
    """
    return _glu("geglu_erf", a, b, swapped)


@checked
def geglu_quick(a: Tensor, b: Tensor | None = None, *, swapped: bool = False) -> Tensor:
    """Gate by gelu in its sigmoid form; arguments as for `glu`.

    Source: ggml_geglu_quick.
    """
    return _glu("geglu_quick", a, b, swapped)


@checked
def reglu_split(a: Tensor, b: Tensor) -> Tensor:
    """Gate two sources: max(a, 0) * b; arguments as for `glu`.

    Source: ggml_reglu_split.
    """
    return _glu("reglu", a, _second("reglu_split", b))


@checked
def geglu_split(a: Tensor, b: Tensor) -> Tensor:
    """Gate two sources: gelu(a) * b; arguments as for `glu`.

    Source: ggml_geglu_split.
    """
    return _glu("geglu", a, _second("geglu_split", b))


@checked
def swiglu_split(a: Tensor, b: Tensor) -> Tensor:
    """Gate two sources: silu(a) * b; arguments as for `glu`.

    Source: ggml_swiglu_split.
    """
    return _glu("swiglu", a, _second("swiglu_split", b))


@checked
def geglu_erf_split(a: Tensor, b: Tensor) -> Tensor:
    """Gate two sources: gelu_erf(a) * b; arguments as for `glu`.

    Source: ggml_geglu_erf_split.
    """
    return _glu("geglu_erf", a, _second("geglu_erf_split", b))


@checked
def geglu_quick_split(a: Tensor, b: Tensor) -> Tensor:
    """Gate two sources: gelu_quick(a) * b; arguments as for `glu`.

    Source: ggml_geglu_quick_split.
    """
    return _glu("geglu_quick", a, _second("geglu_quick_split", b))


@checked
def swiglu_oai(a: Tensor, b: Tensor | None, alpha: float, limit: float) -> Tensor:
    """Gate as gpt-oss does: x / (1 + e^(-alpha x)) * (g + 1), x at most limit, g within -limit and limit.

    Args:
        a: as for `glu`.
        b: as for `glu`.
        alpha: steepness of the sigmoid.
        limit: bound of x and g.

    Returns:
        [n, ne1, ne2, ne3] of the type of `a`, contiguous.

    Raises:
        ValueError: shapes, types or layouts do not fit.

    Source: ggml_swiglu_oai.
    """
    return _glu("swiglu_oai", a, b, False, alpha, limit)


@checked
def swiglu_clamp(a: Tensor, b: Tensor | None, limit: float) -> Tensor:
    """Gate by silu within bounds: silu(x) * g, x at most limit, g within -limit and limit.

    Args:
        a: as for `glu`.
        b: as for `glu`.
        limit: bound of x and g.

    Returns:
        [n, ne1, ne2, ne3] of the type of `a`, contiguous.

    Raises:
        ValueError: shapes, types or layouts do not fit.

    Source: ggml_swiglu_clamp.
    """
    return _glu("swiglu_clamp", a, b, False, 0.0, limit)


# --- reference --------------------------------------------------------------------------------------------------------


@GLU.reference
def _(node, a, b=None):
    name, p = FUNCTIONS[node.params.function], node.params
    n = node.ne[0]
    x, g = (a, b) if b is not None else (a[..., n:], a[..., :n]) if p.swapped else (a[..., :n], a[..., n:])
    if name in GATES:
        return FORMULAS[GATES[name]](x) * g
    x, g = np.minimum(x, p.limit), np.clip(g, -p.limit, p.limit)
    return x / (1 + np.exp(-p.alpha * x)) * (g + 1) if name == "swiglu_oai" else FORMULAS["silu"](x) * g


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def glu_lanes(function: str, type_name: str):
    """Helper (x, g, alpha, limit) -> vector."""
    gate, exp = lanes_of(GATES.get(function, "silu"), type_name), lanes_of("exp", type_name)

    @jitted
    def gated(x, g, alpha, limit):
        return gate(x) * g

    @jitted
    def oai(x, g, alpha, limit):
        x = vec.min(x, limit)
        return x / (exp(x * -alpha) + 1.0) * (vec.max(vec.min(g, limit), -limit) + 1.0)

    @jitted
    def clamped(x, g, alpha, limit):
        return gate(vec.min(x, limit)) * vec.max(vec.min(g, limit), -limit)

    return {"swiglu_oai": oai, "swiglu_clamp": clamped}.get(function, gated)


@functools.cache
def glu_row(function: str, type_name: str, size: int):
    """Jitted (dst, to, src0, at, src1, by, n, alpha, limit): n elements of contiguous rows."""
    lanes = glu_lanes(function, type_name)
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @jitted
    def row(dst, to, src0, at, src1, by, n, alpha, limit):
        for i in range(0, size * (n - 15), size * 16):
            store(dst, to + i, lanes(load(src0, at + i), load(src1, by + i), alpha, limit))
        rest = n % 16
        if rest:
            i = size * (n - rest)
            y = lanes(load_first(src0, at + i, rest), load_first(src1, by + i, rest), alpha, limit)
            store_first(dst, to + i, y, rest)

    return row


@functools.cache
def make_glu(function: str, type_name: str, size: int):
    """Kernel for one source."""
    row = glu_row(function, type_name, size)

    @kernel(by_rows=row_shares.many)
    def glu_halves(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        alpha, limit = memory.f32_from_bits(op_params[2]), memory.f32_from_bits(op_params[3])
        half = size * dst_ne[0]
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3) + size * begin, rows.offset(src0_nb, i1, i2, i3) + size * begin
            x, g = (at + half, at) if op_params[1] else (at, at + half)
            row(dst, to, src0, x, src0, g, end - begin, alpha, limit)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return glu_halves


@functools.cache
def make_glu_split(function: str, type_name: str, size: int):
    """Kernel for two sources."""
    row = glu_row(function, type_name, size)

    @kernel(by_rows=row_shares.many)
    def glu_split(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        alpha, limit = memory.f32_from_bits(op_params[2]), memory.f32_from_bits(op_params[3])
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3) + size * begin, rows.offset(src0_nb, i1, i2, i3) + size * begin
            by = rows.offset(src1_nb, i1, i2, i3) + size * begin
            row(dst, to, src0, at, src1, by, end - begin, alpha, limit)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return glu_split


@GLU.kernel
def _(node):
    if node.type not in (types.F32, types.F16, types.BF16):
        return None
    make = make_glu if len(node.src) == 1 else make_glu_split
    return make(FUNCTIONS[node.params.function], node.type.name, node.type.type_size)


@GLU.flops
def _(node):
    return 8 * node.nelements


# --- gradient ---------------------------------------------------------------------------------------------------------


def _halves(node):
    """x and g as f32: the two sources, or views of the halves of one."""
    if len(node.src) == 2:
        return [as_f32(t) for t in node.src]
    a, n = node.src[0], node.ne[0]
    begins = (n, 0) if node.params.swapped else (0, n)
    return [as_f32(ops.view_4d(a, n, *a.ne[1:], *a.nb[1:], a.type.type_size * i)) for i in begins]


def _clamped_gate(p, name, x, g, grad):
    """Gradients of x and g of swiglu_oai and swiglu_clamp: 0 beyond the limits."""
    alpha = p.alpha if name == "swiglu_oai" else 1.0
    inside_x, inside_g = (ops.step(ops.scale_bias(t, -1.0, p.limit)) for t in (x, ops.abs(g)))
    x, g = ops.clamp(x, -np.inf, p.limit), ops.clamp(g, -p.limit, p.limit)
    steep = ops.scale(x, alpha)  # alpha x sigmoid(alpha x) / alpha
    by_g = ops.mul(grad, ops.scale_bias(g, 1.0, 1.0) if name == "swiglu_oai" else g)
    return (
        ops.mul(ops.unary_back(by_g, steep, "silu"), inside_x),
        ops.mul(ops.mul(grad, ops.mul(x, ops.sigmoid(steep))), inside_g),
    )


@GLU.backward
def _(node, grad, need):
    name, p = FUNCTIONS[node.params.function], node.params
    x, g = _halves(node)
    if name in GATES:
        gate = GATES[name]
        dx, dg = ops.unary_back(ops.mul(grad, g), x, gate), ops.mul(grad, ops.unary(x, gate))
    else:
        dx, dg = _clamped_gate(p, name, x, g, grad)
    if len(node.src) == 2:
        return dx, dg
    return (ops.concat(dg, dx, 0) if p.swapped else ops.concat(dx, dg, 0),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import view_2d

    for name in GATES:
        GLU.case(name)(lambda t, f=name: glu(t("F32", 130, 3, low=-6, high=6), None, f))
        GLU.case(f"{name}, swapped")(lambda t, f=name: glu(t("F32", 66, 2, 2, low=-6, high=6), None, f, swapped=True))
        GLU.case(f"{name}, split")(lambda t, f=name: glu(t("F32", 65, low=-6, high=6), t("F32", 65), f))
        GLU.case(f"{name}, f16")(lambda t, f=name: glu(t("F16", 37, 3), t("F16", 37, 3), f))
    for n in (1, 15, 16, 17, 576):
        GLU.case(f"row of {n}")(lambda t, n=n: swiglu_split(t("F32", n, low=-8, high=8), t("F32", n)))
    GLU.case("padded rows")(lambda t: geglu(view_2d(t("F32", 50, 4), 36, 4, 200, 8)))
    GLU.case("bf16")(lambda t: swiglu(t("BF16", 70, 3)))
    GLU.case("swiglu_oai")(lambda t: swiglu_oai(t("F32", 74, 3, low=-9, high=9), None, 1.702, 7.0))
    GLU.case("swiglu_oai, split")(
        lambda t: swiglu_oai(t("F32", 37, low=-3, high=3), t("F32", 37, low=-3, high=3), 1.2, 2.0)
    )
    GLU.case("swiglu_clamp")(lambda t: swiglu_clamp(t("F32", 74, 3, low=-9, high=9), None, 1.5))
    GLU.case("swiglu_clamp, split")(
        lambda t: swiglu_clamp(t("F32", 41, 3, low=-9, high=9), t("F32", 41, 3, low=-9, high=9), 1.5)
    )


_cases()
