"""Derivatives of the activation functions, on vectors of 16 f32.

Each is jitted, takes a vector x and gives the vector f'(x). Where f has a kink the derivative is the one from below.
"""

from ggjit.jit import jitted
from ggjit.ops.lib import activations, vec


@jitted
def abs(x):
    """-1, 0 or 1."""
    return activations.sgn(x)


@jitted
def relu(x):
    """1 if x > 0, else 0."""
    return activations.step(x)


@jitted
def tanh(x):
    """Of tanh: 1 - y^2."""
    y = vec.tanh(x)
    return 1.0 - y * y


@jitted
def elu(x):
    """1 if x > 0, else e^x."""
    return vec.select(x > 0.0, 1.0, vec.exp(x))


@jitted
def sigmoid(x):
    """Of the logistic function s: s (1 - s)."""
    y = vec.exp(-vec.abs(x))
    s = 1.0 / (y + 1.0)
    return s * (y * s)


@jitted
def exp(x):
    """e^x."""
    return vec.exp(x)


@jitted
def expm1(x):
    """e^x."""
    return vec.exp(x)


@jitted
def softplus(x):
    """sigmoid(x)."""
    return activations.sigmoid(x)


@jitted
def gated(x, z, slope):
    """Derivative of x sigmoid(z), where z has the derivative `slope`: s + x s (1 - s) slope."""
    return activations.sigmoid(z) + x * sigmoid(z) * slope


@jitted
def silu(x):
    """Of x sigmoid(x)."""
    return gated(x, x, 1.0)


@jitted
def gelu_quick(x):
    """Of x sigmoid(1.702 x)."""
    return gated(x, x * 1.702, 1.702)


@jitted
def gelu(x):
    """Of x sigmoid(2 u), u = sqrt(2/pi) x (1 + 0.044715 x^2)."""
    y = vec.max(-10.0, vec.min(x, 10.0))  # beyond it is 0 or 1
    q = y * y
    z = y * vec.fma(q, 2.0 * 0.044715 * 0.7978845608028654, 2.0 * 0.7978845608028654)
    return gated(y, z, vec.fma(q, 6.0 * 0.044715 * 0.7978845608028654, 2.0 * 0.7978845608028654))


@jitted
def gelu_erf(x):
    """Phi(x) + x phi(x) of the normal distribution."""
    rest = activations.erfc_of(vec.abs(x))
    below = vec.select(x > 0.0, 2.0 - rest, rest) * 0.5
    return vec.fma(x, vec.exp(x * x * -0.5) * 0.3989422804014327, below)


@jitted
def hardsigmoid(x):
    """1/6 between -3 and 3, else 0."""
    return vec.select(vec.abs(x) < 3.0, 0.16666667, vec.zero())


@jitted
def hardswish(x):
    """x / 3 + 1/2 between -3 and 3, below 0, above 1."""
    return vec.select(vec.abs(x) < 3.0, vec.fma(x, 0.33333334, 0.5), activations.step(x))


@jitted
def xielu(x, alpha_n, alpha_p, beta, eps):
    """2 alpha_p x + beta if x > 0, else (e^x - 1) alpha_n + beta; from eps on -alpha_n + beta."""
    inner = vec.select(x < eps, vec.exp(x), vec.zero())
    return vec.select(x > 0.0, x * (alpha_p + alpha_p), (inner - 1.0) * alpha_n) + beta
