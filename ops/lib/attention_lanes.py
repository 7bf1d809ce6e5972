"""Attention of many queries: one lane is one query, K and V are converted once a tile for all heads of a KV head.

A set is 16 lanes. The queries of an item are in tiles of 16; in a tile of m queries the lanes of its sets are the m
queries of the first head, then the m of the next ...: with 16 a set is a head, with fewer the heads lie side by side.
"""

import functools

from ggjit.jit import lazy_module
from ggjit.ops.lib import attention as tiles
from ggjit.ops.lib import attention_frame as frames
from ggjit.ops.lib.attention import BYTES, CHUNK, CLOSED, HEAD, MIXED, OPEN, TILE, padded
from ggjit.ops.lib.attention_frame import FRAME, Frame, choose, div, least, less, rem, when
from ggjit.ops.lib.emitted import emitted

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

LANES = 16


class Layout:
    """Sizes and scratch areas.

    Args:
        dk, dv: elements of a head of K and V.
        group: query heads of a KV head.
    """

    def __init__(self, dk, dv, group):
        self.nk, self.nv, self.group = padded(dk), padded(dv), group
        self.n_tiles = query_tiles(group)
        self.n_queries = LANES * self.n_tiles  # of an item
        self.n_sets = self.n_tiles * group
        self.state = HEAD + 64 * self.nv
        self.states = self.n_sets * self.state
        self.classes = 8 * (CHUNK // TILE)
        self.at, self.size = frames.places(
            scales=64, k=64 * self.nk, v=64 * self.nv, s=1024, masks=1024, spare=4 * max(self.nk, self.nv), rows=128,
            last_rows=128, last=512, classes=self.classes * self.n_sets, mask_rows=128 * self.n_sets,
            slopes=64 * self.n_sets, sinks=64 * self.n_sets, q=64 * self.nk * self.n_sets, states=self.states,
            totals=self.states,
        )  # fmt: skip

    def area(self, e, frame, name, s, size):
        """Address of set s in an area of scratch whose sets take `size` bytes."""
        return e.add(frame["scratch"], e.add(self.at[name], e.mul(s, size)))


def query_tiles(group):
    """Tiles of queries that share the conversion of K and V."""
    return max(1, 4 // group)


def n_items(group, n_heads, n):
    """Items of n queries; n_heads counts KV heads times ne3."""
    return -(-n // (LANES * query_tiles(group))) * n_heads


def work_size(dk, dv, group, n, n_heads, n_kv, nth):
    """Bytes of work of the kernel for n queries."""
    x = Layout(dk, dv, group)
    items = n_items(group, n_heads, n)
    splits = frames.n_splits(items, n_kv)
    return (items * splits * x.states if splits > 1 else 0) + nth * (FRAME + x.size)


def _lane(e, frame, x, s, lane):
    """(query of the item, head of the group, is it real) of a lane; one too many repeats the tile's first."""
    tile = div(e, s, x.group)
    first = e.mul(tile, LANES)
    m = least(e, LANES, e.sub(frame["n"], first))
    pair = e.add(e.mul(e.sub(s, e.mul(tile, x.group)), LANES), lane)
    is_real = less(e, pair, e.mul(m, x.group))  # m <= 0 in a tile without queries
    pair, m = choose(e, is_real, pair, 0), choose(e, is_real, m, 1)
    return (
        choose(e, is_real, e.add(first, rem(e, pair, m)), choose(e, less(e, first, frame["n"]), first, 0)),
        div(e, pair, m),
        is_real,
    )


def _is_used(e, frame, x, s):
    """Does a set have a query?"""
    return _lane(e, frame, x, s, 0)[2]


def _loop_sets(e, frame, x, body):
    """body(s) for the sets that have queries."""
    e.loop(x.n_sets, [], lambda s: when(e, _is_used(e, frame, x, s), lambda: body(s)))


def _begin(e, frame, arguments, x, softcap):
    frames.set_arguments(frame, arguments)
    items = e.mul(_n_blocks(e, frame, x), e.mul(frame.ne("k", 2), frame.ne("q", 3)))
    frames.set_splits(e, frame, items)
    frames.set_places(e, frame, e.mul(items, x.states), x.size)
    frame["n_items"], frame["n_heads"] = e.mul(items, frame["splits"]), 1
    frames.store_scales(e, frame, softcap, frame["scratch"])
    for lane in range(LANES):
        e.store_value(frame["scratch"], x.at["last_rows"] + 8 * lane, e.add(frame["scratch"], x.at["last"] + 32 * lane))


def _n_blocks(e, frame, x):
    return div(e, e.add(frame.ne("q", 1), x.n_queries - 1), x.n_queries)


def _set_queries(e, frame, x, item):
    """Queries and head of an item (of all its splits); those with the most KV rows come first."""
    n_blocks = _n_blocks(e, frame, x)
    q0 = e.mul(e.sub(e.sub(n_blocks, 1), rem(e, item, n_blocks)), x.n_queries)
    frame["q0"], frame["n"] = q0, least(e, x.n_queries, e.sub(frame.ne("q", 1), q0))
    head, heads = div(e, item, n_blocks), frame.ne("k", 2)
    frame["hk"], frame["i3"] = rem(e, head, heads), div(e, head, heads)
    frames.set_offsets(e, frame, frame["hk"])


def _set_lane(e, frame, x, s, lane):
    """Rows of q and of the mask, slope and sink of a lane."""
    i, g, _ = _lane(e, frame, x, s, lane)
    i, h, at = e.add(frame["q0"], i), e.add(e.mul(frame["hk"], x.group), g), e.add(frame["scratch"], e.mul(lane, 8))
    e.store_value(at, x.at["rows"], e.add(frame["q"], frame.at("q", (1, i), (2, h), (3, frame["i3"]))))
    four = e.mul(lane, 4)
    e.store_value(e.add(x.area(e, frame, "slopes", s, 64), four), 0, frames.alibi_exponent(e, frame, h))
    frames.store_sink(e, frame, h, e.add(x.area(e, frame, "sinks", s, 64), four))

    def mask():
        steps = (1, i), (2, rem(e, h, frame.ne("mask", 2))), (3, rem(e, frame["i3"], frame.ne("mask", 3)))
        row = e.add(frame["mask"], frame.at("mask", *steps))
        e.store_value(e.add(x.area(e, frame, "mask_rows", s, 128), e.mul(lane, 8)), 0, row)

    when(e, frame.has_mask, mask)


def _set_classes(e, frame, x, s):
    """What the mask does to a set in each tile of a chunk: unused sets are closed, a last tile not full is mixed."""
    first, end, classes = frame["first"], frame["end"], x.area(e, frame, "classes", s, x.classes)
    n_full = div(e, e.sub(end, first), TILE)
    used = choose(e, _is_used(e, frame, x, s), OPEN, CLOSED)
    rest = choose(e, _is_used(e, frame, x, s), MIXED, CLOSED)
    e.loop(
        CHUNK // TILE,
        [],
        lambda t: e.store_value(e.add(classes, e.mul(t, 8)), 0, choose(e, less(e, t, n_full), used, rest)),
    )

    def look():
        in_tile = rem(e, s, x.group)
        same = x.area(e, frame, "classes", e.sub(s, in_tile), x.classes)  # the tile's first set has the same mask rows
        copied = e.b.and_(less(e, 0, in_tile), e.b.icmp_signed("==", frame.ne("mask", 2), e.i64(1)))
        e.if_else(
            copied,
            lambda: e.loop(n_full, [], lambda t: e.store_value(
                e.add(classes, e.mul(t, 8)), 0, e.load(e.add(same, e.mul(t, 8)), 0, emit.I64))),
            lambda: tiles.classify.function(
                e, x.area(e, frame, "mask_rows", s, 128), e.mul(first, 2), n_full, classes),
        )  # fmt: skip

    when(e, e.b.and_(_is_used(e, frame, x, s), frame.has_mask), look)


def _class_at(e, frame, x, kv, s):
    """What the mask does to a set in a tile."""
    tile = div(e, e.sub(kv, frame["first"]), TILE)
    return e.load(e.add(x.area(e, frame, "classes", s, x.classes), e.mul(tile, 8)), 0, emit.I64)


def _load_masks(e, frame, x, s, kv, n_rows):
    """Masks of a set in one tile; a last tile that is not full goes through a copy that ends with -inf."""
    scratch, rows = frame["scratch"], x.area(e, frame, "mask_rows", s, 128)
    is_full = e.b.icmp_signed("==", n_rows, e.i64(TILE))

    def copy():
        def lane(i):
            row = e.add(e.load(e.add(rows, e.mul(i, 8)), 0, emit.I64), e.mul(kv, 2))
            frames.copy_last_mask(e, frame, row, n_rows, e.add(scratch, e.add(x.at["last"], e.mul(i, 32))))

        e.loop(LANES, [], lambda i: lane(i) or [])

    when(e, e.b.not_(is_full), copy)
    table = choose(e, is_full, rows, e.add(scratch, x.at["last_rows"]))
    tiles.load_masks.function(e, table, choose(e, is_full, e.mul(kv, 2), 0), e.add(scratch, x.at["masks"]))


def _store_set(e, frame, x, store_results, s, total):
    """Results of a set to their places; those of lanes too many go to scratch."""
    rows = e.add(frame["scratch"], x.at["rows"])

    def lane(j):
        i, g, is_real = _lane(e, frame, x, s, j)
        h, i = e.add(e.mul(frame["hk"], x.group), g), e.add(frame["q0"], i)
        out = e.add(frame["dst"], frame.at("dst", (1, h), (2, i), (3, frame["i3"])))
        e.store_value(e.add(rows, e.mul(j, 8)), 0, choose(e, is_real, out, e.add(frame["scratch"], x.at["spare"])))

    e.loop(LANES, [], lambda j: lane(j) or [])
    store_results(e, e.add(total, HEAD), rows)


@functools.cache
def make_pieces(dk, dv, k_kind, v_kind, group, softcap):
    """The emitted pieces of the kernel, in the driver's order."""
    shape = dk, dv, group
    load_queries, store_results = tiles.make_load_queries(dk).function, tiles.make_store_results(dv).function
    scores, values = tiles.make_scores(dk).function, tiles.make_values(dv).function

    def begin(e, frame, arguments):
        _begin(e, Frame(e, frame), arguments, Layout(*shape), softcap)

    @emitted("frame item")
    def set_item(e, frame, item):
        x, frame = Layout(*shape), Frame(e, frame)
        frames.set_chunks(e, frame, rem(e, item, frame["splits"]))
        split_states = e.add(frame["states_at"], e.mul(item, x.states))
        own_states = e.add(frame["scratch"], x.at["states"])
        frame["states"] = choose(e, less(e, 1, frame["splits"]), split_states, own_states)
        _set_queries(e, frame, x, div(e, item, frame["splits"]))

        def one(s):
            e.loop(LANES, [], lambda lane: _set_lane(e, frame, x, s, lane))
            frames.finish_slopes(e, x.area(e, frame, "slopes", s, 64))
            load_queries(
                e, e.add(frame["scratch"], x.at["rows"]), frame["scratch"], x.area(e, frame, "q", s, 64 * x.nk)
            )
            tiles.reset.function(e, x.area(e, frame, "totals", s, x.state), e.i64(x.nv))

        _loop_sets(e, frame, x, one)

    @emitted("frame chunk")
    def begin_chunk(e, frame, chunk):
        x, frame = Layout(*shape), Frame(e, frame)
        frames.set_range(e, frame, chunk)
        e.loop(x.n_sets, [], lambda s: _set_classes(e, frame, x, s))
        e.loop(x.n_sets, [], lambda s: tiles.reset.function(e, e.add(frame["states"], e.mul(s, x.state)), e.i64(x.nv)))

    @emitted("frame kv n_rows head")
    def check_rows(e, frame, kv, n_rows, head):
        x, frame = Layout(*shape), Frame(e, frame)
        is_closed = lambda s: e.b.icmp_signed("==", _class_at(e, frame, x, kv, s), e.i64(CLOSED))  # noqa: E731
        (frame["is_open"],) = e.loop(x.n_sets, [e.i64(0)], lambda s, found: [choose(e, is_closed(s), found, 1)])

    @emitted("frame kv n_rows head")
    def run_rows(e, frame, kv, n_rows, head):
        x, frame = Layout(*shape), Frame(e, frame)
        frame["masked"] = -1
        scratch = frame["scratch"]
        k, v, at_s, masks = (e.add(scratch, x.at[name]) for name in ("k", "v", "s", "masks"))
        for name, kind, n, out in (("k", k_kind, dk, k), ("v", v_kind, dv, v)):
            if kind in BYTES:
                stride = frame.nb(name, 1)
                row = e.add(frame[name], e.add(frame[name + "_offs"], e.mul(kv, stride)))
                tiles.make_read_rows(kind, n).function(e, row, stride, n_rows, out)

        def mask(s):
            tile = div(e, s, x.group)
            is_same = e.b.and_(
                e.b.icmp_signed("==", frame["masked"], tile),
                e.b.and_(
                    e.b.icmp_signed("<=", frame.ne("mask", 2), e.i64(1)),
                    e.b.icmp_signed("==", rem(e, frame["n"], LANES), e.i64(0)),
                ),
            )
            when(e, e.b.not_(is_same), lambda: _load_masks(e, frame, x, s, kv, n_rows))
            frame["masked"] = tile
            tiles.mask_scores.function(e, at_s, masks, x.area(e, frame, "slopes", s, 64))

        def one(s):
            kind = _class_at(e, frame, x, kv, s)

            def run():
                scores(e, x.area(e, frame, "q", s, 64 * x.nk), k, at_s)
                if softcap:
                    tiles.cap_scores.function(e, at_s, e.add(scratch, 4))
                when(e, e.b.icmp_signed("==", kind, e.i64(MIXED)), lambda: mask(s))
                values(e, at_s, v, e.add(frame["states"], e.mul(s, x.state)))

            when(e, e.b.icmp_signed("!=", kind, e.i64(CLOSED)), run)

        e.loop(x.n_sets, [], lambda s: one(s) or [])

    @emitted("frame")
    def end_chunk(e, frame):
        x, frame = Layout(*shape), Frame(e, frame)

        def one(s):
            total, part = (x.area(e, frame, name, s, x.state) for name in ("totals", "states"))
            tiles.merge.function(e, total, part, e.i64(x.nv))

        when(e, less(e, frame["splits"], 2), lambda: _loop_sets(e, frame, x, one))

    @emitted("frame")
    def end_item(e, frame):
        x, frame = Layout(*shape), Frame(e, frame)

        def one(s):
            total = x.area(e, frame, "totals", s, x.state)
            tiles.finish.function(e, total, x.area(e, frame, "sinks", s, 64), e.i64(x.nv))
            _store_set(e, frame, x, store_results, s, total)

        when(e, less(e, frame["splits"], 2), lambda: _loop_sets(e, frame, x, one))

    return frames.emitted_with_arguments(begin), set_item, begin_chunk, check_rows, run_rows, end_chunk, end_item


@functools.cache
def make_kernel(dk, dv, k_kind, v_kind, group, softcap):
    """Kernel for many queries."""
    x = Layout(dk, dv, group)
    pieces = make_pieces(dk, dv, k_kind, v_kind, group, softcap)
    return frames.make_driver(pieces, k_kind, dk, v_kind, dv, x.at["k"], x.at["v"], TILE)


@functools.cache
def make_merge(dk, dv, group):
    """Second kernel where items are split: merge the chunks in order, divide, store."""
    shape = dk, dv, group
    store_results = tiles.make_store_results(dv).function

    def merge_lanes(e, frame, arguments):
        x, frame = Layout(*shape), Frame(e, frame)
        _begin(e, frame, arguments, x, False)
        splits = frame["splits"]

        def one(pair):
            item, s = div(e, pair, x.n_sets), rem(e, pair, x.n_sets)
            _set_queries(e, frame, x, item)
            total = e.add(frame["states_at"], e.add(e.mul(e.mul(item, splits), x.states), e.mul(s, x.state)))

            def merge_set():
                n = e.i64(x.nv)
                e.loop(
                    splits, [], lambda c: tiles.merge.function(e, total, e.add(total, e.mul(c, x.states)), n), start=1
                )
                sinks = e.add(frame["scratch"], x.at["sinks"])

                def lane(j):
                    h = e.add(e.mul(frame["hk"], x.group), _lane(e, frame, x, s, j)[1])
                    frames.store_sink(e, frame, h, e.add(sinks, e.mul(j, 4)))

                e.loop(LANES, [], lambda j: lane(j) or [])
                tiles.finish.function(e, total, sinks, n)
                _store_set(e, frame, x, store_results, s, total)

            when(e, _is_used(e, frame, x, s), merge_set)

        frames.loop_from(e, frame, e.mul(div(e, frame["n_items"], splits), x.n_sets), one)

    return frames.make_merge(frames.emitted_with_arguments(merge_lanes))
