"""Rows of values to the bytes of a type and back, by several threads.

    quantize_rows(types.Q4_K, x)                 # f32 [n_rows, n] -> uint8 [n_rows, row_size]
    dequantize_rows(types.Q4_K, b)               # and back

Compiled code does it, without the GIL. Rows are independent, so the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.arguments import check_threads
from ggjit.types import Type

__all__ = ["dequantize_rows", "quantize_rows"]

_PIECE = 1 << 20  # values that a thread converts at once


def quantize_rows(
    type: Type, rows: NDArray[np.float32], imatrix: NDArray[np.float32] | None = None, n_threads: int = 1
) -> NDArray[np.uint8]:
    """Code rows.

    Args:
        type: F32, F16, BF16 or a quantized type that can be made.
        rows: f32 [n_rows, n].
        imatrix: f32 [n], how much the error of each column counts; None: all the same.
        n_threads: threads that share the rows.

    Returns:
        uint8 [n_rows, row_size].

    Raises:
        ValueError: n is no multiple of the type's block, the shape of `imatrix` does not fit, or the type needs one.
        NotImplementedError: nothing here makes the type.
    """
    n_threads = check_threads("quantize_rows", n_threads)
    if rows.ndim != 2:
        raise ValueError(f"quantize_rows: rows must have 2 dimensions, got {list(rows.shape)}")
    if imatrix is not None and imatrix.shape != (rows.shape[1],):
        raise ValueError(f"quantize_rows: imatrix must have {rows.shape[1]} elements, got {list(imatrix.shape)}")
    if rows.shape[1] % type.blck_size:
        raise ValueError(
            f"quantize_rows: n must be a multiple of {type.blck_size}, the block of {type.name}, got {rows.shape[1]}"
        )
    out = np.empty((len(rows), types.row_size(type, rows.shape[1])), np.uint8)
    _share(_coder(type, imatrix), np.ascontiguousarray(rows, np.float32), out, rows.shape[1], n_threads)
    return out


def dequantize_rows(type: Type, rows: NDArray[np.uint8], n_threads: int = 1) -> NDArray[np.float32]:
    """Decode rows.

    Args:
        type: F32, F16, BF16, F64 or a quantized type.
        rows: uint8 [n_rows, row_size].
        n_threads: threads that share the rows.

    Returns:
        f32 [n_rows, n].

    Raises:
        ValueError: rows are not whole blocks.
        NotImplementedError: nothing here decodes the type.
    """
    n_threads = check_threads("dequantize_rows", n_threads)
    if rows.ndim != 2 or rows.shape[1] % type.type_size:
        raise ValueError(
            f"dequantize_rows: rows must have a shape (rows, multiple of {type.type_size}), got {list(rows.shape)}"
        )
    n = rows.shape[1] // type.type_size * type.blck_size
    out = np.empty((len(rows), n), np.float32)
    _share(_decoder(type), rows, out, n, n_threads)
    return out


def _share(convert: Callable[[Any], Any], source: Any, out: Any, n: int, n_threads: int) -> None:
    """Convert pieces of rows, each by one of the threads."""
    step = max(1, min(_PIECE // max(1, n), -(-len(source) // n_threads)))

    def piece(at: int) -> None:
        out[at : at + step] = convert(source[at : at + step])

    if n_threads > 1 and len(source) > step:
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(piece, range(0, len(source), step)))
    else:
        for at in range(0, len(source), step):
            piece(at)


def _to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """BF16 bits of rows, rounded to even; a NaN stays one."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    return np.where(np.isnan(x), bits >> 16 | 64, rounded >> 16).astype(np.uint16).view(np.uint8)


def _coder(type: Type, imatrix: NDArray[np.float32] | None) -> Callable[[Any], Any]:
    if type is types.F32:
        return lambda x: x.view(np.uint8)
    if type is types.F16:
        return _to_f16
    if type is types.BF16:
        return _to_bf16
    quant = _quant(type, "make")
    if quant.needs_imatrix and imatrix is None:
        raise ValueError(f"quantize_rows: {type.name} must have an importance matrix, got none; give imatrix, f32 [n]")
    if quant.quantize_weighted is not None and (imatrix is not None or quant.searches):
        return _weighted_coder(quant, imatrix)
    return (lambda x: quant.quantize(x, imatrix)) if quant.quantize_row is None else _row_coder(quant)


def _to_f16(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint8)


def _decoder(type: Type) -> Callable[[Any], Any]:
    if type in (types.F32, types.F16, types.F64):
        return lambda b: np.ascontiguousarray(b).view(type.dtype)
    if type is types.BF16:
        return lambda b: (np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _row_decoder(_quant(type, "decode"))


def _quant(type: Type, what: str) -> Any:
    if type.quant is None:
        raise NotImplementedError(f"quantize: nothing here can {what} {type.name}")
    return type.quant


def _weighted_coder(quant: Any, imatrix: NDArray[np.float32] | None) -> Callable[[Any], Any]:
    from ggjit.ops.quants.rows_kernel import quantize_weighted

    convert, size, nbytes = _weighted_kernel(quant), quant.type.blck_size, quant.type.type_size
    return lambda x: quantize_weighted(convert, x, imatrix, x.shape[1] // size * nbytes)


@functools.cache
def _weighted_kernel(quant: Any) -> Any:
    from ggjit.ops.quants.rows_kernel import weighted_kernel

    made = weighted_kernel(quant)
    made.address()  # before threads call it
    return made


@functools.cache
def _row_coder(quant: Any) -> Callable[[Any], Any]:
    from ggjit.ops.quants.rows_kernel import convert_rows, rows_kernel

    size, nbytes = quant.type.blck_size, quant.type.type_size
    convert = rows_kernel(quant.quantize_row, size, 4 * size, nbytes)
    convert.address()  # before threads call it
    return lambda x: convert_rows(convert, x, x.shape[1], x.shape[1] // size * nbytes)


@functools.cache
def _row_decoder(quant: Any) -> Callable[[Any], Any]:
    from ggjit.ops.quants.rows_kernel import convert_rows, rows_kernel

    size, nbytes = quant.type.blck_size, quant.type.type_size
    convert = rows_kernel(quant.dequantize_row, size, nbytes, 4 * size)
    convert.address()

    def decode(b: Any) -> Any:
        n = b.shape[1] // nbytes * size
        return convert_rows(convert, b, n, 4 * n).view(np.float32)

    return decode
