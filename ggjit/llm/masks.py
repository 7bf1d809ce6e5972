"""The mask of attention, written by compiled code: which cells of the cache the tokens of a ubatch see.

A dozen NumPy calls a token would take longer than a layer: while weights stream through the caches, each of them finds
its own code and data gone.
"""

from __future__ import annotations

from ggjit.jit import jitted, lazy_module
from ggjit.ops.lib.emitted import emitted

emit = lazy_module("ggjit.ops.lib.emit")

MASKED = -0x400  # -inf as f16, as a signed number
LANES = 16  # cells of a turn; a graph sees a multiple of them


@emitted("mask n_kv cell_pos cell_seq pos seq window")  # type: ignore[no-untyped-call]
def fill_row(e, mask, n_kv, cell_pos, cell_seq, pos, seq, window):  # type: ignore[no-untyped-def]
    """The row of one token; see `fill_mask`."""
    b, i32, i16 = e.b, emit.vector(emit.I32, e.lanes), emit.vector(emit.I16, e.lanes)
    at, window = e.load(pos, 0, emit.I32), b.trunc(window, emit.I32)
    unlimited = b.icmp_signed("==", window, emit.I32(0))
    first = b.select(unlimited, emit.I32(-1), b.add(b.sub(at, window), emit.I32(1)))
    last, first, own = e.splat(at), e.splat(first), e.splat(e.load(seq, 0, emit.I32))

    def turn(i):  # type: ignore[no-untyped-def]
        for p in range(e.parts):
            offset = 4 * p * e.lanes
            cell = e.load(e.add(cell_pos, e.mul(i, 4)), offset, i32)
            hidden = b.icmp_signed("!=", e.load(e.add(cell_seq, e.mul(i, 4)), offset, i32), own)
            hidden = b.or_(hidden, b.or_(b.icmp_signed(">", cell, last), b.icmp_signed("<", cell, first)))
            value = b.and_(b.sext(hidden, i16), emit.ir.Constant(i16, [MASKED] * e.lanes))
            e.store_value(e.add(mask, e.mul(i, 2)), offset // 2, value)
        return []

    e.loop(n_kv, [], turn, step=LANES)


@jitted
def fill_mask(mask, n_kv, n_tokens, cell_pos, cell_seq, pos, seq, window):  # type: ignore[no-untyped-def]
    """Write f16 [n_kv, n_tokens] at address `mask`: 0 where a token sees a cell, else -inf.

    The other addresses are those of int32: positions and sequences of the cells (-1 where one is free) and of the
    tokens. A window, if it is not 0, is how many positions up to its own a token sees.
    """
    for t in range(n_tokens):
        fill_row(mask + 2 * n_kv * t, n_kv, cell_pos, cell_seq, pos + 4 * t, seq + 4 * t, window)
