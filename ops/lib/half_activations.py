"""Activation functions for results of F16 and BF16: those of activations.py that have an exponential in them.

Vectors of f32 in and out with an error of 2e-5 before the rounding to 11 or 8 bits: half the instructions of the forms
for f32, since half the bytes take half the time to move. Fewer than 1 result in 100 is not the nearest value; for
infinities and NaN the results are those of activations.py.
"""

from ggjit.jit import jitted
from ggjit.ops.lib import vec

_LOG2E = 1.4426950408889634
# log1p(y) / y on [0, 1], minimax with 1 at 0: error 9.6e-6
_LOG1P = (-0.024734495, 0.10359251, -0.21240407, 0.32622603, -0.49953946, 1.0)
# tanh(x) / x = P(x^2) / Q(x^2) for |x| <= 4.6, minimax: error 1.1e-6; Q ends with 1
_TANH_P = (0.0016852129, 0.11727102, 0.99999891)
_TANH_Q = (6.7887104e-05, 0.018563639, 0.45059502)
# erfc(z) = t 2^(P(t) - z^2 log2 e), t = 1 / (1 + z / 2), for z >= 0: minimax, error 7.6e-6
_ERFC = (0.33007355, -1.0231427, 0.68454477, 0.36708631, 1.4686825, -1.8272334)


@jitted
def exp(x):
    """e^x."""
    return vec.exp2_half(x * _LOG2E)


@jitted
def expm1(x):
    """e^x - 1."""
    return vec.exp2m1_half(x * _LOG2E)


@jitted
def elu(x):
    """x if x > 0, else e^x - 1."""
    return vec.select(x > 0.0, x, expm1(x))


@jitted
def tanh(x):
    """x P(x^2) / Q(x^2) within -4.6 and 4.6, beyond which results of F16 are -1 and 1."""
    x = vec.min(4.6, vec.max(-4.6, x))
    u = x * x
    p = vec.fma(vec.fma(vec.splat(_TANH_P[0]), u, _TANH_P[1]), u, _TANH_P[2])
    q = vec.fma(vec.fma(vec.fma(vec.splat(_TANH_Q[0]), u, _TANH_Q[1]), u, _TANH_Q[2]), u, 1.0)
    return x * p / q


@jitted
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (vec.exp2_half(x * -_LOG2E) + 1.0)


@jitted
def silu(x):
    """x / (1 + e^-x)."""
    return x / (vec.exp2_half(x * -_LOG2E) + 1.0)


@jitted
def gelu(x):
    """x / (1 + e^-2u), u = sqrt(2/pi) x (1 + 0.044715 x^2): the tanh form; NaN at -inf."""
    t = x * vec.fma(x * x, -0.044715 * 2.302208198, -2.302208198)  # 2 sqrt(2/pi) log2 e
    return x / (vec.exp2_half(t) + 1.0)


@jitted
def gelu_quick(x):
    """x / (1 + e^(-1.702 x))."""
    return x / (vec.exp2_half(x * (-1.702 * _LOG2E)) + 1.0)


@jitted
def gelu_erf(x):
    """x / 2 (1 + erf(x / sqrt 2))."""
    size = vec.abs(x)
    t = 1.0 / vec.fma(size, 0.5 * 0.7071067811865476, 1.0)
    p = vec.fma(vec.splat(_ERFC[0]), t, _ERFC[1])
    p = vec.fma(vec.fma(p, t, _ERFC[2]), t, _ERFC[3])
    p = vec.fma(vec.fma(p, t, _ERFC[4]), t, _ERFC[5])
    rest = t * vec.exp2_half(vec.fma(size * size, -0.5 * _LOG2E, p))
    return x * 0.5 * vec.select(x > 0.0, 2.0 - rest, rest)


@jitted
def softplus(x):
    """log(1 + e^x), as max(x, 0) + log1p(e^-|x|)."""
    y = vec.exp2_half(vec.abs(x) * -_LOG2E)
    p = vec.fma(vec.fma(vec.splat(_LOG1P[0]), y, _LOG1P[1]), y, _LOG1P[2])
    p = vec.fma(vec.fma(vec.fma(p, y, _LOG1P[3]), y, _LOG1P[4]), y, _LOG1P[5])
    return vec.fma(p, y, vec.max(0.0, x))
