"""What the error of a missing name says: how the thing is called here.

For habits from NumPy and from ggml's C names, as tables and a few rules; for typing errors the closest name. Looked at
only where a name is missing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import NoReturn

TENSOR = {
    "T": "use gg.transpose(t)",
    "astype": "use gg.cast(t, type), or t.numpy().astype(dtype)",
    "copy": "use gg.dup(t), or t.numpy().copy()",
    "dtype": "its type is t.type; NumPy's is t.numpy().dtype",
    "fill": "use t.set(value), or gg.fill(t, value) for a node",
    "item": "use t.numpy().item()",
    "matmul": "use gg.mul_mat(w, x)",
    "mean": "use gg.mean(t), of each row, or t.numpy().mean()",
    "max": "use gg.argmax(t), or t.numpy().max()",
    "mT": "use gg.transpose(t)",
    "ndim": "use t.n_dims",
    "permute": "use gg.permute(t, axis0, axis1, axis2, axis3)",
    "reshape": "use gg.reshape_2d(t, ne0, ne1), innermost size first",
    "shape": "sizes are t.ne (innermost first); NumPy's order is t.ne[::-1], of values t.numpy().shape",
    "size": "use t.nelements",
    "strides": "byte steps are t.nb (innermost first)",
    "sum": "use gg.sum(t), or gg.sum_rows(t)",
    "to": "use gg.cast(t, type)",
    "tolist": "use t.numpy().tolist()",
    "transpose": "use gg.transpose(t)",
    "view": "use gg.view_1d, gg.view_2d, gg.view_3d or gg.view_4d",
}
MODULE = {
    "array": "use gg.from_numpy(array)",
    "asarray": "use gg.from_numpy(array)",
    "dup_tensor": "use gg.new_tensor(t.type, *t.ne)",
    "float16": "use gg.F16",
    "float32": "use gg.F32",
    "free": "a context frees itself when nothing refers to it",
    "init": "use gg.Context(mem_size)",
    "int32": "use gg.I32",
    "matmul": "use gg.mul_mat(w, x)",
    "new_f32": "use gg.new_tensor(gg.F32, 1).set(value)",
    "new_graph": "use gg.build(results), or gg.Graph()",
    "new_graph_custom": "use gg.Graph(size, grads)",
    "new_i32": "use gg.new_tensor(gg.I32, 1).set(value)",
    "ones": "use gg.new_tensor(type, *ne).set(1)",
    "tensor": "use gg.from_numpy(array)",
    "zeros": "use gg.new_tensor(type, *ne).set(0)",
}


class Missing:
    """A name that Tensor has not. As `Tensor.__getattr__` it would make each access to names that are there slower.

    Args:
        name: one of `TENSOR`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, tensor: object, kind: type) -> NoReturn:
        raise AttributeError(f"Tensor has no attribute {self.name!r}: {TENSOR[self.name]}")


def closest(name: str, names: Iterable[str]) -> str:
    """`; closest: soft_max` for a name that is nearly one of others, else an empty text."""
    import difflib

    by_letters = {n.replace("_", "").lower(): n for n in names}  # softmax is soft_max
    letters = name.replace("_", "").lower()
    near = [letters] if letters in by_letters else difflib.get_close_matches(letters, by_letters)
    return f"; closest: {', '.join(by_letters[n] for n in near)}" if near else ""


def missing_of_module(name: str, names: Iterable[str]) -> str:
    """The error of `gg.name`.

    Args:
        name: what is missing.
        names: what is there.
    """
    text, known = f"module 'ggjit' has no attribute {name!r}", set(names)
    bare = name.removeprefix("ggml_").removeprefix("GGML_TYPE_")
    hint = MODULE.get(bare) or _rule(bare, known) or (f"use gg.{bare}" if bare in known else "")
    return f"{text}: {hint}" if hint else text + closest(bare, known)


def _rule(name: str, known: set[str]) -> str:
    """What follows from how ggml builds names."""
    from ggjit import ops
    from ggjit.graph import Graph
    from ggjit.tensor import Tensor

    if re.fullmatch(r"new_tensor_[1-4]d", name):
        return "use gg.new_tensor(type, ne0, ...), innermost size first"
    if name.endswith("_inplace") and (op := name.removesuffix("_inplace")) in ops.__all__:
        if "inplace" in inspect.signature(ops.builder(op)).parameters:
            return f"pass inplace=True to gg.{op}"
        return f"gg.{op} has no form in place"
    if name in known or name.startswith("_"):
        return ""
    if hasattr(Graph, method := name.removeprefix("graph_")):
        return f"use graph.{method} of a Graph, such as gg.build makes"
    return f"use t.{name} of a Tensor" if name in vars(Tensor) and name not in TENSOR else ""
