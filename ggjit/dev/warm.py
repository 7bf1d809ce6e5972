"""Compile the kernels of many graphs before anything runs: together they share the CPUs, one by one they do not."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from ggjit.context import Context
from ggjit.dev.cases import ARENA, CaseInputs
from ggjit.graph import Graph
from ggjit.jit import Kernel, compile_all
from ggjit.lower import Lowering
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


def compile_together(kernels: Iterable[Kernel]) -> None:
    """Compile what is not compiled yet."""
    every = list(dict.fromkeys(kernels))
    for i in range(0, len(every), TOGETHER):
        compile_all(every[i : i + TOGETHER])
