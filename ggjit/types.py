"""Tensor element types: ids, blocks and sizes of every live ggml type, and the registry of their code.

A plain type is one value of `type_size` bytes. A block type packs `blck_size` consecutive values of dimension 0 into
`type_size` bytes; what its bytes mean is told by one file each in `ops/quants`, which registers a `Quant` here.

Source: ggml's type table (ids and sizes are part of the GGUF format).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

if TYPE_CHECKING:
    from ggjit.ops.quants.quant import Quant


class Type:
    """One element type; there is exactly one object a type, so identity is equality.

    Attributes:
        name: as GGUF prints it (`"F32"`, `"Q4_K"`).
        id: the number that tensor records and GGUF files hold.
        blck_size: values in a block (1 for plain types).
        type_size: bytes of a block.
        dtype: NumPy dtype of a value, None for block types. BF16 has none in NumPy: its bits come as uint16.
    """

    __slots__ = ("_quant", "blck_size", "dtype", "id", "name", "type_size")

    def __init__(self, name: str, id: int, blck_size: int, type_size: int, dtype: DTypeLike | None = None) -> None:
        self.name, self.id, self.blck_size, self.type_size = name, id, blck_size, type_size
        self.dtype = None if dtype is None else np.dtype(dtype)
        self._quant: Quant | None = None

    @property
    def is_quantized(self) -> bool:
        """True for block types."""
        return self.dtype is None

    @property
    def quant(self) -> Quant | None:
        """The code of a block type: that of ggml's types is imported when it is first asked for."""
        if self._quant is None and self.is_quantized and self.id < FIRST_USER_ID:
            importlib.import_module(f"ggjit.ops.quants.{self.name.lower()}")
        return self._quant

    @property
    def has_panel(self) -> bool:
        """Can matrix products read it as weights of blocks?"""
        return self.quant is not None and self.quant.panel is not None

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return by_id, (self.id,)


FIRST_USER_ID = 1000
"""Ids from here on are for types of one's own; ggml's stay far below."""

_BY_ID: dict[int, Type] = {}
_BY_NAME: dict[str, Type] = {}


def register(type: Type, quant: Quant | None = None) -> Type:
    """Add a type, or the code of one that is known.

    Raises:
        ValueError: the id or the name belongs to another type.
    """
    known = _BY_ID.get(type.id)
    if (known is not None and known is not type) or _BY_NAME.get(type.name.upper(), type) is not type:
        raise ValueError(f"types.register: id and name must be free, got id {type.id} and name {type.name!r}")
    _BY_ID[type.id] = _BY_NAME[type.name.upper()] = type
    if quant is not None:
        type._quant = quant
    return type


def by_id(id: int) -> Type:
    """The type with a ggml id.

    Raises:
        ValueError: no type has that id.
    """
    try:
        return _BY_ID[id]
    except KeyError:
        raise ValueError(f"types.by_id: id must be one of {sorted(_BY_ID)}, got {id}") from None


def by_name(name: str) -> Type:
    """The type with a name, whatever its case.

    Raises:
        ValueError: no type has that name.
    """
    try:
        return _BY_NAME[name.upper()]
    except (KeyError, AttributeError):
        raise ValueError(f"types.by_name: name must be one of {all_names()}, got {name!r}") from None


def all_names() -> list[str]:
    """Names of all types in the order of their ids."""
    return [_BY_ID[i].name for i in sorted(_BY_ID)]


def all_types() -> list[Type]:
    """All types in the order of their ids."""
    return [_BY_ID[i] for i in sorted(_BY_ID)]


def row_size(type: Type, ne0: int) -> int:
    """Bytes of a contiguous row of `ne0` values.

    Raises:
        ValueError: `ne0` is not a multiple of the block.
    """
    if ne0 % type.blck_size:
        raise ValueError(f"row_size: ne0 must be a multiple of {type.blck_size}, the block of {type.name}, got {ne0}")
    return type.type_size * ne0 // type.blck_size


def user_key(id: int) -> str:
    """The metadata key of a GGUF file that describes its type with a user's id."""
    return f"ggjit.type.{id}"


def describe(type: Type) -> str:
    """Name, values of a block and bytes of a block, separated by blanks: the value of `user_key`."""
    return f"{type.name} {type.blck_size} {type.type_size}"


def described(text: object) -> tuple[str, int, int]:
    """Name, values of a block and bytes of a block, from what `describe` gave.

    Raises:
        ValueError: it is no such text.
    """
    words = text.split(" ") if isinstance(text, str) else []
    if len(words) != 3 or not words[0] or not all(w.isascii() and w.isdigit() and 0 < len(w) < 10 for w in words[1:]):
        raise ValueError(f"must be a name, values and bytes of a block, got {text!r}")
    name, blck_size, type_size = words[0], int(words[1]), int(words[2])
    if not blck_size or not type_size:
        raise ValueError(f"must have positive sizes, got {text!r}")
    return name, blck_size, type_size


_PLAIN = (
    ("F32", 0, np.float32), ("F16", 1, np.float16), ("I8", 24, np.int8), ("I16", 25, np.int16), ("I32", 26, np.int32),
    ("I64", 27, np.int64), ("F64", 28, np.float64), ("BF16", 30, np.uint16),
)  # fmt: skip
_BLOCK = (
    ("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34),
    ("Q8_1", 9, 32, 36), ("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176),
    ("Q6_K", 14, 256, 210), ("Q8_K", 15, 256, 292), ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50), ("IQ4_NL", 20, 32, 18), ("IQ3_S", 21, 256, 110),
    ("IQ2_S", 22, 256, 82), ("IQ4_XS", 23, 256, 136), ("IQ1_M", 29, 256, 56), ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66), ("MXFP4", 39, 32, 17), ("NVFP4", 40, 64, 36), ("Q1_0", 41, 128, 18), ("Q2_0", 42, 64, 18),
)  # fmt: skip
ACTIVATIONS = ("Q8_1", "Q8_K")  # forms of activations in ggml's products: no weights, and in no file
for _name, _id, _dtype in _PLAIN:
    register(Type(_name, _id, 1, np.dtype(_dtype).itemsize, _dtype))
for _name, _id, _blck, _size in _BLOCK:
    register(Type(_name, _id, _blck, _size))

F32, F16, BF16, F64 = by_name("F32"), by_name("F16"), by_name("BF16"), by_name("F64")
I8, I16, I32, I64 = by_name("I8"), by_name("I16"), by_name("I32"), by_name("I64")


def __getattr__(name: str) -> Type:
    """Every other type by its name: `types.Q4_0`."""
    found = _BY_NAME.get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    setattr(sys.modules[__name__], name, found)
    return found


_FROM_DTYPE = {t.dtype: t for t in all_types() if t.dtype is not None and t is not BF16}


def from_dtype(dtype: DTypeLike) -> Type:
    """The plain type of a NumPy dtype (uint16 is no type: give BF16 by name).

    Raises:
        TypeError: no plain type has that dtype.
    """
    dtype = np.dtype(dtype)
    found = _FROM_DTYPE.get(dtype.newbyteorder("=") if dtype.isnative else dtype)
    if found is None:
        raise TypeError(f"from_dtype: dtype must be one of {[str(d) for d in _FROM_DTYPE]}, got {dtype}")
    return found
