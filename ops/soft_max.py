"""soft_max over dimension 0, with scale, mask, ALiBi slopes and attention sinks; diag_mask_inf.

    y = exp(x * scale + mask * slope - m) / (sum + exp(sink - m)),   m the largest of the row and its sink

Three passes over a row: the largest score, exponentials and sum, scaling. The first one runs along with the second of
the row before, so that memory is read while exponentials are computed: .45 of plain copy became .7. The sum has
32 partial sums, element i going to lane i % 16 of accumulator i // 16 % 2, and a fixed tree adds them, so masked
columns at the end of a row change no bit. A row belongs to one thread.

Scores that are scaled, and masked by `add` or `diag_mask_inf`, before a plain soft_max are one step with it.

512 rows of 512 f32 take 0.5 ns an element on one Zen 4 core; exp is most of it (17 vector instructions for 16 values).
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import unbroadcast, zeros
from ggjit.fusion import Fused
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.binary import ADD
from ggjit.ops.scale import SCALE
from ggjit.tensor import Tensor, from_numpy, new_node, view_tensor

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["diag_mask_inf", "soft_max", "soft_max_ext"]

SOFT_MAX = Op("soft_max", id=46, params=(("scale", "f32"), ("max_bias", "f32")), inplace=True, nmse=1e-12)
DIAG_MASK_INF = Op("diag_mask_inf", id=44, params=(("n_past", "i32"),), inplace=True, nmse=0.0)


# ---- soft_max -------------------------------------------------------------------------------------------------------


@checked
def soft_max(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Turn each row into weights that sum to 1: exp(a - max) / sum.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], contiguous.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is not contiguous.

    Source: ggml_soft_max.
    """
    return soft_max_ext(a, None, inplace=inplace)


@checked
def soft_max_ext(a: Tensor, mask: Tensor | None, scale: float = 1.0, max_bias: float = 0.0, *,
                 sinks: Tensor | None = None, inplace: bool = False) -> Tensor:  # fmt: skip
    """soft_max of a * scale + mask * slope, as attention needs it.

    The slope is 1, or by ALiBi that of head i2 (see `flash_attn_ext`). A sink is one more score of its head, which
    takes weight but is not in the result.

    Args:
        a: f32 [n_kv, n_tokens, n_head, ne3], contiguous.
        mask: None, or f16 or f32 [n_kv, >= n_tokens, m2, m3], contiguous; m2 divides n_head, m3 divides ne3.
        scale: of the scores.
        max_bias: ALiBi's, 0 for none; needs a mask.
        sinks: None, or f32 [n_head].
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`. A row that is masked everywhere is NaN, as in ggml.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes or layouts that do not fit.

    Source: ggml_soft_max_ext, ggml_soft_max_add_sinks.
    """
    if a.type is not types.F32:
        raise TypeError(f"soft_max: a must be F32, got {a.type.name} ('{a.name}')")
    if not a.is_contiguous:
        raise ValueError(
            f"soft_max: a must be contiguous, got ne {list(a.ne)}, nb {list(a.nb)}; use cont first ('{a.name}')"
        )
    _check_mask(a, mask, max_bias)
    if sinks is not None and (sinks.type is not types.F32 or sinks.ne != (a.ne[2], 1, 1, 1) or not sinks.is_contiguous):
        raise ValueError(
            f"soft_max: sinks must be contiguous f32 [{a.ne[2]}], "
            f"got {sinks.type.name}{list(sinks.ne)} ('{sinks.name}')"
        )
    src = (a, mask, sinks) if sinks is not None else (a, mask) if mask is not None else (a,)
    params = (scale, max_bias)
    return view_tensor(SOFT_MAX, a, src, params) if inplace else new_node(SOFT_MAX, a.type, a.ne, src, params)


def _check_mask(a: Tensor, mask: Tensor | None, max_bias: float) -> None:
    if mask is None:
        if max_bias > 0:
            raise ValueError(f"soft_max: max_bias must be 0 without a mask, got {max_bias} ('{a.name}')")
        return
    if mask.type not in (types.F16, types.F32):
        raise TypeError(f"soft_max: mask must be F16 or F32, got {mask.type.name} ('{mask.name}')")
    fits = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and 0 not in mask.ne[2:]
    if not fits or a.ne[2] % mask.ne[2] or a.ne[3] % mask.ne[3] or not mask.is_contiguous:
        raise ValueError(
            f"soft_max: mask must be contiguous, of {a.ne[0]} columns and at least {a.ne[1]} rows, with ne[2] dividing "
            f"{a.ne[2]} and ne[3] dividing {a.ne[3]}, "
            f"got ne {list(mask.ne)}, nb {list(mask.nb)} ('{a.name}', '{mask.name}')"
        )


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """Slope of each head, float64 [n_head]; ones if max_bias is 0.

    With m = 2^floor(log2(n_head)): 2^(-max_bias / m * (h + 1)) for the first m heads, then
    2^(-max_bias / (2 m) * (2 (h - m) + 1)).
    """
    if max_bias <= 0:
        return np.ones(n_head)
    m = 1 << (n_head.bit_length() - 1)
    h = np.arange(n_head)
    return 2.0 ** np.where(h < m, -max_bias / m * (h + 1), -max_bias / 2 / m * (2 * (h - m) + 1))


@SOFT_MAX.reference
def _(node, a, mask=None, sinks=None):
    p = node.params
    y = a * p.scale
    if mask is not None:
        m = np.tile(mask[:, :, : y.shape[2]], (y.shape[0] // mask.shape[0], y.shape[1] // mask.shape[1], 1, 1))
        y = y + m * alibi_slopes(y.shape[1], p.max_bias)[:, None, None]
    if not y.size:
        return y
    top = y.max(-1, keepdims=True)
    sink = None if sinks is None else sinks.reshape(-1, 1, 1)
    if sink is not None:
        top = np.maximum(top, sink)
    with np.errstate(invalid="ignore"):
        w = np.exp(y - top)
    return w / (w.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top)))


@jitted
def head_slope(op_params, n_head, h):
    """ALiBi slope of a head; 1 without."""
    max_bias = memory.f32_from_bits(op_params[1])
    if max_bias <= 0:
        return np.float32(1)
    m = 1
    while 2 * m <= n_head:
        m *= 2
    steps = 2 * (h + 1) if h < m else 2 * (h - m) + 1
    return vec.exp(max_bias / np.float32(2 * m) * np.float32(-0.6931471805599453) * np.float32(steps))


@functools.cache
def make_score(mask_kind):
    """Jitted (src, at, mask, by, scale, slope, n) -> scaled and masked scores of 16 elements, or the first n < 16."""
    load_mask = vec.loader(mask_kind or "F32")
    load_mask_first = vec.loader_first(mask_kind or "F32")
    is_masked = mask_kind is not None

    @jitted
    def score(src, at, mask, by, scale, slope, n):
        if n < 16:
            y = vec.load_first(src, at, n) * scale
            return vec.fma(load_mask_first(mask, by, n), slope, y) if is_masked else y
        y = vec.load(src, at) * scale
        return vec.fma(load_mask(mask, by), slope, y) if is_masked else y

    return score


@functools.cache
def make_top(mask_kind):
    """Jitted (src, at, mask, by, n, scale, slope) -> largest score of a row."""
    score, size = make_score(mask_kind), 2 if mask_kind == "F16" else 4

    @jitted
    def largest(src, at, mask, by, n, scale, slope):
        top, sixteen = vec.splat(np.float32(-np.inf)), np.int64(16)
        for i in range(0, n - 15, 16):
            top = vec.max(score(src, at + 4 * i, mask, by + size * i, scale, slope, sixteen), top)
        rest = n % 16
        if rest:
            i = n - rest
            y = score(src, at + 4 * i, mask, by + size * i, scale, slope, rest)
            top = vec.max(vec.select(vec.first(rest), y, np.float32(-np.inf)), top)
        return vec.lane_max(top)

    return largest


@functools.cache
def make_exp_row(mask_kind, ahead):
    """Jitted (dst, to, src, at, mask, by, n, scale, slope, top, after, by_after, slope_after) -> (sum, largest).

    dst = exp(score - top) of a row and their sum; if `ahead`, the largest score of the next row, at `after`: it comes
    from memory while this row is computed.
    """
    score, size = make_score(mask_kind), 2 if mask_kind == "F16" else 4

    @jitted
    def exp_row(dst, to, src, at, mask, by, n, scale, slope, top, after, by_after, slope_after):
        even, odd, minus, sixteen = vec.zero(), vec.zero(), np.float32(-np.inf), np.int64(16)
        largest = vec.splat(minus)
        for i in range(0, n - 31, 32):
            j, k, m = 4 * i, size * i, size * (i + 16)
            if ahead:
                largest = vec.max(score(src, after + j, mask, by_after + k, scale, slope_after, sixteen), largest)
                largest = vec.max(score(src, after + j + 64, mask, by_after + m, scale, slope_after, sixteen), largest)
            x = vec.exp(score(src, at + j, mask, by + k, scale, slope, sixteen) - top)
            y = vec.exp(score(src, at + j + 64, mask, by + m, scale, slope, sixteen) - top)
            vec.store(dst, to + j, x)
            vec.store(dst, to + j + 64, y)
            even, odd = even + x, odd + y
        rest = n % 32
        if rest:
            i, more = n - rest, rest - 16
            j, k, m = 4 * i, size * i, size * (i + 16)
            if ahead:
                x = score(src, after + j, mask, by_after + k, scale, slope_after, rest)
                y = score(src, after + j + 64, mask, by_after + m, scale, slope_after, more)
                largest = vec.max(vec.select(vec.first(rest), x, minus), largest)
                largest = vec.max(vec.select(vec.first(more), y, minus), largest)
            x = vec.exp(score(src, at + j, mask, by + k, scale, slope, rest) - top)
            y = vec.exp(score(src, at + j + 64, mask, by + m, scale, slope, more) - top)
            vec.store_first(dst, to + j, x, rest)
            vec.store_first(dst, to + j + 64, y, more)
            even = even + vec.select(vec.first(rest), x, np.float32(0))
            odd = odd + vec.select(vec.first(more), y, np.float32(0))
        return vec.lane_sum(even + odd), vec.lane_max(largest)

    return exp_row


@jitted
def scale_row(dst, to, n, scale):
    """A row times a number, in place."""
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.load(dst, to + 4 * i) * scale)
    rest = n % 16
    if rest:
        at = to + 4 * (n - rest)
        vec.store_first(dst, at, vec.load_first(dst, at, rest) * scale, rest)


@functools.cache
def make_soft_max(mask_kind):
    """Kernel for masks of type F16 or F32, or none (None)."""
    largest, exp_row, is_masked = make_top(mask_kind), make_exp_row(mask_kind, True), mask_kind is not None

    @jitted
    def mask_of(src1_ne, src1_nb, op_params, n_head, i1, i2, i3):
        """Offset of the mask's row and slope of the head."""
        if not is_masked:
            return np.int64(0), np.float32(1)
        return rows.repeated(src1_ne, src1_nb, i1, i2, i3), head_slope(op_params, n_head, i2)

    @kernel(n_optional=2)
    def soft_max(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
                 op_params, work, ith, nth):  # fmt: skip
        scale, n = memory.f32_from_bits(op_params[0]), dst_ne[0]
        first, last = rows.whole(dst_ne, ith, nth)
        if first == last:
            return
        i1, i2, i3 = rows.position(dst_ne, first)
        after = rows.offset(src0_nb, i1, i2, i3)
        by_after, slope_after = mask_of(src1_ne, src1_nb, op_params, dst_ne[2], i1, i2, i3)
        top_after = largest(src0, after, src1, by_after, n, scale, slope_after)
        for k in range(first, last):
            to, at, by, slope, head = rows.offset(dst_nb, i1, i2, i3), after, by_after, slope_after, i2
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
            if k + 1 < last:
                after = rows.offset(src0_nb, i1, i2, i3)
                by_after, slope_after = mask_of(src1_ne, src1_nb, op_params, dst_ne[2], i1, i2, i3)
            top, rest = top_after, np.float32(0)
            if src2_ne[0] > 0:
                sink = memory.load_f32(src2, 4 * head)
                top = vec.max(sink, top)
                rest = vec.exp(sink - top)
            total, top_after = exp_row(dst, to, src0, at, src1, by, n, scale, slope, top, after, by_after, slope_after)
            scale_row(dst, to, n, np.float32(1) / (total + rest))

    return soft_max


@SOFT_MAX.kernel
def _(node):
    mask = node.src[1] if len(node.src) > 1 else None
    return make_soft_max(None if mask is None else mask.type.name)


@SOFT_MAX.flops
def _(node):
    return 5 * node.nelements


@SOFT_MAX.case("rows")
def _(t):
    return soft_max(t("F32", 75, 5, 3, low=-8, high=8))


@SOFT_MAX.case("in place")
def _(t):
    return soft_max(t("F32", 31, 4), inplace=True)


@SOFT_MAX.case("f16 mask, slopes, sinks")
def _(t):
    mask = t("F16", 50, 8, 1, 2)
    return soft_max_ext(t("F32", 50, 7, 6, 2, low=-4, high=4), mask, 0.4, 8.0, sinks=t("F32", 6, low=0, high=5))


@SOFT_MAX.case("f32 mask by head")
def _(t):
    mask = np.where(t.rng.random((2, 5, 33)) < 0.3, -np.inf, 0.5).astype(np.float32)
    return soft_max_ext(t("F32", 33, 5, 4), t.array(mask), 2.0)


@SOFT_MAX.case("masked rows")
def _(t):
    mask = np.triu(np.full((20, 40), -np.inf, np.float16), 2)
    mask[3] = -np.inf
    return soft_max_ext(t("F32", 40, 20, 2), t.array(mask), 1.0)


@SOFT_MAX.case("empty")
def _(t):
    return soft_max(t("F32", 8, 0))


# ---- diag_mask_inf --------------------------------------------------------------------------------------------------


@checked
def diag_mask_inf(a: Tensor, n_past: int, *, inplace: bool = False) -> Tensor:
    """Put -inf where the column is beyond n_past plus the row: the causal mask of scores.

    Args:
        a: f32 [n_kv, n_tokens, ne2, ne3], contiguous.
        n_past: columns that the first row sees besides its own.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: `a` is not f32.
        ValueError: `a` is not contiguous, or n_past is negative.

    Source: ggml_diag_mask_inf.
    """
    if a.type is not types.F32:
        raise TypeError(f"diag_mask_inf: a must be F32, got {a.type.name} ('{a.name}')")
    if not a.is_contiguous or n_past < 0:
        raise ValueError(
            f"diag_mask_inf: a must be contiguous and n_past not negative, "
            f"got nb {list(a.nb)}, n_past {n_past} ('{a.name}')"
        )
    if inplace:
        return view_tensor(DIAG_MASK_INF, a, (a,), (n_past,))
    return new_node(DIAG_MASK_INF, a.type, a.ne, (a,), (n_past,))


@DIAG_MASK_INF.reference
def _(node, a):
    rows, columns = a.shape[-2:]
    return np.where(np.arange(columns) > node.params.n_past + np.arange(rows)[:, None], -np.inf, a)


@kernel
def diag_mask_inf_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Keep the first n_past + i1 + 1 elements of row i1, then -inf."""
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    n, minus = dst_ne[0], vec.splat(np.float32(-np.inf))
    for _ in range(first, last):
        to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
        kept = op_params[0] + i1 + 1
        for i in range(0, n, 16):
            x = vec.load_first(src0, at + 4 * i, n - i)
            vec.store_first(dst, to + 4 * i, vec.select(vec.first(kept - i), x, minus), n - i)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@DIAG_MASK_INF.kernel
def _(node):
    return diag_mask_inf_f32


@DIAG_MASK_INF.case("square")
def _(t):
    return diag_mask_inf(t("F32", 33, 33, 2), 0)


@DIAG_MASK_INF.case("with past, in place")
def _(t):
    return diag_mask_inf(t("F32", 40, 7, 2, 3), 20, inplace=True)


# ---- fusion with what makes the scores -------------------------------------------------------------------------------


@functools.cache
def make_soft_max_causal():
    """Kernel for scores of which row i1 sees op_params[2] + i1 + 1 columns; the others get no weight."""
    largest, exp_row = make_top(None), make_exp_row(None, False)

    @kernel
    def soft_max_causal(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        scale, one, none = memory.f32_from_bits(op_params[0]), np.float32(1), np.int64(0)
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            n = op_params[2] + i1 + 1
            n = n if n < dst_ne[0] else dst_ne[0]
            top = largest(src0, at, src0, none, n, scale, one)
            total, _ = exp_row(dst, to, src0, at, src0, none, n, scale, one, top, at, none, one)
            scale_row(dst, to, n, one / total)
            for i in range(n, dst_ne[0], 16):
                vec.store_first(dst, to + 4 * i, vec.zero(), dst_ne[0] - i)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return soft_max_causal


def _fuse(match, node):
    """scale, then add of a mask or diag_mask_inf, then soft_max; one of the first two may be missing."""
    chain, scale, mask, n_past, t, x = [], 1.0, None, None, node, node.src[0]
    while t is not None and t.op is not SOFT_MAX:
        chain.append(t)
        if t.type is not types.F32 or not t.is_contiguous:
            return None
        if t.op is SCALE and len(chain) == 1 and t.params.b == 0:
            scale = t.params.s
        elif t.op is ADD and mask is None and t.src[0] is (chain[-2] if chain[1:] else x):
            mask = t.src[1]
            if mask.type is not types.F32 or not mask.is_contiguous_rows or mask.ne[0] != t.ne[0]:
                return None
        elif t.op is DIAG_MASK_INF and mask is None:
            n_past = t.params.n_past
            mask = t
        else:
            return None
        t = match.reader(t)
    if t is None or len(t.src) > 1 or t.params.scale != 1.0 or not x.is_contiguous:
        return None

    def emit(low):
        params = struct.pack("<ffi52x", scale, 0.0, n_past or 0)
        if n_past is not None:
            low.emit(make_soft_max_causal(), t, src=(x,), params=params)
        else:
            low.emit(make_soft_max(None if mask is None else "F32"), t, src=(x, mask, None), params=params)

    reads = (x,) if mask is None or n_past is not None else (x, mask)
    return Fused((*chain, t), reads, (x,), emit)


for _op in (SCALE, ADD, DIAG_MASK_INF):
    _op.fusion(_fuse)


@SCALE.fused_case("soft_max of scaled scores")
def _(t):
    return soft_max(ops.scale(t("F32", 75, 5, 3, low=-8, high=8), 0.3))


@SCALE.fused_case("soft_max of scaled, masked scores")
def _(t):
    mask = np.where(t.rng.random((2, 5, 33)) < 0.3, -np.inf, 0.5).astype(np.float32)
    return soft_max(ops.add(ops.scale(t("F32", 33, 5, 4), 0.7), t.array(mask)))


@SCALE.fused_case("soft_max of scaled, causal scores, in place")
def _(t):
    x = ops.scale(t("F32", 70, 9, 3), 2.0)  # in the planner's memory
    return soft_max(diag_mask_inf(ops.scale(x, 0.25, inplace=True), 41, inplace=True), inplace=True)


@ADD.fused_case("soft_max of masked scores")
def _(t):
    return soft_max(ops.add(t("F32", 40, 6, 2, low=-4, high=4), t("F32", 40, 6)))


@DIAG_MASK_INF.fused_case("soft_max of causal scores")
def _(t):
    return soft_max(diag_mask_inf(t("F32", 33, 33, 2, low=-4, high=4), 0))


# ---- gradients ------------------------------------------------------------------------------------------------------


def mask_gradient(mask: Tensor, dz: Tensor, max_bias: float) -> Tensor:
    """Gradient of a mask from that of the scores z = x + mask * slope.

    Args:
        mask: [n_kv, >= n_tokens, m2, m3].
        dz: f32 [n_kv, n_tokens, n_head, ne3].
        max_bias: of ALiBi.

    Returns:
        f32, the shape of `mask`.
    """
    if max_bias > 0:
        slopes = alibi_slopes(dz.ne[2], max_bias).astype(np.float32)
        dz = ops.mul(dz, from_numpy(slopes.reshape(1, -1, 1, 1)))
    n_kv, n = dz.ne[:2]
    used = ops.view_4d(mask, n_kv, n, *mask.ne[2:], *mask.nb[1:], 0)
    grad = unbroadcast(dz, used)
    rest = mask.ne[1] - n
    return grad if not rest else ops.concat(grad, zeros(n_kv, rest, *mask.ne[2:]), 1)


def sinks_gradient(sinks: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """Gradient of sinks: -(1 - sum y) * sum(grad * y), added over the rows of each head.

    Args:
        sinks: [n_head].
        y: f32 [n_kv, n_tokens, n_head, ne3], the weights.
        grad: f32 of this shape, their gradient.

    Returns:
        f32 [n_head].
    """
    taken = ops.scale_bias(ops.sum_rows(y), 1.0, -1.0)
    each = ops.mul(taken, ops.sum_rows(ops.mul(grad, y)))  # [1, n_tokens, n_head, ne3]
    return ops.reshape(unbroadcast(each, ops.view_4d(each, 1, 1, each.ne[2], 1, *each.nb[1:], 0)), sinks)


@SOFT_MAX.backward
def _(node, grad, need):
    p = node.params
    made = [None] * len(node.src)
    if need[0]:
        made[0] = ops.soft_max_ext_back(grad, node, p.scale, 0.0)
    if len(need) > 1 and need[1]:
        made[1] = mask_gradient(node.src[1], ops.soft_max_ext_back(grad, node, 1.0, 0.0), p.max_bias)
    if len(need) > 2 and need[2]:
        made[2] = sinks_gradient(node.src[2], node, grad)
    return made


@DIAG_MASK_INF.backward
def _(node, grad, need):
    return (ops.diag_mask_zero(grad, node.params.n_past),)
