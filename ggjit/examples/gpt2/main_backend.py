"""GPT-2 on one device that is chosen at the start.

The contexts of weights and cache hold headers only. One call sums up what their tensors take in the device's memory,
allocates one buffer and cuts it in order. Bytes go in and out by `set_tensor` and `get_tensor`, never by pointers.

Source: ggml's examples/gpt-2/main-backend.cpp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ggjit.alloc import GraphAllocator
from ggjit.backend import Backend, Device, alloc_ctx_tensors, devices
from ggjit.backends.cpu import CpuBackend
from ggjit.backends.process import ProcessDevice
from ggjit.context import Context, tensor_overhead
from ggjit.examples.gpt2.command import main
from ggjit.examples.gpt2.graph import (
    LOGITS,
    POSITIONS,
    TOKENS,
    Cache,
    gpt2_graph,
    graph_context,
    positions,
    worst_case,
)
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.graph import Graph
from ggjit.models.gpt2 import Gpt2, Sizes
from ggjit.tensor import Tensor


def n_tensors(sizes: Sizes) -> int:
    """Slots of the weights' context."""
    return 2 + 6 + 12 * sizes.n_layer


def pick(name: str) -> Device:
    """The device of a name; "process" starts a child process that stands for one.

    Raises:
        ValueError: there is none.
    """
    found: dict[str, Callable[[], Device]] = {"process": ProcessDevice}
    found |= {d.name: lambda d=d: d for d in devices()}  # type: ignore[misc]
    if name not in found:
        raise ValueError(f"gpt2: the device must be one of {sorted(found)}, got {name!r}")
    return found[name]()


def new_backend(device: Device, n_threads: int) -> Backend:
    """A backend of a device; on the CPU it computes with some threads."""
    backend = device.new_backend()
    if isinstance(backend, CpuBackend):
        backend.n_threads = n_threads
    return backend


def put(tensor: Tensor, values: Sequence[int] | NDArray[np.int32]) -> None:
    """Write whole numbers into an input."""
    assert tensor.buffer is not None
    tensor.buffer.set_tensor(tensor, np.asarray(values, np.int32))


def logits_of(graph: Graph) -> NDArray[np.float32]:
    """Logits, f32 [n, n_vocab]."""
    t = graph.get_tensor(LOGITS)
    assert t.buffer is not None
    return t.buffer.get_tensor(t).view(np.float32).reshape(t.ne[1], t.ne[0])


class DeviceModel:
    """Weights and cache in one device's memory.

    Args:
        file: the model.
        device: of the buffers.

    Attributes:
        ctx_w, buffer_w: headers and memory of the weights.
        ctx_kv, buffer_kv: those of the cache.
    """

    def __init__(self, file: ModelFile, device: Device) -> None:
        self.ctx_w = Context(tensor_overhead() * n_tensors(file.sizes), no_alloc=True)
        with self.ctx_w:
            self.model = Gpt2(file.sizes, file.headers)
        self.buffer_w = alloc_ctx_tensors(self.ctx_w, device.buffer_type(), "weights")
        file.read(self.ctx_w.tensors.values())
        self.ctx_kv = Context(tensor_overhead() * 2, no_alloc=True)
        with self.ctx_kv:
            self.cache = Cache.declare(file.sizes)
        self.buffer_kv = alloc_ctx_tensors(self.ctx_kv, device.buffer_type())

    def facts(self) -> list[str]:
        """What the engine was given."""
        assert self.buffer_w is not None and self.buffer_kv is not None
        used, size = self.ctx_w.used_mem(), self.ctx_w.mem_size
        return [
            f"context of weights: {self.ctx_w.n_objects} headers, {used} of {size} bytes used",
            f"buffer of weights: {self.buffer_w.size} bytes ({self.buffer_w.type.name})",
            f"buffer of the cache: {self.buffer_kv.size} bytes ({self.buffer_kv.type.name})",
        ]


class MainBackend:
    """The program's state.

    Args:
        file: the model.
        n_threads: that compute, on the CPU.
        n_batch: most tokens of a run.
        device: computes and holds everything.

    Attributes:
        loaded: weights and cache.
        backend: computes.
        allocr: plans intermediates in the device's memory.
    """

    def __init__(self, file: ModelFile, n_threads: int, n_batch: int = 32, device: Device | None = None) -> None:
        device = pick("cpu") if device is None else device
        self.backend, self.loaded = new_backend(device, n_threads), DeviceModel(file, device)
        self.allocr = GraphAllocator(device.buffer_type())
        with graph_context():
            self.allocr.reserve(worst_case(self.loaded.model, self.loaded.cache, n_batch))

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind `n_past`; their logits, [n, n_vocab]."""
        with graph_context():
            graph = gpt2_graph(self.loaded.model, self.loaded.cache, n_past, len(tokens))
        self.allocr.alloc_graph(graph)
        put(graph.get_tensor(TOKENS), tokens)
        put(graph.get_tensor(POSITIONS), positions(n_past, len(tokens)))
        self.backend.compute(graph)
        self.backend.synchronize()
        return logits_of(graph)

    def facts(self) -> list[str]:
        """What the engine was given."""
        return [
            f"backend: {self.backend.name} ({self.backend.device.description})",
            *self.loaded.facts(),
            f"compute buffer: {self.allocr.get_buffer_size()} bytes",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this program."""
    parser.add_argument("--device", default="cpu", metavar="NAME", help="what computes: cpu, process ... (cpu)")


def make(file: ModelFile, args: argparse.Namespace) -> MainBackend:
    """The program's state, from the command line's arguments."""
    return MainBackend(file, args.threads, args.n_batch, pick(args.device))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    return main("main_backend", make, add_arguments, argv)


if __name__ == "__main__":
    sys.exit(run())
