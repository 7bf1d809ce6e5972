"""Search for the scales and minimums of a block, in NumPy: what the quantizers of types with a search share.

A block is made of groups, and a value is about d * l * q - dmin * m: d and dmin are the block's f16 factors, l and m
small integers of the group and q the code (`fit_pairs`); or d * l * q with signed codes (`fit_scales`). Each group is
fitted by itself first: candidates of the scale give codes, and codes give the scale (and minimum) of least weighted
squared error. The largest of them give the factors, and l and m are chosen with the codes among the neighbours of what
rounding gives. Then factors that suit these integers best are found, and all is chosen again; the best is kept. Where a
group is the block, candidates are rounded to f16 before they are compared (`fit_signed`, `fit_range`).

Arrays are [weights of a group, groups], so that sums add a group's weights one after the other, as the compiled forms
(`ggjit.ops.quants.search_lanes`) do, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ggjit.ops.quants.quant import Bytes, Floats, largest

TINY = np.float32(1e-12)  # groups whose values lie within it become zeros
SINGULAR = np.float32(1e-5)  # a determinant below this share of its first term counts as zero
NOISE = np.float32(1e-10)  # errors differ if they do so by this share of the squared values
LARGEST = np.float32(65504)  # of f16
FACTORS = 4  # candidates of a block's factor: the largest scale becomes -limit, one more and so on
TWICE, THRICE = 2, 3  # times that codes give a scale (and minimum) and these codes
CHUNK = 4096  # groups at a time, so that their arrays stay in the cache


class Search(NamedTuple):
    """What is searched.

    Attributes:
        size: weights of a group.
        low, high: the least and the largest code.
        limit: largest l and m; signed l are -limit..limit - 1; 0: there are none.
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


def divided(s: Search, span: Floats, k: int) -> Floats:
    """Step of candidate k, of which `high` and some tenths make the span of a group's values."""
    step: Floats = span / (np.float32(s.high) + tenths(k))
    return step


def round_f16(x: Floats) -> Floats:
    """Values as f16 holds them; those beyond its range become its largest."""
    return np.clip(x, -LARGEST, LARGEST).astype(np.float16).astype(np.float32)


def by_chunks(
    fit: Callable[[Search, Floats, Floats], tuple[Floats, ...]], s: Search, x: Floats, imatrix: Floats | None
) -> tuple[Floats, ...]:
    """Fit all blocks of rows, so many at a time.

    Errors are weighted by rms of the group + |x|, or by the importance matrix.

    Args:
        fit: one of this module's.
        s: the search.
        x: values [rows, blocks, size of a block].
        imatrix: mean squares of the activations that meet each column, f32 [blocks * size], or None.

    Returns:
        What `fit` returns, of all blocks.

    Raises:
        ValueError: the importance matrix is not one number for each column.
    """
    if imatrix is not None and np.shape(imatrix) != (x.shape[1] * x.shape[2],):
        raise ValueError(f"quantize: imatrix must have a shape ({x.shape[1] * x.shape[2]},), got {np.shape(imatrix)}")
    groups = x.shape[-1] // s.size
    x = x.reshape(-1, s.size)
    known = None if imatrix is None else np.asarray(imatrix, np.float32).reshape(-1, s.size)
    found, n = [], CHUNK // groups * groups
    for i in range(0, max(len(x), 1), n):
        part = x[i : i + n].T.copy()
        if known is None:
            w = np.sqrt(total(np.square(part)) / np.float32(s.size)) + np.abs(part)
        else:
            w = known[np.arange(i, i + part.shape[1]) % len(known)].T
        found.append(fit(s, part, w))
    return tuple(np.concatenate(v) for v in zip(*found, strict=True))


def codes(x: Floats, step: Floats, minimum: Floats | np.float32, low: int, high: int) -> Floats:
    """Nearest codes of x + minimum in units of step; 0 where step is 0."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        to_code = np.where(step != 0, np.float32(1) / step, np.float32(0))
        return np.rint(np.fmin(np.fmax((x + minimum) * to_code, np.float32(low)), np.float32(high)))


# ---- scales and minimums --------------------------------------------------------------------------------------------


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
        q = codes(x, divided(s, span, k), -low, 0, s.high)
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


# ---- signed scales --------------------------------------------------------------------------------------------------


def fit_scales(s: Search, x: Floats, w: Floats) -> tuple[Floats, ...]:
    """Fit blocks of 256 by d * l * q, all of them signed.

    Args:
        s: the search.
        x: values [size, blocks * groups].
        w: weights of their errors.

    Returns:
        d [blocks], l [blocks, groups], codes [blocks, groups, size].
    """
    groups = 256 // s.size
    scale = _fit_scale(s, x, w)
    top = largest(scale.reshape(-1, groups))
    d, ls, best = np.zeros_like(top), np.zeros_like(scale), np.full_like(top, np.inf)
    for k in range(FACTORS + s.rounds):
        if k < FACTORS:
            new_d = round_f16(top / np.float32(k - s.limit))
            near = codes(scale, new_d.repeat(groups), np.float32(0), -s.limit, s.limit - 1)
        else:
            near, q = ls, codes(x, d.repeat(groups) * ls, np.float32(0), s.low, s.high)
            wq = w * q
            ll, lx = (total(v.reshape(-1, groups).T) for v in (ls * ls * total(wq * q), ls * total(wq * x)))
            new_d = round_f16(_share(lx, ll, d))
        new_ls, error = _best_scales(s, x, w, new_d.repeat(groups), near)
        new = total(error.reshape(-1, groups).T)
        better = new < best
        d, best, ls = (
            np.where(better, new_d, d),
            np.where(better, new, best),
            np.where(better.repeat(groups), new_ls, ls),
        )
    q = codes(x, d.repeat(groups) * ls, np.float32(0), s.low, s.high)
    return d, ls.reshape(-1, groups), q.T.reshape(-1, groups, s.size)


def _share(a: Floats, b: Floats, otherwise: Floats | np.float32) -> Floats:
    """a / b where b is positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, a / b, otherwise)


def _candidates(s: Search, x: Floats) -> Iterator[Floats]:
    """Scales that give the value of largest magnitude a code near the lowest, or, of the other sign, the largest."""
    top = largest(x.T)
    top = np.where(np.abs(top) < TINY, np.float32(0), top)
    for k in range(s.n_steps):
        yield top / (np.float32(s.low) - tenths(k))
    for k in range(s.n_steps):
        yield top / (np.float32(s.high) + tenths(k))


def _fit_scale(s: Search, x: Floats, w: Floats) -> Floats:
    """Scale of each group by itself; 0 where all values are tiny."""
    scale, best = np.zeros_like(x[0]), np.zeros_like(x[0])
    for step in _candidates(s, x):
        q = codes(x, step, np.float32(0), s.low, s.high)
        wq = w * q
        sum_qq, sum_qx = total(wq * q), total(wq * x)
        fitted = _share(sum_qx, sum_qq, np.float32(0))
        better = fitted * sum_qx > best
        scale, best = np.where(better, fitted, scale), np.where(better, fitted * sum_qx, best)
    return scale


def _best_scales(s: Search, x: Floats, w: Floats, d: Floats, near: Floats) -> tuple[Floats, Floats]:
    """The best l of groups among the neighbours of given ones and of what makes the largest code one less."""
    best, best_ls = np.full_like(d, np.inf), near
    less = np.rint(near * (np.float32(s.low) / np.float32(s.low + 1)))
    for ls in (near, near - np.float32(1), near + np.float32(1), less, less - np.float32(1), less + np.float32(1)):
        ls = np.clip(ls, np.float32(-s.limit), np.float32(s.limit - 1))
        error = total(w * np.square(d * ls * codes(x, d * ls, np.float32(0), s.low, s.high) - x))
        better = error < best
        best, best_ls = np.where(better, error, best), np.where(better, ls, best_ls)
    return best_ls, best


# ---- blocks of one group --------------------------------------------------------------------------------------------


def fit_signed(s: Search, x: Floats, w: Floats) -> tuple[Floats, ...]:
    """Fit blocks [size, n] by d * q with signed codes: d [n], codes [n, size]."""
    d, best = np.zeros_like(x[0]), total(w * np.square(x))
    for step in _candidates(s, x):
        for _ in range(TWICE):
            q = codes(x, step, np.float32(0), s.low, s.high)
            wq = w * q
            step = round_f16(_share(total(wq * x), total(wq * q), np.float32(0)))
            error = total(w * np.square(step * codes(x, step, np.float32(0), s.low, s.high) - x))
            better = error < best
            d, best = np.where(better, step, d), np.where(better, error, best)
    return d, codes(x, d, np.float32(0), s.low, s.high).T


def fit_range(s: Search, x: Floats, w: Floats) -> tuple[Floats, ...]:
    """Fit blocks [size, n] by d * q + m with codes 0..high: d, m [n], codes [n, size]."""
    low = x.min(0)
    span = x.max(0) - low
    span = np.where(span < TINY, np.float32(0), span)
    sum_w, sum_x = total(w), total(w * x)
    d, m = np.zeros_like(span), round_f16(_share(sum_x, sum_w, low))
    best = total(w * np.square(m - x))
    for k in range(s.n_steps):
        new_d, new_m = divided(s, span, k), low
        for _ in range(THRICE):
            q = codes(x, new_d, -new_m, 0, s.high)
            wq = w * q
            sum_q, sum_qq, sum_qx = total(wq), total(wq * q), total(wq * x)
            det = sum_w * sum_qq - sum_q * sum_q
            det = np.where(det > SINGULAR * (sum_w * sum_qq), det, np.float32(0))
            new_d = round_f16(_share(sum_w * sum_qx - sum_x * sum_q, det, np.float32(0)))
            new_m = round_f16(_share(sum_x - new_d * sum_q, sum_w, low))
            error = total(w * np.square(new_d * codes(x, new_d, -new_m, 0, s.high) + new_m - x))
            better = error < best
            d, m, best = np.where(better, new_d, d), np.where(better, new_m, m), np.where(better, error, best)
    return d, m, codes(x, d, -m, 0, s.high).T


# ---- two bits a weight, in the order of Q2_K and Q3_K ---------------------------------------------------------------


PAIRS = np.array([0, 2, 4, 6], np.uint8)


def join_two_bits(q: Bytes) -> Bytes:
    """256 values of 2 bits a block to 64 bytes."""
    return (q.reshape(-1, 2, 4, 32) << PAIRS[:, None]).sum(2, dtype=np.uint8).reshape(-1, 64)


def split_two_bits(b: Bytes) -> Bytes:
    """64 bytes a block [rows, blocks, 64] to 256 values of 2 bits [rows, blocks, 16, 16]."""
    q = b.reshape(*b.shape[:2], 2, 1, 32) >> PAIRS[:, None] & np.uint8(3)
    return q.reshape(*b.shape[:2], 16, 16)
