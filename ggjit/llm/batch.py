"""A batch: tokens with their positions and sequences, and which of them give logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit.llm import inputs

_put = struct.Struct("=2i").pack_into


def token_ids(where: str, tokens: Sequence[int]) -> NDArray[Any]:
    """Token ids as an array of whole numbers, [n].

    Raises:
        TypeError: they are something else.
    """
    must = f"{where}: token ids must be a sequence of whole numbers"
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise TypeError(f"{must}, got sequences in it") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"{must}, got dtype {ids.dtype}, shape {ids.shape}")
    return ids


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens to decode together.

    Attributes:
        tokens: ids, int32 [n].
        pos: position in their sequence, int32 [n].
        seq: sequence ids, int32 [n].
        output: bool [n], the tokens whose logits are wanted.
        n_tokens: n.
        address: of the words that compiled code knows the batch by (`ggjit.llm.inputs`).
    """

    tokens: NDArray[np.int32]
    pos: NDArray[np.int32]
    seq: NDArray[np.int32]
    output: NDArray[np.bool_]
    n_tokens: int = field(init=False, repr=False)
    address: int = field(init=False, repr=False)
    _words: NDArray[np.int64] = field(init=False, repr=False)

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
            ValueError: a number does not fit 32 bits; `outputs` is something else.
        """
        if outputs not in ("last", "all", "none"):
            raise ValueError(f"Batch: outputs must be 'last', 'all' or 'none', got {outputs!r}")
        ids = token_ids("Batch", tokens)
        n = len(ids)
        if n and not -(1 << 31) <= ids.min() <= ids.max() < 1 << 31:
            raise ValueError(f"Batch: token ids must fit 32 bits, got {ids.min()} to {ids.max()}")
        for name, low, high in (("positions", first, first + n), ("sequences", seq, seq)):
            if not -(1 << 31) <= low <= high < 1 << 31:
                raise ValueError(f"Batch: {name} must fit 32 bits, got {low} to {high}")
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
        words = [lengths[0]]
        for name, kind in (("tokens", np.int32), ("pos", np.int32), ("seq", np.int32), ("output", np.bool_)):
            array = np.ascontiguousarray(getattr(self, name), kind)
            object.__setattr__(self, name, array)
            words.append(array.ctypes.data)
        object.__setattr__(self, "n_tokens", lengths[0])
        object.__setattr__(self, "_words", np.array(words, np.int64))
        object.__setattr__(self, "address", self._words.ctypes.data)

    def __reduce__(self) -> tuple[type[Batch], tuple[NDArray[Any], ...]]:
        """Copies and other processes have arrays, and so addresses, of their own."""
        return Batch, (self.tokens, self.pos, self.seq, self.output)

    def check(self, n_vocab: int) -> None:
        """Refuse ids that a model does not know, and positions and sequences that a cache uses for free cells.

        Raises:
            ValueError: one is out of range.
        """
        wrong = inputs.check(self.address, n_vocab)
        if wrong:
            raise self.error(wrong, n_vocab)

    def error(self, wrong: int, n_vocab: int) -> ValueError:
        """The error for what compiled code found to be wrong."""
        if wrong == inputs.BAD_ID:
            bad = next(t for t in self.tokens.tolist() if not 0 <= t < n_vocab)
            return ValueError(f"decode: token ids must be in [0, {n_vocab}), got {bad}")
        name, array = ("positions", self.pos) if wrong == inputs.BAD_POS else ("sequences", self.seq)
        return ValueError(f"decode: {name} must not be negative, got {array.min()}")

    def ubatches(self, n_ubatch: int) -> Sequence[Batch]:
        """The batch in pieces of at most `n_ubatch` tokens."""
        if 0 < self.n_tokens <= n_ubatch:
            return (self,)
        cuts = [slice(i, i + n_ubatch) for i in range(0, self.n_tokens, n_ubatch)]
        return [Batch(self.tokens[s], self.pos[s], self.seq[s], self.output[s]) for s in cuts]


class NextToken:
    """The batch of one token that a generation decodes again and again.

    Attributes:
        batch: the batch.
    """

    def __init__(self) -> None:
        self._ids = np.zeros(3, np.int32)
        self.batch = Batch(self._ids[:1], self._ids[1:2], self._ids[2:], np.ones(1, np.bool_))

    def put(self, id: int, pos: int) -> Batch:
        """The batch with another token."""
        _put(self._ids, 0, id, pos)
        return self.batch
