"""sin, cos, log and powers in float64 for kernels that need few of them: own code, the same bits on every system."""

import numpy as np

from ggjit.jit import intrinsic, jitted, lazy_module

ir = lazy_module("llvmlite.ir")
vector_type = lazy_module("ggjit.ops.lib.vector_type")

# pi / 2 in parts of 33 bits, so that their products with numbers below 2^20 are exact.
HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
LN2 = 0.6931471805599453
SIN = (-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
       -2.50507602534068634195e-08, 1.58969099521155010221e-10)  # fmt: skip
COS = (4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
       2.08757232129817482790e-09, -1.13596475577881948265e-11)  # fmt: skip


@jitted
def sin_cos(x):
    """Return sin(x), cos(x) of a float64; to 1e-15 for |x| up to a million, to 1e-7 below 2^31.

    Source: fdlibm (Sun Microsystems), the polynomials on [-pi / 4, pi / 4].
    """
    turns = np.int64(x * 0.6366197723675814 + (0.5 if x >= 0 else -0.5))
    n = np.float64(turns)
    r = ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2]
    z = r * r
    s = r + r * z * (SIN[0] + z * (SIN[1] + z * (SIN[2] + z * (SIN[3] + z * (SIN[4] + z * SIN[5])))))
    c = 1.0 - 0.5 * z + z * z * (COS[0] + z * (COS[1] + z * (COS[2] + z * (COS[3] + z * (COS[4] + z * COS[5])))))
    quarter = turns & 3
    if quarter == 1:
        return c, -s
    if quarter == 2:
        return -s, -c
    if quarter == 3:
        return -c, s
    return s, c


@jitted
def within_a_turn(x):
    """x less whole turns, as float32 in [-pi, pi]; to 1e-7 for |x| up to a million."""
    turns = np.float64(np.int64(x * 0.15915494309189535 + (0.5 if x >= 0 else -0.5)))
    r = ((x - turns * (4 * HALF_PI[0])) - turns * (4 * HALF_PI[1])) - turns * (4 * HALF_PI[2])
    return np.float32(r)


@jitted
def log(x):
    """Natural logarithm of a float64, by its series in (m - 1) / (m + 1); -inf of 0, NaN of what is below."""
    if not 0.0 < x < np.inf:  # halving and doubling would not end
        return x if x > 0.0 else -np.inf if x == 0.0 else np.nan
    e = 0.0
    while x >= 1.5:
        x *= 0.5
        e += 1.0
    while x < 0.75:
        x *= 2.0
        e -= 1.0
    s = (x - 1.0) / (x + 1.0)
    z, total = s * s, 0.0
    for k in range(25, -1, -2):
        total = total * z + 1.0 / k if k > 0 else total
    return e * LN2 + 2.0 * s * total


@jitted
def power(base, exponent):
    """base ** exponent of float64; NaN of a base below 0."""
    x = exponent * log(base)
    if not -1500.0 < x < 1500.0:  # far outside float64: no loop over all those powers of 2
        return np.inf if x > 0.0 else 0.0 if x < 0.0 else np.nan
    n = np.int64(x / LN2 + (0.5 if x >= 0 else -0.5))
    r = x - np.float64(n) * LN2
    total = 1.0
    for k in range(16, 0, -1):
        total = 1.0 + total * r / k
    for _ in range(abs(n)):
        total = total * 2.0 if n > 0 else total * 0.5
    return total


def _make_swap(distance):
    @intrinsic
    def swap(typingctx, v):
        """A vector with each lane i exchanged for lane i ^ distance."""

        def codegen(context, b, signature, args):
            lanes = ir.VectorType(ir.IntType(32), v.lanes)
            return b.shuffle_vector(args[0], args[0], ir.Constant(lanes, [i ^ distance for i in range(v.lanes)]))

        return v(v), codegen

    return swap


swap_pairs, swap_twos, swap_fours, swap_eights = (_make_swap(d) for d in (1, 2, 4, 8))


def _make_twice(first):
    @intrinsic
    def twice(typingctx, v):
        """A vector with each of 8 lanes two times."""

        def codegen(context, b, signature, args):
            lanes = ir.VectorType(ir.IntType(32), v.lanes)
            return b.shuffle_vector(args[0], args[0], ir.Constant(lanes, [first + i // 2 for i in range(v.lanes)]))

        return v(v), codegen

    return twice


twice_low, twice_high = _make_twice(0), _make_twice(8)
