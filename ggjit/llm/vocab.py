"""The vocabulary of a GGUF file: texts, scores and kinds of tokens, and the tokens with a role.

Texts stay in the mapped file. Looking one up goes through a table of all texts of its length in bytes, made when that
length is first asked for, so that opening a model costs the same for 500 and for 262,144 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit.gguf import GgufFile, Metadata, StringArray, ValueType

__all__ = [
    "BYTE",
    "CONTROL",
    "LSTRIP",
    "NORMAL",
    "RSTRIP",
    "UNKNOWN",
    "UNUSED",
    "USER_DEFINED",
    "Roles",
    "TextIndex",
    "Vocab",
]

# Bits of a token's kind, as llama.cpp numbers them.
UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE, LSTRIP, RSTRIP = 1, 2, 4, 8, 16, 32, 128, 256

# Kind by `tokenizer.ggml.token_type`; other numbers mean nothing.
_KINDS = np.zeros(8, np.uint16)
_KINDS[1:7] = NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE


_LONG = 256


def _value(kv: Metadata, key: str, kinds: tuple[ValueType, ...], what: str, default: Any) -> Any:
    if key not in kv:
        return default
    if kv.value_type(key) not in kinds:
        raise kv.fail(key, f"must be {what}, got {kv.value_type(key).name}")
    return kv[key]


def get_str(kv: Metadata, key: str, default: str = "") -> str:
    """A string of the metadata, `default` if the key is not there."""
    return str(_value(kv, key, (ValueType.STRING,), "STRING", default))


def get_bool(kv: Metadata, key: str, default: bool) -> bool:
    """A flag of the metadata, `default` if the key is not there."""
    return bool(_value(kv, key, (ValueType.BOOL,), "BOOL", default))


def get_array(kv: Metadata, key: str, n: int, *kinds: ValueType) -> Any:
    """The first `n` elements of an array of the metadata, None if the key is not there.

    Raises:
        GgufError: the value is no array of one of these types, or too short.
    """
    if key not in kv:
        return None
    if kv.element_type(key) not in kinds:
        got = kv.element_type(key)
        shown = f"ARRAY of {got.name}" if got is not None else kv.value_type(key).name
        raise kv.fail(key, f"must be ARRAY of {' or '.join(kind.name for kind in kinds)}, got {shown}")
    if len(kv[key]) < n:
        raise kv.fail(key, f"must have {n} elements, one a token, got {len(kv[key])}")
    return kv[key][:n]


class TextIndex:
    """Finds the strings of an array by their bytes, through a table a length, made when it is first asked for.

    Attributes:
        texts: the array.
        offsets: int64 [n], where each text begins in the file.
        lengths: int64 [n], bytes of each text.
    """

    def __init__(self, texts: StringArray) -> None:
        self.texts = texts
        self.offsets, self.lengths = texts.offsets, texts.lengths
        # Places by length; texts of _LONG bytes and more are together.
        short = np.minimum(self.lengths, _LONG).astype(np.uint16)
        self._order = np.argsort(short, kind="stable")
        self._first = np.concatenate(([0], np.cumsum(np.bincount(short, minlength=_LONG + 1))))
        self._tables: dict[int, dict[bytes, int]] = {}

    def text(self, i: int) -> bytes:
        """The bytes of a text, as the file has it."""
        first = int(self.offsets[i])
        return bytes(self.texts.data.data[first : first + int(self.lengths[i])])

    def _as_long(self, nbytes: int) -> NDArray[np.int64]:
        bucket = min(nbytes, _LONG)
        places = self._order[self._first[bucket] : self._first[bucket + 1]]
        return places if bucket < _LONG else places[self.lengths[places] == nbytes]

    def _table(self, places: NDArray[np.int64], nbytes: int) -> dict[bytes, int]:
        """Text to place of texts that are all `nbytes` long; the first one of equals."""
        data = self.texts.data
        # Every byte of the file as the first of an item of that size: picking the texts is one indexing.
        items = np.ndarray((len(data) - nbytes + 1,), f"V{nbytes}", data.data, strides=(1,))
        places = places[::-1]
        return dict(zip(items[self.offsets[places]].tolist(), places.tolist()))

    def find(self, text: bytes) -> int:
        """The place of a text, -1 if it is not there."""
        nbytes = len(text)
        table = self._tables.get(nbytes)
        if table is None:
            table = self._table(self._as_long(nbytes), nbytes) if nbytes else {}
            self._tables[nbytes] = table
        return table.get(text, -1)

    def find_all(self, texts: Iterable[bytes]) -> dict[bytes, int]:
        """The places of those of these texts that are there, without making a table of all that are as long."""
        by_length: dict[int, list[bytes]] = {}
        for text in texts:
            by_length.setdefault(len(text), []).append(text)
        found = {}
        for nbytes, group in by_length.items():
            places = self._as_long(nbytes)
            firsts = np.zeros(256, np.bool_)
            firsts[[text[0] for text in group]] = True
            table = self._table(places[firsts[self.texts.data[self.offsets[places]]]], nbytes)
            found.update({text: table[text] for text in group if text in table})
        return found


class Vocab(TextIndex):
    """Texts, scores and kinds of the tokens of a model.

    Attributes:
        n: number of tokens.
        scores: f32 [n], zeros if the file has none.
        attr: uint16 [n], bits of the kind.
    """

    def __init__(self, file: GgufFile) -> None:
        kv = file.kv
        key = "tokenizer.ggml.tokens"
        if get_array(kv, key, 0, ValueType.STRING) is None:
            raise kv.fail(key, "must be in the file, an ARRAY of STRING")
        super().__init__(kv[key])
        self.n = len(self.texts)
        scores = get_array(kv, "tokenizer.ggml.scores", self.n, ValueType.FLOAT32, ValueType.INT32)
        self.scores: NDArray[np.float32] = np.asarray(np.zeros(self.n) if scores is None else scores, np.float32)
        kinds = get_array(kv, "tokenizer.ggml.token_type", self.n, ValueType.INT32)
        if kinds is None:
            self.attr = np.full(self.n, NORMAL, np.uint16)
        else:
            self.attr = _KINDS[np.where((kinds > 0) & (kinds < 7), kinds, 0)]

    def text(self, i: int) -> bytes:
        """The bytes of a token's text; an empty one gets a name."""
        return super().text(i) or b"[EMPTY_%d]" % i

    def id(self, text: bytes) -> int:
        """The token with a text, -1 if there is none."""
        return self.find(text)


# Tokens that end a turn are found by their text if the file does not name them. llama.cpp takes the one that its hash
# map meets first; this order agrees with it on every vocabulary of the reference.
_ROLE_TEXTS = {
    "eot": "<|eot_id|> <|end|> <end_of_turn> <|endoftext|> <|im_end|> <|end_of_text|> <EOT> _<EOT> [EOT]"
    " <｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_EOG_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>"
    " [e~["
)
_SHOWN_TEXTS = "<|channel|> <|message|> <|start|> <|constrain|>"  # of gpt-oss: text that a reader must see
_KEYS = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator", "pad": "padding",
    "mask": "mask", "fim_pre": "fim_pre", "fim_suf": "fim_suf", "fim_mid": "fim_mid", "fim_pad": "fim_pad",
    "fim_rep": "fim_rep", "fim_sep": "fim_sep",
}  # fmt: skip
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_INTEGERS = tuple(ValueType(i) for i in (0, 1, 2, 3, 4, 5, 10, 11))


def _words(texts: str) -> list[bytes]:
    return [word.encode() for word in texts.split(" ")]


class Roles:
    """Which tokens have a role. Ids are -1 where a model has no such token.

    Attributes:
        ids: role (`bos`, `eos`, `eot`, `eom`, `unk`, `sep`, `pad`, `mask`, `fim_pre`, ...) to id.
        eog: all tokens that end the generation: by id, and by what their text is known to mean.
    """

    def __init__(self, file: GgufFile, vocab: Vocab, defaults: dict[str, int]) -> None:
        kv = file.kv
        self.ids = {role: id if id < vocab.n else -1 for role, id in defaults.items()}
        for role, name in (*_KEYS.items(), *_OLD_KEYS.items()):
            key = f"tokenizer.ggml.{name}_token_id"
            id = _value(kv, key, _INTEGERS, "an integer", -1)
            self.ids[role] = id if 0 <= id < vocab.n else self.ids.get(role, -1)
        self._vocab = vocab
        texts = {text for group in (*_ROLE_TEXTS.values(), _EOG_TEXTS, _SHOWN_TEXTS) for text in _words(group)}
        self._found = vocab.find_all(texts)
        self._by_text()
        self.eog = frozenset(self._end_of_generation())

    def _control(self, id: int) -> None:
        self._vocab.attr[id] |= CONTROL

    def _by_text(self) -> None:
        for role, texts in _ROLE_TEXTS.items():
            if self.ids[role] == -1:
                self.ids[role] = next((self._found[text] for text in _words(texts) if text in self._found), -1)
                if self.ids[role] != -1:
                    self._control(self.ids[role])

    def _end_of_generation(self) -> set[int]:
        eog = {self.ids[role] for role in ("fim_pad", "fim_rep", "fim_sep")}
        for text in _words(_EOG_TEXTS):
            if text in self._found:
                eog.add(self._found[text])
                self._control(self._found[text])
        for text in _words(_SHOWN_TEXTS):
            if text in self._found:
                self._vocab.attr[self._found[text]] = USER_DEFINED
        eog |= {self.ids[role] for role in ("eos", "eot", "eom")}
        there = {text for text, id in self._found.items() if id in eog}
        # In the formats of gpt-oss and solar-open <|end|> ends a message, not the turn.
        if b"<|end|>" in there and ({b"<|return|>", b"<|call|>"} <= there or self._solar(there)):
            eog.discard(self._found[b"<|end|>"])
            self._vocab.attr[self._found[b"<|end|>"]] = USER_DEFINED
        return eog - {-1}

    @staticmethod
    def _solar(there: set[bytes]) -> bool:
        return b"<|flush|>" in there and bool({b"<|call|>", b"<|calls|>"} & there)
