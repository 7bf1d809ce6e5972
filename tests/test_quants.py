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
def test_s103_round_trip(name):
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
def test_s103_refuses_parts_of_blocks(name):
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


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param(given, name, marks=[] if name == "IQ2_S" else pytest.mark.full)
        for given in (True, False)
        for name in WEIGHTED
        if given or not types.by_name(name).quant.needs_imatrix
    ],
)
def test_weighted_as_numpy(name, given):
    """The compiled search gives NumPy's bytes, by any number of threads."""
    quant, x = types.by_name(name).quant, random_values(3, 512)
    x[0, :256], x[1, 32:64], x[1, 100:300], x[2, 5] = 0, 1e-30, 1e-6, 1e4
    weights = np.random.default_rng(4).gamma(1.0, 1.0, 512).astype(np.float32) if given else None
    want = quant.quantize(x, weights)
    for n_threads in (1, 3):
        assert np.array_equal(quantize_rows(quant.type, x, weights, n_threads), want)


# Squared errors of ggml's coders (0.25.3) over squared values for the rows of `three_rows`: without importance matrix
# (None: no search, or one is needed), and with one, weighted by it.
GGML_ERRORS = {
    "Q4_0": (None, (0.005035, 0.008257, 0.007748)),
    "Q4_1": (None, (0.003666, 0.006093, 0.002871)),
    "Q5_0": (None, (0.00128, 0.002178, 0.002153)),
    "Q5_1": (None, (0.000798, 0.001286, 0.000704)),
    "Q2_K": ((0.09012, 0.1107, 0.1226), (0.05873, 0.0635, 0.073)),
    "Q3_K": ((0.02158, 0.02706, 0.01069), (0.01723, 0.02134, 0.003535)),
    "Q4_K": ((0.004571, 0.006903, 0.002872), (0.00376, 0.006444, 0.004712)),
    "Q5_K": ((0.001211, 0.001817, 0.001178), (0.0009112, 0.001559, 0.001231)),
    "Q6_K": (None, (0.0002213, 0.000353, 9.387e-05)),
    "IQ2_XXS": (None, (0.08762, 0.1144, 0.9003)),
    "IQ2_XS": (None, (0.06729, 0.07915, 0.5535)),
    "IQ3_XXS": ((0.04303, 0.06545, 0.3803), (0.02225, 0.03006, 0.1328)),
    "IQ1_S": (None, (0.1906, 0.2616, 0.4706)),
    "IQ4_NL": ((0.005334, 0.00696, 0.004483), (0.004303, 0.006035, 0.006911)),
    "IQ3_S": ((0.02872, 0.03504, 0.2449), (0.01369, 0.01716, 0.1137)),
    "IQ2_S": ((0.06814, 0.1104, 0.5315), (0.04604, 0.06447, 0.5242)),
    "IQ4_XS": ((0.00548, 0.007182, 0.00577), (0.004438, 0.006266, 0.00791)),
    "IQ1_M": ((0.347, 0.3257, 0.2684), (0.1629, 0.1693, 0.2752)),
}


def three_rows():
    """Rows with light, heavier and heavy tails, and an importance matrix."""
    u = np.random.default_rng(7).random((5, 512))
    normal = np.sqrt(-2 * np.log(u[:3])) * np.cos(2 * np.pi * u[[1, 2, 0]])
    x = np.stack([normal[0], np.log(u[1] / u[2]), normal[2] ** 5]).astype(np.float32)
    return x, (-np.log(u[4])).astype(np.float32)


@pytest.mark.parametrize("name", WEIGHTED)
def test_errors_beside_ggml(name):
    """No search leaves a larger error than ggml's."""
    quant, (x, weights) = types.by_name(name).quant, three_rows()
    for w, want in zip((None, weights), GGML_ERRORS[name], strict=True):
        if want is not None:
            e = np.square(quant.dequantize(quant.quantize(x, w)).astype(np.float64) - x)
            errors = (e if w is None else w * e).sum(1) / np.square(x.astype(np.float64)).sum(1)
            assert (errors <= np.array(want)).all(), errors / want


@pytest.mark.full
@pytest.mark.parametrize("name", TYPES)
def test_beside_libgguf(name):
    """Many rows by compiled code: the bytes of ggml's coders, or smaller errors."""
    libgguf, kind = pytest.importorskip("libgguf"), types.by_name(name)
    if kind.id not in libgguf._SUPPORTED_QUANTIZED_QTYPES:
        pytest.skip(f"libgguf has no {name}")
    rng = np.random.default_rng(11)
    x = (rng.standard_t(4, (16, 2048)) * np.exp(rng.standard_normal((16, 1)))).astype(np.float32)
    weights = rng.gamma(1.0, 1.0, 2048).astype(np.float32)
    for w in (weights, None):
        if w is None and name in NEEDS_IMATRIX:
            continue
        got, want = quantize_rows(kind, x, w, 2), libgguf.quantize_rows(x, kind.id, w).reshape(16, -1)
        if kind.quant.quantize_weighted is not None and (w is not None or kind.quant.searches):
            scale = 1.0 if w is None else w.astype(np.float64)
            errors = [(scale * np.square(kind.quant.dequantize(q).astype(np.float64) - x)).sum() for q in (got, want)]
            assert errors[0] < errors[1]
        elif name != "Q6_K":  # whose sums are rounded in another order
            assert np.array_equal(got, want)


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
