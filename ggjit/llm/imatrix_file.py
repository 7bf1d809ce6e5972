"""Importance matrices in files: how much the columns of each weight matter, from llama.cpp's tools or `ggjit imatrix`.

The GGUF form holds two tensors for a weight: `<name>.in_sum2`, sums of squared activations, f32 [n, n_mat], and
`<name>.counts`, rows summed, f32 [1, n_mat]; n_mat is the number of experts. The older binary form holds sums that are
already divided.

Source: llama.cpp, tools/imatrix.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, StringArray

__all__ = ["Imatrix", "read_imatrix"]

_MUST_BE = "must be a whole importance matrix (GGUF, or the older .dat)"
SUMS, COUNTS = ".in_sum2", ".counts"


class Imatrix(NamedTuple):
    """An importance matrix.

    Attributes:
        path: of its file.
        values: weight name to f32 [n_mat, n].
        datasets: texts it was made of.
        n_chunks: pieces of text it was made of.
    """

    path: str
    values: dict[str, NDArray[np.float32]]
    datasets: tuple[str, ...]
    n_chunks: int


def read_imatrix(path: str) -> Imatrix:
    """Read an importance matrix of either form.

    Raises:
        GgufError: the file is neither, or has no entries.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    found = _from_gguf(path) if magic == b"GGUF" else _from_binary(path)
    if not found.values:
        raise GgufError(path, 0, f"{_MUST_BE}, got one without entries")
    for name, values in found.values.items():
        if not np.isfinite(values).all():
            raise GgufError(path, 0, f"the importance matrix of {name!r} must be finite")
    return found


def _from_gguf(path: str) -> Imatrix:
    with GgufFile(path) as file:
        if not any(name.endswith(SUMS) for name in file.tensors):
            kind = file.kv.get("general.type", "model")
            raise GgufError(path, 0, f"{_MUST_BE}, got a GGUF file of type {kind!r} without tensors named *{SUMS}")
        values: dict[str, NDArray[np.float32]] = {}
        for name, info in file.tensors.items():
            if not name.endswith(SUMS):
                continue
            counts = file.info(name.removesuffix(SUMS) + COUNTS)
            for one in (info, counts):
                if one.type_name != "F32":
                    raise GgufError(path, one.info_offset, f"type of {one.name!r} must be F32, got {one.type_name}")
            n_mat = info.nelements // info.ne[0]
            if counts.nelements != n_mat:
                message = f"{counts.name!r} must have {n_mat} elements, got {counts.nelements}"
                raise GgufError(path, counts.info_offset, message)
            sums = file.data(name).view(np.float32).reshape(n_mat, info.ne[0])
            n = file.data(counts.name).view(np.float32).reshape(n_mat, 1)
            # Experts that saw nothing count evenly.
            mean = np.divide(sums, n, out=np.ones_like(sums), where=n > 0)
            values[name.removesuffix(SUMS)] = mean
        datasets = file.kv.get("imatrix.datasets", ())
        texts = tuple(datasets) if isinstance(datasets, (StringArray, tuple)) else ()
        return Imatrix(path, values, texts, int(file.kv.get("imatrix.chunk_count", 0)))


def _from_binary(path: str) -> Imatrix:
    data = Path(path).read_bytes()
    values: dict[str, NDArray[np.float32]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        if at + 4 > len(data):
            raise GgufError(path, at, f"{_MUST_BE}, got a file that ends here")
        at += 4
        value: int = struct.unpack_from("<i", data, at - 4)[0]
        return value

    def piece(nbytes: int) -> bytes:
        nonlocal at
        if not 0 <= nbytes <= len(data) - at:
            raise GgufError(path, at, f"{_MUST_BE}, got a length of {nbytes}")
        at += nbytes
        return data[at - nbytes : at]

    for _ in range(number()):
        name = piece(number()).decode("utf-8", "surrogateescape")
        n_calls = number()
        sums = np.frombuffer(piece(4 * number()), "<f4").astype(np.float32)
        values[name] = (sums / np.float32(n_calls) if n_calls > 0 else sums).reshape(1, -1)
    if at == len(data):
        return Imatrix(path, values, (), 0)
    n_chunks = number()
    texts = (piece(number()).decode("utf-8", "surrogateescape"),) if at < len(data) else ()
    return Imatrix(path, values, texts, n_chunks)
