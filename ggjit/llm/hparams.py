"""Hyperparameters of a model, read from GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ggjit.errors import GgufError
from ggjit.gguf import GgufFile

MAX_DEFAULT_CTX = 4096
_MAX_F32 = float(np.finfo(np.float32).max)


def architecture_of(file: GgufFile) -> str:
    """The name of a model's architecture.

    Raises:
        GgufError: the file does not tell it.
    """
    value = file.kv.get("general.architecture")
    if isinstance(value, str):
        return value
    raise GgufError(file.path, 0, f"key 'general.architecture' must be a string in the file, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value in a line that does not get long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


class Hparams:
    """Hyperparameters under an architecture's prefix (`llama.block_count` ...).

    Args:
        file: the open model.

    Attributes:
        arch: `general.architecture`.
        n_layer: number of blocks.
        n_embd: width of the residual stream.
        n_ctx_train: context length of the training.
        head_dim: elements of a head's query and key.
        head_dim_v: elements of a head's value.
        n_rot: elements of a head that rotate.
        eps: of the norms.
        n_expert: experts in each mixture, 0 for dense models.
        n_expert_used: experts that a token meets.

    Raises:
        GgufError: a key is missing or its value cannot be.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.arch = architecture_of(file)
        self.n_layer = self.count("block_count", least=1)
        self.n_embd = self.count("embedding_length", least=1)
        self.n_ctx_train = self.count("context_length", least=1)
        n_head = self.n_head(0)
        if n_head == 0 or ("attention.key_length" not in self and self.n_embd % n_head):
            raise self.fail("attention.head_count", f"must divide {self.n_embd}, the embedding length, got {n_head}")
        self.head_dim = self.count("attention.key_length", self.n_embd // n_head)
        self.head_dim_v = self.count("attention.value_length", self.n_embd // n_head)
        self.n_rot = self.count("rope.dimension_count", self.head_dim)
        self.eps = self.number("attention.layer_norm_rms_epsilon", 1e-5)
        if self.eps < 0:
            raise self.fail("attention.layer_norm_rms_epsilon", f"must not be negative, got {self.eps}")
        self.n_expert = self.count("expert_count", 0)
        self.n_expert_used = self.count("expert_used_count", 0)
        if self.n_expert and not 1 <= self.n_expert_used <= self.n_expert:
            raise self.fail("expert_used_count", f"must be in [1, {self.n_expert}], got {self.n_expert_used}")

    @property
    def default_n_ctx(self) -> int:
        """Tokens of context where none are asked for."""
        return min(self.n_ctx_train, MAX_DEFAULT_CTX)

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self._file.kv

    def fail(self, key: str, message: str) -> Exception:
        """The error for a value that cannot be."""
        full = f"{self.arch}.{key}"
        if full in self._file.kv:
            return self._file.kv.fail(full, message)
        return GgufError(self._file.path, 0, f"key {full!r} {message}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key below the architecture's prefix.

        Raises:
            GgufError: it is missing and there is no default.
        """
        value = self._file.kv.get(f"{self.arch}.{key}", default)
        if value is None:
            raise self.fail(key, "must be in the file")
        return value

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number that is not below `least`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self.fail(key, f"must be a number in [{least}, 2^31), got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that f32 holds."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, got {_shown(value)}")
        if not math.isfinite(value) or abs(value) > _MAX_F32:
            raise self.fail(key, f"must be finite as f32, got {value}")
        return value

    def per_layer(self, key: str, il: int, default: int | None = None) -> int:
        """A number that may be given for each layer."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.count(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and 0 <= il < len(value):
            one = int(value[il])
            if 0 <= one < 1 << 31:
                return one
        text = f"must be a number in [0, 2^31) or one for each of {self.n_layer} layers, got {_shown(value)}"
        raise self.fail(key, text)

    def n_head(self, il: int) -> int:
        """Heads of a layer."""
        return self.per_layer("attention.head_count", il)

    def n_head_kv(self, il: int) -> int:
        """Key and value heads of a layer."""
        return self.per_layer("attention.head_count_kv", il, self.n_head(il))

    def n_ff(self, il: int) -> int:
        """Width of a layer's feed-forward block."""
        return self.per_layer("feed_forward_length", il)
