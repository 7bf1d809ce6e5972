"""GPT-2 with the memory of intermediates planned by a graph allocator.

Weights and cache lie in a context as in main_ctx. The context of a run holds headers only; the allocator plans the
largest graph once, at the start, and then gives every graph its places in one buffer that never grows.

Source: ggml's examples/gpt-2/main-alloc.cpp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit.alloc import GraphAllocator
from ggjit.backend import host_buffer_type
from ggjit.examples.gpt2.command import main
from ggjit.examples.gpt2.graph import LOGITS, POSITIONS, TOKENS, gpt2_graph, graph_context, positions, worst_case
from ggjit.examples.gpt2.main_ctx import load
from ggjit.examples.gpt2.model_file import ModelFile


class MainAlloc:
    """The program's state.

    Args:
        file: the model.
        n_threads: that compute.
        n_batch: most tokens of a run.

    Attributes:
        ctx_w: weights and cache.
        allocr: plans intermediates and holds their buffer.
        n_reserves: how often a run did not fit the plan.
    """

    def __init__(self, file: ModelFile, n_threads: int, n_batch: int = 32) -> None:
        self.n_threads, self.n_reserves = n_threads, 0
        self.ctx_w, self.model, self.cache = load(file)
        self.allocr = GraphAllocator(host_buffer_type())
        with graph_context():
            self.allocr.reserve(worst_case(self.model, self.cache, n_batch))

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind `n_past`; their logits, [n, n_vocab]."""
        with graph_context():
            graph = gpt2_graph(self.model, self.cache, n_past, len(tokens))
        self.n_reserves += self.allocr.needs_realloc(graph)
        self.allocr.alloc_graph(graph)
        graph.get_tensor(TOKENS).set(tokens)
        graph.get_tensor(POSITIONS).set(positions(n_past, len(tokens)))
        graph.compute(self.n_threads)
        logits: NDArray[np.float32] = graph.get_tensor(LOGITS).numpy()[0, 0].copy()
        return logits

    def facts(self) -> list[str]:
        """What the engine was given."""
        return [
            f"context of weights and cache: {self.ctx_w.used_mem()} of {self.ctx_w.mem_size} bytes used",
            f"compute buffer: {self.allocr.get_buffer_size()} bytes; {self.n_reserves} runs did not fit the plan",
        ]


def make(file: ModelFile, args: argparse.Namespace) -> MainAlloc:
    """The program's state, from the command line's arguments."""
    return MainAlloc(file, args.threads, args.n_batch)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    return main("main_alloc", make, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
