"""Loading weights: headers in one context, data in the mapped file where it lies or repacked into panels.

The four steps of a load:
    1. each weight's offset in its file is known from the tensor list;
    2. the files are mapped (`GgufFile`);
    3. a buffer of type "mapped" is wrapped around the bytes between the first and the last tensor of each file;
    4. weights that are used where they lie point into it; those that are repacked get a place in a panel buffer and are
       packed in parallel, and the file's pages are given back as they are consumed.

Pages of the mapping that no weight in place needs are never read, or given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggjit.alloc import TensorAllocator
from ggjit.backend import Buffer, buffer_from_array, tensor_alloc
from ggjit.backends.cpu import PANEL, pack_tensors
from ggjit.context import Context, tensor_overhead
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, StringArray
from ggjit.gguf.reader import TensorInfo
from ggjit.progress import ByteBar
from ggjit.tensor import Tensor, new_tensor


@dataclass
class _Weight:
    """A header and where its bytes are in the file."""

    tensor: Tensor
    info: TensorInfo
    panel: bool


class Loader:
    """What an architecture asks for its weights.

    Each call makes a header and checks the file's shape; `load` gives all of them data.

    Args:
        file: the open model.
        repack: pack matrices into panels.

    Attributes:
        n_vocab: rows of the token embedding.
        weights: all headers by name.
    """

    def __init__(self, file: GgufFile, repack: bool = True) -> None:
        self.file, self.repack = file, repack
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
        self._weights: list[_Weight] = []

    # -- what architectures call -------------------------------------------------------------------------------------

    def vector(self, name: str, *ne: int) -> Tensor:
        """A bias, norm or table: used where it lies in the file.

        Raises:
            GgufError: the file has no such tensor, or of another shape.
        """
        return self._header(name, self._info(name, ne), panel=False)

    def rows(self, name: str, *ne: int) -> Tensor:
        """A matrix of which single rows are read (an embedding): used where it lies."""
        return self.vector(name, *ne)

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
        return self._header(name, self._info(source, ne), panel=self.repack)

    def optional(self, make: Callable[..., Tensor], name: str, *ne: int) -> Tensor | None:
        """A weight that may be missing, made by `vector`, `rows` or `matrix`."""
        return make(name, *ne) if name in self.file.tensors else None

    def _info(self, name: str, ne: tuple[int, ...]) -> TensorInfo:
        info = self.file.info(name)
        full = ne + (1,) * (4 - len(ne))
        if info.ne != full:
            path = self.file.mappings[info.file].path
            raise GgufError(path, info.info_offset, f"tensor {name!r} must have ne {list(full)}, got {list(info.ne)}")
        self.file.data(name)  # its type is a known one
        self._used.add(name)
        return info

    def _header(self, name: str, info: TensorInfo, panel: bool) -> Tensor:
        assert info.type is not None
        with self.context:
            tensor = new_tensor(info.type, *info.ne[: info.n_dims], name=name)
        self._weights.append(_Weight(tensor, info, panel and PANEL.supports(tensor)))
        return tensor

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, n_threads: int, progress: bool = True) -> None:
        """Give every header its data.

        Args:
            n_threads: that pack panels.
            progress: show a bar, if stderr is a terminal.

        Raises:
            GgufError: the file has a tensor that the architecture did not ask for; it would compute something else.
            MemoryError: there is not enough memory for the panels.

        Source: llama.cpp's done_getting_tensors.
        """
        unknown = [info for name, info in self.file.tensors.items() if name not in self._used]
        if unknown:
            got = f"{len(unknown)} others, first {unknown[0].name!r}"
            text = f"tensors must be ones that the architecture uses, got {got}"
            raise GgufError(self.file.mappings[unknown[0].file].path, unknown[0].info_offset, text)
        in_place = [w for w in self._weights if not w.panel]
        repacked = [w for w in self._weights if w.panel]
        for i, mapping in enumerate(self.file.mappings):
            first, last = self.file.used_range(i)
            mine = [w for w in in_place if w.info.file == i]
            if mine:
                buffer = buffer_from_array(mapping.data[first:last])
                self.buffers.append(buffer)
                for w in mine:
                    tensor_alloc(buffer, w.tensor, buffer.base + w.info.offset - first)
        if repacked:
            panels = PANEL.new_buffer(sum(PANEL.padded_size(w.tensor) for w in repacked), "weights")
            self.buffers.append(panels)
            allocator = TensorAllocator(panels)
            for w in repacked:
                allocator.alloc(w.tensor)
            by_tensor = {w.tensor: w.info for w in repacked}
            keep = {(w.info.file, w.info.offset) for w in in_place}

            def give_back(tensor: Tensor) -> None:
                info = by_tensor[tensor]
                if (info.file, info.offset) not in keep:
                    self.file.mappings[info.file].advise_dontneed(info.offset, info.nbytes)

            work = [(w.tensor, self.file.data(w.info.name)) for w in repacked]
            with ByteBar("packing weights", progress) as bar:
                pack_tensors(work, n_threads, progress=bar, on_packed=give_back)

    @property
    def weights(self) -> dict[str, Tensor]:
        """All headers by name."""
        return {w.tensor.name: w.tensor for w in self._weights}
