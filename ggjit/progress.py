"""Progress bars, shown where stderr is a terminal and tqdm is installed."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

__all__ = ["ByteBar", "bar_class"]


@functools.cache
def bar_class() -> Any:
    """tqdm's bar without the thread that watches over slow ones; None if tqdm is not installed.

    Beside a thread of somebody else's kernels are not compiled in several processes (`ggjit.parallel_compile`).
    """
    if importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0})


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
            self.wanted = bar_class() is not None
            if self.wanted:
                self.bar = bar_class()(total=total, desc=self.what, unit="B", unit_scale=True, leave=False)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
