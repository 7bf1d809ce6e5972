"""GGUF files, the format of llama.cpp's models: read lazily from a mapping of the file, written as a stream.

Example:
    with gguf.open("model.gguf") as file:
        file.kv["general.architecture"]
        file.tensors["token_embd.weight"].type
        file.data("token_embd.weight")
"""

from __future__ import annotations

import os

from ggjit.errors import GgufError
from ggjit.gguf.mapping import Mapping
from ggjit.gguf.reader import GgufFile, Metadata, TensorInfo, ValueType
from ggjit.gguf.strings import StringArray
from ggjit.gguf.writer import GgufWriter, check_another

__all__ = [
    "GgufError",
    "GgufFile",
    "GgufWriter",
    "Mapping",
    "Metadata",
    "StringArray",
    "TensorInfo",
    "ValueType",
    "check_another",
    "open",
]


def open(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file; see `GgufFile`."""
    return GgufFile(path)
