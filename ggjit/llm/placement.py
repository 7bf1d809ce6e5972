"""Which device holds each weight, and each layer's cache.

Layers count from the model's end, its output being one more behind the last block: `n_gpu_layers` of them go to the
devices, in even runs if there are several. What reads tokens stays on the CPU. Overrides then place single weights by
their names.

    8 blocks, n_gpu_layers 3      token_embd  blk.0 ... blk.5 | blk.6  blk.7  output_norm output
                                  CPU                         | device

Source: llama.cpp's load_tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ggjit.backend import Device, devices


class Placement:
    """The devices of a model's parts.

    Args:
        n_layer: blocks of the model.
        others: devices beside the CPU.
        n_gpu_layers: blocks on them, counted from the output, which counts as one; None: all.
        overrides: regular expressions that are searched in weights' names, each with the device that weights take; the
            first one that is found decides.

    Attributes:
        cpu: the CPU.
        others: as given.
        layers: device of each block: of its weights by default, and of its cache.
        input, output: devices of what comes before the blocks and behind them.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the number of layers is negative, a regular expression is none, or a device is not there.
    """

    def __init__(
        self,
        n_layer: int,
        others: Sequence[Device] = (),
        n_gpu_layers: int | None = None,
        overrides: Mapping[str, Device | str] | None = None,
    ) -> None:
        if not isinstance(others, Sequence) or any(not hasattr(d, "name") for d in others):
            raise TypeError(f"Placement: devices must be a list of devices such as ProcessDevice(), got {others!r}")
        names = [d.name for d in others] + [devices()[-1].name]
        if len(set(names)) < len(names):
            raise ValueError(f"Placement: devices must have different names, got {names}")
        _check_kinds(n_gpu_layers, overrides)
        if n_gpu_layers is not None and n_gpu_layers < 0:
            raise ValueError(f"Placement: n_gpu_layers must not be negative, got {n_gpu_layers}")
        self.cpu, self.others = devices()[-1], tuple(others)
        n = min(n_layer + 1 if n_gpu_layers is None else n_gpu_layers, n_layer + 1) if others else 0
        first = n_layer + 1 - n
        placed = [self.cpu] * first + [self.others[i * len(self.others) // n] for i in range(n)]
        self.input: Device = self.cpu
        self.layers, self.output = placed[:-1], placed[-1]
        self._overrides = [(self._pattern(p), self._device(d)) for p, d in (overrides or {}).items()]

    @property
    def is_cpu_only(self) -> bool:
        """Is everything on the CPU?"""
        return all(d is self.cpu for d in (*self.layers, self.output, *(d for _, d in self._overrides)))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, the CPU last."""
        return (*self.others, self.cpu)

    def weight(self, name: str) -> Device:
        """The device of a weight."""
        for pattern, device in self._overrides:
            if pattern.search(name):
                return device
        kind, _, rest = name.partition(".")
        il = rest.partition(".")[0]
        if kind == "blk" and il.isdecimal() and int(il) < len(self.layers):
            return self.layers[int(il)]
        return self.output if kind in ("output", "output_norm") else self.input

    @staticmethod
    def _pattern(text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise ValueError(f"Placement: an override must be a regular expression, got {text!r} ({error})") from None

    def _device(self, wanted: Device | str) -> Device:
        for d in self.devices:
            if d is wanted or (isinstance(wanted, str) and d.name.lower() == wanted.lower()):
                return d
        if not isinstance(wanted, str) and not hasattr(wanted, "name"):
            raise TypeError(f"Placement: an override must name a device or be one, got {wanted!r}")
        name = wanted if isinstance(wanted, str) else wanted.name
        raise ValueError(f"Placement: a device must be one of {[d.name for d in self.devices]}, got {name!r}")


def _check_kinds(n_gpu_layers: Any, overrides: Any) -> None:
    if n_gpu_layers is not None and (isinstance(n_gpu_layers, bool) or not isinstance(n_gpu_layers, Integral)):
        raise TypeError(f"Placement: n_gpu_layers must be a whole number or None, got {n_gpu_layers!r}")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(f"Placement: overrides must be a dict of regular expressions, got {overrides!r}")
    for pattern in overrides or ():
        if not isinstance(pattern, str):
            raise TypeError(f"Placement: an override must be a regular expression as a str, got {pattern!r}")


def parse_overrides(text: str) -> dict[str, str]:
    """REGEX=DEVICE, several divided by commas.

    Raises:
        ValueError: a part is none.
    """
    found = {}
    for part in text.split(","):
        pattern, equals, device = part.rpartition("=")
        if not equals or not pattern or not device:
            raise ValueError(f"override: must be REGEX=DEVICE, several divided by commas, got {part!r}")
        found[pattern] = device
    return found
