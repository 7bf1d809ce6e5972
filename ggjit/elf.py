"""ELF64 object files: what LLVM's JIT compiles to on Linux and Windows, read, and on Linux put into memory.

Loading them here saves LLVM at a start at which nothing is compiled: its library alone takes 25 ms and 11 MiB. It is
simple because the code model is the large one: code refers to constants and functions by absolute addresses of 64 bits.

Source: System V ABI, chapters "Object Files" and "Relocation"; x86-64 supplement, "Relocation Types".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_X86_64 = 62
_SYMTAB, _RELA, _NOBITS, _UNWIND = 2, 4, 8, 0x70000001  # kinds of sections
_WRITE, _ALLOC, _EXECUTE, _TLS = 1, 2, 4, 0x400  # flags of sections
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00  # numbers that stand for no section
_R_X86_64_64 = 1  # symbol + addend
_GLOBAL = 1
_LINE = 64  # code begins at a cache line: loops lie as in any other process


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int
    entry_nbytes: int


class _Symbol(NamedTuple):
    name: str
    binding: int
    section: int
    value: int


class ElfObject:
    """An object file's sections and symbols.

    Args:
        code: its bytes.

    Raises:
        ValueError: they are no sound ELF64 object file.
    """

    def __init__(self, code: bytes) -> None:
        self.code = code
        try:
            (self.machine,) = struct.unpack_from("<H", code, 18)
            (table,) = struct.unpack_from("<Q", code, 40)
            size, count = struct.unpack_from("<HH", code, 58)
            self.sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", code, table + i * size)) for i in range(count)]
            self.symbols = list(self._symbols())
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"object code: damaged symbol table ({error})") from error

    def _symbols(self) -> Iterator[_Symbol]:
        for s in self.sections:
            if s.kind == _SYMTAB:
                names = self.sections[s.link].offset
                for at in range(s.offset, s.offset + s.nbytes, 24):
                    name, info, _, section, value = struct.unpack_from("<IBBHQ", self.code, at)
                    end = self.code.index(0, names + name)
                    yield _Symbol(self.code[names + name : end].decode(), info >> 4, section, value)

    def undefined(self) -> list[str]:
        """Names that it needs from outside."""
        return [s.name for s in self.symbols if s.section == _UNDEFINED and s.name]

    def placed(self) -> list[int]:
        """Numbers of the sections that belong into memory; tables for unwinding do not, since no kernel raises."""
        wanted = enumerate(self.sections)
        return [i for i, s in wanted if s.flags & _ALLOC and s.nbytes and s.kind != _UNWIND]

    def relocations(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Section, offset in it, kind, symbol's number and addend of each place to fill in."""
        placed = set(self.placed())
        for s in self.sections:
            if s.kind == _RELA and s.info in placed:
                for at in range(s.offset, s.offset + s.nbytes, 24):
                    offset, info, addend = struct.unpack_from("<QQq", self.code, at)
                    yield s.info, offset, info & 0xFFFFFFFF, info >> 32, addend


def loadable(objects: Mapping[str, bytes]) -> dict[str, ElfObject] | None:
    """The object files as `load` takes them; None if one asks for what it does not know.

    Raises:
        ValueError: one is damaged.
    """
    if sys.platform != "linux" or not all(code.startswith(MAGIC) for code in objects.values()):
        return None
    elves = {entry: ElfObject(code) for entry, code in objects.items()}
    return elves if all(map(_is_known, elves.values())) else None


def _is_known(elf: ElfObject) -> bool:
    return (
        elf.machine == _X86_64
        and not any(elf.sections[i].flags & (_WRITE | _TLS) for i in elf.placed())
        and not any(s.section >= _RESERVED and s.section != _ABSOLUTE for s in elf.symbols)
        and all(kind == _R_X86_64_64 for _, _, kind, _, _ in elf.relocations())
    )


def load(elves: Mapping[str, ElfObject], outside: Callable[[str], int]) -> dict[str, int]:
    """Put object files into memory, code first and constants on pages of their own, for as long as the process lives.

    Args:
        elves: by the names of their entries, as `loadable` gives them.
        outside: address of a function that is none of theirs.

    Returns:
        Addresses of the entries.

    Raises:
        OSError: the system gives no such memory.
        ValueError: an object does not define its entry.
    """
    everything = [(entry, i) for entry, elf in elves.items() for i in elf.placed()]
    places: dict[tuple[str, int], int] = {}
    end = n_code = 0
    for executable in (True, False):
        for entry, i in everything:
            s = elves[entry].sections[i]
            if bool(s.flags & _EXECUTE) == executable:
                end += -end % max(s.alignment, _LINE)
                places[entry, i] = end
                end += s.nbytes
        if executable:
            n_code = end = end + -end % mmap.PAGESIZE
    image, base = bytearray(end), _new_memory(end)
    for (entry, i), at in places.items():
        s = elves[entry].sections[i]
        if s.kind != _NOBITS:
            image[at : at + s.nbytes] = elves[entry].code[s.offset : s.offset + s.nbytes]
    for entry, elf in elves.items():
        addresses = [_address(entry, s, places, base, outside) for s in elf.symbols]
        for i, offset, _, symbol, addend in elf.relocations():
            struct.pack_into("<Q", image, places[entry, i] + offset, addresses[symbol] + addend & (1 << 64) - 1)
    _fill(base, bytes(image), n_code)
    return {entry: _entry(entry, elf, places, base) for entry, elf in elves.items()}


def _address(
    entry: str, symbol: _Symbol, places: Mapping[tuple[str, int], int], base: int, outside: Callable[[str], int]
) -> int:
    if symbol.section == _UNDEFINED:
        return outside(symbol.name) if symbol.name else 0
    if symbol.section == _ABSOLUTE:
        return symbol.value
    return base + places.get((entry, symbol.section), 0) + symbol.value  # of sections left away nobody asks


def _entry(entry: str, elf: ElfObject, places: Mapping[tuple[str, int], int], base: int) -> int:
    for s in elf.symbols:
        if s.name == entry and s.binding == _GLOBAL and (entry, s.section) in places:
            return base + places[entry, s.section] + s.value
    raise ValueError(f"link: objects must define their entries, got none for {entry!r}")


# --- memory -----------------------------------------------------------------------------------------------------------


def _new_memory(nbytes: int) -> int:
    """Pages that nobody gives back: the threads of a pool wait in compiled code until the process has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64
    rights, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, nbytes, rights, kind, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _failed(nbytes)
    return int(address)


def _fill(base: int, image: bytes, n_code: int) -> None:
    """Copy the image there; from then on it is read or executed alone."""
    ctypes.memmove(base, image, len(image))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    parts = (0, n_code, mmap.PROT_READ | mmap.PROT_EXEC), (n_code, len(image), mmap.PROT_READ)
    for first, end, rights in parts:
        if end > first and libc.mprotect(base + first, end - first, rights):
            raise _failed(len(image))


def _failed(nbytes: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"link: the system must give {nbytes} bytes for code, got {os.strerror(number)!r}")
