"""Run reference models: logits of short and split prompts, intermediate tensors, greedy tokens, decoded weights.

A float model may differ from the reference's logits by a fixed amount. A quantized model rounds its activations, as the
reference does in another way: its squared distance to the logits of the same weights without such rounding must not be
much larger than the reference's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ggjit import models, types
from ggjit.counts import counted
from ggjit.dev.reference_cases import Array, Difference, decode, elements_of_rows, nmse
from ggjit.dev.reference_ops import Unsupported
from ggjit.gguf import GgufFile

if TYPE_CHECKING:
    from ggjit.llm import LLM

Job = tuple[str, Callable[[], list[Difference]]]

LOGITS = {"F32": 1e-4, "F16": 1e-2, "BF16": 1e-1}  # largest difference
TRACES = {"F32": 1e-9, "F16": 1e-6, "BF16": 1e-4}  # nmse
# The reference looks GELU up in a table of f16 values; computed exactly it is that far away (F32 weights).
GELU = ("gemma", "gemma2", "gemma3", "gpt2", "bloom", "falcon", "mpt", "phi2", "starcoder2")
GELU_LOGITS, GELU_TRACES = 5e-3, 1e-6
QUANTIZED = 1.1  # squared distance to the logits without rounding, in units of the reference's
BETWEEN = 12.0  # the same between two results that both round, at one position: the reference alone is 5.5 times as far
FLIPS = 2  # steps at which a mixture may choose another expert, where two are within the rounding of each other
N_CTX, N_SPLIT = 256, 16


class Models:
    """A model file opened with several settings, each once.

    Args:
        path: GGUF file.
        threads: numbers of threads to run everything with.
        n_ctx: tokens of context.
    """

    def __init__(self, path: Path, threads: Sequence[int], n_ctx: int = N_CTX) -> None:
        self.path, self.threads, self.n_ctx = path, threads, n_ctx
        self._open: dict[tuple[Any, ...], LLM] = {}
        with GgufFile(path) as file:
            self.arch = str(file.kv.get("general.architecture"))
            self.types = {info.type_name for info in file.tensors.values()}
            self.is_mixture = bool(file.kv.get(f"{self.arch}.expert_count", 0))

    @property
    def kind(self) -> str:
        """The type that limits the accuracy: "F32", "F16", "BF16" or "quantized"."""
        if any(name not in ("F32", "F16", "BF16") for name in self.types):
            return "quantized"
        return next(name for name in ("BF16", "F16", "F32") if name in self.types)

    def get(self, n_threads: int, n_ubatch: int = N_CTX, kv_type: str = "f32", repack: bool = True) -> LLM:
        """The model with some settings.

        Raises:
            Unsupported: no code for its architecture or one of its types is registered.
        """
        from ggjit.llm import LLM

        key = (n_threads, n_ubatch, kv_type, repack)
        if key not in self._open:
            if self.arch not in models.names():
                raise Unsupported("architectures", self.arch)
            for name in sorted(self.types):
                kind = types.by_name(name) if name in types.all_names() else None
                if kind is None or (kind.is_quantized and kind.quant is None):
                    raise Unsupported("types", name)
            try:
                self._open[key] = LLM(
                    self.path, n_ctx=self.n_ctx, n_threads=n_threads, kv_type=kv_type, n_ubatch=n_ubatch, repack=repack,
                    progress=False,
                )  # fmt: skip
            except NotImplementedError as error:
                raise Unsupported("architectures", f"{self.arch} ({error})") from None
        return self._open[key]

    def same(self, compute: Callable[[LLM], Array], **settings: Any) -> tuple[Array, list[Difference]]:
        """A result with each number of threads, whose bits must be the same."""
        results = [compute(self.get(n, **settings)) for n in self.threads]
        for n, other in zip(self.threads[1:], results[1:], strict=True):
            if not np.array_equal(other, results[0], equal_nan=True):
                wrong = float((other != results[0]).sum())
                return results[0], [Difference(f"{counted(n, 'thread')}: bits differ from {self.threads[0]}", wrong, 0)]
        return results[0], []

    def close(self) -> None:
        """Close everything."""
        for llm in self._open.values():
            llm.close()
        self._open.clear()


def _distance(got: Array, want: Array) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max())


def _over(what: str, error: float, limit: float) -> list[Difference]:
    """A difference if the error exceeds the limit (or is NaN)."""
    return [] if error <= limit else [Difference(what, error, limit)]


class _Decoder:
    """The cases of one tiny decoder."""

    def __init__(self, opened: Models, facts: dict[str, Any], data: dict[str, Array]) -> None:
        self.opened, self.facts, self.data = opened, facts, data
        self.spread = facts["spread"]

    def _limit(self, limits: dict[str, float], with_gelu: float) -> float:
        """The limit for float weights."""
        return max(limits[self.opened.kind], with_gelu if self.opened.arch in GELU else 0.0)

    def _check(self, logits: Array, name: str) -> list[Difference]:
        """Logits against the reference's of that name."""
        kind = self.opened.kind
        if kind != "quantized":
            return _over("largest difference", _distance(logits, self.data[name]), self._limit(LOGITS, GELU_LOGITS))
        own = self.spread["short_f32w_vs_quantized_nmse"]
        if name == "short_logits":
            return _over("squared distance to unrounded", nmse(logits, self.data["short_logits_f32w"]), QUANTIZED * own)
        return _over("squared distance", nmse(logits, self.data[name]), BETWEEN * own)

    def short(self, repack: bool = True) -> list[Difference]:
        """Logits of every position of the short prompt."""
        got, found = self.opened.same(lambda llm: llm.logits(self.data["short_ids"].tolist()), repack=repack)
        return found + self._check(got, "short_logits")

    def medium(self) -> list[Difference]:
        """Logits after the medium prompt."""
        got, found = self.opened.same(lambda llm: llm.logits(self.data["medium_ids"].tolist())[-1])
        return found + self._check(got, "medium_logits")

    def long(self) -> list[Difference]:
        """Logits after the long prompt, in pieces of 16 tokens; the bits must be those of one piece."""
        ids = self.data["long_ids"].tolist()
        got, found = self.opened.same(lambda llm: llm.logits(ids), n_ubatch=N_SPLIT)
        whole = self.opened.get(self.opened.threads[0]).logits(ids)
        if not np.array_equal(got, whole):
            found.append(Difference("bits differ from the prompt in one piece", float((got != whole).sum()), 0))
        return found + self._check(got[-1], "long_logits")

    def kv_f16(self) -> list[Difference]:
        """The long prompt with an f16 cache: as near to the f32 cache as the reference's, twice."""
        got, found = self.opened.same(lambda llm: llm.logits(self.data["long_ids"].tolist())[-1], kv_type="f16")
        near = min(_distance(got, self.data[f"long_logits_kvf16{flash}"]) for flash in ("", "_flash"))
        return found + _over("largest difference", near, 2 * self.spread["long_kvf16_vs_f32_max"])

    def greedy(self, name: str) -> list[Difference]:
        """Best tokens along the reference's continuation, where the second best is further than the limit."""
        ids, chosen = self.data[f"{name}_ids"].tolist(), self.data[f"{name}_greedy"]
        got, found = self.opened.same(lambda llm: llm.logits([*ids, *chosen[:-1].tolist()])[len(ids) - 1 :].argmax(1))
        kind = self.opened.kind
        noise = self.spread["short_f32w_vs_quantized_max"] if kind == "quantized" else self._limit(LOGITS, GELU_LOGITS)
        wrong = (got != chosen) & (self.data[f"{name}_greedy_gap"] > 2 * noise)
        flips = FLIPS if kind == "quantized" and self.opened.is_mixture else 0
        return found + _over("unequal tokens", int(wrong.sum()), flips)

    def trace(self, name: str) -> list[Difference]:
        """One intermediate tensor of the short prompt."""
        want = self.data[f"trace__{name}"]

        def compute(llm: LLM) -> Array:
            return llm.trace(self.data["short_ids"].tolist(), [name])[name].reshape(want.shape)

        got, found = self.opened.same(compute)
        return found + _over("nmse", nmse(got, want), self._limit(TRACES, GELU_TRACES))

    def weights(self, name: str) -> list[Difference]:
        """The first rows of a tensor, decoded: the same bits."""
        want = self.data[f"dequant__{name}"]
        with GgufFile(self.opened.path) as file:
            info = file.info(name)
            assert info.type is not None
            n = types.row_size(info.type, info.ne[0])
            rows = np.array(file.data(name)[: n * len(want)]).reshape(len(want), n)
        if info.type.is_quantized and info.type.quant is None:
            raise Unsupported("types", info.type.name)
        got = decode(elements_of_rows(rows, info.type), info.type).astype(np.float32)
        return _over("unequal values", int((got != want).sum()), 0)

    def jobs(self) -> Iterator[Job]:
        """All cases."""
        name = self.facts["name"]
        yield f"{name} short", self.short
        yield f"{name} short, not repacked", lambda: self.short(repack=False)
        yield f"{name} medium", self.medium
        yield f"{name} long", self.long
        if self.opened.kind == "F32":
            yield f"{name} long, f16 cache", self.kv_f16
        for prompt in ("short", "medium", "long"):
            yield f"{name} greedy {prompt}", lambda prompt=prompt: self.greedy(prompt)  # type: ignore[misc]
        for key in self.data:
            kind, _, inner = key.partition("__")
            if kind == "trace":
                yield f"{name} trace {inner}", lambda inner=inner: self.trace(inner)  # type: ignore[misc]
            elif kind == "dequant":
                yield f"{name} weights {inner}", lambda inner=inner: self.weights(inner)  # type: ignore[misc]


class _Real:
    """The cases of a real model, of which the reference knows two correct runs with different settings."""

    def __init__(self, opened: Models, facts: dict[str, Any]) -> None:
        self.opened, self.facts = opened, facts
        self._logits: dict[int, Array] = {}
        self._noise = [self._difference(p["top50"], p["default_top50"]) for p in facts["prompts"]]

    @staticmethod
    def _difference(a: dict[str, Any], b: dict[str, Any]) -> float:
        x, y = (dict(zip(top["ids"], top["logits"], strict=True)) for top in (a, b))
        return float(max(abs(x[i] - y[i]) for i in x.keys() & y.keys()))

    def _along(self, ids: Sequence[int], greedy: dict[str, Any]) -> tuple[Array, list[Difference]]:
        """Logits before each greedy token, fed with the reference's."""
        fed = [*ids, *greedy["ids"][:-1]]
        return self.opened.same(lambda llm: llm.logits(fed)[len(ids) - 1 :], n_ubatch=512)

    def _argmax(self, got: Array, greedy: dict[str, Any], noise: float) -> list[Difference]:
        wrong = (got.argmax(1) != np.array(greedy["ids"])) & (np.array(greedy["gap"]) > noise)
        return _over("unequal tokens", int(wrong.sum()), 0)

    def prompt(self, i: int) -> list[Difference]:
        """Best token of every step whose gap exceeds the noise."""
        one = self.facts["prompts"][i]
        got, found = self._along(one["ids"], one["greedy"])
        self._logits[i] = got[0]
        return found + self._argmax(got, one["greedy"], self._noise[i])

    def chat(self, i: int) -> list[Difference]:
        """The same for a chat."""
        one = self.facts["chats"][i]
        got, found = self._along(one["ids"], one["greedy"])
        return found + self._argmax(got, one["greedy"], max(self._noise))

    def top50(self) -> list[Difference]:
        """Median over prompts of our difference to the nearer setting, in units of theirs to each other."""
        ratios = []
        for i, one in enumerate(self.facts["prompts"]):
            if i not in self._logits:
                self.prompt(i)
            tops = (one["top50"], one["default_top50"])
            near = min(_distance(self._logits[i][top["ids"]], np.array(top["logits"])) for top in tops)
            ratios.append(near / self._noise[i])
        return _over("top-50 difference over the noise", float(np.median(ratios)), 1.25)

    def jobs(self) -> Iterator[Job]:
        """All cases."""
        name = self.facts["name"]
        for i in range(len(self.facts["prompts"])):
            yield f"{name} prompt {i}", lambda i=i: self.prompt(i)  # type: ignore[misc]
        yield f"{name} top 50", self.top50
        for i in range(len(self.facts.get("chats", ()))):
            yield f"{name} chat {i}", lambda i=i: self.chat(i)  # type: ignore[misc]


def _encoder(opened: Models) -> list[Difference]:
    raise Unsupported("architectures", opened.arch)


def jobs(path: Path, facts: dict[str, Any], file: Path, threads: Sequence[int]) -> Iterator[Job]:
    """The numeric cases of a model that a JSON file describes, if it describes any and the model is there."""
    if not file.exists() or "prompts" not in facts:
        return
    numbers = path.with_suffix(".npz")
    with np.load(numbers, allow_pickle=False) as loaded:
        data = {key: loaded[key] for key in loaded.files}
    opened = Models(file, threads, 512 if "perplexity" in facts else N_CTX)
    try:
        if "perplexity" in facts:
            yield from _Real(opened, facts).jobs()
        elif "short_logits" in data:
            yield from _Decoder(opened, facts, data).jobs()
        else:
            yield f"{facts['name']} embeddings", lambda: _encoder(opened)
    finally:
        opened.close()
