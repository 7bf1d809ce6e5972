"""What TQ1_0 and TQ2_0 share: d = max |x|, weight = d * (q - 1) with q of 0, 1, 2, and the panel.

Panel block (1056 bytes): 16 d f16 | 2 halves of 8 operands (see `ggjit.ops.quants.two_bits`): run 4 h + f in field f of
half h. TQ1_0 has it too, though its file has 1.69 bits a weight: taking base 3 apart costs more than reading 2 bits.
"""

from __future__ import annotations

import numpy as np

from ggjit.jit import jitted, lazy_module
from ggjit.ops.quants.quant import Bytes, Floats, inverse, round_away, to_blocks
from ggjit.ops.quants.two_bits import field_runs

memory = lazy_module("ggjit.ops.lib.memory")
NBYTES = 1056


def ternary(x: Floats) -> tuple[Floats, Bytes]:
    """d and q of each block of 256."""
    x = to_blocks(x, 256)
    d = np.abs(x).max(2)
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.nan_to_num(round_away(x * inverse(d)[..., None]))
    return d, (np.clip(q, -1, 1) + 1).astype(np.uint8)


@jitted
def scale_and_inverse(src, x, n):
    """max |x| of n f32, and its inverse, 0 for 0."""
    top = np.float32(0)
    for j in range(n):
        v = abs(memory.load_f32(src, x + 4 * j))
        top = v if v > top else top
    return top, np.float32(1) / top if top > 0 else np.float32(0)


@jitted
def ternary_code(v):
    """0, 1 or 2 for a value that rounds to -1, 0 or 1, ties away from zero."""
    return 2 if v >= np.float32(0.5) else (0 if v <= np.float32(-0.5) else 1)


def runs(e, w, step):
    """The 4 runs of half `step` of a panel block."""
    d, w = e.load_f16(w), e.add(w, e.add(e.mul(step, 512), 32))
    return field_runs(e, w, 0, [d] * 4, 0)
