"""SentencePiece vocabularies (`tokenizer.ggml.model` "llama"): joining characters by the scores of the pieces.

The text, blanks written as "▁", starts as single characters. Neighbours are joined if that makes a token, the one with
the highest score first; characters that are no token become byte tokens.

Joins only ever look at neighbours, so a text may be cut wherever no token reaches across. That is in front of nearly
every "▁": the few characters that stand before an inner "▁" of some token are looked up once. Words are then joined on
their own and remembered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ggjit.llm.merging import PairMerger
from ggjit.llm.vocab import Vocab

__all__ = ["BLANK", "SpmMerger"]

BLANK = "▁".encode()
_CHARACTERS = re.compile(rb"[\x00-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL)


def _before_inner_blanks(vocab: Vocab) -> bytes:
    """The last bytes before a "▁" that does not stand at the beginning of its token."""
    if not vocab.n:
        return b""
    first, last = int(vocab.offsets[0]), int(vocab.offsets[-1] + vocab.lengths[-1])
    data = vocab.texts.data[first:last]
    places = first + np.flatnonzero((data[:-2] == BLANK[0]) & (data[1:-1] == BLANK[1]) & (data[2:] == BLANK[2]))
    token = np.searchsorted(vocab.offsets, places, "right") - 1
    inner = places > vocab.offsets[token]
    inner[1:] &= np.diff(places) != len(BLANK)
    return bytes(set(vocab.texts.data[places[inner] - 1].tolist()))


def _ranks(vocab: Vocab) -> NDArray[np.int64]:
    """The order of the scores as whole numbers: the smaller, the higher the score; equal for equal scores."""
    bits = (vocab.scores + np.float32(0)).view(np.int32).astype(np.int64)  # + 0: no negative zero
    largest = (1 << 31) - 1
    return largest - np.where(bits < 0, bits ^ largest, bits)


class SpmMerger(PairMerger):
    """Turns text into ids by the scores of a vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(vocab)
        self._ranks = _ranks(vocab)
        self._split: re.Pattern[bytes] | None = None

    def byte_id(self, byte: int) -> int:
        """The token of a byte, -1 if the vocabulary has none."""
        id = self._vocab.id(b"<0x%02X>" % byte)
        return id if id >= 0 else self._vocab.id(bytes((byte,)))

    def rank(self, left: bytes, right: bytes) -> int:
        """The higher the score of the token that they make, the smaller the rank."""
        id = self._vocab.id(left + right)
        return int(self._ranks[id]) if id >= 0 else -1

    def characters(self, word: bytes) -> Iterable[int]:
        """One symbol a character; where one ends is told by its first byte."""
        return map(self.symbol, _CHARACTERS.findall(word))

    def spell(self, text: bytes) -> list[int]:
        """Byte tokens.

        Raises:
            ValueError: the vocabulary has none for a byte.
        """
        ids = [self.byte_id(byte) for byte in text]
        if -1 in ids:
            raise ValueError(f"tokenize: the vocabulary must have the token of every byte, got {text!r} without one")
        return ids

    def words(self, text: bytes) -> list[bytes]:
        """A text whose blanks are written as "▁", cut where no token reaches across."""
        if self._split is None:
            joined = re.escape(_before_inner_blanks(self._vocab) + BLANK[-1:])
            self._split = re.compile(rb"(?<=[^" + joined + rb"])(?=" + BLANK + rb")")
        try:
            text.decode()
        except UnicodeDecodeError:  # where characters begin is then a matter of the whole text
            return [text]
        return self._split.split(text)
