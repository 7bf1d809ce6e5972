"""What a quantized type's file registers: conversions, and its panel for matrix products.

A file `ops/quants/<type>.py` draws the block's byte table and gives a `Quant`. Everything else (get_rows, cpy,
set_rows, mul_mat, mul_mat_id, attention over quantized KV) is generic code made from these pieces, so a new type is
one file.

Panels. A panel holds 16 rows of a matrix, blocks along K one after the other, with the file's bits reordered so that
one 64-byte load is the left operand of a dot product for 16 rows x 4 k: byte 4*r + j is row r, k = 4*g + j of k-group
g. A run is 32 weights along K (8 k-groups), the unit in which activations are quantized. What measurements taught:

- A panel is read strictly upwards, in one stream.
- Signed weights are stored with an offset as unsigned bytes; the integer sum starts from -offset * sum(activations),
  which the activations' record holds for 128, so the correction is exact and nearly free. Offsets are powers of two.
- A field inside a byte is masked, not shifted: value << n stays in the operand and 2^-n goes into the f32 scale,
  which is exact. Fields of one byte belong to different scale groups, so that each sum has one factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.jit import Jitted, jitted
from ggjit.types import Type

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
WORK = 32768  # bytes of scratch of a search


class Part(NamedTuple):
    """Operands of a run that share one scale: all 8 (scale per 32), or 4 (scale per 16, two parts a run).

    Attributes:
        operands: (value + offset) << factor, 64 bytes each.
        scale: f32 of 16 rows, divided by 2^factor.
        offset_shift: offset << factor is 1 << offset_shift; None: no offset.
        minimum: f32 of 16 rows, added times d * sum(q) of the activations; None: none.
        factor: how far the operands are shifted left.
    """

    operands: list[Any]
    scale: Any
    offset_shift: int | None = None
    minimum: Any = None
    factor: int = 0


@dataclasses.dataclass(frozen=True)
class Panel:
    """How 16 rows of a type are packed, and how a panel block becomes operands.

    Attributes:
        blck_size: weights along K in a panel block, a multiple of the type's block and at most 256.
        nbytes: bytes of a panel block (16 rows).
        limit: largest value of an operand byte, its factor divided out.
        pack: jitted (src, src_offs, dst, dst_offs, row): a file block to its places in a panel block; where a panel
            block holds several, the number of the file block is the last argument. A panel block of zeros must have
            scales of zero. Or, where codes are scattered, an emit function (e, rows, to): a file block of each of 16
            `RowWords` to a panel block.
        runs: emit function (e, w, step) -> list of runs, each a list of one or two `Part`; w is the block's address.
        steps: the block is read in that many equal steps; `step` is then an i64 value, else the int 0.
        parts: parts in a run.
        minimum: do parts have a minimum.
        offset_shift: log2 of what is added to values to make them unsigned; None: nothing.
    """

    blck_size: int
    nbytes: int
    limit: int
    pack: Jitted | Callable[..., Any]
    runs: Callable[..., Any]
    steps: int = 1
    parts: int = 1
    minimum: bool = False
    offset_shift: int | None = None


@dataclasses.dataclass(frozen=True)
class Quant:
    """The code of a block type.

    Attributes:
        type: the type.
        quantize: (x, imatrix=None), f32 [rows, n] -> uint8 [rows, row_size], in NumPy. Without importance matrix the
            bytes are ggml's unless it searches. imatrix: f32 [n], weights of the columns' errors; types without a
            search take no notice of it.
        dequantize: uint8 [rows, row_size] -> f32 [rows, n], in NumPy; bit for bit as ggml.
        quantize_row: jitted (src, src_offs, dst, dst_offs, n): n f32 to blocks; None: none while a graph runs.
        dequantize_row: jitted (src, src_offs, dst, dst_offs, n): blocks to n f32.
        panel: how matrix products read it; None: it is a form of activations alone.
        searches: quantize has a search of its own, whose error is no larger than ggml's.
        quantize_weighted: jitted (src, src_offs, weights, weights_offs, weighted, dst, dst_offs, n, work): as
            quantize_row, errors weighted by n f32 of `weights` (an importance matrix) unless `weighted` is 0; work has
            WORK bytes. None: no importance matrix changes anything.
        needs_imatrix: quantize refuses to work without one, as ggml's does.
    """

    type: Type
    quantize: Callable[..., Bytes]
    dequantize: Callable[[Bytes], Floats]
    quantize_row: Jitted | None
    dequantize_row: Jitted
    panel: Panel | None
    searches: bool = False
    quantize_weighted: Jitted | None = None
    needs_imatrix: bool = False


def register(quant: Quant) -> Quant:
    """Make a type's code known."""
    types.register(quant.type, quant)
    return quant


# ---- for the NumPy conversions -------------------------------------------------------------------------------------


def to_blocks(x: Floats, size: int) -> Floats:
    """Rows of values as f32 [rows, blocks, size].

    Raises:
        ValueError: rows are not whole blocks.
    """
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2 or x.shape[1] % size:
        raise ValueError(f"quantize: values must have a shape (rows, multiple of {size}), got {x.shape}")
    return x.reshape(x.shape[0], -1, size)


def need_imatrix(type: Type, imatrix: Floats | None) -> None:
    """Refuse a type's values without an importance matrix.

    Raises:
        ValueError: there is none.
    """
    if imatrix is None:
        raise ValueError(f"quantize: {type.name} must have an importance matrix, got none; give imatrix, f32 [n]")


def from_bytes(b: Bytes, nbytes: int) -> Bytes:
    """Rows of blocks as uint8 [rows, blocks, nbytes].

    Raises:
        ValueError: rows are not whole blocks.
    """
    b = np.ascontiguousarray(b, np.uint8)
    if b.ndim != 2 or b.shape[1] % nbytes:
        raise ValueError(f"dequantize: bytes must have a shape (rows, multiple of {nbytes}), got {b.shape}")
    return b.reshape(b.shape[0], -1, nbytes)


def load_f16(b: Bytes) -> Floats:
    """Two bytes of each block as f32 [rows, blocks, 1]."""
    return np.ascontiguousarray(b).view(np.float16).astype(np.float32)


def f16_bytes(x: Floats) -> Bytes:
    """F32 [rows, blocks] as two bytes a block."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x, np.float32).astype(np.float16)[..., None].view(np.uint8)


def inverse(d: Floats) -> Floats:
    """1 / d, and 0 for 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d != 0, np.float32(1) / d, np.float32(0)).astype(np.float32)


def largest(x: Floats) -> Floats:
    """The value of largest magnitude along the last axis, the first of equal ones; +0 if all are zero."""
    top = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    return np.where(top == 0, np.float32(0), top)


def round_away(x: Floats) -> Floats:
    """Nearest integer, ties away from zero."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(np.float32(1), x), np.float32(0))


# ---- for the compiled conversions ----------------------------------------------------------------------------------


@jitted
def clamp(v, low, high):
    """Limit v to [low, high]; NaN gives low."""
    return high if v > high else (v if v > low else low)


@jitted
def nearest(v):
    """Nearest integer of a float of magnitude below 2^22, ties to even."""
    return v + np.float32(12582912.0) - np.float32(12582912.0)
