"""Perplexity: the rule against NumPy, and llama.cpp's values for real models."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from real_models import real_model

import ggjit as gg
from ggjit.cli import main
from ggjit.gguf import GgufFile
from ggjit.llm import tokenizer
from ggjit.llm.perplexity import losses, perplexity, text_chunks

MODEL = Path(__file__).parent / "data" / "models" / "llama-f16.gguf"
TEXT = "In the beginning there was a text, and the text was long enough to be cut into some chunks of tokens. " * 3
N_CTX = 48


@pytest.fixture(scope="module")
def llm():
    with gg.LLM(MODEL, n_ctx=256, n_threads=1, kv_type="f32", progress=False) as model:
        yield model


def test_losses_are_those_of_a_softmax():
    rng = np.random.default_rng(0)
    logits = (rng.normal(0, 3, (37, 101)) + 500).astype(np.float32)  # exp would overflow
    targets = rng.integers(0, 101, 37)
    shifted = logits.astype(np.float64) - 500
    want = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(37), targets]
    assert np.allclose(losses(logits, targets), want, rtol=1e-12)


def test_chunks_begin_with_bos(llm):
    ids, bos = llm.tokenize(TEXT, parse_special=False), llm.tokenizer.bos
    chunks = text_chunks(llm, TEXT, N_CTX)
    assert len(chunks) == len(ids) // N_CTX > 2
    assert llm.tokenizer.add_bos and all(chunk[0] == bos and len(chunk) == N_CTX for chunk in chunks)
    assert [t for chunk in chunks for t in chunk[1:]] == [
        t for i, t in enumerate(ids[: len(chunks) * N_CTX]) if i % N_CTX
    ]


@pytest.mark.parametrize("name", ["llama-f16", "gpt2"])
def test_of_a_long_text_no_more_is_tokenized_than_is_needed(name, monkeypatch):
    monkeypatch.setattr(tokenizer, "MARGIN", 512)
    monkeypatch.setattr(tokenizer, "_WORDS", 64)
    rng = np.random.default_rng(0)
    words = ["the", "Straße", "年", "1234567", " ", "\n\n", "\t", "it's", "<b>", "</s>", "...", "don't", "▁", "ab1c"]
    text = " ".join(words[i] for i in rng.integers(0, len(words), 40_000))
    with GgufFile(MODEL.with_name(f"{name}.gguf")) as file:
        tokens = tokenizer.Tokenizer.from_gguf(file)
    full = tokens.tokenize(text, parse_special=False)
    for given in (text, text.encode()):
        for n in (1, 1000, 4321):
            ids = tokens.first_tokens(given, n)
            assert n <= len(ids) < len(full) // 2 and ids == full[: len(ids)]
    for whole in (text[:1000], text + "\udc80", "年" * 20_000, ""):  # short, no UTF-8, one word
        assert tokens.first_tokens(whole, 5) == tokens.tokenize(whole, parse_special=False)


def test_chunks_of_the_beginning(llm):
    assert text_chunks(llm, TEXT, N_CTX, 2) == text_chunks(llm, TEXT, N_CTX)[:2]


def test_estimates_are_those_of_all_logits(llm):
    nll = []
    for chunk in text_chunks(llm, TEXT, N_CTX):
        logits = llm.logits(chunk).astype(np.float64)
        for position in range(N_CTX // 2 + 1, N_CTX):
            row = logits[position - 1]
            nll.append(np.log(np.exp(row).sum()) - row[chunk[position]])
    *_, last = perplexity(llm, TEXT, N_CTX)
    assert last.n_targets == len(nll) == last.n_chunks * (N_CTX // 2 - 1)
    assert last.ppl == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert last.stderr == pytest.approx(last.ppl * np.std(nll) / math.sqrt(len(nll) - 1), rel=1e-6)
    assert [e.n_chunks for e in perplexity(llm, TEXT, N_CTX, 2)] == [1, 2]


def test_errors(llm):
    with pytest.raises(ValueError, match=r"text_chunks: the text must have at least 48 tokens, a chunk, got"):
        perplexity(llm, "short", N_CTX)
    for n_ctx in (3, 257):
        with pytest.raises(ValueError, match=rf"n_ctx must be in \[4, 256\], the context, got {n_ctx}"):
            perplexity(llm, TEXT, n_ctx)


def test_command(tmp_path, capsys, llm):
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    assert main(["perplexity", str(MODEL), "-f", str(path), "-c", "48", "--kv-type", "f32", "-t", "1"]) == 0
    *_, last = perplexity(llm, TEXT, N_CTX)
    out = capsys.readouterr().out
    assert out.startswith("[1]") and out.endswith(f"Final estimate: PPL = {last.ppl:.4f} +/- {last.stderr:.5f}\n")


@pytest.mark.full
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_real_models_as_llama_cpp(reference, name, kv_type):
    """Within half a percent of one of its two settings."""
    facts = json.loads((reference / "models" / "real" / f"{name}.json").read_text())
    path = real_model(facts["file"])
    text, want = (reference / "models" / "real" / "alice.txt").read_text().removesuffix("\n"), facts["perplexity"]
    with gg.LLM(path, n_ctx=256, kv_type=kv_type, progress=False) as llm:
        estimates = list(perplexity(llm, text, want["n_ctx"]))
    assert len(estimates) == want["n_chunks"]
    assert min(abs(estimates[-1].ppl / want[setting]["ppl"] - 1) for setting in ("strict", "default")) <= 5e-3
    assert estimates[-1].stderr == pytest.approx(want["strict"]["stderr"], rel=1e-2)
