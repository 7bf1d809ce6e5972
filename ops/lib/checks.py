"""What builders check, and the text of the exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggjit.types import F32

if TYPE_CHECKING:
    from ggjit.tensor import Tensor
    from ggjit.types import Type


def described(tensors: tuple[Tensor | None, ...]) -> str:
    """Shapes and names of tensors, for an error message."""
    given = [t for t in tensors if t is not None]
    shapes = " and ".join(str(list(t.ne)) for t in given)
    return f"{shapes} ({', '.join(repr(t.name) for t in given)})"


def are_f32(tensors: tuple[Tensor | None, ...]) -> bool:
    """Are all tensors that are there f32; for ops whose nodes are made by backward rules alone."""
    return all(t is None or t.type is F32 for t in tensors)


def require(where: str, holds: bool, must: str, *tensors: Tensor | None) -> None:
    """Check a rule on the shapes of tensors.

    Raises:
        ValueError: `holds` is False; the text says what must hold and what was given.
    """
    if not holds:
        raise ValueError(f"{where}: {must}, got {described(tensors)}")


def require_type(where: str, name: str, tensor: Tensor, *allowed: Type) -> None:
    """Check the type of a source.

    Raises:
        TypeError: it is none of `allowed`.
    """
    if tensor.type not in allowed:
        names = " or ".join(t.name for t in allowed)
        raise TypeError(f"{where}: {name} must be {names}, got {tensor.type.name} ('{tensor.name}')")


def require_contiguous(where: str, name: str, tensor: Tensor) -> None:
    """Check that a source has no gaps.

    Raises:
        ValueError: it has.
    """
    if not tensor.is_contiguous:
        raise ValueError(
            f"{where}: {name} must be contiguous, got ne {list(tensor.ne)}, nb {list(tensor.nb)} ('{tensor.name}'); "
            "use cont first"
        )
