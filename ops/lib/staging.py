"""Rows as contiguous f32: where they lie if they are, else copied to scratch.

    x, at = staging.packed(src0, at, src0_nb[0], n, work, slot)     # f32 rows of any stride
    staging.gather("F16")(work, slot, src0, at, step, n)            # rows of any plain type and stride
    staging.scatter(dst, to, dst_nb[0], work, slot, n)              # and back to f32 of any stride

So one vector kernel serves all layouts, and its sums have one order for all of them.
"""

import functools

from ggjit.jit import jitted
from ggjit.ops.lib import memory, vec


@jitted
def packed(src, at, step, n, work, slot):
    """Return buffer and offset of n contiguous f32: the row itself, or its copy at `slot` of the scratch."""
    if step == 4 or n == 1:
        return src, at
    for i in range(n):
        memory.store_f32(work, slot + 4 * i, memory.load_f32(src, at + i * step))
    return work, slot


@jitted
def scatter(dst, to, step, work, slot, n):
    """Write n contiguous f32 of the scratch to elements `step` bytes apart."""
    for i in range(n):
        memory.store_f32(dst, to + i * step, memory.load_f32(work, slot + 4 * i))


@functools.cache
def gather(type_name):
    """Helper (work, slot, src, at, step, n) that copies n elements `step` bytes apart to contiguous f32."""
    load, size = memory.loader(type_name), memory.SIZES[type_name]
    load_all, load_first = vec.loader(type_name), vec.loader_first(type_name)

    @jitted
    def gathered(work, slot, src, at, step, n):
        if step == size:
            for i in range(0, n - 15, 16):
                vec.store(work, slot + 4 * i, load_all(src, at + size * i))
            rest = n % 16
            if rest:
                i = n - rest
                vec.store_first(work, slot + 4 * i, load_first(src, at + size * i, rest), rest)
        else:
            for i in range(n):
                memory.store_f32(work, slot + 4 * i, load(src, at + i * step))

    return gathered
