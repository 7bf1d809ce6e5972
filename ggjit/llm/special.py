"""Special tokens in a text: cutting it into tokens that are written out and the text between them.

llama.cpp takes one token after the other, the longest first, and cuts every piece of text that is left at each
occurrence. Here all occurrences are found in one pass over the text (the places where a special token may begin, then
one look-up a length), and the same order then decides between those that overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from ggjit.llm.vocab import CONTROL, LSTRIP, RSTRIP, UNKNOWN, USER_DEFINED, Vocab

__all__ = ["SpecialTokens"]

_BLANKS = b" \t\n\v\f\r"


class SpecialTokens:
    """The special tokens of a vocabulary, ready to cut texts.

    Args:
        vocab: the vocabulary; its kinds must be final.
        control: whether control and unknown tokens are recognised beside the user-defined ones.
    """

    def __init__(self, vocab: Vocab, control: bool) -> None:
        hidden = (vocab.attr & (CONTROL | UNKNOWN)) != 0
        shown = (vocab.attr & USER_DEFINED) != 0
        wanted = hidden | shown if control else shown & ~hidden
        self._vocab = vocab
        self._ids: dict[bytes, int] = {vocab.text(id): id for id in np.flatnonzero(wanted).tolist()}
        self._lengths: dict[bytes, list[int]] = {}  # by the first two bytes
        for text in self._ids:
            self._lengths.setdefault(text[:2], []).append(len(text))
        for begin, sizes in self._lengths.items():
            self._lengths[begin] = sorted(set(sizes))
        # A byte that may begin a token, and ahead of it one that may be the second: the search for tokens that overlap
        # goes on byte by byte.
        firsts = [re.escape(bytes({begin[0] for begin in self._lengths if len(begin) == n})) for n in (1, 2)]
        seconds = re.escape(bytes({begin[1] for begin in self._lengths if len(begin) == 2}))
        begins = [b"[" + firsts[0] + b"]"] if firsts[0] else []
        begins += [b"[" + firsts[1] + b"](?=[" + seconds + b"])"] if seconds else []
        self._begin = re.compile(b"|".join(begins)) if begins else None

    def _occurrences(self, text: bytes) -> list[tuple[int, int, int]]:
        """(-length, id, place) of every place where a special token stands, overlapping ones too."""
        if self._begin is None:
            return []
        found = []
        for match in self._begin.finditer(text):
            place = match.start()
            for nbytes in self._sizes(text[place : place + 2]):
                word = text[place : place + nbytes]
                if len(word) < nbytes:
                    break
                if word in self._ids:
                    found.append((-nbytes, self._ids[word], place))
        return found

    def _sizes(self, begin: bytes) -> list[int]:
        longer = self._lengths.get(begin, [])
        return [1, *longer] if begin[:1] in self._lengths and len(begin) == 2 else longer

    def cut(self, text: bytes) -> Iterable[int | bytes]:
        """The text as ids of special tokens and the non-empty bytes between them."""
        occurrences = self._occurrences(text)
        if not occurrences:
            return [text] if text else []
        taken = bytearray(len(text))
        pieces: list[tuple[int, int | bytes]] = []
        for negative, id, place in sorted(occurrences):
            end = place - negative
            if taken.find(1, place, end) >= 0:
                continue
            pieces.append((place, id))
            first, last = self._strip(text, taken, id, place, end)
            taken[first:last] = b"\1" * (last - first)
        for match in re.finditer(b"\0+", bytes(taken)):
            pieces.append((match.start(), text[match.start() : match.end()]))
        return [piece for _, piece in sorted(pieces, key=lambda item: item[0])]

    def _strip(self, text: bytes, taken: bytearray, id: int, first: int, last: int) -> tuple[int, int]:
        """The range that a token takes: its own, and the blanks beside it that it swallows."""
        attr = int(self._vocab.attr[id])
        if attr & LSTRIP:
            while first > 0 and not taken[first - 1] and text[first - 1] in _BLANKS:
                first -= 1
        if attr & RSTRIP:
            while last < len(text) and not taken[last] and text[last] in _BLANKS:
                last += 1
        return first, last
