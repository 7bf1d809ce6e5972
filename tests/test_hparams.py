"""Metadata that cannot be is one GgufError that names the key."""

from types import SimpleNamespace

import numpy as np
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
    hp = hparams(**{"attention.head_count_kv": np.array([4, 2]), "feed_forward_length": np.array([96, 128])})
    assert [hp.n_head_kv(0), hp.n_head_kv(1), hp.n_ff(1)] == [4, 2, 128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "'llama.block_count' must be in the file"),
        ({"block_count": "many"}, r"'llama.block_count' must be a number in \[1, 2\^31\), got 'many'"),
        ({"embedding_length": -1}, "'llama.embedding_length' must be a number"),
        ({"attention.head_count": 0}, "'llama.attention.head_count' must divide 64"),
        ({"attention.head_count": 5}, "'llama.attention.head_count' must divide 64"),
        ({"attention.layer_norm_rms_epsilon": "x"}, "must be a number, got 'x'"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be finite as f32, got nan"),
        ({"attention.layer_norm_rms_epsilon": 1e308}, r"must be finite as f32, got 1e\+308"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "must not be negative, got -1.0"),
        ({"block_count": 0}, r"must be a number in \[1, 2\^31\), got 0"),
        ({"context_length": 0}, r"must be a number in \[1, 2\^31\), got 0"),
        ({"embedding_length": np.full(64, 2)}, r"got array\(\[2, 2, [^\n]*\.\.\.$"),
        ({"attention.head_count": np.array([4.5, 4.5])}, "or one for each of 2 layers, got array"),
        ({"attention.head_count": np.array([-4, 4])}, "or one for each of 2 layers, got array"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(GgufError, match=message):
        hparams(**changes)


def test_unknown_scaling():
    with pytest.raises(GgufError, match="must be none, linear or yarn, got 'su'"):
        Rope.from_hparams(hparams(**{"rope.scaling.type": "su"}))


@pytest.mark.parametrize("n", [0, 1, 15, 18, 1 << 30])
def test_rotated_elements(n):
    with pytest.raises(GgufError, match=rf"'llama.rope.dimension_count' must be even and at most 16, .*, got {n}$"):
        Rope.from_hparams(hparams(**{"rope.dimension_count": n}))


def test_a_scaling_type_that_is_no_text():
    with pytest.raises(GgufError, match="must be none, linear or yarn, got array"):
        Rope.from_hparams(hparams(**{"rope.scaling.type": np.array([1, 2])}))


@pytest.mark.parametrize("value", [None, 4, np.array([1, 2])])
def test_the_architecture_must_be_a_text(value):
    with pytest.raises(GgufError, match=r"key 'general\.architecture' must be a string in the file, got"):
        Hparams(SimpleNamespace(kv=Kv({**BASE, "general.architecture": value}), path="x.gguf"))


@pytest.mark.parametrize("base", [0.0, -1.0])
def test_the_base_of_angles_is_positive(base):
    with pytest.raises(GgufError, match=rf"'llama\.rope\.freq_base' must be positive, got {base}"):
        Rope.from_hparams(hparams(**{"rope.freq_base": base}))
