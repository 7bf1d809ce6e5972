"""Memory and functions by their addresses, for compiled functions of plain numbers (`ggjit.jit.words`).

What `ggjit.ops.lib.memory` and `vec` read and write are buffers; here one is made of an address.
"""

from __future__ import annotations

from typing import Any

from ggjit.jit import intrinsic, lazy_module

ir: Any = lazy_module("llvmlite.ir")
types: Any = lazy_module("numba.core.types")
arrayobj: Any = lazy_module("numba.np.arrayobj")


@intrinsic
def at(typingctx, address):  # type: ignore[no-untyped-def]
    """The memory from an address on, as a buffer without an end."""
    buffer_type = types.Array(types.uint8, 1, "C")

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        i64, one = ir.IntType(64), ir.IntType(64)(1)
        array = arrayobj.make_array(buffer_type)(context, b)
        data = b.inttoptr(args[0], ir.IntType(8).as_pointer())
        arrayobj.populate_array(array, data, [i64((1 << 63) - 1)], [one], one, None)
        return array._getvalue()

    return buffer_type(types.int64), codegen


@intrinsic
def call_system(typingctx, function, a, c, d, e):  # type: ignore[no-untyped-def]
    """Call a function of the C library, given by its address, with four integers; returns its integer."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        i64 = ir.IntType(64)
        return b.call(b.inttoptr(args[0], ir.FunctionType(i64, [i64] * 4).as_pointer()), args[1:])

    return types.int64(*[types.int64] * 5), codegen
