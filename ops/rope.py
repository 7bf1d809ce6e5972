"""rope: rotary position embedding, in all modes of ggml.

Pair k of a head is turned by the angle theta of its token's position, with YaRN's mixing of scaled and unscaled angles:

    theta_k = position * freq_base^(-2 k / n_dims) / factor_k
    y0, y1  = x0 cos - x1 sin, x0 sin + x1 cos

| mode | pairs | position |
|---|---|---|
| NORMAL 0 | neighbours 2 k, 2 k + 1 | one per token |
| NEOX 2 | k, k + n_dims / 2 | one per token |
| MROPE 8 | as NEOX | of four per token, by sections of pairs |
| VISION 24 | k, k + n_dims: all of the row | of four, each section counts its pairs from 0 |
| IMROPE 40 | as NEOX | of three, in turn |

A ladder: sin and cos for each head; once per token; then one table that all nodes of a graph with the same positions
and parameters share, in which cos and sin are computed 16 at a time (5 times as fast as one at a time). What is left is
to load, multiply and store. Angles are float64 until whole turns are taken off, so that they are right at any
position (ggml's float32 chain is off by 0.01 at position 100000).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import refuse
from ggjit.fusion import Fused
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.rows import SET_ROWS
from ggjit.ops.views import permute
from ggjit.tensor import Tensor, new_node, view_tensor

angles = lazy_module("ggjit.ops.lib.angles")
convert = lazy_module("ggjit.ops.lib.convert")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
sine = lazy_module("ggjit.ops.lib.sine")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["rope", "rope_ext", "rope_multi"]

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
MODES = (NORMAL, NEOX, MROPE, VISION, IMROPE)
MULTI = (MROPE, VISION, IMROPE)
PAIRS = 64  # whose cos and sin are computed together
IDS = 3  # in a kernel's status: source 2 plus one
ROPE = Op(
    "rope", id=48, inplace=True, nmse=1e-12,
    params=(
        ("_n_past", "i32"), ("n_dims", "i32"), ("mode", "i32"), ("_n_ctx", "i32"), ("n_ctx_orig", "i32"),
        ("freq_base", "f32"), ("freq_scale", "f32"), ("ext_factor", "f32"), ("attn_factor", "f32"),
        ("beta_fast", "f32"), ("beta_slow", "f32"), ("section0", "i32"), ("section1", "i32"), ("section2", "i32"),
        ("section3", "i32"), ("offset", "i32"),
    ),
)  # fmt: skip


@checked
def rope(a: Tensor, b: Tensor, n_dims: int, mode: int, *, offset: int = 0, inplace: bool = False) -> Tensor:
    """Turn pairs of a head's elements by angles that grow with the position, base 10000; see `rope_ext`.

    Source: ggml_rope.
    """
    return rope_ext(a, b, None, n_dims, mode, 0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0, offset=offset, inplace=inplace)


@checked
def rope_ext(a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
             freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float, *,
             offset: int = 0, inplace: bool = False) -> Tensor:  # fmt: skip
    """Rotary position embedding with frequency factors and YaRN.

    theta = position * freq_base^(-2 k / n_dims) / c[k];  scaled = freq_scale * theta
    angle = scaled (1 - mix) + theta mix,  mix = ext_factor * ramp(k) between the pairs of beta_fast and beta_slow
    y0, y1 = attn_factor * (x0 cos - x1 sin, x0 sin + x1 cos)

    Args:
        a: f32 or f16 [ne0, n_head, n_tokens, ne3], rows contiguous.
        b: i32 [n_tokens], the positions.
        c: None, or f32 [>= n_dims / 2], divisors of the angles.
        n_dims: elements of a row that are turned, even; the others are copied.
        mode: 0 (NORMAL) pairs neighbours, 2 (NEOX) the first half with the second.
        n_ctx_orig: context length of the training, for YaRN.
        freq_base: base of the angles.
        freq_scale: of the angles, 1 / the factor by which the context was stretched.
        ext_factor: YaRN's share, 0 for none.
        attn_factor: of the result.
        beta_fast: turns in n_ctx_orig at which YaRN's ramp begins.
        beta_slow: and at which it ends.
        offset: first element that is turned.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes, layouts or parameters that do not fit.

    Source: Su et al., RoFormer (2021); Peng et al., YaRN (2023); ggml_rope_ext, ggml_rope_set_offset.
    """
    values = (n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _rope("rope_ext", a, b, c, n_dims, (0, 0, 0, 0), mode, values, offset, inplace)


@checked
def rope_multi(a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, sections: Sequence[int], mode: int, n_ctx_orig: int,
               freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float,
               beta_slow: float, *, offset: int = 0, inplace: bool = False) -> Tensor:  # fmt: skip
    """Rotary embedding of several positions a token (time, height, width, extra), each for a section of pairs.

    Args:
        a: f32 or f16 [ne0, n_head, n_tokens, ne3], rows contiguous.
        b: i32 [4 * n_tokens]: all first positions, all second ones, ...
        c: None, or f32 [>= n_dims / 2] (n_dims in mode 24), divisors of the angles.
        n_dims: elements that are turned; in mode 24 half of ne0, and all of the row is turned.
        sections: 4 numbers of pairs.
        mode: 8 (MROPE), 24 (VISION) or 40 (IMROPE).
        n_ctx_orig: this and all that follow as in `rope_ext`.
        freq_base: base of the angles.
        freq_scale: of the angles.
        ext_factor: YaRN's share.
        attn_factor: of the result.
        beta_fast: where YaRN's ramp begins.
        beta_slow: and where it ends.
        offset: first element that is turned.
        inplace: put the result where `a` lies.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: types that do not fit.
        ValueError: shapes, layouts or parameters that do not fit.

    Source: Wang et al., Qwen2-VL (2024); ggml_rope_multi.
    """
    given = check_sections("rope_multi", sections, mode)
    values = (n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)
    return _rope("rope_multi", a, b, c, n_dims, given, mode, values, offset, inplace)


def check_sections(where: str, sections: Sequence[int], mode: int) -> tuple[int, ...]:
    """Check and return the sections of a mode with several positions a token."""
    given = tuple(int(s) for s in sections)
    if mode not in MULTI or len(given) != 4 or min(given) < 0 or max(given[:3]) == 0:
        raise ValueError(
            f"{where}: mode must be one of {list(MULTI)} and sections 4 numbers, one of the first 3 positive, "
            f"got {mode} and {list(given)}"
        )
    return given


def _rope(where, a, b, c, n_dims, sections, mode, values, offset, inplace, op=ROPE):
    is_multi = where.startswith("rope_multi")
    if mode not in MODES or (mode in MULTI) != is_multi:
        raise ValueError(f"{where}: mode must be {'one of ' + str(list(MULTI)) if is_multi else '0 or 2'}, got {mode}")
    if a.type not in (types.F32, types.F16):
        raise TypeError(f"{where}: a must be F32 or F16, got {a.type.name} ('{a.name}')")
    if not a.is_contiguous_rows:
        raise ValueError(f"{where}: rows of a must be contiguous, got nb {list(a.nb)} ('{a.name}')")
    _check_dims(where, a, n_dims, mode, offset)
    n_positions = a.ne[2] * (4 if mode in MULTI else 1)
    if b.type is not types.I32 or b.ne != (n_positions, 1, 1, 1) or not b.is_contiguous:
        raise ValueError(
            f"{where}: b must be contiguous i32 [{n_positions}], got {b.type.name}{list(b.ne)} ('{a.name}', '{b.name}')"
        )
    n_pairs = n_dims if mode == VISION else n_dims // 2
    if c is not None and (c.type is not types.F32 or c.ne[0] < n_pairs or not c.is_contiguous):
        raise ValueError(
            f"{where}: c must be contiguous f32 of at least {n_pairs} factors, "
            f"got {c.type.name}{list(c.ne)} ('{c.name}')"
        )
    src = (a, b) if c is None else (a, b, c)
    params = (n_dims, mode, *values, *sections, offset)
    return view_tensor(op, a, src, params) if inplace else new_node(op, a.type, a.ne, src, params)


def _check_dims(where: str, a: Tensor, n_dims: int, mode: int, offset: int) -> None:
    if mode == VISION:
        if 2 * n_dims != a.ne[0] or offset:
            raise ValueError(
                f"{where}: mode 24 needs n_dims = ne[0] / 2 and no offset, got {n_dims} of {a.ne[0]}, offset {offset}"
            )
    elif n_dims <= 0 or n_dims % 2 or offset < 0 or offset + n_dims > a.ne[0]:
        raise ValueError(
            f"{where}: n_dims must be even and fit ne[0] {a.ne[0]} after offset {offset}, got {n_dims} ('{a.name}')"
        )


# ---- reference ------------------------------------------------------------------------------------------------------


def _positions(p, b, n_pairs):
    """Position and exponent of each pair: float64 [n_tokens, n_pairs], int64 [n_pairs]."""
    k = np.arange(n_pairs)
    if p.mode not in MULTI:
        return np.repeat(b[:, None], n_pairs, 1).astype(np.float64), k
    s = np.array([p.section0, p.section1, p.section2, p.section3])
    start = np.cumsum(s) - s
    sector = k % s.sum()
    if p.mode == IMROPE:
        which = np.select([(sector % 3 == i) & (sector < 3 * s[i]) for i in (1, 2, 0)], [1, 2, 0], 3)
    else:
        which = np.searchsorted(np.cumsum(s)[:3], sector, side="right")
    exponent = sector - start[which] if p.mode == VISION else k
    return b.reshape(4, -1)[which].T.astype(np.float64), exponent


def _reference_angles(p, b, c, n_pairs):
    """Angles [n_tokens, n_pairs] and the factor of sin and cos."""
    position, exponent = _positions(p, b, n_pairs)
    theta = position * np.float64(p.freq_base) ** (-2.0 / p.n_dims * exponent)
    if c is not None:
        theta = theta / c[:n_pairs]
    if not p.ext_factor:
        return theta * p.freq_scale, p.attn_factor
    low, high = (
        p.n_dims * np.log(p.n_ctx_orig / (turns * 2 * np.pi)) / (2 * np.log(p.freq_base))
        for turns in (p.beta_fast, p.beta_slow)
    )
    low, high = max(0.0, np.floor(low)), min(p.n_dims - 1.0, np.ceil(high))
    mix = (1 - np.clip((np.arange(n_pairs) - low) / max(0.001, high - low), 0, 1)) * p.ext_factor
    return theta * p.freq_scale * (1 - mix) + theta * mix, p.attn_factor * (1 + 0.1 * np.log(1 / p.freq_scale))


def turn_reference(p, a, b, c, sign=1.0):
    """The rows of `a` turned by the angles of their tokens (or back: sign -1), float64."""
    n_pairs = p.n_dims if p.mode == VISION else p.n_dims // 2
    theta, factor = _reference_angles(p, b.reshape(-1), None if c is None else c.reshape(-1), n_pairs)
    cos, sin = np.cos(theta)[:, None, :] * factor, np.sin(theta)[:, None, :] * factor * sign
    first = p.offset + (2 * np.arange(n_pairs) if p.mode == NORMAL else np.arange(n_pairs))
    second = first + (1 if p.mode == NORMAL else n_pairs)
    y = np.array(a)
    y[..., first], y[..., second] = (
        a[..., first] * cos - a[..., second] * sin,
        a[..., first] * sin + a[..., second] * cos,
    )
    return y


@ROPE.reference
def _(node, a, b, c=None):
    return turn_reference(node.params, a, b, c)


# ---- the table of sin and cos ---------------------------------------------------------------------------------------


@jitted
def position_of(op_params, k, token, n_tokens):
    """Index of the position of pair k in b, and the exponent of its frequency."""
    mode, s0, s1, s2 = op_params[2], op_params[11], op_params[12], op_params[13]
    if mode < MROPE:
        return token, k
    sector = k % (s0 + s1 + s2 + op_params[14])
    if mode == IMROPE:
        turn, which = sector % 3, 3
        if turn == 1 and sector < 3 * s1:
            which = 1
        elif turn == 2 and sector < 3 * s2:
            which = 2
        elif turn == 0 and sector < 3 * s0:
            which = 0
        return which * n_tokens + token, k
    which, start = 0, 0
    if sector >= s0 + s1 + s2:
        which, start = 3, s0 + s1 + s2
    elif sector >= s0 + s1:
        which, start = 2, s0 + s1
    elif sector >= s0:
        which, start = 1, s0
    return which * n_tokens + token, sector - start if mode == VISION else k


@jitted
def ramp_of(op_params, beta, freq_base):
    """The pair whose angle makes `beta` turns in the context of the training."""
    n_dims, n_ctx_orig = op_params[1], np.float64(op_params[4])
    return n_dims * angles.log(n_ctx_orig / (beta * 6.283185307179586)) / (2.0 * angles.log(freq_base))


@jitted
def ramp(op_params, freq_base):
    """First and last pair of YaRN's ramp."""
    low = ramp_of(op_params, np.float64(memory.f32_from_bits(op_params[9])), freq_base)
    high = ramp_of(op_params, np.float64(memory.f32_from_bits(op_params[10])), freq_base)
    first = np.int64(low) if low > 0 else 0  # floor, at least 0
    last = np.int64(high) if high > 0 else 0
    if last < high:
        last += 1
    n_dims = op_params[1]
    return np.float64(first), np.float64(last if last < n_dims - 1 else n_dims - 1)


@jitted
def store_turns(dst, to, width, begin, n, turns, factor, back, is_paired):
    """Cos and sin of n angles, those of pairs from `begin` on, to their places in a token's row of the table."""
    signs = vec.select((vec.lanes() & 1) == 0, np.float32(-1), vec.splat(np.float32(1)))
    for i in range(0, n, 16):
        x, rest = vec.load_first(turns, 4 * i, n - i), n - i
        c, s = sine.cos(x) * factor, sine.sin(x) * (factor * back)
        if is_paired:
            at = to + 8 * (begin + i)
            vec.store_first(dst, at, angles.twice_low(c), 2 * rest)
            vec.store_first(dst, at + 64, angles.twice_high(c), 2 * rest - 16)
            vec.store_first(dst, at + 4 * width, angles.twice_low(s) * signs, 2 * rest)
            vec.store_first(dst, at + 4 * width + 64, angles.twice_high(s) * signs, 2 * rest - 16)
        else:
            vec.store_first(dst, to + 4 * (begin + i), c, rest)
            vec.store_first(dst, to + 4 * (width + begin + i), s, rest)


@kernel
def rope_table(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """Cos and sin for each token (row) from positions src0 and factors src1.

    In mode NORMAL a row is cos of each element, then sin with the sign it takes; else cos of each pair, then sin. The
    first word of op_params negates sin: the turn back.
    """
    n_dims, mode = op_params[1], op_params[2]
    width, n_tokens = dst_ne[0] // 2, dst_ne[1]
    n_pairs = n_dims if mode == VISION else n_dims // 2
    freq_base = np.float64(memory.f32_from_bits(op_params[5]))
    freq_scale = np.float64(memory.f32_from_bits(op_params[6]))
    ext_factor = np.float64(memory.f32_from_bits(op_params[7]))
    factor = np.float64(memory.f32_from_bits(op_params[8]))
    step = angles.power(freq_base, -2.0 / n_dims)
    low, high = 0.0, 0.0
    if ext_factor != 0.0:
        low, high = ramp(op_params, freq_base)
        factor *= 1.0 + 0.1 * angles.log(1.0 / freq_scale)
    turns, factor32 = memory.local_1k(), np.float32(factor)
    back = np.float32(1) if op_params[0] == 0 else np.float32(-1)
    for token in range(n_tokens * ith // nth, n_tokens * (ith + 1) // nth):
        frequency, last = 1.0, 0
        for k in range(n_pairs):
            index, exponent = position_of(op_params, k, token, n_tokens)
            if exponent == 0:
                frequency = 1.0
            elif exponent == last + 1:
                frequency *= step
            last = exponent
            theta = memory.load_i32(src0, 4 * index) * frequency
            if src1_ne[0] > 0:
                theta /= np.float64(memory.load_f32(src1, 4 * k))
            angle = theta * freq_scale
            if ext_factor != 0.0:
                span = high - low if high - low > 0.001 else 0.001
                y = (k - low) / span
                y = 0.0 if y < 0.0 else 1.0 if y > 1.0 else y
                mix = (1.0 - y) * ext_factor
                angle = angle * (1.0 - mix) + theta * mix
            memory.store_f32(turns, 4 * (k % PAIRS), angles.within_a_turn(angle))
            if k % PAIRS == PAIRS - 1 or k == n_pairs - 1:
                begin = k // PAIRS * PAIRS
                store_turns(dst, token * dst_nb[1], width, begin, k + 1 - begin, turns, factor32, back, mode == NORMAL)


# ---- turning --------------------------------------------------------------------------------------------------------


@functools.cache
def rope_row(kind, neighbours):
    """Jitted (dst, to, src, at, n, table, cos, sin, op_params): one row of a type."""
    size = types.by_name(kind).type_size
    load, store = vec.loader(kind), vec.storer(kind)
    load_first, store_first = vec.loader_first(kind), vec.storer_first(kind)

    @jitted
    def copy(dst, to, src, at, n):
        for i in range(0, n, 16):
            store_first(dst, to + size * i, load_first(src, at + size * i, n - i), n - i)

    @jitted
    def turn_neighbours(dst, to, src, at, table, cos, sin, n):
        """n elements with their own cos and sin."""
        for i in range(0, n - 15, 16):
            x = load(src, at + size * i)
            turned = angles.swap_pairs(x) * vec.load(table, sin + 4 * i)
            store(dst, to + size * i, vec.fma(x, vec.load(table, cos + 4 * i), turned))
        rest = n % 16
        if rest:
            i = n - rest
            x = load_first(src, at + size * i, rest)
            turned = angles.swap_pairs(x) * vec.load_first(table, sin + 4 * i, rest)
            store_first(dst, to + size * i, vec.fma(x, vec.load_first(table, cos + 4 * i, rest), turned), rest)

    @jitted
    def turn_halves(dst, to, src, at, table, cos, sin, n):
        """n pairs, n elements apart."""
        for i in range(0, n - 15, 16):
            x, y = load(src, at + size * i), load(src, at + size * (n + i))
            c, s = vec.load(table, cos + 4 * i), vec.load(table, sin + 4 * i)
            store(dst, to + size * i, vec.fma(x, c, -(y * s)))
            store(dst, to + size * (n + i), vec.fma(y, c, x * s))
        rest = n % 16
        if rest:
            i = n - rest
            x, y = load_first(src, at + size * i, rest), load_first(src, at + size * (n + i), rest)
            c, s = vec.load_first(table, cos + 4 * i, rest), vec.load_first(table, sin + 4 * i, rest)
            store_first(dst, to + size * i, vec.fma(x, c, -(y * s)), rest)
            store_first(dst, to + size * (n + i), vec.fma(y, c, x * s), rest)

    turn = turn_neighbours if neighbours else turn_halves

    @jitted
    def row(dst, to, src, at, n, table, cos, sin, op_params):
        """A row of n elements; cos and sin are where its token's lie in the table."""
        n_dims, offset = op_params[1] * (2 if op_params[2] == VISION else 1), op_params[15]
        if offset > 0:
            copy(dst, to, src, at, offset)
        n_turns = n_dims if neighbours else n_dims // 2
        turn(dst, to + size * offset, src, at + size * offset, table, cos, sin, n_turns)
        end = offset + n_dims
        if end < n:
            copy(dst, to + size * end, src, at + size * end, n - end)

    return row


@functools.cache
def make_rope(kind, neighbours):
    """Kernel (a, table) for rows of a type, with pairs of neighbours or of halves."""
    row = rope_row(kind, neighbours)

    @kernel(streams=kind == "F32")
    def rope(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        first, last = rows.whole(dst_ne, ith, nth)
        i1, i2, i3 = rows.position(dst_ne, first)
        for _ in range(first, last):
            to, at = rows.offset(dst_nb, i1, i2, i3), rows.offset(src0_nb, i1, i2, i3)
            cos = i2 * src1_nb[1]
            row(dst, to, src0, at, dst_ne[0], src1, cos, cos + 2 * src1_ne[0], op_params)
            i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

    return rope


def table_of(low, node, is_back=False):
    """The table of a node; emits the step that fills it, unless an earlier node has the same; back: sin is negated."""
    a, b = node.src[:2]
    c = node.src[2] if len(node.src) > 2 else None
    p = node.params
    width = p.n_dims if p.mode in (NORMAL, VISION) else p.n_dims // 2
    params = struct.pack("<i", is_back) + node.op_params[4:]
    # All parameters but the last, the offset, which the table has not.
    kind = f"rope {params[:60].hex()} {0 if c is None else c.address}"
    ne = (2 * width, a.ne[2], 1, 1)
    table, is_new = low.derived(b, kind, types.F32, ne, 4 * ne[0] * ne[1])
    if is_new:
        low.emit(rope_table, table, src=(b, c), params=params)
    return table


def lower_turn(low, node, is_back=False):
    """Emit the table and the turn."""
    a, table = node.src[0], table_of(low, node, is_back)
    low.emit(make_rope(a.type.name, node.params.mode == NORMAL), node, src=(a, table))


ROPE.supports(lambda node: True)
ROPE.lower(lower_turn)


@ROPE.flops
def _(node):
    return 3 * node.nelements


# ---- cases ----------------------------------------------------------------------------------------------------------


def _case(
    name, *ne, n_dims, mode, kind="F32", factors=False, high=4000, permuted=False, sections=None, yarn=False, **options
):
    @ROPE.case(name)
    def _(t):
        a = t(kind, *ne)
        if permuted:
            a = permute(a, 0, 2, 1, 3)
        b = t.ints("I32", a.ne[2] * (4 if sections else 1), high=high)
        c = t("F32", n_dims if mode == VISION else n_dims // 2, low=0.5, high=4.0) if factors else None
        values = (512, 10000.0, 0.25, 1.0, 1.1, 32.0, 1.0) if yarn else (0, 500000.0, 1.0, 0.0, 0.8, 0.0, 0.0)
        if sections:
            return rope_multi(a, b, c, n_dims, sections, mode, *values, **options)
        return rope_ext(a, b, c, n_dims, mode, *values, **options)


_case("normal", 64, 3, 5, 2, n_dims=64, mode=NORMAL)
_case("normal, part, yarn", 50, 3, 4, n_dims=22, mode=NORMAL, yarn=True, factors=True, offset=4)
_case("normal, large positions", 32, 2, 6, n_dims=32, mode=NORMAL, high=1 << 20)
_case("neox", 64, 4, 3, n_dims=64, mode=NEOX, inplace=True)
_case("neox, permuted, part", 80, 5, 3, n_dims=40, mode=NEOX, permuted=True, yarn=True)
_case("neox f16, factors", 96, 2, 3, n_dims=96, mode=NEOX, kind="F16", factors=True)
_case("normal f16", 32, 2, 3, n_dims=24, mode=NORMAL, kind="F16")
_case("mrope", 64, 2, 4, n_dims=64, mode=MROPE, sections=(16, 8, 6, 2))
_case("vision", 48, 2, 4, n_dims=24, mode=VISION, sections=(12, 12, 0, 0), factors=True, yarn=True)
_case("imrope", 64, 2, 4, n_dims=60, mode=IMROPE, sections=(11, 11, 8, 0), yarn=True)


# ---- fusion with the store to a KV cache -----------------------------------------------------------------------------


@functools.cache
def make_rope_set_rows(neighbours, target, ids):
    """Kernel (a, table, ids): turned rows of f32 heads to the rows of a cache, all heads of a token to one row.

    Threads share the heads, so that of two tokens with the same id the later one stays.
    """
    row, write = rope_row("F32", neighbours), convert.row(types.F32, target)
    load, blck, size = memory.load_i64 if ids == "I64" else memory.load_i32, target.blck_size, target.type_size

    @kernel
    def rope_set_rows(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, op_params, work,
        ith, nth,
    ):  # fmt: skip
        n, x = src0_ne[0], COUNTER_LINE + 4 * src0_ne[0] * ith
        for i2 in range(src0_ne[2]):
            id = np.int64(load(src2, i2 * src2_nb[0]))
            if id < 0 or id >= dst_ne[1]:
                return i2 << 4 | IDS
            cos = i2 * src1_nb[1]
            for i1 in range(src0_ne[1] * ith // nth, src0_ne[1] * (ith + 1) // nth):
                at = i1 * src0_nb[1] + i2 * src0_nb[2]
                row(work, x, src0, at, n, src1, cos, cos + 2 * src1_ne[0], op_params)
                write(dst, id * dst_nb[1] + i1 * n // blck * size, work, x, n, work, np.int64(0))
        return 0

    return rope_set_rows


@ROPE.fusion
def _(match, node):
    """rope, a view that joins the heads of a token, set_rows."""
    view = match.reader(node) if node.type is types.F32 and node.view_src is None else None
    store = match.reader(view) if view is not None and view.op.view else None
    if store is None or store.op is not SET_ROWS or store.src[0] is not view:
        return None
    n, n_head, n_tokens, ne3 = node.ne
    joins = view.ne == (n * n_head, n_tokens, 1, 1) and view.nb[:2] == node.nb[:3:2] and view.view_offs == 0
    if not joins or ne3 != 1 or n % store.type.blck_size or convert.row(types.F32, store.type) is None:
        return None
    a, ids = node.src[0], store.src[1]

    def emit(low):
        table, made = table_of(low, node), make_rope_set_rows(node.params.mode == NORMAL, store.type, ids.type.name)
        low.emit(made, store, src=(a, table, ids), params=bytes(node.op_params), work=4 * n * low.n_threads)

    return Fused((node, view, store), (*(s for s in node.src if s is not None), ids), (), emit)


def _fused_case(name, mode, n, ids, kind="F16", view=None):
    @ROPE.fused_case(name)
    def _(t):
        k = rope_ext(t("F32", n, 3, len(ids)), t.ints("I32", len(ids), high=99), None, n, mode, 0, 1e4, 1, 0, 1, 0, 0)
        joined = ops.reshape_2d(k, 3 * n, len(ids)) if view is None else ops.view_2d(k, 3 * n, len(ids), k.nb[2], 0)
        return ops.set_rows(t(kind, 3 * n, 8), joined, t.array(np.asarray(ids)))


_fused_case("to an f16 cache", NORMAL, 64, np.array([3, 0, 5]))
_fused_case("to an f32 cache, the same row twice", NEOX, 20, np.array([2, 7, 2, 1], np.int32), "F32", "view")
_fused_case("to a quantized cache", NEOX, 64, np.array([7, 6]), "Q8_0")


# ---- gradient -------------------------------------------------------------------------------------------------------


@ROPE.backward
def _(node, grad, need):
    b, p = node.src[1], node.params
    c = node.src[2] if len(node.src) > 2 else None
    if c is not None and need[2]:
        refuse(node, "the frequency factors have no gradient")
    values = (p.n_ctx_orig, p.freq_base, p.freq_scale, p.ext_factor, p.attn_factor, p.beta_fast, p.beta_slow)
    if p.mode in MULTI:
        sections = (p.section0, p.section1, p.section2, p.section3)
        made = ops.rope_multi_back(grad, b, c, p.n_dims, sections, p.mode, *values, offset=p.offset)
    else:
        made = ops.rope_ext_back(grad, b, c, p.n_dims, p.mode, *values, offset=p.offset)
    return made, *[None] * (len(node.src) - 1)
