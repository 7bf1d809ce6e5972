"""The KV cache: keys and values of every layer, and which token each of its cells holds.

A cell is one row of every layer's K and V tensor. Tokens take the first free cells in rising order, so a sequence that
grows from nothing lies at cells 0, 1, 2, ... however it was split into batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.backend import Buffer, BufferType, NewBuffer, alloc_ctx_tensors, host_buffer_type, new_buffer
from ggjit.context import Context, tensor_overhead
from ggjit.llm import inputs
from ggjit.llm.batch import Batch
from ggjit.pages import use_small_pages
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import Type

SMALL = 16 << 20  # bytes of a layer's keys below which a large page would hold many cells that nobody has reached
PAD = 256  # graphs see the cache's first PAD * 2^k cells


def cache_type(where: str, kv_type: Type | str) -> Type:
    """The type of a cache's keys and values, given by itself or by its name.

    Raises:
        TypeError: what is given is neither.
        ValueError: no cache has that type.
    """
    for type in (types.F16, types.F32):
        if kv_type is type or (isinstance(kv_type, str) and kv_type.upper() == type.name):
            return type
    error = ValueError if isinstance(kv_type, (Type, str)) else TypeError
    raise error(f"{where}: kv_type must be f16 or f32, as a type or by its name, got {kv_type!r}")


class KVCache:
    """Keys and values of `n_cells` tokens.

    Args:
        n_cells: most tokens held at a time.
        type: of keys and values, F32 or F16.
        k_rows: for each layer the number of key values of a token (head_dim * n_head_kv).
        v_rows: the same for values.
        buffer_types: the memory of each layer's part, by default the host's.
        new_buffer: makes the buffers, one of each type.

    Attributes:
        n_layer: number of layers.
        k: for each layer [n_embd_k, n_cells].
        v: for each layer [n_embd_v, n_cells].
        pos: position of each cell's token, -1 if the cell is free.
        seq: sequence of each cell's token, -1 if the cell is free.
        address: of the words that compiled code knows the cache by (`ggjit.llm.inputs`).
        n_used: cells in use.
        n_seen: cells that a graph must see, see `window`.
        buffers: that hold them, by their types.
        nbytes: bytes of keys and values.
    """

    def __init__(
        self,
        n_cells: int,
        type: Type,
        k_rows: Sequence[int],
        v_rows: Sequence[int],
        buffer_types: Sequence[BufferType] | None = None,
        new_buffer: NewBuffer = new_buffer,
    ) -> None:
        self.n_cells = n_cells
        self.type = type
        kinds = [host_buffer_type()] * len(k_rows) if buffer_types is None else buffer_types
        k, v = dict[int, Tensor](), dict[int, Tensor]()
        self.buffers: dict[BufferType, Buffer] = {}
        for kind in dict.fromkeys(kinds):
            mine = [il for il, other in enumerate(kinds) if other is kind]
            with Context(2 * len(mine) * tensor_overhead(), no_alloc=True) as context:
                k.update({il: new_tensor(type, k_rows[il], n_cells, name=f"cache_k_l{il}") for il in mine})
                v.update({il: new_tensor(type, v_rows[il], n_cells, name=f"cache_v_l{il}") for il in mine})
            buffer = alloc_ctx_tensors(context, kind, new_buffer=new_buffer)
            if buffer is not None:
                self.buffers[kind] = buffer
                if buffer.array is not None and max(t.nbytes for t in context.tensors.values()) < SMALL:
                    use_small_pages(buffer.base, buffer.size)
        self.k, self.v = ([x[il] for il in range(len(kinds))] for x in (k, v))
        self.n_layer, self.nbytes = len(self.k), sum(b.size for b in self.buffers.values())
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.full(n_cells, -1, np.int32)
        self._taken = np.zeros(n_cells, np.int64)
        lists = [a.ctypes.data for a in (self.pos, self.seq, self._taken)]
        self._words = np.array([n_cells, *lists, 0], np.int64)
        self.address = self._words.ctypes.data
        self.n_used = self._end = 0
        self.n_seen = self.window()

    def find_cells(self, n: int) -> NDArray[np.int64]:
        """The first `n` free cells, which the next `n` tokens will take.

        Raises:
            ValueError: fewer are free.
        """
        found = inputs.find(self.address, n, self._end if self.n_used == self._end else 0)
        if found < n:
            raise self._full(n)
        return self._taken[:n].copy()

    def _full(self, n: int) -> ValueError:
        free = self.n_cells - self.n_used
        return ValueError(f"decode: tokens must fit the context of {self.n_cells}, got {n} with {free} free")

    def window(self, cells: NDArray[np.int64] | Sequence[int] = ()) -> int:
        """How many cells a graph must see: all in use and `cells`, rounded up so that few graphs serve all lengths."""
        last = max(int(cells[-1]) + 1 if len(cells) else 0, self._end)
        n = min(PAD, self.n_cells)
        while n < last:
            n *= 2
        return min(n, self.n_cells)

    @property
    def ticks(self) -> int:
        """Ticks of the CPU's time counter that compiled code has taken so far, for cells and for inputs."""
        return int(self._words[-1])

    def take(self, batch: Batch, n_vocab: int) -> int:
        """Let the tokens of a batch have the first free cells.

        Args:
            batch: tokens.
            n_vocab: ids below it are known.

        Returns:
            How many of the tokens give logits.

        Raises:
            ValueError: a token is out of range, or there are fewer free cells; nothing is taken then.
        """
        end = self._end
        found = inputs.take.c_function(self.address, batch.address, n_vocab, end if self.n_used == end else 0)
        if found < 0:
            raise self._full(batch.n_tokens) if found == inputs.NONE_FREE else batch.error(found, n_vocab)
        self.n_used += batch.n_tokens
        last = found >> 32
        if last > end:
            self._end = last
            if last > self.n_seen:
                self.n_seen = self.window()
        return int(found & 0xFFFFFFFF)

    def give_back(self, batch: Batch) -> None:
        """Free the cells that the last batch took."""
        self.free(self._taken[: batch.n_tokens])

    def free(self, cells: NDArray[np.int64] | NDArray[np.bool_]) -> None:
        """Free cells, given by number or as a mask of all."""
        self.pos[cells] = self.seq[cells] = -1
        used = np.flatnonzero(self.pos >= 0)
        self.n_used, self._end = len(used), int(used[-1]) + 1 if len(used) else 0
        self.n_seen = self.window()

    def remove(self, seq: int, first: int = 0) -> None:
        """Free the cells of a sequence from position `first` on."""
        self.free((self.seq == seq) & (self.pos >= first))

    def clear(self) -> None:
        """Free all cells."""
        self.pos[:] = self.seq[:] = -1
        self.n_used = self._end = 0
        self.n_seen = self.window()

    def tensors(self, il: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self.k[il], self.v[il]
