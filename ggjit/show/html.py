"""Tensors and graphs as HTML tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ggjit.arguments import check_kinds
from ggjit.backend import buffer_of
from ggjit.op import NONE
from ggjit.tensor import Tensor

if TYPE_CHECKING:
    from ggjit.graph import Graph

_MOST_ROWS = 40


class Html(str):
    """HTML text that a notebook shows."""

    def _repr_html_(self) -> str:
        return str(self)


def table(rows: list[tuple[str, ...]], caption: str) -> Html:
    """Rows of texts as a table."""
    style = "text-align:left;font-family:monospace;padding:1px 10px 1px 0"
    body = "".join("<tr>" + "".join(f'<td style="{style}">{escape(c)}</td>' for c in row) + "</tr>" for row in rows)
    return Html(f"<table><caption style='text-align:left'><b>{escape(caption)}</b></caption>{body}</table>")


def where(t: Tensor) -> str:
    """Where a tensor's bytes are, in words."""
    root = t if t.view_src is None else t.view_src
    shown = f"byte {t.view_offs} of '{root.name}', " if root is not t else ""
    buffer = buffer_of(t)
    if t.data == 0:
        return f"{shown}no data yet"
    if buffer is not None:
        return (
            f"{shown}{buffer.type.name} buffer ({buffer.usage}) of {buffer.size} bytes, offset {t.data - buffer.base}"
        )
    arena = root.context
    if arena.base <= t.data < arena.base + arena.mem_size:
        return f"{shown}arena of {arena.mem_size} bytes, offset {t.data - arena.base}"
    return f"{shown}an array's memory at {t.data:#x}"


def tensor(t: Tensor) -> Html:
    """A tensor's header as a table: sizes in both orders, strides, contiguity, where its bytes are.

    Raises:
        TypeError: `t` is no Tensor.
    """
    check_kinds("show.tensor", Tensor, "a Tensor", t=t)
    shape = tuple(reversed(t.ne[: t.n_dims]))
    made = "" if t.op is NONE else f"{t.op.name}({', '.join(repr(s.name) for s in t.src if s is not None)})"
    layout = [
        name
        for name, holds in (
            ("contiguous", t.is_contiguous),
            ("not contiguous", not t.is_contiguous),
            ("transposed", t.is_transposed),
            ("permuted", t.is_permuted),
            ("a view", t.is_view),
        )
        if holds
    ]
    rows: list[tuple[str, ...]] = [
        ("type", t.type.name),
        ("ne (ggml order)", "{" + ", ".join(map(str, t.ne)) + "}"),
        ("shape (NumPy order)", str(shape)),
        ("nb (bytes)", "{" + ", ".join(map(str, t.nb)) + "}"),
        ("layout", ", ".join(layout)),
        ("bytes", str(t.nbytes)),
        ("where", where(t)),
    ]
    if made:
        rows.insert(0, ("op", made))
    return table(rows, f"Tensor '{t.name}'")


def graph_table(g: Graph) -> Html:
    """A graph's nodes as a table, the first 40 of them."""
    rows: list[tuple[str, ...]] = [("", "op", "type", "ne", "reads", "name")]
    for i, t in enumerate(g.nodes[:_MOST_ROWS]):
        ne = "{" + ", ".join(map(str, t.ne[: t.n_dims])) + "}"
        reads = ", ".join(s.name for s in t.src if s is not None)
        rows.append((str(i), t.op.name, t.type.name, ne, reads, t.name))
    if g.n_nodes > _MOST_ROWS:
        rows.append(("...", f"{g.n_nodes - _MOST_ROWS} more", "", "", "", ""))
    return table(rows, f"Graph of {g.n_nodes} nodes and {g.n_leafs} leafs")
