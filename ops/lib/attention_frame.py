"""What the attention kernels of both layouts share around their tiles: the frame, items, scratch, readers, the driver.

A kernel is a short loop in Numba's language (`make_driver`) over emitted pieces: that compiles in a quarter of the time
of the same code typed by Numba. The pieces talk through a frame, int64 words in scratch memory: the addresses of the
tensors, of their ne and nb, and the state of the loop.

Work is shared by the chunk counter. An item is some queries of some KV heads; if there are few, an item is one chunk of
KV rows of these, its states stay in the work buffer and a second kernel merges them in order.

    work:  counter line | a frame for each thread | states of all items and chunks, if split | scratch of each thread
"""

import functools

from ggjit import types
from ggjit.jit import jitted, kernel, lazy_module
from ggjit.op import COUNTER_LINE
from ggjit.ops.lib import attention as tiles
from ggjit.ops.lib.attention import BYTES, CHUNK, LOG2E, MINUS_INF, TILE, padded
from ggjit.ops.lib.emitted import emitted

ir = lazy_module("llvmlite.ir")
emit = lazy_module("ggjit.ops.lib.emit")
memory = lazy_module("ggjit.ops.lib.memory")
atomics = lazy_module("ggjit.ops.lib.atomics")

AHEAD = 64  # rows between what is read and what is asked for
SPLIT_BELOW = 16  # items: fewer are split by chunks
TENSORS = ("dst", "q", "k", "v", "mask", "sinks")
ARGUMENTS = (*(t + part for t in TENSORS for part in ("", "_ne", "_nb")), "params", "work", "ith", "nth")
WORDS = (
    *ARGUMENTS, "n_items", "splits", "states_at", "scratch", "item", "hk", "i3", "k3", "q0", "n", "chunk0", "chunk1",
    "states", "first", "end", "is_open", "masked", "k_offs", "v_offs", "n_heads", "parts", "heads_of_part", "block0",
)  # fmt: skip
FRAME = (8 * len(WORDS) + 63) // 64 * 64
AT = {name: 8 * i for i, name in enumerate(WORDS)}


class Frame:
    """The words of a frame by name, while code is emitted."""

    def __init__(self, e, address):
        self.e, self.address = e, address

    def __getitem__(self, name):
        """Load a word."""
        return self.e.load(self.address, AT[name], emit.I64)

    def __setitem__(self, name, value):
        """Store a word."""
        self.e.store_value(self.address, AT[name], self.e.i64(value))

    def ne(self, tensor, d):
        """Size of a dimension."""
        return self.e.load(self[tensor + "_ne"], 8 * d, emit.I64)

    def nb(self, tensor, d):
        """Byte step of a dimension."""
        return self.e.load(self[tensor + "_nb"], 8 * d, emit.I64)

    def at(self, tensor, *steps):
        """Byte offset into a tensor: the sum of steps (dimension, index)."""
        offset = 0
        for d, i in steps:
            offset = self.e.add(offset, self.e.mul(i, self.nb(tensor, d)))
        return offset

    @property
    def has_mask(self):
        """Is there a mask? An absent source has sizes of 0."""
        return self.e.b.icmp_signed(">", self.ne("mask", 0), self.e.i64(0))


# ---- integers and control -------------------------------------------------------------------------------------------


def div(e, a, c):
    """Quotient of two that are not negative."""
    return e.b.udiv(e.i64(a), e.i64(c))


def rem(e, a, c):
    """Remainder of two that are not negative."""
    return e.b.urem(e.i64(a), e.i64(c))


def less(e, a, c):
    """a < c."""
    return e.b.icmp_signed("<", e.i64(a), e.i64(c))


def least(e, a, c):
    """The smaller."""
    return e.b.select(less(e, a, c), e.i64(a), e.i64(c))


def choose(e, condition, a, c):
    """A where the condition holds, else c."""
    return e.b.select(condition, e.i64(a), e.i64(c))


def when(e, condition, body):
    """Emit body() where the condition holds."""
    with e.b.if_then(condition):
        body()


def loop_from(e, frame, count, body):
    """body(i) for i = ith, ith + nth, ... below count."""
    nth = frame["nth"]
    turns = div(e, e.add(e.sub(count, frame["ith"]), e.sub(nth, 1)), nth)
    turns = choose(e, less(e, frame["ith"], count), turns, 0)
    e.loop(turns, [], lambda i: body(e.add(frame["ith"], e.mul(i, nth))) or [])


# ---- items, scratch -------------------------------------------------------------------------------------------------


def n_splits(n_items, n_kv):
    """Parts into which an item's KV rows are split."""
    n_chunks = (n_kv + CHUNK - 1) // CHUNK
    return n_chunks if n_items < SPLIT_BELOW and n_chunks > 1 else 1


def places(**sizes):
    """Offsets of scratch areas by name, each at a multiple of 64, and the sum."""
    at, end = {}, 0
    for name, size in sizes.items():
        at[name], end = end, end + (size + 63) // 64 * 64
    return at, end


def set_arguments(frame, arguments):
    """Fill the words of the kernel's arguments."""
    for name, value in zip(ARGUMENTS, arguments, strict=True):
        frame[name] = value


def count_chunks(e, frame):
    """Chunks of all KV rows."""
    return div(e, e.add(frame.ne("k", 1), CHUNK - 1), CHUNK)


def set_splits(e, frame, n_units):
    """Parts into which the KV rows are split: see n_splits."""
    n_chunks = count_chunks(e, frame)
    is_split = e.b.and_(less(e, n_units, SPLIT_BELOW), less(e, 1, n_chunks))
    frame["splits"] = choose(e, is_split, n_chunks, 1)


def set_places(e, frame, states_size, scratch_size):
    """Where states (states_size bytes for each split) and the thread's scratch are."""
    splits = frame["splits"]
    after = e.add(frame["work"], e.add(COUNTER_LINE, e.mul(frame["nth"], FRAME)))
    states = choose(e, less(e, 1, splits), e.mul(splits, states_size), 0)
    frame["states_at"] = after
    frame["scratch"] = e.add(e.add(after, states), e.mul(frame["ith"], scratch_size))


def set_chunks(e, frame, chunk):
    """Chunks of an item: the given one if the KV rows are split, else all."""
    is_split = less(e, 1, frame["splits"])
    frame["chunk0"] = choose(e, is_split, chunk, 0)
    frame["chunk1"] = choose(e, is_split, e.add(chunk, 1), count_chunks(e, frame))


def set_offsets(e, frame, hk):
    """Where K and V of a KV head begin."""
    k3 = div(e, frame["i3"], div(e, frame.ne("q", 3), frame.ne("k", 3)))
    frame["k_offs"] = frame.at("k", (2, hk), (3, k3))
    frame["v_offs"] = frame.at("v", (2, hk), (3, k3))


def set_range(e, frame, chunk):
    """First row of a chunk and the end."""
    first = e.mul(chunk, CHUNK)
    frame["first"], frame["end"] = first, least(e, e.add(first, CHUNK), frame.ne("k", 1))


# ---- values ---------------------------------------------------------------------------------------------------------


def store_scales(e, frame, softcap, at):
    """What q is multiplied by, and the cap, in base 2: two f32."""
    scale, cap = (e.load(frame["params"], 4 * i, emit.F32) for i in (0, 2))
    factor = e.b.fdiv(scale, cap) if softcap else scale
    e.store_value(at, 0, e.b.fmul(factor, ir.Constant(emit.F32, (2 if softcap else 1) * LOG2E)))
    e.store_value(at, 4, e.b.fmul(cap, ir.Constant(emit.F32, LOG2E)))


def alibi_exponent(e, frame, h):
    """log2 of the slope of a head."""
    heads = frame.ne("q", 2)
    zeros = e.call("llvm.ctlz.i64", emit.I64, heads, ir.Constant(emit.I1, 1))
    m = e.b.shl(e.i64(1), e.sub(63, zeros))
    steps = choose(e, less(e, h, m), e.add(e.mul(h, 2), 2), e.add(e.mul(e.sub(h, m), 2), 1))
    per_step = e.b.fdiv(e.load(frame["params"], 4, emit.F32), e.b.sitofp(e.mul(m, -2), emit.F32))
    return e.b.fmul(per_step, e.b.sitofp(steps, emit.F32))


def finish_slopes(e, at):
    """From 16 exponents to slopes in base 2."""
    e.store(at, e.fmul(tiles.exp2(e, e.load_f32(at)), e.f32_const(LOG2E)))


def store_sink(e, frame, h, at, lanes=1):
    """The sink of a head in base 2, -inf for none, in some lanes."""
    minus = ir.Constant(emit.F32, float("-inf"))

    def store(value):
        for j in range(lanes):
            e.store_value(at, 4 * j, value)

    has_sinks = less(e, 0, frame.ne("sinks", 0))
    scale = lambda x: e.b.fmul(x, ir.Constant(emit.F32, LOG2E))  # noqa: E731
    e.if_else(
        has_sinks,
        lambda: store(scale(e.load(e.add(frame["sinks"], e.mul(h, 4)), 0, emit.F32))),
        lambda: store(minus),
    )


def copy_last_mask(e, frame, row, rest, at):
    """16 f16 masks of the last tile, which has `rest` rows: its values (0 without a mask), then -inf."""
    for j in range(TILE):
        e.store_value(at, 2 * j, ir.Constant(emit.I16, MINUS_INF))

    def copy(j):
        to = e.add(at, e.mul(j, 2))
        e.if_else(
            frame.has_mask,
            lambda: e.store_value(to, 0, e.load(e.add(row, e.mul(j, 2)), 0, emit.I16)),
            lambda: e.store_value(to, 0, ir.Constant(emit.I16, 0)),
        )

    e.loop(rest, [], copy)


# ---- reading K and V ------------------------------------------------------------------------------------------------


@functools.cache
def make_read_blocks(kind, n):
    """Helper (src, offs, stride, n_rows, is_open, work, at): rows of a block type as tiles of f32, zeros after them.

    Tiles whose bit of is_open is not set stay as they are. For a plain type, which the emitted pieces read themselves,
    it does nothing.
    """
    if kind in BYTES:

        @jitted
        def read_nothing(src, offs, stride, n_rows, is_open, work, at):
            pass

        return read_nothing
    width, row_size = padded(n), types.row_size(types.by_name(kind), n)
    dequantize_row = types.by_name(kind).quant.dequantize_row

    @emitted("row")
    def prefetch(e, row):
        for offset in range(0, row_size, 64):
            e.prefetch(row, offset)

    @jitted
    def read_blocks(src, offs, stride, n_rows, is_open, work, at):
        for r in range((n_rows + TILE - 1) // TILE * TILE):
            if is_open >> (r // TILE) & 1:
                used = n if r < n_rows else 0
                if used > 0:
                    prefetch(memory.address(src) + offs + (r + AHEAD) * stride)
                    dequantize_row(src, offs + r * stride, work, at + 4 * width * r, n)
                for d in range(used, width):
                    memory.store_i32(work, at + 4 * (width * r + d), 0)

    return read_blocks


def copy_rows(e, src, stride, n_rows, nbytes, dst):
    """The first n_rows of 16 rows of nbytes (even), then zeros: for a last tile that is not full."""

    def one(r):
        row, out = e.add(src, e.mul(r, stride)), e.add(dst, e.mul(r, nbytes))
        e.loop(nbytes, [], lambda i: e.store_value(e.add(out, i), 0, e.load(e.add(row, i), 0, emit.I16)), step=2)

    e.loop(n_rows, [], one)
    zero = ir.Constant(emit.I16, 0)
    e.loop(16 * nbytes, [], lambda i: e.store_value(e.add(dst, i), 0, zero), start=e.mul(n_rows, nbytes), step=2)


# ---- kernels --------------------------------------------------------------------------------------------------------


def make_driver(pieces, k_kind, dk, v_kind, dv, at_k, at_v, run):
    """The kernel over emitted pieces: begin, set_item, begin_chunk, check_rows, run_rows, end_chunk, end_item.

    The rows of a chunk are given to check_rows and run_rows in runs: up to `run` rows of full tiles, or the rows of a
    last tile that is not full. The bits of the frame's is_open say of which tiles the rows are read.
    """
    begin, set_item, begin_chunk, check_rows, run_rows, end_chunk, end_item = pieces
    read_k, read_v = make_read_blocks(k_kind, dk), make_read_blocks(v_kind, dv)
    at_items, at_chunk0, at_chunk1, at_first, at_end = (AT[w] for w in ("n_items", "chunk0", "chunk1", "first", "end"))
    at_open, at_k_offs, at_v_offs, at_scratch = (AT[w] for w in ("is_open", "k_offs", "v_offs", "scratch"))
    at_heads = AT["n_heads"]

    @kernel(counter=True, n_optional=2)
    def attention(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        at = COUNTER_LINE + ith * FRAME
        start = memory.address(work)
        frame = start + at
        begin(
            frame, memory.address(dst), memory.address(dst_ne), memory.address(dst_nb),
            memory.address(src0), memory.address(src0_ne), memory.address(src0_nb),
            memory.address(src1), memory.address(src1_ne), memory.address(src1_nb),
            memory.address(src2), memory.address(src2_ne), memory.address(src2_nb),
            memory.address(src3), memory.address(src3_ne), memory.address(src3_nb),
            memory.address(src4), memory.address(src4_ne), memory.address(src4_nb),
            memory.address(op_params), start, ith, nth,
        )  # fmt: skip
        scratch = memory.load_i64(work, at + at_scratch) - start
        item = atomics.fetch_add(work, 0, 1)
        while item < memory.load_i64(work, at + at_items):
            set_item(frame, item)
            n_heads = memory.load_i64(work, at + at_heads)
            for chunk in range(memory.load_i64(work, at + at_chunk0), memory.load_i64(work, at + at_chunk1)):
                begin_chunk(frame, chunk)
                end = memory.load_i64(work, at + at_end)
                kv = memory.load_i64(work, at + at_first)
                while kv < end:
                    n_rows = min(end - kv, run)
                    if n_rows > TILE:
                        n_rows -= n_rows % TILE
                    for head in range(n_heads):
                        check_rows(frame, kv, n_rows, head)
                        is_open = memory.load_i64(work, at + at_open)
                        if is_open != 0:
                            read_k(
                                src1, memory.load_i64(work, at + at_k_offs) + kv * src1_nb[1], src1_nb[1], n_rows,
                                is_open, work, scratch + at_k,
                            )  # fmt: skip
                            read_v(
                                src2, memory.load_i64(work, at + at_v_offs) + kv * src2_nb[1], src2_nb[1], n_rows,
                                is_open, work, scratch + at_v,
                            )  # fmt: skip
                            run_rows(frame, kv, n_rows, head)
                    kv += n_rows
                end_chunk(frame)
            end_item(frame)
            item = atomics.fetch_add(work, 0, 1)

    return attention


def make_merge(merge):
    """The second kernel, where items are split: the emitted `merge` does all of it."""

    @kernel(n_optional=2)
    def attention_merge(
        dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb,
        src3, src3_ne, src3_nb, src4, src4_ne, src4_nb, op_params, work, ith, nth,
    ):  # fmt: skip
        start = memory.address(work)
        merge(
            start + COUNTER_LINE + ith * FRAME, memory.address(dst), memory.address(dst_ne), memory.address(dst_nb),
            memory.address(src0), memory.address(src0_ne), memory.address(src0_nb),
            memory.address(src1), memory.address(src1_ne), memory.address(src1_nb),
            memory.address(src2), memory.address(src2_ne), memory.address(src2_nb),
            memory.address(src3), memory.address(src3_ne), memory.address(src3_nb),
            memory.address(src4), memory.address(src4_ne), memory.address(src4_nb),
            memory.address(op_params), start, ith, nth,
        )  # fmt: skip

    return attention_merge


def emitted_with_arguments(function):
    """An emit function (e, frame, then ARGUMENTS as one tuple) callable from kernels."""
    scope, name, names = {"function": function}, function.__name__, ", ".join(ARGUMENTS)
    exec(f"def {name}(e, frame, {names}):\n    function(e, frame, ({names}))\n", scope)
    return emitted("frame " + " ".join(ARGUMENTS))(scope[name])
