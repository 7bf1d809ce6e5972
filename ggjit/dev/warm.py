"""Compile the kernels of many graphs before anything runs: together they share the CPUs, one by one they do not."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence

from ggjit import kernel_cache, parallel_compile
from ggjit.context import Context
from ggjit.dev.cases import ARENA, CaseInputs
from ggjit.graph import Graph
from ggjit.jit import Kernel, compile_all
from ggjit.lower import Lowering
from ggjit.lower import kernels_of as kernels_of_graph
from ggjit.op import all_ops
from ggjit.tensor import Tensor

THREADS = (1, 2, 3)
TOGETHER = 512


def kernels_of(result: Tensor, threads: Sequence[int] = THREADS) -> list[Kernel]:
    """The kernels that the graph of a result runs with these numbers of threads; none where one has no kernel."""
    found: list[Kernel] = []
    try:
        for n in threads:
            lowering = Lowering(n)
            for node in Graph(64).build_forward_expand(result).nodes:
                lowering.lower_node(node)
            found += [step.kernel for step in lowering.steps]
    except (NotImplementedError, ValueError):  # what the run itself reports
        return []
    return found


def case_kernels() -> list[Kernel]:
    """The kernels of all cases of all ops."""
    found: list[Kernel] = []
    for op in all_ops():
        for name, case in op.cases.items():
            with Context(ARENA):
                found += kernels_of(case(CaseInputs(zlib.crc32(f"{op.name}/{name}".encode()))))
    return found


def product_kernels(names: Iterable[str], variants: Iterable[tuple[int | None, bool]]) -> list[Kernel]:
    """Kernels of products for types of weights: columns of the tile (None: for many), and whether it is packed."""
    from ggjit.ops.lib import panel_kernels

    found: list[Kernel] = []
    for name in names:
        found.append(panel_kernels.pack_kernel(name))
        for columns, packed in variants:
            many = columns is None
            found.append(
                panel_kernels.many_kernel(name, packed) if many else panel_kernels.few_kernel(name, columns, packed)
            )
    return found


def model_kernels(
    path: str | os.PathLike[str], n_tokens: Iterable[int], kv_type: str = "f16", repack: bool = True
) -> list[Kernel]:
    """The kernels of a model's graphs for these numbers of tokens, with all logits and with the last alone."""
    from ggjit.llm.context import DecodeContext, DecodeGraph
    from ggjit.llm.kv_cache import PAD
    from ggjit.llm.model import Model

    found: list[Kernel] = []
    model = Model(path, repack=repack, progress=False, no_alloc=True)
    context = DecodeContext(model, PAD, 2, kv_type)
    for n in n_tokens:
        for n_outputs in {1, n}:
            graph = DecodeGraph(context, n, PAD, n_outputs).graph
            context.allocator.alloc_graph(graph)
            found += kernels_of_graph(graph, 2)
    context.close()
    model.close()
    return found


def compile_behind(kernels: Callable[[], Iterable[Kernel]]) -> int:
    """Compile what is not compiled yet while this process goes on.

    Args:
        kernels: called by the process that compiles.

    Returns:
        See `parallel_compile.behind`.
    """

    def compile_each() -> None:
        for kernel in kernels():
            kernel.address()

    return parallel_compile.behind(compile_each) if kernel_cache.folder() is not None else 0


def compile_together(kernels: Iterable[Kernel]) -> None:
    """Compile what is not compiled yet."""
    every = list(dict.fromkeys(kernels))
    for i in range(0, len(every), TOGETHER):
        compile_all(every[i : i + TOGETHER])
