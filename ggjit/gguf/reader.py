"""GGUF files: metadata and tensors, read lazily from a mapping of the file.

    header      "GGUF", version (u32), n_tensors (u64), n_kv (u64)
    metadata    n_kv times: key (string), value type (u32), value
    tensors     n_tensors times: name (string), n_dims (u32), ne (u64 each), type id (u32), offset (u64)
    padding     to `general.alignment` (32 if not given)
    data        each tensor at its offset, counted from here

A string is its length (u64) and its bytes; an array is its element type (u32), its count (u64) and its elements.

Opening reads the header and the tensor list and steps over the values; nothing of a vocabulary is decoded (see
`strings.py` for how its strings are stepped over in milliseconds). Every length, count, offset and type is checked
against the size of the file before it is used, so a damaged file is one `GgufError` and never a crash or a large
allocation. A tensor type that nobody here knows is listed; only asking for its data is an error.

Type ids from 1000 on are the file's own: the key `ggjit.type.<id>` gives name, values and bytes of a block, and the
type is the one that is registered here by that name and layout, whatever its id.

Source: the GGUF specification of ggml (docs/gguf.md).
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.arguments import check_kinds
from ggjit.counts import counted
from ggjit.errors import GgufError
from ggjit.gguf.mapping import Mapping
from ggjit.gguf.split import check_split, split_paths
from ggjit.gguf.strings import StringArray, string_starts

__all__ = ["GgufFile", "Metadata", "TensorInfo", "ValueType"]

MAX_DIMS = 4
MAX_NAME = 63  # bytes of a tensor's name
MAX_KEY = 65535  # bytes of a metadata key
_SHOWN = 64  # characters of a key in an error
MAX_NESTING = 8
ALIGNMENT = 32


class ValueType(enum.IntEnum):
    """The types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FORMATS = {
    ValueType.UINT8: "B", ValueType.INT8: "b", ValueType.UINT16: "H", ValueType.INT16: "h", ValueType.UINT32: "I",
    ValueType.INT32: "i", ValueType.FLOAT32: "f", ValueType.BOOL: "?", ValueType.UINT64: "Q", ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}  # fmt: skip
_SCALAR = {kind: struct.Struct("<" + code) for kind, code in _FORMATS.items()}
DTYPES = {kind: np.dtype(code).newbyteorder("<") for kind, code in _FORMATS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
        name: of the tensor.
        type: its `Type`, None if this version knows no type with that id.
        type_id: the id in the file.
        ne: 4 sizes, innermost first.
        n_dims: sizes given in the file.
        offset: of its first byte, from the beginning of its file.
        nbytes: its size; for an unknown type the room up to the next tensor.
        file: index of its file among the parts of a split model.
        info_offset: of its entry in the tensor list, for error messages.
        label: name of an unknown type, if the file gives one.
    """

    name: str
    type: types.Type | None
    type_id: int
    ne: tuple[int, int, int, int]
    n_dims: int
    offset: int
    nbytes: int
    file: int
    info_offset: int
    label: str = ""

    @property
    def nelements(self) -> int:
        """Number of values."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def type_name(self) -> str:
        """Name of the type; an unknown one shows its id."""
        return self.type.name if self.type is not None else self.label or f"type {self.type_id}"


def _of(what: str, name: str) -> str:
    return f"{what} {name}" if name else what


class _Reader:
    """A position in a mapped file, with checked reads. `what` and `name` say in errors what is read."""

    def __init__(self, mapping: Mapping) -> None:
        self.path, self.data, self.size, self.pos = mapping.path, mapping.data, mapping.size, 0
        self.view = mapping.data.data

    def fail(self, message: str, offset: int | None = None) -> GgufError:
        return GgufError(self.path, self.pos if offset is None else offset, message)

    def need(self, nbytes: int, what: str, name: str = "") -> int:
        """Offset of the next `nbytes` bytes, which are stepped over."""
        at = self.pos
        if nbytes > self.size - at:
            raise self.fail(f"{_of(what, name)} must fit in the file, got {nbytes} bytes with {self.size - at} left")
        self.pos = at + nbytes
        return at

    def u32(self, what: str, name: str = "") -> int:
        return int(_U32.unpack_from(self.view, self.need(4, what, name))[0])

    def u64(self, what: str, name: str = "") -> int:
        return int(_U64.unpack_from(self.view, self.need(8, what, name))[0])

    def count(self, smallest: int, what: str, name: str = "") -> int:
        """A number of things of at least `smallest` bytes each that must still fit in the file."""
        at = self.pos
        n = self.u64(what, name)
        if n * smallest > self.size - self.pos:
            left = self.size - self.pos
            raise self.fail(f"{_of(what, name)} must fit in the file, got {n} with {left} bytes left", at)
        return n

    def text(self, what: str, longest: int) -> str:
        at = self.pos
        length = self.count(1, "length of", what)
        if length > longest:
            raise self.fail(f"{what} must be at most {longest} bytes, got {length}", at)
        start = self.need(length, what)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} must be UTF-8, got byte {error.object[error.start]:#04x}", at) from None

    def value_type(self, what: str, name: str) -> ValueType:
        at = self.pos
        kind = self.u32(what, name)
        try:
            return ValueType(kind)
        except ValueError:
            raise self.fail(f"{what} {name} must be one of 0 to 12, got {kind}", at) from None

    def skip(self, kind: ValueType, key: str) -> Any:
        """Step over one value; what is needed to read it later."""
        at = self.pos
        if kind is ValueType.STRING:
            length = self.count(1, "length of", key)
            return self.need(length, key), length
        if kind is ValueType.ARRAY:
            return self.skip_array(key, 0)
        self.need(DTYPES[kind].itemsize, key)
        if kind is ValueType.BOOL and self.view[at] > 1:
            raise self.fail(f"{key} must be 0 or 1, got {self.view[at]}", at)
        return at

    def skip_array(self, key: str, nesting: int) -> Any:
        at = self.pos
        kind = self.value_type("element type of", key)
        if kind is ValueType.STRING:
            n = self.count(8, "length of", key)
            starts = string_starts(self.data, self.pos, n)
            if isinstance(starts, int):
                raise self.fail(f"strings of {key} must fit in the file of {self.size} bytes", starts)
            self.pos = int(starts[-1])
            return kind, starts
        if kind is ValueType.ARRAY:
            n = self.count(12, "length of", key)
            if nesting == MAX_NESTING:
                raise self.fail(f"{key} must not be nested deeper than {MAX_NESTING}", at)
            return kind, [self.skip_array(key, nesting + 1) for _ in range(n)]
        n = self.count(DTYPES[kind].itemsize, "length of", key)
        start = self.need(n * DTYPES[kind].itemsize, key)
        if kind is ValueType.BOOL and n and self.data[start : start + n].max() > 1:
            raise self.fail(f"{key} must hold 0 and 1 only", start)
        return kind, (start, n)


class Metadata(MappingABC[str, Any]):
    """The metadata of a file: key to value, each read when first asked for.

    Numbers and flags come as int, float and bool, strings as str, arrays of numbers as NumPy arrays on the mapping,
    arrays of strings as `StringArray`, arrays of arrays as lists.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._entries: dict[str, tuple[ValueType, Any, int, int]] = {}
        self._values: dict[str, Any] = {}

    def _add(self, key: str, kind: ValueType, place: Any, offset: int, end: int) -> None:
        self._entries[key] = kind, place, offset, end

    def value_type(self, key: str) -> ValueType:
        """The type of a value."""
        return self._entries[key][0]

    def element_type(self, key: str) -> ValueType | None:
        """The type of an array's elements, None if the value is no array."""
        kind, place, *_ = self._entries[key]
        return place[0] if kind is ValueType.ARRAY else None

    def offset(self, key: str) -> int:
        """Where in the file the entry begins."""
        return self._entries[key][2]

    def raw(self, key: str) -> bytes:
        """The entry as it is in the file: key, type and value."""
        _, _, start, end = self._entries[key]
        return self._mapping.data[start:end].tobytes()

    def fail(self, key: str, message: str) -> GgufError:
        """The error to raise where the value of `key` (or its absence) is at fault."""
        return GgufError(self._mapping.path, self.offset(key) if key in self else 0, f"{key} {message}")

    def forget(self) -> None:
        """Read values anew when they are next asked for."""
        self._values.clear()

    def _array(self, place: Any) -> Any:
        kind, where = place
        if kind is ValueType.STRING:
            return StringArray(self._mapping.data, where)
        if kind is ValueType.ARRAY:
            return [self._array(inner) for inner in where]
        start, n = where
        return np.frombuffer(self._mapping.data, DTYPES[kind], n, start) if n else np.empty(0, DTYPES[kind])

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, place, *_ = self._entries[key]
            if kind is ValueType.STRING:
                start, length = place
                text = self._mapping.data[start : start + length].tobytes()
                self._values[key] = text.decode("utf-8", "surrogateescape")
            elif kind is ValueType.ARRAY:
                self._values[key] = self._array(place)
            else:
                self._values[key] = _SCALAR[kind].unpack_from(self._mapping.data.data, place)[0]
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"Metadata({len(self)} keys)"


def _header(reader: _Reader) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata entries."""
    reader.need(4, "magic")
    magic = bytes(reader.view[:4])
    if magic != b"GGUF":
        raise reader.fail(f"magic must be b'GGUF', got {magic!r}", 0)
    version = reader.u32("version")
    if version and version & 0xFFFF == 0:
        raise reader.fail(f"byte order must be little-endian, got a big-endian file (version {version >> 24})", 4)
    if version not in (2, 3):
        hint = "; convert it to version 3" if version == 1 else ""
        raise reader.fail(f"version must be 2 or 3, got {version}{hint}", 4)
    return version, reader.count(24, "number of tensors"), reader.count(13, "number of metadata entries")


def _metadata(reader: _Reader, mapping: Mapping, n: int) -> Metadata:
    kv = Metadata(mapping)
    for _ in range(n):
        at = reader.pos
        key = reader.text("metadata key", MAX_KEY)
        if key in kv:
            raise reader.fail(f"metadata keys must differ, got {key[:_SHOWN]!r} twice", at)
        name = key if key.isprintable() and len(key) <= _SHOWN else repr(key[:_SHOWN])
        kind = reader.value_type("type of", name)
        place = reader.skip(kind, name)
        kv._add(key, kind, place, at, reader.pos)
    return kv


def _alignment(kv: Metadata) -> int:
    key = "general.alignment"
    value = kv.get(key, ALIGNMENT)
    if key in kv and kv.value_type(key) is not ValueType.UINT32:
        raise kv.fail(key, f"must be UINT32, got {kv.value_type(key).name}")
    if value < 8 or value & (value - 1):
        raise kv.fail(key, f"must be a power of two and at least 8, got {value}")
    return int(value)


def _tensor_sizes(reader: _Reader, name: str) -> tuple[tuple[int, int, int, int], int]:
    at = reader.pos
    n_dims = reader.u32("n_dims of", repr(name))
    if not 1 <= n_dims <= MAX_DIMS:
        raise reader.fail(f"n_dims of {name!r} must be 1 to {MAX_DIMS}, got {n_dims}", at)
    ne = [reader.u64("ne of", repr(name)) for _ in range(n_dims)] + [1] * (MAX_DIMS - n_dims)
    if not 0 < ne[0] * ne[1] * ne[2] * ne[3] < 1 << 63:
        raise reader.fail(f"ne of {name!r} must be positive with a product below 2**63, got {ne[:n_dims]}", at + 4)
    return (ne[0], ne[1], ne[2], ne[3]), n_dims


def _find_type(kv: Metadata, type_id: int) -> tuple[types.Type | None, str, int, int]:
    """The type of an id, None for an unknown one; its name, values and bytes of a block (0 if not known)."""
    if type_id < types.FIRST_USER_ID:
        try:
            known = types.by_id(type_id)
        except ValueError:
            return None, "", 1, 0
        return known, known.name, known.blck_size, known.type_size
    key = types.user_key(type_id)
    if key not in kv:
        return None, "", 1, 0
    try:
        name, blck_size, type_size = types.described(kv[key])
    except ValueError as error:
        raise kv.fail(key, str(error)) from None
    try:
        found = types.by_name(name)
    except ValueError:
        return None, name, blck_size, type_size
    same = (found.blck_size, found.type_size) == (blck_size, type_size)
    return found if same else None, name, blck_size, type_size


def _tensor(reader: _Reader, file: int, kv: Metadata) -> TensorInfo:
    """One entry of the tensor list; its offset is still relative to the data."""
    at = reader.pos
    name = reader.text("tensor name", MAX_NAME)
    ne, n_dims = _tensor_sizes(reader, name)
    type_at = reader.pos
    type_id = reader.u32("type of", repr(name))
    offset = reader.u64("offset of", repr(name))
    kind, label, blck_size, type_size = _find_type(kv, type_id)
    if ne[0] % blck_size:
        block = f"{blck_size}, the block of {label}"
        raise reader.fail(f"ne[0] of {name!r} must be a multiple of {block}, got {list(ne[:n_dims])}", type_at)
    nbytes = ne[0] // blck_size * type_size * ne[1] * ne[2] * ne[3]
    return TensorInfo(name, kind, type_id, ne, n_dims, offset, nbytes, file, at, label)


def _place(reader: _Reader, infos: list[TensorInfo], data_offset: int, alignment: int) -> dict[str, TensorInfo]:
    """Check offsets, make them absolute, and give tensors of unknown type the room up to the next one."""
    room = max(0, reader.size - data_offset)
    ends = sorted({info.offset for info in infos} | {room})
    following = dict(pairwise(ends))
    placed: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in placed:
            raise reader.fail(f"tensor names must differ, got {info.name!r} twice", info.info_offset)
        if info.offset % alignment:
            raise reader.fail(
                f"offset of {info.name!r} must be a multiple of {alignment}, got {info.offset}", info.info_offset
            )
        nbytes = info.nbytes if info.label else max(0, following.get(info.offset, 0) - info.offset)
        if info.offset + nbytes > room:
            got = f"{nbytes} bytes at {data_offset + info.offset} in a file of {reader.size}"
            raise reader.fail(f"data of {info.name!r} must lie in the file, got {got}", info.info_offset)
        placed[info.name] = info._replace(offset=data_offset + info.offset, nbytes=nbytes)
    for one, other in pairwise(sorted(placed.values(), key=lambda info: info.offset)):
        if one.offset + one.nbytes > other.offset:
            got = f"{one.nbytes} bytes at {one.offset} and {other.name!r} at {other.offset}"
            raise reader.fail(f"data of {one.name!r} must end before the next begins, got {got}", other.info_offset)
    return placed


class _Part:
    """One file of a model."""

    def __init__(self, path: str, file: int, mmap: bool) -> None:
        self.mapping = Mapping(path)
        reader = _Reader(self.mapping)
        self.version, n_tensors, n_kv = _header(reader)
        self.kv = _metadata(reader, self.mapping, n_kv)
        self.alignment = _alignment(self.kv)
        infos = [_tensor(reader, file, self.kv) for _ in range(n_tensors)]
        self.data_offset = -(-reader.pos // self.alignment) * self.alignment
        self.tensors = _place(reader, infos, self.data_offset, self.alignment)
        if not mmap:
            self.mapping.detach(min(self.data_offset, reader.size))
            self.kv.forget()


class GgufFile:
    """An open GGUF file, or all parts of a split model (`NAME-00001-of-00003.gguf`, any part may be named).

    Args:
        path: the file.
        mmap: keep it mapped; else metadata are copied and tensors read when they are asked for.

    Attributes:
        path: the file (the first part of a split model).
        version: of the format, 2 or 3.
        alignment: of the tensor data.
        data_offset: where tensor data begins in the first file.
        kv: the metadata (`Metadata`), of the first part.
        tensors: name to `TensorInfo`, in the order of the files.
        mappings: the files (`Mapping`), one a part.

    Raises:
        GgufError: the file does not hold what the format demands, or a part is missing.
        OSError: it cannot be opened.
        TypeError: the path is none.
    """

    def __init__(self, path: str | os.PathLike[str], mmap: bool = True) -> None:
        check_kinds("GgufFile", (str, os.PathLike), "a str or a path", path=path)
        paths = split_paths(os.fspath(path))
        parts = [_Part(paths[0], 0, mmap)]
        paths = check_split(parts[0].kv, paths)
        self.tensors: dict[str, TensorInfo] = dict(parts[0].tensors)
        for file, name in enumerate(paths[1:], 1):
            part = _Part(name, file, mmap)
            check_split(part.kv, paths, file)
            for info in part.tensors.values():
                if info.name in self.tensors:
                    raise GgufError(name, info.info_offset, f"tensor {info.name!r} must be in one part only")
                self.tensors[info.name] = info
            parts.append(part)
        total = parts[0].kv.get("split.tensors.count", len(self.tensors)) if len(paths) > 1 else len(self.tensors)
        if total != len(self.tensors):
            found = f"{len(self.tensors)}, the sum of the parts"
            raise parts[0].kv.fail("split.tensors.count", f"must be {found}, got {total}")
        self.path = paths[0]
        self.version, self.alignment, self.data_offset = parts[0].version, parts[0].alignment, parts[0].data_offset
        self.kv = parts[0].kv
        self.mappings = tuple(part.mapping for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(mapping.size for mapping in self.mappings)

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies.

        Raises:
            GgufError: the model has no such tensor.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise GgufError(self.path, self.data_offset, f"tensor {name!r} must be in the file") from None

    def known_info(self, name: str) -> TensorInfo:
        """Where a tensor of a known type lies.

        Raises:
            GgufError: the model has no such tensor, or nothing here knows its type.
        """
        info = self.info(name)
        if info.type is None:
            path = self.mappings[info.file].path
            got = f"{info.label} (id {info.type_id})" if info.label else f"id {info.type_id}"
            raise GgufError(path, info.info_offset, f"type of tensor {name!r} must be a known one, got {got}")
        return info

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: uint8 [nbytes], read-only on the mapping, or read from the file.

        Raises:
            GgufError: the model has no such tensor, nothing here knows its type, or the file has become shorter.
        """
        info = self.known_info(name)
        mapping = self.mappings[info.file]
        if len(mapping.data) == mapping.size:
            return mapping.data[info.offset : info.offset + info.nbytes]
        data = np.fromfile(mapping.path, np.uint8, info.nbytes, offset=info.offset)
        if len(data) != info.nbytes:
            got = f"must have {info.nbytes} bytes, got {len(data)}"
            raise GgufError(mapping.path, info.offset, f"tensor {name!r} {got}")
        return data

    def used_range(self, file: int = 0) -> tuple[int, int]:
        """First and last byte offset (exclusive) that the tensors of one part cover; (0, 0) if it has none."""
        ranges = [(info.offset, info.offset + info.nbytes) for info in self.tensors.values() if info.file == file]
        return (min(first for first, _ in ranges), max(last for _, last in ranges)) if ranges else (0, 0)

    def close(self) -> None:
        """Let the mappings go; each lives on while an array on it does."""
        for mapping in self.mappings:
            mapping.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({self.path!r}, {counted(len(self.kv), 'key')}, {counted(len(self.tensors), 'tensor')})"
