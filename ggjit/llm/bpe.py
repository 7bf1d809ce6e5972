"""Byte-level BPE vocabularies (`tokenizer.ggml.model` "gpt2"): joining bytes by a list of merges.

A text is cut into words by the patterns of its pre-tokenizer kind (by the `tokenizers` library, whose regular
expressions are those of the models' makers). The bytes of a word, one printable character each, are joined in the order
of the model's list of merges. That list stays in the file, like the vocabulary: the library's own merging needs tables
of both, which take 0.1 s for 50,000 tokens, and cannot join over strings that are no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggjit.extras import how_to_install
from ggjit.gguf import GgufFile, ValueType
from ggjit.llm.merging import PairMerger
from ggjit.llm.pretokenizers import PreTokenizer
from ggjit.llm.vocab import TextIndex, Vocab, get_array

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer as Splitter

__all__ = ["BYTE_OF", "BpeMerger", "decode"]


def _byte_characters() -> dict[int, str]:
    """Byte to the printable character that stands for it (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


CHARACTER_OF = _byte_characters()
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}

_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def decode(data: bytes) -> str:
    """Decode UTF-8; each byte that is part of none becomes U+FFFD, as in llama.cpp (and not one for several)."""
    return _NOT_UTF8.sub("\ufffd", data.decode("utf-8", "surrogateescape"))


def _splitter(kind: PreTokenizer) -> Splitter:
    try:
        from tokenizers import Regex, pre_tokenizers
    except ModuleNotFoundError as error:
        hint = f"tokenizer: byte-level BPE needs the package tokenizers; {how_to_install('tokenizers')}"
        raise ModuleNotFoundError(hint, name=error.name) from None
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns])


class BpeMerger(PairMerger):
    """Turns text into ids by a list of merges.

    Args:
        file: the model, for its merges.
        vocab: its vocabulary.
        kind: its pre-tokenizer.
    """

    def __init__(self, file: GgufFile, vocab: Vocab, kind: PreTokenizer) -> None:
        super().__init__(vocab)
        key = "tokenizer.ggml.merges"
        if get_array(file.kv, key, 0, ValueType.STRING) is None:
            raise file.kv.fail(key, "must be in the file, an ARRAY of STRING")
        self._merges = TextIndex(file.kv[key])
        self._ignore_merges = kind.ignore_merges
        self._splitter = _splitter(kind)
        self._bytes: list[int] = []

    def rank(self, left: bytes, right: bytes) -> int:
        """The place in the list of merges."""
        return self._merges.find(left + b" " + right)

    def characters(self, word: bytes) -> Iterable[int]:
        """One symbol a byte."""
        if not self._bytes:
            self._bytes = [self.symbol(CHARACTER_OF[byte].encode()) for byte in range(256)]
        return map(self._bytes.__getitem__, word)

    def spell(self, text: bytes) -> list[int]:
        """The tokens of the bytes that the text is written with, where there are some."""
        return [id for byte in text if (id := self._vocab.id(bytes((byte,)))) >= 0]

    def merge(self, word: bytes) -> list[int]:
        """The ids of a word; kinds that ignore merges take one that is a token as it is."""
        if self._ignore_merges:
            id = self._vocab.id("".join(map(CHARACTER_OF.__getitem__, word)).encode())
            if id >= 0:
                return [id]
        return super().merge(word)

    def words(self, text: bytes) -> list[bytes]:
        """What the pre-tokenizer cuts a text into."""
        return [word.encode() for word, _ in self._splitter.pre_tokenize_str(decode(text))]
