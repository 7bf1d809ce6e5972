"""The gradient that linear recurrences share: RWKV 6 and 7, gated linear attention, the gated delta rule, Mamba's scan.

A head has a state S of keys x values. For each token, with vectors w, a, b, k, r over keys and v over values:

    c   = S^T a
    S   = diag(w) S + b c^T + k v^T
    o   = S^T r              (RWKV 6: of the state before the token)

Backwards, with G the gradient of S after the token:

    G  += r do^T       dr = S do        dk = G v        dv = G^T k       db = G c       dc = G^T b
    da  = S' dc        dw = sum over values of S' G     G = diag(w) G + a dc^T          (S' the state before)

A value's row of the state does not depend on the others: its history is made again in the scratch, walked backwards,
and added to the sums over values. A thread takes whole heads, so the order of sums does not depend on the threads.
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit import ops, types
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import are_f32, require, require_contiguous
from ggjit.tensor import Dims, Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
state_rows = lazy_module("ggjit.ops.lib.state_rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__: list[str] = []

RECURRENCE_BACK = Op("recurrence_back", id=1004, params=(("before", "i32"),), nmse=1e-6)


def recurrence_back(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None, s: Tensor,
                    grad: Tensor, grad_s: Tensor, *, before: bool = False) -> dict[str, Tensor | None]:  # fmt: skip
    """Gradients of a linear recurrence.

    Args:
        r: f32 [n_keys, n_heads, n_tokens, n_seqs], contiguous, as are all others: what reads the state.
        w: as r: the decay of each key.
        k: as r: the keys.
        v: f32 [n_values, n_heads, n_tokens, n_seqs]: the values.
        a: as k: what reads the state that b writes again; None if there is no such term.
        b: as k, or None.
        s: f32 [n_keys, n_values, n_heads, n_seqs], the first states.
        grad: of the outputs, the shape of v.
        grad_s: f32 [n_keys, n_values, n_heads, n_slots n_seqs], of the states after the last token, the one before ...
        before: outputs are made of the state before the token.

    Returns:
        Gradients by name: r, w, k, v, a, b, s, each of the shape of its source (a and b None if they are).

    Raises:
        ValueError: shapes do not fit.
    """
    like_k = all(t is None or t.ne == k.ne for t in (r, w, a, b)) and (a is None) == (b is None)
    n, heads, tokens, seqs = k.ne
    fits = like_k and v.ne == grad.ne == (v.ne[0], heads, tokens, seqs) and s.ne == (n, v.ne[0], heads, seqs)
    require("recurrence_back", fits and grad_s.ne[:3] == s.ne[:3] and seqs > 0 and grad_s.ne[3] % seqs == 0,
            "r, w, a and b must be as k, grad as v, and states fit them", k, v, s, grad, grad_s)  # fmt: skip
    for name, t in {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "s": s, "grad": grad, "grad_s": grad_s}.items():
        if t is not None:
            require_contiguous("recurrence_back", name, t)
    parts: list[tuple[str, Dims]] = [("r", k.ne), ("w", k.ne), ("k", k.ne), ("v", v.ne), ("s", s.ne)]
    if a is not None:
        parts += [("a", k.ne), ("b", k.ne)]
    sizes = [int(np.prod(ne)) for _, ne in parts]
    all_parts = new_node(RECURRENCE_BACK, types.F32, (sum(sizes), 1, 1, 1), (r, w, k, v, s, grad, grad_s, a, b),
                         (int(before),))  # fmt: skip
    found: dict[str, Tensor | None] = {"a": None, "b": None}
    for i, (name, ne) in enumerate(parts):
        found[name] = ops.reshape_4d(ops.view_1d(all_parts, sizes[i], 4 * sum(sizes[:i])), *ne)
    return found


@RECURRENCE_BACK.reference
def _(node, r, w, k, v, s, grad, grad_s, a=None, b=None):
    tokens, zero = k.shape[1], np.zeros_like(k)
    a, b = (zero if x is None else x for x in (a, b))
    states, cs = [s], []  # [seqs, heads, values, keys]
    for t in range(tokens):
        cs.append(np.einsum("shvk,shk->shv", states[-1], a[:, t]))
        states.append(
            states[-1] * w[:, t, :, None] + cs[-1][..., None] * b[:, t, :, None] + v[:, t][..., None] * k[:, t, :, None]
        )
    g, out = np.zeros_like(s), {n: np.zeros_like(k) for n in "rwkab"} | {"v": np.zeros_like(v)}
    slots = grad_s.reshape(-1, *s.shape)
    for t in reversed(range(tokens)):
        if tokens - 1 - t < len(slots):
            g = g + slots[tokens - 1 - t]
        read = states[t if node.params.before else t + 1]
        out["r"][:, t] = np.einsum("shv,shvk->shk", grad[:, t], read)
        if not node.params.before:
            g = g + grad[:, t][..., None] * r[:, t, :, None]
        out["k"][:, t], out["v"][:, t] = np.einsum("shvk,shv->shk", g, v[:, t]), np.einsum("shvk,shk->shv", g, k[:, t])
        dc = np.einsum("shvk,shk->shv", g, b[:, t])
        out["b"][:, t] = np.einsum("shvk,shv->shk", g, cs[t])
        out["a"][:, t] = np.einsum("shvk,shv->shk", states[t], dc)
        out["w"][:, t] = (states[t] * g).sum(2)
        g = g * w[:, t, :, None] + dc[..., None] * a[:, t, :, None]
        if node.params.before:
            g = g + grad[:, t][..., None] * r[:, t, :, None]
    parts = [out["r"], out["w"], out["k"], out["v"], g] + ([out["a"], out["b"]] if node.src[7] is not None else [])
    return np.concatenate([p.reshape(-1) for p in parts])


@jitted
def multiply(dst, to, src, at, factors, by, n):
    """dst = src * factors for n contiguous f32."""
    for i in range(0, n, 16):
        product = vec.load_first(src, at + 4 * i, n - i) * vec.load_first(factors, by + 4 * i, n - i)
        vec.store_first(dst, to + 4 * i, product, n - i)


@jitted
def add_product(dst, to, x, at, y, by, n):
    """dst += x * y for n contiguous f32."""
    for i in range(0, n, 16):
        x_i, y_i = vec.load_first(x, at + 4 * i, n - i), vec.load_first(y, by + 4 * i, n - i)
        vec.store_first(dst, to + 4 * i, vec.fma(x_i, y_i, vec.load_first(dst, to + 4 * i, n - i)), n - i)


@functools.cache
def make_recurrence_back(mixes: bool, before: bool):
    """Kernel; src0 to src8 are r, w, k, v, s, grad, grad_s, a, b.

    Args:
        mixes: there are a and b.
        before: outputs are made of the state before the token.
    """

    @kernel
    def recurrence_back_heads(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, src3, src3_ne,
        src3_nb, src4, src4_ne, src4_nb, src5, src5_ne, src5_nb, src6, src6_ne, src6_nb, src7, src7_ne, src7_nb, src8,
        src8_ne, src8_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        n, heads, tokens, seqs = src2_ne[0], src2_ne[1], src2_ne[2], src2_ne[3]
        values = src3_ne[0]
        keyed, valued = 4 * n * heads * tokens * seqs, 4 * values * heads * tokens * seqs
        states = 4 * n * values * heads * seqs
        dr, dw, dk, dv = 0, keyed, 2 * keyed, 3 * keyed
        ds, da, db = dv + valued, dv + valued + states, dv + valued + states + keyed
        n_slots, row = src6_ne[3] // seqs, 4 * n
        history = COUNTER_LINE + ith * row * (tokens + 2)
        g = history + row * (tokens + 1)
        for unit in range(heads * seqs * ith // nth, heads * seqs * (ith + 1) // nth):
            head, seq = unit % heads, unit // heads
            for t in range(tokens):
                at = ((seq * tokens + t) * heads + head) * row
                for i in range(0, row, 4):
                    memory.store_f32(dst, dr + at + i, np.float32(0))
                    memory.store_f32(dst, dw + at + i, np.float32(0))
                    memory.store_f32(dst, dk + at + i, np.float32(0))
                    if mixes:
                        memory.store_f32(dst, da + at + i, np.float32(0))
                        memory.store_f32(dst, db + at + i, np.float32(0))
            for j in range(values):
                state = (unit * values + j) * row
                for i in range(0, row, 4):
                    memory.store_f32(work, history + i, memory.load_f32(src4, state + i))
                    memory.store_f32(work, g + i, np.float32(0))
                for t in range(tokens):
                    token = (seq * tokens + t) * heads + head
                    at, old, new = token * row, history + t * row, history + (t + 1) * row
                    multiply(work, new, work, old, src1, at, n)
                    if mixes:
                        state_rows.add_scaled(work, new, src8, at, state_rows.dot(work, old, src7, at, n), n)
                    state_rows.add_scaled(work, new, src2, at, memory.load_f32(src3, 4 * (token * values + j)), n)
                for t in range(tokens - 1, -1, -1):
                    token = (seq * tokens + t) * heads + head
                    at, old, by = token * row, history + t * row, 4 * (token * values + j)
                    if tokens - 1 - t < n_slots:
                        state_rows.add_scaled(work, g, src6, (tokens - 1 - t) * states + state, np.float32(1), n)
                    grad = memory.load_f32(src5, by)
                    if before:
                        state_rows.add_scaled(dst, dr + at, work, old, grad, n)
                    else:
                        state_rows.add_scaled(dst, dr + at, work, old + row, grad, n)
                        state_rows.add_scaled(work, g, src0, at, grad, n)
                    state_rows.add_scaled(dst, dk + at, work, g, memory.load_f32(src3, by), n)
                    memory.store_f32(dst, dv + by, state_rows.dot(work, g, src2, at, n))
                    add_product(dst, dw + at, work, old, work, g, n)
                    if mixes:
                        dc = state_rows.dot(work, g, src8, at, n)
                        state_rows.add_scaled(dst, db + at, work, g, state_rows.dot(work, old, src7, at, n), n)
                        state_rows.add_scaled(dst, da + at, work, old, dc, n)
                        multiply(work, g, work, g, src1, at, n)
                        state_rows.add_scaled(work, g, src7, at, dc, n)
                    else:
                        multiply(work, g, work, g, src1, at, n)
                    if before:
                        state_rows.add_scaled(work, g, src0, at, grad, n)
                for i in range(0, row, 4):
                    memory.store_f32(dst, ds + state + i, memory.load_f32(work, g + i))

    return recurrence_back_heads


@RECURRENCE_BACK.kernel
def _(node):
    return None if not are_f32(node.src) else make_recurrence_back(node.src[7] is not None, bool(node.params.before))


@RECURRENCE_BACK.work_size
def _(node, nth):
    k = node.src[2]
    return 4 * k.ne[0] * (k.ne[2] + 2) * nth


@RECURRENCE_BACK.flops
def _(node):
    k, v = node.src[2:4]
    return 20 * k.nelements * v.ne[0]


def _cases():
    def case(name, *sizes, mixes=False, before=False, slots=1):
        keys, values, heads, tokens, seqs = sizes

        @RECURRENCE_BACK.case(name)
        def _(t):
            keyed, valued = (keys, heads, tokens, seqs), (values, heads, tokens, seqs)
            a, b = (t("F32", *keyed, low=-0.5, high=0.5) if mixes else None for _ in range(2))
            found = recurrence_back(
                t("F32", *keyed), t("F32", *keyed, low=0), t("F32", *keyed), t("F32", *valued), a, b,
                t("F32", keys, values, heads, seqs), t("F32", *valued), t("F32", keys, values, heads, slots * seqs),
                before=before,
            )  # fmt: skip
            return found["r"].view_src

    case("decay", 16, 16, 2, 4, 2)
    case("two sizes, snapshots", 21, 5, 3, 4, 2, slots=3)
    case("before", 8, 8, 2, 3, 1, before=True)
    case("mixed", 19, 7, 2, 3, 2, mixes=True)
    case("more slots than tokens", 16, 3, 1, 2, 1, slots=4)


_cases()
