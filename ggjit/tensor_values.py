"""The values of tensors: their memory, reading and writing them as NumPy arrays, conversion to a type's bytes.

What `Tensor.bytes`, `Tensor.numpy` and `Tensor.set` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggjit import types
from ggjit.op import NONE
from ggjit.types import Type, row_size

if TYPE_CHECKING:
    from ggjit.tensor import Tensor

_MANY = 1 << 16  # values for which compiling a search pays


def memory_of(t: Tensor) -> NDArray[np.uint8]:
    """The bytes [data, data + nbytes) as a live uint8 array that keeps their owner alive; else a copy.

    Raises:
        ValueError: the tensor has no data, or not in memory that is known here.
    """
    address, size = t.data, t.nbytes
    if address == 0:
        raise ValueError(f"Tensor: data must be allocated before it is read or set, got none ('{t.name}')")
    root = t.view_src
    buffer = t.buffer if root is None else root.buffer
    if buffer is not None and not buffer.type.is_host:
        return buffer.get_tensor(t)
    owners: list[Any] = [t.context.array, t.buffer]
    if root is not None:
        owners += [root.context.array, root.buffer, *root.context.kept.values()]
    for owner in owners + list(t.context.kept.values()):
        array = getattr(owner, "array", owner)
        if isinstance(array, np.ndarray):
            start = address - array.ctypes.data
            if 0 <= start and start + size <= array.nbytes:
                return array[start : start + size]
    raise ValueError(f"Tensor: data must lie in host memory that is known here, got address {address:#x} ('{t.name}')")


def _check_readable(t: Tensor) -> None:
    root = t if t.view_src is None else t.view_src
    buffer = None if root.op is NONE else root.buffer
    if buffer is not None and buffer.usage == "compute":
        from ggjit.readable import check

        check(t)


def to_bytes(t: Tensor) -> NDArray[np.uint8]:
    """`Tensor.bytes`."""
    _check_readable(t)
    return memory_of(t)


def to_numpy(t: Tensor) -> NDArray[Any]:
    """`Tensor.numpy`."""
    memory, shape = to_bytes(t), t.ne[::-1]
    if t.type.dtype is not None:
        values = np.ndarray(shape, t.type.dtype, memory, 0, t.nb[::-1])
        return (values.astype(np.uint32) << 16).view(np.float32) if t.type is types.BF16 else values
    if t.is_empty:
        return np.zeros(shape, np.float32)
    blocks = np.ndarray(
        (*shape[:-1], t.ne[0] // t.type.blck_size, t.type.type_size), np.uint8, memory, 0, (*t.nb[::-1], 1)
    )
    rows = np.ascontiguousarray(blocks).reshape(t.nrows, -1)
    return np.asarray(_quant(t.type).dequantize(rows)).reshape(shape)


def set_values(t: Tensor, values: ArrayLike) -> None:
    """`Tensor.set`."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"Tensor.set: values must be real numbers, got dtype {array.dtype} ('{t.name}')")
    shape = t.ne[::-1]
    try:
        array = np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"Tensor.set: values must fit shape {shape} (ne {list(t.ne)} reversed), got {array.shape} ('{t.name}')"
        ) from None
    encoded = encode(array, t.type)
    buffer = t.buffer if t.view_src is None else t.view_src.buffer
    if buffer is not None and not buffer.type.is_host:
        if not t.is_contiguous:
            raise ValueError(
                f"Tensor.set: a tensor outside host memory must be contiguous, got nb {list(t.nb)} ('{t.name}')"
            )
        buffer.set_tensor(t, encoded)
        return
    memory = memory_of(t)
    if not memory.flags.writeable:
        raise ValueError(f"Tensor.set: the data must be writable, got read-only memory ('{t.name}')")
    blocks = (t.ne[0] // t.type.blck_size, t.type.type_size)
    target = np.ndarray((*shape[:-1], *blocks), np.uint8, memory, 0, (*t.nb[::-1], 1))
    target[...] = encoded.reshape(target.shape)


def _quant(type: Type) -> Any:
    if type.quant is None:
        raise NotImplementedError(
            f"{type.name}: code of the type must be registered, got none; ops/quants holds the types"
        )
    return type.quant


def _check_whole(array: NDArray[Any], type: Type) -> None:
    """Refuse what a type of whole numbers cannot hold: NumPy would wrap it around."""
    assert type.dtype is not None
    limits, low, high = np.iinfo(type.dtype), array.min(), array.max()
    if not (limits.min <= low and high <= limits.max):  # NaN too
        raise ValueError(
            f"encode: values must lie in [{limits.min}, {limits.max}] to be {type.name}, got {low} to {high}"
        )


def encode(array: NDArray[Any], type: Type) -> NDArray[np.uint8]:
    """Values as the bytes of a contiguous tensor of `type`, shape (..., bytes of a row)."""
    if type is types.BF16:
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        quiet = np.isnan(np.asarray(array, np.float32))
        rounded = np.where(quiet, (bits >> 16) | 64, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return rounded.view(np.uint8)
    if type.dtype is not None:
        if type.dtype.kind == "i" and array.size and array.dtype != type.dtype:
            _check_whole(array, type)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, type.dtype).view(np.uint8)
    if array.shape[-1] % type.blck_size:
        raise ValueError(
            f"encode: ne[0] must be a multiple of {type.blck_size}, the block of {type.name}, got {array.shape[-1]}"
        )
    if not array.size:
        return np.zeros((*array.shape[:-1], row_size(type, array.shape[-1])), np.uint8)
    rows = np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1])
    if _quant(type).searches and rows.size >= _MANY:
        from ggjit.quantize import quantize_rows

        encoded = quantize_rows(type, rows)
    else:
        encoded = _quant(type).quantize(rows)
    return encoded.reshape(*array.shape[:-1], -1)
