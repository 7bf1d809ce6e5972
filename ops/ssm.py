"""ssm_conv and ssm_scan: the causal convolution and the selective scan of Mamba.

    ssm_conv   dst[i, t, s] = sum over j of sx[t + j, i, s] c[j, i]
    ssm_scan   d = softplus(dt),  h = exp(d A) h' + (d x) B^T,  y = h C      for each head, token after token

A state h has d_state x head_dim values. Row by row of d_state they do not depend on each other: a row is a unit of
work and walks through the tokens of its sequence. ssm_conv makes 16 channels at once.

Source: Gu and Dao, Mamba (2023); Dao and Gu, Transformers are SSMs (2024): A has one value a head in Mamba 2.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, unbroadcast
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.conv import depthwise_gradients
from ggjit.ops.lib.checks import require, require_contiguous, require_type
from ggjit.ops.recurrence_back import recurrence_back
from ggjit.tensor import Tensor, new_node

activations = lazy_module("ggjit.ops.lib.activations")
memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
state_rows = lazy_module("ggjit.ops.lib.state_rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["ssm_conv", "ssm_scan"]

SSM_CONV = Op("ssm_conv", id=76)
SSM_SCAN = Op("ssm_scan", id=77, params=(("n_slots", "i32"),), nmse=2e-7)
IDS = 7  # in a kernel's status: source 6 plus one


# --- builders ---------------------------------------------------------------------------------------------------------


@checked
def ssm_conv(sx: Tensor, c: Tensor) -> Tensor:
    """Causal depthwise convolution along time.

    Args:
        sx: f32 [d_conv - 1 + n_tokens, d_inner, n_seqs], rows packed: the last inputs and the new ones.
        c: f32 [d_conv, d_inner], any strides.

    Returns:
        f32 [d_inner, n_tokens, n_seqs].

    Raises:
        ValueError: sizes do not fit, or rows of `sx` have gaps.
        TypeError: a source is not f32.

    Source: ggml_ssm_conv.
    """
    require_type("ssm_conv", "sx", sx, types.F32)
    require_type("ssm_conv", "c", c, types.F32)
    fits = sx.ne[1] == c.ne[1] and sx.ne[3] == c.ne[2] == c.ne[3] == 1 and sx.ne[0] >= c.ne[0]
    require("ssm_conv", fits, "sx must have 3 dimensions, c 2, sx.ne[1] equal c.ne[1], sx.ne[0] not be below c.ne[0]",
            sx, c)  # fmt: skip
    if sx.nb[0] != 4 or sx.nb[1] != 4 * sx.ne[0]:
        raise ValueError(f"ssm_conv: rows of sx must be packed, got ne {list(sx.ne)}, nb {list(sx.nb)} ('{sx.name}')")
    return new_node(SSM_CONV, types.F32, (sx.ne[1], sx.ne[0] - c.ne[0] + 1, sx.ne[2], 1), (sx, c))


@checked
def ssm_scan(
    s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, n_slots: int = 1
) -> Tensor:
    """Selective scan.

    Args:
        s: f32 [d_state, head_dim, n_heads, n_rows], contiguous: stored states.
        x: f32 [head_dim, n_heads, n_tokens, n_seqs], rows contiguous.
        dt: f32 [n_heads, n_tokens, n_seqs], rows contiguous; softplus is applied here.
        A: f32 [d_state or 1, n_heads], contiguous.
        B: f32 [d_state, n_groups, n_tokens, n_seqs], rows contiguous; n_groups divides n_heads.
        C: as B.
        ids: i32 [n_seqs]: the row of `s` that each sequence begins with.
        n_slots: how many of the last states the result holds, the last one first; 1 unless A has one value a head.
            Those of before the first token are zeros (ggml leaves them unwritten).

    Returns:
        f32, one dimension: y as x, then the states [d_state, head_dim, n_heads, n_seqs, n_slots].

    Raises:
        ValueError: sizes or layouts do not fit.
        TypeError: types do not fit.
        IndexError: when computed, an id is out of range.

    Source: ggml_ssm_scan.
    """
    where, (n, dim, heads, _), (_, _, tokens, seqs) = "ssm_scan", s.ne, x.ne
    for name, t in {"s": s, "x": x, "dt": dt, "A": A, "B": B, "C": C}.items():
        require_type(where, name, t, types.F32)
        require(where, t.is_contiguous_rows, f"rows of {name} must be contiguous", t)
    require_type(where, "ids", ids, types.I32)
    require_contiguous(where, "s", s)
    require_contiguous(where, "A", A)
    require_contiguous(where, "ids", ids)
    require(where, x.ne[:2] == (dim, heads), "x must fit the states s", x, s)
    require(where, dt.ne == (heads, tokens, seqs, 1), "dt must have ne [n_heads, n_tokens, n_seqs] of x", dt, x)
    require(where, A.ne[0] in (1, n) and A.ne[1:] == (heads, 1, 1), "A must have ne [d_state or 1, n_heads] of s", A, s)
    groups = B.ne == C.ne and B.ne[0] == n and B.ne[2:] == (tokens, seqs) and B.ne[1] and heads % B.ne[1] == 0
    require(where, bool(groups), "B and C must be alike, fit s and x, and their groups divide the heads", B, C, s, x)
    require(where, ids.ne == (seqs, 1, 1, 1), "ids must have a number for each sequence of x", ids, x)
    one = n_slots > 0 and (n_slots == 1 or A.ne[0] == 1)
    require(where, one, f"n_slots ({n_slots}) must be positive, and 1 unless A has one value a head", A)
    size = x.nelements + n * dim * heads * seqs * n_slots
    return new_node(SSM_SCAN, types.F32, (size, 1, 1, 1), (s, x, dt, A, B, C, ids), (n_slots,))


# --- references -------------------------------------------------------------------------------------------------------


@SSM_CONV.reference
def _(node, sx, c):
    windows = np.lib.stride_tricks.sliding_window_view(sx[0], c.shape[3], 2)  # [s, i, t, j]
    return np.einsum("sitj,ij->sti", windows, c[0, 0])[None]


@SSM_SCAN.reference
def _(node, s, x, dt, a, b, c, ids):
    _, tokens, heads, _ = x.shape
    group = np.arange(heads) // (heads // b.shape[2])
    h, y, states = s[ids[0, 0, 0]], np.zeros(x.shape), []
    for t in range(tokens):
        d = np.logaddexp(0, dt[0, :, t])[:, :, None]  # [seqs, heads, 1]
        h = h * np.exp(d * a[0, 0])[:, :, None] + (d * x[:, t])[..., None] * b[:, t][:, group][:, :, None]
        y[:, t] = (h * c[:, t][:, group][:, :, None]).sum(-1)
        states.append(h)
    n_slots = node.params.n_slots
    slots = states[::-1][:n_slots] + [np.zeros(h.shape)] * (n_slots - tokens)
    return np.concatenate([v.reshape(-1) for v in (y, *slots)])


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def ssm_conv_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
    """16 channels of a token at once."""
    first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        to = rows.offset(dst_nb, i1, i2, i3)
        for i in range(begin, end, 16):
            n, total = end - i, vec.zero()
            for j in range(src1_ne[0]):
                x = vec.load_strided_first(src0, 4 * (i1 + j) + i * src0_nb[1] + i2 * src0_nb[2], src0_nb[1], n)
                c = vec.load_strided_first(src1, j * src1_nb[0] + i * src1_nb[1], src1_nb[1], n)
                total = vec.fma(x, c, total)
            vec.store_first(dst, to + 4 * i, total, n)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@functools.cache
def make_ssm_scan(by_state: bool):
    """Kernel; `by_state`: A has a value for each element of a row of the state."""

    @kernel
    def ssm_scan_f32(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, src4, src4_ne, src4_nb, src5, src5_ne, src5_nb, src6, src6_ne, src6_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        n, dim, heads, tokens, seqs = src0_ne[0], src0_ne[1], src0_ne[2], src1_ne[2], src1_ne[3]
        n_slots, per_group = np.int64(op_params[0]), heads // src4_ne[1]
        outputs, slot = 4 * dim * heads * tokens * seqs, 4 * n * dim * heads * seqs
        slot_of_decays = COUNTER_LINE + 4 * n * ith
        unit, last = dim * heads * seqs * ith // nth, dim * heads * seqs * (ith + 1) // nth
        while unit < last:  # some rows of the state of a head
            j, head, seq = unit % dim, unit // dim % heads, unit // (dim * heads)
            count = min(dim - j, last - unit, state_rows.rows(n))
            id = np.int64(memory.load_i32(src6, 4 * seq))
            if id < 0 or id >= src0_ne[3]:
                return seq << 4 | IDS
            h, row = outputs + 4 * unit * n, 4 * n
            state_rows.copy(dst, h, src0, 4 * ((id * heads + head) * dim + j) * n, count * n)
            for t in range(tokens):
                step = memory.load_f32(src2, 4 * head + t * src2_nb[1] + seq * src2_nb[2])
                d = activations.softplus(vec.splat(step))
                b = head // per_group * src4_nb[1] + t * src4_nb[2] + seq * src4_nb[3]
                c = head // per_group * src5_nb[1] + t * src5_nb[2] + seq * src5_nb[3]
                at = 4 * j + head * src1_nb[1] + t * src1_nb[2] + seq * src1_nb[3]
                to = 4 * (((seq * tokens + t) * heads + head) * dim + j)
                delta, decay = vec.lane(d, 0), vec.lane(vec.exp(d * memory.load_f32(src3, 4 * head)), 0)
                if by_state:
                    for i in range(0, n, 16):
                        decays = vec.exp(d * vec.load_first(src3, 4 * (head * n + i), n - i))
                        vec.store_first(work, slot_of_decays + 4 * i, decays, n - i)
                whole = 0 if by_state or n % 16 else count // 4 * 4
                for i in range(0, whole, 4):
                    y = to + 4 * i  # the inputs times their step lie where the outputs go
                    for m in range(0, 16, 4):
                        memory.store_f32(dst, y + m, delta * memory.load_f32(src1, at + 4 * i + m))
                    state_rows.step_4(dst, h + i * row, row, decay, src4, b, dst, y, src5, c, n, dst, y)
                for i in range(whole, count):
                    x, s = delta * memory.load_f32(src1, at + 4 * i), h + i * row
                    if by_state:
                        y = state_rows.step_by(dst, s, work, slot_of_decays, src4, b, x, src5, c, n)
                    else:
                        y = state_rows.step(dst, s, decay, src4, b, x, src5, c, n)
                    memory.store_f32(dst, to + 4 * i, y)
                back = tokens - 1 - t
                if back > 0 and back < n_slots:
                    state_rows.copy(dst, h + back * slot, dst, h, count * n)
            for back in range(tokens, n_slots):
                state_rows.clear(dst, h + back * slot, count * n)
            unit += count
        return 0

    return ssm_scan_f32


SSM_CONV.kernel(lambda node: ssm_conv_f32)


@SSM_CONV.flops
def _(node):
    return 2 * node.nelements * node.src[1].ne[0]


@SSM_SCAN.kernel
def _(node):
    return make_ssm_scan(node.src[3].ne[0] > 1)


@SSM_SCAN.work_size
def _(node, nth):
    n = node.src[3].ne[0]
    return 4 * n * nth if n > 1 else 0


@SSM_SCAN.flops
def _(node):
    return 5 * node.src[1].nelements * node.src[0].ne[0]


# --- backward ---------------------------------------------------------------------------------------------------------


@SSM_CONV.backward
def _(node, grad, need):
    sx, c = node.src
    image = ops.reshape_4d(as_contiguous(sx), sx.ne[0], 1, sx.ne[1], sx.ne[2])
    weights = ops.reshape_4d(as_contiguous(c), c.ne[0], 1, 1, c.ne[1])
    turned = ops.cont(ops.transpose(grad))
    dc, dx = depthwise_gradients(
        weights, image, ops.reshape_4d(turned, turned.ne[0], 1, *turned.ne[1:3]), (1, 1, 0, 0, 1, 1), need[::-1]
    )
    return ops.reshape(dx, sx) if dx is not None else None, ops.reshape(dc, c) if dc is not None else None


def _by_head(t: Tensor, heads: int) -> Tensor:
    """Vectors of groups for each head: [n, groups, ...] to [n, heads, ...]."""
    n, groups, tokens, seqs = t.ne
    each = ops.reshape_4d(as_contiguous(t), n, 1, groups, tokens * seqs)
    return ops.reshape_4d(ops.repeat_4d(each, n, heads // groups, groups, tokens * seqs), n, heads, tokens, seqs)


def _by_group(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the heads of each group."""
    n, groups, tokens, seqs = like.ne
    each = ops.reshape_4d(grad, n, grad.ne[1] // groups, groups, tokens * seqs)
    wide = ops.view_4d(each, n, 1, groups, tokens * seqs, *each.nb[1:], 0)
    return ops.reshape_4d(ops.repeat_back(each, wide), *like.ne)


@SSM_SCAN.backward
def _(node, grad, need):
    """The recurrence with w = exp(d A), k = B, v = d x and C for r."""
    s, x, dt, a, b, c, ids = node.src
    (n, dim, heads, n_rows), (_, _, tokens, seqs) = s.ne, x.ne
    flat = n * dim * heads
    states = grad.nelements - x.nelements
    go = ops.reshape_4d(ops.view_1d(grad, x.nelements, 0), *x.ne)
    gs = ops.reshape_4d(ops.view_1d(grad, states, 4 * x.nelements), n, dim, heads, states // flat)
    stored = ops.reshape_2d(s, flat, n_rows)
    first = ops.reshape_4d(ops.get_rows(stored, ids), n, dim, heads, seqs)
    dt_4d, a_4d = ops.reshape_4d(as_contiguous(dt), 1, heads, tokens, seqs), ops.reshape_4d(a, a.ne[0], heads, 1, 1)
    d, x = ops.softplus(dt_4d), as_contiguous(x)
    steps = ops.repeat_4d(d, a.ne[0], heads, tokens, seqs)
    w = ops.repeat_4d(ops.exp(ops.mul(steps, a_4d)), n, heads, tokens, seqs)
    found = recurrence_back(_by_head(c, heads), w, _by_head(b, heads), ops.mul(x, d), None, None, first, go, gs)
    dw = unbroadcast(ops.mul(found["w"], w), steps)  # of d A
    dd = ops.add(ops.sum_rows(ops.mul(dw, a_4d)), ops.sum_rows(ops.mul(found["v"], x)))
    return (
        ops.reshape(ops.get_rows_back(ops.reshape_2d(found["s"], flat, seqs), ids, stored), s),
        ops.mul(found["v"], d),
        ops.reshape(ops.mul(dd, ops.sigmoid(dt_4d)), dt),
        ops.reshape(unbroadcast(ops.mul(dw, steps), a_4d), a),
        _by_group(found["k"], b),
        _by_group(found["r"], c),
        None,
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import transpose, view_2d, view_4d

    for d_conv, d_inner, tokens, seqs in ((4, 16, 5, 2), (4, 33, 1, 1), (3, 7, 4, 3), (1, 40, 2, 1)):
        SSM_CONV.case(f"{d_conv} x {d_inner}, {tokens} tokens")(
            lambda t, k=d_conv, n=d_inner, m=tokens, s=seqs: ssm_conv(t("F32", k - 1 + m, n, s), t("F32", k, n))
        )
    SSM_CONV.case("weights with gaps")(lambda t: ssm_conv(t("F32", 8, 16, 2), view_2d(t("F32", 7, 16), 4, 16, 28, 4)))
    SSM_CONV.case("weights transposed")(lambda t: ssm_conv(t("F32", 8, 21), transpose(t("F32", 21, 4))))

    def scan(name, n, dim, heads, groups, tokens, seqs, by_state=False, n_slots=1, gap=0):
        @SSM_SCAN.case(name)
        def _(t):
            def rows_of(ne0, ne1):
                whole = t("F32", ne0 + gap, ne1, tokens, seqs)
                return view_4d(whole, ne0, ne1, tokens, seqs, *whole.nb[1:], 4 * gap) if gap else whole

            ids = t.array(np.arange(seqs + 1, 1, -1).astype(np.int32))
            s, dt = t("F32", n, dim, heads, seqs + 2), t("F32", heads, tokens, seqs, low=-3, high=3)
            a = t("F32", n if by_state else 1, heads, low=-2, high=0)
            return ssm_scan(s, rows_of(dim, heads), dt, a, rows_of(n, groups), rows_of(n, groups), ids, n_slots)

    scan("Mamba 1", 16, 1, 8, 1, 4, 2, by_state=True)
    scan("Mamba 2", 16, 4, 6, 2, 5, 1)
    scan("odd sizes", 7, 3, 4, 4, 3, 2)
    scan("snapshots", 16, 4, 4, 2, 5, 2, n_slots=3)
    scan("more slots than tokens", 33, 4, 4, 1, 2, 1, n_slots=4)
    scan("rows with gaps", 16, 16, 4, 2, 3, 2, gap=5)


_cases()
