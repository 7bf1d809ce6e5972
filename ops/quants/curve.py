"""Quantizing to the curve of IQ4_NL and IQ4_XS: the scale of 32 weights, x about scale * CURVE[code].

Candidates map the value of largest magnitude near either end of the curve; the codes that a candidate gives have a
scale of least squared error, weighted by the importance matrix if there is one.

NumPy arrays are [32, groups], so that sums add the weights of a group one after the other, as the compiled form does.
"""

from __future__ import annotations

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.lookup import CURVE, curve_code, nearest_on_curve
from ggjit.ops.quants.quant import Bytes, Floats, largest
from ggjit.ops.quants.search import total

memory = lazy_module("ggjit.ops.lib.memory")
FINALISTS = ((127, *range(-134, -119)), (105, 109, 113, 117, 121))  # what the largest value becomes; the best of each
N_FIRST, N_ALL = len(FINALISTS[0]), len(FINALISTS[0]) + len(FINALISTS[1])
TARGETS = FINALISTS[0] + FINALISTS[1]
VALUES = np.array(CURVE, np.float32)


def weights_of(x: Floats, imatrix: Floats | None) -> Floats:
    """Weights of the errors of blocks [rows, n, size]."""
    if imatrix is None:
        return np.ones_like(x)
    return np.broadcast_to(np.asarray(imatrix, np.float32).reshape(1, *x.shape[1:]), x.shape)


def code(x: Floats, step: Floats) -> Bytes:
    """Codes of the nearest of step * CURVE; those of 0 where step is 0."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return nearest_on_curve(x * np.where(step != 0, np.float32(1) / step, np.float32(0)))


def error(x: Floats, w: Floats, step: Floats) -> Floats:
    """Weighted squared error of groups with the nearest codes."""
    return total(w * np.square(step * VALUES[code(x, step)] - x))


def fit(x: Floats, w: Floats) -> Floats:
    """Scales of groups [32, n]."""
    top = largest(x.T)
    found = []
    for targets in FINALISTS:
        best, scale = np.zeros_like(top), np.zeros_like(top)
        for target in targets:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                to_code = np.where(top != 0, np.float32(target) / top, np.float32(0))
                v = VALUES[nearest_on_curve(x * to_code)]
            xq, qq = total(w * v * x), total(w * v * v)
            better = (qq > 0) & (xq * xq > best * qq)
            fitted = xq / np.where(qq > 0, qq, np.float32(1))
            scale, best = np.where(better, fitted, scale), np.where(better, fitted * xq, best)
        found.append(scale)
    return np.where(error(x, w, found[1]) < error(x, w, found[0]), found[1], found[0])


# ---- compiled, without weights -------------------------------------------------------------------------------------


@jitted
def reciprocal(step):
    """1 / step, and 0 for 0."""
    return np.float32(1) / step if step != 0 else np.float32(0)


@jitted
def curve_error(src, x, step):
    """Squared error of 32 f32 with the nearest codes."""
    to_code, out = reciprocal(step), np.float32(0)
    for i in range(32):
        v = memory.load_f32(src, x + 4 * i)
        difference = step * np.float32(CURVE[curve_code(v * to_code)]) - v
        out += difference * difference
    return out


@jitted
def curve_sums(src, x, to_code):
    """Sums over 32 f32 of the nearest values times x, and squared."""
    xq = qq = np.float32(0)
    for i in range(32):
        v = memory.load_f32(src, x + 4 * i)
        q = np.float32(CURVE[curve_code(v * to_code)])
        xq += q * v
        qq += q * q
    return xq, qq


@jitted
def fit_curve(src, x):
    """The scale of 32 f32, as `fit`."""
    top = np.float32(0)
    for i in range(32):
        v = memory.load_f32(src, x + 4 * i)
        top = v if abs(v) > abs(top) else top
    best = scale = first = np.float32(0)
    for k in range(N_ALL):
        if k == N_FIRST:
            first, scale, best = scale, np.float32(0), np.float32(0)
        xq, qq = curve_sums(src, x, np.float32(TARGETS[k]) / top if top != 0 else np.float32(0))
        if qq > 0 and xq * xq > best * qq:
            scale = xq / qq
            best = scale * xq
    return scale if curve_error(src, x, scale) < curve_error(src, x, first) else first
