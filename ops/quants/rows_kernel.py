"""Conversions of rows of a quantized type as kernels by themselves, outside of graphs: arrays in, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggjit.jit import Jitted, Kernel, kernel
from ggjit.ops.quants.quant import WORK, Bytes, Floats, Quant

_ONE = [1, 1, 1, 1]


def rows_kernel(convert: Jitted, size: int, from_nbytes: int, to_nbytes: int) -> Kernel:
    """Kernel: dst_ne[1] rows of src0, one after the other, to rows of dst; dst_ne[0] is the number of values in a row.

    Args:
        convert: jitted (src, src_offs, dst, dst_offs, n), as in `Quant`.
        size: values in a block.
        from_nbytes: bytes of a block in src0.
        to_nbytes: bytes of a block in dst.
    """

    @kernel
    def convert_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        n = dst_ne[0]
        for i in range(dst_ne[1]):
            convert(src0, i * (n // size) * from_nbytes, dst, i * (n // size) * to_nbytes, n)

    return convert_rows


def weighted_kernel(quant: Quant) -> Kernel:
    """Kernel: dst_ne[1] rows of dst_ne[0] f32 of src0 to blocks; if params[0], errors of columns weighted by src1."""
    quantize, size, nbytes = quant.quantize_weighted, quant.type.blck_size, quant.type.type_size

    @kernel
    def quantize_rows(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        n, weighted = dst_ne[0], op_params[0]
        for i in range(dst_ne[1]):
            quantize(src0, 4 * n * i, src1, np.int64(0), weighted, dst, i * (n // size) * nbytes, n, work)

    return quantize_rows


def quantize_weighted(convert: Kernel, x: Floats, imatrix: Floats | None, row_nbytes: int) -> Bytes:
    """Rows through a `weighted_kernel`, without the GIL.

    Args:
        convert: the kernel.
        x: f32 [rows, n].
        imatrix: f32 [n], or None.
        row_nbytes: bytes of a row of the result.

    Returns:
        uint8 [rows, row_nbytes].
    """
    rows, n = x.shape
    out = np.zeros((rows, row_nbytes), np.uint8)
    if out.size:
        params = np.full(16, imatrix is not None, np.int32)
        flat = [
            np.ascontiguousarray(v, np.float32).reshape(-1).view(np.uint8)
            for v in (x, x if imatrix is None else imatrix)
        ]
        args = params, np.zeros(WORK, np.uint8), 0, 1
        convert(out.reshape(-1), [n, rows, 1, 1], _ONE, flat[0], _ONE, _ONE, flat[1], _ONE, _ONE, *args)
    return out


def convert_rows(convert: Kernel, source: Any, n: int, row_nbytes: int) -> Bytes:
    """Rows through a `rows_kernel`, without the GIL.

    Args:
        convert: the kernel.
        source: array [rows, ...] of f32 or of bytes.
        n: values in a row.
        row_nbytes: bytes of a row of the result.

    Returns:
        uint8 [rows, row_nbytes].
    """
    out = np.zeros((len(source), row_nbytes), np.uint8)
    if out.size:
        flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        args = (np.zeros(16, np.int32), np.zeros(64, np.uint8), 0, 1)
        convert(out.reshape(-1), [n, len(source), 1, 1], _ONE, flat, _ONE, _ONE, *args)
    return out
