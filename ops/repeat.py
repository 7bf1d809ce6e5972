"""repeat, repeat_back, concat: tensors laid side by side.

    repeat       dst[i0, i1, i2, i3] = a[i0 % a.ne0, i1 % a.ne1, i2 % a.ne2, i3 % a.ne3]
    repeat_back  dst[j0, j1, j2, j3] = sum of a[i0, i1, i2, i3] over all i with i % dst.ne = j
    concat       `b` after `a` along one dimension

repeat and concat move bytes and take any type. repeat_back is the gradient of whatever repeats: it adds one tile after
the other, rows as vectors; a row that shrinks to one value is a sum of 32 partial sums, as in norm.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.copy import cont
from ggjit.ops.norm import sum_of
from ggjit.ops.views import as_dims, view_4d
from ggjit.tensor import Dims, Tensor, can_repeat, new_node

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["concat", "repeat", "repeat_4d", "repeat_back"]

REPEAT = Op("repeat", id=20)
REPEAT_BACK = Op("repeat_back", id=21)
CONCAT = Op("concat", id=22, params=(("dim", "i32"),))


# --- repeat -----------------------------------------------------------------------------------------------------------


@checked
def repeat(a: Tensor, b: Tensor) -> Tensor:
    """Repeat `a` to the shape of `b`.

    Args:
        a: any plain type and layout.
        b: gives the shape, each size a multiple of that of `a`; its type and values do not matter.

    Returns:
        [ne of b], of the type of `a`.

    Raises:
        ValueError: `a` does not repeat into `b`.
        TypeError: `a` is quantized.

    Source: ggml_repeat.
    """
    return _repeat("repeat", a, b.ne)


@checked
def repeat_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """Repeat `a` to [ne0, ne1, ne2, ne3]; see `repeat`.

    Source: ggml_repeat_4d.
    """
    return _repeat("repeat_4d", a, as_dims("repeat_4d", a.type, ne0, ne1, ne2, ne3))


def _repeat(where: str, a: Tensor, ne: Dims) -> Tensor:
    if a.type.is_quantized:
        raise TypeError(f"{where}: a must be of a plain type, got {a.type.name} ('{a.name}')")
    fits = 0 in ne if a.is_empty else all(m % n == 0 for n, m in zip(a.ne, ne, strict=True))
    if not fits:
        raise ValueError(
            f"{where}: each size of the result must be a multiple of that of a, got {list(ne)} and {list(a.ne)} "
            f"('{a.name}')"
        )
    return new_node(REPEAT, a.type, ne, (a,))


@REPEAT.reference
def _(node, a):
    if not a.size:
        return np.zeros(node.ne[::-1])
    return np.tile(a, [n // m for n, m in zip(node.ne[::-1], a.shape, strict=True)])


@functools.cache
def make_repeat(type_name: str, size: int):
    """Kernel for a type of `size` bytes; rows of the source may have gaps between elements."""
    element, by_value = convert.element(type_name, type_name), size == 4

    @kernel
    def repeat_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        ne00, step = src0_ne[0], src0_nb[0]
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.repeated(src0_ne, src0_nb, i1, i2, i3)
            if by_value and ne00 == 1:
                x = vec.splat(memory.load_f32(src0, at))
                for i in range(begin, end, 16):
                    vec.store_first(dst, to + 4 * i, x, end - i)
            elif step == size and ne00 >= 8:
                i, j = begin, begin % ne00
                while i < end:
                    n = ne00 - j if ne00 - j < end - i else end - i
                    convert.move(dst, to + size * i, src0, at + size * j, size * n)
                    i, j = i + n, 0
            else:
                j = begin % ne00
                for i in range(begin, end):
                    element(dst, to + size * i, src0, at + j * step)
                    j = j + 1 if j + 1 < ne00 else 0
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return repeat_rows


@REPEAT.kernel
def _(node):
    return make_repeat(node.type.name, node.type.type_size)


@REPEAT.backward
def _(node, grad, need):
    return (repeat_back(grad, node.src[0]),)


# --- repeat_back ------------------------------------------------------------------------------------------------------


@checked
def repeat_back(a: Tensor, b: Tensor) -> Tensor:
    """Add the tiles of `a` that have the shape of `b`: the gradient of `repeat`.

    Args:
        a: f32, any strides.
        b: gives the shape, each size a divisor of that of `a`; its type and values do not matter.

    Returns:
        f32 [ne of b].

    Raises:
        TypeError: `a` is not f32.
        ValueError: `b` does not repeat into `a`.

    Source: ggml_repeat_back.
    """
    if a.type is not types.F32:
        raise TypeError(f"repeat_back: a must be F32, got {a.type.name} ('{a.name}')")
    if not can_repeat(b, a):
        raise ValueError(
            f"repeat_back: each size of b must divide that of a, got {list(b.ne)} and {list(a.ne)} "
            f"('{a.name}', '{b.name}')"
        )
    return new_node(REPEAT_BACK, a.type, b.ne, (a,))


@REPEAT_BACK.reference
def _(node, a):
    if not a.size:
        return np.zeros(node.ne[::-1])
    parts = [n for m, k in zip(a.shape, node.ne[::-1], strict=True) for n in (m // k, k)]
    return a.reshape(parts).sum((0, 2, 4, 6))


@jitted
def add_row(dst, to, src, at, n):
    """dst + src of n contiguous f32."""
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.load(dst, to + 4 * i) + vec.load(src, at + 4 * i))
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        vec.store_first(dst, to + i, vec.load_first(dst, to + i, rest) + vec.load_first(src, at + i, rest), rest)


@kernel
def repeat_back_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Add the tiles, outer dimensions first, each thread for its part of the result."""
    ne0, ne1, ne2, ne3, step = dst_ne[0], dst_ne[1], dst_ne[2], dst_ne[3], src0_nb[0]
    slot = COUNTER_LINE + 4 * src0_ne[0] * ith
    first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to, total = rows.offset(dst_nb, i1, i2, i3), 0.0
        for i in range(begin, end, 16):
            vec.store_first(dst, to + 4 * i, vec.zero(), end - i)
        for j3 in range(i3, src0_ne[3], ne3):
            for j2 in range(i2, src0_ne[2], ne2):
                for j1 in range(i1, src0_ne[1], ne1):
                    at = rows.offset(src0_nb, j1, j2, j3)
                    if ne0 == 1:
                        x, x_at = staging.packed(src0, at, step, src0_ne[0], work, slot)
                        total += np.float64(sum_of(x, x_at, src0_ne[0]))
                    else:
                        for tile in range(0, src0_ne[0], ne0):
                            x, x_at = staging.packed(src0, at + (tile + begin) * step, step, end - begin, work, slot)
                            add_row(dst, to + 4 * begin, x, x_at, end - begin)
        if ne0 == 1:
            memory.store_f32(dst, to, np.float32(total))
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@REPEAT_BACK.kernel
def _(node):
    return repeat_back_f32


@REPEAT_BACK.work_size
def _(node, nth):
    return 0 if node.src[0].is_contiguous_rows else 4 * node.src[0].ne[0] * nth


@REPEAT_BACK.flops
def _(node):
    return node.src[0].nelements


# --- concat -----------------------------------------------------------------------------------------------------------


@checked
def concat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Put `b` after `a` along a dimension.

    Args:
        a: any type; of a quantized one with contiguous rows.
        b: of the type of `a`, and of its shape but for ne[dim].
        dim: 0 to 3.

    Returns:
        The shape of `a` with ne[dim] = a.ne[dim] + b.ne[dim].

    Raises:
        ValueError: there is no such dimension, the others differ, or rows of blocks have gaps.
        TypeError: the types differ.

    Source: ggml_concat.
    """
    names = f"('{a.name}', '{b.name}')"
    if not 0 <= dim < 4:
        raise ValueError(f"concat: dim must be 0 to 3, got {dim} {names}")
    if a.type is not b.type:
        raise TypeError(f"concat: a and b must have one type, got {a.type.name} and {b.type.name} {names}")
    if any(a.ne[d] != b.ne[d] for d in range(4) if d != dim):
        raise ValueError(
            f"concat: a and b must agree in all dimensions but {dim}, got {list(a.ne)} and {list(b.ne)} {names}"
        )
    for t in (a, b):
        if a.type.is_quantized and not t.is_contiguous_rows:
            raise ValueError(f"concat: rows of blocks must be contiguous, got nb {list(t.nb)} ('{t.name}')")
    ne = list(a.ne)
    ne[dim] += b.ne[dim]
    return new_node(CONCAT, a.type, tuple(ne), (a, b), (dim,))  # type: ignore[arg-type]


@CONCAT.reference
def _(node, a, b):
    return np.concatenate([a, b], 3 - node.params.dim)


@functools.cache
def make_concat(type_name: str, blck: int, size: int):
    """Kernel for a type of blocks of `blck` elements and `size` bytes."""
    element = convert.element(type_name, type_name) if blck == 1 else None
    has_elements = blck == 1

    @jitted
    def piece(dst, to, src, at, step, n):
        if has_elements and step != size:
            for i in range(n):
                element(dst, to + size * i, src, at + i * step)
        else:
            convert.move(dst, to, src, at, n // blck * size)

    @kernel
    def concat_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        dim, ne00 = op_params[0], src0_ne[0]
        a1, a2, a3 = (src0_ne[1] if dim == 1 else 0), (src0_ne[2] if dim == 2 else 0), (src0_ne[3] if dim == 3 else 0)
        first, last, begin, end = rows.share(dst_ne, np.int64(max(16, blck)), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to = rows.offset(dst_nb, i1, i2, i3) + begin // blck * size
            if dim == 0:
                middle = ne00 if ne00 < end else end
                if begin < middle:
                    at = rows.offset(src0_nb, i1, i2, i3) + begin // blck * src0_nb[0]
                    piece(dst, to, src0, at, src0_nb[0], middle - begin)
                if middle < begin:
                    middle = begin
                if middle < end:
                    at = rows.offset(src1_nb, i1, i2, i3) + (middle - ne00) // blck * src1_nb[0]
                    piece(dst, to + (middle - begin) // blck * size, src1, at, src1_nb[0], end - middle)
            elif i1 < src0_ne[1] and i2 < src0_ne[2] and i3 < src0_ne[3]:
                piece(dst, to, src0, rows.offset(src0_nb, i1, i2, i3) + begin // blck * src0_nb[0], src0_nb[0],
                      end - begin)  # fmt: skip
            else:
                at = rows.offset(src1_nb, i1 - a1, i2 - a2, i3 - a3) + begin // blck * src1_nb[0]
                piece(dst, to, src1, at, src1_nb[0], end - begin)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return concat_rows


@CONCAT.kernel
def _(node):
    return make_concat(node.type.name, node.type.blck_size, node.type.type_size)


@CONCAT.backward
def _(node, grad, need):
    a, b = node.src
    skip = a.ne[node.params.dim] * grad.nb[node.params.dim]
    return tuple(
        cont(view_4d(grad, *t.ne, *grad.nb[1:], offset)) if wanted else None
        for t, offset, wanted in zip((a, b), (0, skip), need, strict=True)
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    REPEAT.case("every dimension")(lambda t: repeat_4d(t("F32", 9, 3, 2), 27, 3, 4, 3))
    REPEAT.case("one value")(lambda t: repeat_4d(t("F32", 1), 37, 5, 1, 1))
    REPEAT.case("values of rows")(lambda t: repeat(t("F32", 1, 5), t("F32", 70, 5, 2)))
    REPEAT.case("long rows")(lambda t: repeat_4d(t("F16", 65), 195, 2, 1, 1))
    REPEAT.case("short rows")(lambda t: repeat_4d(t.ints("I16", 3, 2), 90, 4, 1, 1))
    REPEAT.case("bytes")(lambda t: repeat_4d(t.ints("I8", 20), 40, 2, 1, 1))
    REPEAT.case("i64")(lambda t: repeat_4d(t.ints("I64", 12), 36, 2, 1, 1))
    REPEAT.case("bf16 permuted")(lambda t: repeat_4d(permute(t("BF16", 8, 3, 2), 0, 2, 1, 3), 16, 4, 3, 1))
    REPEAT.case("transposed")(lambda t: repeat_4d(transpose(t("F32", 3, 11)), 22, 6, 1, 1))

    REPEAT_BACK.case("every dimension")(lambda t: repeat_back(t("F32", 27, 3, 4, 3), t("F32", 9, 3, 2)))
    REPEAT_BACK.case("to a row")(lambda t: repeat_back(t("F32", 100, 40), t("F32", 100)))
    REPEAT_BACK.case("to a value a row")(lambda t: repeat_back(t("F32", 70, 5, 2), t("F32", 1, 5)))
    REPEAT_BACK.case("to one value")(lambda t: repeat_back(t("F32", 70, 5, 2), t("F32", 1)))
    REPEAT_BACK.case("padded rows")(lambda t: repeat_back(view_2d(t("F32", 50, 6), 34, 6, 200, 8), t("F32", 17, 3)))
    REPEAT_BACK.case("transposed")(lambda t: repeat_back(transpose(t("F32", 6, 34)), t("F32", 17, 2)))
    REPEAT_BACK.case("transposed to one value")(lambda t: repeat_back(transpose(t("F32", 6, 34)), t("F32", 1, 2)))

    for dim in range(4):
        sizes = [[11, 4, 3, 2], [11, 4, 3, 2]]
        sizes[1][dim] = 5
        CONCAT.case(f"dimension {dim}")(lambda t, d=dim, s=sizes: concat(t("F32", *s[0]), t("F32", *s[1]), d))
    CONCAT.case("long rows")(lambda t: concat(t("F16", 100), t("F16", 77), 0))
    CONCAT.case("bytes")(lambda t: concat(t.ints("I8", 9, 2), t.ints("I8", 4, 2), 0))
    CONCAT.case("i64")(lambda t: concat(t.ints("I64", 9, 2), t.ints("I64", 9, 3), 1))
    CONCAT.case("blocks")(lambda t: concat(t("Q8_0", 64, 2), t("Q8_0", 96, 2), 0))
    CONCAT.case("rows of blocks")(lambda t: concat(t("Q4_0", 64, 2), t("Q4_0", 64, 3), 1))
    CONCAT.case("transposed")(lambda t: concat(transpose(t("F32", 3, 20)), transpose(t("F32", 3, 7)), 0))
    CONCAT.case("permuted")(lambda t: concat(permute(t("F32", 8, 3, 4), 0, 2, 1, 3), t("F32", 8, 4, 2), 2))
    CONCAT.case("one empty")(lambda t: concat(t("F32", 8, 4), t("F32", 8, 0), 1))


_cases()
