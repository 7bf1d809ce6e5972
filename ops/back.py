"""The ops that ggml has for gradients: silu_back, rms_norm_back, soft_max_back, rope_back, get_rows_back.

    silu_back      dx = dy s (1 + x (1 - s)),  s = 1 / (1 + e^-x)
    rms_norm_back  dx = r dy - x r^3 mean(x dy),  r = 1 / sqrt(mean(x^2) + eps)
    soft_max_back  dx = scale y (dy - sum(y dy))
    rope_back      dx = dy turned back by the angles of rope
    get_rows_back  dst[:, ids[i]] += a[:, i], in the order of i

Backward rules beside the forward ops build them. Sums are those of norm: 32 partial sums and a fixed tree. Rows with
gaps between elements are gathered to the scratch first. rope_back runs rope's kernel on a table with sin negated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.norm import rms_norm_scale
from ggjit.ops.repeat import add_row
from ggjit.ops.rope import ROPE, _rope, check_sections, lower_turn, turn_reference
from ggjit.tensor import Tensor, new_node, same_shape, view_tensor

activations = lazy_module("ggjit.ops.lib.activations")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
staging = lazy_module("ggjit.ops.lib.staging")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["get_rows_back", "rms_norm_back", "rope_ext_back", "rope_multi_back", "silu_back", "soft_max_ext_back"]

SILU_BACK = Op("silu_back", id=23, inplace=True)
RMS_NORM_BACK = Op("rms_norm_back", id=26, params=(("eps", "f32"),), inplace=True)
GET_ROWS_BACK = Op("get_rows_back", id=41)
SOFT_MAX_BACK = Op("soft_max_back", id=47, params=(("scale", "f32"), ("max_bias", "f32")), inplace=True)
ROPE_BACK = Op("rope_back", id=49, params=ROPE.params, inplace=True, nmse=1e-12)
IDS = 2  # in a kernel's status: source 1 plus one


def _check_pair(where: str, a: Tensor, b: Tensor, kinds: tuple[types.Type, ...] = (types.F32,)) -> None:
    names = f"('{a.name}', '{b.name}')"
    if a.type not in kinds or b.type is not a.type:
        raise TypeError(
            f"{where}: a and b must both be {' or '.join(t.name for t in kinds)}, got {a.type.name} and "
            f"{b.type.name} {names}"
        )
    if not same_shape(a, b):
        raise ValueError(f"{where}: a and b must have one shape, got {list(a.ne)} and {list(b.ne)} {names}")


# --- silu_back --------------------------------------------------------------------------------------------------------


@checked
def silu_back(a: Tensor, b: Tensor) -> Tensor:
    """Gradient of silu: a s (1 + b (1 - s)) with s = 1 / (1 + e^-b).

    Args:
        a: f32 or f16, the gradient of the result; any strides.
        b: the source of silu; type and shape of `a`, any strides.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: types that do not fit.
        ValueError: the shapes differ.

    Source: ggml_silu_back.
    """
    _check_pair("silu_back", a, b, (types.F32, types.F16))
    return new_node(SILU_BACK, a.type, a.ne, (a, b))


@SILU_BACK.reference
def _(node, a, b):
    s = 1 / (1 + np.exp(-b))
    return a * s * (1 + b * (1 - s))


@jitted
def silu_back_lanes(dy, x):
    """Gradient of silu."""
    s = activations.sigmoid(x)
    return dy * s * vec.fma(x, 1.0 - s, 1.0)


@functools.cache
def make_silu_back(type_name: str, is_strided: bool):
    """Kernel for a type; strided sources are gathered to f32 rows in the scratch."""
    gather, size = staging.gather(type_name), types.by_name(type_name).type_size
    source, step = ("F32", 4) if is_strided else (type_name, size)
    load, load_first = vec.loader(source), vec.loader_first(source)
    store, store_first = vec.storer(type_name), vec.storer_first(type_name)

    @jitted
    def row(dst, to, src0, at, src1, by, n):
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, silu_back_lanes(load(src0, at + step * i), load(src1, by + step * i)))
        rest = n % 16
        if rest:
            i = n - rest
            dy, x = load_first(src0, at + step * i, rest), load_first(src1, by + step * i, rest)
            store_first(dst, to + size * i, silu_back_lanes(dy, x), rest)

    @kernel
    def silu_back_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        n = end - begin
        slot = COUNTER_LINE + 8 * dst_ne[0] * ith
        for _ in range(first, last):
            to = rows.offset(dst_nb, i1, i2, i3) + size * begin
            at = rows.offset(src0_nb, i1, i2, i3) + src0_nb[0] * begin
            by = rows.offset(src1_nb, i1, i2, i3) + src1_nb[0] * begin
            if is_strided:
                gather(work, slot, src0, at, src0_nb[0], n)
                gather(work, slot + 4 * n, src1, by, src1_nb[0], n)
                row(dst, to, work, slot, work, slot + 4 * n, n)
            else:
                row(dst, to, src0, at, src1, by, n)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return silu_back_rows


def _is_strided(node):
    return not (node.src[0].is_contiguous_rows and node.src[1].is_contiguous_rows)


def _two_rows(node, nth):
    return 8 * node.ne[0] * nth if _is_strided(node) else 0


SILU_BACK.kernel(lambda node: make_silu_back(node.type.name, _is_strided(node)))
SILU_BACK.work_size(_two_rows)
SILU_BACK.flops(lambda node: 8 * node.nelements)


# --- rms_norm_back and soft_max_back ----------------------------------------------------------------------------------


@checked
def rms_norm_back(a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Gradient of rms_norm: r a - b r^3 mean(a b), r = 1 / sqrt(mean(b^2) + eps), over rows.

    Args:
        a: f32, the gradient of the result; any strides.
        b: f32, the source of rms_norm; the shape of `a`, any strides.
        eps: as in rms_norm, not negative.

    Returns:
        f32, the shape of `a`.

    Raises:
        TypeError: one is not f32.
        ValueError: the shapes differ, or `eps` is negative.

    Source: ggml_rms_norm_back.
    """
    _check_pair("rms_norm_back", a, b)
    if not eps >= 0:
        raise ValueError(f"rms_norm_back: eps must not be negative, got {eps} ('{b.name}')")
    return new_node(RMS_NORM_BACK, a.type, a.ne, (a, b), (eps,))


@RMS_NORM_BACK.reference
def _(node, dy, x):
    if not x.size:
        return x
    square = (x * x).mean(-1, keepdims=True) + node.params.eps
    return (dy - x * (x * dy).mean(-1, keepdims=True) / square) / np.sqrt(square)


@checked
def soft_max_ext_back(a: Tensor, b: Tensor, scale: float, max_bias: float, *, inplace: bool = False) -> Tensor:
    """Gradient of soft_max: scale b (a - sum(a b)), over rows.

    Args:
        a: f32, the gradient of the result; any strides.
        b: f32, the result of soft_max; the shape of `a`, any strides.
        scale: as in soft_max.
        max_bias: 0. (A mask, with ALiBi's slope or without, does not show in this gradient; ggml refuses others too.)
        inplace: put the result where `a` lies; its rows are then contiguous.

    Returns:
        f32, the shape of `a`.

    Raises:
        TypeError: one is not f32.
        ValueError: the shapes differ, or rows of `a` have gaps in place.
        NotImplementedError: max_bias is not 0.

    Source: ggml_soft_max_ext_back.
    """
    _check_pair("soft_max_ext_back", a, b)
    if max_bias != 0:
        raise NotImplementedError(f"soft_max_ext_back: max_bias must be 0, got {max_bias} ('{a.name}')")
    if not inplace:
        return new_node(SOFT_MAX_BACK, a.type, a.ne, (a, b), (scale, max_bias))
    if not a.is_contiguous_rows:
        raise ValueError(f"soft_max_ext_back: rows of a must be contiguous in place, got nb {list(a.nb)} ('{a.name}')")
    return view_tensor(SOFT_MAX_BACK, a, (a, b), (scale, max_bias))


@SOFT_MAX_BACK.reference
def _(node, dy, y):
    return node.params.scale * y * (dy - (y * dy).sum(-1, keepdims=True))


@jitted
def dot_of(src0, at, src1, by, n):
    """Sum of x * y over n contiguous f32, in the order of norm's sums."""
    even, odd = vec.zero(), vec.zero()
    for i in range(0, n - 31, 32):
        even = vec.fma(vec.load(src0, at + 4 * i), vec.load(src1, by + 4 * i), even)
        odd = vec.fma(vec.load(src0, at + 4 * i + 64), vec.load(src1, by + 4 * i + 64), odd)
    rest = n % 32
    if rest:
        i = 4 * (n - rest)
        even = vec.fma(vec.load_first(src0, at + i, rest), vec.load_first(src1, by + i, rest), even)
        tail = rest - 16
        odd = vec.fma(vec.load_first(src0, at + i + 64, tail), vec.load_first(src1, by + i + 64, tail), odd)
    return vec.lane_sum(even + odd)


@jitted
def rms_norm_back_row(dst, to, src0, at, src1, by, n, eps):
    """rms_norm_back of n contiguous f32."""
    r = rms_norm_scale(src1, by, n, eps)
    s = -(r * r * r * (dot_of(src0, at, src1, by, n) / np.float32(n)))
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.fma(vec.load(src1, by + 4 * i), s, vec.load(src0, at + 4 * i) * r))
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        dy, x = vec.load_first(src0, at + i, rest), vec.load_first(src1, by + i, rest)
        vec.store_first(dst, to + i, vec.fma(x, s, dy * r), rest)


@jitted
def soft_max_back_row(dst, to, src0, at, src1, by, n, scale):
    """soft_max_back of n contiguous f32."""
    dot = dot_of(src0, at, src1, by, n)
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, (vec.load(src0, at + 4 * i) - dot) * vec.load(src1, by + 4 * i) * scale)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        dy, y = vec.load_first(src0, at + i, rest), vec.load_first(src1, by + i, rest)
        vec.store_first(dst, to + i, (dy - dot) * y * scale, rest)


@functools.cache
def make_row_back(name: str):
    """Kernel of rms_norm_back or soft_max_back."""
    row = {"rms_norm_back": rms_norm_back_row, "soft_max_back": soft_max_back_row}[name]

    @kernel
    def row_back(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        p, n = memory.f32_from_bits(op_params[0]), dst_ne[0]
        slot = COUNTER_LINE + 8 * n * ith
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            dy, at = staging.packed(src0, rows.offset(src0_nb, i1, i2, i3), src0_nb[0], n, work, slot)
            x, by = staging.packed(src1, rows.offset(src1_nb, i1, i2, i3), src1_nb[0], n, work, slot + 4 * n)
            row(dst, rows.offset(dst_nb, i1, i2, i3), dy, at, x, by, n, p)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return row_back


for _op in (RMS_NORM_BACK, SOFT_MAX_BACK):
    _op.kernel(lambda node: make_row_back(node.op.name))
    _op.work_size(_two_rows)
    _op.flops(lambda node: 8 * node.nelements)


# --- rope_back --------------------------------------------------------------------------------------------------------


@checked
def rope_ext_back(a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
                  freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float, *,
                  offset: int = 0) -> Tensor:  # fmt: skip
    """Gradient of rope_ext: turn pairs back; arguments as for `rope_ext`, `a` the gradient of its result.

    Source: ggml_rope_ext_back.
    """
    values = (n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _rope("rope_ext_back", a, b, c, n_dims, (0, 0, 0, 0), mode, values, offset, False, ROPE_BACK)


@checked
def rope_multi_back(a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, sections: Sequence[int], mode: int,
                    n_ctx_orig: int, freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float,
                    beta_fast: float, beta_slow: float, *, offset: int = 0) -> Tensor:  # fmt: skip
    """Gradient of rope_multi: turn pairs back; arguments as for `rope_multi`, `a` the gradient of its result.

    Source: ggml_rope_multi_back.
    """
    given = check_sections("rope_multi_back", sections, mode)
    values = (n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _rope("rope_multi_back", a, b, c, n_dims, given, mode, values, offset, False, ROPE_BACK)


@ROPE_BACK.reference
def _(node, a, b, c=None):
    return turn_reference(node.params, a, b, c, -1.0)


ROPE_BACK.supports(lambda node: True)
ROPE_BACK.lower(lambda low, node: lower_turn(low, node, True))
ROPE_BACK.flops(lambda node: 3 * node.nelements)


# --- get_rows_back ----------------------------------------------------------------------------------------------------


@checked
def get_rows_back(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Add rows at the places that get_rows took them from: the gradient of its first source.

    Args:
        a: f32 or f16 [ne0, n, b1, b2], the gradient of the result; any strides.
        b: i32 [n, b1, b2], the numbers, below c.ne[1].
        c: gives the shape [ne0, n_rows, b1, b2]; its type and values do not matter.

    Returns:
        f32 [ne of c]; rows of equal numbers are added in order.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes that do not fit.
        IndexError: when computed, a number is out of range.

    Source: ggml_get_rows_back (which takes matrices only).
    """
    names = f"('{a.name}', '{b.name}', '{c.name}')"
    if a.type not in (types.F32, types.F16) or b.type is not types.I32:
        raise TypeError(f"get_rows_back: a must be F32 or F16 and b I32, got {a.type.name} and {b.type.name} {names}")
    if a.ne != (c.ne[0], *b.ne[:3]) or c.ne[2:] != a.ne[2:] or b.ne[3] != 1:
        raise ValueError(
            f"get_rows_back: a must be [ne0, n, b1, b2], b [n, b1, b2] and c [ne0, n_rows, b1, b2], got {list(a.ne)}, "
            f"{list(b.ne)} and {list(c.ne)} {names}"
        )
    return new_node(GET_ROWS_BACK, types.F32, c.ne, (a, b))


@GET_ROWS_BACK.reference
def _(node, a, b):
    out = np.zeros(node.ne[::-1])
    for i3, i2, i1 in np.ndindex(*a.shape[:3]):
        out[i3, i2, b[0, i3, i2, i1]] += a[i3, i2, i1]
    return out


@functools.cache
def make_get_rows_back(type_name: str):
    """Kernel for gradients of a type; each thread adds its columns of all rows."""
    gather, size, is_plain = staging.gather(type_name), types.by_name(type_name).type_size, type_name == "F32"

    @kernel(streams=is_plain)
    def get_rows_back(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        begin, end = rows.part(dst_ne[0], np.int64(16), ith, nth)
        n, slot = end - begin, COUNTER_LINE + 4 * dst_ne[0] * ith
        if n == 0:
            return 0
        for i3 in range(dst_ne[3]):
            for i2 in range(dst_ne[2]):
                for i1 in range(dst_ne[1]):
                    to = rows.offset(dst_nb, i1, i2, i3) + 4 * begin
                    for i in range(0, n, 16):
                        vec.store_first(dst, to + 4 * i, vec.zero(), n - i)
                for i1 in range(src1_ne[0]):
                    id = np.int64(memory.load_i32(src1, i1 * src1_nb[0] + i2 * src1_nb[1] + i3 * src1_nb[2]))
                    if id < 0 or id >= dst_ne[1]:
                        return (i1 + src1_ne[0] * (i2 + src1_ne[1] * i3)) << 4 | IDS
                    to = rows.offset(dst_nb, id, i2, i3) + 4 * begin
                    at = rows.offset(src0_nb, i1, i2, i3) + src0_nb[0] * begin
                    if is_plain and src0_nb[0] == size:
                        add_row(dst, to, src0, at, n)
                    else:
                        gather(work, slot, src0, at, src0_nb[0], n)
                        add_row(dst, to, work, slot, n)
        return 0

    return get_rows_back


@GET_ROWS_BACK.kernel
def _(node):
    return make_get_rows_back(node.src[0].type.name)


@GET_ROWS_BACK.work_size
def _(node, nth):
    return 4 * node.ne[0] * nth


@GET_ROWS_BACK.flops
def _(node):
    return node.src[0].nelements


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    pairs = {
        SILU_BACK: silu_back,
        RMS_NORM_BACK: lambda a, b: rms_norm_back(a, b, 1e-5),
        SOFT_MAX_BACK: lambda a, b: soft_max_ext_back(a, b, 0.4, 0.0),
    }
    for op, build in pairs.items():
        for n in (1, 16, 31, 65, 577):
            op.case(f"rows of {n}")(lambda t, f=build, n=n: f(t("F32", n, 3), t("F32", n, 3)))
        op.case("padded and permuted")(
            lambda t, f=build: f(view_2d(t("F32", 50, 6), 34, 6, 200, 8), permute(t("F32", 34, 1, 6), 0, 2, 1, 3))
        )
        op.case("transposed")(lambda t, f=build: f(transpose(t("F32", 6, 34)), t("F32", 34, 6)))
        op.case("both transposed")(lambda t, f=build: f(transpose(t("F32", 6, 34)), transpose(t("F32", 6, 34))))
    SILU_BACK.case("f16")(lambda t: silu_back(t("F16", 37, 3, low=-4, high=4), t("F16", 37, 3, low=-4, high=4)))
    SILU_BACK.case("f16 transposed")(lambda t: silu_back(transpose(t("F16", 5, 37)), t("F16", 37, 5)))
    SOFT_MAX_BACK.case("in place")(
        lambda t: soft_max_ext_back(t("F32", 33, 4), t("F32", 33, 4, low=0), 1.0, 0.0, inplace=True)
    )

    def turn(t, kind, mode, n_dims, factors=False, sections=None, **more):
        a = permute(t(kind, 64, 5, 3), 0, 2, 1, 3)
        b = t.ints("I32", 5 * (4 if sections else 1), high=4000)
        c = t("F32", 32, low=0.5, high=4.0) if factors else None
        values = (512, 10000.0, 0.25, 1.0, 1.1, 32.0, 1.0)
        if sections:
            return rope_multi_back(a, b, c, n_dims, sections, mode, *values, **more)
        return rope_ext_back(a, b, c, n_dims, mode, *values, **more)

    ROPE_BACK.case("normal")(lambda t: turn(t, "F32", 0, 64, factors=True))
    ROPE_BACK.case("neox, part")(lambda t: turn(t, "F32", 2, 40, offset=8))
    ROPE_BACK.case("f16")(lambda t: turn(t, "F16", 2, 64))
    ROPE_BACK.case("mrope")(lambda t: turn(t, "F32", 8, 64, sections=(16, 8, 6, 2)))
    ROPE_BACK.case("vision")(lambda t: turn(t, "F32", 24, 32, factors=True, sections=(16, 16, 0, 0)))

    GET_ROWS_BACK.case("equal numbers")(
        lambda t: get_rows_back(t("F32", 37, 9), t.ints("I32", 9, high=4), t("F32", 37, 4))
    )
    GET_ROWS_BACK.case("f16")(lambda t: get_rows_back(t("F16", 65, 3), t.ints("I32", 3, high=6), t("F16", 65, 6)))
    GET_ROWS_BACK.case("transposed")(
        lambda t: get_rows_back(transpose(t("F32", 5, 33)), t.ints("I32", 5, high=6), t("F32", 33, 6))
    )
    GET_ROWS_BACK.case("batches, spaced numbers")(
        lambda t: get_rows_back(
            t("F32", 20, 4, 3), view_2d(t.ints("I32", 6, 3, high=5), 4, 3, 24, 8), t("F32", 20, 5, 3)
        )
    )


_cases()
