"""Counts in texts: 1 token, 2 tokens."""

from __future__ import annotations


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number and its noun, in the singular for 1.

    Args:
        n: the number.
        noun: its singular.
        plural: by default with an s at its end.
    """
    return f"1 {noun}" if n == 1 else f"{n} {plural or noun + 's'}"
