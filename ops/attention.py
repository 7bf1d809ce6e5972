"""Fused attention: soft_max(q k^T * scale + mask) v in one pass over K and V, the scores never in memory.

The order of all float operations is fixed by the KV row alone (see `ops/lib/attention.py`), so a row of the result has
the same bits for any number of queries, threads and masked rows of padding. Two kernels compute it:

    lanes   16 queries of a head at a time (the heads of a group side by side where there are fewer queries); K and V
            are converted once a tile for all heads of the group; tiles that the mask closes are skipped
    rows    a few query rows: K and V are read as they lie, once for the heads of a group

A ladder on one Zen 4 core, f16 K and V, 9 heads of 64 on 3 KV heads:

| version | 512 causal tokens: share of the FMA peak | 1 token over 4096 rows: share of plain reads |
|---|---|---|
| one chain of d for a score, KV tiles of 32 | .75, but a token alone gets other bits | .5 to .67, other bits |
| 16 partial sums of d and a fixed tree, KV tiles of 16 | .70 to .75 | .43 |
| for a token four tiles together, memory asked for between them | the same | .57 to .65; with two threads 1.0 |

Long contexts with few queries are split among threads by chunks of 512 KV rows, merged in order by a second step.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, as_f32
from ggjit.jit import Kernel, lazy_module
from ggjit.op import PREC_F32, Op, unsupported
from ggjit.ops.mul_mat import mul_mat_gradients
from ggjit.ops.soft_max import alibi_slopes, mask_gradient, sinks_gradient
from ggjit.ops.views import permute
from ggjit.tensor import Tensor, new_node

frames = lazy_module("ggjit.ops.lib.attention_frame")
rows = lazy_module("ggjit.ops.lib.attention_rows")
lanes = lazy_module("ggjit.ops.lib.attention_lanes")

__all__ = ["flash_attn_back", "flash_attn_ext"]

FLASH_ATTN_EXT = Op(
    "flash_attn_ext",
    id=74,
    params=(("scale", "f32"), ("max_bias", "f32"), ("logit_softcap", "f32"), ("prec", "i32")),
    nmse=1e-11,
)
PRECISIONS = (0, PREC_F32)  # both accumulate in f32 here
PLAIN = ("F32", "F16", "BF16")
CLOSED = -1e30  # stands for -inf where a difference of two is taken
FEW = 17  # query rows of a KV head below which "rows" is faster: those of "lanes" would not fill their lanes


@checked
def flash_attn_ext(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None,
                   max_bias: float = 0.0, logit_softcap: float = 0.0, *, sinks: Tensor | None = None,
                   prec: int = 0) -> Tensor:  # fmt: skip
    """Attention of all heads: soft_max(softcap(q k^T * scale) + mask * slope) v.

    softcap(x) = logit_softcap * tanh(x / logit_softcap) if logit_softcap is not 0. The slope is 1, or by ALiBi with
    m = 2^floor(log2(n_head)): 2^(-max_bias / m * (h + 1)) for the first m heads, then
    2^(-max_bias / (2 m) * (2 (h - m) + 1)). A sink is one more score of its head, without a value.

    Args:
        q: f32 [n_embd_k, n_tokens, n_head, ne3], rows contiguous.
        k: f32, f16, bf16 or a quantized type [n_embd_k, n_kv, n_head_kv, ne3], rows contiguous; n_head is a multiple of
            n_head_kv. Dimension 3 may be a divisor of q's.
        v: [n_embd_v, n_kv, n_head_kv, ne3] of any of these types, not transposed.
        mask: None, or f16 [n_kv, >= n_tokens, m2, m3], contiguous; m2 divides n_head, m3 divides ne3.
        scale: of the scores, by default 1/sqrt(n_embd_k).
        max_bias: ALiBi's, 0 for none; needs a mask.
        logit_softcap: 0 for none.
        sinks: None, or f32 [n_head].
        prec: 0, or 10 for GGML_PREC_F32; sums are f32 in both cases.

    Returns:
        f32 [n_embd_v, n_head, n_tokens, ne3], contiguous. A row that is masked everywhere and has no sink is 0.

    Raises:
        ValueError: shapes or layouts that do not fit.
        TypeError: types that do not fit.

    Source: Dao, FlashAttention-2 (2023); ggml_flash_attn_ext.
    """
    _check_shapes(q, k, v)
    _check_mask(q, k, mask, max_bias)
    scale = max(q.ne[0], 1) ** -0.5 if scale is None else scale
    if sinks is not None and (
        sinks.type is not types.F32 or sinks.ne[0] != q.ne[2] or sinks.nrows != 1 or not sinks.is_contiguous
    ):
        raise ValueError(
            f"flash_attn_ext: sinks must be contiguous f32 [{q.ne[2]}], got {sinks.type.name}{list(sinks.ne)}"
        )
    if prec not in PRECISIONS:
        raise ValueError(f"flash_attn_ext: prec must be 0 or 10 (F32), got {prec}")
    ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    src = (q, k, v) if mask is None and sinks is None else (q, k, v, mask) if sinks is None else (q, k, v, mask, sinks)
    return new_node(FLASH_ATTN_EXT, types.F32, ne, src, (scale, max_bias, logit_softcap, prec))


@checked
def flash_attn_back(q: Tensor, k: Tensor, v: Tensor, d: Tensor, masked: bool) -> NoReturn:
    """Refuse, as ggml does: its op is of a flash attention that is no more, without scale, mask tensor and sinks.

    Gradients of `flash_attn_ext` are made of other ops by `Graph.build_backward_expand`.

    Args:
        q: queries.
        k: keys.
        v: values, transposed.
        d: gradient of the result.
        masked: was the attention causal.

    Raises:
        NotImplementedError: always.

    Source: ggml_flash_attn_back, which aborts.
    """
    raise NotImplementedError(
        "flash_attn_back: the gradient must be taken of flash_attn_ext, by Graph.build_backward_expand, got a call of "
        "ggml's op for its former flash attention"
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    names = f"('{q.name}', '{k.name}', '{v.name}')"
    if q.type is not types.F32:
        raise TypeError(f"flash_attn_ext: q must be F32, got {q.type.name} {names}")
    if q.ne[0] != k.ne[0] or k.ne[1] != v.ne[1] or k.ne[2:] != v.ne[2:]:
        raise ValueError(
            f"flash_attn_ext: q and k must have the same ne[0], k and v the same ne[1], ne[2], ne[3], "
            f"got {list(q.ne)}, {list(k.ne)}, {list(v.ne)} {names}"
        )
    if 0 in k.ne[2:] or q.ne[2] % k.ne[2] or q.ne[3] % k.ne[3]:
        raise ValueError(
            f"flash_attn_ext: k's heads and ne[3] must divide q's, got {list(q.ne)} and {list(k.ne)} {names}"
        )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.is_contiguous_rows:
            raise ValueError(f"flash_attn_ext: rows of {name} must be contiguous, got nb {list(t.nb)} ('{t.name}')")


def _check_mask(q: Tensor, k: Tensor, mask: Tensor | None, max_bias: float) -> None:
    if mask is None:
        if max_bias > 0:
            raise ValueError(f"flash_attn_ext: max_bias must be 0 without a mask, got {max_bias}")
        return
    if mask.type is not types.F16:
        raise TypeError(f"flash_attn_ext: mask must be F16, got {mask.type.name} ('{mask.name}')")
    fits = mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1] and 0 not in mask.ne[2:]
    if not fits or q.ne[2] % mask.ne[2] or q.ne[3] % mask.ne[3] or not mask.is_contiguous:
        raise ValueError(
            f"flash_attn_ext: mask must be contiguous, of {k.ne[1]} columns and at least {q.ne[1]} rows, with ne[2] "
            f"dividing {q.ne[2]}, ne[3] dividing {q.ne[3]}, got ne {list(mask.ne)}, nb {list(mask.nb)} ('{mask.name}')"
        )


# ---- reference ------------------------------------------------------------------------------------------------------


@FLASH_ATTN_EXT.reference
def _(node, q, k, v, mask=None, sinks=None):
    p = node.params
    n3, heads, n, _ = q.shape
    k, v = (np.repeat(np.repeat(x, heads // x.shape[1], 1), n3 // x.shape[0], 0) for x in (k, v))
    s = np.einsum("bhnd,bhkd->bhnk", q, k) * p.scale
    if p.logit_softcap:
        s = p.logit_softcap * np.tanh(s / p.logit_softcap)
    if mask is not None:
        m = np.tile(mask[:, :, :n], (n3 // mask.shape[0], heads // mask.shape[1], 1, 1))
        s = s + m * alibi_slopes(heads, p.max_bias)[:, None, None]
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(sinks.reshape(-1, 1, 1), (n3, heads, n, 1))], -1)
    top = s.max(-1, keepdims=True, initial=-1e300)
    w = np.exp(s - top)
    total = w.sum(-1, keepdims=True)
    w = np.divide(w, total, out=np.zeros_like(w), where=total > 0)
    return np.einsum("bhnk,bhkd->bnhd", w[..., : k.shape[2]], v)


# ---- kernels --------------------------------------------------------------------------------------------------------


def _plan(node: Tensor, nth: int) -> tuple[list[Kernel], int] | None:
    """The kernels that compute a node one after the other, and bytes of work; None if a type has no code."""
    q, k, v = (t for t in node.src[:3] if t is not None)
    if any(t.type.name not in PLAIN and t.type.quant is None for t in (k, v)):
        return None
    (dk, n), dv, n_kv, group = q.ne[:2], v.ne[0], k.ne[1], max(q.ne[2] // k.ne[2], 1)
    n_heads = k.ne[2] * q.ne[3]
    layout = rows if n * group < FEW else lanes
    kernels = [layout.make_kernel(dk, dv, k.type.name, v.type.name, group, node.params.logit_softcap != 0)]
    if frames.n_splits(layout.n_items(group, n_heads, n), n_kv) > 1:
        kernels.append(layout.make_merge(dk, dv, group))
    return kernels, layout.work_size(dk, dv, group, n, n_heads, n_kv, nth)


@FLASH_ATTN_EXT.kernel
def _(node):
    plan = _plan(node, 1)
    return None if plan is None else plan[0][0]


@FLASH_ATTN_EXT.lower
def _(low, node):
    plan = _plan(node, low.n_threads)
    if plan is None:
        raise NotImplementedError(unsupported(FLASH_ATTN_EXT, node))
    for step in plan[0]:
        low.emit(step, node, work=plan[1])


@FLASH_ATTN_EXT.flops
def _(node):
    q, k, v = node.src[:3]
    return 2 * (k.ne[0] + v.ne[0]) * k.ne[1] * q.ne[1] * q.ne[2] * q.ne[3]


# ---- cases ----------------------------------------------------------------------------------------------------------


def causal_mask(n: int, n_kv: int, n_past: int, n_rows: int = 0) -> np.ndarray:
    """f16 mask [max(n, n_rows), n_kv] of queries at positions n_past, n_past + 1, ... over KV rows 0, 1, ..."""
    mask = np.where(np.arange(n_kv) <= n_past + np.arange(max(n, n_rows))[:, None], 0.0, -np.inf)
    return mask.astype(np.float16)


def _case(
    name, n, n_kv, heads, heads_kv, dk, dv=None, kind="F16", n3=1, mask_rows=0, mask=True, sinks=False, **options
):
    @FLASH_ATTN_EXT.case(name)
    def _(t):
        q = permute(t("F32", dk, heads, n, n3), 0, 2, 1, 3)
        k = permute(t(kind, dk, heads_kv, n_kv, n3), 0, 2, 1, 3)
        v = permute(t(kind, dv or dk, heads_kv, n_kv, n3), 0, 2, 1, 3)
        m = t.array(causal_mask(n, n_kv, n_kv - n, mask_rows)) if mask else None
        return flash_attn_ext(q, k, v, m, 1.5 / dk**0.5, sinks=t("F32", heads) if sinks else None, **options)


_case("prompt", 40, 40, 6, 2, 64)
_case("prompt f32", 33, 45, 2, 2, 32, kind="F32")
_case("prompt bf16", 17, 64, 4, 1, 128, kind="BF16")
_case("prompt, padded mask", 20, 48, 3, 3, 40, 24, mask_rows=32, n3=2)
_case("no mask", 18, 21, 2, 2, 80, mask=False)
_case("a few queries", 5, 70, 8, 2, 64, max_bias=8.0)
_case("long, few queries", 6, 1100, 8, 1, 32, sinks=True)
_case("token", 1, 96, 6, 2, 64, sinks=True)
_case("token, long", 1, 1300, 3, 1, 64)
_case("token, odd sizes", 2, 37, 5, 1, 72, 20, kind="F32", max_bias=4.0)
_case("token, softcap", 1, 64, 7, 1, 256, logit_softcap=20.0)
_case("prompt, softcap", 16, 64, 2, 1, 256, logit_softcap=20.0, sinks=True)


# ---- gradient -------------------------------------------------------------------------------------------------------


def _weights(node: Tensor, z: Tensor, scale: float) -> Tensor:
    """soft_max of scores with the node's mask and sinks; rows that the mask closes are 0."""
    mask, sinks = (*node.src[3:], None, None)[:2]
    if mask is None:
        return ops.soft_max_ext(z, None, scale, sinks=sinks)
    bounded = ops.clamp(as_f32(mask), CLOSED, np.inf)
    y = ops.soft_max_ext(z, bounded, scale, node.params.max_bias, sinks=sinks)
    used = ops.view_4d(bounded, *z.ne[:2], *bounded.ne[2:], *bounded.nb[1:], 0)
    return ops.mul(y, ops.step(ops.scale_bias(as_contiguous(used), 1.0, -0.5 * CLOSED)))


def _scores(node: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """Scores before soft_max, what tanh gave if they are capped, and the factor that is still to come."""
    p, cap = node.params, node.params.logit_softcap
    z = ops.mul_mat(k, q)
    if not cap:
        return z, None, p.scale
    t = ops.tanh(ops.scale(z, p.scale / cap))
    return ops.scale(t, cap), t, 1.0


@FLASH_ATTN_EXT.backward
def _(node, grad, need):
    """The scores are computed again, as nodes: [n_kv, n_tokens, n_head, ne3]."""
    need = (*need, False, False)
    (q, k, v), (mask, sinks), p = node.src[:3], (*node.src[3:], None, None)[:2], node.params
    keys, values = as_f32(k), as_f32(v)
    z, t, scale = _scores(node, q, keys)
    y = _weights(node, z, scale)
    dout = ops.cont(ops.permute(grad, 0, 2, 1, 3))  # [n_embd_v, n_tokens, n_head, ne3]
    dy = ops.mul_mat(values, dout)
    dv, _ = mul_mat_gradients(values, dout, y, (need[2], False))
    dz = ops.soft_max_ext_back(dy, y, 1.0, 0.0)
    ds = ops.scale(dz, p.scale)
    if t is not None:
        ds = ops.mul(ds, ops.scale_bias(ops.mul(t, t), -1.0, 1.0))
    dk, dq = mul_mat_gradients(keys, q, ds, (need[1], need[0]))
    dmask = mask_gradient(mask, dz, p.max_bias) if need[3] else None
    dsinks = sinks_gradient(sinks, y, dy) if need[4] else None
    return (dq, dk, dv, dmask, dsinks)[: len(node.src)]
