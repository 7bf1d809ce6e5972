"""Atomic operations for kernels that share work by chunks.

chunk = atomics.fetch_add(work, 0, 1)       # work[0:8] is the step's chunk counter, zeroed by the program
"""

from ggjit.jit import intrinsic, lazy_module
from ggjit.ops.lib.memory import pointer

ir = lazy_module("llvmlite.ir")
types = lazy_module("numba.core.types")


@intrinsic
def fetch_add(typingctx, buffer, offs, value):
    """Add to the int64 at a byte offset of a buffer; returns what it was before."""

    def codegen(context, b, signature, args):
        at = pointer(context, b, signature.args[0], args[0], args[1], ir.IntType(64))
        return b.atomic_rmw("add", at, args[2], "monotonic")

    return types.int64(buffer, types.int64, types.int64), codegen
