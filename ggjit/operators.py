"""What the operators of a Tensor make: nodes, of numbers and of other tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ggjit import types

if TYPE_CHECKING:
    from ggjit.tensor import Tensor


def binary(name: str, a: Tensor, b: Tensor | float) -> Tensor:
    """The node of an operator; NotImplemented for an operand that it does not know."""
    from ggjit import ops
    from ggjit.tensor import Tensor

    if isinstance(b, Tensor):
        return getattr(ops, name)(a, b)  # type: ignore[no-any-return]
    value = number(name, b)
    if value is None:
        return NotImplemented  # type: ignore[no-any-return]
    if name in ("mul", "div"):
        return ops.scale_bias(a, value if name == "mul" else 1.0 / value, 0.0)
    return ops.scale_bias(a, 1.0, value if name == "add" else -value)


def number(name: str, value: Any) -> float | None:
    """An operand that is a number; None for what an operator does not know."""
    if isinstance(value, (int, float, np.number)):
        return float(value)
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"{name}: operands must be Tensors or numbers, got an array of shape {value.shape}; use "
            "gg.from_numpy(array), or t.numpy() once it is computed"
        )
    return None


def divided(value: float, t: Tensor) -> Tensor:
    """value / t: ggml has no op for it, and a leaf of one number has no gradient to be in the way."""
    from ggjit import ops
    from ggjit.tensor import from_numpy

    type = t.type if t.type in (types.F16, types.BF16) else types.F32
    one = from_numpy(np.array([value], np.float32), type)
    quotient: Tensor = ops.div(ops.repeat(one, t), t)
    return quotient
