"""Run reference vocabularies: tokenize, detokenize, pieces, roles of tokens, chat templates. Every row is a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggjit.dev.reference_cases import Difference
from ggjit.dev.reference_ops import Unsupported
from ggjit.gguf import GgufFile

if TYPE_CHECKING:
    from ggjit.llm.tokenizer import Tokenizer

Job = tuple[str, Callable[[], list[Difference]]]

SEPARATOR = "\n__ggml_vocab_test__\n"
ROLES = ("bos", "eos", "eot", "sep", "nl", "pad", "mask", "add_bos", "add_eos")


def _unequal(what: str, got: Any, want: Any) -> list[Difference]:
    return [] if got == want else [Difference(f"{what}: got {got!r:.200}, not {want!r:.200}", 1, 0)]


class _Vocabulary:
    """The cases of one vocabulary."""

    def __init__(self, facts: dict[str, Any], file: Path) -> None:
        self.facts, self.file = facts, file
        self._tokenizer: Tokenizer | None = None
        self._missing: Unsupported | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, made once.

        Raises:
            Unsupported: its kind is not registered.
        """
        from ggjit.llm.tokenizer import Tokenizer

        if self._missing is not None:
            raise self._missing
        if self._tokenizer is None:
            file = GgufFile(self.file)
            try:
                self._tokenizer = Tokenizer.from_gguf(file)
            except NotImplementedError:
                kind, pre = (file.kv.get(f"tokenizer.ggml.{key}", "") for key in ("model", "pre"))
                self._missing = Unsupported("vocabularies", f"{kind} {pre}".strip())
                raise self._missing from None
        return self._tokenizer

    def roles(self) -> list[Difference]:
        """Number of tokens, tokens with a role, flags."""
        want, t = self.facts["vocab"], self.tokenizer
        found = _unequal("n_vocab", t.n_vocab, want["n_vocab"])
        for role in ROLES:
            found += _unequal(role, getattr(t, role), want[role])
        return found + _unequal("eog", sorted(t.eog), sorted(want["eog"]))

    def tokenize(self, row: dict[str, Any]) -> list[Difference]:
        """A text with all flags that give the same ids."""
        found = []
        for special, parse in row["flags"]:
            got = list(self.tokenizer.tokenize(row["text"], add_special=special, parse_special=parse))
            found += _unequal(f"tokenize {row['text']!r:.60} {special, parse}", got, row["ids"])
        return found

    def detokenize(self, row: dict[str, Any]) -> list[Difference]:
        """Ids to bytes."""
        want = bytes.fromhex(row["hex"]) if "hex" in row else row["text"].encode()
        flags = {key: row[key] for key in ("remove_special", "unparse_special")}
        got = self.tokenizer.detokenize_bytes(row["ids"], **flags)
        return _unequal(f"detokenize {row['ids']!r:.60}", got, want)

    def piece(self, id: int) -> list[Difference]:
        """The bytes of one token with and without special texts, and the bits of its kind."""
        pieces, t = self.facts["pieces"], self.tokenizer
        found = _unequal("piece", t.piece(id, special=True).hex(), pieces["special_hex"][id])
        found += _unequal("plain piece", t.piece(id, special=False).hex(), pieces["plain_hex"][id])
        return found + _unequal("attr", t.attr(id), pieces["attr"][id])

    def chat(self, one: dict[str, Any]) -> list[Difference]:
        """A rendered conversation, and its ids."""
        from ggjit.llm.chat import render

        got = render(self.tokenizer, one["messages"], add_generation_prompt=one.get("add_generation_prompt", True))
        found = _unequal("rendered chat", got, one["rendered"] if "rendered" in one else one["rendered_c_api"])
        if "ids" in one:
            found += _unequal("ids of the chat", list(self.tokenizer.tokenize(got, add_special=False)), one["ids"])
        return found

    def _texts(self, path: Path) -> Iterator[dict[str, Any]]:
        """Rows of an .inp file of texts and an .out file of ids."""
        inputs, outputs = (path.parent / f"{self.file.name}.{kind}" for kind in ("inp", "out"))
        if inputs.exists() and outputs.exists():
            texts = inputs.read_bytes().decode().split(SEPARATOR)
            lines = outputs.read_text().split("\n")
            for text, line in zip(texts, lines[: len(texts)], strict=True):
                yield {"text": text, "ids": [int(word) for word in line.split()], "flags": [(False, False)]}

    def jobs(self, path: Path) -> Iterator[Job]:
        """All rows."""
        name = self.facts["name"]
        yield f"{name} vocabulary", self.roles
        for i, row in enumerate(self.facts["tokenize"]):
            yield f"{name} tokenize {i}", lambda row=row: self.tokenize(row)  # type: ignore[misc]
        for i, row in enumerate(self.facts["detokenize"]):
            yield f"{name} detokenize {i}", lambda row=row: self.detokenize(row)  # type: ignore[misc]
        for id in range(len(self.facts.get("pieces", {}).get("attr", ()))):
            yield f"{name} piece {id}", lambda id=id: self.piece(id)  # type: ignore[misc]
        for i, one in enumerate(self.facts.get("chats", self.facts.get("chat", ()))):
            yield f"{name} rendered chat {i}", lambda one=one: self.chat(one)  # type: ignore[misc]
        for i, row in enumerate(self._texts(path)):
            yield f"{name} text {i}", lambda row=row: self.tokenize(row)  # type: ignore[misc]


def jobs(path: Path, facts: dict[str, Any], file: Path) -> Iterator[Job]:
    """The vocabulary cases that a JSON file describes, if it describes any and the model is there."""
    if file.exists() and "tokenize" in facts:
        yield from _Vocabulary(facts, file).jobs(path)
