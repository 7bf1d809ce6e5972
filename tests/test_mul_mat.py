"""mul_mat through graphs: builder's checks, ggml's cases, precision, strided weights, panels and shared activations."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import op as ops_registry
from ggjit import ops, types
from ggjit.backend import alloc_ctx_tensors
from ggjit.backends.cpu import PANEL
from ggjit.context import Context
from ggjit.dev.cases import nmse
from ggjit.graph import Graph

MUL_MAT = ops_registry.by_name("mul_mat")


@pytest.fixture(autouse=True)
def context():
    with Context(32 << 20) as ctx:
        yield ctx


def leaf(name, *ne, seed=0):
    t = gg.new_tensor(types.by_name(name), *ne)
    t.set(np.random.default_rng(seed).standard_normal(t.ne[::-1]).astype(np.float32))
    return t.set_name(f"{name}_{seed}")


def compute(node, n_threads=1):
    Graph(64).build_forward_expand(node).compute(n_threads)
    return node.numpy().copy()


def executed(node, n_threads=2):
    from ggjit.lower import lower

    return lower(Graph(64).build_forward_expand(node), n_threads)


# ---- builder
# -----------------------------------------------------------------------------------------------------------


def test_s12_s13_worked_example():
    """The product of ggml's "simple" example."""
    a = gg.from_numpy(np.float32([[2, 8], [5, 1], [4, 2], [8, 6]]))
    b = gg.from_numpy(np.float32([[10, 5], [9, 9], [5, 4]]))
    got = compute(ops.mul_mat(a, b))
    assert got.reshape(3, 4).tolist() == [[60, 55, 50, 110], [90, 54, 54, 126], [42, 29, 28, 64]]


def test_s12_s15_shape_and_params():
    node = ops.mul_mat(leaf("F16", 64, 5, 2), leaf("F32", 64, 3, 4, 2), prec=10, hint=1)
    assert (node.type, node.ne) == (types.F32, (5, 3, 4, 2))
    assert np.frombuffer(node.op_params, np.int32)[:2].tolist() == [10, 1]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (lambda: leaf("F32", 8, 3), lambda: leaf("F32", 7, 2),
         r"mul_mat: src0.ne\[0\] must equal src1.ne\[0\], got \[8, 3\] and \[7, 2\] \('F32_0', 'F32_0'\)"),
        (lambda: ops.transpose(leaf("F32", 3, 8)), lambda: leaf("F32", 8, 2), "src0 must not be transposed"),
        (lambda: leaf("F32", 8, 3), lambda: ops.transpose(leaf("F32", 2, 8)), r"src1.nb\[0\] must be the 4 bytes"),
        (lambda: leaf("F32", 8, 3, 2), lambda: leaf("F32", 8, 2, 3), r"src0.ne\[2:\] must divide src1.ne\[2:\]"),
        (lambda: ops.permute(leaf("F32", 8, 4, 2), 2, 0, 1, 3), lambda: leaf("F32", 4, 2, 8), "src0"),
    ],
)  # fmt: skip
def test_s15_s16_s17_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        ops.mul_mat(a(), b())


def test_s38_permuted_v_of_attention_is_refused():
    """One row is contiguous and transposed: still refused, as ggml does."""
    v = ops.permute(leaf("F32", 64, 1, 12), 1, 2, 0, 3)
    with pytest.raises(ValueError, match="must not be transposed"):
        ops.mul_mat(v, leaf("F32", 1, 3, 12))


def test_types_without_kernels():
    node = ops.mul_mat(gg.new_tensor(types.by_name("Q8_1"), 32, 4), leaf("F32", 32, 2))
    assert not MUL_MAT.supported(node)
    with pytest.raises(NotImplementedError, match="must have kernels for the types, got Q8_1 and F32"):
        executed(node)


# ---- values
# ------------------------------------------------------------------------------------------------------------


def test_s14_s18_a_linear_layer_of_another_framework():
    """A weight that others write as (n_out, n_in) has ne {n_in, n_out} and the same bytes: nothing is transposed."""
    r = np.random.default_rng(0)
    weight = r.standard_normal((5, 8), np.float32)  # y = x W^T
    x = r.standard_normal((3, 8), np.float32)
    w = gg.from_numpy(weight)
    assert w.ne == (8, 5, 1, 1) and np.array_equal(w.bytes(), weight.reshape(-1).view(np.uint8))
    y = ops.mul_mat(w, gg.from_numpy(x))
    assert y.ne == (5, 3, 1, 1)
    assert np.allclose(compute(y)[0, 0], x.astype(np.float64) @ weight.T.astype(np.float64), atol=1e-5)


def test_s15_s17_batches_and_steps():
    """Matrix i of `a` serves several of `b`; columns and matrices may lie anywhere and in any order."""
    wide, b = leaf("F32", 16, 6, 2), leaf("F32", 8, 4, 3, 3, seed=1)
    # [8, 3, 1, 2]: each second row, from its element 4 on
    a = ops.view_4d(wide, 8, 3, 1, 2, 2 * wide.nb[1], wide.nb[2], wide.nb[2], 16)
    b = ops.permute(b, 0, 3, 2, 1)  # [8, 3, 3, 4]: dimension 1 has the largest step
    node = ops.mul_mat(a, b)
    assert node.ne == (3, 3, 3, 4) and node.nb[0] == 4
    left = a.numpy().astype(np.float64)[np.arange(4) // 2][:, [0, 0, 0]]
    want = np.einsum("wzmk,wznk->wznm", left, b.numpy().astype(np.float64))
    assert np.abs(compute(node, 2) - want).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "limit"), [("F32", 1e-10), ("F16", 1e-6), ("BF16", 1e-5), ("Q8_0", 1e-4), ("Q4_1", 1e-4)]
)
@pytest.mark.parametrize("n", [1, 5, 40])
def test_precision(name, limit, n):
    """Against float64 with the weights as they are stored."""
    a, b = leaf(name, 512, 70), leaf("F32", 512, n, seed=1)
    want = b.numpy().astype(np.float64) @ a.numpy().astype(np.float64).swapaxes(2, 3)
    assert nmse(want, compute(ops.mul_mat(a, b), 2)) < limit


def test_columns_and_threads_do_not_change_bits():
    """Tokens of a prompt alone, in pieces, at once; one to three threads."""
    for name in ("F32", "Q4_1"):
        a, b = leaf(name, 256, 50), leaf("F32", 256, 30, seed=1)
        whole = compute(ops.mul_mat(a, b), 1)[0, 0]
        for pieces, n_threads in (((1,) * 30, 2), ((7, 23), 3), ((20, 10), 2), ((30,), 3)):
            at = 0
            for n in pieces:
                piece = ops.view_2d(b, 256, n, b.nb[1], at * b.nb[1])
                got = compute(ops.mul_mat(a, piece), n_threads)[0, 0]
                assert np.array_equal(got.view(np.uint32), whole[at : at + n].view(np.uint32)), (name, pieces)
                at += n


@pytest.mark.parametrize("rows", [16, 40, 3000])
def test_threads_share_the_rows_of_a_product(rows):
    """Few rows are shared evenly, of many an eighth is taken in chunks; a pair of products too."""
    w, v = leaf("F32", 256, rows), leaf("F32", 256, rows, seed=2)
    x = leaf("F32", 256, 1, seed=1)
    a, b = (t.numpy().astype(np.float64)[0, 0] @ x.numpy()[0, 0, 0] for t in (w, v))
    results = []
    for n_threads in (1, 2, 3, 5):
        product = ops.mul_mat(w, x)
        both = ops.swiglu_split(ops.mul_mat(w, x), ops.mul_mat(v, x))
        for node in (product, both):
            node.set(np.nan)
        graph = Graph(64).build_forward_expand(product).build_forward_expand(both)
        graph.compute(n_threads)
        results.append([node.numpy().reshape(-1).copy() for node in (product, both)])
    assert nmse(a, results[0][0]) < 1e-12 and nmse(a / (1 + np.exp(-a)) * b, results[0][1]) < 1e-12
    for some in results[1:]:
        assert all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(some, results[0], strict=True))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_weights_in_a_cache(name):
    """K of an attention: heads side by side in a row of the cache, seen head by head through a permuted view."""
    n_kv, heads, size = 21, 3, 64
    cache = leaf(name, heads * size, 32)
    row = types.row_size(cache.type, size)
    k = ops.view_3d(cache, size, n_kv, heads, cache.nb[1], row, 5 * cache.nb[1])
    q = ops.permute(leaf("F32", size, 2 * heads, 4, seed=1), 0, 2, 1, 3)
    got = compute(ops.mul_mat(k, q), 2)
    keys = cache.numpy()[0, 0, 5 : 5 + n_kv].reshape(n_kv, heads, size).transpose(1, 0, 2).astype(np.float64)
    want = q.numpy()[0].astype(np.float64) @ keys.repeat(2, 0).swapaxes(1, 2)
    assert nmse(want, got[0]) < {"Q8_0": 1e-4, "F16": 1e-6}.get(name, 1e-10)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("n", [1, 40])
def test_panel_buffer(name, n):
    """Weights packed at load give the bits of weights packed on the way."""
    rows = leaf(name, 256, 37, 2)
    b = leaf("F32", 256, n, 2, seed=1)
    want = compute(ops.mul_mat(rows, b), 2)
    with Context(1 << 20, no_alloc=True) as weights:
        packed = gg.new_tensor(rows.type, *rows.ne)
    alloc_ctx_tensors(weights, PANEL)
    packed.buffer.set_tensor(packed, rows.bytes())
    got = compute(ops.mul_mat(packed, b), 2)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    part = ops.view_3d(packed, 256, 16, 2, packed.nb[1], packed.nb[2], 0)
    assert not MUL_MAT.supported(ops.mul_mat(part, b))


def test_empty():
    assert compute(ops.mul_mat(leaf("F32", 8, 4), gg.new_tensor(types.F32, 8, 0))).size == 0


# ---- lowering
# ------------------------------------------------------------------------------------------------------------


def test_activations_are_shared():
    """q, k, v of one input: its activations are quantized once; another input's again."""
    x, y = leaf("F32", 64, 3), leaf("F32", 64, 3, seed=1)
    products = [ops.mul_mat(leaf(name, 64, 16, seed=i), x) for i, name in enumerate(("Q8_0", "Q4_0", "Q4_1"))]
    node = ops.mul_mat(leaf("Q8_0", 64, 16, seed=5), y)
    for p in products:
        node = ops.add(node, p)
    names = [s.kernel.name for s in executed(node).steps]
    assert names.count("act_q8") == 2 and names.count("mul_mat_few") == 4


def test_float_activations_need_no_step():
    names = [s.kernel.name for s in executed(ops.mul_mat(leaf("F32", 64, 16), leaf("F32", 64, 2))).steps]
    assert names == ["mul_mat_few"]


@pytest.mark.parametrize("b_name", ["F32", "BF16"])
@pytest.mark.parametrize(("k", "n"), [(64, 2), (1029, 1), (43, 40)])
def test_activations_for_f16_weights_are_rounded_to_f16(b_name, k, n):
    """As ggml does; beyond that the product is exact to f32."""
    a, b = leaf("F16", k, 19), leaf(b_name, k, n, seed=1)
    want = b.numpy().astype(np.float16).astype(np.float64) @ a.numpy().astype(np.float64).swapaxes(2, 3)
    assert nmse(want, compute(ops.mul_mat(a, b), 2)) < 1e-12


@pytest.mark.parametrize("build", [ops.mul_mat, lambda a, b: ops.mul_mat_id(a, b, leaf("I32", 1, 2))])
def test_weights_without_columns_are_named(build):
    with gg.Context(1 << 20), pytest.raises(ValueError, match=r"src0.ne\[0\] must be at least 1, got \[0, 4, 1, 1\]"):
        build(leaf("F32", 0, 4), leaf("F32", 0, 2))
