"""Read reference cases of single ops and quantizers, and compare results with them.

A file `<op>.npz` or `quantize_<type>.npz` holds cases; each has an id and arrays named `<id>.<part>`. The part `meta`
is JSON in bytes; `s0`, `s1` ... are the bytes of the storages that the sources lie in, `dst` the bytes of the result
and `s<k>_after` those of a storage that the op changed; a quantizer's case has `x`, `imatrix`, `q`, `q_cpu` and `y`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.types import Type

Array = NDArray[Any]


class Case(NamedTuple):
    """One case: its id in the file, its description and its arrays by name."""

    id: str
    meta: dict[str, Any]
    arrays: dict[str, Array]


class Difference(NamedTuple):
    """What was compared, how far it is from the reference and how far it may be."""

    what: str
    error: float
    limit: float

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.3g}, limit {self.limit:.3g}"


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of one file in the order of their ids.

    Raises:
        ValueError: the file holds no cases.
    """
    with np.load(path, allow_pickle=False) as file:
        names = defaultdict(list)
        for key in file.files:
            case, _, part = key.partition(".")
            names[case].append(part)
        if not all("meta" in parts for parts in names.values()):
            raise ValueError(f"{path}: every array must belong to a case with a description, got {file.files[:3]}")
        for case, parts in sorted(names.items()):
            arrays = {part: file[f"{case}.{part}"] for part in parts}
            yield Case(case, json.loads(arrays.pop("meta").tobytes()), arrays)


def is_case_file(path: Path) -> bool:
    """Does a .npz file hold cases (rather than a model's results)?"""
    with np.load(path, allow_pickle=False) as file:
        return any(key.endswith(".meta") for key in file.files)


def elements(memory: Array, header: dict[str, Any], offset: int = 0) -> Array:
    """The elements of a tensor in memory: shape ne[::-1]; block types as bytes, with two more axes (block, byte)."""
    kind = types.by_name(header["type"])
    ne, nb = header["ne"], header["nb"]
    shape = [*reversed(ne[1:]), ne[0] // kind.blck_size]
    strides = list(reversed(nb))
    if kind.dtype is None:
        shape, strides = [*shape, kind.type_size], [*strides, 1]
    dtype = np.uint8 if kind.dtype is None else kind.dtype
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.ndarray(shape, dtype, np.ascontiguousarray(memory), offset, strides)


def elements_of_rows(rows: Array, kind: Type) -> Array:
    """The elements of rows given as bytes [n, bytes of a row], as `elements` gives them."""
    return rows.reshape(len(rows), -1, kind.type_size) if kind.dtype is None else rows.view(kind.dtype)


def decode(values: Array, kind: Type) -> Array:
    """float64 values of what `elements` gives.

    Raises:
        NotImplementedError: no code is registered for the block type.
    """
    if kind is types.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind.dtype is not None:
        return values.astype(np.float64)
    if kind.quant is None:
        raise NotImplementedError(f"{kind.name}: code of the type must be registered, got none")
    rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1] * values.shape[-2])
    return np.asarray(kind.quant.dequantize(rows), np.float64).reshape(*values.shape[:-2], -1)


def nmse(got: Array, want: Array) -> float:
    """Squared error over squared values where the reference is finite; inf if infinities or NaN lie elsewhere."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return float("inf")
    error = float(np.square(got[finite] - want[finite]).sum())
    energy = float(np.square(want[finite]).sum())
    return 0.0 if error == 0 else error / energy if energy > 0 else float("inf")


def _same_bits(got: Array, want: Array) -> bool:
    return np.array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def compare(case: Case, what: str, got: Array, want: Array, kind: Type) -> Difference | None:
    """How a result (as `elements` gives it) misses the reference by the case's own rule; None if it passes."""
    if got.shape != want.shape:
        return Difference(f"{what}: shape {list(got.shape)}, not {list(want.shape)}", float("inf"), 0)
    rule = case.meta["compare"]
    if _same_bits(got, want):
        return None
    if rule == "set":  # indices of a row in any order
        got, want, rule = np.sort(got, -1), np.sort(want, -1), "exact"
    if rule == "exact":
        a, b = (decode(x, kind) if kind is types.BF16 else x for x in (got, want))
        n = int(((a != b) & ~(np.isnan(a) & np.isnan(b))).sum())
        return Difference(f"{what}: unequal values", n, 0) if n else None
    a, b = decode(got, kind), decode(want, kind)
    if rule == "close":
        with np.errstate(all="ignore"):
            near = np.isclose(a, b, case.meta["close"]["rtol"], case.meta["close"]["atol"], equal_nan=True)
        return None if near.all() else Difference(f"{what}: values that are not close", float((~near).sum()), 0)
    error, limit = nmse(a, b), float(case.meta["nmse_max"])
    return None if error <= limit else Difference(f"{what}: nmse", error, limit)
