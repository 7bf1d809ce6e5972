"""Decoding: batches in ubatches, a KV cache, and one graph for each shape that is built once and replayed.

What changes from ubatch to ubatch (ids, positions, mask, the cache rows to write) is data in input tensors; the graph,
its memory plan and its program stay as they are for all ubatches with the same number of tokens, cache window and
outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from ggjit import garbage, ops, types
from ggjit.alloc import GraphAllocator
from ggjit.arguments import check_kinds, check_positive, check_threads
from ggjit.backend import Buffer, BufferType, host_buffer_type, new_buffer
from ggjit.context import Context, tensor_overhead
from ggjit.counts import counted
from ggjit.graph import Graph, graph_overhead
from ggjit.llm import inputs
from ggjit.llm.batch import Batch
from ggjit.llm.kv_cache import PAD, KVCache, cache_type
from ggjit.lower import Executable, Scratch, lower, scratch_size
from ggjit.op import PREC_F32
from ggjit.tensor import Tensor, new_tensor
from ggjit.types import Type
from ggjit.unbacked import UnbackedAllocator, unbacked_buffer

if TYPE_CHECKING:
    from ggjit.gguf.rows import FileRows
    from ggjit.llm.memory import Memory
    from ggjit.llm.model import Model
    from ggjit.llm.scheduled import Scheduled

N_UBATCH = 512
MAX_GRAPHS = 12  # shapes kept ready
PRECISIONS = {"default": 0, "f32": PREC_F32}  # words of the products that the architecture gives none
GRAPH_SIZE = 8192


def check_precision(where: str, prec: str) -> None:
    """Check that a name of `PRECISIONS` is given.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(prec, str) or prec not in PRECISIONS:
        raise ValueError(f"{where}: prec must be one of {list(PRECISIONS)}, got {prec!r}")


_DROPPED = ("cache", "allocator", "scratch", "scheduler")  # attributes of a context that is not closed


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
        self._file_rows = context.model.file_rows
        self._rows: tuple[Tensor, Tensor, FileRows] | None = None
        self._stores: list[Tensor] = []
        self._windows: dict[int, Tensor] = {}
        size, prec = GRAPH_SIZE * tensor_overhead() + graph_overhead(GRAPH_SIZE), PRECISIONS[context.prec]
        self.context = Context(size, no_alloc=True, prec=prec)
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
        self._scheduled: Scheduled | None = None

    def prepare(self, context: DecodeContext) -> DecodeGraph:
        """Make it ready to run."""
        if context.scheduler is None:
            # The same tokens will see more of the cache: with room for its masks, the buffer stays.
            context.allocator.room = 2 * self.n_tokens * (self.cache.n_cells - self.n_kv) * (1 + len(self._windows))
            context.allocator.alloc_graph(self.graph)
            self.executable: Executable = lower(self.graph, context.n_threads, scratch=context.scratch)
            self._bind()
        else:
            from ggjit.llm.scheduled import Scheduled

            self._scheduled = Scheduled(context.scheduler, self.graph)
        return self

    def _bind(self) -> None:
        """Note where inputs and result lie."""
        known = {*self.graph.leafs}
        numbers, of_rows = None, (0, 0, 0, 0, 0)
        if self._rows is not None:
            from ggjit.gguf.rows import pread_address

            rows, numbers, source = self._rows
            of_rows = pread_address(), source.file, rows.data, source.row_nbytes, source.offset
        wanted = [self.tokens, self.pos, self.cells, self.out_ids, numbers]
        masks = [(t.data, window) for window, t in [(0, self.mask), *self._windows.items()] if t in known]
        places = [0 if t is None or t not in known else t.data for t in wanted]
        self._inputs = np.array([self.n_kv, *places, *of_rows, len(masks), *(x for m in masks for x in m)], np.int64)
        self._inputs_address = self._inputs.ctypes.data
        self._result = self._last = None
        if self.logits is not None and self.logits.buffer is not None and self.logits.buffer.type.is_host:
            self._result = self.logits.numpy()[0, 0]
            self._last = self._result[-1]

    # -- what model files call ---------------------------------------------------------------------------------------

    def name(self, t: Tensor, name: str, il: int | None = None) -> Tensor:
        """Name a tensor as llama.cpp does, `name-il` in layers; returns it."""
        t.name = name if il is None else f"{name}-{il}"
        return t

    def embed(self, weight: Tensor) -> Tensor:
        """Rows of an embedding for the ubatch's tokens, f32 [n_embd, n_tokens].

        Where the model wants it (`Model.file_rows`) they are read from the file before each run.

        Args:
            weight: [n_embd, n_vocab].
        """
        source = self._file_rows.get(weight)
        if source is None:
            return ops.get_rows(weight, self.tokens)
        rows = new_tensor(weight.type, weight.ne[0], self.n_tokens, name="inp_rows").set_input()
        numbers = new_tensor(types.I32, self.n_tokens, name="inp_row_ids").set_input()
        self._rows = rows, numbers, source
        return ops.get_rows(rows, numbers)

    def compute_first(self, il: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compute what a layer's queries, keys and values are made of, one after the other, before anything else.

        Threads need not meet between products of one source, nor between the ropes and stores behind them.
        """
        is_last = il == self.cache.n_layer - 1  # where nothing but the cache is wanted, it makes no queries
        for t in (k, v) if is_last and not self.n_outputs else (q, k, v):
            self.graph.build_forward_expand(t)

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

    def run(self, batch: Batch, callback: Callable[[Tensor], bool] | None = None) -> bool:
        """Fill the inputs for a batch that has its cells, and compute; False if the callback stopped it."""
        if self._scheduled is not None and self._scheduled.place():
            self._bind()
        if inputs.fill.c_function(self._inputs_address, batch.address, self.cache.address) and self._rows is not None:
            rows, _, source = self._rows
            source.read(batch.tokens.tolist(), map(memoryview, rows.bytes().reshape(self.n_tokens, -1)))
        return (self._scheduled or self.executable).run(callback)

    def result(self) -> NDArray[np.float32]:
        """The logits of the last run, [n_outputs, n_vocab]: a view that the next run overwrites, or a copy of them."""
        assert self.logits is not None
        result: NDArray[np.float32] = self.logits.numpy()[0, 0] if self._result is None else self._result
        return result

    def last_result(self) -> NDArray[np.float32]:
        """The logits of the last of the tokens that have them, as `result` gives them."""
        last: NDArray[np.float32] = self.result()[-1] if self._last is None else self._last
        return last


class _Allocator(GraphAllocator):
    """Gives new buffers `room` beyond what is planned."""

    room = 0

    def _new_buffer(self, type: BufferType, size: int) -> Buffer:
        return super()._new_buffer(type, size + self.room)


class _UnbackedAllocator(_Allocator, UnbackedAllocator):
    """The same without memory."""


class DecodeContext:
    """A model at work: its KV cache and its graphs.

    Where a model has parts on other devices, a scheduler computes the graphs, and memory for the largest ones is taken
    at once. On the CPU alone it grows with the graphs, unless `reserve` is called.

    Args:
        model: the weights.
        n_ctx: tokens the cache holds (rounded up to a multiple of 256).
        n_threads: that compute.
        kv_type: of the cache, F16 or F32: the type or its name.
        n_ubatch: most tokens computed together.
        prec: "default", or "f32": all products of weights but those of experts take activations of about 16 bits.

    Attributes:
        cache: keys and values, each layer's on the layer's device.
        scheduler: None on the CPU alone.
        reserved: nodes and splits of the graphs of a prompt and of one token, once memory is reserved.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a size is not positive, `n_threads` not 1 to 512, or the cache type or the precision
            is none of the two.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_threads: int,
        kv_type: Type | str = types.F16,
        n_ubatch: int = N_UBATCH,
        prec: str = "default",
    ) -> None:
        kv_type = cache_type("DecodeContext", kv_type)
        check_kinds("DecodeContext", Integral, "a whole number", n_ctx=n_ctx, n_ubatch=n_ubatch)
        check_positive("DecodeContext", n_ctx=n_ctx, n_ubatch=n_ubatch)
        n_threads = check_threads("DecodeContext", n_threads)
        check_precision("DecodeContext", prec)
        self.model, self.n_threads, self.n_ubatch, self.n_ctx, self.prec = model, n_threads, n_ubatch, n_ctx, prec
        self.cache = self._new_cache(kv_type)
        self.allocator = (_UnbackedAllocator if model.no_alloc else _Allocator)(host_buffer_type())
        self.scratch, self._scratch_nbytes = Scratch(), 0
        self.reserved: dict[str, tuple[int, int]] = {}
        self._graphs: dict[tuple[int, int, int], DecodeGraph] = {}  # in the order of use
        self._latest = (0, 0, 0)
        self.scheduler = None
        if not model.placement.is_cpu_only:
            from ggjit.llm.scheduled import new_scheduler

            self.scheduler = new_scheduler(model.placement, n_threads, model.no_alloc)
            self.reserve()

    def _new_cache(self, kv_type: Type) -> KVCache:
        model, hp = self.model, self.model.hparams
        n_cells = (self.n_ctx + PAD - 1) // PAD * PAD
        k_rows = [hp.head_dim * hp.n_head_kv(il) for il in range(hp.n_layer)]
        v_rows = [hp.head_dim_v * hp.n_head_kv(il) for il in range(hp.n_layer)]
        where = [d.buffer_type() for d in model.placement.layers]
        try:
            return KVCache(n_cells, kv_type, k_rows, v_rows, where, unbacked_buffer if model.no_alloc else new_buffer)
        except MemoryError:
            size = kv_type.type_size * n_cells * (sum(k_rows) + sum(v_rows))
            raise MemoryError(
                f"DecodeContext: the KV cache of {self.n_ctx} tokens must fit the memory, got {size / 2**30:.1f} GiB; "
                "give a smaller n_ctx"
            ) from None

    # -- memory ------------------------------------------------------------------------------------------------------

    def _largest(self, n_tokens: int) -> DecodeGraph:
        """The graph that needs most memory of those with so many tokens: all cells, all logits."""
        return DecodeGraph(self, n_tokens, self.cache.n_cells, n_tokens)

    def reserve(self) -> None:
        """Take the memory of the largest graphs.

        Three times: for a prompt; for one token, whose splits may need more; and for a prompt again, because each plan
        replaces the one before.

        Source: llama.cpp's llama_context::sched_reserve.
        """
        n = min(self.n_ubatch, self.n_ctx)
        for what, n_tokens in (("prompt", n), ("decode", 1), ("prompt", n)):
            graph = self._largest(n_tokens).graph
            if self.scheduler is not None:
                n_splits = len(self.scheduler.split_graph(graph).splits)
                self.scheduler.reserve(graph)
            else:
                n_splits, self.allocator.room = 1, 0
                self.allocator.alloc_graph(graph)
                self._scratch_nbytes = max(self._scratch_nbytes, scratch_size(graph, self.n_threads))
            self.reserved[what] = len(graph.nodes), n_splits
        if not self.model.no_alloc:
            self.scratch.take(self._scratch_nbytes)

    def memory(self) -> dict[str, Memory]:
        """Bytes that are allocated on each device (without memory: that would be), the CPU last.

        After `reserve` these are the largest that any graph needs. Scratch of the devices of a scheduler is taken when
        they compute; here it is that of the largest graph.
        """
        from ggjit.llm.memory import Memory

        placement = self.model.placement
        kv = {d.name: self.cache.buffers.get(d.buffer_type()) for d in placement.devices}
        if self.scheduler is None:
            n = self._scratch_nbytes if self.model.no_alloc else self.scratch.nbytes
            compute, scratch = {placement.cpu.name: self.allocator.get_buffer_size()}, {placement.cpu.name: n}
        else:
            from ggjit.llm.scheduled import Scheduled

            largest = Scheduled(self.scheduler, self._largest(min(self.n_ubatch, self.n_ctx)).graph)
            largest.place()
            names = [b.name for b in self.scheduler.backends]
            compute = {b.name: self.scheduler.get_buffer_size(b) for b in self.scheduler.backends}
            scratch = dict(zip(names, largest.scratch_sizes(), strict=True))
        return {
            name: Memory(
                self.model.memory[name],
                0 if buffer is None else buffer.size,
                compute.get(name, 0),
                scratch.get(name, 0),
            )
            for name, buffer in kv.items()
        }

    # -- decoding ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        counts = counted(self.n_ctx, "token"), counted(len(self._graphs), "graph"), counted(self.n_threads, "thread")
        return f"DecodeContext({', '.join(counts)})"

    def graph(self, n_tokens: int, n_kv: int, n_outputs: int) -> DecodeGraph:
        """The graph of a shape, built at its first use."""
        key = n_tokens, n_kv, n_outputs
        if key != self._latest:
            found = self._graphs.pop(key, None)
            self._graphs[key] = found or self._new_graph(*key)  # the last that will be dropped
            self._latest = key
            while len(self._graphs) > MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return self._graphs[key]

    @garbage.put_off()
    def _new_graph(self, n_tokens: int, n_kv: int, n_outputs: int) -> DecodeGraph:
        return DecodeGraph(self, n_tokens, n_kv, n_outputs).prepare(self)

    def decode(
        self, batch: Batch, callback: Callable[[Tensor], bool] | None = None, copy: bool = True
    ) -> NDArray[np.float32]:
        """Compute a batch; its keys and values stay in the cache.

        Args:
            batch: tokens.
            callback: see `Executable.run`. If it stops the run, the cells of the ubatch are free again and no more
                logits are computed.
            copy: False gives the logits of the last token alone, which must have some, where they lie: the next call
                overwrites them.

        Returns:
            Logits of the tokens with `output` set, f32 [n, n_vocab]; f32 [n_vocab] without a copy, [0] if the callback
            stopped the run.

        Raises:
            ValueError: a token id is out of range, the cache is too full, or there are no logits where they are wanted
                without a copy; nothing is computed then.
        """
        cache, n_vocab, at = self.cache, self.model.n_vocab, 0
        if not (copy or (batch.n_tokens and batch.output[-1])):
            raise ValueError("decode: the last token must have output=True if logits are not copied, got none")
        if batch.n_tokens > self.n_ctx - cache.n_used:
            raise ValueError(
                f"decode: tokens must fit the context of {self.n_ctx}, got {batch.n_tokens} with {cache.n_used} in use"
            )
        if copy:
            results = np.empty((np.count_nonzero(batch.output), n_vocab), np.float32)
        ubatches = batch.ubatches(self.n_ubatch)
        if len(ubatches) > 1:
            batch.check(n_vocab)  # all of them, before the first is computed
        for u in ubatches:
            n_outputs, done = cache.take(u, n_vocab), False
            try:
                graph = self.graph(u.n_tokens, cache.n_seen, n_outputs)
                done = graph.run(u, callback)
            finally:
                if not done:
                    cache.give_back(u)
            if not done:
                break
            if copy and n_outputs:
                results[at : at + n_outputs] = graph.result()
                at += n_outputs
        if copy:
            return results[:at]
        return graph.last_result() if done else np.empty(0, np.float32)

    def close(self) -> None:
        """Drop graphs and cache; computing is an error from here on."""
        self._graphs.clear()
        for name in _DROPPED:
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> NoReturn:
        """Only what is not there gets here: what `close` has dropped."""
        if name in _DROPPED:
            raise ValueError("DecodeContext: the context must be open, got a closed one")
        raise AttributeError(f"'DecodeContext' object has no attribute {name!r}")
