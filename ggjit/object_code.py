"""Object code: the target machine, and the symbols an object needs from outside. LLVM alone, no Numba.

LLVM's linker resolves an unknown symbol to address 0 without an error, and the crash comes when it is called. So
each object's symbol table is read, and names outside a short list are refused.
"""

from __future__ import annotations

import struct
from typing import Any

from ggjit import cpu, elf

# What code may call outside itself: what LLVM makes of memory intrinsics, and scalar functions of the C library.
MEMORY = ("memcpy", "memmove", "memset", "memcmp")
_MATHS = """
    sin cos tan asin acos atan atan2 sinh cosh tanh exp exp2 expm1 log log2 log10 log1p pow fmod erf erfc cbrt hypot
    floor ceil trunc rint round roundeven nearbyint fma ldexp
"""
MATHS = tuple(name + suffix for name in _MATHS.split() for suffix in ("", "f"))
ALLOWED = frozenset(MEMORY + MATHS)


def target_machine(opt: int = 3) -> Any:
    """A new LLVM target machine for the CPU that code is compiled for (an engine takes ownership of its own)."""
    import llvmlite.binding as llvm

    if cpu.triple() == llvm.get_process_triple():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    name, features = cpu.target()
    return llvm.Target.from_triple(cpu.triple()).create_target_machine(
        cpu=name, features=features, opt=opt, reloc="static" if cpu.cpu_level() != "neon" else "default",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip


def undefined_symbols(code: bytes) -> list[str]:
    """Return the names that an object file needs from outside.

    ELF64 (LLVM's JIT makes it on Linux and on Windows) and Mach-O 64.

    Raises:
        ValueError: the bytes are neither.
    """
    try:
        if code.startswith(elf.MAGIC):
            return elf.ElfObject(code).undefined()
        if code[:4] == b"\xcf\xfa\xed\xfe":
            return _undefined_macho(code)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"object code: damaged symbol table ({error})") from error
    raise ValueError(f"object code: must be ELF64 or Mach-O 64, got {code[:5]!r}")


def _undefined_macho(code: bytes) -> list[str]:
    (count,) = struct.unpack_from("<I", code, 16)
    at, names = 32, []
    for _ in range(count):
        command, size = struct.unpack_from("<II", code, at)
        if command == 2:  # LC_SYMTAB
            symbols, n, strings = struct.unpack_from("<III", code, at + 8)
            for entry in range(symbols, symbols + 16 * n, 16):
                name, kind = struct.unpack_from("<IB", code, entry)
                if kind & 0xE0 == 0 and kind & 0x0E == 0 and kind & 1:  # no debug symbol, undefined, external
                    names.append(code[strings + name : code.index(0, strings + name)].decode().removeprefix("_"))
        at += size
    return names


def check_symbols(code: bytes, what: str) -> None:
    """Refuse code that needs anything but memory and maths functions of the C library.

    Raises:
        ValueError: it does; the text names the symbols.
    """
    bad = sorted(set(undefined_symbols(code)) - ALLOWED)
    if bad:
        hint = ""
        if any(name.startswith("__svml") for name in bad):
            hint = "; import ggjit before numba, or set NUMBA_DISABLE_INTEL_SVML=1"
        elif any(name.startswith("NRT_") for name in bad):
            hint = "; kernels must not allocate"
        raise ValueError(f"{what}: compiled code may call only memory and maths functions, got {', '.join(bad)}{hint}")
