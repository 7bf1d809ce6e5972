"""A batch: tokens with their positions and sequences, and which of them give logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """Tokens to decode together.

    Attributes:
        tokens: ids, int32 [n].
        pos: position in their sequence, int32 [n].
        seq: sequence ids, int32 [n].
        output: bool [n], the tokens whose logits are wanted.
    """

    tokens: NDArray[np.int32]
    pos: NDArray[np.int32]
    seq: NDArray[np.int32]
    output: NDArray[np.bool_]

    @classmethod
    def of(cls, tokens: Sequence[int], first: int = 0, seq: int = 0, outputs: str = "last") -> Batch:
        """Consecutive tokens of one sequence.

        Args:
            tokens: ids.
            first: position of the first one.
            seq: the sequence.
            outputs: "last", "all" or "none".

        Raises:
            TypeError: the ids are no whole numbers.
            ValueError: one does not fit 32 bits.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(
                f"Batch: token ids must be a sequence of whole numbers, got dtype {ids.dtype}, shape {ids.shape}"
            )
        n = len(ids)
        if n and not -(1 << 31) <= ids.min() <= ids.max() < 1 << 31:
            raise ValueError(f"Batch: token ids must fit 32 bits, got {ids.min()} to {ids.max()}")
        output = np.full(n, outputs == "all")
        if outputs == "last" and n:
            output[-1] = True
        pos = np.arange(first, first + n, dtype=np.int32)
        return cls(ids.astype(np.int32), pos, np.full(n, seq, np.int32), output)

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def ubatches(self, n_ubatch: int) -> Iterator[Batch]:
        """The batch in pieces of at most `n_ubatch` tokens."""
        for i in range(0, self.n_tokens, n_ubatch):
            s = slice(i, i + n_ubatch)
            yield Batch(self.tokens[s], self.pos[s], self.seq[s], self.output[s])
