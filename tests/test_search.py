"""The search for scales and minimums: exact where values can be held, better with an importance matrix."""

import numpy as np
import pytest

from ggjit import types

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def values(rows, n):
    return np.random.default_rng(7).standard_normal((rows, n)).astype(np.float32)


def weighted_error(quant, x, weights, imatrix):
    return (weights * np.square(quant.dequantize(quant.quantize(x, imatrix)) - x.astype(np.float64))).sum()


@pytest.mark.parametrize("name", TYPES)
def test_importance_matrix(name):
    """It lowers the weighted error of each row; rows and chunks of blocks do not influence each other."""
    quant, x = types.by_name(name).quant, values(3, 2048)
    imatrix = np.exp(2 * np.random.default_rng(8).standard_normal(2048)).astype(np.float32)
    for row in x[:, None]:
        assert weighted_error(quant, row, imatrix, imatrix) < 0.95 * weighted_error(quant, row, imatrix, None)
    whole = quant.quantize(np.tile(x, (40, 1)), imatrix)
    assert np.array_equal(whole, np.tile(quant.quantize(x, imatrix), (40, 1)))


@pytest.mark.parametrize("name", TYPES)
def test_importance_matrix_of_another_size(name):
    with pytest.raises(ValueError, match=r"imatrix must have a shape \(512,\), got \(256,\)"):
        types.by_name(name).quant.quantize(values(2, 512), np.ones(256, np.float32))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K"])
def test_values_that_a_block_can_hold(name):
    """Codes times one scale are found again, zeros and values of one sign too."""
    quant, n = types.by_name(name).quant, 1 << {"Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5}[name]
    codes = np.random.default_rng(9).integers(0, n, (3, 256)).astype(np.float32)
    codes[:, ::16], codes[:, 8::16] = 0, n - 1
    limit = {"Q2_K": 15, "Q3_K": -32, "Q4_K": 63, "Q5_K": 63}[name]
    codes = codes - n // 2 if name == "Q3_K" else codes
    x = codes * np.float32(limit / 64)
    x[1] = 0
    y = quant.dequantize(quant.quantize(x))
    assert not y[1].any() and np.abs(y - x).max() < 1e-6 * np.abs(x).max()


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_constant_blocks(name):
    """Blocks of one value, positive or negative: the error is that of f16."""
    quant = types.by_name(name).quant
    x = np.repeat(np.float32([[0.73], [-1.25], [3000]]), 256, 1)
    assert (np.abs(quant.dequantize(quant.quantize(x)) / x - 1) < 2**-11).all()
