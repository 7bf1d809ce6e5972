"""Views: other headers on the same bytes. reshape, view, permute and transpose do no work when a graph runs.

Each result has op, sources and `view_src`, the tensor that owns the bytes; a view of a view is a view of that owner,
with the offsets summed. What needs gaps closed or elements moved is a copy: `cont`, `cpy` (ops/copy.py).
"""

from __future__ import annotations

import operator

import numpy as np

from ggjit import ops
from ggjit.arguments import checked
from ggjit.autodiff import refuse, zeros
from ggjit.op import Op
from ggjit.tensor import Dims, Tensor, contiguous_nb, new_node
from ggjit.types import Type

__all__ = [
    "permute", "reshape", "reshape_1d", "reshape_2d", "reshape_3d", "reshape_4d", "transpose", "view_1d", "view_2d",
    "view_3d", "view_4d",
]  # fmt: skip

RESHAPE = Op("reshape", id=36, view=True)
VIEW = Op("view", id=37, params=(("offset", "i64"),), view=True)
PERMUTE = Op(
    "permute", id=38, params=(("axis0", "i32"), ("axis1", "i32"), ("axis2", "i32"), ("axis3", "i32")), view=True
)
TRANSPOSE = Op("transpose", id=39, view=True)


def as_dims(where: str, type: Type, *ne: int) -> Dims:
    """Check 1 to 4 sizes of a result and fill them up with ones.

    Raises:
        TypeError: a size is no whole number.
        ValueError: a size is negative, or the first is no multiple of the type's block.
    """
    try:
        dims = tuple(map(operator.index, ne)) + (1,) * (4 - len(ne))
    except TypeError:
        raise TypeError(f"{where}: sizes must be ints, got {list(ne)}") from None
    if len(dims) != 4 or min(dims) < 0:
        raise ValueError(f"{where}: sizes must be 1 to 4 and not be negative, got {list(ne)}")
    if dims[0] % type.blck_size:
        raise ValueError(
            f"{where}: ne[0] must be a multiple of {type.blck_size}, the block of {type.name}, got {list(ne)}"
        )
    return dims


# --- reshape ----------------------------------------------------------------------------------------------------------


def _reshape(where: str, a: Tensor, *ne: int) -> Tensor:
    dims = as_dims(where, a.type, *ne)
    if not a.is_contiguous:
        raise ValueError(
            f"{where}: a must be contiguous, got ne {list(a.ne)}, nb {list(a.nb)}; use cont first ('{a.name}')"
        )
    if a.nelements != dims[0] * dims[1] * dims[2] * dims[3]:
        raise ValueError(
            f"{where}: the number of elements must stay the same, got {list(a.ne)} and {list(ne)} ('{a.name}')"
        )
    result = new_node(RESHAPE, a.type, dims, (a,), (), None, a, 0)
    result.name = f"{a.name} (reshaped)"
    return result


@checked
def reshape(a: Tensor, b: Tensor) -> Tensor:
    """Show the elements of `a` in the shape of `b`.

    Args:
        a: any type, contiguous.
        b: gives the shape; its type, layout and values do not matter.

    Returns:
        A view of `a`: its type, ne of `b`, contiguous.

    Raises:
        ValueError: `a` is not contiguous, the numbers of elements differ, or ne[0] does not divide into blocks.

    Source: ggml_reshape.
    """
    return _reshape("reshape", a, *b.ne)


@checked
def reshape_1d(a: Tensor, ne0: int) -> Tensor:
    """Show the elements of `a` as one row; see `reshape`.

    Source: ggml_reshape_1d.
    """
    return _reshape("reshape_1d", a, ne0)


@checked
def reshape_2d(a: Tensor, ne0: int, ne1: int) -> Tensor:
    """Show the elements of `a` as [ne0, ne1]; see `reshape`.

    Source: ggml_reshape_2d.
    """
    return _reshape("reshape_2d", a, ne0, ne1)


@checked
def reshape_3d(a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
    """Show the elements of `a` as [ne0, ne1, ne2]; see `reshape`.

    Source: ggml_reshape_3d.
    """
    return _reshape("reshape_3d", a, ne0, ne1, ne2)


@checked
def reshape_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
    """Show the elements of `a` as [ne0, ne1, ne2, ne3]; see `reshape`.

    Source: ggml_reshape_4d.
    """
    return _reshape("reshape_4d", a, ne0, ne1, ne2, ne3)


@RESHAPE.reference
def _(node, a):
    return a.reshape(node.ne[::-1])


@RESHAPE.case("heads")
def _(t):
    return reshape_3d(t("F32", 768, 5), 64, 12, 5)


@RESHAPE.case("blocks")
def _(t):
    return reshape_4d(t("Q8_0", 192, 4), 32, 2, 3, 4)


@RESHAPE.case("empty")
def _(t):
    return reshape_2d(t("F16", 8, 0), 0, 3)


# --- view -------------------------------------------------------------------------------------------------------------


def _view(where: str, a: Tensor, ne: Dims, nb: Dims, offset: int) -> Tensor:
    if offset < 0 or min(nb) < 0:
        raise ValueError(f"{where}: offset and strides must not be negative, got {offset} and {list(nb)} ('{a.name}')")
    result = new_node(VIEW, a.type, ne, (a,), (offset,), nb, a, offset)
    root = a.view_src or a
    if result.view_offs + result.nbytes > root.nbytes and result.nbytes:
        raise ValueError(
            f"{where}: all elements must lie inside the source, got offset {result.view_offs} + {result.nbytes} bytes "
            f"with ne {list(ne)}, nb {list(nb)} of {root.nbytes} ('{root.name}')"
        )
    result.name = f"{a.name} (view)"
    return result


@checked
def view_1d(a: Tensor, ne0: int, offset: int) -> Tensor:
    """Show `ne0` adjacent elements of `a`.

    Args:
        a: any type and layout.
        ne0: number of elements, a multiple of the block.
        offset: bytes from the start of `a`.

    Returns:
        A view of `a`, [ne0], of its type.

    Raises:
        ValueError: the view does not lie inside `a`'s owner, or ne0 does not divide into blocks.

    Source: ggml_view_1d.
    """
    ne = as_dims("view_1d", a.type, ne0)
    return _view("view_1d", a, ne, contiguous_nb(a.type, ne), offset)


@checked
def view_2d(a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
    """Show `ne1` rows of `ne0` adjacent elements of `a`.

    Args:
        a: any type and layout.
        ne0: elements of a row, a multiple of the block.
        ne1: number of rows.
        nb1: bytes from row to row. Rows may overlap or have gaps between them.
        offset: bytes from the start of `a`.

    Returns:
        A view of `a`, [ne0, ne1], of its type; not contiguous if nb1 is more than a row.

    Raises:
        ValueError: the view does not lie inside `a`'s owner, or ne0 does not divide into blocks.

    Source: ggml_view_2d.
    """
    ne = as_dims("view_2d", a.type, ne0, ne1)
    return _view("view_2d", a, ne, (a.type.type_size, nb1, nb1 * ne[1], nb1 * ne[1]), offset)


@checked
def view_3d(a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
    """Show `ne2` planes of `ne1` rows of `ne0` adjacent elements of `a`; see `view_2d`.

    Source: ggml_view_3d.
    """
    ne = as_dims("view_3d", a.type, ne0, ne1, ne2)
    return _view("view_3d", a, ne, (a.type.type_size, nb1, nb2, nb2 * ne[2]), offset)


@checked
def view_4d(a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
    """Show [ne0, ne1, ne2, ne3] elements of `a` with given strides; see `view_2d`.

    Source: ggml_view_4d.
    """
    ne = as_dims("view_4d", a.type, ne0, ne1, ne2, ne3)
    return _view("view_4d", a, ne, (a.type.type_size, nb1, nb2, nb3), offset)


@VIEW.reference
def _(node, a):
    """Lays the values of `a` out as its bytes are, then reads them with the strides of the view."""
    source, size, blck = node.src[0], node.type.type_size, node.type.blck_size
    whole = max(node.params.offset + node.nbytes, source.nbytes) // size * blck
    memory = np.full(max(whole, 1), np.nan, a.dtype) if a.dtype.kind == "f" else np.zeros(max(whole, 1), a.dtype)

    def layout(t, offset):
        steps = [n // size * blck for n in t.nb[:0:-1]]
        shape = [*t.ne[:0:-1], t.ne[0] // blck, blck]
        strides = [memory.itemsize * n for n in (*steps, t.nb[0] // size * blck, 1)]
        return np.lib.stride_tricks.as_strided(memory[offset // size * blck :], shape, strides)

    if 0 in node.ne:
        return np.zeros(node.ne[::-1], a.dtype)
    layout(source, 0)[...] = a.reshape(layout(source, 0).shape)
    return layout(node, node.params.offset).reshape(node.ne[::-1])


@VIEW.case("row")
def _(t):
    return view_1d(t("F32", 48, 6), 20, 80)


@VIEW.case("first row")
def _(t):
    a = t("F32", 48, 6)
    return view_1d(a, a.ne[0], 0)


@VIEW.case("query columns")
def _(t):
    return view_2d(t("F32", 2304, 5), 768, 5, 9216, 3072)


@VIEW.case("overlapping rows")
def _(t):
    return view_2d(t("F32", 64, 3), 9, 4, 20, 0)


@VIEW.case("one head")
def _(t):
    return view_3d(t("F16", 8, 6), 4, 3, 1, 16, 96, 8)


@VIEW.case("4d")
def _(t):
    return view_4d(t("F32", 8, 5, 4, 3), 3, 2, 2, 2, 32, 320, 640, 36)


@VIEW.case("of a view of blocks")
def _(t):
    return view_2d(view_2d(t("Q8_0", 128, 5), 96, 4, 136, 136), 32, 2, 272, 34)


@VIEW.case("of a permuted tensor")
def _(t):
    return view_1d(permute(t("F32", 5, 4, 3), 0, 2, 1, 3), 10, 40)


# --- permute and transpose --------------------------------------------------------------------------------------------


@checked
def permute(a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
    """Move dimension i of `a` to position axis_i.

    Args:
        a: any type and layout.
        axis0: where dimension 0 goes, 0 to 3. NumPy's transpose takes the inverse of this.
        axis1: where dimension 1 goes.
        axis2: where dimension 2 goes.
        axis3: where dimension 3 goes.

    Returns:
        A view of `a` with ne and nb in the new order.

    Raises:
        ValueError: the axes are not 0 to 3 in some order.

    Source: ggml_permute.
    """
    axes = (axis0, axis1, axis2, axis3)
    if sorted(axes) != [0, 1, 2, 3]:
        raise ValueError(f"permute: axes must be 0, 1, 2 and 3 in some order, got {list(axes)} ('{a.name}')")
    ne, nb = [0] * 4, [0] * 4
    for i, axis in enumerate(axes):
        ne[axis], nb[axis] = a.ne[i], a.nb[i]
    result = _strided(PERMUTE, a, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), axes)
    result.name = f"{a.name} (permuted)"
    return result


@checked
def transpose(a: Tensor) -> Tensor:
    """Swap dimensions 0 and 1 of `a`.

    Args:
        a: any type and layout.

    Returns:
        A view of `a`, [ne1, ne0, ne2, ne3].

    Source: ggml_transpose.
    """
    result = _strided(TRANSPOSE, a, (a.ne[1], a.ne[0], *a.ne[2:]), (a.nb[1], a.nb[0], *a.nb[2:]), ())
    result.name = f"{a.name} (transposed)"
    return result


def _strided(op: Op, a: Tensor, ne: Dims, nb: Dims, params: tuple[int, ...]) -> Tensor:
    if a.type.is_quantized and (op is TRANSPOSE or params[0] != 0):
        raise ValueError(f"{op.name}: dimension 0 of a block type must stay first, got {a.type.name} ('{a.name}')")
    return new_node(op, a.type, ne, (a,), params, nb, a, 0)


@PERMUTE.reference
def _(node, a):
    p = node.params
    axes = (p.axis0, p.axis1, p.axis2, p.axis3)
    return np.moveaxis(a, (3, 2, 1, 0), [3 - axis for axis in axes])


@TRANSPOSE.reference
def _(node, a):
    return a.swapaxes(2, 3)


@PERMUTE.case("heads first")
def _(t):
    return permute(t("F32", 64, 12, 5), 0, 2, 1, 3)


@PERMUTE.case("values")
def _(t):
    return permute(t("F16", 16, 6, 5, 2), 1, 2, 0, 3)


@PERMUTE.case("reversed")
def _(t):
    return permute(t("F32", 7, 5, 3, 2), 3, 2, 1, 0)


@PERMUTE.case("blocks")
def _(t):
    return permute(t("Q8_0", 64, 3, 4, 2), 0, 3, 1, 2)


@TRANSPOSE.case("plain")
def _(t):
    return transpose(t("F32", 17, 5, 2))


@TRANSPOSE.case("of a permuted tensor")
def _(t):
    return transpose(permute(t("I32", 6, 5, 4), 0, 2, 1, 3))


# --- gradients --------------------------------------------------------------------------------------------------------


@RESHAPE.backward
def _(node, grad, need):
    return (reshape(grad, node.src[0]),)


@TRANSPOSE.backward
def _(node, grad, need):
    return (transpose(grad),)


@PERMUTE.backward
def _(node, grad, need):
    p = node.params
    return (permute(grad, *np.argsort([p.axis0, p.axis1, p.axis2, p.axis3]).tolist()),)


@VIEW.backward
def _(node, grad, need):
    """Add the gradient to zeros laid out as the bytes of the source are, then read them as the source lies there."""
    source, size = node.src[0], node.type.type_size
    offset = node.params.offset
    if any(n % size for n in (*source.nb, *node.nb, offset)):
        refuse(node, f"strides and offset must be multiples of the {size} bytes of {node.type.name}")
    if overlaps(source.ne, source.nb, size):
        refuse(node, "rows of the source must not overlap")
    n = max((max(source.nbytes, offset + node.nbytes)) // size, node.nelements)  # rows of the view may overlap
    memory = ops.acc(zeros(n, 1, 1, 1), grad, *[4 * (nb // size) for nb in node.nb[1:]], 4 * (offset // size))
    return (_read_as(source, memory),)


def overlaps(ne: Dims, nb: Dims, size: int) -> bool:
    """Do elements of `size` bytes share bytes: is a stride less than what the smaller strides span?"""
    extent = size
    for step, n in sorted((step, n) for step, n in zip(nb, ne, strict=True) if n > 1):
        if step < extent:
            return True
        extent += step * (n - 1)
    return False


def _read_as(t: Tensor, memory: Tensor) -> Tensor:
    """The elements of t from f32 that lie as the bytes of t do."""
    if t.is_contiguous:
        return reshape(view_1d(memory, t.nelements, 0), t)
    size = t.type.type_size
    order = sorted(range(4), key=lambda d: (t.nb[d], t.ne[d] > 1))
    if t.nb[order[0]] != size:
        order.sort(key=lambda d: t.nb[d] != size)
    i, j, k, m = order
    nb = [4 * (n // size) for n in t.nb]
    return permute(view_4d(memory, t.ne[i], t.ne[j], t.ne[k], t.ne[m], nb[j], nb[k], nb[m], 0), i, j, k, m)
