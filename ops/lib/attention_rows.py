"""Attention of a few queries: one lane is one element of a head, K and V are read as they lie.

A block is one query of some heads of a KV head. All blocks of an item, and all its KV heads, go over a run of K and V
before the next run: in a cache the heads of a row lie side by side, so memory is read upwards.

A run is up to four tiles: the scores of all, then soft-max of all, then the values of all. A tile alone is one chain of
folds, maxima, exponentials and sums; in a run the chains of its tiles hide behind each other.
"""

import functools

from ggjit.jit import lazy_module
from ggjit.ops.lib import attention as tiles
from ggjit.ops.lib import attention_frame as frames
from ggjit.ops.lib.attention import BYTES, HEAD, MINUS_INF, TILE, padded
from ggjit.ops.lib.attention_frame import AHEAD, FRAME, Frame, choose, div, least, less, rem, when
from ggjit.ops.lib.emitted import emitted

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")

HEADS = 4  # of a block; up to 7 where no second block would be full
RUN = 64  # KV rows of a run
SCRATCH = 256 + 8 * RUN  # bytes of a head: sums; weights and corrections of each tile


# ---- one run --------------------------------------------------------------------------------------------------------


@functools.cache
def make_load_row(n):
    """Emitted (src, scale, dst): n f32, scaled, to padded(n)."""

    @emitted("src scale dst")
    def load_row(e, src, scale, dst):
        factor = e.splat_f32(scale)
        for i in range(0, padded(n), 16):
            e.store(dst, e.fmul(tiles.load_values(e, "F32", src, 4 * i, n - i), factor), 4 * i)

    return load_row


@functools.cache
def make_store_row(n):
    """Emitted (src, dst): n f32 of padded(n)."""

    @emitted("src dst")
    def store_row(e, src, dst):
        for i in range(0, n, 16):
            if n - i >= 16:
                e.store(dst, e.load_f32(src, 4 * i), 4 * i)
            else:
                e.store_first(dst, e.load_f32(src, 4 * i), e.i64(n - i), 4 * i)

    return store_row


def _run_scores(e, dk, kind, group, q, k, stride, sums, is_open, scores):
    """Scores of the open tiles of a run for `group` queries: [tile][query][16].

    Four K rows at a time, half folded, to `sums`; then the other folds. Rows of the next run are asked for meanwhile.
    """
    n, plain = padded(dk), _plain(kind)
    query = lambda g, d: e.load_f32(q, 4 * (g * n + d))  # noqa: E731
    if e.level == "avx512" and group * n <= 256:  # in registers for all rows
        loaded = {(g, d): query(g, d) for g in range(group) for d in range(0, n, 16)}
        query = lambda g, d: loaded[g, d]  # noqa: E731

    def four(kt, i):
        kr = e.add(kt, e.mul(e.mul(i, 4), stride))
        halves = []
        for r in range(0, 4, 2):
            pair = []
            for row in (kr if r == 0 else e.add(kr, e.mul(stride, r)), e.add(kr, e.mul(stride, r + 1))):
                _prefetch(e, kind, e.add(row, e.mul(stride, AHEAD)), dk)
                acc = [None] * group
                for d in range(0, n, 16):
                    x = tiles.load_values(e, plain, row, d * BYTES[plain], dk - d)
                    for g in range(group):
                        y = query(g, d)
                        acc[g] = e.fmul(x, y) if d == 0 else e.fma(x, y, acc[g])
                pair.append([tiles.join(e, a) for a in acc])
            halves.append([tiles.fold(e, x, y, tiles.FOLDS[0]) for x, y in zip(*pair, strict=True)])
        for g, (x, y) in enumerate(zip(*halves, strict=True)):
            e.store(e.add(sums, e.mul(i, 64 * group)), tiles.split(e, tiles.fold(e, x, y, tiles.FOLDS[1])), 64 * g)

    def tile(t, i):
        kt = e.add(k, e.mul(e.mul(i, TILE), stride))
        e.loop(4, [], lambda i: four(kt, i) or [])
        for g in range(group):
            x = [tiles.join(e, e.load_f32(sums, 64 * (i * group + g))) for i in range(4)]
            x = tiles.fold(
                e, tiles.fold(e, x[0], x[1], tiles.FOLDS[2]), tiles.fold(e, x[2], x[3], tiles.FOLDS[2]), tiles.FOLDS[3]
            )
            x = tiles.split(e, tiles.shuffle(e, x, x, tiles.ROW_ORDER))
            e.store(e.add(scores, e.mul(t, 64 * group)), x, 64 * g)

    _loop_open(e, is_open, [], lambda t, i: tile(t, i) or [])


def _plain(kind):
    """The type in which rows of K or V are read: those of a block type are f32 in scratch."""
    return kind if kind in BYTES else "F32"


def _prefetch(e, kind, row, n):
    """Ask for n values of a row in memory; of a block type, whoever dequantizes asks."""
    for offset in range(0, n * BYTES.get(kind, 0), 64):
        e.prefetch(row, offset)


def _loop_open(e, is_open, carried, body):
    """carried = body(t, i, *carried) for the open tiles of a run: t counts them, i is the tile's place in the run."""
    n = e.load(is_open, 0, emit.I64)
    return e.loop(n, carried, lambda t, *c: body(t, e.load(e.add(is_open, e.mul(t, 8)), 8, emit.I64), *c))


def _run_values(e, dv, kind, group, v, stride, states, weights, corr, is_open):
    """o = o * corr, then the 16 V rows times the weights, for each open tile of a run and `group` heads."""
    limit = 16 if e.level == "avx512" else 8  # sums in registers
    plain = _plain(kind)

    def block(b, n, count=16):
        """n vectors from vector b on."""
        at = [e.add(s, e.mul(b, 64)) for s in states]
        vb = e.add(v, e.mul(b, 16 * BYTES[plain]))

        def tile(t, i, *sums):
            of_tile = e.mul(t, 64 * group)
            ct, wt, vt = e.add(corr, of_tile), e.add(weights, of_tile), e.add(vb, e.mul(e.mul(i, TILE), stride))
            c = [e.load_f32(ct, 64 * g) for g in range(group)]
            sums = [e.fmul(x, c[at // n]) for at, x in enumerate(sums)]

            def two(r, *sums):  # a loop: of 16 rows at a stretch LLVM loads the values first and spills them
                sums = list(sums)
                row, w = e.add(vt, e.mul(r, stride)), e.add(wt, e.mul(r, 4))
                for u in range(2):
                    row = row if u == 0 else e.add(row, stride)
                    _prefetch(e, kind, e.add(row, e.mul(stride, AHEAD)), 16 * n)
                    for j in range(n):
                        x = tiles.load_values(e, plain, row, 16 * j * BYTES[plain], count)
                        for g in range(group):
                            sums[g * n + j] = e.fma(x, e.splat_f32(w, 64 * g + 4 * u), sums[g * n + j])
                return sums

            return e.loop(TILE, sums, two, step=2)

        sums = [e.load_f32(a, HEAD + 64 * j) for a in at for j in range(n)]
        sums = _loop_open(e, is_open, sums, tile)
        for g, a in enumerate(at):
            for j in range(n):
                e.store(a, sums[g * n + j], HEAD + 64 * j)

    full = dv // 16
    n = max([j for j in range(1, full + 1) if full % j == 0 and j * group * e.parts <= limit], default=1)
    e.loop(full, [], lambda b: block(b, n), step=n)
    if dv % 16:
        block(e.i64(full), 1, dv % 16)


@functools.cache
def make_run(dk, dv, k_kind, v_kind, group, softcap):
    """Emitted (q, k, k_stride, v, v_stride, masks, offset, slopes, cap, state, scratch, is_open): a run for some heads.

    q is [group][padded(dk)]; masks is a table of `group` addresses of f16 rows, read at an offset of bytes; slopes are
    `group` f32; scratch takes SCRATCH * group bytes; is_open is the number of open tiles and their places in the run.
    """
    nbytes = HEAD + 4 * padded(dv)

    @emitted("q k k_stride v v_stride masks offset slopes cap state scratch is_open")
    def run(e, q, k, k_stride, v, v_stride, masks, offset, slopes, cap, state, scratch, is_open):
        weights, corr = e.add(scratch, 256 * group), e.add(scratch, (256 + 4 * RUN) * group)
        _run_scores(e, dk, k_kind, group, q, k, k_stride, scratch, is_open, weights)
        states = [e.add(state, g * nbytes) for g in range(group)]

        def soft_max(t, i, *old):
            at, new = e.add(weights, e.mul(t, 64 * group)), []
            for g in range(group):
                m, total = old[2 * g : 2 * g + 2]
                s = e.load_f32(at, 64 * g)
                if softcap:
                    s = tiles.capped(e, s, e.splat_f32(cap))
                mask = e.load_f16(tiles.row_at(e, masks, g), e.add(offset, e.mul(i, 2 * TILE)))
                s = e.fma(mask, e.splat_f32(slopes, 4 * g), s)
                top = tiles.split(e, tiles.across(e, tiles.join(e, s), lambda x, y: e.fmax([x], [y])[0]))
                top = e.fmax(m, top)
                c, w = tiles.exp2(e, e.fsub(m, top)), tiles.exp2(e, e.fsub(s, top))
                sum_of_tile = tiles.split(e, tiles.across(e, tiles.join(e, w), e.b.fadd))
                e.store(at, w, 64 * g)
                e.store(e.add(corr, e.mul(t, 64 * group)), c, 64 * g)
                new += [top, e.fma(total, c, sum_of_tile)]
            return new

        old = [e.load_f32(s, offset) for s in states for offset in (0, 64)]
        for g, s in enumerate(_loop_open(e, is_open, old, soft_max)):
            e.store(states[g // 2], s, 64 * (g % 2))
        _run_values(e, dv, v_kind, group, v, v_stride, states, weights, corr, is_open)

    return run


# ---- the kernel -----------------------------------------------------------------------------------------------------


class Layout:
    """Sizes and scratch areas.

    Args:
        dk, dv: elements of a head of K and V.
        group: query heads of a KV head.
    """

    def __init__(self, dk, dv, group):
        self.nk, self.nv, self.group = padded(dk), padded(dv), group
        self.n_blocks = 1 if group < 2 * HEADS else -(-group // HEADS)
        self.block = -(-group // self.n_blocks)  # heads in a block; those beyond the group repeat the last one
        self.state = HEAD + 4 * self.nv
        self.states = self.block * self.state
        self.fixed, self.fixed_size = frames.places(
            scales=64, k=4 * RUN * self.nk, v=4 * RUN * self.nv, run=SCRATCH * self.block, zeros=2 * RUN
        )
        self.own, self.own_size = frames.places(
            sinks=64 * self.block, slopes=64, masks=8 * self.block, last_masks=8 * self.block, last=32 * self.block,
            is_open=8 + 8 * (RUN // TILE), q=4 * self.nk * self.block, states=self.states, totals=self.states,
        )  # fmt: skip


def n_items(group, n_heads, n):
    """Units by which it is decided whether KV rows are split; n_heads counts KV heads times ne3."""
    return n_heads


def work_size(dk, dv, group, n, n_heads, n_kv, nth):
    """Bytes of work of the kernel for n queries."""
    x = Layout(dk, dv, group)
    splits = frames.n_splits(n_heads, n_kv)
    blocks = n_heads * n * x.n_blocks
    return (splits * blocks * x.states if splits > 1 else 0) + nth * (FRAME + x.fixed_size + blocks * x.own_size)


class Block:
    """Block b of those of one index of dimension 3: KV head, query, first head of the group."""

    def __init__(self, e, frame, x, b):
        per_head = _per_head(e, frame, x)
        self.hk, rest = div(e, b, per_head), rem(e, b, per_head)
        self.i, self.first = div(e, rest, x.n_blocks), e.mul(rem(e, rest, x.n_blocks), x.block)
        self.b, self.h0 = b, e.add(e.mul(self.hk, x.group), self.first)
        self.n_real = least(e, x.block, e.sub(x.group, self.first))  # heads that do not repeat another
        self.area = e.add(frame["scratch"], e.add(x.fixed_size, e.mul(e.sub(b, frame["block0"]), x.own_size)))

    def result(self, e, frame, g, i3):
        """Address of the result of head g."""
        return e.add(frame["dst"], frame.at("dst", (1, e.add(self.h0, g)), (2, self.i), (3, i3)))


def _per_head(e, frame, x):
    """Blocks of a KV head."""
    return e.mul(frame.ne("q", 1), x.n_blocks)


def _loop_blocks(e, frame, x, body, head=None):
    """body(block) for all blocks of an item, or those of one of its KV heads."""
    per_head, first = _per_head(e, frame, x), frame["block0"]
    n_heads = frame["n_heads"] if head is None else 1
    first = e.add(first, e.mul(per_head, 0 if head is None else head))
    end = e.add(first, e.mul(per_head, n_heads))
    e.loop(end, [], lambda b: body(Block(e, frame, x, b)) or [], start=first)


def _states_of(e, frame, x, block):
    """Address of the states of a block: of the chunk if KV rows are split, else in its area."""
    split_states = e.add(frame["states"], e.mul(block.b, x.states))
    return choose(e, less(e, 1, frame["splits"]), split_states, e.add(block.area, x.own["states"]))


def _begin(e, frame, arguments, x, softcap):
    frames.set_arguments(frame, arguments)
    heads, n3 = frame.ne("k", 2), frame.ne("q", 3)
    units = e.mul(heads, n3)
    blocks = e.mul(units, _per_head(e, frame, x))
    frames.set_splits(e, frame, units)
    frames.set_places(e, frame, e.mul(blocks, x.states), e.add(x.fixed_size, e.mul(blocks, x.own_size)))
    frames.store_scales(e, frame, softcap, frame["scratch"])
    for at in range(0, 2 * RUN, 64):
        e.store(e.add(frame["scratch"], x.fixed["zeros"]), e.zero_i32(), at)
    # The KV heads of a row lie side by side, so an item goes over all of them, unless that leaves threads without work.
    others = e.mul(frame["splits"], n3)
    parts = least(e, heads, div(e, e.add(frame["nth"], e.sub(others, 1)), others))
    per_part = div(e, e.add(heads, e.sub(parts, 1)), parts)
    parts = div(e, e.add(heads, e.sub(per_part, 1)), per_part)
    frame["parts"], frame["heads_of_part"], frame["n_items"] = parts, per_part, e.mul(others, parts)


def _set_block(e, frame, x, load_row, block):
    """Everything of a block that does not depend on the chunk."""
    area, scratch = block.area, frame["scratch"]
    rest = rem(e, frame.ne("k", 1), TILE)

    def head(g):
        h = e.add(block.h0, least(e, g, e.sub(block.n_real, 1)))
        row = e.add(frame["q"], frame.at("q", (1, block.i), (2, h), (3, frame["i3"])))
        load_row(e, row, scratch, e.add(area, e.add(x.own["q"], e.mul(g, 4 * x.nk))))
        e.store_value(e.add(area, e.mul(g, 4)), x.own["slopes"], frames.alibi_exponent(e, frame, h))
        frames.store_sink(e, frame, h, e.add(area, e.add(x.own["sinks"], e.mul(g, 64))), 16)
        copy = e.add(area, e.add(x.own["last"], e.mul(g, 32)))
        at = e.add(area, e.mul(g, 8))
        e.store_value(at, x.own["masks"], e.add(scratch, x.fixed["zeros"]))
        e.store_value(at, x.own["last_masks"], copy)

        def mask():
            steps = (1, block.i), (2, rem(e, h, frame.ne("mask", 2))), (3, rem(e, frame["i3"], frame.ne("mask", 3)))
            e.store_value(at, x.own["masks"], e.add(frame["mask"], frame.at("mask", *steps)))

        when(e, frame.has_mask, mask)
        at_rest = e.mul(e.sub(frame.ne("k", 1), rest), 2)
        frames.copy_last_mask(e, frame, e.add(e.load(at, x.own["masks"], emit.I64), at_rest), rest, copy)
        tiles.reset.function(e, e.add(area, e.add(x.own["totals"], e.mul(g, x.state))), e.i64(x.nv // 16))

    e.loop(x.block, [], lambda g: head(g) or [])
    frames.finish_slopes(e, e.add(area, x.own["slopes"]))


def _check_block(e, frame, x, kv, n_rows, area):
    """List the open tiles of a run for a block: a tile is open if it is not full or not all its masks are -inf."""
    is_full = e.b.icmp_signed(">=", n_rows, e.i64(TILE))
    per_head = choose(e, e.b.icmp_signed("==", frame.ne("mask", 2), e.i64(1)), 1, x.block)
    heads = choose(e, e.b.and_(is_full, frame.has_mask), per_head, 0)
    half = emit.vector(emit.I16, TILE)

    def tile(i, n, bits):
        def head(g, found):
            mask = e.load(e.add(area, e.mul(g, 8)), x.own["masks"], emit.I64)
            at = e.mul(e.add(kv, e.mul(i, TILE)), 2)
            other = e.b.xor(e.load(mask, at, half), ir.Constant(half, [MINUS_INF] * TILE))
            some = e.b.icmp_unsigned("!=", e.b.bitcast(other, ir.IntType(256)), ir.Constant(ir.IntType(256), 0))
            return [choose(e, some, 1, found)]

        (found,) = e.loop(heads, [choose(e, less(e, 0, heads), 0, 1)], head)
        e.store_value(e.add(area, e.mul(n, 8)), x.own["is_open"] + 8, i)
        return [e.add(n, found), e.b.or_(bits, e.b.shl(found, i))]

    n_tiles = div(e, e.add(n_rows, TILE - 1), TILE)
    n, bits = e.loop(n_tiles, [e.i64(0), e.i64(0)], tile)
    e.store_value(area, x.own["is_open"], n)
    frame["is_open"] = e.b.or_(frame["is_open"], bits)


def _find_rows(e, frame, x, name, kind, n, kv, n_rows):
    """Address and stride of a run's rows of K or V: in the cache, or in scratch where those cannot be used."""
    at = e.add(frame["scratch"], x.fixed[name])
    if kind not in BYTES:
        return at, e.i64(4 * padded(n))
    stride, nbytes = frame.nb(name, 1), n * BYTES[kind]
    row = e.add(frame[name], e.add(frame[name + "_offs"], e.mul(kv, stride)))
    is_full = e.b.icmp_signed(">=", n_rows, e.i64(TILE))
    when(e, e.b.not_(is_full), lambda: frames.copy_rows(e, row, stride, n_rows, nbytes, at))
    return choose(e, is_full, row, at), choose(e, is_full, stride, nbytes)


@functools.cache
def make_pieces(dk, dv, k_kind, v_kind, group, softcap):
    """The emitted pieces of the kernel, in the driver's order."""
    shape = dk, dv, group
    load_row, store_row = make_load_row(dk).function, make_store_row(dv).function
    run = make_run(dk, dv, k_kind, v_kind, Layout(*shape).block, softcap).function

    def begin(e, frame, arguments):
        _begin(e, Frame(e, frame), arguments, Layout(*shape), softcap)

    @emitted("frame item")
    def set_item(e, frame, item):
        x, frame = Layout(*shape), Frame(e, frame)
        splits, parts, per_head = frame["splits"], frame["parts"], _per_head(e, frame, x)
        chunk, rest = rem(e, item, splits), div(e, item, splits)
        hk, i3 = e.mul(rem(e, rest, parts), frame["heads_of_part"]), div(e, rest, parts)
        frame["i3"], frame["block0"] = i3, e.mul(hk, per_head)
        frame["n_heads"] = least(e, frame["heads_of_part"], e.sub(frame.ne("k", 2), hk))
        frames.set_chunks(e, frame, chunk)
        of_chunk = e.mul(e.add(e.mul(i3, splits), chunk), e.mul(e.mul(frame.ne("k", 2), per_head), x.states))
        frame["states"] = e.add(frame["states_at"], of_chunk)
        _loop_blocks(e, frame, x, lambda block: _set_block(e, frame, x, load_row, block))

    @emitted("frame chunk")
    def begin_chunk(e, frame, chunk):
        x, frame = Layout(*shape), Frame(e, frame)
        frames.set_range(e, frame, chunk)

        def one(block):
            at = _states_of(e, frame, x, block)
            e.loop(x.block, [], lambda g: tiles.reset.function(e, e.add(at, e.mul(g, x.state)), e.i64(x.nv // 16)))

        _loop_blocks(e, frame, x, one)

    @emitted("frame kv n_rows head")
    def check_rows(e, frame, kv, n_rows, head):
        x, frame = Layout(*shape), Frame(e, frame)
        frame["is_open"] = 0
        frames.set_offsets(e, frame, e.add(div(e, frame["block0"], _per_head(e, frame, x)), head))
        _loop_blocks(e, frame, x, lambda block: _check_block(e, frame, x, kv, n_rows, block.area), head)

    @emitted("frame kv n_rows head")
    def run_rows(e, frame, kv, n_rows, head):
        x, frame = Layout(*shape), Frame(e, frame)
        scratch = frame["scratch"]
        k, k_stride = _find_rows(e, frame, x, "k", k_kind, dk, kv, n_rows)
        v, v_stride = _find_rows(e, frame, x, "v", v_kind, dv, kv, n_rows)
        is_full = e.b.icmp_signed(">=", n_rows, e.i64(TILE))
        offset = choose(e, e.b.and_(is_full, frame.has_mask), e.mul(kv, 2), 0)
        masks = choose(e, is_full, x.own["masks"], x.own["last_masks"])

        def one(block):
            area = block.area
            run(
                e, e.add(area, x.own["q"]), k, k_stride, v, v_stride, e.add(area, masks), offset,
                e.add(area, x.own["slopes"]), e.add(scratch, 4), _states_of(e, frame, x, block),
                e.add(scratch, x.fixed["run"]), e.add(area, x.own["is_open"]),
            )  # fmt: skip

        _loop_blocks(e, frame, x, one, head)

    @emitted("frame")
    def end_chunk(e, frame):
        x, frame = Layout(*shape), Frame(e, frame)

        def one(block):
            def head(g):
                total, part = (e.add(block.area, e.add(x.own[t], e.mul(g, x.state))) for t in ("totals", "states"))
                tiles.merge.function(e, total, part, e.i64(x.nv // 16))

            e.loop(x.block, [], lambda g: head(g) or [])

        when(e, less(e, frame["splits"], 2), lambda: _loop_blocks(e, frame, x, one))

    @emitted("frame")
    def end_item(e, frame):
        x, frame = Layout(*shape), Frame(e, frame)

        def one(block):
            def head(g):
                total = e.add(block.area, e.add(x.own["totals"], e.mul(g, x.state)))
                sink = e.add(block.area, e.add(x.own["sinks"], e.mul(g, 64)))
                tiles.finish.function(e, total, sink, e.i64(x.nv // 16))
                store_row(e, e.add(total, HEAD), block.result(e, frame, g, frame["i3"]))

            e.loop(block.n_real, [], lambda g: head(g) or [])

        when(e, less(e, frame["splits"], 2), lambda: _loop_blocks(e, frame, x, one))

    return frames.emitted_with_arguments(begin), set_item, begin_chunk, check_rows, run_rows, end_chunk, end_item


@functools.cache
def make_kernel(dk, dv, k_kind, v_kind, group, softcap):
    """Kernel for a few queries."""
    x = Layout(dk, dv, group)
    pieces = make_pieces(dk, dv, k_kind, v_kind, group, softcap)
    run = RUN if k_kind in BYTES and v_kind in BYTES else TILE  # more rows of a block type as f32 would leave L1
    return frames.make_driver(pieces, k_kind, dk, v_kind, dv, x.fixed["k"], x.fixed["v"], run)


@functools.cache
def make_merge(dk, dv, group):
    """Second kernel where KV rows are split: merge the chunks in order, divide, store."""
    shape = dk, dv, group
    store_row = make_store_row(dv).function

    def merge_rows(e, frame, arguments):
        x, frame = Layout(*shape), Frame(e, frame)
        _begin(e, frame, arguments, x, False)
        frame["block0"] = 0
        splits, n_blocks = frame["splits"], e.mul(frame.ne("k", 2), _per_head(e, frame, x))
        per_chunk, sink, n = e.mul(n_blocks, x.states), frame["scratch"], e.i64(x.nv // 16)

        def one(pair):
            i3, block = div(e, pair, n_blocks), Block(e, frame, x, rem(e, pair, n_blocks))
            first = e.add(frame["states_at"], e.add(e.mul(e.mul(i3, splits), per_chunk), e.mul(block.b, x.states)))

            def head(g):
                total = e.add(first, e.mul(g, x.state))
                part = lambda chunk: e.add(total, e.mul(chunk, per_chunk))  # noqa: E731
                e.loop(splits, [], lambda chunk: tiles.merge.function(e, total, part(chunk), n), start=1)
                frames.store_sink(e, frame, e.add(block.h0, g), sink, 16)
                tiles.finish.function(e, total, sink, n)
                store_row(e, e.add(total, HEAD), block.result(e, frame, g, i3))

            e.loop(block.n_real, [], lambda g: head(g) or [])

        frames.loop_from(e, frame, e.mul(frame.ne("q", 3), n_blocks), one)

    return frames.make_merge(frames.emitted_with_arguments(merge_rows))
