"""opt_step_adamw and opt_step_sgd: one step of an optimizer, in place.

    adamw   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
            w = w (1 - alpha wd) - alpha m beta1h / (sqrt(v beta2h) + eps)
    sgd     w = w (1 - alpha wd) - alpha g

alpha, wd and the rest are data, so a graph is built once and its parameters change from step to step: adamw's are
[alpha, beta1, beta2, eps, wd, beta1h, beta2h] with beta1h = 1 / (1 - beta1^t) and beta2h = 1 / (1 - beta2^t) at step t
(from 1), sgd's [alpha, wd].
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import require, require_type
from ggjit.tensor import FLAG_PARAM, Tensor, view_tensor

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["opt_step_adamw", "opt_step_sgd"]

OPT_STEP_ADAMW = Op("opt_step_adamw", id=98, state=(2, 3))
OPT_STEP_SGD = Op("opt_step_sgd", id=99)


def _check(where: str, a: Tensor, grad: Tensor, moments: tuple[Tensor, ...], params: Tensor, n_params: int) -> None:
    if not a.flags & FLAG_PARAM:
        raise ValueError(f"{where}: a must be a parameter (set_param), got '{a.name}'")
    for name, t in (("a", a), ("grad", grad), *zip("mv", moments, strict=False), ("params", params)):
        require_type(where, name, t, types.F32)
    for t in (grad, *moments):
        require(where, t.ne == a.ne, "gradient and moments must have the shape of a", a, t)
    for t in (a, *moments):
        if not t.is_contiguous_rows:
            raise ValueError(f"{where}: rows must be contiguous, got ne {list(t.ne)}, nb {list(t.nb)} ('{t.name}')")
    fits = params.ne == (n_params, 1, 1, 1) and params.is_contiguous
    require(where, fits, f"params must be contiguous [{n_params}]", params)


@checked
def opt_step_adamw(a: Tensor, grad: Tensor, m: Tensor, v: Tensor, params: Tensor) -> Tensor:
    """Update weights and moments by AdamW (formulas above).

    Args:
        a: f32, the weights, a parameter (`set_param`); rows contiguous.
        grad: f32, the shape of `a`, any strides.
        m: f32, the shape of `a`: first moments, updated too; rows contiguous.
        v: f32, the shape of `a`: second moments, updated too; rows contiguous.
        params: f32 [7]: alpha, beta1, beta2, eps, wd, beta1h, beta2h.

    Returns:
        A view of `a`.

    Raises:
        TypeError: one is not f32.
        ValueError: shapes or layouts do not fit, or `a` is no parameter.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2017); ggml_opt_step_adamw.
    """
    _check("opt_step_adamw", a, grad, (m, v), params, 7)
    return view_tensor(OPT_STEP_ADAMW, a, (a, grad, m, v, params))


@checked
def opt_step_sgd(a: Tensor, grad: Tensor, params: Tensor) -> Tensor:
    """Update weights by gradient descent with weight decay (formula above).

    Args:
        a: f32, the weights, a parameter (`set_param`); rows contiguous.
        grad: f32, the shape of `a`, any strides.
        params: f32 [2]: alpha, wd.

    Returns:
        A view of `a`.

    Raises:
        TypeError: one is not f32.
        ValueError: shapes or layouts do not fit, or `a` is no parameter.

    Source: ggml_opt_step_sgd.
    """
    _check("opt_step_sgd", a, grad, (), params, 2)
    return view_tensor(OPT_STEP_SGD, a, (a, grad, params))


def adamw_moments(grad, m, v, params):
    """The moments after a step, float64."""
    beta1, beta2 = params.reshape(-1)[1:3]
    return beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad


@OPT_STEP_ADAMW.reference
def _(node, a, grad, m, v, params):
    alpha, _, _, eps, wd, beta1h, beta2h = params.reshape(-1)
    m, v = adamw_moments(grad, m, v, params)
    return a * (1 - alpha * wd) - alpha * m * beta1h / (np.sqrt(v * beta2h) + eps)


@OPT_STEP_SGD.reference
def _(node, a, grad, params):
    alpha, wd = params.reshape(-1)
    return a * (1 - alpha * wd) - alpha * grad


@kernel
def opt_step_adamw_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
                       src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth):  # fmt: skip
    """Moments and weights, 16 elements at a time."""
    alpha, beta1, beta2 = memory.load_f32(src4, 0), memory.load_f32(src4, 4), memory.load_f32(src4, 8)
    eps, wd = memory.load_f32(src4, 12), memory.load_f32(src4, 16)
    beta1h, beta2h = memory.load_f32(src4, 20), memory.load_f32(src4, 24)
    keep, one = np.float32(1) - alpha * wd, np.float32(1)
    slot = COUNTER_LINE + 4 * dst_ne[0] * ith
    first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    n = end - begin
    for _ in range(first, last):
        to, m_at = rows.offset(dst_nb, i1, i2, i3) + 4 * begin, rows.offset(src2_nb, i1, i2, i3) + 4 * begin
        v_at, at = rows.offset(src3_nb, i1, i2, i3) + 4 * begin, rows.offset(src1_nb, i1, i2, i3) + begin * src1_nb[0]
        grad, g_at = staging.packed(src1, at, src1_nb[0], n, work, slot)
        for i in range(0, n, 16):
            g, rest = vec.load_first(grad, g_at + 4 * i, n - i), n - i
            m = vec.fma(g, one - beta1, vec.load_first(src2, m_at + 4 * i, rest) * beta1)
            v = vec.fma(g * g, one - beta2, vec.load_first(src3, v_at + 4 * i, rest) * beta2)
            vec.store_first(src2, m_at + 4 * i, m, rest)
            vec.store_first(src3, v_at + 4 * i, v, rest)
            step = m * beta1h / (vec.sqrt(v * beta2h) + eps)
            w = vec.load_first(dst, to + 4 * i, rest)
            vec.store_first(dst, to + 4 * i, vec.fma(step, -alpha, w * keep), rest)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@kernel
def opt_step_sgd_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
                     op_params, work, ith, nth):  # fmt: skip
    """Weights, 16 elements at a time."""
    alpha, wd = memory.load_f32(src2, 0), memory.load_f32(src2, 4)
    keep = np.float32(1) - alpha * wd
    slot = COUNTER_LINE + 4 * dst_ne[0] * ith
    first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    n = end - begin
    for _ in range(first, last):
        to, at = rows.offset(dst_nb, i1, i2, i3) + 4 * begin, rows.offset(src1_nb, i1, i2, i3) + begin * src1_nb[0]
        grad, g_at = staging.packed(src1, at, src1_nb[0], n, work, slot)
        for i in range(0, n, 16):
            g, w = vec.load_first(grad, g_at + 4 * i, n - i), vec.load_first(dst, to + 4 * i, n - i)
            vec.store_first(dst, to + 4 * i, vec.fma(g, -alpha, w * keep), n - i)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


OPT_STEP_ADAMW.kernel(lambda node: opt_step_adamw_f32)
OPT_STEP_SGD.kernel(lambda node: opt_step_sgd_f32)


def _work_size(node, nth):
    return 0 if node.src[1].is_contiguous_rows else 4 * node.ne[0] * nth


for _op in (OPT_STEP_ADAMW, OPT_STEP_SGD):
    _op.work_size(_work_size)
    _op.flops(lambda node: (12 if node.op is OPT_STEP_ADAMW else 3) * node.nelements)


# --- cases ------------------------------------------------------------------------------------------------------------

_PARAMS = np.array([0.1, 0.8, 0.95, 1e-5, 0.1, 1.2, 3.0], np.float32)


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    def adamw(t, grad, *ne):
        v = t("F32", *ne, low=0, high=1)
        return opt_step_adamw(t("F32", *ne).set_param(), grad, t("F32", *ne), v, t.array(_PARAMS))

    def sgd(t, grad, *ne):
        return opt_step_sgd(t("F32", *ne).set_param(), grad, t.array(np.float32([0.3, 0.1])))

    for op, build in ((OPT_STEP_ADAMW, adamw), (OPT_STEP_SGD, sgd)):
        for n in (1, 16, 33, 577):
            op.case(f"rows of {n}")(lambda t, f=build, n=n: f(t, t("F32", n, 4), n, 4))
        op.case("padded gradient")(lambda t, f=build: f(t, view_2d(t("F32", 50, 6), 34, 6, 200, 8), 34, 6))
        op.case("permuted gradient")(lambda t, f=build: f(t, permute(t("F32", 9, 3, 4), 0, 2, 1, 3), 9, 4, 3))
        op.case("transposed gradient")(lambda t, f=build: f(t, transpose(t("F32", 6, 34)), 34, 6))


_cases()
