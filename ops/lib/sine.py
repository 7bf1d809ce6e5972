"""sin and cos of vectors of f32, right to the last places for every argument.

|x| up to LIMIT: x - n pi/2 by three fmas with pi/2 in parts, then a polynomial on [-pi/4, pi/4]. A vector with a larger
value is done lane by lane: 2/pi to 256 bits times x in integers, of which the bits around the point are kept.

Source: Cephes (S. Moshier), the polynomials of sinf and cosf; Payne and Hanek, Radian reduction for trigonometric
functions (1983).
"""

import numpy as np

from ggjit.jit import jitted
from ggjit.ops.lib import angles, memory, vec

LIMIT = 20000.0
_HALF_PI = (1.5707963705062866, -4.3711388286737929e-08, -1.7151244978164196e-15)  # f32 parts
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_TWO_OVER_PI = (0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB)  # 32 bits each
_2_63_OVER = 1.5707963267948966 / 4611686018427387904.0  # pi / 2 / 2^62


@jitted
def word(i):
    """32 bits of 2/pi that begin at word i; 0 before the first."""
    if i < 0:
        return np.uint64(0)
    return np.uint64(_TWO_OVER_PI[i])


@jitted
def turn(x):
    """Return (n, r) with x = n pi/2 + r, |r| <= pi/4, n modulo 4, of a finite float32 of at least 2."""
    bits = np.int64(memory.bits_f32(x)) & 0x7FFFFFFF
    mantissa, exponent = np.uint64(bits & 0x7FFFFF | 0x800000), (bits >> 23) - 150  # x = mantissa * 2^exponent
    # Bits of 2/pi before this one give multiples of 4 quarters.
    start = exponent - 2
    i, shift = start >> 5, start & 31
    a, b, c, d = word(i), word(i + 1), word(i + 2), word(i + 3)
    if shift > 0:
        s, r = np.uint64(shift), np.uint64(32 - shift)
        low = np.uint64(0xFFFFFFFF)
        a, b, c = (a << s | b >> r) & low, (b << s | c >> r) & low, (c << s | d >> r) & low
    # 64 bits: two of quarters, then the fraction
    product = (mantissa * a << np.uint64(32)) + mantissa * b + (mantissa * c >> np.uint64(32))
    quarters = (product + np.uint64(1 << 61)) >> np.uint64(62)
    rest = np.int64(product - (quarters << np.uint64(62)))
    return np.int64(quarters), np.float64(rest) * _2_63_OVER


@jitted
def sine_of(x, ahead):
    """sin(x + ahead pi/2) of a float32 beyond LIMIT; NaN of infinities and NaN."""
    if not np.isfinite(x):
        return np.float32(np.nan)
    n, r = turn(x)
    if x < 0:
        n, r = -n, -r
    sin, cos = angles.sin_cos(r)
    n = (n + ahead) & 3
    y = sin if n & 1 == 0 else cos
    return np.float32(y if n < 2 else -y)


@jitted
def sine_near(x, ahead):
    """sin(x + ahead pi/2) of |x| up to LIMIT."""
    n = vec.round_i32(x * 0.6366197723675814)
    whole = vec.to_f32(n)
    r = vec.fma(whole, -_HALF_PI[0], x)
    r = vec.fma(whole, -_HALF_PI[2], vec.fma(whole, -_HALF_PI[1], r))
    z = r * r
    sin = vec.fma(vec.fma(vec.fma(vec.fma(z, _SIN[0], _SIN[1]), z, _SIN[2]), z, 0.0), r, r)
    cos = vec.fma(vec.fma(vec.fma(z, _COS[0], _COS[1]), z, _COS[2]), z * z, vec.fma(z, -0.5, 1.0))
    n = n + ahead
    y = vec.select((n & 1) == 0, sin, cos)
    return vec.select((n & 2) == 0, y, -y)


@jitted
def sine(x, ahead):
    """sin(x + ahead pi/2), ahead 0 or 1."""
    near = vec.abs(x) <= LIMIT
    y = sine_near(vec.select(near, x, 0.0), ahead)
    if not vec.all_lanes(near):
        for i in range(16):
            value = vec.lane(x, i)
            if not (-LIMIT <= value <= LIMIT):
                y = vec.select(vec.lanes() == np.int32(i), sine_of(value, ahead), y)
    return y


@jitted
def sin(x):
    """Sine; NaN of infinities."""
    return sine(x, np.int32(0))


@jitted
def cos(x):
    """Cosine; NaN of infinities."""
    return sine(x, np.int32(1))
