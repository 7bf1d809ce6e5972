"""Activation functions on vectors of 16 f32, shared by the unary ops, the gated ones and fused kernels.

Each is jitted, takes a vector and gives a vector. Errors are a few units in the last place, also where the result is
small: differences that would cancel (expm1, erfc) have forms of their own. The tails of the gelus, below 1e-25, have
some hundred units. For infinities and NaN the results are ggml's.
"""

from ggjit.jit import jitted
from ggjit.ops.lib import vec

# erfc(z) = t exp(P(t) - z^2), t = 1 / (1 + z / 2), for z >= 0: least squares on Chebyshev nodes, error 5.4e-8
_ERFC = (0.15395260, -0.73015124, 1.2732782, -0.85202193, 0.049095988, -0.067735992, 0.058146335, 0.38170520,
         0.99920720, -1.2654762)  # fmt: skip


@jitted
def relu(x):
    """x if x > 0, else 0 (also for NaN)."""
    return vec.max(x, 0.0)


@jitted
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (vec.exp(-x) + 1.0)


@jitted
def silu(x):
    """x / (1 + e^-x)."""
    return x / (vec.exp(-x) + 1.0)


@jitted
def gelu_open(x):
    """x / (1 + e^-2u), u = sqrt(2/pi) x (1 + 0.044715 x^2): the tanh form; NaN at -inf."""
    u = x * vec.fma(x * x, 0.044715 * 0.7978845608028654, 0.7978845608028654)
    return x / (vec.exp(u * -2.0) + 1.0)


@jitted
def gelu(x):
    """The tanh form, 0 up to -10."""
    return vec.select(x <= -10.0, 0.0, gelu_open(x))


@jitted
def gelu_quick(x):
    """x / (1 + e^(-1.702 x))."""
    return x / (vec.exp(x * -1.702) + 1.0)


@jitted
def erfc_positive(z):
    """1 - erf(z) of z >= 0."""
    t = 1.0 / vec.fma(z, 0.5, 1.0)
    p = vec.fma(vec.splat(_ERFC[0]), t, _ERFC[1])
    p = vec.fma(vec.fma(p, t, _ERFC[2]), t, _ERFC[3])
    p = vec.fma(vec.fma(p, t, _ERFC[4]), t, _ERFC[5])
    p = vec.fma(vec.fma(p, t, _ERFC[6]), t, _ERFC[7])
    p = vec.fma(vec.fma(p, t, _ERFC[8]), t, _ERFC[9])
    return t * vec.exp(p - z * z)


@jitted
def gelu_erf(x):
    """x / 2 (1 + erf(x / sqrt 2))."""
    rest = erfc_positive(vec.abs(x) * 0.7071067811865476)
    return x * 0.5 * vec.select(x > 0.0, 2.0 - rest, rest)


@jitted
def expm1(x):
    """e^x - 1, exact to the last places near 0."""
    y = vec.max(-87.0, x)
    n = vec.round_i32(y * 1.4426950408889634)
    whole = vec.to_f32(n)
    r = vec.fma(whole, 2.12194440e-4, vec.fma(whole, -0.693359375, y))
    p = vec.fma(vec.fma(r, 1.9875691500e-4, 1.3981999507e-3), r, 8.3334519073e-3)
    p = vec.fma(vec.fma(vec.fma(p, r, 4.1665795894e-2), r, 1.6666665459e-1), r, 5.0000001201e-1)
    two_to_n = vec.bits_f32((n + 127) << 23)
    near = vec.fma(vec.fma(p, r * r, r), two_to_n, two_to_n - 1.0)
    return vec.select(x > 1.0, vec.exp(x) - 1.0, near)


@jitted
def elu(x):
    """x if x > 0, else e^x - 1."""
    return vec.select(x > 0.0, x, expm1(x))


@jitted
def softplus(x):
    """log(1 + e^x), as max(x, 0) + log1p(e^-|x|)."""
    y = vec.exp(-vec.abs(x))
    s = y / (y + 2.0)  # log1p(y) = 2 atanh(s), s <= 1/3
    q = s * s
    p = vec.fma(vec.fma(vec.fma(q, 1.0 / 13.0, 1.0 / 11.0), q, 1.0 / 9.0), q, 1.0 / 7.0)
    p = vec.fma(vec.fma(vec.fma(p, q, 1.0 / 5.0), q, 1.0 / 3.0), q, 1.0)
    return vec.max(0.0, x) + (s + s) * p


@jitted
def hardsigmoid(x):
    """(x + 3) / 6 within 0 and 1 (0 for NaN)."""
    return vec.min(vec.max((x + 3.0) / 6.0, 0.0), 1.0)


@jitted
def hardswish(x):
    """x hardsigmoid(x)."""
    return x * hardsigmoid(x)


@jitted
def neg(x):
    """-x."""
    return -x


@jitted
def sgn(x):
    """-1, 0 or 1 by the sign (0 for NaN)."""
    return vec.select(x > 0.0, 1.0, vec.select(x < 0.0, -1.0, vec.zero()))


@jitted
def step(x):
    """1 if x > 0, else 0."""
    return vec.select(x > 0.0, 1.0, vec.zero())


@jitted
def round_away(x):
    """Nearest integer, ties away from zero."""
    return vec.trunc(x + vec.copy_sign(0.49999997, x))  # the float32 below 1/2


@jitted
def xielu(x, alpha_n, alpha_p, beta, eps):
    """alpha_p x^2 + beta x if x > 0, else (expm1(min(x, eps)) - x) alpha_n + beta x."""
    positive = vec.fma(x * alpha_p, x, x * beta)
    return vec.select(x > 0.0, positive, vec.fma(expm1(vec.min(x, eps)) - x, alpha_n, x * beta))
