# ruff: noqa: F403
"""The ops, one family a file, imported when one of its functions is first looked at; that neither compiles nor imports
Numba, and fills the registry (`ggjit.op`).

Which family has a function is read from the files' `__all__`. Some functions have the name of their file (`scale`,
`norm`): `ops.norm` is the function, `from ggjit.ops.norm import` reaches the file.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggjit.arguments import checked

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


class _Ops(types.ModuleType):
    """This module: a family that has been imported, wherever that was asked for, gives it its functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FILES and isinstance(value, types.ModuleType):
            functions = getattr(value, "__all__", ())
            for f in functions:
                self.__dict__.setdefault(f, checked(getattr(value, f)))
            if name in functions:  # the function has the name
                return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops


def __getattr__(name: str) -> Any:
    """An op's function: its family is imported."""
    if name not in _FAMILY:
        raise AttributeError(f"module 'ggjit.ops' has no attribute {name!r}")
    family = importlib.import_module(f"{__name__}.{_FAMILY[name]}")
    # Another thread may have imported it and not stored its functions yet; or somebody has deleted this one.
    return globals().setdefault(name, checked(getattr(family, name)))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_all() -> None:
    """Import every family, so that the registry is complete."""
    for family in _FILES:
        importlib.import_module(f"{__name__}.{family}")
