"""A memory plan as a picture: offsets over time, chains of tensors that write in place, peak and lower bound."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

from ggjit.arguments import check_kinds
from ggjit.show.axes import axes, pyplot

if TYPE_CHECKING:
    from ggjit.plan import Plan, Tensors

_LABELS = 60  # links at most whose names are written


def check_plan(where: str, given: Any) -> None:
    """Check that something is a plan, in particular that there is one yet."""
    from ggjit.plan import Plan

    if given is None:
        raise TypeError(f"{where}: there must be a plan, got None; `GraphAllocator.reserve` makes one")
    check_kinds(where, Plan, "a Plan such as `GraphAllocator.reserve` makes", plan=given)


def plan(p: Plan, graph: Tensors, buffer_id: int = 0, ax: Any = None) -> Any:
    """Draw a plan with matplotlib: a box for each tensor, from its first to its last step.

    Tensors that write over each other have one colour and touch. The black line is the peak, the dashed one the bytes
    that no plan with the same in-place choices goes below.

    Args:
        p: the plan.
        graph: that it was made for, or one that it serves.
        buffer_id: which of its buffers.
        ax: matplotlib axes to draw on, by default new ones.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: `p` is no plan, `graph` no graph, or `buffer_id` no whole number.
        ValueError: the plan has no such buffer.
    """
    check_plan("show.plan", p)
    if not hasattr(graph, "leafs"):
        raise TypeError(f"show.plan: graph must be a Graph, got {type(graph).__name__}; gg.build makes one")
    check_kinds("show.plan", Integral, "a whole number", buffer_id=buffer_id)
    if not 0 <= buffer_id < len(p.sizes):
        raise ValueError(f"show.plan: buffer_id must be 0 to {len(p.sizes) - 1}, got {buffer_id}")
    ax = axes("show.plan", ax, 4)
    tensors, chains = [*graph.leafs, *graph.nodes], p.chains(buffer_id)
    colours = pyplot("show.plan").get_cmap("tab20")
    n_links = sum(map(len, chains))
    for k, chain in enumerate(chains):
        colour = colours(k % 20)
        for j, i in enumerate(chain):
            at = p.placements[i]
            end = p.placements[chain[j + 1]].first if j + 1 < len(chain) else at.last + 1  # the next one writes here
            first, span = at.first, end - at.first
            style = {"facecolor": colour, "alpha": 0.75 if j == 0 else 0.5, "hatch": "//" if j else None}
            ax.broken_barh([(first, span)], (at.offset, at.size), edgecolor="white", linewidth=0.8, **style)
            if n_links <= _LABELS and at.size > 0.04 * p.sizes[buffer_id]:
                ax.text(
                    first + span / 2, at.offset + at.size / 2, tensors[i].name, ha="center", va="center", fontsize=7
                )
    bound, peak = p.lower_bound(buffer_id), p.sizes[buffer_id]
    ax.axhline(peak, color="black", linewidth=1.2, label=f"peak {peak}")
    ax.axhline(bound, color="crimson", linestyle="--", linewidth=1.2, label=f"lower bound {bound}")
    ax.set(xlabel="step", ylabel="offset (KiB)", xlim=(0, max(len(graph.nodes), 1)), ylim=(0, max(peak, 1) * 1.08))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    return ax
