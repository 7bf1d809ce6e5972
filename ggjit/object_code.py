"""Object code: the target machine, the symbols an object needs from outside, linking. LLVM alone, no Numba.

llvmlite's linker resolves an unknown symbol to address 0 without an error, and the crash comes when it is called. So
each object's symbol table is read, names outside a short list are refused, and those of the list are given to
the linker by address.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
from collections.abc import Mapping
from typing import Any

from ggjit import cpu

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
        if code[:5] == b"\x7fELF\x02":
            return _undefined_elf(code)
        if code[:4] == b"\xcf\xfa\xed\xfe":
            return _undefined_macho(code)
    except (struct.error, IndexError) as error:
        raise ValueError(f"object code: damaged symbol table ({error})") from error
    raise ValueError(f"object code: must be ELF64 or Mach-O 64, got {code[:5]!r}")


def _name(code: bytes, at: int) -> str:
    end = code.find(b"\0", at)
    return code[at:end].decode()


def _undefined_elf(code: bytes) -> list[str]:
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    names = []
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset + 24, offset + length, 24):  # the first symbol is empty
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0 and code[strings + name]:
                names.append(_name(code, strings + name))
    return names


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
                    names.append(_name(code, strings + name).removeprefix("_"))
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


@functools.cache
def _c_libraries() -> tuple[Any, ...]:
    if sys.platform == "win32":
        return ctypes.CDLL("ucrtbase"), ctypes.CDLL("msvcrt")
    libm: str | None = "libm.so.6"
    if sys.platform != "linux":
        from ctypes.util import find_library

        libm = find_library("m")
    libraries = [ctypes.CDLL(None)]
    with contextlib.suppress(OSError):  # other names (musl): the C library has the functions itself
        libraries.append(ctypes.CDLL(libm))
    return tuple(libraries)


@functools.cache
def c_address(name: str) -> int:
    """Return the address of a function of the C library.

    Raises:
        ValueError: there is none.
    """
    for library in _c_libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    raise ValueError(f"C library: has no function {name!r}")


_engines: list[Any] = []  # linked code lives as long as the process


def link(objects: Mapping[str, bytes]) -> dict[str, int]:
    """Link objects (entry name -> code) in one engine and return the entries' addresses."""
    import llvmlite.binding as llvm

    for code in objects.values():
        for name in undefined_symbols(code):
            llvm.add_symbol(name, c_address(name))
    module = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"')
    engine = llvm.create_mcjit_compiler(module, target_machine())
    for code in objects.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in objects}
    missing = [name for name, address in addresses.items() if not address]
    if missing:
        raise ValueError(f"link: objects must define their entries, got none for {missing}")
    _engines.append(engine)
    return addresses
