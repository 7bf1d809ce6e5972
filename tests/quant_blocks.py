"""Blocks of quantized types for tests: by the type's quantizer, or random where that takes long."""

import numpy as np

from ggjit import types

CODEBOOK = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS")


def random_blocks(name, rows, k):
    """Bytes [rows, row_size] with every code and scale, and d of 0.01 to 0.03."""
    t, rng = types.by_name(name), np.random.default_rng(5)
    b = rng.integers(0, 256, (rows, k // t.blck_size, t.type_size), dtype=np.uint8)
    d = (0.01 + 0.02 * rng.random(b.shape[:2])).astype(np.float16)
    if name == "IQ1_M":  # d lies in the top 4 bits of four words
        words = b[..., -8:].copy().view(np.uint16)
        words = words & 0xFFF | (d.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        b[..., -8:] = words.view(np.uint8)
    else:
        b[..., :2] = d[..., None].view(np.uint8)
    return b.reshape(rows, -1)


def blocks(name, x):
    """Bytes of rows of f32; for a type with a codebook as many random blocks."""
    if name in CODEBOOK:
        return random_blocks(name, *x.shape)
    return types.by_name(name).quant.quantize(x)
