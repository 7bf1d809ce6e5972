"""Quantized types, one file each, imported when `Type.quant` is first asked for: most models need few of them."""

from ggjit.ops.quants.quant import Panel, Part, Quant, register

__all__ = ["Panel", "Part", "Quant", "register"]
