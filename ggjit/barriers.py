"""Where the threads of a program meet: barriers between its steps, and which steps need none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ggjit import row_shares
from ggjit.replicas import Replica, Replicas
from ggjit.tensor import Tensor

if TYPE_CHECKING:
    from ggjit.lower import Step

BARRIER, COUNTER, EACH, RECORDS = 1, 2, 4, 8  # flags of a step
_NO_COPIES = Replica(None, frozenset())


def set_barriers(
    steps: list[Step], rows: NDArray[np.int64], work: tuple[int, int], n_threads: int, replicas: Replicas
) -> list[int]:
    """Set BARRIER on each step after which the threads must meet before the next one.

    A step may begin while other threads are still in the steps before it only if it reads nothing they write and writes
    nothing they read or write; bytes that a thread has for itself in both steps (`ggjit.row_shares`, `own_scratch`,
    `ggjit.replicas`) do not count.
    Counters are zeroed at barriers, so between two barriers no counter serves two steps.

    Returns:
        For each step the number of the counter of its own that it uses, from 1 on; 0: that of the work buffer.
    """
    before: list[_Touched] = []  # since the last barrier
    lines: list[int] = []
    n_lines = 0  # in use since the last barrier
    for i, s in enumerate(steps):
        touched = _Touched(s, work, n_threads, replicas.steps.get(i, _NO_COPIES), replicas)
        if any(touched.waits_for(b) for b in before):
            rows[i - 1, 3] |= BARRIER
            before, n_lines = [], 0
        own = bool(rows[i, 3] & COUNTER) and (s.kernel.own_scratch or not s.work)
        n_lines += own
        lines.append(n_lines if own else 0)
        before.append(touched)
    if steps:
        rows[-1, 3] |= BARRIER
    return lines


class _Touched:
    """The bytes that a step reads and writes: ranges, each with the tensor whose they are.

    Args:
        step: the step.
        work: the work buffer's bytes.
        n_threads: threads that compute it.
        replica: which of its tensors threads have copies of.
        replicas: where those are.
    """

    def __init__(self, step: Step, work: tuple[int, int], n_threads: int, replica: Replica, replicas: Replicas) -> None:
        self.dst, by_rows = step.record, step.kernel.by_rows
        made = replica.result
        self.own = replica.read if made is None else replica.read | {made}
        self.by_rows = made is None and by_rows is not None and by_rows(self.dst, n_threads)
        self.reads = [r for t in self.dst.src if t is not None for r in self._ranges(t, replicas)]
        self.writes: list[tuple[int, int, Tensor | None]] = [
            *self._ranges(self.dst if made is None else made, replicas)
        ]
        for k in self.dst.op.state:
            if (updated := self.dst.src[k]) is not None:
                self.writes += self._ranges(updated, replicas)
        self.work = step.work if step.kernel.own_scratch else 0
        if step.work:
            self.writes.append((*work, None))

    def _ranges(self, t: Tensor, replicas: Replicas) -> list[tuple[int, int, Tensor]]:
        found = replicas.ranges(t) if t in self.own else [(t.data, t.data + _extent(t))]
        return [(first, end, t) for first, end in found]

    def waits_for(self, other: _Touched) -> bool:
        """Must all threads have ended the other step, which comes first, before one begins this one?"""
        pairs = ((self.reads, other.writes), (self.writes, other.writes), (self.writes, other.reads))
        return any(
            low < h and l < high and not self._keep_apart(other, t, u)
            for mine, theirs in pairs
            for low, high, t in mine
            for l, h, u in theirs  # noqa: E741
        )

    def _keep_apart(self, other: _Touched, t: Tensor | None, u: Tensor | None) -> bool:
        """Has each thread bytes of its own in two ranges that share some? None stands for the work buffer."""
        if t is None or u is None:
            return t is u and 0 < self.work == other.work
        if t in self.own or u in other.own:
            return t is u
        return self.by_rows and other.by_rows and row_shares.meet(t, self.dst, u, other.dst)


def _extent(t: Tensor) -> int:
    buffer = t.buffer
    return t.nbytes if buffer is None or buffer.type.is_host else buffer.type.alloc_size(t)
