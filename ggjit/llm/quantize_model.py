"""Quantizing a model: from a GGUF file to another one, some rows at a time.

Tensors are chosen a type by `quantize_mixes`, decoded to f32, coded and written, each as a stream: a large model needs
no more memory than some pieces of rows. What does not change is copied as it is. All parts of a split model make one
file.

Source: llama.cpp's llama_model_quantize: types, metadata and the order of tensors are the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.arguments import check_threads
from ggjit.gguf import GgufFile, GgufWriter, ValueType, check_another
from ggjit.gguf.reader import TensorInfo
from ggjit.llm.imatrix_file import Imatrix, read_imatrix
from ggjit.llm.quantize_mixes import (
    COPY,
    NEEDS_IMATRIX,
    Choices,
    Mix,
    ModelFacts,
    TensorFacts,
    choose_types,
    find_mix,
    sort_key,
)
from ggjit.types import Type

__all__ = ["Plan", "Step", "plan", "quantize_model", "result_nbytes", "tensor_rule", "totals", "weight_type"]

QUANTIZATION_VERSION = 2
_PIECE = 1 << 24  # values decoded at once
_DATASET_KEY = "quantize.imatrix.dataset"


class Step(NamedTuple):
    """What becomes of a tensor.

    Attributes:
        info: where it is.
        type: what it becomes.
        imatrix: f32 [n_mat, n], None if there is none for it.
    """

    info: TensorInfo
    type: Type
    imatrix: NDArray[np.float32] | None

    @property
    def ne(self) -> tuple[int, ...]:
        """Sizes without trailing ones."""
        return _sizes(self.info)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.info.nelements // self.type.blck_size * self.type.type_size


class Plan(NamedTuple):
    """How a file is quantized.

    Attributes:
        mix: the mix.
        steps: for each tensor, in the order of the result.
        imatrix: the importance matrix, None if none is given.
    """

    mix: Mix
    steps: list[Step]
    imatrix: Imatrix | None


def tensor_rule(text: str) -> tuple[re.Pattern[str], Type]:
    """A pattern for names and the type that it gives, from `REGEX=TYPE`.

    Raises:
        ValueError: there is no such type or the pattern is none.
    """
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"quantize: a rule for tensors must be REGEX=TYPE, got {text!r}")
    try:
        return re.compile(pattern), weight_type(name)
    except re.error as error:
        raise ValueError(f"quantize: {pattern!r} must be a regular expression, got {error}") from None


def weight_type(name: str) -> Type:
    """A type that weights may have, by its name.

    Raises:
        ValueError: it is none.
    """
    for type in _weight_types():
        if type.name == name.upper():
            return type
    known = ", ".join(type.name for type in _weight_types())
    raise ValueError(f"quantize: the type of a tensor must be one of {known}, got {name!r}")


def _weight_types() -> list[Type]:
    floats = (types.F32, types.F16, types.BF16)
    return [
        type
        for type in types.all_types()
        if type in floats or (type.is_quantized and type.name not in types.ACTIVATIONS)
    ]


def _sizes(info: TensorInfo) -> tuple[int, ...]:
    ne = list(info.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return tuple(ne)


def _first(value: Any) -> int:
    """A number, or the first of a list with one a block."""
    return int(value[0]) if isinstance(value, np.ndarray) and len(value) else int(value)


def model_facts(file: GgufFile, has_imatrix: bool) -> ModelFacts:
    """What rules ask of a model.

    Raises:
        GgufError: the file names no architecture.
    """
    arch = file.kv.get("general.architecture")
    if not isinstance(arch, str):
        raise file.kv.fail("general.architecture", "must be in the file")
    n_head = _first(file.kv.get(f"{arch}.attention.head_count", 0))
    n_head_kv = _first(file.kv.get(f"{arch}.attention.head_count_kv", n_head))
    n_layer = int(file.kv.get(f"{arch}.block_count", 0))
    n_gqa = n_head // n_head_kv if n_head_kv else 0
    return ModelFacts(arch, n_layer, n_gqa, int(file.kv.get(f"{arch}.expert_count", 0)), has_imatrix)


def plan(
    file: GgufFile,
    type: str,
    imatrix: Imatrix | None = None,
    choices: Choices | None = None,
    allow_requantize: bool = False,
) -> Plan:
    """Decide what becomes of each tensor.

    Args:
        file: the model.
        type: name of a mix (`quantize_mixes.MIXES`).
        imatrix: importance matrix.
        choices: what is not left to the mix.
        allow_requantize: tensors may be quantized already; what was lost stays lost.

    Raises:
        ValueError: there is no such mix; a type needs an importance matrix; a tensor is quantized already.
        GgufError: a tensor's type is not known.
    """
    mix = find_mix(type)
    for info in file.tensors.values():
        file.known_info(info.name)
    facts = [TensorFacts(info.name, info.type, _sizes(info)) for info in file.tensors.values() if info.type]
    if mix is COPY:
        mix = mix._replace(ftype=int(file.kv.get("general.file_type", mix.ftype)))
        found = {t.name: t.type for t in sorted(facts, key=lambda t: sort_key(t.name))}
    else:
        found = choose_types(facts, mix, model_facts(file, imatrix is not None), choices or Choices())
    steps = []
    for name, kind in found.items():
        info = file.tensors[name]
        weights = None if imatrix is None or kind is info.type else _weights(imatrix, info)
        if kind is not info.type:
            _check(info, kind, mix, weights, allow_requantize)
        steps.append(Step(info, kind, weights))
    return Plan(mix, steps, imatrix)


def _weights(imatrix: Imatrix, info: TensorInfo) -> NDArray[np.float32] | None:
    """The importance of a tensor's columns: f32 [matrices, n]."""
    found = imatrix.values.get(info.name)
    if found is None:
        return None
    n, n_mat = info.ne[0], info.ne[2]
    if found.size not in (n, n * n_mat):
        if info.name == "token_embd.weight":  # made with another one tied to it
            return None
        got = f"{found.size} in {imatrix.path}"
        raise ValueError(f"quantize: the importance matrix of {info.name!r} must have {n * n_mat} values, got {got}")
    return found.reshape(-1, n)


def _check(info: TensorInfo, kind: Type, mix: Mix, weights: Any, allow_requantize: bool) -> None:
    wanted = kind.name in NEEDS_IMATRIX or (
        mix.name == "Q2_K_S" and kind.name == "Q2_K" and info.name != "token_embd.weight"
    )
    if weights is None and wanted:
        raise ValueError(
            f"quantize: {kind.name} must have an importance matrix, got none for {info.name!r}; give one by --imatrix"
        )
    assert info.type is not None
    if info.type.is_quantized and not allow_requantize:
        raise ValueError(
            f"quantize: tensors must not be quantized already, got {info.name!r} of type {info.type.name}; "
            "begin with an F16, BF16 or F32 model, or give --allow-requantize, which loses more than quantizing once"
        )
    if not info.type.is_quantized and info.type.name not in ("F32", "F16", "BF16", "F64"):
        raise ValueError(f"quantize: {info.name!r} must be of a float type, got {info.type.name}")


def quantize_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str,
    imatrix: str | None = None,
    choices: Choices | None = None,
    allow_requantize: bool = False,
    n_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Quantize a model file.

    Args:
        path: the model, or any part of a split one.
        out: the file to make; it appears when it is whole.
        type: name of a mix (`quantize_mixes.MIXES`).
        imatrix: path of an importance matrix.
        choices: what is not left to the mix.
        allow_requantize: tensors may be quantized already.
        n_threads: that code rows.
        progress: called with bytes written and bytes in all.

    Returns:
        What was done.

    Raises:
        ValueError, GgufError: see `plan`; `out` is the model itself.
        OSError: a file cannot be read or written.
    """
    n_threads = check_threads("quantize", n_threads)
    matrix = None if imatrix is None else read_imatrix(imatrix)
    with GgufFile(path) as file:
        for mapping in file.mappings:
            check_another(out, mapping.path, "quantize: the result", "the model")
        if imatrix is not None:
            check_another(out, imatrix, "quantize: the result", "the importance matrix")
        made = plan(file, type, matrix, choices, allow_requantize)
        _writer(out, file, made, n_threads, progress).write()
        return made


def result_nbytes(file: GgufFile, made: Plan) -> int:
    """Bytes of the file that a plan leads to."""
    return _writer("", file, made, 1, None).nbytes


def _writer(
    out: str | os.PathLike[str], file: GgufFile, made: Plan, n_threads: int, progress: Callable[[int, int], None] | None
) -> GgufWriter:
    """All that the result holds, declared."""
    writer = GgufWriter(out, progress)
    _metadata(writer, file, made)
    for step in made.steps:
        writer.add_tensor(step.info.name, _rows(file, step, n_threads), step.type, step.ne)
    return writer


def _metadata(writer: GgufWriter, file: GgufFile, made: Plan) -> None:
    """The model's metadata, and what tells how it was quantized."""
    matrix = made.imatrix
    new: dict[str, tuple[Any, ValueType]] = {
        "general.quantization_version": (QUANTIZATION_VERSION, ValueType.UINT32),
        "general.file_type": (made.mix.ftype, ValueType.UINT32),
    }
    if matrix is not None:
        new["quantize.imatrix.file"] = matrix.path, ValueType.STRING
        if matrix.datasets:
            new[_DATASET_KEY] = matrix.datasets[0], ValueType.STRING
        new["quantize.imatrix.entries_count"] = len(matrix.values), ValueType.UINT32
        if matrix.n_chunks:
            new["quantize.imatrix.chunks_count"] = matrix.n_chunks, ValueType.UINT32
    own = (types.user_key(0)[:-1], "split.")
    writer.copy(file.kv, [key for key in file.kv if key not in new and not key.startswith(own)])
    for key, (value, kind) in new.items():
        writer.add(key, value, kind)


def _rows(file: GgufFile, step: Step, n_threads: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor in its new type, some rows at a time."""
    from ggjit.quantize import dequantize_rows, quantize_rows

    info = step.info
    assert info.type is not None
    data = file.data(info.name)
    mapping = file.mappings[info.file]
    if step.type is info.type:
        yield data
        mapping.advise_dontneed(info.offset, info.nbytes)
        return
    n, n_mat = info.ne[0], info.ne[2] * info.ne[3]
    size = types.row_size(info.type, n)
    per_mat = info.ne[1]
    at_once = max(1, _PIECE // n)
    for mat in range(n_mat):
        weights = None if step.imatrix is None else step.imatrix[mat % len(step.imatrix)]
        for first in range(mat * per_mat, (mat + 1) * per_mat, at_once):
            last = min(first + at_once, (mat + 1) * per_mat)
            x = dequantize_rows(info.type, data[first * size : last * size].reshape(last - first, size), n_threads)
            yield quantize_rows(step.type, x, weights, n_threads)
            mapping.advise_dontneed(info.offset + first * size, (last - first) * size)


def totals(made: Plan) -> Mapping[str, Sequence[int]]:
    """Tensors and bytes of the result by type, most bytes first."""
    found: dict[str, list[int]] = {}
    for step in made.steps:
        one = found.setdefault(step.type.name, [0, 0])
        one[0] += 1
        one[1] += step.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
