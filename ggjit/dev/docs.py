"""`python -m ggjit.dev docs`: the pages in `ggjit/docs` that are made and not written.

    ops.md     what ops take, found by trying (`ggjit.dev.probe`), so the page cannot say what is not so
    types.md   the registered types
    memory.md  what the planner makes of model graphs (`ggjit.dev.memory`)
    seeds.md   what ggml is described to do and which tests hold it (`ggjit.dev.seeds`)

`python -m ggjit.dev check docs` makes them again and compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ggjit import types
from ggjit.dev import memory, seeds
from ggjit.dev.builders import builders, builders_of
from ggjit.dev.probe import Found, Probe, Types
from ggjit.op import NONE, Op, all_ops
from ggjit.ops.glu import FUNCTIONS as GATED
from ggjit.ops.lib.convert import is_encodable
from ggjit.ops.unary import FUNCTIONS as UNARY
from ggjit.types import Type

FOLDER = Path(__file__).resolve().parents[1] / "docs"
Box = tuple[frozenset[Type | str | None], ...]  # any combination of these

OPS = """# Ops

Made by `python -m ggjit.dev docs` from the registered ops: what a builder accepts and a kernel takes, found by trying
each case with sources of every type and layout. Do not edit.

- **builders**: the functions of `ggjit.ops` (and of `ggjit`) that make a node of the op. Several nodes are made by
  {composed}.
- **types**: of the sources in the order of `Tensor.src`, then of the result; a line is any combination of what it
  lists. `-` is a source that is left out. {groups}
- **layout** of each source: `any` strides; `rows` are contiguous but may lie anywhere; `contiguous`.
- **backend**: where it is computed. Views do no work.
- **in place**: the planner may put the result where a source lies.
- **gradient**: the sources that have one.

Ops without a number of ggml's are made by backward rules.

"""
TYPES = """# Types

Made by `python -m ggjit.dev docs` from the registered types. Do not edit.

- **panel**: bits per weight where matrix products read it from repacked rows.
- **read**: there is code for it as a source; which ops take it: `ops.md`.
- **quantize**: files and tensors are made in it (`Tensor.set`, `from_numpy`); **imatrix**: an importance matrix changes
  its bytes. ggml refuses to quantize to what is marked `ggml needs it` without one.
- **written**: while a graph runs, by `cpy`, `set_rows` and their like.

"""
NOTES = """
Where the sources of these numbers disagree:

- IQ3_S has 110 bytes for 256 values, 3.4375 bits; lists that say 3.3125 are wrong.
- ggml itself refuses IQ2_XXS, IQ2_XS and IQ1_S without an importance matrix. llama.cpp's program for quantizing asks
  for one with IQ3_XXS, IQ2_S and IQ1_M, and with Q2_K in its mix Q2_K_S; not for the token embedding and the output.
- Q8_1 and Q8_K are forms of activations in ggml's products: no file holds them, and they are no weights here.
"""
NEEDED_BY_GGML = ("IQ2_XXS", "IQ2_XS", "IQ1_S")


# --- ops --------------------------------------------------------------------------------------------------------------


def boxes(combinations: Iterable[Types]) -> list[Box]:
    """Combinations of types as few boxes.

    A type that follows a source is named so ("as src0") where that makes fewer boxes.
    """
    found: list[Box] = []
    by_length: dict[int, list[Types]] = {}
    for c in combinations:
        by_length.setdefault(len(c), []).append(c)
    for n in sorted(by_length):
        candidates: list[list[Box]] = [
            _merged([_following(c, result, alike) for c in by_length[n]])
            for alike in (False, True)
            for result in (None, *range(n - 1))
        ]
        fewest: list[Box] = min(candidates, key=len)
        found += fewest
    return found


def _following(kinds: Types, result: int | None, alike: bool) -> Box:
    """One combination; the result named after source `result`, sources after the first one if `alike`."""
    box: list[Type | str | None] = list(kinds)
    if result is not None and kinds[-1] is kinds[result]:
        box[-1] = f"as src{result}"
    for i in range(1, len(kinds) - 1):
        if alike and kinds[i] is kinds[0]:
            box[i] = "as src0"
    return tuple(frozenset([t]) for t in box)


def _merged(every: Sequence[Box]) -> list[Box]:
    """Join boxes that differ in one place, place by place, until none do."""
    found = list(dict.fromkeys(every))
    while True:
        n = len(found)
        for place in range(max(map(len, found), default=0)):
            groups: dict[Box, frozenset[Type | str | None]] = {}
            for box in found:
                if place < len(box):
                    rest = (*box[:place], frozenset(), *box[place + 1 :])
                    groups[rest] = groups.get(rest, frozenset()) | box[place]
                else:
                    groups[box] = frozenset()
            found = [(*rest[:place], kinds, *rest[place + 1 :]) if kinds else rest for rest, kinds in groups.items()]
        if len(found) == n:
            return found


def groups() -> dict[str, frozenset[Type]]:
    """Names of sets of types, larger ones first."""
    coded = frozenset(t for t in types.all_types() if t.quant is not None)
    plain = frozenset(t for t in types.all_types() if not t.is_quantized)
    return {
        "all": frozenset(types.all_types()),
        "plain": plain,
        "quantized": coded,
        "weights": frozenset(t for t in coded if t.has_panel),
        "written": frozenset(t for t in coded if is_encodable(t)),  # type: ignore[no-untyped-call]
    }


def names(kinds: frozenset[Type | str | None]) -> str:
    """A set of types in words."""
    rest, words = set(kinds), []
    for name, members in groups().items():
        if members <= rest:
            words.append(name)
            rest -= members
    order = {t: i for i, t in enumerate(types.all_types())}
    listed = sorted((t for t in rest if isinstance(t, Type)), key=order.__getitem__)
    words = [t.name for t in listed if not t.is_quantized] + words + [t.name for t in listed if t.is_quantized]
    return " ".join(words + [t for t in rest if isinstance(t, str)] + ["-"] * (None in rest))


def _layout(found: Found) -> str:
    def word(layouts: set[str]) -> str:
        return "any" if "transposed" in layouts else "rows" if layouts - {"contiguous"} else "contiguous"

    words = [word(found.layouts[i]) for i in sorted(found.layouts)]
    return " ".join(words[:1] if len(set(words)) == 1 else words)


def _row(op: Op, function: str, found: Found, takes_all: bool) -> str:
    lines = ["all, up to the function"] if takes_all else []
    for box in [] if takes_all else sorted(boxes(found.types), key=lambda b: [names(p) for p in b]):
        sources = ", ".join(names(p) for p in box[:-1])
        lines.append(f"{sources} → {names(box[-1])}" if sources else names(box[-1]))
    home = next(iter(op.cases.values())).__module__.removeprefix("ggjit.").replace(".", "/")
    gradient = " ".join(f"src{i}" for i in sorted(found.gradients)) or "-"
    number = str(op.id) if op.id < types.FIRST_USER_ID else ""
    made_by = " ".join(builders_of(op, function)) or "-"
    cells = (
        f"{op.name}: {function}" if function else op.name, number, f"`{home}.py`", made_by, "<br>".join(lines),
        _layout(found), "view" if op.view else "CPU", "yes" if op.inplace else "-", gradient,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def ops_page() -> str:
    """The table of ops."""
    functions = {"unary": UNARY, "unary_back": UNARY, "glu": GATED}
    rows = []
    for op in [op for op in all_ops() if op.cases and op is not NONE]:
        probe = Probe(op, functions.get(op.name, ()))
        rows += [_row(op, name, probe.found[name], probe.takes_all) for name in sorted(probe.found)]
    known = groups()
    unwritten = names(frozenset(known["quantized"] - known["written"]))
    text = (
        f"`plain` are {' '.join(t.name for t in types.all_types() if not t.is_quantized)};\n"
        f"  `quantized` all block types; `weights` those but Q8_1 and Q8_K; `written` all but {unwritten}."
    )
    head = "| op | id | file | builders | types | layout | backend | in place | gradient |\n" + "|---" * 9 + "|\n"
    composed = " ".join(sorted(name for name, made in builders().items() if not made and name != "flash_attn_back"))
    return OPS.format(groups=text, composed=composed) + head + "\n".join(rows) + "\n"


# --- types ------------------------------------------------------------------------------------------------------------


def _quantizer(type: Type) -> tuple[str, str]:
    """Can values be quantized, and does an importance matrix change the bytes: found by trying."""
    if type.quant is None:
        return ("-" if type.is_quantized else "yes"), "-"
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((1, 256)).astype(np.float32), rng.uniform(0.1, 9, 256).astype(np.float32)
    try:
        same = np.array_equal(type.quant.quantize(x, weights), type.quant.quantize(x, np.ones_like(weights)))
    except NotImplementedError:
        return "-", "ggml needs it" if type.name in NEEDED_BY_GGML else "-"
    used = "-" if same else "yes"
    return "yes", f"{used}, ggml needs it" if type.name in NEEDED_BY_GGML else used


def types_page() -> str:
    """The table of types."""
    rows = []
    for t in types.all_types():
        if t.id >= types.FIRST_USER_ID:
            continue
        found = None if t.quant is None else t.quant.panel
        panel = "-" if found is None else f"{found.nbytes * 8 / 16 / found.blck_size:g}"
        quantize, imatrix = _quantizer(t)
        read = "yes" if not t.is_quantized or t.quant is not None else "-"
        written = "yes" if is_encodable(t) else "-"  # type: ignore[no-untyped-call]
        cells = (
            t.id, t.name, t.blck_size, t.type_size, f"{8 * t.type_size / t.blck_size:g}", panel, read, quantize,
            imatrix, written,
        )  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    head = (
        "| id | type | values in a block | bytes | bits per weight | panel | read | quantize | imatrix | written |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    return TYPES + head + "\n".join(rows) + "\n" + NOTES


PAGES = {"ops.md": ops_page, "types.md": types_page, "seeds.md": seeds.page, "memory.md": memory.page}


# --- command ----------------------------------------------------------------------------------------------------------


def stale() -> list[str]:
    """Names of the pages that differ from what the registries say."""
    return [
        name
        for name, make in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text(encoding="utf-8") != make()
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `docs`."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")


def run(args: argparse.Namespace) -> int:
    """Write the pages, or check them."""
    if args.check:
        old = stale()
        if old:
            print(
                f"docs: pages must be fresh, got stale {', '.join(old)}; run python -m ggjit.dev docs", file=sys.stderr
            )
        return 1 if old else 0
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        print(FOLDER / name)
    return 0
