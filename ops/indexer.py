"""lightning_indexer: the scores by which DeepSeek's sparse attention chooses its keys.

    dst[j, t] = sum over heads h of w[h, t] relu(q[:, h, t] . k[:, j]) + mask[j, t]

Each key is decoded once and meets all queries; masked pairs are not computed. A product has 16 partial sums and a fixed
tree; heads are added in order.

Source: DeepSeek-AI, DeepSeek-V3.2 (2025).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, as_f32, unbroadcast
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import require, require_type
from ggjit.tensor import Tensor, new_node

state_rows = lazy_module("ggjit.ops.lib.state_rows")
convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")

__all__ = ["lightning_indexer"]

LIGHTNING_INDEXER = Op("lightning_indexer", id=87, nmse=1e-6)
LARGE = 1e5  # beyond all f16


@checked
def lightning_indexer(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Scores by which sparse attention chooses its keys.

    Args:
        q: f32 [n, n_heads, n_tokens, n_streams], rows contiguous.
        k: f32, f16, bf16 or a quantized type [n, 1, n_kv, n_streams], rows contiguous.
        weights: f32 [n_heads, n_tokens, 1, n_streams], any strides.
        mask: f16 [n_kv, n_tokens, 1, m], any strides; m divides n_streams.

    Returns:
        f32 [n_kv, n_tokens, 1, n_streams].

    Raises:
        ValueError: sizes or layouts do not fit.
        TypeError: types do not fit.

    Source: ggml_lightning_indexer.
    """
    where, (n, heads, tokens, streams) = "lightning_indexer", q.ne
    for name, t in (("q", q), ("weights", weights)):
        require_type(where, name, t, types.F32)
    require_type(where, "mask", mask, types.F16)
    like_q = k.ne[0] == n and k.ne[1] == 1 and k.ne[3] == streams
    require(where, like_q, "k must have ne [n, 1, n_kv, n_streams] of q", k, q)
    require(where, weights.ne == (heads, tokens, 1, streams), "weights must have a value for each head and token of q",
            weights, q)  # fmt: skip
    masks = mask.ne[:3] == (k.ne[2], tokens, 1) and mask.ne[3] > 0 and streams % mask.ne[3] == 0
    require(where, masks, "mask must have ne [n_kv, n_tokens, 1, m], m dividing the streams", mask, k, q)
    for name, t in (("q", q), ("k", k)):
        require(where, t.is_contiguous_rows, f"rows of {name} must be contiguous", t)
    return new_node(LIGHTNING_INDEXER, types.F32, (k.ne[2], tokens, 1, streams), (q, k, weights, mask))


@LIGHTNING_INDEXER.reference
def _(node, q, k, w, mask):
    scores = np.maximum(np.einsum("sthd,sjd->stjh", q, k[:, :, 0]), 0)
    return np.einsum("stjh,sth->stj", scores, w[:, 0])[:, None] + np.tile(mask, (q.shape[0] // mask.shape[0], 1, 1, 1))


# --- kernels ---------------------------------------------------------------------------------------------------------


@functools.cache
def make_lightning_indexer(decode):
    """Kernel; `decode`: helper that converts a row of keys to f32."""

    @kernel
    def lightning_indexer_f32(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        n, heads, tokens, n_kv = src0_ne[0], src0_ne[1], src0_ne[2], src1_ne[2]
        key = COUNTER_LINE + 4 * n * ith
        total = n_kv * src1_ne[3]
        for unit in range(total * ith // nth, total * (ith + 1) // nth):
            j, stream = unit % n_kv, unit // n_kv
            decode(work, key, src1, j * src1_nb[2] + stream * src1_nb[3], n, work, key)
            for t in range(tokens):
                masked = j * src3_nb[0] + t * src3_nb[1] + stream % src3_ne[3] * src3_nb[3]
                score = memory.load_f16(src3, masked)
                if score != np.float32(-np.inf):
                    for h in range(heads):
                        q = h * src0_nb[1] + t * src0_nb[2] + stream * src0_nb[3]
                        product = state_rows.dot(src0, q, work, key, n)
                        w = h * src2_nb[0] + t * src2_nb[1] + stream * src2_nb[3]
                        score += memory.load_f32(src2, w) * (product if product > 0 else np.float32(0))
                memory.store_f32(dst, 4 * j + t * dst_nb[1] + stream * dst_nb[3], score)

    return lightning_indexer_f32


@LIGHTNING_INDEXER.kernel
def _(node):
    decode = convert.row(node.src[1].type, types.F32)
    return None if decode is None else make_lightning_indexer(decode)


@LIGHTNING_INDEXER.work_size
def _(node, nth):
    return 4 * node.src[0].ne[0] * nth


@LIGHTNING_INDEXER.flops
def _(node):
    return 2 * node.nelements * node.src[0].ne[0] * node.src[0].ne[1]


# --- backward --------------------------------------------------------------------------------------------------------


@LIGHTNING_INDEXER.backward
def _(node, grad, need):
    q, k, w, mask = node.src
    n, heads, tokens, streams = q.ne
    n_kv = k.ne[2]
    keys = ops.reshape_4d(as_contiguous(as_f32(k)), n, n_kv, 1, streams)
    queries = ops.reshape_4d(as_contiguous(q), n, heads * tokens, 1, streams)
    scores = ops.reshape_4d(ops.mul_mat(keys, queries), n_kv, heads, tokens, streams)
    # What is masked is -inf, whatever the scores are.
    grad = ops.mul(grad, ops.step(ops.scale_bias(as_contiguous(as_f32(mask)), 1.0, LARGE)))
    g = ops.reshape_4d(grad, n_kv, 1, tokens, streams)
    dw = ops.reshape(ops.sum_rows(ops.mul(ops.relu(scores), g)), w)
    by_head = ops.mul(ops.step(scores), ops.reshape_4d(as_contiguous(w), 1, heads, tokens, streams))
    ds = ops.reshape_4d(ops.mul(by_head, g), n_kv, heads * tokens, 1, streams)
    dq = ops.reshape(ops.out_prod(keys, ops.transpose(ds)), q)
    dk = ops.reshape(ops.out_prod(queries, ds), k) if need[1] else None
    return dq, dk, dw, unbroadcast(grad, mask) if need[3] else None


# --- cases -----------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose

    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
        LIGHTNING_INDEXER.case(kind)(
            lambda t, k=kind: lightning_indexer(
                t("F32", 32, 3, 4, 2), t(k, 32, 1, 17, 2), t("F32", 3, 4, 1, 2), t("F16", 17, 4, 1, 1)
            )
        )
    LIGHTNING_INDEXER.case("masked, permuted")(
        lambda t: lightning_indexer(
            permute(t("F32", 40, 3, 4), 0, 2, 1, 3),
            t("F32", 40, 1, 5),
            transpose(t("F32", 3, 4)),
            t.array(np.where(t.rng.random((1, 1, 3, 5)) < 0.5, -np.inf, 0.5).astype(np.float16)),
        )
    )


_cases()
