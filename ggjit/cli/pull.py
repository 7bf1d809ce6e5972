"""`ggjit pull NAME`: fetch a model once and print its path."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `pull`."""
    parser.add_argument(
        "name", metavar="NAME", help="smollm2 (the small default model), hf:owner/repo/file.gguf, or a file"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Fetch the model; its path goes to stdout."""
    from ggjit.fetch import pull

    print(pull(args.name, progress=not args.no_progress))
    return 0
