"""How threads share the rows of a tensor, and how a loop walks over them.

    first, last, begin, end = rows.share(dst_ne, np.int64(16), ith, nth)
    i1, i2, i3 = rows.position(dst_ne, first)
    for _ in range(first, last):
        ...                                      # elements begin to end of row (i1, i2, i3)
        i1, i2, i3 = rows.following(dst_ne, i1, i2, i3)

Threads take whole rows if there are enough of them, else all rows and a part of each, cut at multiples of a unit. Only
ops whose elements do not depend on each other may be cut; the others ask for `whole` rows. Positions are counted up,
since a division costs as much as a short row. Constants are given as np.int64, since Numba compiles a helper anew for
each literal number.
"""

from ggjit.jit import jitted


@jitted
def whole(ne, ith, nth):
    """Return the rows (first, last) of a thread."""
    n = ne[1] * ne[2] * ne[3]
    return n * ith // nth, n * (ith + 1) // nth


@jitted
def part(ne0, unit, ith, nth):
    """Return the elements (begin, end) of every row for a thread; begin is a multiple of unit."""
    size = (ne0 + unit * nth - 1) // (unit * nth) * unit
    begin = size * ith
    if begin >= ne0:
        return ne0, ne0
    return begin, begin + size if begin + size < ne0 else ne0


@jitted
def share(ne, unit, ith, nth):
    """Return rows (first, last) and elements (begin, end) of a thread."""
    n = ne[1] * ne[2] * ne[3]
    if n >= 8 * nth or (n >= nth and n % nth == 0):
        return n * ith // nth, n * (ith + 1) // nth, 0, ne[0]
    begin, end = part(ne[0], unit, ith, nth)
    return 0, n if end > begin else 0, begin, end


@jitted
def position(ne, row):
    """Return the indices (i1, i2, i3) of a row."""
    plane = ne[1] * ne[2]
    return row % ne[1], row % plane // ne[1], row // plane


@jitted
def following(ne, i1, i2, i3):
    """Return the indices of the next row."""
    i1 += 1
    if i1 == ne[1]:
        i1, i2 = 0, i2 + 1
        if i2 == ne[2]:
            i2, i3 = 0, i3 + 1
    return i1, i2, i3


@jitted
def offset(nb, i1, i2, i3):
    """Return the byte offset of a row."""
    return i1 * nb[1] + i2 * nb[2] + i3 * nb[3]


@jitted
def repeated(ne, nb, i1, i2, i3):
    """Return the byte offset of a row of a source that repeats along dimensions 1 to 3."""
    if i1 >= ne[1]:
        i1 %= ne[1]
    if i2 >= ne[2]:
        i2 %= ne[2]
    if i3 >= ne[3]:
        i3 %= ne[3]
    return i1 * nb[1] + i2 * nb[2] + i3 * nb[3]


@jitted
def packed(ne, nb, blck, size):
    """Return whether a tensor of blocks of `blck` elements and `size` bytes is contiguous."""
    row = ne[0] // blck * size
    return (
        (nb[0] == size or ne[0] == blck)
        and (nb[1] == row or ne[1] == 1)
        and (nb[2] == row * ne[1] or ne[2] == 1)
        and (nb[3] == row * ne[1] * ne[2] or ne[3] == 1)
    )
