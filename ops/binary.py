"""add, sub, mul, div: element by element, the second source repeated to the shape of the first.

    dst[i0, i1, i2, i3] = a[i0, i1, i2, i3] o b[i0 % b.ne0, i1 % b.ne1, i2 % b.ne2, i3 % b.ne3]

Values are f32 in registers; results are rounded once to the type of `a` (or that of `add_cast`). Four kernels:

    rows        rows of both sources contiguous and equally long (or b one value a row): the models' case, memory speed
    strided     any strides and any repeating: 16 lanes gathered one by one
    quantized   a row of blocks is decoded, added to and encoded again
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, row_shares, types
from ggjit.arguments import checked
from ggjit.autodiff import as_f32, unbroadcast
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.tensor import Tensor, can_repeat, new_node, view_tensor
from ggjit.tensor_values import encode
from ggjit.types import Type

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["add", "add_cast", "div", "mul", "sub"]

ADD = Op("add", id=2, inplace=True)
SUB = Op("sub", id=6, inplace=True)
MUL = Op("mul", id=7, inplace=True)
DIV = Op("div", id=8, inplace=True)

# (a, b) -> types of the result that there are kernels for
_PLAIN = {
    (types.F32, types.F32): (types.F32,),
    (types.F16, types.F16): (types.F16,),
    (types.BF16, types.BF16): (types.BF16,),
    (types.F16, types.F32): (types.F16, types.F32),
    (types.BF16, types.F32): (types.BF16, types.F32),
}
_SLOT = 64  # bytes of 16 f32


# --- builders ---------------------------------------------------------------------------------------------------------


def _check(op: Op, a: Tensor, b: Tensor) -> None:
    if not can_repeat(b, a):
        raise ValueError(
            f"{op.name}: each size of b must divide that of a, got {list(a.ne)} and {list(b.ne)} "
            f"('{a.name}', '{b.name}')"
        )


def _binary(op: Op, a: Tensor, b: Tensor, inplace: bool) -> Tensor:
    _check(op, a, b)
    return view_tensor(op, a, (a, b)) if inplace else new_node(op, a.type, a.ne, (a, b))


@checked
def add(a: Tensor, b: Tensor, *, inplace: bool = False) -> Tensor:
    """Add `b` to `a`, repeated where it is smaller.

    Args:
        a: f32, f16, bf16 or a quantized type [ne0, ne1, ne2, ne3], any strides.
        b: of the type of `a`, or f32; each size divides that of `a`. To a quantized `a` only f32 of the same shape is
            added; the sum is quantized again.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: `b` does not repeat into `a`.

    Source: ggml_add.
    """
    return _binary(ADD, a, b, inplace)


@checked
def add_cast(a: Tensor, b: Tensor, type: Type) -> Tensor:
    """Add `b` to `a` and give the sum in another type.

    Args:
        a: f16, bf16 or a quantized type.
        b: f32 with rows as long as those of `a`; the other sizes divide those of `a`.
        type: of the result, f32.

    Returns:
        [ne of a], of `type`.

    Raises:
        ValueError: `b` does not repeat into `a`, or its rows have another length.
        TypeError: `a` is neither f16, bf16 nor quantized.

    Source: ggml_add_cast.
    """
    _check(ADD, a, b)
    if a.ne[0] != b.ne[0]:
        raise ValueError(
            f"add_cast: rows must be equally long, got {list(a.ne)} and {list(b.ne)} ('{a.name}', '{b.name}')"
        )
    if not a.type.is_quantized and a.type not in (types.F16, types.BF16):
        raise TypeError(f"add_cast: a must be F16, BF16 or quantized, got {a.type.name} ('{a.name}')")
    return new_node(ADD, type, a.ne, (a, b))


@checked
def sub(a: Tensor, b: Tensor, *, inplace: bool = False) -> Tensor:
    """Subtract `b` from `a`, repeated where it is smaller.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3], any strides.
        b: of the type of `a`, or f32; each size divides that of `a`.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: `b` does not repeat into `a`.

    Source: ggml_sub.
    """
    return _binary(SUB, a, b, inplace)


@checked
def mul(a: Tensor, b: Tensor, *, inplace: bool = False) -> Tensor:
    """Multiply `a` by `b` element by element, `b` repeated where it is smaller.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3], any strides.
        b: of the type of `a`, or f32; each size divides that of `a`.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: `b` does not repeat into `a`.

    Source: ggml_mul.
    """
    return _binary(MUL, a, b, inplace)


@checked
def div(a: Tensor, b: Tensor, *, inplace: bool = False) -> Tensor:
    """Divide `a` by `b` element by element, `b` repeated where it is smaller.

    Args:
        a: f32, f16 or bf16 [ne0, ne1, ne2, ne3], any strides.
        b: of the type of `a`, or f32; each size divides that of `a`.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        ValueError: `b` does not repeat into `a`.

    Source: ggml_div.
    """
    return _binary(DIV, a, b, inplace)


# --- references -------------------------------------------------------------------------------------------------------


def _repeat(a, b):
    return np.tile(b, [n // m if m else 1 for n, m in zip(a.shape, b.shape, strict=True)])


@ADD.reference
def _(node, a, b):
    total = a + _repeat(a, b)
    if node.type.is_quantized:
        rows = total.astype(np.float32).reshape(-1, node.ne[0])
        return node.type.quant.dequantize(encode(rows, node.type)).reshape(a.shape)
    return total


@SUB.reference
def _(node, a, b):
    return a - _repeat(a, b)


@MUL.reference
def _(node, a, b):
    return a * _repeat(a, b)


@DIV.reference
def _(node, a, b):
    return a / _repeat(a, b)


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def add_lanes(x, y):
    """x + y."""
    return x + y


@jitted
def sub_lanes(x, y):
    """x - y."""
    return x - y


@jitted
def mul_lanes(x, y):
    """x * y."""
    return x * y


@jitted
def div_lanes(x, y):
    """x / y."""
    return x / y


LANES = {ADD: add_lanes, SUB: sub_lanes, MUL: mul_lanes, DIV: div_lanes}


@functools.cache
def binary_row(op: Op, d: Type, s0: Type, s1: Type):
    """Jitted (dst, to, src0, at, src1, by, n): n elements of contiguous rows."""
    lanes, size, size0, size1 = LANES[op], d.type_size, s0.type_size, s1.type_size
    load0, load0_first, load1, load1_first = (f(t.name) for t in (s0, s1) for f in (vec.loader, vec.loader_first))
    store, store_first = vec.storer(d.name), vec.storer_first(d.name)

    @jitted
    def row(dst, to, src0, at, src1, by, n):
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, lanes(load0(src0, at + size0 * i), load1(src1, by + size1 * i)))
        rest = n % 16
        if rest:
            i = n - rest
            x, y = load0_first(src0, at + size0 * i, rest), load1_first(src1, by + size1 * i, rest)
            store_first(dst, to + size * i, lanes(x, y), rest)

    return row


@functools.cache
def binary_row_by_one(op: Op, d: Type, s0: Type, s1: Type):
    """Jitted (dst, to, src0, at, src1, by, n): n elements of a contiguous row and one value."""
    lanes, size, size0 = LANES[op], d.type_size, s0.type_size
    load0, load0_first, load1 = vec.loader(s0.name), vec.loader_first(s0.name), memory.loader(s1.name)
    store, store_first = vec.storer(d.name), vec.storer_first(d.name)

    @jitted
    def row(dst, to, src0, at, src1, by, n):
        y = load1(src1, by)
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, lanes(load0(src0, at + size0 * i), y))
        rest = n % 16
        if rest:
            i = n - rest
            store_first(dst, to + size * i, lanes(load0_first(src0, at + size0 * i, rest), y), rest)

    return row


@functools.cache
def make_binary(op: Op, d: Type, s0: Type, s1: Type, by_one: bool):
    """Kernel for contiguous rows; src1's are as long as src0's, or one value."""
    row = (binary_row_by_one if by_one else binary_row)(op, d, s0, s1)
    size, size0, size1 = d.type_size, s0.type_size, 0 if by_one else s1.type_size

    @kernel(streams=d is types.F32, by_rows=row_shares.many)
    def binary(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to = rows.offset(dst_nb, i1, i2, i3) + size * begin
            at = rows.offset(src0_nb, i1, i2, i3) + size0 * begin
            by = rows.repeated(src1_ne, src1_nb, i1, i2, i3) + size1 * begin
            row(dst, to, src0, at, src1, by, end - begin)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return binary


@functools.cache
def make_binary_strided(op: Op, d: Type, s0: Type, s1: Type):
    """Kernel for any strides and any repeating."""
    lanes, load0, load1, store = LANES[op], memory.loader(s0.name), memory.loader(s1.name), memory.storer(d.name)

    @kernel
    def binary_strided(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        x = COUNTER_LINE + 2 * _SLOT * ith
        y = x + _SLOT
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            by = rows.repeated(src1_ne, src1_nb, i1, i2, i3)
            for i in range(begin, end, 16):
                n = 16 if i + 16 < end else end - i
                for j in range(n):
                    memory.store_f32(work, x + 4 * j, load0(src0, at + (i + j) * src0_nb[0]))
                    memory.store_f32(work, y + 4 * j, load1(src1, by + (i + j) % src1_ne[0] * src1_nb[0]))
                vec.store(work, x, lanes(vec.load_first(work, x, n), vec.load_first(work, y, n)))
                for j in range(n):
                    store(dst, to + (i + j) * dst_nb[0], memory.load_f32(work, x + 4 * j))
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return binary_strided


@functools.cache
def make_add_quantized(d: Type, s0: Type):
    """Kernel that adds f32 rows to rows of blocks of type s0; the sums are encoded if d is quantized."""
    assert s0.quant is not None
    dequantize_row, add_row = s0.quant.dequantize_row, binary_row(ADD, types.F32, types.F32, types.F32)
    quantize_row = d.quant.quantize_row if d.quant is not None else None
    is_encoded = d.quant is not None

    @kernel
    def add_quantized(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n = dst_ne[0]
        x = COUNTER_LINE + 4 * n * ith
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, by = rows.offset(dst_nb, i1, i2, i3), rows.repeated(src1_ne, src1_nb, i1, i2, i3)
            dequantize_row(src0, rows.offset(src0_nb, i1, i2, i3), work, x, n)
            if is_encoded:
                add_row(work, x, work, x, src1, by, n)
                quantize_row(work, x, dst, to, n)
            else:
                add_row(dst, to, work, x, src1, by, n)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return add_quantized


def _select(node):
    """Kernel of an element-wise node of plain types."""
    a, b = node.src
    if node.type not in _PLAIN.get((a.type, b.type), ()):
        return None
    if _has_plain_rows(node):
        return make_binary(node.op, node.type, a.type, b.type, b.ne[0] != a.ne[0])
    return make_binary_strided(node.op, node.type, a.type, b.type)


def _has_plain_rows(node):
    """Are the rows without gaps, those of src1 as long as those of src0 or one value?"""
    a, b = node.src
    return b.ne[0] in (1, a.ne[0]) and all(t.is_contiguous_rows for t in (node, a, b))


def _work_size(node, nth):
    a = node.src[0]
    if a.type.is_quantized:
        return 4 * a.ne[0] * nth
    return 0 if _has_plain_rows(node) else 2 * _SLOT * nth


@ADD.kernel
def _(node):
    a, b = node.src
    if not a.type.is_quantized:
        return _select(node)
    plain = b.type is types.F32 and a.ne == b.ne and all(t.is_contiguous_rows for t in (node, a, b))
    if not plain or a.type.quant is None or node.type not in (types.F32, a.type):
        return None
    if node.type.is_quantized and not convert.is_encodable(node.type):
        return None
    return make_add_quantized(node.type, a.type)


for _op in (ADD, SUB, MUL, DIV):
    _op.work_size(_work_size)
for _op in (SUB, MUL, DIV):
    _op.kernel(_select)


# --- gradients --------------------------------------------------------------------------------------------------------


@ADD.backward
def _(node, grad, need):
    return grad, unbroadcast(grad, node.src[1]) if need[1] else None


@SUB.backward
def _(node, grad, need):
    return grad, ops.neg(unbroadcast(grad, node.src[1])) if need[1] else None


@MUL.backward
def _(node, grad, need):
    a, b = node.src
    return (
        mul(grad, as_f32(b)) if need[0] else None,
        unbroadcast(mul(grad, as_f32(a)), b) if need[1] else None,
    )


@DIV.backward
def _(node, grad, need):
    a, b = node.src
    over = div(grad, as_f32(b))
    if not need[1]:
        return over, None
    quotient = node if node.type is types.F32 else div(as_f32(a), as_f32(b))
    return over if need[0] else None, ops.neg(unbroadcast(mul(over, quotient), b))


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases(op, build):
    def case(name, make):
        op.case(name)(make)

    low = 0.5 if op is DIV else -1.0

    def second(t, kind, *ne):
        return t(kind, *ne, low=low)

    case("row", lambda t: build(t("F32", 577), second(t, "F32", 577)))
    for n in (1, 15, 17, 65):
        case(f"tail {n}", lambda t, n=n: build(t("F32", n, 5), second(t, "F32", n, 5)))
    case("b one row", lambda t: build(t("F32", 96, 5, 3), second(t, "F32", 96)))
    case("b one value a row", lambda t: build(t("F32", 33, 5, 2), second(t, "F32", 1, 5)))
    case("b repeated in every dimension", lambda t: build(t("F32", 20, 6, 4, 2), second(t, "F32", 10, 3, 2, 1)))
    case("a permuted", lambda t: build(_permuted(t("F32", 9, 4, 6)), second(t, "F32", 9, 6, 4)))
    case("b transposed", lambda t: build(t("F32", 21, 6), _transposed(second(t, "F32", 6, 21))))
    case("a transposed", lambda t: build(_transposed(t("F32", 6, 21)), second(t, "F32", 21, 6)))
    case("f16", lambda t: build(t("F16", 37, 3), second(t, "F16", 37, 3)))
    case("bf16", lambda t: build(t("BF16", 37, 3), second(t, "BF16", 37)))
    case("f16, f32", lambda t: build(t("F16", 65, 2), second(t, "F32", 65, 2)))
    case("bf16, f32, repeated", lambda t: build(t("BF16", 12, 2), second(t, "F32", 6, 2)))
    case("in place", lambda t: build(t("F32", 40, 3), second(t, "F32", 40), inplace=True))


def _permuted(a):
    from ggjit.ops.views import permute

    return permute(a, 0, 2, 1, 3)


def _transposed(a):
    from ggjit.ops.views import transpose

    return transpose(a)


for _op, _build in ((ADD, add), (SUB, sub), (MUL, mul), (DIV, div)):
    _cases(_op, _build)


@ADD.case("quantized")
def _(t):
    return add(t("Q8_0", 64, 3), t("F32", 64, 3))


@ADD.case("quantized to f32")
def _(t):
    return add_cast(t("Q4_0", 96, 3), t("F32", 96, 3), types.F32)


@ADD.case("f16 to f32")
def _(t):
    return add_cast(t("F16", 33, 4), t("F32", 33), types.F32)
