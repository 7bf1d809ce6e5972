"""Asking for memory that the CPU does not foresee: the next row while this one is worked on, rows far apart.

An address may lie outside of everything; then nothing happens.
"""

from ggjit.jit import intrinsic, jitted, lazy_module
from ggjit.ops.lib.memory import pointer

ir = lazy_module("llvmlite.ir")
types = lazy_module("numba.core.types")
cgutils = lazy_module("numba.core.cgutils")

LINE = 64


def _make_prefetch(for_writing):
    @intrinsic
    def prefetch(typingctx, buffer, offset):
        """Ask for the line at a byte offset."""

        def codegen(context, b, signature, args):
            at, i32 = pointer(context, b, signature.args[0], args[0], args[1], ir.IntType(8)), ir.IntType(32)
            operands = [at, i32(for_writing), i32(3), i32(1)]  # to all caches, of data
            function = ir.FunctionType(ir.VoidType(), [x.type for x in operands])
            b.call(cgutils.get_or_insert_function(b.module, function, "llvm.prefetch.p0"), operands)
            return context.get_dummy_value()

        return types.void(buffer, types.int64), codegen

    return prefetch


line, line_to_write = _make_prefetch(0), _make_prefetch(1)


@jitted
def span(buffer, at, nbytes):
    """Ask for all lines of some bytes."""
    for i in range(0, nbytes, LINE):
        line(buffer, at + i)
