"""mul_mat: the matrix product c = b a^T, with dimensions 2 and 3 as batch.

    dst[m, n, i2, i3] = sum_k a[k, m, i2 / r2, i3 / r3] * b[k, n, i2, i3]      r2 = b.ne2 / a.ne2, r3 = b.ne3 / a.ne3

Row m of a (a weight matrix as GGUF stores it) meets row n of b (a token's activations). Weights are read as panels of
16 rows, packed when they are loaded (buffer type "panel") or on the way. Activations are brought into the form that the
weights' type wants by a step of its own, shared by all products of the same b:

    block types    int8 per 32 (act_q8); twice with prec F32, that is about 16 bits (act_q16)
    F32            f32, as it is
    F16            f32, rounded to what f16 can hold, as ggml does
    BF16           rounded to bf16

Up to 16 columns tiles read the panel itself; for more it is prepared once per group of panels (see `panel_kernels`).
The ladder of the tiles is in `panel` and `float_panel`. Every variant gives the same bits. Bias, residual and
activation that follow a product of few columns, and both products of a gated unit, are one step with it.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_f32, refuse
from ggjit.context import current
from ggjit.fusion import Fused
from ggjit.jit import jitted, lazy_module
from ggjit.op import PREC_F32, Op
from ggjit.ops.binary import ADD
from ggjit.ops.glu import FUNCTIONS, GATES, GLU
from ggjit.ops.unary import FUNCTIONS as UNARY_FUNCTIONS
from ggjit.ops.unary import UNARY, lanes_of
from ggjit.tensor import Dims, Tensor, new_node
from ggjit.types import Type

kernels = lazy_module("ggjit.ops.lib.panel_kernels")
activations = lazy_module("ggjit.ops.lib.panel_activations")

__all__ = ["mul_mat"]

MUL_MAT = Op("mul_mat", id=29, params=(("prec", "i32"), ("hint", "i32")), nmse=5e-4, packed=(0,))
FLOATS = (types.F32, types.F16, types.BF16)
INT8 = tuple(types.by_name(name) for name in ("Q8_0", "Q8_1", "Q8_K"))  # what ggml makes of activations


def check_mul_mat(op: Op, a: Tensor, b: Tensor) -> None:
    """Check what every product of weights a with activations b needs of both.

    Raises:
        ValueError: a is transposed or has no columns, sizes differ, or elements of a row are not next to each other.
    """
    names = f"('{a.name}', '{b.name}')"
    if a.is_transposed and a.ne[0] == 0:
        raise ValueError(f"{op.name}: src0.ne[0] must be at least 1, got {list(a.ne)} ('{a.name}')")
    if a.is_transposed:
        raise ValueError(
            f"{op.name}: src0 must not be transposed, got nb {list(a.nb)} ('{a.name}'); make it contiguous by cont"
        )
    if a.ne[0] != b.ne[0]:
        raise ValueError(
            f"{op.name}: src0.ne[0] must equal src1.ne[0], got {list(a.ne[: a.n_dims])} and {list(b.ne[: b.n_dims])} "
            f"{names}"
        )
    for i, t in enumerate((a, b)):
        if t.nb[0] != t.type.type_size:
            raise ValueError(
                f"{op.name}: src{i}.nb[0] must be the {t.type.type_size} bytes of {t.type.name}, got nb {list(t.nb)} "
                f"('{t.name}'); make it contiguous by cont"
            )


@checked
def mul_mat(a: Tensor, b: Tensor, *, prec: int | None = None, hint: int = 0) -> Tensor:
    """Multiply matrices: each row of b with each row of a.

    Args:
        a: [k, m, n2, n3], any type with kernels; rows contiguous, other strides free. Not transposed.
        b: f32, f16 or bf16 [k, n, N2, N3], or Q8_0, Q8_1, Q8_K where a has a block type; rows contiguous. n2 divides N2
            and n3 divides N3: a is repeated.
        prec: 0, or 10 for GGML_PREC_F32: block types meet activations of about 16 bits, not 8; by default what the
            context says. Sums are f32 in any case.
        hint: ggml's hint word; it does not change the result.

    Returns:
        f32 [m, n, N2, N3].

    Raises:
        ValueError: shapes or layouts do not fit.

    Source: ggml_mul_mat, ggml_prec_set_acc, ggml_mul_mat_set_hint.
    """
    check_mul_mat(MUL_MAT, a, b)
    if any(n % m if m else n for m, n in zip(a.ne[2:], b.ne[2:], strict=True)):
        raise ValueError(
            f"mul_mat: src0.ne[2:] must divide src1.ne[2:], got {list(a.ne)} and {list(b.ne)} ('{a.name}', '{b.name}')"
        )
    prec = current("mul_mat").prec if prec is None else prec
    return new_node(MUL_MAT, types.F32, (a.ne[1], *b.ne[1:]), (a, b), (prec, hint))


@MUL_MAT.reference
def _(node, a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    repeats = [n // m if m else 1 for m, n in zip(a.shape[:2], b.shape[:2], strict=True)]
    return b @ a.repeat(repeats[0], 0).repeat(repeats[1], 1).swapaxes(2, 3)


# ---- lowering ------------------------------------------------------------------------------------------------------


def is_packed(a: Tensor) -> bool:
    """Does a lie in memory that holds panels?"""
    buffer = (a if a.view_src is None else a.view_src).buffer
    return buffer is not None and buffer.type.name == "panel"


def takes(a: Tensor, b: Tensor) -> bool:
    """Are there kernels for the types, and are packed weights whole?"""
    if a.type not in FLOATS and not a.type.has_panel:
        return False
    if b.type not in FLOATS and (b.type not in INT8 or a.type in FLOATS):
        return False
    return not is_packed(a) or a.view_src is None or (a.view_src.ne == a.ne and a.view_offs == 0)


@MUL_MAT.supports
def _(node):
    return takes(*node.src)


def _derived(low, source: Tensor, kind: str, kernel, type: Type, ne: Dims) -> Tensor:
    y, is_new = low.derived(source, kind, type, ne, type.type_size * math.prod(ne))
    if is_new:
        low.emit(kernel, y, src=(source,))
    return y


def records_of(a: Tensor, b: Tensor, prec: int) -> int:
    """Records of activations for each 32 of k: 2 for floats that a block type meets with prec F32."""
    return 2 if prec == PREC_F32 and a.type not in FLOATS and b.type in FLOATS else 1


def lower_activations(low, a: Tensor, b: Tensor, records: int = 1) -> Tensor:
    """The tensor that kernels for weights of a's type read for b; emits the step that fills it if it is new."""
    kind = kernels.weights(a.type.name).activations
    k, name = b.ne[0], b.type.name
    if kind == "act_q8":
        kind, ne = f"act_q{8 * records}", (activations.q8_row_nbytes(k, records), *b.ne[1:])
        return _derived(low, b, kind, activations.quantize_kernel(name, records), types.I8, ne)
    if kind == "act_bf16":
        ne = (k + k % 2, *b.ne[1:])
        return _derived(low, b, kind, activations.convert_kernel(name, "BF16"), types.BF16, ne)
    if kind == "act_f16" and b.type is not types.F16:
        return _derived(low, b, kind, activations.round_f16_kernel(name), types.F32, b.ne)
    if b.type is types.F32:
        return b
    return _derived(low, b, "act_f32", activations.convert_kernel(name, "F32"), types.F32, b.ne)


def lower_tiles(low, y: Tensor, columns: int) -> Tensor:
    """Tiles of y's words for tiles that read so many columns side by side; y itself if that is 0."""
    if columns == 0:
        return y
    words = y.ne[0] * y.type.type_size // 4
    ne = (words * columns, -(-y.ne[1] // columns), *y.ne[2:])
    return _derived(low, y, f"act_tiles {columns}", activations.tile_kernel(columns), types.I32, ne)


def lower_product(
    low, a: Tensor, b: Tensor, dst: Tensor, prec: int, end=None, sources: tuple[Tensor, ...] = ()
) -> None:
    """Emit the steps of a product, and of what is done to its rows in the same step.

    Args:
        low: the lowering.
        a: weights.
        b: activations.
        dst: the result.
        prec: the precision word.
        end: a `panel_kernels.End`, for few columns.
        sources: what the end reads.
    """
    records = records_of(a, b, prec)
    y = lower_activations(low, a, b, records)
    for other in low.readers.get(b, ()):  # all forms before the first product: between them threads need not meet
        if other.op is MUL_MAT and other.src[1] is b and takes(other.src[0], b):
            lower_activations(low, other.src[0], b, records_of(other.src[0], b, other.params.prec))
    packed, n = is_packed(a), b.ne[1]
    along = 2 if _is_along_2(a, b) else 1
    n = b.ne[2] // a.ne[2] if along == 2 else n
    name = a.type.name
    if n > kernels.FEW and along == 1:
        columns, kernel = kernels.many_columns(name, records), kernels.many_kernel(name, packed, records)
        work = kernels.many_work_size(a.type, a.ne[0], packed, low.n_threads)
    else:
        columns = kernels.tile_columns(n, records)
        kernel = kernels.few_kernel(name, columns, packed, along, end, records)
        work = kernels.few_work_size(a.type, packed, low.n_threads, end, records)
    y = lower_tiles(low, y, kernels.tile_width(name, columns, along))
    low.emit(kernel, dst, src=(a, y, *sources), work=work)


def _is_along_2(a: Tensor, b: Tensor) -> bool:
    """Has each matrix one column, and do several share weights?"""
    return b.ne[1] == 1 and b.ne[2] > a.ne[2]


@MUL_MAT.lower
def _(low, node):
    a, b = node.src
    if not takes(a, b):
        raise NotImplementedError(
            f"mul_mat: the CPU must have kernels for the types, got {a.type.name} and {b.type.name} ('{node.name}')"
        )
    lower_product(low, a, b, node, node.params.prec)


@MUL_MAT.flops
def _(node):
    return 2 * node.src[0].ne[0] * node.nelements


# ---- cases ---------------------------------------------------------------------------------------------------------


@MUL_MAT.case("f32")
def _(t):
    return mul_mat(t("F32", 100, 37), t("F32", 100, 3))


@MUL_MAT.case("f32 many columns")
def _(t):
    return mul_mat(t("F32", 300, 33), t("F32", 300, 29))


@MUL_MAT.case("f16 odd")
def _(t):
    return mul_mat(t("F16", 67, 20), t("F32", 67, 5))


@MUL_MAT.case("bf16 odd")
def _(t):
    return mul_mat(t("BF16", 67, 20), t("F32", 67, 5))


@MUL_MAT.case("repeated in dimensions 2 and 3")
def _(t):
    return mul_mat(t("F16", 32, 5, 2, 2), t("F32", 32, 4, 6, 4))


@MUL_MAT.case("one column for several heads")
def _(t):
    return mul_mat(t("F32", 64, 19, 2), t("F32", 64, 1, 6))


@MUL_MAT.case("q4_0")
def _(t):
    return mul_mat(t("Q4_0", 256, 40), t("F32", 256, 1))


@MUL_MAT.case("q8_0, precision f32")
def _(t):
    return mul_mat(t("Q8_0", 1120, 20), t("F32", 1120, 2), prec=PREC_F32)


@MUL_MAT.case("q6_k many columns")
def _(t):
    return mul_mat(t("Q6_K", 1280, 20), t("F32", 1280, 18))


# ---- fusion with what follows --------------------------------------------------------------------------------------


@jitted
def add_lanes(x, b):
    """x + b."""
    return x + b


@jitted
def add_twice_lanes(x, b, c):
    """(x + b) + c."""
    return (x + b) + c


@functools.cache
def add_unary_end(function: str):
    """The end f(x + b)."""
    lanes = lanes_of(function, "F32")

    @jitted
    def add_unary_lanes(x, b):
        return lanes(x + b)

    return kernels.End(add_unary_lanes, 1)


@functools.cache
def gate_end(function: str):
    """The end f(x) * b, b being a second product."""
    lanes = lanes_of(function, "F32")

    @jitted
    def gate_lanes(x, b):
        return lanes(x) * b

    return kernels.End(gate_lanes, 1, True)


@functools.cache
def sum_end(n: int):
    """The end x + b, or (x + b) + c."""
    return kernels.End(add_lanes, 1) if n == 1 else kernels.End(add_twice_lanes, 2)


def _term(node, x):
    """The f32 rows that a node adds to x; None if it does something else."""
    if node is None or node.op is not ADD or node.src[0] is not x or node.type is not types.F32:
        return None
    other = node.src[1]
    fits = other.type is types.F32 and other.is_contiguous_rows and other.ne[0] == node.ne[0]
    return other if fits and node.is_contiguous_rows else None


def _takes_end(a, b):
    """Are there kernels of the product that take an `End`: for few columns?"""
    return takes(a, b) and b.ne[1] <= kernels.FEW and not _is_along_2(a, b)


@MUL_MAT.fusion
def _(match, node):
    """Both products of a gated unit and the unit."""
    unit = match.reader(node)
    if unit is None or unit.op is not GLU or len(unit.src) != 2 or unit.type is not types.F32:
        return None
    function = GATES.get(FUNCTIONS[unit.params.function])
    gate, up = unit.src
    if function is None or any(t.op is not MUL_MAT or match.reader(t) is not unit for t in unit.src):
        return None
    (a, b), (c, d) = gate.src, up.src
    prec = gate.params.prec
    alike = a.type is c.type and a.ne == c.ne and is_packed(a) == is_packed(c) and b is d and up.params.prec == prec
    if gate is up or not alike or b.ne[2:] != (1, 1) or not _takes_end(a, b) or not takes(c, b):
        return None
    other = up if node is gate else gate
    end = gate_end(function)
    return Fused((node, other, unit), (a, c, b), (), lambda low: lower_product(low, a, b, unit, prec, end, (c,)))


@MUL_MAT.fusion
def _(match, node):
    """A product, add of a bias or of the residual, and then the other or an activation; or without the last."""
    a, b = node.src
    add = match.reader(node)
    term = _term(add, node)
    if term is None or not _takes_end(a, b):
        return None
    chain, end, sources = (node, add), sum_end(1), (term,)
    after = match.reader(add)
    second = _term(after, add)
    if second is not None:
        chain, end, sources = (node, add, after), sum_end(2), (term, second)
    elif after is not None and after.op is UNARY and after.is_contiguous_rows:
        function = UNARY_FUNCTIONS[after.params.function]
        if function != "xielu":
            chain, end = (node, add, after), add_unary_end(function)
    prec = node.params.prec
    return Fused(chain, (a, b, *sources), (), lambda low: lower_product(low, a, b, chain[-1], prec, end, sources))


def _fused_cases():
    def product(t, kind, n, k=96, m=37):
        return mul_mat(t(kind, k, m), t("F32", k, n))

    for kind, n, k in (("Q4_0", 1, 96), ("Q8_0", 3, 96), ("F16", 13, 300), ("F32", 2, 50)):
        name = f"{kind}, {n} columns"
        MUL_MAT.fused_case(f"bias, {name}")(lambda t, f=kind, n=n, k=k: ops.add(product(t, f, n, k), t("F32", 37)))
        MUL_MAT.fused_case(f"gated unit, {name}")(lambda t, f=kind, n=n, k=k: _gated(t, f, n, k))
    MUL_MAT.fused_case("bias and residual")(
        lambda t: ops.add(ops.add(product(t, "Q4_0", 2), t("F32", 37)), t("F32", 37, 2))
    )
    MUL_MAT.fused_case("bias and activation")(lambda t: ops.gelu(ops.add(product(t, "F16", 6), t("F32", 37))))
    MUL_MAT.fused_case("residual of repeated weights")(
        lambda t: ops.add(mul_mat(t("F32", 40, 20), t("F32", 40, 3, 4, 2)), t("F32", 20, 3, 2))
    )


def _gated(t, kind, n, k):
    x = t("F32", k, n)
    return ops.swiglu_split(mul_mat(t(kind, k, 37), x), mul_mat(t(kind, k, 37), x))


_fused_cases()


# ---- gradient ------------------------------------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    """t with dimensions 0 and 1 swapped, as contiguous f32."""
    if t.type in (types.F16, types.BF16):
        return ops.cast(ops.transpose(t), types.F32)
    return ops.cont(ops.transpose(as_f32(t)))


def sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was repeated as weights are, index i to i * r ... i * r + r - 1 of dimensions 2 and 3.

    Args:
        grad: f32 [ne0, ne1, N2, N3], contiguous.
        like: [ne0, ne1, n2, n3].

    Returns:
        f32, the shape of `like`.
    """
    ne0, ne1, n2, n3 = like.ne
    plane, r2, r3 = ne0 * ne1, grad.ne[2] // n2, grad.ne[3] // n3
    if r2 > 1:
        groups = ops.reshape_4d(grad, plane, r2, n2, grad.ne[3])
        grad = ops.repeat_back(groups, ops.view_4d(groups, plane, 1, n2, grad.ne[3], *groups.nb[1:], 0))
    if r3 > 1:
        groups = ops.reshape_3d(grad, plane * n2, r3, n3)
        grad = ops.repeat_back(groups, ops.view_3d(groups, plane * n2, 1, n3, *groups.nb[1:3], 0))
    return ops.reshape(grad, like)


def mul_mat_gradients(
    a: Tensor, b: Tensor, grad: Tensor, need: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both sources of a product, as products of transposed copies.

    a: sum over columns n (and the group of a) of b[:, n] grad[:, n];  b: sum over rows m of a[:, m] grad[m, :]

    All factors are f32: mul_mat rounds what meets f16 and bf16 weights, and small gradients would be lost.

    Args:
        a: weights of mul_mat, of any type.
        b: activations of mul_mat.
        grad: f32 [m, n, N2, N3].
        need: which are wanted.

    Returns:
        f32 gradients of the shapes of a and b.
    """
    of_a = of_b = None
    if need[0]:
        of_a = sum_groups(mul_mat(transposed(b), transposed(grad)), a)
    if need[1]:
        of_b = mul_mat(transposed(a), grad)
    return of_a, of_b


@MUL_MAT.backward
def _(node, grad, need):
    a, b = node.src
    if need[1] and is_packed(a):
        refuse(node, "weights must lie in rows to be transposed, got a panel buffer")
    return mul_mat_gradients(a, b, grad, need)
