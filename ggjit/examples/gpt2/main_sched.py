"""GPT-2 with its last layers on one device and the rest on the CPU.

The program chooses a device for each weight by its name, makes a buffer for each device with a tensor allocator that
cuts it, and puts the whole cache on the device that has more layers. The scheduler finds out the rest: which device
computes each node, where the graph must be cut, and which tensors are copied to the other side.

    n_gpu_layers 4 of 12      CPU                                    device
    weights                   token_embd position_embd layers 0-7    layers 8-11 output_norm output
    cache                     all layers

Where the machine has no other device, a child process stands for one.

Source: ggml's examples/gpt-2/main-sched.cpp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit.alloc import TensorAllocator
from ggjit.backend import Backend, Buffer, Device, alloc_ctx_tensors, devices
from ggjit.cli import at_least
from ggjit.context import Context, tensor_overhead
from ggjit.counts import counted
from ggjit.examples.gpt2.command import main
from ggjit.examples.gpt2.graph import POSITIONS, TOKENS, Cache, gpt2_graph, graph_context, positions, worst_case
from ggjit.examples.gpt2.main_backend import logits_of, n_tensors, new_backend, pick, put
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.models.gpt2 import Gpt2
from ggjit.sched import Scheduler

SPARE = 512  # bytes beside each tensor's own


def on_device(name: str, n_layer: int, n_gpu_layers: int) -> bool:
    """Does a weight go to the device? The last `n_gpu_layers` layers do, and the ends of the model with them."""
    kind, _, rest = name.partition(".")
    if kind == "blk":
        return int(rest.partition(".")[0]) >= n_layer - n_gpu_layers
    return n_gpu_layers > 0 if kind.startswith("output") else n_gpu_layers > n_layer


def cache_on_device(n_layer: int, n_gpu_layers: int) -> bool:
    """Does the cache go to the device? Where more layers are; to the device if they are as many."""
    return 2 * n_gpu_layers >= n_layer


class MainSched:
    """The program's state.

    Args:
        file: the model.
        n_threads: that compute, on the CPU.
        n_gpu_layers: layers on the device; more than there are: the embeddings, too.
        n_batch: most tokens of a run.
        device: beside the CPU.

    Attributes:
        gpu, cpu: the backends.
        tensor_backends: the backend of each weight by its name.
        backend_buffers: the allocator of each backend's buffer of weights, by the backend's name.
        buffer_kv: memory of the cache.
        sched: computes.
    """

    def __init__(self, file: ModelFile, n_threads: int, n_gpu_layers: int, device: Device, n_batch: int = 32) -> None:
        sizes = file.sizes
        self.ctx_w = Context(tensor_overhead() * n_tensors(sizes), no_alloc=True)
        with self.ctx_w:
            self.model = Gpt2(sizes, file.headers)
        self.gpu, self.cpu = new_backend(device, n_threads), new_backend(pick("cpu"), n_threads)
        self.tensor_backends = {
            t.name: self.gpu if on_device(t.name, sizes.n_layer, n_gpu_layers) else self.cpu
            for t in self.ctx_w.tensors.values()
        }
        self.backend_buffers: dict[str, TensorAllocator] = {}
        for backend in (self.gpu, self.cpu):
            self._new_buffer(backend)
        self.ctx_kv = Context(tensor_overhead() * 2, no_alloc=True)
        with self.ctx_kv:
            self.cache = Cache.declare(sizes)
        owner = self.gpu if cache_on_device(sizes.n_layer, n_gpu_layers) else self.cpu
        self.buffer_kv = alloc_ctx_tensors(self.ctx_kv, owner.device.buffer_type())
        for t in self.ctx_w.tensors.values():
            self.backend_buffers[self.tensor_backends[t.name].name].alloc(t)
            file.read([t])
        self.sched = Scheduler([self.gpu, self.cpu])
        with graph_context():
            self.sched.reserve(worst_case(self.model, self.cache, n_batch))

    def _new_buffer(self, backend: Backend) -> None:
        type = backend.device.buffer_type()
        mine = [t for t in self.ctx_w.tensors.values() if self.tensor_backends[t.name] is backend]
        if mine:
            buffer = type.new_buffer(sum(type.padded_size(t) + SPARE for t in mine), "weights")
            self.backend_buffers[backend.name] = TensorAllocator(buffer)

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind `n_past`; their logits, [n, n_vocab]."""
        with graph_context():
            graph = gpt2_graph(self.model, self.cache, n_past, len(tokens))
        self.sched.alloc_graph(graph)
        put(graph.get_tensor(TOKENS), tokens)
        put(graph.get_tensor(POSITIONS), positions(n_past, len(tokens)))
        self.sched.compute(graph)
        return logits_of(graph)

    def facts(self) -> list[str]:
        """What the engine was given, and what it made of the last run."""
        lines = []
        for backend in (self.gpu, self.cpu):
            n = sum(b is backend for b in self.tensor_backends.values())
            size = self.backend_buffers[backend.name].buffer.size if n else 0
            lines.append(
                f"{backend.name} ({backend.device.description}): {n} weights in {size} bytes, "
                f"compute buffer {self.sched.get_buffer_size(backend)} bytes"
            )
        kv: Buffer | None = self.buffer_kv
        assert kv is not None
        lines.append(f"buffer of the cache: {kv.size} bytes ({kv.type.name})")
        run = self.sched.current
        if run is not None:
            nbytes = sum(copy.tensor.nbytes for copy in run.copies)
            counts = counted(len(run.splits), "split"), counted(len(run.copies), "copy", "copies")
            lines.append(f"last run: {', '.join(counts)} of {nbytes} bytes")
        return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this program."""
    other = next((d.name for d in devices() if d.name != "cpu"), "process")
    parser.add_argument("-ngl", "--n-gpu-layers", type=at_least(0), default=0, metavar="N", help="on the device (0)")
    parser.add_argument("--device", default=other, metavar="NAME", help=f"what computes beside the CPU ({other})")


def make(file: ModelFile, args: argparse.Namespace) -> MainSched:
    """The program's state, from the command line's arguments."""
    return MainSched(file, args.threads, args.n_gpu_layers, pick(args.device), args.n_batch)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    return main("main_sched", make, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(run())
