"""SentencePiece vocabularies (`tokenizer.ggml.model` "llama"): merging characters by the scores of the pieces.

The text, blanks written as "▁", starts as single characters. Of all neighbours whose joined text is a token, the pair
with the highest score (the leftmost of equals) is joined, until no pair is left; characters that are no token become
byte tokens.

Texts are not joined to look a pair up: the token that two tokens give is remembered, together with its place in the
order of scores. The queue holds one number a pair, that place and where the pair stands; an entry counts if the pair
that stands there now still has that place.

Joins only ever look at neighbours, so a text may be cut wherever no token reaches across. That is in front of nearly
every "▁": the few characters that stand before an inner "▁" of some token are looked up once. Words are then merged on
their own and remembered.
"""

from __future__ import annotations

import heapq
import re
import threading

import numpy as np
from numpy.typing import NDArray

from ggjit.llm.vocab import Vocab

__all__ = ["SpmMerger"]

BLANK = "▁".encode()
_CHARACTERS = re.compile(rb"[\x00-\xbf]|[\xc0-\xdf].?|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL)
_REMEMBERED = 1 << 16  # words
_PAIRS = 1 << 20
_LOW = (1 << 32) - 1


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
    return _LOW // 2 - np.where(bits < 0, bits ^ (_LOW // 2), bits)


class SpmMerger:
    """Turns text into ids by the scores of a vocabulary."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._words: dict[bytes, list[int]] = {}
        self._split: re.Pattern[bytes] | None = None
        self._bytes = [-1] * 256
        # A symbol is a token, or a character that is none: those are numbered from vocab.n on.
        self._symbols: dict[bytes, int] = {}
        self._unknown: list[bytes] = []
        self._pairs: dict[int, int] = {}  # left symbol << 32 | right symbol -> rank << 32 | token, -1 if none
        self._ranks = _ranks(vocab)
        self._lock = threading.Lock()

    def byte_id(self, byte: int) -> int:
        """The token of a byte, -1 if the vocabulary has none."""
        if self._bytes[byte] < 0:
            id = self._vocab.id(b"<0x%02X>" % byte)
            self._bytes[byte] = id if id >= 0 else self._vocab.id(bytes((byte,)))
        return self._bytes[byte]

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text whose blanks are written as "▁"."""
        if self._split is None:
            joined = re.escape(_before_inner_blanks(self._vocab) + BLANK[-1:])
            self._split = re.compile(rb"(?<=[^" + joined + rb"])(?=" + BLANK + rb")")
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

    def _symbol(self, text: bytes) -> int:
        symbol = self._symbols.get(text)
        if symbol is None:
            symbol = self._vocab.id(text)
            if symbol < 0:
                with self._lock:  # threads may share a tokenizer: one number for one text
                    self._unknown.append(text)
                    symbol = self._vocab.n + len(self._unknown) - 1
            self._symbols[text] = symbol
        return symbol

    def _text(self, symbol: int) -> bytes:
        n = self._vocab.n
        return self._vocab.text(symbol) if symbol < n else self._unknown[symbol - n]

    def _joined(self, left: int, right: int) -> int:
        """What two symbols give, for `_pairs`."""
        id = self._vocab.id(self._text(left) + self._text(right))
        if len(self._pairs) >= _PAIRS:
            self._pairs.clear()
        value = self._pairs[left << 32 | right] = int(self._ranks[id]) << 32 | id if id >= 0 else -1
        return value

    def _merge(self, text: bytes) -> list[int]:
        symbols = [self._symbol(character) for character in _CHARACTERS.findall(text)]
        n = len(symbols)
        before, after = list(range(-1, n - 1)), [*range(1, n), -1]
        pairs, joined = self._pairs, self._joined
        heap: list[int] = []
        for left in range(n - 1):
            value = pairs.get(symbols[left] << 32 | symbols[left + 1])
            if value is None:
                value = joined(symbols[left], symbols[left + 1])
            if value >= 0:
                heap.append(value & ~_LOW | left)
        heapq.heapify(heap)
        while heap:
            key = heapq.heappop(heap)
            left = key & _LOW
            right = after[left]
            if right < 0:
                continue
            value = pairs.get(symbols[left] << 32 | symbols[right])
            if value is None:
                value = joined(symbols[left], symbols[right])
            if value < 0 or (value ^ key) >> 32:
                continue
            symbols[left] = value & _LOW
            following = after[left] = after[right]
            after[right] = -2
            if following >= 0:
                before[following] = left
            for first, second in ((before[left], left), (left, following)):
                if first >= 0 and second >= 0:
                    value = pairs.get(symbols[first] << 32 | symbols[second])
                    if value is None:
                        value = joined(symbols[first], symbols[second])
                    if value >= 0:
                        heapq.heappush(heap, value & ~_LOW | first)
        return self._ids(symbols, after)

    def _ids(self, symbols: list[int], after: list[int]) -> list[int]:
        """Ids of the symbols that are left; characters that are no token become bytes."""
        ids = []
        at = 0 if symbols else -1
        while at >= 0:
            symbol = symbols[at]
            if symbol < self._vocab.n:
                ids.append(symbol)
            else:
                ids += self._byte_ids(self._text(symbol))
            at = after[at]
        return ids

    def _byte_ids(self, piece: bytes) -> list[int]:
        ids = [self.byte_id(byte) for byte in piece]
        if -1 in ids:
            raise ValueError(f"tokenize: the vocabulary must have the token of every byte, got {piece!r} without one")
        return ids
