"""Kernels beside their machine code, with the loops that take the time."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ggjit.arguments import check_texts
from ggjit.jit import Kernel

if TYPE_CHECKING:
    from ggjit.tensor import Tensor

__all__ = ["Code", "Codes", "Loop", "asm", "loops_of"]

SHOWN = 3  # loops
_LABEL = re.compile(r"^(\.?L\w+):")
_JUMP = re.compile(r"^\s+(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s+(?:[^,]+,\s*)*(\.?L\w+)\s*$")
_END = re.compile(r"^\s+(?:jmp|b|ret\w*|ud2|br)\b(?!\.)")  # nothing falls through
_NOISE = re.compile(r"^\s*(?:\.(?!L)|#|//)")  # directives and comments
_VECTOR = re.compile(r"%([xyz])mm\d+|\b([vqz])\d+\b")
_SCALAR = re.compile(
    r"^v?(?:mov|add|sub|mul|div|sqrt|min|max|u?comi|fn?m(?:add|sub)\d{3}|cvt\w+2)s[sd]$"
)  # one lane of x86
_WIDTHS = {"x": 128, "y": 256, "z": 512, "v": 128, "q": 128}
_MEMORY = re.compile(r"\(%r|\[x|\[sp")
_MOVES = re.compile(r"^v?(?:p?mov|pbroadcast|broadcast|ldr|ldp|str|stp|ld1|st1)")


@dataclass
class Loop:
    """An innermost loop.

    Attributes:
        lines: its instructions.
        depth: loops around it, itself counted.
        width: bits of the widest vector register that it names; 0: none.
        n_vector: instructions on vectors that are no moves.
        n_memory: instructions that name memory.
    """

    lines: list[str]
    depth: int
    width: int
    n_vector: int
    n_memory: int

    @property
    def text(self) -> str:
        """What it is made of, in words."""
        names = Counter(line.split()[0] for line in self.lines if not _LABEL.match(line))
        most = ", ".join(f"{n} {name}" for name, n in names.most_common(4))
        return (
            f"{sum(names.values())} instructions, {self.n_vector} of them vector arithmetic of {self.width} bits, "
            f"{self.n_memory} with memory; {most}"
        )


class _Flow:
    """Basic blocks of assembly text and the jumps between them."""

    def __init__(self, lines: list[str]) -> None:
        starts = {0} | {i for i, s in enumerate(lines) if _LABEL.match(s)} | {
            i + 1 for i, s in enumerate(lines[:-1]) if _JUMP.match(s)
        }  # fmt: skip
        first = sorted(starts)
        self.blocks = list(zip(first, [*first[1:], len(lines)], strict=True))
        labels = {m[1]: k for k, (i, _) in enumerate(self.blocks) if (m := _LABEL.match(lines[i]))}
        self.next: list[set[int]] = [set() for _ in self.blocks]
        for k, (_, end) in enumerate(self.blocks):
            jump = _JUMP.match(lines[end - 1])
            if jump and jump[1] in labels:
                self.next[k].add(labels[jump[1]])
            if k + 1 < len(self.blocks) and not _END.match(lines[end - 1]):
                self.next[k].add(k + 1)
        self.before: list[set[int]] = [set() for _ in self.blocks]
        for k, targets in enumerate(self.next):
            for t in targets:
                self.before[t].add(k)

    def _reach(self, start: int, edges: list[set[int]], within: set[int], header: int) -> list[int]:
        """Blocks that are reached, in the order in which they are left; no way goes back to the header."""
        seen, order = {start}, []
        stack = [(start, iter(sorted(edges[start] & within)))]
        while stack:
            at, rest = stack[-1]
            step = next(
                (t for t in rest if t not in seen and header not in ((t,) if edges is self.next else (at,))), -1
            )
            if step >= 0:
                seen.add(step)
                stack.append((step, iter(sorted(edges[step] & within))))
            else:
                order.append(at)
                stack.pop()
        return order

    def _cycles(self, within: set[int], header: int = -1) -> Iterator[set[int]]:
        """Largest sets of blocks of which each reaches each, jumps to the header left out."""
        order: list[int] = []
        left = set(within)
        while left:
            order += (found := self._reach(min(left), self.next, left, header))
            left -= set(found)
        left = set(within)
        for k in reversed(order):
            if k in left:
                part = set(self._reach(k, self.before, left, header))
                left -= part
                if len(part) > 1 or (k in self.next[k] and k != header):
                    yield part

    def loops(self, within: set[int], header: int = -1, depth: int = 1) -> Iterator[tuple[list[int], int]]:
        """The innermost loops: blocks in order, and how many loops are around."""
        for part in self._cycles(within, header):
            entry = min((k for k in part if self.before[k] - part), default=min(part))
            inner = list(self.loops(part, entry, depth + 1))
            yield from inner or [(sorted(part), depth)]


def loops_of(text: str) -> list[Loop]:
    """The innermost loops of assembly text: those with vector arithmetic first, then the deepest, then the longest."""
    lines = [line for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    if not lines:
        return []
    flow, found = _Flow(lines), []
    for blocks, depth in flow.loops(set(range(len(flow.blocks)))):
        body = [line for k in blocks for line in lines[slice(*flow.blocks[k])]]
        code = [line for line in body if not _LABEL.match(line)]
        code_v = [line for line in code if _VECTOR.search(line) and not _SCALAR.search(line.split()[0])]
        width = max((_WIDTHS[x or a] for line in code_v for x, a in _VECTOR.findall(line)), default=0)
        vector = [line for line in code_v if not _MOVES.match(line.split()[0])]
        found.append(Loop(body, depth, width, len(vector), sum(bool(_MEMORY.search(s)) for s in code)))
    return sorted(found, key=lambda loop: (loop.n_vector == 0, -loop.depth, -loop.n_vector))


def _source(function: Callable[..., Any]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return f"# no source of {function.__qualname__}\n"


def _helpers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The project's functions that one refers to by name, helpers and intrinsics unwrapped."""
    names = inspect.getclosurevars(function)
    found: dict[str, Callable[..., Any]] = {}
    for value in (*names.nonlocals.values(), *names.globals.values()):
        inner = getattr(value, "function", value)
        if inspect.isfunction(inner):
            found[inner.__qualname__] = inner
    return list(found.values())


class Code:
    """A kernel's source and machine code.

    Args:
        kernel: the kernel; it is compiled anew.

    Attributes:
        source: of its function.
        helpers: source of the functions that it names, by their names.
        text: assembly.
        loops: innermost loops, the hottest first (by structure: nothing is measured).
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.source = _source(kernel.function)
        self.helpers = {f.__qualname__: _source(f) for f in _helpers(kernel.function)}
        self.text = kernel.asm()
        self.loops = loops_of(self.text)

    def __str__(self) -> str:
        loops = [f"# {loop.text}\n" + "\n".join(loop.lines) for loop in self.loops[:SHOWN]]
        return "\n\n".join([self.source.rstrip(), *loops])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        pre = "text-align:left;font-size:11px;line-height:1.25;white-space:pre;margin:0 0 8px;padding:4px"
        cell = "vertical-align:top;text-align:left;max-width:640px;overflow-x:auto"
        helpers = "".join(
            f"<details><summary>{escape(name)}</summary><pre style='{pre}'>{escape(source)}</pre></details>"
            for name, source in self.helpers.items()
        )
        loops = "".join(
            f"<div>{escape(loop.text)}</div><pre style='{pre};background:#eef3f8'>"
            f"{escape(chr(10).join(s.expandtabs(4) for s in loop.lines))}</pre>"
            for loop in self.loops[:SHOWN]
        )
        n = len(self.text.splitlines())
        whole = f"<details><summary>all {n} lines</summary><pre style='{pre}'>{escape(self.text)}</pre></details>"
        return (
            f"<table><caption style='text-align:left'><b>{escape(self.kernel.name)}</b></caption><tr>"
            f"<td style='{cell}'><pre style='{pre}'>{escape(self.source)}</pre>{helpers}</td>"
            f"<td style='{cell}'>{loops}{whole}</td></tr></table>"
        )


class Codes(list[Code]):
    """Several kernels."""

    def _repr_html_(self) -> str:
        return "".join(code._repr_html_() for code in self)


def asm(
    op: str | Callable[..., Tensor] | Kernel | Tensor, types: str | Iterable[str] = "F32", label: str = ""
) -> Codes:
    """Show kernels beside their machine code.

        gg.show.asm(gg.mul_mat, "Q4_0", "8 columns")
        gg.show.asm("silu", ["F32", "F16"])
        gg.show.asm(my_kernel)

    Args:
        op: a builder or its name, a kernel, or a node whose tensors have data.
        types: of weights, tables and caches, else of the first source; as GGUF names them.
        label: a part of the label of the shape to take (see `ggjit bench ops`); by default the first.

    Returns:
        The kernel that computes the op, for each type; of a node all its kernels. A notebook shows them.

    Raises:
        TypeError: `op` or `types` is of another kind.
        ValueError: no such op, type or shape.
    """
    from ggjit.tensor import Tensor

    if isinstance(op, Kernel):
        return Codes([Code(op)])
    if isinstance(op, Tensor):
        return Codes(map(Code, _kernels_of(op)))
    from ggjit.bench_shapes import builder_name

    name = builder_name("show.asm", op)
    check_texts("show.asm", "names of types", types=[types] if isinstance(types, str) else types)
    return Codes(Code(_kernel_of(name, kind.upper(), label)) for kind in ([types] if isinstance(types, str) else types))


def _kernels_of(node: Tensor) -> list[Kernel]:
    from ggjit.lower import Lowering

    lowering = Lowering(1)
    lowering.lower_node(node)
    return list(dict.fromkeys(step.kernel for step in lowering.steps))


def _kernel_of(name: str, type: str, label: str) -> Kernel:
    """The kernel that writes the op's result."""
    from ggjit.bench_ops import Bench
    from ggjit.bench_shapes import shapes

    found = [s for s in shapes(name, type, small=True) if label in s.label]
    if not found:
        have = "; ".join(s.label for s in shapes(name, type, small=True))
        raise ValueError(f"show.asm: label must be a part of one of these: {have}, got {label!r}")
    bench = Bench(found[0])
    bench.run(1)
    steps = bench.graph._executable(1).steps
    return next(step.kernel for step in steps if step.record.data == bench.node.data)
