"""Convolutions composed of im2col and mul_mat, as ggml composes them; conv.py has ops that need no memory for columns.

    columns = im2col(a, b)                [IC KH KW, OW OH N]
    result  = columns^T a                 [OW OH N, OC], then in the order of an image

Sums are those of mul_mat: f32, of f16 columns where the kernel is not f32 (and in conv_1d), as in ggml.
"""

from __future__ import annotations

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.ops.im2col import im2col, im2col_3d
from ggjit.tensor import Tensor

__all__ = ["conv_1d", "conv_1d_dw", "conv_1d_dw_ph", "conv_1d_ph", "conv_2d", "conv_2d_dw", "conv_2d_s1_ph",
           "conv_2d_sk_p0", "conv_3d"]  # fmt: skip


@checked
def conv_1d(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Convolution of rows, by im2col and mul_mat.

    Args:
        a: f32, f16 or bf16, the kernel [K, IC, OC], contiguous.
        b: f32 or f16, [L, IC, N].
        s0: step along dimension 0.
        p0: padding on both sides of dimension 0.
        d0: distance of neighbours in the kernel along dimension 0.

    Returns:
        f32 [OL, OC, N].

    Source: ggml_conv_1d.
    """
    columns = im2col(a, b, s0, 0, p0, 0, d0, 1, False, types.F16)
    left = ops.reshape_2d(columns, columns.ne[0], columns.ne[1] * columns.ne[2])
    product = ops.mul_mat(left, ops.reshape_2d(a, a.ne[0] * a.ne[1], a.ne[2]))
    if columns.ne[2] == 1:
        return ops.reshape_3d(product, columns.ne[1], a.ne[2], 1)
    split = ops.reshape_3d(product, columns.ne[1], columns.ne[2], a.ne[2])
    return ops.cont(ops.permute(split, 0, 2, 1, 3))


@checked
def conv_1d_ph(a: Tensor, b: Tensor, s: int, d: int) -> Tensor:
    """conv_1d with half the kernel as padding. Source: ggml_conv_1d_ph."""
    return conv_1d(a, b, s, a.ne[0] // 2, d)


@checked
def conv_1d_dw(a: Tensor, b: Tensor, s0: int, p0: int, d0: int) -> Tensor:
    """Depthwise convolution of rows, by im2col and mul_mat.

    Args:
        a: f32, f16 or bf16, the kernel [K, 1, C], contiguous.
        b: f32 or f16, [L, C], contiguous.
        s0: step along dimension 0.
        p0: padding on both sides of dimension 0.
        d0: distance of neighbours in the kernel along dimension 0.

    Returns:
        f32 [OL, C, 1].

    Source: ggml_conv_1d_dw.
    """
    planes = ops.reshape_4d(b, b.ne[0], 1, b.ne[1], b.ne[2])
    columns = im2col(a, ops.reshape_3d(planes, b.ne[0], 1, b.ne[1] * b.ne[2]), s0, 0, p0, 0, d0, 1, False, types.F16)
    product = ops.mul_mat(columns, a)
    return ops.reshape_3d(product, product.ne[0], product.ne[2], 1)


@checked
def conv_1d_dw_ph(a: Tensor, b: Tensor, s0: int, d0: int) -> Tensor:
    """conv_1d_dw with half the kernel as padding. Source: ggml_conv_1d_dw_ph."""
    return conv_1d_dw(a, b, s0, a.ne[0] // 2, d0)


@checked
def conv_2d(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of planes, by im2col and mul_mat; `conv_2d_direct` needs no memory for the columns.

    Args:
        a: f32, f16 or bf16, the kernel [KW, KH, IC, OC], contiguous.
        b: f32 or f16, [W, H, IC, N].
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.

    Returns:
        f32 [OW, OH, OC, N].

    Source: ggml_conv_2d.
    """
    columns = im2col(a, b, s0, s1, p0, p1, d0, d1, True, a.type if a.type is types.F32 else types.F16)
    _, ow, oh, n = columns.ne
    left = ops.reshape_2d(columns, columns.ne[0], ow * oh * n)
    product = ops.mul_mat(left, ops.reshape_2d(a, a.ne[0] * a.ne[1] * a.ne[2], a.ne[3]))
    return ops.cont(ops.permute(ops.reshape_4d(product, ow, oh, n, a.ne[3]), 0, 1, 3, 2))


@checked
def conv_2d_sk_p0(a: Tensor, b: Tensor) -> Tensor:
    """conv_2d with the kernel's size as stride and no padding. Source: ggml_conv_2d_sk_p0."""
    return conv_2d(a, b, a.ne[0], a.ne[1], 0, 0, 1, 1)


@checked
def conv_2d_s1_ph(a: Tensor, b: Tensor) -> Tensor:
    """conv_2d with stride 1 and half the kernel as padding. Source: ggml_conv_2d_s1_ph."""
    return conv_2d(a, b, 1, 1, a.ne[0] // 2, a.ne[1] // 2, 1, 1)


@checked
def conv_2d_dw(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Depthwise convolution of planes, by im2col and mul_mat.

    Args:
        a: f32, f16 or bf16, the kernel [KW, KH, 1, C], contiguous.
        b: f32 or f16, [W, H, C, N], contiguous.
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.

    Returns:
        f32 [OW, OH, C, N].

    Source: ggml_conv_2d_dw.
    """
    kernel_4d = ops.reshape_4d(a, a.ne[0], a.ne[1], 1, a.ne[2] * a.ne[3])
    planes = ops.reshape_4d(b, b.ne[0], b.ne[1], 1, b.ne[2] * b.ne[3])
    columns = im2col(kernel_4d, planes, s0, s1, p0, p1, d0, d1, True, types.F16)
    left = ops.reshape_4d(columns, columns.ne[0], columns.ne[2] * columns.ne[1], b.ne[2], b.ne[3])
    product = ops.mul_mat(ops.reshape_4d(kernel_4d, a.ne[0] * a.ne[1], 1, kernel_4d.ne[3], 1), left)
    return ops.reshape_4d(product, columns.ne[1], columns.ne[2], b.ne[2], b.ne[3])


@checked
def conv_3d(a: Tensor, b: Tensor, n_channels: int, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int,
            d0: int, d1: int, d2: int) -> Tensor:  # fmt: skip
    """Convolution of volumes, by im2col_3d and mul_mat.

    Args:
        a: f32 or f16, the kernel [KW, KH, KD, OC IC], contiguous.
        b: f32 or f16, [W, H, D, N IC].
        n_channels: IC.
        s0: step along dimension 0.
        s1: step along dimension 1.
        s2: step along dimension 2.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        p2: padding on both sides of dimension 2.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.
        d2: distance of neighbours in the kernel along dimension 2.

    Returns:
        f32 [OW, OH, OD, OC N].

    Source: ggml_conv_3d.
    """
    columns = im2col_3d(a, b, n_channels, s0, s1, s2, p0, p1, p2, d0, d1, d2, a.type)
    oc, n = a.ne[3] // n_channels, b.ne[3] // n_channels
    _, ow, oh, planes = columns.ne
    left = ops.reshape_2d(columns, columns.ne[0], ow * oh * planes)
    product = ops.mul_mat(left, ops.reshape_2d(a, columns.ne[0], oc))
    split = ops.cont(ops.permute(ops.reshape_4d(product, ow * oh, planes // n, n, oc), 0, 1, 3, 2))
    return ops.reshape_4d(split, ow, oh, planes // n, oc * n)
