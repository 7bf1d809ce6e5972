"""What all drawings are made of: boxes, lines and words as SVG text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

PALETTE = ("#dbe9f6", "#fde0c5", "#d9ead3", "#ead9f2", "#f6d5d5", "#fff3c4")
INK, GREY, PALE = "#444", "#999", "#f2f2f2"
LEGEND_HEIGHT = 24


class Svg(str):
    """SVG text that a notebook shows."""

    def __repr__(self) -> str:
        return f"Svg({len(self)} characters)"

    def _repr_svg_(self) -> str:
        return str(self)


def document(width: float, height: float, parts: Iterable[str]) -> Svg:
    """A drawing of some size on white; its lines may end with `marker-end="url(#a)"`, an arrow's head."""
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif"><defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto"><path d="M0,1 L8,4 L0,7 z" '
        'fill="#666"/></marker></defs>'
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>{"".join(parts)}</svg>'
    )


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, the same for the same names."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(sorted(set(names)))}


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "white", more: str = "") -> str:
    """A filled rectangle; `more` are attributes."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"'
        f"{' ' if more else ''}{more}/>"
    )


def text(x: float, y: float, words: str, size: float = 11, anchor: str = "start", fill: str = INK) -> str:
    """Words at a base line; the anchor is "start", "middle" or "end"."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, stroke: str = GREY, more: str = "") -> str:
    """A straight line; `more` are attributes."""
    return f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="{stroke}" fill="none"{" " if more else ""}{more}/>'


def legend(x: float, y: float, colours: Mapping[str, str], step: float = 110) -> str:
    """Names beside their colours, side by side."""
    return "".join(
        box(x + step * i, y, 12, 12, colour, colour) + text(x + step * i + 18, y + 10, name)
        for i, (name, colour) in enumerate(colours.items())
    )
