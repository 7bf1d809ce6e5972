"""Pictures of tensors, graphs and memory plans, for notebooks.

    gg.show.tensor(t)                  # sizes in both orders, strides, where the bytes are
    gg.show.graph(g)                   # a drawing: views dashed, what writes in place green
    gg.show.plan(allocator.plan, g)    # offsets over time (needs matplotlib: pip install 'ggjit[show]')

A Tensor or Graph that ends a notebook's cell shows itself. Nothing here is imported before it is used.
"""

from ggjit.show.html import Html, tensor
from ggjit.show.memory_plan import plan
from ggjit.show.svg import Svg, graph

__all__ = ["Html", "Svg", "graph", "plan", "tensor"]
