"""The flat KV cache, and the graph over it that all five programs build.

The cache is one f32 tensor for keys and one for values, n_layer * n_ctx rows of n_embd. A run writes its rows behind
those of the past by `cpy` into a view, and reads all of them by a second view of the same bytes:

    layer il          row 0                 n_past          n_past + N           n_ctx
                      | keys of the past    | written now   | free               |
                      |<-- K, V: read by the products  ---->|

Source: ggml's examples/gpt-2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggjit import ops, types
from ggjit.context import Context, tensor_overhead
from ggjit.graph import Graph, graph_overhead
from ggjit.models.gpt2 import Attend, Gpt2, Sizes
from ggjit.tensor import Tensor, new_tensor

MAX_NODES = 4096
TOKENS, POSITIONS, LOGITS = "inp_tokens", "inp_pos", "result_output"


@dataclass
class Cache:
    """Keys and values, f32 [n_layer * n_ctx * n_embd] each."""

    k: Tensor
    v: Tensor

    @classmethod
    def declare(cls, sizes: Sizes) -> Cache:
        """Make the headers in the innermost context."""
        n = sizes.n_layer * sizes.n_ctx * sizes.n_embd
        return cls(new_tensor(types.F32, n, name="memory_k"), new_tensor(types.F32, n, name="memory_v"))


def graph_context() -> Context:
    """An arena for the headers of one graph: 345168 bytes of it are used by GPT-2 small."""
    return Context(tensor_overhead() * MAX_NODES + graph_overhead(MAX_NODES), no_alloc=True)


def cached_attention(
    graph: Graph, sizes: Sizes, cache: Cache, first: int, n_kv: int, hide: Callable[[Tensor], Tensor]
) -> Attend:
    """Attention over the flat cache by two products.

    Args:
        graph: gets the writes to the cache.
        sizes: of the model.
        cache: keys and values.
        first: row of the cache that the first new token goes to.
        n_kv: rows that are read.
        hide: puts -inf on scores that must not count, f32 [n_kv, n, n_head].
    """
    n_embd, n_head, d, n_ctx = sizes.n_embd, sizes.n_head, sizes.head_dim, sizes.n_ctx
    row = 4 * n_embd

    def attend(qkv: Tensor, il: int) -> Tensor:
        n = qkv.ne[1]
        q, k, v = (ops.view_2d(qkv, n_embd, n, qkv.nb[1], row * i).set_name(f"{'QKV'[i]}cur-{il}") for i in range(3))
        for new, memory in ((k, cache.k), (v, cache.v)):
            place = ops.view_1d(memory, n * n_embd, row * (il * n_ctx + first))
            graph.build_forward_expand(ops.cpy(new, place))
        past_k, past_v = (
            ops.reshape_3d(ops.view_1d(memory, n_kv * n_embd, row * il * n_ctx), d, n_head, n_kv)
            for memory in (cache.k, cache.v)
        )
        q = ops.permute(ops.cont_3d(q, d, n_head, n), 0, 2, 1, 3).set_name(f"Q-{il}")  # [d, n, n_head]
        k = ops.permute(past_k, 0, 2, 1, 3).set_name(f"K-{il}")  # [d, n_kv, n_head]
        kq = ops.mul_mat(k, q).set_name(f"KQ-{il}")  # [n_kv, n, n_head]
        kq = ops.soft_max(hide(ops.scale(kq, 1.0 / math.sqrt(d)))).set_name(f"KQ_soft_max-{il}")
        v = ops.permute(past_v, 1, 2, 0, 3).set_name(f"V-{il}")  # [n_kv, d, n_head], transposed in memory
        v = ops.cont_3d(v, n_kv, d, n_head).set_name(f"V_trans-{il}")  # as mul_mat needs it
        kqv = ops.mul_mat(v, kq).set_name(f"KQV-{il}")  # [d, n, n_head]
        return ops.cont_2d(ops.permute(kqv, 0, 2, 1, 3).set_name(f"KQV_merged-{il}"), n_embd, n)

    return attend


def inputs(n: int) -> tuple[Tensor, Tensor]:
    """Ids and positions of n tokens, i32 [n], in the innermost context."""
    return (
        new_tensor(types.I32, n, name=TOKENS).set_input(),
        new_tensor(types.I32, n, name=POSITIONS).set_input(),
    )


def gpt2_graph(model: Gpt2, cache: Cache, n_past: int, n: int) -> Graph:
    """The graph of n new tokens of one sequence behind `n_past`, in the innermost context.

    Raises:
        ValueError: they do not fit the context.
    """
    if n_past < 0 or n < 1 or n_past + n > model.sizes.n_ctx:  # rows of the next layer come behind the last one
        raise ValueError(f"gpt2: tokens must fit the context of {model.sizes.n_ctx}, got {n} behind {n_past}")
    graph = Graph(MAX_NODES)
    tokens, pos = inputs(n)
    attend = cached_attention(graph, model.sizes, cache, n_past, n_past + n, lambda kq: ops.diag_mask_inf(kq, n_past))
    return graph.build_forward_expand(model.forward(tokens, pos, attend).set_output())


def worst_case(model: Gpt2, cache: Cache, n_batch: int) -> Graph:
    """The largest graph of runs of at most `n_batch` tokens: a full batch at the end of the context."""
    n = min(model.sizes.n_ctx, n_batch)
    return gpt2_graph(model, cache, model.sizes.n_ctx - n, n)


def positions(n_past: int, n: int) -> NDArray[np.int32]:
    """Positions of n tokens behind `n_past`."""
    return np.arange(n_past, n_past + n, dtype=np.int32)
