"""Gradients: every case of every op against differences of the float64 reference, two models against JAX.

All cases run if GGJIT_FULL_TESTS is set; else some of each op.
"""

import math
import os
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit.autodiff import FLOATS
from ggjit.dev.cases import CaseInputs, nmse
from ggjit.dev.gradients import gradient_errors, graph_errors, leafs_of
from ggjit.graph import Graph
from ggjit.op import all_ops
from ggjit.ops.unary import FUNCTIONS
from ggjit.tensor import Tensor

FULL = bool(os.environ.get("GGJIT_FULL_TESTS"))
N_QUICK = 3
OPS = [op for op in all_ops() if op.name != "none"]
CASES = [(op, name) for op in OPS if op.has_backward for name in (op.cases if FULL else [*op.cases][:N_QUICK])]

WITHOUT_RULE = {
    "fill": "its result does not depend on its source",
    "arange": "it has no source",
    "opt_step_adamw": "it ends a step of training",
    "opt_step_sgd": "it ends a step of training",
}
"""Ops without a backward rule besides the gradients of others (`*_back`) and those without float result."""
LIMITS = {("flash_attn_ext", "long, few queries"): 5e-4}
"""Of cases: a sink's weight is 1 less the sum of 1100 others."""
WITHOUT_SOURCE = {"rope": (2,)}
"""Sources that have no gradient: the frequency factors of rope."""
OPAQUE = {("map_custom3", "three sources"), ("custom", "in place")}
"""Cases of a user's function that comes without a backward rule."""
NOT_SMOOTH = ("floor", "ceil", "round", "trunc")


def nodes_of_cases(op):
    with gg.Context(64 << 20):
        for name in op.cases:
            yield op.cases[name](CaseInputs(0))


@pytest.mark.parametrize("op", [op for op in OPS if not op.has_backward], ids=lambda op: op.name)
def test_only_some_ops_have_no_rule(op):
    if op.name in WITHOUT_RULE or "_back" in op.name:
        return
    for node in nodes_of_cases(op):
        assert node.type.dtype is not None and node.type.dtype.kind == "i", "an op with a float result must have one"


def is_refused(op, node: Tensor) -> bool:
    """In place, to a type that passes no gradient, or a function without one."""
    function = getattr(node.params, "function", None) if op.name == "unary" else None
    in_place = op.inplace and node.view_src is not None
    return in_place or node.type not in FLOATS or (function is not None and FUNCTIONS[function] in NOT_SMOOTH)


@pytest.mark.parametrize(("op", "name"), CASES, ids=[f"{op.name}-{name}" for op, name in CASES])
def test_case(op, name):
    with gg.Context(64 << 20):
        node = op.cases[name](CaseInputs(0))
        refused = ((op.name, name) in OPAQUE or is_refused(op, node)) and any(t.type in FLOATS for t in leafs_of(node))
    if refused:
        with pytest.raises(NotImplementedError, match=f"build_backward_expand: {op.name}: "):
            gradient_errors(op, name)
        return
    for leaf, error, limit in gradient_errors(op, name, WITHOUT_SOURCE.get(op.name, ())):
        limit = LIMITS.get((op.name, name), limit)
        assert error <= limit, f"{leaf}: error {error:.3g}, limit {limit:.3g}"


# -- graphs of several ops ---------------------------------------------------------------------------------------------


def repeated_use(t):
    x = t("F32", 6, 5)
    y = gg.mul(gg.tanh(x), gg.sigmoid(x))
    return gg.add(gg.mul(y, y), gg.sub(x, y))


def broadcasts(t):
    x, row, column, one = t("F32", 6, 5, 2), t("F32", 6), t("F32", 1, 5), t("F32", 1, low=1, high=2)
    return gg.div(gg.sub(gg.mul(gg.add(x, row), column), gg.add(column, one)), one)


def views_of_views(t):
    x = gg.permute(t("F32", 8, 6, 4), 0, 2, 1, 3)
    inner = gg.view_3d(x, 5, 3, 2, x.nb[1], x.nb[2], x.nb[1] + 8)
    rows = gg.view_2d(inner, 3, 3, inner.nb[1], 4)
    return gg.mul(gg.cont(gg.transpose(rows)), gg.cont(gg.transpose(gg.view_2d(x, 3, 3, x.nb[1], 0))))


def padded_f16(t):
    x = gg.view_2d(t("F16", 20, 6), 12, 6, 40, 8)
    return gg.mul_mat(x, gg.gelu(gg.view_2d(t("F32", 16, 5), 12, 5, 64, 16)))


def products_of_one_source(t):
    x = t("F32", 16, 16)
    return gg.mul_mat(gg.mul_mat(x, x), x)


def grouped_heads_and_batches(t):
    k, q = gg.permute(t("BF16", 16, 2, 9, 2), 0, 2, 1, 3), gg.permute(t("F32", 16, 6, 5, 4), 0, 2, 1, 3)
    return gg.soft_max_ext(gg.mul_mat(gg.cast(k, gg.F32), q), t("F32", 9, 7, 3, 2), 0.3, 4.0, sinks=t("F32", 6))


def cache_of_rows(t):
    cache = t("F32", 12, 8)
    first = gg.set_rows(cache, gg.rms_norm(t("F32", 12, 3), 1e-5), t.array(np.int64([5, 2, 5])))
    second = gg.set_rows(first, gg.silu(t("F32", 12, 2)), t.array(np.int64([2, 7])))
    return gg.mul_mat(gg.view_2d(second, 12, 6, second.nb[1], 48), t("F32", 12, 4))


def copy_into_memory(t):
    memory = t("F32", 40)
    copied = gg.cpy(gg.sqr(t("F32", 5, 4)), gg.view_2d(memory, 5, 4, 24, 8))
    return gg.mul(copied, t("F32", 5, 4))


def gates(t):
    h = gg.norm(t("F32", 32, 4), 1e-5)
    both = gg.mul_mat(t("F32", 32, 24), h)
    return gg.add(gg.swiglu(both), gg.geglu(both, swapped=True))


def closed_rows(t):
    """Two queries see nothing: their result and all that comes from them is 0."""
    mask = np.triu(np.full((6, 9), -np.inf, np.float16), 3)
    mask[[1, 4]] = -np.inf
    q, k, v = t("F32", 8, 6, 4), t("F32", 8, 9, 2), t("F32", 5, 9, 2)
    return gg.flash_attn_ext(q, k, v, t.array(mask), 0.35)


GRAPHS = (
    repeated_use, broadcasts, views_of_views, padded_f16, products_of_one_source, grouped_heads_and_batches,
    cache_of_rows, copy_into_memory, gates, closed_rows,
)  # fmt: skip


@pytest.mark.parametrize("build", GRAPHS, ids=lambda f: f.__name__)
def test_graph(build):
    errors = graph_errors(build)
    assert errors
    for leaf, error, limit in errors:
        assert error <= limit, f"{leaf}: error {error:.3g}, limit {limit:.3g}"


# -- models ------------------------------------------------------------------------------------------------------------

N_HEAD, N_HEAD_KV, EPS = 4, 2, 1e-5


class Model:
    """Weights as parameters, tokens and targets of one file, and the parts that both models share."""

    def __init__(self, name: str) -> None:
        self.data = np.load(Path(__file__).with_name("data") / f"gradients_{name}.npz")
        self.names = [k[5:] for k in self.data.files if k.startswith("grad ")]
        self.weights = {k: gg.from_numpy(self.data[k], name=k).set_param() for k in self.names}
        self.tokens = gg.from_numpy(self.data["tokens"], name="tokens")
        self.n = len(self.data["tokens"])

    def linear(self, x: Tensor, name: str, bias: str = "") -> Tensor:
        y = gg.mul_mat(self.weights[name], x)
        return gg.add(y, self.weights[bias]) if bias else y

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross entropy, composed."""
        labels = np.zeros(logits.ne[1::-1], np.float32)
        labels[np.arange(self.n), self.data["targets"]] = 1.0
        likely = gg.mul(gg.log(gg.soft_max(logits)), gg.from_numpy(labels))
        loss = gg.scale(gg.sum(likely), -1.0 / self.n)
        loss.set_loss()
        return loss

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention from mul_mat and soft_max: [d, n_head, n] each -> [n_embd, n]."""
        d, heads, n = q.ne[:3]
        q, k = (gg.permute(t, 0, 2, 1, 3) for t in (q, k))
        scores = gg.soft_max(gg.diag_mask_inf(gg.scale(gg.mul_mat(k, q), 1.0 / math.sqrt(d)), 0))
        values = gg.cont(gg.permute(v, 1, 2, 0, 3))  # [n, d, n_head]
        return gg.cont_2d(gg.permute(gg.mul_mat(values, scores), 0, 2, 1, 3), d * heads, n)

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by flash_attn_ext."""
        d, heads, n = q.ne[:3]
        q, k, v = (gg.permute(t, 0, 2, 1, 3) for t in (q, k, v))
        mask = gg.from_numpy(np.where(np.tri(n), 0.0, -np.inf).astype(np.float16))
        return gg.reshape_2d(gg.flash_attn_ext(q, k, v, mask, 1.0 / math.sqrt(d)), d * heads, n)

    def check(self, loss: Tensor, n_threads: int) -> None:
        graph = Graph(1024, grads=True).build_forward_expand(loss).build_backward_expand().reset()
        graph.compute(n_threads)
        assert abs(loss.numpy().item() - self.data["loss"]) < 1e-6
        for name in self.names:
            error = nmse(
                self.data[f"grad {name}"], graph.grad(self.weights[name]).numpy().reshape(self.data[name].shape)
            )
            assert error < 1e-11, f"{name}: {error:.3g}"


def gpt2(m: Model, attention) -> Tensor:
    w, n = m.weights, m.n
    n_embd = w["wte"].ne[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return gg.add(gg.mul(gg.norm(x, EPS), w[f"{name}/g"]), w[f"{name}/b"])

    x = gg.get_rows(w["wte"], m.tokens)
    x = gg.add(x, gg.get_rows(w["wpe"], gg.from_numpy(np.arange(n, dtype=np.int32))))
    qkv = m.linear(norm(x, "ln_1"), "c_attn/w", "c_attn/b")
    parts = [gg.view_2d(qkv, n_embd, n, qkv.nb[1], 4 * n_embd * i) for i in range(3)]
    q, k, v = (gg.cont_3d(t, n_embd // N_HEAD, N_HEAD, n) for t in parts)
    x = gg.add(m.linear(attention(q, k, v), "c_proj/w", "c_proj/b"), x)
    h = gg.gelu(m.linear(norm(x, "ln_2"), "c_fc/w", "c_fc/b"))
    x = gg.add(m.linear(h, "mlp_proj/w", "mlp_proj/b"), x)
    return m.loss(m.linear(norm(x, "ln_f"), "wte"))


def llama(m: Model, attention) -> Tensor:
    w, n = m.weights, m.n
    positions = gg.from_numpy(np.arange(n, dtype=np.int32))

    def norm(x: Tensor, name: str) -> Tensor:
        return gg.mul(gg.rms_norm(x, EPS), w[f"{name}/g"])

    x = gg.get_rows(w["token_embd"], m.tokens)
    h = norm(x, "attn_norm")
    q, k, v = (m.linear(h, f"attn_{p}") for p in "qkv")
    d = q.ne[0] // N_HEAD
    q, k, v = (gg.reshape_3d(t, d, t.ne[0] // d, n) for t in (q, k, v))
    q, k = (gg.rope(t, positions, d, 0) for t in (q, k))
    x = gg.add(m.linear(attention(q, k, v), "attn_output"), x)
    h = norm(x, "ffn_norm")
    h = gg.swiglu_split(m.linear(h, "ffn_gate"), m.linear(h, "ffn_up"))
    x = gg.add(m.linear(h, "ffn_down"), x)
    return m.loss(m.linear(norm(x, "output_norm"), "output"))


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("attention", ["attention", "fused_attention"])
@pytest.mark.parametrize("model", [gpt2, llama], ids=["gpt2", "llama"])
def test_model(model, attention, n_threads):
    with gg.Context(16 << 20):
        m = Model(model.__name__)
        m.check(model(m, getattr(m, attention)), n_threads)


def test_model_in_planned_memory():
    """The gradients are still there when memory is reused between nodes."""
    with gg.Context(4 << 20, no_alloc=True):
        m = Model("llama")
        m.check(llama(m, m.fused_attention), 2)
