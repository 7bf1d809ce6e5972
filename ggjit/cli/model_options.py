"""Arguments that say where a model's weights and layers lie, shared by commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ggjit.cli import at_least, warn, warn_of_unfound

if TYPE_CHECKING:
    from ggjit.backend import Device
    from ggjit.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_argument_group("where the model lies")
    group.add_argument(
        "-ngl", "--n-gpu-layers", type=at_least(0), metavar="N",
        help="layers on devices, counted from the output, which counts as one (all)",
    )  # fmt: skip
    group.add_argument(
        "-ot", "--override-tensor", metavar="REGEX=DEVICE,...",
        help="devices of weights whose names match; the first match decides",
    )  # fmt: skip
    group.add_argument(
        "--device", action="append", metavar="NAME",
        help='a device beside the CPU (all that are there); "process" starts a child process that stands for one, '
        "named process0, process1, ...",
    )  # fmt: skip
    group.add_argument("--no-mmap", dest="mmap", action="store_false", help="read all weights instead of mapping them")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as keywords of `LLM` and `estimate`."""
    from ggjit.llm.placement import parse_overrides

    overrides = None if args.override_tensor is None else parse_overrides(args.override_tensor)
    devices = [_device(name, i) for i, name in enumerate(args.device)] if args.device else _others()
    if args.n_gpu_layers and not devices:
        warn(f"--n-gpu-layers: there must be a device for layers to lie on, got {args.n_gpu_layers} and none: all "
             "stay on the CPU")  # fmt: skip
    return {
        "devices": devices,
        "n_gpu_layers": args.n_gpu_layers,
        "overrides": overrides,
        "mmap": args.mmap,
    }


def add_context(parser: argparse._ActionsContainer) -> None:
    """Declare the length of the context."""
    parser.add_argument(
        "-c", "--ctx", type=at_least(1, 0, "the model's"), metavar="CTX",
        help="tokens of context (the model's, at most 4096); 0: the model's",
    )  # fmt: skip


def context_length(args: argparse.Namespace, path: str | os.PathLike[str]) -> int | None:
    """The length of the context that is wanted, None for the default."""
    if args.ctx != 0:
        n_ctx: int | None = args.ctx
        return n_ctx
    from ggjit.gguf import GgufFile
    from ggjit.llm.hparams import Hparams

    with GgufFile(path) as file:
        return Hparams(file).n_ctx_train


def warn_of_context(llm: LLM) -> None:
    """Warn of a context longer than what the model was trained for."""
    trained = llm.model.hparams.n_ctx_train
    if llm.n_ctx > trained:
        warn(
            f"the model was trained for contexts of {trained} tokens, got {llm.n_ctx}: what comes beyond may make no "
            "sense"
        )


def warn_of_overrides(args: argparse.Namespace, names: Collection[str]) -> None:
    """Warn of overrides that fit no weight."""
    from ggjit.llm.placement import parse_overrides

    warn_of_unfound("--override-tensor", parse_overrides(args.override_tensor) if args.override_tensor else (), names)


def _others() -> list[Device]:
    from ggjit.backend import devices

    return list(devices()[:-1])


def _device(name: str, number: int) -> Device:
    found: dict[str, Callable[[], Device]] = {"process": lambda: _process(f"process{number}")}
    for d in _others():
        found[d.name] = lambda d=d: d  # type: ignore[misc]
    if name not in found:
        raise ValueError(f"--device: must be one of {sorted(found)}, got {name!r}")
    return found[name]()


def _process(name: str) -> Device:
    from ggjit.backends.process import ProcessDevice

    return ProcessDevice(name)
