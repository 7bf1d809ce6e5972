"""Element-wise ops, norms, views, copies and rows: errors, layouts, bytes, what the registered cases do not cover."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.cpu import cpu_level
from ggjit.jit import kernel, lazy_module
from ggjit.ops.binary import ADD, make_binary
from ggjit.ops.norm import make_norm, sum_of_squares
from ggjit.ops.unary import FORMULAS, FUNCTIONS

memory = lazy_module("ggjit.ops.lib.memory")
Q4_0, Q8_0 = types.by_name("Q4_0"), types.by_name("Q8_0")


@pytest.fixture(autouse=True)
def context():
    with gg.Context(8 << 20) as opened:
        yield opened


def leaf(values, type=None, name="x"):
    return gg.from_numpy(np.asarray(values), type, name)


def numbers(*ne, type=gg.F32, name="x"):
    """0, 1, 2 ... in memory order."""
    return gg.new_tensor(type, *ne, name=name).set(np.arange(math.prod(ne)).reshape(ne[::-1]))


def compute(*nodes, n_threads=2):
    gg.build(list(nodes)).compute(n_threads=n_threads)
    return nodes[0].numpy()


# --- views: seeds S19 to S31 ------------------------------------------------------------------------------------------


def test_s19_what_view_reshape_permute_and_cont_take_and_give():
    """View: of anything. Reshape: of what is contiguous. Permute: of anything. Cont: a copy, made when it runs."""
    a = numbers(6, 4, name="a")
    apart = ops.transpose(a)
    view = ops.view_2d(apart, 2, 3, 24, 8)
    assert (view.view_src, view.data, view.is_contiguous) == (a, a.data + 8, False)
    with pytest.raises(ValueError, match="reshape_1d: a must be contiguous"):
        ops.reshape_1d(apart, 24)
    shaped = ops.reshape_1d(a, 24)
    assert (shaped.view_src, shaped.data, shaped.is_contiguous) == (a, a.data, True)
    turned = ops.permute(apart, 1, 0, 2, 3)
    assert (turned.view_src, turned.data, turned.nb) == (a, a.data, a.nb)
    copy = ops.cont(apart)
    assert copy.view_src is None and copy.data != a.data and copy.is_contiguous
    before = copy.numpy().copy()
    assert not before.any() and np.array_equal(compute(copy), apart.numpy())
    assert [t.op.view for t in (view, shaped, turned, copy)] == [True, True, True, False]


def test_s30_cont_takes_rows_whole_where_they_are_dense():
    """Fig. 6: rows of 16 bytes that lie apart are copied whole; turned ones element by element, or in tiles."""
    a = numbers(4, 2, 3, name="a")
    rows, turned = ops.permute(a, 0, 2, 1, 3), ops.permute(a, 2, 0, 1, 3)
    assert rows.nb[:2] == (4, 32) and turned.nb[:2] == (16, 32) != rows.nb[:2]
    graph = gg.build([ops.cont(rows), ops.cont(ops.transpose(a)), ops.cont(turned)])
    graph.compute(1)
    used = [step.kernel.name for step in graph._executable(1).steps]
    assert ["runs" in used[0], "transposed" in used[1], "elements" in used[2]] == [True] * 3
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    assert np.array_equal(graph.nodes[1].numpy()[0], values.transpose(1, 0, 2))
    for node in graph.nodes:
        if node.op.name == "cont":
            assert np.array_equal(node.numpy(), node.src[0].numpy())


def test_s21_query_columns_keep_the_row_step():
    qkv = numbers(2304, 3, name="qkv")
    q = ops.view_2d(qkv, 768, 3, qkv.nb[1], 0)
    assert (q.ne, q.nb, q.is_contiguous) == ((768, 3, 1, 1), (4, 9216, 27648, 27648), False)
    k = ops.view_2d(qkv, 768, 3, qkv.nb[1], 768 * 4)
    assert k.data == qkv.data + 3072 and k.numpy()[0, 0, 1, 0] == 2304 + 768


def test_s23_s24_cache_write_prefix_and_head():
    """Fig. 3: n_ctx 6, n_embd 8, 2 heads of 4."""
    cache = gg.new_tensor(gg.F32, 6 * 8, name="cache").set(-1.0)
    row = numbers(8, name="row")
    write = ops.cpy(row, ops.view_1d(cache, 8, 4 * 8 * 2))
    prefix = ops.view_1d(cache, 3 * 8, 0)
    head = ops.view_2d(prefix, 4, 3, 32, 16)
    assert head.nb == (4, 32, 96, 96) and not head.is_contiguous and head.view_src is cache
    compute(write)
    assert np.array_equal(head.numpy()[0, 0], [[-1] * 4, [-1] * 4, [4, 5, 6, 7]])
    assert np.array_equal(cache.numpy().reshape(6, 8)[3], [-1] * 8)


def test_s25_reshape_shares_memory_and_needs_contiguity():
    a = numbers(6, 4, name="a")
    b = ops.reshape_3d(a, 2, 3, 4)
    assert b.data == a.data and b.nb == (4, 8, 24, 96) and b.is_contiguous and b.name == "a (reshaped)"
    with pytest.raises(ValueError, match=r"reshape_2d: a must be contiguous, .*use cont first \('a \(transposed\)'\)"):
        ops.reshape_2d(ops.transpose(a), 6, 4)
    with pytest.raises(ValueError, match=r"number of elements must stay the same, got \[6, 4, 1, 1\] and \[5, 5\]"):
        ops.reshape_2d(a, 5, 5)
    with pytest.raises(ValueError, match="ne\\[0\\] must be a multiple of 32, the block of Q8_0"):
        ops.reshape_2d(gg.new_tensor(Q8_0, 64, 4), 16, 16)


def test_s27_s28_permute_of_two_by_two():
    """Fig. 5: [[a, b], [c, d]] permuted by (1, 0, 2, 3) is the transpose."""
    a = leaf(np.float32([[1, 2], [3, 4]]), name="A")
    p, t = ops.permute(a, 1, 0, 2, 3), ops.transpose(a)
    assert p.nb[:2] == t.nb[:2] == (8, 4) and p.data == a.data and p.src == (a,)
    assert np.array_equal(p.numpy()[0, 0], [[1, 3], [2, 4]])
    assert (p.params.axis0, p.params.axis1, p.params.axis2, p.params.axis3) == (1, 0, 2, 3)
    assert (p.name, t.name) == ("A (permuted)", "A (transposed)")


def test_s26_s29_s31_cont_makes_a_new_tensor_of_any_shape():
    a = numbers(8, 3, name="a")
    copy = ops.cont(a)
    assert copy.data != a.data and copy.op.name == "cont" and copy.name == "a (cont)"
    merged = ops.cont_2d(ops.permute(numbers(4, 3, 2), 0, 2, 1, 3), 8, 3)
    assert np.array_equal(compute(copy, merged), a.numpy())
    want = np.arange(24).reshape(2, 3, 4).swapaxes(0, 1).reshape(3, 8)
    assert np.array_equal(merged.numpy()[0, 0], want)


def test_a_view_of_a_view_shows_the_owner():
    a = numbers(8, 6, name="a")
    inner = ops.view_2d(ops.view_2d(a, 8, 4, 32, 64), 3, 2, 64, 36)
    assert inner.view_src is a and inner.view_offs == 100 and inner.params.offset == 36
    assert np.array_equal(inner.numpy()[0, 0], [[25, 26, 27], [41, 42, 43]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a: ops.view_1d(a, 20, 120), "a view must lie inside its source, got offset 120 \\+ 80 bytes of 192"),
        (lambda a: ops.view_2d(a, 4, 4, 64, 0), "all elements must lie inside the source"),
        (lambda a: ops.view_1d(a, 4, -4), "must not be negative"),
        (lambda a: ops.permute(a, 0, 0, 1, 2), "axes must be 0, 1, 2 and 3 in some order, got \\[0, 0, 1, 2\\]"),
        (lambda a: ops.transpose(gg.new_tensor(Q8_0, 32, 32)), "dimension 0 of a block type must stay first"),
    ],
)
def test_views_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make(numbers(8, 6))


# --- what builders refuse ---------------------------------------------------------------------------------------------


def f32(*ne, name=""):
    return gg.new_tensor(gg.F32, *ne, name=name)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ops.add(f32(4, 3, name="a"), f32(3, 3, name="b")),
            ValueError,
            r"^add: each size of b must divide that of a, got \[4, 3, 1, 1\] and \[3, 3, 1, 1\] \('a', 'b'\)$",
        ),
        (lambda: ops.mul(f32(4), f32(4, 2)), ValueError, "^mul: each size of b"),
        (lambda: ops.add_cast(f32(8), f32(8), gg.F16), TypeError, "a must be F16, BF16 or quantized, got F32"),
        (lambda: ops.add_cast(gg.new_tensor(gg.F16, 8), f32(4), gg.F32), ValueError, "rows must be equally long"),
        (lambda: ops.scale(ops.permute(f32(8, 3, 2), 0, 2, 1, 3), 2.0), ValueError, "equally far apart"),
        (lambda: ops.relu(ops.transpose(f32(5, 4))), ValueError, "^relu: rows of a must be contiguous"),
        (lambda: ops.unary(f32(4), "softmin"), ValueError, "^unary: function must be one of abs, .* got 'softmin'"),
        (lambda: ops.swiglu(ops.permute(f32(8, 3, 2), 0, 2, 1, 3)), ValueError, "contiguous above dimension 1"),
        (lambda: ops.swiglu(f32(7)), ValueError, "^swiglu: ne\\[0\\] of a must be even"),
        (lambda: ops.geglu(f32(8), f32(4)), ValueError, "^geglu: a and b must have the same type and shape"),
        (lambda: ops.rms_norm(f32(8), -1.0), ValueError, "^rms_norm: eps must not be negative, got -1.0"),
        (lambda: ops.cpy(f32(8, 3), f32(8, 2)), ValueError, "^cpy: a and b must have equally many elements"),
        (lambda: ops.cont_2d(f32(8, 3), 5, 5), ValueError, "^cont_2d: the number of elements must stay the same"),
        (lambda: ops.cast(f32(40), Q4_0), ValueError, "^cast: ne\\[0\\] must be a multiple of 32, the block of Q4_0"),
        (lambda: ops.get_rows(f32(8, 3, 2), numbers(2, type=gg.I32)), ValueError, "^get_rows: a must have ne"),
        (lambda: ops.get_rows(f32(8, 3), numbers(2, type=gg.I64)), TypeError, "^get_rows: b must be I32, got I64"),
        (
            lambda: ops.set_rows(f32(8, 3), gg.new_tensor(gg.BF16, 8, 2), numbers(2, type=gg.I64)),
            TypeError,
            "^set_rows: b must be F32 or F16",
        ),
        (lambda: ops.set_rows(f32(8, 3), f32(8, 2), numbers(3, type=gg.I64)), ValueError, "a number for each row"),
        (lambda: ops.set_rows(f32(8, 3), f32(9, 2), numbers(2, type=gg.I64)), ValueError, "must agree in dimensions"),
    ],
)
def test_builders_refuse(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.add(f32(4, 3), gg.new_tensor(gg.F16, 4, 3)),
        lambda: ops.add(numbers(4, type=gg.I32), numbers(4, type=gg.I32)),
        lambda: ops.add(gg.new_tensor(Q4_0, 64, 2), f32(64)),
        lambda: ops.norm(gg.new_tensor(gg.F16, 8), 1e-5),
        lambda: ops.cast(gg.new_tensor(Q4_0, 64), gg.F16),
        lambda: ops.cast(numbers(8, type=gg.I32), gg.F16),
        lambda: ops.cast(ops.transpose(f32(32, 64)), Q4_0),
        lambda: ops.cpy(f32(64), ops.view_2d(gg.new_tensor(Q4_0, 64, 2), 32, 2, 36, 0)),
        lambda: ops.cast(f32(256), types.by_name("IQ2_S")),
        lambda: ops.set_rows(gg.new_tensor(types.by_name("IQ3_S"), 256, 3), f32(256, 2), numbers(2, type=gg.I64)),
    ],
)
def test_what_has_no_kernel_is_refused_before_it_runs(make):
    node = make()
    assert not node.op.supported(node)
    with pytest.raises(NotImplementedError, match=f"^{node.op.name}: the CPU backend must have a kernel"):
        compute(node)


@pytest.mark.parametrize(("bad", "position"), [(-1, 2), (5, 1), (1 << 40, 0)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_ids_out_of_range_are_named(bad, position, n_threads):
    ids = np.array([1, 4, 0], np.int64)
    ids[position] = bad
    write = ops.set_rows(f32(70, 5, name="cache"), f32(70, 3), leaf(ids, name="cells"))
    with pytest.raises(IndexError, match=rf"source 'cells' .* got {bad} at position {position} of \[3, 1, 1, 1\]"):
        compute(write, n_threads=n_threads)
    if abs(bad) < 1 << 31:
        read = ops.get_rows(f32(70, 5), leaf(np.int32(ids), name="tokens"))
        with pytest.raises(IndexError, match=rf"get_rows: .*source 'tokens' .* got {bad} at position {position}"):
            compute(read, n_threads=n_threads)


def test_positions_of_ids_count_over_all_dimensions():
    ids = np.zeros((2, 3), np.int32)
    ids[1, 1] = 9
    with pytest.raises(IndexError, match=r"got 9 at position 4 of \[3, 2, 1, 1\]"):
        compute(ops.get_rows(f32(8, 4, 2), leaf(ids)))
    with pytest.raises(IndexError, match=r"got 9 at position 4 of \[3, 2, 1, 1\]"):
        compute(ops.set_rows(f32(8, 4, 4), f32(8, 3, 4), leaf(ids)))


# --- values -----------------------------------------------------------------------------------------------------------


def test_names_of_copies():
    a, b = numbers(4, name="a"), numbers(4, name="b")
    assert ops.cpy(a, b).name == "b (copy of a)" and ops.cpy(a, f32(4)).name == "a (copy)"
    assert ops.cast(a, gg.F16).name == "a (copy)" and ops.add(a, b, inplace=True).name == "a (view)"
    assert ops.view_1d(a, 2, 0).name == "a (view)" and ops.dup(a).name == ""


def test_in_place_leaves_the_gaps_alone():
    a = numbers(10, 4)
    view = ops.view_2d(a, 7, 3, 40, 44)
    compute(ops.scale(view, -1.0, inplace=True))
    want = np.arange(40.0).reshape(4, 10)
    want[1:4, 1:8] *= -1
    assert np.array_equal(a.numpy()[0, 0], want)
    compute(ops.set_rows(ops.view_2d(a, 7, 3, 40, 44), f32(7, 1).set(0.5), leaf(np.int64([1]))))
    want[2, 1:8] = 0.5
    assert np.array_equal(a.numpy()[0, 0], want)


def test_of_two_rows_with_the_same_id_the_later_stays():
    rows = numbers(100, 6)
    for n_threads in (1, 2, 3):
        cache = f32(100, 2)
        compute(ops.set_rows(cache, rows, leaf(np.int64([1, 0, 1, 0, 1, 1]))), n_threads=n_threads)
        assert np.array_equal(cache.numpy()[0, 0], rows.numpy()[0, 0][[3, 5]])


def test_a_scalar_like_broadcast_of_rows():
    a, weights = numbers(70, 3), leaf(np.float32([[2], [3], [4]]))
    assert weights.ne == (1, 3, 1, 1)
    assert np.array_equal(compute(ops.mul(a, weights)), a.numpy() * weights.numpy())


def test_casts_to_integers_cut_and_copies_keep_bits():
    got = compute(ops.cast(leaf(np.float32([1.9, -1.9, 0.5, 1e6])), gg.I32))
    assert got.reshape(-1).tolist() == [1, -1, 0, 1000000]
    bits = np.uint16([0x7C01, 0xFE55, 1, 0x8000]).view(np.float16)  # a signalling NaN, a NaN, a denormal, -0
    for made in (ops.cont(leaf(bits)), ops.cont(ops.transpose(leaf(np.stack([bits, bits], 1))))):
        assert np.array_equal(compute(made).reshape(-1)[:4].view(np.uint16), bits.view(np.uint16))


def test_empty_tensors_compute():
    nodes = [
        ops.add(f32(8, 0), f32(8, 0)), ops.rms_norm(f32(8, 0), 1e-5), ops.silu(f32(0)), ops.cont(f32(5, 0, 3)),
        ops.get_rows(f32(8, 4), gg.new_tensor(gg.I32, 0)), ops.swiglu(f32(0, 3)),
    ]  # fmt: skip
    cache = numbers(8, 4)
    compute(*nodes, ops.set_rows(cache, f32(8, 0), gg.new_tensor(gg.I64, 0)))
    assert nodes[4].numpy().shape == (1, 1, 0, 8)
    assert np.array_equal(cache.numpy().reshape(-1), np.arange(32))


SPECIAL = np.float32(
    [0, -0.0, 1e-40, -1e-40, 1e-8, 5, -5, 20, -20, 88.7, -88.7, 104, -104, 1e30, -1e30, np.inf, -np.inf, np.nan]
)
NAN_AT_MINUS_INFINITY = ("silu", "gelu_quick", "gelu_erf", "hardswish")  # -inf * 0


@pytest.mark.parametrize("name", [f for f in FUNCTIONS if f != "xielu"])
def test_special_values(name):
    got = compute(ops.unary(leaf(SPECIAL), name)).reshape(-1)
    with np.errstate(all="ignore"):
        want = FORMULAS[name](np.float64(SPECIAL)).astype(np.float32)
    if name in NAN_AT_MINUS_INFINITY:
        want[-2] = np.nan
    elif name == "gelu":
        want[SPECIAL <= -10] = 0
    if name in ("sgn", "step", "relu", "hardsigmoid"):
        want[-1] = 0  # ggml compares, and a NaN compares false
    assert np.allclose(got, want, rtol=1e-5, atol=1e-30, equal_nan=True), np.c_[SPECIAL, got, want]


def test_accuracy_of_activations():
    x = np.random.default_rng(0).uniform(-9, 9, 20000).astype(np.float32)
    for name in ("silu", "gelu", "gelu_erf", "tanh", "sigmoid", "softplus", "elu", "expm1"):
        got, want = compute(ops.unary(leaf(x), name)).reshape(-1), FORMULAS[name](np.float64(x))
        if name in ("gelu", "gelu_erf"):  # the float64 formulas themselves cancel in the tail
            got, want = got[x > -4], want[x > -4]
        assert np.max(np.abs(got - want) / np.abs(want)) < 2e-6, name


# --- how kernels compute ----------------------------------------------------------------------------------------------


@kernel
def squares(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    memory.store_f32(dst, 0, sum_of_squares(src0, 0, src0_ne[0]))


def test_a_sum_does_not_depend_on_zeros_behind_it():
    rng = np.random.default_rng(1)
    none = np.zeros(16, np.int32), np.zeros(0, np.uint8), 0, 1
    for n in (1, 15, 16, 17, 31, 33, 100, 191):
        x = np.zeros(512, np.float32)
        x[:n] = rng.normal(size=n)
        found = set()
        for m in (n, n + 1, 200, 256, 511, 512):
            out = np.zeros(4, np.uint8)
            squares(out, (1, 1, 1, 1), (4, 4, 4, 4), x.view(np.uint8), (m, 1, 1, 1), (4, 4 * m, 4 * m, 4 * m), *none)
            found.add(out.tobytes())
        assert len(found) == 1


@pytest.mark.skipif(cpu_level() not in ("avx512", "avx2"), reason="the instructions are those of AVX")
def test_hot_loops_use_whole_registers():
    add = make_binary(ADD, gg.F32, gg.F32, gg.F32, False).asm()  # streams: 256 bits at both levels
    assert any("vaddps" in line and "ymm" in line for line in add.splitlines()) and "zmm" not in add
    register = {"avx512": "zmm", "avx2": "ymm"}[cpu_level()]
    norm = make_norm("rms_norm").asm()
    assert any("vfmadd" in line and register in line for line in norm.splitlines())
    assert "vmovups" in norm and "call" not in norm
