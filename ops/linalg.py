"""out_prod, a matrix product over dimension 1, and solve_tri, a system of equations with a lower triangle.

    out_prod    dst[m, p] = sum over n of a[m, n] b[p, n]; mul_mat is the same over dimension 0
    solve_tri   X with A X = B by forward substitution:  x_i = (b_i - sum over j < i of A[i, j] x_j) / A[i, i]

out_prod is what the gradient of a matrix product with respect to its weights is made of.

| out_prod | one Zen 4 core |
|---|---|
| 16 m x 1 p | one load of a for each multiply-add |
| 16 m x 4 p | one load for four, 4 independent chains |

One chain of multiply-adds in n order per element: the bits depend neither on threads nor on the tile.
"""

from __future__ import annotations

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, as_f32, zeros
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.copy import make_copy_runs
from ggjit.ops.lib.checks import require, require_type
from ggjit.ops.mul_mat import sum_groups
from ggjit.tensor import Tensor, new_node

convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["out_prod", "solve_tri"]

OUT_PROD = Op("out_prod", id=31, nmse=5e-4)
SOLVE_TRI = Op("solve_tri", id=85)
LOWER_DIAG = 2  # of tri


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """Sum of the outer products of the rows of `a` and `b`.

    Args:
        a: f32, f16 or a quantized type [m, n, n2, n3]; rows contiguous unless f32.
        b: f32 [p, n, N2, N3], any strides. n2 divides N2 and n3 divides N3: `a` is repeated (an f16 `a` is not).

    Returns:
        f32 [m, p, N2, N3].

    Raises:
        ValueError: sizes do not fit, or `a` is transposed.
        TypeError: types do not fit.

    Source: ggml_out_prod.
    """
    require("out_prod", a.ne[1] == b.ne[1], "a.ne[1] must equal b.ne[1]", a, b)
    repeats = all(n and m % n == 0 for n, m in zip(a.ne[2:], b.ne[2:], strict=True))
    require("out_prod", repeats, "a.ne[2:] must divide b.ne[2:]", a, b)
    if a.type not in (types.F32, types.F16) and not a.type.is_quantized:
        raise TypeError(f"out_prod: a must be F32, F16 or quantized, got {a.type.name} ('{a.name}')")
    require_type("out_prod", "b", b, types.F32)
    require("out_prod", a.type is not types.F16 or a.ne[2:] == b.ne[2:], "an F16 a must not be repeated", a, b)
    if a.is_transposed or (a.type is not types.F32 and not a.is_contiguous_rows):
        raise ValueError(f"out_prod: a must not be transposed, got nb {list(a.nb)} ('{a.name}'); use cont first")
    return new_node(OUT_PROD, types.F32, (a.ne[0], b.ne[0], *b.ne[2:]), (a, b))


@checked
def solve_tri(a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool) -> Tensor:
    """Solve A X = B for a lower triangular A.

    Args:
        a: f32 [n, n, n2, n3], rows are rows of A; what lies above the diagonal is not looked at. Any strides.
        b: f32 [k, n, n2, n3], any strides.
        left: A stands left of X; True.
        lower: A is a lower triangle; True.
        uni: the diagonal is 1; False.

    Returns:
        f32, the shape of `b`.

    Raises:
        ValueError: sizes do not fit.
        TypeError: a source is not f32.
        NotImplementedError: another form is asked for.

    Source: ggml_solve_tri.
    """
    fits = a.ne[0] == a.ne[1] == b.ne[1] and a.ne[2:] == b.ne[2:]
    require("solve_tri", fits, "a must be square, a.ne[1] equal b.ne[1], and dimensions 2 and 3 be equal", a, b)
    require_type("solve_tri", "a", a, types.F32)
    require_type("solve_tri", "b", b, types.F32)
    if not left or not lower or uni:
        raise NotImplementedError(
            f"solve_tri: left and lower must be True and uni False, got {left}, {lower} and {uni} "
            f"('{a.name}', '{b.name}')"
        )
    return new_node(SOLVE_TRI, types.F32, b.ne, (a, b))


# --- references -------------------------------------------------------------------------------------------------------


@OUT_PROD.reference
def _(node, a, b):
    a = a.repeat(b.shape[1] // a.shape[1], 1).repeat(b.shape[0] // a.shape[0], 0)
    return b.swapaxes(2, 3) @ a


@SOLVE_TRI.reference
def _(node, a, b):
    return np.linalg.solve(np.tril(a), b)


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def load_few(src, at, step, n):
    """The first n of f32 that lie `step` bytes apart."""
    return vec.load_first(src, at, n) if step == 4 else vec.load_strided_first(src, at, step, n)


@kernel
def out_prod_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """Tiles of 16 m x 4 p."""
    n_m, n_p = (dst_ne[0] + 15) // 16, (dst_ne[1] + 3) // 4
    total = n_m * n_p * dst_ne[2] * dst_ne[3]
    r2, r3, step = dst_ne[2] // src0_ne[2], dst_ne[3] // src0_ne[3], src1_nb[0]
    for tile in range(total * ith // nth, total * (ith + 1) // nth):
        m, p, matrix = 16 * (tile % n_m), 4 * (tile // n_m % n_p), tile // (n_m * n_p)
        i2, i3 = matrix % dst_ne[2], matrix // dst_ne[2]
        n, last = dst_ne[0] - m, dst_ne[1] - 1 - p
        n = n if n < 16 else 16
        at = m * src0_nb[0] + i2 // r2 * src0_nb[2] + i3 // r3 * src0_nb[3]
        by = p * step + i2 * src1_nb[2] + i3 * src1_nb[3]
        p1, p2, p3 = 1 if last > 1 else last, 2 if last > 2 else last, 3 if last > 3 else last
        v0, v1, v2, v3 = vec.zero(), vec.zero(), vec.zero(), vec.zero()
        for _ in range(src0_ne[1]):
            x = load_few(src0, at, src0_nb[0], n)
            v0 = vec.fma(x, memory.load_f32(src1, by), v0)
            v1 = vec.fma(x, memory.load_f32(src1, by + p1 * step), v1)
            v2 = vec.fma(x, memory.load_f32(src1, by + p2 * step), v2)
            v3 = vec.fma(x, memory.load_f32(src1, by + p3 * step), v3)
            at, by = at + src0_nb[1], by + src1_nb[1]
        to = 4 * m + p * dst_nb[1] + i2 * dst_nb[2] + i3 * dst_nb[3]
        vec.store_first(dst, to, v0, n)
        if last >= 1:
            vec.store_first(dst, to + dst_nb[1], v1, n)
        if last >= 2:
            vec.store_first(dst, to + 2 * dst_nb[1], v2, n)
        if last >= 3:
            vec.store_first(dst, to + 3 * dst_nb[1], v3, n)


@kernel
def solve_tri_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """16 columns of X at once."""
    n_k = (dst_ne[0] + 15) // 16
    total = n_k * dst_ne[2] * dst_ne[3]
    for chunk in range(total * ith // nth, total * (ith + 1) // nth):
        k, i2, i3 = 16 * (chunk % n_k), chunk // n_k % dst_ne[2], chunk // (n_k * dst_ne[2])
        n = dst_ne[0] - k if dst_ne[0] - k < 16 else 16
        x = 4 * k + i2 * dst_nb[2] + i3 * dst_nb[3]
        for i in range(dst_ne[1]):
            at = i * src0_nb[1] + i2 * src0_nb[2] + i3 * src0_nb[3]
            by = k * src1_nb[0] + i * src1_nb[1] + i2 * src1_nb[2] + i3 * src1_nb[3]
            v = load_few(src1, by, src1_nb[0], n)
            for j in range(i):
                v = vec.fma(vec.load_first(dst, x + j * dst_nb[1], n), -memory.load_f32(src0, at + j * src0_nb[0]), v)
            vec.store_first(dst, x + i * dst_nb[1], v / memory.load_f32(src0, at + i * src0_nb[0]), n)


def lower_f32(low, a: Tensor) -> Tensor:
    """`a` as f32: itself, or a decoded copy in scratch memory that all users share."""
    if a.type is types.F32:
        return a
    copy, is_new = low.derived(a, "f32", types.F32, a.ne, 4 * a.nelements)
    if is_new:
        unit, row = max(64, a.type.blck_size), convert.row(a.type, types.F32)
        low.emit(make_copy_runs(row, unit, a.type.blck_size, a.type.type_size, 1, 4), copy, src=(a,))
    return copy


@OUT_PROD.lower
def _(low, node):
    a, b = node.src
    low.emit(out_prod_f32, node, src=(lower_f32(low, a), b))


@OUT_PROD.supports
def _(node):
    return convert.row(node.src[0].type, types.F32) is not None


@OUT_PROD.flops
def _(node):
    return 2 * node.nelements * node.src[0].ne[1]


SOLVE_TRI.kernel(lambda node: solve_tri_f32)
SOLVE_TRI.flops(lambda node: node.nelements * node.ne[1])


# --- backward ---------------------------------------------------------------------------------------------------------


@OUT_PROD.backward
def _(node, grad, need):
    a, b = node.src
    da = sum_groups(out_prod(grad, ops.cont(ops.transpose(b))), a) if need[0] else None
    db = ops.cont(ops.transpose(ops.mul_mat(as_contiguous(as_f32(a)), grad))) if need[1] else None
    return da, db


@SOLVE_TRI.backward
def _(node, grad, need):
    """dB = A^-T dX, dA = -dB X^T where A is looked at; A^-1 is solved for."""
    a, _ = node.src
    n, _, n2, n3 = a.ne
    inverse = solve_tri(a, ops.diag(ops.scale_bias(zeros(n, 1, n2, n3), 1.0, 1.0)), True, True, False)
    db = out_prod(grad, inverse)
    return ops.tri(ops.scale(ops.mul_mat(node, db), -1.0), LOWER_DIAG) if need[0] else None, db


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose

    OUT_PROD.case("odd")(lambda t: out_prod(t("F32", 37, 5), t("F32", 7, 5)))
    OUT_PROD.case("repeated")(lambda t: out_prod(t("F32", 16, 3, 1, 2), t("F32", 5, 3, 3, 4)))
    OUT_PROD.case("b transposed")(lambda t: out_prod(t("F32", 9, 4), transpose(t("F32", 4, 5))))
    OUT_PROD.case("permuted")(lambda t: out_prod(permute(t("F32", 9, 2, 4), 0, 2, 1, 3), t("F32", 3, 4, 2)))
    OUT_PROD.case("f16")(lambda t: out_prod(t("F16", 33, 4, 2), t("F32", 6, 4, 2)))
    for kind in ("Q4_0", "Q8_0"):
        OUT_PROD.case(kind)(lambda t, kind=kind: out_prod(t(kind, 64, 5), t("F32", 3, 5, 2)))
    diagonal = np.eye(33, dtype=np.float32)

    def triangle(t, n, *batch):
        noise = t.rng.uniform(-1, 1, (*batch, n, n)).astype(np.float32)
        return t.array(noise + 4 * diagonal[:n, :n])

    SOLVE_TRI.case("33")(lambda t: solve_tri(triangle(t, 33), t("F32", 7, 33), True, True, False))
    SOLVE_TRI.case("batch")(lambda t: solve_tri(triangle(t, 8, 2, 3), t("F32", 21, 8, 3, 2), True, True, False))
    SOLVE_TRI.case("transposed")(
        lambda t: solve_tri(transpose(triangle(t, 9)), transpose(t("F32", 9, 20)), True, True, False)
    )


_cases()
