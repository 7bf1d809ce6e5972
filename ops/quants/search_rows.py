"""The searches of `ggjit.ops.quants.search` for one block at a time, compiled: the same operations, the same bits.

They work without importance matrix. A block's l and m are left in a buffer:

    found = memory.local_1k()
    d, dmin = make_fit_pairs(search)(src, x, found)        # of 256 f32 at byte x of src
    l, m = small(found, L, g), small(found, M, g)          # of group g
    q = code(value + dmin * m, reciprocal(d * l), low, high)
"""

import functools

import numpy as np

from ggjit.jit import jitted
from ggjit.ops.lib import memory
from ggjit.ops.quants.quant import clamp, nearest
from ggjit.ops.quants.search import FACTORS

# 16 f32 each in the buffer of a block
L, M, NEW_L, NEW_M, RMS, SCALE, SPARE = range(0, 448, 64)


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
def rms(src, x, size):
    """Root of the mean square of a group."""
    total = np.float32(0)
    for i in range(size):
        v = memory.load_f32(src, x + 4 * i)
        total += v * v
    return np.sqrt(total / np.float32(size))


@jitted
def least_squares(sum_w, sum_x, sum_q, sum_qq, sum_qx):
    """The scale and minimum of least error for codes, the minimum not negative."""
    det = sum_w * sum_qq - sum_q * sum_q
    m = (sum_q * sum_qx - sum_qq * sum_x) / det
    if det > np.float32(1e-5) * (sum_w * sum_qq) and m > 0:
        return (sum_w * sum_qx - sum_x * sum_q) / det, m
    return (sum_qx / sum_qq if sum_qq > 0 else np.float32(0)), np.float32(0)


@functools.cache
def make_fit_pairs(search):
    """Jitted (src, x, found) -> (d, dmin), as `search.fit_pairs`; ls and m of the groups go to the buffer."""
    size, n_steps, rounds, groups = search.size, search.n_steps, search.rounds, 256 // search.size
    nbytes = 4 * size
    high, limit = np.float32(search.high), np.float32(search.limit)
    one_less = np.float32(search.high) / np.float32(search.high - 1)
    zero = np.float32(0)

    @jitted
    def pair_error(src, x, mean, step, minimum):
        to_code, error = reciprocal(step), np.float32(0)
        for i in range(size):
            v = memory.load_f32(src, x + 4 * i)
            e = step * code(v + minimum, to_code, zero, high) - minimum - v
            error += (mean + abs(v)) * (e * e)
        return error

    @jitted
    def fit_group(src, x, mean):
        low = top = memory.load_f32(src, x)
        sum_w = sum_x = sum_xx = np.float32(0)
        for i in range(size):
            v = memory.load_f32(src, x + 4 * i)
            w = mean + abs(v)
            low, top = v if v < low else low, v if v > top else top
            sum_w += w
            sum_x += w * v
            sum_xx += w * (v * v)
        low = low if low < 0 else zero
        span = top - low
        span = zero if span < np.float32(1e-12) else span
        noise = np.float32(1e-10) * sum_xx
        scale, minimum = zero, zero - low
        best = pair_error(src, x, mean, zero, minimum)
        for k in range(n_steps):
            to_code = reciprocal(span / (high + tenths(k)))
            sum_q = sum_qq = sum_qx = np.float32(0)
            for i in range(size):
                v = memory.load_f32(src, x + 4 * i)
                q = code(v - low, to_code, zero, high)
                wq = (mean + abs(v)) * q
                sum_q += wq
                sum_qq += wq * q
                sum_qx += wq * v
            a, m = least_squares(sum_w, sum_x, sum_q, sum_qq, sum_qx)
            error = np.float32(0)
            for i in range(size):
                v = memory.load_f32(src, x + 4 * i)
                e = a * code(v - low, to_code, zero, high) - m - v
                error += (mean + abs(v)) * (e * e)
            if error + noise < best:
                best, scale, minimum = error, a, m
        return scale, minimum

    @jitted
    def best_pair(src, x, mean, d, dmin, near, near_m):
        best, best_ls, best_m = np.float32(np.inf), near, near_m
        for i in range(4):
            ls = near - np.float32(1) if i == 1 else (near + np.float32(1) if i == 2 else near)
            ls = clamp(nearest(near * one_less) if i == 3 else ls, zero, limit)
            for j in range(3):
                m = near_m - np.float32(1) if j == 1 else (near_m + np.float32(1) if j == 2 else near_m)
                m = clamp(m, zero, limit)
                error = pair_error(src, x, mean, d * ls, dmin * m)
                if error < best:
                    best, best_ls, best_m = error, ls, m
        return best_ls, best_m, best

    @jitted
    def refit(src, x, found, d, dmin):
        ll = lm = mm = lx = mx = np.float32(0)
        for g in range(groups):
            ls, m, mean = small(found, L, g), small(found, M, g), small(found, RMS, g)
            to_code, minimum = reciprocal(d * ls), dmin * m
            sum_w = sum_x = sum_q = sum_qq = sum_qx = np.float32(0)
            for i in range(size):
                v = memory.load_f32(src, x + nbytes * g + 4 * i)
                w = mean + abs(v)
                q = code(v + minimum, to_code, zero, high)
                sum_w += w
                sum_x += w * v
                sum_q += w * q
                sum_qq += w * q * q
                sum_qx += w * q * v
            ll += ls * ls * sum_qq
            lm += ls * m * sum_q
            mm += m * m * sum_w
            lx += ls * sum_qx
            mx += m * sum_x
        det = ll * mm - lm * lm
        if det > np.float32(1e-5) * (ll * mm):
            d, dmin = (lx * mm - mx * lm) / det, (lx * lm - mx * ll) / det
        elif ll > 0:
            d = lx / ll
        return round_f16(found, d if d > 0 else zero), round_f16(found, dmin if dmin > 0 else zero)

    @jitted
    def choose(src, x, found, d, dmin, near, near_m):
        error = np.float32(0)
        for g in range(groups):
            around, around_m = small(found, near, g), small(found, near_m, g)
            ls, m, e = best_pair(src, x + nbytes * g, small(found, RMS, g), d, dmin, around, around_m)
            memory.store_f32(found, NEW_L + 4 * g, ls)
            memory.store_f32(found, NEW_M + 4 * g, m)
            error += e
        return error

    @jitted
    def keep(found):
        for g in range(groups):
            memory.store_f32(found, L + 4 * g, small(found, NEW_L, g))
            memory.store_f32(found, M + 4 * g, small(found, NEW_M, g))

    @jitted
    def fit_pairs(src, x, found):
        top = top_m = np.float32(0)
        for g in range(groups):
            mean = rms(src, x + nbytes * g, size)
            scale, minimum = fit_group(src, x + nbytes * g, mean)
            memory.store_f32(found, RMS + 4 * g, mean)
            memory.store_f32(found, NEW_L + 4 * g, scale)
            memory.store_f32(found, NEW_M + 4 * g, minimum)
            top, top_m = scale if scale > top else top, minimum if minimum > top_m else top_m
        d, dmin = round_f16(found, top / limit), round_f16(found, top_m / limit)
        for g in range(groups):
            memory.store_f32(found, NEW_L + 4 * g, code(small(found, NEW_L, g), reciprocal(d), zero, limit))
            memory.store_f32(found, NEW_M + 4 * g, code(small(found, NEW_M, g), reciprocal(dmin), zero, limit))
        best = choose(src, x, found, d, dmin, NEW_L, NEW_M)
        keep(found)
        for _ in range(rounds):
            new_d, new_dmin = refit(src, x, found, d, dmin)
            error = choose(src, x, found, new_d, new_dmin, L, M)
            if error < best:
                best, d, dmin = error, new_d, new_dmin
                keep(found)
        return d, dmin

    return fit_pairs


@functools.cache
def make_fit_scales(search):
    """Jitted (src, x, found) -> d, as `search.fit_scales`; l of the groups goes to the buffer."""
    size, n_steps, rounds, groups = search.size, search.n_steps, search.rounds, 256 // search.size
    nbytes = 4 * size
    low, high = np.float32(search.low), np.float32(search.high)
    lowest, limit = np.float32(-search.limit), np.float32(search.limit - 1)
    one_less = np.float32(search.low) / np.float32(search.low + 1)
    zero = np.float32(0)

    @jitted
    def fit_group(src, x, mean):
        top = zero
        for i in range(size):
            v = memory.load_f32(src, x + 4 * i)
            top = v if abs(v) > abs(top) else top
        top = zero if abs(top) < np.float32(1e-12) else top
        scale = best = zero
        for k in range(2 * n_steps):
            to_code = reciprocal(top / (low - tenths(k) if k < n_steps else high + tenths(k - n_steps)))
            sum_qq = sum_qx = zero
            for i in range(size):
                v = memory.load_f32(src, x + 4 * i)
                q = code(v, to_code, low, high)
                wq = (mean + abs(v)) * q
                sum_qq += wq * q
                sum_qx += wq * v
            fitted = sum_qx / sum_qq if sum_qq > 0 else zero
            if fitted * sum_qx > best:
                scale, best = fitted, fitted * sum_qx
        return scale

    @jitted
    def best_scale(src, x, mean, d, near):
        less = nearest(near * one_less)
        best, best_ls = np.float32(np.inf), near
        for k in range(6):
            around = near if k < 3 else less
            around = around - np.float32(1) if k % 3 == 1 else (around + np.float32(1) if k % 3 == 2 else around)
            ls = clamp(around, lowest, limit)
            step = d * ls
            to_code, error = reciprocal(step), zero
            for i in range(size):
                v = memory.load_f32(src, x + 4 * i)
                e = step * code(v, to_code, low, high) - v
                error += (mean + abs(v)) * (e * e)
            if error < best:
                best, best_ls = error, ls
        return best_ls, best

    @jitted
    def refit(src, x, found, d):
        ll = lx = zero
        for g in range(groups):
            ls, mean = small(found, L, g), small(found, RMS, g)
            to_code = reciprocal(d * ls)
            sum_qq = sum_qx = zero
            for i in range(size):
                v = memory.load_f32(src, x + nbytes * g + 4 * i)
                q = code(v, to_code, low, high)
                wq = (mean + abs(v)) * q
                sum_qq += wq * q
                sum_qx += wq * v
            ll += ls * ls * sum_qq
            lx += ls * sum_qx
        return round_f16(found, lx / ll if ll > 0 else d)

    @jitted
    def fit_scales(src, x, found):
        top = zero
        for g in range(groups):
            mean = rms(src, x + nbytes * g, size)
            scale = fit_group(src, x + nbytes * g, mean)
            memory.store_f32(found, RMS + 4 * g, mean)
            memory.store_f32(found, SCALE + 4 * g, scale)
            memory.store_f32(found, L + 4 * g, zero)
            top = scale if abs(scale) > abs(top) else top
        d, best = zero, np.float32(np.inf)
        for k in range(FACTORS + rounds):
            new_d = round_f16(found, top / (lowest + np.float32(k))) if k < FACTORS else refit(src, x, found, d)
            error = zero
            for g in range(groups):
                near = (
                    code(small(found, SCALE, g), reciprocal(new_d), lowest, limit)
                    if k < FACTORS
                    else small(found, L, g)
                )
                ls, e = best_scale(src, x + nbytes * g, small(found, RMS, g), new_d, near)
                memory.store_f32(found, NEW_L + 4 * g, ls)
                error += e
            if error < best:
                best, d = error, new_d
                for g in range(groups):
                    memory.store_f32(found, L + 4 * g, small(found, NEW_L, g))
        return d

    return fit_scales
