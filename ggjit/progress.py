"""A progress bar of bytes, shown where stderr is a terminal and tqdm is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

__all__ = ["ByteBar"]


class ByteBar:
    """A progress bar that is called with bytes done and bytes in all.

    Args:
        what: goes on.
        wanted: False: it is never shown.
    """

    def __init__(self, what: str, wanted: bool = True) -> None:
        self.what = what
        self.wanted = wanted and sys.stderr is not None and sys.stderr.isatty()
        self.bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show how far it is."""
        if self.bar is None and self.wanted:
            self.wanted = importlib.util.find_spec("tqdm") is not None
            if self.wanted:
                from tqdm import tqdm

                self.bar = tqdm(total=total, desc=self.what, unit="B", unit_scale=True, leave=False)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
