"""The record of an op and the registry of all ops.

A family file in `ops/` makes one `Op` for each op and hangs all its concerns on it by decorators: reference, kernels,
work size, lowering, test cases. The engine knows no op by name; it asks the record.

    SQR = Op("sqr", id=9, inplace=True)

    @checked                            # names an argument of the wrong kind (see ggjit.arguments)
    def sqr(a):                         # the builder: checks, and one header with the result's type and shape
        return new_node(SQR, a.type, a.ne, (a,))

    @SQR.reference                      # NumPy float64, the only truth
    def _(node, a): return a * a

    @kernel                             # Numba's language over bytes; the signature is fixed (see ggjit.jit.Kernel)
    def sqr_f32(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth): ...

    @SQR.kernel                         # which CPU kernel computes a node; None: unsupported
    def _(node): return sqr_f32 if node.type is F32 and node.src[0].is_contiguous else None

    @SQR.backward                       # gradients of the sources, built from ops (see ggjit.autodiff)
    def _(node, grad, need): return (scale(mul(grad, node.src[0]), 2.0),)

    @SQR.case("rows")                   # run by the tests at every level and thread count
    def _(t): return sqr(t("F32", 65, 3))
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggjit.fusion import Fused, Match
    from ggjit.jit import Kernel
    from ggjit.lower import Lowering
    from ggjit.tensor import Tensor

PARAM_BYTES = 64
COUNTER_LINE = 64  # first bytes of a work buffer: the chunk counter has a cache line of its own
_FORMATS = {"f32": "f", "i32": "i", "i64": "q"}
FIRST_USER_ID = 2000
PREC_F32 = 10  # GGML_PREC_F32, a product's precision word
REGISTRY: dict[str, Op] = {}  # of the families imported so far; `all_ops` gives all
_BY_ID: dict[int, Op] = {}


class Params:
    """The parameters of a node by name (`node.params.eps`)."""

    def __init__(self, names: Sequence[str], values: Sequence[float | int]) -> None:
        self.__dict__.update(zip(names, values, strict=True))

    def __repr__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.__dict__.items())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Op:
    """One operation.

    Args:
        name: ggml's enum in lower case.
        id: ggml's number, written to tensor records; from 1000 on that of an op of ours. A user's own op takes None and
            gets a free number from 2000 on; made again under its name (a cell of a notebook that is run again) it takes
            the place of the former one.
        params: (name, "f32" | "i32" | "i64") for each value of op_params, in order. "i64" takes two words. A name
            that begins with "_" is padding: builders do not give it and it is 0.
        view: the op does nothing at run time; its result is another header on the source's bytes.
        inplace: the planner may put the result where a source of the same layout lies.
        nmse: limit of the tests, sum((want - got)^2) / sum(want^2).
        state: positions of sources that the op updates and that `Graph.reset` sets to 0: an optimizer's moments.
        packed: positions of sources that may lie in a buffer of repacked weights, not in rows.
        shape_only: positions of sources whose values are not read.
        picks: (source, ids): of that source only the matrices (dimension 2) are read whose numbers are among the ids.
    """

    name: str
    id: int
    params: tuple[tuple[str, str], ...]

    def __init__(self, name: str, id: int | None = None, *, params: Sequence[tuple[str, str]] = (), view: bool = False,
                 inplace: bool = False, nmse: float = 1e-7, state: Sequence[int] = (),
                 packed: Sequence[int] = (), picks: tuple[int, int] | None = None,
                 shape_only: Sequence[int] = ()) -> None:  # fmt: skip
        if id is None:
            _load_all()
        if name in REGISTRY and not (id is None and REGISTRY[name].id >= FIRST_USER_ID):
            raise ValueError(f"Op: name must be new, got {name!r}")
        if id is None:
            id = max(FIRST_USER_ID - 1, *_BY_ID) + 1
        if id in _BY_ID:
            raise ValueError(f"Op: id must be new, got {id}, the id of {_BY_ID[id].name!r}")
        self.name, self.id, self.view, self.inplace, self.nmse = name, id, view, inplace, nmse
        self.params, self.state, self.packed, self.picks = tuple(params), tuple(state), tuple(packed), picks
        self.shape_only = tuple(shape_only)
        self._given = [not n.startswith("_") for n, _ in params]
        self.param_names = [n for n, g in zip([n for n, _ in params], self._given, strict=True) if g]
        self._format = struct.Struct("<" + "".join(_FORMATS[f] for _, f in params))
        if self._format.size > PARAM_BYTES:
            raise ValueError(f"Op: params of {name!r} must fit {PARAM_BYTES} bytes, got {self._format.size}")
        self._padding = bytes(PARAM_BYTES - self._format.size)
        self._reference: Callable[..., Any] | None = None
        self._kernel: Callable[[Tensor], Kernel | None] | None = None
        self._work_size: Callable[[Tensor, int], int] | None = None
        self._lower: Callable[[Lowering, Tensor], None] | None = None
        self._supports: Callable[[Tensor], bool] | None = None
        self._flops: Callable[[Tensor], int] | None = None
        self._traffic: Callable[[Tensor], tuple[int, int]] | None = None
        self._backward: Callable[..., Sequence[Tensor | None]] | None = None
        self.cases: dict[str, Callable[..., Tensor]] = {}
        self.fusions: list[Callable[[Match, Tensor], Fused | None]] = []
        self.fused_cases: dict[str, Callable[..., Tensor]] = {}
        REGISTRY[name] = _BY_ID[id] = self

    def __repr__(self) -> str:
        return self.name

    # -- op_params ---------------------------------------------------------------------------------------------------

    def pack_params(self, values: Sequence[float | int]) -> bytes:
        """The 64 bytes of op_params that hold `values` (padding words left out)."""
        if len(values) != len(self.params):
            rest = iter(values)
            values = [next(rest) if g else 0 for g in self._given]
        try:
            return self._format.pack(*values) + self._padding
        except (struct.error, OverflowError) as error:
            given = ", ".join(f"{n}={v!r}" for (n, _), v in zip(self.params, values, strict=False) if n[0] != "_")
            raise ValueError(f"{self.name}: parameters must fit their types, got {given} ({error})") from None

    def unpack_params(self, data: bytes | memoryview) -> Params:
        """op_params by name."""
        values = self._format.unpack(data[: self._format.size])
        return Params(self.param_names, [v for v, g in zip(values, self._given, strict=True) if g])

    # -- what a family file gives, as decorators ---------------------------------------------------------------------

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: f(node, *sources) -> result as NumPy arrays of shape ne[::-1], float64 (integers int64)."""
        self._reference = function
        return function

    def kernel(self, function: Callable[[Tensor], Kernel | None]) -> Callable[[Tensor], Kernel | None]:
        """Decorator: f(node) -> the CPU kernel for its types and layout, None if there is none."""
        self._kernel = function
        return function

    def work_size(self, function: Callable[[Tensor, int], int]) -> Callable[[Tensor, int], int]:
        """Decorator: f(node, n_threads) -> bytes of scratch beyond the chunk counter's line."""
        self._work_size = function
        return function

    def lower(self, function: Callable[[Lowering, Tensor], None]) -> Callable[[Lowering, Tensor], None]:
        """Decorator: f(lowering, node) emits the node's steps, where one kernel call is not all."""
        self._lower = function
        return function

    def supports(self, function: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
        """Decorator: f(node) -> can the CPU compute it; needed only beside `lower`."""
        self._supports = function
        return function

    def flops(self, function: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
        """Decorator: f(node) -> arithmetic operations, for profiles."""
        self._flops = function
        return function

    def traffic(self, function: Callable[[Tensor], tuple[int, int]]) -> Callable[[Tensor], tuple[int, int]]:
        """Decorator: f(node) -> bytes (read, written), for profiles; by default those of all sources and the node."""
        self._traffic = function
        return function

    def backward(self, function: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Sequence[Tensor | None]]:
        """Decorator: f(node, grad, need) -> gradients of the sources, as nodes.

        `grad` is contiguous f32 of the node's shape. `need[i]` says whether source i wants a gradient: f32 of its
        shape, of any layout, or None if it is 0. The other entries do not matter.
        """
        self._backward = function
        return function

    def fusion(self, function: Callable[[Match, Tensor], Fused | None]) -> Callable[[Match, Tensor], Fused | None]:
        """Decorator: f(match, node) -> nodes, this one the first, that one kernel computes (see `ggjit.fusion`).

        Rules are tried in the order in which they stand in the file: longer chains first.
        """
        self.fusions.append(function)
        return function

    def case(self, name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
        """Decorator: f(t) -> a node to test; `t` makes its leafs (see `ggjit.dev.cases`)."""
        return _register(self, self.cases, name)

    def fused_case(self, name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
        """Decorator: f(t) -> the last node of a graph that a fusion rule of this op applies to."""
        return _register(self, self.fused_cases, name)

    # -- what the engine asks ----------------------------------------------------------------------------------------

    @property
    def has_reference(self) -> bool:
        """Is a float64 reference registered?"""
        return self._reference is not None

    def compute_reference(self, node: Tensor, *sources: Any) -> Any:
        """The float64 result of a node from its sources' arrays."""
        if self._reference is None:
            raise NotImplementedError(f"{self.name}: no reference is registered")
        return self._reference(node, *sources)

    def kernel_for(self, node: Tensor) -> Kernel:
        """The CPU kernel of a node.

        Raises:
            NotImplementedError: no kernel takes these types and this layout.
        """
        found = self._kernel(node) if self._kernel is not None else None
        if found is None:
            raise NotImplementedError(unsupported(self, node))
        return found

    def work_size_for(self, node: Tensor, n_threads: int) -> int:
        """Bytes of scratch that a node's kernel takes, the chunk counter's line not counted."""
        return self._work_size(node, n_threads) if self._work_size is not None else 0

    def lower_node(self, low: Lowering, node: Tensor) -> None:
        """Emit the steps of a node."""
        if self._lower is not None:
            self._lower(low, node)
        else:
            low.emit(self.kernel_for(node), node, work=self.work_size_for(node, low.n_threads))

    def supported(self, node: Tensor) -> bool:
        """Can the CPU compute the node?"""
        if self.view or node.op is NONE:
            return True
        if self._supports is not None:
            return self._supports(node)
        return self._kernel is not None and self._kernel(node) is not None

    @property
    def has_backward(self) -> bool:
        """Is a backward rule registered?"""
        return self._backward is not None

    def backward_for(self, node: Tensor, grad: Tensor, need: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of a node's sources.

        Raises:
            NotImplementedError: the op has no backward rule.
        """
        if self._backward is None:
            raise NotImplementedError(f"{self.name}: a backward rule must be registered, got none ('{node.name}')")
        return self._backward(node, grad, need)

    def flops_for(self, node: Tensor) -> int:
        """Arithmetic operations of a node; its element count where the op does not say."""
        return self._flops(node) if self._flops is not None else node.nelements

    def traffic_for(self, node: Tensor) -> tuple[int, int]:
        """Bytes of tensors that a node reads and writes; gaps between elements do not count."""
        if self._traffic is not None:
            return self._traffic(node)
        return sum(element_nbytes(s) for s in {*node.src}), element_nbytes(node)


def element_nbytes(t: Tensor | None) -> int:
    """Bytes of a tensor's elements, without gaps between them; 0 for None."""
    return 0 if t is None else t.nelements // t.type.blck_size * t.type.type_size


def _register(
    op: Op, cases: dict[str, Callable[..., Tensor]], name: str
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in cases:
            raise ValueError(f"{op.name}: case {name!r} must be new")
        cases[name] = function
        return function

    return register


def unsupported(op: Op, node: Tensor) -> str:
    """The text of the error for a node that no kernel takes."""
    given = ", ".join(f"{s.type.name}{list(s.ne)}" for s in node.src if s is not None)
    hint = "; most ops take F32: gg.from_numpy(array, gg.F32)" if "F64[" in given else ""
    return f"{op.name}: the CPU backend must have a kernel for the types and layout, got {given} ('{node.name}'){hint}"


def _load_all() -> None:
    from ggjit import ops

    ops.load_all()


def all_ops() -> list[Op]:
    """Every op by name, those of families that nothing has used yet too."""
    _load_all()
    return sorted(REGISTRY.values(), key=lambda op: op.name)


def by_id(id: int) -> Op:
    """The op with a ggml number.

    Raises:
        ValueError: none is registered.
    """
    if id not in _BY_ID:
        _load_all()
    try:
        return _BY_ID[id]
    except KeyError:
        raise ValueError(f"op.by_id: id must be one of a registered op, got {id}") from None


def by_name(name: str) -> Op:
    """The op with a name.

    Raises:
        ValueError: none is registered.
    """
    if name not in REGISTRY:
        from ggjit import ops

        getattr(ops, name, None)  # most ops have a function of their name: its family will do
    if name not in REGISTRY:
        _load_all()
    try:
        return REGISTRY[name]
    except KeyError:
        raise ValueError(f"op.by_name: name must be one of {sorted(REGISTRY)}, got {name!r}") from None


NONE = Op("none", id=0, view=True)
