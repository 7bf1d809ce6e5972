"""Quantized types: NumPy conversions byte for byte as ggml's, compiled ones as NumPy's, and what panels say of
themselves."""

import functools

import numpy as np
import pytest
from quant_blocks import CODEBOOK, random_blocks

from ggjit import types
from ggjit.dev.reference_cases import read_cases
from ggjit.jit import kernel
from ggjit.ops.lib import panel
from ggjit.quantize import quantize_rows

TYPES = [t.name for t in types.all_types() if t.is_quantized and t.quant is not None]
NEEDS_IMATRIX = ("IQ1_S", "IQ2_XS", "IQ2_XXS")
TERNARY = ("TQ1_0", "TQ2_0", "Q2_0")
QUICK = ("Q4_0", "Q5_1", "Q4_K", "IQ2_S", "TQ1_0")  # the coders of the others take long to compile: full runs
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
    assert t.has_panel == (name not in ("Q8_1", "Q8_K"))
    if t.has_panel:
        panel.check_panel(name)


def weights_of(name, n):
    """An importance matrix if the type needs one."""
    return np.random.default_rng(4).gamma(2.0, 1.0, n).astype(np.float32) if name in NEEDS_IMATRIX else None


@pytest.mark.parametrize("name", TYPES)
def test_round_trip(name):
    """Quantized values lie near the given ones."""
    t = types.by_name(name)
    x = random_values(3, 1024)
    if name in TERNARY:
        x = np.sign(x) * (np.abs(x) > 0.5) * np.float32(0.75) + x * np.float32(0.01)
    b = t.quant.quantize(x, weights_of(name, 1024))
    assert b.shape == (3, types.row_size(t, 1024)) and b.dtype == np.uint8
    y = t.quant.dequantize(b)
    error = np.square(y - x).sum() / np.square(x).sum()
    assert (
        error
        < {1: 0.4, 2: 0.15, 3: 0.04, 4: 0.02, 5: 0.01, 6: 2e-3, 8: 1e-4, 9: 1e-4}[
            2 if name in TERNARY else t.type_size * 8 // t.blck_size
        ]
    )


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in TYPES])
def test_compiled_as_numpy(name):
    t = types.by_name(name)
    x = random_values(2, 512)
    x[0, :256], x[1, 32:64] = 0, 1e-30
    x[1, 256:], x[1, 300] = np.float32(1.4765625), np.float32(2.953125)  # the quotient is just below 1/2
    b = random_blocks(name, 2, 512) if name in CODEBOOK else t.quant.quantize(x)
    if t.quant.quantize_row is not None and name != "IQ4_NL":  # its compiled form does not search
        assert np.array_equal(convert_rows(name, "quantize_row", x, 512, b.shape[1]), b)
    y = convert_rows(name, "dequantize_row", b, 512, 4 * 512).view(np.float32)
    assert np.array_equal(y.view(np.uint32), t.quant.dequantize(b).view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_refuses_parts_of_blocks(name):
    quant = types.by_name(name).quant
    with pytest.raises(ValueError, match=r"shape \(rows, multiple of"):
        quant.quantize(np.zeros((2, 17), np.float32), weights_of(name, 17))
    with pytest.raises(ValueError, match=f"multiple of .*, the block of {name}, got 17"):
        quantize_rows(quant.type, np.zeros((2, 17), np.float32), weights_of(name, 17))
    if name in NEEDS_IMATRIX:
        for quantize in (lambda x: quant.quantize(x), lambda x: quantize_rows(quant.type, x)):
            with pytest.raises(ValueError, match=f"{name} must have an importance matrix, got none"):
                quantize(np.zeros((2, 256), np.float32))
    with pytest.raises(ValueError, match=r"shape \(rows, multiple of"):
        quant.dequantize(np.zeros((2, 7), np.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_bytes_as_ggml(name, reference):
    quant = types.by_name(name).quant
    for case in read_cases(reference / "ops" / f"quantize_{name.lower()}.npz"):
        arrays, meta = case.arrays, case.meta
        q = arrays.get("q", arrays.get("q_cpu"))
        y = quant.dequantize(q)
        if "y" in arrays:
            assert np.array_equal(y.view(np.uint32), arrays["y"].view(np.uint32)), (case.id, meta["pattern"])
        if meta["kind"] != "quantize":
            continue
        if name == "IQ4_NL" and "q_cpu" in arrays:
            q = convert_rows(name, "quantize_row", arrays["x"], meta["n"], arrays["q"].shape[1])
            assert np.array_equal(q, arrays["q_cpu"]), (case.id, meta["pattern"])
        want, q = q, quant.quantize(arrays["x"], arrays.get("imatrix"))
        if meta["imatrix"] or quant.searches:
            weights = arrays.get("imatrix", np.float32(1)).astype(np.float64)
            errors = [(weights * np.square(v - arrays["x"].astype(np.float64))).sum() for v in (quant.dequantize(q), y)]
            assert errors[0] <= errors[1], (case.id, meta["pattern"])
        elif meta.get("q_exact", True):
            assert np.array_equal(q, want), (case.id, meta["pattern"])
        else:
            assert np.array_equal(quant.dequantize(q), y), (case.id, meta["pattern"])


WEIGHTED = [name for name in TYPES if types.by_name(name).quant.quantize_weighted is not None]


@pytest.mark.parametrize("name", [n if n == "IQ2_S" else pytest.param(n, marks=pytest.mark.full) for n in WEIGHTED])
@pytest.mark.parametrize("given", [True, False])
def test_weighted_as_numpy(name, given):
    """The compiled search gives NumPy's bytes, by any number of threads."""
    quant, x = types.by_name(name).quant, random_values(3, 512)
    x[0, :256], x[1, 32:64], x[1, 100:300], x[2, 5] = 0, 1e-30, 1e-6, 1e4
    weights = np.random.default_rng(4).gamma(1.0, 1.0, 512).astype(np.float32) if given else None
    if weights is None and quant.needs_imatrix:
        pytest.skip("needs an importance matrix")
    want = quant.quantize(x, weights)
    for n_threads in (1, 3):
        assert np.array_equal(quantize_rows(quant.type, x, weights, n_threads), want)


@pytest.mark.parametrize("name", CODEBOOK)
def test_codebook_search_on_edges(name):
    """No garbage: finite values of about the right size, whatever is given."""
    quant = types.by_name(name).quant
    for value in (0.0, 1e-40, 1e-7, 3e4, 1e30, np.inf, np.nan):
        x = np.zeros((1, 256), np.float32)
        x[0, 7] = value
        y = quant.dequantize(quant.quantize(x, np.ones(256, np.float32)))
        most = max(1.3 * float(np.nan_to_num(value, posinf=3e30)), 1e-20)
        assert np.isfinite(y).all() and np.abs(y).max() <= most, value
        if value == 3e4:
            assert np.square(y - x).sum() <= np.square(x).sum()


def test_q8_0_rounds_what_is_just_below_a_half_down():
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1], x[0, 2] = 127, np.nextafter(np.float32(0.5), np.float32(0)), 0.5
    quant = types.by_name("Q8_0").quant
    want = quant.quantize(x)
    assert want[0, 2:5].view(np.int8).tolist() == [127, 0, 1]
    got = np.zeros(34, np.uint8)
    quant.quantize_row.njit(x.view(np.uint8).reshape(-1), 0, got, 0, 32)
    assert got.tolist() == want[0].tolist()
