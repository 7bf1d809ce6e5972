"""Rows of the states that recurrences carry from token to token: f32, contiguous, in memory between two tokens.

Whole vectors and a masked tail: a masked store would make the load that follows it wait. Sums are one chain of 16
partial sums, so their order does not depend on the row's length or place.
"""

from ggjit.jit import jitted
from ggjit.ops.lib import memory, vec

BYTES = 16384  # of a state that stay in the first cache while the tokens pass


@jitted
def rows(n):
    """How many rows of n f32 that are."""
    count = BYTES // (4 * n)
    return count if count > 1 else 1


@jitted
def copy(dst, to, src, at, n):
    """dst = src for n f32."""
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.load(src, at + 4 * i))
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        vec.store_first(dst, to + i, vec.load_first(src, at + i, rest), rest)


@jitted
def clear(dst, to, n):
    """dst = 0 for n f32."""
    for i in range(0, n, 16):
        vec.store_first(dst, to + 4 * i, vec.zero(), n - i)


@jitted
def dot(x, at, y, by, n):
    """Sum of x * y for n f32."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        total = vec.fma(vec.load(x, at + 4 * i), vec.load(y, by + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        total = vec.fma(vec.load_first(x, at + i, rest), vec.load_first(y, by + i, rest), total)
    return vec.lane_sum(total)


@jitted
def add_scaled(dst, to, src, at, factor, n):
    """dst += src * factor for n f32."""
    for i in range(0, n - 15, 16):
        vec.store(dst, to + 4 * i, vec.fma(vec.load(src, at + 4 * i), factor, vec.load(dst, to + 4 * i)))
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        total = vec.fma(vec.load_first(src, at + i, rest), factor, vec.load_first(dst, to + i, rest))
        vec.store_first(dst, to + i, total, rest)


@jitted
def decayed_dot(s, at, decay, y, by, n):
    """Sum of (s * decay) * y for n f32; decay is a number."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        total = vec.fma(vec.load(s, at + 4 * i) * decay, vec.load(y, by + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        total = vec.fma(vec.load_first(s, at + i, rest) * decay, vec.load_first(y, by + i, rest), total)
    return vec.lane_sum(total)


@jitted
def decayed_dot_by(s, at, decays, d, y, by, n):
    """Sum of (s * decays) * y for n f32."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        total = vec.fma(vec.load(s, at + 4 * i) * vec.load(decays, d + 4 * i), vec.load(y, by + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        x = vec.load_first(s, at + i, rest) * vec.load_first(decays, d + i, rest)
        total = vec.fma(x, vec.load_first(y, by + i, rest), total)
    return vec.lane_sum(total)


@jitted
def step(s, at, decay, k, k_at, factor, r, r_at, n):
    """s = s * decay + k * factor, and the sum of s * r; decay is a number."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        new = vec.fma(vec.load(k, k_at + 4 * i), factor, vec.load(s, at + 4 * i) * decay)
        vec.store(s, at + 4 * i, new)
        total = vec.fma(new, vec.load(r, r_at + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        new = vec.fma(vec.load_first(k, k_at + i, rest), factor, vec.load_first(s, at + i, rest) * decay)
        vec.store_first(s, at + i, new, rest)
        total = vec.fma(new, vec.load_first(r, r_at + i, rest), total)
    return vec.lane_sum(total)


@jitted
def step_by(s, at, decays, d, k, k_at, factor, r, r_at, n):
    """s = s * decays + k * factor, and the sum of s * r."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        old = vec.load(s, at + 4 * i) * vec.load(decays, d + 4 * i)
        new = vec.fma(vec.load(k, k_at + 4 * i), factor, old)
        vec.store(s, at + 4 * i, new)
        total = vec.fma(new, vec.load(r, r_at + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        old = vec.load_first(s, at + i, rest) * vec.load_first(decays, d + i, rest)
        new = vec.fma(vec.load_first(k, k_at + i, rest), factor, old)
        vec.store_first(s, at + i, new, rest)
        total = vec.fma(new, vec.load_first(r, r_at + i, rest), total)
    return vec.lane_sum(total)


@jitted
def mixed_step(s, at, decays, d, k, k_at, factor, b, b_at, c, r, r_at, n):
    """s = s * decays + k * factor + b * c, and the sum of s * r."""
    total = vec.zero()
    for i in range(0, n - 15, 16):
        new = vec.load(s, at + 4 * i) * vec.load(decays, d + 4 * i)
        new = vec.fma(vec.load(b, b_at + 4 * i), c, vec.fma(vec.load(k, k_at + 4 * i), factor, new))
        vec.store(s, at + 4 * i, new)
        total = vec.fma(new, vec.load(r, r_at + 4 * i), total)
    rest = n % 16
    if rest:
        i = 4 * (n - rest)
        new = vec.load_first(s, at + i, rest) * vec.load_first(decays, d + i, rest)
        new = vec.fma(vec.load_first(k, k_at + i, rest), factor, new)
        new = vec.fma(vec.load_first(b, b_at + i, rest), c, new)
        vec.store_first(s, at + i, new, rest)
        total = vec.fma(new, vec.load_first(r, r_at + i, rest), total)
    return vec.lane_sum(total)


@jitted
def step_4(s, at, row, decay, k, k_at, x, x_at, r, r_at, n, dst, to):
    """`step` of 4 rows, `row` bytes apart, with factors at x and sums to dst; n is a multiple of 16.

    What the rows share is loaded once.
    """
    s1, s2, s3 = at + row, at + 2 * row, at + 3 * row
    x0, x1 = memory.load_f32(x, x_at), memory.load_f32(x, x_at + 4)
    x2, x3 = memory.load_f32(x, x_at + 8), memory.load_f32(x, x_at + 12)
    t0, t1, t2, t3 = vec.zero(), vec.zero(), vec.zero(), vec.zero()
    for i in range(0, 4 * n, 64):
        k_i, r_i = vec.load(k, k_at + i), vec.load(r, r_at + i)
        n0 = vec.fma(k_i, x0, vec.load(s, at + i) * decay)
        n1 = vec.fma(k_i, x1, vec.load(s, s1 + i) * decay)
        n2 = vec.fma(k_i, x2, vec.load(s, s2 + i) * decay)
        n3 = vec.fma(k_i, x3, vec.load(s, s3 + i) * decay)
        vec.store(s, at + i, n0)
        vec.store(s, s1 + i, n1)
        vec.store(s, s2 + i, n2)
        vec.store(s, s3 + i, n3)
        t0, t1, t2, t3 = vec.fma(n0, r_i, t0), vec.fma(n1, r_i, t1), vec.fma(n2, r_i, t2), vec.fma(n3, r_i, t3)
    store_sums(dst, to, t0, t1, t2, t3)


@jitted
def store_sums(dst, to, t0, t1, t2, t3):
    """Sums of the lanes of 4 vectors to 4 f32."""
    memory.store_f32(dst, to, vec.lane_sum(t0))
    memory.store_f32(dst, to + 4, vec.lane_sum(t1))
    memory.store_f32(dst, to + 8, vec.lane_sum(t2))
    memory.store_f32(dst, to + 12, vec.lane_sum(t3))


@jitted
def mixed_step_4(s, at, row, decays, d, k, k_at, x, x_at, b, b_at, a, a_at, r, r_at, n, dst, to):
    """`mixed_step` of 4 rows, c being the sums of s * a; factors at x, sums to dst; n is a multiple of 16."""
    s1, s2, s3 = at + row, at + 2 * row, at + 3 * row
    t0, t1, t2, t3 = vec.zero(), vec.zero(), vec.zero(), vec.zero()
    for i in range(0, 4 * n, 64):
        a_i = vec.load(a, a_at + i)
        t0, t1 = vec.fma(vec.load(s, at + i), a_i, t0), vec.fma(vec.load(s, s1 + i), a_i, t1)
        t2, t3 = vec.fma(vec.load(s, s2 + i), a_i, t2), vec.fma(vec.load(s, s3 + i), a_i, t3)
    c0, c1, c2, c3 = vec.lane_sum(t0), vec.lane_sum(t1), vec.lane_sum(t2), vec.lane_sum(t3)
    x0, x1 = memory.load_f32(x, x_at), memory.load_f32(x, x_at + 4)
    x2, x3 = memory.load_f32(x, x_at + 8), memory.load_f32(x, x_at + 12)
    t0, t1, t2, t3 = vec.zero(), vec.zero(), vec.zero(), vec.zero()
    for i in range(0, 4 * n, 64):
        d_i, k_i, b_i, r_i = (
            vec.load(decays, d + i),
            vec.load(k, k_at + i),
            vec.load(b, b_at + i),
            vec.load(r, r_at + i),
        )
        n0 = vec.fma(b_i, c0, vec.fma(k_i, x0, vec.load(s, at + i) * d_i))
        n1 = vec.fma(b_i, c1, vec.fma(k_i, x1, vec.load(s, s1 + i) * d_i))
        n2 = vec.fma(b_i, c2, vec.fma(k_i, x2, vec.load(s, s2 + i) * d_i))
        n3 = vec.fma(b_i, c3, vec.fma(k_i, x3, vec.load(s, s3 + i) * d_i))
        vec.store(s, at + i, n0)
        vec.store(s, s1 + i, n1)
        vec.store(s, s2 + i, n2)
        vec.store(s, s3 + i, n3)
        t0, t1, t2, t3 = vec.fma(n0, r_i, t0), vec.fma(n1, r_i, t1), vec.fma(n2, r_i, t2), vec.fma(n3, r_i, t3)
    store_sums(dst, to, t0, t1, t2, t3)
