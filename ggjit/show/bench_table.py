"""Ops measured beside the machine's limits, as a table and a plot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ggjit import ops, types
from ggjit.arguments import check_positive, check_threads
from ggjit.bench_ops import Row, measure
from ggjit.bench_shapes import Build, Shape, builder_name
from ggjit.bench_shapes import shapes as known_shapes
from ggjit.limits import UNITS, Meter
from ggjit.name_hints import closest
from ggjit.show.axes import axes, pyplot
from ggjit.show.html import table
from ggjit.tensor import Tensor

__all__ = ["BenchTable", "bench"]

_HEAD = ("op", "type", "shape", "threads", "ms", "GFLOP/s", "GB/s", "limit of the same run", "share of the limit")
Shapes = str | Iterable[str | Shape | Sequence[int]] | Mapping[str, Build]


class BenchTable:
    """Measurements; a notebook shows them as a table.

    Attributes:
        rows: one for each shape, see `ggjit.bench_ops.Row`.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def __add__(self, other: BenchTable) -> BenchTable:
        return BenchTable(self.rows + other.rows)

    def _texts(self) -> list[tuple[str, ...]]:
        return [
            _HEAD,
            *(
                (r.op, r.type, r.shape, str(r.threads), f"{r.milliseconds:.3g}", f"{r.gflops:.1f}",
                 f"{r.gb_per_second:.1f}", f"{r.limit} {r.limit_rate:.1f} {UNITS[r.limit]}", f"{r.share:.2f}")
                for r in self.rows
            ),
        ]  # fmt: skip

    def __repr__(self) -> str:
        texts = self._texts()
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        return "\n".join("  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in texts)

    def _repr_html_(self) -> str:
        return str(table(self._texts(), "results checked against float64 references in the same run"))

    def plot(self, ax: Any = None) -> Any:
        """Draw each row's share of its limit, with the least and the greatest of its turns.

        Args:
            ax: matplotlib axes to draw on, by default new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is missing.
        """
        ax = axes("bench", ax, 0.8 + 0.3 * len(self.rows))
        from matplotlib.patches import Patch

        kinds = dict.fromkeys(r.limit for r in self.rows)
        colours = dict(zip(kinds, pyplot("bench").get_cmap("tab10").colors, strict=False))
        for y, r in enumerate(self.rows):
            low, high = r.share - min(r.shares), max(r.shares) - r.share
            ax.barh(y, r.share, xerr=[[low], [high]], color=colours[r.limit], alpha=0.75, capsize=3)
        names = [f"{r.op} {r.type} {r.shape}, {r.threads}T" for r in self.rows]
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.invert_yaxis()
        ax.axvline(1.0, color="black", linewidth=1.2)
        ax.set(xlabel="share of the limit of the same run", xlim=(0, max(1.05, *(max(r.shares) for r in self.rows))))
        handles = [Patch(color=colours[kind]) for kind in kinds]
        ax.legend(handles, list(kinds), loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)
        return ax


def bench(
    op: str | Callable[..., Tensor],
    shapes: Shapes | None = None,
    *,
    type: str = "F32",
    threads: int | None = None,
    turns: int = 5,
    small: bool = False,
    repack: bool = True,
) -> BenchTable:
    """Measure an op beside the limit that binds it, and check its results.

        gg.bench("silu")                                      # a handful of shapes
        gg.bench(gg.mul_mat, ["Q4_0", "Q8_0"])                # all shapes of these types
        gg.bench(gg.add, [(4096, 512), (4096, 4096)])         # sizes of all sources, in ggml's order
        gg.bench(gg.mul_mat, [(4096, 4096, 1)], type="Q4_0")  # rows and columns of the weights, tokens
        gg.bench("mine", {"a row": lambda t: gg.sqr(t("F32", 4096))})

    Args:
        op: a builder, or its name.
        shapes: types, sizes, `ggjit.bench_shapes.Shape`, or functions that build a node from leafs by their labels.
        type: of the first source where sizes are given; others are F32.
        threads: that compute, by default as many as graphs use.
        turns: of each shape, in turns with its limit.
        small: data that stays in a core's own cache, where types are given or nothing.
        repack: pack weights of products into panels.

    Returns:
        A table with `plot`.

    Raises:
        WrongResult: a result is wrong.
        TypeError: an argument is of the wrong kind.
        ValueError: no such op, type or shape; `threads` is not 1 to 512, `turns` not positive.
        NotImplementedError: no kernel takes the types.
    """
    name = builder_name("bench", op)
    check_positive("bench", turns=turns)
    meter = Meter(None if threads is None else check_threads("bench", threads, "threads"))
    return BenchTable([measure(s, meter, turns, repack=repack) for s in _shapes(name, op, shapes, type, small)])


def _shapes(name: str, op: str | Callable[..., Tensor], given: Shapes | None, type: str, small: bool) -> list[Shape]:
    if given is None:
        return [s for s in known_shapes(name, None, small) if s.is_default]
    if isinstance(given, Mapping):
        return [Shape(name, label, "", build) for label, build in given.items()]
    if not isinstance(given, Iterable):
        raise TypeError(f"bench: shapes must be types, sizes or functions by their labels, got {given!r}")
    found: list[Shape] = []
    for one in [given] if isinstance(given, str) else given:
        if isinstance(one, Shape):
            found.append(one)
        elif isinstance(one, str):
            found += known_shapes(name, one.upper(), small)
        elif not isinstance(one, Sequence):
            raise TypeError(f"bench: a shape must be a type, sizes or a Shape, got {one!r}")
        else:
            found.append(_sized(name, op, tuple(one), type))  # type: ignore[arg-type]
    return found


def _sized(name: str, op: str | Callable[..., Tensor], ne: tuple[int, ...], type: str) -> Shape:
    """A shape of given sizes."""
    build = getattr(ops, name, None) if isinstance(op, str) else op
    if build is None:
        near = closest(name, ops.__all__)
        raise ValueError(f"bench: op must be a builder or its name, got {name!r}{near}")
    types.by_name(type)
    if name == "mul_mat":
        if len(ne) != 3:
            raise ValueError(f"bench: sizes of mul_mat must be rows, columns and tokens, got {list(ne)}")
        m, k, n = ne
        label = f"{m} x {k}, {n} columns"
        return Shape(name, label, type, lambda t: ops.mul_mat(t.weights(type, k, m), t("F32", k, n)), (0, {0: 1}))
    parameters = inspect.signature(build).parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    # A builder without annotations, as one writes it in a notebook, is taken to have tensors alone.
    others = [p.name for p in needed if p.annotation not in (p.empty, Tensor, "Tensor", "gg.Tensor", "Tensor | None")]
    n_src = len(needed) - len(others)
    if others or not n_src:
        raise ValueError(
            f"bench: sizes alone must be enough for {name}, got other arguments ({', '.join(others)}); give a function "
            "of leafs by its label"
        )
    return Shape(name, str(list(ne)), type, lambda t: build(t(type, *ne), *(t("F32", *ne) for _ in range(n_src - 1))))
