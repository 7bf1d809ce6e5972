"""Vectors of 16 lanes as values in kernels: one 512-bit, two 256-bit or four 128-bit registers, chosen by LLVM.

    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.load(src0, at + 4 * i) * scale)
    rest = n % 16
    if rest:
        i = n - rest
        vec.store_first(dst, to + 4 * i, vec.load_first(src0, at + 4 * i, rest) * scale, rest)

Values are f32, i32 or masks; + - * / and comparisons are operators (vector_type.py lists them), also with a number on
one side. Offsets are bytes; element alignment is assumed, no more. The `_first` forms touch only the first n lanes
(none if n <= 0, all if n >= 16) and load zeros into the rest. Results are the same bits at AVX2 and AVX-512.

Explicit vectors are for every hot loop: LLVM's own vectorising falls back to scalar code when an op runs in place, and
never reorders a sum. The module imports no Numba.
"""

from ggjit.jit import intrinsic, lazy_module
from ggjit.ops.lib import elementary
from ggjit.ops.lib.memory import (
    SIZES,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    pointer,
)

ir = lazy_module("llvmlite.ir")
types = lazy_module("numba.core.types")
cgutils = lazy_module("numba.core.cgutils")
vector_type = lazy_module("ggjit.ops.lib.vector_type")

LANES = 16
_TYPES = ("F32", "F16", "BF16", "I32", "I16", "I8", "U8")


def _vector(element):
    return ir.VectorType(element, LANES)


def _first(b, n):
    """LLVM mask of the first n (i64) lanes."""
    i64 = ir.IntType(64)
    n = b.select(b.icmp_signed(">", n, i64(LANES)), i64(LANES), n)
    n = b.select(b.icmp_signed("<", n, i64(0)), i64(0), n)
    index = _vector(ir.IntType(32))
    lanes = vector_type.splat(b, b.trunc(n, ir.IntType(32)), index)
    return b.icmp_signed("<", ir.Constant(index, list(range(LANES))), lanes)


def _suffix(type_):
    element = type_.element
    return f"v{type_.count}{'f32' if isinstance(element, ir.FloatType) else f'i{element.width}'}"


def _declare(b, name, result, args):
    function = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), args)


# --- loads and stores -------------------------------------------------------------------------------------------------


def _memory_element(kind):
    return ir.FloatType() if kind == "F32" else ir.IntType(8 * SIZES[kind])


def _widen(b, kind, value, elem):
    """What is in memory as an f32 or i32 vector."""
    if kind == "F32":
        return value
    if kind in ("F16", "BF16"):
        return (f16_to_f32 if kind == "F16" else bf16_to_f32)(b, value)
    i32 = _vector(ir.IntType(32))
    if kind != "I32":
        value = b.zext(value, i32) if kind[0] == "U" else b.sext(value, i32)
    return b.sitofp(value, _vector(ir.FloatType())) if elem == "f32" else value


def _narrow(b, kind, value):
    """The form in memory of an f32 or i32 vector; integers lose their high bits."""
    if kind in ("F16", "BF16"):
        return (f32_to_f16 if kind == "F16" else f32_to_bf16)(b, value)
    return b.trunc(value, _vector(ir.IntType(8 * SIZES[kind]))) if kind in ("I16", "I8", "U8") else value


def _load(b, kind, at):
    return b.load(at, align=SIZES[kind])


def _load_first(b, kind, at, n):
    type_ = _vector(_memory_element(kind))
    args = [at, ir.IntType(32)(SIZES[kind]), _first(b, n), ir.Constant(type_, None)]
    return _declare(b, f"llvm.masked.load.{_suffix(type_)}.p0", type_, args)


def _store_first(b, kind, at, value, n):
    args = [value, at, ir.IntType(32)(SIZES[kind]), _first(b, n)]
    _declare(b, f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(), args)


def _make_load(kind, elem):
    @intrinsic
    def load(typingctx, buffer, offset):
        """16 values at a byte offset."""

        def codegen(context, b, signature, args):
            at = pointer(context, b, signature.args[0], args[0], args[1], _vector(_memory_element(kind)))
            return _widen(b, kind, _load(b, kind, at), elem)

        return vector_type.Vec(elem)(buffer, types.int64), codegen

    return load


def _make_load_first(kind, elem):
    @intrinsic
    def load_first(typingctx, buffer, offset, n):
        """The first n values at a byte offset, zeros after."""

        def codegen(context, b, signature, args):
            at = pointer(context, b, signature.args[0], args[0], args[1], _vector(_memory_element(kind)))
            return _widen(b, kind, _load_first(b, kind, at, args[2]), elem)

        return vector_type.Vec(elem)(buffer, types.int64, types.int64), codegen

    return load_first


def _make_store(kind, elem):
    @intrinsic
    def store(typingctx, buffer, offset, value):
        """Store 16 values at a byte offset."""

        def codegen(context, b, signature, args):
            at = pointer(context, b, signature.args[0], args[0], args[1], _vector(_memory_element(kind)))
            b.store(_narrow(b, kind, args[2]), at, align=SIZES[kind])
            return context.get_dummy_value()

        return types.void(buffer, types.int64, vector_type.Vec(elem)), codegen

    return store


def _make_store_first(kind, elem):
    @intrinsic
    def store_first(typingctx, buffer, offset, value, n):
        """Store the first n lanes at a byte offset."""

        def codegen(context, b, signature, args):
            at = pointer(context, b, signature.args[0], args[0], args[1], _vector(_memory_element(kind)))
            _store_first(b, kind, at, _narrow(b, kind, args[2]), args[3])
            return context.get_dummy_value()

        return types.void(buffer, types.int64, vector_type.Vec(elem), types.int64), codegen

    return store_first


load, load_f16, load_bf16 = (_make_load(k, "f32") for k in ("F32", "F16", "BF16"))
load_i32, load_i16, load_i8, load_u8 = (_make_load(k, "i32") for k in ("I32", "I16", "I8", "U8"))
load_first, load_f16_first, load_bf16_first = (_make_load_first(k, "f32") for k in ("F32", "F16", "BF16"))
load_i32_first, load_i16_first, load_i8_first, load_u8_first = (
    _make_load_first(k, "i32") for k in ("I32", "I16", "I8", "U8")
)
store, store_f16, store_bf16 = (_make_store(k, "f32") for k in ("F32", "F16", "BF16"))
store_i32, store_i16, store_i8 = (_make_store(k, "i32") for k in ("I32", "I16", "I8"))
store_first, store_f16_first, store_bf16_first = (_make_store_first(k, "f32") for k in ("F32", "F16", "BF16"))
store_i32_first, store_i16_first, store_i8_first = (_make_store_first(k, "i32") for k in ("I32", "I16", "I8"))


def _of_type(table, where, type_name):
    if type_name not in table:
        raise ValueError(f"{where}: type must be one of {', '.join(table)}, got {type_name!r}")
    return table[type_name]


def loader(type_name):
    """Helper (buffer, offs) -> f32 vector, for F32 F16 BF16 I32 I16 I8 U8."""
    return _of_type(_LOADERS, "vec.loader", type_name)


def loader_first(type_name):
    """Helper (buffer, offs, n) -> f32 vector, zeros after the first n."""
    return _of_type(_LOADERS_FIRST, "vec.loader_first", type_name)


def storer(type_name):
    """Helper (buffer, offs, f32 vector), for F32 F16 BF16."""
    return _of_type(_STORERS, "vec.storer", type_name)


def storer_first(type_name):
    """Helper (buffer, offs, f32 vector, n)."""
    return _of_type(_STORERS_FIRST, "vec.storer_first", type_name)


_LOADERS = {k: _make_load(k, "f32") for k in _TYPES}
_LOADERS_FIRST = {k: _make_load_first(k, "f32") for k in _TYPES}
_STORERS = {k: _make_store(k, "f32") for k in ("F32", "F16", "BF16")}
_STORERS_FIRST = {k: _make_store_first(k, "f32") for k in ("F32", "F16", "BF16")}


def _strided(context, b, signature, args, mask):
    """Gather f32 at offset + lane * stride where the mask is set, zeros elsewhere."""
    index, pointers = _vector(ir.IntType(64)), _vector(ir.PointerType())
    base = pointer(context, b, signature.args[0], args[0], args[1], ir.IntType(8))
    lanes = ir.Constant(index, list(range(LANES)))
    offsets = b.mul(vector_type.splat(b, args[2], index), lanes)
    at = b.inttoptr(b.add(vector_type.splat(b, b.ptrtoint(base, ir.IntType(64)), index), offsets), pointers)
    f32 = _vector(ir.FloatType())
    gather = [at, ir.IntType(32)(4), mask, ir.Constant(f32, None)]
    return _declare(b, f"llvm.masked.gather.v{LANES}f32.v{LANES}p0", f32, gather)


@intrinsic
def load_strided(typingctx, buffer, offset, stride):
    """16 f32 that lie `stride` bytes apart."""

    def codegen(context, b, signature, args):
        return _strided(context, b, signature, args, ir.Constant(_vector(ir.IntType(1)), [1] * LANES))

    return vector_type.Vec("f32")(buffer, types.int64, types.int64), codegen


@intrinsic
def load_strided_first(typingctx, buffer, offset, stride, n):
    """The first n of f32 that lie `stride` bytes apart, zeros after."""

    def codegen(context, b, signature, args):
        return _strided(context, b, signature, args, _first(b, args[3]))

    return vector_type.Vec("f32")(buffer, types.int64, types.int64, types.int64), codegen


# --- making vectors ---------------------------------------------------------------------------------------------------


def _make_splat(elem, scalar):
    @intrinsic
    def splat(typingctx, x):
        """A vector with x in every lane."""

        def codegen(context, b, signature, args):
            return vector_type.splat(b, args[0], signature.return_type.llvm)

        return vector_type.Vec(elem)(getattr(types, scalar)), codegen

    return splat


splat, splat_i32 = _make_splat("f32", "float32"), _make_splat("i32", "int32")


def _make_constant(elem, values):
    @intrinsic
    def constant(typingctx):
        """A constant vector."""

        def codegen(context, b, signature, args):
            return ir.Constant(signature.return_type.llvm, list(values))

        return vector_type.Vec(elem)(), codegen

    return constant


zero, lanes = _make_constant("f32", (0.0,) * LANES), _make_constant("i32", tuple(range(LANES)))


@intrinsic
def first(typingctx, n):
    """Mask of the first n lanes."""

    def codegen(context, b, signature, args):
        return _first(b, args[0])

    return vector_type.Vec("mask")(types.int64), codegen


@intrinsic
def select(typingctx, mask, a, c):
    """a where the mask is set, c elsewhere (f32 or i32)."""
    vector = a if isinstance(a, vector_type.Vec) else c

    def codegen(context, b, signature, args):
        sides = [
            v if isinstance(t, vector_type.Vec) else vector_type.splat(b, v, vector.llvm)
            for t, v in zip(signature.args[1:], args[1:], strict=True)
        ]
        return b.select(args[0], *sides)

    if not isinstance(vector, vector_type.Vec):
        return None
    scalar = types.float32 if vector.elem == "f32" else types.int32
    sides = [t if isinstance(t, vector_type.Vec) else scalar for t in (a, c)]
    return vector(vector_type.Vec("mask"), *sides), codegen


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _make_map(emit, n_args, doc):
    """Helper of n f32 vectors (or n float32), emitted by emit(b, *values)."""

    def typed(arguments):
        vector = any(isinstance(t, vector_type.Vec) for t in arguments)
        type_ = vector_type.Vec("f32") if vector else types.float32
        given = [t if isinstance(t, vector_type.Vec) else types.float32 for t in arguments]

        def codegen(context, b, signature, args):
            if vector:
                pairs = zip(signature.args, args, strict=True)
                args = [v if isinstance(t, vector_type.Vec) else vector_type.splat(b, v, type_.llvm) for t, v in pairs]
            return emit(b, *args)

        return type_(*given), codegen

    if n_args == 1:

        def function(typingctx, a):
            return typed((a,))
    elif n_args == 2:

        def function(typingctx, a, c):
            return typed((a, c))
    else:

        def function(typingctx, a, c, d):
            return typed((a, c, d))

    function.__doc__ = doc
    return intrinsic(function)


def _emit_min(b, x, y):
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _emit_max(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _llvm(name):
    return lambda b, x: elementary.call(b, name, x)


# The names follow the formulas, so some hide Python's own here.
fma = _make_map(elementary.fma, 3, "a * c + d, rounded once where the CPU can.")
min = _make_map(_emit_min, 2, "a if a < c else c: c where one is NaN.")
max = _make_map(_emit_max, 2, "a if a > c else c: c where one is NaN.")
abs = _make_map(elementary.fabs, 1, "Absolute value.")
copy_sign = _make_map(elementary.copy_sign, 2, "a (not negative) with the sign of c.")
sqrt = _make_map(_llvm("llvm.sqrt"), 1, "Square root, correctly rounded.")
floor = _make_map(_llvm("llvm.floor"), 1, "Largest integer not above.")
ceil = _make_map(_llvm("llvm.ceil"), 1, "Smallest integer not below.")
trunc = _make_map(_llvm("llvm.trunc"), 1, "Integer part.")
rint = _make_map(_llvm("llvm.rint"), 1, "Nearest integer, ties to even.")
exp = _make_map(elementary.exp, 1, elementary.exp.__doc__)
exp2 = _make_map(elementary.exp2, 1, elementary.exp2.__doc__)
exp2_half = _make_map(elementary.exp2_half, 1, elementary.exp2_half.__doc__)
exp2m1_half = _make_map(elementary.exp2m1_half, 1, elementary.exp2m1_half.__doc__)
log = _make_map(elementary.log, 1, elementary.log.__doc__)
tanh = _make_map(elementary.tanh, 1, elementary.tanh.__doc__)


# --- lanes ------------------------------------------------------------------------------------------------------------


def _tree(b, value, combine):
    """Combine the two halves until one lane is left: a fixed tree."""
    n, index = value.type.count, ir.IntType(32)
    while n > 1:
        n //= 2
        masks = [ir.Constant(ir.VectorType(index, n), [o + i for i in range(n)]) for o in (0, n)]
        value = combine(b, *(b.shuffle_vector(value, value, mask) for mask in masks))
    return b.extract_element(value, index(0))


def _make_lanes(emit_f32, emit_i32, doc):
    def function(typingctx, v):
        if not isinstance(v, vector_type.Vec) or v.elem == "mask":
            return None
        emit, scalar = (emit_f32, types.float32) if v.elem == "f32" else (emit_i32, types.int32)

        def codegen(context, b, signature, args):
            return _tree(b, args[0], emit)

        return scalar(v), codegen

    function.__doc__ = doc
    return intrinsic(function)


lane_sum = _make_lanes(
    lambda b, x, y: b.fadd(x, y), lambda b, x, y: b.add(x, y), "Sum of all lanes, as a fixed tree of halves."
)
lane_max = _make_lanes(
    _emit_max, lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y), "Largest lane (not for lanes that are NaN)."
)
lane_min = _make_lanes(
    _emit_min, lambda b, x, y: b.select(b.icmp_signed("<", x, y), x, y), "Smallest lane (not for lanes that are NaN)."
)


@intrinsic
def lane(typingctx, v, i):
    """Lane i (0 to 15) as a number."""
    scalar = types.float32 if v.elem == "f32" else types.int32

    def codegen(context, b, signature, args):
        return b.extract_element(args[0], b.trunc(args[1], ir.IntType(32)))

    return scalar(v, types.int64), codegen


def _make_mask_test(name):
    @intrinsic
    def test(typingctx, mask):
        """Whether any (all) lanes of a mask are set."""

        def codegen(context, b, signature, args):
            bits = b.bitcast(args[0], ir.IntType(LANES))
            return (
                b.icmp_unsigned("!=", bits, bits.type(0))
                if name == "any"
                else b.icmp_unsigned("==", bits, bits.type(-1))
            )

        return types.boolean(vector_type.Vec("mask")), codegen

    return test


any_lane, all_lanes = _make_mask_test("any"), _make_mask_test("all")


# --- conversions ------------------------------------------------------------------------------------------------------


def _make_convert(emit, given, returned, doc):
    def function(typingctx, v):
        def codegen(context, b, signature, args):
            return emit(b, args[0], signature.return_type.llvm)

        return vector_type.Vec(returned)(vector_type.Vec(given)), codegen

    function.__doc__ = doc
    return intrinsic(function)


def _emit_round(b, x, i32):
    shifted = b.fadd(x, ir.Constant(x.type, [12582912.0] * LANES))  # 1.5 * 2^23
    return b.sub(b.bitcast(shifted, i32), ir.Constant(i32, [0x4B400000] * LANES))


round_i32 = _make_convert(_emit_round, "f32", "i32", "Nearest integer, ties to even, of |v| <= 2^22.")
trunc_i32 = _make_convert(lambda b, v, t: b.fptosi(v, t), "f32", "i32", "Integer part of |v| < 2^31.")
to_f32 = _make_convert(lambda b, v, t: b.sitofp(v, t), "i32", "f32", "i32 to f32.")
bits_i32 = _make_convert(lambda b, v, t: b.bitcast(v, t), "f32", "i32", "The bits of f32 as i32.")
bits_f32 = _make_convert(lambda b, v, t: b.bitcast(v, t), "i32", "f32", "The f32 with the bits of i32.")
