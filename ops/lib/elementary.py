"""exp, log, tanh of float32 as LLVM IR, for scalars and vectors: no library call, same bits at AVX2 and AVX-512.

Each takes an IR builder and a value of LLVM type float or <n x float>. The error is at most 2 units in the last place
(tests/test_vec.py measures it). The portable level has no fma and differs in the last places.

Source: Cephes (S. Moshier), the polynomials of expf, logf and tanhf.
"""

import functools

from ggjit.jit import cpu_level, lazy_module
from ggjit.ops.lib.memory import constant, integer_vector

ir = lazy_module("llvmlite.ir")
cgutils = lazy_module("numba.core.cgutils")

_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits


def call(b, name, *args, result=None):
    """Emit an LLVM intrinsic that is named by its first operand's type: `call(b, "llvm.sqrt", x)`."""
    like = args[0].type
    suffix = f"v{like.count}f32" if isinstance(like, ir.VectorType) else "f32"
    function = ir.FunctionType(result or like, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, function, f"{name}.{suffix}"), args)


def fma(b, x, y, z):
    """Multiply and add: x * y + z, rounded once where the CPU can."""
    if cpu_level() == "sse2":
        return b.fadd(b.fmul(x, y), z)
    return call(b, "llvm.fma", x, y, z)


def fabs(b, x):
    """Absolute value."""
    i32 = integer_vector(x.type, 32)
    return b.bitcast(b.and_(b.bitcast(x, i32), constant(i32, 0x7FFFFFFF)), x.type)


def copy_sign(b, magnitude, sign):
    """`magnitude` (not negative) with the sign of `sign`."""
    i32 = integer_vector(sign.type, 32)
    bit = b.and_(b.bitcast(sign, i32), constant(i32, -0x80000000))
    return b.bitcast(b.or_(b.bitcast(magnitude, i32), bit), sign.type)


def _polynomial(b, x, coefficients):
    """Horner's scheme, highest power first."""
    out = constant(x.type, coefficients[0])
    for c in coefficients[1:]:
        out = fma(b, out, x, constant(x.type, c))
    return out


def _two_to(b, n):
    """2^n as float32, for n in -126 .. 127."""
    c = functools.partial(constant, n.type)
    f32 = ir.VectorType(ir.FloatType(), n.type.count) if isinstance(n.type, ir.VectorType) else ir.FloatType()
    return b.bitcast(b.shl(b.add(n, c(127)), c(23)), f32)


def _is_wide(x):
    return cpu_level() == "avx512" and isinstance(x.type, ir.VectorType) and x.type.count == 16


def _scaled(b, p, whole, shifted):
    """p * 2^whole, rounded once; shifted is whole + _ROUND."""
    if _is_wide(p):
        rounding, every = ir.IntType(32)(4), ir.IntType(16)(-1)  # as the mode says; all lanes
        operands = [p, whole, p, every, rounding]
        function = ir.FunctionType(p.type, [v.type for v in operands])
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        return b.call(cgutils.get_or_insert_function(b.module, function, name), operands)
    i32 = integer_vector(p.type, 32)
    n = b.sub(b.bitcast(shifted, i32), constant(i32, 0x4B400000))  # _ROUND's bits
    half = b.ashr(n, constant(i32, 1))  # 2^n may be no float32: two factors
    return b.fmul(b.fmul(p, _two_to(b, half)), _two_to(b, b.sub(n, half)))


def exp(b, x):
    """e^x. -inf and what is too small give 0 (through the denormals), too large inf, NaN NaN."""
    c = functools.partial(constant, x.type)
    x = b.select(b.fcmp_ordered("<", x, c(-104.0)), c(-104.0), x)
    x = b.select(b.fcmp_ordered(">", x, c(89.0)), c(89.0), x)
    shifted = fma(b, x, c(1.44269504088896341), c(_ROUND))
    whole = b.fsub(shifted, c(_ROUND))
    r = fma(b, whole, c(-0.693359375), x)
    r = fma(b, whole, c(2.12194440e-4), r)
    p = _polynomial(b, r, (1.381982584e-3, 8.368686773e-3, 4.166827723e-2, 1.666652113e-1, 4.999999404e-1))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), c(1.0))
    return _scaled(b, p, whole, shifted)


_EXP2 = (
    0.0001532719616,
    0.001339102513,
    0.009618504904,
    0.05550359562,
    0.2402264774,
    0.6931471825,
)  # (2^f - 1) / f, minimax: error 3e-9 of 2^f
_EXP2_HALF = (9.6180793e-3, 5.5837218e-2, 2.4023253e-1, 6.9313687e-1)  # error 1.5e-5, of 2^f 6e-6


def _exp2_parts(b, t, coefficients):
    """(f, q, whole, shifted): 2^t = (1 + f q) 2^whole."""
    c = functools.partial(constant, t.type)
    if _is_wide(t):
        every, rounding = ir.IntType(16)(-1), ir.IntType(32)(4)
        operands = [t, ir.IntType(32)(8), t, every, rounding]
        function = ir.FunctionType(t.type, [v.type for v in operands])
        name = "llvm.x86.avx512.mask.reduce.ps.512"  # less the nearest integer; 0 for infinities
        f = b.call(cgutils.get_or_insert_function(b.module, function, name), operands)
        shifted, whole = None, b.fsub(t, f)
    else:
        t = b.select(b.fcmp_ordered("<", t, c(-160.0)), c(-160.0), t)
        t = b.select(b.fcmp_ordered(">", t, c(160.0)), c(160.0), t)
        shifted = b.fadd(t, c(_ROUND))
        whole = b.fsub(shifted, c(_ROUND))
        f = b.fadd(b.fsub(t, whole), c(0.0))  # 0 also for -0, as above
    return f, _polynomial(b, f, coefficients), whole, shifted


def _exp2(b, t, coefficients):
    f, q, whole, shifted = _exp2_parts(b, t, coefficients)
    return _scaled(b, fma(b, f, q, constant(t.type, 1.0)), whole, shifted)


def exp2(b, t):
    """2^t. Edges as for `exp`, which is not this of x log2 e: the product's rounding counts |x| times."""
    return _exp2(b, t, _EXP2)


def exp2_half(b, t):
    """2^t for results of F16 and BF16: error 6e-6."""
    return _exp2(b, t, _EXP2_HALF)


def exp2m1_half(b, t):
    """2^t - 1 for results of F16 and BF16: error 2e-5, also where it is small."""
    c = functools.partial(constant, t.type)
    f, q, whole, shifted = _exp2_parts(b, t, _EXP2_HALF)
    near = b.fmul(f, q)
    far = b.fsub(_scaled(b, b.fadd(near, c(1.0)), whole, shifted), c(1.0))
    return b.select(b.fcmp_ordered("==", whole, c(0.0)), near, far)


def log(b, x):
    """Natural logarithm. 0 gives -inf, negative values NaN."""
    c, i32 = functools.partial(constant, x.type), integer_vector(x.type, 32)
    ci = functools.partial(constant, i32)
    small = b.fcmp_ordered("<", x, c(1.1754943508222875e-38))  # a denormal is scaled by 2^23 first
    bits = b.bitcast(b.select(small, b.fmul(x, c(8388608.0)), x), i32)
    # x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    e = b.ashr(b.sub(bits, ci(0x3F3504F3)), ci(23))
    m = b.bitcast(b.sub(bits, b.shl(e, ci(23))), x.type)
    e = b.sitofp(b.sub(e, b.select(small, ci(23), ci(0))), x.type)
    r = b.fsub(m, c(1.0))
    p = _polynomial(b, r, (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                           -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1))  # fmt: skip
    square = b.fmul(r, r)
    y = b.fmul(b.fmul(p, r), square)
    y = fma(b, e, c(-2.12194440e-4), y)
    y = fma(b, square, c(-0.5), y)
    out = fma(b, e, c(0.693359375), b.fadd(r, y))
    out = b.select(b.fcmp_ordered("==", x, c(float("inf"))), x, out)
    out = b.select(b.fcmp_ordered("==", x, c(0.0)), c(float("-inf")), out)
    return b.select(b.fcmp_unordered("<", x, c(0.0)), c(float("nan")), out)  # unordered: NaN too


def tanh(b, x):
    """Hyperbolic tangent."""
    c = functools.partial(constant, x.type)
    size = fabs(b, x)
    square = b.fmul(x, x)
    p = _polynomial(b, square, (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
                                -3.33332819422e-1))  # fmt: skip
    near = fma(b, b.fmul(p, square), x, x)
    far = b.fsub(c(1.0), b.fdiv(c(2.0), b.fadd(exp(b, b.fadd(size, size)), c(1.0))))
    return b.select(b.fcmp_ordered("<", size, c(0.625)), near, copy_sign(b, far, x))
