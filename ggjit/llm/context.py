"""Decoding: batches in ubatches, a KV cache, and one graph for each shape that is built once and replayed.

What changes from ubatch to ubatch (ids, positions, mask, the cache rows to write) is data in input tensors; the graph,
its memory plan and its program stay as they are for all ubatches with the same number of tokens, cache window and
outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ggjit import ops, types
from ggjit.alloc import GraphAllocator
from ggjit.backend import host_buffer_type
from ggjit.context import Context, tensor_overhead
from ggjit.graph import Graph, graph_overhead
from ggjit.llm.batch import Batch
from ggjit.llm.kv_cache import PAD, KVCache
from ggjit.lower import Executable, lower
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import Type

if TYPE_CHECKING:
    from ggjit.llm.model import Model

N_UBATCH = 512
MAX_GRAPHS = 12  # shapes kept ready
GRAPH_SIZE = 8192
_MASKED = np.uint16(0xFC00)  # -inf as f16


class DecodeGraph:
    """The graph of one ubatch shape, while it is built and afterwards.

    Args:
        context: decodes with it.
        n_tokens: of the ubatch.
        n_kv: cells of the cache that it sees.
        n_outputs: tokens whose logits it gives; 0 only fills the cache.

    Attributes:
        tokens: ids, i32 [n_tokens].
        pos: positions, i32 [n_tokens].
        mask: 0 where a token may attend to a cell, else -inf; f16 [n_kv, n_tokens].
        cells: cache rows that the tokens' keys and values go to, i64 [n_tokens].
        out_ids: which tokens give logits, i32 [n_outputs].
        logits: f32 [n_vocab, n_outputs], None if n_outputs is 0.
    """

    def __init__(self, context: DecodeContext, n_tokens: int, n_kv: int, n_outputs: int) -> None:
        self.cache, self.n_tokens, self.n_kv, self.n_outputs = context.cache, n_tokens, n_kv, n_outputs
        self._stores: list[Tensor] = []
        self._windows: dict[int, Tensor] = {}
        self.context = Context(GRAPH_SIZE * tensor_overhead() + graph_overhead(GRAPH_SIZE), no_alloc=True)
        with self.context:
            self.tokens = new_tensor(types.I32, n_tokens, name="inp_tokens").set_input()
            self.pos = new_tensor(types.I32, n_tokens, name="inp_pos").set_input()
            self.mask = new_tensor(types.F16, n_kv, n_tokens, name="kq_mask").set_input()
            self.cells = new_tensor(types.I64, n_tokens, name="kv_cells").set_input()
            self.out_ids = new_tensor(types.I32, max(n_outputs, 1), name="inp_out_ids").set_input()
            self.graph = Graph(GRAPH_SIZE)
            logits = context.model.architecture.build(self)
            for store in self._stores:
                self.graph.build_forward_expand(store)
            self.logits = logits.set_output() if n_outputs else None
            if n_outputs:
                self.graph.build_forward_expand(logits)
        context.allocator.alloc_graph(self.graph)
        self.executable: Executable = lower(self.graph, context.n_threads)
        known = {*self.graph.leafs}
        self._inputs = {t: t.numpy() for t in (self.tokens, self.pos, self.cells, self.out_ids) if t in known}
        masks = [(None, self.mask), *self._windows.items()]
        self._masks = {w: t.numpy()[0, 0].view(np.uint16) for w, t in masks if t in known}
        self._result = self.logits.numpy()[0, 0] if self.logits is not None else None

    # -- what model files call ---------------------------------------------------------------------------------------

    def name(self, t: Tensor, name: str, il: int | None = None) -> Tensor:
        """Name a tensor as llama.cpp does, `name-il` in layers; returns it."""
        t.name = name if il is None else f"{name}-{il}"
        return t

    def store_kv(self, il: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of the ubatch to the cache of a layer.

        Args:
            il: layer.
            k: f32 [head_dim, n_head_kv, n_tokens].
            v: f32 [head_dim_v, n_head_kv, n_tokens].

        Returns:
            The cache's window as [head_dim, n_kv, n_head_kv] and [head_dim_v, n_kv, n_head_kv].
        """
        views = []
        for cache, new in zip(self.cache.tensors(il), (k, v), strict=True):
            rows = ops.view_2d(new, new.ne[0] * new.ne[1], new.ne[2], new.nb[2], 0)
            store = ops.set_rows(cache, rows, self.cells)
            self._stores.append(store)
            self.graph.build_forward_expand(store)
            row, esz = cache.nb[1], cache.type.type_size
            window = ops.view_3d(cache, new.ne[0], new.ne[1], self.n_kv, new.ne[0] * esz, row, 0)
            views.append(ops.permute(window, 0, 2, 1, 3))
        return views[0], views[1]

    def window_mask(self, window: int) -> Tensor:
        """The mask of attention to the last `window` tokens, the token itself among them; f16 [n_kv, n_tokens]."""
        if window not in self._windows:
            mask = new_tensor(types.F16, self.n_kv, self.n_tokens, name=f"kq_mask_{window}")
            self._windows[window] = mask.set_input()
        return self._windows[window]

    def select_outputs(self, x: Tensor) -> Tensor:
        """The rows of `x` whose logits are wanted; all of them as they are."""
        if self.n_outputs == self.n_tokens:
            return x
        return ops.get_rows(x, self.out_ids)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, cells: NDArray[np.int64], callback: Callable[[Tensor], bool] | None = None) -> None:
        """Fill the inputs and compute."""
        values = {self.tokens: batch.tokens, self.pos: batch.pos, self.cells: cells}
        if 0 < self.n_outputs < self.n_tokens:
            values[self.out_ids] = np.flatnonzero(batch.output)
        for t, view in self._inputs.items():
            view[...] = values[t]
        cell_pos, cell_seq = self.cache.pos[: self.n_kv], self.cache.seq[: self.n_kv]
        hidden = (cell_pos > batch.pos[:, None]) | (cell_seq != batch.seq[:, None])
        for window, mask in self._masks.items():
            outside = hidden if window is None else hidden | (cell_pos <= batch.pos[:, None] - window)
            np.multiply(outside, _MASKED, out=mask, casting="unsafe")
        self.executable.run(callback)

    def result(self) -> NDArray[np.float32]:
        """The logits of the last run, [n_outputs, n_vocab]: a view that the next run overwrites."""
        assert self._result is not None
        result: NDArray[np.float32] = self._result
        return result


class DecodeContext:
    """A model at work: its KV cache and its graphs.

    Args:
        model: the weights.
        n_ctx: tokens the cache holds (rounded up to a multiple of 256).
        n_threads: that compute.
        kv_type: of the cache, F16 or F32.
        n_ubatch: most tokens computed together.

    Raises:
        ValueError: a size is not positive, or the cache type is none of the two.
    """

    def __init__(
        self, model: Model, n_ctx: int, n_threads: int, kv_type: Type = types.F16, n_ubatch: int = N_UBATCH
    ) -> None:
        if n_ctx < 1 or n_ubatch < 1 or n_threads < 1:
            raise ValueError(
                f"DecodeContext: n_ctx, n_ubatch and n_threads must be positive, "
                f"got {n_ctx}, {n_ubatch} and {n_threads}"
            )
        if kv_type not in (types.F16, types.F32):
            raise ValueError(f"DecodeContext: kv_type must be f16 or f32, got {kv_type.name.lower()}")
        self.model, self.n_threads, self.n_ubatch, self.n_ctx = model, n_threads, n_ubatch, n_ctx
        hp = model.hparams
        n_cells = (n_ctx + PAD - 1) // PAD * PAD
        k_rows = [hp.head_dim * hp.n_head_kv(il) for il in range(hp.n_layer)]
        v_rows = [hp.head_dim_v * hp.n_head_kv(il) for il in range(hp.n_layer)]
        try:
            self.cache = KVCache(n_cells, kv_type, k_rows, v_rows)
        except MemoryError:
            size = kv_type.type_size * n_cells * (sum(k_rows) + sum(v_rows))
            raise MemoryError(
                f"DecodeContext: the KV cache of {n_ctx} tokens must fit the memory, got {size / 2**30:.1f} GiB; "
                "give a smaller n_ctx"
            ) from None
        self.allocator = GraphAllocator(host_buffer_type())
        self._graphs: OrderedDict[tuple[int, int, int], DecodeGraph] = OrderedDict()

    def __repr__(self) -> str:
        return f"DecodeContext({self.n_ctx} tokens, {len(self._graphs)} graphs, {self.n_threads} threads)"

    def graph(self, n_tokens: int, n_kv: int, n_outputs: int) -> DecodeGraph:
        """The graph of a shape, built at its first use."""
        key = (n_tokens, n_kv, n_outputs)
        found = self._graphs.get(key)
        if found is None:
            found = self._graphs[key] = DecodeGraph(self, *key)
            while len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return found

    def decode(self, batch: Batch, callback: Callable[[Tensor], bool] | None = None) -> NDArray[np.float32]:
        """Compute a batch; its keys and values stay in the cache.

        Args:
            batch: tokens.
            callback: see `Executable.run`.

        Returns:
            Logits of the tokens with `output` set, f32 [n, n_vocab].

        Raises:
            ValueError: a token id is out of range, or the cache is too full; nothing is computed then.
        """
        n_vocab = self.model.n_vocab
        if batch.n_tokens and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < n_vocab:
            bad = next(t for t in batch.tokens.tolist() if not 0 <= t < n_vocab)
            raise ValueError(f"decode: token ids must be in [0, {n_vocab}), got {bad}")
        if batch.n_tokens > self.n_ctx - self.cache.n_used:
            raise ValueError(
                f"decode: tokens must fit the context of {self.n_ctx}, "
                f"got {batch.n_tokens} with {self.cache.n_used} in use"
            )
        results = np.empty((int(np.count_nonzero(batch.output)), n_vocab), np.float32)
        at = 0
        for u in batch.ubatches(self.n_ubatch):
            n_outputs = int(np.count_nonzero(u.output))
            cells = self.cache.find_cells(u.n_tokens)
            graph = self.graph(u.n_tokens, self.cache.window(cells), n_outputs)
            self.cache.take(cells, u.pos, u.seq)
            try:
                graph.run(u, cells, callback)
            except BaseException:
                self.cache.pos[cells] = self.cache.seq[cells] = -1
                raise
            if n_outputs:
                results[at : at + n_outputs] = graph.result()
                at += n_outputs
        return results

    def close(self) -> None:
        """Drop graphs and cache."""
        self._graphs.clear()
        del self.cache, self.allocator
