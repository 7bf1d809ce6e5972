"""The gemma3 architecture: Gemma 3 text models.

Blocks with a norm before and after both halves, norms on the heads of queries and keys, a GEGLU feed-forward block, and
tied embeddings that are scaled on the way in. Five of six layers see a sliding window and have rotary frequencies of
their own; every sixth sees everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ggjit import ops
from ggjit.llm.context import DecodeGraph
from ggjit.llm.hparams import Hparams
from ggjit.llm.loader import Loader
from ggjit.models import architecture
from ggjit.models.layers import NEOX, Rope, attention, geglu, heads, linear, rms_norm
from ggjit.op import PREC_F32
from ggjit.tensor import Tensor

PATTERN = 6  # every sixth layer sees everything
LOCAL_FREQ_BASE = 10000.0


@dataclass
class Layer:
    """Weights of one block."""

    attn_norm: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    q_norm: Tensor
    k_norm: Tensor
    attn_post_norm: Tensor
    ffn_norm: Tensor
    ffn_gate: Tensor
    ffn_up: Tensor
    ffn_down: Tensor
    ffn_post_norm: Tensor


@architecture("gemma3")
class Gemma3:
    """Weights and graph."""

    def __init__(self, hparams: Hparams, loader: Loader) -> None:
        self.hparams = hparams
        self.rope = Rope.from_hparams(hparams, NEOX)
        local = hparams.number("rope.freq_base_swa", LOCAL_FREQ_BASE)
        self.rope_local = replace(self.rope, freq_base=local, freq_scale=1.0, ext_factor=0.0)
        self.window = hparams.count("attention.sliding_window")
        n_embd, n_vocab = hparams.n_embd, loader.n_vocab
        self.tok_embd = loader.rows("token_embd.weight", n_embd, n_vocab)
        self.output_norm = loader.vector("output_norm.weight", n_embd)
        self.output = loader.matrix("output.weight", n_embd, n_vocab, tied="token_embd.weight")
        self.layers = [self._layer(loader, il) for il in range(hparams.n_layer)]

    def _layer(self, loader: Loader, il: int) -> Layer:
        hp, blk = self.hparams, f"blk.{il}."
        n_embd, n_ff = hp.n_embd, hp.n_ff(il)
        n_q, n_k = hp.head_dim * hp.n_head(il), hp.head_dim * hp.n_head_kv(il)
        n_v, n_out = hp.head_dim_v * hp.n_head_kv(il), hp.head_dim_v * hp.n_head(il)
        return Layer(
            attn_norm=loader.vector(blk + "attn_norm.weight", n_embd),
            wq=loader.matrix(blk + "attn_q.weight", n_embd, n_q),
            wk=loader.matrix(blk + "attn_k.weight", n_embd, n_k),
            wv=loader.matrix(blk + "attn_v.weight", n_embd, n_v),
            wo=loader.matrix(blk + "attn_output.weight", n_out, n_embd),
            q_norm=loader.vector(blk + "attn_q_norm.weight", hp.head_dim),
            k_norm=loader.vector(blk + "attn_k_norm.weight", hp.head_dim),
            attn_post_norm=loader.vector(blk + "post_attention_norm.weight", n_embd),
            ffn_norm=loader.vector(blk + "ffn_norm.weight", n_embd),
            ffn_gate=loader.matrix(blk + "ffn_gate.weight", n_embd, n_ff),
            ffn_up=loader.matrix(blk + "ffn_up.weight", n_embd, n_ff),
            ffn_down=loader.matrix(blk + "ffn_down.weight", n_ff, n_embd),
            ffn_post_norm=loader.vector(blk + "post_ffw_norm.weight", n_embd),
        )

    def build(self, g: DecodeGraph) -> Tensor:
        """Write the graph of one ubatch; returns the logits, f32 [n_vocab, n_outputs]."""
        hp = self.hparams
        x = g.name(g.embed(self.tok_embd), "inp_embd")
        x = g.name(ops.scale(x, math.sqrt(hp.n_embd)), "inp_scaled")
        for il, layer in enumerate(self.layers):
            cur = g.name(rms_norm(x, layer.attn_norm, hp.eps), "attn_norm", il)
            cur = self._attention(g, cur, layer, il)
            if il == hp.n_layer - 1:  # only what is asked for goes on
                cur, x = g.select_outputs(cur), g.select_outputs(x)
            cur = g.name(rms_norm(cur, layer.attn_post_norm, hp.eps), "attn_post_norm", il)
            x = g.name(ops.add(cur, x), "sa_out", il)
            cur = g.name(rms_norm(x, layer.ffn_norm, hp.eps), "ffn_norm", il)
            cur = g.name(geglu(cur, layer.ffn_gate, layer.ffn_up, layer.ffn_down), "ffn_out", il)
            cur = g.name(rms_norm(cur, layer.ffn_post_norm, hp.eps), "ffn_post_norm", il)
            x = g.name(ops.add(cur, x), "l_out", il)
        cur = g.name(rms_norm(x, self.output_norm, hp.eps), "result_norm")
        return g.name(linear(cur, self.output, prec=PREC_F32), "result_output")

    def _attention(self, g: DecodeGraph, cur: Tensor, layer: Layer, il: int) -> Tensor:
        hp = self.hparams
        is_local = il % PATTERN != PATTERN - 1
        rope = self.rope_local if is_local else self.rope
        q = heads(linear(cur, layer.wq), hp.head_dim, hp.n_head(il))
        k = heads(linear(cur, layer.wk), hp.head_dim, hp.n_head_kv(il))
        v = g.name(heads(linear(cur, layer.wv, prec=PREC_F32), hp.head_dim_v, hp.n_head_kv(il)), "Vcur", il)
        g.compute_first(il, q, k, v)
        q = g.name(rope.apply(rms_norm(q, layer.q_norm, hp.eps), g.pos), "Qcur", il)
        k = g.name(rope.apply(rms_norm(k, layer.k_norm, hp.eps), g.pos), "Kcur", il)
        mask = g.window_mask(self.window) if is_local else g.mask
        out = g.name(attention(g, q, k, v, il, 1.0 / math.sqrt(hp.head_dim), mask), "kqv_out", il)
        return linear(out, layer.wo)
