"""Linear attention with a state: RWKV 6 and 7, gated linear attention, the gated delta rule.

For each head and token, with a state S of keys x values and S' the state before:

    rwkv_wkv6          o = S'^T r + (r . (tf k)) v        S = diag(td) S' + k v^T
    gated_linear_attn  o = scale S^T q                    S = diag(g) S' + k v^T
    rwkv_wkv7          o = S^T r                          S = diag(w) S' + b (S'^T a)^T + k v^T
    gated_delta_net    o = S^T q / sqrt(n)                S = E + k (beta (v - E^T k))^T,  E = diag(exp(g)) S'

The result holds the outputs of all tokens and after them the states. The first two keep a state as rows of values
(key after key), the others as rows of keys: 16 values, or one value's row, are a unit of work that needs no other, and
the tokens of a sequence are walked within it. Sums over keys are in a fixed order.

Gradients come from recurrence_back.py, where all of them are one recurrence.

Source: Peng et al., Eagle and Finch (2024) and RWKV-7 Goose (2025); Yang et al., Gated linear attention (2023) and
Gated delta networks (2024).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.arguments import checked
from ggjit.autodiff import as_contiguous, unbroadcast
from ggjit.jit import kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import require, require_contiguous, require_type
from ggjit.ops.recurrence_back import recurrence_back
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
prefetch = lazy_module("ggjit.ops.lib.prefetch")
state_rows = lazy_module("ggjit.ops.lib.state_rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["gated_delta_net", "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7"]

RWKV_WKV6 = Op("rwkv_wkv6", id=82)
GATED_LINEAR_ATTN = Op("gated_linear_attn", id=83, params=(("scale", "f32"),))
RWKV_WKV7 = Op("rwkv_wkv7", id=84)
GATED_DELTA_NET = Op("gated_delta_net", id=86, params=(("n_slots", "i32"),))


# --- builders ---------------------------------------------------------------------------------------------------------


def _check(where: str, k: Tensor, others: dict[str, Tensor], state: Tensor) -> None:
    """What the three ops with flat states need: f32 without gaps, sources like k, states for whole sequences."""
    n, heads, tokens, _ = k.ne
    for name, t in {"k": k, **others, "state": state}.items():
        require_type(where, name, t, types.F32)
        require_contiguous(where, name, t)
    for name, t in others.items():
        require(where, t.ne == k.ne, f"{name} must have the shape of k", t, k)
    seqs = state.ne[1]
    fits = k.ne[3] == 1 and state.ne == (n * n * heads, seqs, 1, 1) and seqs > 0 and tokens % seqs == 0
    require(where, fits, f"state must have ne [{n * n * heads}, n_seqs] and n_seqs divide the tokens of k", state, k)


def _with_states(op: Op, k: Tensor, src: tuple[Tensor, ...], state: Tensor, params: tuple[float, ...] = ()) -> Tensor:
    n, heads, tokens, _ = k.ne
    return new_node(op, types.F32, (n * heads, tokens + n * state.ne[1], 1, 1), src, params)


@checked
def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """The recurrence of RWKV 6.

    Args:
        k: f32 [n, n_heads, n_tokens], contiguous; the tokens of a sequence follow each other.
        v: as k: the values.
        r: as k: what reads the state.
        td: as k: the decay of each key.
        tf: f32 [n, n_heads]: weight of the present token.
        state: f32 [n n n_heads, n_seqs]: keys x values of each head.

    Returns:
        f32 [n n_heads, n_tokens + n n_seqs]: outputs, then the last states.

    Raises:
        ValueError: shapes do not fit, or a source has gaps.
        TypeError: a source is not f32.

    Source: ggml_rwkv_wkv6.
    """
    _check("rwkv_wkv6", k, {"v": v, "r": r, "td": td}, state)
    require("rwkv_wkv6", tf.nelements == k.ne[0] * k.ne[1], "tf must have a value for each key of k's heads", tf, k)
    require_type("rwkv_wkv6", "tf", tf, types.F32)
    require_contiguous("rwkv_wkv6", "tf", tf)
    return _with_states(RWKV_WKV6, k, (k, v, r, tf, td, state), state)


@checked
def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Linear attention whose state decays by a gate.

    Args:
        k: f32 [n, n_heads, n_tokens], contiguous; the tokens of a sequence follow each other.
        v: as k: the values.
        q: as k: the queries.
        g: as k: the decay of each key.
        state: f32 [n n n_heads, n_seqs]: keys x values of each head.
        scale: of the outputs.

    Returns:
        f32 [n n_heads, n_tokens + n n_seqs]: outputs, then the last states.

    Raises:
        ValueError: shapes do not fit, or a source has gaps.
        TypeError: a source is not f32.

    Source: ggml_gated_linear_attn.
    """
    _check("gated_linear_attn", k, {"v": v, "q": q, "g": g}, state)
    return _with_states(GATED_LINEAR_ATTN, k, (k, v, q, g, state), state, (scale,))


@checked
def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """The recurrence of RWKV 7.

    Args:
        r: f32 [n, n_heads, n_tokens], contiguous; the tokens of a sequence follow each other.
        w: as r: the decay of each key.
        k: as r: the keys.
        v: as r: the values.
        a: as r: what reads the state that b writes again.
        b: as r.
        state: f32 [n n n_heads, n_seqs]: values x keys of each head.

    Returns:
        f32 [n n_heads, n_tokens + n n_seqs]: outputs, then the last states.

    Raises:
        ValueError: shapes do not fit, or a source has gaps.
        TypeError: a source is not f32.

    Source: ggml_rwkv_wkv7.
    """
    _check("rwkv_wkv7", k, {"r": r, "w": w, "v": v, "a": a, "b": b}, state)
    return _with_states(RWKV_WKV7, k, (r, w, k, v, a, b, state), state)


@checked
def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, n_slots: int = 1
) -> Tensor:
    """The gated delta rule.

    Args:
        q: f32 [n, n_key_heads, n_tokens, n_seqs], rows contiguous; head h of v uses head h % n_key_heads.
        k: as q.
        v: f32 [n, n_heads, n_tokens, n_seqs], rows contiguous.
        g: f32 [1 or n, n_heads, n_tokens, n_seqs], contiguous: logarithm of the decay of a state, or of each key.
        beta: f32 [1, n_heads, n_tokens, n_seqs], contiguous: how much of the error is corrected.
        state: f32 [n, n, n_heads, n_seqs], contiguous: values x keys of each head.
        n_slots: how many of the last states the result holds, the last one first. Those of before the first token are
            zeros (ggml leaves them unwritten).

    Returns:
        f32 [n n_heads, n_tokens n_seqs + n n_seqs n_slots]: outputs, then states.

    Raises:
        ValueError: shapes or layouts do not fit.
        TypeError: a source is not f32.

    Source: ggml_gated_delta_net.
    """
    where, (n, heads, tokens, seqs) = "gated_delta_net", v.ne
    for name, t in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}.items():
        require_type(where, name, t, types.F32)
        if name in ("g", "beta", "state"):
            require_contiguous(where, name, t)
        else:
            require(where, t.nb[0] == 4, f"rows of {name} must be contiguous", t)
    like_v = q.ne == k.ne and k.ne[0] == n and k.ne[1] and heads % k.ne[1] == 0 and k.ne[2:] == v.ne[2:]
    require(where, bool(like_v), "q and k must be alike and fit v, whose heads are a multiple of theirs", q, k, v)
    require(where, g.ne[0] in (1, n) and g.ne[1:] == v.ne[1:], "g.ne[0] must be 1 or that of v, the rest as v", g, v)
    require(where, beta.ne == (1, *v.ne[1:]), "beta must have a value for each head and token of v", beta, v)
    require(where, state.nelements == n * n * heads * seqs, "state must have n x n values for each head of v", state, v)
    require(where, n_slots > 0, f"n_slots ({n_slots}) must be positive for v", v)
    ne = (n * heads, tokens * seqs + n * seqs * n_slots, 1, 1)
    return new_node(GATED_DELTA_NET, types.F32, ne, (q, k, v, g, beta, state), (n_slots,))


# --- references -------------------------------------------------------------------------------------------------------


def _walk(k, state, step):
    """Outputs and last states of step(token, S') -> (o, S), S [heads, n, n]."""
    tokens, heads, n = k.shape[1:]
    seqs = state.shape[2]
    out, last = np.zeros((tokens, heads, n)), []
    for seq, s in enumerate(state.reshape(seqs, heads, n, n)):
        for t in range(seq * tokens // seqs, (seq + 1) * tokens // seqs):
            out[t], s = step(t, s)
        last.append(s)
    return np.concatenate([out.reshape(-1, heads * n), np.stack(last).reshape(-1, heads * n)])[None, None]


@RWKV_WKV6.reference
def _(node, k, v, r, tf, td, state):
    def step(t, s):
        kv = k[0, t][:, :, None] * v[0, t][:, None]
        read = s + tf.reshape(k.shape[2:])[..., None] * kv
        return np.einsum("hk,hkv->hv", r[0, t], read), s * td[0, t][..., None] + kv

    return _walk(k, state, step)


@GATED_LINEAR_ATTN.reference
def _(node, k, v, q, g, state):
    def step(t, s):
        s = s * g[0, t][..., None] + k[0, t][:, :, None] * v[0, t][:, None]
        return node.params.scale * np.einsum("hk,hkv->hv", q[0, t], s), s

    return _walk(k, state, step)


@RWKV_WKV7.reference
def _(node, r, w, k, v, a, b, state):
    def step(t, s):
        c = np.einsum("hvk,hk->hv", s, a[0, t])
        s = s * w[0, t][:, None] + c[..., None] * b[0, t][:, None] + v[0, t][..., None] * k[0, t][:, None]
        return np.einsum("hvk,hk->hv", s, r[0, t]), s

    return _walk(k, state, step)


@GATED_DELTA_NET.reference
def _(node, q, k, v, g, beta, state):
    seqs, tokens, heads, n = v.shape
    head = np.arange(heads) % k.shape[2]
    s, out = state.reshape(seqs, heads, n, n), np.zeros(v.shape)
    states = []
    for t in range(tokens):
        s = s * np.exp(g[:, t])[:, :, None]
        error = (v[:, t] - np.einsum("shvk,shk->shv", s, k[:, t][:, head])) * beta[:, t]
        s = s + error[..., None] * k[:, t][:, head][:, :, None]
        out[:, t] = np.einsum("shvk,shk->shv", s, q[:, t][:, head]) / np.sqrt(n)
        states.append(s)
    n_slots = node.params.n_slots
    slots = states[::-1][:n_slots] + [np.zeros_like(s)] * (n_slots - tokens)
    return np.concatenate([x.reshape(-1, heads * n) for x in (out, *slots)])[None, None]


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def rwkv_wkv6_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne, src3_nb,
    src4, src4_ne, src4_nb, src5, src5_ne, src5_nb, op_params, work, ith, nth,
):  # fmt: skip
    """16 values of a head through all tokens of a sequence."""
    n, heads, seqs = src0_ne[0], src0_ne[1], src5_ne[1]
    tokens, chunks = src0_ne[2] // seqs, (n + 15) // 16
    for unit in range(seqs * heads * chunks * ith // nth, seqs * heads * chunks * (ith + 1) // nth):
        j, head = unit % chunks * 16, unit // chunks
        state, count = 4 * (head * n * n + j), n - j
        s = 4 * src0_ne[2] * heads * n + state
        for i in range(n):
            vec.store_first(dst, s + 4 * n * i, vec.load_first(src5, state + 4 * n * i, count), count)
        for t in range(tokens):
            at = 4 * n * ((head // heads * tokens + t) * heads + head % heads)
            v, o = vec.load_first(src1, at + 4 * j, count), vec.zero()
            for i in range(n):
                kv, old = v * memory.load_f32(src0, at + 4 * i), vec.load_first(dst, s + 4 * n * i, count)
                read = vec.fma(kv, memory.load_f32(src3, 4 * (head % heads * n + i)), old)
                o = vec.fma(read, memory.load_f32(src2, at + 4 * i), o)
                vec.store_first(dst, s + 4 * n * i, vec.fma(old, memory.load_f32(src4, at + 4 * i), kv), count)
            vec.store_first(dst, at + 4 * j, o, count)


@kernel
def gated_linear_attn_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne, src3_nb,
    src4, src4_ne, src4_nb, op_params, work, ith, nth,
):  # fmt: skip
    """16 values of a head through all tokens of a sequence."""
    n, heads, seqs, scale = src0_ne[0], src0_ne[1], src4_ne[1], memory.f32_from_bits(op_params[0])
    tokens, chunks = src0_ne[2] // seqs, (n + 15) // 16
    for unit in range(seqs * heads * chunks * ith // nth, seqs * heads * chunks * (ith + 1) // nth):
        j, head = unit % chunks * 16, unit // chunks
        state, count = 4 * (head * n * n + j), n - j
        s = 4 * src0_ne[2] * heads * n + state
        for i in range(n):
            vec.store_first(dst, s + 4 * n * i, vec.load_first(src4, state + 4 * n * i, count), count)
        for t in range(tokens):
            at = 4 * n * ((head // heads * tokens + t) * heads + head % heads)
            v, o = vec.load_first(src1, at + 4 * j, count), vec.zero()
            for i in range(n):
                old = vec.load_first(dst, s + 4 * n * i, count)
                new = vec.fma(old, memory.load_f32(src3, at + 4 * i), v * memory.load_f32(src0, at + 4 * i))
                o = vec.fma(new, memory.load_f32(src2, at + 4 * i), o)
                vec.store_first(dst, s + 4 * n * i, new, count)
            vec.store_first(dst, at + 4 * j, o * scale, count)


@kernel
def rwkv_wkv7_f32(
    dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne, src3_nb,
    src4, src4_ne, src4_nb, src5, src5_ne, src5_nb, src6, src6_ne, src6_nb, op_params, work, ith, nth,
):  # fmt: skip
    """Rows of the state of a head, one a value, through all tokens of a sequence."""
    n, heads, seqs = src0_ne[0], src0_ne[1], src6_ne[1]
    tokens, row = src0_ne[2] // seqs, 4 * n
    unit, last = seqs * heads * n * ith // nth, seqs * heads * n * (ith + 1) // nth
    while unit < last:
        j, head = unit % n, unit // n
        count = min(n - j, last - unit, state_rows.rows(n))
        s = 4 * (src0_ne[2] * heads * n + unit * n)
        state_rows.copy(dst, s, src6, 4 * unit * n, count * n)
        for t in range(tokens):
            at = 4 * n * ((head // heads * tokens + t) * heads + head % heads)
            after = at + row * heads  # of the next token, too far for the CPU to foresee
            prefetch.span(src0, after, row)
            prefetch.span(src1, after, row)
            prefetch.span(src2, after, row)
            prefetch.span(src4, after, row)
            prefetch.span(src5, after, row)
            whole = count // 4 * 4 if n % 16 == 0 else 0
            for i in range(0, whole, 4):
                y = at + 4 * (j + i)
                state_rows.mixed_step_4(
                    dst, s + i * row, row, src1, at, src2, at, src3, y, src5, at, src4, at, src0, at, n, dst, y
                )
            for i in range(whole, count):
                c, v = state_rows.dot(dst, s + i * row, src4, at, n), memory.load_f32(src3, at + 4 * (j + i))
                o = state_rows.mixed_step(dst, s + i * row, src1, at, src2, at, v, src5, at, c, src0, at, n)
                memory.store_f32(dst, at + 4 * (j + i), o)
        unit += count


@functools.cache
def make_gated_delta_net(by_key: bool):
    """Kernel; `by_key`: each key decays by itself."""

    @kernel
    def gated_delta_net_f32(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, src4, src4_ne, src4_nb, src5, src5_ne, src5_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        """Rows of the state of a head, one a value, through all tokens of a sequence."""
        n, heads, tokens, seqs = src2_ne[0], src2_ne[1], src2_ne[2], src2_ne[3]
        n_slots, slot, scale = np.int64(op_params[0]), 4 * n * n * heads * seqs, np.float32(1) / vec.sqrt(np.float32(n))
        outputs, row, decays = 4 * n * heads * tokens * seqs, 4 * n, COUNTER_LINE + 4 * n * ith
        unit, last = seqs * heads * n * ith // nth, seqs * heads * n * (ith + 1) // nth
        while unit < last:
            j, head, seq = unit % n, unit // n % heads, unit // (n * heads)
            count, first = min(n - j, last - unit, state_rows.rows(n)), outputs + 4 * unit * n
            state_rows.copy(dst, first, src5, 4 * unit * n, count * n)
            for t in range(tokens):
                q = head % src0_ne[1] * src0_nb[1] + t * src0_nb[2] + seq * src0_nb[3]
                k = head % src1_ne[1] * src1_nb[1] + t * src1_nb[2] + seq * src1_nb[3]
                v = 4 * j + head * src2_nb[1] + t * src2_nb[2] + seq * src2_nb[3]
                token = (seq * tokens + t) * heads + head
                beta = memory.load_f32(src4, 4 * token)
                decay = vec.exp(memory.load_f32(src3, 4 * token))
                if by_key:
                    for i in range(0, n, 16):
                        g = vec.load_first(src3, 4 * (token * n + i), n - i)
                        vec.store_first(work, decays + 4 * i, vec.exp(g), n - i)
                for i in range(count):
                    s, value = first + i * row, memory.load_f32(src2, v + 4 * i)
                    if by_key:
                        error = (value - state_rows.decayed_dot_by(dst, s, work, decays, src1, k, n)) * beta
                        o = state_rows.step_by(dst, s, work, decays, src1, k, error, src0, q, n)
                    else:
                        error = (value - state_rows.decayed_dot(dst, s, decay, src1, k, n)) * beta
                        o = state_rows.step(dst, s, decay, src1, k, error, src0, q, n)
                    memory.store_f32(dst, 4 * (token * n + j + i), o * scale)
                back = tokens - 1 - t
                if back > 0 and back < n_slots:
                    state_rows.copy(dst, first + back * slot, dst, first, count * n)
            for back in range(tokens, n_slots):
                state_rows.clear(dst, first + back * slot, count * n)
            unit += count

    return gated_delta_net_f32


RWKV_WKV6.kernel(lambda node: rwkv_wkv6_f32)
GATED_LINEAR_ATTN.kernel(lambda node: gated_linear_attn_f32)
RWKV_WKV7.kernel(lambda node: rwkv_wkv7_f32)


@GATED_DELTA_NET.kernel
def _(node):
    return make_gated_delta_net(node.src[3].ne[0] > 1)


@GATED_DELTA_NET.work_size
def _(node, nth):
    return 4 * node.ne[0] // node.src[2].ne[1] * nth if node.src[3].ne[0] > 1 else 0


def _flops(node):
    each = {RWKV_WKV6: 6, GATED_LINEAR_ATTN: 5, RWKV_WKV7: 10, GATED_DELTA_NET: 9}[node.op]
    return each * node.src[2].nelements * node.src[2].ne[0]


for _op in (RWKV_WKV6, GATED_LINEAR_ATTN, RWKV_WKV7, GATED_DELTA_NET):
    _op.flops(_flops)


# --- backward ---------------------------------------------------------------------------------------------------------


def split(node: Tensor, grad: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of outputs, in the shape of `like`, and of states [n, n, n_heads, n_slots n_seqs]."""
    n, heads = like.ne[:2]
    outputs = like.nelements
    states = grad.nelements - outputs
    return (
        ops.reshape_4d(ops.view_1d(grad, outputs, 0), *like.ne),
        ops.reshape_4d(ops.view_1d(grad, states, 4 * outputs), n, n, heads, states // (n * n * heads)),
    )


def _turned(s: Tensor) -> Tensor:
    """States with keys and values exchanged."""
    return ops.cont(ops.transpose(s))


def _by_sequence(t: Tensor, n_seqs: int) -> Tensor:
    return ops.reshape_4d(as_contiguous(t), t.ne[0], t.ne[1], t.ne[2] // n_seqs, n_seqs)


@RWKV_WKV6.backward
def _(node, grad, need):
    k, v, r, tf, td, state = node.src
    seqs, (n, heads) = state.ne[1], k.ne[:2]
    go, gs = split(node, grad, k)
    s = _turned(ops.reshape_4d(state, n, n, heads, seqs))
    by = [_by_sequence(t, seqs) for t in (r, td, k, v)]
    found = recurrence_back(*by, None, None, s, _by_sequence(go, seqs), _turned(gs), before=True)
    dr, dtd, dk, dv = (ops.reshape(found[name], k) for name in "rwkv")
    # The present token: o += z v with z = sum over keys of r tf k.
    tf_3d = ops.reshape_3d(tf, n, heads, 1)
    z, dz = ops.sum_rows(ops.mul(ops.mul(r, k), tf_3d)), ops.sum_rows(ops.mul(go, v))
    dv = ops.add(dv, ops.mul(go, z))
    dr = ops.add(dr, ops.mul(ops.mul(k, tf_3d), dz))
    dk = ops.add(dk, ops.mul(ops.mul(r, tf_3d), dz))
    dtf = ops.reshape(unbroadcast(ops.mul(ops.mul(r, k), dz), tf_3d), tf)
    return dk, dv, dr, dtf, dtd, ops.reshape(_turned(found["s"]), state)


@GATED_LINEAR_ATTN.backward
def _(node, grad, need):
    k, v, q, g, state = node.src
    seqs, (n, heads), scale = state.ne[1], k.ne[:2], node.params.scale
    go, gs = split(node, grad, k)
    s = _turned(ops.reshape_4d(state, n, n, heads, seqs))
    by = [_by_sequence(t, seqs) for t in (ops.scale(q, scale), g, k, v)]
    found = recurrence_back(*by, None, None, s, _by_sequence(go, seqs), _turned(gs))
    dq, dg, dk, dv = (ops.reshape(found[name], k) for name in "rwkv")
    return dk, dv, ops.scale(dq, scale), dg, ops.reshape(_turned(found["s"]), state)


@RWKV_WKV7.backward
def _(node, grad, need):
    r, w, k, v, a, b, state = node.src
    seqs, (n, heads) = state.ne[1], k.ne[:2]
    go, gs = split(node, grad, k)
    by = [_by_sequence(t, seqs) for t in (r, w, k, v, a, b)]
    found = recurrence_back(*by, ops.reshape_4d(state, n, n, heads, seqs), _by_sequence(go, seqs), gs)
    return *(ops.reshape(found[name], k) for name in "rwkvab"), ops.reshape(found["s"], state)


@GATED_DELTA_NET.backward
def _(node, grad, need):
    """The recurrence with a = -diag(w) k, b = beta k, beta k for k, w = exp(g) and q / sqrt(n) for r."""
    q, k, v, g, beta, state = node.src
    n, heads, _, seqs = v.ne
    go, gs = split(node, grad, v)
    keys, r = (ops.repeat_4d(as_contiguous(t), *v.ne) for t in (k, ops.scale(as_contiguous(q), n**-0.5)))
    w, bk = ops.repeat_4d(ops.exp(g), *v.ne), ops.mul(keys, beta)
    a = ops.neg(ops.mul(keys, w))
    found = recurrence_back(r, w, bk, as_contiguous(v), a, bk, ops.reshape_4d(state, n, n, heads, seqs), go, gs)
    dbk, da = ops.add(found["k"], found["b"]), found["a"]
    dk = ops.sub(ops.mul(dbk, beta), ops.mul(w, da))
    dg = ops.mul(ops.sub(found["w"], ops.mul(keys, da)), w)
    return (
        ops.scale(unbroadcast(found["r"], q), n**-0.5),
        unbroadcast(dk, k),
        found["v"],
        unbroadcast(dg, g),
        ops.sum_rows(ops.mul(dbk, keys)),
        ops.reshape(found["s"], state),
    )


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import view_4d

    for n, heads, tokens, seqs in ((16, 2, 3, 1), (32, 1, 4, 2), (48, 2, 2, 1), (5, 3, 4, 2), (64, 1, 2, 1)):
        name, ne, state = f"{heads} heads of {n}, {seqs} sequences", (n, heads, tokens), (n * n * heads, seqs)
        RWKV_WKV6.case(name)(
            lambda t, ne=ne, s=state: rwkv_wkv6(
                t("F32", *ne), t("F32", *ne), t("F32", *ne), t("F32", *ne[:2]), t("F32", *ne, low=0), t("F32", *s)
            )
        )
        GATED_LINEAR_ATTN.case(name)(
            lambda t, ne=ne, s=state: gated_linear_attn(
                t("F32", *ne), t("F32", *ne), t("F32", *ne), t("F32", *ne, low=0), t("F32", *s), 0.25
            )
        )
        RWKV_WKV7.case(name)(
            lambda t, ne=ne, s=state: rwkv_wkv7(
                t("F32", *ne),
                t("F32", *ne, low=0),
                t("F32", *ne),
                t("F32", *ne),
                t("F32", *ne, low=-0.1, high=0.1),
                t("F32", *ne),
                t("F32", *s),
            )
        )

    def delta(name, n, key_heads, heads, tokens, seqs, by_key=False, n_slots=1, gap=0):
        @GATED_DELTA_NET.case(name)
        def _(t):
            def rows(h):
                whole = t("F32", n + gap, h, tokens, seqs, low=-0.3, high=0.3)
                return view_4d(whole, n, h, tokens, seqs, *whole.nb[1:], 4 * gap) if gap else whole

            one = (heads, tokens, seqs)
            return gated_delta_net(
                rows(key_heads), rows(key_heads), rows(heads), t("F32", n if by_key else 1, *one, high=0),
                t("F32", 1, *one, low=0), t("F32", n, n, heads, seqs), n_slots,
            )  # fmt: skip

    delta("one decay", 16, 2, 2, 3, 1)
    delta("shared keys", 32, 2, 4, 2, 2)
    delta("decay by key, shared keys", 16, 1, 2, 4, 2, by_key=True)
    delta("snapshots", 8, 2, 2, 5, 1, n_slots=3)
    delta("more slots than tokens", 21, 1, 2, 2, 1, n_slots=4)
    delta("rows with gaps", 7, 1, 3, 2, 1, gap=3)


_cases()
