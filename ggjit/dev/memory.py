"""The page `ggjit/docs/memory.md`: what the planner makes of model graphs.

The graphs are those of real models, at their sizes, but without weights: the files that the decoder's graphs come from
are all hole, and nothing is compiled or run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ggjit import ops, types
from ggjit.alloc import GraphAllocator, TensorAllocator
from ggjit.backend import Buffer, host_buffer_type
from ggjit.context import Context, tensor_overhead
from ggjit.examples.gpt2.graph import Cache, graph_context, worst_case
from ggjit.examples.gpt2.main_backend import n_tensors
from ggjit.examples.gpt2.model_file import Headers
from ggjit.gguf import GgufWriter
from ggjit.graph import Graph, build
from ggjit.llm.context import DecodeContext, DecodeGraph
from ggjit.llm.model import Model
from ggjit.models.gpt2 import Gpt2, Sizes
from ggjit.plan import Plan
from ggjit.tensor import new_tensor

PAGE = """# Planned memory

Made by `python -m ggjit.dev docs`: every graph is planned, none is run. Do not edit.

- **live**: the most bytes that are in use at one step, given which nodes write in place. No plan needs less.
- **planned**: what is allocated, and by how much it is more than what is live.
- **best fit**: what the walk alone would need, as ggml places tensors; the lower of the two is taken.
- **ggml**: measured on ggml 0.25.3 for its own gpt-2 example, n_batch as many tokens.
- **sum**: a place of its own for every intermediate.

GPT-2 attends by separate products over a cache of 1024 tokens, as ggml's example does. The others are the decoder's
graphs over 2048 cells, with logits for the last token.

"""
GGML = {1: 3210304, 8: 3661888, 32: 6629504, 512: 106072064}
_N_KV = 2048


class Shape(NamedTuple):
    """Sizes of a decoder.

    Attributes:
        arch: `general.architecture`.
        more: metadata beside what all have, below the architecture's prefix.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    more: Mapping[str, Any] = {}

    @property
    def n_expert(self) -> int:
        """Experts of each mixture, 0 for dense models."""
        return int(self.more.get("expert_count", 0))


SHAPES = {
    "SmolLM2 135M": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152),
    "Llama 3.2 1B": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256),
    "Mixtral 8x7B": Shape("llama", 32, 4096, 32, 8, 128, 14336, 32000, {"expert_count": 8, "expert_used_count": 2}),
    "Gemma 3 270M": Shape("gemma3", 18, 640, 4, 1, 256, 2048, 262144, {"attention.sliding_window": 512}),
}


# --- graphs -----------------------------------------------------------------------------------------------------------


class _Hole(GgufWriter):
    """Writes the head; the tensors' bytes are a hole in the file."""

    def write(self) -> None:
        self._written = True
        with open(self.path, "wb") as file:
            file.write(self._head())
            file.truncate(self.nbytes)


def _matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the matrices of one block."""
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    experts = (shape.n_expert,) if shape.n_expert else ()
    s = "_exps" if experts else ""
    found: dict[str, tuple[int, ...]] = {
        "attn_q": (shape.n_embd, n_q),
        "attn_k": (shape.n_embd, n_kv),
        "attn_v": (shape.n_embd, n_kv),
        "attn_output": (n_q, shape.n_embd),
        f"ffn_gate{s}": (shape.n_embd, shape.n_ff, *experts),
        f"ffn_up{s}": (shape.n_embd, shape.n_ff, *experts),
        f"ffn_down{s}": (shape.n_ff, shape.n_embd, *experts),
    }
    return found | ({"ffn_gate_inp": (shape.n_embd, *experts)} if experts else {})


def _norms(shape: Shape) -> dict[str, int]:
    """Names and sizes of the norms of one block."""
    found = {"attn_norm": shape.n_embd, "ffn_norm": shape.n_embd}
    if shape.arch == "gemma3":
        found |= {"post_attention_norm": shape.n_embd, "post_ffw_norm": shape.n_embd}
        found |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    return found


def write_hole(path: Path, shape: Shape) -> None:
    """Write a model file of a shape that takes no room."""
    values = {
        "block_count": shape.n_layer, "context_length": _N_KV, "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff, "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.dimension_count": shape.head_dim,
        "attention.layer_norm_rms_epsilon": np.float32(1e-5), **shape.more,
    }  # fmt: skip
    with _Hole(path) as writer:
        writer.add("general.architecture", shape.arch)
        for key, value in values.items():
            writer.add(f"{shape.arch}.{key}", value)
        writer.add_tensor("token_embd.weight", (), types.F16, (shape.n_embd, shape.n_vocab))
        writer.add_tensor("output_norm.weight", (), types.F32, (shape.n_embd,))
        for il in range(shape.n_layer):
            for name, n in _norms(shape).items():
                writer.add_tensor(f"blk.{il}.{name}.weight", (), types.F32, (n,))
            for name, ne in _matrices(shape).items():
                writer.add_tensor(f"blk.{il}.{name}.weight", (), types.F16, ne)


def decode_graph(path: str | Path, n_tokens: int, n_kv: int, n_outputs: int = 1) -> Graph:
    """The graph of one ubatch of a model file, whose intermediates have no memory yet; nothing is compiled.

    Args:
        path: the file.
        n_tokens: of the ubatch.
        n_kv: cells of the cache that it sees.
        n_outputs: tokens whose logits it gives.
    """
    model = Model(path, no_alloc=True)
    return DecodeGraph(DecodeContext(model, n_kv, 1), n_tokens, n_kv, n_outputs).graph


def _decoder(shape: Shape, n_tokens: int) -> Graph:
    with tempfile.TemporaryDirectory(prefix="ggjit-") as folder:
        path = Path(folder) / "model.gguf"
        write_hole(path, shape)
        return decode_graph(path, n_tokens, _N_KV)


def place_elsewhere(context: Context) -> None:
    """Give the tensors of a context addresses without memory: to the planner they have data of their own then."""
    allocator = TensorAllocator(Buffer(host_buffer_type(), None, "weights", 1 << 40, 1 << 40))
    for t in context.tensors.values():
        allocator.alloc(t)


def _gpt2(n_tokens: int) -> Graph:
    sizes = Sizes()
    weights = Context(tensor_overhead() * n_tensors(sizes), no_alloc=True)
    with weights:
        model = Gpt2(sizes, Headers(50257, lambda name: types.F32))
    caches = Context(tensor_overhead() * 2, no_alloc=True)
    with caches:
        cache = Cache.declare(sizes)
    place_elsewhere(weights)
    place_elsewhere(caches)
    with graph_context():
        return worst_case(model, cache, n_tokens)


def _mlp() -> Graph:
    with Context(1 << 16, no_alloc=True) as weights:
        w1, w2 = new_tensor(types.F32, 256, 1024), new_tensor(types.F32, 1024, 256)
        b1, b2, x = new_tensor(types.F32, 1024), new_tensor(types.F32, 256), new_tensor(types.F32, 256, 4)
    place_elsewhere(weights)
    with Context(1 << 16, no_alloc=True):
        hidden = ops.relu(ops.add(ops.mul_mat(w1, x), b1))
        return build(ops.add(ops.mul_mat(w2, hidden), b2), 16)


GRAPHS: dict[tuple[str, int], Callable[[], Graph]] = {
    ("MLP 256-1024-256", 4): _mlp,
    **{("GPT-2 small", n): lambda n=n: _gpt2(n) for n in GGML},  # type: ignore[misc]
    **{
        (name, n): lambda shape=shape, n=n: _decoder(shape, n)  # type: ignore[misc]
        for name, shape in SHAPES.items()
        for n in (1, 32, 512)
    },
}


# --- page -------------------------------------------------------------------------------------------------------------


def planned(graph: Graph) -> tuple[Plan, int]:
    """The plan of a graph in host memory, and the bytes of its intermediates without reuse."""
    plan = GraphAllocator(host_buffer_type()).measure(graph)
    return plan, sum(p.size for p in plan.placements if p.kind == "planned")


def page() -> str:
    """The table."""
    head = ("model", "tokens", "live", "planned", "over live", "best fit", "ggml", "sum")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (name, n), make in GRAPHS.items():
        plan, own = planned(make())
        live, size = plan.lower_bound(), plan.sizes[0]
        ggml = f"{GGML[n]:,}" if name == "GPT-2 small" else "-"
        cells = (name, n, f"{live:,}", f"{size:,}", f"{100 * (size / live - 1):.2f} %", f"{plan.best_fit[0]:,}", ggml)
        lines.append("| " + " | ".join(map(str, cells)) + f" | {own:,} |")
    return PAGE + "\n".join(lines) + "\n"
