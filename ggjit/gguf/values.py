"""Metadata values as bytes: which GGUF type a Python value becomes, and its encoding.

Without a type given a str is a STRING, a bool a BOOL, a float a FLOAT32, an int the first of UINT32, INT32, UINT64 and
INT64 that holds it; a NumPy scalar or array has the type of its dtype; a list takes the type that holds all its
elements, and a list of lists is an array of arrays.

Source: the GGUF specification of ggml (docs/gguf.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit.gguf.reader import DTYPES, MAX_NESTING, ValueType
from ggjit.gguf.strings import StringArray

__all__ = ["encode", "string"]

_U32, _U32_U64 = struct.Struct("<I"), struct.Struct("<IQ")
_RANGES = {
    kind: np.iinfo(DTYPES[kind])
    for kind in ValueType
    if kind in DTYPES and DTYPES[kind].kind in "iu"
}  # fmt: skip
_INTS = (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64)
_BY_DTYPE = {dtype.newbyteorder("="): kind for kind, dtype in DTYPES.items()}
_FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)


def string(text: str | bytes, what: str) -> bytes:
    """A string with its length; surrogates of `StringArray` become the bytes that they stand for.

    Raises:
        ValueError: it cannot be encoded.
    """
    try:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} must be Unicode text, got {text[error.start : error.end]!r}") from None
    return struct.pack("<Q", len(data)) + data


def _int_type(values: Iterable[int], what: str) -> ValueType:
    low, high = 0, 0
    for value in values:
        low, high = min(low, value), max(high, value)
    for kind in _INTS:
        if _RANGES[kind].min <= low and high <= _RANGES[kind].max:
            return kind
    raise ValueError(f"{what} must fit in 64 bits, got {low if low < -(1 << 63) else high}")


def _dtype_type(dtype: np.dtype[Any], what: str) -> ValueType:
    kind = _BY_DTYPE.get(dtype.newbyteorder("="))
    if kind is None:
        raise ValueError(f"{what} must have a dtype that GGUF has, got {dtype}")
    return kind


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple, StringArray)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _type_of(value: Any, what: str) -> ValueType:
    """The type of one value, no array's elements looked at."""
    if isinstance(value, (str, bytes)):
        return ValueType.STRING
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        return _int_type((value,), what)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return ValueType.FLOAT32
    if isinstance(value, (np.generic, np.ndarray)) and not _is_array(value):
        return _dtype_type(value.dtype, what)
    if _is_array(value):
        return ValueType.ARRAY
    raise ValueError(f"{what} must be text, a number, a flag or an array of these, got {type(value).__name__}")


def _element_type(values: Sequence[Any] | NDArray[Any], what: str) -> ValueType:
    if isinstance(values, StringArray):
        return ValueType.STRING
    if isinstance(values, np.ndarray):
        return ValueType.ARRAY if values.ndim > 1 else _dtype_type(values.dtype, what)
    if not len(values):
        raise ValueError(f"{what} must have an element type, got an empty array; give `element`")
    kinds = {_type_of(value, what) for value in values}
    if len(kinds) > 1 and kinds <= set(_INTS):
        return _int_type(map(int, values), what)
    if len(kinds) > 1 and kinds <= {*_INTS, *_FLOATS}:
        return ValueType.FLOAT64 if ValueType.FLOAT64 in kinds else ValueType.FLOAT32
    if len(kinds) > 1:
        raise ValueError(f"{what} must have elements of one type, got {', '.join(sorted(k.name for k in kinds))}")
    return kinds.pop()


def _numbers(values: Any, kind: ValueType, what: str) -> bytes:
    """Numbers or flags of one type, all checked to fit it."""
    array = np.asarray(values)
    wanted = DTYPES[kind]
    integral = array.dtype.kind in "iu" or not array.size
    allowed = {"b": array.dtype.kind == "b" or not array.size, "f": integral or array.dtype.kind == "f"}
    if not allowed.get(wanted.kind, integral):
        raise ValueError(f"{what} must be {kind.name}, got {array.dtype.name}")
    if array.size and wanted.kind in "iu":
        limits = _RANGES[kind]
        for value in (int(array.min()), int(array.max())):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{what} must be {kind.name}, {limits.min} to {limits.max}, got {value}")
    with np.errstate(over="ignore"):
        return array.astype(wanted).tobytes()


def _array(values: Any, element: ValueType | None, what: str, nesting: int) -> bytes:
    if nesting > MAX_NESTING:
        raise ValueError(f"{what} must not be nested deeper than {MAX_NESTING}")
    kind = _element_type(values, what) if element is None else element
    head = _U32_U64.pack(kind, len(values))
    if kind is ValueType.STRING:
        texts = values.raw_all() if isinstance(values, StringArray) else values
        if not all(isinstance(text, (str, bytes)) for text in texts):
            raise ValueError(f"{what} must be STRING, got other elements")
        return head + b"".join([string(text, what) for text in texts])
    if kind is ValueType.ARRAY:
        if not all(map(_is_array, values)):
            raise ValueError(f"{what} must be ARRAY, got elements that are none")
        return head + b"".join([_array(inner, None, what, nesting + 1) for inner in values])
    if isinstance(values, (list, tuple)) and any(isinstance(v, (str, bytes)) or _is_array(v) for v in values):
        raise ValueError(f"{what} must be {kind.name}, got other elements")
    return head + _numbers(values, kind, what)


def encode(value: Any, kind: ValueType | None, element: ValueType | None, what: str) -> bytes:
    """The type and the bytes of a value.

    Args:
        value: str, bytes, bool, int, float, a NumPy scalar or array, a `StringArray`, or a list.
        kind: its type; None: as the module says.
        element: type of an array's elements; None: as the module says.
        what: names the value in errors.

    Raises:
        ValueError: GGUF has no such type, or the value does not fit the one given.
    """
    found = _type_of(value, what) if kind is None else ValueType(kind)
    head = _U32.pack(found)
    if found is ValueType.ARRAY:
        if not _is_array(value):
            raise ValueError(f"{what} must be ARRAY, got {type(value).__name__}")
        return head + _array(value, None if element is None else ValueType(element), what, 0)
    if found is ValueType.STRING:
        if not isinstance(value, (str, bytes)):
            raise ValueError(f"{what} must be STRING, got {type(value).__name__}")
        return head + string(value, what)
    if isinstance(value, (str, bytes)) or _is_array(value):
        raise ValueError(f"{what} must be {found.name}, got {type(value).__name__}")
    return head + _numbers(value, found, what)
