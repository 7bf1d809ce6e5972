"""Steps of one row that every thread computes for itself.

A row has no parts that are worth two threads: the norm of 576 values takes 0.1 us, less than threads need to meet
behind it. So each computes it whole, into a copy of its own, and what follows reads the reader's copy: 4 of the 10
barriers of a layer that computes one token go, and no thread fetches what another one has just written.

    mul_mat + add     all threads together, a barrier behind it
    rms_norm + mul    each thread, into its copy
    act_q8            each thread, from its copy into another one
    mul_mat           all threads together, each reads its copy

Thread 0's copy is the tensor itself; the others' are scratch. Each thread has a record of its own of such a step, and
of one that reads copies, which the program's row tells (`RECORDS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.context import TENSOR_SIZE
from ggjit.tensor import RECORD, Tensor

if TYPE_CHECKING:
    from ggjit.lower import Lowering, Step

LARGEST = 64 << 10  # bytes of a copy
_ALIGN = 64  # no two threads write to one line


class Replica(NamedTuple):
    """What is special about a step.

    Attributes:
        result: the tensor that each thread has a copy of, where each computes it whole; else None.
        read: those that it reads.
    """

    result: Tensor | None
    read: frozenset[Tensor]


class Replicas:
    """The replicated steps of a lowering, and those that read their results.

    Args:
        lowering: all of whose steps are emitted; gets the scratch for the copies.
        nodes: of the graph; None replicates nothing.

    Attributes:
        steps: by their position.
        blocks: the other threads' copies of each tensor that has some, one after the other.
    """

    def __init__(self, lowering: Lowering, nodes: Sequence[Tensor] | None) -> None:
        self.steps: dict[int, Replica] = {}
        self.blocks: dict[Tensor, Tensor] = {}
        self._n = lowering.n_threads - 1
        if self._n == 0 or nodes is None:
            return
        steps = lowering.steps
        written = Counter(lowering.result_of(s) for s in steps)
        written.update(t for s in steps for k in s.record.op.state if (t := s.record.src[k]) is not None)
        viewed = {t.view_src for t in nodes}
        for i, step in enumerate(steps):
            result = lowering.result_of(step)
            read = frozenset(t for t in step.record.src if t in self.blocks)
            is_each = _is_each(step, result, lowering.n_threads) and written[result] == 1
            if is_each and (lowering.is_scratch(result) or _is_apart(step, result, read, viewed)):
                self.blocks[result] = lowering.block(self._n * stride(result), i)
                self.steps[i] = Replica(result, read)
            elif read:
                self.steps[i] = Replica(None, read)
            for t in read:
                lowering.keep(self.blocks[t], i)

    def tables(self, steps: Sequence[Step]) -> dict[int, int]:
        """Make the threads' records, once all tensors have data.

        Returns:
            The address of each such step's table: the addresses of the records of all threads.
        """
        if not self.steps:
            return {}
        n, tensors = self._n, [*self.blocks, *(steps[i].record for i in self.steps)]
        place = {t: k for k, t in enumerate(self.blocks)}
        self._records = np.empty((len(tensors), n), RECORD)  # of copies, then of steps; alive as long as this is
        for k, t in enumerate(tensors):
            self._records[k] = t.record
        base, of_thread = self._records.ctypes.data, np.arange(n) * TENSOR_SIZE
        for t, k in place.items():
            self._records["data"][k] = self.blocks[t].data + stride(t) * np.arange(n)
        own = [steps[i].record.address for i in self.steps]
        for k, (i, replica) in enumerate(self.steps.items(), len(place)):
            if replica.result is not None:
                self._records["data"][k] = self._records["data"][place[replica.result]]
            for j, source in enumerate(steps[i].record.src):
                if source in replica.read:
                    self._records["src"][k, :, j] = base + place[source] * n * TENSOR_SIZE + of_thread
        self._tables: NDArray[np.int64] = np.empty((len(own), n + 1), np.int64)
        self._tables[:, 0] = own
        self._tables[:, 1:] = base + (len(place) + np.arange(len(own)))[:, None] * n * TENSOR_SIZE + of_thread
        address = self._tables.ctypes.data
        return {i: address + 8 * (n + 1) * k for k, i in enumerate(self.steps)}

    def ranges(self, t: Tensor) -> list[tuple[int, int]]:
        """Addresses of all copies of a tensor."""
        block = self.blocks[t].data
        return [(t.data, t.data + t.nbytes), (block, block + self._n * stride(t))]


def stride(t: Tensor) -> int:
    """Bytes from copy to copy."""
    return (t.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


def _is_each(step: Step, result: Tensor, n_threads: int) -> bool:
    """Would one thread compute it anyway?"""
    kernel, by_rows = step.kernel, step.kernel.by_rows
    if by_rows is None or kernel.counts_threads or kernel.uses_counter:
        return False
    if result.nrows != 1 or result.nbytes > LARGEST or step.work:
        return False
    return by_rows(step.record, n_threads)


def _is_apart(step: Step, result: Tensor, read: frozenset[Tensor], viewed: set[Tensor | None]) -> bool:
    """Is a node found through its header alone, and written where no other thread reads at the time?"""
    if result.view_src is not None or result in viewed:
        return False
    first, end = result.data, result.data + result.nbytes
    shared = [t for t in step.record.src if t is not None and t not in read]
    return all(t.data >= end or t.data + t.nbytes <= first for t in shared)
