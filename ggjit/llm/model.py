"""A model: hyperparameters, weights in memory, and the architecture that builds its graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ggjit import garbage, models
from ggjit.backend import Device, new_buffer
from ggjit.counts import counted
from ggjit.gguf import GgufFile
from ggjit.llm.hparams import Hparams, architecture_of
from ggjit.llm.loader import Loader
from ggjit.llm.placement import Placement
from ggjit.tensor import Tensor
from ggjit.unbacked import unbacked_buffer


def _path_of(path: str | os.PathLike[str], progress: bool) -> str | os.PathLike[str]:
    """Where a model lies that may be named as for the commands."""
    if not isinstance(path, str) or os.path.exists(path):
        return path
    from ggjit.fetch import pull

    return pull(path, progress)


class Model:
    """The weights of a GGUF file, ready for any number of contexts.

    Args:
        path: the file (or any part of a split model), or a name that `ggjit.fetch.pull` takes.
        n_threads: that pack weights.
        repack: pack matrices into panels; without it kernels read the mapped file.
        progress: show a bar while packing, if stderr is a terminal.
        mmap: use weights where the mapped file has them if that serves; without it all are read, and nothing stays
            mapped.
        mlock: keep weights from being paged out; a warning where the system forbids it.
        devices: beside the CPU.
        n_gpu_layers: blocks on the devices, counted from the output, which counts as one; None: all.
        overrides: device of weights by regular expressions that are searched in their names.
        no_alloc: allocate nothing: only tell how much memory it would be.

    Attributes:
        file: the open file, for metadata.
        hparams: hyperparameters.
        architecture: weights by their role; builds graphs.
        n_vocab: number of tokens.
        weights: all weights by name.
        buffers: that hold them.
        placement: the devices of its parts.
        memory: bytes allocated for weights by device.
        mapped_nbytes: bytes of the file that are used where they lie.
        file_rows: matrices whose rows are read from the file as they are wanted.
        is_locked: are all weights of host memory kept from being paged out?

    Raises:
        GgufError: the file is not sound or lacks something.
        NotImplementedError: the architecture is not there.
        ValueError: an argument that places layers is no good.
    """

    @garbage.put_off()
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_threads: int = 1,
        repack: bool = True,
        progress: bool = True,
        mmap: bool = True,
        mlock: bool = False,
        devices: Sequence[Device] = (),
        n_gpu_layers: int | None = None,
        overrides: Mapping[str, Device | str] | None = None,
        no_alloc: bool = False,
    ) -> None:
        path = _path_of(path, progress)
        self.file = GgufFile(path, mmap)
        self.path, self.no_alloc = os.fspath(path), no_alloc
        cls = models.get(architecture_of(self.file))
        self.hparams = Hparams(self.file)
        if self.hparams.n_layer > len(self.file.tensors):  # before anything is made for each block
            got = f"must be at most {len(self.file.tensors)}, the number of tensors, got {self.hparams.n_layer}"
            raise self.hparams.fail("block_count", got)
        self.placement = Placement(self.hparams.n_layer, devices, n_gpu_layers, overrides)
        loader = Loader(self.file, repack, self.placement, mmap, unbacked_buffer if no_alloc else new_buffer)
        self.architecture = cls(self.hparams, loader)
        loader.place()
        if not no_alloc:
            loader.fill(n_threads, progress)
        self.file_rows = {} if mlock else loader.file_rows
        self.is_locked = mlock and not no_alloc and loader.lock()
        self.n_vocab = loader.n_vocab
        self.weights: dict[str, Tensor] = loader.weights
        self.buffers, self.memory, self.mapped_nbytes = loader.buffers, loader.memory, loader.mapped_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the weights where they are used: in buffers, and in the mapped file."""
        return sum(t.nbytes if t.buffer is None else t.buffer.type.alloc_size(t) for t in self.weights.values())

    def close(self) -> None:
        """Drop weights and file; what still holds a tensor keeps its memory alive."""
        self.weights, self.buffers, self.file_rows = {}, [], {}
        del self.architecture
        self.file.close()

    def __repr__(self) -> str:
        hp = self.hparams
        size = f"{counted(hp.n_layer, 'layer')}, {self.nbytes / 2**20:.0f} MiB"
        return f"Model({os.path.basename(self.path)!r}, {hp.arch}, {size})"
