"""Axes of matplotlib for the pictures, which is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ggjit.extras import how_to_install


def pyplot(where: str) -> Any:
    """`matplotlib.pyplot`.

    Raises:
        ImportError: matplotlib is missing; the text begins with `where`.
    """
    try:
        import matplotlib.pyplot
    except ModuleNotFoundError as error:
        text = f"{where}: matplotlib must be installed, got none; {how_to_install('matplotlib')}"
        raise ModuleNotFoundError(text, name=error.name) from None
    return matplotlib.pyplot


def axes(where: str, ax: Any, height: float) -> Any:
    """The axes that are given, else new ones, 9 inches wide.

    Raises:
        ImportError: as for `pyplot`, also where axes are given.
    """
    plt = pyplot(where)
    return plt.subplots(figsize=(9, height), layout="constrained")[1] if ax is None else ax


def check_picture(where: str, path: str) -> None:
    """Check that a picture can be written to a file, before the work that it shows is done.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib writes no such files.
        OSError: the file cannot be made there.
    """
    from ggjit.cli import check_output

    pyplot(where)
    from matplotlib.backend_bases import FigureCanvasBase

    known, kind = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix.removeprefix(".").lower()
    if kind not in known:
        raise ValueError(f"{where}: a picture's name must end with one of .{', .'.join(sorted(known))}, got {path!r}")
    check_output(path)
