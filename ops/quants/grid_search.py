"""Search for the codebook entries, signs and scales of a block of IQ1, IQ2 or IQ3, in NumPy.

A weight is about s * value with s = d * factor * (2 k + 1): d of the block, k of a group, values from a point of the
codebook (`ggjit.ops.quants.grids`), their signs or a shift beside. The error of a point is a sum over its coordinates.
A point is a pair of halves (u, v), each of which takes few forms, so for a given s the best point is found exactly:

    min over u of (error of u + min over the v that follow u in the codebook of (error of v))

with one operation a point. Where signs must be even in number and are odd, one is turned: an octet's error is then the
least that turns a coordinate of u or one of v, so the best point and the best sign are found together.

Scales: each group is fitted by itself among candidates of s; the largest gives candidates of d, and k is the best of
the neighbours of what rounding gives. Then d is fitted to all points and k chosen again, and the best is kept.

Arrays are [octets, ...], 32 octets to a block. Sums are in the order of the compiled form
(`ggjit.ops.quants.grid_search_rows`), which gives the same bits. Errors are weighted by the importance matrix alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit.ops.quants.grids import grid
from ggjit.ops.quants.quant import Bytes, Floats
from ggjit.ops.quants.search import round_f16

Ints = NDArray[np.int64]
CHUNK = 32  # blocks at a time
F32 = np.float32


class GridSearch(NamedTuple):
    """What is searched.

    Attributes:
        grid: name of the codebook.
        values: of a coordinate of a point, for each shift.
        factor: weight = d * factor * (2 * k + 1) * value.
        octets: of a group, which has a scale.
        n_scales: values of k.
        even_signs: is the number of negative signs of an octet even; False: free, or there are none.
        shift_octets: octets that share a shift; 0: there are signs instead.
        targets: candidates of a group's s make its largest magnitude so many.
        factors: candidates of d make the k of the largest scale n_scales - 1, one less and so on.
        rounds: how often d is fitted anew.
    """

    grid: str
    values: tuple[tuple[int, ...], ...]
    factor: float
    octets: int
    n_scales: int
    even_signs: bool
    shift_octets: int
    targets: tuple[float, ...]
    factors: int = 3
    rounds: int = 1


class Halves(NamedTuple):
    """A codebook as pairs of halves, sorted.

    Attributes:
        n: coordinates of a half.
        forms: of a half.
        u: first halves that occur.
        starts: where their second halves begin in v.
        v: second halves.
        entry: number in the codebook.
    """

    n: int
    forms: int
    u: Ints
    starts: Ints
    v: Ints
    entry: Ints


def half_size(name: str) -> int:
    """Coordinates of half a point."""
    return 2 if name.startswith("IQ3") else 4


def geometric(low: float, high: float, n: int) -> tuple[float, ...]:
    """n numbers from low to high, of equal ratios."""
    return tuple(low * (high / low) ** (i / (n - 1)) for i in range(n))


@functools.cache
def halves_of(name: str) -> Halves:
    """The codebook of a type as pairs of halves."""
    points = grid(name).astype(np.int64)
    n, base = points.shape[1] // 2, 3 if points.shape[1] == 8 else 8
    powers = base ** np.arange(n)
    first, second = points[:, :n] @ powers, points[:, n:] @ powers
    order = np.lexsort((second, first))
    u, starts = np.unique(first[order], return_index=True)
    return Halves(n, base**n, u, starts, second[order], order)


def check_imatrix(n: int, imatrix: Floats | None) -> None:
    """Check that an importance matrix has one number for each of n columns."""
    if imatrix is not None and np.shape(imatrix) != (n,):
        raise ValueError(f"quantize: imatrix must have a shape ({n},), got {np.shape(imatrix)}")


class Found(NamedTuple):
    """Blocks as they are coded: d f32 [blocks], k [blocks, groups], entries [blocks, points], marks [blocks, 32].

    A mark has the signs of an octet, 1 for -, or the number of its shift.
    """

    d: Floats
    k: Bytes
    entries: NDArray[np.uint16]
    marks: Bytes


def fit_blocks(s: GridSearch, x: Floats, imatrix: Floats | None) -> Found:
    """Fit the blocks of rows.

    Args:
        s: the search.
        x: values [rows, blocks, 256].
        imatrix: f32 [blocks * 256], or None.

    Raises:
        ValueError: the importance matrix is not one number for each column.
    """
    check_imatrix(x.shape[1] * 256, imatrix)
    weights = F32(1) if imatrix is None else np.asarray(imatrix, F32).reshape(x.shape[1:])
    w = np.broadcast_to(weights, x.shape).reshape(-1, 256)
    x = x.reshape(-1, 256)
    found = []
    with np.errstate(all="ignore"):
        for i in range(0, max(len(x), 1), CHUNK):
            found.append(_Fit(s, x[i : i + CHUNK], w[i : i + CHUNK]).run())
    return Found(*(np.concatenate(v) for v in zip(*found, strict=True)))


class _Fit:
    """Blocks that are fitted at once."""

    def __init__(self, s: GridSearch, x: Floats, w: Floats) -> None:
        self.s, self.h = s, halves_of(s.grid)
        self.n, self.groups = len(x), 32 // s.octets
        octets = x.reshape(-1, 8)
        self.negative = (octets < 0) if not s.shift_octets else np.zeros(octets.shape, bool)
        self.x = octets if s.shift_octets else np.abs(octets)
        self.w = w.reshape(-1, 8)
        self.odd = self.negative.sum(1) % 2 == 1

    # -- points ------------------------------------------------------------------------------------------------------

    def _costs(self, step: Floats, values: Sequence[int], at: int) -> list[Floats]:
        """Errors of the values of coordinates at..at + n, each [octets, values]."""
        scaled = [step * F32(v) for v in values]
        out = []
        for i in range(at, at + self.h.n):
            errors = [(self.x[:, i] - v) for v in scaled]
            out.append(np.stack([self.w[:, i] * (e * e) for e in errors], 1))
        return out

    def _turns(self, step: Floats, values: Sequence[int], at: int) -> list[Floats]:
        """What turning the sign of coordinates at..at + n adds."""
        four = F32(4) * step
        out = []
        for i in range(at, at + self.h.n):
            p = (self.w[:, i] * self.x[:, i]) * four
            out.append(np.stack([p * F32(v) for v in values], 1))
        return out

    def _half(self, step: Floats, values: Sequence[int], at: int) -> tuple[Floats, Floats | None]:
        """Errors of the forms of a half [octets, forms], and what the cheapest turn adds."""
        costs = _combine(self._costs(step, values, at), np.add)
        if not self.s.even_signs:
            return costs, None
        return costs, costs + _combine(self._turns(step, values, at), np.minimum)

    def _point(self, step: Floats, values: Sequence[int], at: int) -> tuple[Any, ...]:
        """Errors and places of the best point of coordinates from `at`: without a turn, and with one.

        Returns:
            error, u, v without a turn; then error, u, v, and whether the turn lies in the second half.
        """
        h = self.h
        e, e_turned = self._half(step, values, at)
        f, f_turned = self._half(step, values, at + h.n)
        least = np.minimum.reduceat(f[:, h.v], h.starts, axis=1)
        total = e[:, h.u] + least
        place = total.argmin(1)
        out = [_at(total, place), place]
        if e_turned is None or f_turned is None:
            return tuple(out)
        first = e_turned[:, h.u] + least
        second = e[:, h.u] + np.minimum.reduceat(f_turned[:, h.v], h.starts, axis=1)
        turned = np.where(second < first, second, first)
        place = turned.argmin(1)
        return (*out, _at(turned, place), place, _at(second, place) < _at(first, place))

    def errors(self, step: Floats) -> Floats:
        """Errors of octets, for each shift: [shifts, octets]."""
        out = []
        for values in self.s.values:
            points = [self._point(step, values, at) for at in range(0, 8, 2 * self.h.n)]
            total = points[0][0] if len(points) == 1 else points[0][0] + points[1][0]
            if self.s.even_signs:
                turned = points[0][2]
                if len(points) == 2:
                    a, b = points[0][2] + points[1][0], points[0][0] + points[1][2]
                    turned = np.where(b < a, b, a)
                total = np.where(self.odd, turned, total)
            out.append(total)
        return np.stack(out)

    # -- groups ------------------------------------------------------------------------------------------------------

    def group_errors(self, step: Floats) -> Floats:
        """Errors of groups [blocks, groups] with steps of the same shape."""
        errors = self.errors(step.reshape(-1).repeat(self.s.octets))
        if self.s.shift_octets == 1:
            errors = np.where(errors[1] < errors[0], errors[1], errors[0])[None]
        sums = _in_order(errors.reshape(len(errors), -1, self.s.octets))
        best = sums[0] if len(sums) == 1 else np.where(sums[1] < sums[0], sums[1], sums[0])
        return best.reshape(self.n, self.groups)

    def first_steps(self) -> Floats:
        """The s of groups by themselves [blocks, groups]."""
        top = np.abs(self.x).reshape(self.n, self.groups, -1).max(2)
        best, step = np.full_like(top, np.inf), np.zeros_like(top)
        for target in self.s.targets:
            new = top * F32(1 / target)
            error = self.group_errors(new)
            better = error < best
            best, step = np.where(better, error, best), np.where(better, new, step)
        return step

    def choose(self, d: Floats, near: Floats) -> tuple[Floats, Floats]:
        """The best k among neighbours [blocks, groups], and the errors of blocks."""
        unit = (d * F32(self.s.factor))[:, None]
        best, chosen = np.full_like(near, np.inf), np.zeros_like(near)
        for j in (0, -1, 1):
            k = np.clip(near + F32(j), F32(0), F32(self.s.n_scales - 1))
            error = self.group_errors(unit * (F32(2) * k + F32(1)))
            better = error < best
            best, chosen = np.where(better, error, best), np.where(better, k, chosen)
        return chosen, _in_order(best)

    def run(self) -> Found:
        """Fit all."""
        s = self.s
        step = self.first_steps()
        top = step.max(1)
        d, best = np.zeros_like(top), np.full_like(top, np.inf)
        k = np.zeros_like(step)
        for j in range(s.factors):
            new_d = round_f16(top * F32(1 / (s.factor * (2 * (s.n_scales - j) - 1))))
            inverse = np.where(new_d > 0, F32(1) / (new_d * F32(s.factor)), F32(0))
            near = np.rint(_limited((step * inverse[:, None] - F32(1)) * F32(0.5), s.n_scales - 1))
            d, k, best = self._better(new_d, near, d, k, best)
        for _ in range(s.rounds):
            a, b = self.sums(d, k)
            new_d = round_f16(np.where(a > 0, b / (a * F32(s.factor)), d))
            d, k, best = self._better(np.where(new_d > 0, new_d, F32(0)), k, d, k, best)
        return self.coded(d, k)

    def _better(self, new_d: Floats, near: Floats, d: Floats, k: Floats, best: Floats) -> tuple[Floats, ...]:
        new_k, error = self.choose(new_d, near)
        better = error < best
        return np.where(better, new_d, d), np.where(better[:, None], new_k, k), np.where(better, error, best)

    # -- what was found ----------------------------------------------------------------------------------------------

    def points(self, d: Floats, k: Floats) -> tuple[Any, ...]:
        """Entries [octets, points], signs to turn [octets, 8], shifts [octets], values [octets, 8]."""
        s, h = self.s, self.h
        step = ((d * F32(s.factor))[:, None] * (F32(2) * k + F32(1))).reshape(-1).repeat(s.octets)
        shift = self._shifts(step)
        entries, turn = [], np.zeros(self.x.shape, bool)
        values = np.array(s.values, F32)
        per_octet = range(0, 8, 2 * h.n)
        found = [[self._place(step, v, at) for at in per_octet] for v in s.values]
        which = np.zeros(len(step), np.int64)
        if s.even_signs and len(per_octet) == 2:
            p, q = (self._point(step, s.values[0], at) for at in per_octet)
            which = (p[0] + q[2] < p[2] + q[0]).astype(np.int64)
        coordinates = np.zeros(self.x.shape, np.int64)
        for i, at in enumerate(per_octet):
            turned = self.odd & (which == i)
            options = [f[i] for f in found]
            entry = np.stack([np.where(turned, o[1], o[0]) for o in options])[shift, np.arange(len(step))]
            entries.append(h.entry[entry])
            point = grid(s.grid)[h.entry[entry]].astype(np.int64)
            coordinates[:, at : at + 2 * h.n] = point
            if s.even_signs:
                second = options[0][2]
                cost = np.concatenate([np.stack(self._turns(step, s.values[0], at + n), 1) for n in (0, h.n)], 1)
                cost = np.take_along_axis(cost, point[..., None], 2)[..., 0]
                halves = cost.reshape(len(step), 2, h.n)[np.arange(len(step)), second.astype(np.int64)]
                place = at + second * h.n + halves.argmin(1)
                turn[turned, place[turned]] = True
        return np.stack(entries, 1), turn, shift, values[shift[:, None], coordinates]

    def _place(self, step: Floats, values: Sequence[int], at: int) -> tuple[Any, ...]:
        """Places in h.v of the best points: without a turn; with one, and whether that lies in the second half."""
        h = self.h
        p = self._point(step, values, at)
        f, f_turned = self._half(step, values, at + h.n)
        out = [_first_of(h, f, p[1])]
        if f_turned is None:
            return (*out, out[0])
        return (*out, np.where(p[4], _first_of(h, f_turned, p[3]), _first_of(h, f, p[3])), p[4])

    def _shifts(self, step: Floats) -> Ints:
        if not self.s.shift_octets:
            return np.zeros(len(step), np.int64)
        sums = _in_order(self.errors(step).reshape(2, -1, self.s.shift_octets))
        return (sums[1] < sums[0]).astype(np.int64).repeat(self.s.shift_octets)

    def sums(self, d: Floats, k: Floats) -> tuple[Floats, Floats]:
        """Sums over blocks of w * value^2 * (2 k + 1)^2 and of w * x * value * (2 k + 1)."""
        _, turn, _, value = self.points(d, k)
        value = np.where(turn, -value, value)
        scale = (F32(2) * k + F32(1)).reshape(-1)
        a = _in_order(self.w * (value * value)).reshape(-1, self.s.octets)
        b = _in_order((self.w * self.x) * value).reshape(-1, self.s.octets)
        a, b = _in_order(a) * (scale * scale), _in_order(b) * scale
        return _in_order(a.reshape(self.n, -1)), _in_order(b.reshape(self.n, -1))

    def coded(self, d: Floats, k: Floats) -> Found:
        """The blocks as bytes say it."""
        entries, turn, shift, _ = self.points(d, k)
        marks = np.packbits(self.negative ^ turn, axis=1, bitorder="little")[:, 0]
        marks = shift.astype(np.uint8) if self.s.shift_octets else marks
        return Found(
            d, k.astype(np.uint8), entries.reshape(self.n, -1).astype(np.uint16), marks.reshape(self.n, 32)
        )  # fmt: skip


def _combine(parts: list[Floats], join: Any) -> Floats:
    """All combinations of the values of coordinates, the first one fastest: [octets, values^n]."""
    while len(parts) > 1:
        parts = [
            join(a[:, None, :], b[:, :, None]).reshape(len(a), -1) for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _at(x: Floats, place: Ints) -> Any:
    return np.take_along_axis(x, place[:, None], 1)[:, 0]


def _first_of(h: Halves, f: Floats, place: Ints) -> Ints:
    """Places in h.v of the first least f among the second halves of h.u[place]."""
    ends = np.append(h.starts[1:], len(h.v))
    owner = np.arange(len(h.u)).repeat(ends - h.starts)
    masked = np.where(owner == place[:, None], f[:, h.v], np.inf)
    return np.asarray(np.where(np.isfinite(masked.min(1)), masked.argmin(1), h.starts[place]))


def _in_order(x: Floats) -> Floats:
    """Sum along the last axis, one after the other."""
    out = x[..., 0].copy()
    for i in range(1, x.shape[-1]):
        out += x[..., i]
    return out


def _limited(x: Floats, high: int) -> Floats:
    """Values from 0 to `high`; NaN gives 0."""
    return np.fmin(np.fmax(x, F32(0)), F32(high))


# ---- parts of blocks ------------------------------------------------------------------------------------------------


def sign_words(found: Found) -> Bytes:
    """A word of 32 bits for each run of 32: seven signs of four octets, then k: uint8 [blocks, 32]."""
    seven = (found.marks & 127).reshape(-1, 8, 4).astype(np.uint32) << np.array([0, 7, 14, 21], np.uint32)
    words = seven.sum(2, dtype=np.uint32) | found.k.astype(np.uint32) << 28
    return words.astype("<u4").view(np.uint8)


def joined_halves(x: Bytes) -> Bytes:
    """Values of 4 bits two to a byte, the first one low."""
    return (x[:, ::2] | x[:, 1::2] << 4).astype(np.uint8)
