"""Reverse-mode differentiation: nodes appended to a graph that compute the gradients of its parameters.

`Graph.build_backward_expand` walks the nodes from the last to the first. Where the gradient of a node is known, the
backward rule of its op gives the gradients of its sources, as nodes built from ops; contributions of several readers
are added. Nothing is computed here, and the graph stays static: it may run any number of times.

    f = a x^2 + b        x2 = x * x     ax2 = a * x2     f = ax2 + b          4 nodes with the parameter x
    df/df = 1            the gradient of the loss: a leaf that `Graph.reset` sets to 1
    df/dx2 = df/df * a   mul
    df/dx  = df/dx2 * x + df/dx2 * x                     mul, mul, add        8 nodes

What holds for all gradients: f32, with the shape of their tensor; a rule is given a contiguous one. Only nodes that
lead from a parameter to a loss get any. A source of integers has none; a quantized type cannot pass one on.

Values that the backward nodes read again must still be there when they run. In-place forms and copies into existing
memory may overwrite them, or take values past the graph's edges: both are found and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from ggjit import types
from ggjit.op import NONE
from ggjit.tensor import FLAG_LOSS, FLAG_OUTPUT, FLAG_PARAM, Tensor, contiguous_nb, new_tensor

if TYPE_CHECKING:
    from ggjit.graph import Graph

FLOATS = (types.F32, types.F16, types.BF16)


# -- what backward rules use -------------------------------------------------------------------------------------------


def as_f32(t: Tensor) -> Tensor:
    """The tensor itself if it is f32, else converted to it."""
    from ggjit.ops import cast

    return t if t.type is types.F32 else cast(t, types.F32)


def as_contiguous(t: Tensor) -> Tensor:
    """The tensor itself if it has the strides of a new one, else a view that has them, or a copy."""
    from ggjit.ops import cont, reshape

    if t.nb == contiguous_nb(t.type, t.ne):
        return t
    return reshape(t, t) if t.is_contiguous else cont(t)


def zeros(*ne: int) -> Tensor:
    """Zeros, f32 of 4 sizes; made when the graph runs."""
    from ggjit.ops import arange, repeat_4d

    return repeat_4d(arange(0.0, 1.0, 1.0), *ne)


def unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of a source that was repeated to the shape of `grad`: the sum over its repeats.

    Args:
        grad: gradient of the repeated values.
        like: the source; each size divides that of `grad`.

    Returns:
        The shape of `like`.
    """
    from ggjit.ops import repeat_back

    return grad if grad.ne == like.ne else repeat_back(grad, like)


def refuse(node: Tensor, why: str) -> NoReturn:
    """Say that no gradient can pass through a node.

    Raises:
        NotImplementedError: names the op, the reason and the node.
    """
    raise NotImplementedError(f"build_backward_expand: {node.op.name}: {why} ('{node.name}')")


# -- the walk ----------------------------------------------------------------------------------------------------------


def build_backward_expand(graph: Graph, grad_accs: Mapping[Tensor, Tensor] | None = None) -> None:
    """Append what computes the gradients of all parameters of a graph; see `Graph.build_backward_expand`."""
    _check(graph, grad_accs or {})
    backward = _Backward(graph)
    for t, acc in (grad_accs or {}).items():
        graph.grads[t] = graph.grad_accs[t] = acc
    for t in backward.forward:
        if t.flags & FLAG_LOSS:
            t.flags |= FLAG_OUTPUT
            if t not in graph.grads:
                acc = new_tensor(types.F32, *t.ne, name=f"grad acc for {t.name}")
                graph.grads[t] = graph.grad_accs[t] = acc
    for position in reversed(range(len(backward.forward))):
        backward.visit(position)
    for t in backward.forward:
        if t.flags & FLAG_PARAM and t in graph.grads:
            grad = as_contiguous(graph.grads[t])
            grad.flags |= FLAG_OUTPUT
            graph.build_forward_expand(grad)
            graph.grads[t] = grad


def _check(graph: Graph, grad_accs: Mapping[Tensor, Tensor]) -> None:
    where = "build_backward_expand"
    if not graph.has_grads:
        raise ValueError(f"{where}: the graph must have room for gradients, got Graph(grads=False)")
    if graph.grads:
        raise ValueError(f"{where}: a graph must be differentiated once, got a second call")
    params = [t for t in graph.nodes if t.flags & FLAG_PARAM]
    if not params:
        raise ValueError(f"{where}: a leaf of the graph must be marked by set_param before it is built, got none")
    if not grad_accs and not any(t.flags & FLAG_LOSS for t in graph.nodes):
        raise ValueError(f"{where}: a node of the graph must be marked by set_loss, got none")
    for t in params:
        if t.type not in FLOATS:
            raise TypeError(f"{where}: a parameter must be F32, F16 or BF16, got {t.type.name} ('{t.name}')")
    for t, acc in grad_accs.items():
        if t not in graph.use_counts:
            raise ValueError(f"{where}: what has an accumulator must be in the graph, got '{t.name}'")
        if acc.type is not types.F32 or acc.ne != t.ne or not acc.is_contiguous:
            raise ValueError(
                f"{where}: an accumulator must be contiguous F32 of its tensor's shape {list(t.ne)}, got "
                f"{acc.type.name}{list(acc.ne)} ('{t.name}')"
            )


class _Write:
    """Where a node writes into memory that it does not own: the in-place forms, cpy, set_rows."""

    def __init__(self, node: Tensor, position: int) -> None:
        self.node, self.position = node, position

    def hits(self, t: Tensor) -> bool:
        """Does it write bytes of `t`?"""
        a, b = self.node, t
        if _root(a) is not _root(b):
            return False
        return a.view_offs < b.view_offs + b.nbytes and b.view_offs < a.view_offs + a.nbytes


def _root(t: Tensor) -> Tensor:
    return t if t.view_src is None else t.view_src


class _Backward:
    """One walk over a graph: what needs gradients, and what is overwritten."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.forward = list(graph.nodes)
        self.known = dict(graph.use_counts)
        self.writes = [_Write(t, i) for i, t in enumerate(self.forward) if t.view_src is not None and not t.op.view]
        self.needed: set[Tensor] = set()
        for i, t in enumerate(self.forward):
            passes = t.type in FLOATS or t.type.is_quantized
            if passes and (t.flags & (FLAG_PARAM | FLAG_LOSS) or any(s in self.needed for s in t.src)):
                self.needed.add(t)
            self._check_read(t, i)

    def _check_read(self, node: Tensor, position: int) -> None:
        """Refuse to read past the graph's edges what a node with a gradient wrote."""
        for w in self.writes:
            if w.position >= position or w.node not in self.needed or node.op.view:
                continue
            for s in node.src:
                if s is not None and w.hits(s) and not _leads_to(w.node, s):
                    refuse(w.node, f"what it writes must be read through its result, got a read by '{node.name}'")

    def visit(self, position: int) -> None:
        """Append the gradients of the sources of one node."""
        node = self.forward[position]
        grad = self.graph.grads.get(node)
        if grad is None or node.op is NONE:
            return
        need = tuple(s is not None and s in self.needed for s in node.src)
        if not any(need):
            return
        if node.type not in FLOATS:
            refuse(node, f"a gradient must pass through F32, F16 or BF16, got {node.type.name}")
        if node.op.inplace and node.view_src is not None:
            refuse(node, "the source must be kept for the backward pass, got the in-place form")
        for s, wanted in zip(node.src, need, strict=True):
            if wanted and s is not None and s.type not in FLOATS:
                refuse(s, f"a gradient must pass through F32, F16 or BF16, got {s.type.name}")
        if not node.op.has_backward:
            refuse(node, "a backward rule must be registered, got none")
        made = node.op.backward_for(node, as_contiguous(grad), need)
        if len(made) != len(node.src):
            raise ValueError(
                f"build_backward_expand: the backward rule of {node.op.name} must give {len(node.src)} gradients, "
                f"got {len(made)}"
            )
        for source, gradient, wanted in zip(node.src, made, need, strict=True):
            if wanted and gradient is not None:
                assert source is not None
                self._add(node, position, source, gradient)

    def _add(self, node: Tensor, position: int, source: Tensor, gradient: Tensor) -> None:
        """Add a contribution to the gradient of a source."""
        from ggjit.ops import add

        graph = self.graph
        if gradient.ne != source.ne or gradient.type is not types.F32:
            raise ValueError(
                f"build_backward_expand: the backward rule of {node.op.name} must give F32 of its source's shape "
                f"{list(source.ne)}, got {gradient.type.name}{list(gradient.ne)} ('{source.name}')"
            )
        before = graph.grads.get(source)
        if before is not None:
            # An accumulator keeps the sum; that of a loss stays 1.
            gradient = add(before, gradient, inplace=source in graph.grad_accs and not source.flags & FLAG_LOSS)
        first = graph.n_nodes
        if gradient not in graph.use_counts:
            if gradient.op is not NONE:
                gradient.name = f"grad for {source.name}"
            graph.build_forward_expand(gradient)
        graph.grads[source] = gradient
        self._check_kept(node, position, graph.nodes[first:])

    def _check_kept(self, node: Tensor, position: int, made: Sequence[Tensor]) -> None:
        """Refuse backward nodes that read what the graph has overwritten when they run."""
        for w in self.writes:
            if w.position < position:
                continue
            for s in {s for t in made for s in t.src if s is not None and s in self.known}:
                if w.hits(s) and (w.position > position or s is not node):
                    refuse(node, f"'{s.name}' must be kept for the backward pass, got overwritten by '{w.node.name}'")


def _leads_to(write: Tensor, t: Tensor) -> bool:
    """Is `write` among what `t` is a view of, through views and other writes of the same memory?"""
    root, stack = _root(write), [t]
    while stack:
        t = stack.pop()
        if t is write:
            return True
        stack += [s for s in t.src if s is not None and _root(s) is root and t.view_src is not None]
    return False


def reset(graph: Graph) -> None:
    """Set accumulators to 0, those of losses to 1, and the moments of optimizer steps to 0; see `Graph.reset`."""
    for node in graph.nodes:
        acc = graph.grad_accs.get(node)
        if acc is not None:
            acc.set(1.0 if node.flags & FLAG_LOSS else 0.0)
        for i in node.op.state:
            state = node.src[i]
            if state is not None:
                state.set(0.0)
