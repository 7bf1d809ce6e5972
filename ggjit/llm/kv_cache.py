"""The KV cache: keys and values of every layer, and which token each of its cells holds.

A cell is one row of every layer's K and V tensor. Tokens take the first free cells in rising order, so a sequence that
grows from nothing lies at cells 0, 1, 2, ... however it was split into batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit.backend import Buffer, BufferType, NewBuffer, alloc_ctx_tensors, host_buffer_type, new_buffer
from ggjit.context import Context, tensor_overhead
from ggjit.pages import use_small_pages
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import Type

SMALL = 16 << 20  # bytes of a layer's keys below which a large page would hold many cells that nobody has reached
PAD = 256  # graphs see the cache's first PAD * 2^k cells


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
        k: for each layer [n_embd_k, n_cells].
        v: for each layer [n_embd_v, n_cells].
        pos: position of each cell's token, -1 if the cell is free.
        seq: sequence of each cell's token, -1 if the cell is free.
        addresses: of `pos` and `seq`.
        n_used: cells in use.
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
        self.nbytes = sum(b.size for b in self.buffers.values())
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.full(n_cells, -1, np.int32)
        self.addresses = self.pos.ctypes.data, self.seq.ctypes.data
        self.n_used = self._end = 0

    def find_cells(self, n: int) -> NDArray[np.int64]:
        """The first `n` free cells.

        Raises:
            ValueError: fewer are free.
        """
        end = self._end
        if self.n_used == end and end + n <= self.n_cells:
            return np.arange(end, end + n)
        free = np.flatnonzero(self.pos < 0)[:n]
        if len(free) < n:
            raise ValueError(f"decode: tokens must fit the context of {self.n_cells}, got {n} with {len(free)} free")
        return free

    def window(self, cells: NDArray[np.int64]) -> int:
        """How many cells a graph must see: all in use and `cells`, rounded up so that few graphs serve all lengths."""
        last = max(int(cells[-1]) + 1 if len(cells) else 0, self._end)
        n = min(PAD, self.n_cells)
        while n < last:
            n *= 2
        return min(n, self.n_cells)

    def take(self, cells: NDArray[np.int64], pos: NDArray[np.int32], seq: NDArray[np.int32]) -> None:
        """Note that `cells`, which were free, hold tokens at `pos` of `seq`."""
        self.pos[cells], self.seq[cells] = pos, seq
        self.n_used += len(cells)
        self._end = max(self._end, int(cells[-1]) + 1) if len(cells) else self._end

    def free(self, cells: NDArray[np.int64] | NDArray[np.bool_]) -> None:
        """Free cells, given by number or as a mask of all."""
        self.pos[cells] = self.seq[cells] = -1
        used = np.flatnonzero(self.pos >= 0)
        self.n_used, self._end = len(used), int(used[-1]) + 1 if len(used) else 0

    def remove(self, seq: int, first: int = 0) -> None:
        """Free the cells of a sequence from position `first` on."""
        self.free((self.seq == seq) & (self.pos >= first))

    def clear(self) -> None:
        """Free all cells."""
        self.pos[:] = self.seq[:] = -1
        self.n_used = self._end = 0

    def tensors(self, il: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self.k[il], self.v[il]
