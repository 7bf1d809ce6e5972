"""The best points of a codebook for 16 octets at a time, emitted: the inner part of `ggjit.ops.quants.grid_search`.

Lanes are octets. A point needs the errors of all forms of its halves, which fit a table on the stack, and one minimum a
point of the codebook:

    tables     errors of u | of u with a turned sign | of v | of v with one; 64 bytes a form
    result     error | error with a turn | number in the codebook of both | does the turn lie in v; 32 words each, of
               which the lanes fill 16
"""

from __future__ import annotations

import functools

import numpy as np

from ggjit.jit import lazy_module
from ggjit.ops.lib.emitted import emitted
from ggjit.ops.quants.codebook import Table
from ggjit.ops.quants.grid_search import half_size, halves_of
from ggjit.ops.quants.grids import grid

emit = lazy_module("ggjit.ops.lib.emit")
ROW = 128  # bytes from one coordinate of 32 octets to the next, and of a word of the result
TURNED, ENTRY, ENTRY_TURNED, SECOND, RESULT = 128, 256, 384, 512, 640


@functools.cache
def lists(name):
    """A codebook for the emitted code, three lists as bytes.

    Returns:
        First halves (offset in a table, begin, end); their second halves (offset in a table), one after the other;
        numbers in the codebook beside them.
    """
    h = halves_of(name)
    ends = np.append(h.starts[1:], len(h.v))
    found = np.stack([64 * h.u, h.starts, ends], 1), 64 * h.v, h.entry
    return tuple(v.astype(np.int32).tobytes() for v in found)


def combined(e, parts, join):
    """All combinations of the values of coordinates, the first one fastest."""
    while len(parts) > 1:
        parts = [[join(a, b) for b in parts[i + 1] for a in parts[i]] for i in range(0, len(parts), 2)]
    return parts[0]


def smaller(e, a, c):
    """The smaller of two that are not negative: their bits are in the same order."""
    name = f"llvm.smin.v{e.lanes}i32"
    return e.bits_to_f32(e.map(lambda x, y: e.call(name, x.type, x, y), e.f32_bits(a), e.f32_bits(c)))


def store_half(e, x, scaled, turns, n, to, to_turned):
    """Errors of the forms of a half, and with the cheapest turn.

    Args:
        e: the Emit.
        x: address of its first coordinate's magnitudes; weights follow 8 rows later, weight * magnitude 16 rows later.
        scaled: s * value of each value.
        turns: 4 s, and the values; None: signs are free.
        n: coordinates.
        to: address of the table.
        to_turned: address of the table with a turn.
    """
    costs, added = [], []
    for i in range(n):
        v, w, of_coordinate = e.load_f32(x, ROW * i), e.load_f32(x, ROW * (8 + i)), []
        for value in scaled:
            d = e.fsub(v, value)
            of_coordinate.append(e.fmul(w, e.fmul(d, d)))
        costs.append(of_coordinate)
        if turns is not None:
            p = e.fmul(e.load_f32(x, ROW * (16 + i)), turns[0])
            added.append([e.fmul(p, value) for value in turns[1]])
    sums = combined(e, costs, e.fadd)
    for form, v in enumerate(sums):
        e.store(to, v, 64 * form)
    if turns is not None:
        for form, (v, least) in enumerate(zip(sums, combined(e, added, lambda a, b: smaller(e, a, b)), strict=True)):
            e.store(to_turned, e.fadd(v, least), 64 * form)


def make_point(s, track):
    """Emitted (x, steps, values, tables, result): the best points of 16 octets.

    Args:
        s: the GridSearch.
        track: find the number of the points too, not only their errors.
    """
    n, n_values, turned = half_size(s.grid), len(s.values[0]), s.even_signs
    first, second, entry = lists(s.grid)
    nbytes = 64 * n_values**n

    @emitted("x steps values tables result")
    def point(e, x, steps, values, tables, result):
        e0, e1, f0, f1 = (e.add(tables, k * nbytes) for k in range(4))
        step, of_value = e.load_f32(steps), [e.splat_f32(values, 4 * k) for k in range(n_values)]
        scaled = [e.fmul(step, v) for v in of_value]
        turns = (e.fmul(e.f32_const(4.0), step), of_value) if turned else None
        store_half(e, x, scaled, turns, n, e0, e1)
        store_half(e, e.add(x, ROW * n), scaled, turns, n, f0, f1)
        of_u, of_v, of_entry = (Table(e, data, 4).address for data in (first, second, entry))
        found = search(e, (e0, e1, f0, f1), seconds_of(first, second), turned, track)
        words = (0, ENTRY, TURNED, ENTRY_TURNED, SECOND) if track else (0, TURNED)
        for word, v in zip(words if turned else words[: 1 + track], found, strict=False):
            e.store(result, v, word)
        if track:
            number(e, result, ENTRY, None, (f0, f1), of_u, of_v, of_entry)
            if turned:
                number(e, result, ENTRY_TURNED, SECOND, (f0, f1), of_u, of_v, of_entry)

    return point


def record(e, of_u, i):
    """A first half: offset in a table, begin and end of its second halves."""
    at = e.add(of_u, e.mul(i, 12))
    return [e.b.zext(e.load(at, 4 * k, emit.I32), emit.I64) for k in range(3)]


def seconds_of(first, second):
    """Second halves by first half, as offsets in a table: [(offset of u, offsets of v)]."""
    records, of_v = np.frombuffer(first, np.int32).reshape(-1, 3).tolist(), np.frombuffer(second, np.int32).tolist()
    return [(u, sorted(set(of_v[begin:end]))) for u, begin, end in records]


def least_of(e, table, part, block):
    """For each first half of a block the least of its second halves' errors, as i32 vectors of one part.

    A second half is loaded once for all of them, whose minima stay in registers.
    """
    kind, found = emit.vector(emit.I32, e.lanes), {}
    for v in sorted({v for _, vs in block for v in vs}):
        x = e.load(table, v + part * e.nbytes, kind)
        for u, vs in block:
            if v in vs:
                found[u] = e.call(f"llvm.smin.v{e.lanes}i32", kind, found[u], x) if u in found else x
    return [e.b.bitcast(found[u], emit.vector(emit.F32, e.lanes)) for u, _ in block]


def search(e, tables, pairs, turned, track):
    """The least error, and the first half that gives it; then both with a turn, and whether that lies in v.

    One part of the lanes after the other, so many first halves at once as there are registers for.
    """
    e0, e1, f0, f1 = tables
    kind, out = emit.vector(emit.F32, e.lanes), []
    size = (24 if e.level == "avx512" else 12) // (2 if turned else 1)
    for part in range(e.parts):
        best = [e.f32_const(float("inf"))[0], e.i32_const(0)[0]] * 2 + [e.i32_const(0)[0]]
        for begin in range(0, len(pairs), size):
            block = pairs[begin : begin + size]
            least = least_of(e, f0, part, block)
            least_turned = least_of(e, f1, part, block) if turned else least
            for k, (u, _) in enumerate(block):
                error, number = e.load(e0, u + part * e.nbytes, kind), e.i32_const(begin + k)[0]
                total = e.b.fadd(error, least[k])
                better = e.b.fcmp_ordered("<", total, best[0])
                best[0], best[1] = e.b.select(better, total, best[0]), e.b.select(better, number, best[1])
                if turned:
                    in_u = e.b.fadd(e.load(e1, u + part * e.nbytes, kind), least[k])
                    in_v = e.b.fadd(error, least_turned[k])
                    second = e.b.fcmp_ordered("<", in_v, in_u)
                    total = e.b.select(second, in_v, in_u)
                    better = e.b.fcmp_ordered("<", total, best[2])
                    flag = e.b.zext(second, number.type)
                    for i, v in ((2, total), (3, number), (4, flag)):
                        best[i] = e.b.select(better, v, best[i])
        out.append(best)
    found = [list(v) for v in zip(*out, strict=True)]  # LLVM drops what is not used
    return found if track else [found[0], found[2]]


def number(e, result, word, second, tables, of_u, of_v, of_entry):
    """Replace the number of the first half in `word` of the result by the point's, lane by lane.

    Args:
        e: the Emit.
        result: its address.
        word: offset in it.
        second: offset of the flags that tell which table of v counts; None: the first.
        tables: errors of v, and with a turn.
        of_u: address of the list of first halves.
        of_v: of that of second halves.
        of_entry: of that of numbers.
    """

    def body(lane):
        at = e.add(result, e.mul(lane, 4))
        _, begin, end = record(e, of_u, e.b.zext(e.load(at, word, emit.I32), emit.I64))
        table = e.i64(tables[0])
        if second is not None:
            flag = e.b.icmp_signed("!=", e.load(at, second, emit.I32), emit.I32(0))
            table = e.b.select(flag, tables[1], tables[0])
        table = e.add(table, e.mul(lane, 4))

        def scan(j, best, place):
            v = e.load(table, e.b.zext(e.load(of_v, e.mul(j, 4), emit.I32), emit.I64), emit.F32)
            better = e.b.fcmp_ordered("<", v, best)
            return [e.b.select(better, v, best), e.b.select(better, j, place)]

        _, place = e.loop(end, [emit.F32(float("inf")), begin], scan, start=begin)
        e.store_value(at, word, e.load(of_entry, e.mul(place, 4), emit.I32))
        return []

    e.loop(16, [], body)


def make_fetch(name):
    """Emitted (entry, values, to): the values of the coordinates of a point, as f32."""
    n, data = 2 * half_size(name), grid(name).tobytes()

    @emitted("entry values to")
    def fetch(e, entry, values, to):
        at = e.add(Table(e, data, n).address, e.mul(entry, n))
        for i in range(n):
            code = e.b.zext(e.load(at, i, emit.I8), emit.I64)
            e.store_value(to, 4 * i, e.load(values, e.mul(code, 4), emit.F32))

    return fetch
