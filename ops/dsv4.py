"""Hyper-connections of DeepSeek V4: several residual streams, mixed before and after each layer.

    dsv4_hc_comb  the mixing matrix of 4 streams: softmax of rows, then rows and columns normalised in turns
    dsv4_hc_pre   dst[:, t] = sum over streams i of w[i, t] x[:, i, t], or scale sigmoid(gate[:, i, t]) for w
    dsv4_hc_post  dst[:, j, t] = post[j, t] x[:, t] + sum over i of comb[j, i, t] residual[:, i, t]

Source: Xie et al., mHC: manifold-constrained hyper-connections (2025).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, unbroadcast, zeros
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import are_f32, require, require_type
from ggjit.ops.linalg import load_few
from ggjit.tensor import Tensor, new_node

angles = lazy_module("ggjit.ops.lib.angles")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["dsv4_hc_comb", "dsv4_hc_post", "dsv4_hc_pre", "dsv4_hc_pre_gated"]

DSV4_HC_COMB = Op("dsv4_hc_comb", id=88, params=(("eps", "f32"), ("n_iter", "i32")))
DSV4_HC_COMB_BACK = Op("dsv4_hc_comb_back", id=1002, params=(("eps", "f32"), ("n_iter", "i32")), nmse=1e-6)
DSV4_HC_PRE = Op("dsv4_hc_pre", id=89, params=(("scale", "f32"), ("gated", "i32")))
DSV4_HC_POST = Op("dsv4_hc_post", id=90)
STREAMS = 4  # of hc_comb
FIRST = 8  # of the 24 mixing values; those before are dsv4_hc_pre's and dsv4_hc_post's


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def dsv4_hc_comb(mixes: Tensor, scale: Tensor, base: Tensor, eps: float, n_iter: int) -> Tensor:
    """Mixing matrices of hyper-connections, nearly doubly stochastic.

    z = mixes[8:] scale[2] + base[8:] as 4 x 4; softmax of rows, + eps; columns divided by their sums + eps; then
    n_iter - 1 times rows and columns.

    Args:
        mixes: f32 [24, n_tokens], rows contiguous.
        scale: f32 [3], contiguous.
        base: f32 [24], contiguous.
        eps: added to sums.
        n_iter: normalisations of columns, at least 1.

    Returns:
        f32 [4, 4, n_tokens].

    Raises:
        ValueError: sizes do not fit.
        TypeError: a source is not f32.

    Source: Sinkhorn and Knopp (1967); ggml_dsv4_hc_comb.
    """
    n = (2 + STREAMS) * STREAMS
    for name, t in (("mixes", mixes), ("scale", scale), ("base", base)):
        require_type("dsv4_hc_comb", name, t, types.F32)
        require("dsv4_hc_comb", t.is_contiguous_rows, f"rows of {name} must be contiguous", t)
    fits = mixes.ne[0] == n and mixes.ne[2] == mixes.ne[3] == 1 and scale.ne == (3, 1, 1, 1) and base.ne == (n, 1, 1, 1)
    require("dsv4_hc_comb", fits, f"mixes must have ne [{n}, n_tokens] (4 streams), scale [3] and base [{n}]",
            mixes, scale, base)  # fmt: skip
    require("dsv4_hc_comb", n_iter > 0, f"n_iter ({n_iter}) must be positive for mixes", mixes)
    return new_node(DSV4_HC_COMB, types.F32, (STREAMS, STREAMS, mixes.ne[1], 1), (mixes, scale, base), (eps, n_iter))


@checked
def dsv4_hc_pre(x: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the streams of hyper-connections.

    Args:
        x: f32 [n, n_streams, n_tokens], any strides.
        weights: f32 [n_streams, n_tokens], any strides.

    Returns:
        f32 [n, n_tokens].

    Raises:
        ValueError: sizes do not fit.
        TypeError: a source is not f32.

    Source: ggml_dsv4_hc_pre.
    """
    require("dsv4_hc_pre", weights.ne == (*x.ne[1:3], 1, 1) and x.ne[3] == 1,
            "weights must have a value for each stream and token of x", weights, x)  # fmt: skip
    return _hc_pre(x, weights, 1.0, 0)


@checked
def dsv4_hc_pre_gated(x: Tensor, gate: Tensor, scale: float) -> Tensor:
    """Sum of the streams of hyper-connections, each element with a gate: scale sum(x sigmoid(gate)).

    Args:
        x: f32 [n, n_streams, n_tokens], any strides.
        gate: f32, the shape of `x`.
        scale: of the sum.

    Returns:
        f32 [n, n_tokens].

    Raises:
        ValueError: sizes do not fit.
        TypeError: a source is not f32.

    Source: ggml_dsv4_hc_pre_gated.
    """
    require("dsv4_hc_pre", gate.ne == x.ne and x.ne[3] == 1, "gate must have the shape of x, of 3 dimensions", gate, x)
    return _hc_pre(x, gate, scale, 1)


def _hc_pre(x: Tensor, weights: Tensor, scale: float, gated: int) -> Tensor:
    require_type("dsv4_hc_pre", "x", x, types.F32)
    require_type("dsv4_hc_pre", "weights", weights, types.F32)
    return new_node(DSV4_HC_PRE, types.F32, (x.ne[0], x.ne[2], 1, 1), (x, weights), (scale, gated))


@checked
def dsv4_hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None = None) -> Tensor:
    """Add a layer's result to the mixed streams of hyper-connections.

    Args:
        x: f32 [n, n_tokens], any strides.
        residual: f32 [n, n_streams, n_tokens], any strides.
        post: f32 [n_streams, n_tokens], any strides: weight of x in each stream.
        comb: f32 [n_streams, n_streams, n_tokens], any strides: new x old stream; None: streams are not mixed.

    Returns:
        f32 [n, n_streams, n_tokens].

    Raises:
        ValueError: sizes do not fit.
        TypeError: a source is not f32.

    Source: ggml_dsv4_hc_post.
    """
    n, streams, tokens, _ = residual.ne
    fits = x.ne == (n, tokens, 1, 1) and residual.ne[3] == 1 and post.ne == (streams, tokens, 1, 1)
    fits = fits and (comb is None or comb.ne == (streams, streams, tokens, 1))
    require("dsv4_hc_post", fits, "x, post and comb must fit residual [n, n_streams, n_tokens]",
            x, post, comb, residual)  # fmt: skip
    for name, t in {"x": x, "residual": residual, "post": post, "comb": comb}.items():
        if t is not None:
            require_type("dsv4_hc_post", name, t, types.F32)
    return new_node(DSV4_HC_POST, types.F32, residual.ne, (x, residual, post, comb))


# --- references -------------------------------------------------------------------------------------------------------


def _softmax(mixes, scale, base):
    z = (mixes[0, 0] * scale[0, 0, 0, 2] + base[0, 0, 0])[:, FIRST:].reshape(-1, STREAMS, STREAMS)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@DSV4_HC_COMB.reference
def _(node, mixes, scale, base):
    eps = node.params.eps
    m = _softmax(mixes, scale, base) + eps
    for i in range(1, 2 * node.params.n_iter):
        m = m / (m.sum(-2 if i % 2 else -1, keepdims=True) + eps)
    return m[None]


@DSV4_HC_COMB_BACK.reference
def _(node, mixes, scale, base, grad):
    eps, p = node.params.eps, _softmax(mixes, scale, base)
    steps, m = [], p + eps
    for i in range(1, 2 * node.params.n_iter):
        axis = -2 if i % 2 else -1
        total = m.sum(axis, keepdims=True) + eps
        m = m / total
        steps.append((axis, total, m))
    g = grad[0]
    for axis, total, m in reversed(steps):
        g = (g - (g * m).sum(axis, keepdims=True)) / total
    return (p * (g - (g * p).sum(-1, keepdims=True))).reshape(node.ne[::-1])


@DSV4_HC_PRE.reference
def _(node, x, w):
    p = node.params
    if p.gated:
        return p.scale * (x / (1 + np.exp(-w))).sum(2)[None]
    return np.einsum("tid,ti->td", x[0], w[0, 0])[None, None]


@DSV4_HC_POST.reference
def _(node, x, residual, post, comb=None):
    kept = residual if comb is None else np.einsum("tij,tid->tjd", comb[0], residual[0])[None]
    return kept + post[0, 0][None, :, :, None] * x[0, 0][None, :, None]


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def divide(work, to, at, first, step, eps):
    """Divide 4 values `step` bytes apart by their sum + eps; returns that divisor."""
    a, b = memory.load_f32(work, at + first), memory.load_f32(work, at + first + step)
    c, d = memory.load_f32(work, at + first + 2 * step), memory.load_f32(work, at + first + 3 * step)
    total = (a + b) + (c + d) + eps
    memory.store_f32(work, to + first, a / total)
    memory.store_f32(work, to + first + step, b / total)
    memory.store_f32(work, to + first + 2 * step, c / total)
    memory.store_f32(work, to + first + 3 * step, d / total)
    return total


@jitted
def softmax_rows(dst, to, mixes, at, scale, base):
    """softmax of each row of z = mixes scale + base, without eps."""
    z = vec.fma(vec.load(mixes, at + 4 * FIRST), scale, vec.load(base, 4 * FIRST))  # lane 4 row + column
    largest = vec.max(z, angles.swap_pairs(z))
    e = vec.exp(z - vec.max(largest, angles.swap_twos(largest)))
    total = e + angles.swap_pairs(e)
    vec.store(dst, to, e / (total + angles.swap_twos(total)))


@kernel
def dsv4_hc_comb_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
    ith, nth,
):  # fmt: skip
    """The result's place is the scratch."""
    eps, n_iter, scale = memory.f32_from_bits(op_params[0]), np.int64(op_params[1]), memory.load_f32(src1, 8)
    for t in range(dst_ne[2] * ith // nth, dst_ne[2] * (ith + 1) // nth):
        to = t * dst_nb[2]
        softmax_rows(dst, to, src0, t * src0_nb[1], scale, src2)
        x = vec.load(dst, to) + eps  # the whole matrix; lane 4 r + c
        for i in range(1, 2 * n_iter):
            if i % 2:
                total = x + angles.swap_fours(x)
                total = total + angles.swap_eights(total)
            else:
                total = x + angles.swap_pairs(x)
                total = total + angles.swap_twos(total)
            x = x / (total + eps)
        vec.store(dst, to, x)


@kernel
def dsv4_hc_comb_back_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne, src3_nb,
    op_params, work, ith, nth,
):  # fmt: skip
    """Gradient of z: all matrices and divisors on the way are made again."""
    eps, n_iter, scale = memory.f32_from_bits(op_params[0]), np.int64(op_params[1]), memory.load_f32(src1, 8)
    probability = COUNTER_LINE + ith * 80 * (2 * n_iter + 1)  # then for each step 16 values and 4 divisors
    first = probability + 80
    for t in range(dst_ne[1] * ith // nth, dst_ne[1] * (ith + 1) // nth):
        softmax_rows(work, probability, src0, t * src0_nb[1], scale, src2)
        vec.store(work, first, vec.load(work, probability) + eps)
        for i in range(1, 2 * n_iter):
            at, by_column = first + 80 * i, i % 2
            for j in range(STREAMS):
                total = divide(work, at, at - 80, 4 * j if by_column else 16 * j, 16 if by_column else 4, eps)
                memory.store_f32(work, at + 64 + 4 * j, total)
        to = t * dst_nb[1]
        vec.store(dst, to, vec.load(src3, t * src3_nb[2]))
        for i in range(2 * n_iter - 1, -1, -1):
            last = i == 0  # the softmax
            at, by_column = probability if last else first + 80 * i, i % 2
            for j in range(STREAMS):
                start, step, inner = 4 * j if by_column else 16 * j, 16 if by_column else 4, np.float32(0)
                for e in range(STREAMS):
                    x = start + e * step
                    inner = vec.fma(memory.load_f32(dst, to + x), memory.load_f32(work, at + x), inner)
                for e in range(STREAMS):
                    x = start + e * step
                    g = memory.load_f32(dst, to + x) - inner
                    if last:
                        g = g * memory.load_f32(work, at + x)
                    else:
                        g = g / memory.load_f32(work, at + 64 + 4 * j)
                    memory.store_f32(dst, to + x, g)


DSV4_HC_COMB.kernel(lambda node: dsv4_hc_comb_f32)
DSV4_HC_COMB.flops(lambda node: 4 * node.nelements * node.params.n_iter)
DSV4_HC_COMB_BACK.kernel(lambda node: dsv4_hc_comb_back_f32 if are_f32(node.src) else None)
DSV4_HC_COMB_BACK.work_size(lambda node, nth: 80 * (2 * node.params.n_iter + 1) * nth)
DSV4_HC_COMB_BACK.flops(lambda node: 10 * node.nelements * node.params.n_iter)


@functools.cache
def make_hc_pre(gated: bool):
    """Kernel; `gated`: each element has a gate."""

    @kernel
    def dsv4_hc_pre_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        scale = memory.f32_from_bits(op_params[0])
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        for t in range(first, last):
            for i in range(begin, end, 16):
                n, total = end - i, vec.zero()
                for stream in range(src0_ne[1]):
                    x = load_few(src0, i * src0_nb[0] + stream * src0_nb[1] + t * src0_nb[2], src0_nb[0], n)
                    if gated:
                        g = load_few(src1, i * src1_nb[0] + stream * src1_nb[1] + t * src1_nb[2], src1_nb[0], n)
                        total += x / (vec.exp(-g) + np.float32(1))
                    else:
                        total = vec.fma(x, memory.load_f32(src1, stream * src1_nb[0] + t * src1_nb[1]), total)
                vec.store_first(dst, 4 * i + t * dst_nb[1], total * scale if gated else total, n)

    return dsv4_hc_pre_f32


@functools.cache
def make_hc_post(mixes: bool):
    """Kernel; `mixes`: there is a matrix that mixes the streams (src3)."""

    @kernel
    def dsv4_hc_post_f32(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        for row in range(first, last):
            j, t = row % dst_ne[1], row // dst_ne[1]
            post = memory.load_f32(src2, j * src2_nb[0] + t * src2_nb[1])
            for i in range(begin, end, 16):
                n, at = end - i, i * src1_nb[0] + t * src1_nb[2]
                total = load_few(src0, i * src0_nb[0] + t * src0_nb[1], src0_nb[0], n) * post
                if mixes:
                    for old in range(src1_ne[1]):
                        w = memory.load_f32(src3, j * src3_nb[0] + old * src3_nb[1] + t * src3_nb[2])
                        total = vec.fma(load_few(src1, at + old * src1_nb[1], src1_nb[0], n), w, total)
                else:
                    total = total + load_few(src1, at + j * src1_nb[1], src1_nb[0], n)
                vec.store_first(dst, 4 * i + j * dst_nb[1] + t * dst_nb[2], total, n)

    return dsv4_hc_post_f32


DSV4_HC_PRE.kernel(lambda node: make_hc_pre(bool(node.params.gated)))
DSV4_HC_POST.kernel(lambda node: make_hc_post(node.src[3] is not None))


@DSV4_HC_PRE.flops
def _(node):
    return 2 * node.src[0].nelements


@DSV4_HC_POST.flops
def _(node):
    return 2 * node.nelements * (1 + node.ne[1] * (node.src[3] is not None))


# --- backward ---------------------------------------------------------------------------------------------------------


@DSV4_HC_COMB.backward
def _(node, grad, need):
    (mixes, scale, base), p, tokens = node.src, node.params, node.ne[2]
    n = STREAMS * STREAMS
    dz = new_node(DSV4_HC_COMB_BACK, types.F32, (n, tokens, 1, 1), (*node.src, grad), (p.eps, p.n_iter))
    dmixes = ops.mul(dz, ops.view_1d(scale, 1, 8))
    used = ops.view_2d(mixes, n, tokens, mixes.nb[1], 4 * FIRST)
    dscale = ops.reshape_1d(ops.sum(ops.mul(dz, used)), 1)
    dbase = unbroadcast(dz, ops.view_1d(base, n, 4 * FIRST))
    return (
        ops.concat(zeros(FIRST, tokens, 1, 1), dmixes, 0),
        ops.concat(zeros(2, 1, 1, 1), dscale, 0),
        ops.concat(zeros(FIRST, 1, 1, 1), dbase, 0),
    )


@DSV4_HC_PRE.backward
def _(node, grad, need):
    (x, w), p = node.src, node.params
    n, streams, tokens, _ = x.ne
    g = ops.reshape_3d(grad, n, 1, tokens)
    if p.gated:
        s = ops.sigmoid(as_contiguous(w))
        dx = ops.scale(ops.mul(s, g), p.scale)
        return dx, ops.mul(ops.mul(dx, x), ops.scale_bias(s, -1.0, 1.0))
    dx = ops.mul(ops.repeat_4d(g, *x.ne), ops.reshape_3d(as_contiguous(w), 1, streams, tokens))
    return dx, ops.reshape(ops.sum_rows(ops.mul(x, g)), w)


@DSV4_HC_POST.backward
def _(node, grad, need):
    x, residual, post, comb = node.src
    n, streams, tokens, _ = residual.ne
    x_3d = ops.reshape_3d(as_contiguous(x), n, 1, tokens)
    weighted = ops.mul(grad, ops.reshape_3d(as_contiguous(post), 1, streams, tokens))
    dx = ops.reshape(ops.repeat_back(weighted, x_3d), x)
    dpost = ops.reshape(ops.sum_rows(ops.mul(grad, x_3d)), post)
    if comb is None:
        return dx, grad, dpost, None
    dresidual = ops.out_prod(grad, ops.transpose(comb))
    return dx, dresidual, dpost, ops.mul_mat(grad, as_contiguous(residual))


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    for n_iter in (1, 4, 20):
        DSV4_HC_COMB.case(f"{n_iter} iterations")(
            lambda t, n=n_iter: dsv4_hc_comb(t("F32", 24, 5), t("F32", 3), t("F32", 24), 1e-2, n)
        )
        DSV4_HC_COMB_BACK.case(f"{n_iter} iterations")(
            lambda t, n=n_iter: new_node(
                DSV4_HC_COMB_BACK,
                types.F32,
                (16, 5, 1, 1),
                (t("F32", 24, 5), t("F32", 3), t("F32", 24), t("F32", 4, 4, 5)),
                (1e-2, n),
            )
        )
    DSV4_HC_COMB.case("rows with gaps")(
        lambda t: dsv4_hc_comb(view_2d(t("F32", 27, 3), 24, 3, 108, 8), t("F32", 3), t("F32", 24), 1e-6, 3)
    )
    for n in (1, 33, 64):
        DSV4_HC_PRE.case(f"{n}")(lambda t, n=n: dsv4_hc_pre(t("F32", n, 4, 3), t("F32", 4, 3)))
        DSV4_HC_PRE.case(f"{n}, gated")(lambda t, n=n: dsv4_hc_pre_gated(t("F32", n, 4, 3), t("F32", n, 4, 3), 0.5))
        for mixed in (True, False):
            DSV4_HC_POST.case(f"{n}, mixed" if mixed else f"{n}")(
                lambda t, n=n, m=mixed: dsv4_hc_post(
                    t("F32", n, 3), t("F32", n, 4, 3), t("F32", 4, 3), t("F32", 4, 4, 3) if m else None
                )
            )
    DSV4_HC_PRE.case("permuted")(
        lambda t: dsv4_hc_pre(permute(t("F32", 4, 37, 3), 1, 0, 2, 3), transpose(t("F32", 3, 4)))
    )
    DSV4_HC_POST.case("permuted")(
        lambda t: dsv4_hc_post(
            transpose(t("F32", 3, 37)),
            permute(t("F32", 4, 37, 3), 1, 0, 2, 3),
            transpose(t("F32", 3, 4)),
            permute(t("F32", 4, 4, 3), 1, 0, 2, 3),
        )
    )


_cases()
