"""The generic check of a quantized type, for types of one's own: `gg.check_type("Q3_64")`.

Its conversions run on blocks with guards around them, twice: what lies around a block and what was in it before must
not show. Then a product through its panels is compared with one of the decoded weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.jit import Jitted, kernel

if TYPE_CHECKING:
    from ggjit.types import Type

_GUARD, _BLOCKS = 256, 2  # bytes on either side; blocks in a row
_FILLS = (0x00, 0xFF)
LARGEST_ERROR = 1e-3  # squared, relative, of products: activations have 8 bits
_ONE = [1, 1, 1, 1]


@dataclasses.dataclass(frozen=True)
class TypeReport:
    """What the check of a type found.

    Attributes:
        name: of the type.
        error: squared error of a normal sample that was quantized and decoded, over its squares.
        problems: one sentence each; none if the type is sound.
    """

    name: str
    error: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Is there no problem?"""
        return not self.problems

    def __str__(self) -> str:
        return "\n".join((f"{self.name}: squared error {self.error:.3g}", *(self.problems or ("all passed",))))


def check_type(type: Type | str) -> TypeReport:
    """Check the conversions of a quantized type and its products.

    - `quantize` sets all bytes of a block and no others, and reads its values alone
    - decoding (`scale`, `code`, `minimum`, `table`) reads the bytes of a block alone
    - decoded values are nearer to what was quantized than zeros are
    - a block of zeros is decoded to zeros, as rows that a panel lacks are
    - a product is that of the decoded weights, which it is not if codes need more bits than was said

    Args:
        type: with both conversions, or its name.

    Raises:
        TypeError: it is neither a type nor a name.
        ValueError: there is no such type, or it has no conversions.
    """
    found = types.by_name(type) if isinstance(type, str) else type
    if not isinstance(found, types.Type):
        raise TypeError(f"check_type: type must be a Type or the name of one, got {found!r}")
    quant = found.quant
    if quant is None or quant.quantize_row is None or quant.panel is None:
        raise ValueError(f"check_type: type must be a quantized one with both conversions, got {found.name}")
    n = _BLOCKS * found.blck_size
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    problems: list[str] = []
    code = _guarded(quant.quantize_row, "quantize", x.view(np.uint8), n, _BLOCKS * found.type_size, problems)
    values = _guarded(quant.dequantize_row, "decoding", code, n, 4 * n, problems).view(np.float32)
    error = float(np.square(x - values, dtype=np.float64).sum() / np.square(x, dtype=np.float64).sum())
    if not error < 1:
        problems.append(f"decoded values must be nearer to the quantized than zeros, got a squared error {error:.3g}")
    if not problems:  # such code writes where it should not, or reads what is not its own
        problems += _products(found)
    return TypeReport(found.name, error, tuple(problems))


def _guarded(
    convert: Jitted, what: str, source: NDArray[np.uint8], n: int, nbytes: int, problems: list[str]
) -> NDArray[np.uint8]:
    """The bytes that a conversion gives; problems are added if others were written or show."""

    @kernel
    def guarded(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):  # type: ignore[no-untyped-def]
        convert(src0, np.int64(op_params[0]), dst, np.int64(op_params[0]), dst_ne[0])

    results = []
    for fill in _FILLS:
        to = np.full(nbytes + 2 * _GUARD, fill, np.uint8)
        around = np.full(_GUARD, fill, np.uint8)
        src = np.concatenate([around, source, around])
        guarded(to, [n, 1, 1, 1], _ONE, src, _ONE, _ONE, np.full(16, _GUARD, np.int32), np.zeros(64, np.uint8), 0, 1)
        outside = np.flatnonzero(np.concatenate([to[:_GUARD], to[nbytes + _GUARD :]]) != fill)
        if len(outside):
            at = int(outside[0]) - _GUARD if outside[0] < _GUARD else int(outside[0]) - _GUARD + nbytes
            problems.append(f"{what}: must write the {nbytes} bytes of {_BLOCKS} blocks, got a write at byte {at}")
            break
        results.append(to[_GUARD : nbytes + _GUARD])
    if len(results) == 2 and (different := np.flatnonzero(results[0] != results[1])).size:
        problems.append(
            f"{what}: must set every byte and read its blocks alone, got byte {different[0]} that depends on what lay "
            "there or around"
        )
    return results[0] if results else to[_GUARD : nbytes + _GUARD]


def _products(type: Type) -> Iterator[str]:
    """Problems of a product, and of rows of zeros."""
    import ggjit as gg

    quant, n_rows, k = type.quant, 17, max(256, type.blck_size)
    assert quant is not None
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((n, k)).astype(np.float32) for n in (n_rows, 3))
    b = np.zeros((n_rows, k // type.blck_size * type.type_size), np.uint8)
    b[: n_rows - 1] = quant.quantize(x[: n_rows - 1])
    rows = quant.dequantize(b)
    if rows[-1].any():
        yield f"decoding: a block of zeros must give zeros, got {rows[-1][rows[-1] != 0][0]}"
    if not np.isfinite(rows).all():
        yield "decoding: values must be finite, got others"
        return
    with gg.Context(4 << 20):
        w = gg.new_tensor(type, k, n_rows)
        w.bytes()[:] = b.reshape(-1)
        product = gg.mul_mat(w, gg.from_numpy(y))
        gg.build(product).compute(2)
        got = product.numpy().reshape(3, n_rows)
    want = y.astype(np.float64) @ rows.T.astype(np.float64)
    error = float(np.square(want - got).sum() / max(np.square(want).sum(), 1e-300))
    if error > LARGEST_ERROR:
        yield f"products: must be those of the decoded weights, got a squared error {error:.3g}; do codes fit `bits`?"
