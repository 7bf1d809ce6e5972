"""One engine of `ggjit bench peers`, in a process of its own: requests are lines of JSON on stdin, answers on stdout.

It also runs in Pythons that have no ggjit, so it imports nothing of the package but in the engines that are its own. A
peer is driven by the C functions that its package binds. Times are taken here, around the work alone.

    ggjit           gg.LLM
    llama_cpp       llama-cpp-python
    ik_llama_cpp    ik-llama-cpp-python
    limits          plain reads and the int8 peak: what the machine could do
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

KV_TYPES = {"f32": 0, "f16": 1}  # numbers of ggml's types


class Engine:
    """What all engines can do; `import` happens when one is made.

    Attributes:
        n_ubatch: most tokens that are computed together.
        n_past: tokens in the cache.
    """

    n_ubatch = 512
    n_past = 0

    def fields(self) -> list[str]:
        """Names of the parameters that `options` may set."""
        return []

    def load(self, path: str, n_ctx: int, threads: int, kv_type: str, options: dict[str, float]) -> None:
        """Load a model and make a context."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], first: int) -> None:
        """Compute tokens of one sequence at positions from `first` on, and the logits of the last."""
        raise NotImplementedError

    def logits(self) -> bytes:
        """The logits of the last token that was computed, f32."""
        raise NotImplementedError

    def forget(self, first: int) -> None:
        """Drop the cache from a position on."""
        raise NotImplementedError

    def cost(self, n_past: int, n: int) -> tuple[int, int, float]:
        """Bytes of weights of a token, of keys and values of `n_past` tokens; operations in a prefill of n tokens."""
        raise NotImplementedError

    def turn(self, kind: str) -> float:
        """Measure a limit."""
        raise NotImplementedError

    def extend(self, ids: Sequence[int]) -> None:
        """Compute more tokens, in as few parts as the engine takes."""
        for at in range(0, len(ids), self.n_ubatch):
            part = ids[at : at + self.n_ubatch]
            self.decode(part, self.n_past)
            self.n_past += len(part)

    def cut(self, n_past: int) -> None:
        """Keep the first tokens only."""
        self.forget(n_past)
        self.n_past = min(self.n_past, n_past)


class Ggjit(Engine):
    """ggjit itself."""

    def __init__(self) -> None:
        import ggjit.llm
        import ggjit.lower
        import ggjit.ops
        import ggjit.program

        self._gg = ggjit

    def load(self, path: str, n_ctx: int, threads: int, kv_type: str, options: dict[str, float]) -> None:
        """Load a model and make a context."""
        self._llm = self._gg.LLM(
            path, n_ctx=n_ctx, n_threads=threads, kv_type=kv_type, n_ubatch=self.n_ubatch, progress=False
        )
        from ggjit.llm.batch import Batch

        self._batch, self._context = Batch.of, self._llm.context
        self.n_vocab = self._llm.model.n_vocab

    def decode(self, ids: Sequence[int], first: int) -> None:
        """Compute tokens of one sequence at positions from `first` on, and the logits of the last."""
        self._logits = self._context.decode(self._batch(ids, first))

    def logits(self) -> bytes:
        """The logits of the last token that was computed, f32."""
        return bytes(self._logits[-1])

    def forget(self, first: int) -> None:
        """Drop the cache from a position on."""
        self._context.cache.remove(0, first)

    def cost(self, n_past: int, n: int) -> tuple[int, int, float]:
        """Bytes of weights of a token, of keys and values of `n_past` tokens; operations in a prefill of n tokens."""
        from ggjit.bench_peers import kv_nbytes
        from ggjit.cli.bench import prefill_flops, token_cost

        self.cut(0)
        return token_cost(self._llm)[0], kv_nbytes(self._context, n_past), prefill_flops(self._llm, n)


class _Llama(Engine):
    """What llama.cpp and its fork have in common."""

    _api: Any
    _log: Any

    def fields(self) -> list[str]:
        """The fields of the parameters of models and contexts."""
        made = self._api.llama_model_default_params(), self._api.llama_context_default_params()
        return sorted({name for params in made for name, _ in params._fields_})

    def load(self, path: str, n_ctx: int, threads: int, kv_type: str, options: dict[str, float]) -> None:
        """Load a model and make a context."""
        api, fields = self._api, dict(options)
        api.llama_backend_init()
        model = api.llama_model_default_params()
        _set(model, {"n_gpu_layers": 0} | fields)
        self._model = api.llama_model_load_from_file(os.fsencode(path), model)
        if not self._model:
            raise OSError(f"the model must be one that the engine can load, got {path}")
        context = api.llama_context_default_params()
        given = {"n_ctx": n_ctx, "n_batch": self.n_ubatch, "n_ubatch": self.n_ubatch, "n_threads": threads}
        given |= {"n_threads_batch": threads, "type_k": KV_TYPES[kv_type], "type_v": KV_TYPES[kv_type]}
        _set(context, given | fields)
        self._context = api.llama_init_from_model(self._model, context)
        if not self._context:
            raise OSError("the engine must be able to make a context of that size, got none")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batches: dict[int, Any] = {}

    def _batch(self, n: int) -> Any:
        """A batch for n tokens of sequence 0 whose last one gives logits."""
        made = self._batches.get(n)
        if made is None:
            made = self._batches[n] = self._api.llama_batch_init(n, 0, 1)
            made.n_tokens = n
            for i in range(n):
                made.n_seq_id[i], made.seq_id[i][0], made.logits[i] = 1, 0, i == n - 1
        return made

    def decode(self, ids: Sequence[int], first: int) -> None:
        """Compute tokens of one sequence at positions from `first` on, and the logits of the last."""
        n = len(ids)
        batch, words = self._batch(n), ctypes.c_int32 * n
        ctypes.memmove(batch.token, words(*ids), 4 * n)
        ctypes.memmove(batch.pos, words(*range(first, first + n)), 4 * n)
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: status must be 0, got {status}")
        self._at = self._api.llama_get_logits_ith(self._context, n - 1)

    def logits(self) -> bytes:
        """The logits of the last token that was computed, f32."""
        return ctypes.string_at(self._at, 4 * self.n_vocab)


class LlamaCpp(_Llama):
    """llama.cpp through llama-cpp-python."""

    def __init__(self) -> None:
        import llama_cpp.llama_cpp

        self._api = llama_cpp.llama_cpp
        self._log = self._api.llama_log_callback(lambda *_: None)
        self._api.llama_log_set(self._log, None)

    def forget(self, first: int) -> None:
        """Drop the cache from a position on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, first, -1)


class IkLlamaCpp(_Llama):
    """ik_llama.cpp through ik-llama-cpp-python."""

    def __init__(self) -> None:
        from ik_llama_cpp import _ctypes_api

        self._api = _ctypes_api
        self._remove = _ctypes_api._lib.llama_kv_cache_seq_rm  # the package binds no function that drops a part
        self._remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._remove.restype = ctypes.c_bool

    def forget(self, first: int) -> None:
        """Drop the cache from a position on."""
        self._remove(self._context, 0, first, -1)


class Limits(Engine):
    """The machine's limits, measured by ggjit."""

    def load(self, path: str, n_ctx: int, threads: int, kv_type: str, options: dict[str, float]) -> None:
        """Make the buffer that is read."""
        from ggjit.limits import Meter

        self._meter = Meter(threads, int(options.get("buffer_nbytes", 0)) or None)
        self.n_vocab = 0
        for kind in ("read", "int8"):
            self._meter.turn(kind, 0)

    def turn(self, kind: str) -> float:
        """Measure a limit."""
        return self._meter.turn(kind, 0.05)


ENGINES: dict[str, Callable[[], Engine]] = {
    "ggjit": Ggjit, "llama_cpp": LlamaCpp, "ik_llama_cpp": IkLlamaCpp, "limits": Limits
}  # fmt: skip


def _set(params: Any, values: dict[str, float]) -> None:
    """Set those fields that the version at hand has; what is an integer or a flag there becomes one."""
    for name, _ in params._fields_:
        if name in values:
            setattr(params, name, type(getattr(params, name))(values[name]))


def memory() -> int:
    """The most bytes of memory that this process has had since `begin_memory`, or since its start."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def begin_memory() -> int:
    """Let the peak of memory begin anew where the system can do that; return what is in use now."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass
    return memory()


# --- requests ---------------------------------------------------------------------------------------------------------


def _load(engine: Engine, path: str, **options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    engine.load(path, **options)
    return {"seconds": time.perf_counter() - start, "n_vocab": getattr(engine, "n_vocab", 0)}


def _prefill(engine: Engine, ids: list[int]) -> dict[str, Any]:
    engine.cut(0)
    start = time.perf_counter()
    engine.extend(ids)
    return {"seconds": time.perf_counter() - start}


def _generate(engine: Engine, ids: list[int], n: int) -> dict[str, Any]:
    """The last n tokens one by one; what comes before them is computed unless it is in the cache, and not timed."""
    depth = len(ids) - n
    engine.cut(depth)
    engine.extend(ids[engine.n_past : depth])
    start = time.perf_counter()
    for token in ids[depth:]:
        engine.extend([token])
    return {"seconds": time.perf_counter() - start}


def _greedy(engine: Engine, ids: list[int], n: int) -> dict[str, Any]:
    """Go on with the best token each time."""
    found = list(ids)
    engine.cut(0)
    engine.extend(ids)
    while len(found) < n:
        values = memoryview(engine.logits()).cast("f")
        found.append(max(range(len(values)), key=values.__getitem__))
        engine.extend(found[-1:])
    return {"ids": found}


def _logits(engine: Engine, prompts: list[list[int]], steps: list[int], file: str) -> dict[str, Any]:
    """Write the logits after each prompt, computed as a whole, and after each step, one by one."""
    with open(file, "wb") as out:
        for ids in prompts:
            engine.cut(0)
            engine.extend(ids)
            out.write(engine.logits())
        engine.cut(0)
        for token in steps:
            engine.extend([token])
            out.write(engine.logits())
    engine.cut(0)
    return {}


def _turn(engine: Engine, kind: str) -> dict[str, Any]:
    return {"rate": engine.turn(kind)}


def _cost(engine: Engine, n_past: int, n: int) -> dict[str, Any]:
    return dict(zip(("weights", "kv", "flops"), engine.cost(n_past, n), strict=True))


def _fields(engine: Engine) -> dict[str, Any]:
    return {"fields": engine.fields()}


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "load": _load, "prefill": _prefill, "generate": _generate, "greedy": _greedy, "logits": _logits, "turn": _turn,
    "cost": _cost, "fields": _fields,
}  # fmt: skip


def serve(name: str) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    start = time.perf_counter()
    engine = ENGINES[name]()
    seconds = time.perf_counter() - start
    base = begin_memory()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = REQUESTS[request.pop("do")](engine, **request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer |= {"import_seconds": seconds, "memory": memory() - base}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
