"""Mixtures of experts in models: the block against NumPy float64, and llama.cpp's tiny models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from test_hparams import BASE, Kv

import ggjit as gg
from ggjit.dev import reference as reference_module
from ggjit.dev.cases import nmse
from ggjit.llm.hparams import Hparams
from ggjit.models.layers import MIN_WEIGHT_SUM, mixture


def named(t, name, il):
    t.name = f"{name}-{il}"
    return t


GRAPH = SimpleNamespace(name=named)


def silu(x):
    return x / (1 + np.exp(-x))


def expected(x, gate_inp, gate, up, down, n_used):
    """Each token by itself, in float64."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = gate_inp @ row
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:n_used]
        for e in chosen:
            h = silu(gate[e] @ row) * (up[e] @ row)
            out[t] += probs[e] / max(probs[chosen].sum(), MIN_WEIGHT_SUM) * (down[e] @ h)
    return out


@pytest.mark.parametrize(
    ("n_tokens", "n_expert", "n_used"), [(1, 8, 2), (1, 4, 1), (9, 8, 3), (40, 5, 2), (3, 3, 3)], ids=str
)
def test_block(n_tokens, n_expert, n_used):
    rng = np.random.default_rng(n_tokens)
    n_embd, n_ff = 32, 21
    shapes = (n_tokens, n_embd), (n_expert, n_embd), *[(n_expert, n_ff, n_embd)] * 2, (n_expert, n_embd, n_ff)
    arrays = [rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
    want = expected(*(a.astype(np.float64) for a in arrays), n_used)
    results = []
    for n_threads in (1, 3):
        with gg.Context(8 << 20):
            out = mixture(GRAPH, *map(gg.from_numpy, arrays), n_used, 0)
            gg.build(out).compute(n_threads)
            results.append(out.numpy()[0, 0].copy())
    assert out.ne[:2] == (n_embd, n_tokens)
    assert nmse(want, results[0]) <= 1e-10
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("name", ["llama-moe", "llama-moe-q.Q4_K_M"])
def test_tiny_models_agree_with_llama_cpp(reference, name):
    tally = reference_module.run_paths([reference / "models" / f"{name}.gguf"])
    assert (tally.failed, tally.n_unsupported) == (0, 0) and tally.passed > 10


@pytest.mark.parametrize("used", [0, 5])
def test_a_token_must_use_some_of_the_experts(used):
    kv = Kv({**BASE, "llama.expert_count": 4, "llama.expert_used_count": used})
    with pytest.raises(gg.GgufError, match=rf"'llama.expert_used_count' must be in \[1, 4\], got {used}"):
        Hparams(SimpleNamespace(kv=kv, path="x.gguf"))
