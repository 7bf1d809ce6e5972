"""Weights of 2 bits in panels: 8 operands hold 4 runs of 32, run f in bits 2 f and 2 f + 1 of all (factor 4^f)."""

from __future__ import annotations

from ggjit.jit import jitted
from ggjit.ops.quants.quant import Part


@jitted
def spread(q):
    """Four 2-bit values of a byte to the low bits of the four bytes of a word."""
    return (q | q << 6 | q << 12 | q << 18) & 0x03030303


def field_runs(e, w, offset, scales, offset_shift=None, minimums=None):
    """The 4 runs of 8 operands.

    Args:
        e: the Emit.
        w: address of the panel block.
        offset: where the operands are.
        scales: f32 of each run.
        offset_shift: as in `Part`, of the values.
        minimums: of each run, or None.
    """
    x, out = [e.load_bytes(w, offset + 64 * g) for g in range(8)], []
    for f, scale in enumerate(scales):
        scale = e.fmul(scale, e.f32_const(4.0**-f)) if f else scale
        shift = None if offset_shift is None else offset_shift + 2 * f
        out.append([Part([e.and_(v, 3 << 2 * f) for v in x], scale, shift, minimums and minimums[f], 2 * f)])
    return out
