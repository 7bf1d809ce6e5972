# ruff: noqa: F403
"""The ops, one family a file, imported when one of its functions is first looked at; that neither compiles nor imports
Numba, and fills the registry (`ggjit.op`).

Which family has which builders is read from the files' `__all__`. `gg.add` and `ops.add` are the same function, that of
`ggjit.ops.binary`. A name that is a file and one of its builders too (`norm`, `scale`) is the file here, as after
`import ggjit.ops.norm`; called, such a file is the builder: `ops.norm(a, 1e-5)`. `gg.norm` is always the builder.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggjit.ops.attention import *
    from ggjit.ops.back import *
    from ggjit.ops.binary import *
    from ggjit.ops.conv import *
    from ggjit.ops.conv_by_im2col import *
    from ggjit.ops.conv_transpose import *
    from ggjit.ops.copy import *
    from ggjit.ops.custom import *
    from ggjit.ops.dsv4 import *
    from ggjit.ops.fill import *
    from ggjit.ops.glu import *
    from ggjit.ops.group_norm import *
    from ggjit.ops.im2col import *
    from ggjit.ops.indexer import *
    from ggjit.ops.linalg import *
    from ggjit.ops.loss import *
    from ggjit.ops.math import *
    from ggjit.ops.mul_mat import *
    from ggjit.ops.mul_mat_id import *
    from ggjit.ops.norm import *
    from ggjit.ops.optimizer import *
    from ggjit.ops.pad import *
    from ggjit.ops.pool import *
    from ggjit.ops.recurrence_back import *
    from ggjit.ops.reduce import *
    from ggjit.ops.repeat import *
    from ggjit.ops.rope import *
    from ggjit.ops.rows import *
    from ggjit.ops.rwkv import *
    from ggjit.ops.scale import *
    from ggjit.ops.set import *
    from ggjit.ops.soft_max import *
    from ggjit.ops.sort import *
    from ggjit.ops.ssm import *
    from ggjit.ops.unary import *
    from ggjit.ops.unary_back import *
    from ggjit.ops.upscale import *
    from ggjit.ops.views import *
    from ggjit.ops.window import *

_LISTED = re.compile(r"^__all__(?:: list\[str\])? = \[(.*?)\]", re.MULTILINE | re.DOTALL)


def _functions(path: Path) -> list[str]:
    """What a family's file lists in `__all__`; the file is not executed."""
    listed = _LISTED.search(path.read_text(encoding="utf-8"))
    return re.findall(r'"(\w+)"', listed[1]) if listed is not None else []


_FILES = {p.stem: p for p in sorted(Path(__file__).parent.glob("*.py")) if p.stem != "__init__"}
_FAMILY = {function: family for family, path in _FILES.items() for function in _functions(path)}
__all__ = list(_FAMILY)


class _NamedFamily(types.ModuleType):
    """A family with a builder of its own name: called, it is that builder."""

    def _builder(self) -> Callable[..., Any]:
        return self.__dict__[self.__name__.rpartition(".")[2]]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._builder()(*args, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._builder())

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def _named(name: str, family: Any) -> Any:
    if name in _FAMILY and isinstance(family, types.ModuleType):
        family.__class__ = _NamedFamily
    return family


class _Ops(types.ModuleType):
    """This module: the import system sets each family as an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _named(name, value))


sys.modules[__name__].__class__ = _Ops


def builder(name: str) -> Any:
    """The function that makes nodes, by name: its family is imported.

    Raises:
        AttributeError: there is none.
    """
    if name not in _FAMILY:
        raise AttributeError(f"module 'ggjit.ops' has no builder {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FAMILY[name]}"), name)


def __getattr__(name: str) -> Any:
    """A family, or a builder of one."""
    if name in _FILES or name in ("lib", "quants"):  # what another thread imports may not be an attribute yet
        return _named(name, importlib.import_module(f"{__name__}.{name}"))
    if name not in _FAMILY:
        raise AttributeError(f"module 'ggjit.ops' has no attribute {name!r}")
    return globals().setdefault(name, builder(name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES, *__all__})


def load_all() -> None:
    """Import every family, so that the registry is complete."""
    for family in _FILES:
        importlib.import_module(f"{__name__}.{family}")
