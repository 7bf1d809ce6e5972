"""What ops take, found by trying: element types, layouts and gradients of every op, without compiling anything.

Each registered case of an op is built again with one leaf after the other of every type, then with more than one leaf
of what was taken alone: taken is what the builder accepts and `op.supported` affirms. Layouts are tried in the same
way, gradients by building the op's backward rule.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ggjit import types
from ggjit.autodiff import FLOATS
from ggjit.context import Context
from ggjit.op import NONE, Op
from ggjit.tensor import Tensor, new_node, new_tensor
from ggjit.types import Type

ARENA = 1 << 18
REFUSED = (TypeError, ValueError, NotImplementedError)
LARGEST_BLOCK = 256
ALIKE = 2  # cases that differ but in their sizes and values
LAYOUTS = ("contiguous", "rows apart", "permuted", "transposed")
Types = tuple[Type | None, ...]
Kinds = Mapping[int, Type]  # by a leaf's order
_PLAIN = {t for t in types.all_types() if not t.is_quantized}
Case = Callable[..., Tensor]
NOTHING: Mapping[int, Any] = {}


class Leafs:
    """Makes the leafs of a case without values, some of other types or layouts.

    Args:
        seed: of the case's own random numbers.
        kinds: types of leafs by their order, in place of the case's.
        sizes: what dimension 0 of leafs becomes by its size; else that of block types is made a multiple of all blocks.
        layouts: one of `LAYOUTS` by a leaf's order.
    """

    def __init__(
        self,
        seed: int,
        kinds: Kinds,
        sizes: Mapping[int, int] = NOTHING,
        layouts: Mapping[int, str] = NOTHING,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.own: list[Type] = []
        self._kinds, self._layouts = kinds, layouts
        self._given, self.sizes = sizes, dict(sizes)

    def __call__(self, type: str, *ne: int, low: float = 0, high: float = 0) -> Tensor:
        """The next leaf, without values."""
        at, own = len(self.own), types.by_name(type)
        self.own.append(own)
        kind = self._kinds.get(at, own)
        ne0 = self._given.get(ne[0], ne[0])
        if ne0 % kind.blck_size:
            ne0 = math.lcm(ne0, LARGEST_BLOCK)
            self.sizes[ne[0]] = ne0
        return laid_out(kind, (ne0, *ne[1:]), self._layouts.get(at, "contiguous"))

    ints = __call__

    def array(self, values: ArrayLike, type: str | None = None) -> Tensor:
        """A leaf of the shape of values; a type by name, else that of the values."""
        array = np.asarray(values)
        kind = types.from_dtype(array.dtype).name if type is None else type
        return self(kind, *(array.shape[::-1] or (1,)))


def laid_out(type: Type, ne: tuple[int, ...], layout: str) -> Tensor:
    """A tensor of a type, shape and one of `LAYOUTS`."""
    from ggjit import ops

    n0, n1, n2, n3 = *ne, *(1,) * (4 - len(ne))
    if layout == "rows apart":
        whole = new_tensor(type, n0 + type.blck_size, n1, n2, n3)
        return ops.view_4d(whole, n0, n1, n2, n3, *whole.nb[1:], 0)
    if layout == "permuted":
        return ops.permute(new_tensor(type, n0, n2, n1, n3), 0, 2, 1, 3)
    if layout == "transposed":
        return ops.transpose(new_tensor(type, n1, n0, n2, n3))
    return new_tensor(type, *ne)


class Found:
    """What is known about one op, or about one function of an op of many.

    Attributes:
        types: types of the sources and of the result that it takes.
        layouts: for each source the layouts that it takes.
        gradients: positions of sources that have a gradient.
    """

    def __init__(self) -> None:
        self.types: dict[Types, None] = {}
        self.layouts: dict[int, set[str]] = {}
        self.gradients: set[int] = set()


class Probe:
    """Tries what one op takes.

    Args:
        op: the op.
        functions: names of its functions by the number in its parameters, for an op of many.

    Attributes:
        found: by the name of the function; that of an op with but one is "".
        takes_all: sources may be of any types.
    """

    def __init__(self, op: Op, functions: tuple[str, ...] = ()) -> None:
        self.op, self.functions = op, functions
        self.found: dict[str, Found] = {}
        self.takes_all = False
        self._seen: Counter[Any] = Counter()
        for name, case in op.cases.items():
            self._case(case, zlib.crc32(f"{op.name}/{name}".encode()))

    def _case(self, case: Case, seed: int) -> None:
        leafs = Leafs(seed, NOTHING)
        with _built(self.op, case, leafs) as node:
            if node is None:
                return
            self._note(node).gradients |= _gradients(self.op, node)
            sources = [None if s is None else (s.type, s.ne[0] % 256 == 0, layout_of(s)) for s in node.src]
            signature = self._function(node), tuple(sources), node.type, node.is_view, len(leafs.own)
        self._seen[signature] += 1
        if self._seen[signature] > ALIKE:
            return
        self._try_layouts(case, seed, len(leafs.own))
        self._try_types(case, seed, leafs.own)

    def _try_types(self, case: Case, seed: int, own: list[Type]) -> None:
        """Other types for one leaf, for all leafs of one type, then for further leafs what they took alone."""
        alone = {i: [t for t in types.all_types() if self._try(case, seed, {i: t})] for i in range(len(own))}
        if len(own) > 1 and all(_PLAIN <= set(taken) for taken in alone.values()):
            self.takes_all = True  # each leaf is of any type: what is done is up to a user's function
            return
        pending = [{i: t} for i, taken in alone.items() for t in taken if t is not own[i]]
        for kind in dict.fromkeys(own):
            same = [i for i, t in enumerate(own) if t is kind]
            together = [dict.fromkeys(same, t) for t in types.all_types() if len(same) > 1 and t is not kind]
            pending += [kinds for kinds in together if self._try(case, seed, kinds)]
        while pending:
            kinds = pending.pop()
            more = [{**kinds, i: t} for i in range(max(kinds) + 1, len(own)) for t in alone[i] if t is not own[i]]
            more += [{**kinds, i: own[i]} for i in kinds if len(kinds) > 1]
            pending += [kinds for kinds in more if self._try(case, seed, kinds, new=True)]

    def _try(self, case: Case, seed: int, kinds: Kinds, new: bool = False) -> bool:
        """Is the case taken with leafs of other types; with `new`: and was that not known."""
        sizes: Mapping[int, int] = NOTHING
        for _ in range(2):
            leafs = Leafs(seed, kinds, sizes)
            with _built(self.op, case, leafs) as node:
                if node is not None:
                    known = self.found.get(self._function(node))
                    n = 0 if known is None else len(known.types)
                    return len(self._note(node).types) > n or not new
            sizes = leafs.sizes
        return False

    def _try_layouts(self, case: Case, seed: int, n: int) -> None:
        for at in range(n):
            for layout in LAYOUTS:
                with _built(self.op, case, Leafs(seed, NOTHING, layouts={at: layout})) as node:
                    if node is not None:
                        found = self._note(node)
                        for i, s in enumerate(node.src):
                            if s is not None:
                                found.layouts.setdefault(i, set()).add(layout_of(s))

    def _note(self, node: Tensor) -> Found:
        """Note the types of a node; returns what is known about its function."""
        found = self.found.setdefault(self._function(node), Found())
        found.types[(*(None if s is None else s.type for s in node.src), node.type)] = None
        return found

    def _function(self, node: Tensor) -> str:
        return self.functions[node.params.function] if self.functions else ""


def layout_of(t: Tensor) -> str:
    """The name among `LAYOUTS` that is nearest to a tensor's layout."""
    if t.is_contiguous:
        return "contiguous"
    if not t.is_contiguous_rows:
        return "transposed"
    return "permuted" if t.is_permuted else "rows apart"


@contextlib.contextmanager
def _built(op: Op, case: Case, leafs: Leafs) -> Iterator[Tensor | None]:
    """The node of a case in a context of its own; None if it is refused."""
    with Context(ARENA, no_alloc=True):
        try:
            node: Tensor | None = case(leafs)
        except REFUSED:
            node = None
        yield node if node is not None and node.op is op and op.supported(node) else None


def _gradients(op: Op, node: Tensor) -> set[int]:
    """Positions of the sources for which the backward rule has a gradient."""
    if not op.has_backward:
        return set()
    grad = new_node(NONE, types.F32, node.ne)
    found = set()
    for i, s in enumerate(node.src):
        if s is None or s.type not in FLOATS:
            continue
        with contextlib.suppress(NotImplementedError):
            result = op.backward_for(node, grad, [j == i for j in range(len(node.src))])
            if i < len(result) and result[i] is not None:
                found.add(i)
    return found
