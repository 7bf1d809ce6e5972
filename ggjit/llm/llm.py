"""LLM: a model, its tokenizer and one conversation, in a few lines.

    with gg.LLM("model.gguf") as llm:
        for piece in llm.generate("The capital of France is", max_tokens=16, temperature=0):
            print(piece, end="", flush=True)

What a prompt shares with the tokens of the call before stays in the cache and is not computed again.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.arguments import check_kinds, check_positive, check_texts, check_threads
from ggjit.backend import devices as all_devices
from ggjit.jit import soon
from ggjit.llm import choice, inputs
from ggjit.llm.batch import Batch, NextToken, token_ids
from ggjit.llm.context import N_UBATCH, DecodeContext, check_precision
from ggjit.llm.kv_cache import cache_type
from ggjit.llm.model import Model
from ggjit.llm.sampling import Sampler

if TYPE_CHECKING:
    from ggjit.backend import Device
    from ggjit.llm.tokenizer import Tokenizer
    from ggjit.tensor import Tensor
    from ggjit.types import Type

Message = Mapping[str, str]
_living: weakref.WeakSet[LLM] = weakref.WeakSet()


class LLM:
    """A language model ready to generate.

    Calls from several threads take turns; a generator that another call interrupts ends with an error.

    Args:
        path: GGUF file, or a name that `gg.pull` takes, such as "smollm2": it is fetched unless it is there.
        n_ctx: tokens of context, by default the smaller of the model's and 4096.
        n_threads: by default as many as the process may use.
        kv_type: of the KV cache, F16 or F32: the type or its name.
        n_ubatch: most tokens computed together.
        prec: "default", or "f32": all products of weights but those of experts take activations of about 16 bits, not
            keys, values and logits alone. A prompt takes 1.5 times as long; results are nearly those of F32 weights.
        repack: pack weights into panels at load; without it kernels read the mapped file.
        progress: show progress bars, if stderr is a terminal.
        mmap: use weights and metadata, as the vocabulary, where the mapped file has them: cutting it short while it is
            in use ends the process, replacing it does not. Without it all is read, and the file may change afterwards.
        mlock: keep weights from being paged out; a warning where the system forbids it.
        devices: beside the CPU, by default all that are there.
        n_gpu_layers: blocks on the devices, counted from the output, which counts as one; by default all.
        overrides: devices of weights, by regular expressions that are searched in their names: `{"ffn": "cpu"}`.

    Raises:
        GgufError: the file is not sound.
        NotImplementedError: no code for its architecture or tokenizer is there.
        OSError: the file cannot be opened or fetched.
        TypeError: a parameter is of the wrong kind.
        ValueError: a parameter is out of range, or `path` is neither a file nor a known name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kv_type: Type | str = types.F16,
        n_ubatch: int = N_UBATCH,
        prec: str = "default",
        repack: bool = True,
        progress: bool = True,
        mmap: bool = True,
        mlock: bool = False,
        devices: Sequence[Device] | None = None,
        n_gpu_layers: int | None = None,
        overrides: Mapping[str, Device | str] | None = None,
    ) -> None:
        from ggjit.threadpool import default_threads

        check_kinds("LLM", Integral, "a whole number", n_ubatch=n_ubatch)
        check_positive("LLM", n_ctx=n_ctx, n_ubatch=n_ubatch)
        n = default_threads() if n_threads is None else check_threads("LLM", n_threads)
        kv_type = cache_type("LLM", kv_type)
        check_precision("LLM", prec)
        soon(inputs.take, inputs.fill, inputs.check, choice.choose)  # what every token needs beside the graph
        others = all_devices()[:-1] if devices is None else devices
        self.model = Model(
            path, n_threads=n, repack=repack, progress=progress, mmap=mmap, mlock=mlock, devices=others,
            n_gpu_layers=n_gpu_layers, overrides=overrides,
        )  # fmt: skip
        n_ctx = self.model.hparams.default_n_ctx if n_ctx is None else n_ctx
        self.context = DecodeContext(self.model, n_ctx, n, kv_type, n_ubatch, prec)
        self._tokenizer: Tokenizer | None = None
        self._ids: list[int] = []  # what the cache holds
        self._lock = threading.RLock()
        self._turn = 0  # counts calls that change the cache, so that an interrupted generator notices
        self._closed = False
        _living.add(self)

    # -- text --------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, made at its first use."""
        with self._lock:
            if self._tokenizer is None:
                self._check_open()
                from ggjit.llm.tokenizer import Tokenizer

                self._tokenizer = Tokenizer.from_gguf(self.model.file)
            return self._tokenizer

    def tokenize(self, text: str | bytes, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text; see `Tokenizer.tokenize`."""
        return self.tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ids; special tokens are shown if `special`."""
        return self.tokenizer.detokenize(ids, unparse_special=special)

    # -- numbers -----------------------------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Tokens of context."""
        return self.context.n_ctx

    def logits(self, ids: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits after each token of a sequence: f32 [n, n_vocab].

        Args:
            ids: the tokens.
            first: leave those after the tokens before this position away.

        Raises:
            TypeError: an id, or `first`, is no whole number.
            ValueError: an id is out of range, the sequence is longer than the context, or `first` is negative.
        """
        check_kinds("logits", Integral, "a whole number", first=first)
        if first < 0:
            raise ValueError(f"logits: first must not be negative, got {first}")
        with self._lock:
            self._begin(())
            batch = Batch.of(ids, outputs="all")
            batch.output[:first] = False
            result = self.context.decode(batch)
            self._ids = list(ids)
            return result

    def decode_from_empty(self, batches: Sequence[Sequence[int]]) -> None:
        """Clear the cache and decode batches one after the other, with the logits of each last token."""
        with self._lock:
            self._begin(())
            for ids in batches:
                self._append(ids)

    def observe(self, ids: Sequence[int], look: Callable[[Tensor], bool]) -> None:
        """Compute a sequence, from an empty cache, and look at each node when it is computed.

        Args:
            ids: the tokens.
            look: see `Executable.run`.
        """
        with self._lock:
            self._begin(())
            whole = True

            def watch(node: Tensor) -> bool:
                nonlocal whole
                whole = look(node)
                return whole

            self.context.decode(Batch.of(ids, outputs="all"), watch)
            if whole:
                self._ids = list(ids)
            else:  # keys and values are there only in part
                self.context.cache.remove(0)

    def trace(self, ids: Sequence[int], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Intermediate tensors of a sequence by their names in the graph (`Qcur-0`, `l_out-1` ...).

        Args:
            ids: at most one ubatch of tokens.
            names: of nodes.

        Returns:
            Copies of shape ne[::-1]; of several nodes of one name the last.

        Raises:
            KeyError: the graph has no node of a name.
            TypeError: `ids` are no whole numbers, or `names` no texts.
            ValueError: more tokens than one ubatch holds.
        """
        check_texts("trace", "a list of texts", names=names)
        ids = token_ids("trace", ids).tolist()
        if len(ids) > self.context.n_ubatch:
            raise ValueError(f"trace: tokens must fit a ubatch of {self.context.n_ubatch}, got {len(ids)}")
        wanted, found = set(names), {}

        def look(node: Tensor) -> bool:
            if node.name in wanted:
                found[node.name] = node.numpy().copy()
            return True

        self.observe(ids, look)
        missing = wanted - set(found)
        if missing:
            raise KeyError(f"trace: the graph must hold nodes of these names, got {sorted(missing)}")
        return found

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | bytes | Sequence[int],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        on_token: Callable[[int], Any] | None = None,
    ) -> Iterator[str]:
        """Generate text, piece by piece.

        What the prompt shares with the tokens of the call before is not computed again.

        Args:
            prompt: text, its bytes, or ids.
            max_tokens: most tokens to generate, by default until the context is full.
            stop: texts at which to stop; they are not part of the result.
            temperature: see `Sampler`.
            top_k: see `Sampler`.
            top_p: see `Sampler`.
            min_p: see `Sampler`.
            seed: see `Sampler`.
            on_token: called with each generated id, end tokens too, as soon as it is known.

        Returns:
            An iterator of pieces of text. It ends at an end token, a stop text, `max_tokens` or the context's end.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: the prompt is empty or longer than the context, or a parameter is out of range.
            RuntimeError: another call used the model in between.
        """
        sampler = Sampler(temperature, top_k, top_p, min_p, seed)
        check_kinds("generate", (str, bytes, Sequence, np.ndarray), "a text or token ids", prompt=prompt)
        stops = (stop,) if isinstance(stop, str) else stop
        check_texts("generate", "a text or a list of texts", stop=stops)
        if "" in stops:
            raise ValueError("generate: a stop text must not be empty, got ''; leave it away")
        ids = self.tokenize(prompt) if isinstance(prompt, (str, bytes)) else prompt
        return self._pieces(self.tokens(ids, max_tokens, sampler, on_token), stops)

    def n_shared(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of a prompt are in the cache already and will not be computed again."""
        return next((i for i, (a, b) in enumerate(zip(self._ids, ids[:-1], strict=False)) if a != b),
                    max(0, min(len(self._ids), len(ids) - 1)))  # fmt: skip

    def tokens(
        self,
        ids: Sequence[int],
        max_tokens: int | None,
        sampler: Sampler,
        on_token: Callable[[int], Any] | None = None,
    ) -> Iterator[int]:
        """Generate ids; an end token ends the iterator and is not part of it."""
        return self._begin_generation(ids, max_tokens, sampler, on_token, self.tokenizer.eog)

    def raw_tokens(self, ids: Sequence[int], max_tokens: int | None, sampler: Sampler) -> Iterator[int]:
        """Generate ids, end tokens too."""
        return self._begin_generation(ids, max_tokens, sampler, None, frozenset())

    def _begin_generation(
        self,
        ids: Sequence[int],
        max_tokens: int | None,
        sampler: Sampler,
        on_token: Callable[[int], Any] | None,
        last: frozenset[int],
    ) -> Iterator[int]:
        check_kinds("generate", (Integral, NoneType), "a whole number or None", max_tokens=max_tokens)
        check_kinds("generate", Callable, "a Sampler", sampler=sampler)  # type: ignore[arg-type]
        check_kinds("generate", (Callable, NoneType), "callable or None", on_token=on_token)  # type: ignore[arg-type]
        prompt = token_ids("generate", ids).tolist()
        if not prompt:
            raise ValueError("generate: the prompt must have at least one token, got none")
        if len(prompt) > self.n_ctx:
            raise ValueError(f"generate: the prompt must fit the context of {self.n_ctx} tokens, got {len(prompt)}")
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"generate: max_tokens must not be negative, got {max_tokens}")
        return self._generate(prompt, max_tokens, sampler, on_token, last)

    def _generate(
        self,
        ids: list[int],
        max_tokens: int | None,
        sampler: Sampler,
        on_token: Callable[[int], Any] | None,
        last: frozenset[int],
    ) -> Iterator[int]:
        room = self.n_ctx - len(ids) + 1
        count = room if max_tokens is None else min(max_tokens, room)
        turn, token, following = 0, -1, NextToken()
        for at in range(len(ids) - 1, len(ids) - 1 + count):
            with self._lock:
                if turn == 0:
                    turn = self._begin(ids)
                    logits = self._append(ids[len(self._ids) :])
                elif turn == self._turn:
                    logits = self.context.decode(following.put(token, at), copy=False)
                    self._ids.append(token)
                else:
                    raise RuntimeError("generate: the model must not be used by another call in between, got one")
                token = sampler(logits)
            if on_token is not None:
                on_token(token)
            if token in last:
                return
            yield token

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("LLM: the model must be open, got a closed one")

    def _begin(self, ids: Sequence[int]) -> int:
        """Keep of the cache what it shares with `ids`, and mark the start of a call that changes it."""
        self._check_open()
        same = self.n_shared(ids)
        self.context.cache.remove(0, same)
        del self._ids[same:]
        self._turn += 1
        return self._turn

    def _append(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Decode more tokens of the sequence; the logits of the last, see `DecodeContext.decode`."""
        first = len(self._ids)
        try:
            logits = self.context.decode(Batch.of(ids, first), copy=False)
        except BaseException:
            self.context.cache.remove(0, first)
            raise
        self._ids += ids
        return logits

    def _pieces(self, tokens: Iterator[int], stops: Sequence[str]) -> Iterator[str]:
        from ggjit.llm.tokenizer import StreamDecoder

        decoder, held = StreamDecoder(self.tokenizer), ""
        for token in tokens:
            held += decoder.push(token)
            keep = 0
            if stops:
                cut = min((i for i in (held.find(s) for s in stops) if i >= 0), default=-1)
                if cut >= 0:
                    if cut:
                        yield held[:cut]
                    return
                keep = max(_overlap(held, s) for s in stops)
            ready = held[: len(held) - keep]
            if ready:
                yield ready
            held = held[len(held) - keep :]
        held += decoder.flush()
        if held:
            yield held

    def chat(self, messages: Sequence[Message], max_tokens: int | None = None, **sampling: Any) -> Iterator[str]:
        """Generate the assistant's reply to a conversation; only what is new is computed.

        Args:
            messages: mappings with `role` and `content`.
            max_tokens: most tokens to generate.
            sampling: see `generate`.

        Returns:
            An iterator of pieces of text.

        Raises:
            ValueError: the model has no chat template, or the conversation is longer than the context.
        """
        ids = self.tokenize(self.render_chat(messages), add_special=False)
        return self.generate(ids, max_tokens, **sampling)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model's chat template makes of it."""
        from ggjit.llm.chat import render

        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def warmup(self) -> None:
        """Build a graph of each kind that a conversation may meet, which compiles the kernels that the model needs."""
        with self._lock:
            self._check_open()
            cells = self.context.cache
            for n in (1, 2, 3, 4, 6, 8, 64):  # products have a kernel for each of these few columns, and one for many
                if n <= min(self.n_ctx, self.context.n_ubatch):
                    self.context.graph(n, cells.window(np.arange(n)), 1)
                    self.context.graph(n, cells.n_cells, n)  # long contexts share the cache among threads
            Sampler(0)(np.zeros(2, np.float32))

    # -- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give weights, cache and graphs back. Further calls raise."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._turn += 1
            self._ids = []
            self.context.close()
            self.model.close()
        gc.collect()  # tensors and contexts hold each other, and with them all weights

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._ids)} of {self.n_ctx} tokens in the cache"
        return f"LLM({self.model!r}, {state})"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)


def _after_fork() -> None:
    """In the child, a model that another thread of the parent was using begins anew: that thread is not here."""
    for llm in list(_living):
        if llm._lock.acquire(blocking=False):
            llm._lock.release()
            continue
        llm._lock = threading.RLock()
        llm._turn += 1
        llm._ids = []
        if not llm._closed:
            llm.context.cache.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
