"""One measurement of `peak_memory`, run by path in a process of its own; its Python may be one without ggjit.

PYTHON peak_memory_worker.py imports '["module", ...]'    import them and print the memory
PYTHON peak_memory_worker.py ours|peer '{...}'            load a model, decode, and print memory and modules
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def status() -> dict[str, int]:
    """Peak and present resident bytes: all, of no file, of files."""
    found = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in ("VmHWM", "VmRSS", "RssAnon", "RssFile"):
                found[key] = 1024 * int(value.split()[0])
    return found


def ours(model: str, n_ctx: int, n_ubatch: int, n_threads: int, n_prompt: int, n_predict: int) -> list[int]:
    """Decode greedily with ggjit."""
    from ggjit.llm import LLM, Sampler

    llm = LLM(model, n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads, kv_type="f16", progress=False)
    return list(llm.raw_tokens(prompt(n_prompt, llm.model.n_vocab), n_predict, Sampler(0)))


def peer(model: str, n_ctx: int, n_ubatch: int, n_threads: int, n_prompt: int, n_predict: int) -> list[int]:
    """Decode greedily with llama.cpp, through its C interface."""
    c: Any = importlib.import_module("llama_cpp")
    quiet = c.llama_log_callback(lambda *_: None)
    c.llama_log_set(quiet, ctypes.c_void_p(0))
    c.llama_backend_init()
    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, max(n_ubatch, n_prompt), n_ubatch
    params.n_threads = params.n_threads_batch = n_threads
    context = c.llama_init_from_model(loaded, params)
    n_vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded))
    out: list[int] = []
    new = prompt(n_prompt, n_vocab)
    while True:
        array = (c.llama_token * len(new))(*new)
        if c.llama_decode(context, c.llama_batch_get_one(array, len(new))):
            raise RuntimeError("llama_decode: must return 0")
        logits = c.llama_get_logits_ith(context, -1)[:n_vocab]
        new = [max(range(n_vocab), key=logits.__getitem__)]
        del logits
        out += new
        if len(out) == n_predict:
            return out


def prompt(n: int, n_vocab: int) -> list[int]:
    """Ids from all over the vocabulary."""
    return [(7919 * (i + 1)) % n_vocab for i in range(n)]


def main(what: str, text: str) -> None:
    """Do one measurement and print it as JSON."""
    sys.path.pop(0)  # this file's folder
    given = json.loads(text)
    if what == "imports":
        for name in given:
            try:
                importlib.import_module(name)
            except ImportError:  # an alias that a package made
                continue
        print(json.dumps(status()))
        return
    decode: Callable[..., list[int]] = {"ours": ours, "peer": peer}[what]
    tokens = decode(**given)
    found = status()
    modules = [name for name in sys.modules if name != "__main__"]
    print(json.dumps({**found, "tokens": tokens, "modules": modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
