"""The search of `ggjit.ops.quants.grid_search` for one block at a time, compiled: the same operations, the same bits.

    d = make_fit(search)(src, x, weights, at, weighted, found)
    grid_search_rows.word(found, K, g)           # k of group g; ENTRIES: of point p; MARKS: of octet o

`found`, a buffer of WORK bytes, holds what is known of the block; arrays of octets are 32 words.
Errors of 16 octets are found at once (`ggjit.ops.quants.grid_points`).
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants import grid_points
from ggjit.ops.quants.grid_points import ENTRY, ENTRY_TURNED, RESULT, SECOND, TURNED
from ggjit.ops.quants.grid_search import half_size
from ggjit.ops.quants.quant import WORK, clamp, nearest

memory = lazy_module("ggjit.ops.lib.memory")

X, W, WX = 0, 1024, 2048  # coordinates [8][32] of magnitudes, of weights, of their products
STEP, ODD, ERROR = 3072, 3200, 3328  # [32] each; errors of two shifts
SIGNS, MARKS, ENTRIES, VALUES = 3584, 3712, 3840, 4096  # [32], [32], [64]; f32 [2][8]
GROUP_STEP, GROUP_ERROR, FIRST, NEAR, TRIED, BEST, NEW_K, K = range(4160, 4160 + 8 * 64, 64)  # f32 [16] each
SPARE, POINT = 4672, 4736  # one number; values of an octet's coordinates
RESULTS, TABLES = 4800, 4800 + 2 * RESULT
assert TABLES + 4 * 81 * 64 <= WORK


@jitted
def word(found, what, i):
    """Entry i of one of the buffer's arrays of i32."""
    return np.int64(memory.load_i32(found, what + 4 * i))


@jitted
def get(found, what, i):
    """Entry i of one of the buffer's arrays of f32."""
    return memory.load_f32(found, what + 4 * i)


@jitted
def put(found, what, i, v):
    """Set entry i of one of the buffer's arrays of f32."""
    memory.store_f32(found, what + 4 * i, v)


@jitted
def scale(found, g):
    """k of group g."""
    return np.int64(get(found, K, g))


@jitted
def round_f16(found, v):
    """v as f16 holds it; beyond its range its largest."""
    memory.store_f16(found, SPARE, clamp(v, np.float32(-65504), np.float32(65504)))
    return memory.load_f16(found, SPARE)


# ---- points for given steps -----------------------------------------------------------------------------------------


@functools.cache
def make_search(s, track):
    """Jitted (found): the best points of all octets for the steps of groups, to RESULTS."""
    n = half_size(s.grid)
    n_points, n_shifts, octets = 4 // n, len(s.values), s.octets
    point = grid_points.make_point(s, track)

    @jitted
    def search(found):
        base = memory.address(found)
        for o in range(32):
            put(found, STEP, o, get(found, GROUP_STEP, o // octets))
        for b in range(2):
            for q in range(n_points * n_shifts):
                x, values = base + X + 64 * b + 256 * n * (q % n_points), base + VALUES + 32 * (q // n_points)
                point(x, base + STEP + 64 * b, values, base + TABLES, base + RESULTS + RESULT * q + 64 * b)

    return search


@functools.cache
def make_errors(s):
    """Jitted (found): the errors of groups with the steps of groups, to GROUP_ERROR."""
    two_points, n_shifts, octets, groups = half_size(s.grid) == 2, len(s.values), s.octets, 32 // s.octets
    even_signs, shift_octets = s.even_signs, s.shift_octets
    search = make_search(s, False)

    @jitted
    def octet_error(found, o):
        total = get(found, RESULTS, o)
        if two_points:
            total += get(found, RESULTS + RESULT, o)
        if even_signs and word(found, ODD, o):
            total = get(found, RESULTS + TURNED, o)
            if two_points:
                total += get(found, RESULTS + RESULT, o)
                in_second = get(found, RESULTS, o) + get(found, RESULTS + RESULT + TURNED, o)
                total = in_second if in_second < total else total
        return total

    @jitted
    def errors(found):
        search(found)
        for g in range(groups):
            first = second = np.float32(0)
            for o in range(octets * g, octets * (g + 1)):
                a = octet_error(found, o)
                b = get(found, RESULTS + RESULT, o) if n_shifts == 2 else a
                if shift_octets == 1:
                    a = b if b < a else a
                first += a
                second += b
            if shift_octets > 1 and second < first:
                first = second
            put(found, GROUP_ERROR, g, first)

    return errors


@functools.cache
def make_points(s):
    """Jitted (found, o): the entries, the mark and the values (to POINT) of octet o, after a search with numbers."""
    n = half_size(s.grid)
    n_points, even_signs, shift_octets = 4 // n, s.even_signs, s.shift_octets
    fetch = grid_points.make_fetch(s.grid)

    @jitted
    def shift_of(found, o):
        """The shift of the octets that share it with octet o."""
        first = second = np.float32(0)
        begin = o // shift_octets * shift_octets
        for i in range(begin, begin + shift_octets):
            first += get(found, RESULTS, i)
            second += get(found, RESULTS + RESULT, i)
        return 1 if second < first else 0

    @jitted
    def turned_point(found, o):
        """Which point of octet o has the sign that is turned; 2: none."""
        if not word(found, ODD, o):
            return 2
        if n_points == 1:
            return 0
        in_second = get(found, RESULTS, o) + get(found, RESULTS + RESULT + TURNED, o)
        return 1 if in_second < get(found, RESULTS + TURNED, o) + get(found, RESULTS + RESULT, o) else 0

    @jitted
    def turn(found, o, at):
        """Turn the sign of least cost among n coordinates from `at`."""
        best, place, four = np.float32(np.inf), at, np.float32(4) * get(found, STEP, o)
        for i in range(at, at + n):
            cost = get(found, WX + 128 * i, o) * four * get(found, POINT, i)
            if cost < best:
                best, place = cost, i
        put(found, POINT, place, -get(found, POINT, place))
        memory.store_i32(found, MARKS + 4 * o, word(found, MARKS, o) ^ 1 << place)

    @jitted
    def points(found, o):
        base, which, shift = memory.address(found), 2, 0
        if shift_octets:
            shift = shift_of(found, o)
        if even_signs:
            which = turned_point(found, o)
        memory.store_i32(found, MARKS + 4 * o, shift if shift_octets else word(found, SIGNS, o))
        for p in range(n_points):
            result = RESULTS + RESULT * (p + shift)
            entry = word(found, result + (ENTRY_TURNED if which == p else ENTRY), o)
            memory.store_i32(found, ENTRIES + 4 * (n_points * o + p), entry)
            fetch(entry, base + VALUES + 32 * shift, base + POINT + 8 * n * p)
        if which < 2:
            turn(found, o, 2 * n * which + n * word(found, RESULTS + RESULT * which + SECOND, o))

    return points


# ---- steps ----------------------------------------------------------------------------------------------------------


@functools.cache
def make_choose(s):
    """Jitted (found, d) -> error: the best k of groups among the neighbours of NEAR, to NEW_K."""
    groups, factor, top_k = 32 // s.octets, np.float32(s.factor), np.float32(s.n_scales - 1)
    zero, one = np.float32(0), np.float32(1)
    errors = make_errors(s)

    @jitted
    def choose(found, d):
        unit = d * factor
        for g in range(groups):
            put(found, BEST, g, np.float32(np.inf))
            put(found, NEW_K, g, zero)
        for j in range(3):
            for g in range(groups):
                k = get(found, NEAR, g)
                k = clamp(k - one if j == 1 else (k + one if j == 2 else k), zero, top_k)
                put(found, TRIED, g, k)
                put(found, GROUP_STEP, g, unit * (np.float32(2) * k + one))
            errors(found)
            for g in range(groups):
                if get(found, GROUP_ERROR, g) < get(found, BEST, g):
                    put(found, BEST, g, get(found, GROUP_ERROR, g))
                    put(found, NEW_K, g, get(found, TRIED, g))
        total = zero
        for g in range(groups):
            total += get(found, BEST, g)
        return total

    return choose


@functools.cache
def make_first_steps(s):
    """Jitted (found) -> the largest step: the steps of groups by themselves, to FIRST."""
    octets, groups, n_targets = s.octets, 32 // s.octets, len(s.targets)
    shares, errors = tuple(np.float32(1 / t) for t in s.targets), make_errors(s)

    @jitted
    def first_steps(found):
        for g in range(groups):
            top = 0  # as bits: LLVM takes a minute over a chain of maxima of floats
            for o in range(octets * g, octets * (g + 1)):
                for i in range(8):
                    top = max(top, word(found, X + 128 * i, o) & 0x7FFFFFFF)
            memory.store_i32(found, NEAR + 4 * g, top)
            put(found, BEST, g, np.float32(np.inf))
            put(found, FIRST, g, np.float32(0))
        for j in range(n_targets):
            for g in range(groups):
                put(found, GROUP_STEP, g, get(found, NEAR, g) * shares[j])
            errors(found)
            for g in range(groups):
                if get(found, GROUP_ERROR, g) < get(found, BEST, g):
                    put(found, BEST, g, get(found, GROUP_ERROR, g))
                    put(found, FIRST, g, get(found, GROUP_STEP, g))
        top = np.float32(0)
        for g in range(groups):
            top = get(found, FIRST, g) if get(found, FIRST, g) > top else top
        return top

    return first_steps


@functools.cache
def make_refit(s):
    """Jitted (found, d) -> d of least error for the points that d and K give; these are left in the buffer."""
    octets, groups, factor = s.octets, 32 // s.octets, np.float32(s.factor)
    search, points = make_search(s, True), make_points(s)

    @jitted
    def refit(found, d):
        unit, vv, xv = d * factor, np.float32(0), np.float32(0)
        for g in range(groups):
            put(found, GROUP_STEP, g, unit * (np.float32(2) * get(found, K, g) + np.float32(1)))
        search(found)
        for g in range(groups):
            group_vv = group_xv = np.float32(0)
            for o in range(octets * g, octets * (g + 1)):
                points(found, o)
                octet_vv = octet_xv = np.float32(0)
                for i in range(8):
                    v = get(found, POINT, i)
                    octet_vv += get(found, W + 128 * i, o) * (v * v)
                    octet_xv += get(found, WX + 128 * i, o) * v
                group_vv += octet_vv
                group_xv += octet_xv
            k = np.float32(2) * get(found, K, g) + np.float32(1)
            vv += group_vv * (k * k)
            xv += group_xv * k
        fitted = round_f16(found, xv / (vv * factor) if vv > 0 else d)
        return fitted if fitted > 0 else np.float32(0)

    return refit


@functools.cache
def make_load(s):
    """Jitted (src, x, weights, at, weighted, found): the block's values and weights to the buffer."""
    signed, n_values = s.shift_octets == 0, len(s.values[0])
    values = tuple(np.float32(v) for shift in s.values for v in shift)
    n_all = len(values)

    @jitted
    def load(src, x, weights, at, weighted, found):
        for o in range(32):
            signs = n_signs = 0
            for i in range(8):
                v = memory.load_f32(src, x + 32 * o + 4 * i)
                w = memory.load_f32(weights, at + 32 * o + 4 * i) if weighted else np.float32(1)
                if signed and v < 0:
                    signs |= 1 << i
                    n_signs += 1
                v = abs(v) if signed else v
                put(found, X + 128 * i, o, v)
                put(found, W + 128 * i, o, w)
                put(found, WX + 128 * i, o, w * v)
            memory.store_i32(found, ODD + 4 * o, n_signs & 1)
            memory.store_i32(found, SIGNS + 4 * o, signs)
        for k in range(n_all):
            put(found, VALUES + 32 * (k // n_values), k % n_values, values[k])

    return load


@functools.cache
def make_fit(s):
    """Jitted (src, x, weights, at, weighted, found) -> d, of the 256 f32 at byte x of src.

    Their weights are f32 at byte `at` of weights; all are 1 where weighted is 0.
    """
    groups, factors, rounds = 32 // s.octets, s.factors, s.rounds
    factor, top_k = np.float32(s.factor), np.float32(s.n_scales - 1)
    tops = tuple(np.float32(1 / (s.factor * (2 * (s.n_scales - j) - 1))) for j in range(factors))
    zero, one = np.float32(0), np.float32(1)
    load, first_steps, choose, refit = make_load(s), make_first_steps(s), make_choose(s), make_refit(s)

    @jitted
    def near(found, d):
        inverse = one / (d * factor) if d > 0 else zero
        for g in range(groups):
            k = (get(found, FIRST, g) * inverse - one) * np.float32(0.5)
            put(found, NEAR, g, nearest(clamp(k, zero, top_k)))

    @jitted
    def fit(src, x, weights, at, weighted, found):
        load(src, x, weights, at, weighted, found)
        top = first_steps(found)
        for g in range(groups):
            put(found, K, g, zero)
        d, best = zero, np.float32(np.inf)
        for j in range(factors + rounds):
            if j < factors:
                new_d = round_f16(found, top * tops[j])
                near(found, new_d)
            else:
                new_d = refit(found, d)
                for g in range(groups):
                    put(found, NEAR, g, get(found, K, g))
            error = choose(found, new_d)
            if error < best:
                best, d = error, new_d
                for g in range(groups):
                    put(found, K, g, get(found, NEW_K, g))
        refit(found, d)
        return d

    return fit


# ---- rows and blocks -------------------------------------------------------------------------------------------------


@functools.cache
def make_quantize_weighted(s, nbytes, store):
    """The `quantize_weighted` of a type (see `ggjit.ops.quants.quant.Quant`).

    Args:
        s: the search.
        nbytes: bytes of a block.
        store: jitted (found, d, dst, y): what was found to the block at byte y of dst.
    """
    fit = make_fit(s)

    @jitted
    def quantize_weighted(src, src_offs, weights, weights_offs, weighted, dst, dst_offs, n, work):
        for i in range(n // 256):
            d = fit(src, src_offs + 1024 * i, weights, weights_offs + 1024 * i, weighted, work)
            store(work, d, dst, dst_offs + nbytes * i)

    return quantize_weighted


@jitted
def store_sign_word(found, r, dst, at):
    """The seven signs of the four octets of run r, then its k, as a word."""
    out = scale(found, r) << 28
    for o in range(4):
        out |= (word(found, MARKS, 4 * r + o) & 127) << 7 * o
    memory.store_u32(dst, at, out)
