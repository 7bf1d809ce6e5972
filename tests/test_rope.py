"""rope: tokens alone, the shared table, accuracy at large positions, errors."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.dev import reference as runner
from ggjit.lower import lower

rope_module = importlib.import_module("ggjit.ops.rope")
PLAIN = (0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def compute(build, n_threads=1):
    with gg.Context(16 << 20):
        node = build()
        gg.Graph(16).build_forward_expand(node).compute(n_threads)
        return node.numpy().copy()


def same(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("mode", [0, 2])
def test_a_token_has_the_same_bits_alone(mode):
    x = np.random.default_rng(0).standard_normal((7, 3, 64), np.float32)
    positions = np.int32([0, 5, 1, 900, 4097, 31000, 131071])
    build = lambda i: lambda: ops.rope(gg.from_numpy(x[i]), gg.from_numpy(positions[i]), 48, mode)
    whole = compute(build(slice(None)))
    for n_threads in (2, 3, 4):
        assert same(compute(build(slice(None)), n_threads), whole)
    for i in range(7):
        assert same(compute(build(slice(i, i + 1))), whole[:, i : i + 1])


def test_nodes_with_the_same_positions_and_parameters_share_one_table():
    with gg.Context(1 << 20):
        b, c = gg.from_numpy(np.arange(4, dtype=np.int32)), gg.from_numpy(np.ones(16, np.float32))
        a = [gg.from_numpy(np.ones((4, 2, 32), np.float32)) for _ in range(2)]
        nodes = [ops.rope_ext(x, b, f, 32, 2, *PLAIN, offset=0) for f in (None, c) for x in a]
        nodes.append(ops.rope(a[0], b, 16, 2, offset=8))
        nodes.append(ops.rope(a[0], b, 16, 2))
        graph = gg.Graph(32)
        for node in nodes:
            graph.build_forward_expand(node)
        made = [step.kernel.name for step in lower(graph, 1).steps]
        assert made.count("rope") == 6 and made.count("rope_table") == 3


def test_angles_are_right_at_large_positions():
    x = np.zeros((3, 1, 64), np.float32)
    x[..., :32] = 1
    positions = np.int32([1 << 20, 999_983, 65_537])
    y = compute(lambda: ops.rope_ext(gg.from_numpy(x), gg.from_numpy(positions), None, 64, 2, *PLAIN))[0, :, 0]
    for i, p in enumerate(positions):
        for k in range(32):
            theta = int(p) * 10000.0 ** (-k / 32)
            assert abs(y[i, k] - math.cos(theta)) < 1e-6 and abs(y[i, 32 + k] - math.sin(theta)) < 1e-6


def test_sin_cos_log_power():
    from ggjit.ops.lib import angles

    for x in (0.0, 1e-9, -0.7, math.pi / 4, 3.0, -1234.5, 1e5, 1e6, 2.0**31 - 1):
        s, c = angles.sin_cos(x)
        limit = 1e-15 if abs(x) <= 1e6 else 1e-7
        assert abs(s - math.sin(x)) < limit and abs(c - math.cos(x)) < limit
    for x in (1e-6, 0.25, 1.0, 3.5, 1e4, 5e5, 1e7):
        assert abs(angles.log(x) - math.log(x)) <= 4e-16 * max(1, abs(math.log(x)))
        assert abs(angles.power(x, -2 / 64) / x ** (-2 / 64) - 1) < 1e-15
    assert abs(angles.power(10000.0, -1.0) * 10000 - 1) < 1e-14 and angles.power(1.0, -0.5) == 1
    assert angles.log(0.0) == -math.inf and angles.log(math.inf) == math.inf
    assert math.isnan(angles.log(-1.0)) and math.isnan(angles.log(math.nan)) and math.isnan(angles.power(-1.0, 0.5))
    assert angles.power(0.0, -0.5) == math.inf and angles.power(0.0, 0.5) == 0 and angles.power(10.0, 1e300) == math.inf


@pytest.mark.parametrize(
    "changes",
    [{"freq_base": 0.0}, {"freq_base": -1.0}, {"freq_base": math.inf}, {"freq_base": math.nan}, {"n_ctx_orig": 0},
     {"beta_fast": 0.0}, {"freq_scale": 0.0}],
)  # fmt: skip
def test_parameters_that_make_no_angles_end(changes):
    names = ("n_ctx_orig", "freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
    yarn = dict(zip(names, (64, 1e4, 0.5, 1.0, 1.0, 32.0, 1.0), strict=True))
    x, positions = np.ones((2, 1, 8), np.float32), np.int32([0, 5])
    for values in ({**yarn, **changes}, {**yarn, "ext_factor": 0.0, **changes}):
        y = compute(lambda v=values: ops.rope_ext(gg.from_numpy(x), gg.from_numpy(positions), None, 8, 0, *v.values()))
        assert y.shape == (1, 2, 1, 8)


def test_position_zero_changes_nothing_and_the_rest_is_copied():
    x = np.random.default_rng(2).standard_normal((2, 3, 50), np.float32)
    positions = np.int32([0, 3])
    for mode in (0, 2):
        y = compute(lambda m=mode: ops.rope(gg.from_numpy(x), gg.from_numpy(positions), 20, m, offset=7))[0]
        assert same(y[0], x[0]) and same(y[1, :, :7], x[1, :, :7]) and same(y[1, :, 27:], x[1, :, 27:])
        assert not np.isclose(y[1, :, 7:27], x[1, :, 7:27]).any()


def build(a=("F32", 32, 2, 3), b=("I32", 3), c=None, n_dims=32, mode=0, offset=0, sections=None):
    new = lambda s: gg.new_tensor(types.by_name(s[0]), *s[1:])
    a, b, c = new(a), new(b), None if c is None else new(c)
    if sections is not None:
        return ops.rope_multi(a, b, c, n_dims, sections, mode, *PLAIN, offset=offset)
    return ops.rope_ext(a, b, c, n_dims, mode, *PLAIN, offset=offset)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"a": ("BF16", 32, 2, 3)}, TypeError, "a must be F32 or F16, got BF16"),
        ({"b": ("I32", 4)}, ValueError, r"b must be contiguous i32 \[3\]"),
        ({"b": ("I64", 3)}, ValueError, r"b must be contiguous i32 \[3\]"),
        ({"c": ("F32", 15)}, ValueError, "at least 16 factors"),
        ({"n_dims": 9}, ValueError, "n_dims must be even"),
        ({"n_dims": 34}, ValueError, "must be even and fit"),
        ({"offset": 2}, ValueError, "after offset 2"),
        ({"mode": 1}, ValueError, "mode must be"),
        ({"mode": 8}, ValueError, "mode must be"),
        ({"mode": 8, "sections": (0, 0, 0, 4), "b": ("I32", 12)}, ValueError, "sections"),
        ({"mode": 8, "sections": (4, 4, 4, 4)}, ValueError, r"b must be contiguous i32 \[12\]"),
        ({"mode": 24, "sections": (8, 8, 0, 0), "b": ("I32", 12)}, ValueError, "mode 24 needs"),
        ({"mode": 2, "sections": (4, 4, 4, 4)}, ValueError, "mode must be"),
    ],
)
def test_errors(changes, error, text):
    with gg.Context(1 << 16), pytest.raises(error, match=f"rope_(ext|multi): .*{text}"):
        build(**changes)


def test_rows_must_be_contiguous():
    with gg.Context(1 << 16):
        a = ops.permute(gg.new_tensor(types.F32, 2, 32, 3), 1, 0, 2, 3)
        with pytest.raises(ValueError, match="rows of a must be contiguous"):
            ops.rope(a, gg.new_tensor(types.I32, 3), 32, 0)


def test_reference_cases(reference, capsys):
    tally = runner.run_paths([reference / "ops" / "rope.npz"])
    assert (tally.failed, tally.n_unsupported, capsys.readouterr().out) == (0, 0, "") and tally.passed == 40
