"""Windows and relative positions of image transformers (SAM).

    win_part      [C, W, H] -> [C, w, w, n]: the image cut into windows of w x w, filled up with zeros
    win_unpart    the inverse: what lies outside the image is left out
    get_rel_pos   dst[:, k, q] = a[:, kh - 1 - k + q]: a row for each pair of positions
    add_rel_pos   attention scores [kw kh, qw qh, B] plus pw[kx, q] plus ph[ky, q]

All move whole rows of C elements where these are contiguous; strides are honoured (ggml ignores those of win_part,
win_unpart and get_rel_pos).

Source: Kirillov et al., Segment anything (2023); Li et al., MViTv2 (2021), for the relative positions.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.lib.checks import are_f32, require, require_contiguous, require_type
from ggjit.tensor import Tensor, new_node, view_tensor

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["add_rel_pos", "get_rel_pos", "win_part", "win_unpart"]

WIN_PART = Op("win_part", id=78, params=(("n_x", "i32"), ("n_y", "i32"), ("w", "i32")))
WIN_UNPART = Op("win_unpart", id=79, params=(("w", "i32"),))
GET_REL_POS = Op("get_rel_pos", id=80)
GET_REL_POS_BACK = Op("get_rel_pos_back", id=1006)
ADD_REL_POS = Op("add_rel_pos", id=81, params=(("in_place", "i32"),), inplace=True)


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def win_part(a: Tensor, w: int) -> Tensor:
    """Cut an image into windows.

    Args:
        a: f32 [C, W, H], any strides.
        w: pixels along both sides of a window.

    Returns:
        f32 [C, w, w, n], n = ceil(W / w) ceil(H / w) windows, zeros outside the image.

    Raises:
        ValueError: `a` has 4 dimensions or `w` is not positive.
        TypeError: `a` is not f32.

    Source: ggml_win_part.
    """
    require("win_part", a.ne[3] == 1 and w > 0, f"a must have 3 dimensions and w ({w}) be positive", a)
    require_type("win_part", "a", a, types.F32)
    n_x, n_y = -(-a.ne[1] // w), -(-a.ne[2] // w)
    return new_node(WIN_PART, types.F32, (a.ne[0], w, w, n_x * n_y), (a,), (n_x, n_y, w))


@checked
def win_unpart(a: Tensor, w0: int, h0: int, w: int) -> Tensor:
    """Put windows together to an image.

    Args:
        a: f32 [C, w, w, n], any strides, as win_part makes them.
        w0: width of the image.
        h0: height of the image.
        w: pixels along both sides of a window.

    Returns:
        f32 [C, w0, h0].

    Raises:
        ValueError: the windows do not cover the image.
        TypeError: `a` is not f32.

    Source: ggml_win_unpart.
    """
    n = -(-w0 // w) * -(-h0 // w) if w > 0 else -1
    fits = w0 > 0 and h0 > 0 and a.ne[1] == a.ne[2] == w and a.ne[3] == n
    require("win_unpart", fits, f"a must have ne [C, {w}, {w}, {n}] for an image of {w0} x {h0}", a)
    require_type("win_unpart", "a", a, types.F32)
    return new_node(WIN_UNPART, types.F32, (a.ne[0], w0, h0, 1), (a,), (w,))


@checked
def get_rel_pos(a: Tensor, qh: int, kh: int) -> Tensor:
    """Relative position embeddings for each pair of query and key.

    Args:
        a: f16 [C, 2 qh - 1], any strides: an embedding for each distance.
        qh: number of queries.
        kh: number of keys, equal to qh.

    Returns:
        f16 [C, kh, qh].

    Raises:
        ValueError: sizes do not fit.
        TypeError: `a` is not f16.

    Source: ggml_get_rel_pos.
    """
    fits = qh == kh and a.ne[1] == 2 * qh - 1 and a.ne[2] == a.ne[3] == 1
    require("get_rel_pos", fits, f"a must have 2 dimensions, qh ({qh}) equal kh ({kh}) and a.ne[1] be {2 * qh - 1}", a)
    require_type("get_rel_pos", "a", a, types.F16)
    return new_node(GET_REL_POS, a.type, (a.ne[0], kh, qh, 1), (a,))


@checked
def add_rel_pos(a: Tensor, pw: Tensor, ph: Tensor, *, inplace: bool = False) -> Tensor:
    """Add relative position scores to attention scores.

    Args:
        a: f32 [kw kh, qw qh, B], contiguous.
        pw: f32 [kw, qw, qh, B], contiguous.
        ph: f32 [kh, qw, qh, B], contiguous; kh equals kw or not.
        inplace: put the result where `a` lies.

    Returns:
        f32, the shape of `a`.

    Raises:
        ValueError: sizes do not fit, or a source has gaps.
        TypeError: a source is not f32.

    Source: ggml_add_rel_pos.
    """
    fits = a.ne == (pw.ne[0] * ph.ne[0], pw.ne[1] * pw.ne[2], pw.ne[3], 1) and pw.ne[1:] == ph.ne[1:]
    require("add_rel_pos", fits, "a must have ne [pw.ne[0] ph.ne[0], pw.ne[1] pw.ne[2], pw.ne[3]] and pw and ph agree "
            "in dimensions 1 to 3", a, pw, ph)  # fmt: skip
    for name, t in (("a", a), ("pw", pw), ("ph", ph)):
        require_type("add_rel_pos", name, t, types.F32)
        require_contiguous("add_rel_pos", name, t)
    if inplace:
        return view_tensor(ADD_REL_POS, a, (a, pw, ph), (1,))
    return new_node(ADD_REL_POS, types.F32, a.ne, (a, pw, ph), (0,))


# --- references -------------------------------------------------------------------------------------------------------


@WIN_PART.reference
def _(node, a):
    p = node.params
    out = np.zeros((p.n_y * p.w, p.n_x * p.w, a.shape[3]))
    out[: a.shape[1], : a.shape[2]] = a[0]
    return out.reshape(p.n_y, p.w, p.n_x, p.w, -1).swapaxes(1, 2).reshape(node.ne[::-1])


@WIN_UNPART.reference
def _(node, a):
    w, (c, w0, h0, _) = node.params.w, node.ne
    n_x, n_y = -(-w0 // w), -(-h0 // w)
    return a.reshape(n_y, n_x, w, w, c).swapaxes(1, 2).reshape(1, n_y * w, n_x * w, c)[:, :h0, :w0]


@GET_REL_POS.reference
def _(node, a):
    n = node.ne[1]
    return a[0, 0][n - 1 - np.arange(n)[None, :] + np.arange(n)[:, None]][None]


@GET_REL_POS_BACK.reference
def _(node, grad):
    n, out = grad.shape[2], np.zeros(node.ne[::-1])
    np.add.at(out[0, 0], n - 1 - np.arange(n)[None, :] + np.arange(n)[:, None], grad[0])
    return out


@ADD_REL_POS.reference
def _(node, a, pw, ph):
    by_axes = a.reshape(*pw.shape[:3], ph.shape[3], pw.shape[3])
    return (by_axes + pw[:, :, :, None, :] + ph[:, :, :, :, None]).reshape(a.shape)


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_row(type_name: str):
    """Jitted (dst, to, src, at, step, n): a row whose elements lie `step` bytes apart to a contiguous one."""
    size, element = memory.SIZES[type_name], convert.element(type_name, type_name)

    @jitted
    def row(dst, to, src, at, step, n):
        if step == size:
            convert.move(dst, to, src, at, n * size)
        else:
            for i in range(n):
                element(dst, to + i * size, src, at + i * step)

    return row


@functools.cache
def make_run():
    """Jitted (dst, to, src, at, src_nb, n, n_rows): f32 rows of n elements to contiguous ones."""
    row = make_row("F32")

    @jitted
    def run(dst, to, src, at, src_nb, n, n_rows):
        if src_nb[0] == 4 and src_nb[1] == 4 * n:
            convert.move(dst, to, src, at, 4 * n * n_rows)
        else:
            for i in range(n_rows):
                row(dst, to + 4 * n * i, src, at + i * src_nb[1], src_nb[0], n)

    return run


@functools.cache
def make_win_part():
    """Kernel of win_part: rows of C elements."""
    run = make_run()

    @kernel
    def win_part_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n_x, w = np.int64(op_params[0]), np.int64(op_params[2])
        k, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, k)
        while k < last:  # a run of rows inside a window
            x, y, to = i3 % n_x * w + i1, i3 // n_x * w + i2, rows.offset(dst_nb, i1, i2, i3)
            n = min(dst_ne[1] - i1, last - k)
            inside = 0 if y >= src0_ne[2] else min(n, src0_ne[1] - x)
            inside = inside if inside > 0 else 0
            run(dst, to, src0, x * src0_nb[1] + y * src0_nb[2], src0_nb, dst_ne[0], inside)
            for i in range(4 * inside * dst_ne[0], 4 * n * dst_ne[0], 4):
                memory.store_f32(dst, to + i, np.float32(0))
            k += n
            i1, i2, i3 = rows.following(dst_ne, i1 + n - 1, i2, i3)

    return win_part_rows


@functools.cache
def make_win_unpart():
    """Kernel of win_unpart: rows of C elements."""
    run = make_run()

    @kernel
    def win_unpart_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        w = np.int64(op_params[0])
        n_x = (dst_ne[1] + w - 1) // w
        k, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, k)
        while k < last:  # a run of rows inside a window
            x = i1 % w
            n = min(w - x, dst_ne[1] - i1, last - k)
            at = x * src0_nb[1] + i2 % w * src0_nb[2] + (i2 // w * n_x + i1 // w) * src0_nb[3]
            run(dst, rows.offset(dst_nb, i1, i2, i3), src0, at, src0_nb, dst_ne[0], n)
            k += n
            i1, i2, i3 = rows.following(dst_ne, i1 + n - 1, i2, i3)

    return win_unpart_rows


@functools.cache
def make_get_rel_pos():
    """Kernel of get_rel_pos: rows of C elements."""
    row = make_row("F16")

    @kernel
    def get_rel_pos_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            at = (dst_ne[1] - 1 - i1 + i2) * src0_nb[1]
            row(dst, rows.offset(dst_nb, i1, i2, i3), src0, at, src0_nb[0], dst_ne[0])
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return get_rel_pos_rows


@kernel
def get_rel_pos_back_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """A row of the gradient is the sum of a diagonal."""
    n = src0_ne[1]
    for d in range(dst_ne[1] * ith // nth, dst_ne[1] * (ith + 1) // nth):
        for i in range(dst_ne[0]):
            total = np.float32(0)
            for k in range(n):
                q = d - (n - 1) + k
                if q >= 0 and q < n:
                    total += memory.load_f32(src0, i * src0_nb[0] + k * src0_nb[1] + q * src0_nb[2])
            memory.store_f32(dst, d * dst_nb[1] + 4 * i, total)


@kernel
def add_rel_pos_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
    ith, nth,
):  # fmt: skip
    """Rows of a, pw and ph belong together; all are contiguous."""
    kw, kh = src1_ne[0], src2_ne[0]
    n_rows = dst_ne[1] * dst_ne[2]
    for row in range(n_rows * ith // nth, n_rows * (ith + 1) // nth):
        for y in range(kh):
            h, at = memory.load_f32(src2, 4 * (row * kh + y)), 4 * (row * kh + y) * kw
            for x in range(0, kw, 16):
                n = 16 if x + 16 < kw else kw - x
                w = vec.load_first(src1, 4 * (row * kw + x), n)
                vec.store_first(dst, at + 4 * x, vec.load_first(src0, at + 4 * x, n) + w + h, n)


WIN_PART.kernel(lambda node: make_win_part())
WIN_UNPART.kernel(lambda node: make_win_unpart())
GET_REL_POS.kernel(lambda node: make_get_rel_pos())
GET_REL_POS_BACK.kernel(lambda node: get_rel_pos_back_f32 if are_f32(node.src) else None)
ADD_REL_POS.kernel(lambda node: add_rel_pos_f32)
ADD_REL_POS.flops(lambda node: 2 * node.nelements)
for _op in (WIN_PART, WIN_UNPART, GET_REL_POS):
    _op.flops(lambda node: 0)


# --- backward ---------------------------------------------------------------------------------------------------------


@WIN_PART.backward
def _(node, grad, need):
    a = node.src[0]
    return (win_unpart(grad, a.ne[1], a.ne[2], node.params.w),)


@WIN_UNPART.backward
def _(node, grad, need):
    return (win_part(grad, node.params.w),)


@GET_REL_POS.backward
def _(node, grad, need):
    return (new_node(GET_REL_POS_BACK, types.F32, node.src[0].ne, (grad,)),)


@ADD_REL_POS.backward
def _(node, grad, need):
    _, pw, ph = node.src
    n_rows = node.ne[1] * node.ne[2]
    by_axes = ops.reshape_3d(grad, pw.ne[0], ph.ne[0], n_rows)
    dw = dh = None
    if need[1]:
        dw = ops.reshape(ops.repeat_back(by_axes, ops.reshape_3d(pw, pw.ne[0], 1, n_rows)), pw)
    if need[2]:
        dh = ops.reshape(ops.sum_rows(by_axes), ph)
    return grad, dw, dh


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_3d

    WIN_PART.case("filled up")(lambda t: win_part(t("F32", 8, 7, 5), 3))
    WIN_PART.case("one window")(lambda t: win_part(t("F32", 33, 2, 2), 5))
    WIN_PART.case("view")(lambda t: win_part(view_3d(t("F32", 12, 5, 3), 9, 4, 3, 48, 240, 8), 2))
    WIN_PART.case("permuted")(lambda t: win_part(permute(t("F32", 4, 9, 3), 1, 0, 2, 3), 2))
    WIN_UNPART.case("cut off")(lambda t: win_unpart(t("F32", 8, 3, 3, 6), 7, 5, 3))
    WIN_UNPART.case("permuted")(lambda t: win_unpart(permute(t("F32", 2, 9, 2, 4), 1, 0, 2, 3), 3, 4, 2))
    for n in (1, 5):
        GET_REL_POS.case(f"{n} positions")(lambda t, n=n: get_rel_pos(t("F16", 17, 2 * n - 1), n, n))
        GET_REL_POS_BACK.case(f"{n} positions")(
            lambda t, n=n: new_node(GET_REL_POS_BACK, types.F32, (17, 2 * n - 1, 1, 1), (t("F32", 17, n, n),))
        )
    GET_REL_POS.case("transposed")(lambda t: get_rel_pos(transpose(t("F16", 5, 9)), 3, 3))
    for inplace in (False, True):
        ADD_REL_POS.case("in place" if inplace else "square")(
            lambda t, i=inplace: add_rel_pos(t("F32", 16, 15, 2), t("F32", 4, 5, 3, 2), t("F32", 4, 5, 3, 2), inplace=i)
        )
    ADD_REL_POS.case("wide")(lambda t: add_rel_pos(t("F32", 60, 6), t("F32", 20, 2, 3), t("F32", 3, 2, 3)))


_cases()
