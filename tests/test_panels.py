"""Kernels of the matrix product by themselves: values, the same bits for every variant, thread count and CPU level."""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from quant_blocks import blocks

from ggjit import types
from ggjit.context import Context
from ggjit.cpu import NAMES, cpu_level
from ggjit.ops.lib import float_panel, panel_activations, panel_kernels
from ggjit.tensor import new_tensor

FLOATS = tuple(float_panel.UNITS)
TYPES = (*FLOATS, *(t.name for t in types.all_types() if t.has_panel))
QUICK_TYPES = (*FLOATS, "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ2_XS", "IQ4_XS", "MXFP4", "TQ1_0")
EVERY_TYPE = [n if n in QUICK_TYPES else pytest.param(n, marks=pytest.mark.full) for n in TYPES]
NO_PARAMS = np.zeros(16, np.int32)
ABSENT = (None, (0, 0, 0, 0), (0, 0, 0, 0)) * 2  # src2 and src3 of few_kernel, for what follows a product


def nb_of(type, ne):
    nb = [type.type_size, types.row_size(type, ne[0])]
    return [*nb, nb[1] * ne[1], nb[1] * ne[1] * ne[2]]


def aligned(nbytes):
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def encode(type, x):
    """Rows of f32 as bytes of a type, and the float64 values that they stand for."""
    if type.is_quantized:
        b = blocks(type.name, x)
        return b, type.quant.dequantize(b).astype(np.float64)
    if type is types.BF16:
        u = x.view(np.uint32)
        u = (u + 0x7FFF + (u >> 16 & 1)) >> 16
        return u.astype(np.uint16).view(np.uint8), (u << 16).view(np.float32).astype(np.float64)
    y = x.astype(type.dtype)
    return y.view(np.uint8), y.astype(np.float64)


class Product:
    """A product of random weights {k, m, n_w} with activations {k, n, n_y}, run by any kernel."""

    def __init__(self, name, k, m, n, n_w=1, n_y=1, records=1):
        self.records = records
        self.type, self.w = types.by_name(name), panel_kernels.weights(name)
        rng = np.random.default_rng(self.type.id)
        x = rng.standard_normal((n_w * m, k)).astype(np.float32)
        self.rows, values = encode(self.type, x)
        self.ne, self.y_ne, self.out_ne = [k, m, n_w, 1], [k, n, n_y, 1], [m, n, n_y, 1]
        self.y = rng.standard_normal((n_y, n, k)).astype(np.float32)
        self.values = values.reshape(n_w, m, k).repeat(n_y // n_w, 0)

    def panels(self, n_threads=2):
        k, m, n_w = self.ne[:3]
        out = np.full(panel_kernels.panel_nbytes(self.type, k, m) * n_w + 8, 7, np.uint8)
        for ith in range(n_threads):
            panel_kernels.pack_kernel(self.type.name)(
                out, [1] * 4, [1] * 4, self.rows.reshape(-1), self.ne, nb_of(self.type, self.ne), NO_PARAMS,
                aligned(64), ith, n_threads,
            )  # fmt: skip
        assert (out[-8:] == 7).all()
        return out

    def activations(self, n_threads=3):
        """Bytes, ne and nb in the form that the kernels read."""
        k, source = self.y_ne[0], self.y.reshape(-1).view(np.uint8)
        kind = self.w.activations
        if kind == "act_f32":
            return source, self.y_ne, nb_of(types.F32, self.y_ne)
        if kind == "act_q8":
            made, t = panel_activations.quantize_kernel("F32", self.records), types.I8
            ne = [panel_activations.q8_row_nbytes(k, self.records), *self.y_ne[1:]]
        elif kind == "act_f16":
            made, t, ne = panel_activations.round_f16_kernel("F32"), types.F32, self.y_ne
        else:
            made, t, ne = panel_activations.convert_kernel("F32", "BF16"), types.BF16, [k + k % 2, *self.y_ne[1:]]
        out = np.full(int(np.prod(ne)) * t.type_size, 77, np.uint8)
        for ith in range(n_threads):
            made(out, ne, nb_of(t, ne), source, self.y_ne, nb_of(types.F32, self.y_ne), NO_PARAMS, aligned(64), ith,
                 n_threads)  # fmt: skip
        return out, ne, nb_of(t, ne)

    def tiles(self, columns, n_threads=2):
        """The same as `columns` side by side, if that is not 0."""
        y, y_ne, y_nb = self.activations()
        if columns == 0:
            return y, y_ne, y_nb
        ne = [y_nb[1] // 4 * columns, -(-y_ne[1] // columns), *y_ne[2:]]
        out = np.full(4 * int(np.prod(ne)) + 8, 77, np.uint8)
        for ith in range(n_threads):
            panel_activations.tile_kernel(columns)(
                out, ne, nb_of(types.I32, ne), y, y_ne, y_nb, NO_PARAMS, aligned(64), ith, n_threads
            )
        assert (out[-8:] == 77).all()
        return out, ne, nb_of(types.I32, ne)

    def run(self, columns=None, packed=True, n_threads=1, along=1):
        """The result by few_kernel(columns), by many_kernel if columns is None."""
        name, k = self.type.name, self.ne[0]
        if columns is None:
            kernel = panel_kernels.many_kernel(name, packed, self.records)
            size = panel_kernels.many_work_size(self.type, k, packed, n_threads)
        else:
            kernel = panel_kernels.few_kernel(name, columns, packed, along, None, self.records)
            size = panel_kernels.few_work_size(self.type, packed, n_threads, None, self.records)
        work = aligned(64 + size)
        nbytes = 4 * int(np.prod(self.out_ne))
        out = np.full(nbytes + 64, 7, np.uint8)
        source = self.panels() if packed else self.rows.reshape(-1)
        y = self.tiles(panel_kernels.tile_width(name, columns or panel_kernels.many_columns(name), along))
        rest = () if columns is None else ABSENT
        for ith in range(n_threads):  # one after the other: the first gets all chunks
            kernel(out, self.out_ne, nb_of(types.F32, self.out_ne), source, self.ne, nb_of(self.type, self.ne), *y,
                   *rest, NO_PARAMS, work, ith, n_threads)  # fmt: skip
        assert (out[nbytes:] == 7).all(), "wrote past the result"
        return out[:nbytes].view(np.float32).reshape(self.out_ne[::-1][1:])

    def want(self):
        """The float64 product with activations as the kernels see them."""
        y = self.y.astype(np.float64)
        if self.w.activations == "act_q8":
            rest = self.y.reshape(-1, 32)
            for _ in range(self.records):
                factor = np.minimum(127 / np.abs(rest).max(1, keepdims=True).astype(np.float64), 2.0**127)
                q = np.rint(rest * factor.astype(np.float32)).astype(np.float64)
                d = (rest * q).sum(1, keepdims=True) / np.maximum((q * q).sum(1, keepdims=True), 1)
                rest = (rest - q * d).astype(np.float32)
            y = y - rest.reshape(y.shape)
        elif self.w.activations != "act_f32":
            y = encode(self.type, self.y.reshape(-1, self.y.shape[2]))[1].reshape(self.y.shape)
        return y @ self.values.swapaxes(1, 2)


def error(got, want):
    return np.square(got - want).sum() / np.square(want).sum()


def bits(x):
    return x.view(np.uint32)


def part_of_unit(name):
    """The smallest K that is not a whole panel block, 0 if there is none."""
    if name in FLOATS:
        return 1
    t = types.by_name(name)
    return t.blck_size if t.blck_size < t.quant.panel.blck_size else 0


SIZES = [(2560, 37, 19), (256, 50, 3)]
# Columns of the tile (None: the kernel for many), packed or not, threads. All of them in CI: each is a kernel a type.
QUICK = [(8, True, 3), (None, True, 2)]
VARIANTS = [*QUICK, (3, False, 2), (None, True, 1), (None, False, 2)] if os.environ.get("GGJIT_FULL_TESTS") else QUICK


@pytest.mark.parametrize("name", EVERY_TYPE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_same_bits(name, size):
    """Every kernel gives the same bits: columns, panels or rows, threads; and what float64 gives."""
    k, m, n = size
    product = Product(name, k + part_of_unit(name), m, n, 2, 4)
    first = product.run(8)
    assert error(first, product.want()) < 1e-10
    for columns, packed, n_threads in VARIANTS:
        got = product.run(columns, packed, n_threads)
        assert np.array_equal(bits(got), bits(first)), (columns, packed, n_threads)


@pytest.mark.parametrize("name", ["Q2_K", *(pytest.param(name, marks=pytest.mark.full) for name in ("Q8_0", "Q4_1"))])
def test_activations_of_16_bits(name):
    """Two records a run: nearly the product of the values themselves, and the same bits from every kernel."""
    k = 2560 + part_of_unit(name)
    product, plain = (Product(name, k, 37, 19, 2, 4, records) for records in (2, 1))
    first, exact = product.run(1), product.y.astype(np.float64) @ product.values.swapaxes(1, 2)
    assert error(first, product.want()) < 1e-11
    assert error(first, exact) < 1e-4 * error(plain.run(8), exact)
    variants = [(None, True, 2), (4, True, 1), (3, False, 3), (None, False, 1)]
    for columns, packed, n_threads in variants if os.environ.get("GGJIT_FULL_TESTS") else variants[:1]:
        got = product.run(columns, packed, n_threads)
        assert np.array_equal(bits(got), bits(first)), (columns, packed, n_threads)


def test_columns_along_dimension_2():
    product = Product("F16", 64, 20, 1, 2, 10)
    assert np.array_equal(bits(product.run(3, True, 2, along=2)), bits(product.run(1)))


@pytest.mark.parametrize(("n", "n_threads"), [(131, 2), (127, 2), (300, 3)])
def test_threads_with_columns_of_their_own(n, n_threads):
    """Each computes its columns and no others, whatever the others do; the bits are those of few columns."""
    product = Product("Q8_0", 1120, 37, n)
    want = product.run(8)
    assert np.array_equal(bits(product.run(None, True, n_threads)), bits(want))
    with Context(4096, no_alloc=True):
        by_rows = panel_kernels.many_by_rows(new_tensor(types.F32, 37, n), n_threads)
    assert by_rows == (n >= 128 * (n_threads - 1))
    if by_rows:
        work = aligned(64 + panel_kernels.many_work_size(product.type, 1120, True, n_threads))
        out = np.full(4 * 37 * n, 7, np.uint8)
        panel_kernels.many_kernel("Q8_0", True)(
            out, product.out_ne, nb_of(types.F32, product.out_ne), product.panels(), product.ne,
            nb_of(product.type, product.ne), *product.tiles(0), NO_PARAMS, work, 1, n_threads,
        )  # fmt: skip
        first, last = n // n_threads, 2 * n // n_threads
        rows = out.view(np.float32).reshape(n, 37)
        assert np.array_equal(bits(rows[first:last]), bits(want[0, first:last]))
        assert (rows[:first].view(np.uint8) == 7).all() and (rows[last:].view(np.uint8) == 7).all()


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_batch_does_not_change_a_column(name):
    """A column alone and within 29 has the same bits."""
    product = Product(name, 320, 16, 29)
    whole = product.run()
    product.y, product.y_ne, product.out_ne = product.y[:, 7:8].copy(), [320, 1, 1, 1], [16, 1, 1, 1]
    assert np.array_equal(bits(product.run(1)), bits(whole[:, 7:8]))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_1", "Q6_K"])
def test_special_values(name):
    """Zeros give zeros; a NaN or an infinity in the activations shows in its column alone."""
    product = Product(name, 512, 17, 3)
    product.y[0, 0] = 0
    product.y[0, 1, 5] = np.nan
    got = product.run(8)
    assert (got[0, 0] == 0).all() and np.isnan(got[0, 1]).all() and np.isfinite(got[0, 2]).all()
    product.y[0, 1, 5] = np.inf
    assert not np.isfinite(product.run(8)[0, 1]).any()


def test_tiny_activations():
    """Values whose d is subnormal: codes stay within 127."""
    product = Product("Q8_0", 64, 16, 1)
    product.y[:] *= np.float32(3e-43)
    assert np.abs(product.run(1) - product.want()).max() < 1e-40
    records = product.activations()[0].reshape(-1, 64)[:2]
    assert np.abs(records[:, 32:].view(np.int8).astype(int)).max() <= 127


@pytest.mark.parametrize(
    ("largest", "records", "limit"), [(9e-37, 1, 1e-4), (3e-37, 1, 1e-3), (3e-34, 2, 1e-9), (3e-35, 2, 1e-7)]
)
def test_small_activations_have_their_scale(largest, records, limit):
    """Where they would be multiplied by more than 2^127, codes are smaller and the scale is that of the codes."""
    product = Product("Q8_0", 64, 16, 1, records=records)
    product.y *= np.float32(largest) / np.abs(product.y).max()
    want = product.y.astype(np.float64) @ product.values.swapaxes(1, 2)
    assert error(product.run(1), want) < limit


@pytest.mark.parametrize("name", ["Q8_0", "Q8_1", "Q8_K"])
def test_activations_already_int8(name):
    """ggml's own int8 forms become the records of their values."""
    rng = np.random.default_rng(0)
    size, nbytes = panel_activations.BLOCKS[name]
    blocks = np.zeros((4, nbytes), np.uint8)
    blocks[:, panel_activations.CODES_AT[name] :][:, :size] = rng.integers(0, 256, (4, size))
    d = np.array([0.5, 0.25, 1, 2], np.float32 if name == "Q8_K" else np.float16)
    blocks[:, : d.itemsize] = d[:, None].view(np.uint8)
    codes = blocks[:, panel_activations.CODES_AT[name] :][:, :size].view(np.int8).reshape(-1, 32).astype(int)
    nbytes_out = panel_activations.q8_row_nbytes(4 * size)
    out = np.zeros(nbytes_out, np.uint8)
    ne = [4 * size, 1, 1, 1]
    panel_activations.quantize_kernel(name)(
        out, [nbytes_out, 1, 1, 1], [1, nbytes_out, 0, 0], blocks.reshape(-1), ne, [nbytes, blocks.size, 0, 0],
        NO_PARAMS, aligned(64), 0, 1,
    )  # fmt: skip
    records = out.reshape(-1, 64)[: size // 8]
    sums = np.stack([codes[:, :16].sum(1), codes[:, 16:].sum(1), codes.sum(1)], 1)
    scales = d.astype(np.float32).repeat(size // 32)
    assert np.array_equal(records[:, 32:].view(np.int8), codes)
    assert np.array_equal(records[:, :16].copy().view(np.float32), scales[:, None] * np.c_[np.ones(len(sums)), sums])
    assert np.array_equal(records[:, 16:28].copy().view(np.int32), -128 * sums)


def in_a_process(level):
    """Results of this file's `main` in a process at a CPU level."""
    env = {**os.environ, "GGJIT_CPU": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@functools.cache
def at_all_levels():
    """The same at all levels, two processes at a time: each has kernels of its own to compile."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(X86, pool.map(in_a_process, X86), strict=True))


def main():
    """Print errors and hashes of a few products: one tile of 3 columns and the one for many."""
    found = {}
    for name in ("F16", "BF16", *(t for t in TYPES if t not in FLOATS)):
        product = Product(name, 512 + (part_of_unit(name) if name not in FLOATS else 0), 37, 3)
        few, many = product.run(3), product.run()
        digests = [hashlib.sha256(x.tobytes()).hexdigest() for x in (few, many)]
        found[name] = error(few, product.want()), *digests
    print(json.dumps(found))


X86 = NAMES[: NAMES.index(cpu_level()) + 1] if cpu_level() in NAMES else ()


@pytest.mark.full
@pytest.mark.parametrize("level", X86)
def test_levels(level):
    """Every level gives right values and the same bits for few and many columns."""
    for name, (err, few, many) in at_all_levels()[level].items():
        assert err < 1e-10, name
        assert few == many, name


@pytest.mark.full
@pytest.mark.skipif("avx512" not in X86, reason="needs AVX-512")
@pytest.mark.parametrize("level", ["avx2", "avxvnni"])
def test_same_bits_on_avx512_and_below(level):
    wide, narrow = at_all_levels()["avx512"], at_all_levels()[level]
    assert {k: v for k, v in wide.items() if k != "BF16"} == {k: v for k, v in narrow.items() if k != "BF16"}


def loops(assembly):
    """Innermost loops of assembly text: the lines between a label and the jump back to it."""
    found, lines = [], assembly.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"(\.LBB\w+):", line))}
    for i, line in enumerate(lines):
        m = re.match(r"\s+j\w+\s+(\.LBB\w+)", line)
        if m and labels.get(m.group(1), i) < i and not any(labels[m.group(1)] < labels[x] <= i for x in labels):
            found.append(lines[labels[m.group(1)] : i])
    return found


@pytest.mark.skipif(cpu_level() != "avx512", reason="needs AVX-512")
@pytest.mark.parametrize(
    ("name", "columns", "instruction", "count"),
    [("Q4_1", 1, r"vpdpbusd\s.*\{1to16\}, %zmm", 8), ("Q4_1", None, r"vpdpbusd\s.*\{1to16\}, %zmm", 64),
     ("F32", None, r"vfmadd231ps\s.*%zmm", 48)],
)  # fmt: skip
def test_instructions(name, columns, instruction, count):
    """The hot loop has the dot instruction with broadcast activations, and no vector goes to the stack."""
    made = panel_kernels.many_kernel(name, True) if columns is None else panel_kernels.few_kernel(name, columns, True)
    hot = [loop for loop in loops(made.asm()) if sum(bool(re.search(instruction, line)) for line in loop) == count]
    assert hot
    assert not any(re.search(r"\(%rsp\).*zmm|zmm.*\(%rsp\)", line) for line in hot[0])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
