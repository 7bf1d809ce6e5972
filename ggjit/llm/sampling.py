"""Choosing the next token from logits: greedy, temperature, top-k, top-p and min-p.

The order is llama.cpp's: top-k, then top-p, then min-p on the probabilities of what is left, then temperature.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from ggjit.arguments import check_kinds
from ggjit.llm import choice

_AHEAD = 64  # random numbers drawn at a time


class Sampler:
    """A seeded sampler.

    Args:
        temperature: 0 takes the best token (the lowest id of equals).
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the best tokens whose probabilities reach this sum; 1 keeps all.
        min_p: drop tokens less likely than this share of the best one's probability; 0 keeps all.
        seed: of the random numbers; None takes a fresh one.

    Raises:
        TypeError: a parameter is no number, or no whole one.
        ValueError: it is out of range.
    """

    def __init__(self, temperature: float = 0.8, top_k: int = 40, top_p: float = 0.95, min_p: float = 0.05,
                 seed: int | None = None) -> None:  # fmt: skip
        check_kinds("Sampler", Real, "a number", temperature=temperature, top_p=top_p, min_p=min_p)
        check_kinds("Sampler", Integral, "a whole number", top_k=top_k, seed=0 if seed is None else seed)
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
        self._top_k = 1 if temperature == 0.0 else int(top_k)
        self._shares = float(temperature or 1.0), float(top_p), float(min_p)
        # The best token needs no random numbers, and their module takes milliseconds to import.
        self._rng = None if self._top_k == 1 else np.random.default_rng(seed)
        self._draws: list[int] = []
        self._lock = threading.Lock()
        self._seen: NDArray[np.float32] | None = None  # logits whose address is known: models give the same array again
        self._address = self._n_vocab = 0
        self._function: Callable[[int, int, int], int] = choice.choose

    def _look_at(self, logits: NDArray[np.float32]) -> None:
        """Note where logits lie, and make room for as many."""
        logits = np.ascontiguousarray(logits, np.float32)
        if logits.ndim != 1 or not len(logits):
            raise ValueError(f"Sampler: logits must be one row of at least one value, got shape {logits.shape}")
        if len(logits) != self._n_vocab:
            n = self._n_vocab = len(logits)
            k = self._top_k if 0 < self._top_k < n else n
            self._scratch = np.empty(choice.HISTOGRAM_NBYTES + (choice.KEY_NBYTES + choice.WEIGHT_NBYTES) * k, np.uint8)
            self._block = np.zeros(choice.BLOCK.size, np.uint8)
            choice.BLOCK.pack_into(self._block, 0, n, k, self._scratch.ctypes.data, *self._shares, 0, 0, 0.0, 0)
            self._block_address = self._block.ctypes.data
            self._function = choice.choose.c_function
        self._seen, self._address = logits, logits.ctypes.data

    def probabilities(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, best first, and their probabilities."""
        with self._lock:
            self._choose(logits, 0)
            _, k, _, _, _, _, n, keys, total, _ = choice.BLOCK.unpack(self._block)
            weights = choice.HISTOGRAM_NBYTES + choice.KEY_NBYTES * k
            ids = self._scratch[keys : keys + 8 * n].view(np.int64) & 0x7FFFFFFF
            return ids, self._scratch[weights : weights + 8 * n].view(np.float64) / total

    def __call__(self, logits: NDArray[np.float32]) -> int:
        """Choose a token.

        Args:
            logits: f32 [n_vocab].

        Raises:
            ValueError: the logits hold no finite value.
        """
        with self._lock:
            if not self._draws:
                draws = np.zeros(_AHEAD) if self._rng is None else self._rng.random(_AHEAD)[::-1] * choice.DRAWS
                self._draws = draws.astype(np.int64).tolist()
            return self._choose(logits, self._draws.pop())

    def _choose(self, logits: NDArray[np.float32], draw: int) -> int:
        if logits is not self._seen:
            self._look_at(logits)
        id = self._function(self._block_address, self._address, draw)
        if id < 0:
            raise ValueError(f"Sampler: logits must be finite, got {logits[~id]} for token {~id}")
        return id

    @property
    def ticks(self) -> int:
        """Ticks of the CPU's time counter that compiled code has taken so far."""
        return int(choice.BLOCK.unpack(self._block)[-1]) if self._n_vocab else 0
