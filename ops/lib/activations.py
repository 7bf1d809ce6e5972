"""Activation functions on vectors of 16 f32, shared by the unary ops, the gated ones and fused kernels.

Each is jitted, takes a vector and gives a vector. Errors are a few units in the last place, also where the result is
small: differences that would cancel (expm1, erfc) have forms of their own. The tails of the gelus, below 1e-25, have
some hundred units. For infinities and NaN the results are ggml's.
"""

from ggjit.jit import jitted
from ggjit.ops.lib import vec

_LOG2E = 1.4426950408889634
# erfc(z) = t 2^(P(t) - z^2 log2 e), t = 1 / (1 + z / 2), for z >= 0: least squares on Chebyshev nodes, error 5.4e-8
_ERFC = (0.222106653, -1.05338557, 1.83695214, -1.22920781, 0.0708305384,
         -0.0977223797, 0.0838874292, 0.550684199, 1.44155127, -1.82569624)  # fmt: skip
# log1p(y) / y on [0, 1], minimax with 1 at 0: error 5.3e-9
_LOG1P = (-0.00329046859, 0.0200862419, -0.057457231, 0.106611282, -0.153448805, 0.196921021, -0.24958019, 0.333304644,
          -0.499999315)  # fmt: skip


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
def gelu(x):
    """x / (1 + e^-2u), u = sqrt(2/pi) x (1 + 0.044715 x^2): the tanh form, 0 up to -10."""
    u = x * vec.fma(x * x, 0.044715 * 0.7978845608028654, 0.7978845608028654)
    return vec.select(x <= -10.0, 0.0, x / (vec.exp(u * -2.0) + 1.0))


@jitted
def gelu_quick(x):
    """x / (1 + e^(-1.702 x))."""
    return x / (vec.exp(x * -1.702) + 1.0)


@jitted
def erfc_of(size):
    """erfc(size / sqrt 2) of size >= 0: twice what the normal distribution has above it."""
    t = 1.0 / vec.fma(size, 0.5 * 0.7071067811865476, 1.0)
    p = vec.fma(vec.splat(_ERFC[0]), t, _ERFC[1])
    p = vec.fma(vec.fma(p, t, _ERFC[2]), t, _ERFC[3])
    p = vec.fma(vec.fma(p, t, _ERFC[4]), t, _ERFC[5])
    p = vec.fma(vec.fma(p, t, _ERFC[6]), t, _ERFC[7])
    p = vec.fma(vec.fma(p, t, _ERFC[8]), t, _ERFC[9])
    return t * vec.exp2(vec.fma(size * size, -0.5 * _LOG2E, p))


@jitted
def gelu_erf(x):
    """x / 2 (1 + erf(x / sqrt 2))."""
    rest = erfc_of(vec.abs(x))
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
    p = vec.fma(vec.fma(vec.splat(_LOG1P[0]), y, _LOG1P[1]), y, _LOG1P[2])
    p = vec.fma(vec.fma(vec.fma(p, y, _LOG1P[3]), y, _LOG1P[4]), y, _LOG1P[5])
    p = vec.fma(vec.fma(vec.fma(p, y, _LOG1P[6]), y, _LOG1P[7]), y, _LOG1P[8])
    return vec.fma(vec.fma(p, y, 1.0), y, vec.max(0.0, x))


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
