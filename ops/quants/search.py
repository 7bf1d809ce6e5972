"""Search for the scales and minimums of a block, in NumPy: what the quantizers of types with a search share.

A block is made of groups, and a value is about d * l * q - dmin * m: d and dmin are the block's f16 factors, l and m
small integers of the group and q the code (`fit_pairs`); or d * l * q with signed codes (`fit_scales`). Each group is
fitted by itself first: candidates of the scale give codes, and codes give the scale (and minimum) of least weighted
squared error. The largest of them give the factors, and l and m are chosen with the codes among the neighbours of what
rounding gives. Then factors that suit these integers best are found, and all is chosen again; the best is kept.

Arrays are [weights of a group, groups], so that sums add a group's weights one after the other, as the compiled forms
(`ggjit.ops.quants.search_rows`) do, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ggjit.ops.quants.quant import Floats

TINY = np.float32(1e-12)  # groups whose values lie within it become zeros
SINGULAR = np.float32(1e-5)  # a determinant below this share of its first term counts as zero
NOISE = np.float32(1e-10)  # errors differ if they do so by this share of the squared values
LARGEST = np.float32(65504)  # of f16
CHUNK = 4096  # groups at a time, so that their arrays stay in the cache


class Search(NamedTuple):
    """What is searched: blocks of 256 in groups of `size`.

    Attributes:
        size: weights of a group.
        low, high: the least and the largest code.
        limit: largest l and m.
        n_steps: candidates of a group's scale, by tenths of a code: a value of the largest code, of one tenth less, one
            tenth more and so on.
        rounds: how often factors are fitted anew.
    """

    size: int
    low: int
    high: int
    limit: int
    n_steps: int
    rounds: int


def total(x: Floats) -> Floats:
    """Sum along the first axis, one after the other."""
    out = x[0].copy()
    for row in x[1:]:
        out += row
    return out


def tenths(k: int) -> np.float32:
    """Candidate k of 0, -0.1, 0.1, -0.2, 0.2 ..."""
    return np.float32(0.1) * np.float32(-(k // 2) - 1 if k % 2 else k // 2)


def round_f16(x: Floats) -> Floats:
    """Values as f16 holds them; those beyond its range become its largest."""
    return np.minimum(x, LARGEST).astype(np.float16).astype(np.float32)


def by_chunks(
    fit: Callable[[Search, Floats, Floats], tuple[Floats, ...]], s: Search, x: Floats, imatrix: Floats | None
) -> tuple[Floats, ...]:
    """Fit all blocks of rows, so many at a time.

    Args:
        fit: `fit_pairs` or `fit_scales`.
        s: the search.
        x: values [rows, blocks, 256].
        imatrix: mean squares of the activations that meet each column, f32 [blocks * 256], or None.

    Returns:
        What `fit` returns, of all blocks.
    """
    groups = 256 // s.size
    x = x.reshape(-1, groups, s.size)
    known = None if imatrix is None else np.asarray(imatrix, np.float32).reshape(-1, groups, s.size)
    found, n = [], CHUNK // groups
    for i in range(0, max(len(x), 1), n):
        part = x[i : i + n].reshape(-1, s.size).T.copy()
        square = np.square(part)
        mean = total(square) / np.float32(s.size)
        if known is None:
            w = np.sqrt(mean) + np.abs(part)
        else:
            rows = np.arange(i, i + part.shape[1] // groups) % len(known)
            w = known[rows].reshape(-1, s.size).T * np.sqrt(mean + square)
        found.append(fit(s, part, w))
    return tuple(np.concatenate(v) for v in zip(*found, strict=True))


def codes(x: Floats, step: Floats, minimum: Floats | np.float32, low: int, high: int) -> Floats:
    """Nearest codes of x + minimum in units of step; 0 where step is 0."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        to_code = np.where(step != 0, np.float32(1) / step, np.float32(0))
        return np.rint(np.fmin(np.fmax((x + minimum) * to_code, np.float32(low)), np.float32(high)))


# ---- scales and minimums -------------------------------------------------------------------------------------------


def fit_pairs(s: Search, x: Floats, w: Floats) -> tuple[Floats, ...]:
    """Fit blocks by d * l * q - dmin * m, all of them not negative.

    Args:
        s: the search.
        x: values [size, blocks * groups].
        w: weights of their errors.

    Returns:
        d, dmin [blocks], l, m [blocks, groups], codes [blocks, groups, size].
    """
    groups = 256 // s.size
    scale, minimum = _fit_group(s, x, w)
    limit = np.float32(s.limit)
    d = round_f16(scale.reshape(-1, groups).max(1) / limit)
    dmin = round_f16(minimum.reshape(-1, groups).max(1) / limit)
    near = codes(scale, d.repeat(groups), np.float32(0), 0, s.limit)
    near_m = codes(minimum, dmin.repeat(groups), np.float32(0), 0, s.limit)
    ls, m, error = _best_pairs(s, x, w, d.repeat(groups), dmin.repeat(groups), near, near_m)
    best = total(error.reshape(-1, groups).T)
    for _ in range(s.rounds):
        new_d, new_dmin = _refit(s, x, w, d, dmin, ls, m)
        new_ls, new_m, error = _best_pairs(s, x, w, new_d.repeat(groups), new_dmin.repeat(groups), ls, m)
        new = total(error.reshape(-1, groups).T)
        better = new < best
        d, dmin, best = np.where(better, new_d, d), np.where(better, new_dmin, dmin), np.where(better, new, best)
        better = better.repeat(groups)
        ls, m = np.where(better, new_ls, ls), np.where(better, new_m, m)
    q = codes(x, d.repeat(groups) * ls, dmin.repeat(groups) * m, 0, s.high)
    return d, dmin, ls.reshape(-1, groups), m.reshape(-1, groups), q.T.reshape(-1, groups, s.size)


def _fit_group(s: Search, x: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum of each group by itself; 0 and 0 where all values are tiny."""
    low = np.minimum(x.min(0), np.float32(0))
    span = x.max(0) - low
    span = np.where(span < TINY, np.float32(0), span)
    sum_w, sum_x = total(w), total(w * x)
    noise = NOISE * total(w * np.square(x))
    scale, minimum = np.zeros_like(span), np.float32(0) - low
    best = total(w * np.square(low - x))
    for k in range(s.n_steps):
        q = codes(x, span / (np.float32(s.high) + tenths(k)), -low, 0, s.high)
        wq = w * q
        sums = sum_w, sum_x, total(wq), total(wq * q), total(wq * x)
        a, m = _least_squares(*sums)
        error = total(w * np.square(a * q - m - x))
        better = error + noise < best
        best, scale, minimum = (np.where(better, *v) for v in ((error, best), (a, scale), (m, minimum)))
    return scale, minimum


def _least_squares(sum_w: Floats, sum_x: Floats, sum_q: Floats, sum_qq: Floats, sum_qx: Floats) -> tuple[Floats, ...]:
    """The scale and minimum of least error for codes, the minimum not negative."""
    with np.errstate(divide="ignore", invalid="ignore"):
        det = sum_w * sum_qq - sum_q * sum_q
        a, m = (sum_w * sum_qx - sum_x * sum_q) / det, (sum_q * sum_qx - sum_qq * sum_x) / det
        both = (det > SINGULAR * (sum_w * sum_qq)) & (m > 0)
        alone = np.where(sum_qq > 0, sum_qx / sum_qq, np.float32(0))
    return np.where(both, a, alone), np.where(both, m, np.float32(0))


def _best_pairs(
    s: Search, x: Floats, w: Floats, d: Floats, dmin: Floats, near: Floats, near_m: Floats
) -> tuple[Floats, ...]:
    """The best l and m of groups among the neighbours of given ones, and their errors.

    One more l is tried: with which the largest code would be one less.
    """
    limit = np.float32(s.limit)
    best, best_ls, best_m = np.full_like(d, np.inf), near, near_m
    less = np.rint(near * (np.float32(s.high) / np.float32(s.high - 1)))
    for ls in (near, near - np.float32(1), near + np.float32(1), less):
        ls = np.clip(ls, np.float32(0), limit)
        for j in (0, -1, 1):
            m = np.clip(near_m + np.float32(j), np.float32(0), limit)
            step, minimum = d * ls, dmin * m
            error = total(w * np.square(step * codes(x, step, minimum, 0, s.high) - minimum - x))
            better = error < best
            best, best_ls, best_m = (np.where(better, *v) for v in ((error, best), (ls, best_ls), (m, best_m)))
    return best_ls, best_m, best


def _refit(s: Search, x: Floats, w: Floats, d: Floats, dmin: Floats, ls: Floats, m: Floats) -> tuple[Floats, Floats]:
    """The factors of least error for the integers and their codes."""
    groups = 256 // s.size
    q = codes(x, d.repeat(groups) * ls, dmin.repeat(groups) * m, 0, s.high)
    wq = w * q
    sums = ls * ls * total(wq * q), ls * m * total(wq), m * m * total(w), ls * total(wq * x), m * total(w * x)
    ll, lm, mm, lx, mx = (total(v.reshape(-1, groups).T) for v in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        det = ll * mm - lm * lm
        both = det > SINGULAR * (ll * mm)
        new_d, new_dmin = (lx * mm - mx * lm) / det, (lx * lm - mx * ll) / det
        new_d, new_dmin = np.where(both, new_d, np.where(ll > 0, lx / ll, d)), np.where(both, new_dmin, dmin)
    return round_f16(np.fmax(new_d, np.float32(0))), round_f16(np.fmax(new_dmin, np.float32(0)))
