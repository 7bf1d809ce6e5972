"""Choosing the next token from logits: greedy, temperature, top-k, top-p and min-p.

The order is llama.cpp's: top-k, then top-p, then min-p on the probabilities of what is left, then temperature.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggjit.op import COUNTER_LINE

_NO_PARAMS = np.zeros(16, np.int32)


def best_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The ids of the k largest logits, best first, of equals the lower id, by the kernel of the op top_k.

    NumPy's partition of a vocabulary takes as long as a tenth of a small model's decode step.

    Args:
        logits: f32 [n_vocab].
        k: 1 to n_vocab.
    """
    from ggjit.ops.sort import HISTOGRAM, top_k_f32

    logits, ids = np.ascontiguousarray(logits, np.float32), np.empty(k, np.int32)
    work = np.empty(COUNTER_LINE + HISTOGRAM + 16 * k, np.uint8)
    shapes = ((k, 1, 1, 1), (4, 4 * k, 4 * k, 4 * k)), ((n := len(logits), 1, 1, 1), (4, 4 * n, 4 * n, 4 * n))
    top_k_f32(ids.view(np.uint8), *shapes[0], logits.view(np.uint8), *shapes[1], _NO_PARAMS, work, 0, 1)
    return ids.astype(np.int64)


class Sampler:
    """A seeded sampler.

    Args:
        temperature: 0 takes the best token (the lowest id of equals).
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the best tokens whose probabilities reach this sum; 1 keeps all.
        min_p: drop tokens less likely than this share of the best one's probability; 0 keeps all.
        seed: of the random numbers; None takes a fresh one.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(self, temperature: float = 0.8, top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05,
                 seed: int | None = None) -> None:  # fmt: skip
        for name, value, low, high in (
            ("temperature", temperature, 0.0, np.finfo(float).max),
            ("top_k", top_k, 0, np.inf),
            ("top_p", top_p, 0.0, 1.0),
            ("min_p", min_p, 0.0, 1.0),
        ):
            if not low <= value <= high:
                raise ValueError(f"Sampler: {name} must be between {low} and {high}, got {value}")
        if seed is not None and seed < 0:
            raise ValueError(f"Sampler: seed must not be negative, got {seed}")
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.rng = np.random.default_rng(seed)

    def probabilities(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, best first, and their probabilities."""
        n = len(logits)
        ids = best_ids(logits, self.top_k if 0 < self.top_k < n else n)
        values = logits[ids].astype(np.float64)
        p = np.exp(values - values[0])
        p /= p.sum()
        keep = len(p)
        if self.top_p < 1.0:
            keep = min(keep, int(np.searchsorted(np.cumsum(p), self.top_p)) + 1)
        if self.min_p > 0.0:
            keep = min(keep, max(1, int(np.count_nonzero(p >= self.min_p * p[0]))))
        ids, values = ids[:keep], values[:keep]
        with np.errstate(over="ignore"):
            p = np.exp((values - values[0]) / self.temperature)
        return ids, p / p.sum()

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Choose a token.

        Args:
            logits: f32 [n_vocab].

        Raises:
            ValueError: the logits hold no finite value.
        """
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise ValueError(f"Sampler: logits must be finite, got {logits[best]} for token {best}")
        if self.temperature == 0.0 or self.top_k == 1:
            return best
        ids, p = self.probabilities(logits)
        return int(ids[np.searchsorted(np.cumsum(p), self.rng.random() * p.sum(), side="right").clip(max=len(ids) - 1)])
