"""A profile as a picture: the time of each op, and the part of it that the machine's limits ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggjit.show.axes import axes

if TYPE_CHECKING:
    from ggjit.profile import Profile

_MOST = 12  # ops with a bar of their own


def profile_plot(p: Profile, ax: Any = None) -> Any:
    """Draw a profile with matplotlib: a bar for each op, for barriers and for Python.

    Dark is the least time that the limits allow, pale what is beyond.

    Args:
        p: the profile.
        ax: matplotlib axes to draw on, by default new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is missing.
    """
    lines = p.ops()
    bars = [(line.op, line.seconds, min(line.least, line.seconds)) for line in lines[:_MOST]]
    if len(lines) > _MOST:
        rest = lines[_MOST:]
        bars.append((f"{len(rest)} more", sum(line.seconds for line in rest), sum(line.least for line in rest)))
    bars += [("barriers", p.barriers, 0.0), ("Python", p.python, 0.0)]
    ax = axes("show.profile", ax, 0.6 + 0.3 * len(bars))
    names, seconds, least = zip(*bars, strict=True)
    at = range(len(bars))
    ax.barh(at, [1e6 * s for s in seconds], color="#b7cfe6", label="time")
    ax.barh(at, [1e6 * s for s in least], color="#2b6ca3", label="least that the limits allow")
    for y, (_, passed, _) in enumerate(bars):
        ax.text(1e6 * passed, y, f" {100 * passed / p.wall:.1f} %", va="center", fontsize=8)
    ax.set_yticks(at, names, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="microseconds of a step", title=p.notes()[0])
    ax.title.set_fontsize(9)
    ax.margins(x=0.1)
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    return ax
