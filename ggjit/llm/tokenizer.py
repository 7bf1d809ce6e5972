"""Text to tokens and back, from the metadata of a GGUF file, with the results of llama.cpp.

    text -> cut at special tokens -> between them: merge (merging.py, spm.py, bpe.py) -> ids
    ids  -> pieces, byte by byte  -> text

Kinds of vocabulary are registered in `KINDS` by `tokenizer.ggml.model`.

Source: llama.cpp's llama_tokenize, llama_detokenize and llama_token_to_piece.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Protocol

from ggjit import garbage
from ggjit.arguments import check_kinds
from ggjit.counts import counted
from ggjit.gguf import GgufFile
from ggjit.llm.bpe import BYTE_OF, BpeMerger
from ggjit.llm.pretokenizers import PRE_TOKENIZERS
from ggjit.llm.special import SpecialTokens
from ggjit.llm.spm import BLANK, SpmMerger
from ggjit.llm.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    RSTRIP,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Roles,
    Vocab,
    get_bool,
    get_str,
)

__all__ = ["KINDS", "StreamDecoder", "Tokenizer"]

MARGIN = 8192  # characters at the end of a text that was cut there
_WORDS = 512  # that must be among them
_CHARACTERS_OF_A_TOKEN = 4  # about
_TOKENS_OF_A_CHARACTER = 8  # at most: a byte each, those of a blank before it, a special token
_PHI3_KEEPS = (b"<unk>", b"<s>", b"<|endoftext|>")
_CLEANING = ((re.compile(rb" ([?!.,])"), rb"\1"), (re.compile(rb" ' "), b"'"), (re.compile(rb" '(?=[sm]|re|ve)"), b"'"))


def is_utf8(text: str) -> bool:
    """Whether a text can be written in UTF-8: it holds no halves of pairs, which stand for other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Merger(Protocol):
    """What a kind of vocabulary does with text that holds no special tokens."""

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text."""

    def words(self, text: bytes) -> list[bytes]:
        """The words of a text, which become ids each for itself."""


class Tokenizer:
    """The tokenizer of a model. Make one with `Tokenizer.from_gguf`.

    Attributes:
        n_vocab: number of tokens.
        bos: id of the token that begins a text; so `eos`, `eot`, `eom`, `unk`, `sep`, `nl`, `pad`, `mask` (-1: none).
        eog: ids of all tokens that end the generation.
        add_bos: whether `add_special` puts `bos` before a text.
        add_eos: whether `add_special` puts `eos` behind it.
        chat_template: source of the chat template, empty if the model has none (see `chat.py`).
    """

    def __init__(self, file: GgufFile, vocab: Vocab, defaults: dict[str, int]) -> None:
        self.vocab = vocab
        self.n_vocab = vocab.n
        roles = Roles(file, vocab, defaults)
        self.roles, self.eog = roles.ids, roles.eog
        self.bos, self.eos, self.eot, self.eom = (roles.ids[role] for role in ("bos", "eos", "eot", "eom"))
        self.unk, self.sep, self.pad, self.mask = (roles.ids[role] for role in ("unk", "sep", "pad", "mask"))
        self.nl = -1
        self.chat_template = get_str(file.kv, "tokenizer.chat_template")
        self.add_bos = self.add_eos = self.add_space_prefix = self.clean_spaces = False
        self._special: dict[bool, SpecialTokens] = {}
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})  # without and with what is special
        self._merger: Merger
        self._strip_rules(file)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(self.n_vocab, 'token')})"

    @staticmethod
    @garbage.put_off()
    def from_gguf(file: GgufFile) -> Tokenizer:
        """The tokenizer that a file describes.

        Raises:
            NotImplementedError: nothing here knows its kind of vocabulary or of pre-tokenizer.
            GgufError: its metadata do not hold what the kind needs.
        """
        kind = get_str(file.kv, "tokenizer.ggml.model")
        if not kind:
            raise file.kv.fail("tokenizer.ggml.model", "must be in the file")
        if kind not in KINDS:
            raise NotImplementedError(f"tokenizer: tokenizer.ggml.model must be one of {sorted(KINDS)}, got {kind!r}")
        return KINDS[kind](file)

    def _flags(self, file: GgufFile, add_bos: bool, add_space_prefix: bool, clean_spaces: bool) -> None:
        """Set the flags of a kind, then those that the file itself gives."""
        kv = file.kv
        self.clean_spaces = clean_spaces
        self.add_space_prefix = get_bool(kv, "tokenizer.ggml.add_space_prefix", add_space_prefix)
        self.add_bos = get_bool(kv, "tokenizer.ggml.add_bos_token", add_bos)
        self.add_eos = get_bool(kv, "tokenizer.ggml.add_eos_token", False)
        for name in ("bos", "eos"):
            if getattr(self, f"add_{name}") and getattr(self, name) < 0:
                key = f"tokenizer.ggml.{name}_token_id"
                raise kv.fail(key, f"must be in the file and below {self.n_vocab}, since texts get that token")

    def _strip_rules(self, file: GgufFile) -> None:
        """Special tokens of Phi 3 swallow the blanks behind them; GGUF has no field for that, only the name tells."""
        name = get_str(file.kv, "general.name").lower()
        if "phi-3" not in name and "phi3" not in name:
            return
        attr = self.vocab.attr
        attr[(attr & (CONTROL | USER_DEFINED | UNKNOWN)) != 0] |= RSTRIP
        found = self.vocab.find_all((b"</s>", *_PHI3_KEEPS))
        if b"</s>" in found:
            attr[found[b"</s>"]] |= RSTRIP
        for text in _PHI3_KEEPS:
            if text in found:
                attr[found[text]] &= ~RSTRIP & 0xFFFF

    def is_eog(self, id: int) -> bool:
        """Whether a token ends the generation."""
        return id in self.eog

    def attr(self, id: int) -> int:
        """Bits of a token's kind, as llama.cpp gives them."""
        attr = int(self.vocab.attr[self._check(id)])
        return attr | UNUSED if attr & CONTROL and b"unused" in self.vocab.text(id) else attr

    def _check(self, id: int) -> int:
        check_kinds("tokenizer", Integral, "a whole number", id=id)
        if not 0 <= id < self.n_vocab:
            raise IndexError(f"tokenizer: id must be in [0, {self.n_vocab}), got {id}")
        return id

    def tokenize(self, text: str | bytes, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Turn text into ids.

        Args:
            text: str, or bytes that need not be UTF-8.
            add_special: put BOS before and EOS behind it if the model wants them.
            parse_special: recognise control tokens in the text (user-defined ones always are).

        Returns:
            The ids.

        Raises:
            TypeError: the text is neither.
        """
        check_kinds("tokenize", (str, bytes, bytearray, memoryview), "str or bytes", text=text)
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
        if parse_special not in self._special:
            self._special[parse_special] = SpecialTokens(self.vocab, parse_special)
        ids = [self.bos] if add_special and self.add_bos else []
        after_special = True
        for piece in self._special[parse_special].cut(data):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode(piece, after_special)
            after_special = isinstance(piece, int)
        return [*ids, self.eos] if add_special and self.add_eos else ids

    def first_tokens(self, text: str | bytes, n: int) -> list[int]:
        """The first n ids of a long text, or some more, as `tokenize(text, parse_special=False)` gives them.

        No more of the text is looked at than is needed, where its end does not change its beginning: where text is cut,
        only the words near the cut change, and whether there are words tells `MARGIN` characters before it. Their
        tokens are dropped.
        """
        text = bytes(text).decode("utf-8", "surrogateescape") if not isinstance(text, str) else text
        n_dropped = MARGIN * _TOKENS_OF_A_CHARACTER
        size = _CHARACTERS_OF_A_TOKEN * (n + n_dropped)
        while size < len(text) and is_utf8(text):  # else SentencePiece knows no words
            if len(self._words(text[size - MARGIN : size].encode())) < _WORDS:
                break
            ids = self.tokenize(text[:size], parse_special=False)
            if len(ids) >= n + n_dropped:
                return ids[:-n_dropped]
            size *= 2
        return self.tokenize(text, parse_special=False)

    def _words(self, text: bytes) -> list[bytes]:
        return self._merger.words(text)

    def _encode(self, text: bytes, after_special: bool) -> list[int]:
        return self._merger.encode(text)

    def _piece(self, id: int, attr: int) -> bytes:
        """Text of a normal token."""
        raise NotImplementedError

    def piece(self, id: int, special: bool = True) -> bytes:
        """The bytes that a token stands for.

        Args:
            id: the token.
            special: whether control and unknown tokens give their text, or nothing.

        Raises:
            IndexError: there is no such token.
        """
        piece = self._pieces[special].get(id)
        if piece is None:
            piece = self._pieces[special][id] = self._new_piece(id, special)
        return piece

    def known_pieces(self, special: bool) -> Mapping[int, bytes]:
        """Pieces that have been asked for already."""
        return self._pieces[special]

    def _new_piece(self, id: int, special: bool) -> bytes:
        attr = int(self.vocab.attr[self._check(id)])
        if not special and attr & (UNKNOWN | CONTROL):
            return b""
        text = self.vocab.text(id)
        if attr & (UNKNOWN | CONTROL | USER_DEFINED):
            return text
        if attr & NORMAL:
            return self._piece(id, attr)
        if attr & BYTE and re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", text):
            return bytes((int(text[3:5], 16),))
        return b""

    def detokenize_bytes(
        self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False
    ) -> bytes:
        """As `detokenize`, without decoding."""
        check_kinds("detokenize", Iterable, "token ids", ids=ids)
        ids = list(ids)
        strip = self.add_space_prefix
        if remove_special and self.add_bos and ids and ids[0] == self.bos:
            ids, strip = ids[1:], False
        if remove_special and self.add_eos and ids and ids[-1] == self.eos:
            ids = ids[:-1]
        pieces = [self.piece(id, unparse_special) for id in ids]
        if strip and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        if self.clean_spaces:
            for pattern, replacement in _CLEANING:
                text = pattern.sub(replacement, text)
        return text

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """Turn ids into text; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: the tokens.
            remove_special: drop the BOS and EOS that `tokenize` adds.
            unparse_special: write control tokens out instead of leaving them away.

        Returns:
            The text.

        Raises:
            IndexError: there is no such token.
            TypeError: an id is no whole number.
        """
        return self.detokenize_bytes(ids, remove_special, unparse_special).decode("utf-8", "replace")


class SpmTokenizer(Tokenizer):
    """SentencePiece vocabularies: Llama 2, Gemma, Phi 3."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file, Vocab(file), {"bos": 1, "eos": 2, "unk": 0})
        self._flags(file, add_bos=True, add_space_prefix=True, clean_spaces=False)
        merger = SpmMerger(self.vocab)
        newline = merger.byte_id(ord("\n"))
        self._merger, self.nl = merger, newline if newline >= 0 else self.pad

    def _words(self, text: bytes) -> list[bytes]:
        return self._merger.words(text.replace(b" ", BLANK))

    def _encode(self, text: bytes, after_special: bool) -> list[int]:
        if self.add_space_prefix and after_special:
            text = b" " + text
        return self._merger.encode(text.replace(b" ", BLANK))

    def _piece(self, id: int, attr: int) -> bytes:
        return self.vocab.text(id).replace(BLANK, b" ")


class BpeTokenizer(Tokenizer):
    """Byte-level BPE vocabularies: GPT-2, Llama 3, Qwen, SmolLM and most others."""

    def __init__(self, file: GgufFile) -> None:
        name = get_str(file.kv, "tokenizer.ggml.pre") or "default"
        if name not in PRE_TOKENIZERS:
            raise NotImplementedError(
                f"tokenizer: tokenizer.ggml.pre must be one of {sorted(PRE_TOKENIZERS)}, got {name!r}"
            )
        kind = PRE_TOKENIZERS[name]
        super().__init__(file, Vocab(file), {"bos": 11 if kind.bos else -1, "eos": 11})
        self._flags(file, add_bos=kind.add_bos, add_space_prefix=False, clean_spaces=kind.clean_spaces)
        self._merger = BpeMerger(file, self.vocab, kind)
        newline = self.vocab.id("Ċ".encode())
        self.nl = newline if newline >= 0 else self.pad

    def _piece(self, id: int, attr: int) -> bytes:
        text = self.vocab.text(id)
        piece = bytearray()
        for character in text.decode("utf-8", "replace"):
            if character in BYTE_OF:
                piece.append(BYTE_OF[character])
            else:
                piece += b"[UNK_BYTE_0x" + character.encode().hex().encode() + text + b"]"
        return bytes(piece)


# tokenizer.ggml.model -> the class that reads it.
KINDS: dict[str, Callable[[GgufFile], Tokenizer]] = {"llama": SpmTokenizer, "gpt2": BpeTokenizer}


class StreamDecoder:
    """Turns ids into text as they come, holding back the bytes of a character that is not yet whole.

    Args:
        tokenizer: of the model.
        special: whether control tokens are written out.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special, self._held = tokenizer, special, b""
        self._known = tokenizer.known_pieces(special)

    def push(self, ids: int | Sequence[int]) -> str:
        """The text that is whole once these tokens are added; it may be empty."""
        held = self._held
        for id in (ids,) if isinstance(ids, int) else ids:
            piece = self._known.get(id)
            held += self._tokenizer.piece(int(id), self._special) if piece is None else piece
        text, n = utf_8_decode(held, "replace", False)
        self._held = held[n:]
        return text

    def flush(self) -> str:
        """What was held back; a character that never became whole is U+FFFD. The decoder starts anew."""
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return text
