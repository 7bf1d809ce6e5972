"""Transposed convolutions: each element of the source adds its kernel to the result.

    conv_transpose_1d      dst[l s + k, oc]               += a[k, oc, ic] b[l, ic]
    conv_transpose_2d_p0   dst[x s + kx, y s + ky, oc, n] += a[kx, ky, oc, ic] b[x, y, ic, n]

A thread makes whole rows of the result. In its scratch the elements of a row lie by phase (i modulo s), so that a tap
adds to neighbours whatever the stride: 16 multiply-adds at once, in the order (ic, ky, kx). The input stays f32 where
the kernel is f16 (ggml rounds it in conv_transpose_1d).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.conv import as_matrix_f32
from ggjit.ops.lib.checks import require, require_type
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["conv_transpose_1d", "conv_transpose_2d_p0"]

CONV_TRANSPOSE_1D = Op("conv_transpose_1d", id=51, params=(("s0", "i32"), ("p0", "i32"), ("d0", "i32")))
CONV_TRANSPOSE_2D = Op("conv_transpose_2d", id=59, params=(("stride", "i32"),), nmse=5e-4)


# --- builders ---------------------------------------------------------------------------------------------------------


def _check(where: str, a: Tensor, b: Tensor, stride: int) -> None:
    taps = min(a.ne[0], b.ne[0]) > 0 and (where == "conv_transpose_1d" or min(a.ne[1], b.ne[1]) > 0)
    require(where, taps, "the kernel a and the data b must not be empty", a, b)
    require(where, stride > 0, f"the stride ({stride}) must be positive for a and b", a, b)
    require_type(where, "a", a, types.F32, types.F16)
    require_type(where, "b", b, types.F32)


@checked
def conv_transpose_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Transposed convolution of rows.

    Args:
        a: f32 or f16, the kernel [K, OC, IC], any strides.
        b: f32 [L, IC], any strides.
        s0: stride.
        p0: padding, 0.
        d0: dilation, 1.

    Returns:
        f32 [(L - 1) s0 + K, OC].

    Raises:
        ValueError: channels differ, or p0 or d0 are not 0 and 1.
        TypeError: types do not fit.

    Source: ggml_conv_transpose_1d.
    """
    fits = b.ne[2] == b.ne[3] == a.ne[3] == 1 and a.ne[2] == b.ne[1]
    require("conv_transpose_1d", fits, "b must have 2 dimensions, a 3, and a.ne[2] must equal b.ne[1]", a, b)
    require("conv_transpose_1d", p0 == 0 and d0 == 1, f"p0 must be 0 and d0 1 (got {p0} and {d0}) for a and b", a, b)
    _check("conv_transpose_1d", a, b, s0)
    return new_node(CONV_TRANSPOSE_1D, types.F32, ((b.ne[0] - 1) * s0 + a.ne[0], a.ne[1], 1, 1), (a, b), (s0, p0, d0))


@checked
def conv_transpose_2d_p0(a: Tensor, b: Tensor, stride: int) -> Tensor:
    """Transposed convolution of planes without padding.

    Args:
        a: f32 or f16, the kernel [KW, KH, OC, IC], any strides.
        b: f32 [W, H, IC, N], any strides.
        stride: along both dimensions.

    Returns:
        f32 [(W - 1) stride + KW, (H - 1) stride + KH, OC, N].

    Raises:
        ValueError: channels differ.
        TypeError: types do not fit.

    Source: ggml_conv_transpose_2d_p0.
    """
    require("conv_transpose_2d", a.ne[3] == b.ne[2], "a.ne[3] must equal b.ne[2]", a, b)
    _check("conv_transpose_2d", a, b, stride)
    ne = ((b.ne[0] - 1) * stride + a.ne[0], (b.ne[1] - 1) * stride + a.ne[1], a.ne[2], b.ne[3])
    return new_node(CONV_TRANSPOSE_2D, types.F32, ne, (a, b), (stride,))


# --- references -------------------------------------------------------------------------------------------------------


@CONV_TRANSPOSE_1D.reference
def _(node, a, b):
    s, n_l, n_k = node.params.s0, b.shape[3], a.shape[3]
    out = np.zeros((a.shape[2], (n_l - 1) * s + n_k))
    for k in range(n_k):
        out[:, k : k + (n_l - 1) * s + 1 : s] += a[0, :, :, k].T @ b[0, 0]
    return out[None, None]


@CONV_TRANSPOSE_2D.reference
def _(node, a, b):
    s, out = node.params.stride, np.zeros(node.ne[::-1])
    for ky, kx in np.ndindex(*a.shape[2:]):
        rows_, columns = slice(ky, ky + (b.shape[2] - 1) * s + 1, s), slice(kx, kx + (b.shape[3] - 1) * s + 1, s)
        out[:, :, rows_, columns] += np.einsum("io,niyx->noyx", a[:, :, ky, kx], b)
    return out


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_conv_transpose(type_name: str, planes: bool):
    """Kernel: a row of the result at a time, by phases in the thread's scratch."""
    load = memory.loader(type_name)

    @kernel
    def conv_transpose(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        s, kh, n_in, n_x = np.int64(op_params[0]), 1, src1_ne[1], src1_ne[0]
        a_y, a_out, a_in, b_y, b_in = 0, src0_nb[1], src0_nb[2], 0, src1_nb[1]
        if planes:
            kh, n_in = src0_ne[1], src1_ne[2]
            a_y, a_out, a_in, b_y, b_in = src0_nb[1], src0_nb[2], src0_nb[3], src1_nb[1], src1_nb[2]
        phase = (dst_ne[0] + s - 1) // s
        scratch = COUNTER_LINE + ith * 4 * s * phase
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            oy, oc = (i1, i2) if planes else (0, i1)
            for i in range(s * phase):
                memory.store_f32(work, scratch + 4 * i, np.float32(0))
            for c in range(n_in):
                for ky in range(kh):
                    y = (oy - ky) // s
                    if oy < ky or y * s != oy - ky or (planes and y >= src1_ne[1]):
                        continue
                    at = y * b_y + c * b_in + i3 * src1_nb[3]
                    for kx in range(src0_ne[0]):
                        w = load(src0, kx * src0_nb[0] + ky * a_y + oc * a_out + c * a_in)
                        to = scratch + 4 * (kx % s * phase + kx // s)
                        for x in range(0, n_x, 16):
                            n = n_x - x if x + 16 > n_x else 16
                            if src1_nb[0] == 4:
                                v = vec.load_first(src1, at + 4 * x, n)
                            else:
                                v = vec.load_strided_first(src1, at + x * src1_nb[0], src1_nb[0], n)
                            total = vec.fma(v, w, vec.load_first(work, to + 4 * x, n))
                            vec.store_first(work, to + 4 * x, total, n)
            row = rows.offset(dst_nb, i1, i2, i3)
            for r in range(s):
                for q in range((dst_ne[0] - r + s - 1) // s):
                    value = memory.load_f32(work, scratch + 4 * (r * phase + q))
                    memory.store_f32(dst, row + 4 * (q * s + r), value)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return conv_transpose


def _stride(node):
    return node.params.stride if node.op is CONV_TRANSPOSE_2D else node.params.s0


def _select(node):
    return make_conv_transpose(node.src[0].type.name, node.op is CONV_TRANSPOSE_2D)


def _work_size(node, nth):
    s = _stride(node)
    return 4 * nth * s * -(-node.ne[0] // s)


def _flops(node):
    a, b = node.src
    return 2 * a.nelements * b.ne[0] * (b.ne[1] * b.ne[3] if node.op is CONV_TRANSPOSE_2D else 1)


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(node, grad, need):
    """The gradient of the source is a convolution of the gradient; that of the kernel a sum over places."""
    (a, b), s = node.src, _stride(node)
    planes = node.op is CONV_TRANSPOSE_2D
    kw, kh, n_out, n_in = a.ne if planes else (a.ne[0], 1, a.ne[1], a.ne[2])
    w, h, _, n = b.ne if planes else (b.ne[0], 1, b.ne[1], 1)
    ow, oh = node.ne[0], node.ne[1] if planes else 1
    n_k, places = kw * kh * n_out, w * h
    weights = as_matrix_f32(a, n_k, n_in)
    image = ops.reshape_4d(grad, ow, oh, n_out, n)
    columns = ops.im2col(ops.reshape_4d(weights, kw, kh, n_out, n_in), image, s, s, 0, 0, 1, 1, True, types.F32)
    columns = ops.reshape_2d(columns, n_k, places * n)
    da = db = None
    if need[0]:
        values = ops.reshape_3d(as_contiguous(b), places, n_in, n)
        turned = ops.reshape_2d(ops.cont(ops.permute(values, 1, 0, 2, 3)), n_in, places * n)
        da = ops.reshape(ops.out_prod(columns, turned), a)
    if need[1]:
        product = ops.reshape_3d(ops.mul_mat(weights, columns), n_in, places, n)
        db = ops.reshape(ops.cont(ops.permute(product, 1, 0, 2, 3)), b)
    return da, db


for _op in (CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D):
    _op.kernel(_select)
    _op.work_size(_work_size)
    _op.flops(_flops)
    _op.backward(_backward)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, view_2d

    for kind in ("F32", "F16"):
        for s in (1, 2, 3):
            CONV_TRANSPOSE_1D.case(f"{kind}, stride {s}")(
                lambda t, k=kind, s=s: conv_transpose_1d(t(k, 4, 3, 5), t("F32", 37, 5), s, 0, 1)
            )
            CONV_TRANSPOSE_2D.case(f"{kind}, stride {s}")(
                lambda t, k=kind, s=s: conv_transpose_2d_p0(t(k, 3, 2, 3, 4), t("F32", 19, 4, 4, 2), s)
            )
    CONV_TRANSPOSE_1D.case("views")(
        lambda t: conv_transpose_1d(
            permute(t("F32", 3, 4, 2), 0, 2, 1, 3), view_2d(t("F32", 12, 5), 9, 4, 48, 4), 2, 0, 1
        )
    )
    CONV_TRANSPOSE_1D.case("stride beyond the kernel")(
        lambda t: conv_transpose_1d(t("F32", 2, 3, 2), permute(t("F32", 2, 9), 1, 0, 2, 3), 5, 0, 1)
    )
    CONV_TRANSPOSE_2D.case("permuted")(
        lambda t: conv_transpose_2d_p0(
            permute(t("F32", 2, 3, 2, 3), 1, 0, 2, 3), permute(t("F32", 4, 9, 3), 1, 0, 2, 3), 2
        )
    )


_cases()
