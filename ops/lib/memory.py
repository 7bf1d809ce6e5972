"""Typed loads and stores on byte buffers (uint8[::1]) at a byte offset, for kernels.

Each is a getelementptr on the buffer's pointer, the one form that LLVM optimises: a `.view()` makes gathers, and an
integer address in a loop is never vectorised. Element alignment is assumed, no more.

f16 and bf16 are loaded to and stored from float32, stores rounding to nearest even. At the portable level f16 is
converted by integer code: the compiler's helper functions for it cannot be linked.

    memory.load_f32(src0, i01 * src0_nb[1] + 4 * i00)

The module imports no Numba, so that factories may choose `loader(type_name)` at any time.
"""

import functools

from ggjit.cpu import has
from ggjit.jit import cpu_level, intrinsic, lazy_module

bfloat = lazy_module("ggjit.ops.lib.bfloat")
ir = lazy_module("llvmlite.ir")
types = lazy_module("numba.core.types")
arrayobj = lazy_module("numba.np.arrayobj")
cgutils = lazy_module("numba.core.cgutils")

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F64": 8, "U8": 1, "U16": 2, "U32": 4}


def pointer(context, b, buffer_type, buffer, offset, llvm_type):
    """LLVM pointer to `llvm_type` at a byte offset of a buffer."""
    data = arrayobj.make_array(buffer_type)(context, b, buffer).data
    return b.bitcast(b.gep(data, [offset]), llvm_type.as_pointer())


def integer_vector(like, bits):
    """The integer type with the shape (scalar or vector) of an LLVM type."""
    element = ir.IntType(bits)
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element


def constant(type_, value):
    """LLVM constant, repeated for a vector type."""
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


def f16_to_f32(b, bits):
    """float32 of f16 bits (i16, scalar or vector). Exact."""
    f32 = ir.VectorType(ir.FloatType(), bits.type.count) if isinstance(bits.type, ir.VectorType) else ir.FloatType()
    if cpu_level() != "sse2":
        half = ir.VectorType(ir.HalfType(), bits.type.count) if isinstance(bits.type, ir.VectorType) else ir.HalfType()
        return b.fpext(b.bitcast(bits, half), f32)
    i32 = integer_vector(bits.type, 32)
    c = functools.partial(constant, i32)
    wide = b.zext(bits, i32)
    sign = b.shl(b.and_(wide, c(0x8000)), c(16))
    magnitude = b.shl(b.and_(wide, c(0x7FFF)), c(13))
    # A normal number's exponent moves by 112; infinity and NaN get all ones (and NaN its quiet bit); a small one is
    # magnitude * 2^-24, found as the difference of two floats with the exponent of 2^-14.
    normal = b.add(magnitude, c(112 << 23))
    special = b.icmp_unsigned(">=", magnitude, c(31 << 23))
    nan = b.icmp_unsigned(">", magnitude, c(31 << 23))
    normal = b.select(special, b.add(normal, c(112 << 23)), normal)
    normal = b.select(nan, b.or_(normal, c(1 << 22)), normal)
    tiny = b.fsub(b.bitcast(b.add(magnitude, c(113 << 23)), f32), b.bitcast(c(113 << 23), f32))
    small = b.icmp_unsigned("<", magnitude, c(1 << 23))
    return b.bitcast(b.or_(b.select(small, b.bitcast(tiny, i32), normal), sign), f32)


def f32_to_f16(b, value):
    """f16 bits (i16) of float32, to nearest even."""
    i16, i32 = integer_vector(value.type, 16), integer_vector(value.type, 32)
    if cpu_level() != "sse2":
        half = (
            ir.VectorType(ir.HalfType(), value.type.count) if isinstance(value.type, ir.VectorType) else ir.HalfType()
        )
        return b.bitcast(b.fptrunc(value, half), i16)
    c = functools.partial(constant, i32)
    bits = b.bitcast(value, i32)
    sign = b.and_(b.lshr(bits, c(16)), c(0x8000))
    magnitude = b.and_(bits, c(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, c(13)), c(1))
    normal = b.lshr(b.sub(b.add(b.add(magnitude, c(0xFFF)), odd), c(112 << 23)), c(13))
    # Below 2^-14 adding 0.5 aligns the last f16 bit with the last float32 bit, and the addition rounds.
    half = constant(value.type, 0.5)
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, value.type), half), i32), b.bitcast(half, i32))
    out = b.select(b.icmp_unsigned("<", magnitude, c(113 << 23)), tiny, normal)
    out = b.select(b.icmp_unsigned(">=", magnitude, c((127 + 16) << 23)), c(0x7C00), out)
    nan = b.or_(c(0x7E00), b.and_(b.lshr(magnitude, c(13)), c(0x3FF)))
    out = b.select(b.icmp_unsigned(">", magnitude, c(0x7F800000)), nan, out)
    return b.trunc(b.or_(out, sign), i16)


def bf16_to_f32(b, bits):
    """float32 of bf16 bits (i16, scalar or vector). Exact."""
    f32 = ir.VectorType(ir.FloatType(), bits.type.count) if isinstance(bits.type, ir.VectorType) else ir.FloatType()
    i32 = integer_vector(bits.type, 32)
    return b.bitcast(b.shl(b.zext(bits, i32), constant(i32, 16)), f32)


def f32_to_bf16(b, value):
    """bf16 bits (i16) of float32, to nearest even; a NaN is made quiet."""
    wide = isinstance(value.type, ir.VectorType) and value.type.count == 16
    return (_bf16_at_once if wide and cpu_level() == "avx512" and has("avx512bf16") else _bf16_as_integers)(b, value)


def _bf16_at_once(b, value):
    """16 values by the CPU's instruction; a vector with a denormal, which the instruction takes for 0, as integers."""
    i16, i32, lanes = ir.IntType(16), ir.IntType(32), ir.VectorType(ir.IntType(1), 16)
    function = ir.FunctionType(lanes, [value.type, i32])
    classify = cgutils.get_or_insert_function(b.module, function, "llvm.x86.avx512.fpclass.ps.512")
    function = ir.FunctionType(ir.VectorType(bfloat.BF16, 16), [value.type])
    convert = cgutils.get_or_insert_function(b.module, function, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    denormal = b.bitcast(b.call(classify, [value, i32(0x20)]), i16)
    with b.if_else(b.icmp_unsigned("!=", denormal, i16(0)), likely=False) as (rare, usual):
        with rare:
            exact, exact_block = _bf16_as_integers(b, value), b.block
        with usual:
            rounded, rounded_block = b.bitcast(b.call(convert, [value]), exact.type), b.block
    out = b.phi(exact.type)
    out.add_incoming(exact, exact_block)
    out.add_incoming(rounded, rounded_block)
    return out


def _bf16_as_integers(b, value):
    i32 = integer_vector(value.type, 32)
    c = functools.partial(constant, i32)
    bits = b.bitcast(value, i32)
    rounded = b.lshr(b.add(bits, b.add(c(0x7FFF), b.and_(b.lshr(bits, c(16)), c(1)))), c(16))
    nan = b.icmp_unsigned(">", b.and_(bits, c(0x7FFFFFFF)), c(0x7F800000))
    return b.trunc(b.select(nan, b.or_(b.lshr(bits, c(16)), c(64)), rounded), integer_vector(value.type, 16))


def _llvm_type(kind):
    """LLVM type in memory and Numba type of a value, by the name of a type."""
    if kind == "F32":
        return ir.FloatType(), types.float32
    if kind == "F64":
        return ir.DoubleType(), types.float64
    if kind in ("F16", "BF16"):
        return ir.IntType(16), types.float32
    return ir.IntType(8 * SIZES[kind]), getattr(types, f"{'u' if kind[0] == 'U' else ''}int{8 * SIZES[kind]}")


def _make_load(kind, result=None):
    """Load of type `kind`, converted to `result` ("f32") if that is given."""

    @intrinsic
    def load(typingctx, buffer, offset):
        """Value at a byte offset of a buffer."""
        llvm, scalar = _llvm_type(kind)
        returned = types.float32 if result == "f32" else scalar

        def codegen(context, b, signature, args):
            value = b.load(pointer(context, b, signature.args[0], args[0], args[1], llvm), align=SIZES[kind])
            if kind == "F16":
                return f16_to_f32(b, value)
            if kind == "BF16":
                return bf16_to_f32(b, value)
            return context.cast(b, value, scalar, returned)

        return returned(buffer, types.int64), codegen

    return load


def _make_store(kind, given=None):
    """Store to type `kind`, of a value converted from `given` ("f32") if that is given."""

    @intrinsic
    def store(typingctx, buffer, offset, value):
        """Store a value at a byte offset of a buffer."""
        llvm, scalar = _llvm_type(kind)
        taken = types.float32 if given == "f32" else scalar

        def codegen(context, b, signature, args):
            value = args[2]
            if kind == "F16":
                value = f32_to_f16(b, value)
            elif kind == "BF16":
                value = f32_to_bf16(b, value)
            else:
                value = context.cast(b, value, taken, scalar)
            b.store(value, pointer(context, b, signature.args[0], args[0], args[1], llvm), align=SIZES[kind])
            return context.get_dummy_value()

        return types.void(buffer, types.int64, taken), codegen

    return store


load_f32, load_f64, load_f16, load_bf16 = (_make_load(k) for k in ("F32", "F64", "F16", "BF16"))
load_i8, load_i16, load_i32, load_i64 = (_make_load(k) for k in ("I8", "I16", "I32", "I64"))
load_u8, load_u16, load_u32 = (_make_load(k) for k in ("U8", "U16", "U32"))
store_f32, store_f64, store_f16, store_bf16 = (_make_store(k) for k in ("F32", "F64", "F16", "BF16"))
store_i8, store_i16, store_i32, store_i64 = (_make_store(k) for k in ("I8", "I16", "I32", "I64"))
store_u8, store_u16, store_u32 = (_make_store(k) for k in ("U8", "U16", "U32"))


@functools.cache
def loader(type_name):
    """Helper (buffer, offs) -> float32 for a plain type: F32 F16 BF16 I8 I16 I32 I64 F64 U8 U16 U32."""
    if type_name not in SIZES:
        raise ValueError(f"loader: type must be one of {', '.join(SIZES)}, got {type_name!r}")
    return _make_load(type_name, "f32")


@functools.cache
def storer(type_name):
    """Helper (buffer, offs, float32) for a plain type. Integers are cut towards zero."""
    if type_name not in SIZES:
        raise ValueError(f"storer: type must be one of {', '.join(SIZES)}, got {type_name!r}")
    return _make_store(type_name, "f32")


@intrinsic
def address(typingctx, buffer):
    """Address of a buffer's first byte as int64, for emitted kernel bodies."""

    def codegen(context, b, signature, args):
        data = arrayobj.make_array(signature.args[0])(context, b, args[0]).data
        return b.ptrtoint(data, ir.IntType(64))

    return types.int64(buffer), codegen


def _make_local(nbytes):
    @intrinsic
    def local(typingctx):
        """A buffer on the stack of the calling function, not zeroed."""
        buffer_type = types.Array(types.uint8, 1, "C")

        def codegen(context, b, signature, args):
            with b.goto_entry_block():  # cgutils.alloca_once would store zeros, over which LLVM takes long
                memory = b.alloca(ir.ArrayType(ir.IntType(8), nbytes))
            memory.align = 16
            array = arrayobj.make_array(buffer_type)(context, b)
            size = ir.Constant(ir.IntType(64), nbytes)
            data = b.bitcast(memory, ir.IntType(8).as_pointer())
            arrayobj.populate_array(array, data, [size], [ir.Constant(ir.IntType(64), 1)], 1, None)
            return array._getvalue()

        return buffer_type(), codegen

    return local


local_1k, local_8k = _make_local(1024), _make_local(8192)


@intrinsic
def bits_f32(typingctx, value):
    """The int32 with the bits of a float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def f32_from_bits(typingctx, bits):
    """The float32 with the bits of an int32 (op_params hold floats so)."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen
