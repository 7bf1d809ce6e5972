"""What builders say to an argument of the wrong kind: one TypeError that names it, whatever the builder."""

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.op import by_name

SCALARS = {"int": 1, "float": 1.0, "bool": True, "Type": gg.F32, "str": "relu", "Sequence[int]": (1, 1, 1, 1)}
WRONG = {"None": None, "1": 1, "an array of shape (2, 2); use gg.from_numpy": np.zeros((2, 2)), "'x'": "x", "list": [1]}
BUILDERS = [(name, ops.builder(name)) for name in ops.__all__]
PLACES = [
    (name, p.name)
    for name, builder in BUILDERS
    for p in inspect.signature(builder).parameters.values()
    if str(p.annotation).startswith("Tensor") and name != "flash_attn_back"  # which takes nothing
]


@pytest.fixture(autouse=True)
def context():
    with gg.Context(1 << 16) as opened:
        yield opened


def filled(builder):
    """Arguments of the right kinds, whether they fit each other or not."""
    given = {}
    for p in inspect.signature(builder).parameters.values():
        kind = str(p.annotation)
        if kind.startswith("Tensor"):
            given[p.name] = gg.new_tensor(gg.F32, 4, 4)
        elif p.default is p.empty:
            given[p.name] = (gg.new_tensor(gg.F32, 4),) if kind.startswith("Sequence[T") else SCALARS.get(kind)
    return given


@pytest.mark.parametrize(("name", "place"), PLACES, ids=[f"{name}-{place}" for name, place in PLACES])
def test_what_is_no_tensor_is_named(name, place):
    builder = ops.builder(name)
    optional = "None" in str(inspect.signature(builder).parameters[place].annotation)
    given = filled(builder)
    for text, wrong in WRONG.items():
        if wrong is None and optional:
            continue
        with pytest.raises(TypeError) as raised:
            builder(**{**given, place: wrong})
        assert str(raised.value) == f"{name}: {place} must be a Tensor, got {text}"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda a: ops.mul_mat(1, a), "mul_mat: a must be a Tensor, got 1"),
        (lambda a: ops.soft_max_ext(a, 3), "soft_max_ext: mask must be a Tensor, got 3"),
        (lambda a: ops.custom_4d(gg.F32, 4, 1, 1, 1, [a, None], None), "custom_4d: args[1] must be a Tensor, got None"),
        (lambda a: ops.cast(a, "F16"), "cast: type must be a Type such as gg.F32, got 'F16'"),
        (lambda a: ops.cast(a, np.float16), "cast: type must be a Type such as gg.F32, got type"),
        (lambda a: ops.reshape_2d(a, 2.5, 2), "reshape_2d: ne0 must be an int, got 2.5"),
        (lambda a: ops.repeat_4d(a, 4, 4, None, 1), "repeat_4d: ne2 must be an int, got None"),
        (lambda a: ops.scale(a, "2"), "scale: s must be a number, got '2'"),
        (lambda a: ops.norm(a, None), "norm: eps must be a number, got None"),
        (lambda a: ops.add(a), "add: missing a required argument: 'b'"),
        (lambda a: ops.add(a, a, a), "add: too many positional arguments"),
        (lambda a: ops.neg(a, where=a), "neg: got an unexpected keyword argument 'where'"),
        (lambda a: gg.new_tensor(gg.F32, 2.5), "new_tensor: dimensions must be ints, got [2.5]"),
        (lambda a: gg.new_node(by_name("sqr"), gg.F32, a.ne, (a, 1)),
         "sqr: sources must be Tensors or None, got ['Tensor', 'int']"),
    ],
)  # fmt: skip
def test_other_kinds(call, text):
    with pytest.raises(TypeError) as raised:
        call(gg.new_tensor(gg.F32, 4, 4))
    assert str(raised.value) == text and raised.value.__cause__ is None


def test_numbers_of_numpy_are_numbers():
    a = gg.new_tensor(gg.F32, 4, 4)
    assert ops.reshape_1d(a, np.int64(16)).ne == (16, 1, 1, 1)
    assert ops.scale(a, np.float32(2)).params.s == 2


def test_errors_of_builders_pass_unchanged():
    a = gg.new_tensor(gg.F32, 4, 4, name="a")
    with pytest.raises(ValueError, match=r"^reshape_1d: the number of elements must stay the same"):
        ops.reshape_1d(a, 3)
    with pytest.raises(TypeError, match=r"^sum: a must be F32, F16 or BF16, got I32"):
        ops.sum(gg.new_tensor(types.I32, 4))


def test_the_file_of_a_builder_has_the_checked_one():
    from ggjit.ops.norm import rms_norm

    with pytest.raises(TypeError, match=r"^rms_norm: a must be a Tensor, got None"):
        rms_norm(None, 1e-5)
    for name, builder in BUILDERS:
        assert builder is getattr(sys.modules[builder.__module__], name) is getattr(gg, name)
        assert builder.__wrapped__.__module__ == builder.__module__


def test_builders_can_be_pickled():
    for _, builder in BUILDERS:
        assert pickle.loads(pickle.dumps(builder)) is builder
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).__module__)"
    sent = pickle.dumps(gg.rms_norm)
    got = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert got.stdout.split() == [b"ggjit.ops.norm"]


def test_builders_keep_names_and_documentation():
    assert ops.add.__name__ == "add" and ops.add.__doc__.startswith("Add `b` to `a`")
    assert list(inspect.signature(ops.add).parameters) == ["a", "b", "inplace"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("scale_inplace", ": pass inplace=True to gg.scale"),
        ("soft_max_inplace", ": pass inplace=True to gg.soft_max"),
        ("mul_mat_inplace", ": gg.mul_mat has no form in place"),
        ("new_tensor_2d", ": use gg.new_tensor(type, ne0, ...), innermost size first"),
        ("new_graph", ": use gg.build(results), or gg.Graph()"),
        ("ggml_mul_mat", ": use gg.mul_mat"),
        ("ggml_init", ": use gg.Context(mem_size)"),
        ("graph_compute", ": use graph.compute of a Graph, such as gg.build makes"),
        ("set_param", ": use t.set_param of a Tensor"),
        ("softmax", "; closest: soft_max"),
        ("tensr", "; closest: Tensor, new_tensor"),
        ("nothing_like_it", ""),
        ("_private", ""),
    ],
)
def test_missing_names_say_what_to_use(name, hint):
    with pytest.raises(AttributeError) as raised:
        getattr(gg, name)
    assert str(raised.value) == f"module 'ggjit' has no attribute {name!r}{hint}"
