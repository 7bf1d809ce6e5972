"""acc, set, add1, add_id: additions and copies into a part of a tensor.

    acc     a, and b added to the elements of the view (nb1, nb2, nb3, offset)
    set     a, but b in the place of the view (nb1, nb2, nb3, offset)
    add1    a + one value
    add_id  a[:, i1, i2] + b[:, ids[i1, i2]]

acc and set are two steps: `a` is copied (unless the result lies there), then threads share the rows of `b`. add1 uses
the kernels of add. add_id checks every id.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, zeros
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops import binary, copy
from ggjit.ops.binary import binary_row, binary_row_by_one, make_binary
from ggjit.ops.repeat import add_row
from ggjit.ops.views import overlaps
from ggjit.tensor import Tensor, new_node, view_tensor
from ggjit.types import Type

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["acc", "add1", "add_id", "set", "set_1d", "set_2d"]

_REGION = (("nb1", "i32"), ("nb2", "i32"), ("nb3", "i32"), ("offset", "i32"), ("inplace", "i32"))
ADD_ID = Op("add_id", id=3)
ADD1 = Op("add1", id=4, inplace=True)
ACC = Op("acc", id=5, params=_REGION)
SET = Op("set", id=33, params=_REGION)
IDS = 3  # in a kernel's status: source 2 plus one


# --- acc and set ------------------------------------------------------------------------------------------------------


@checked
def acc(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, *, inplace: bool = False) -> Tensor:
    """Add `b` to a part of `a`.

    Args:
        a: f32, contiguous.
        b: f32, rows contiguous, no more elements than `a`.
        nb1: bytes between rows of the part.
        nb2: bytes between its planes.
        nb3: bytes between its steps of dimension 3.
        offset: of its first byte.
        inplace: put the result where `a` lies.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: one is not f32.
        ValueError: layouts do not fit, or the part does not lie inside `a`.

    Source: ggml_acc.
    """
    return _into(ACC, "acc", a, b, (nb1, nb2, nb3, offset), inplace)


@checked
def set(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, *, inplace: bool = False) -> Tensor:
    """Put `b` in the place of a part of `a`; arguments as for `acc`, of type f32 or i32.

    Source: ggml_set.
    """
    return _into(SET, "set", a, b, (nb1, nb2, nb3, offset), inplace)


@checked
def set_1d(a: Tensor, b: Tensor, offset: int, *, inplace: bool = False) -> Tensor:
    """Put `b` in the place of elements of `a` from a byte offset on; see `acc`.

    Source: ggml_set_1d.
    """
    return _into(SET, "set_1d", a, b, (*a.nb[1:], offset), inplace)


@checked
def set_2d(a: Tensor, b: Tensor, nb1: int, offset: int, *, inplace: bool = False) -> Tensor:
    """Put `b` in the place of rows of `a`, nb1 bytes apart; see `acc`.

    Source: ggml_set_2d.
    """
    return _into(SET, "set_2d", a, b, (nb1, *a.nb[2:], offset), inplace)


def _into(op: Op, where: str, a: Tensor, b: Tensor, region: tuple[int, ...], inplace: bool) -> Tensor:
    names = f"('{a.name}', '{b.name}')"
    allowed = (types.F32,) if op is ACC else (types.F32, types.I32)
    if a.type not in allowed or b.type is not a.type:
        raise TypeError(
            f"{where}: a and b must both be {' or '.join(t.name for t in allowed)}, "
            f"got {a.type.name} and {b.type.name} {names}"
        )
    if not a.is_contiguous or not b.is_contiguous_rows:
        raise ValueError(
            f"{where}: a must be contiguous and rows of b, got nb {list(a.nb)} of ne {list(a.ne)} and {list(b.nb)} of "
            f"{list(b.ne)} {names}"
        )
    end = 0 if b.is_empty else region[3] + 4 * b.ne[0] + sum_of_steps(b, region)
    if min(region) < 0 or end > a.nbytes or b.nelements > a.nelements:
        raise ValueError(
            f"{where}: b must lie inside a at the strides and offset given, got {list(b.ne)} with {list(region[:3])} "
            f"at {region[3]} in {a.nbytes} bytes {names}"
        )
    params = (*region, int(inplace))
    return view_tensor(op, a, (a, b), params) if inplace else new_node(op, a.type, a.ne, (a, b), params)


def sum_of_steps(b: Tensor, region: tuple[int, ...]) -> int:
    """Byte offset of the last row of a part with the shape of `b`."""
    return (b.ne[1] - 1) * region[0] + (b.ne[2] - 1) * region[1] + (b.ne[3] - 1) * region[2]


def _reference(node, a, b):
    """Row after row, as parts may overlap."""
    p, out = node.params, a.copy()
    flat = out.reshape(-1)
    for i3, i2, i1 in np.ndindex(*b.shape[:3]):
        at = (p.offset + i1 * p.nb1 + i2 * p.nb2 + i3 * p.nb3) // 4
        part = flat[at : at + b.shape[-1]]
        part[...] = part + b[i3, i2, i1] if node.op is ACC else b[i3, i2, i1]
    return out


@jitted
def rows_overlap(ne, op_params):
    """Do rows of the part share bytes, or follow each other in no order?"""
    n, size = ne[0] * 4, np.int64(op_params[0])
    if ne[1] > 1 and size < n:
        return True
    if ne[1] > 1:
        n = size * (ne[1] - 1) + n
    if ne[2] > 1 and op_params[1] < n:
        return True
    if ne[2] > 1:
        n = np.int64(op_params[1]) * (ne[2] - 1) + n
    return ne[3] > 1 and op_params[2] < n


@functools.cache
def make_into(is_sum: bool):
    """Kernel that adds or copies rows of src1 to the part of dst; if rows of the part overlap, one thread does it."""

    @kernel(streams=True)
    def into(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n = src1_ne[0]
        first, last = rows.whole(src1_ne, ith, nth)
        if rows_overlap(src1_ne, op_params):
            first, last = 0, src1_ne[1] * src1_ne[2] * src1_ne[3] if ith == 0 else 0
        i1, i2, i3 = rows.position(src1_ne, first)
        for _ in range(first, last):
            to = op_params[3] + i1 * op_params[0] + i2 * op_params[1] + i3 * op_params[2]
            at = rows.offset(src1_nb, i1, i2, i3)
            if is_sum:
                add_row(dst, to, src1, at, n)
            else:
                convert.move(dst, to, src1, at, 4 * n)
            i1, i2, i3 = rows.following(src1_ne, i1, i2, i3)

    return into


def _lower(low, node):
    a, b = node.src
    if node.data != a.data:
        low.emit(copy._select(node), node, src=(a,), work=0)
    if not b.is_empty:
        low.emit(make_into(node.op is ACC), node)


def _flops(node):
    return node.src[1].nelements


for _op in (ACC, SET):
    _op.reference(_reference)
    _op.lower(_lower)
    _op.supports(lambda node: True)
    _op.flops(_flops)


def _part(grad, node):
    """The part of a gradient that `b` went to."""
    p = node.params
    return copy.cont(ops.view_4d(grad, *node.src[1].ne, p.nb1, p.nb2, p.nb3, p.offset))


@ACC.backward
def _(node, grad, need):
    return grad, _part(grad, node) if need[1] else None


@SET.backward
def _(node, grad, need):
    """What is overwritten has gradient 0, also elements of `b` where later ones overlap them."""
    b, p = node.src[1], node.params
    region = (p.nb1, p.nb2, p.nb3, p.offset)
    kept = set(grad, zeros(*b.ne), *region) if need[0] else None
    if not need[1]:
        return kept, None
    part = _part(grad, node)
    if overlaps(b.ne, (4, *region[:3]), 4):  # an element has stayed where its own number is found
        own = ops.reshape(ops.arange(0.0, float(b.nelements), 1.0), b)
        lost = ops.step(ops.abs(ops.sub(_part(set(zeros(*node.ne), own, *region), node), own)))
        part = ops.mul(part, ops.scale_bias(lost, -1.0, 1.0))
    return kept, part


# --- add1 -------------------------------------------------------------------------------------------------------------

_ADD1 = {
    types.F32: (types.F32,),
    types.F16: (types.F16, types.F32),
    types.BF16: (types.BF16, types.F32),
}


@checked
def add1(a: Tensor, b: Tensor, *, inplace: bool = False) -> Tensor:
    """Add one value to all elements.

    Args:
        a: f32, f16, bf16 or a quantized type; rows contiguous and equally far apart.
        b: [1], of the type of `a` or f32.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`; a quantized sum is quantized again.

    Raises:
        TypeError: types that do not fit.
        ValueError: `b` is more than one value, or the layout of `a` does not fit.

    Source: ggml_add1.
    """
    names = f"('{a.name}', '{b.name}')"
    if b.ne != (1, 1, 1, 1):
        raise ValueError(f"add1: b must be one value, got ne {list(b.ne)} {names}")
    if b.type not in ((types.F32,) if a.type.is_quantized else _ADD1.get(a.type, ())):
        raise TypeError(
            f"add1: a must be F32, F16, BF16 or quantized and b of its type or F32, got {a.type.name} and "
            f"{b.type.name} {names}"
        )
    if a.nb[0] != a.type.type_size or a.nb[2] != a.nb[1] * a.ne[1] or a.nb[3] != a.nb[2] * a.ne[2]:
        raise ValueError(
            f"add1: rows of a must be contiguous and equally far apart, got ne {list(a.ne)}, nb {list(a.nb)} {names}"
        )
    return view_tensor(ADD1, a, (a, b)) if inplace else new_node(ADD1, a.type, a.ne, (a, b))


@ADD1.reference
def _(node, a, b):
    return copy.as_type(a + b, node.type) if node.type.is_quantized else a + b


@functools.cache
def make_add1_quantized(type: Type):
    """Kernel for rows of blocks."""
    assert type.quant is not None
    dequantize_row, quantize_row = type.quant.dequantize_row, type.quant.quantize_row
    row = binary_row_by_one(binary.ADD, types.F32, types.F32, types.F32)

    @kernel
    def add1_quantized(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n = dst_ne[0]
        x = COUNTER_LINE + 4 * n * ith
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            dequantize_row(src0, rows.offset(src0_nb, i1, i2, i3), work, x, n)
            row(work, x, work, x, src1, 0, n)
            quantize_row(work, x, dst, rows.offset(dst_nb, i1, i2, i3), n)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return add1_quantized


@ADD1.kernel
def _(node):
    a, b = node.src
    if not a.type.is_quantized:
        return make_binary(binary.ADD, node.type, a.type, b.type, True)
    return make_add1_quantized(a.type) if a.type.quant is not None and convert.is_encodable(a.type) else None


@ADD1.work_size
def _(node, nth):
    return 4 * node.ne[0] * nth if node.type.is_quantized else 0


@ADD1.backward
def _(node, grad, need):
    from ggjit.ops.reduce import sum

    return grad, sum(grad) if need[1] else None


# --- add_id -----------------------------------------------------------------------------------------------------------


@checked
def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Add to each row the row of `b` that its id tells: dst[:, i1, i2] = a[:, i1, i2] + b[:, ids[i1, i2]].

    Args:
        a: f32 [ne0, n_used, n_tokens], rows contiguous.
        b: f32 [ne0, n_expert], rows contiguous.
        ids: i32 [n_used, n_tokens], below n_expert.

    Returns:
        The shape of `a`.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes or layouts that do not fit.
        IndexError: when computed, an id is out of range.

    Source: ggml_add_id.
    """
    names = f"('{a.name}', '{b.name}', '{ids.name}')"
    if a.type is not types.F32 or b.type is not types.F32 or ids.type is not types.I32:
        raise TypeError(
            f"add_id: a and b must be F32 and ids I32, got {a.type.name}, {b.type.name} and {ids.type.name} {names}"
        )
    if a.ne[0] != b.ne[0] or a.ne[1:3] != ids.ne[:2] or a.ne[3] != 1 or b.ne[2:] != (1, 1) or ids.ne[2:] != (1, 1):
        raise ValueError(
            f"add_id: a must be [ne0, n_used, n_tokens], b [ne0, n_expert] and ids [n_used, n_tokens], got "
            f"{list(a.ne)}, {list(b.ne)} and {list(ids.ne)} {names}"
        )
    for t in (a, b):
        if not t.is_contiguous_rows:
            raise ValueError(f"add_id: rows must be contiguous, got ne {list(t.ne)}, nb {list(t.nb)} ('{t.name}')")
    return new_node(ADD_ID, a.type, a.ne, (a, b, ids))


@ADD_ID.reference
def _(node, a, b, ids):
    return a + b[0, 0][ids[0, 0]][None]


@functools.cache
def make_add_id():
    """Kernel that adds a row of src1 to each row of src0."""
    row = binary_row(binary.ADD, types.F32, types.F32, types.F32)

    @kernel(streams=True)
    def add_id_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
                   op_params, work, ith, nth):  # fmt: skip
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for k in range(first, last):
            id = np.int64(memory.load_i32(src2, i1 * src2_nb[0] + i2 * src2_nb[1]))
            if id < 0 or id >= src1_ne[1]:
                return k << 4 | IDS
            to, at = rows.offset(dst_nb, i1, i2, i3) + 4 * begin, rows.offset(src0_nb, i1, i2, i3) + 4 * begin
            row(dst, to, src0, at, src1, id * src1_nb[1] + 4 * begin, end - begin)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)
        return 0

    return add_id_f32


ADD_ID.kernel(lambda node: make_add_id())


@ADD_ID.backward
def _(node, grad, need):
    from ggjit.ops.back import get_rows_back
    from ggjit.ops.views import reshape_1d, reshape_2d

    a, b, ids = node.src
    if not need[1]:
        return grad, None, None
    grads = reshape_2d(grad, a.ne[0], a.ne[1] * a.ne[2])
    return grad, get_rows_back(grads, reshape_1d(as_contiguous(ids), ids.nelements), b), None


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, view_2d

    for op, build in ((ACC, acc), (SET, set)):
        op.case("part")(lambda t, f=build: f(t("F32", 40, 6, 4, 2), t("F32", 25, 3, 2), 160, 960, 3840, 1160))
        op.case("all")(lambda t, f=build: f(t("F32", 17, 3), t("F32", 17, 3), 68, 204, 204, 0))
        op.case("in place")(lambda t, f=build: f(t("F32", 16, 5), t("F32", 7, 2), 64, 320, 320, 140, inplace=True))
        op.case("row of another shape")(lambda t, f=build: f(t("F32", 8, 3, 5), t("F32", 20), 80, 80, 80, 48))
        op.case("overlapping rows")(lambda t, f=build: f(t("F32", 64), t("F32", 20, 3), 16, 60, 60, 8))
        op.case("b permuted")(
            lambda t, f=build: f(t("F32", 9, 6, 4), permute(t("F32", 9, 2, 3), 0, 2, 1, 3), 36, 216, 864, 36)
        )
    SET.case("i32")(lambda t: set(t.ints("I32", 10, 6), t.ints("I32", 5, 3), 40, 240, 240, 44))
    SET.case("1d")(lambda t: set_1d(t("F32", 24), t("F32", 7), 8))
    SET.case("2d")(lambda t: set_2d(t("F32", 24, 4), t("F32", 7, 3), 96, 108))

    for a, b in (("F32", "F32"), ("F16", "F16"), ("F16", "F32"), ("BF16", "F32"), ("BF16", "BF16"), ("Q8_0", "F32")):
        ADD1.case(f"{a}, {b}")(lambda t, a=a, b=b: add1(t(a, 64, 3), t(b, 1)))
    ADD1.case("tail")(lambda t: add1(t("F32", 37, 3, 2), t("F32", 1)))
    ADD1.case("padded rows, in place")(
        lambda t: add1(view_2d(t("F32", 40, 3), 33, 3, 160, 12), t("F32", 1), inplace=True)
    )

    ADD_ID.case("experts")(lambda t: add_id(t("F32", 37, 2, 5), t("F32", 37, 6), t.ints("I32", 2, 5, high=6)))
    ADD_ID.case("one row")(lambda t: add_id(t("F32", 577, 1, 1), t("F32", 577, 3), t.ints("I32", 1, 1, high=3)))
    ADD_ID.case("spaced ids")(
        lambda t: add_id(t("F32", 9, 2, 3), t("F32", 9, 4), view_2d(t.ints("I32", 6, 3, high=4), 2, 3, 24, 8))
    )
    ADD_ID.case("padded rows")(
        lambda t: add_id(permute(t("F32", 18, 5, 2), 0, 2, 1, 3), view_2d(t("F32", 24, 4), 18, 4, 96, 12),
                         t.ints("I32", 2, 5, high=4))
    )  # fmt: skip


_cases()
