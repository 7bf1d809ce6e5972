"""Kernels of attention around the emitted tiles: what to read, in which chunks, who does what.

Work is shared by the chunk counter. An item is a KV head with some queries; if there are few items, an item is one chunk
of KV rows of these, its states stay in the work buffer and a second kernel merges them in the order of the chunks.

    work:  counter line | states of all items and chunks, if split | scratch of thread 0 | scratch of thread 1 | ...
"""

import functools

import numpy as np

from ggjit import types
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.ops.lib.attention import BYTES, CHUNK, CLOSED, HEAD, LOG2E, MINUS_INF, MIXED, OPEN, TILE, padded

memory = lazy_module("ggjit.ops.lib.memory")
atomics = lazy_module("ggjit.ops.lib.atomics")
tiles = lazy_module("ggjit.ops.lib.attention")

COUNTER_LINE = 64
SPLIT_BELOW = 16  # items: fewer are split by chunks
HEADS = 4  # heads in one pass over a tile of K and V in layout "rows"


# ---- what both layouts share ----------------------------------------------------------------------------------------


def n_splits(n_items, n_kv):
    """Parts into which an item's KV rows are split."""
    n_chunks = (n_kv + CHUNK - 1) // CHUNK
    return n_chunks if n_items < SPLIT_BELOW and n_chunks > 1 else 1


count_splits = jitted(n_splits)


@jitted
def least(a, b):
    """The smaller of two integers."""
    return a if a < b else b


@functools.cache
def make_read_tile(kind, n):
    """Helper (src, offs, stride, n_rows, work, at): rows of n values as a tile of f32 in scratch, zeros after them."""
    width = padded(n)
    if kind in BYTES:
        read_rows = tiles.make_read_rows(kind, n)

        @jitted
        def read_plain(src, offs, stride, n_rows, work, at):
            read_rows(memory.address(src) + offs, stride, n_rows, memory.address(work) + at)

        return read_plain
    dequantize_row = types.by_name(kind).quant.dequantize_row

    @jitted
    def read_blocks(src, offs, stride, n_rows, work, at):
        for r in range(TILE):
            used = n if r < n_rows else 0
            if used > 0:
                dequantize_row(src, offs + r * stride, work, at + 4 * width * r, n)
            for d in range(used, width):
                memory.store_f32(work, at + 4 * (width * r + d), np.float32(0))

    return read_blocks


@functools.cache
def make_find_tile(kind, n):
    """Helper as make_read_tile, returning (address, stride) of 16 rows: those in the cache if they can be used as they are."""
    if kind not in BYTES:
        read_tile = make_read_tile(kind, n)

        @jitted
        def find_blocks(src, offs, stride, n_rows, work, at):
            read_tile(src, offs, stride, n_rows, work, at)
            return memory.address(work) + at, 4 * padded(n)

        return find_blocks
    words = n * BYTES[kind] // 2

    @jitted
    def find_plain(src, offs, stride, n_rows, work, at):
        if n_rows == TILE:
            return memory.address(src) + offs, stride
        for r in range(TILE):
            for i in range(words):
                x = memory.load_i16(src, offs + r * stride + 2 * i) if r < n_rows else np.int16(0)
                memory.store_i16(work, at + 2 * (r * words + i), x)
        return memory.address(work) + at, 2 * words

    return find_plain


@jitted
def store_scales(op_params, softcap, work, at):
    """What q is multiplied by, and the cap, in base 2."""
    scale, cap = memory.f32_from_bits(op_params[0]), memory.f32_from_bits(op_params[2])
    factor = scale * np.float32(LOG2E)
    if softcap:
        factor = scale / cap * np.float32(2 * LOG2E)
    memory.store_f32(work, at, factor)
    memory.store_f32(work, at + 4, cap * np.float32(LOG2E))


@jitted
def alibi_exponent(op_params, n_head, h):
    """log2 of the slope of a head."""
    m = 1
    while 2 * m <= n_head:
        m *= 2
    steps = 2 * (h + 1) if h < m else 2 * (h - m) + 1
    return memory.f32_from_bits(op_params[1]) / np.float32(2 * m) * np.float32(-steps)


@jitted
def finish_slopes(work, at, n):
    """From exponents to slopes in base 2: n vectors of 16."""
    tiles.exp2_values(memory.address(work) + at, n)
    for i in range(16 * n):
        memory.store_f32(work, at + 4 * i, memory.load_f32(work, at + 4 * i) * np.float32(LOG2E))


@jitted
def sink_value(sinks, has_sinks, h):
    """The sink of a head in base 2, -inf for none."""
    return memory.load_f32(sinks, 4 * h) * np.float32(LOG2E) if has_sinks else np.float32(-np.inf)


@jitted
def store_sinks(work, at, sink):
    """One sink in 16 lanes."""
    for j in range(16):
        memory.store_f32(work, at + 4 * j, sink)


@jitted
def copy_last_mask(mask, offs, has_mask, rest, work, at):
    """16 f16 masks of the last tile: `rest` values, then -inf."""
    for j in range(TILE):
        value = np.int16(0)
        if has_mask and j < rest:
            value = memory.load_i16(mask, offs + 2 * j)
        memory.store_i16(work, at + 2 * j, value if j < rest else np.int16(MINUS_INF - 65536))


@jitted
def is_closed(mask, offs):
    """Are 16 f16 masks all -inf?"""
    for j in range(TILE):
        if memory.load_u16(mask, offs + 2 * j) != MINUS_INF:
            return False
    return True


def places(**sizes):
    """Offsets of scratch areas by name, each at a multiple of 64, and the sum."""
    at, end = {}, 0
    for name, size in sizes.items():
        at[name], end = end, end + (size + 63) // 64 * 64
    return at, end


# ---- layout "rows" --------------------------------------------------------------------------------------------------


def row_blocks(group):
    """Number of blocks of heads and heads in a block; heads beyond the group repeat the last one."""
    n_blocks = -(-group // HEADS)
    return n_blocks, -(-group // n_blocks)


def row_places(dk, dv, group):
    """Scratch areas of a thread and its size, then areas of a block (one query of some heads) and its size."""
    nk, nv, block = padded(dk), padded(dv), row_blocks(group)[1]
    states = block * (HEAD + 4 * nv)
    fixed = places(scales=64, k=64 * nk, v=64 * nv, weights=320 * block, zeros=64)
    own = places(
        sinks=64 * block, slopes=64, masks=8 * block, last_masks=8 * block, last=32 * block, q=4 * nk * block,
        states=states, totals=states,
    )  # fmt: skip
    return *fixed, *own


def row_work_size(dk, dv, group, n, n_items, n_kv, nth):
    """Bytes of work of the kernel for n queries."""
    n_blocks, block = row_blocks(group)
    _, fixed, _, own = row_places(dk, dv, group)
    splits = n_splits(n_items, n_kv)
    states = n_items * splits * n * n_blocks * block * (HEAD + 4 * padded(dv)) if splits > 1 else 0
    return states + nth * (fixed + n * n_blocks * own)


@functools.cache
def make_rows(dk, dv, k_kind, v_kind, group, softcap):
    """Kernel for a few query rows of a KV head, one lane an element of the head."""
    n_blocks, block = row_blocks(group)
    nk, nv = padded(dk), padded(dv)
    state_size = HEAD + 4 * nv
    at, fixed_size, own, own_size = row_places(dk, dv, group)
    at_k, at_v, at_weights, at_zeros = at["k"], at["v"], at["weights"], at["zeros"]
    at_sinks, at_slopes, at_masks, at_last_masks = own["sinks"], own["slopes"], own["masks"], own["last_masks"]
    at_last, at_q, at_states, at_totals = own["last"], own["q"], own["states"], own["totals"]
    find_k, find_v = make_find_tile(k_kind, dk), make_find_tile(v_kind, dv)
    k_plain, v_plain = k_kind if k_kind in BYTES else "F32", v_kind if v_kind in BYTES else "F32"
    row_tile = tiles.make_row_tile(dk, dv, k_plain, v_plain, block, softcap)
    load_row, store_row = tiles.make_load_row(dk), tiles.make_store_row(dv)

    @jitted
    def set_block(src0, src0_ne, src0_nb, src3, src3_ne, src3_nb, src4, src4_ne, op_params, b, hk, i3, n_kv, work, fixed, at):
        """Everything of block b that does not depend on the chunk."""
        base = memory.address(work) + at
        i, rest = b // n_blocks, n_kv % TILE
        for g in range(block):
            h = hk * group + least(b % n_blocks * block + g, group - 1)
            row = memory.address(src0) + i * src0_nb[1] + h * src0_nb[2] + i3 * src0_nb[3]
            load_row(row, memory.address(work) + fixed, base + at_q + 4 * nk * g)
            memory.store_f32(work, at + at_slopes + 4 * g, alibi_exponent(op_params, src0_ne[2], h))
            store_sinks(work, at + at_sinks + 64 * g, sink_value(src4, src4_ne[0] > 0, h))
            offs, mask = 0, memory.address(work) + fixed + at_zeros
            if src3_ne[0] > 0:
                offs = i * src3_nb[1] + h % src3_ne[2] * src3_nb[2] + i3 % src3_ne[3] * src3_nb[3]
                mask = memory.address(src3) + offs
            memory.store_i64(work, at + at_masks + 8 * g, mask)
            memory.store_i64(work, at + at_last_masks + 8 * g, base + at_last + 32 * g)
            copy_last_mask(src3, offs + 2 * (n_kv - rest), src3_ne[0] > 0, rest, work, at + at_last + 32 * g)
        finish_slopes(work, at + at_slopes, 1)

    @jitted
    def is_block_closed(src3, src3_ne, kv, work, masks):
        for g in range(1 if src3_ne[2] == 1 else block):
            if not is_closed(src3, memory.load_i64(work, masks + 8 * g) - memory.address(src3) + 2 * kv):
                return False
        return True

    @jitted
    def run_chunk(src1, src1_ne, src1_nb, src2, src2_nb, src3, src3_ne, n, hk, k3, chunk, work, fixed, states, stride):
        base, blocks = memory.address(work) + fixed, fixed + fixed_size
        n_kv, has_mask = src1_ne[1], src3_ne[0] > 0
        k_offs, v_offs = hk * src1_nb[2] + k3 * src1_nb[3], hk * src2_nb[2] + k3 * src2_nb[3]
        for b in range(n * n_blocks):
            for g in range(block):
                tiles.reset(states + b * stride + g * state_size, nv // 16)
        for kv in range(chunk * CHUNK, least(n_kv, (chunk + 1) * CHUNK), TILE):
            n_rows = least(TILE, n_kv - kv)
            masks, offs = at_last_masks if n_rows < TILE else at_masks, 2 * kv if has_mask and n_rows == TILE else 0
            kp, ks, vp, vs = 0, 0, 0, 0
            for b in range(n * n_blocks):
                own = blocks + b * own_size
                if has_mask and n_rows == TILE and is_block_closed(src3, src3_ne, kv, work, own + at_masks):
                    continue
                if kp == 0:
                    kp, ks = find_k(src1, k_offs + kv * src1_nb[1], src1_nb[1], n_rows, work, fixed + at_k)
                    vp, vs = find_v(src2, v_offs + kv * src2_nb[1], src2_nb[1], n_rows, work, fixed + at_v)
                own += memory.address(work)
                row_tile(
                    own + at_q, kp, ks, vp, vs, own + masks, offs, own + at_slopes, base + 4, states + b * stride,
                    base + at_weights,
                )  # fmt: skip

    @kernel(counter=True)
    def attention_rows(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        n, n_kv, heads_kv = src0_ne[1], src1_ne[1], src1_ne[2]
        n_items = heads_kv * src0_ne[3]
        n_chunks, splits = (n_kv + CHUNK - 1) // CHUNK, count_splits(n_items, n_kv)
        split_size = n * n_blocks * block * state_size
        fixed = COUNTER_LINE + ith * (fixed_size + n * n_blocks * own_size)
        if splits > 1:
            fixed += n_items * splits * split_size
        blocks = memory.address(work) + fixed + fixed_size
        store_scales(op_params, softcap, work, fixed)
        for j in range(8):
            memory.store_i64(work, fixed + at_zeros + 8 * j, 0)
        item = atomics.fetch_add(work, 0, 1)
        while item < n_items * splits:
            head = item // splits
            hk, i3 = head % heads_kv, head // heads_kv
            k3 = i3 // (src0_ne[3] // src1_ne[3])
            for b in range(n * n_blocks):
                own = fixed + fixed_size + b * own_size
                set_block(src0, src0_ne, src0_nb, src3, src3_ne, src3_nb, src4, src4_ne, op_params, b, hk, i3, n_kv, work, fixed, own)  # fmt: skip
                for g in range(block):
                    tiles.reset(blocks + b * own_size + at_totals + g * state_size, nv // 16)
            if splits > 1:
                states = memory.address(work) + COUNTER_LINE + item * split_size
                run_chunk(src1, src1_ne, src1_nb, src2, src2_nb, src3, src3_ne, n, hk, k3, item % splits, work, fixed, states, block * state_size)  # fmt: skip
                item = atomics.fetch_add(work, 0, 1)
                continue
            for chunk in range(n_chunks):
                run_chunk(src1, src1_ne, src1_nb, src2, src2_nb, src3, src3_ne, n, hk, k3, chunk, work, fixed, blocks + at_states, own_size)  # fmt: skip
                for b in range(n * n_blocks):
                    for g in range(block):
                        own = blocks + b * own_size + g * state_size
                        tiles.merge(own + at_totals, own + at_states, nv // 16)
            for b in range(n * n_blocks):
                for g in range(least(block, group - b % n_blocks * block)):
                    own = blocks + b * own_size
                    total = own + at_totals + g * state_size
                    tiles.finish(total, own + at_sinks + 64 * g, nv // 16)
                    h = hk * group + b % n_blocks * block + g
                    store_row(total + HEAD, memory.address(dst) + h * dst_nb[1] + b // n_blocks * dst_nb[2] + i3 * dst_nb[3])
            item = atomics.fetch_add(work, 0, 1)

    return attention_rows


@functools.cache
def make_merge_rows(dv, group):
    """Second kernel of make_rows where chunks are split: merge in order, divide, store."""
    n_blocks, block = row_blocks(group)
    nv = padded(dv)
    state_size = HEAD + 4 * nv
    store_row = tiles.make_store_row(dv)

    @kernel
    def attention_merge_rows(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        heads_kv, n_cols = src1_ne[2], src0_ne[1] * n_blocks * block
        n_items = heads_kv * src0_ne[3]
        splits = count_splits(n_items, src1_ne[1])
        for pair in range(ith, n_items * n_cols, nth):
            item, col = pair // n_cols, pair % n_cols
            hg = col % (n_blocks * block)
            if hg >= group:
                continue
            h, i3 = item % heads_kv * group + hg, item // heads_kv
            at = COUNTER_LINE + (item * splits * n_cols + col) * state_size
            total = memory.address(work) + at
            for chunk in range(1, splits):
                tiles.merge(total, total + chunk * n_cols * state_size, nv // 16)
            # All is in the first chunk's state now, so the second's place is free for the sink.
            sink = n_cols * state_size
            store_sinks(work, at + sink, sink_value(src4, src4_ne[0] > 0, h))
            tiles.finish(total, total + sink, nv // 16)
            store_row(total + HEAD, memory.address(dst) + h * dst_nb[1] + col // (n_blocks * block) * dst_nb[2] + i3 * dst_nb[3])

    return attention_merge_rows


# ---- layout "lanes" -------------------------------------------------------------------------------------------------


def lane_tiles(group):
    """Query tiles that share the conversion of K and V."""
    return max(1, 4 // group)


def lane_places(dk, dv, group):
    """Scratch areas of a thread; a set is 16 lanes."""
    nk, nv, n_sets = padded(dk), padded(dv), lane_tiles(group) * group
    state = HEAD + 64 * nv
    return places(
        scales=64, k=64 * nk, v=64 * nv, s=1024, masks=1024, spare=4 * max(nk, nv), rows=128, last_rows=128, last=512,
        classes=8 * (CHUNK // TILE) * n_sets, mask_rows=128 * n_sets, slopes=64 * n_sets, sinks=64 * n_sets,
        q=64 * nk * n_sets, states=state * n_sets, totals=state * n_sets,
    )  # fmt: skip


def lane_items(group, n):
    """Items of n queries of one KV head."""
    return -(-n // (16 * lane_tiles(group)))


def lane_work_size(dk, dv, group, n, n_heads, n_kv, nth):
    """Bytes of work of the kernel; n_heads counts KV heads times ne3."""
    n_sets = lane_tiles(group) * group
    n_items = lane_items(group, n) * n_heads
    splits = n_splits(n_items, n_kv)
    states = n_items * splits * n_sets * (HEAD + 64 * padded(dv)) if splits > 1 else 0
    return states + nth * lane_places(dk, dv, group)[1]


@functools.cache
def make_lane_of(group):
    """Helper (n, set, lane) -> (query, head of the group, is it real) for n queries of an item.

    Queries are in tiles of 16; in a tile of m the lanes of its sets are m queries of the first head, then m of the next ...
    A lane too many repeats the first.
    """

    @jitted
    def lane_of(n, set_, lane):
        tile = set_ // group
        m = least(16, n - 16 * tile)
        pair = 16 * (set_ - tile * group) + lane
        real = m > 0 and pair < m * group
        if not real:
            return 16 * tile if m > 0 else 0, 0, False
        return 16 * tile + pair % m, pair // m, True

    return lane_of


@functools.cache
def make_store_set(dv, group):
    """Helper: results of one set of lanes to their places."""
    lane_of, store_results = make_lane_of(group), tiles.make_store_results(dv)

    @jitted
    def store_set(dst, dst_nb, n, set_, q0, hk, i3, total, work, rows, spare):
        for lane in range(16):
            i, g, real = lane_of(n, set_, lane)
            out = memory.address(dst) + (hk * group + g) * dst_nb[1] + (q0 + i) * dst_nb[2] + i3 * dst_nb[3]
            memory.store_i64(work, rows + 8 * lane, out if real else memory.address(work) + spare)
        store_results(total + HEAD, memory.address(work) + rows)

    return store_set


@functools.cache
def make_count_sets(group):
    """Helper n -> the number of sets of n queries, were all tiles full; the last tile may use fewer (see is_used)."""
    lane_of = make_lane_of(group)

    @jitted
    def is_used(n, set_):
        return lane_of(n, set_, 0)[2]

    return is_used


@functools.cache
def make_lanes(dk, dv, k_kind, v_kind, group, softcap):
    """Kernel for many queries, one lane a query of a head."""
    n_tiles = lane_tiles(group)
    n_sets, nk, nv = n_tiles * group, padded(dk), padded(dv)
    state_size = HEAD + 64 * nv
    at, scratch_size = lane_places(dk, dv, group)
    at_k, at_v, at_s, at_m, at_rows, at_last_rows = at["k"], at["v"], at["s"], at["masks"], at["rows"], at["last_rows"]
    at_last, at_classes, at_mask_rows, at_slopes, at_sinks = at["last"], at["classes"], at["mask_rows"], at["slopes"], at["sinks"]
    at_q, at_states, at_totals, at_spare = at["q"], at["states"], at["totals"], at["spare"]
    chunk_tiles = CHUNK // TILE
    lane_of, is_used, store_set = make_lane_of(group), make_count_sets(group), make_store_set(dv, group)
    read_k, read_v = make_read_tile(k_kind, dk), make_read_tile(v_kind, dv)
    load_queries, scores, values = tiles.make_load_queries(dk), tiles.make_scores(dk), tiles.make_values(dv)

    @jitted
    def set_lanes(src0, src0_ne, src0_nb, src3, src3_ne, src3_nb, src4, src4_ne, op_params, n, q0, hk, i3, work, scratch):
        """Everything of the lanes that does not depend on the chunk."""
        base = memory.address(work) + scratch
        for lane in range(16):
            memory.store_i64(work, scratch + at_last_rows + 8 * lane, base + at_last + 32 * lane)
        for s in range(n_sets):
            for lane in range(16):
                i, g, real = lane_of(n, s, lane)
                h = hk * group + g
                row = memory.address(src0) + (q0 + i) * src0_nb[1] + h * src0_nb[2] + i3 * src0_nb[3]
                memory.store_i64(work, scratch + at_rows + 8 * lane, row)
                memory.store_f32(work, scratch + at_slopes + 64 * s + 4 * lane, alibi_exponent(op_params, src0_ne[2], h))
                memory.store_f32(work, scratch + at_sinks + 64 * s + 4 * lane, sink_value(src4, src4_ne[0] > 0, h))
                mask = memory.address(src3)
                if src3_ne[0] > 0:
                    mask += (q0 + i) * src3_nb[1] + h % src3_ne[2] * src3_nb[2] + i3 % src3_ne[3] * src3_nb[3]
                memory.store_i64(work, scratch + at_mask_rows + 128 * s + 8 * lane, mask)
            if is_used(n, s):
                load_queries(base + at_rows, base, base + at_q + 64 * nk * s)
        finish_slopes(work, scratch + at_slopes, n_sets)

    @jitted
    def set_classes(src3_ne, n, first, n_full, work, scratch):
        """What the mask does to each set in each full tile of a chunk that begins at row `first`."""
        base = memory.address(work) + scratch
        for s in range(n_sets):
            classes = scratch + at_classes + 8 * chunk_tiles * s
            for t in range(chunk_tiles):
                memory.store_i64(work, classes + 8 * t, (OPEN if t < n_full else MIXED) if is_used(n, s) else CLOSED)
            if src3_ne[0] > 0 and is_used(n, s):
                if s % group > 0 and src3_ne[2] == 1:  # the same rows of the mask as the tile's first set
                    for t in range(n_full):
                        same = scratch + at_classes + 8 * chunk_tiles * (s - s % group)
                        memory.store_i64(work, classes + 8 * t, memory.load_i64(work, same + 8 * t))
                else:
                    tiles.classify(base + at_mask_rows + 128 * s, 2 * first, n_full, memory.address(work) + classes)

    @jitted
    def load_mask_tile(src3, src3_ne, s, kv, rest, work, scratch):
        """Masks of a set in one tile; the last tile, of `rest` rows, goes through a copy that ends with -inf."""
        base = memory.address(work) + scratch
        rows = at_mask_rows + 128 * s
        if rest == 0:
            tiles.load_masks(base + rows, 2 * kv, base + at_m)
            return
        for lane in range(16):
            offs = memory.load_i64(work, scratch + rows + 8 * lane) - memory.address(src3) + 2 * kv
            copy_last_mask(src3, offs, src3_ne[0] > 0, rest, work, scratch + at_last + 32 * lane)
        tiles.load_masks(base + at_last_rows, 0, base + at_m)

    @jitted
    def run_chunk(src1, src1_ne, src1_nb, src2, src2_nb, src3, src3_ne, n, hk, k3, chunk, work, scratch, states):
        base = memory.address(work) + scratch
        first, end = chunk * CHUNK, least(src1_ne[1], (chunk + 1) * CHUNK)
        set_classes(src3_ne, n, first, (end - first) // TILE, work, scratch)
        for s in range(n_sets):
            tiles.reset(states + s * state_size, nv)
        k_offs, v_offs = hk * src1_nb[2] + k3 * src1_nb[3], hk * src2_nb[2] + k3 * src2_nb[3]
        for kv in range(first, end, TILE):
            n_rows = least(TILE, end - kv)
            is_read, masked = False, -1
            for s in range(n_sets):
                kind = memory.load_i64(work, scratch + at_classes + 8 * (chunk_tiles * s + (kv - first) // TILE))
                if kind == CLOSED:
                    continue
                if not is_read:
                    read_k(src1, k_offs + kv * src1_nb[1], src1_nb[1], n_rows, work, scratch + at_k)
                    read_v(src2, v_offs + kv * src2_nb[1], src2_nb[1], n_rows, work, scratch + at_v)
                    is_read = True
                scores(base + at_q + 64 * nk * s, base + at_k, base + at_s)
                if softcap:
                    tiles.cap_scores(base + at_s, base + 4)
                if kind == MIXED:
                    if masked != s // group or src3_ne[2] > 1 or n % 16 > 0:
                        load_mask_tile(src3, src3_ne, s, kv, n_rows % TILE, work, scratch)
                        masked = s // group
                    tiles.mask_scores(base + at_s, base + at_m, base + at_slopes + 64 * s)
                values(base + at_s, base + at_v, states + s * state_size)

    @kernel(counter=True)
    def attention_lanes(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        n_kv, heads_kv = src1_ne[1], src1_ne[2]
        n_blocks = (src0_ne[1] + 16 * n_tiles - 1) // (16 * n_tiles)
        n_items = n_blocks * heads_kv * src0_ne[3]
        n_chunks, splits = (n_kv + CHUNK - 1) // CHUNK, count_splits(n_items, n_kv)
        scratch = COUNTER_LINE + ith * scratch_size
        if splits > 1:
            scratch += n_items * splits * n_sets * state_size
        base = memory.address(work) + scratch
        store_scales(op_params, softcap, work, scratch)
        item = atomics.fetch_add(work, 0, 1)
        while item < n_items * splits:
            head = item // splits // n_blocks
            q0 = (n_blocks - 1 - item // splits % n_blocks) * 16 * n_tiles  # the longest first
            n, hk, i3 = least(16 * n_tiles, src0_ne[1] - q0), head % heads_kv, head // heads_kv
            k3 = i3 // (src0_ne[3] // src1_ne[3])
            set_lanes(src0, src0_ne, src0_nb, src3, src3_ne, src3_nb, src4, src4_ne, op_params, n, q0, hk, i3, work, scratch)
            first, last = item % splits, item % splits + 1
            states = memory.address(work) + COUNTER_LINE + item * n_sets * state_size
            if splits == 1:
                first, last, states = 0, n_chunks, base + at_states
                for s in range(n_sets):
                    tiles.reset(base + at_totals + s * state_size, nv)
            for chunk in range(first, last):
                run_chunk(src1, src1_ne, src1_nb, src2, src2_nb, src3, src3_ne, n, hk, k3, chunk, work, scratch, states)
                if splits == 1:
                    for s in range(n_sets):
                        tiles.merge(base + at_totals + s * state_size, states + s * state_size, nv)
            if splits == 1:
                for s in range(n_sets):
                    if is_used(n, s):
                        total = base + at_totals + s * state_size
                        tiles.finish(total, base + at_sinks + 64 * s, nv)
                        store_set(dst, dst_nb, n, s, q0, hk, i3, total, work, scratch + at_rows, scratch + at_spare)
            item = atomics.fetch_add(work, 0, 1)

    return attention_lanes


@functools.cache
def make_merge_lanes(dk, dv, group):
    """Second kernel of make_lanes where chunks are split: merge in order, divide, store."""
    n_tiles = lane_tiles(group)
    n_sets, nv = n_tiles * group, padded(dv)
    state_size = HEAD + 64 * nv
    at, scratch_size = lane_places(dk, dv, group)
    at_sinks, at_rows, at_spare = at["sinks"], at["rows"], at["spare"]
    lane_of, is_used, store_set = make_lane_of(group), make_count_sets(group), make_store_set(dv, group)

    @kernel
    def attention_merge_lanes(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        heads_kv = src1_ne[2]
        n_blocks = (src0_ne[1] + 16 * n_tiles - 1) // (16 * n_tiles)
        n_items = n_blocks * heads_kv * src0_ne[3]
        splits = count_splits(n_items, src1_ne[1])
        scratch = COUNTER_LINE + n_items * splits * n_sets * state_size + ith * scratch_size
        for pair in range(ith, n_items * n_sets, nth):
            item, s = pair // n_sets, pair % n_sets
            head, q0 = item // n_blocks, (n_blocks - 1 - item % n_blocks) * 16 * n_tiles
            n, hk, i3 = least(16 * n_tiles, src0_ne[1] - q0), head % heads_kv, head // heads_kv
            if not is_used(n, s):
                continue
            total = memory.address(work) + COUNTER_LINE + (item * splits * n_sets + s) * state_size
            for chunk in range(1, splits):
                tiles.merge(total, total + chunk * n_sets * state_size, nv)
            for lane in range(16):
                i, g, real = lane_of(n, s, lane)
                sink = sink_value(src4, src4_ne[0] > 0, hk * group + g)
                memory.store_f32(work, scratch + at_sinks + 4 * lane, sink)
            tiles.finish(total, memory.address(work) + scratch + at_sinks, nv)
            store_set(dst, dst_nb, n, s, q0, hk, i3, total, work, scratch + at_rows, scratch + at_spare)

    return attention_merge_lanes
