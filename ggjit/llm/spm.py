"""SentencePiece vocabularies (`tokenizer.ggml.model` "llama"): merging characters by the scores of the pieces.

The text, blanks written as "▁", starts as single characters. Of all neighbours whose joined text is a token, the pair
with the highest score (the leftmost of equals) is joined, until no pair is left; characters that are no token become
byte tokens.

Joins only ever look at neighbours, so a text may be cut wherever no token reaches across. That is in front of nearly
every "▁": the few characters that stand before an inner "▁" of some token are looked up once. Words are then merged on
their own and remembered.
"""

from __future__ import annotations

import heapq
import re

import numpy as np

from ggjit.llm.vocab import Vocab

__all__ = ["SpmMerger"]

BLANK = "▁".encode()
_CHARACTERS = re.compile(rb"[\x00-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL)
_REMEMBERED = 1 << 16  # words


def _before_inner_blanks(vocab: Vocab) -> set[bytes]:
    """The last bytes before a "▁" that does not stand at the beginning of its token."""
    first = int(vocab.texts.offsets[0]) if vocab.n else 0
    data = vocab.texts.data[first : int(vocab.texts.offsets[-1] + vocab.texts.lengths[-1]) if vocab.n else 0]
    places = first + np.flatnonzero((data[:-2] == BLANK[0]) & (data[1:-1] == BLANK[1]) & (data[2:] == BLANK[2]))
    token = np.searchsorted(vocab.texts.offsets, places, "right") - 1
    inner = places[places > vocab.texts.offsets[token]]
    inner = inner[~np.isin(inner - 3, places)]
    return {bytes((last,)) for last in np.unique(vocab.texts.data[inner - 1]).tolist()}


class SpmMerger:
    """Turns text into ids by the scores of a vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._words: dict[bytes, list[int]] = {}
        self._split: re.Pattern[bytes] | None = None
        self._bytes = [-1] * 256

    def byte_id(self, byte: int) -> int:
        """The token of a byte, -1 if the vocabulary has none."""
        if self._bytes[byte] < 0:
            id = self._vocab.id(b"<0x%02X>" % byte)
            self._bytes[byte] = id if id >= 0 else self._vocab.id(bytes((byte,)))
        return self._bytes[byte]

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text whose blanks are written as "▁"."""
        if self._split is None:
            before = b"".join(sorted(map(re.escape, _before_inner_blanks(self._vocab) | {b"\x81"})))
            self._split = re.compile(rb"(?<=[^" + before + rb"])(?=" + BLANK + rb")")
        try:
            text.decode()
        except UnicodeDecodeError:  # where characters begin is then a matter of the whole text
            return self._merge(text)
        ids: list[int] = []
        for word in self._split.split(text):
            found = self._words.get(word)
            if found is None:
                if len(self._words) >= _REMEMBERED:
                    self._words.clear()
                found = self._words[word] = self._merge(word)
            ids += found
        return ids

    def _merge(self, text: bytes) -> list[int]:
        ends = [match.end() for match in _CHARACTERS.finditer(text)]
        n = len(ends)
        starts = [0, *ends[:-1]] if ends else []
        before, after = list(range(-1, n - 1)), [*range(1, n), -1]
        vocab_id, scores = self._vocab.id, self._vocab.scores
        heap: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            id = vocab_id(text[starts[left] : ends[right]])
            if id >= 0:
                heapq.heappush(heap, (-float(scores[id]), left, right, ends[right] - starts[left]))

        for right in range(1, n):
            offer(right - 1, right)
        while heap:
            _, left, right, size = heapq.heappop(heap)
            # Joined away, or grown since it was offered.
            if after[left] != right or ends[right] - starts[left] != size:
                continue
            ends[left] = ends[right]
            after[left], after[right] = after[right], -2
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        ids = []
        at = 0 if n else -1
        while at >= 0:
            ids += self._ids_of(text[starts[at] : ends[at]])
            at = after[at]
        return ids

    def _ids_of(self, piece: bytes) -> list[int]:
        id = self._vocab.id(piece)
        if id >= 0:
            return [id]
        ids = [self.byte_id(byte) for byte in piece]
        if -1 in ids:
            raise ValueError(f"tokenize: the vocabulary must have the token of every byte, got {piece!r} without one")
        return ids
