"""`python -m ggjit.dev COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "check": "run what CI runs: format, lint, types, docs, tests, wheel",
    "docs": "make the pages of docs/ that are not written by hand: ops, types, plans of memory, checklist",
    "compare-ggml": "measure ops beside ggml's own CPU kernels",
    "cross-compile": "machine code of kernels for CPUs that are not at hand (AVX-VNNI, AArch64)",
    "make-model": "write a random llama of about 0.5 B parameters, for sizes and speeds",
    "peak-memory": "measure a model's resident memory beside llama.cpp's",
    "reference": "run reference cases through builder, plan and compiled program",
}


def _module(command: str) -> str:
    return f"ggjit.dev.{command.replace('-', '_')}"


def main(argv: list[str]) -> int:
    """Run one developer command and return its exit status."""
    command = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="python -m ggjit.dev")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(_module(name)).add_arguments(sub)
    args = parser.parse_args(argv)
    return int(importlib.import_module(_module(args.command)).run(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
