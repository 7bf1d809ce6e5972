"""Blocks that architectures share. Shapes are in ggml order; n is the number of tokens of the ubatch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggjit import ops
from ggjit.tensor import Tensor

if TYPE_CHECKING:
    from ggjit.llm.context import DecodeGraph
    from ggjit.llm.hparams import Hparams

NORMAL, NEOX = 0, 2  # rope modes: pairs of neighbours, or of the first and second half


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotary positions of a model.

    Attributes:
        n_dims: elements of a head that rotate.
        mode: NORMAL or NEOX.
        n_ctx_orig: context length before scaling.
        freq_base: base of the frequencies.
        freq_scale: factor on positions, 1 / the scaling factor.
        ext_factor: 1 for YaRN, else 0.
        attn_factor: factor on the result.
    """

    n_dims: int
    mode: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float

    @classmethod
    def from_hparams(cls, hp: Hparams, mode: int = NORMAL) -> Rope:
        """Read them from metadata.

        Raises:
            GgufError: the scaling type is unknown, its factor or the base is not positive, or an odd number of elements
                rotates
                or exceeds a head.
        """
        if hp.n_rot % 2 or not 0 < hp.n_rot <= hp.head_dim:
            raise hp.fail(
                "rope.dimension_count",
                f"must be even and at most {hp.head_dim}, the elements of a head, got {hp.n_rot}",
            )
        kind = hp.get(
            "rope.scaling.type", "linear" if "rope.scaling.factor" in hp or "rope.scale_linear" in hp else "none"
        )
        if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
            raise hp.fail("rope.scaling.type", f"must be none, linear or yarn, got {kind!r}")
        factor = hp.number("rope.scaling.factor", hp.number("rope.scale_linear", 1.0))
        if factor < 0:
            raise hp.fail("rope.scaling.factor", f"must be positive, got {factor}")
        if hp.number("rope.freq_base", 10000.0) <= 0:
            raise hp.fail("rope.freq_base", f"must be positive, got {hp.number('rope.freq_base')}")
        return cls(
            n_dims=hp.n_rot,
            mode=mode,
            n_ctx_orig=hp.count("rope.scaling.original_context_length", hp.n_ctx_train),
            freq_base=hp.number("rope.freq_base", 10000.0),
            freq_scale=1.0 / factor if factor and kind != "none" else 1.0,
            ext_factor=1.0 if kind == "yarn" else 0.0,
            attn_factor=hp.number("rope.scaling.attn_factor", 1.0),
        )

    def apply(self, x: Tensor, pos: Tensor, factors: Tensor | None = None) -> Tensor:
        """Rotate heads by their tokens' positions: f32 [head_dim, n_head, n]."""
        return ops.rope_ext(
            x, pos, factors, self.n_dims, self.mode, self.n_ctx_orig, self.freq_base, self.freq_scale, self.ext_factor,
            self.attn_factor, 32.0, 1.0,
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows by their root mean square and scale by a weight, f32 [n_embd, n]."""
    return ops.mul(ops.rms_norm(x, eps), weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, prec: int | None = None) -> Tensor:
    """W x + b: [n_in, n] -> [n_out, n].

    Keys (but those of gemma3, which are normalised), values and logits have prec F32 (see `ggjit.ops.mul_mat`): they
    carry half of the noise of activations of 8 bits, but few of a prompt's multiplications, and a token's work is
    reading weights.
    """
    y = ops.mul_mat(weight, x, prec=prec)
    return y if bias is None else ops.add(y, bias)


def heads(x: Tensor, head_dim: int, n_head: int, first: int = 0) -> Tensor:
    """Heads of a projection as a view: [n_out, n] -> [head_dim, n_head, n], from element `first` of each row."""
    esz = x.type.type_size
    return ops.view_3d(x, head_dim, n_head, x.ne[1], head_dim * esz, x.nb[1], first * esz)


def attention(
    g: DecodeGraph, q: Tensor, k: Tensor, v: Tensor, il: int, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Write keys and values to the cache, attend over it, and join the heads.

    Args:
        g: the graph.
        q: f32 [head_dim, n_head, n].
        k: f32 [head_dim, n_head_kv, n].
        v: f32 [head_dim_v, n_head_kv, n].
        il: layer.
        scale: of the scores.
        mask: by default that of causal attention.

    Returns:
        f32 [head_dim_v * n_head, n].
    """
    k_cache, v_cache = g.store_kv(il, k, v)
    out = ops.flash_attn_ext(
        ops.permute(q, 0, 2, 1, 3), k_cache, v_cache, g.mask if mask is None else mask, scale
    )  # [head_dim_v, n_head, n]
    return ops.reshape_2d(out, out.ne[0] * out.ne[1], out.ne[2])


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Feed-forward block: down (silu(gate x) * up x)."""
    return ops.mul_mat(down, ops.swiglu_split(ops.mul_mat(gate, x), ops.mul_mat(up, x)))


def geglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Feed-forward block: down (gelu(gate x) * up x)."""
    return ops.mul_mat(down, ops.geglu_split(ops.mul_mat(gate, x), ops.mul_mat(up, x)))


MIN_WEIGHT_SUM = 6.103515625e-5  # the smallest normal f16: chosen weights are never divided by less


def mixture(
    g: DecodeGraph, x: Tensor, gate_inp: Tensor, gate: Tensor, up: Tensor, down: Tensor, n_used: int, il: int
) -> Tensor:
    """Feed-forward block of experts: each token's best few, weighted by their share of the router's softmax.

    Args:
        g: the graph.
        x: f32 [n_embd, n].
        gate_inp: the router, [n_embd, n_expert].
        gate: of all experts, [n_embd, n_ff, n_expert].
        up: [n_embd, n_ff, n_expert].
        down: [n_ff, n_embd, n_expert].
        n_used: experts of a token.
        il: layer.

    Returns:
        f32 [n_embd, n].

    Source: Mixtral of experts (2024); llama.cpp's build_moe_ffn.
    """
    n_embd, n, n_expert = x.ne[0], x.ne[1], gate_inp.ne[1]
    logits = g.name(ops.mul_mat(gate_inp, x), "ffn_moe_logits", il)  # [n_expert, n]
    probs = g.name(ops.soft_max(logits), "ffn_moe_probs", il)
    order = ops.argsort(probs, 1)  # descending
    ids = g.name(ops.view_2d(order, n_used, n, order.nb[1], 0), "ffn_moe_topk", il)  # [n_used, n]
    weights = ops.get_rows(ops.reshape_3d(probs, 1, n_expert, n), ids)  # [1, n_used, n]
    weights = ops.reshape_2d(weights, n_used, n)
    weights = ops.div(weights, ops.clamp(ops.sum_rows(weights), MIN_WEIGHT_SUM, math.inf))
    weights = g.name(ops.reshape_3d(weights, 1, n_used, n), "ffn_moe_weights_norm", il)
    x = ops.reshape_3d(x, n_embd, 1, n)
    x = ops.swiglu_split(ops.mul_mat_id(gate, x, ids), ops.mul_mat_id(up, x, ids))  # [n_ff, n_used, n]
    x = ops.mul(ops.mul_mat_id(down, x, ids), weights)  # [n_embd, n_used, n]
    parts = [ops.view_2d(x, n_embd, n, x.nb[2], u * x.nb[1]) for u in range(n_used)]
    return functools.reduce(ops.add, parts) if n_used > 1 else ops.reshape_2d(x, n_embd, n)
