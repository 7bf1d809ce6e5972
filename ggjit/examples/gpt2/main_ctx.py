"""GPT-2 with all memory in contexts.

The program sums up the bytes of every weight and of the cache itself and makes one context of that size, with the data
behind each header. Each run builds its graph in a new context on one large block; every intermediate gets a place of
its own and keeps it until the context goes. How large the block must be is a guess: 256 MiB, then what the first run
used for each token and a tenth more. A run at the end of a long context needs more for each token than the first one
did, so the guess can be too small; the arena then says so, and the program doubles the block.

Source: ggml's examples/gpt-2/main-ctx.cpp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.context import Context, aligned_bytes
from ggjit.errors import OutOfArena
from ggjit.examples.gpt2.command import main
from ggjit.examples.gpt2.graph import LOGITS, POSITIONS, TOKENS, Cache, gpt2_graph, positions
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.models.gpt2 import Gpt2, Sizes
from ggjit.types import Type, row_size

BUF_SIZE = 256 << 20
OBJECT_OVERHEAD = 512  # more than a header takes


def context_size(sizes: Sizes, n_vocab: int, type_of: Callable[[str], Type]) -> int:
    """Bytes of weights, cache and headers."""
    n_embd, n_ctx, n_layer, n_ff = sizes.n_embd, sizes.n_ctx, sizes.n_layer, sizes.n_ff

    def size(name: str, n: int) -> int:
        return row_size(type_of(name), n)

    total = size("output_norm.weight", n_embd) + size("output_norm.bias", n_embd)
    total += size("token_embd.weight", n_vocab * n_embd)
    total += size("position_embd.weight", n_ctx * n_embd)
    total += size("output.weight", n_vocab * n_embd)
    for il in range(n_layer):
        blk = f"blk.{il}."
        total += size(blk + "attn_norm.weight", n_embd) + size(blk + "attn_norm.bias", n_embd)
        total += size(blk + "ffn_norm.weight", n_embd) + size(blk + "ffn_norm.bias", n_embd)
        total += size(blk + "attn_qkv.weight", n_embd * 3 * n_embd) + size(blk + "attn_qkv.bias", 3 * n_embd)
        total += size(blk + "attn_output.weight", n_embd * n_embd) + size(blk + "attn_output.bias", n_embd)
        total += size(blk + "ffn_up.weight", n_embd * n_ff) + size(blk + "ffn_up.bias", n_ff)
        total += size(blk + "ffn_down.weight", n_ff * n_embd) + size(blk + "ffn_down.bias", n_embd)
    total += 2 * n_ctx * n_layer * row_size(types.F32, n_embd)  # memory_k, memory_v
    return total + (6 + 12 * n_layer) * OBJECT_OVERHEAD


def load(file: ModelFile) -> tuple[Context, Gpt2, Cache]:
    """Weights and cache in one context."""
    context = Context(context_size(file.sizes, file.n_vocab, file.type_of))
    with context:
        model = Gpt2(file.sizes, file.headers)
        weights = list(context.tensors.values())
        cache = Cache.declare(file.sizes)
    file.read(weights)
    return context, model, cache


class MainCtx:
    """The program's state.

    Args:
        file: the model.
        n_threads: that compute.
        buf_size: first guess for the block of a run.

    Attributes:
        ctx_w: weights and cache.
        buf: the block that runs build their contexts on.
        mem_per_token: bytes that the first run used for each of its tokens.
        used: bytes that the last run used.
        n_missed: how often the block was too small nevertheless.
    """

    def __init__(self, file: ModelFile, n_threads: int, buf_size: int = BUF_SIZE) -> None:
        self.n_threads = n_threads
        self.ctx_w, self.model, self.cache = load(file)
        self.buf = aligned_bytes(buf_size)
        self.mem_per_token = self.used = self.n_missed = 0
        self.eval(0, range(min(4, file.sizes.n_ctx)))  # to learn mem_per_token
        self.mem_per_token = self.used // min(4, file.sizes.n_ctx)

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind `n_past`; their logits, [n, n_vocab]."""
        needed = self.mem_per_token * len(tokens)
        if needed > self.buf.nbytes:
            self.buf = aligned_bytes(int(1.1 * needed))
        while True:
            try:
                return self._run(n_past, tokens)
            except OutOfArena:
                self.n_missed += 1
                self.buf = aligned_bytes(2 * self.buf.nbytes)

    def _run(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        ctx0 = Context(self.buf.nbytes, mem_buffer=self.buf)
        with ctx0:
            graph = gpt2_graph(self.model, self.cache, n_past, len(tokens))
        graph.get_tensor(TOKENS).set(tokens)
        graph.get_tensor(POSITIONS).set(positions(n_past, len(tokens)))
        graph.compute_with_ctx(ctx0, self.n_threads)
        logits: NDArray[np.float32] = graph.get_tensor(LOGITS).numpy()[0, 0].copy()
        self.used = ctx0.used_mem()
        ctx0.reset()  # tensors of this run are gone
        return logits

    def facts(self) -> list[str]:
        """What the engine was given."""
        return [
            f"context of weights and cache: {self.ctx_w.used_mem()} of {self.ctx_w.mem_size} bytes used",
            f"block of the runs' contexts: {self.buf.nbytes} bytes, the last run used {self.used}",
            f"mem_per_token {self.mem_per_token} bytes; the block was too small {self.n_missed} times",
        ]


def make(file: ModelFile, args: argparse.Namespace) -> MainCtx:
    """The program's state, from the command line's arguments."""
    return MainCtx(file, args.threads)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    return main("main_ctx", make, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
