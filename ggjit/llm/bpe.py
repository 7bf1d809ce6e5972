"""Byte-level BPE vocabularies (`tokenizer.ggml.model` "gpt2"), on the `tokenizers` library.

A text is cut into words by the patterns of its pre-tokenizer kind, the bytes of a word are written as one printable
character each, and neighbours are merged in the order of the model's list of merges.

Merges may lead over strings that are no tokens. The library has no such strings, so they get ids behind the
vocabulary here, and a result that still holds one is spelled out afterwards.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ggjit.gguf import GgufFile, ValueType
from ggjit.llm.pretokenizers import PreTokenizer
from ggjit.llm.vocab import Vocab, get_array

if TYPE_CHECKING:
    import tokenizers

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


def _halves(merge: str) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not left:  # a blank at the first place belongs to the left half
        left, blank, right = merge[1:].partition(" ")
        left = " " + left
    return (left, right) if blank else ("", "")


def _library() -> type[tokenizers.Tokenizer]:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tokenizer: byte-level BPE vocabularies need the package tokenizers; pip install 'ggjit[llm]'",
            name=error.name,
        ) from None
    return tokenizers.Tokenizer


class BpeMerger:
    """Turns text into ids by a list of merges.

    Args:
        file: the model, for its merges.
        vocab: its vocabulary.
        kind: its pre-tokenizer.
    """

    def __init__(self, file: GgufFile, vocab: Vocab, kind: PreTokenizer) -> None:
        self._vocab, self._kind = vocab, kind
        key = "tokenizer.ggml.merges"
        merges = get_array(file.kv, key, 0, ValueType.STRING)
        if merges is None:
            raise file.kv.fail(key, "must be in the file, an ARRAY of STRING")
        self._merges = file.kv[key]
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._spelled: dict[int, list[int]] = {}
        _library()

    def _build(self) -> tokenizers.Tokenizer:
        from tokenizers import Regex, models, pre_tokenizers

        ids = {text: id for id, text in enumerate(self._vocab.texts)}
        pairs = list(dict.fromkeys(map(_halves, self._merges)))
        strings = {*BYTE_OF, *(left + right for left, right in pairs)}
        for text in sorted(strings - ids.keys()):
            self._spelled[len(ids)] = [id for id in map(self._byte_id, text.encode()) if id >= 0]
            ids[text] = len(ids)
        merges = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=self._kind.ignore_merges)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._kind.patterns]
        tokenizer = _library()(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return tokenizer

    def _byte_id(self, byte: int) -> int:
        return self._vocab.id(bytes((byte,)))

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text."""
        if self._tokenizer is None:
            self._tokenizer = self._build()
        ids: list[int] = self._tokenizer.encode(decode(text), add_special_tokens=False).ids
        if self._spelled and max(ids, default=0) >= self._vocab.n:
            ids = [piece for id in ids for piece in self._spelled.get(id, (id,))]
        return ids
