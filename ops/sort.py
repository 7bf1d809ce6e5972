"""argsort and top_k: the order of the elements of rows.

Both work on keys: the bits of an f32 turned so that integers compare as the values do, with the index below them, which
makes all keys of a row different and equal values stay in the order of their indices. -0 equals 0; NaN is above inf.

    argsort  up to 64 keys by insertion, more by four passes of 8 bits (a radix sort keeps the order of equals)
    top_k    the k best in a heap whose worst is on top: most elements cost one comparison; then in falling order

A row belongs to one thread; keys and the histogram lie in the scratch.
"""

from __future__ import annotations

import numpy as np

from ggjit import types
from ggjit.arguments import checked
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE, Op
from ggjit.ops.lib.checks import require_type
from ggjit.tensor import Tensor, new_node

memory = lazy_module("ggjit.ops.lib.memory")
rows = lazy_module("ggjit.ops.lib.rows")
vec = lazy_module("ggjit.ops.lib.vec")

__all__ = ["argsort", "top_k"]

ARGSORT = Op("argsort", id=69, params=(("order", "i32"),))
TOP_K = Op("top_k", id=70)
ASCENDING, DESCENDING = 0, 1
HISTOGRAM = 8 * 256
FEW = 64


@checked
def argsort(a: Tensor, order: int) -> Tensor:
    """Give the indices that sort each row.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        order: 0 ascending, 1 descending.

    Returns:
        i32, the shape of `a`; indices of equal values ascend.

    Raises:
        TypeError: `a` is not f32.
        ValueError: there is no such order.

    Source: ggml_argsort.
    """
    require_type("argsort", "a", a, types.F32)
    if order not in (ASCENDING, DESCENDING):
        raise ValueError(f"argsort: order must be 0 (ascending) or 1 (descending), got {order} ('{a.name}')")
    return new_node(ARGSORT, types.I32, a.ne, (a,), (order,))


@checked
def top_k(a: Tensor, k: int) -> Tensor:
    """Give the indices of the k largest elements of each row.

    Args:
        a: f32 [ne0, ne1, ne2, ne3], any strides.
        k: 1 to ne0.

    Returns:
        i32 [k, ne1, ne2, ne3], largest first (ggml promises no order); of equal values the lower index.

    Raises:
        TypeError: `a` is not f32.
        ValueError: k is out of range.

    Source: ggml_top_k.
    """
    require_type("top_k", "a", a, types.F32)
    if not 1 <= k <= a.ne[0]:
        raise ValueError(f"top_k: k must be 1 to ne[0], got {k} of {list(a.ne)} ('{a.name}')")
    return new_node(TOP_K, types.I32, (k, *a.ne[1:]), (a,))


@ARGSORT.reference
def _(node, a):
    return np.argsort(a if node.params.order == ASCENDING else -a, -1, "stable")


@TOP_K.reference
def _(node, a):
    return np.argsort(-a, -1, "stable")[..., : node.ne[0]]


# --- kernels ----------------------------------------------------------------------------------------------------------


@jitted
def key_of(value, index, flip):
    """int64 that orders as value (or against it: flip -1), then by index."""
    bits = np.int64(memory.bits_f32(value + np.float32(0)))  # -0 + 0 = 0
    if value != value:  # NaN, of either sign
        bits = np.int64(0x7FFFFFFF)
    if bits < 0:
        bits ^= 0x7FFFFFFF
    return (bits ^ flip) << 32 | index


@jitted
def value_of(key):
    """The value that `key_of` with flip -1 made a key of."""
    bits = ~(key >> 32)
    return memory.f32_from_bits(np.int32(bits ^ 0x7FFFFFFF if bits < 0 else bits))


@jitted
def sort_few(work, at, n):
    """Sort n int64 by insertion."""
    for i in range(1, n):
        key, j = memory.load_i64(work, at + 8 * i), i
        while j > 0 and memory.load_i64(work, at + 8 * (j - 1)) > key:
            memory.store_i64(work, at + 8 * j, memory.load_i64(work, at + 8 * (j - 1)))
            j -= 1
        memory.store_i64(work, at + 8 * j, key)


@jitted
def sort_many(work, at, spare, histogram, n, lowest):
    """Sort n int64 by their bits from `lowest` on, equals in order, byte by byte; returns where they lie."""
    for shift in range(lowest, 64, 8):
        for d in range(256):
            memory.store_i64(work, histogram + 8 * d, 0)
        top = 128 if shift == 56 else 0  # the highest byte has the sign
        for i in range(n):
            d = histogram + 8 * ((memory.load_i64(work, at + 8 * i) >> shift & 255) ^ top)
            memory.store_i64(work, d, memory.load_i64(work, d) + 1)
        total = 0
        for d in range(histogram, histogram + 8 * 256, 8):
            count = memory.load_i64(work, d)
            memory.store_i64(work, d, total)
            total += count
        for i in range(n):
            key = memory.load_i64(work, at + 8 * i)
            d = histogram + 8 * ((key >> shift & 255) ^ top)
            place = memory.load_i64(work, d)
            memory.store_i64(work, d, place + 1)
            memory.store_i64(work, spare + 8 * place, key)
        at, spare = spare, at
    return at


@jitted
def store_indices(dst, to, work, at, n):
    """The lower halves of n keys."""
    for i in range(n):
        memory.store_i32(dst, to + 4 * i, np.int32(memory.load_i64(work, at + 8 * i) & 0x7FFFFFFF))


@kernel
def argsort_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """Keys of a row, sorted."""
    n, flip = dst_ne[0], np.int64(-1) if op_params[0] == DESCENDING else np.int64(0)
    histogram = COUNTER_LINE + (HISTOGRAM + 16 * n) * ith
    keys = histogram + HISTOGRAM
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        at = rows.offset(src0_nb, i1, i2, i3)
        for i in range(n):
            key = key_of(memory.load_f32(src0, at + i * src0_nb[0]), i, flip)
            memory.store_i64(work, keys + 8 * i, key)
        found = keys
        if n > FEW:  # the indices below bit 32 are in order already
            found = sort_many(work, keys, keys + 8 * n, histogram, n, np.int64(32))
        else:
            sort_few(work, keys, n)
        store_indices(dst, rows.offset(dst_nb, i1, i2, i3), work, found, n)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


@jitted
def sink(work, heap, n, key):
    """Put a key at the root of a heap of n whose largest key is on top, in place of the one there."""
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        below = memory.load_i64(work, heap + 8 * child)
        if child + 1 < n and memory.load_i64(work, heap + 8 * (child + 1)) > below:
            child += 1
            below = memory.load_i64(work, heap + 8 * child)
        if below <= key:
            break
        memory.store_i64(work, heap + 8 * i, below)
        i = child
    memory.store_i64(work, heap + 8 * i, key)


@jitted
def rise(work, heap, i, key):
    """Put a key at the end i of a heap."""
    while i > 0:
        parent = (i - 1) // 2
        above = memory.load_i64(work, heap + 8 * parent)
        if above >= key:
            break
        memory.store_i64(work, heap + 8 * i, above)
        i = parent
    memory.store_i64(work, heap + 8 * i, key)


@jitted
def best_keys(src, at, nb0, n, k, work, histogram, heap):
    """Keys of the k largest of n values at byte `at`, the best first, by a heap, then sorted; returns where they lie.

    The heap has room for 2 k keys. Of 16 values of which none is above the worst in the heap, none belongs there: later
    equals come after it.
    """
    for i in range(k):
        rise(work, heap, i, key_of(memory.load_f32(src, at + i * nb0), i, np.int64(-1)))
    i = k
    while i < n:
        if nb0 == 4:
            worst = value_of(memory.load_i64(work, heap))
            while i + 16 <= n and vec.all_lanes(vec.load(src, at + 4 * i) <= worst):
                i += 16
        for j in range(i, i + 16 if i + 16 < n else n):
            key = key_of(memory.load_f32(src, at + j * nb0), j, np.int64(-1))
            if key < memory.load_i64(work, heap):
                sink(work, heap, k, key)
        i += 16
    if k > FEW:
        return sort_many(work, heap, heap + 8 * k, histogram, k, np.int64(0))
    sort_few(work, heap, k)
    return heap


@kernel
def top_k_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
    """The k smallest keys against the values."""
    n, k = src0_ne[0], dst_ne[0]
    histogram = COUNTER_LINE + (HISTOGRAM + 16 * k) * ith
    first, last = rows.whole(dst_ne, ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        at = rows.offset(src0_nb, i1, i2, i3)
        found = best_keys(src0, at, src0_nb[0], n, k, work, histogram, histogram + HISTOGRAM)
        store_indices(dst, rows.offset(dst_nb, i1, i2, i3), work, found, k)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)


ARGSORT.kernel(lambda node: argsort_f32)
TOP_K.kernel(lambda node: top_k_f32)


@ARGSORT.work_size
def _(node, nth):
    return (HISTOGRAM + 16 * node.ne[0]) * nth


@TOP_K.work_size
def _(node, nth):
    return (HISTOGRAM + 16 * node.ne[0]) * nth


@ARGSORT.flops
def _(node):
    return node.nelements * max(node.ne[0], 2).bit_length()


@TOP_K.flops
def _(node):
    return node.src[0].nelements


# --- cases ------------------------------------------------------------------------------------------------------------


def _cases():
    from ggjit.ops.views import permute, transpose, view_2d

    for order in (ASCENDING, DESCENDING):
        name = ("ascending", "descending")[order]
        for n in (1, 2, 64, 65, 1000):
            ARGSORT.case(f"{name}, {n}")(lambda t, n=n, o=order: argsort(t("F32", n, 3, 2), o))
        ARGSORT.case(f"{name}, equal values")(
            lambda t, o=order: argsort(t.array(np.float32([0.0, -0.0, 3, -2, 3, 0, np.inf, -np.inf, -2] * 9)), o)
        )
        ARGSORT.case(f"{name}, padded")(lambda t, o=order: argsort(view_2d(t("F32", 50, 6), 34, 6, 200, 8), o))
        ARGSORT.case(f"{name}, transposed")(lambda t, o=order: argsort(transpose(t("F32", 4, 90)), o))
    for k, n in ((1, 1), (1, 300), (5, 17), (40, 300), (64, 64), (65, 70), (100, 1000)):
        TOP_K.case(f"{k} of {n}")(lambda t, n=n, k=k: top_k(t("F32", n, 3), k))
    TOP_K.case("equal values")(lambda t: top_k(t.array(np.float32([1, 3, 2, 3] * 40)), 90))
    TOP_K.case("few equal values")(lambda t: top_k(t.array(np.float32([1, 3, 2, 3] * 9)), 20))
    TOP_K.case("permuted")(lambda t: top_k(permute(t("F32", 40, 2, 3), 0, 2, 1, 3), 6))
    TOP_K.case("transposed")(lambda t: top_k(transpose(t("F32", 4, 90)), 70))


_cases()
