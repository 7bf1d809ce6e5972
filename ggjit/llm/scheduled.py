"""Decode graphs on several devices.

What an `Executable` is for graphs on the CPU alone, a `Scheduled` is here: one scheduler serves all graphs of a
context, and a graph gets its places anew when another one ran in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ggjit.graph import Graph
from ggjit.sched import Scheduler
from ggjit.unbacked import UnbackedAllocator

if TYPE_CHECKING:
    from ggjit.llm.placement import Placement
    from ggjit.tensor import Tensor


def new_scheduler(placement: Placement, n_threads: int, no_alloc: bool) -> Scheduler:
    """A scheduler for the devices of a model.

    Args:
        placement: names the devices.
        n_threads: of the CPU.
        no_alloc: plan only.
    """
    from ggjit.backends.cpu import DEVICE

    backends = [*(d.new_backend() for d in placement.others), DEVICE.new_backend(n_threads)]
    scheduler = Scheduler(backends)
    if no_alloc:
        scheduler.allocator = UnbackedAllocator(scheduler.types)
    return scheduler


class Scheduled:
    """A graph that a scheduler computes.

    Args:
        scheduler: computes it.
        graph: the graph.
    """

    def __init__(self, scheduler: Scheduler, graph: Graph) -> None:
        self.scheduler, self.graph = scheduler, graph

    def place(self) -> bool:
        """Give the tensors their places if another graph has been there; False if they have them."""
        current = self.scheduler.current
        if current is not None and current.graph is self.graph:
            return False
        self.scheduler.reset()
        self.scheduler.alloc_graph(self.graph)
        return True

    def run(self, callback: Callable[[Tensor], bool] | None = None) -> bool:
        """Compute the graph; a callback sees each node that computes something, and stops the run by False: so this."""
        self.scheduler.set_eval_callback(None if callback is None else lambda t, ask: ask or callback(t))
        return self.scheduler.compute(self.graph)

    def scratch_sizes(self) -> list[int]:
        """Bytes of scratch that each backend takes for the graph, which has its places."""
        split, backends = self.scheduler.current, self.scheduler.backends
        assert split is not None
        assert split.graph is self.graph
        sizes = [0] * len(backends)
        for s, part in zip(split.splits, split.parts, strict=True):
            sizes[s.backend_id] += backends[s.backend_id].scratch_size(part)
        return sizes
