"""GPT-2 small without values: weights, KV cache and the graph of one evaluation, built as ggml's gpt-2 examples do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import ggjit as gg
from ggjit import types
from ggjit.graph import Graph
from ggjit.tensor import Tensor

N_VOCAB, N_CTX, N_EMBD, N_HEAD, N_LAYER, EPS = 50257, 1024, 768, 12, 12, 1e-5
MAX_NODES = 4096
N_WEIGHTS = 2 + 6 + 12 * N_LAYER  # room for: 149 are used


@dataclass
class Gpt2:
    """The tensors that live longer than one evaluation."""

    weights: gg.Context
    cache: gg.Context
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def gpt2(wtype: gg.Type = types.F32) -> Gpt2:
    """Headers of all weights and of the KV cache, without data."""
    weights = gg.Context(gg.tensor_overhead() * N_WEIGHTS, no_alloc=True)
    cache = gg.Context(gg.tensor_overhead() * 2, no_alloc=True)
    model = Gpt2(weights, cache)

    def add(name: str, type: gg.Type, *ne: int) -> None:
        model.tensors[name] = gg.new_tensor(type, *ne, name=name)

    with weights:
        add("model/ln_f/g", types.F32, N_EMBD)
        add("model/ln_f/b", types.F32, N_EMBD)
        add("model/wte", wtype, N_EMBD, N_VOCAB)
        add("model/wpe", types.F32, N_EMBD, N_CTX)
        add("model/lm_head", wtype, N_EMBD, N_VOCAB)
        for il in range(N_LAYER):
            for name, type, *ne in (
                ("ln_1/g", types.F32, N_EMBD), ("ln_1/b", types.F32, N_EMBD),
                ("ln_2/g", types.F32, N_EMBD), ("ln_2/b", types.F32, N_EMBD),
                ("attn/c_attn/w", wtype, N_EMBD, 3 * N_EMBD), ("attn/c_attn/b", types.F32, 3 * N_EMBD),
                ("attn/c_proj/w", wtype, N_EMBD, N_EMBD), ("attn/c_proj/b", types.F32, N_EMBD),
                ("mlp/c_fc/w", wtype, N_EMBD, 4 * N_EMBD), ("mlp/c_fc/b", types.F32, 4 * N_EMBD),
                ("mlp/c_proj/w", wtype, 4 * N_EMBD, N_EMBD), ("mlp/c_proj/b", types.F32, N_EMBD),
            ):  # fmt: skip
                add(f"model/h{il}/{name}", type, *ne)
    with cache:
        for name in ("model/memory_k", "model/memory_v"):
            add(name, types.F32, N_LAYER * N_CTX * N_EMBD)
    return model


def graph_context() -> gg.Context:
    """An arena with room for the headers of one graph, as the examples size it."""
    return gg.Context(gg.tensor_overhead() * MAX_NODES + gg.graph_overhead(MAX_NODES), no_alloc=True)


def attention(graph: Graph, model: Gpt2, cur: Tensor, il: int, n_past: int, n: int) -> Tensor:
    """Self-attention of layer `il`: f32 [3 * n_embd, n] -> [n_embd, n]; writes the cache."""
    d, length = N_EMBD // N_HEAD, n_past + n
    parts = [gg.view_2d(cur, N_EMBD, n, cur.nb[1], 4 * N_EMBD * i).set_name(f"{'QKV'[i]}cur-{il}") for i in range(3)]
    for part, name in zip(parts[1:], ("model/memory_k", "model/memory_v"), strict=True):
        place = gg.view_1d(model[name], n * N_EMBD, 4 * N_EMBD * (il * N_CTX + n_past))
        graph.build_forward_expand(gg.cpy(part, place))
    past = [
        gg.reshape_3d(gg.view_1d(model[name], length * N_EMBD, 4 * N_EMBD * il * N_CTX), d, N_HEAD, length)
        for name in ("model/memory_k", "model/memory_v")
    ]
    q = gg.permute(gg.cont_3d(parts[0], d, N_HEAD, n), 0, 2, 1, 3).set_name(f"Q-{il}")
    k = gg.permute(past[0], 0, 2, 1, 3).set_name(f"K-{il}")
    kq = gg.mul_mat(k, q).set_name(f"KQ-{il}")
    kq = gg.soft_max(gg.diag_mask_inf(gg.scale(kq, 1.0 / math.sqrt(d)), n_past))
    v = gg.permute(past[1], 1, 2, 0, 3).set_name(f"V-{il}")
    v_trans = gg.cont_3d(v, length, d, N_HEAD).set_name(f"V_trans-{il}")
    kqv = gg.mul_mat(v_trans, kq).set_name(f"KQV-{il}")
    return gg.cont_2d(gg.permute(kqv, 0, 2, 1, 3).set_name(f"KQV_merged-{il}"), N_EMBD, n)


def gpt2_graph(model: Gpt2, n_past: int, n: int) -> Graph:
    """The graph of `n` new tokens after `n_past`, in the innermost context."""
    graph = Graph(MAX_NODES)

    def norm(x: Tensor, name: str) -> Tensor:
        return gg.add(gg.mul(gg.norm(x, EPS), model[f"{name}/g"]), model[f"{name}/b"])

    def linear(x: Tensor, name: str) -> Tensor:
        return gg.add(gg.mul_mat(model[f"{name}/w"], x), model[f"{name}/b"])

    embd = gg.new_tensor(types.I32, n, name="embd").set_input()
    position = gg.new_tensor(types.I32, n, name="position").set_input()
    x = gg.add(gg.get_rows(model["model/wte"], embd), gg.get_rows(model["model/wpe"], position))
    for il in range(N_LAYER):
        h = f"model/h{il}"
        cur = attention(graph, model, linear(norm(x, f"{h}/ln_1"), f"{h}/attn/c_attn"), il, n_past, n)
        x = gg.add(linear(cur, f"{h}/attn/c_proj"), x)
        cur = gg.gelu(linear(norm(x, f"{h}/ln_2"), f"{h}/mlp/c_fc"))
        x = gg.add(linear(cur, f"{h}/mlp/c_proj"), x)
    x = gg.mul_mat(model["model/lm_head"], norm(x, "model/ln_f"))
    return graph.build_forward_expand(x.set_name("logits").set_output())
