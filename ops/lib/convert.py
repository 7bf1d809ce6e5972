"""Rows from one type to another: what get_rows, set_rows, cpy and their like are made of.

`row(source, target)` gives a helper (dst, to, src, at, n, work, scratch) for n contiguous elements:

    equal types             bytes are moved; source and target may overlap
    float to float          vectors, rounding to nearest even
    I32 to F32 and back     truncation towards zero
    quantized to F32        the type's dequantize_row
    F32 to quantized        the type's quantize_row
    F16, BF16 to quantized  through 256 f32 at a time in the scratch (SCRATCH bytes at offset `scratch` of `work`)
"""

import functools

from ggjit import types
from ggjit.jit import intrinsic, jitted, lazy_module
from ggjit.ops.lib import memory, vec
from ggjit.ops.lib.memory import pointer

ir = lazy_module("llvmlite.ir")
numba_types = lazy_module("numba.core.types")
cgutils = lazy_module("numba.core.cgutils")

CHUNK = 256  # elements through the scratch, a multiple of every block
SCRATCH = 4 * CHUNK
_FLOATS = ("F32", "F16", "BF16")
_SEARCHED = ("IQ1", "IQ2", "IQ3")  # need an importance matrix or a long search: no conversion at run time


def is_encodable(type):
    """Can values be converted to the type while a graph runs?"""
    return not type.is_quantized or (type.quant is not None and not type.name.startswith(_SEARCHED))


@intrinsic
def move(typingctx, dst, to, src, at, nbytes):
    """Move bytes between buffers that may overlap."""

    def codegen(context, b, signature, args):
        i8 = ir.IntType(8)
        target = pointer(context, b, signature.args[0], args[0], args[1], i8)
        source = pointer(context, b, signature.args[2], args[2], args[3], i8)
        operands = [target, source, args[4], ir.IntType(1)(0)]
        function = ir.FunctionType(ir.VoidType(), [x.type for x in operands])
        b.call(cgutils.get_or_insert_function(b.module, function, "llvm.memmove.p0.p0.i64"), operands)
        return context.get_dummy_value()

    i64 = numba_types.int64
    return numba_types.void(dst, i64, src, i64, i64), codegen


def _as_bits(b, value, source, target):
    """A vector of one plain type's bits as those of another: equal sizes as they are, floats rounded."""
    if memory.SIZES[source] == memory.SIZES[target] and (source == target or {source, target} - {*_FLOATS}):
        return value
    f32 = ir.VectorType(ir.FloatType(), value.type.count)
    widen = {"F32": lambda b, v: b.bitcast(v, f32), "F16": memory.f16_to_f32, "BF16": memory.bf16_to_f32}
    narrow = {
        "F32": lambda b, v: b.bitcast(v, memory.integer_vector(v.type, 32)),
        "F16": memory.f32_to_f16,
        "BF16": memory.f32_to_bf16,
    }
    return narrow[target](b, widen[source](b, value))


@functools.cache
def tile(source, target):
    """Helper (dst, to, dst_step, src, at, src_step) that transposes 16 x 16 elements; None if there is none.

    Rows of the source lie src_step bytes apart, those of the target dst_step. Types are given by name; floats are
    converted while they have the smaller size.
    """
    if source != target and not {source, target} <= {*_FLOATS}:
        return None
    size0, size = memory.SIZES[source], memory.SIZES[target]
    between = target if size < size0 else source

    @intrinsic
    def transpose_tile(typingctx, dst, to, dst_step, src, at, src_step):
        """Transpose 16 x 16 elements."""

        def codegen(context, b, signature, args):
            dst, to, dst_step, src, at, src_step = args
            i64, i32 = ir.IntType(64), ir.IntType(32)
            read, written = (ir.VectorType(ir.IntType(8 * n), 16) for n in (size0, size))
            r = []
            for i in range(16):
                offset = b.add(at, b.mul(src_step, i64(i)))
                value = b.load(pointer(context, b, signature.args[3], src, offset, read), align=size0)
                r.append(_as_bits(b, value, source, between))
            for d in (8, 4, 2, 1):  # swap the blocks of d x d elements beside the diagonal of each 2d x 2d block
                low = ir.Constant(ir.VectorType(i32, 16), [j if not j & d else 16 + j - d for j in range(16)])
                high = ir.Constant(ir.VectorType(i32, 16), [j + d if not j & d else 16 + j for j in range(16)])
                for i in range(16):
                    if not i & d:
                        x, y = r[i], r[i + d]
                        r[i], r[i + d] = b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)
            for i in range(16):
                offset = b.add(to, b.mul(dst_step, i64(i)))
                value = _as_bits(b, r[i], between, target)
                b.store(value, pointer(context, b, signature.args[0], dst, offset, written), align=size)
            return context.get_dummy_value()

        i64 = numba_types.int64
        return numba_types.void(dst, i64, i64, src, i64, i64), codegen

    return transpose_tile


@functools.cache
def row(source, target):
    """Helper (dst, to, src, at, n, work, scratch) that converts n contiguous elements; None if there is none.

    Args:
        source: type of what is read.
        target: type of what is written; n is a multiple of both blocks.
    """
    if source is target:
        return move_row(source.blck_size, source.type_size)
    if source.name in _FLOATS and target.name in _FLOATS:
        return _float_row(source.name, target.name)
    if {source, target} == {types.F32, types.I32}:
        return _value_row(source.name, target.name)
    if source.is_quantized and target is types.F32:
        return None if source.quant is None else _decode_row(source)
    if source.name in _FLOATS and target.is_quantized and is_encodable(target):
        return _encode_row(target) if source is types.F32 else _encode_row_by_scratch(source, target)
    return None


def scratch_size(source, target, nth):
    """Bytes of scratch for nth threads, each with SCRATCH bytes."""
    return SCRATCH * nth if target.is_quantized and source.name in ("F16", "BF16") else 0


@functools.cache
def move_row(blck, size):
    """Helper that moves n elements in blocks of `blck` elements and `size` bytes."""

    @jitted
    def moved(dst, to, src, at, n, work, scratch):
        move(dst, to, src, at, n // blck * size)

    return moved


@functools.cache
def _float_row(source, target):
    load, load_first = vec.loader(source), vec.loader_first(source)
    store, store_first = vec.storer(target), vec.storer_first(target)
    size0, size = memory.SIZES[source], memory.SIZES[target]

    @jitted
    def converted(dst, to, src, at, n, work, scratch):
        for i in range(0, n - 15, 16):
            store(dst, to + size * i, load(src, at + size0 * i))
        rest = n % 16
        if rest:
            i = n - rest
            store_first(dst, to + size * i, load_first(src, at + size0 * i, rest), rest)

    return converted


@functools.cache
def _value_row(source, target):
    value = element(source, target)
    size0, size = memory.SIZES[source], memory.SIZES[target]

    @jitted
    def converted(dst, to, src, at, n, work, scratch):
        for i in range(n):
            value(dst, to + size * i, src, at + size0 * i)

    return converted


@functools.cache
def _decode_row(source):
    dequantize_row = source.quant.dequantize_row

    @jitted
    def decoded(dst, to, src, at, n, work, scratch):
        dequantize_row(src, at, dst, to, n)

    return decoded


@functools.cache
def _encode_row(target):
    quantize_row = target.quant.quantize_row

    @jitted
    def encoded(dst, to, src, at, n, work, scratch):
        quantize_row(src, at, dst, to, n)

    return encoded


@functools.cache
def _encode_row_by_scratch(source, target):
    widen, quantize_row = _float_row(source.name, "F32"), target.quant.quantize_row
    size0, blck, size = source.type_size, target.blck_size, target.type_size

    @jitted
    def encoded(dst, to, src, at, n, work, scratch):
        for i in range(0, n, CHUNK):
            count = CHUNK if i + CHUNK < n else n - i
            widen(work, scratch, src, at + size0 * i, count, work, scratch)
            quantize_row(work, scratch, dst, to + i // blck * size, count)

    return encoded


@functools.cache
def element(source, target):
    """Helper (dst, to, src, at) that converts one element of plain types, given by name; None if there is none."""
    if source == target:
        bits = {1: "I8", 2: "I16", 4: "I32", 8: "I64"}[memory.SIZES[source]].lower()
        load, store = getattr(memory, f"load_{bits}"), getattr(memory, f"store_{bits}")
    elif {source, target} == {"F32", "I32"} or (source in _FLOATS and target in _FLOATS):
        load, store = memory.loader(source), memory.storer(target)
    else:
        return None

    @jitted
    def converted(dst, to, src, at):
        store(dst, to, load(src, at))

    return converted
