"""Writing GGUF files: metadata and tensors are declared, then everything goes to the disk in one pass.

    with GgufWriter("model.gguf") as writer:
        writer.add("general.architecture", "llama")
        writer.add("llama.block_count", 1)
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
        writer.add_tensor("token_embd.weight", chunks(), type=types.F16, ne=(64, 1000))  # an iterator of bytes

Sizes come from types and shapes alone, so the head is written first and the data follows as it is made: an iterator is
asked for its next piece when the one before is on its way to the disk, and no more of a model than one piece is in
memory.

The bytes go to a file of another name in the same folder, which takes its name when all is written and on the disk.
After an error or Ctrl-C nothing is left, and a file that was there before is as it was.

A type of one's own (id 1000 and above) is described by the key `ggjit.type.<id>`, which is added for it.

Source: the GGUF specification of ggml (docs/gguf.md).
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.arguments import check_kinds
from ggjit.counts import counted
from ggjit.gguf.reader import ALIGNMENT, MAX_DIMS, MAX_KEY, MAX_NAME, Metadata, ValueType
from ggjit.gguf.values import encode, string
from ggjit.types import Type

__all__ = ["GgufWriter", "check_another", "new_file"]

VERSION = 3
_PIECE = 16 << 20  # bytes given to the file at once


class _Tensor(NamedTuple):
    name: str
    type: Type
    ne: tuple[int, ...]
    nbytes: int
    data: Any


def check_another(out: str | os.PathLike[str], path: str | os.PathLike[str], what: str, than: str) -> None:
    """Refuse to write what is made of a file over it, by whatever name.

    Raises:
        ValueError: both are the same file.
    """
    if os.path.exists(out) and os.path.exists(path) and os.path.samefile(path, out):
        raise ValueError(f"{what} must be another file than {than}, got {os.fspath(out)!r}")


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when the block ends without an error, and is gone otherwise.

    Raises:
        OSError: it cannot be written.
        ValueError: `path` is there and no regular file.
    """
    target = os.path.realpath(path)  # a link stays one
    if os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode):
        raise ValueError(f"GgufWriter: path must name a file or nothing yet, got {os.fspath(path)!r}")
    folder, name = os.path.split(target)
    try:
        temporary = os.path.join(folder, f".{name[:200]}.{os.urandom(8).hex()}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every file system lets folders be synced
        folder_fd = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)


class GgufWriter:
    """A GGUF file of version 3 in the making. As a context manager it is written when the block ends without an error.

    Args:
        path: of the file; what is there is replaced when all is written.
        progress: called with bytes written and bytes in all, as tensor data is written.

    Raises:
        ValueError: a key or name is given twice or is none that the format takes, a value or type cannot be written,
            data is not what shape and type say.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
        check_kinds("GgufWriter", (str, os.PathLike), "a str or a path", path=path)
        self.path = os.fspath(path)
        self.alignment = ALIGNMENT
        self._progress = progress
        self._entries: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._written = False

    # -- metadata ----------------------------------------------------------------------------------------------------

    def add(self, key: str, value: Any, type: ValueType | None = None, element: ValueType | None = None) -> None:
        """Add a metadata value.

        Args:
            key: printable ASCII, at most 65535 bytes. `general.alignment` (UINT32, a power of two of at least 8) also
                is the alignment of the file.
            value: str, bytes, bool, int, float, NumPy scalar or array, `StringArray`, or a list of these.
            type: its type; None: see `ggjit.gguf.values`.
            element: type of an array's elements; an empty list needs it.

        Raises:
            ValueError: see the class.
        """
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not 0 < len(key) <= MAX_KEY:
            shown = key[:64] if isinstance(key, str) else key
            raise self._fail(f"a key must be 1 to {MAX_KEY} printable ASCII characters, got {shown!r}")
        if key == "general.alignment":
            type = ValueType.UINT32 if type is None else type
        try:
            body = encode(value, type, element, key)
        except ValueError as error:
            raise self._fail(str(error)) from None
        self._add_entry(key, string(key, "key") + body, value)

    def copy(self, kv: Metadata, keys: Iterable[str] | None = None) -> None:
        """Add metadata of another file as they are, to the last bit; descriptions of types are left to `add_tensor`.

        Args:
            kv: the metadata of an open file.
            keys: which; None: all.

        Raises:
            ValueError: a key is there already.
        """
        prefix = types.user_key(0)[:-1]
        for key in [key for key in kv if not key.startswith(prefix)] if keys is None else keys:
            self._add_entry(key, kv.raw(key), kv[key] if key == "general.alignment" else None)

    def _add_entry(self, key: str, entry: bytes, value: Any) -> None:
        if key in self._entries:
            raise self._fail(f"keys must differ, got {key!r} twice")
        if key == "general.alignment":
            if entry[-8:-4] != struct.pack("<I", ValueType.UINT32) or value < 8 or value & (value - 1):
                raise self._fail(f"{key} must be UINT32, a power of two and at least 8, got {value!r}")
            self.alignment = int(value)
        self._entries[key] = entry

    # -- tensors -----------------------------------------------------------------------------------------------------

    def add_tensor(self, name: str, data: Any, type: Type | str | None = None, ne: Sequence[int] | None = None) -> None:
        """Add a tensor.

        Args:
            name: at most 63 bytes.
            data: values, a NumPy array of the reversed shape, which is converted if `type` differs from its own. With
                `ne`: the bytes as they stand in the file, bytes-like or uint8, or an iterable of such pieces that is
                asked for them when the file is written.
            type: of the tensor; None: that of the array's dtype.
            ne: 1 to 4 sizes, innermost first.

        Raises:
            ValueError: see the class.
        """
        if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME:
            raise self._fail(f"a tensor's name must be 1 to {MAX_NAME} bytes, got {name!r}")
        if name in self._tensors:
            raise self._fail(f"tensor names must differ, got {name!r} twice")
        if isinstance(data, np.generic):
            data = np.asarray(data)
        kind = self._type(name, data, type)
        if ne is None:
            if not isinstance(data, np.ndarray):
                raise self._fail(f"ne of {name!r} must be given with data that is no array, got None")
            ne = data.shape[::-1] or (1,)
        sizes = self._sizes(name, kind, ne)
        nbytes = kind.type_size * (sizes[0] // kind.blck_size) * int(np.prod(sizes[1:], dtype=object))
        if isinstance(data, np.ndarray) and data.dtype != np.uint8:
            data = self._values(name, data, kind, sizes)
        elif isinstance(data, (bytes, bytearray, memoryview, np.ndarray)) and memoryview(data).nbytes != nbytes:
            raise self._fail(f"data of {name!r} must have {nbytes} bytes, got {memoryview(data).nbytes}")
        if kind.id >= types.FIRST_USER_ID:
            self._describe(kind)
        self._tensors[name] = _Tensor(name, kind, sizes, nbytes, data)

    def _type(self, name: str, data: Any, type: Type | str | None) -> Type:
        try:
            if isinstance(type, str):
                found = types.by_name(type)
            elif type is not None:
                found = types.by_id(type.id)
            elif isinstance(data, np.ndarray):
                found = types.from_dtype(data.dtype)
            else:
                raise ValueError("it must be given with data that is no array, got None")
            if found.name in types.ACTIVATIONS:
                raise ValueError(f"it must be one of weights, got {found.name}, a form of activations")
            return found
        except (ValueError, TypeError) as error:
            raise self._fail(f"type of {name!r}: {error}") from None

    def _sizes(self, name: str, kind: Type, ne: Sequence[int]) -> tuple[int, ...]:
        sizes = tuple(int(n) for n in ne)
        if not 1 <= len(sizes) <= MAX_DIMS:
            raise self._fail(f"{name!r} must have 1 to {MAX_DIMS} dimensions, got {list(sizes)}")
        if min(sizes) < 1 or int(np.prod(sizes, dtype=object)) >= 1 << 63:
            raise self._fail(f"ne of {name!r} must be positive with a product below 2**63, got {list(sizes)}")
        if sizes[0] % kind.blck_size:
            block = f"{kind.blck_size}, the block of {kind.name}"
            raise self._fail(f"ne[0] of {name!r} must be a multiple of {block}, got {list(sizes)}")
        return sizes

    def _values(self, name: str, data: NDArray[Any], kind: Type, sizes: tuple[int, ...]) -> Any:
        """Values of an array as pieces of bytes of a type, made when they are asked for."""
        if data.size != int(np.prod(sizes, dtype=object)):
            raise self._fail(f"data of {name!r} must have the values of ne {list(sizes)}, got {list(data.shape)}")
        if data.dtype == kind.dtype and kind is not types.BF16:
            return data
        if data.dtype.kind != "f" or (kind.name.startswith("I") and not kind.is_quantized):
            raise self._fail(f"data of {name!r} must be {kind.name} or floats, got {data.dtype}")
        return _converted(data.reshape(-1, sizes[0]), kind)

    def _describe(self, kind: Type) -> None:
        key = types.user_key(kind.id)
        if key not in self._entries:
            self.add(key, types.describe(kind))

    # -- writing -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the file as it would be written now."""
        return len(self._head()) + sum(self._padded(t.nbytes) for t in self._tensors.values())

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment

    def _head(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(self._tensors), len(self._entries)), *self._entries.values()]
        offset = 0
        for t in self._tensors.values():
            ne = struct.pack(f"<I{len(t.ne)}Q", len(t.ne), *t.ne)
            parts += [string(t.name, "tensor name"), ne, struct.pack("<IQ", t.type.id, offset)]
            offset += self._padded(t.nbytes)
        head = b"".join(parts)
        return head + bytes(self._padded(len(head)) - len(head))

    def write(self) -> None:
        """Write the file; it can be done once.

        Raises:
            ValueError, OSError: see the class.
        """
        if self._written:
            raise self._fail("a file must be written once")
        self._written = True
        total = sum(t.nbytes for t in self._tensors.values())
        done = 0
        with new_file(self.path) as file:
            file.write(self._head())
            for t in self._tensors.values():
                left = t.nbytes
                for piece in _pieces(t.data):
                    left -= piece.nbytes
                    if left < 0:
                        break
                    file.write(piece)
                    done += piece.nbytes
                    if self._progress is not None:
                        self._progress(done, total)
                if left:
                    got = f"{t.nbytes - left}" if left > 0 else "more"
                    raise self._fail(f"data of {t.name!r} must have {t.nbytes} bytes, got {got}")
                file.write(bytes(self._padded(t.nbytes) - t.nbytes))

    def _fail(self, message: str) -> ValueError:
        return ValueError(f"GgufWriter: {message} ({self.path})")

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._written:
            self.write()

    def __repr__(self) -> str:
        counts = counted(len(self._entries), "key"), counted(len(self._tensors), "tensor")
        return f"GgufWriter({self.path!r}, {', '.join(counts)})"


def _pieces(data: Any) -> Iterator[memoryview]:
    """The bytes of a tensor, some MiB at once."""
    if isinstance(data, np.ndarray):
        flat = data.reshape(-1) if data.flags.c_contiguous else None
        if flat is None:  # one row after the other, whatever the strides
            yield from (piece for part in data for piece in _pieces(np.ascontiguousarray(part)))
            return
        data = memoryview(flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8))
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(data).cast("B")
        yield from (view[at : at + _PIECE] for at in range(0, len(view), _PIECE))
        return
    for part in data:
        yield from _pieces(part)


def _converted(rows: NDArray[Any], kind: Type) -> Iterator[NDArray[np.uint8]]:
    """Rows of floats as bytes of a type, some MiB at once."""
    from ggjit.quantize import quantize_rows

    step = max(1, _PIECE // (4 * rows.shape[1]))
    for at in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[at : at + step], np.float32)
        yield part.astype(np.float64).view(np.uint8) if kind is types.F64 else quantize_rows(kind, part)
