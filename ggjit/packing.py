"""Offline packing: offsets for blocks whose lifetimes are known before anything runs.

A block is a chain: the tensors that write in place over each other share one offset, and each needs no more bytes than
the one before. Drawn over time a chain is a staircase; to pack is to find an offset for each, so that no two cover the
same byte at the same step, and the highest byte is as low as it can be:

    offset
      ^  +--------+
      |  | c      +-----+          links of c: (first 0, last 2, size 2), (2, 4, 1)
      |  |              |
      |  +--+-----+-----+-+
      |  |a |     | b     |
      +--+--+-----+-------+-> step

No packing is lower than the bytes that are live at one step, `lower_bound`. Finding the lowest one is NP-hard. `pack`
places chains one after the other, begins with the large and long-lived ones, each at the lowest or the highest offset
that is free over its whole life; then it repairs: chains that end above the bound come earlier in the order, or go to
the other end. The model graphs in the tests meet the bound after 1 to 20 tries.

Source: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020 (greedy by size).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NEAR = 50  # a known peak that exceeds the bound by less than one part in 50 is near enough
_SLACKS = (8, 3, 1)  # steps that chains may end later, the first ones that fit are taken
_VISITS = 900_000  # of neighbours in all tries: some 300 ms
_FEW_VISITS = 60_000  # after which a peak near the bound will do
_SLACK_VISITS = 15_000
_MOST_PAIRS = 1_500_000  # of links alive together; more would take seconds
_PATIENCE = 20  # tries without progress before another start


class Link(NamedTuple):
    """Bytes in use from step `first` to step `last`, both included."""

    first: int
    last: int
    size: int


Chain = Sequence[Link]
_Neighbours = list[list[tuple[int, int, int]]]  # for each chain (other chain, own size, its size)


def _spans(chain: Chain) -> Iterator[Link]:
    """The links without the steps at which the one before, which is not smaller, is alive too."""
    before = -1
    for first, last, size in chain:
        if max(first, before + 1) <= last:
            yield Link(max(first, before + 1), last, size)
        before = last


def lower_bound(chains: Sequence[Chain]) -> int:
    """The most bytes that are live at one step; where links of a chain meet, the larger one counts."""
    change: dict[int, int] = {}
    for chain in chains:
        for first, last, size in _spans(chain):
            change[first] = change.get(first, 0) + size
            change[last + 1] = change.get(last + 1, 0) - size
    live = most = 0
    for step in sorted(change):
        live += change[step]
        most = max(most, live)
    return most


def pack(chains: Sequence[Chain], known: int) -> list[int] | None:
    """Offsets of chains, such that no two meet.

    A kernel that computes several nodes at once (`ggjit.fusion`) reads later than the plan, made for single nodes, asks
    for. So a peak within 2 % of the bound is left as it is: best fit is kind to such kernels, as it spreads over the
    memory that the peak needs anyway. And where it costs nothing, what was read stays in place for some more steps
    (`loosen`), for as many as a packing that meets the bound is found with.

    Args:
        chains: sizes are multiples of the alignment, so the offsets are too.
        known: the peak of a packing that is known already.

    Returns:
        The best offsets found; None if the known packing is near the bound, or none is better.
    """
    bound = lower_bound(chains)
    if known - bound <= bound // _NEAR:
        return None
    for slack in _SLACKS:
        offsets, peak = _search(loosen(chains, bound, slack), bound, _SLACK_VISITS)
        if peak <= bound:
            return offsets
    offsets, peak = _search(chains, bound, _VISITS)
    return offsets if peak < known else None


def loosen(chains: Sequence[Chain], bound: int, steps: int) -> list[list[Link]]:
    """Let chains end later, by at most `steps`, as long as the live bytes stay within `bound` at each step."""
    end = max((chain[-1].last for chain in chains), default=0)
    live = [0] * (end + 2)
    for chain in chains:
        for first, last, size in _spans(chain):
            live[first] += size
            live[last + 1] -= size
    for step in range(1, end + 2):
        live[step] += live[step - 1]
    longer = []
    for chain in chains:
        first, last, size = chain[-1]
        until = min(last + steps, end)
        while last < until and live[last + 1] + size <= bound:
            last += 1
            live[last] += size
        longer.append([*chain[:-1], Link(first, last, size)])
    return longer


def _search(chains: Sequence[Chain], bound: int, visits: int) -> tuple[list[int], int]:
    """The best offsets found and their peak; ends when `bound` is met or `visits` neighbours were looked at."""
    neighbours = _neighbours(chains)
    if neighbours is None:
        return [], 1 << 62
    sizes, starts, rng = [chain[0].size for chain in chains], _starts(chains), random.Random(0)
    cost_of_try = 1 + sum(map(len, neighbours))
    order, high = starts[0], [False] * len(chains)
    best, least, n_starts = [0] * len(chains), 1 << 62, 1
    kept, lowest, tries = (order, high, sizes), 1 << 62, 0
    for n in range(1 + visits // cost_of_try):
        offsets = _place(order, high, neighbours, sizes, bound)
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        peak = max(ends)
        if peak < least:
            best, least = offsets, peak
        if peak <= bound or (n * cost_of_try > _FEW_VISITS and least - bound <= bound // _NEAR):
            break
        above = sum(end - bound for end in ends if end > bound)
        tries = 0 if above < lowest else tries + 1
        if above <= lowest:
            kept, lowest = (order, high, ends), above
        if tries < _PATIENCE:
            order, high = _repair(*kept, bound, neighbours, rng)
        else:
            order, high = starts[n_starts % len(starts)], [rng.random() < 0.3 for _ in chains]
            lowest, tries, n_starts = 1 << 62, 0, n_starts + 1
    return best, least


def _starts(chains: Sequence[Chain]) -> list[list[int]]:
    """Orders to begin with: what is hard to place comes first."""
    size = [chain[0].size for chain in chains]
    length = [chain[-1].last - chain[0].first + 1 for chain in chains]
    every = range(len(chains))
    return [
        sorted(every, key=lambda i: (-size[i], -length[i], i)),
        sorted(every, key=lambda i: (-size[i] * length[i], i)),
        sorted(every, key=lambda i: (-length[i], -size[i], i)),
    ]


def _repair(
    order: Sequence[int], high: Sequence[bool], ends: Sequence[int], bound: int, neighbours: _Neighbours,
    rng: random.Random,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Another order and other sides: chains that end above the bound come earlier, or a neighbour changes sides."""
    order, high = list(order), list(high)
    offenders = [i for i in order if ends[i] > bound]
    for i in offenders if rng.random() < 0.5 else [rng.choice(offenders)]:
        at = order.index(i)
        order.insert(rng.randrange(at + 1), order.pop(at))
        high[i] ^= rng.random() < 0.5
    near = neighbours[rng.choice(offenders)]
    if near and rng.random() < 0.5:
        high[rng.choice(near)[0]] ^= True
    return order, high


def _neighbours(chains: Sequence[Chain]) -> _Neighbours | None:
    """Which links of other chains are alive together with each chain's; None if they are too many."""
    events = sorted((first, i, last, size) for i, chain in enumerate(chains) for first, last, size in chain)
    found: _Neighbours = [[] for _ in chains]
    alive: list[tuple[int, int, int]] = []
    pairs = 0
    for first, i, last, size in events:
        alive = [a for a in alive if a[0] >= first]
        pairs += len(alive)
        if pairs > _MOST_PAIRS:
            return None
        for _, j, other in alive:
            if i != j:
                found[i].append((j, size, other))
                found[j].append((i, other, size))
        alive.append((last, i, size))
    return found


def _place(
    order: Sequence[int], high: Sequence[bool], neighbours: _Neighbours, sizes: Sequence[int], bound: int
) -> list[int]:
    """Give each chain the lowest offset at which it meets none that has one; `high` ones the highest within `bound`."""
    offsets = [-1] * len(sizes)
    for i in order:
        taken = sorted([(offsets[j] - own, offsets[j] + other) for j, own, other in neighbours[i] if offsets[j] >= 0])
        at, highest, top = 0, -1, bound - sizes[i]
        for low, end in taken:  # offsets between low and end, both excluded, would meet
            if low >= at:
                if not high[i] or at > top:
                    break
                highest = min(low, top)
            if end > at:
                at = end
        offsets[i] = highest if high[i] and at > top and highest >= 0 else top if high[i] and at <= top else at
    return offsets
