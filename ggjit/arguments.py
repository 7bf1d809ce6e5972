"""Builders say which argument is of the wrong kind: `add: b must be a Tensor, got None`.

Other functions check what they are given before they do anything (`check_kinds`).

Nothing is checked before a builder runs, since a graph's nodes take 3 to 4 us each to make. When one raises, its
arguments are compared with its annotations, and what does not fit them is the error.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ggjit.tensor import Tensor
from ggjit.types import Type

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
_WIDTH = 60  # characters of a value in an error
MAX_THREADS = 512
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "Tensor": (Tensor, "a Tensor"),
    "Type": (Type, "a Type such as gg.F32"),
    "int": (numbers.Integral, "an int"),
    "float": (numbers.Real, "a number"),
}


def check_kinds(where: str, kinds: type | tuple[type, ...], must: str, **values: Any) -> None:
    """Check what a function is given.

    Args:
        where: the function.
        kinds: what a value must be an instance of; True and False are no numbers.
        must: the same in words.
        values: arguments by their names.

    Raises:
        TypeError: a value is of another kind.
    """
    for name, value in values.items():
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"{where}: {name} must be {must}, got {_shown(value)}")


def check_positive(where: str, **values: int | None) -> None:
    """Check sizes that may be left out: one error for the first that is not positive.

    Raises:
        TypeError: a value is no whole number.
        ValueError: a value is below 1.
    """
    for name, value in values.items():
        if value is None:
            continue
        check_kinds(where, numbers.Integral, "a whole number", **{name: value})
        if value < 1:
            raise ValueError(f"{where}: {name} must be positive, got {value}")


def check_threads(where: str, n_threads: int, name: str = "n_threads") -> int:
    """A number of threads that a function was given.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is not 1 to 512.
    """
    if n_threads.__class__ is int and 1 <= n_threads <= MAX_THREADS:  # a graph's run asks each time
        return n_threads
    check_kinds(where, numbers.Integral, "a whole number", **{name: n_threads})
    if not 1 <= n_threads <= MAX_THREADS:
        raise ValueError(f"{where}: {name} must be 1 to {MAX_THREADS}, got {n_threads}")
    return int(n_threads)


def tensors_of(where: str, name: str, value: Any) -> list[Tensor]:
    """Tensors that a function was given as a list or another iterable.

    Raises:
        TypeError: `value` is none, or an element of it is no Tensor.
    """
    try:
        found = None if isinstance(value, (str, bytes, np.ndarray)) else list(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{where}: {name} must be a list of Tensors, got {_described(value)}")
    for i, one in enumerate(found):
        if not isinstance(one, Tensor):
            raise TypeError(f"{where}: {name}[{i}] must be a Tensor, got {_described(one)}")
    return found


def check_texts(where: str, must: str, **values: Any) -> None:
    """Check lists of texts, as `check_kinds` does."""
    for name, value in values.items():
        many = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        if not many or not all(isinstance(one, str) for one in value):
            raise TypeError(f"{where}: {name} must be {must}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def checked(builder: _Builder) -> _Builder:
    """Decorator of builders: a TypeError that names the argument when one is of the wrong kind."""

    @functools.wraps(builder)
    def build(*args: Any, **keywords: Any) -> Any:
        try:
            return builder(*args, **keywords)
        except (AttributeError, TypeError, ValueError):
            text = misfit(builder, args, keywords)
            if text is None:
                raise
        raise TypeError(text)

    return cast(_Builder, build)


def misfit(builder: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """The first argument that is not what its annotation says, as the text of an error."""
    signature = inspect.signature(builder)
    try:
        given = signature.bind(*args, **keywords).arguments
    except TypeError as error:
        return f"{builder.__name__}: {error}"
    for name, value in given.items():
        annotation = str(signature.parameters[name].annotation)
        many = annotation.startswith("Sequence[")
        base = annotation.removeprefix("Sequence[").removesuffix("]")
        kind, _, optional = base.partition(" | ")
        if kind not in _KINDS or (value is None and optional == "None"):
            continue
        for at, one in _elements(name, value, many):
            if not isinstance(one, _KINDS[kind][0]):
                return f"{builder.__name__}: {at} must be {_KINDS[kind][1]}, got {_described(one)}"
    return None


def _elements(name: str, value: Any, many: bool) -> list[tuple[str, Any]]:
    if many and isinstance(value, Sequence):
        return [(f"{name}[{i}]", one) for i, one in enumerate(value)]
    return [(name, value)]


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}; use gg.from_numpy"
    return repr(value) if isinstance(value, (numbers.Number, str, Type)) or value is None else type(value).__name__
