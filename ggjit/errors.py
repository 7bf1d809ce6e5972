"""The exceptions of ggjit that are more than a ValueError, TypeError or NotImplementedError."""

from __future__ import annotations

import os


class OutOfArena(MemoryError):
    """A context's arena has no room for the next object."""


class GgufError(ValueError):
    """A GGUF file that does not hold what the format demands.

    Args:
        path: the file.
        offset: byte offset at which the fault was found.
        message: what must hold and what was given.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int, message: str) -> None:
        self.path, self.offset, self.message = os.fspath(path), int(offset), message
        super().__init__(f"{self.path}, byte {self.offset}: {message}")

    def __reduce__(self) -> tuple[type[GgufError], tuple[str, int, str]]:
        return GgufError, (self.path, self.offset, self.message)
