"""A model: hyperparameters, weights in memory, and the architecture that builds its graphs."""

from __future__ import annotations

import os

from ggjit import models
from ggjit.gguf import GgufFile
from ggjit.llm.hparams import Hparams, architecture_of
from ggjit.llm.loader import Loader
from ggjit.tensor import Tensor


class Model:
    """The weights of a GGUF file, ready for any number of contexts.

    Args:
        path: the file (or any part of a split model).
        n_threads: that pack weights.
        repack: pack matrices into panels; without it kernels read the mapped file.
        progress: show a bar while packing, if stderr is a terminal.

    Attributes:
        file: the open file, for metadata.
        hparams: hyperparameters.
        architecture: weights by their role; builds graphs.
        n_vocab: number of tokens.
        weights: all weights by name.

    Raises:
        GgufError: the file is not sound or lacks something.
        NotImplementedError: the architecture is not there.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, n_threads: int = 1, repack: bool = True, progress: bool = True
    ) -> None:
        self.path = os.fspath(path)
        self.file = GgufFile(path)
        cls = models.get(architecture_of(self.file))
        self.hparams = Hparams(self.file)
        loader = Loader(self.file, repack)
        self.architecture = cls(self.hparams, loader)
        loader.load(n_threads, progress)
        self.n_vocab = loader.n_vocab
        self.weights: dict[str, Tensor] = loader.weights
        self.buffers = loader.buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the weights where they are used: panels, and tensors in the mapped file."""
        return sum(t.nbytes if t.buffer is None else t.buffer.type.alloc_size(t) for t in self.weights.values())

    def close(self) -> None:
        """Drop weights and file; what still holds a tensor keeps its memory alive."""
        self.weights, self.buffers = {}, []
        del self.architecture
        self.file.close()

    def __repr__(self) -> str:
        hp = self.hparams
        return f"Model({os.path.basename(self.path)!r}, {hp.arch}, {hp.n_layer} layers, {self.nbytes / 2**20:.0f} MiB)"
