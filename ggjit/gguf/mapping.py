"""A file mapped read-only: its bytes as a NumPy array, their address, and what to tell the kernel about pages.

Pages are read on first touch. Whoever has consumed a range (a repacked weight) gives its pages back with
`advise_dontneed`, so that a loader's peak memory is what it built and not that plus the file.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mapping"]


class Mapping:
    """A whole file mapped read-only.

    The mapping lives as long as the last array made from it, so a view never points to freed memory.

    Args:
        path: the file.

    Attributes:
        path: the file.
        size: its bytes.
        data: uint8 [size], read-only, on the mapping; after `detach` a copy of the first bytes.
        address: of the first byte (0 for an empty file).

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # An empty file cannot be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        self.data: NDArray[np.uint8] = np.frombuffer(self._map or b"", np.uint8)
        self.address = self.data.ctypes.data if self.size else 0

    def _advise(self, advice: str, first: int, last: int) -> None:
        value = getattr(mmap, advice, None)
        if self._map is not None and value is not None and last > first:
            self._map.madvise(value, first, last - first)

    def advise_dontneed(self, offset: int, nbytes: int) -> None:
        """Give the pages that lie wholly inside a range back; touching them again reads the file again.

        Args:
            offset: of the range in the file.
            nbytes: of the range.
        """
        page = mmap.PAGESIZE
        end = offset + nbytes
        self._advise("MADV_DONTNEED", -(-offset // page) * page, self.size if end >= self.size else end // page * page)

    def advise_willneed(self, offset: int, nbytes: int) -> None:
        """Ask for a range to be read ahead.

        Args:
            offset: of the range in the file.
            nbytes: of the range.
        """
        page = mmap.PAGESIZE
        self._advise("MADV_WILLNEED", offset // page * page, min(offset + nbytes, self.size))

    def detach(self, nbytes: int) -> None:
        """Copy the first bytes, which `data` is from here on, and let the mapping go.

        Args:
            nbytes: to keep.
        """
        self.data = self.data[:nbytes].copy()
        self.data.setflags(write=False)
        self.address = self.data.ctypes.data if nbytes else 0
        self._map = None

    def close(self) -> None:
        """Drop the mapping; it goes when the last array on it goes. Its bytes cannot be asked for any more."""
        self._map = None
        for name in ("data", "address"):
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "address"):
            raise ValueError(f"Mapping: the file must be open, got a closed one ({self.path})")
        raise AttributeError(f"'Mapping' object has no attribute {name!r}")

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
