"""GPT-2 without values: weights, KV cache and the graph of one evaluation, built as ggml's gpt-2 examples do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import ggjit as gg
from ggjit import types
from ggjit.graph import Graph
from ggjit.tensor import Tensor

MAX_NODES = 4096


@dataclass(frozen=True)
class Sizes:
    """Hyperparameters; by default those of GPT-2 small."""

    n_vocab: int = 50257
    n_ctx: int = 1024
    n_embd: int = 768
    n_head: int = 12
    n_layer: int = 12
    eps: float = 1e-5

    @property
    def n_weights(self) -> int:
        """Slots of the weights' context as the examples count them; three stay empty."""
        return 2 + 6 + 12 * self.n_layer


SMALL = Sizes()
TINY = Sizes(n_vocab=97, n_ctx=24, n_embd=32, n_head=4, n_layer=2)


@dataclass
class Gpt2:
    """The tensors that live longer than one evaluation."""

    sizes: Sizes
    weights: gg.Context
    cache: gg.Context
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def gpt2(wtype: gg.Type = types.F32, sizes: Sizes = SMALL) -> Gpt2:
    """Headers of all weights and of the KV cache, without data."""
    weights = gg.Context(gg.tensor_overhead() * sizes.n_weights, no_alloc=True)
    cache = gg.Context(gg.tensor_overhead() * 2, no_alloc=True)
    model = Gpt2(sizes, weights, cache)
    n_embd, f32 = sizes.n_embd, types.F32

    def add(name: str, type: gg.Type, *ne: int) -> None:
        model.tensors[name] = gg.new_tensor(type, *ne, name=name)

    with weights:
        add("model/ln_f/g", f32, n_embd)
        add("model/ln_f/b", f32, n_embd)
        add("model/wte", wtype, n_embd, sizes.n_vocab)
        add("model/wpe", f32, n_embd, sizes.n_ctx)
        add("model/lm_head", wtype, n_embd, sizes.n_vocab)
        for il in range(sizes.n_layer):
            for name in ("ln_1/g", "ln_1/b", "ln_2/g", "ln_2/b"):
                add(f"model/h{il}/{name}", f32, n_embd)
            for name, n_in, n_out in (
                ("attn/c_attn", 1, 3),
                ("attn/c_proj", 1, 1),
                ("mlp/c_fc", 1, 4),
                ("mlp/c_proj", 4, 1),
            ):
                add(f"model/h{il}/{name}/w", wtype, n_in * n_embd, n_out * n_embd)
                add(f"model/h{il}/{name}/b", f32, n_out * n_embd)
    with cache:
        for name in ("model/memory_k", "model/memory_v"):
            add(name, f32, sizes.n_layer * sizes.n_ctx * n_embd)
    return model


def graph_context(no_alloc: bool = True, data: int = 0) -> gg.Context:
    """An arena with room for the headers of one graph, as the examples size it, and for some data."""
    return gg.Context(gg.tensor_overhead() * MAX_NODES + gg.graph_overhead(MAX_NODES) + data, no_alloc=no_alloc)


def attention(graph: Graph, model: Gpt2, cur: Tensor, il: int, n_past: int, n: int) -> Tensor:
    """Self-attention of layer `il`: f32 [3 * n_embd, n] -> [n_embd, n]; writes the cache."""
    n_embd, n_head, n_ctx = model.sizes.n_embd, model.sizes.n_head, model.sizes.n_ctx
    d, length = n_embd // n_head, n_past + n
    parts = [gg.view_2d(cur, n_embd, n, cur.nb[1], 4 * n_embd * i).set_name(f"{'QKV'[i]}cur-{il}") for i in range(3)]
    caches = (model["model/memory_k"], model["model/memory_v"])
    for part, cache in zip(parts[1:], caches, strict=True):
        place = gg.view_1d(cache, n * n_embd, 4 * n_embd * (il * n_ctx + n_past))
        graph.build_forward_expand(gg.cpy(part, place))
    past = [
        gg.reshape_3d(gg.view_1d(cache, length * n_embd, 4 * n_embd * il * n_ctx), d, n_head, length)
        for cache in caches
    ]
    q = gg.permute(gg.cont_3d(parts[0], d, n_head, n), 0, 2, 1, 3).set_name(f"Q-{il}")
    k = gg.permute(past[0], 0, 2, 1, 3).set_name(f"K-{il}")
    kq = gg.mul_mat(k, q).set_name(f"KQ-{il}")
    kq = gg.soft_max(gg.diag_mask_inf(gg.scale(kq, 1.0 / math.sqrt(d)), n_past)).set_name(f"KQ_soft_max-{il}")
    v = gg.permute(past[1], 1, 2, 0, 3).set_name(f"V-{il}")
    v_trans = gg.cont_3d(v, length, d, n_head).set_name(f"V_trans-{il}")
    kqv = gg.mul_mat(v_trans, kq).set_name(f"KQV-{il}")
    merged = gg.permute(kqv, 0, 2, 1, 3).set_name(f"KQV_merged-{il}")
    return gg.cont_2d(merged, n_embd, n).set_name(f"KQV_out-{il}")


def gpt2_graph(model: Gpt2, n_past: int, n: int) -> Graph:
    """The graph of `n` new tokens after `n_past`, in the innermost context."""
    graph = Graph(MAX_NODES)

    def norm(x: Tensor, name: str) -> Tensor:
        return gg.add(gg.mul(gg.norm(x, model.sizes.eps), model[f"{name}/g"]), model[f"{name}/b"])

    def linear(x: Tensor, name: str) -> Tensor:
        return gg.add(gg.mul_mat(model[f"{name}/w"], x), model[f"{name}/b"])

    embd = gg.new_tensor(types.I32, n, name="embd").set_input()
    position = gg.new_tensor(types.I32, n, name="position").set_input()
    x = gg.add(gg.get_rows(model["model/wte"], embd), gg.get_rows(model["model/wpe"], position))
    for il in range(model.sizes.n_layer):
        h = f"model/h{il}"
        cur = attention(graph, model, linear(norm(x, f"{h}/ln_1"), f"{h}/attn/c_attn"), il, n_past, n)
        x = gg.add(linear(cur, f"{h}/attn/c_proj"), x)
        cur = gg.gelu(linear(norm(x, f"{h}/ln_2"), f"{h}/mlp/c_fc"))
        x = gg.add(linear(cur, f"{h}/mlp/c_proj"), x)
    x = gg.mul_mat(model["model/lm_head"], norm(x, "model/ln_f"))
    return graph.build_forward_expand(x.set_name("logits").set_output())
