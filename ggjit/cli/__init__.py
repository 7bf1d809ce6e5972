"""The command line: `python -m ggjit COMMAND`, also installed as `ggjit`.

One module a command, named as the command, with

    add_arguments(parser)     declare the command's arguments
    run(args)                 do it; return the exit status (None: 0)

Only the module of the command that was asked for is imported, so `ggjit --help` stays quick.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

__all__ = [
    "COMMANDS",
    "at_least",
    "cache_folders",
    "check_output",
    "main",
    "missing_package",
    "numbers",
    "read_text",
    "tell_of_long",
    "warn",
    "warn_of_unfound",
]

COMMANDS = {
    "run": "generate text with a model, or chat with it",
    "pull": "fetch a model once and print its path",
    "inspect": "show a GGUF file: metadata and tensors",
    "quantize": "make a model file smaller, by llama.cpp's mixes of types",
    "imatrix": "make an importance matrix for the quantization of a model",
    "perplexity": "measure how well a model predicts a text",
    "bench": "measure a model, single ops, or a model beside llama.cpp, with the machine's limits",
    "profile": "show where the time of prefill or decode goes, by op and kernel",
    "warmup": "compile the kernels that a model needs",
    "info": "show versions, CPU, threads, caches and, on request, the machine's limits",
}

_LONG = 1 << 22  # characters: seconds

# What users and files can cause; anything else is a bug and shows its traceback.
EXPECTED = (ValueError, NotImplementedError, OSError, MemoryError, IndexError)


def at_least(low: int, special: int | None = None, meaning: str = "") -> Callable[[str], int]:
    """A type of arguments: a whole number not below `low`, or the one of a special meaning."""
    other = "" if special is None else f", or {special} for {meaning}"

    def number(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if value >= low or value == special:
                return value
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}{other}, got {text!r}")

    return number


def numbers(low: int) -> Callable[[str], list[int]]:
    """A type of arguments: whole numbers not below `low`, separated by commas."""
    number = at_least(low)
    return lambda text: [number(word) for word in text.split(",")]


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install where a package of an extra is missing; None if another one is."""
    from ggjit.extras import how_to_install

    how = how_to_install(error.name or "")
    return None if how is None else f"needs the package {error.name}: {how}"


def check_output(path: str) -> None:
    """Check that a file can be made, before the work whose result goes there.

    Raises:
        OSError: the folder is not there, the file is one, or it must not be written.
    """
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def read_text(path: str) -> str:
    """A text file's content, or that of stdin for `-`; what ends the last line is no part of it."""
    if path == "-":
        return sys.stdin.read().removesuffix("\n")
    with open(path, encoding="utf-8", errors="surrogateescape") as file:  # tokens exist for all bytes
        return file.read().removesuffix("\n")


def tell_of_long(text: str) -> None:
    """Say on a terminal that a long text is tokenized, which takes a while."""
    if len(text) > _LONG and sys.stderr.isatty():
        print(f"tokenizing a text of {len(text):,} characters ...", file=sys.stderr)


def warn(text: str) -> None:
    """Say on stderr what may not be meant."""
    print(f"ggjit: warning: {text}", file=sys.stderr)


def cache_folders() -> tuple[Path | None, Path | None]:
    """The folder of compiled kernels that is wanted, and the one that is written to."""
    from ggjit import fetch, kernel_cache

    models = fetch.models_folder()  # lies in it
    return None if models is None else models.parent.absolute(), kernel_cache.folder()


def _warn_of_cache() -> None:
    """Warn where the folder that was asked for cannot be made; one that may only be read serves what it holds."""
    if not os.environ.get("GGJIT_CACHE_DIR"):
        return
    wanted, used = cache_folders()
    if used != wanted and not (wanted is not None and wanted.is_dir()):
        instead = f"kernels go to {used}" if used else "kernels are not kept"
        warn(f"GGJIT_CACHE_DIR: must be a folder that can be written, got {wanted}; {instead}")


def _warn_of_threads(args: argparse.Namespace) -> None:
    """Warn of more threads than there are CPUs for them."""
    asked = getattr(args, "threads", None) or 0
    n = max(asked) if isinstance(asked, list) else asked
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n > n_cpus:
        warn(f"--threads: each thread should have a CPU of its own, got {n} for {n_cpus}")


def warn_of_unfound(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Warn of regular expressions that are found in no tensor's name."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            warn(
                f"{option}: a regular expression must be found in the name of a tensor, got {pattern!r}, found in none"
            )


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ggjit", description="ggml in Python, compiled by Numba for this machine")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(f"ggjit.cli.{name}").add_arguments(sub)
    return parser


def _line(error: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _open_streams() -> None:
    """Let no text stop a command: closed streams become empty ones, bytes and characters go through somehow."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDWR), fd)  # else the next file that is opened gets the number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="surrogateescape" if utf8 or stream is sys.stdin else "backslashreplace")


def _fail(text: str) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    print(f"ggjit: error: {text}", file=sys.stderr)
    return 1


def _run(argv: Sequence[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    parser = _parser(command)
    args = parser.parse_args(argv)
    if args.version:
        from ggjit import __version__

        print(f"ggjit {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    if args.command not in ("info", "inspect"):  # which show the folder, or compute nothing with a model
        _warn_of_cache()
        _warn_of_threads(args)
    status = importlib.import_module(f"ggjit.cli.{args.command}").run(args) or 0
    sys.stdout.flush()
    return int(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Errors that users or files cause print one line and give 1 (a traceback with GGJIT_DEBUG=1); Ctrl-C gives 130.

    Args:
        argv: the words after the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _open_streams()
        return _run(words)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `ggjit inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        hint = missing_package(error)
        if hint is None or os.environ.get("GGJIT_DEBUG") == "1":
            raise
        return _fail(f"{words[0]} {hint}")
    except EXPECTED as error:
        if os.environ.get("GGJIT_DEBUG") == "1":
            raise
        return _fail(_line(error))
