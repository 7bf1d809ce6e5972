"""What builders of the smaller ops refuse, each with its one exception; ids that are out of range when computed."""

import math

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types

V, T, N = ValueError, TypeError, NotImplementedError


@pytest.fixture(autouse=True)
def context():
    with gg.Context(2 << 20) as opened:
        yield opened


def leaf(*ne, type="F32", name="x"):
    t = gg.new_tensor(types.by_name(type), *ne, name=name)
    return t if t.type.is_quantized else t.set(0)


def turned(*ne, **more):
    return ops.transpose(leaf(*ne, **more))


def apart(*ne):
    """Rows with gaps between them."""
    return ops.view_2d(leaf(ne[0] + 4, *ne[1:]), *ne, 4 * (ne[0] + 4), 0)


ROWS = [
    (lambda: ops.sqr(turned(4, 5)), V, "sqr: rows of a must be contiguous"),
    (lambda: ops.sqrt(leaf(4, type="I32")), T, "sqrt: a must be F32 or F16 or BF16, got I32 ('x')"),
    (lambda: ops.log(leaf(4, type="F64")), T, "log: a must be F32"),
    (lambda: ops.sin(turned(4, 5)), V, "sin: rows"),
    (lambda: ops.cos(leaf(32, type="Q8_0")), T, "cos: a must be"),
    (lambda: ops.clamp(leaf(4, type="BF16"), 0, 1), T, "clamp: a must be F32 or F16, got BF16"),
    (lambda: ops.leaky_relu(leaf(4, type="BF16"), 0.1), T, "leaky_relu: a must be F32 or F16, got BF16"),
    (lambda: ops.sum(leaf(4, type="I32")), T, "sum: a must be F32, F16 or BF16, got I32"),
    (lambda: ops.sum_rows(leaf(4, type="F16")), T, "sum_rows: a must be F32, got F16"),
    (lambda: ops.sum_rows(turned(4, 5)), V, "sum_rows: rows of a must be contiguous"),
    (lambda: ops.mean(leaf(4, type="F16")), T, "mean: a must be F32"),
    (lambda: ops.cumsum(leaf(4, type="F16")), T, "cumsum: a must be F32"),
    (lambda: ops.argmax(leaf(4, 3, 2)), V, "argmax: a must be a matrix with ne[0] > 0, got ne [4, 3, 2, 1]"),
    (lambda: ops.argmax(leaf(0, 3)), V, "argmax: a must be a matrix"),
    (lambda: ops.count_equal(leaf(4), leaf(4)), T, "count_equal: a and b must be I32, got F32 and F32"),
    (lambda: ops.count_equal(leaf(4, type="I32"), leaf(5, type="I32")), V, "count_equal: a and b must have one shape"),
    (lambda: ops.repeat(leaf(3, 2), leaf(4, 2)), V, "repeat: each size of the result must be a multiple"),
    (lambda: ops.repeat(leaf(32, type="Q8_0"), leaf(64)), T, "repeat: a must be of a plain type, got Q8_0"),
    (lambda: ops.repeat_4d(leaf(3), 6, -1, 1, 1), V, "repeat_4d: sizes must be 1 to 4 and not be negative"),
    (lambda: ops.repeat_back(leaf(6, type="F16"), leaf(3)), T, "repeat_back: a must be F32"),
    (lambda: ops.repeat_back(leaf(6), leaf(4)), V, "repeat_back: each size of b must divide that of a"),
    (lambda: ops.concat(leaf(4, 3), leaf(4, 2), 0), V, "concat: a and b must agree in all dimensions but 0"),
    (lambda: ops.concat(leaf(4, 3), leaf(4, 3), 4), V, "concat: dim must be 0 to 3, got 4"),
    (lambda: ops.concat(leaf(4), leaf(4, type="F16"), 1), T, "concat: a and b must have one type, got F32 and F16"),
    (lambda: ops.acc(apart(8, 2), leaf(4, 2), 32, 64, 64, 0), V, "acc: a must be contiguous and rows of b"),
    (lambda: ops.acc(leaf(8, 2), turned(2, 4), 32, 64, 64, 0), V, "acc: a must be contiguous and rows of b"),
    (lambda: ops.acc(leaf(8, 2, type="I32"), leaf(4, 2, type="I32"), 32, 64, 64, 0), T, "acc: a and b must both"),
    (lambda: ops.acc(leaf(8, 2), leaf(4, 2), 32, 64, 64, 20), V, "acc: b must lie inside a at the strides and offset"),
    (lambda: ops.acc(leaf(8, 2), leaf(4, 2), 32, 64, 64, -4), V, "acc: b must lie inside a"),
    (lambda: ops.set(leaf(8, type="F16"), leaf(4, type="F16"), 16, 16, 16, 0), T, "set: a and b must both be F32"),
    (lambda: ops.set_1d(leaf(8), leaf(4), 20), V, "set_1d: b must lie inside a"),
    (lambda: ops.set_2d(leaf(8, 3), leaf(4, 3), 32, 20), V, "set_2d: b must lie inside a"),
    (lambda: ops.add1(leaf(8), leaf(2)), V, "add1: b must be one value, got ne [2, 1, 1, 1]"),
    (lambda: ops.add1(leaf(8), leaf(1, type="F16")), T, "add1: a must be F32, F16, BF16 or quantized and b of its"),
    (lambda: ops.add1(ops.permute(leaf(8, 3, 2), 0, 2, 1, 3), leaf(1)), V, "add1: rows of a must be contiguous and"),
    (lambda: ops.add_id(leaf(4, 2, 3), leaf(4, 5), leaf(2, 3)), T, "add_id: a and b must be F32 and ids I32"),
    (lambda: ops.add_id(leaf(4, 2, 3), leaf(4, 5), leaf(3, 2, type="I32")), V, "add_id: a must be [ne0, n_used, n_tok"),
    (lambda: ops.fill(leaf(4, type="BF16"), 1.0), T, "fill: a must be F32 or F16, got BF16"),
    (lambda: ops.fill(apart(4, 3), 1.0), V, "fill: a must be contiguous"),
    (lambda: ops.arange(3.0, 3.0, 1.0), V, "arange: stop must be above start and step above 0, got 3.0, 3.0 and 1.0"),
    (lambda: ops.arange(0.0, math.nan, 1.0), V, "arange: stop must be above start"),
    (lambda: ops.diag(leaf(4, 3)), V, "diag: a.ne[1] must be 1"),
    (lambda: ops.tri(leaf(4, 3), 0), V, "tri: a must be square"),
    (lambda: ops.tri(leaf(4, 4), 4), V, "tri: type must be 0 to 3, got 4"),
    (lambda: ops.tri(apart(4, 4), 1), V, "tri: a must be contiguous"),
    (lambda: ops.diag_mask_zero(apart(4, 4), 1), V, "diag_mask_zero: a must be contiguous"),
    (lambda: ops.diag_mask_zero(leaf(4, 4), -1), V, "diag_mask_zero: n_past must not be negative, got -1"),
    (lambda: ops.timestep_embedding(leaf(4, 2), 8, 100), V, "timestep_embedding: timesteps must have one dimension"),
    (lambda: ops.timestep_embedding(leaf(4), 1, 100), V, "timestep_embedding: dim must be at least 2 and max_period 1"),
    (lambda: ops.argsort(leaf(4, type="F16"), 0), T, "argsort: a must be F32"),
    (lambda: ops.argsort(leaf(4), 2), V, "argsort: order must be 0 (ascending) or 1 (descending), got 2"),
    (lambda: ops.top_k(leaf(4, 3), 5), V, "top_k: k must be 1 to ne[0], got 5 of [4, 3, 1, 1]"),
    (lambda: ops.top_k(leaf(4, 3), 0), V, "top_k: k must be 1 to ne[0]"),
    (lambda: ops.pad(leaf(4, type="F16"), 1, 0, 0, 0), T, "pad: a must be F32"),
    (lambda: ops.pad_ext(leaf(4), -1, 0, 0, 0, 0, 0, 0, 0), V, "pad_ext: paddings must not be negative"),
    (lambda: ops.pad_circular(leaf(4, 0), 1, 0, 0, 0), V, "pad_circular: a must not be empty to be repeated"),
    (lambda: ops.pad_reflect_1d(leaf(4, 3), 4, 0), V, "pad_reflect_1d: paddings must be 0 to ne[0] - 1 = 3, got 4, 0"),
    (lambda: ops.pad_reflect_1d(apart(4, 3), 1, 0), V, "pad_reflect_1d: a must be contiguous"),
    (lambda: ops.roll(leaf(4, 3), 4, 0, 0, 0), V, "roll: shifts must be smaller than the sizes [4, 3, 1, 1]"),
    (lambda: ops.roll(leaf(4, type="F16"), 1, 0, 0, 0), T, "roll: a must be F32"),
    (lambda: ops.upscale(leaf(4, 3), 1, 0), V, "upscale: scale_factor must be above 1, got 1"),
    (lambda: ops.upscale(leaf(4, 3), 2, 3), V, "upscale: mode must be 0 to 2 plus flags 256 and 512, got 3"),
    (lambda: ops.interpolate(leaf(4, 3), 8, 8, 1, 1, 512), V, "interpolate: antialias (512) must come with"),
    (lambda: ops.interpolate(leaf(4, 3), 8, 0, 1, 1, 0), V, "interpolate: a and the result [8, 0, 1, 1] must not be"),
    (lambda: ops.group_norm(leaf(4, 3, 2), 0, 1e-5), V, "group_norm: n_groups must be positive and eps not negative"),
    (lambda: ops.group_norm(turned(4, 3), 1, 1e-5, inplace=True), V, "group_norm: rows of a must be contiguous in"),
    (lambda: ops.l2_norm(leaf(4), -1.0), V, "l2_norm: eps must not be negative, got -1.0"),
    (lambda: ops.silu_back(leaf(4), leaf(4, type="F16")), T, "silu_back: a and b must both be F32 or F16"),
    (lambda: ops.rms_norm_back(leaf(4), leaf(5), 1e-5), V, "rms_norm_back: a and b must have one shape"),
    (lambda: ops.rms_norm_back(leaf(4), leaf(4), -1.0), V, "rms_norm_back: eps must not be negative"),
    (lambda: ops.soft_max_ext_back(leaf(8, 3), leaf(8, 3), 1.0, 8.0), N, "soft_max_ext_back: max_bias must be 0, got"),
    (lambda: ops.get_rows_back(leaf(8, 2), leaf(3, type="I32"), leaf(8, 3)), V, "get_rows_back: a must be [ne0, n, b1"),
    (lambda: ops.get_rows_back(leaf(8, 2), leaf(2, type="I64"), leaf(8, 3)), T, "get_rows_back: a must be F32 or F16"),
    (lambda: ops.cross_entropy_loss(leaf(4, 2), leaf(4, 3)), V, "cross_entropy_loss: a and b must have one shape"),
    (lambda: ops.cross_entropy_loss(leaf(4, type="F16"), leaf(4)), T, "cross_entropy_loss: a must be F32"),
    (lambda: ops.cross_entropy_loss_back(leaf(2), leaf(4), leaf(4)), V, "cross_entropy_loss_back: a must be one value"),
]


@pytest.mark.parametrize(("build", "error", "text"), ROWS, ids=[text.split("'")[0][:60] for *_, text in ROWS])
def test_refused(build, error, text):
    with pytest.raises(error) as raised:
        build()
    message = str(raised.value)
    assert message.startswith(text) and "\n" not in message and type(raised.value) is error


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_out_of_range(bad, n_threads):
    ids = np.int32([[0, 1], [2, bad], [3, 1]])
    matrix = gg.from_numpy(ids, name="ids")
    row = gg.from_numpy(ids.reshape(-1), name="ids")
    nodes = {
        "add_id": ops.add_id(leaf(8, 2, 3), leaf(8, 4), matrix),
        "get_rows_back": ops.get_rows_back(leaf(8, 6), row, leaf(8, 4)),
    }
    for name, node in nodes.items():
        with pytest.raises(IndexError, match=rf"^{name}: .*'ids' must be valid rows, got {bad} at position 3"):
            gg.build(node).compute(n_threads=n_threads)
