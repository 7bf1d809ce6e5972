"""Joining neighbours, the best pair first: what SentencePiece and byte-level BPE vocabularies have in common.

A text is a chain of symbols. Of all neighbours that may be joined the pair with the smallest rank (the leftmost of
equals) is joined to one symbol, until no pair is left. The kinds differ in what gives a pair its rank: the score of the
token that it makes (spm.py), or its place in a list of merges (bpe.py).

Symbols are numbers: that of the token with the same text, or one behind the vocabulary. What two symbols give is
looked up once and remembered. The queue holds one number a pair, its rank and where it stands; an entry counts if the
pair that stands there now has that rank.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from ggjit.llm.vocab import Vocab

__all__ = ["PairMerger"]

_LOW = (1 << 32) - 1
_PAIRS = 1 << 20  # remembered
_WORDS = 1 << 16


class PairMerger:
    """Turns words into ids. Kinds say what the rank of a pair is and what becomes of symbols that are no tokens."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._symbols: dict[bytes, int] = {}
        self._others: list[bytes] = []  # texts of symbols that are no tokens, numbered from vocab.n on
        self._pairs: dict[int, int] = {}  # left << 32 | right -> rank << 32 | symbol, -1 if they are not joined
        self._words: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()

    def rank(self, left: bytes, right: bytes) -> int:
        """The rank of a pair of texts, 0 to 2**32 - 1, or -1 if they are not joined."""
        raise NotImplementedError

    def characters(self, word: bytes) -> Iterable[int]:
        """The symbols that a word begins with."""
        raise NotImplementedError

    def spell(self, text: bytes) -> list[int]:
        """The ids of a symbol that is no token."""
        raise NotImplementedError

    def symbol(self, text: bytes) -> int:
        """The symbol with a text."""
        symbol = self._symbols.get(text)
        if symbol is None:
            symbol = self._vocab.id(text)
            if symbol < 0:
                with self._lock:  # threads may share a tokenizer: one number for one text
                    self._others.append(text)
                    symbol = self._vocab.n + len(self._others) - 1
            symbol = self._symbols.setdefault(text, symbol)
        return symbol

    def text(self, symbol: int) -> bytes:
        """The text of a symbol."""
        n = self._vocab.n
        return self._vocab.text(symbol) if symbol < n else self._others[symbol - n]

    def words(self, text: bytes) -> list[bytes]:
        """The words of a text, which are merged each for itself."""
        raise NotImplementedError

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text."""
        return [id for word in self.words(text) for id in self.word(word)]

    def word(self, word: bytes) -> list[int]:
        """The ids of a word, remembered."""
        found = self._words.get(word)
        if found is None:
            if len(self._words) >= _WORDS:
                self._words.clear()
            found = self._words[word] = self.merge(word)
        return found

    def _joined(self, left: int, right: int) -> int:
        first, second = self.text(left), self.text(right)
        rank = self.rank(first, second)
        value = rank << 32 | self.symbol(first + second) if rank >= 0 else -1
        if len(self._pairs) >= _PAIRS:
            self._pairs.clear()
        self._pairs[left << 32 | right] = value
        return value

    def merge(self, word: bytes) -> list[int]:
        """The ids of a word."""
        symbols = list(self.characters(word))
        n = len(symbols)
        before, after = list(range(-1, n - 1)), [*range(1, n), -1]
        pairs, joined = self._pairs, self._joined
        queue: list[int] = []
        for left in range(n - 1):
            value = pairs.get(symbols[left] << 32 | symbols[left + 1])
            if value is None:
                value = joined(symbols[left], symbols[left + 1])
            if value >= 0:
                queue.append(value & ~_LOW | left)
        heapq.heapify(queue)
        while queue:
            key = heapq.heappop(queue)
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
                        heapq.heappush(queue, value & ~_LOW | first)
        return self._ids(symbols, after)

    def _ids(self, symbols: list[int], after: list[int]) -> list[int]:
        ids: list[int] = []
        at = 0 if symbols else -1
        while at >= 0:
            symbol = symbols[at]
            if symbol < self._vocab.n:
                ids.append(symbol)
            else:
                ids += self.spell(self.text(symbol))
            at = after[at]
        return ids
