"""Hyperparameters of a model, read from GGUF metadata."""

from __future__ import annotations

from typing import Any

from ggjit.gguf import GgufFile


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

    Raises:
        GgufError: a key is missing or its value cannot be.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.arch = self._text("general.architecture")
        self.n_layer = self.count("block_count")
        self.n_embd = self.count("embedding_length")
        self.n_ctx_train = self.count("context_length")
        n_head = self.n_head(0)
        if n_head == 0 or ("attention.key_length" not in self and self.n_embd % n_head):
            raise self.fail("attention.head_count", f"must divide {self.n_embd}, the embedding length, got {n_head}")
        self.head_dim = self.count("attention.key_length", self.n_embd // n_head)
        self.head_dim_v = self.count("attention.value_length", self.n_embd // n_head)
        self.n_rot = self.count("rope.dimension_count", self.head_dim)
        self.eps = self.number("attention.layer_norm_rms_epsilon", 1e-5)
        self.n_expert = self.count("expert_count", 0)

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self._file.kv

    def fail(self, key: str, message: str) -> Exception:
        """The error for a value that cannot be."""
        full = f"{self.arch}.{key}"
        if full in self._file.kv:
            return self._file.kv.fail(full, message)
        from ggjit.errors import GgufError

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

    def _text(self, key: str) -> str:
        value = self._file.kv.get(key)
        if not isinstance(value, str):
            from ggjit.errors import GgufError

            raise GgufError(self._file.path, 0, f"key {key!r} must be a string in the file, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.fail(key, f"must be a number in [0, 2^31), got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, got {value!r}")
        return value

    def per_layer(self, key: str, il: int, default: int | None = None) -> int:
        """A number that may be given for each layer."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.count(key, default)
        try:
            return int(value[il])
        except (TypeError, IndexError, ValueError):
            raise self.fail(key, f"must be a number or one for each of {self.n_layer} layers, got {value!r}") from None

    def n_head(self, il: int) -> int:
        """Heads of a layer."""
        return self.per_layer("attention.head_count", il)

    def n_head_kv(self, il: int) -> int:
        """Key and value heads of a layer."""
        return self.per_layer("attention.head_count_kv", il, self.n_head(il))

    def n_ff(self, il: int) -> int:
        """Width of a layer's feed-forward block."""
        return self.per_layer("feed_forward_length", il)
