"""Model architectures, one file each, named as GGUF's `general.architecture`.

A file registers a class: its constructor asks the loader for the weights it needs, its `build` writes the decode graph.

    @architecture("llama")
    class Llama: ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from ggjit.llm.context import DecodeGraph
    from ggjit.llm.hparams import Hparams
    from ggjit.llm.loader import Loader
    from ggjit.tensor import Tensor


class Architecture(Protocol):
    """What a model file gives."""

    def __init__(self, hparams: Hparams, loader: Loader) -> None: ...

    def build(self, g: DecodeGraph) -> Tensor:
        """Write the graph of one ubatch and return the logits, f32 [n_vocab, n_outputs]."""
        ...


_REGISTRY: dict[str, type[Architecture]] = {}
_Class = TypeVar("_Class", bound=type)


def architecture(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: register an architecture under GGUF's name."""

    def register(cls: _Class) -> _Class:
        _REGISTRY[name] = cls
        return cls

    return register


def names() -> list[str]:
    """Architectures that can be run: those with a file here and those a user registered."""
    files = {m.name for m in pkgutil.iter_modules(__path__) if m.name != "layers"}
    return sorted(files | set(_REGISTRY))


def get(name: str) -> type[Architecture]:
    """The class of an architecture.

    Raises:
        NotImplementedError: there is none of that name.
    """
    if name not in _REGISTRY and name in names():
        importlib.import_module(f"{__name__}.{name}")
    if name not in _REGISTRY:
        raise NotImplementedError(f"models: the architecture must be one of {names()}, got {name!r}")
    return _REGISTRY[name]
