"""Perplexity of a text: how many tokens, equally likely, the model would have to choose from on average.

    for estimate in perplexity(llm, text, n_ctx=512):
        print(estimate.n_chunks, estimate.ppl)

The text is tokenized once, special tokens in it taken as text, and cut into chunks of `n_ctx` tokens without overlap;
the rest is dropped. Each chunk is computed from an empty cache, its first token replaced by BOS if the model puts BOS
before texts. Only the targets in the second half count, so that each has at least half a context before it.

Source: llama.cpp's llama-perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ggjit.llm.llm import LLM

ROWS = 16  # logits' rows that are looked at together in float64


class Estimate(NamedTuple):
    """The perplexity after some chunks.

    Attributes:
        n_chunks: chunks computed so far.
        n_targets: tokens whose probability counts.
        ppl: exp of the mean of -log p.
        stderr: standard error of `ppl`.
    """

    n_chunks: int
    n_targets: int
    ppl: float
    stderr: float


def text_chunks(llm: LLM, text: str | bytes, n_ctx: int, max_chunks: int | None = None) -> list[list[int]]:
    """The tokens of a text in chunks of `n_ctx`, each with BOS in place of its first if the model adds BOS.

    Args:
        llm: the model.
        text: the text.
        n_ctx: tokens of a chunk.
        max_chunks: most chunks; the rest of a long text is not looked at.

    Raises:
        ValueError: the text has fewer tokens, or `n_ctx` is below 4 or beyond the context.
    """
    if not 4 <= n_ctx <= llm.n_ctx:
        raise ValueError(f"text_chunks: n_ctx must be in [4, {llm.n_ctx}], the context, got {n_ctx}")
    if max_chunks is None or max_chunks < 1:
        ids = llm.tokenize(text, parse_special=False)
    else:
        ids = llm.tokenizer.first_tokens(text, n_ctx * max_chunks)
    if len(ids) < n_ctx:
        raise ValueError(f"text_chunks: the text must have at least {n_ctx} tokens, a chunk, got {len(ids)}")
    chunks = [ids[i : i + n_ctx] for i in range(0, len(ids) // n_ctx * n_ctx, n_ctx)]
    if llm.tokenizer.add_bos:
        for chunk in chunks:
            chunk[0] = llm.tokenizer.bos
    return chunks[:max_chunks]


def losses(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log of the targets' probabilities.

    Args:
        logits: f32 [n, n_vocab].
        targets: ids, [n].

    Returns:
        f64 [n].
    """
    out = np.empty(len(targets))
    for i in range(0, len(targets), ROWS):
        rows = logits[i : i + ROWS].astype(np.float64)
        top = rows.max(1)
        chosen = rows[np.arange(len(rows)), targets[i : i + ROWS]]
        out[i : i + ROWS] = np.log(np.exp(rows - top[:, None]).sum(1)) + top - chosen
    return out


def perplexity(llm: LLM, text: str | bytes, n_ctx: int, max_chunks: int | None = None) -> Iterator[Estimate]:
    """Estimate the perplexity of a text, better with each chunk.

    Args:
        llm: the model; its context must hold `n_ctx` tokens.
        text: the text.
        n_ctx: tokens of a chunk.
        max_chunks: stop after so many.

    Returns:
        An iterator of one estimate for each chunk.

    Raises:
        ValueError: the text has fewer tokens than a chunk, or `n_ctx` is out of range.
    """
    chunks = text_chunks(llm, text, n_ctx, max_chunks)
    return _estimates(llm, chunks, n_ctx // 2)


def _estimates(llm: LLM, chunks: list[list[int]], first: int) -> Iterator[Estimate]:
    n, total, squares = 0, 0.0, 0.0
    for i, chunk in enumerate(chunks):
        logits = llm.logits(chunk, first)[:-1]
        found = losses(logits, np.array(chunk[first + 1 :]))
        n, total, squares = n + len(found), total + float(found.sum()), squares + float(np.square(found).sum())
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0)
        ppl = math.exp(mean)
        yield Estimate(i + 1, n, ppl, ppl * math.sqrt(variance / (n - 1)) if n > 1 else math.inf)
