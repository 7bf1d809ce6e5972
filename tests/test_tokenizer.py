"""Tokenizers: every row of the reference vocabularies, and what no row shows."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, STRING, entry, gguf
from real_models import real_model

from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, ValueType
from ggjit.llm.bpe import decode
from ggjit.llm.pretokenizers import PRE_TOKENIZERS
from ggjit.llm.special import SpecialTokens
from ggjit.llm.tokenizer import KINDS, StreamDecoder, Tokenizer
from ggjit.llm.vocab import CONTROL, LSTRIP, RSTRIP, USER_DEFINED

DATA = Path(__file__).parent / "data" / "vocab"
SMALL = sorted(path.stem for path in DATA.glob("*.gguf"))
ROLES = ("n_vocab", "bos", "eos", "eot", "sep", "nl", "pad", "mask", "add_bos", "add_eos")
REAL = {
    "smollm2-135m-instruct": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m": "gemma-3-270m-q4_k_m.gguf",
}

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra llm")


def load(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(DATA / f"{name}.gguf"))


def check(tokenizer: Tokenizer, facts: dict) -> int:
    """Compare all rows; the number of them."""
    for role in ROLES:
        assert getattr(tokenizer, role) == facts["vocab"][role], role
    assert sorted(tokenizer.eog) == facts["vocab"]["eog"]
    for row in facts["tokenize"]:
        for special, parse in row["flags"]:
            assert tokenizer.tokenize(row["text"], special, parse) == row["ids"], (row["text"], special, parse)
    for row in facts["detokenize"]:
        want = bytes.fromhex(row["hex"]) if "hex" in row else row["text"].encode()
        got = tokenizer.detokenize_bytes(row["ids"], row["remove_special"], row["unparse_special"])
        assert got == want, row
    pieces = facts.get("pieces", {"attr": []})
    for id in range(len(pieces["attr"])):
        assert tokenizer.piece(id).hex() == pieces["special_hex"][id]
        assert tokenizer.piece(id, special=False).hex() == pieces["plain_hex"][id]
        assert tokenizer.attr(id) == pieces["attr"][id]
    return len(facts["tokenize"]) + len(facts["detokenize"]) + len(pieces["attr"])


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SMALL)
def test_small_vocabularies(name):
    assert check(load(name), read(DATA / f"{name}.json")) > 600


def test_reference_models(reference):
    seen = set()
    for path in sorted((reference / "models").glob("*.json")):
        facts = read(path)
        file = path.with_suffix(".gguf")
        if "tokenize" not in facts or GgufFile(file).kv["tokenizer.ggml.model"] not in KINDS:
            continue
        check(Tokenizer.from_gguf(GgufFile(file)), facts)
        seen.add(path.stem)
    assert {"llama", "llama-tied", "gemma3", "phi3", "qwen2", "gpt2", "falcon", "bloom", "mpt", "starcoder2"} <= seen


def test_reference_vocabularies(reference):
    seen = set()
    for path in sorted((reference / "vocab").glob("*.cases.json")):
        name = path.name.removesuffix(".cases.json")
        file = path.with_name(f"ggml-vocab-{name}.gguf")
        if GgufFile(file).kv["tokenizer.ggml.model"] not in KINDS:
            continue
        tokenizer = Tokenizer.from_gguf(GgufFile(file))
        check(tokenizer, read(path))
        texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = Path(f"{file}.out").read_text().split("\n")
        for text, line in zip(texts, lines):
            assert tokenizer.tokenize(text, False, False) == [int(word) for word in line.split()], text
        seen.add(name)
    assert {"llama-spm", "gpt-2", "starcoder", "deepseek-coder"} <= seen


@pytest.mark.parametrize("name", REAL)
def test_real_models(reference, name):
    check(Tokenizer.from_gguf(GgufFile(real_model(REAL[name]))), read(reference / "models/real" / f"{name}.json"))


def vocabulary(texts: list[str], kinds: list[int], scores: list[float] | None = None, **more: object) -> bytes:
    entries = [
        entry("tokenizer.ggml.model", STRING, more.pop("model", "llama")),
        entry("tokenizer.ggml.tokens", ARRAY, (STRING, texts)),
        entry("tokenizer.ggml.token_type", ARRAY, (ValueType.INT32, kinds)),
    ]
    if scores is not None:
        entries.append(entry("tokenizer.ggml.scores", ARRAY, (ValueType.FLOAT32, scores)))
    for key, content in more.items():
        if isinstance(content, list):
            entries.append(entry(f"tokenizer.ggml.{key}", ARRAY, (STRING, content)))
        else:
            kind = {str: STRING, bool: ValueType.BOOL, int: ValueType.UINT32}[type(content)]
            entries.append(entry(key if "." in key else f"tokenizer.ggml.{key}", kind, content))
    return gguf(entries)


@pytest.fixture
def make(tmp_path):
    def make(*args, **more) -> Tokenizer:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"  # vocabularies are read lazily: one file each
        path.write_bytes(vocabulary(*args, **more))
        return Tokenizer.from_gguf(GgufFile(path))

    return make


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def spm(make, pieces: dict[str, float], special: dict[str, int] | None = None, **more) -> Tokenizer:
    special = {"<unk>": 2, "<s>": 3, "</s>": 3} | (special or {})
    texts = [*special, *BYTES, *pieces]
    kinds = [*special.values(), *[6] * 256, *[1] * len(pieces)]
    return make(texts, kinds, [0.0] * (len(special) + 256) + list(pieces.values()), **more)


def words(tokenizer: Tokenizer, text: str | bytes, *flags: bool) -> list[bytes]:
    return [tokenizer.vocab.text(id) for id in tokenizer.tokenize(text, *flags)]


def test_spm_joins_by_score_then_from_the_left(make):
    t = spm(make, {"a": -9, "b": -9, "ab": -2, "ba": -1, "aa": -3, "aaa": -4}, add_space_prefix=False)
    assert words(t, "abab", False) == [b"a", b"ba", b"b"]
    assert words(t, "aaaa", False) == [b"aa", b"aa"]
    assert words(t, "aaaaa", False) == [b"aa", b"aaa"]
    t = spm(make, {"a": -9, "b": -9, "c": -9, "ab": -1, "bc": -1}, add_space_prefix=False)
    assert words(t, "abc", False) == [b"ab", b"c"]


def test_spm_space_prefix_and_bytes(make):
    t = spm(make, {"▁": -9, "a": -9, "▁a": -1, "▁▁": -2})
    assert words(t, "a a") == [b"<s>", "▁a".encode(), "▁a".encode()]
    assert words(t, "  a", False) == ["▁▁".encode(), "▁a".encode()]
    assert words(t, "é", False) == ["▁".encode(), b"<0xC3>", b"<0xA9>"]
    assert words(t, b"\xff\xc3", False) == ["▁".encode(), b"<0xFF>", b"<0xC3>"]
    assert words(t, "<s>a</s> a", True, True)[1:] == [b"<s>", "▁a".encode(), b"</s>", "▁".encode(), "▁a".encode()]
    assert t.detokenize(t.tokenize("a a"), remove_special=True) == " a a"  # as llama.cpp: BOS keeps the prefix
    assert t.detokenize(t.tokenize("a a", False)) == "a a"
    assert t.nl == t.vocab.id(b"<0x0A>")


def test_spm_tokens_that_reach_over_a_blank(make):
    # Words may be merged on their own only where no token goes on over the blank.
    pieces = {"▁": -9, "x": -9, "y": -9, "a": -9, "x▁": -1, "x▁y": -0.5, "▁a": -1}
    t = spm(make, pieces, add_space_prefix=False)
    assert words(t, "x y", False) == ["x▁y".encode()]
    assert words(t, "a a", False) == [b"a", "▁a".encode()]
    assert words(t, "x  x a x", False)[-1] == b"x"
    r = random.Random(1)
    for _ in range(200):
        text = "".join(r.choice("xya  ") for _ in range(r.randint(1, 30)))
        whole = t._merger.merge(text.replace(" ", "▁").encode())
        assert t.tokenize(text, False) == whole, text


def test_spm_without_byte_tokens(make):
    t = make(["<unk>", "<s>", "</s>", "a"], [2, 3, 3, 1], [0.0] * 4, add_space_prefix=False)
    assert t.tokenize("a", False) == [3]
    with pytest.raises(ValueError, match="must have the token of every byte, got b'b' without one"):
        t.tokenize("b")


def test_special_tokens_longest_first(make):
    special = {"<x>": 3, "<x><y>": 3, "y><": 4, "\n": 4, "\n\n": 4, "\n\n\n": 4}
    t = spm(make, {"a": -9, "<": -9, ">": -9, "x": -9, "y": -9}, special, add_space_prefix=False)
    assert words(t, "a<x><y>a<x>", False) == [b"a", b"<x><y>", b"a", b"<x>"]
    assert words(t, "a<x><y>a", False, False) == [b"a", b"<", b"x", b">", b"<", b"y", b">", b"a"]
    assert words(t, "\n" * 8, False, False) == [b"\n\n\n", b"\n\n\n", b"\n\n"]
    assert words(t, "y><x>", False, True) == [b"y", b">", b"<x>"]  # as long as y><, and a smaller id
    assert words(t, "ay><a", False, False) == [b"a", b"y><", b"a"]


def test_special_tokens_swallow_blanks(make):
    t = spm(make, {"a": -9, "▁": -9}, {"<l>": 3, "<r>": 3, "<b>": 3}, add_space_prefix=False)
    for name, bits in (("<l>", LSTRIP), ("<r>", RSTRIP), ("<b>", LSTRIP | RSTRIP)):
        t.vocab.attr[t.vocab.id(name.encode())] |= bits
    cut = lambda text: [t.vocab.text(x) if isinstance(x, int) else x for x in SpecialTokens(t.vocab, True).cut(text)]
    assert cut(b"a \t<l> a") == [b"a", b"<l>", b" a"]
    assert cut(b"a <r> \n a") == [b"a ", b"<r>", b"a"]
    assert cut(b" <b>  <b> a <r><l> ") == [b"<b>", b"<b>", b"a ", b"<r>", b"<l>", b" "]
    assert cut(b"") == [] and cut(b"<r>") == [b"<r>"]


def test_cutting_is_what_one_token_after_the_other_gives():
    r = random.Random(5)

    class Plain:
        def __init__(self, texts):
            self.texts = texts
            bits = [USER_DEFINED, CONTROL, CONTROL | LSTRIP, USER_DEFINED | RSTRIP]
            self.attr = np.array([r.choice(bits) for _ in texts], np.uint16)

        def text(self, id):
            return self.texts[id]

    def slow(vocab, text):
        """One token after the other, the longest first, in every piece that is left."""
        pieces = [text] if text else []
        for id in sorted(range(len(vocab.texts)), key=lambda id: (-len(vocab.texts[id]), id)):
            word, attr, found = vocab.texts[id], vocab.attr[id], []
            for piece in pieces:
                while isinstance(piece, bytes) and (at := piece.find(word)) >= 0:
                    left = piece[:at].rstrip(b" \t\n\v\f\r") if attr & LSTRIP else piece[:at]
                    piece = piece[at + len(word) :]
                    piece = piece.lstrip(b" \t\n\v\f\r") if attr & RSTRIP else piece
                    found += [left, id] if left else [id]
                found += [piece] if piece != b"" else []
            pieces = found
        return pieces

    for _ in range(400):
        texts = {bytes(r.choice(b"ab <") for _ in range(r.randint(1, 4))) for _ in range(r.randint(1, 8))}
        vocab = Plain(sorted(texts))
        text = bytes(r.choice(b"ab <") for _ in range(r.randint(0, 40)))
        assert list(SpecialTokens(vocab, True).cut(text)) == slow(vocab, text)


def test_bpe_merges_over_strings_that_are_no_tokens(make):
    # "ab" is no token: it leads to "abc", and where it stays it is spelled out by bytes that are tokens.
    t = make(["a", "b", "c", "abc", "Ġ"], [1] * 5, model="gpt2", pre="gpt-2", merges=["a b", "ab c"])
    assert words(t, "abc") == [b"abc"]
    assert words(t, "ab c") == [b"a", b"b", "Ġ".encode(), b"c"]
    assert words(t, "abx") == [b"a", b"b"]  # x is no token at all


def test_bpe_ignores_merges_for_whole_words(make):
    tokens, merges = ["a", "b", "c", "ab", "bc", "abc", "<|eot_id|>"], ["b c", "a b"]
    kinds = [1] * 6 + [3]
    merged = make(tokens, kinds, model="gpt2", pre="gpt-2", merges=merges)
    whole = make(tokens, kinds, model="gpt2", pre="llama-bpe", merges=merges, add_bos_token=False)
    assert (words(merged, "abc"), words(whole, "abc")) == ([b"a", b"bc"], [b"abc"])
    assert (merged.eot, merged.is_eog(6), merged.is_eog(0)) == (6, True, False)


def test_cleaning_of_blanks(make):
    t = make(["Ġ", "a", "'", "s", "m", "r", "e", "t", "."], [1] * 9, model="gpt2", pre="gpt-2", merges=["a s"])
    detokenize = lambda text: t.detokenize([t.vocab.id(c.replace(" ", "Ġ").encode()) for c in text])
    assert detokenize("a .") == "a." and detokenize("a 's 't") == "a's 't" and detokenize("a 're a") == "a're a"
    assert detokenize("a ' a") == "a'a"
    t.clean_spaces = False
    assert detokenize("a 's .") == "a 's ."


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "gemma4", "unheard"])
def test_unknown_kinds(make, kind):
    with pytest.raises(
        NotImplementedError, match=rf"tokenizer\.ggml\.model must be one of \['gpt2', 'llama'\], got '{kind}'"
    ):
        make(["a"], [1], model=kind)


def test_unknown_pre_tokenizer(make):
    with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.pre must be one of .*, got 'brand-new'"):
        make(["a"], [1], model="gpt2", pre="brand-new", merges=["a a"])


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_takes_any_text(make, name):
    letters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(256, 324))]
    t = make(
        [*letters, "<s>"],
        [1] * 256 + [3],
        model="gpt2",
        pre=name,
        merges=["a b"],
        bos_token_id=256,
        add_bos_token=False,
    )
    r = random.Random(name)
    for _ in range(20):
        text = "".join(
            chr(r.choice([r.randrange(128), r.randrange(0xD800), r.randrange(0xE000, 0x30000)])) for _ in range(60)
        )
        ids = t.tokenize(text)
        assert b"".join(t.piece(id) for id in ids) == text.encode()


def test_wrong_metadata(make, tmp_path):
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.token_type must have 2 elements, one a token, got 1"):
        make(["a", "b"], [1])
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.merges must be in the file"):
        make(["a"], [1], model="gpt2", pre="gpt-2")
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.add_bos_token must be BOOL, got UINT32"):
        make(["<unk>", "<s>", "</s>"], [2, 3, 3], [0.0] * 3, add_bos_token=1)
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.bos_token_id must be in the file and below 1"):
        make(["a"], [1], [0.0])
    path = tmp_path / "b.gguf"
    path.write_bytes(gguf([entry("general.name", STRING, "x")]))
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.model must be in the file"):
        Tokenizer.from_gguf(GgufFile(path))
    with pytest.raises(IndexError, match=r"id must be in \[0, 3\), got 3"):
        make(["<unk>", "<s>", "</s>"], [2, 3, 3], [0.0] * 3).piece(3)


def test_bytes_that_are_no_utf8():
    assert decode(b"a\xe2\x96b") == "a\ufffd\ufffdb"
    assert decode(b"\xc0\x80\xed\xa0\x80\xf0\x9f") == "\ufffd" * 7
    assert decode("ä€😀".encode()) == "ä€😀"
    t = load("llama-tied")
    assert t.tokenize(b"a\xff b") == t.tokenize("a\ufffd b")
    assert t.tokenize(b"a\xff b".decode("utf-8", "surrogateescape")) == t.tokenize("a\ufffd b")


def test_stream_decoder():
    for name in ("llama", "llama-tied"):
        t = load(name)
        text = "Zażółć 😀 gęślą jaźń 漢字\n"
        ids = t.tokenize(text, add_special=False)
        decoder = StreamDecoder(t)
        parts = [decoder.push(id) for id in ids]
        assert "".join(parts) + decoder.flush() == (" " if name == "llama" else "") + text
        assert all("\ufffd" not in part for part in parts) and "" in parts
        first = next(id for id in ids if t.piece(id)[0] >= 0xC0)
        assert decoder.push([first]) == "" and decoder.flush() == "\ufffd" and decoder.flush() == ""
        assert decoder.push(t.eos) == "" and StreamDecoder(t, special=True).push(t.eos) == t.piece(t.eos).decode()


def test_long_texts_are_quick():
    import time

    for name in ("llama", "llama-tied"):
        t = load(name)
        for text in ("the rabbit said \n" * 6000, "a" * 50_000, "<s>" * 20_000, "漢" * 20_000):
            start = time.perf_counter()
            ids = t.tokenize(text, add_special=False)
            assert time.perf_counter() - start < 5
            assert t.detokenize(ids, unparse_special=True).replace(" ", "") == text.replace(" ", "")


def test_files_are_read_lazily(tmp_path):
    path = tmp_path / "a.gguf"
    n = 262_144
    texts = ["<unk>", "<s>", "</s>", *BYTES, *(f"piece{i}" for i in range(n - 259))]
    packed = [entry("tokenizer.ggml.model", STRING, "llama"), entry("tokenizer.ggml.tokens", ARRAY, (STRING, texts))]
    key = b"tokenizer.ggml.scores"
    packed.append(struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 6, n) + bytes(4 * n))
    path.write_bytes(gguf(packed))
    t = Tokenizer.from_gguf(GgufFile(path))
    assert t.vocab.id(b"piece777") == 259 + 777 and t.vocab.id(b"piece") == -1
    assert set(t.vocab._tables) == {5, 6, 8}  # byte tokens at most, and what was asked for
