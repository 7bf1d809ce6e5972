"""Make gradients_gpt2.npz and gradients_llama.npz: losses and gradients of two small language models by JAX.

Run with jax (CPU) and numpy: `python tests/data/gradients.py`. All is computed in float64 and kept as float32. A file
holds tokens and targets, the weights by name, `loss`, and for each weight `grad NAME`. Matrices are [n_out, n_in].
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
N_VOCAB, N_EMBD, N_HEAD, N_HEAD_KV, N_TOKENS, N_FF, EPS = 29, 32, 4, 2, 7, 48, 1e-5
D_HEAD = N_EMBD // N_HEAD


def weights(rng, shapes):
    """Random weights, rounded to float32; gains near 1."""
    made = {}
    for name, shape in shapes.items():
        w = rng.normal(size=shape) / np.sqrt(shape[-1])
        made[name] = (1.0 + 0.3 * w if name.endswith("/g") else w).astype(np.float32).astype(np.float64)
    return made


def loss_of(logits, targets):
    """Mean cross entropy."""
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets])


def attention(q, k, v):
    """Causal attention of [n_head, n_tokens, d] queries; heads of k and v serve several of q."""
    k, v = (jnp.repeat(x, q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = jnp.einsum("hnd,hmd->hnm", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("hnm,hmd->nhd", jax.nn.softmax(scores), v).reshape(q.shape[1], -1)


def heads(x, n):
    """[n_tokens, n * d] -> [n, n_tokens, d]."""
    return x.reshape(x.shape[0], n, -1).swapaxes(0, 1)


# -- gpt2: one block, the token embedding is also the output matrix ----------------------------------------------------

GPT2 = {
    "wte": (N_VOCAB, N_EMBD), "wpe": (N_TOKENS + 2, N_EMBD), "ln_1/g": (N_EMBD,), "ln_1/b": (N_EMBD,),
    "c_attn/w": (3 * N_EMBD, N_EMBD), "c_attn/b": (3 * N_EMBD,), "c_proj/w": (N_EMBD, N_EMBD), "c_proj/b": (N_EMBD,),
    "ln_2/g": (N_EMBD,), "ln_2/b": (N_EMBD,), "c_fc/w": (4 * N_EMBD, N_EMBD), "c_fc/b": (4 * N_EMBD,),
    "mlp_proj/w": (N_EMBD, 4 * N_EMBD), "mlp_proj/b": (N_EMBD,), "ln_f/g": (N_EMBD,), "ln_f/b": (N_EMBD,),
}  # fmt: skip


def gpt2(w, tokens, targets):
    """Loss of GPT-2 with one block."""

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}/g"] + w[f"{name}/b"]

    def linear(x, name):
        return x @ w[f"{name}/w"].T + w[f"{name}/b"]

    x = w["wte"][tokens] + w["wpe"][: len(tokens)]
    q, k, v = (heads(part, N_HEAD) for part in jnp.split(linear(norm(x, "ln_1"), "c_attn"), 3, -1))
    x = x + linear(attention(q, k, v), "c_proj")
    x = x + linear(jax.nn.gelu(linear(norm(x, "ln_2"), "c_fc"), approximate=True), "mlp_proj")
    return loss_of(norm(x, "ln_f") @ w["wte"].T, targets)


# -- llama: one block, grouped heads, rope of neighbours ---------------------------------------------------------------

LLAMA = {
    "token_embd": (N_VOCAB, N_EMBD), "attn_norm/g": (N_EMBD,), "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_HEAD_KV * D_HEAD, N_EMBD), "attn_v": (N_HEAD_KV * D_HEAD, N_EMBD), "attn_output": (N_EMBD, N_EMBD),
    "ffn_norm/g": (N_EMBD,), "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF),
    "output_norm/g": (N_EMBD,), "output": (N_VOCAB, N_EMBD),
}  # fmt: skip


def rope(x):
    """Neighbours 2 k and 2 k + 1 of [n_head, n_tokens, d] turned by position * 10000^(-2 k / d)."""
    n, d = x.shape[1:]
    angle = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)
    return jnp.stack(turned, -1).reshape(x.shape)


def llama(w, tokens, targets):
    """Loss of llama with one block."""

    def norm(x, name):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}/g"]

    x = w["token_embd"][tokens]
    h = norm(x, "attn_norm")
    q, k, v = (heads(h @ w[f"attn_{p}"].T, n) for p, n in (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV)))
    x = x + attention(rope(q), rope(k), v) @ w["attn_output"].T
    h = norm(x, "ffn_norm")
    x = x + (jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return loss_of(norm(x, "output_norm") @ w["output"].T, targets)


def main():
    """Write both files beside this one."""
    for seed, (name, model, shapes) in enumerate((("gpt2", gpt2, GPT2), ("llama", llama, LLAMA))):
        rng = np.random.default_rng(seed)
        w = weights(rng, shapes)
        tokens, targets = (rng.integers(0, N_VOCAB, N_TOKENS) for _ in range(2))
        tokens[3] = tokens[1]  # a row that is read twice
        loss, grads = jax.value_and_grad(model)(w, tokens, targets)
        arrays = {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32), "loss": np.float32(loss)}
        arrays |= {k: np.float32(v) for k, v in w.items()} | {f"grad {k}": np.float32(v) for k, v in grads.items()}
        np.savez_compressed(Path(__file__).with_name(f"gradients_{name}.npz"), **arrays)


if __name__ == "__main__":
    main()
