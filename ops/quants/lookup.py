"""Weights that are entries of a table of 16: the curve of IQ4_NL and IQ4_XS, the 4-bit floats of MXFP4 and NVFP4."""

from __future__ import annotations

import itertools

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.nibbles import load_nibbles
from ggjit.ops.quants.quant import Bytes, Floats

emit = lazy_module("ggjit.ops.lib.emit")

CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # steps grow with the magnitude
MIDDLES = tuple((a + b) / 2 for a, b in itertools.pairwise(CURVE))
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of sign, 2 exponent bits, 1 bit
E2M1_MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between neighbours of the positive half


def nearest_e2m1(x: Floats, scale: Floats) -> Bytes:
    """Codes of the nearest of scale * `E2M1`, of two equally near ones the smaller; 0 where scale is 0."""
    code, a = np.zeros(x.shape, np.uint8), np.abs(x)
    for middle in E2M1_MIDDLES:
        code += a > np.float32(middle) * scale
    code[np.broadcast_to(scale, x.shape) == 0] = 0
    return code | (x < 0) * (code > 0) * np.uint8(8)


@jitted
def e2m1_code(v, scale):
    """Code of the nearest of scale * `E2M1`, as `nearest_e2m1`; the scale is not 0."""
    a, code = abs(v), 0
    for middle in E2M1_MIDDLES:
        code += 1 if a > np.float32(middle) * scale else 0
    return code | 8 if v < 0 and code > 0 else code


def nearest_on_curve(x: Floats) -> Bytes:
    """Codes of the nearest values of `CURVE`, of two equally near ones the larger."""
    return np.searchsorted(np.array(MIDDLES, np.float32), x, side="right").astype(np.uint8)


@jitted
def curve_code(v):
    """Code of the nearest value of `CURVE`, as `nearest_on_curve`."""
    code = 0
    for middle in MIDDLES:
        code += 1 if v >= np.float32(middle) else 0
    return code


def bytes_as_i32(e, v):
    """16 bytes of one LLVM vector as i32."""
    index = emit.vector(emit.I32, e.lanes)
    parts = [
        e.b.shuffle_vector(v, v, emit.ir.Constant(index, list(range(p * e.lanes, (p + 1) * e.lanes))))
        for p in range(e.parts)
    ]
    return [e.b.zext(x, index) for x in parts]


def values(e, q, table):
    """Entries of a table of int8 as f32; q is i32 below 16."""
    x = e.map(lambda v: e.b.bitcast(v, emit.vector(emit.I8, e.nbytes)), q)
    x = e.map(lambda v: e.b.bitcast(v, emit.vector(emit.I32, e.lanes)), e.lookup16(x, table))
    return e.to_f32(e.sar_i32(e.shl_i32(x, 24), 24))


def nibble_values(e, x, offset, table):
    """Entries of a table for the low and the high halves of 16 bytes of a file block, as f32."""
    q = e.load_u8_as_i32(x, offset)
    return [values(e, e.and_i32(q, 15), table), values(e, e.shr_i32(q, 4), table)]


def load_entries(e, w, offset, table, added):
    """The 8 operands of a run: entries of a table plus `added`, by the nibbles of 4 operands of a panel block."""
    table = [v + added for v in table]
    return [e.lookup16(x, table) for x in load_nibbles(e, w, offset)]
