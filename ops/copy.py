"""Copies: dup, cpy, cont, cast. Elements go over in order (dimension 0 first), converted where the types differ.

Three kernels, chosen by layout; each is made for a pair of types:

    runs        both sides have contiguous rows, of any lengths: bytes are moved or vectors converted, at memory speed
    transpose   the source's dimension 1 is contiguous, the target's dimension 0: tiles of 16 x 16 in registers
    elements    anything else, one element at a time

Conversions are those of ops/lib/convert.py: between F32, F16 and BF16; F32 and I32; quantized to F32; F32, F16 and
BF16 to quantized (not IQ1, IQ2, IQ3, which need a search). To a quantized type the source has contiguous rows and the
target is contiguous.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op, element_nbytes
from ggjit.ops.views import as_dims
from ggjit.tensor import Tensor, new_node, view_tensor
from ggjit.tensor_values import encode
from ggjit.types import Type

convert = lazy_module("ggjit.ops.lib.convert")
prefetch = lazy_module("ggjit.ops.lib.prefetch")
rows = lazy_module("ggjit.ops.lib.rows")

__all__ = ["cast", "cont", "cont_1d", "cont_2d", "cont_3d", "cont_4d", "cpy", "dup"]

DUP = Op("dup", id=1)
CPY = Op("cpy", id=34)
CONT = Op("cont", id=35)
TILE = 16
ROWS_AHEAD = 8  # rows with gaps between them from the one that is read to the one that is asked for
CACHED = 1 << 20  # bytes of a source that are taken to be in a core's cache
STRIP = 128  # rows of the target that are made together, so that of a source row several lines are read
AHEAD = 32  # source rows from the one that is read to the one that is asked for


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def dup(a: Tensor, *, inplace: bool = False) -> Tensor:
    """Copy `a`.

    Args:
        a: any type and layout.
        inplace: give a view of `a` instead.

    Returns:
        The type and shape of `a`; contiguous unless in place.

    Source: ggml_dup.
    """
    return view_tensor(DUP, a, (a,)) if inplace else new_node(DUP, a.type, a.ne, (a,))


@checked
def cpy(a: Tensor, b: Tensor) -> Tensor:
    """Copy the elements of `a` into `b`, converting them to its type.

    Args:
        a: any layout.
        b: where they go: as many elements, any shape and layout.

    Returns:
        A view of `b`. Nothing is copied unless it is in a graph: give it to `Graph.build_forward_expand`.

    Raises:
        ValueError: the numbers of elements differ.

    Source: ggml_cpy.
    """
    if a.nelements != b.nelements:
        raise ValueError(
            f"cpy: a and b must have equally many elements, got {list(a.ne)} and {list(b.ne)} ('{a.name}', '{b.name}')"
        )
    result = view_tensor(CPY, b, (a, b))
    result.name = f"{b.name} (copy of {a.name})" if b.name else f"{a.name} (copy)"
    return result


@checked
def cast(a: Tensor, type: Type) -> Tensor:
    """Convert `a` to another type.

    Args:
        a: any layout.
        type: of the result.

    Returns:
        The shape of `a`, contiguous, of `type`. The node's op is cpy; ggml lists the result itself as its second
        source, which is left out here.

    Raises:
        ValueError: ne[0] is no multiple of the block of `type`.

    Source: ggml_cast.
    """
    result = new_node(CPY, type, as_dims("cast", type, *a.ne), (a,))
    result.name = f"{a.name} (copy)"
    return result


def _cont(where: str, a: Tensor, *ne: int) -> Tensor:
    dims = as_dims(where, a.type, *ne)
    if a.nelements != dims[0] * dims[1] * dims[2] * dims[3]:
        raise ValueError(
            f"{where}: the number of elements must stay the same, got {list(a.ne)} and {list(ne)} ('{a.name}')"
        )
    result = new_node(CONT, a.type, dims, (a,))
    result.name = f"{a.name} (cont)"
    return result


@checked
def cont(a: Tensor) -> Tensor:
    """Copy `a` to a contiguous tensor, also if it is contiguous already.

    Args:
        a: any type and layout.

    Returns:
        The type and shape of `a`, contiguous.

    Source: ggml_cont.
    """
    return _cont("cont", a, *a.ne)


@checked
def cont_1d(a: Tensor, ne0: int) -> Tensor:
    """Copy the elements of `a` to one row; see `cont_4d`.

    Source: ggml_cont_1d.
    """
    return _cont("cont_1d", a, ne0)


@checked
def cont_2d(a: Tensor, ne0: int, ne1: int) -> Tensor:
    """Copy the elements of `a` to [ne0, ne1]; see `cont_4d`.

    Source: ggml_cont_2d.
    """
    return _cont("cont_2d", a, ne0, ne1)


@checked
def cont_3d(a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """Copy the elements of `a` to [ne0, ne1, ne2]; see `cont_4d`.

    Source: ggml_cont_3d.
    """
    return _cont("cont_3d", a, ne0, ne1, ne2)


@checked
def cont_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """Copy the elements of `a` to a contiguous tensor of another shape: a copy and a reshape in one.

    Args:
        a: any type and layout.
        ne0: size of dimension 0, a multiple of the block.
        ne1: size of dimension 1.
        ne2: size of dimension 2.
        ne3: size of dimension 3.

    Returns:
        [ne0, ne1, ne2, ne3] of the type of `a`, contiguous.

    Raises:
        ValueError: the numbers of elements differ, or ne0 is no multiple of the block.

    Source: ggml_cont_4d.
    """
    return _cont("cont_4d", a, ne0, ne1, ne2, ne3)


# --- reference --------------------------------------------------------------------------------------------------------


def as_type(values, type):
    """Values rounded to a type, as float64 (integers as int64); what is to be f32 stays as exact as it is."""
    if type is types.F32:
        return values.astype(np.float64)
    if type.is_quantized:
        rows = values.astype(np.float32).reshape(-1, values.shape[-1])
        return type.quant.dequantize(encode(rows, type)).astype(np.float64).reshape(values.shape)
    if type is types.BF16:
        bits = encode(values, type).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(values.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(type.dtype).astype(np.int64 if type.dtype.kind == "i" else np.float64)


def _reference(node, a, *_):
    shaped = a.reshape(node.ne[::-1])
    return shaped if node.src[0].type is node.type else as_type(shaped, node.type)


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_copy_runs(row, unit: int, blck0: int, size0: int, blck: int, size: int):
    """Kernel for contiguous rows, of any lengths: runs that end with a row of either side.

    Args:
        row: helper that converts contiguous elements (`convert.row`).
        unit: threads cut at multiples of it.
        blck0: elements of a block of the source.
        size0: bytes of a block of the source.
        blck: elements of a block of the target.
        size: bytes of a block of the target.
    """

    @kernel
    def copy_runs(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        scratch = COUNTER_LINE + convert.SCRATCH * ith
        ne0, ne00 = dst_ne[0], src0_ne[0]
        k, end = rows.part(ne0 * dst_ne[1] * dst_ne[2] * dst_ne[3], np.int64(unit), ith, nth)
        packed = rows.packed(dst_ne, dst_nb, np.int64(blck), np.int64(size))
        if packed and rows.packed(src0_ne, src0_nb, np.int64(blck0), np.int64(size0)):
            row(dst, k // blck * size, src0, k // blck0 * size0, end - k, work, scratch)
            return
        nbytes = ne00 // blck0 * size0  # of rows that lie apart, short or slow to convert: the CPU foresees them not
        far = src0_nb[1] > nbytes + 64 and (nbytes <= 256 or size0 != size)
        far = far and nbytes * src0_ne[1] * src0_ne[2] * src0_ne[3] > CACHED
        i0, j0 = k % ne0, k % ne00
        i1, i2, i3 = rows.position(dst_ne, k // ne0)
        j1, j2, j3 = rows.position(src0_ne, k // ne00)
        while k < end:
            n = ne0 - i0 if ne0 - i0 < ne00 - j0 else ne00 - j0
            if end - k < n:
                n = end - k
            to = rows.offset(dst_nb, i1, i2, i3) + i0 // blck * size
            at = rows.offset(src0_nb, j1, j2, j3) + j0 // blck0 * size0
            if far:
                prefetch.span(src0, at + ROWS_AHEAD * src0_nb[1], n // blck0 * size0)
            row(dst, to, src0, at, n, work, scratch)
            k, i0, j0 = k + n, i0 + n, j0 + n
            if i0 == ne0:
                i0 = 0
                i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
            if j0 == ne00:
                j0 = 0
                j1, j2, j3 = rows.following(src0_ne, j1, j2, j3)

    return copy_runs


@functools.cache
def make_transpose(element, tile, size0: int, size: int):
    """Kernel for equal shapes, the source contiguous along dimension 1 and the target along dimension 0.

    Args:
        element: helper that converts one element.
        tile: helper that moves 16 x 16 elements; None: one at a time.
        size0: bytes of an element of the source.
        size: bytes of an element of the target.
    """
    by_tiles = tile is not None

    @jitted
    def block(dst, to, dst_step, src, at, src_step, n0, n1):
        """n0 x n1 elements, at most a tile."""
        if by_tiles and n0 == TILE and n1 == TILE:
            tile(dst, to, dst_step, src, at, src_step)
        else:
            for i1 in range(n1):
                for i0 in range(n0):
                    element(dst, to + i1 * dst_step + size * i0, src, at + i0 * src_step + size0 * i1)

    @kernel
    def copy_transposed(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        """Strips of rows of the target; of each source row that is touched some lines, asked for ahead."""
        ne0, ne1, src_step = dst_ne[0], dst_ne[1], src0_nb[0]
        strips = (ne1 + STRIP - 1) // STRIP
        n = strips * dst_ne[2] * dst_ne[3]
        for strip in range(n * ith // nth, n * (ith + 1) // nth):
            i2, i3, first = strip // strips % dst_ne[2], strip // strips // dst_ne[2], strip % strips * STRIP
            last = first + STRIP if first + STRIP < ne1 else ne1
            to, at = rows.offset(dst_nb, first, i2, i3), rows.offset(src0_nb, 0, i2, i3) + size0 * first
            for begin in range(0, ne0, TILE):
                n0 = TILE if begin + TILE < ne0 else ne0 - begin
                for i in range(AHEAD, AHEAD + TILE):
                    prefetch.span(src0, at + (begin + i) * src_step, size0 * (last - first))
                for i in range(0, last - first, TILE):
                    n1 = TILE if first + i + TILE < last else last - first - i
                    block(
                        dst, to + i * dst_nb[1] + size * begin, dst_nb[1], src0, at + size0 * i + begin * src_step,
                        src_step, n0, n1,
                    )  # fmt: skip

    return copy_transposed


@functools.cache
def make_copy_elements(element):
    """Kernel for any two layouts of as many elements."""

    @kernel
    def copy_elements(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        begin, end = rows.part(dst_ne[0] * dst_ne[1] * dst_ne[2] * dst_ne[3], np.int64(16), ith, nth)
        i0, j0 = begin % dst_ne[0], begin % src0_ne[0]
        i1, i2, i3 = rows.position(dst_ne, begin // dst_ne[0])
        j1, j2, j3 = rows.position(src0_ne, begin // src0_ne[0])
        to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, j1, j2, j3)
        for _ in range(begin, end):
            element(dst, to + i0 * dst_nb[0], src0, at + j0 * src0_nb[0])
            i0, j0 = i0 + 1, j0 + 1
            if i0 == dst_ne[0]:
                i0 = 0
                i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
                to = rows.offset(dst_nb, i1, i2, i3)
            if j0 == src0_ne[0]:
                j0 = 0
                j1, j2, j3 = rows.following(src0_ne, j1, j2, j3)
                at = rows.offset(src0_nb, j1, j2, j3)

    return copy_elements


def _select(node):
    a = node.src[0]
    s, d = a.type, node.type
    is_packed = node.is_contiguous and a.is_contiguous
    by_blocks = s.is_quantized or d.is_quantized
    if is_packed or (node.is_contiguous_rows and a.is_contiguous_rows and (node.ne[0] == a.ne[0] or not by_blocks)):
        row = convert.row(s, d)
        if row is None or (d.is_quantized and s is not d and not node.is_contiguous):
            return None
        return make_copy_runs(
            row, max(64, s.blck_size, d.blck_size), s.blck_size, s.type_size, d.blck_size, d.type_size
        )
    element = None if by_blocks else convert.element(s.name, d.name)
    if element is None:
        return None
    if node.ne == a.ne and a.nb[1] == s.type_size and node.nb[0] == d.type_size:
        return make_transpose(element, convert.tile(s.name, d.name), s.type_size, d.type_size)
    return make_copy_elements(element)


def _work_size(node, nth):
    return convert.scratch_size(node.src[0].type, node.type, nth)


# --- gradients --------------------------------------------------------------------------------------------------------


def _backward(node, grad, need):
    """Elements pass in order; what b of cpy held does not matter."""
    return ops.reshape(grad, node.src[0]), *[None] * (len(node.src) - 1)


for _op in (DUP, CPY, CONT):
    _op.backward(_backward)


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d, view_3d

    for op, build in ((DUP, dup), (CONT, cont)):
        op.case("f32")(lambda t, f=build: f(t("F32", 13, 4, 3, 2)))
        op.case("padded rows")(lambda t, f=build: f(view_2d(t("F32", 40, 6), 33, 6, 160, 8)))
        op.case("permuted")(lambda t, f=build: f(permute(t("F16", 64, 3, 5), 0, 2, 1, 3)))
        op.case("transposed")(lambda t, f=build: f(transpose(t("F32", 35, 50, 2))))
        op.case("reversed")(lambda t, f=build: f(permute(t.ints("I16", 5, 4, 3, 2), 3, 2, 1, 0)))
        op.case("bytes")(lambda t, f=build: f(transpose(t.ints("I8", 17, 33))))
        op.case("blocks")(lambda t, f=build: f(permute(t("Q8_0", 96, 3, 4), 0, 2, 1, 3)))
        op.case("large")(lambda t, f=build: f(t.ints("I64", 3000)))
    CONT.case("new shape")(lambda t: cont_2d(permute(t("F32", 6, 5, 4), 1, 0, 2, 3), 10, 12))
    CONT.case("merged heads")(lambda t: cont_2d(permute(t("F32", 64, 5, 12), 0, 2, 1, 3), 768, 5))
    CONT.case("query of a joint product")(lambda t: cont_3d(view_2d(t("F32", 192, 5), 64, 5, 768, 256), 16, 4, 5))
    CONT.case("values")(lambda t: cont(permute(t("F32", 16, 3, 20), 1, 2, 0, 3)))
    DUP.case("in place")(lambda t: dup(t("F32", 12, 3), inplace=True))

    kinds = ("F32", "F16", "BF16")
    for s in kinds:
        for d in kinds:
            CPY.case(f"{s} to {d}")(lambda t, s=s, d=d: cast(t(s, 65, 3), types.by_name(d)))
            CPY.case(f"{s} to {d}, transposed")(lambda t, s=s, d=d: cast(transpose(t(s, 21, 18)), types.by_name(d)))
            CPY.case(f"{s} to {d}, elements")(lambda t, s=s, d=d: cpy(permute(t(s, 4, 6, 5), 2, 0, 1, 3), t(d, 12, 10)))
        CPY.case(f"{s} to Q8_0")(lambda t, s=s: cast(t(s, 320, 3), types.by_name("Q8_0")))
    CPY.case("F32 to Q4_0, permuted")(lambda t: cast(permute(t("F32", 64, 3, 5), 0, 2, 1, 3), types.by_name("Q4_0")))
    CPY.case("Q4_1 to F32, permuted")(lambda t: cast(permute(t("Q4_1", 64, 3, 5), 0, 2, 1, 3), types.F32))
    CPY.case("Q6_K to F32")(lambda t: cast(t("Q6_K", 512, 3), types.F32))
    CPY.case("F32 to I32")(lambda t: cast(t("F32", 25, 3, low=-100, high=100), types.I32))
    CPY.case("I32 to F32, transposed")(lambda t: cast(transpose(t.ints("I32", 25, 3, high=1 << 20)), types.F32))
    CPY.case("into a tensor")(lambda t: cpy(t("F32", 65, 3), t("F16", 65, 3)))
    CPY.case("into a cache")(lambda t: cpy(t("F32", 8, 2), view_3d(t("F16", 8, 6), 8, 2, 1, 16, 32, 48)))
    CPY.case("into permuted memory")(lambda t: cpy(t("F32", 5, 4, 3), permute(t("F32", 5, 3, 4), 0, 2, 1, 3)))
    CPY.case("into padded rows of another shape")(
        lambda t: cpy(t("F32", 12, 5, 2), view_2d(t("F32", 9, 21), 6, 20, 36, 4))
    )


for _op in (DUP, CPY, CONT):
    _op.reference(_reference)
    _op.kernel(_select)
    _op.work_size(_work_size)
    _op.traffic(lambda node: (element_nbytes(node.src[0]), element_nbytes(node)))  # b of cpy is only written
_cases()
