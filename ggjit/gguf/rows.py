"""Rows of a matrix in a file, read one by one as they are wanted.

A row of an embedding has a few hundred bytes. Read through a mapping it brings in what the system has around it, up to
2 MiB; so a conversation would soon hold the whole matrix.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Iterable

__all__ = ["FileRows", "pread_address"]


class FileRows:
    """Rows of one matrix.

    Args:
        path: the file; it stays open as long as this object lives.
        offset: of the first row.
        row_nbytes: bytes of a row.

    Attributes:
        file: the descriptor.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, offset: int, row_nbytes: int) -> None:
        self.path, self.offset, self.row_nbytes = path, offset, row_nbytes
        self.file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.file)

    def read(self, ids: Iterable[int], out: Iterable[memoryview]) -> None:
        """Read rows.

        Args:
            ids: their numbers.
            out: `row_nbytes` bytes for each.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        for row, id in zip(out, ids, strict=True):
            data = self._at(self.offset + id * self.row_nbytes)
            if len(data) != self.row_nbytes:
                raise OSError(f"{self.path}: row {id} must have {self.row_nbytes} bytes, got {len(data)}")
            row[:] = data

    def _at(self, offset: int) -> bytes:
        if hasattr(os, "pread"):  # a forked child shares the file's position
            return os.pread(self.file, self.row_nbytes, offset)
        os.lseek(self.file, offset, os.SEEK_SET)
        return os.read(self.file, self.row_nbytes)


@functools.cache
def pread_address() -> int:
    """Address of the C library's pread, 0 if the system has none."""
    return ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value or 0 if hasattr(os, "pread") else 0
