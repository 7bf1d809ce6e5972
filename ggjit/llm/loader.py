"""Loading weights: headers in one context, data where each weight's device wants it.

The four steps of a load:
    1. each weight's offset in its file is known from the tensor list;
    2. the files are mapped (`GgufFile`);
    3. memory is chosen for each weight (`Placement` tells its device), and a buffer made of each kind: one of type
       "mapped" is wrapped around the bytes between the first and the last tensor of each file;
    4. weights that are used where they lie point into the mapping; matrices for the CPU are repacked into panels in
       parallel, a slice at a time; the rest is copied. What was read of the mapping is given back.

So a page of the file stays in memory only if a weight is used where it lies. Without mapping each tensor is read from
the file, of which metadata are copied when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggjit.alloc import TensorAllocator
from ggjit.backend import Buffer, BufferType, NewBuffer, buffer_from_array, new_buffer, tensor_alloc
from ggjit.backends.cpu import HOST, MAPPED, PANEL, pack_tensors
from ggjit.context import Context, tensor_overhead
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, StringArray
from ggjit.gguf.reader import TensorInfo
from ggjit.gguf.rows import FileRows
from ggjit.llm.placement import Placement
from ggjit.pages import lock_memory
from ggjit.progress import ByteBar
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import ACTIVATIONS

GIVE_BACK = (
    16 << 20
)  # bytes of a file consumed between two times that its pages are given back: all CPUs are interrupted


@dataclass
class _Weight:
    """A header, where its bytes are in the file, and the memory that it gets."""

    tensor: Tensor
    info: TensorInfo
    device: str
    type: BufferType


class Loader:
    """What an architecture asks for its weights.

    Each call makes a header and checks the file's shape; `load` gives all of them data.

    Args:
        file: the open model.
        repack: pack matrices into panels.
        placement: the device of each weight; by default all are on the CPU.
        mmap: use weights where the mapped file has them if that serves; else read all of them.
        new_buffer: makes the buffers.

    Attributes:
        n_vocab: rows of the token embedding.
        weights: all headers by name.
        buffers: that hold them.
        memory: bytes allocated for them by device.
        mapped_nbytes: bytes of the mapped files that are used where they lie.
        file_rows: matrices whose rows are better read from the file than through its mapping.
    """

    def __init__(
        self,
        file: GgufFile,
        repack: bool = True,
        placement: Placement | None = None,
        mmap: bool = True,
        new_buffer: NewBuffer = new_buffer,
    ) -> None:
        self.file, self.repack, self.mmap, self._new_buffer = file, repack, mmap, new_buffer
        self.placement = Placement(0) if placement is None else placement
        self.context = Context((2 * len(file.tensors) + 8) * tensor_overhead(), no_alloc=True)
        self.n_vocab = file.info("token_embd.weight").ne[1]
        tokens = file.kv.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray) and len(tokens) != self.n_vocab:
            raise file.kv.fail(
                "tokenizer.ggml.tokens",
                f"must have {self.n_vocab} elements, one a row of token_embd.weight, got {len(tokens)}",
            )
        self._used: set[str] = set()  # names in the file
        self.buffers: list[Buffer] = []
        self.memory = {d.name: 0 for d in self.placement.devices}
        self.mapped_nbytes = 0
        self.file_rows: dict[Tensor, FileRows] = {}
        self._weights: list[_Weight] = []

    # -- what architectures call -------------------------------------------------------------------------------------

    def vector(self, name: str, *ne: int) -> Tensor:
        """A bias, norm or table; copied where matrices are: one page of the mapping for each would be more.

        Raises:
            GgufError: the file has no such tensor, or of another shape.
        """
        return self._header(name, self._info(name, ne), HOST if self.repack else MAPPED)

    def rows(self, name: str, *ne: int) -> Tensor:
        """A matrix of which single rows are read (an embedding): used where it lies, or read row by row."""
        tensor = self._header(name, self._info(name, ne), MAPPED)
        if self.repack and self._weights[-1].type is MAPPED:
            info = self._weights[-1].info
            self.file_rows[tensor] = FileRows(self.file.mappings[info.file].path, info.offset, tensor.nb[1])
        return tensor

    def matrix(self, name: str, *ne: int, tied: str | None = None) -> Tensor:
        """A matrix for mul_mat: repacked into panels where that is wanted and possible.

        Args:
            name: of the tensor.
            ne: its sizes.
            tied: the tensor to use if the file has none of that name.

        Raises:
            GgufError: the file has no such tensor, or of another shape.
        """
        source = tied if tied is not None and name not in self.file.tensors else name
        return self._header(name, self._info(source, ne), PANEL if self.repack else MAPPED)

    def optional(self, make: Callable[..., Tensor], name: str, *ne: int) -> Tensor | None:
        """A weight that may be missing, made by `vector`, `rows` or `matrix`."""
        return make(name, *ne) if name in self.file.tensors else None

    def _info(self, name: str, ne: tuple[int, ...]) -> TensorInfo:
        info = self.file.known_info(name)
        full = ne + (1,) * (4 - len(ne))
        if info.ne != full:
            path = self.file.mappings[info.file].path
            raise GgufError(path, info.info_offset, f"tensor {name!r} must have ne {list(full)}, got {list(info.ne)}")
        if info.type is not None and info.type.name in ACTIVATIONS:
            text = f"tensor {name!r} must have a type of weights, got {info.type.name}, a form of activations"
            raise GgufError(self.file.mappings[info.file].path, info.info_offset, text)
        self._used.add(name)
        return info

    def _header(self, name: str, info: TensorInfo, wanted: BufferType) -> Tensor:
        assert info.type is not None
        with self.context:
            tensor = new_tensor(info.type, *info.ne[: info.n_dims], name=name)
        device = self.placement.weight(name)
        if device is self.placement.cpu:
            type = wanted if wanted.supports(tensor) else MAPPED
            type = HOST if type is MAPPED and not self.mmap else type
        else:
            type = next((t for t in device.weight_buffer_types() if t.supports(tensor)), HOST)
        self._weights.append(_Weight(tensor, info, device.name, type))
        return tensor

    # -- loading -----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Make the buffers and give every header its place.

        Raises:
            GgufError: the file has a tensor that the architecture did not ask for; it would compute something else.
            MemoryError: there is not enough memory.

        Source: llama.cpp's done_getting_tensors, create_backend_buffers.
        """
        unknown = [info for name, info in self.file.tensors.items() if name not in self._used]
        if unknown:
            got = f"{len(unknown)} others, first {unknown[0].name!r}"
            text = f"tensors must be ones that the architecture uses, got {got}"
            raise GgufError(self.file.mappings[unknown[0].file].path, unknown[0].info_offset, text)
        groups: dict[tuple[str, BufferType], list[_Weight]] = {}
        for w in self._weights:
            groups.setdefault((w.device, w.type), []).append(w)
        for (device, type), group in groups.items():
            if type is MAPPED:
                self._place_mapped(group)
                continue
            buffer = self._new_buffer(type, sum(type.padded_size(w.tensor) for w in group), "weights")
            self.buffers.append(buffer)
            self.memory[device] += buffer.size
            allocator = TensorAllocator(buffer)
            for w in group:
                allocator.alloc(w.tensor)

    def _place_mapped(self, group: list[_Weight]) -> None:
        for i, mapping in enumerate(self.file.mappings):
            first, last = self.file.used_range(i)
            mine = [w for w in group if w.info.file == i]
            if mine:
                buffer = buffer_from_array(mapping.data[first:last])
                self.buffers.append(buffer)
                for w in mine:
                    tensor_alloc(buffer, w.tensor, buffer.base + w.info.offset - first)
        used = {(w.info.file, w.info.offset): w.info.nbytes for w in group}
        self.mapped_nbytes = sum(used.values())

    def fill(self, n_threads: int, progress: bool = True) -> None:
        """Pack and copy what is not used where it lies.

        Args:
            n_threads: that pack panels.
            progress: show a bar, if stderr is a terminal.
        """
        consumed = 0

        def give_back(tensor: Tensor, first: int, end: int) -> None:
            nonlocal consumed
            consumed += end - first
            if self.mmap and consumed >= GIVE_BACK:
                self._give_back()
                consumed = 0

        for w in self._weights:
            if w.type not in (MAPPED, PANEL):
                assert w.tensor.buffer is not None
                w.tensor.buffer.set_tensor(w.tensor, self.file.data(w.info.name))
                give_back(w.tensor, 0, w.info.nbytes)
        packed = [w for w in self._weights if w.type is PANEL]
        with ByteBar("packing weights", progress) as bar:
            if self.mmap:
                pack_tensors([(w.tensor, self.file.data(w.info.name)) for w in packed], n_threads, bar, give_back)
            else:
                self._read_and_pack(packed, n_threads, bar)
        if any(w.type is not MAPPED for w in self._weights):
            self._give_back()

    def _give_back(self) -> None:
        """Let the files' pages go; those that are used where they lie come back when they are touched."""
        for mapping in self.file.mappings:
            mapping.advise_dontneed(0, mapping.size)

    def _read_and_pack(self, weights: list[_Weight], n_threads: int, bar: ByteBar) -> None:
        done, total = 0, sum(w.info.nbytes for w in weights)
        for w in weights:
            pack_tensors([(w.tensor, self.file.data(w.info.name))], n_threads)
            done += w.info.nbytes
            bar(done, total)

    def lock(self) -> bool:
        """Keep all weights of host memory from being paged out; a warning and False where the system forbids it."""
        ranges = {(w.tensor.data, w.info.nbytes) for w in self._weights if w.type is MAPPED}
        ranges |= {(b.base, b.size) for b in self.buffers if b.array is not None and b.type is not MAPPED}
        return all(lock_memory(address, nbytes, "mlock") for address, nbytes in sorted(ranges))

    @property
    def weights(self) -> dict[str, Tensor]:
        """All headers by name."""
        return {w.tensor.name: w.tensor for w in self._weights}
