"""im2col and its inverse: patches of an image as rows of a matrix, so that a convolution is a matrix product.

    im2col      row (ow, oh, n) = the patch under the kernel at that place, kw fastest, then kh (kd), then the channel
    im2col_3d   the same for volumes, whose channels and batch share dimension 3
    *_back      the gradient: each element of the image is the sum of the elements of all rows that it went to
    col2im_1d   dst[t s + k - p, oc] = sum of a[oc K + k, t]: what a transposed convolution adds up

Element k of a patch lies at o s - p + k d; outside the image it is 0. One walk over up to three dimensions serves all:
im2col of a row is that of a volume of height and depth 1. The `_back` kernels gather, so that no two threads add to the
same element. Convolutions composed of im2col and mul_mat are in conv_by_im2col.py.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.lib.checks import require, require_type
from ggjit.ops.views import as_dims
from ggjit.tensor import Dims, Tensor, new_node
from ggjit.types import Type

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")

__all__ = ["col2im_1d", "im2col", "im2col_3d", "im2col_3d_back", "im2col_back"]

_PARAMS = tuple((n, "i32") for n in ("s0", "s1", "p0", "p1", "d0", "d1", "is_2D"))
_PARAMS_3D = tuple((n, "i32") for n in ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "n_channels"))
IM2COL = Op("im2col", id=52, params=_PARAMS, shape_only=(0,))
IM2COL_BACK = Op("im2col_back", id=53, params=_PARAMS, shape_only=(1,))
IM2COL_3D = Op("im2col_3d", id=54, params=_PARAMS_3D, shape_only=(0,))
IM2COL_3D_BACK = Op("im2col_3d_back", id=1001, params=_PARAMS_3D, shape_only=(1,))
COL2IM_1D = Op("col2im_1d", id=55, params=(("s0", "i32"), ("n_channels", "i32"), ("p0", "i32")))
FLOATS = (types.F32, types.F16, types.BF16)


# --- builders ---------------------------------------------------------------------------------------------------------


def conv_size(where: str, a: Tensor, b: Tensor, n: int, k: int, s: int, p: int, d: int) -> int:
    """Places of a kernel of k elements along n elements of the image b."""
    given = f"strides and dilations must be positive, paddings not negative (got {s}, {d}, {p}) for a and b"
    require(where, s > 0 and d > 0 and p >= 0, given, a, b)
    size = (n + 2 * p - d * (k - 1) - 1) // s + 1
    require(where, size > 0, f"b with padding {p} must be as large as the kernel a with dilation {d}", a, b)
    return size


@checked
def im2col(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, is_2D: bool,
           type: Type = types.F32) -> Tensor:  # fmt: skip
    """Lay the patches of an image out as rows.

    Args:
        a: the kernel, used for its shape: [KW, KH, IC, OC], or [KW, IC, OC].
        b: f32 or f16, the image, any strides: [W, H, IC, N], or [W, IC, N].
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.
        is_2D: planes; else rows, and s1, p1, d1 do not matter.
        type: of the result, F32 or F16.

    Returns:
        [IC KH KW, OW, OH, N], or [IC KW, OW, N].

    Raises:
        ValueError: channels differ, or the image is smaller than the kernel.
        TypeError: types do not fit.

    Source: ggml_im2col.
    """
    if is_2D:
        require("im2col", a.ne[2] == b.ne[2], "a.ne[2] must equal b.ne[2]", a, b)
    else:
        require("im2col", a.ne[1] == b.ne[1] and b.ne[3] == 1, "a.ne[1] must equal b.ne[1] and b.ne[3] be 1", a, b)
    ow = conv_size("im2col", a, b, b.ne[0], a.ne[0], s0, p0, d0)
    oh = conv_size("im2col", a, b, b.ne[1], a.ne[1], s1, p1, d1) if is_2D else b.ne[2]
    ne = (a.ne[0] * a.ne[1] * (a.ne[2] if is_2D else 1), ow, oh, b.ne[3] if is_2D else 1)
    _check_types("im2col", b, type)
    return new_node(IM2COL, type, ne, (a, b), (s0, s1, p0, p1, d0, d1, int(is_2D)))


def _check_types(where: str, b: Tensor, type: Type) -> None:
    require_type(where, "b", b, types.F32, types.F16)
    if type not in (types.F32, types.F16) or (b.type is types.F16 and type is not types.F16):
        raise TypeError(
            f"{where}: the result must be F32 or F16, and F16 for an F16 image, got {type.name} ('{b.name}')"
        )


@checked
def im2col_back(a: Tensor, b: Tensor, ne: Dims, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int,
                is_2D: bool) -> Tensor:  # fmt: skip
    """Gradient of `im2col` with respect to the image.

    Args:
        a: f32, the gradient of im2col's result, any strides.
        b: the kernel, used for its shape.
        ne: shape of the image, up to 4 sizes.
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.
        is_2D: planes; else rows.

    Returns:
        f32 of shape `ne`.

    Raises:
        ValueError: `a` has not the shape of im2col's result.
        TypeError: `a` is not f32.

    Source: ggml_im2col_back.
    """
    dims = as_dims("im2col_back", types.F32, *ne)
    require_type("im2col_back", "a", a, types.F32)
    channels = dims[2] == b.ne[2] if is_2D else dims[1] == b.ne[1] and dims[3] == 1
    require("im2col_back", channels, f"the kernel b must have the channels of the image {list(dims)}", a, b)
    size = b.ne[0] * b.ne[1] * (b.ne[2] if is_2D else 1)
    ow = conv_size("im2col_back", a, b, dims[0], b.ne[0], s0, p0, d0)
    oh = conv_size("im2col_back", a, b, dims[1], b.ne[1], s1, p1, d1) if is_2D else dims[2]
    want = (size, ow, oh, dims[3] if is_2D else 1)
    require("im2col_back", a.ne == want, f"a must have ne {list(want)} for an image {list(dims)}", a, b)
    return new_node(IM2COL_BACK, types.F32, dims, (a, b), (s0, s1, p0, p1, d0, d1, int(is_2D)))


def _sizes_3d(where, a, b, ne, ksp):
    return tuple(conv_size(where, a, b, ne[i], a.ne[i], *ksp[i]) for i in range(3))


@checked
def im2col_3d(a: Tensor, b: Tensor, n_channels: int, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int,
              d0: int, d1: int, d2: int, type: Type = types.F32) -> Tensor:  # fmt: skip
    """Lay the patches of a volume out as rows.

    Args:
        a: the kernel, used for its shape: [KW, KH, KD, OC IC].
        b: f32 or f16, the volume, any strides: [W, H, D, N IC].
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
        type: of the result, F32 or F16.

    Returns:
        [IC KD KH KW, OW, OH, N OD].

    Raises:
        ValueError: `n_channels` does not divide dimension 3, or the volume is smaller than the kernel.
        TypeError: types do not fit.

    Source: ggml_im2col_3d.
    """
    _check_channels("im2col_3d", a, b, n_channels)
    _check_types("im2col_3d", b, type)
    ow, oh, od = _sizes_3d("im2col_3d", a, b, b.ne, ((s0, p0, d0), (s1, p1, d1), (s2, p2, d2)))
    ne = (n_channels * a.ne[2] * a.ne[1] * a.ne[0], ow, oh, od * (b.ne[3] // n_channels))
    return new_node(IM2COL_3D, type, ne, (a, b), (s0, s1, s2, p0, p1, p2, d0, d1, d2, n_channels))


def _check_channels(where: str, a: Tensor, b: Tensor, n_channels: int) -> None:
    fits = n_channels > 0 and a.ne[3] % n_channels == 0 and b.ne[3] % n_channels == 0
    require(where, fits, f"the {n_channels} channels must divide a.ne[3] and b.ne[3]", a, b)


@checked
def im2col_3d_back(a: Tensor, b: Tensor, ne: Dims, n_channels: int, s0: int, s1: int, s2: int, p0: int, p1: int,
                   p2: int, d0: int, d1: int, d2: int) -> Tensor:  # fmt: skip
    """Gradient of `im2col_3d` with respect to the volume (ggml has none).

    Args:
        a: f32, the gradient of im2col_3d's result, any strides.
        b: the kernel, used for its shape.
        ne: shape of the volume.
        n_channels: channels of the volume.
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
        f32 of shape `ne`.

    Raises:
        ValueError: `a` has not the shape of im2col_3d's result, or `n_channels` does not divide `ne[3]`.
        TypeError: `a` is not f32.
    """
    ne = as_dims("im2col_3d_back", types.F32, *ne)
    require_type("im2col_3d_back", "a", a, types.F32)
    fits = n_channels > 0 and ne[3] % n_channels == 0
    require("im2col_3d_back", fits, f"the {n_channels} channels must divide those of the volume {list(ne)}", a, b)
    ow, oh, od = _sizes_3d("im2col_3d_back", b, b, ne, ((s0, p0, d0), (s1, p1, d1), (s2, p2, d2)))
    want = (n_channels * b.ne[2] * b.ne[1] * b.ne[0], ow, oh, od * (ne[3] // n_channels))
    require("im2col_3d_back", a.ne == want, f"a must have ne {list(want)} for a volume {list(ne)}", a, b)
    return new_node(IM2COL_3D_BACK, types.F32, ne, (a, b), (s0, s1, s2, p0, p1, p2, d0, d1, d2, n_channels))


@checked
def col2im_1d(a: Tensor, s0: int, oc: int, p0: int) -> Tensor:
    """Add up the columns that a transposed convolution makes.

    dst[t s0 + k - p0, c] = sum of a[c K + k, t]

    Args:
        a: f32, f16 or bf16 [K oc, T], any strides.
        s0: stride.
        oc: channels.
        p0: elements cut off at both ends.

    Returns:
        [(T - 1) s0 + K - 2 p0, oc], of the type of `a`.

    Raises:
        ValueError: `oc` does not divide a.ne[0], or nothing is left.
        TypeError: `a` is no float.

    Source: ggml_col2im_1d.
    """
    require_type("col2im_1d", "a", a, *FLOATS)
    fits = oc > 0 and a.ne[0] % oc == 0 and a.ne[2] == a.ne[3] == 1 and s0 > 0 and p0 >= 0
    require("col2im_1d", fits, f"a must have 2 dimensions and {oc} channels must divide a.ne[0], strides ({s0}) be "
            f"positive and p0 ({p0}) not negative", a)  # fmt: skip
    size = (a.ne[1] - 1) * s0 + a.ne[0] // oc - 2 * p0
    require("col2im_1d", size > 0, f"p0 ({p0}) must leave elements", a)
    return new_node(COL2IM_1D, a.type, (size, oc, 1, 1), (a,), (s0, oc, p0))


# --- references -------------------------------------------------------------------------------------------------------


def _walk(node):
    """Dimensions (1 to 3) and (stride, padding, dilation) of width, height and depth."""
    p = node.params
    if node.op in (IM2COL_3D, IM2COL_3D_BACK):
        return 3, ((p.s0, p.p0, p.d0), (p.s1, p.p1, p.d1), (p.s2, p.p2, p.d2))
    if p.is_2D:
        return 2, ((p.s0, p.p0, p.d0), (p.s1, p.p1, p.d1), (1, 0, 1))
    return 1, ((p.s0, p.p0, p.d0), (1, 0, 1), (1, 0, 1))


def patches(kernel_ne, image, ksp):
    """Patches of [N, C, D, H, W] under a kernel (KW, KH, KD): [N, OD, OH, OW, C, KD, KH, KW]; 0 outside."""
    padded = np.pad(image, ((0, 0), (0, 0), *(((p, p)) for _, p, _ in ksp[::-1])))
    each = zip(padded.shape[:1:-1], kernel_ne, ksp, strict=True)
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, (s, _, d) in each]
    out = np.zeros((image.shape[0], *sizes[::-1], image.shape[1], *kernel_ne[::-1]), image.dtype)
    for k in np.ndindex(*kernel_ne[::-1]):
        cut = [slice(i * d, i * d + (n - 1) * s + 1, s) for i, n, (s, _, d) in zip(k[::-1], sizes, ksp, strict=True)]
        out[(..., *k)] = padded[(slice(None), slice(None), *cut[::-1])].transpose(0, 2, 3, 4, 1)
    return out


def _im2col(node, kernel_ne, image):
    n_dims, ksp = _walk(node)
    if n_dims == 1:
        image = image[0, :, :, None, None]
    elif n_dims == 2:
        image = image[:, :, None]
    else:
        image = image.reshape(image.shape[0] // node.params.n_channels, node.params.n_channels, *image.shape[1:])
    sizes = (*kernel_ne[:n_dims], *(1,) * (3 - n_dims))
    return patches(sizes, image, ksp)


def _im2col_reference(node, a, b):
    return _im2col(node, node.src[0].ne, b).reshape(node.ne[::-1])


def _back_reference(node, grad, kernel_values):
    """Each column element is added where the number that im2col puts there says."""
    numbers = np.arange(1, node.nelements + 1).reshape(node.ne[::-1])
    to = _im2col(node, node.src[1].ne, numbers)
    return np.bincount(to.reshape(-1), grad.reshape(-1), node.nelements + 1)[1:].reshape(node.ne[::-1])


for _op in (IM2COL, IM2COL_3D):
    _op.reference(_im2col_reference)
for _op in (IM2COL_BACK, IM2COL_3D_BACK):
    _op.reference(_back_reference)


@COL2IM_1D.reference
def _(node, a):
    p, n_t = node.params, a.shape[2]
    k = a.shape[3] // p.n_channels
    out = np.zeros((p.n_channels, (n_t - 1) * p.s0 + k))
    for t in range(n_t):
        out[:, t * p.s0 : t * p.s0 + k] += a[0, 0, t].reshape(p.n_channels, k)
    return out[:, p.p0 : out.shape[1] - p.p0][None, None]


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def walk(n_dims: int):
    """Jitted op_params -> s0, s1, s2, p0, p1, p2, d0, d1, d2."""
    volume, plane = n_dims == 3, n_dims == 2

    @jitted
    def values(op_params):
        if volume:
            return (
                np.int64(op_params[0]), np.int64(op_params[1]), np.int64(op_params[2]), np.int64(op_params[3]),
                np.int64(op_params[4]), np.int64(op_params[5]), np.int64(op_params[6]), np.int64(op_params[7]),
                np.int64(op_params[8]),
            )  # fmt: skip
        one, zero = np.int64(1), np.int64(0)
        s0, p0, d0 = np.int64(op_params[0]), np.int64(op_params[2]), np.int64(op_params[4])
        if plane:
            return (
                s0, np.int64(op_params[1]), one, p0, np.int64(op_params[3]), zero, d0, np.int64(op_params[5]), one
            )  # fmt: skip
        return s0, one, one, p0, zero, zero, d0, one, one

    return values


@functools.cache
def layout(n_dims: int):
    """Jitted (ne, nb, n_channels) of an image -> height, depth, channels, and strides of y, z, channel, batch."""
    volume, plane = n_dims == 3, n_dims == 2

    @jitted
    def values(ne, nb, n_channels):
        if volume:
            return ne[1], ne[2], n_channels, nb[1], nb[2], nb[3], nb[3] * n_channels
        if plane:
            return ne[1], np.int64(1), ne[2], nb[1], np.int64(0), nb[2], nb[3]
        return np.int64(1), np.int64(1), ne[1], np.int64(0), np.int64(0), nb[1], nb[2]

    return values


@functools.cache
def make_im2col(n_dims: int, source: str, target: str):
    """Kernel of im2col; a thread takes whole patches."""
    load, store, size = memory.loader(source), memory.storer(target), memory.SIZES[target]
    read_walk, read_layout = walk(n_dims), layout(n_dims)

    @kernel
    def im2col_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        s0, s1, s2, p0, p1, p2, d0, d1, d2 = read_walk(op_params)
        height, depth, n_channels, sy, sz, sc, sn = read_layout(src1_ne, src1_nb, np.int64(op_params[9]))
        kw, kh = src0_ne[0], src0_ne[1] if n_dims > 1 else 1
        kd, n_planes = src0_ne[2] if n_dims > 2 else 1, dst_ne[3] * n_channels // src1_ne[3] if n_dims > 2 else 1
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            x0, y0, z0, image = i1 * s0 - p0, i2 * s1 - p1, i3 % n_planes * s2 - p2, i3 // n_planes * sn
            if n_dims == 1:
                y0, image = 0, i2 * sn
            to = rows.offset(dst_nb, i1, i2, i3)
            for c in range(n_channels):
                for k in range(kd * kh):
                    y, z = y0 + k % kh * d1, z0 + k // kh * d2
                    inside = y >= 0 and y < height and z >= 0 and z < depth
                    at = image + c * sc + y * sy + z * sz
                    for kx in range(kw):
                        x, value = x0 + kx * d0, np.float32(0)
                        if inside and x >= 0 and x < src1_ne[0]:
                            value = load(src1, at + x * src1_nb[0])
                        store(dst, to, value)
                        to += size
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return im2col_rows


@functools.cache
def make_im2col_back(n_dims: int):
    """Kernel of the gradient; a thread takes whole rows of the image."""
    read_walk, read_layout = walk(n_dims), layout(n_dims)

    @kernel
    def im2col_back_rows(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
    ):
        s0, s1, s2, p0, p1, p2, d0, d1, d2 = read_walk(op_params)
        _, _, n_channels, _, _, _, _ = read_layout(dst_ne, dst_nb, np.int64(op_params[9]))
        kw, kh, kd = src1_ne[0], src1_ne[1] if n_dims > 1 else 1, src1_ne[2] if n_dims > 2 else 1
        oh, od = src0_ne[2] if n_dims > 1 else 1, src0_ne[3] * n_channels // dst_ne[3] if n_dims > 2 else 1
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to = rows.offset(dst_nb, i1, i2, i3)
            y, z, c, base = i1, 0, i2, i3 * src0_nb[3]
            if n_dims == 1:
                y, c, base = 0, i1, i2 * src0_nb[2]
            if n_dims == 3:
                z, c, base = i2, i3 % n_channels, i3 // n_channels * od * src0_nb[3]
            for x in range(dst_ne[0]):
                memory.store_f32(dst, to + 4 * x, np.float32(0))
            for k in range(kd * kh):
                ys, zs = y + p1 - k % kh * d1, z + p2 - k // kh * d2
                oy, oz = ys // s1, zs // s2
                if ys < 0 or zs < 0 or oy * s1 != ys or oz * s2 != zs or oy >= oh or oz >= od:
                    continue
                at = base + (c * kd * kh + k) * kw * src0_nb[0] + oz * src0_nb[3]
                if n_dims > 1:
                    at += oy * src0_nb[2]
                for kx in range(kw):
                    for ox in range(src0_ne[1]):
                        x = ox * s0 - p0 + kx * d0
                        if x >= 0 and x < dst_ne[0]:
                            g = memory.load_f32(src0, at + kx * src0_nb[0] + ox * src0_nb[1])
                            memory.store_f32(dst, to + 4 * x, memory.load_f32(dst, to + 4 * x) + g)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return im2col_back_rows


@functools.cache
def make_col2im_1d(type_name: str):
    """Kernel of col2im_1d."""
    load, store, size = memory.loader(type_name), memory.storer(type_name), memory.SIZES[type_name]

    @kernel
    def col2im_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        s0, p0 = np.int64(op_params[0]), np.int64(op_params[2])
        n_k = src0_ne[0] // dst_ne[1]
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        for c in range(first, last):
            for i in range(begin, end):
                t, k, total = (i + p0) // s0, (i + p0) % s0, np.float32(0)
                while k < n_k and t >= 0:
                    if t < src0_ne[1]:
                        total += load(src0, (c * n_k + k) * src0_nb[0] + t * src0_nb[1])
                    t, k = t - 1, k + s0
                store(dst, c * dst_nb[1] + i * size, total)

    return col2im_rows


def _select(node):
    return make_im2col(_walk(node)[0], node.src[1].type.name, node.type.name)


def _select_back(node):
    return make_im2col_back(_walk(node)[0])


for _op in (IM2COL, IM2COL_3D):
    _op.kernel(_select)
for _op in (IM2COL_BACK, IM2COL_3D_BACK):
    _op.kernel(_select_back)


@COL2IM_1D.kernel
def _(node):
    return make_col2im_1d(node.type.name)


def _flops(node):
    return node.src[0].nelements


for _op in (IM2COL_BACK, IM2COL_3D_BACK, COL2IM_1D):
    _op.flops(_flops)


# --- backward ---------------------------------------------------------------------------------------------------------


@IM2COL.backward
def _(node, grad, need):
    (a, b), p = node.src, node.params
    return None, im2col_back(grad, a, b.ne, p.s0, p.s1, p.p0, p.p1, p.d0, p.d1, bool(p.is_2D)) if need[1] else None


@IM2COL_3D.backward
def _(node, grad, need):
    (a, b), p = node.src, node.params
    if not need[1]:
        return None, None
    walked = (p.s0, p.s1, p.s2, p.p0, p.p1, p.p2, p.d0, p.d1, p.d2)
    return None, im2col_3d_back(grad, a, b.ne, p.n_channels, *walked)


@COL2IM_1D.backward
def _(node, grad, need):
    a, p = node.src[0], node.params
    k = a.ne[0] // p.n_channels
    shape = ops.view_2d(a, k, p.n_channels, k * a.nb[0], 0)  # only its sizes are looked at
    image = ops.reshape_3d(grad, grad.ne[0], p.n_channels, 1)
    columns = im2col(shape, image, p.s0, 1, p.p0, 0, 1, 1, False, types.F32)
    return (ops.reshape_2d(columns, *a.ne[:2]),)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute

    f16 = types.F16
    plane, line = (2, 1, 1, 2, 1, 2), (2, 0, 2, 0, 2, 0)
    IM2COL.case("planes")(lambda t: im2col(t("F32", 3, 2, 4, 5), t("F32", 9, 6, 4, 2), *plane, True))
    IM2COL.case("planes to f16")(lambda t: im2col(t("F16", 3, 2, 4, 5), t("F32", 9, 6, 4, 2), *plane, True, f16))
    IM2COL.case("f16")(lambda t: im2col(t("F16", 3, 3, 2, 1), t("F16", 8, 6, 2), 1, 1, 1, 1, 1, 1, True, f16))
    IM2COL.case("rows")(lambda t: im2col(t("F32", 3, 2, 2), t("F32", 12, 2, 3), *line, False))
    IM2COL.case("permuted")(
        lambda t: im2col(t("F32", 3, 3, 3, 2), permute(t("F32", 3, 9, 4), 2, 0, 1, 3), 1, 1, 0, 0, 1, 1, True)
    )
    IM2COL_BACK.case("planes")(
        lambda t: im2col_back(t("F32", 24, 5, 8, 2), t("F32", 3, 2, 4, 5), (9, 6, 4, 2), *plane, True)
    )
    IM2COL_BACK.case("rows")(lambda t: im2col_back(t("F32", 6, 6, 3), t("F16", 3, 2, 2), (12, 2, 3), *line, False))
    IM2COL_BACK.case("permuted")(
        lambda t: im2col_back(
            permute(t("F32", 4, 8, 7), 1, 0, 2, 3), t("F32", 2, 2, 2), (5, 8, 2, 1), 1, 1, 0, 0, 1, 1, True
        )
    )
    volume = (2, 2, 1, 1, 1, 0, 1, 1, 2, 1)
    IM2COL_3D.case("volume")(lambda t: im2col_3d(t("F32", 2, 3, 2, 4), t("F32", 7, 6, 5, 4), *volume))
    IM2COL_3D.case("volume to f16")(lambda t: im2col_3d(t("F16", 2, 3, 2, 4), t("F32", 7, 6, 5, 4), *volume, f16))
    IM2COL_3D.case("permuted")(
        lambda t: im2col_3d(
            t("F32", 2, 2, 2, 2), permute(t("F32", 4, 9, 3, 2), 1, 0, 2, 3), 1, *(1,) * 3, *(0,) * 3, *(1,) * 3
        )
    )
    IM2COL_3D_BACK.case("volume")(
        lambda t: im2col_3d_back(t("F32", 24, 4, 2, 12), t("F32", 2, 3, 2, 4), (7, 6, 5, 4), *volume)
    )
    for kind in ("F32", "F16", "BF16"):
        COL2IM_1D.case(kind)(lambda t, kind=kind: col2im_1d(t(kind, 20, 11), 3, 4, 2))
    COL2IM_1D.case("transposed")(lambda t: col2im_1d(permute(t("F32", 7, 12), 1, 0, 2, 3), 2, 3, 0))


_cases()
