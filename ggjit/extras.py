"""Packages that only parts of ggjit need, and the extras that bring them."""

from __future__ import annotations

__all__ = ["EXTRAS", "how_to_install"]

# module that an optional part imports -> the extra that brings it
EXTRAS = {
    "tokenizers": "llm",
    "jinja2": "llm",
    "tqdm": "llm",
    "huggingface_hub": "hub",
    "matplotlib": "show",
    "graphviz": "show",
}


def how_to_install(module: str) -> str | None:
    """The command that installs what a module belongs to; None if no extra brings it."""
    extra = EXTRAS.get(module.partition(".")[0])
    return None if extra is None else f"pip install -e '.[{extra}]' in a clone of ggjit"
