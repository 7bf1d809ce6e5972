"""soft_max: rows alone, masked columns, in place; errors. diag_mask_inf."""

from __future__ import annotations

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.dev import reference as runner


def compute(build, n_threads=1):
    with gg.Context(16 << 20):
        node = build()
        gg.Graph(8).build_forward_expand(node).compute(n_threads)
        return node.numpy().copy()


def same(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_a_row_has_the_same_bits_alone_and_with_masked_columns():
    x = np.random.default_rng(0).standard_normal((9, 203), np.float32) * 5
    whole = compute(lambda: ops.soft_max(gg.from_numpy(x)))
    for n_threads in (2, 3, 4):
        assert same(compute(lambda: ops.soft_max(gg.from_numpy(x)), n_threads), whole)
    assert same(compute(lambda: ops.soft_max(gg.from_numpy(x[4]))), whole[:, :, 4:5])
    wide = np.pad(x, ((0, 0), (0, 54)))
    mask = np.pad(np.zeros_like(x), ((0, 0), (0, 54)), constant_values=-np.inf)
    for kind in (types.F32, types.F16):
        y = compute(lambda t=kind: ops.soft_max_ext(gg.from_numpy(wide), gg.from_numpy(mask, t), 1.0))
        assert same(y[..., :203], whole) and not y[..., 203:].any()


def test_rows_sum_to_one_and_large_scores_do_not_overflow():
    y = compute(lambda: ops.soft_max(gg.from_numpy(np.float32([[1e4, 1e4 - 1, -1e4], [-1e30, -1e30, -1e30]]))))
    assert np.allclose(y.sum(-1), 1, atol=1e-6) and np.allclose(y[0, 0, 1], 1 / 3)


def test_a_row_that_is_masked_everywhere_is_nan_unless_it_has_a_sink():
    x, mask = np.zeros((1, 2, 5), np.float32), np.full((2, 5), -np.inf, np.float16)
    mask[1] = 0
    y = compute(lambda: ops.soft_max_ext(gg.from_numpy(x), gg.from_numpy(mask), 1.0))
    assert np.isnan(y[0, 0, 0]).all() and np.allclose(y[0, 0, 1], 0.2)
    y = compute(
        lambda: ops.soft_max_ext(
            gg.from_numpy(x), gg.from_numpy(mask), 1.0, sinks=gg.from_numpy(np.zeros(1, np.float32))
        )
    )
    assert not y[0, 0, 0].any() and np.allclose(y[0, 0, 1], 1 / 6)


def test_in_place():
    x = np.random.default_rng(1).standard_normal((5, 33), np.float32)
    with gg.Context(1 << 20):
        a = gg.from_numpy(x)
        node = ops.soft_max(a, inplace=True)
        gg.Graph(8).build_forward_expand(node).compute(2)
        assert node.view_src is a and same(a.numpy(), compute(lambda: ops.soft_max(gg.from_numpy(x))))


def test_the_vectors_are_not_scalar_code():
    from ggjit.ops.soft_max import make_soft_max

    text = make_soft_max("F16").asm()
    assert "expf" not in text
    if gg.cpu.cpu_level() == "avx512":
        assert sum("vfmadd" in line and "%zmm" in line for line in text.splitlines()) > 20


@pytest.mark.parametrize(
    ("a", "mask", "options", "error", "text"),
    [
        (("F16", 8, 3), None, {}, TypeError, "a must be F32, got F16"),
        (("F32", 8, 3), ("BF16", 8, 3), {}, TypeError, "mask must be F16 or F32, got BF16"),
        (("F32", 8, 3), ("F32", 8, 2), {}, ValueError, "at least 3 rows"),
        (("F32", 8, 3), ("F32", 7, 3), {}, ValueError, "of 8 columns"),
        (("F32", 8, 3, 4), ("F32", 8, 3, 3), {}, ValueError, "dividing 4"),
        (("F32", 8, 3), None, {"max_bias": 8.0}, ValueError, "max_bias must be 0 without a mask"),
        (("F32", 8, 3, 2), None, {"sinks": 3}, ValueError, r"sinks must be contiguous f32 \[2\]"),
    ],
)
def test_errors(a, mask, options, error, text):
    with gg.Context(1 << 16):
        new = lambda s: gg.new_tensor(types.by_name(s[0]), *s[1:])
        if "sinks" in options:
            options = {"sinks": gg.new_tensor(types.F32, options["sinks"])}
        with pytest.raises(error, match=f"soft_max: .*{text}"):
            ops.soft_max_ext(new(a), None if mask is None else new(mask), 1.0, **options)


def test_a_must_be_contiguous():
    with gg.Context(1 << 16):
        with pytest.raises(ValueError, match="soft_max: a must be contiguous"):
            ops.soft_max(ops.transpose(gg.new_tensor(types.F32, 8, 3)))
        with pytest.raises(ValueError, match="diag_mask_inf: a must be contiguous"):
            ops.diag_mask_inf(ops.transpose(gg.new_tensor(types.F32, 8, 3)), 0)
        with pytest.raises(TypeError, match="diag_mask_inf: a must be F32"):
            ops.diag_mask_inf(gg.new_tensor(types.F16, 8, 3), 0)


def test_reference_cases(reference, capsys):
    tally = runner.run_paths([reference / "ops" / f"{name}.npz" for name in ("soft_max", "diag_mask_inf")])
    assert (tally.failed, tally.n_unsupported, capsys.readouterr().out) == (0, 0, "") and tally.passed == 54
