"""The llama architecture: Llama 1 to 3, Mistral, Mixtral, SmolLM and all that share their graph.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward block, or a mixture of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ggjit import ops
from ggjit.llm.context import DecodeGraph
from ggjit.llm.hparams import Hparams
from ggjit.llm.loader import Loader
from ggjit.models import architecture
from ggjit.models.layers import Rope, attention, heads, linear, mixture, rms_norm, swiglu
from ggjit.op import PREC_F32
from ggjit.tensor import Tensor


@dataclass
class Layer:
    """Weights of one block."""

    attn_norm: Tensor
    wqkv: Tensor | None  # q, k and v in one matrix, or each of its own
    wq: Tensor | None
    wk: Tensor | None
    wv: Tensor | None
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    ffn_norm: Tensor
    ffn_gate_inp: Tensor | None  # the router, where there are experts: the next three hold all of them
    ffn_gate: Tensor
    ffn_up: Tensor
    ffn_down: Tensor


@architecture("llama")
class Llama:
    """Weights and graph."""

    def __init__(self, hparams: Hparams, loader: Loader) -> None:
        self.hparams, self.rope = hparams, Rope.from_hparams(hparams)
        n_embd, n_vocab = hparams.n_embd, loader.n_vocab
        self.tok_embd = loader.rows("token_embd.weight", n_embd, n_vocab)
        self.output_norm = loader.vector("output_norm.weight", n_embd)
        self.output = loader.matrix("output.weight", n_embd, n_vocab, tied="token_embd.weight")
        self.rope_freqs = loader.optional(loader.vector, "rope_freqs.weight", hparams.n_rot // 2)
        self.layers = [self._layer(loader, il) for il in range(hparams.n_layer)]

    def _layer(self, loader: Loader, il: int) -> Layer:
        hp, blk = self.hparams, f"blk.{il}."
        n_embd, n_q = hp.n_embd, hp.head_dim * hp.n_head(il)
        n_k, n_v = hp.head_dim * hp.n_head_kv(il), hp.head_dim_v * hp.n_head_kv(il)
        n_out, n_ff = hp.head_dim_v * hp.n_head(il), hp.n_ff(il)
        wqkv = loader.optional(loader.matrix, blk + "attn_qkv.weight", n_embd, n_q + n_k + n_v)
        split = wqkv is None
        n_expert = (hp.n_expert,) if hp.n_expert else ()
        s = "_exps" if n_expert else ""
        return Layer(
            attn_norm=loader.vector(blk + "attn_norm.weight", n_embd),
            wqkv=wqkv,
            wq=loader.matrix(blk + "attn_q.weight", n_embd, n_q) if split else None,
            wk=loader.matrix(blk + "attn_k.weight", n_embd, n_k) if split else None,
            wv=loader.matrix(blk + "attn_v.weight", n_embd, n_v) if split else None,
            bq=loader.optional(loader.vector, blk + "attn_q.bias", n_q),
            bk=loader.optional(loader.vector, blk + "attn_k.bias", n_k),
            bv=loader.optional(loader.vector, blk + "attn_v.bias", n_v),
            wo=loader.matrix(blk + "attn_output.weight", n_out, n_embd),
            bo=loader.optional(loader.vector, blk + "attn_output.bias", n_embd),
            ffn_norm=loader.vector(blk + "ffn_norm.weight", n_embd),
            ffn_gate_inp=loader.matrix(blk + "ffn_gate_inp.weight", n_embd, *n_expert) if n_expert else None,
            ffn_gate=loader.matrix(f"{blk}ffn_gate{s}.weight", n_embd, n_ff, *n_expert),
            ffn_up=loader.matrix(f"{blk}ffn_up{s}.weight", n_embd, n_ff, *n_expert),
            ffn_down=loader.matrix(f"{blk}ffn_down{s}.weight", n_ff, n_embd, *n_expert),
        )

    def build(self, g: DecodeGraph) -> Tensor:
        """Write the graph of one ubatch; returns the logits, f32 [n_vocab, n_outputs]."""
        hp = self.hparams
        x = g.name(g.embed(self.tok_embd), "inp_embd")
        for il, layer in enumerate(self.layers):
            cur = g.name(rms_norm(x, layer.attn_norm, hp.eps), "attn_norm", il)
            cur = self._attention(g, cur, layer, il)
            if il == hp.n_layer - 1:  # only what is asked for goes on
                cur, x = g.select_outputs(cur), g.select_outputs(x)
            x = g.name(ops.add(cur, x), "ffn_inp", il)
            cur = g.name(rms_norm(x, layer.ffn_norm, hp.eps), "ffn_norm", il)
            cur = self._feed_forward(g, cur, layer, il)
            x = g.name(ops.add(cur, x), "l_out", il)
        cur = g.name(rms_norm(x, self.output_norm, hp.eps), "result_norm")
        return g.name(linear(cur, self.output, prec=PREC_F32), "result_output")

    def _feed_forward(self, g: DecodeGraph, cur: Tensor, layer: Layer, il: int) -> Tensor:
        matrices = layer.ffn_gate, layer.ffn_up, layer.ffn_down
        if layer.ffn_gate_inp is None:
            return g.name(swiglu(cur, *matrices), "ffn_out", il)
        n_used = self.hparams.n_expert_used
        return g.name(mixture(g, cur, layer.ffn_gate_inp, *matrices, n_used, il), "ffn_moe_out", il)

    def _attention(self, g: DecodeGraph, cur: Tensor, layer: Layer, il: int) -> Tensor:
        hp = self.hparams
        n_head, n_kv = hp.n_head(il), hp.n_head_kv(il)
        if layer.wqkv is not None:
            qkv = linear(cur, layer.wqkv)
            n_q, n_k = hp.head_dim * n_head, hp.head_dim * n_kv
            q, k = heads(qkv, hp.head_dim, n_head), heads(qkv, hp.head_dim, n_kv, n_q)
            v = heads(qkv, hp.head_dim_v, n_kv, n_q + n_k)
        else:
            assert layer.wq is not None and layer.wk is not None and layer.wv is not None
            q = heads(linear(cur, layer.wq, layer.bq), hp.head_dim, n_head)
            k = heads(linear(cur, layer.wk, layer.bk, PREC_F32), hp.head_dim, n_kv)
            v = heads(linear(cur, layer.wv, layer.bv, PREC_F32), hp.head_dim_v, n_kv)
        g.compute_first(il, q, k, v)
        q = g.name(self.rope.apply(q, g.pos, self.rope_freqs), "Qcur", il)
        k = g.name(self.rope.apply(k, g.pos, self.rope_freqs), "Kcur", il)
        v = g.name(v, "Vcur", il)
        out = g.name(attention(g, q, k, v, il, 1.0 / math.sqrt(hp.head_dim)), "kqv_out", il)
        return g.name(linear(out, layer.wo, layer.bo), "attn_out", il)
