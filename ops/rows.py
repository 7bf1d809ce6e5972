"""get_rows and set_rows: rows of a matrix by number.

    get_rows   dst[:, i10, i11, i12] = a[:, ids[i10, i11, i12], i11, i12], decoded to f32
    set_rows   a[:, ids[i1, i2 % c1, i3 % c2], i2, i3] = b[:, i1, i2, i3], encoded to the type of a

get_rows looks token embeddings up; set_rows writes the KV cache. Every id is checked: a kernel stops at the first one
out of range and returns its place. Threads of set_rows take a part of every row, so that of two rows with the same id
the later one stays, whatever the number of threads.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import zeros
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op, element_nbytes
from ggjit.ops.copy import as_type
from ggjit.ops.views import VIEW
from ggjit.tensor import Tensor, new_node, view_tensor

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")

__all__ = ["get_rows", "set_rows"]

GET_ROWS = Op("get_rows", id=40)
SET_ROWS = Op("set_rows", id=42)
IDS = 2  # in a kernel's status: source 1 plus one


@checked
def get_rows(a: Tensor, b: Tensor) -> Tensor:
    """Gather rows of `a` by number.

    Args:
        a: f32, f16, bf16, i32 or a quantized type [ne0, n_rows, b.ne1, b.ne2].
        b: i32 [n, ...], the numbers, below n_rows; at most 3 dimensions.

    Returns:
        [ne0, b.ne0, b.ne1, b.ne2], contiguous: i32 if `a` is, else f32.

    Raises:
        ValueError: shapes do not fit.
        TypeError: `b` is not i32.
        IndexError: when computed, a number is out of range.

    Source: ggml_get_rows.
    """
    if a.ne[2] != b.ne[1] or a.ne[3] != b.ne[2] or b.ne[3] != 1:
        raise ValueError(
            f"get_rows: a must have ne [ne0, n_rows, b.ne1, b.ne2] and b at most 3 dimensions, got {list(a.ne)} and "
            f"{list(b.ne)} ('{a.name}', '{b.name}')"
        )
    if b.type is not types.I32:
        raise TypeError(f"get_rows: b must be I32, got {b.type.name} ('{b.name}')")
    type = types.I32 if a.type is types.I32 else types.F32
    return new_node(GET_ROWS, type, (a.ne[0], b.ne[0], b.ne[1], b.ne[2]), (a, b))


@checked
def set_rows(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Write rows into `a` by number.

    Args:
        a: f32, f16, bf16 or a quantized type (not IQ1, IQ2, IQ3) [ne0, n_rows, ne2, ne3], rows contiguous.
        b: f32 or f16 [ne0, n, ne2, ne3], rows contiguous: what is written.
        c: i64 or i32 [n, c1, c2], the numbers, below n_rows; c1 divides ne2 and c2 divides ne3.

    Returns:
        A view of `a`. Its sources are b, c and a, in this order.

    Raises:
        ValueError: shapes or layouts do not fit.
        TypeError: `b` is neither f32 nor f16, or `c` neither i64 nor i32.
        IndexError: when computed, a number is out of range.

    Source: ggml_set_rows.
    """
    names = f"('{a.name}', '{b.name}', '{c.name}')"
    if a.ne[0] != b.ne[0] or a.ne[2:] != b.ne[2:]:
        raise ValueError(
            f"set_rows: a and b must agree in dimensions 0, 2 and 3, got {list(a.ne)} and {list(b.ne)} {names}"
        )
    if b.ne[1] != c.ne[0] or c.ne[3] != 1 or any(n % m if m else n for n, m in zip(b.ne[2:], c.ne[1:3], strict=True)):
        raise ValueError(
            f"set_rows: c must have a number for each row of b and repeat along dimensions 2 and 3, got {list(c.ne)} "
            f"for {list(b.ne)} {names}"
        )
    if b.type not in (types.F32, types.F16) or c.type not in (types.I64, types.I32):
        raise TypeError(f"set_rows: b must be F32 or F16 and c I64 or I32, got {b.type.name} and {c.type.name} {names}")
    for t in (a, b):
        if not t.is_contiguous_rows:
            raise ValueError(f"set_rows: rows must be contiguous, got ne {list(t.ne)}, nb {list(t.nb)} ('{t.name}')")
    return view_tensor(SET_ROWS, a, (b, c, a))


# --- references -------------------------------------------------------------------------------------------------------


@GET_ROWS.reference
def _(node, a, ids):
    out = np.zeros(node.ne[::-1], a.dtype)
    for i2, i1, i0 in np.ndindex(*ids.shape[1:]):
        out[i2, i1, i0] = a[i2, i1, ids[0, i2, i1, i0]]
    return out


@SET_ROWS.reference
def _(node, b, ids, a):
    out = a.copy()
    _, c2, c1, _ = ids.shape
    for i3, i2, i1 in np.ndindex(*b.shape[:3]):
        out[i3, i2, ids[0, i3 % c2, i2 % c1, i1]] = as_type(b[i3, i2, i1], node.type)
    return out


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_get_rows(row, unit: int, blck0: int, size0: int):
    """Kernel that gathers contiguous rows.

    Args:
        row: helper that converts contiguous elements (`convert.row`).
        unit: threads cut rows at multiples of it.
        blck0: elements of a block of the source.
        size0: bytes of a block of the source.
    """

    @kernel
    def get_rows_of(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        first, last, begin, end = rows.share(dst_ne, np.int64(unit), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for k in range(first, last):
            id = np.int64(memory.load_i32(src1, i1 * src1_nb[0] + i2 * src1_nb[1] + i3 * src1_nb[2]))
            if id < 0 or id >= src0_ne[1]:
                return k << 4 | IDS
            to = rows.offset(dst_nb, i1, i2, i3) + 4 * begin
            at = rows.offset(src0_nb, id, i2, i3) + begin // blck0 * size0
            row(dst, to, src0, at, end - begin, work, 0)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
        return 0

    return get_rows_of


@functools.cache
def make_get_rows_strided(element):
    """Kernel that gathers rows whose elements have gaps."""

    @kernel
    def get_rows_strided(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
    ):
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for k in range(first, last):
            id = np.int64(memory.load_i32(src1, i1 * src1_nb[0] + i2 * src1_nb[1] + i3 * src1_nb[2]))
            if id < 0 or id >= src0_ne[1]:
                return k << 4 | IDS
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, id, i2, i3)
            for i in range(begin, end):
                element(dst, to + 4 * i, src0, at + i * src0_nb[0])
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
        return 0

    return get_rows_strided


@functools.cache
def make_set_rows(row, unit: int, size0: int, blck: int, size: int, ids: str):
    """Kernel that writes contiguous rows.

    Args:
        row: helper that converts contiguous elements (`convert.row`).
        unit: threads cut rows at multiples of it.
        size0: bytes of an element of the source.
        blck: elements of a block of the target.
        size: bytes of a block of the target.
        ids: "i64" or "i32".
    """
    load = memory.load_i64 if ids == "i64" else memory.load_i32

    @kernel
    def set_rows_to(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth
    ):  # fmt: skip
        scratch = COUNTER_LINE + convert.SCRATCH * ith
        begin, end = rows.part(dst_ne[0], np.int64(unit), ith, nth)
        if begin == end:
            return 0
        for i3 in range(src0_ne[3]):
            for i2 in range(src0_ne[2]):
                c1, c2 = i2 % src1_ne[1], i3 % src1_ne[2]
                to = i2 * dst_nb[2] + i3 * dst_nb[3] + begin // blck * size
                at = i2 * src0_nb[2] + i3 * src0_nb[3] + begin * size0
                for i1 in range(src0_ne[1]):
                    id = np.int64(load(src1, i1 * src1_nb[0] + c1 * src1_nb[1] + c2 * src1_nb[2]))
                    if id < 0 or id >= dst_ne[1]:
                        return (i1 + src1_ne[0] * (c1 + src1_ne[1] * c2)) << 4 | IDS
                    row(dst, to + id * dst_nb[1], src0, at + i1 * src0_nb[1], end - begin, work, scratch)
        return 0

    return set_rows_to


@GET_ROWS.kernel
def _(node):
    a = node.src[0]
    if not a.is_contiguous_rows:
        element = None if a.type.is_quantized else convert.element(a.type.name, node.type.name)
        return None if element is None else make_get_rows_strided(element)
    row = convert.row(a.type, node.type)
    return None if row is None else make_get_rows(row, max(16, a.type.blck_size), a.type.blck_size, a.type.type_size)


@SET_ROWS.kernel
def _(node):
    b, c, _ = node.src
    row = convert.row(b.type, node.type)
    if row is None:
        return None
    t = node.type
    return make_set_rows(row, max(32, t.blck_size), b.type.type_size, t.blck_size, t.type_size, c.type.name.lower())


@SET_ROWS.work_size
def _(node, nth):
    return convert.scratch_size(node.src[0].type, node.type, nth)


@GET_ROWS.traffic
def _(node):
    """The rows that are gathered, not the whole table."""
    a, ids = node.src
    row = a.ne[0] // a.type.blck_size * a.type.type_size
    return row * node.nrows + element_nbytes(ids), element_nbytes(node)


@SET_ROWS.flops
def _(node):
    return node.src[0].nelements


@SET_ROWS.traffic
def _(node):
    """The rows that are written."""
    b, ids, a = node.src
    row = a.ne[0] // a.type.blck_size * a.type.type_size
    return element_nbytes(b) + element_nbytes(ids), row * b.nrows


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    for name, n in (("F32", 37), ("F16", 577), ("BF16", 65), ("Q8_0", 96), ("Q4_0", 64), ("Q4_1", 64), ("Q6_K", 512)):
        GET_ROWS.case(name)(lambda t, f=name, n=n: get_rows(t(f, n, 6), t.ints("I32", 4, high=6)))
        GET_ROWS.case(f"{name}, one row")(lambda t, f=name, n=n: get_rows(t(f, n, 6), t.ints("I32", 1, high=6)))
        GET_ROWS.case(f"{name}, batches")(
            lambda t, f=name, n=n: get_rows(t(f, n, 5, 2, 3), t.ints("I32", 3, 2, 3, high=5))
        )
    GET_ROWS.case("I32")(lambda t: get_rows(t.ints("I32", 17, 6), t.ints("I32", 9, high=6)))
    GET_ROWS.case("permuted")(lambda t: get_rows(permute(t("Q8_0", 32, 2, 4), 0, 2, 1, 3), t.ints("I32", 3, 2, high=4)))
    GET_ROWS.case("transposed")(lambda t: get_rows(transpose(t("F16", 6, 33)), t.ints("I32", 4, high=6)))
    GET_ROWS.case("spaced ids")(
        lambda t: get_rows(t("F32", 9, 4, 3), view_2d(t.ints("I32", 6, 3, high=4), 3, 3, 24, 0))
    )
    GET_ROWS.case("no ids")(lambda t: get_rows(t("F32", 8, 4), t.ints("I32", 0)))

    ids = [4, 0, 5]
    for s in ("F32", "F16"):
        for d, n in (("F32", 37), ("F16", 192), ("BF16", 65), ("Q8_0", 320), ("Q4_0", 64), ("Q4_1", 64)):
            SET_ROWS.case(f"{s} to {d}")(
                lambda t, s=s, d=d, n=n: set_rows(t(d, n, 6), t(s, n, 3), t.array(np.int64(ids)))
            )
    SET_ROWS.case("i32 ids")(lambda t: set_rows(t("F16", 64, 6), t("F32", 64, 3), t.array(np.int32(ids))))
    SET_ROWS.case("repeated ids")(
        lambda t: set_rows(t("F16", 64, 6, 4, 2), t("F32", 64, 3, 4, 2), t.ints("I64", 3, 2, high=6))
    )
    SET_ROWS.case("same id twice")(
        lambda t: set_rows(t("F32", 70, 4), t("F32", 70, 5), t.array(np.int64([1, 3, 1, 3, 1])))
    )
    SET_ROWS.case("padded rows")(
        lambda t: set_rows(
            view_2d(t("F16", 40, 6), 33, 6, 80, 8), view_2d(t("F32", 40, 3), 33, 3, 160, 4), t.array(np.int64(ids))
        )
    )


_cases()


# --- gradients --------------------------------------------------------------------------------------------------------


@GET_ROWS.backward
def _(node, grad, need):
    a, ids = node.src
    return ops.get_rows_back(grad, ids, a), None


@SET_ROWS.backward
def _(node, grad, need):
    """b: the rows that stayed, those that a later one replaced have none. a: all rows that were not replaced."""
    b, ids, a = node.src
    every = _numbers(ids, b)
    of_b = of_a = None
    if need[0]:
        # Each row's number is written where the row went; it has stayed where its own number is found.
        number = ops.reshape_2d(ops.arange(0.0, float(b.ne[1]), 1.0), 1, b.ne[1])
        own = ops.repeat_4d(number, 1, *b.ne[1:])
        found = get_rows(set_rows(zeros(1, *a.ne[1:]), own, ids), every)
        lost = ops.step(ops.abs(ops.sub(found, own)))
        of_b = ops.mul(get_rows(grad, every), ops.scale_bias(lost, -1.0, 1.0))
    if need[2]:
        of_a = set_rows(ops.cont(grad), zeros(*b.ne), ids)
    return of_b, None, of_a


def _numbers(ids: Tensor, b: Tensor) -> Tensor:
    """The numbers as i32 [n, b.ne2, b.ne3]; of i64 the low halves."""
    if ids.type is types.I64:
        ids = new_node(VIEW, types.I32, ids.ne, (ids,), (0,), ids.nb, ids, 0)
    if ids.ne[1:3] == b.ne[2:]:
        return ids
    return ops.repeat_4d(ids, ids.ne[0], b.ne[2], b.ne[3], 1)
