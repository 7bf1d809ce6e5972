"""Rows of a matrix in a file, read one by one as they are wanted.

A row of an embedding has a few hundred bytes. Read through a mapping it brings in what the system has around it, up to
2 MiB; so a conversation would soon hold the whole matrix.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

__all__ = ["FileRows"]


class FileRows:
    """Rows of one matrix.

    Args:
        path: the file; it stays open as long as this object lives.
        offset: of the first row.
        row_nbytes: bytes of a row.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, offset: int, row_nbytes: int) -> None:
        self.path, self.offset, self.row_nbytes = path, offset, row_nbytes
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._fd)

    def read(self, ids: Iterable[int], out: Iterable[memoryview]) -> None:
        """Read rows.

        Args:
            ids: their numbers.
            out: `row_nbytes` bytes for each.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        for row, id in zip(out, ids, strict=True):
            n = _read_at(self._fd, (row,), self.offset + id * self.row_nbytes)
            if n != self.row_nbytes:
                raise OSError(f"{self.path}: row {id} must have {self.row_nbytes} bytes, got {n}")


def _seek_and_read(fd: int, out: tuple[memoryview], offset: int) -> int:
    """os.preadv where the system has none. A forked child shares the file's position, so it is the second choice."""
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(out[0]))
    out[0][: len(data)] = data
    return len(data)


_read_at = getattr(os, "preadv", _seek_and_read)
