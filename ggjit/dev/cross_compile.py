"""`python -m ggjit.dev cross-compile`: the machine code of kernels for CPUs that are not at hand.

Kernels are compiled for the target and never run. Of each the hottest loop is told (by structure: the innermost loop
with most dot products, else most multiply-adds, else most vector arithmetic): its instructions, those that multiply and
add, what goes to the stack and back in it, and the functions that the kernel calls.

    python -m ggjit.dev cross-compile --target avxvnni --type Q4_0 Q6_K
    python -m ggjit.dev cross-compile --target aarch64-i8mm --op flash_attn_ext rms_norm --asm
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from ggjit import cpu
from ggjit.jit import Kernel

TILES: tuple[int | None, ...] = (1, 4, None)  # columns; None: the kernel for many
OPS = (
    "flash_attn_ext", "soft_max", "rms_norm", "norm", "rope", "add", "mul", "scale", "unary", "glu", "cpy",
    "get_rows", "set_rows", "mul_mat_id",
)  # fmt: skip
_DOT = re.compile(r"\b(vpdpbusd|vdpbf16ps|vpmaddubsw|usdot|sdot|usmmla|bfdot)\b")
_FMA = re.compile(r"\b(vfmadd\w+ps|fmla)\b")
_STACK = re.compile(r"\(%r[sb]p|\[sp|\[x29")
_OUTSIDE = re.compile(
    r"(?:movabsq\s+\$|:abs_g3:|callq?\s+|bl\s+)(?!_ZN|ggjit_|absent_source)([A-Za-z_]\w*)(?:@PLT)?\s*(?:,|$)"
)
_OWN = re.compile(r"^([A-Za-z_]\w*):", re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """What a kernel's machine code shows.

    Attributes:
        kernel: what it is for.
        dots: how many of each dot instruction its hottest loop has.
        fmas: multiply-adds of f32 in that loop.
        instructions: of that loop.
        stack: instructions of that loop that name the stack.
        width: bits of the widest register in it.
        calls: functions that the kernel calls.
        error: why it does not compile; empty if it does.
    """

    kernel: str
    dots: dict[str, int]
    fmas: int = 0
    instructions: int = 0
    stack: int = 0
    width: int = 0
    calls: tuple[str, ...] = ()
    error: str = ""


def product_kernels(names: Iterable[str], tiles: Iterable[int | None] = TILES) -> dict[str, Kernel]:
    """Kernels of products with packed weights, by what they are for: packing, few and many columns."""
    from ggjit.ops.lib import panel_kernels

    found: dict[str, Kernel] = {}
    for name in names:
        found[f"mul_mat {name} packing"] = panel_kernels.pack_kernel(name)
        for n in tiles:
            if n is None:
                found[f"mul_mat {name} many columns"] = panel_kernels.many_kernel(name, True)
            else:
                found[f"mul_mat {name} columns={n}"] = panel_kernels.few_kernel(name, n, True)
    return found


def activation_kernels() -> dict[str, Kernel]:
    """Kernels that bring activations into the forms that products read."""
    from ggjit.ops.lib import panel_activations as made

    found = {f"activations {name} int8": made.quantize_kernel(name) for name in ("F32", "F16", "BF16", "Q8_0", "Q8_K")}
    found["activations F32 to BF16"] = made.convert_kernel("F32", "BF16")
    found["activations F32 rounded to F16"] = made.round_f16_kernel("F32")
    return found | {f"activations tiles columns={n}": made.tile_kernel(n) for n in (4, 6)}


def op_kernels(names: Iterable[str]) -> dict[str, Kernel]:
    """Kernels of all cases of ops, each once."""
    import zlib

    from ggjit.context import Context
    from ggjit.dev.cases import ARENA, CaseInputs
    from ggjit.dev.warm import kernels_of
    from ggjit.op import by_name

    found: dict[Kernel, str] = {}
    for name in names:
        op = by_name(name)
        for case, build in op.cases.items():
            with Context(ARENA):
                made = kernels_of(build(CaseInputs(zlib.crc32(f"{op.name}/{case}".encode()))), (1,))
            for kernel in made:
                found.setdefault(kernel, f"{name} ({case}) {kernel.name}")
    return {text: kernel for kernel, text in found.items()}


def report(name: str, kernel: Kernel, show: Callable[[str], None] | None = None) -> Report:
    """Compile a kernel and look at its machine code; `show` gets the text of the hottest loop."""
    from ggjit.show.machine_code import loops_of

    try:
        text = kernel.asm()
    except Exception as error:  # the sweep goes on: what does not compile is what it looks for
        return Report(name, {}, error=f"{type(error).__name__}: {error}".splitlines()[0])
    own = set(_OWN.findall(text))
    calls = tuple(sorted({m[1] for line in text.splitlines() if (m := _OUTSIDE.search(line))} - own))
    loops = loops_of(text)
    if not loops:
        return Report(name, {}, calls=calls)
    hot = max(loops, key=lambda x: (*(_count(pattern, x.lines).total() for pattern in (_DOT, _FMA)), x.n_vector))
    if show is not None:
        show("\n".join(hot.lines))
    return Report(
        name, dict(_count(_DOT, hot.lines)), _count(_FMA, hot.lines).total(),
        sum(not line.strip().endswith(":") for line in hot.lines), sum(bool(_STACK.search(s)) for s in hot.lines),
        hot.width, calls,
    )  # fmt: skip


def _count(pattern: re.Pattern[str], lines: Iterable[str]) -> Counter[str]:
    return Counter(m[1] for line in lines if (m := pattern.search(line)))


def table(reports: Sequence[Report]) -> str:
    """The reports as a table of text."""
    lines = [f"{'kernel':50} {'dot products':24} {'f32 fma':>7} {'loop':>6} {'stack':>6} {'bits':>5}  calls"]
    for r in reports:
        dots = ", ".join(f"{n} {name}" for name, n in r.dots.items()) or "-"
        rest = f"{r.fmas:7} {r.instructions:6} {r.stack:6} {r.width:5}  {', '.join(r.calls) or '-'}"
        lines.append(f"{r.kernel[:50]:50} {r.error or f'{dots:24} {rest}'}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--target", choices=[*cpu.TARGETS], default="aarch64-i8mm", help="CPU to compile for")
    parser.add_argument("--type", nargs="*", metavar="TYPE", help="products: types of weights (default: all)")
    parser.add_argument(
        "--op", nargs="*", metavar="OP", help=f"ops whose cases are compiled (default: {' '.join(OPS)})"
    )
    parser.add_argument("--every-op", action="store_true", help="compile the cases of all ops")
    parser.add_argument("--asm", action="store_true", help="print the hottest loop of each kernel")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compile, print the table; 1 if a kernel does not compile."""
    cpu.compile_for(args.target)
    from ggjit import types
    from ggjit.op import all_ops, by_name
    from ggjit.ops.lib import float_panel

    every = [*float_panel.UNITS, *(t.name for t in types.all_types() if t.has_panel)]
    only_types, only_ops = args.type is not None and args.op is None, args.op is not None and args.type is None
    try:
        for name in args.op or ():
            by_name(name)
        for name in args.type or ():
            types.by_name(name)
    except ValueError as error:
        print(f"cross-compile: {error}", file=sys.stderr)
        return 1
    names = [types.by_name(name).name for name in ([] if only_ops else args.type or every)]
    of_ops = [] if only_types else [op.name for op in all_ops()] if args.every_op else args.op or OPS
    kernels = product_kernels(names) | ({} if only_types or only_ops else activation_kernels()) | op_kernels(of_ops)
    reports = []
    for name, kernel in kernels.items():
        show = (lambda text, name=name: print(f"\n{name}\n{text}")) if args.asm else None
        reports.append(report(name, kernel, show))
    print(json.dumps([asdict(r) for r in reports], indent=1) if args.json else table(reports))
    return int(any(r.error for r in reports))
