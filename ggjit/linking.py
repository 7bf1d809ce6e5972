"""Linking: object code in memory, with the addresses of what it calls in the C library."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Mapping
from typing import Any

from ggjit import elf, object_code


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


def link(objects: Mapping[str, bytes]) -> dict[str, int]:
    """Put objects (entry name -> code) into memory and return the entries' addresses.

    Raises:
        OSError: the system gives no memory for code.
        ValueError: an object does not define its entry, or needs a function that the C library does not have.
    """
    elves = elf.loadable(objects)
    return _link_by_llvm(objects) if elves is None else elf.load(elves, c_address)


_engines: list[Any] = []  # linked code lives as long as the process


def _link_by_llvm(objects: Mapping[str, bytes]) -> dict[str, int]:
    """The same by LLVM's linker, for systems other than Linux on x86-64."""
    import llvmlite.binding as llvm

    for code in objects.values():
        for name in object_code.undefined_symbols(code):
            llvm.add_symbol(name, c_address(name))
    module = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"')
    engine = llvm.create_mcjit_compiler(module, object_code.target_machine())
    for code in objects.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in objects}
    missing = [name for name, address in addresses.items() if not address]
    if missing:
        raise ValueError(f"link: objects must define their entries, got none for {missing}")
    _engines.append(engine)
    return addresses
