"""GPT-2 without values: headers of its weights and KV cache as the programs in `ggjit.examples.gpt2` make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ggjit as gg
from ggjit import types
from ggjit.examples.gpt2.graph import Cache, gpt2_graph
from ggjit.examples.gpt2.main_backend import n_tensors
from ggjit.examples.gpt2.model_file import Headers
from ggjit.graph import Graph
from ggjit.models.gpt2 import Gpt2, Sizes
from ggjit.tensor import Tensor

SMALL, TINY = Sizes(), Sizes(n_ctx=24, n_embd=32, n_head=4, n_layer=2, n_ff=128)
N_VOCAB = {SMALL: 50257, TINY: 97}
MATRICES = ("token_embd.weight", "output.weight", "qkv.weight", "attn_output.weight", "up.weight", "down.weight")


def f32(name: str) -> gg.Type:
    return types.F32


def f16_matrices(name: str) -> gg.Type:
    """Types as ggml's converter writes them with f16 matrices."""
    return types.F16 if name.endswith(MATRICES) else types.F32


@dataclass
class Gpt2Headers:
    """The tensors that live longer than one evaluation, and their contexts."""

    weights: gg.Context
    model: Gpt2
    kv: gg.Context
    cache: Cache

    @property
    def sizes(self) -> Sizes:
        return self.model.sizes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and cache by name."""
        return {t.name: t for context in (self.weights, self.kv) for t in context.tensors.values()}

    def graph(self, n_past: int, n: int) -> Graph:
        """The graph of `n` new tokens after `n_past`, in the innermost context."""
        return gpt2_graph(self.model, self.cache, n_past, n)


def gpt2(type_of: Callable[[str], gg.Type] = f32, sizes: Sizes = SMALL) -> Gpt2Headers:
    """Headers of all weights and of the KV cache, without data."""
    weights = gg.Context(gg.tensor_overhead() * n_tensors(sizes), no_alloc=True)
    with weights:
        model = Gpt2(sizes, Headers(N_VOCAB[sizes], type_of))
    kv = gg.Context(gg.tensor_overhead() * 2, no_alloc=True)
    with kv:
        cache = Cache.declare(sizes)
    return Gpt2Headers(weights, model, kv, cache)
