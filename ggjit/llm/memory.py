"""How much memory a model and its context take, known before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggjit import types
from ggjit.arguments import check_positive, check_threads

if TYPE_CHECKING:
    from ggjit.backend import Device
    from ggjit.types import Type


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: in buffers; what is used in the mapped file is not among them.
        kv: keys and values.
        compute: inputs, results of nodes, logits.
        scratch: of kernels.
    """

    weights: int
    kv: int
    compute: int
    scratch: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.kv + self.compute + self.scratch


@dataclass(frozen=True)
class Estimate:
    """What a model will take.

    Attributes:
        devices: by name, the CPU last.
        mapped: bytes of the file that are used where they lie; the system reads and drops them as it likes.
        n_ctx, n_ubatch: of the context.
        reserved: nodes and splits of the graphs of a prompt and of one token.
    """

    devices: dict[str, Memory]
    mapped: int
    n_ctx: int
    n_ubatch: int
    reserved: dict[str, tuple[int, int]]


def estimate(
    path: str | os.PathLike[str],
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    kv_type: Type | str = types.F16,
    n_ubatch: int | None = None,
    repack: bool = True,
    mmap: bool = True,
    devices: Sequence[Device] = (),
    n_gpu_layers: int | None = None,
    overrides: Mapping[str, Device | str] | None = None,
) -> Estimate:
    """Weights, cache, compute and scratch memory of a model, without allocating any; arguments as for `LLM`.

    All that allocates runs as it would, with buffers that have addresses and no memory. So the figures are those of
    `DecodeContext.memory` after `DecodeContext.reserve`.

    Raises:
        GgufError: the file is not sound.
        NotImplementedError: the architecture is not there.
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range.
    """
    from ggjit.llm.context import N_UBATCH, DecodeContext
    from ggjit.llm.kv_cache import cache_type
    from ggjit.llm.model import Model
    from ggjit.threadpool import default_threads

    check_positive("estimate", n_ctx=n_ctx, n_ubatch=n_ubatch)
    kv_type = cache_type("estimate", kv_type)
    n = default_threads() if n_threads is None else check_threads("estimate", n_threads)
    model = Model(
        path, n_threads=n, repack=repack, progress=False, mmap=mmap, devices=devices, n_gpu_layers=n_gpu_layers,
        overrides=overrides, no_alloc=True,
    )  # fmt: skip
    try:
        n_ctx = model.hparams.default_n_ctx if n_ctx is None else n_ctx
        n_ubatch = N_UBATCH if n_ubatch is None else n_ubatch
        context = DecodeContext(model, n_ctx, n, kv_type, n_ubatch)
        if not context.reserved:
            context.reserve()
        return Estimate(context.memory(), model.mapped_nbytes, n_ctx, n_ubatch, context.reserved)
    finally:
        model.close()
