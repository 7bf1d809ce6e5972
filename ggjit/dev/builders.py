"""Which functions of `ggjit.ops` build which op: seen while the cases of ops are built, else read from their code."""

from __future__ import annotations

import functools
import inspect
import sys
import zlib
from types import CodeType, FrameType
from typing import Any

from ggjit import ops
from ggjit.context import Context
from ggjit.dev.cases import ARENA, CaseInputs
from ggjit.op import NONE, Op, all_ops
from ggjit.tensor import Tensor


@functools.cache
def _functions() -> dict[str, Any]:
    found = {name: inspect.unwrap(ops.builder(name)) for name in ops.__all__}
    return {name: function for name, function in found.items() if inspect.isfunction(function)}


def _seen() -> dict[str, set[str]]:
    """For each builder the ops of the nodes that it returned in the cases."""
    codes = {function.__code__: name for name, function in _functions().items()}
    found: dict[str, set[str]] = {}

    def look(frame: FrameType, event: str, value: object) -> None:
        if event == "return" and isinstance(value, Tensor) and frame.f_code in codes:
            found.setdefault(codes[frame.f_code], set()).add(value.op.name)

    for op in all_ops():
        for name, build in op.cases.items():
            with Context(ARENA):
                inputs = CaseInputs(zlib.crc32(f"{op.name}/{name}".encode()))
                sys.setprofile(look)
                try:
                    build(inputs)
                finally:
                    sys.setprofile(None)
    return found


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _read(function: Any) -> set[str]:
    """The ops that a function and the private ones that it calls name, and the builders that they call."""
    found: set[str] = set()
    for name in _names(function.__code__):
        value = inspect.unwrap(function.__globals__.get(name, 0))
        if isinstance(value, Op) and value is not NONE:
            found.add(value.name)
        elif inspect.isfunction(value) and value is _functions().get(name):
            found.add(name)
        elif inspect.isfunction(value) and value.__module__ == function.__module__ and name.startswith("_"):
            found |= _read(value)
    return found


@functools.cache
def builders() -> dict[str, str]:
    """For each builder the op that its result is of, "" where that is one of several nodes."""
    seen = _seen()
    found = {name: next(iter(seen[name])) for name in seen if len(seen[name]) == 1}
    homes = {op.name: _home(op) for op in all_ops()}
    for name, function in _functions().items():
        if name not in found:
            made = {found.get(called, called) for called in _read(function)}
            is_one = len(made) == 1 and homes.get(min(made)) == function.__module__
            found[name] = made.pop() if is_one else ""
    return found


def _home(op: Op) -> str:
    return next((case.__module__ for case in op.cases.values()), "")


def builders_of(op: Op, function: str = "") -> list[str]:
    """The builders of an op, or of one function of it: `silu` of unary."""
    every = sorted(name for name, made in builders().items() if made == op.name)
    if not function:
        return every
    return [name for name in every if name in (function, f"{function}_split")] or [n for n in every if n == op.name]
