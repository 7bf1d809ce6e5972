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
        if type(tokens) is list and len(tokens) == 1 and type(id := tokens[0]) is int and 0 <= id < 1 << 31:
            array = np.array([id, first, seq], np.int32)  # the step of a generation, at the least cost
            return cls(array[:1], array[1:2], array[2:], np.full(1, outputs != "none"))
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

    def __post_init__(self) -> None:
        """Compiled code reads the arrays by their addresses, so they must be what they are said to be.

        Raises:
            TypeError: an array has another type.
            ValueError: they have not the same length.
        """
        for name, array in (("tokens", self.tokens), ("pos", self.pos), ("seq", self.seq)):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                what = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"Batch: {name} must be an int32 array of one dimension, got {what}")
        lengths = [len(a) for a in (self.tokens, self.pos, self.seq, self.output)]
        if lengths.count(lengths[0]) < 4:
            raise ValueError(f"Batch: tokens, pos, seq and output must be equally long, got {lengths}")

    def check_places(self) -> None:
        """Refuse positions and sequences that a cache uses for free cells.

        Raises:
            ValueError: one is negative.
        """
        for name, array in (("positions", self.pos), ("sequences", self.seq)):
            lowest = array[0] if len(array) == 1 else array.min(initial=0)
            if lowest < 0:
                raise ValueError(f"decode: {name} must not be negative, got {lowest}")

    @property
    def id_range(self) -> tuple[int, int]:
        """The lowest and the highest id; 0, 0 without tokens."""
        if len(self.tokens) < 2:
            id = int(self.tokens[0]) if len(self.tokens) else 0
            return id, id
        return int(self.tokens.min()), int(self.tokens.max())

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def ubatches(self, n_ubatch: int) -> Iterator[Batch]:
        """The batch in pieces of at most `n_ubatch` tokens."""
        if 0 < self.n_tokens <= n_ubatch:
            yield self
            return
        for i in range(0, self.n_tokens, n_ubatch):
            s = slice(i, i + n_ubatch)
            yield Batch(self.tokens[s], self.pos[s], self.seq[s], self.output[s])
