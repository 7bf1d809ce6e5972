"""Pictures of tensors, graphs, memory plans, splits, files and caches, for notebooks.

    gg.show.tensor(t)                  # sizes in both orders, strides, where the bytes are
    gg.show.graph(g)                   # a drawing: views dashed, what writes in place green
    gg.show.plan(allocator.plan, g)    # offsets over time (needs matplotlib, the extra `show`)
    gg.show.passes(scheduler.current)  # the scheduler's passes one by one, with their reasons
    gg.show.splits(scheduler.current)  # what each backend computes, and the copies in between
    gg.show.gguf(file)                 # a file's parts and tensors
    gg.show.loaded(file, weights)      # where weights have their bytes: on the mapping, in panels
    gg.show.cells(cache)               # the token in each cell of a KV cache
    gg.show.asm(gg.mul_mat, "Q4_0")    # a kernel's source beside its machine code

A Tensor or Graph that ends a notebook's cell shows itself. Nothing here is imported before it is used.
"""

from ggjit.show.cells import cells
from ggjit.show.files import gguf, loaded
from ggjit.show.graph_drawing import graph
from ggjit.show.html import Html, tensor
from ggjit.show.machine_code import asm
from ggjit.show.memory_plan import plan
from ggjit.show.scheduler import passes, splits
from ggjit.show.svg import Svg

__all__ = ["Html", "Svg", "asm", "cells", "gguf", "graph", "loaded", "passes", "plan", "splits", "tensor"]
