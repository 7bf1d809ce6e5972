"""The Numba type of vector values and its operators. Imported before anything compiles; kernels use vec.py.

+ - * /  < <= > >= == !=  -v        f32 vectors, also with a number on one side
+ - * & | ^ << >>  comparisons      i32 vectors, also with a number on one side
& | ^ ~                             masks
"""

import operator

from llvmlite import ir
from numba import types
from numba.core.extending import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import models, register_model

LANES = 16
_ELEMENTS = {"f32": ir.FloatType(), "i32": ir.IntType(32), "mask": ir.IntType(1)}
_SCALARS = {"f32": types.float32, "i32": types.int32}


class Vec(types.Type):
    """A vector of `lanes` values of elem "f32", "i32" or "mask" (one bit)."""

    def __init__(self, elem, lanes=LANES):
        self.elem, self.lanes = elem, lanes
        self.llvm = ir.VectorType(_ELEMENTS[elem], lanes)
        super().__init__(name=f"Vec({elem},{lanes})")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, fe_type.llvm)


def splat(b, value, llvm_type):
    """LLVM vector with `value` in every lane."""
    index = ir.VectorType(ir.IntType(32), llvm_type.count)
    one = b.insert_element(ir.Constant(llvm_type, ir.Undefined), value, ir.IntType(32)(0))
    return b.shuffle_vector(one, ir.Constant(llvm_type, ir.Undefined), ir.Constant(index, [0] * llvm_type.count))


_ARITHMETIC = {
    operator.add: {"f32": "fadd", "i32": "add"},
    operator.sub: {"f32": "fsub", "i32": "sub"},
    operator.mul: {"f32": "fmul", "i32": "mul"},
    operator.truediv: {"f32": "fdiv"},
    operator.and_: {"i32": "and_", "mask": "and_"},
    operator.or_: {"i32": "or_", "mask": "or_"},
    operator.xor: {"i32": "xor", "mask": "xor"},
    operator.lshift: {"i32": "shl"},
    operator.rshift: {"i32": "ashr"},
}
_COMPARISONS = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}


def _operands(args):
    """The types that both sides are cast to, or None if this is no operation on vectors."""
    a, c = args
    if isinstance(a, Vec) and a == c:
        return a, c
    for vector, number, swap in ((a, c, False), (c, a, True)):
        if isinstance(vector, Vec) and vector.elem in _SCALARS and isinstance(number, types.Number):
            scalar = _SCALARS[vector.elem]
            return (scalar, vector) if swap else (vector, scalar)
    return None


def _vectors(b, sig, args):
    vector = next(t for t in sig.args if isinstance(t, Vec))
    return [v if isinstance(t, Vec) else splat(b, v, vector.llvm) for t, v in zip(sig.args, args, strict=True)]


def _register_binary(op, result, emit):
    @infer_global(op)
    class Operator(AbstractTemplate):
        def generic(self, args, kws):
            operands = _operands(args) if len(args) == 2 else None
            if operands is None:
                return None
            returned = result(next(t for t in operands if isinstance(t, Vec)))
            return None if returned is None else signature(returned, *operands)

    def lower(context, b, sig, args):
        vector = next(t for t in sig.args if isinstance(t, Vec))
        return emit(b, vector.elem, *_vectors(b, sig, args))

    for left, right in ((Vec, Vec), (Vec, types.Number), (types.Number, Vec)):
        lower_builtin(op, left, right)(lower)


def _register():
    for op, instructions in _ARITHMETIC.items():
        in_place = getattr(operator, f"i{op.__name__.strip('_')}")  # `acc += v`
        for each in (op, in_place):
            _register_binary(
                each,
                lambda vector, i=instructions: vector if vector.elem in i else None,
                lambda b, elem, x, y, i=instructions: getattr(b, i[elem])(x, y),
            )
    for op, sign in _COMPARISONS.items():
        _register_binary(
            op,
            lambda vector: Vec("mask", vector.lanes) if vector.elem != "mask" else None,
            lambda b, elem, x, y, s=sign: _compare(b, elem, s, x, y),
        )
    for op, elems, emit in (
        (
            operator.neg,
            ("f32", "i32"),
            lambda b, v: b.fneg(v) if isinstance(v.type.element, ir.FloatType) else b.neg(v),
        ),
        (operator.invert, ("mask", "i32"), lambda b, v: b.not_(v)),
    ):
        _register_unary(op, elems, emit)


def _compare(b, elem, sign, x, y):
    if elem == "i32":
        return b.icmp_signed(sign, x, y)
    return b.fcmp_unordered(sign, x, y) if sign == "!=" else b.fcmp_ordered(sign, x, y)


def _register_unary(op, elems, emit):
    @infer_global(op)
    class Operator(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 1 and isinstance(args[0], Vec) and args[0].elem in elems:
                return signature(args[0], args[0])
            return None

    @lower_builtin(op, Vec)
    def lower(context, b, sig, args):
        return emit(b, args[0])


_register()
