"""GPT-2 with the tokens of several sequences in one run.

The cache's rows become cells: each notes the position of its token and the sequences that the token belongs to. A run
writes the next free cells and reads all cells in use; a mask, an input as ids and positions are, hides from each token
the cells of other sequences and of later positions. A prompt that several sequences share is computed once.

    cell       0  1  2  3  4    5  6   7  8   9 10
    position   0  1  2  3  4    5  5   6  6   7  7
    sequence   0 and 1          0  1   0  1   0  1

Source: ggml's examples/gpt-2/main-batched.cpp.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit import ops, types
from ggjit.alloc import GraphAllocator
from ggjit.backend import Device
from ggjit.cli import at_least
from ggjit.counts import counted
from ggjit.examples.gpt2.command import Engine, main, prompt_ids, sampler_of
from ggjit.examples.gpt2.graph import MAX_NODES, POSITIONS, TOKENS, Cache, cached_attention, graph_context, inputs
from ggjit.examples.gpt2.main_backend import DeviceModel, add_arguments, logits_of, new_backend, pick, put
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.graph import Graph
from ggjit.llm.tokenizer import StreamDecoder
from ggjit.models.gpt2 import Gpt2
from ggjit.tensor import new_tensor

MASK = "KQ_mask"


class Cells:
    """Which token each row of the cache holds.

    Args:
        n: rows.
        n_seq: sequences.

    Attributes:
        pos: position of each cell's token.
        member: does the cell belong to the sequence; bool [n, n_seq].
        head: the next free cell.
    """

    def __init__(self, n: int, n_seq: int) -> None:
        self.pos, self.member, self.head = np.zeros(n, np.int32), np.zeros((n, n_seq), bool), 0

    def take(self, pos: NDArray[np.int32], seq: NDArray[np.intp]) -> int:
        """Note tokens in the next cells; the first of them.

        Raises:
            ValueError: fewer are free.
        """
        first, n = self.head, len(pos)
        if first + n > len(self.pos):
            raise ValueError(f"gpt2: tokens must fit the {len(self.pos)} cells of the cache, got {n} with {first} used")
        self.pos[first : first + n], self.member[range(first, first + n), seq] = pos, True
        self.head += n
        return first

    def share(self, seq: int, other: int) -> None:
        """Let the tokens of a sequence belong to another one, too."""
        self.member[:, other] |= self.member[:, seq]

    def remove(self, seq: int, first: int) -> None:
        """Take the tokens from position `first` on out of a sequence."""
        self.member[self.pos >= first, seq] = False
        self.head = 1 + int(np.flatnonzero(self.member.any(1)).max(initial=-1))

    def mask(self, pos: NDArray[np.int32], seq: NDArray[np.intp]) -> NDArray[np.float32]:
        """-inf where a token must not look, else 0: f32 [n_tokens, cells in use]."""
        n_kv = self.head
        seen = self.member[:n_kv, seq].T & (self.pos[:n_kv] <= pos[:, None])
        return np.where(seen, np.float32(0), np.float32(-np.inf))


def batch_graph(model: Gpt2, cache: Cache, first: int, n: int, n_kv: int) -> Graph:
    """The graph of n tokens that go to the cells from `first` on and look at the first `n_kv` cells."""
    graph = Graph(MAX_NODES)
    tokens, pos = inputs(n)
    mask = new_tensor(types.F32, n_kv, n, name=MASK).set_input()
    attend = cached_attention(graph, model.sizes, cache, first, n_kv, lambda kq: ops.add(kq, mask))
    return graph.build_forward_expand(model.forward(tokens, pos, attend).set_output())


class MainBatched:
    """The program's state.

    Args:
        file: the model.
        n_threads: that compute, on the CPU.
        n_batch: most tokens of a run.
        n_seq: sequences.
        device: computes and holds everything.

    Attributes:
        cells: what the cache holds.
        n_runs: graphs computed.
    """

    def __init__(
        self, file: ModelFile, n_threads: int, n_batch: int = 32, n_seq: int = 1, device: Device | None = None
    ) -> None:
        device = pick("cpu") if device is None else device
        self.backend, self.loaded = new_backend(device, n_threads), DeviceModel(file, device)
        n_ctx, self.n_batch, self.n_runs = file.sizes.n_ctx, n_batch, 0
        self.cells = Cells(n_ctx, n_seq)
        self.allocr = GraphAllocator(device.buffer_type())
        n = min(n_ctx, n_batch)
        with graph_context():
            self.allocr.reserve(batch_graph(self.loaded.model, self.loaded.cache, n_ctx - n, n, n_ctx))

    def decode(self, tokens: Sequence[int], pos: Sequence[int], seq: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens, each at a position of a sequence; their logits, [n, n_vocab].

        Raises:
            ValueError: the cache is full.
        """
        parts = []
        for i in range(0, len(tokens), self.n_batch):
            part = slice(i, i + self.n_batch)
            parts.append(self._run(tokens[part], np.array(pos[part], np.int32), np.array(seq[part], np.intp)))
        return np.concatenate(parts)

    def _run(self, tokens: Sequence[int], pos: NDArray[np.int32], seq: NDArray[np.intp]) -> NDArray[np.float32]:
        first = self.cells.take(pos, seq)
        with graph_context():
            graph = batch_graph(self.loaded.model, self.loaded.cache, first, len(pos), self.cells.head)
        self.allocr.alloc_graph(graph)
        put(graph.get_tensor(TOKENS), tokens)
        put(graph.get_tensor(POSITIONS), pos)
        mask = graph.get_tensor(MASK)
        assert mask.buffer is not None
        mask.buffer.set_tensor(mask, self.cells.mask(pos, seq))
        self.backend.compute(graph)
        self.backend.synchronize()
        self.n_runs += 1
        return logits_of(graph)

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens of sequence 0 behind `n_past`; their logits, [n, n_vocab]."""
        self.cells.remove(0, n_past)
        return self.decode(tokens, range(n_past, n_past + len(tokens)), [0] * len(tokens))

    def facts(self) -> list[str]:
        """What the engine was given."""
        return [
            f"backend: {self.backend.name} ({self.backend.device.description})",
            *self.loaded.facts(),
            f"compute buffer: {self.allocr.get_buffer_size()} bytes",
            f"cells: {self.cells.head} of {len(self.cells.pos)} in use after {self.n_runs} runs",
        ]


def converse(engine: Engine, file: ModelFile, args: argparse.Namespace) -> None:
    """Continue the prompt in several ways at once; each stream has a seed of its own."""
    assert isinstance(engine, MainBatched)
    n_seq, start = args.n_parallel, time.perf_counter()
    ids = prompt_ids(file, args.prompt, args.n_predict)
    samplers = [sampler_of(args, s) for s in range(n_seq)]
    rows = engine.eval(0, ids)[-1:].repeat(n_seq, 0)
    for s in range(1, n_seq):
        engine.cells.share(0, s)
    streams: list[list[int]] = [[] for _ in range(n_seq)]
    going = list(range(n_seq))
    for step in range(args.n_predict):
        chosen = {s: samplers[s](row) for s, row in zip(going, rows, strict=True)}
        going = [s for s in going if chosen[s] not in file.tokenizer.eog]
        for s in going:
            streams[s].append(chosen[s])
        if not going or step + 1 == args.n_predict:
            break
        rows = engine.decode([chosen[s] for s in going], [len(ids) + step] * len(going), going)
    for s, stream in enumerate(streams):
        decoder = StreamDecoder(file.tokenizer)
        print(f"sequence {s}: {args.prompt}{decoder.push(stream)}{decoder.flush()}", flush=True)
    print(f"\n{counted(len(ids), 'token')} of prompt, {time.perf_counter() - start:.2f} s", file=sys.stderr)


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this program."""
    add_arguments(parser)
    parser.add_argument("-np", "--n-parallel", type=at_least(1), default=2, metavar="N", help="sequences (2)")


def make(file: ModelFile, args: argparse.Namespace) -> MainBatched:
    """The program's state, from the command line's arguments."""
    return MainBatched(file, args.threads, args.n_batch, args.n_parallel, pick(args.device))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    return main("main_batched", make, add_own_arguments, argv, converse)


if __name__ == "__main__":
    sys.exit(run())
