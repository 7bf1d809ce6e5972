"""ggjit: ggml in Python, compiled by Numba for the very CPU it runs on.

A graph is defined in a context, built, and computed:

    import ggjit as gg

    with gg.Context(1 << 20):
        x = gg.new_tensor(gg.F32, 1).set(2.0)
        f = x * x * 3.0 + 4.0
        gg.build(f).compute()
        print(f.numpy().ravel())  # [16.]

Every op is a function here (`gg.mul_mat`, see `ggjit.ops`), every type a name (`gg.Q4_0`, see `ggjit.types`), and
`gg.LLM` runs a language model from a GGUF file.
"""

from __future__ import annotations

from typing import Any

from ggjit.context import Context, tensor_overhead
from ggjit.errors import GgufError, OutOfArena
from ggjit.graph import Graph, build, graph_overhead
from ggjit.op import Op
from ggjit.tensor import Tensor, from_numpy, new_node, new_tensor
from ggjit.types import BF16, F16, F32, F64, I8, I16, I32, I64, Type, row_size

__version__ = "0.1.0"
_LAZY = {  # name -> the module that is imported when it is first used
    "LLM": "ggjit.llm",
    "GgufFile": "ggjit.gguf",
    "GgufWriter": "ggjit.gguf",
    "Tokenizer": "ggjit.llm.tokenizer",
    "GraphAllocator": "ggjit.alloc",
    "Scheduler": "ggjit.sched",
    "TensorAllocator": "ggjit.alloc",
    "bench": "ggjit.show.bench_table",
    "check_op": "ggjit.dev.op_check",
    "check_type": "ggjit.dev.type_check",
    "pull": "ggjit.fetch",
    "jitted": "ggjit.jit",
    "kernel": "ggjit.jit",
    "register_type": "ggjit.ops.quants.own_type",
}

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
    "LLM",
    "Context",
    "GgufError",
    "GgufFile",
    "GgufWriter",
    "Graph",
    "GraphAllocator",
    "Op",
    "OutOfArena",
    "Scheduler",
    "Tensor",
    "TensorAllocator",
    "Tokenizer",
    "Type",
    "bench",
    "build",
    "check_op",
    "check_type",
    "from_numpy",
    "graph_overhead",
    "jitted",
    "kernel",
    "new_node",
    "new_tensor",
    "pull",
    "register_type",
    "row_size",
    "tensor_overhead",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names that are loaded on first use, and every op and type: `gg.mul_mat`, `gg.Q4_0`."""
    import importlib
    import importlib.util

    if name.startswith("__") or not name.isidentifier():
        raise AttributeError(f"module 'ggjit' has no attribute {name!r}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if importlib.util.find_spec(f"ggjit.{name}") is not None:  # a submodule: `from ggjit import jit` looks here first
        return importlib.import_module(f"ggjit.{name}")
    ops = importlib.import_module("ggjit.ops")
    if name in getattr(ops, "__all__", ()):
        return globals().setdefault(name, ops.builder(name))  # the search above takes ten times as long as a node
    types = importlib.import_module("ggjit.types")
    if name in types.all_names():
        return types.by_name(name)
    if name.startswith("_"):
        raise AttributeError(f"module 'ggjit' has no attribute {name!r}")
    from ggjit.name_hints import missing_of_module

    raise AttributeError(missing_of_module(name, __dir__()))


def __dir__() -> list[str]:
    import importlib

    ops, types = (importlib.import_module(f"ggjit.{name}") for name in ("ops", "types"))
    return sorted({*__all__, *ops.__all__, *types.all_names(), "show"})
