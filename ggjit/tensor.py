"""Tensor: a handle on one header record in a context's arena.

The record has the 336 bytes and offsets of ggml's `struct ggml_tensor`, so kernels and Python see the same bytes:

    0 type i32 | 8 buffer i64 | 16 ne i64[4] | 48 nb i64[4] | 80 op i32 | 84 op_params i32[16] | 148 flags i32
    152 src i64[10] | 232 view_src i64 | 240 view_offs i64 | 248 data i64 | 256 name c[64] | 320 extra i64 | 328 pad

Dimension 0 is innermost: element (i0, i1, i2, i3) lies at data + i0*nb[0] + i1*nb[1] + i2*nb[2] + i3*nb[3], strides in
bytes. A NumPy view of the same bytes has the reversed shape. A header with an op and sources is also a graph node.

What never changes after creation (type, ne, nb, op, src, view_src, view_offs) is kept as Python values and written to
the record once; what changes later (data, buffer, flags, name) lives in the record alone.
"""

from __future__ import annotations

import builtins
import math
import operator
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggjit import context as _context
from ggjit import name_hints, operators, tensor_values
from ggjit import op as _op
from ggjit import types as _types
from ggjit.context import TENSOR, TENSOR_SIZE, Context
from ggjit.op import NONE, Op, Params
from ggjit.types import Type, row_size

if TYPE_CHECKING:
    from ggjit.backend import Buffer

MAX_DIMS, MAX_SRC, MAX_NAME = 4, 10, 64
_MOST = 1 << 59  # elements: so all bytes and strides fit 64 bits
FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM, FLAG_LOSS, FLAG_COMPUTE = 1, 2, 4, 8, 16
Dims = tuple[int, int, int, int]

BUFFER_AT, PARAMS_AT, FLAGS_AT, DATA_AT, NAME_AT, EXTRA_AT = 8, 84, 148, 248, 256, 320
_RECORD = struct.Struct("<i4xq4q4qi64si10qqqq64sq8x")
assert _RECORD.size == TENSOR_SIZE
_I64, _I32 = struct.Struct("<q"), struct.Struct("<i")
_NO_PARAMS = bytes(_op.PARAM_BYTES)
_NO_SRC = tuple((0,) * n for n in range(MAX_SRC + 1))  # by number of absent sources

RECORD = np.dtype({
    "names": ["type", "buffer", "ne", "nb", "op", "op_params", "flags", "src", "view_src", "view_offs", "data", "name",
              "extra"],
    "formats": ["i4", "i8", ("i8", 4), ("i8", 4), "i4", ("i4", 16), "i4", ("i8", 10), "i8", "i8", "i8", "S64", "i8"],
    "offsets": [0, 8, 16, 48, 80, 84, 148, 152, 232, 240, 248, 256, 320],
    "itemsize": TENSOR_SIZE,
})  # fmt: skip
"""The record as a NumPy dtype, to look at it."""


class Tensor:
    """A handle on one record; there is one handle a record, so identity is equality.

    Attributes:
        type: element type.
        ne: numbers of elements, dimension 0 (innermost) first.
        nb: byte steps of the dimensions; nb[0] is the size of a block for block types.
        op: what computes it; `op.NONE` for a leaf.
        src: sources of the op, None where one is absent.
        view_src: the tensor whose bytes this one shows (never itself a view), or None.
        view_offs: byte offset into `view_src`.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "context",
        "nb",
        "ne",
        "offset",
        "op",
        "src",
        "type",
        "view_offs",
        "view_src",
    )
    context: Context
    offset: int
    address: int
    type: Type
    ne: Dims
    nb: Dims
    op: Op
    src: tuple[Tensor | None, ...]
    view_src: Tensor | None
    view_offs: int

    def __init__(self) -> None:
        raise TypeError("Tensor: made by new_tensor, from_numpy or an op, not by calling the class")

    # -- fields that live in the record ------------------------------------------------------------------------------

    @property
    def record(self) -> Any:
        """The header as a NumPy record of dtype `RECORD` (a live view)."""
        return np.frombuffer(self.context.array, RECORD, 1, self.offset)[0]

    @property
    def data(self) -> int:
        """Address of the first element, 0 while it has none."""
        return int(_I64.unpack_from(self.context.buffer, self.offset + DATA_AT)[0])

    @data.setter
    def data(self, address: int) -> None:
        _I64.pack_into(self.context.buffer, self.offset + DATA_AT, address)

    @property
    def buffer(self) -> Buffer | None:
        """The buffer that holds the data, None for data in an arena or in an array."""
        found: Buffer | None = self.context.kept.get(_I64.unpack_from(self.context.buffer, self.offset + BUFFER_AT)[0])
        return found

    @buffer.setter
    def buffer(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self.context.keep(buffer)
        _I64.pack_into(self.context.buffer, self.offset + BUFFER_AT, 0 if buffer is None else id(buffer))

    @property
    def flags(self) -> int:
        """Sum of FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM, FLAG_LOSS and FLAG_COMPUTE."""
        return int(_I32.unpack_from(self.context.buffer, self.offset + FLAGS_AT)[0])

    @flags.setter
    def flags(self, flags: int) -> None:
        _I32.pack_into(self.context.buffer, self.offset + FLAGS_AT, flags)

    @property
    def name(self) -> str:
        """The name, at most 63 bytes of UTF-8 (longer ones are cut)."""
        at = self.offset + NAME_AT
        return bytes(self.context.buffer[at : at + MAX_NAME]).split(b"\0", 1)[0].decode("utf-8", "replace")

    @name.setter
    def name(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Tensor: name must be a str, got {name!r}")
        data = name.encode()[: MAX_NAME - 1].decode("utf-8", "ignore").encode()
        at = self.offset + NAME_AT
        self.context.buffer[at : at + MAX_NAME] = data + bytes(MAX_NAME - len(data))

    @property
    def op_params(self) -> bytes:
        """The 64 bytes of op parameters."""
        at = self.offset + PARAMS_AT
        return bytes(self.context.buffer[at : at + _op.PARAM_BYTES])

    @property
    def params(self) -> Params:
        """The op's parameters by name."""
        return self.op.unpack_params(self.op_params)

    def set_name(self, name: str) -> Tensor:
        """Set the name and return the tensor, for chains."""
        self.name = name
        return self

    def set_input(self) -> Tensor:
        """Mark as an input: the planner gives it memory before all others."""
        self.flags |= FLAG_INPUT
        return self

    def set_output(self) -> Tensor:
        """Mark as an output: the planner never reuses its memory."""
        self.flags |= FLAG_OUTPUT
        return self

    def set_param(self) -> Tensor:
        """Mark a leaf as trainable; in a graph it is then a node.

        Raises:
            ValueError: the tensor is the result of an op.
        """
        if self.op is not NONE:
            raise ValueError(f"set_param: the tensor must be a leaf, got the result of {self.op.name} ('{self.name}')")
        self.flags |= FLAG_PARAM
        return self

    def set_loss(self) -> Tensor:
        """Mark as a loss: what parameters are differentiated for.

        Raises:
            ValueError: the tensor is not one f32.

        Source: ggml_set_loss.
        """
        if self.nelements != 1 or self.type is not _types.F32:
            raise ValueError(
                f"set_loss: the tensor must be one F32, got {self.type.name} {list(self.ne)} ('{self.name}')"
            )
        self.flags |= FLAG_LOSS
        return self

    # -- sizes and layout --------------------------------------------------------------------------------------------

    @property
    def nelements(self) -> int:
        """Number of elements."""
        ne = self.ne
        return ne[0] * ne[1] * ne[2] * ne[3]

    @property
    def nrows(self) -> int:
        """Number of rows: ne[1] * ne[2] * ne[3]."""
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps of a strided layout included."""
        ne, nb, t = self.ne, self.nb, self.type
        if 0 in ne:
            return 0
        row = ne[0] // t.blck_size * nb[0] if t.is_quantized else t.type_size + (ne[0] - 1) * nb[0]
        return row + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]

    @property
    def n_dims(self) -> int:
        """Dimensions up to the last one that is not 1."""
        return max((d + 1 for d in range(MAX_DIMS) if self.ne[d] > 1), default=1)

    @property
    def is_view(self) -> bool:
        """Does it show the bytes of another tensor?"""
        return self.view_src is not None

    def _contiguous_from(self, n: int) -> bool:
        """Are dimensions above `n` packed without gaps (dimensions of one element aside)?"""
        t, ne, nb = self.type, self.ne, self.nb
        expected = t.type_size
        if ne[0] != t.blck_size and nb[0] != expected:
            return False
        expected *= ne[0] // t.blck_size
        for d in range(1, MAX_DIMS):
            if d > n:
                if ne[d] != 1 and nb[d] != expected:
                    return False
                expected *= ne[d]
            else:
                expected = ne[d] * nb[d]
        return True

    @property
    def is_contiguous(self) -> bool:
        """No gaps: strides are the products of the sizes below; those of dimensions of one element do not count."""
        return self._contiguous_from(0)

    @property
    def is_contiguous_1(self) -> bool:
        """Contiguous in dimensions above 1: rows may have gaps between them."""
        return self._contiguous_from(1)

    @property
    def is_contiguous_2(self) -> bool:
        """Contiguous in dimensions above 2."""
        return self._contiguous_from(2)

    @property
    def is_contiguous_rows(self) -> bool:
        """Are the elements of each row next to each other?"""
        return self.ne[0] == self.type.blck_size or self.nb[0] == self.type.type_size

    @property
    def is_transposed(self) -> bool:
        """nb[0] > nb[1]."""
        return self.nb[0] > self.nb[1]

    @property
    def is_permuted(self) -> bool:
        """Are the strides not in rising order?"""
        nb = self.nb
        return nb[0] > nb[1] or nb[1] > nb[2] or nb[2] > nb[3]

    @property
    def is_empty(self) -> bool:
        """Is any dimension 0?"""
        return 0 in self.ne

    # -- values ------------------------------------------------------------------------------------------------------

    def bytes(self) -> NDArray[np.uint8]:
        """The tensor's bytes in memory order (gaps included): a live view in host memory, else a copy.

        Raises:
            ValueError: the tensor has no data, or its values are gone as for `numpy`.
        """
        return tensor_values.to_bytes(self)

    def numpy(self) -> NDArray[Any]:
        """The values as a NumPy array of shape ne[::-1].

        Returns:
            A live view for plain types; a float32 copy for BF16, which NumPy has not, and for block types.

        Raises:
            ValueError: the tensor has no data, or not in host memory; or its graph was computed and its memory went to
                another node, or it was computed inside a fused kernel (`Graph.compute(keep=...)` keeps it).
            NotImplementedError: no code is registered for the block type.
        """
        return tensor_values.to_numpy(self)

    def set(self, values: ArrayLike) -> Tensor:
        """Write values, converting to the tensor's type; a scalar fills.

        Args:
            values: shape ne[::-1], or one that NumPy broadcasts to it. Leading dimensions of 1 may be left out.

        Returns:
            The tensor.

        Raises:
            TypeError: the values are no real numbers.
            ValueError: the shape does not fit, a whole number is out of range, or the tensor has no data.
        """
        tensor_values.set_values(self, values)
        return self

    # -- operators ---------------------------------------------------------------------------------------------------

    __array_ufunc__ = None  # else `tensor + array` is an array of one node for each element

    def __add__(self, other: Tensor | float) -> Tensor:
        return operators.binary("add", self, other)

    def __radd__(self, other: float) -> Tensor:
        return operators.binary("add", self, other)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return operators.binary("sub", self, other)

    def __rsub__(self, other: float) -> Tensor:
        value = operators.number("sub", other)
        return NotImplemented if value is None else operators.binary("add", -self, value)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return operators.binary("mul", self, other)

    def __rmul__(self, other: float) -> Tensor:
        return operators.binary("mul", self, other)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return operators.binary("div", self, other)

    def __rtruediv__(self, other: float) -> Tensor:
        value = operators.number("div", other)
        return NotImplemented if value is None else operators.divided(value, self)

    def __neg__(self) -> Tensor:
        return operators.binary("mul", self, -1.0)

    # -- what a tensor has not, with a hint --------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise TypeError("Tensor: values must be had by t.numpy(), got a tensor where NumPy wants an array")

    def __matmul__(self, other: Any) -> NoReturn:
        raise TypeError("@: products must be made by gg.mul_mat(w, x), got the operator; w.ne[0] must be x.ne[0]")

    __rmatmul__ = __matmul__

    def __pow__(self, other: Any) -> NoReturn:
        raise TypeError("**: powers must be made by gg.sqr, gg.sqrt, gg.exp and gg.log, got the operator")

    __rpow__ = __pow__

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError("[]: elements must be had by t.numpy()[...], parts by gg.view_2d or gg.get_rows, got an index")

    def __setitem__(self, index: Any, values: Any) -> NoReturn:
        raise TypeError("[]: elements must be set by t.set(values), parts by t.numpy()[...] = values, got an index")

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in name_hints.TENSOR]

    def _repr_html_(self) -> str:
        from ggjit.show.html import tensor

        return tensor(self)

    def __repr__(self) -> str:
        ne = list(self.ne[: self.n_dims])
        made = (
            "" if self.op is NONE else f" = {self.op.name}({', '.join(_label(s) for s in self.src if s is not None)})"
        )
        layout = "" if self.is_contiguous else f", nb {list(self.nb)}"
        return f"Tensor('{self.name}' {self.type.name}, ne {ne}, shape {tuple(reversed(ne))}{layout}){made}"


for _name in name_hints.TENSOR:
    setattr(Tensor, _name, name_hints.Missing(_name))


def _label(t: Tensor) -> str:
    return f"'{t.name}'" if t.name else t.op.name if t.op is not NONE else t.type.name


# -- creation --------------------------------------------------------------------------------------------------------


def contiguous_nb(type: Type, ne: Dims) -> Dims:
    """Strides of a tensor without gaps."""
    n1 = row_size(type, ne[0])
    n2 = n1 * ne[1]
    return type.type_size, n1, n2, n2 * ne[2]


def _dims(what: str, ne: Sequence[int]) -> Dims:
    if not 1 <= len(ne) <= MAX_DIMS:
        raise ValueError(f"{what}: a tensor must have 1 to {MAX_DIMS} dimensions, got {list(ne)}")
    try:
        dims = tuple(map(operator.index, ne)) + (1,) * (MAX_DIMS - len(ne))
    except TypeError:
        raise TypeError(f"{what}: dimensions must be ints, got {list(ne)}") from None
    if min(dims) < 0:
        raise ValueError(f"{what}: dimensions must not be negative, got {list(ne)}")
    if math.prod(n or 1 for n in dims) >= _MOST:
        raise ValueError(f"{what}: a tensor must have less than 2^59 elements, got {list(ne)}")
    return dims  # type: ignore[return-value]


def _checked(what: str, type: Type) -> Type:
    if not isinstance(type, Type):
        raise TypeError(f"{what}: type must be one of ggjit's, such as gg.F32, got {type!r}")
    return type


def new_node(
    op: Op,
    type: Type,
    ne: Dims,
    src: tuple[Tensor | None, ...] = (),
    params: Sequence[float | int] = (),
    nb: Dims | None = None,
    view_src: Tensor | None = None,
    view_offs: int = 0,
) -> Tensor:
    """Write one header into the innermost context: the last call of every builder.

    Args:
        op: what computes the tensor.
        type: of the result.
        ne: of the result.
        src: at most 10 sources.
        params: values of `op.params`, in order.
        nb: strides, contiguous ones if absent.
        view_src: the result shows bytes of this tensor; a view of a view is a view of the root.
        view_offs: byte offset into it.

    Raises:
        RuntimeError: no context is open.
        OutOfArena: the arena is full.
        ValueError: a view reaches beyond its source; ne[0] is no multiple of the block.
    """
    context = _context.current(op.name if op is not NONE else "new_tensor")
    own = contiguous_nb(type, ne)
    size = own[3] * ne[3]
    if view_src is not None:
        if view_src.view_src is not None:
            view_offs += view_src.view_offs
            view_src = view_src.view_src
        if size and size + view_offs > view_src.nbytes:
            raise ValueError(
                f"{op.name}: a view must lie inside its source, got offset {view_offs} + {size} bytes of "
                f"{view_src.nbytes} ('{view_src.name}')"
            )
        data = view_src.data
        data = data + view_offs if data else 0
        size = 0
    elif context.no_alloc:
        data = size = 0
    else:
        data = -1
    packed = op.pack_params(params) if params else _NO_PARAMS
    offset = context.new_object(TENSOR_SIZE + size, TENSOR)
    address = context.base + offset
    if data == -1:
        data = address + TENSOR_SIZE
    t: Tensor = Tensor.__new__(Tensor)
    t.context, t.offset, t.address = context, offset, address
    t.type, t.ne, t.nb, t.op, t.src, t.view_src, t.view_offs = (
        type,
        ne,
        own if nb is None else nb,
        op,
        src,
        view_src,
        view_offs,
    )
    try:
        sources = tuple([0 if s is None else s.address for s in src]) + _NO_SRC[MAX_SRC - len(src)]
    except AttributeError:
        given = [type.__name__ for type in map(builtins.type, src)]
        raise TypeError(f"{op.name}: sources must be Tensors or None, got {given}") from None
    root = 0 if view_src is None else view_src.address
    try:
        _RECORD.pack_into(
            context.buffer, offset, type.id, 0, *ne, *t.nb, op.id, packed, 0, *sources, root, view_offs, data, b"", 0
        )
    except struct.error:
        text = f"{op.name}: sizes and strides must fit 64 bits, got ne {list(ne)}, nb {list(t.nb)}"
        raise ValueError(text) from None
    context.tensors[address] = t
    return t


def view_tensor(op: Op, a: Tensor, src: tuple[Tensor | None, ...], params: Sequence[float | int] = ()) -> Tensor:
    """A node whose result lies on `a`'s bytes, with its layout: the in-place form of an op."""
    t = new_node(op, a.type, a.ne, src, params, a.nb, a, 0)
    t.name = f"{a.name} (view)"
    return t


def new_tensor(type: Type, *ne: int, name: str = "") -> Tensor:
    """Make a leaf in the innermost context.

    Args:
        type: element type.
        ne: 1 to 4 sizes, dimension 0 (innermost) first.
        name: at most 63 bytes.

    Returns:
        The tensor; its data (uninitialised: zero in a fresh arena) follows the header unless the context is no_alloc.

    Raises:
        RuntimeError: no context is open.
        OutOfArena: the arena is full.
        TypeError: `type` is no type.
        ValueError: bad sizes.

    Source: ggml_new_tensor.
    """
    t = new_node(NONE, _checked("new_tensor", type), _dims("new_tensor", ne))
    if name:
        t.name = name
    return t


def from_numpy(array: ArrayLike, type: Type | None = None, name: str = "") -> Tensor:
    """Make a leaf from a NumPy array; dimension 0 is the array's last axis.

    Args:
        array: 0 to 4 axes.
        type: element type, by default the array's own; block types quantize.
        name: at most 63 bytes.

    Returns:
        In a context with data a copy; in a no_alloc context a header on the array's own memory if the array is
        contiguous and of the tensor's type (it is kept alive), else on a converted copy.

    Raises:
        TypeError: no type has the array's dtype, or `type` is no type.
        ValueError: more than 4 axes.
    """
    values = np.asarray(array)
    own = _types.from_dtype(values.dtype) if type is None else _checked("from_numpy", type)
    t = new_node(NONE, own, _dims("from_numpy", values.shape[::-1] or (1,)))
    if name:
        t.name = name
    if not t.context.no_alloc:
        return t.set(values)
    shared = own.dtype == values.dtype and own is not _types.BF16 and values.flags.c_contiguous
    return attach(t, values if shared else tensor_values.encode(values.reshape(t.ne[::-1]), own))


def attach(t: Tensor, memory: NDArray[Any]) -> Tensor:
    """Let a header without data point to the first byte of a contiguous array, which is kept alive.

    Raises:
        ValueError: the array is not contiguous or holds fewer bytes than the tensor.
    """
    if not memory.flags.c_contiguous or memory.nbytes < t.nbytes:
        raise ValueError(
            f"attach: memory must be contiguous and hold {t.nbytes} bytes, got {memory.nbytes} ('{t.name}')"
        )
    flat = memory.reshape(-1).view(np.uint8)
    t.context.keep(flat)
    t.data = flat.ctypes.data
    return t


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Equal ne."""
    return a.ne == b.ne


def can_repeat(a: Tensor, b: Tensor) -> bool:
    """Does `a` repeated fill `b` exactly?"""
    if a.is_empty:
        return b.is_empty
    return all(m % n == 0 for n, m in zip(a.ne, b.ne, strict=True))
