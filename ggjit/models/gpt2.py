"""The gpt2 architecture.

Pre-norm blocks of multi-head attention and a GELU feed-forward block, with a bias everywhere; positions are learned and
added to the embedding. All but the attention's way to the cache is in `Gpt2.forward`: the runtime attends by
`flash_attn_ext` over its cells, the programs in `ggjit.examples.gpt2` by separate products over a flat cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ggjit import ops
from ggjit.models import architecture
from ggjit.models.layers import attention, heads, linear
from ggjit.op import PREC_F32
from ggjit.tensor import Tensor

if TYPE_CHECKING:
    from ggjit.llm.context import DecodeGraph
    from ggjit.llm.hparams import Hparams

Attend = Callable[[Tensor, int], Tensor]  # q, k and v of a layer, f32 [3 * n_embd, n] -> f32 [n_embd, n]
Select = Callable[[Tensor], Tensor]


class Declarer(Protocol):
    """Where the headers of the weights come from: a `Loader`, or a program's own."""

    @property
    def n_vocab(self) -> int:
        """Rows of the token embedding."""

    def vector(self, name: str, *ne: int) -> Tensor:
        """A bias or norm."""

    def rows(self, name: str, *ne: int) -> Tensor:
        """A matrix of which single rows are read."""

    def matrix(self, name: str, *ne: int, tied: str | None = None) -> Tensor:
        """A matrix for mul_mat; the values of `tied` if the file has none of that name."""


@dataclass(frozen=True)
class Sizes:
    """Hyperparameters; by default those of GPT-2 small, whose vocabulary has 50257 tokens."""

    n_ctx: int = 1024
    n_embd: int = 768
    n_head: int = 12
    n_layer: int = 12
    n_ff: int = 3072
    eps: float = 1e-5

    @classmethod
    def from_hparams(cls, hp: Hparams) -> Sizes:
        """Read them from metadata.

        Raises:
            GgufError: a value is missing or cannot be.
        """
        eps = hp.number("attention.layer_norm_epsilon")
        if eps < 0:
            raise hp.fail("attention.layer_norm_epsilon", f"must not be negative, got {eps}")
        if hp.head_dim * hp.n_head(0) != hp.n_embd or hp.head_dim_v != hp.head_dim:
            raise hp.fail("attention.head_count", f"must divide {hp.n_embd} into heads, got {hp.n_head(0)}")
        return cls(hp.n_ctx_train, hp.n_embd, hp.n_head(0), hp.n_layer, hp.n_ff(0), eps)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.n_embd // self.n_head


@dataclass
class Layer:
    """Weights of one block."""

    attn_norm: Tensor
    attn_norm_b: Tensor
    ffn_norm: Tensor
    ffn_norm_b: Tensor
    wqkv: Tensor
    bqkv: Tensor
    wo: Tensor
    bo: Tensor
    ffn_up: Tensor
    ffn_up_b: Tensor
    ffn_down: Tensor
    ffn_down_b: Tensor


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise rows to mean 0 and variance 1, then scale and shift: f32 [n_embd, n]."""
    return ops.add(ops.mul(ops.norm(x, eps), weight), bias)


@architecture("gpt2")
class Gpt2:
    """Weights and graph.

    Args:
        hparams: of the file, or sizes.
        loader: makes the headers of the weights.
    """

    def __init__(self, hparams: Hparams | Sizes, loader: Declarer) -> None:
        self.sizes = s = hparams if isinstance(hparams, Sizes) else Sizes.from_hparams(hparams)
        self.output_norm = loader.vector("output_norm.weight", s.n_embd)
        self.output_norm_b = loader.vector("output_norm.bias", s.n_embd)
        self.tok_embd = loader.rows("token_embd.weight", s.n_embd, loader.n_vocab)
        self.pos_embd = loader.rows("position_embd.weight", s.n_embd, s.n_ctx)
        self.output = loader.matrix("output.weight", s.n_embd, loader.n_vocab, tied="token_embd.weight")
        self.layers = [self._layer(loader, f"blk.{il}.") for il in range(s.n_layer)]

    def _layer(self, loader: Declarer, blk: str) -> Layer:
        n_embd, n_ff = self.sizes.n_embd, self.sizes.n_ff
        return Layer(
            attn_norm=loader.vector(blk + "attn_norm.weight", n_embd),
            attn_norm_b=loader.vector(blk + "attn_norm.bias", n_embd),
            ffn_norm=loader.vector(blk + "ffn_norm.weight", n_embd),
            ffn_norm_b=loader.vector(blk + "ffn_norm.bias", n_embd),
            wqkv=loader.matrix(blk + "attn_qkv.weight", n_embd, 3 * n_embd),
            bqkv=loader.vector(blk + "attn_qkv.bias", 3 * n_embd),
            wo=loader.matrix(blk + "attn_output.weight", n_embd, n_embd),
            bo=loader.vector(blk + "attn_output.bias", n_embd),
            ffn_up=loader.matrix(blk + "ffn_up.weight", n_embd, n_ff),
            ffn_up_b=loader.vector(blk + "ffn_up.bias", n_ff),
            ffn_down=loader.matrix(blk + "ffn_down.weight", n_ff, n_embd),
            ffn_down_b=loader.vector(blk + "ffn_down.bias", n_embd),
        )

    def forward(self, tokens: Tensor, pos: Tensor, attend: Attend, select: Select = lambda x: x) -> Tensor:
        """Write the graph of n tokens.

        Args:
            tokens: ids, i32 [n].
            pos: positions, i32 [n].
            attend: the attention of a layer.
            select: the rows whose logits are wanted, by default all.

        Returns:
            The logits, f32 [n_vocab, n_outputs].
        """
        eps = self.sizes.eps
        embd = ops.get_rows(self.tok_embd, tokens).set_name("inp_embd")
        x = ops.add(embd, ops.get_rows(self.pos_embd, pos).set_name("pos_embd")).set_name("inpL")
        for il, layer in enumerate(self.layers):
            cur = norm(x, layer.attn_norm, layer.attn_norm_b, eps).set_name(f"attn_norm-{il}")
            cur = attend(linear(cur, layer.wqkv, layer.bqkv).set_name(f"wqkv-{il}"), il).set_name(f"kqv_out-{il}")
            cur = linear(cur, layer.wo, layer.bo).set_name(f"attn_out-{il}")
            if il == self.sizes.n_layer - 1:  # only what is asked for goes on
                cur, x = select(cur), select(x)
            x = ops.add(cur, x).set_name(f"ffn_inp-{il}")
            cur = norm(x, layer.ffn_norm, layer.ffn_norm_b, eps).set_name(f"ffn_norm-{il}")
            cur = ops.gelu(linear(cur, layer.ffn_up, layer.ffn_up_b)).set_name(f"ffn_gelu-{il}")
            cur = linear(cur, layer.ffn_down, layer.ffn_down_b).set_name(f"ffn_out-{il}")
            x = ops.add(cur, x).set_name(f"l_out-{il}")
        x = norm(x, self.output_norm, self.output_norm_b, eps).set_name("result_norm")
        return ops.mul_mat(self.output, x, prec=PREC_F32).set_name("result_output")

    def build(self, g: DecodeGraph) -> Tensor:
        """Write the graph of one ubatch; returns the logits, f32 [n_vocab, n_outputs]."""
        d, n_head, n_embd = self.sizes.head_dim, self.sizes.n_head, self.sizes.n_embd

        def attend(qkv: Tensor, il: int) -> Tensor:
            q, k, v = (heads(qkv, d, n_head, i * n_embd).set_name(f"{'QKV'[i]}cur-{il}") for i in range(3))
            return attention(g, q, k, v, il, 1.0 / math.sqrt(d))

        return self.forward(g.tokens, g.pos, attend, g.select_outputs)
