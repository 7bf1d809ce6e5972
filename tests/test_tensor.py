from __future__ import annotations

import gc
import struct

import numpy as np
import pytest

import ggjit as gg
from ggjit import types
from ggjit.tensor import (
    FLAG_INPUT,
    FLAG_OUTPUT,
    FLAG_PARAM,
    RECORD,
    Tensor,
    attach,
    can_repeat,
    same_shape,
)  # fmt: skip
from ggjit.tensor_values import encode


@pytest.fixture
def context():
    with gg.Context(1 << 20) as c:
        yield c


def test_s1_record(context: gg.Context) -> None:
    assert RECORD.itemsize == 336
    offsets = {n: RECORD.fields[n][1] for n in RECORD.names}
    assert offsets == {
        "type": 0, "buffer": 8, "ne": 16, "nb": 48, "op": 80, "op_params": 84, "flags": 148, "src": 152,
        "view_src": 232, "view_offs": 240, "data": 248, "name": 256, "extra": 320,
    }  # fmt: skip
    sizes = {n: RECORD.fields[n][0].itemsize for n in RECORD.names}
    assert (sizes["src"], sizes["op_params"], sizes["name"], sizes["ne"], sizes["nb"]) == (80, 64, 64, 32, 32)
    t = gg.new_tensor(types.F16, 5, 3, 2, name="weights")
    r = t.record
    assert (r["type"], r["op"], r["flags"], r["buffer"], r["view_src"], r["extra"]) == (1, 0, 0, 0, 0, 0)
    assert r["ne"].tolist() == [5, 3, 2, 1] and r["nb"].tolist() == [2, 10, 30, 60]
    assert r["data"] == t.address + 336 and r["name"] == b"weights" and not r["src"].any()


def test_s1_node_record(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 8, 4)
    v = gg.view_2d(gg.view_1d(a, 16, 32), 4, 2, 16, 16)
    r = v.record
    assert r["op"] == v.op.id == 37
    assert r["src"].tolist() == [v.src[0].address] + [0] * 9
    assert (r["view_src"], r["view_offs"], r["data"]) == (a.address, 48, a.data + 48)
    assert struct.unpack_from("<q", v.op_params)[0] == v.params.offset == 16
    assert len(v.op_params) == 64


def test_s2_four_dimensions(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 1)
    assert t.ne == (1, 1, 1, 1) and t.n_dims == 1 and t.nelements == 1
    assert gg.new_tensor(types.F32, 2, 1, 3).ne == (2, 1, 3, 1)
    assert gg.new_tensor(types.F32, 2, 1, 3).n_dims == 3
    for bad in ((), (1, 2, 3, 4, 5)):
        with pytest.raises(ValueError, match=r"new_tensor: a tensor must have 1 to 4 dimensions, got \["):
            gg.new_tensor(types.F32, *bad)
    with pytest.raises(ValueError, match=r"new_tensor: dimensions must not be negative, got \[2, -1\]"):
        gg.new_tensor(types.F32, 2, -1)


def test_s3_dimension_0_is_innermost(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 3, 2)  # K = 3 columns, M = 2 rows: (M, K) elsewhere
    t.set([[1, 2, 3], [4, 5, 6]])
    assert t.numpy().shape == (1, 1, 2, 3)
    assert t.bytes().view(np.float32).tolist() == [1, 2, 3, 4, 5, 6]


def test_s4_strides(context: gg.Context) -> None:
    t = gg.new_tensor(types.Q4_K, 768, 2304)
    assert t.nb == (144, 432, 995328, 995328) and t.nbytes == 995328
    assert (t.nelements, t.nrows) == (768 * 2304, 2304)
    with pytest.raises(ValueError, match="row_size: ne0 must be a multiple of 256, the block of Q4_K, got 100"):
        gg.new_tensor(types.Q4_K, 100)


def test_s5_address_of_an_element(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 4, 3, 2, 2)
    values = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)
    t.set(values)
    p = gg.permute(t, 2, 0, 3, 1)
    memory = np.frombuffer(context.array, np.uint8)
    for i in ((0, 0, 0, 0), (2, 1, 3, 1), (1, 0, 2, 1)):
        at = p.data - context.base + sum(k * n for k, n in zip(i, p.nb, strict=True))
        assert memory[at : at + 4].view(np.float32)[0] == p.numpy()[i[::-1]]


def test_s6_figure_1(context: gg.Context) -> None:
    assert gg.new_tensor(types.F32, 3, 2).nb == (4, 12, 24, 24)


def test_s7_contiguous(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 6, 4, 3)
    assert a.is_contiguous and a.is_contiguous_1 and a.is_contiguous_2 and a.is_contiguous_rows
    rows = gg.view_3d(a, 3, 4, 3, a.nb[1], a.nb[2], 0)
    assert not rows.is_contiguous and rows.is_contiguous_1 and rows.is_contiguous_2 and rows.is_contiguous_rows
    planes = gg.view_3d(a, 6, 2, 3, a.nb[1], a.nb[2], 0)
    assert not planes.is_contiguous and not planes.is_contiguous_1 and planes.is_contiguous_2
    t = gg.transpose(a)
    assert not t.is_contiguous and not t.is_contiguous_rows and t.is_transposed and t.is_permuted


def test_s7_strides_of_single_elements_do_not_count(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 1, 5)
    t = gg.transpose(a)  # ne {5, 1}, nb {4, 4}
    assert t.is_contiguous
    one = gg.view_2d(gg.new_tensor(types.F32, 8, 8), 8, 1, 1000, 0)
    assert one.is_contiguous and one.nb == (4, 1000, 1000, 1000)
    column = gg.permute(gg.new_tensor(types.F32, 4, 1, 3), 1, 0, 2, 3)  # ne {1, 4, 3}, nb {16, 4, 16}
    assert column.nb[0] == 16 and column.is_contiguous  # nb[0] is free where ne[0] is one block


def test_s8_strides_are_bytes(context: gg.Context) -> None:
    assert gg.new_tensor(types.F16, 4, 3).nb[:2] == (2, 8)
    assert gg.new_tensor(types.Q8_0, 64, 3).nb[:2] == (34, 68)


def test_s9_permute_moves_nb0(context: gg.Context) -> None:
    assert gg.permute(gg.new_tensor(types.F32, 2, 3), 1, 0, 2, 3).nb[0] == 8


def test_s10_zero_copy(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 8, 4)
    used = context.used_mem()
    views = [gg.transpose(a), gg.reshape_1d(a, 32), gg.view_1d(a, 8, 32), gg.permute(a, 1, 2, 0, 3)]
    assert context.used_mem() - used == 4 * 368
    assert [v.data - a.data for v in views] == [0, 0, 32, 0]
    a.set(np.arange(32).reshape(4, 8))
    assert views[2].numpy().ravel().tolist() == list(range(8, 16))


def test_s11_a_header_is_a_node(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 8, 4)
    t = gg.transpose(a)
    assert t.op.name == "transpose" and t.src == (a,) and a.op.name == "none" and a.src == ()


def test_s20_views_flatten_to_the_root(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 64)
    v = gg.view_1d(gg.view_1d(a, 32, 64), 8, 16)
    assert v.view_src is a and v.view_offs == 80 and v.src[0].view_src is a
    with pytest.raises(ValueError, match=r"view: a view must lie inside its source, got offset 240 \+ 32 bytes of 256"):
        gg.view_1d(a, 8, 240)


def test_s52_views_take_no_data(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 1024)
    used = context.used_mem()
    gg.view_1d(a, 1024, 0)
    assert context.used_mem() == used + 368


def test_nbytes_of_strided_and_empty(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 8, 4)
    assert gg.view_2d(a, 3, 2, 64, 4).nbytes == 64 + 12
    assert gg.transpose(a).nbytes == 128
    empty = gg.new_tensor(types.F32, 8, 0)
    assert empty.nbytes == 0 and empty.is_empty and empty.numpy().shape == (1, 1, 0, 8)
    assert gg.new_tensor(types.Q4_0, 64, 2).nbytes == 72


def test_predicates_of_two(context: gg.Context) -> None:
    a, b, c = (gg.new_tensor(types.F32, *ne) for ne in ((8, 4), (8, 1), (3, 4)))
    assert can_repeat(b, a) and not can_repeat(a, b) and not can_repeat(c, a)
    assert same_shape(a, gg.new_tensor(types.F16, 8, 4)) and not same_shape(a, b)
    assert can_repeat(gg.new_tensor(types.F32, 2, 2), a)  # 2 divides 8 and 4


def test_names(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 1, name="é" * 40)
    assert t.name == "é" * 31 and t.set_name("x") is t and t.name == "x"
    t.name = "a" * 63
    assert t.name == "a" * 63


def test_flags(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 1)
    assert t.set_input().set_output() is t and t.flags == FLAG_INPUT | FLAG_OUTPUT
    assert t.set_param().flags & FLAG_PARAM and t.record["flags"] == 7
    v = gg.view_1d(t, 1, 0).set_name("v")
    with pytest.raises(ValueError, match=r"set_param: the tensor must be a leaf, got the result of view \('v'\)"):
        v.set_param()


def test_one_handle_a_record(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 1)
    assert context.tensors[a.address] is a and a != gg.new_tensor(types.F32, 1) and len({a, a}) == 1
    with pytest.raises(TypeError, match="Tensor: made by new_tensor"):
        Tensor()


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", [types.F32, types.F16, types.F64, types.I8, types.I16, types.I32, types.I64])
def test_set_and_numpy(context: gg.Context, type: gg.Type) -> None:
    values = np.arange(-6, 6).reshape(1, 1, 3, 4)
    t = gg.new_tensor(type, 4, 3).set(values[0, 0])
    assert t.numpy().dtype == type.dtype and np.array_equal(t.numpy(), values)
    t.numpy()[...] = 1  # live
    assert t.numpy().sum() == 12
    assert np.array_equal(t.set(2).numpy(), np.full((1, 1, 3, 4), 2))


def test_set_bf16_rounds_to_nearest_even(context: gg.Context) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, np.inf, np.nan, 3.4e38], np.float32)
    got = gg.new_tensor(types.BF16, 7).set(values).numpy().ravel()
    assert got[:5].tolist() == [1.0, 1.0, 1.015625, -2.5, np.inf] and np.isnan(got[5]) and got[6] == np.inf


def test_set_through_strides(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 4, 3).set(0.0)
    gg.transpose(a).set(np.arange(12).reshape(4, 3))
    assert a.numpy()[0, 0].tolist() == np.arange(12).reshape(4, 3).T.tolist()
    b = gg.new_tensor(types.F32, 4, 3).set(0.0)
    gg.view_2d(b, 2, 2, 32, 4).set([[1, 2], [3, 4]])
    assert b.numpy()[0, 0].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 3, 4, 0]]


def test_set_block_type(context: gg.Context) -> None:
    values = np.linspace(-4, 4, 128, dtype=np.float32).reshape(2, 64)
    t = gg.new_tensor(types.Q8_0, 64, 2).set(values)
    assert np.abs(t.numpy()[0, 0] - values).max() < 0.02
    assert np.array_equal(t.bytes().reshape(2, 68), encode(values, types.Q8_0))


def test_set_bad_shape(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 4, 3, name="w")
    text = r"Tensor.set: values must fit shape \(1, 1, 3, 4\) \(ne \[4, 3, 1, 1\] reversed\), got \(4, 3\) \('w'\)"
    with pytest.raises(ValueError, match=text):
        t.set(np.zeros((4, 3)))


def test_no_data_is_an_error() -> None:
    with gg.Context(4096, no_alloc=True):
        t = gg.new_tensor(types.F32, 4, name="w")
    for act in (t.numpy, t.bytes, lambda: t.set(0.0)):
        with pytest.raises(
            ValueError, match=r"Tensor: data must be allocated before it is read or set, got none \('w'\)"
        ):
            act()


def test_unknown_memory_is_an_error(context: gg.Context) -> None:
    t = gg.new_tensor(types.F32, 4)
    t.data = 4096
    with pytest.raises(ValueError, match="Tensor: data must lie in host memory that is known here, got address 0x1000"):
        t.numpy()


def test_from_numpy_copies_into_an_arena(context: gg.Context) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = gg.from_numpy(array, name="x")
    array[:] = 0
    assert t.ne == (3, 2, 1, 1) and t.name == "x" and t.numpy()[0, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gg.from_numpy(3.5).ne == (1, 1, 1, 1) and gg.from_numpy(np.float32(3.5)).numpy().item() == 3.5
    assert gg.from_numpy(np.ones((2, 32), np.float32), types.Q8_0).type is types.Q8_0


def test_from_numpy_shares_in_a_no_alloc_context() -> None:
    with gg.Context(4096, no_alloc=True) as c:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        t = gg.from_numpy(array)
        strided = gg.from_numpy(array[:, ::2])
        assert t.data == array.ctypes.data and c.used_mem() == 2 * 368
        array[0, 0] = 9
        assert t.numpy()[0, 0, 0, 0] == 9 and strided.numpy()[0, 0].tolist() == [[0, 2], [3, 5]]
        del array
        gc.collect()
        assert t.numpy()[0, 0].tolist() == [[9, 1, 2], [3, 4, 5]]


def test_from_numpy_errors(context: gg.Context) -> None:
    with pytest.raises(TypeError, match="from_dtype: dtype must be one of"):
        gg.from_numpy(np.zeros(3, np.complex64))
    with pytest.raises(ValueError, match="from_numpy: a tensor must have 1 to 4 dimensions"):
        gg.from_numpy(np.zeros((1,) * 5, np.float32))


def test_attach(context: gg.Context) -> None:
    with gg.Context(4096, no_alloc=True):
        t = gg.new_tensor(types.F32, 4, name="w")
    with pytest.raises(ValueError, match=r"attach: memory must be contiguous and hold 16 bytes, got 12 \('w'\)"):
        attach(t, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="attach: memory must be contiguous"):
        attach(t, np.zeros(8, np.float32)[::2])
    assert attach(t, np.ones(4, np.float32)).numpy().sum() == 4


def test_read_only_memory_is_not_written() -> None:
    with gg.Context(4096, no_alloc=True):
        array = np.zeros(4, np.float32)
        array.flags.writeable = False
        t = gg.from_numpy(array)
    with pytest.raises(ValueError, match=r"Tensor.set: the data must be writable, got read-only memory"):
        t.set(1.0)


def test_views_of_an_arena_keep_it_alive() -> None:
    def make() -> Tensor:
        with gg.Context(1 << 16):
            a = gg.new_tensor(types.F32, 64).set(np.arange(64))
        with gg.Context(4096, no_alloc=True):
            return gg.view_1d(a, 4, 240)

    v = make()
    gc.collect()
    junk = [np.full(1 << 16, 255, np.uint8) for _ in range(8)]
    assert v.numpy().ravel().tolist() == [60, 61, 62, 63] and len(junk) == 8


def test_repr(context: gg.Context) -> None:
    a = gg.new_tensor(types.F32, 3, 2, name="a")
    assert repr(a) == "Tensor('a' F32, ne [3, 2], shape (2, 3))"
    assert (
        repr(gg.transpose(a))
        == "Tensor('a (transposed)' F32, ne [2, 3], shape (3, 2), nb [12, 4, 24, 24]) = transpose('a')"
    )


def test_operators_with_numbers_and_arrays(context: gg.Context) -> None:
    a = gg.from_numpy(np.float32([1, 2, 4]))
    for made, want in (
        (1 - a, [0, -1, -3]), (a - 1, [0, 1, 3]), (np.float32(2) * a, [2, 4, 8]), (np.float64(2) - a, [1, 0, -2]),
        (a / 2, [0.5, 1, 2]), (-a, [-1, -2, -4]), (1 / a, [1, 0.5, 0.25]), (np.float32(3) / a, [3, 1.5, 0.75]),
    ):  # fmt: skip
        gg.build(made).compute(1)
        assert made.numpy().ravel().tolist() == want
    made = 1.0 / gg.cast(a, types.F16)
    gg.build(made).compute(1)
    assert made.type is types.F16 and made.numpy().ravel().tolist() == [1, 0.5, 0.25]
    used = context.used_mem()
    for wrong in (lambda: a - "x", lambda: "x" - a, lambda: "x" / a):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()
    assert context.used_mem() == used


def test_a_number_by_a_parameter_has_a_gradient(context: gg.Context) -> None:
    a = gg.from_numpy(np.float32([1, 2, 4])).set_param()
    graph = gg.Graph(64, grads=True).build_forward_expand(gg.sum(2.0 / a).set_loss()).build_backward_expand()
    graph.reset().compute(1)
    np.testing.assert_allclose(graph.grad(a).numpy().ravel(), [-2, -0.5, -0.125], rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("add", lambda t, a: t + a), ("add", lambda t, a: a + t), ("sub", lambda t, a: t - a),
        ("sub", lambda t, a: a - t), ("mul", lambda t, a: t * a), ("mul", lambda t, a: a * t),
        ("div", lambda t, a: t / a), ("div", lambda t, a: a / t),
    ],
)  # fmt: skip
def test_arrays_and_tensors_meet_in_one_error(context: gg.Context, op, call) -> None:
    t = gg.new_tensor(types.F32, 4, 3)
    with pytest.raises(TypeError) as raised:
        call(t, np.ones((3, 4), np.float32))
    assert str(raised.value) == (
        f"{op}: operands must be Tensors or numbers, got an array of shape (3, 4); use gg.from_numpy(array), or "
        "t.numpy() once it is computed"
    )


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda t: np.asarray(t), r"t\.numpy\(\)"), (lambda t: np.array([t, t]), r"t\.numpy\(\)"),
        (lambda t: np.asarray(t, np.float32), r"t\.numpy\(\)"), (lambda t: gg.from_numpy(t), r"t\.numpy\(\)"),
        (lambda t: t @ t, r"gg\.mul_mat"), (lambda t: np.ones((4, 4)) @ t, r"gg\.mul_mat"),
        (lambda t: t**2, r"gg\.sqr"), (lambda t: 2**t, r"gg\.sqr"), (lambda t: t[0], r"t\.numpy\(\)\[\.\.\.\]"),
        (lambda t: list(t), r"t\.numpy\(\)"), (lambda t: t.__setitem__(0, 1), r"t\.set\(values\)"),
    ],
)  # fmt: skip
def test_operators_that_are_missing_say_what_to_use(context: gg.Context, call, hint) -> None:
    with pytest.raises(TypeError, match=hint):
        call(gg.new_tensor(types.F32, 4, 3))


@pytest.mark.parametrize(
    ("name", "hint"), [("shape", r"t\.ne"), ("T", r"gg\.transpose"), ("reshape", r"gg\.reshape_2d")]
)
def test_members_of_arrays_say_what_to_use(context: gg.Context, name, hint) -> None:
    t = gg.new_tensor(types.F32, 4, 3)
    with pytest.raises(AttributeError, match=rf"^Tensor has no attribute '{name}': .*{hint}"):
        getattr(t, name)
    assert not hasattr(t, name) and name not in dir(t) and "ne" in dir(t)


def test_a_name_is_text(context: gg.Context) -> None:
    with pytest.raises(TypeError, match=r"^Tensor: name must be a str, got 5$"):
        gg.new_tensor(types.F32, 4).set_name(5)


def test_type_must_be_a_type(context: gg.Context) -> None:
    with pytest.raises(TypeError, match=r"new_tensor: type must be one of ggjit's, such as gg\.F32, got 'F32'"):
        gg.new_tensor("F32", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from_numpy: type must"):
        gg.from_numpy([1.0], np.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("ne", [(1 << 64,), (1 << 62,), (1 << 40, 1 << 40), (1 << 31, 1 << 31, 2), (0, 1 << 62)])
def test_sizes_beyond_64_bits_are_refused(ne: tuple[int, ...]) -> None:
    with gg.Context(1 << 12, no_alloc=True) as context:
        with pytest.raises(ValueError, match=r"new_tensor: a tensor must have less than 2\^59 elements, got \["):
            gg.new_tensor(gg.F32, *ne)
        assert context.used_mem() == 0


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, float("nan"), float("inf"), 3e9])
def test_whole_numbers_do_not_wrap_around(value: float) -> None:
    with gg.Context(1 << 12):
        t = gg.new_tensor(gg.I32, 3).set(7)
        with pytest.raises(ValueError, match=r"values must lie in \[-2147483648, 2147483647\] to be I32, got "):
            t.set([1, value, 2])
        with pytest.raises(ValueError, match="to be I32"):
            gg.from_numpy([value], gg.I32)
        assert t.numpy().ravel().tolist() == [7, 7, 7]
        assert t.set([True, 2.0, np.uint64(3)]).numpy().ravel().tolist() == [1, 2, 3]


@pytest.mark.parametrize("values", [None, 1j, "1", [object()], [b"x"]])
def test_only_real_numbers_are_set(values: object) -> None:
    with gg.Context(1 << 12):
        t = gg.new_tensor(gg.F32, 1).set(7)
        with pytest.raises(TypeError, match=r"Tensor.set: values must be real numbers, got dtype"):
            t.set(values)
        assert t.numpy().item() == 7


def test_parameters_that_do_not_fit_name_the_op() -> None:
    with gg.Context(1 << 12):
        x = gg.new_tensor(gg.F32, 4)
        with pytest.raises(ValueError, match=r"rms_norm: parameters must fit their types, got eps=1e\+308"):
            gg.rms_norm(x, 1e308)
        with pytest.raises(TypeError, match=r"view_1d: offset must be an int, got 4\.0"):
            gg.view_1d(x, 1, 4.0)
        with pytest.raises(ValueError, match="view: sizes and strides must fit 64 bits, got ne"):
            gg.view_2d(x, 1, 1, 1 << 63, 0)


@pytest.mark.parametrize("ne", [(0, 3), (32, 0), (0, 0)])
def test_empty_tensors_of_blocks_have_values(ne) -> None:
    with gg.Context(1 << 12):
        t = gg.new_tensor(gg.Q8_0, *ne)
        assert t.set(np.zeros(t.ne[::-1])).numpy().shape == t.ne[::-1]
