"""Importance matrices: how large the values are that each weight of a model meets, for its quantization.

    collected = collect(llm, text, n_ctx=512)
    write("imatrix.gguf", collected, ["text.txt"])

While a text is computed, the squares of what each matrix of the blocks is multiplied with are added up column by
column: the sum for column i says how much an error of the weights there costs. Matrices of experts are counted each
for the tokens that were routed to it.

The file is llama.cpp's: `general.type` imatrix, `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`, and
for each matrix two f32 tensors, `<name>.in_sum2` [n_in, n_mat] and `<name>.counts` [1, n_mat].

Source: llama.cpp's llama-imatrix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ggjit.gguf.reader import ValueType
from ggjit.gguf.writer import GgufWriter
from ggjit.llm.perplexity import text_chunks
from ggjit.ops.mul_mat import MUL_MAT
from ggjit.ops.mul_mat_id import MUL_MAT_ID
from ggjit.tensor import Tensor

if TYPE_CHECKING:
    from ggjit.llm.llm import LLM

BLOCKS = "blk."  # what the names of the blocks' tensors begin with
OUTPUT = "output.weight"


@dataclass
class Sums:
    """What a matrix, or each of several experts' matrices, was multiplied with.

    Attributes:
        in_sum2: sums of squares, f64 [n_mat, n_in].
        counts: columns that were added, f64 [n_mat].
    """

    in_sum2: NDArray[np.float64]
    counts: NDArray[np.float64]


@dataclass
class Collected:
    """The sums of a text by the names of the matrices.

    Attributes:
        n_chunks: chunks that were computed.
        chunk_size: tokens of a chunk.
        sums: by name.
    """

    n_chunks: int
    chunk_size: int
    sums: dict[str, Sums]


class Collector:
    """A callback that adds up the squares of what the matrices of a model are multiplied with.

    Args:
        process_output: take the output matrix too, not only those of the blocks.
    """

    def __init__(self, process_output: bool = False) -> None:
        self.process_output = process_output
        self.sums: dict[str, Sums] = {}

    def __call__(self, node: Tensor) -> bool:
        """Look at a node that was just computed."""
        if node.op in (MUL_MAT, MUL_MAT_ID):
            weights, x = node.src[0], node.src[1]
            assert weights is not None and x is not None
            if weights.name.startswith(BLOCKS) or (self.process_output and weights.name == OUTPUT):
                self._add(node, weights, x)
        return True

    def _add(self, node: Tensor, weights: Tensor, x: Tensor) -> None:
        n_in, n_mat = weights.ne[0], weights.ne[2]
        sums = self.sums.get(weights.name)
        if sums is None:
            sums = self.sums[weights.name] = Sums(np.zeros((n_mat, n_in)), np.zeros(n_mat))
        squares = np.square(x.numpy()[0].astype(np.float64))  # [tokens, n_b, n_in], or [1, tokens, n_in]
        if node.op is MUL_MAT:
            sums.in_sum2[0] += squares.reshape(-1, n_in).sum(0)
            sums.counts[0] += squares.size // n_in
            return
        assert node.src[2] is not None
        ids = node.src[2].numpy()[0, 0]  # [tokens, n_used]
        for e in np.unique(ids):
            t, u = np.nonzero(ids == e)
            sums.in_sum2[e] += squares[t, u % squares.shape[1]].sum(0)
            sums.counts[e] += len(t)


def collect(
    llm: LLM,
    text: str | bytes,
    n_ctx: int,
    max_chunks: int | None = None,
    *,
    process_output: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Compute a text in chunks, each from an empty cache, and add up the squares of activations.

    Args:
        llm: the model; its context must hold `n_ctx` tokens.
        text: the text; see `ggjit.llm.perplexity.text_chunks`.
        n_ctx: tokens of a chunk.
        max_chunks: stop after so many.
        process_output: take the output matrix too.
        progress: called with chunks done and in all.

    Returns:
        The sums.

    Raises:
        ValueError: the text has fewer tokens than a chunk, or `n_ctx` is out of range.
    """
    collector = Collector(process_output)
    chunks = text_chunks(llm, text, n_ctx, max_chunks)
    for i, chunk in enumerate(chunks):
        llm.observe(chunk, collector)
        if progress is not None:
            progress(i + 1, len(chunks))
    return Collected(len(chunks), n_ctx, collector.sums)


def write(path: str | os.PathLike[str], collected: Collected, datasets: Sequence[str]) -> None:
    """Write sums as a GGUF file of llama.cpp's form.

    Args:
        path: of the file; what is there is replaced.
        collected: the sums.
        datasets: names of the texts.

    Raises:
        OSError: the file cannot be written.
    """
    with GgufWriter(path) as writer:
        writer.add("general.type", "imatrix")
        writer.add("imatrix.datasets", list(datasets), element=ValueType.STRING)
        writer.add("imatrix.chunk_count", collected.n_chunks, ValueType.UINT32)
        writer.add("imatrix.chunk_size", collected.chunk_size, ValueType.UINT32)
        for name, sums in sorted(collected.sums.items()):
            writer.add_tensor(f"{name}.in_sum2", sums.in_sum2.astype(np.float32))
            writer.add_tensor(f"{name}.counts", sums.counts.astype(np.float32)[:, None])
