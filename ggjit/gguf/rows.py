"""Rows of a matrix in a file, read one by one as they are wanted.

A row of an embedding has a few hundred bytes. Read through a mapping it brings in what the system has around it, up to
2 MiB; so a conversation would soon hold the whole matrix.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

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

    def read(self, ids: Iterable[int], out: NDArray[np.uint8]) -> None:
        """Read rows.

        Args:
            ids: their numbers.
            out: [n, row_nbytes].

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        for row, id in zip(out, ids, strict=True):
            data = self._at(self.offset + id * self.row_nbytes)
            if len(data) != self.row_nbytes:
                raise OSError(f"{self.path}: row {id} must have {self.row_nbytes} bytes, got {len(data)}")
            row[:] = np.frombuffer(data, np.uint8)

    def _at(self, offset: int) -> bytes:
        if hasattr(os, "pread"):  # a forked child shares the file's position
            return os.pread(self._fd, self.row_nbytes, offset)
        os.lseek(self._fd, offset, os.SEEK_SET)
        return os.read(self._fd, self.row_nbytes)
