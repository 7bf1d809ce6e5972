"""`ggjit inspect FILE`: what a GGUF file holds. Arrays are summed up and long texts cut unless JSON is asked for.

With `--memory` it tells instead how much memory the model and a context will take (`ggjit.cli.inspect_memory`).
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from ggjit.cli import inspect_memory
from ggjit.counts import counted
from ggjit.gguf import GgufFile, StringArray

_SHOWN = 4  # elements of an array
_WIDTH = 96  # characters of a text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `inspect`."""
    parser.add_argument(
        "file", metavar="FILE", help="a GGUF file, the first part of a split one, or a name that `ggjit pull` knows"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with whole texts and arrays")
    inspect_memory.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print metadata, tensors and totals by type."""
    from ggjit.fetch import MODELS, pull

    is_name = args.file.startswith("hf:") or args.file.lower() in MODELS
    path = pull(args.file) if is_name else args.file
    if args.memory:
        return inspect_memory.run(args, str(path))
    with GgufFile(path) as file:
        if args.json:
            print(json.dumps(collect(file), indent=1, allow_nan=False))
        else:
            print("\n".join(_lines(file)))
    return 0


def totals(file: GgufFile) -> dict[str, dict[str, int]]:
    """Tensors, values and bytes by type, the type with most bytes first."""
    found: dict[str, dict[str, int]] = {}
    for info in file.tensors.values():
        one = found.setdefault(info.type_name, {"tensors": 0, "values": 0, "bytes": 0})
        one["tensors"] += 1
        one["values"] += info.nelements
        one["bytes"] += info.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it; bytes that are no UTF-8 become U+FFFD, numbers that JSON lacks a text."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value.tolist()]
    if isinstance(value, (StringArray, list)):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def collect(file: GgufFile) -> dict[str, Any]:
    """Everything that the file tells about itself, ready for JSON."""
    return {
        "path": file.path,
        "files": [mapping.path for mapping in file.mappings],
        "nbytes": file.nbytes,
        "version": file.version,
        "alignment": file.alignment,
        "data_offset": file.data_offset,
        "metadata": {key: {"type": _type_name(file, key), "value": _plain(value)} for key, value in file.kv.items()},
        "tensors": [
            {
                "name": info.name,
                "type": info.type_name,
                "type_id": info.type_id,
                "ne": list(info.ne[: info.n_dims]),
                "file": info.file,
                "offset": info.offset,
                "nbytes": info.nbytes,
            }
            for info in file.tensors.values()
        ],
        "totals": totals(file),
    }


def _type_name(file: GgufFile, key: str) -> str:
    element = file.kv.element_type(key)
    return file.kv.value_type(key).name if element is None else f"ARRAY of {element.name}"


def _text(value: str, width: int = _WIDTH) -> str:
    text = repr(_plain(value))
    return text if len(text) <= width else f"{text[: width - 20]}... {len(value)} characters"


def _name(text: str) -> str:
    """A key or name as it is, unless printing it could do more than that."""
    return text if text.isprintable() else repr(text)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (np.ndarray, StringArray, list)):
        shown = [_text(one, 24) if isinstance(one, str) else _value(one) for one in value[:_SHOWN]]
        return f"[{', '.join(shown)}{', ...' if len(value) > _SHOWN else ''}] ({len(value)})"
    return f"{value:.9g}" if isinstance(value, (float, np.floating)) else str(value)


def table(rows: list[list[str]], sides: str) -> list[str]:
    """Columns as wide as needed; `sides` tells by r or l how each is set."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    set_ = [str.rjust if side == "r" else str.ljust for side in sides]
    return ["  ".join(place(cell, width) for place, cell, width in zip(set_, row, widths)).rstrip() for row in rows]


def _lines(file: GgufFile) -> list[str]:
    parts = f" in {len(file.mappings)} files" if len(file.mappings) > 1 else ""
    lines = [f"{file.path}: GGUF version {file.version}, {file.nbytes:,} bytes{parts}, alignment {file.alignment}"]
    lines += ["", f"{len(file.kv)} metadata"]
    rows = [["key", "type", "value"]]
    rows += [[_name(key), _type_name(file, key), _value(value)] for key, value in file.kv.items()]
    lines += table(rows, "lll")
    lines += ["", counted(len(file.tensors), "tensor")]
    rows = [["name", "type", "ne", "offset", "bytes"]]
    for info in file.tensors.values():
        ne = " x ".join(map(str, info.ne[: info.n_dims]))
        rows.append([_name(info.name), info.type_name, ne, f"{info.offset:,}", f"{info.nbytes:,}"])
    lines += table(rows, "lllrr")
    rows = [["type", "tensors", "values", "bytes", "bits a value"]]
    for name, one in totals(file).items():
        bits = f"{8 * one['bytes'] / one['values']:.3f}"
        rows.append([name, str(one["tensors"]), f"{one['values']:,}", f"{one['bytes']:,}", bits])
    return [*lines, "", "totals", *table(rows, "lrrrr")]
