"""Quantized types: NumPy conversions byte for byte as ggml's, compiled ones as NumPy's, and what panels say of
themselves."""

import functools

import numpy as np
import pytest

from ggjit import types
from ggjit.dev.reference_cases import read_cases
from ggjit.jit import kernel
from ggjit.ops.lib import panel

TYPES = [t.name for t in types.all_types() if t.is_quantized and t.quant is not None]
ONE = [1, 1, 1, 1]


@functools.cache
def row_kernel(name, part):
    """A kernel that converts one row of src0_ne[0] values by a type's jitted function."""
    convert = getattr(types.by_name(name).quant, part)

    @kernel
    def convert_row(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        convert(src0, 0, dst, 0, src0_ne[0])

    return convert_row


def convert_rows(name, part, rows, n, nbytes):
    """Rows through the compiled conversion: uint8 [rows, nbytes]."""
    out = np.zeros((len(rows), nbytes), np.uint8)
    for source, target in zip(rows, out, strict=True):
        data = np.ascontiguousarray(source).view(np.uint8)
        args = (np.zeros(16, np.int32), np.zeros(64, np.uint8), 0, 1)
        row_kernel(name, part)(target, ONE, ONE, data, [n, 1, 1, 1], ONE, *args)
    return out


def random_values(rows, n):
    rng = np.random.default_rng(3)
    return (rng.standard_normal((rows, n)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_registered(name):
    t = types.by_name(name)
    assert t.quant.type is t
    panel.check_panel(name)


@pytest.mark.parametrize("name", TYPES)
def test_round_trip(name):
    """Quantized values lie near the given ones, and quantizing decoded values again gives them back."""
    t = types.by_name(name)
    x = random_values(3, 1024)
    b = t.quant.quantize(x)
    assert b.shape == (3, types.row_size(t, 1024)) and b.dtype == np.uint8
    y = t.quant.dequantize(b)
    error = np.square(y - x).sum() / np.square(x).sum()
    assert error < {4: 0.02, 5: 0.01, 6: 1e-3, 8: 1e-4}[t.type_size * 8 // t.blck_size]


@pytest.mark.parametrize("name", TYPES)
def test_compiled_as_numpy(name):
    t = types.by_name(name)
    x = random_values(2, 512)
    x[0, :256], x[1, 32:64] = 0, 1e-30
    b = t.quant.quantize(x)
    assert np.array_equal(convert_rows(name, "quantize_row", x, 512, b.shape[1]), b)
    y = convert_rows(name, "dequantize_row", b, 512, 4 * 512).view(np.float32)
    assert np.array_equal(y.view(np.uint32), t.quant.dequantize(b).view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_refuses_parts_of_blocks(name):
    quant = types.by_name(name).quant
    with pytest.raises(ValueError, match=r"shape \(rows, multiple of"):
        quant.quantize(np.zeros((2, 17), np.float32))
    with pytest.raises(ValueError, match=r"shape \(rows, multiple of"):
        quant.dequantize(np.zeros((2, 7), np.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_bytes_as_ggml(name, reference):
    quant = types.by_name(name).quant
    for case in read_cases(reference / "ops" / f"quantize_{name.lower()}.npz"):
        arrays, meta = case.arrays, case.meta
        y = quant.dequantize(arrays["q"])
        assert np.array_equal(y.view(np.uint32), arrays["y"].view(np.uint32)), (case.id, meta["pattern"])
        if meta["kind"] != "quantize" or meta["imatrix"]:
            continue
        q = quant.quantize(arrays["x"])
        if meta.get("q_exact", True):
            assert np.array_equal(q, arrays["q"]), (case.id, meta["pattern"])
        else:
            assert np.array_equal(quant.dequantize(q), arrays["y"]), (case.id, meta["pattern"])
