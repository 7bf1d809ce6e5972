"""Quantized types, one file each; importing this package registers them all."""

from ggjit.ops.quants import q4_0, q4_1, q4_k, q5_0, q6_k, q8_0
from ggjit.ops.quants.quant import Panel, Part, Quant, register

__all__ = ["Panel", "Part", "Quant", "q4_0", "q4_1", "q4_k", "q5_0", "q6_k", "q8_0", "register"]
