"""The GGUF file of a GPT-2: sizes, vocabulary, and the bytes of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ggjit.errors import GgufError
from ggjit.gguf import GgufFile
from ggjit.llm.hparams import Hparams, architecture_of
from ggjit.llm.tokenizer import Tokenizer
from ggjit.models.gpt2 import Sizes
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import Type

OUTPUT, TIED = "output.weight", "token_embd.weight"


class Headers:
    """Makes headers of weights in the innermost context; how they get data is the program's affair.

    Args:
        n_vocab: rows of the token embedding.
        type_of: the type of a weight.
    """

    def __init__(self, n_vocab: int, type_of: Callable[[str], Type]) -> None:
        self.n_vocab, self.type_of = n_vocab, type_of

    def vector(self, name: str, *ne: int) -> Tensor:
        """A bias or norm."""
        return new_tensor(self.type_of(name), *ne, name=name)

    def rows(self, name: str, *ne: int) -> Tensor:
        """A matrix of which single rows are read."""
        return self.vector(name, *ne)

    def matrix(self, name: str, *ne: int, tied: str | None = None) -> Tensor:
        """A matrix for mul_mat; a tied one is a tensor of its own here, as in ggml's programs."""
        return self.vector(name, *ne)


class ModelFile:
    """An open model.

    Args:
        path: GGUF file of the architecture gpt2.

    Attributes:
        sizes: hyperparameters.
        n_vocab: number of tokens.
        tokenizer: text to ids and back.

    Raises:
        GgufError: the file is not sound.
        ValueError: it is another model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = GgufFile(path)
        if architecture_of(self.file) != "gpt2":
            raise ValueError(f"gpt2: the architecture must be gpt2, got {architecture_of(self.file)!r}")
        self.sizes = Sizes.from_hparams(Hparams(self.file))
        self.n_vocab = self.file.info(TIED).ne[1]
        self.tokenizer = Tokenizer.from_gguf(self.file)

    def _stored(self, name: str) -> str:
        """The name under which the file has a weight."""
        return TIED if name == OUTPUT and OUTPUT not in self.file.tensors else name

    def type_of(self, name: str) -> Type:
        """The type of a weight."""
        self.file.data(self._stored(name))  # its type is a known one
        type = self.file.info(self._stored(name)).type
        assert type is not None
        return type

    @property
    def headers(self) -> Headers:
        """Makes the headers of this model's weights."""
        return Headers(self.n_vocab, self.type_of)

    def data(self, weight: Tensor) -> NDArray[np.uint8]:
        """The bytes of a weight, on the mapping.

        Raises:
            GgufError: the file has no such weight, or of another shape.
        """
        info = self.file.info(self._stored(weight.name))
        if info.ne != weight.ne:
            text = f"tensor {info.name!r} must have ne {list(weight.ne)}, got {list(info.ne)}"
            raise GgufError(self.file.mappings[info.file].path, info.info_offset, text)
        return self.file.data(info.name)

    def read(self, weights: Iterable[Tensor]) -> None:
        """Copy the bytes of weights to where each has its place: an arena, or a buffer of any device."""
        for weight in weights:
            data, buffer = self.data(weight), weight.buffer
            if buffer is None:
                weight.bytes()[:] = data
            else:
                buffer.set_tensor(weight, data)

    def close(self) -> None:
        """Let the file go."""
        self.file.close()
