"""The searches of `ggjit.ops.quants.search`, compiled: the same operations, the same bits, 16 groups at a time.

Lanes are the groups of a block of 256 (8 or 16 of them), or 16 blocks of one group. Their values and the weights of
the errors are brought into a buffer, transposed: word i of lane g is value i of group g.

    found = memory.local_8k()                                  # or the scratch of a conversion
    load(src, x, weights, at, weighted, lanes, found)          # make_load
    d, dmin = fit_pairs(found)                                 # make_fit_pairs
    l, m = small(found, L, g), small(found, M, g)              # of group g
    q = code(value + dmin * m, reciprocal(d * l), low, high)
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.quant import clamp, nearest
from ggjit.ops.quants.search import FACTORS, THRICE, TWICE

memory = lazy_module("ggjit.ops.lib.memory")
vec = lazy_module("ggjit.ops.lib.vec")

# In the buffer: values, weights and codes, 64 bytes for each of up to 32 words; then 16 f32 each.
X, W, Q = 0, 2048, 4096
L, M, NEW_L, NEW_M, SCALE, MINIMUM, ERROR, SPARE = range(6144, 6144 + 8 * 64, 64)
ROUND = 12582912.0  # added and taken away again it leaves whole numbers


# ---- numbers --------------------------------------------------------------------------------------------------------


@jitted
def small(found, what, g):
    """Entry g of one of the buffer's arrays."""
    return memory.load_f32(found, what + 4 * g)


@jitted
def reciprocal(step):
    """1 / step, and 0 for 0."""
    return np.float32(1) / step if step != 0 else np.float32(0)


@jitted
def code(v, to_code, low, high):
    """Nearest code of v, in units whose reciprocal is to_code."""
    return nearest(clamp(v * to_code, low, high))


@jitted
def tenths(k):
    """Candidate k of 0, -0.1, 0.1, -0.2, 0.2 ..."""
    return np.float32(0.1) * np.float32(-(k // 2) - 1 if k % 2 else k // 2)


@jitted
def round_f16(found, v):
    """v as f16 holds it; beyond its range its largest."""
    memory.store_f16(found, SPARE, clamp(v, np.float32(-65504), np.float32(65504)))
    return memory.load_f16(found, SPARE)


@jitted
def sum_of(found, what, n):
    """Sum of the first n entries of one of the buffer's arrays."""
    out = np.float32(0)
    for g in range(n):
        out += small(found, what, g)
    return out


@jitted
def value(found, i, lane):
    """Value i of a lane."""
    return memory.load_f32(found, X + 64 * i + 4 * lane)


# ---- lanes ----------------------------------------------------------------------------------------------------------


@jitted
def limited(v, low, high):
    """v limited to [low, high]; NaN gives low."""
    return vec.min(vec.max(v, low), high)


@jitted
def codes(v, to_code, low, high):
    """Nearest codes."""
    return limited(v * to_code, low, high) + np.float32(ROUND) - np.float32(ROUND)


@jitted
def inverse(step):
    """1 / step, and 0 for 0."""
    return vec.select(step != np.float32(0), np.float32(1) / step, np.float32(0))


@jitted
def share(a, b, otherwise):
    """a / b where b is positive."""
    return vec.select(b > np.float32(0), a / b, otherwise)


@jitted
def rounded_f16(found, v):
    """Lanes as f16 holds them; those beyond its range become its largest."""
    vec.store_f16(found, SPARE, limited(v, np.float32(-65504), np.float32(65504)))
    return vec.load_f16(found, SPARE)


@functools.cache
def make_load(size, plain=False):
    """Jitted (src, x, weights, at, weighted, lanes, found): values and weights of groups to the buffer.

    Groups of `size` f32 lie one after the other, from byte x of src, and as many weights from byte `at`; lanes beyond
    the number of groups are zeros. `weighted` 0: weights are rms + |x|, or 1 where `plain`.
    """
    nbytes, count = 4 * size, np.float32(size)

    @jitted
    def load(src, x, weights, at, weighted, lanes, found):
        squares = vec.zero()
        for i in range(size):
            v = vec.load_strided_first(src, x + 4 * i, nbytes, lanes)
            vec.store(found, X + 64 * i, v)
            squares = squares + v * v
        rms = vec.sqrt(squares / count)
        for i in range(size):
            v = vec.load(found, X + 64 * i)
            w = vec.zero() + np.float32(1) if plain else rms + vec.abs(v)
            if weighted:
                w = vec.load_strided_first(weights, at + 4 * i, nbytes, lanes)
            vec.store(found, W + 64 * i, w)

    return load


@functools.cache
def make_error(size, low, high):
    """Jitted (found, step, minimum) -> errors of lanes with the nearest codes."""
    low, high = np.float32(low), np.float32(high)

    @jitted
    def error_of(found, step, minimum):
        to_code, error = inverse(step), vec.zero()
        for i in range(size):
            v = vec.load(found, X + 64 * i)
            e = step * codes(v + minimum, to_code, low, high) - minimum - v
            error = error + vec.load(found, W + 64 * i) * (e * e)
        return error

    return error_of


# ---- scales and minimums --------------------------------------------------------------------------------------------


@jitted
def least_squares(sum_w, sum_x, sum_q, sum_qq, sum_qx):
    """The scale and minimum of least error for codes, the minimum not negative."""
    det = sum_w * sum_qq - sum_q * sum_q
    a, m = (sum_w * sum_qx - sum_x * sum_q) / det, (sum_q * sum_qx - sum_qq * sum_x) / det
    both = (det > np.float32(1e-5) * (sum_w * sum_qq)) & (m > np.float32(0))
    return vec.select(both, a, share(sum_qx, sum_qq, np.float32(0))), vec.select(both, m, np.float32(0))


@functools.cache
def make_fit_range_of_groups(search):
    """Jitted (found): scale and minimum of each lane by itself, to SCALE and MINIMUM."""
    size, n_steps, high, zero = search.size, search.n_steps, np.float32(search.high), np.float32(0)

    @jitted
    def error_of(found, a, m):
        error = vec.zero()
        for i in range(size):
            e = a * vec.load(found, Q + 64 * i) - m - vec.load(found, X + 64 * i)
            error = error + vec.load(found, W + 64 * i) * (e * e)
        return error

    @jitted
    def fit_group(found):
        low = top = vec.load(found, X)
        sum_w = sum_x = sum_xx = vec.zero()
        for i in range(size):
            v, w = vec.load(found, X + 64 * i), vec.load(found, W + 64 * i)
            low, top = vec.min(v, low), vec.max(v, top)
            sum_w, sum_x, sum_xx = sum_w + w, sum_x + w * v, sum_xx + w * (v * v)
            vec.store(found, Q + 64 * i, vec.zero())
        low = vec.min(low, zero)
        span = top - low
        span = vec.select(span < np.float32(1e-12), zero, span)
        noise = np.float32(1e-10) * sum_xx
        scale, minimum = vec.zero(), zero - low
        best = error_of(found, scale, minimum)
        for k in range(n_steps):
            to_code = inverse(span / (high + tenths(k)))
            sum_q = sum_qq = sum_qx = vec.zero()
            for i in range(size):
                v = vec.load(found, X + 64 * i)
                q = codes(v - low, to_code, zero, high)
                wq = vec.load(found, W + 64 * i) * q
                vec.store(found, Q + 64 * i, q)
                sum_q, sum_qq, sum_qx = sum_q + wq, sum_qq + wq * q, sum_qx + wq * v
            a, m = least_squares(sum_w, sum_x, sum_q, sum_qq, sum_qx)
            error = error_of(found, a, m)
            better = error + noise < best
            best, scale, minimum = (
                vec.select(better, error, best),
                vec.select(better, a, scale),
                vec.select(better, m, minimum),
            )
        vec.store(found, SCALE, scale)
        vec.store(found, MINIMUM, minimum)

    return fit_group


@functools.cache
def make_fit_pairs(search):
    """Jitted (found) -> (d, dmin), as `search.fit_pairs` for one block; l and m of the groups go to L and M."""
    size, rounds, groups = search.size, search.rounds, 256 // search.size
    high, limit, zero, one = np.float32(search.high), np.float32(search.limit), np.float32(0), np.float32(1)
    one_less = np.float32(search.high) / np.float32(search.high - 1)
    fit_group, error_of = make_fit_range_of_groups(search), make_error(search.size, 0, search.high)

    @jitted
    def choose(found, d, dmin, near, near_m):
        """The best neighbours of l and m in two arrays, to NEW_L and NEW_M; returns the error of the block."""
        around, around_m = vec.load(found, near), vec.load(found, near_m)
        best, best_ls, best_m = vec.zero() + np.float32(np.inf), around, around_m
        for i in range(4):
            ls = around
            if i == 1:
                ls = around - one
            if i == 2:
                ls = around + one
            if i == 3:
                ls = around * one_less + np.float32(ROUND) - np.float32(ROUND)
            ls = limited(ls, zero, limit)
            for j in range(3):
                m = limited(around_m + np.float32(0 if j == 0 else 2 * j - 3), zero, limit)
                error = error_of(found, ls * d, m * dmin)
                better = error < best
                best, best_ls = vec.select(better, error, best), vec.select(better, ls, best_ls)
                best_m = vec.select(better, m, best_m)
        vec.store(found, NEW_L, best_ls)
        vec.store(found, NEW_M, best_m)
        vec.store(found, ERROR, best)
        return sum_of(found, ERROR, groups)

    @jitted
    def refit(found, d, dmin):
        ls, m = vec.load(found, L), vec.load(found, M)
        to_code, minimum = inverse(ls * d), m * dmin
        sum_w = sum_x = sum_q = sum_qq = sum_qx = vec.zero()
        for i in range(size):
            v, w = vec.load(found, X + 64 * i), vec.load(found, W + 64 * i)
            q = codes(v + minimum, to_code, zero, high)
            wq = w * q
            sum_w, sum_x = sum_w + w, sum_x + w * v
            sum_q, sum_qq, sum_qx = sum_q + wq, sum_qq + wq * q, sum_qx + wq * v
        ll, lm, mm = (
            lanes_sum(found, ls * ls * sum_qq),
            lanes_sum(found, ls * m * sum_q),
            lanes_sum(found, m * m * sum_w),
        )
        lx, mx = lanes_sum(found, ls * sum_qx), lanes_sum(found, m * sum_x)
        det = ll * mm - lm * lm
        if det > np.float32(1e-5) * (ll * mm):
            d, dmin = (lx * mm - mx * lm) / det, (lx * lm - mx * ll) / det
        elif ll > 0:
            d = lx / ll
        return round_f16(found, d if d > 0 else zero), round_f16(found, dmin if dmin > 0 else zero)

    @jitted
    def lanes_sum(found, v):
        vec.store(found, ERROR, v)
        return sum_of(found, ERROR, groups)

    @jitted
    def keep(found):
        vec.store(found, L, vec.load(found, NEW_L))
        vec.store(found, M, vec.load(found, NEW_M))

    @jitted
    def fit_pairs(found):
        fit_group(found)
        top = top_m = zero
        for g in range(groups):
            scale, minimum = small(found, SCALE, g), small(found, MINIMUM, g)
            top, top_m = scale if scale > top else top, minimum if minimum > top_m else top_m
        d, dmin = round_f16(found, top / limit), round_f16(found, top_m / limit)
        vec.store(found, NEW_L, codes(vec.load(found, SCALE), reciprocal(d), zero, limit))
        vec.store(found, NEW_M, codes(vec.load(found, MINIMUM), reciprocal(dmin), zero, limit))
        best = choose(found, d, dmin, NEW_L, NEW_M)
        keep(found)
        for _ in range(rounds):
            new_d, new_dmin = refit(found, d, dmin)
            error = choose(found, new_d, new_dmin, L, M)
            if error < best:
                best, d, dmin = error, new_d, new_dmin
                keep(found)
        return d, dmin

    return fit_pairs


# ---- signed scales --------------------------------------------------------------------------------------------------


@jitted
def largest(found, size):
    """The value of largest magnitude of each lane, the first of equal ones."""
    top = vec.zero()
    for i in range(size):
        v = vec.load(found, X + 64 * i)
        top = vec.select(vec.abs(v) > vec.abs(top), v, top)
    return top


@jitted
def without_tiny(v):
    """0 where the magnitude is tiny."""
    return vec.select(vec.abs(v) < np.float32(1e-12), np.float32(0), v)


@functools.cache
def make_sums(size, low, high):
    """Jitted (found, to_code) -> (sums of w * q^2, of w * q * x), for the nearest codes."""
    low, high = np.float32(low), np.float32(high)

    @jitted
    def sums(found, to_code):
        sum_qq = sum_qx = vec.zero()
        for i in range(size):
            v = vec.load(found, X + 64 * i)
            q = codes(v, to_code, low, high)
            wq = vec.load(found, W + 64 * i) * q
            sum_qq, sum_qx = sum_qq + wq * q, sum_qx + wq * v
        return sum_qq, sum_qx

    return sums


@functools.cache
def make_fit_scales(search):
    """Jitted (found) -> d, as `search.fit_scales` for one block; l of the groups goes to L."""
    size, n_steps, rounds, groups = search.size, search.n_steps, search.rounds, 256 // search.size
    low, high, zero = np.float32(search.low), np.float32(search.high), np.float32(0)
    lowest, limit = np.float32(-search.limit), np.float32(search.limit - 1)
    one_less = np.float32(search.low) / np.float32(search.low + 1)
    sums, error_of = make_sums(size, low, high), make_error(size, low, high)

    @jitted
    def fit_group(found):
        top, scale, best = without_tiny(largest(found, size)), vec.zero(), vec.zero()
        for k in range(2 * n_steps):
            to_code = inverse(top / (low - tenths(k) if k < n_steps else high + tenths(k - n_steps)))
            sum_qq, sum_qx = sums(found, to_code)
            fitted = share(sum_qx, sum_qq, zero)
            better = fitted * sum_qx > best
            scale, best = vec.select(better, fitted, scale), vec.select(better, fitted * sum_qx, best)
        vec.store(found, SCALE, scale)

    @jitted
    def choose(found, d, near):
        less = near * one_less + np.float32(ROUND) - np.float32(ROUND)
        best, best_ls = vec.zero() + np.float32(np.inf), near
        for k in range(6):
            around = near if k < 3 else less
            ls = limited(around + np.float32(0 if k % 3 == 0 else 2 * (k % 3) - 3), lowest, limit)
            error = error_of(found, ls * d, zero)
            better = error < best
            best, best_ls = vec.select(better, error, best), vec.select(better, ls, best_ls)
        vec.store(found, NEW_L, best_ls)
        vec.store(found, ERROR, best)
        return sum_of(found, ERROR, groups)

    @jitted
    def refit(found, d):
        ls = vec.load(found, L)
        sum_qq, sum_qx = sums(found, inverse(ls * d))
        vec.store(found, ERROR, ls * ls * sum_qq)
        ll = sum_of(found, ERROR, groups)
        vec.store(found, ERROR, ls * sum_qx)
        return round_f16(found, sum_of(found, ERROR, groups) / ll if ll > 0 else d)

    @jitted
    def fit_scales(found):
        fit_group(found)
        top = zero
        for g in range(groups):
            scale = small(found, SCALE, g)
            top = scale if abs(scale) > abs(top) else top
        vec.store(found, L, vec.zero())
        d, best = zero, np.float32(np.inf)
        for k in range(FACTORS + rounds):
            new_d = round_f16(found, top / (lowest + np.float32(k))) if k < FACTORS else refit(found, d)
            near = vec.load(found, L)
            if k < FACTORS:
                near = codes(vec.load(found, SCALE), reciprocal(new_d), lowest, limit)
            error = choose(found, new_d, near)
            if error < best:
                best, d = error, new_d
                vec.store(found, L, vec.load(found, NEW_L))
        return d

    return fit_scales


# ---- blocks of one group --------------------------------------------------------------------------------------------


@functools.cache
def make_fit_signed(search):
    """Jitted (found): d of lanes to SCALE, as `search.fit_signed`."""
    size, n_steps = search.size, search.n_steps
    low, high, zero = np.float32(search.low), np.float32(search.high), np.float32(0)
    sums, error_of = make_sums(size, low, high), make_error(size, low, high)

    @jitted
    def fit_signed(found):
        top, d = without_tiny(largest(found, size)), vec.zero()
        best = error_of(found, d, zero)
        for k in range(2 * n_steps):
            step = top / (low - tenths(k) if k < n_steps else high + tenths(k - n_steps))
            for _ in range(TWICE):
                sum_qq, sum_qx = sums(found, inverse(step))
                step = rounded_f16(found, share(sum_qx, sum_qq, zero))
                error = error_of(found, step, zero)
                better = error < best
                d, best = vec.select(better, step, d), vec.select(better, error, best)
        vec.store(found, SCALE, d)

    return fit_signed


@functools.cache
def make_fit_range(search):
    """Jitted (found): d and m of lanes to SCALE and MINIMUM, as `search.fit_range`."""
    size, n_steps, high, zero = search.size, search.n_steps, np.float32(search.high), np.float32(0)

    @jitted
    def error_of(found, d, m):
        to_code, error = inverse(d), vec.zero()
        for i in range(size):
            v = vec.load(found, X + 64 * i)
            e = d * codes(v - m, to_code, zero, high) + m - v
            error = error + vec.load(found, W + 64 * i) * (e * e)
        return error

    @jitted
    def fit_range(found):
        low = top = vec.load(found, X)
        sum_w = sum_x = vec.zero()
        for i in range(size):
            v, w = vec.load(found, X + 64 * i), vec.load(found, W + 64 * i)
            low, top, sum_w, sum_x = vec.min(v, low), vec.max(v, top), sum_w + w, sum_x + w * v
        span = top - low
        span = vec.select(span < np.float32(1e-12), zero, span)
        d, m = vec.zero(), rounded_f16(found, share(sum_x, sum_w, low))
        best = error_of(found, d, m)
        for k in range(n_steps):
            new_d, new_m = span / (high + tenths(k)), low
            for _ in range(THRICE):
                to_code = inverse(new_d)
                sum_q = sum_qq = sum_qx = vec.zero()
                for i in range(size):
                    v = vec.load(found, X + 64 * i)
                    q = codes(v - new_m, to_code, zero, high)
                    wq = vec.load(found, W + 64 * i) * q
                    sum_q, sum_qq, sum_qx = sum_q + wq, sum_qq + wq * q, sum_qx + wq * v
                det = sum_w * sum_qq - sum_q * sum_q
                det = vec.select(det > np.float32(1e-5) * (sum_w * sum_qq), det, zero)
                new_d = rounded_f16(found, share(sum_w * sum_qx - sum_x * sum_q, det, zero))
                new_m = rounded_f16(found, share(sum_x - new_d * sum_q, sum_w, low))
                error = error_of(found, new_d, new_m)
                better = error < best
                d, m = vec.select(better, new_d, d), vec.select(better, new_m, m)
                best = vec.select(better, error, best)
        vec.store(found, SCALE, d)
        vec.store(found, MINIMUM, m)

    return fit_range


# ---- rows -----------------------------------------------------------------------------------------------------------


def make_coders(size, nbytes, block, plain=False):
    """`quantize_row` and `quantize_weighted` of a type with blocks of 256 (see `ggjit.ops.quants.quant.Quant`).

    Args:
        size: values of a group.
        nbytes: bytes of a block.
        block: jitted (found, src, x, dst, y): fits what was loaded into the buffer, 256 f32 at byte x of src, and
            writes the block at byte y of dst.
        plain: weights are as `make_load` says.
    """
    load, groups = make_load(size, plain), 256 // size

    @jitted
    def quantize_row(src, src_offs, dst, dst_offs, n):
        found = memory.local_8k()
        for i in range(n // 256):
            load(src, src_offs + 1024 * i, src, np.int64(0), 0, groups, found)
            block(found, src, src_offs + 1024 * i, dst, dst_offs + nbytes * i)

    @jitted
    def quantize_weighted(src, src_offs, weights, weights_offs, weighted, dst, dst_offs, n, work):
        for i in range(n // 256):
            x = src_offs + 1024 * i
            load(src, x, weights, weights_offs + 1024 * i, weighted, groups, work)
            block(work, src, x, dst, dst_offs + nbytes * i)

    return quantize_row, quantize_weighted


def make_weighted_coder(size, nbytes, fit, block, plain=False):
    """`quantize_weighted` of a type with blocks of one group, 16 of them at a time.

    Args:
        size: values of a block.
        nbytes: bytes of a block.
        fit: jitted (found): fits the lanes.
        block: jitted (found, lane, dst, y): writes the block of a lane at byte y of dst.
        plain: weights are as `make_load` says.
    """
    load = make_load(size, plain)

    @jitted
    def quantize_weighted(src, src_offs, weights, weights_offs, weighted, dst, dst_offs, n, work):
        blocks = n // size
        for i in range(0, blocks, 16):
            lanes = blocks - i if blocks - i < 16 else 16
            x, at = src_offs + 4 * size * i, weights_offs + 4 * size * i
            load(src, x, weights, at, weighted, lanes, work)
            fit(work)
            for lane in range(lanes):
                block(work, lane, dst, dst_offs + nbytes * (i + lane))

    return quantize_weighted
