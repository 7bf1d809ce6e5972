"""Quantizing to the curve of IQ4_NL and IQ4_XS: the scale of 32 weights, x about scale * CURVE[code].

Candidates map the value of largest magnitude near either end of the curve; the codes that a candidate gives have a
scale of least squared error, weighted by the importance matrix if there is one.

NumPy arrays are [32, groups], so that sums add the weights of a group one after the other, as the compiled form does.
"""

from __future__ import annotations

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.lookup import CURVE, MIDDLES, nearest_on_curve
from ggjit.ops.quants.quant import Bytes, Floats, largest
from ggjit.ops.quants.search import total
from ggjit.ops.quants.search_lanes import SCALE, W, X, inverse
from ggjit.ops.quants.search_lanes import largest as largest_of_lanes

vec = lazy_module("ggjit.ops.lib.vec")
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


# ---- compiled: groups are lanes of a buffer of `ggjit.ops.quants.search_lanes` --------------------------------------


@jitted
def nearest_values(v):
    """The nearest values of `CURVE`."""
    out = vec.zero() + np.float32(CURVE[0])
    for k in range(15):
        out = vec.select(v >= np.float32(MIDDLES[k]), np.float32(CURVE[k + 1]), out)
    return out


@jitted
def curve_error(found, step):
    """Errors of lanes with the nearest codes."""
    to_code, out = inverse(step), vec.zero()
    for i in range(32):
        v = vec.load(found, X + 64 * i)
        e = step * nearest_values(v * to_code) - v
        out = out + vec.load(found, W + 64 * i) * (e * e)
    return out


@jitted
def curve_sums(found, to_code):
    """Sums of lanes of w times the nearest values times x, and squared."""
    xq = qq = vec.zero()
    for i in range(32):
        v = vec.load(found, X + 64 * i)
        q = nearest_values(v * to_code)
        wq = vec.load(found, W + 64 * i) * q
        xq, qq = xq + wq * v, qq + wq * q
    return xq, qq


@jitted
def fit_curve(found):
    """The scales of lanes, as `fit`, to SCALE."""
    top = largest_of_lanes(found, 32)
    scale = best = first = vec.zero()
    for k in range(N_ALL):
        if k == N_FIRST:
            first, scale, best = scale, vec.zero(), vec.zero()
        to_code = vec.select(top != np.float32(0), np.float32(TARGETS[k]) / top, np.float32(0))
        xq, qq = curve_sums(found, to_code)
        better = (qq > np.float32(0)) & (xq * xq > best * qq)
        fitted = xq / vec.select(qq > np.float32(0), qq, np.float32(1))
        scale, best = vec.select(better, fitted, scale), vec.select(better, fitted * xq, best)
    vec.store(found, SCALE, vec.select(curve_error(found, scale) < curve_error(found, first), scale, first))
