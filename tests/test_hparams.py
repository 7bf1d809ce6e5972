"""Metadata that cannot be is one GgufError that names the key."""

from types import SimpleNamespace

import pytest

from ggjit.errors import GgufError
from ggjit.llm.hparams import Hparams
from ggjit.models.layers import Rope

BASE = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.context_length": 128,
    "llama.attention.head_count": 4,
    "llama.feed_forward_length": 96,
}


class Kv(dict):
    def fail(self, key, message):
        return GgufError("x.gguf", 7, f"key {key!r} {message}")


def hparams(**changes):
    kv = Kv({**BASE, **{f"llama.{k}": v for k, v in changes.items()}})
    for key in [k for k, v in kv.items() if v is None]:
        del kv[key]
    return Hparams(SimpleNamespace(kv=kv, path="x.gguf"))


def test_defaults():
    hp = hparams()
    assert (hp.head_dim, hp.head_dim_v, hp.n_rot, hp.n_head(1), hp.n_head_kv(1), hp.n_ff(0)) == (16, 16, 16, 4, 4, 96)
    rope = Rope.from_hparams(hp)
    assert (rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor, rope.n_ctx_orig) == (1e4, 1, 0, 1, 128)


def test_scaling():
    linear = Rope.from_hparams(hparams(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}))
    assert (linear.freq_scale, linear.ext_factor) == (0.25, 0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    rope = Rope.from_hparams(hparams(**yarn))
    assert (rope.freq_scale, rope.ext_factor, rope.n_ctx_orig) == (0.25, 1, 32)


def test_values_per_layer():
    hp = hparams(**{"attention.head_count_kv": [4, 2], "feed_forward_length": [96, 128]})
    assert [hp.n_head_kv(0), hp.n_head_kv(1), hp.n_ff(1)] == [4, 2, 128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "'llama.block_count' must be in the file"),
        ({"block_count": "many"}, r"'llama.block_count' must be a number in \[0, 2\^31\), got 'many'"),
        ({"embedding_length": -1}, "'llama.embedding_length' must be a number"),
        ({"attention.head_count": 0}, "'llama.attention.head_count' must divide 64"),
        ({"attention.head_count": 5}, "'llama.attention.head_count' must divide 64"),
        ({"attention.layer_norm_rms_epsilon": "x"}, "must be a number, got 'x'"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(GgufError, match=message):
        hparams(**changes)


def test_unknown_scaling():
    with pytest.raises(GgufError, match="must be none, linear or yarn, got 'su'"):
        Rope.from_hparams(hparams(**{"rope.scaling.type": "su"}))
