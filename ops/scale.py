"""scale: s * x + b with constants.

One kernel; a row is read and written once, 16 elements at a time.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.tensor import Tensor, new_node, view_tensor

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["scale", "scale_bias"]

SCALE = Op("scale", id=32, params=(("s", "f32"), ("b", "f32")), inplace=True)


@checked
def scale(a: Tensor, s: float, *, inplace: bool = False) -> Tensor:
    """Multiply by a constant; see `scale_bias`.

    Source: ggml_scale.
    """
    return scale_bias(a, s, 0.0, inplace=inplace)


@checked
def scale_bias(a: Tensor, s: float, b: float, *, inplace: bool = False) -> Tensor:
    """Multiply by a constant and add another: s * a + b.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3]; rows contiguous, equally far apart.
        s: factor.
        b: what is added.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: rows of `a` are not contiguous or not equally far apart.

    Source: ggml_scale_bias.
    """
    nb, size = a.nb, a.type.type_size
    if nb[0] != size or nb[2] != nb[1] * a.ne[1] or nb[3] != nb[2] * a.ne[2]:
        raise ValueError(
            f"scale: rows of a must be contiguous and equally far apart, got ne {list(a.ne)}, nb {list(nb)} "
            f"('{a.name}')"
        )
    params = (s, b)
    return view_tensor(SCALE, a, (a,), params) if inplace else new_node(SCALE, a.type, a.ne, (a,), params)


@SCALE.reference
def _(node, a):
    return a * node.params.s + node.params.b


@functools.cache
def scale_row(type_name: str, size: int):
    """Jitted (dst, to, src, at, n, s, b): n elements of a contiguous row."""
    load, load_first = vec.loader(type_name), vec.loader_first(type_name)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @jitted
    def row(dst, to, src, at, n, s, b):
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, vec.fma(load(src, at + size * i), s, b))
        rest = n % 16
        if rest:
            i = size * (n - rest)
            store_first(dst, to + i, vec.fma(load_first(src, at + i, rest), s, b), rest)

    return row


@functools.cache
def make_scale(type_name: str, size: int):
    """Kernel for contiguous rows."""
    row = scale_row(type_name, size)

    @kernel(streams=type_name == "F32")
    def scale_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        s, b = memory.f32_from_bits(op_params[0]), memory.f32_from_bits(op_params[1])
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            row(dst, to + size * begin, src0, at + size * begin, end - begin, s, b)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return scale_rows


@SCALE.kernel
def _(node):
    return make_scale(node.type.name, node.type.type_size) if node.type in (types.F32, types.F16, types.BF16) else None


@SCALE.flops
def _(node):
    return 2 * node.nelements


@SCALE.backward
def _(node, grad, need):
    return (scale(grad, node.params.s),)


for _n in (1, 15, 17, 65, 577):
    SCALE.case(f"row of {_n}")(lambda t, n=_n: scale(t("F32", n), 0.125))


@SCALE.case("bias")
def _(t):
    return scale_bias(t("F32", 65, 3, 2), -0.7, 1.3)


@SCALE.case("in place")
def _(t):
    return scale_bias(t("F32", 37, 3), 2.5, -4.0, inplace=True)


@SCALE.case("padded rows, in place")
def _(t):
    from ggjit.ops.views import view_2d

    return scale(view_2d(t("F32", 40, 3), 33, 3, 160, 12), 3.0, inplace=True)


@SCALE.case("f16")
def _(t):
    return scale(t("F16", 35, 2), 2.5)


@SCALE.case("bf16")
def _(t):
    return scale_bias(t("BF16", 35, 2), 2.5, 1.0)


@SCALE.case("zero")
def _(t):
    return scale(t("F32", 20), 0.0)
