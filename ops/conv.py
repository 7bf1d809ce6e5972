"""Direct convolutions of planes and volumes, without memory for all columns (conv_by_im2col.py has the composed forms).

    conv_2d_direct      dst[x, y, oc, n] = sum over c, ky, kx of a[kx, ky, c, oc] b[X, Y, c, n]
                        with X = x s0 - p0 + kx d0, Y = y s1 - p1 + ky d1, 0 outside
    conv_3d_direct      the same for volumes; channels and batch share dimension 3
    conv_2d_dw_direct   each channel with a kernel of its own

The first two are matrix products whose left side is made on the way: 16 neighbouring pixels of the result are gathered
as one panel (`float_panel`: per k 16 f32), a few panels at a time stay in L2, and the tile of mul_mat runs over the
output channels. One chain of multiply-adds in the order (c, kz, ky, kx) per output.

| version | 3x3, 64 to 64 channels, 64x64 |
|---|---|
| im2col and mul_mat | writes and reads 9 times the image |
| panels made in L2 | the image is read 9 times from L1 and L2 |
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, as_f32
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.im2col import conv_size, layout, patches, walk
from ggjit.ops.lib.checks import require, require_contiguous, require_type
from ggjit.ops.linalg import lower_f32
from ggjit.tensor import Tensor, new_node

atomics = lazy_module("ggjit.ops.lib.atomics")
float_panel = lazy_module("ggjit.ops.lib.float_panel")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["conv_2d_direct", "conv_2d_dw_direct", "conv_3d_direct"]

_PARAMS = tuple((n, "i32") for n in ("s0", "s1", "p0", "p1", "d0", "d1"))
_PARAMS_3D = tuple(
    (n, "i32") for n in ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2", "n_channels", "n_batch", "n_out")
)
CONV_2D = Op("conv_2d", id=56, params=_PARAMS, nmse=5e-4)
CONV_3D = Op("conv_3d", id=57, params=_PARAMS_3D, nmse=5e-4)
CONV_2D_DW = Op("conv_2d_dw", id=58, params=_PARAMS)
Walked = tuple[int, int, int, int, int, int]  # s0, s1, p0, p1, d0, d1
SCRATCH = 256 << 10  # bytes of panels, to stay in L2
COLUMNS = 8  # output channels of a tile


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def conv_2d_direct(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of planes.

    Args:
        a: f32 or f16, the kernel [KW, KH, IC, OC], contiguous.
        b: f32, [W, H, IC, N], any strides.
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.

    Returns:
        f32 [OW, OH, OC, N].

    Raises:
        ValueError: channels differ, the image is smaller than the kernel, or the kernel has gaps.
        TypeError: types do not fit.

    Source: ggml_conv_2d_direct.
    """
    require("conv_2d", a.ne[2] == b.ne[2], "a.ne[2] must equal b.ne[2]", a, b)
    _check_types("conv_2d", a, b)
    require_contiguous("conv_2d", "a", a)
    ow = conv_size("conv_2d", a, b, b.ne[0], a.ne[0], s0, p0, d0)
    oh = conv_size("conv_2d", a, b, b.ne[1], a.ne[1], s1, p1, d1)
    return new_node(CONV_2D, types.F32, (ow, oh, a.ne[3], b.ne[3]), (a, b), (s0, s1, p0, p1, d0, d1))


def _check_types(where: str, a: Tensor, b: Tensor) -> None:
    require_type(where, "a", a, types.F32, types.F16)
    require_type(where, "b", b, types.F32)


@checked
def conv_3d_direct(a: Tensor, b: Tensor, s0: int, s1: int, s2: int, p0: int, p1: int, p2: int, d0: int, d1: int,
                   d2: int, n_channels: int, n_batch: int, n_out: int) -> Tensor:  # fmt: skip
    """Convolution of volumes.

    Args:
        a: f32 or f16, the kernel [KW, KH, KD, n_channels n_out], contiguous.
        b: f32, [W, H, D, n_channels n_batch], any strides.
        s0: step along dimension 0.
        s1: step along dimension 1.
        s2: step along dimension 2.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        p2: padding on both sides of dimension 2.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.
        d2: distance of neighbours in the kernel along dimension 2.
        n_channels: channels of the volume.
        n_batch: volumes.
        n_out: channels of the result.

    Returns:
        f32 [OW, OH, OD, n_out n_batch].

    Raises:
        ValueError: sizes do not fit, or the kernel has gaps.
        TypeError: types do not fit.

    Source: ggml_conv_3d_direct.
    """
    fits = a.ne[3] == n_channels * n_out and b.ne[3] == n_channels * n_batch
    require("conv_3d", fits, f"dimension 3 must be {n_channels} channels times {n_out} outputs of a and {n_batch} of b",
            a, b)  # fmt: skip
    _check_types("conv_3d", a, b)
    require_contiguous("conv_3d", "a", a)
    each = zip(b.ne[:3], a.ne[:3], (s0, s1, s2), (p0, p1, p2), (d0, d1, d2), strict=True)
    ow, oh, od = (conv_size("conv_3d", a, b, *nkspd) for nkspd in each)
    params = (s0, s1, s2, p0, p1, p2, d0, d1, d2, n_channels, n_batch, n_out)
    return new_node(CONV_3D, types.F32, (ow, oh, od, n_out * n_batch), (a, b), params)


@checked
def conv_2d_dw_direct(a: Tensor, b: Tensor, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int) -> Tensor:
    """Convolution of planes, each channel with a kernel of its own.

    Args:
        a: f32 or f16, the kernel [KW, KH, 1, C], any strides.
        b: f32 [W, H, C, N], contiguous, or with the channels next to each other (nb[2] the size of an element).
        s0: step along dimension 0.
        s1: step along dimension 1.
        p0: padding on both sides of dimension 0.
        p1: padding on both sides of dimension 1.
        d0: distance of neighbours in the kernel along dimension 0.
        d1: distance of neighbours in the kernel along dimension 1.

    Returns:
        f32 [OW, OH, C, N], in the order of `b`.

    Raises:
        ValueError: sizes or layouts do not fit.
        TypeError: types do not fit.

    Source: ggml_conv_2d_dw_direct.
    """
    require("conv_2d_dw", a.ne[2] == 1 and a.ne[3] == b.ne[2], "a.ne[2] must be 1 and a.ne[3] equal b.ne[2]", a, b)
    _check_types("conv_2d_dw", a, b)
    ow = conv_size("conv_2d_dw", a, b, b.ne[0], a.ne[0], s0, p0, d0)
    oh = conv_size("conv_2d_dw", a, b, b.ne[1], a.ne[1], s1, p1, d1)
    ne, nb = (ow, oh, *b.ne[2:]), None
    if not b.is_contiguous:
        n, (w, h, c, _) = b.type.type_size, b.ne
        if b.nb != (n * c, n * c * w, n, n * c * w * h):
            raise ValueError(
                f"conv_2d_dw: b must be contiguous, or with channels next to each other, got ne {list(b.ne)}, nb "
                f"{list(b.nb)} ('{b.name}'); use cont first"
            )
        nb = (4 * c, 4 * c * ow, 4, 4 * c * ow * oh)
    return new_node(CONV_2D_DW, types.F32, ne, (a, b), (s0, s1, p0, p1, d0, d1), nb)


# --- references -------------------------------------------------------------------------------------------------------


@CONV_2D.reference
def _(node, a, b):
    p = node.params
    found = patches((*node.src[0].ne[:2], 1), b[:, :, None], ((p.s0, p.p0, p.d0), (p.s1, p.p1, p.d1), (1, 0, 1)))
    size = a.shape[2] * a.shape[3]
    rows = found[:, 0, :, :, :, 0].reshape(*found.shape[:1], *found.shape[2:5], size)
    return np.einsum("nyxck,ock->noyx", rows, a.reshape(*a.shape[:2], size))


@CONV_3D.reference
def _(node, a, b):
    p, sizes = node.params, node.src[0].ne[:3]
    volumes = b.reshape(p.n_batch, p.n_channels, *b.shape[1:])
    found = patches(sizes, volumes, ((p.s0, p.p0, p.d0), (p.s1, p.p1, p.d1), (p.s2, p.p2, p.d2)))
    size = int(np.prod(found.shape[4:]))
    return np.einsum("nzyxk,ok->nozyx", found.reshape(*found.shape[:4], size), a.reshape(p.n_out, size))


@CONV_2D_DW.reference
def _(node, a, b):
    p = node.params
    found = patches((*node.src[0].ne[:2], 1), b[:, :, None], ((p.s0, p.p0, p.d0), (p.s1, p.p1, p.d1), (1, 0, 1)))
    return np.einsum("nyxcij,cij->ncyx", found[:, 0, :, :, :, 0], a[:, 0])


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_gather(n_dims: int):
    """Jitted: the patches of 16 pixels side by side, 64 bytes for each element of a patch, in k order.

    Pixels (first, first + n) of the result lie in rows of `ow` and planes of `oh`; lanes from n on stay as they are.
    """
    read_walk, read_layout = walk(n_dims), layout(n_dims)

    @jitted
    def gather(work, panel, src, image, ne, nb, kernel_ne, op_params, first, n, ow, oh):
        s0, s1, s2, p0, p1, p2, d0, d1, d2 = read_walk(op_params)
        height, depth, n_channels, sy, sz, sc, _ = read_layout(ne, nb, np.int64(op_params[9]))
        kw, kh, kd = kernel_ne[0], kernel_ne[1], kernel_ne[2] if n_dims > 2 else 1
        step, lane = s0 * nb[0], 0
        while lane < n:
            pixel = first + lane
            ox, oy, oz = pixel % ow, pixel // ow % oh, pixel // (ow * oh)
            count = ow - ox if ow - ox < n - lane else n - lane
            x0, y0, z0, to = ox * s0 - p0, oy * s1 - p1, oz * s2 - p2, panel + 4 * lane
            for c in range(n_channels):
                for k in range(kd * kh):
                    y, z = y0 + k % kh * d1, z0 + k // kh * d2
                    inside = y >= 0 and y < height and z >= 0 and z < depth
                    row = image + c * sc + y * sy + z * sz
                    for kx in range(kw):
                        x = x0 + kx * d0
                        if inside and x >= 0 and x + (count - 1) * s0 < ne[0]:
                            if step == 4:
                                vec.store_first(work, to, vec.load_first(src, row + 4 * x, count), count)
                            else:
                                v = vec.load_strided_first(src, row + x * nb[0], step, count)
                                vec.store_first(work, to, v, count)
                        else:
                            for j in range(count):
                                value, xj = np.float32(0), x + j * s0
                                if inside and xj >= 0 and xj < ne[0]:
                                    value = memory.load_f32(src, row + xj * nb[0])
                                memory.store_f32(work, to + 4 * j, value)
                        to += 64
            lane += count

    return gather


@functools.cache
def make_conv(n_dims: int):
    """Kernel for f32 weights [K, OC] without gaps: panels of 16 pixels by tiles of 8 output channels."""
    gather, tile = make_gather(n_dims), float_panel.float_tile("F32", COLUMNS)
    channel = n_dims  # the dimension of dst that output channels lie along

    @kernel(counter=True)
    def conv(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n_in, n_out, n_batch = src1_ne[2], src0_ne[3], src1_ne[3]
        n_pixels, n_k = dst_ne[0] * dst_ne[1], src0_ne[0] * src0_ne[1]
        if n_dims == 3:
            n_in, n_out, n_batch = np.int64(op_params[9]), np.int64(op_params[11]), np.int64(op_params[10])
            n_pixels, n_k = n_pixels * dst_ne[2], n_k * src0_ne[2]
        n_k = n_k * n_in
        n_panels, size = (n_pixels + 15) // 16, 64 * n_k
        group = n_panels * n_batch // (4 * nth)
        group = group if group * size < SCRATCH else SCRATCH // size
        group = group if group > 1 else 1
        n_groups, image_nb = (n_panels + group - 1) // group, src1_nb[3] * (n_in if n_dims == 3 else 1)
        base = COUNTER_LINE + ith * (size if size > SCRATCH else SCRATCH)
        at = atomics.fetch_add(work, 0, 1)
        while at < n_groups * n_batch:
            first, n = at % n_groups * group, at // n_groups
            last = first + group if first + group < n_panels else n_panels
            for p in range(first, last):
                rest = n_pixels - 16 * p
                gather(work, base + (p - first) * size, src1, n * image_nb, src1_ne, src1_nb, src0_ne, op_params,
                       16 * p, rest if rest < 16 else 16, dst_ne[0], dst_ne[1])  # fmt: skip
            out = memory.address(dst) + n * n_out * dst_nb[channel]
            for c in range(0, n_out, COLUMNS):
                for p in range(first, last):
                    tile(
                        memory.address(work) + base + (p - first) * size, memory.address(src0) + 4 * n_k * c, 4 * n_k,
                        out + c * dst_nb[channel] + 64 * p, dst_nb[channel], n_k, n_pixels - 16 * p, n_out - c, 0,
                    )  # fmt: skip
            at = atomics.fetch_add(work, 0, 1)

    return conv


@functools.cache
def make_conv_dw(type_name: str):
    """Kernel for rows of pixels: 16 of them at once where all taps lie inside."""
    load = memory.loader(type_name)

    @kernel
    def conv_dw(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        s0, s1 = np.int64(op_params[0]), np.int64(op_params[1])
        p0, p1 = np.int64(op_params[2]), np.int64(op_params[3])
        d0, d1, kw = np.int64(op_params[4]), np.int64(op_params[5]), src0_ne[0]
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, plane = rows.offset(dst_nb, i1, i2, i3), i2 * src1_nb[2] + i3 * src1_nb[3]
            i = begin
            while i < end:
                x, y = i * s0 - p0, i1 * s1 - p1
                wide = i + 16 <= end and x >= 0 and x + 15 * s0 + (kw - 1) * d0 < src1_ne[0]
                v, value = vec.zero(), np.float32(0)
                for ky in range(src0_ne[1]):
                    yk = y + ky * d1
                    if yk < 0 or yk >= src1_ne[1]:
                        continue
                    for kx in range(kw):
                        xk = x + kx * d0
                        at = plane + yk * src1_nb[1] + 4 * xk
                        w = load(src0, kx * src0_nb[0] + ky * src0_nb[1] + i2 * src0_nb[3])
                        if wide:
                            v = vec.fma(vec.load(src1, at) if s0 == 1 else vec.load_strided(src1, at, 4 * s0), w, v)
                        elif xk >= 0 and xk < src1_ne[0]:
                            value = vec.fma(memory.load_f32(src1, at), w, value)
                if wide:
                    vec.store(dst, to + 4 * i, v)
                    i += 16
                else:
                    memory.store_f32(dst, to + 4 * i, value)
                    i += 1
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return conv_dw


@functools.cache
def make_conv_dw_channels(type_name: str):
    """Kernel for channels next to each other: 16 channels of a pixel at once."""
    load, load_first, size = memory.loader(type_name), vec.loader_first(type_name), memory.SIZES[type_name]

    @kernel
    def conv_dw_channels(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
    ):
        s0, s1 = np.int64(op_params[0]), np.int64(op_params[1])
        p0, p1 = np.int64(op_params[2]), np.int64(op_params[3])
        d0, d1, n = np.int64(op_params[4]), np.int64(op_params[5]), dst_ne[2]
        total = dst_ne[0] * dst_ne[1] * dst_ne[3]
        for pixel in range(total * ith // nth, total * (ith + 1) // nth):
            ox, oy, batch = pixel % dst_ne[0], pixel // dst_ne[0] % dst_ne[1], pixel // (dst_ne[0] * dst_ne[1])
            to = ox * dst_nb[0] + oy * dst_nb[1] + batch * dst_nb[3]
            for c in range(0, n, 16):
                count = 16 if c + 16 < n else n - c
                v = vec.zero()
                for ky in range(src0_ne[1]):
                    for kx in range(src0_ne[0]):
                        x, y = ox * s0 - p0 + kx * d0, oy * s1 - p1 + ky * d1
                        if x < 0 or x >= src1_ne[0] or y < 0 or y >= src1_ne[1]:
                            continue
                        by = kx * src0_nb[0] + ky * src0_nb[1] + c * src0_nb[3]
                        if src0_nb[3] == size:
                            w = load_first(src0, by, count)
                        else:  # the result's place takes the weights
                            for j in range(count):
                                memory.store_f32(dst, to + 4 * (c + j), load(src0, by + j * src0_nb[3]))
                            w = vec.load_first(dst, to + 4 * c, count)
                        at = x * src1_nb[0] + y * src1_nb[1] + batch * src1_nb[3] + 4 * c
                        v = vec.fma(vec.load_first(src1, at, count), w, v)
                vec.store_first(dst, to + 4 * c, v, count)

    return conv_dw_channels


def _lower(low, node):
    a, b = node.src
    size = 64 * (a.nelements // node.ne[2] if node.op is CONV_2D else a.nelements // node.params.n_out)
    work = low.n_threads * max(size, SCRATCH)
    low.emit(make_conv(2 if node.op is CONV_2D else 3), node, src=(lower_f32(low, a), b), work=work)


def _flops(node):
    n_out = {CONV_2D: node.ne[2], CONV_2D_DW: node.ne[2]}.get(node.op) or node.params.n_out
    return 2 * node.nelements * (node.src[0].nelements // n_out)


for _op in (CONV_2D, CONV_3D):
    _op.lower(_lower)
    _op.supports(lambda node: True)
for _op in (CONV_2D, CONV_3D, CONV_2D_DW):
    _op.flops(_flops)


@CONV_2D_DW.kernel
def _(node):
    name = node.src[0].type.name
    return make_conv_dw(name) if node.src[1].is_contiguous else make_conv_dw_channels(name)


# --- backward ---------------------------------------------------------------------------------------------------------


def as_matrix_f32(a: Tensor, ne0: int, ne1: int) -> Tensor:
    """A kernel as a matrix of f32."""
    return ops.reshape_2d(as_f32(as_contiguous(a)), ne0, ne1)


def _gradients(a: Tensor, columns: Tensor, grad: Tensor, sizes: tuple[int, int, int, int], need, back):
    """Gradients of kernel and image; sizes = K, pixels, output channels, batch; back(columns' gradient) -> image's."""
    n_k, n_pixels, n_out, n_batch = sizes
    grad = ops.reshape_3d(grad, n_pixels, n_out, n_batch)
    da = db = None
    if need[0]:
        turned = ops.reshape_2d(ops.cont(ops.permute(grad, 1, 0, 2, 3)), n_out, n_pixels * n_batch)
        da = ops.reshape(ops.out_prod(ops.reshape_2d(columns, n_k, n_pixels * n_batch), turned), a)
    if need[1]:
        db = back(ops.reshape_4d(ops.out_prod(as_matrix_f32(a, n_k, n_out), grad), *columns.ne))
    return da, db


@CONV_2D.backward
def _(node, grad, need):
    (a, b), p = node.src, node.params
    walked = (p.s0, p.s1, p.p0, p.p1, p.d0, p.d1)
    columns = ops.im2col(a, b, *walked, True, types.F32)
    sizes = (columns.ne[0], node.ne[0] * node.ne[1], node.ne[2], node.ne[3])
    return _gradients(a, columns, grad, sizes, need, lambda g: ops.im2col_back(g, a, b.ne, *walked, True))


@CONV_3D.backward
def _(node, grad, need):
    (a, b), p = node.src, node.params
    walked = (p.n_channels, p.s0, p.s1, p.s2, p.p0, p.p1, p.p2, p.d0, p.d1, p.d2)
    columns = ops.im2col_3d(a, b, *walked, types.F32)
    sizes = (columns.ne[0], node.ne[0] * node.ne[1] * node.ne[2], p.n_out, p.n_batch)
    return _gradients(a, columns, grad, sizes, need, lambda g: ops.im2col_3d_back(g, a, b.ne, *walked))


def depthwise_gradients(a: Tensor, b: Tensor, grad: Tensor, walked: Walked, need):
    """Gradients of a depthwise convolution.

    Args:
        a: the kernel [K0, K1, 1, C].
        b: f32 [W, H, C, N].
        grad: f32 [OW, OH, C, N].
        walked: s0, s1, p0, p1, d0, d1.
        need: which of the two to make.
    """
    n_k, n_pixels, (w, h, c, n) = a.ne[0] * a.ne[1], grad.ne[0] * grad.ne[1], b.ne
    weights = ops.reshape_4d(as_matrix_f32(a, n_k, c), n_k, 1, c, 1)
    shape = ops.reshape_4d(weights, a.ne[0], a.ne[1], 1, c)
    grad = ops.reshape_4d(grad, n_pixels, 1, c, n)
    da = db = None
    if need[0]:
        columns = ops.im2col(shape, ops.reshape_4d(as_contiguous(b), w, h, 1, c * n), *walked, True, types.F32)
        columns = ops.reshape_4d(columns, n_k, n_pixels, c, n)
        each = ops.out_prod(columns, ops.reshape_4d(grad, 1, n_pixels, c, n))
        da = ops.reshape_4d(ops.repeat_back(each, weights), *a.ne)
    if need[1]:
        spread = ops.out_prod(weights, grad)  # [n_k, n_pixels, c, n]
        ow, oh = _image(b, a, walked)
        columns = ops.reshape_4d(spread, n_k, ow, oh, c * n)
        db = ops.reshape_4d(ops.im2col_back(columns, shape, (w, h, 1, c * n), *walked, True), w, h, c, n)
    return da, db


def _image(b, a, walked):
    s0, s1, p0, p1, d0, d1 = walked
    return (conv_size("conv_2d_dw", a, b, b.ne[0], a.ne[0], s0, p0, d0),
            conv_size("conv_2d_dw", a, b, b.ne[1], a.ne[1], s1, p1, d1))  # fmt: skip


@CONV_2D_DW.backward
def _(node, grad, need):
    p = node.params
    return depthwise_gradients(*node.src, grad, (p.s0, p.s1, p.p0, p.p1, p.d0, p.d1), need)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute

    for kind in ("F32", "F16"):
        CONV_2D.case(f"{kind}, padded, strided")(
            lambda t, k=kind: conv_2d_direct(t(k, 3, 2, 4, 11), t("F32", 21, 6, 4, 2), 2, 1, 1, 1, 1, 1)
        )
        CONV_3D.case(f"{kind}, padded, strided")(
            lambda t, k=kind: conv_3d_direct(t(k, 2, 2, 3, 6), t("F32", 6, 5, 5, 4), 2, 1, 1, 1, 0, 1, 1, 1, 1, 2, 2, 3)
        )
        CONV_2D_DW.case(f"{kind}, padded, dilated")(
            lambda t, k=kind: conv_2d_dw_direct(t(k, 3, 3, 1, 5), t("F32", 45, 9, 5, 2), 1, 2, 2, 1, 2, 2)
        )
        CONV_2D_DW.case(f"{kind}, strided")(
            lambda t, k=kind: conv_2d_dw_direct(t(k, 3, 3, 1, 2), t("F32", 75, 6, 2), 2, 1, 1, 1, 1, 1)
        )
        CONV_2D_DW.case(f"{kind}, channels first")(
            lambda t, k=kind: conv_2d_dw_direct(
                permute(t(k, 21, 3, 2, 1), 3, 0, 1, 2), permute(t("F32", 21, 9, 6, 2), 2, 0, 1, 3), 2, 1, 1, 1, 1, 1
            )
        )
    CONV_2D.case("many channels")(lambda t: conv_2d_direct(t("F32", 3, 3, 5, 19), t("F32", 40, 7, 5), 1, 1, 1, 1, 1, 1))
    CONV_2D.case("dilated")(lambda t: conv_2d_direct(t("F32", 3, 3, 1, 1), t("F32", 10, 9), 1, 2, 2, 1, 2, 2))
    CONV_2D.case("one row")(lambda t: conv_2d_direct(t("F32", 5, 1, 2, 17), t("F32", 11, 1, 2), 3, 1, 2, 0, 1, 1))
    CONV_2D.case("permuted")(
        lambda t: conv_2d_direct(t("F32", 3, 3, 3, 2), permute(t("F32", 3, 24, 5), 2, 0, 1, 3), 1, 1, 1, 1, 1, 1)
    )
    CONV_3D.case("permuted")(
        lambda t: conv_3d_direct(
            t("F32", 2, 2, 2, 2), permute(t("F32", 4, 9, 3), 1, 0, 2, 3), *(1,) * 3, *(0,) * 3, *(1,) * 3, 1, 1, 2
        )
    )
    CONV_2D_DW.case("kernel with channels first only")(
        lambda t: conv_2d_dw_direct(permute(t("F32", 5, 3, 2, 1), 3, 0, 1, 2), t("F32", 20, 6, 5), 1, 1, 1, 0, 1, 1)
    )
    CONV_2D_DW.case("image with channels first only")(
        lambda t: conv_2d_dw_direct(t("F32", 3, 2, 1, 5), permute(t("F32", 5, 20, 6, 1), 2, 0, 1, 3), 1, 1, 1, 0, 1, 1)
    )


_cases()
