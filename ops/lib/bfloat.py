"""LLVM's type bfloat, which llvmlite has not. Imported before anything compiles that names it."""

from llvmlite import ir


class _BFloat(ir.types._BaseFloatType):
    """Prints itself; bf16 values are i16 elsewhere."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self):
        return "bfloat"


_BFloat._create_instance()
BF16 = _BFloat()
