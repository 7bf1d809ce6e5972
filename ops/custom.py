"""Ops whose kernel is the user's: a function in Numba's language takes the place of ggml's C callback.

    def scaled(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
        for i in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
            memory.store_f32(dst, 4 * i, 2 * memory.load_f32(src0, 4 * i))

    y = map_custom1(x, scaled)

The function is what a kernel is without op_params and scratch: `dst` and each source come as bytes (uint8), four sizes
ne and four strides nb in bytes; `ith` of `nth` threads computes its share. It reads and writes by the helpers of
ggjit.ops.lib.memory and vec. What C passes as user data is a constant that the function closes over, or a source.
It is compiled once, and kept on disk under its source, that of all it calls, and the constants it closes over.

Its float64 reference and its backward rule may be given beside it. An op of its own (`ggjit.op.Op`) does more:
parameters, scratch, a choice of kernels by type, errors for indices out of range, fusion.

Source: ggml_map_custom1, ggml_map_custom2, ggml_map_custom3, ggml_custom_4d, ggml_custom_inplace.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ggjit.arguments import checked
from ggjit.autodiff import refuse
from ggjit.jit import Jitted, Kernel, jitted, kernel, lazy_module
from ggjit.op import Op
from ggjit.ops.views import as_dims
from ggjit.tensor import MAX_SRC, Dims, Tensor, new_node, view_tensor
from ggjit.types import Type

memory = lazy_module("ggjit.ops.lib.memory")

__all__ = ["custom_4d", "custom_inplace", "map_custom1", "map_custom2", "map_custom3"]

_PARAMS = (("function", "i64"), ("n_tasks", "i32"))
MAP_CUSTOM1 = Op("map_custom1", id=92, params=_PARAMS)
MAP_CUSTOM2 = Op("map_custom2", id=93, params=_PARAMS)
MAP_CUSTOM3 = Op("map_custom3", id=94, params=_PARAMS)
CUSTOM = Op("custom", id=95, params=_PARAMS)


class _Function:
    """What belongs to a node's function. The node's context keeps it alive."""

    def __init__(self, function: Callable[..., Any], reference: Callable[..., Any] | None,
                 backward: Callable[..., Sequence[Tensor | None]] | None) -> None:  # fmt: skip
        self.function, self.reference, self.backward = function, reference, backward
        self.number = next(_count_up)
        _functions[self.number] = self


_count_up = itertools.count(1)
_functions: weakref.WeakValueDictionary[int, _Function] = weakref.WeakValueDictionary()  # by the number in op_params


# --- builders ---------------------------------------------------------------------------------------------------------


def _custom(op: Op, where: str, src: tuple[Tensor, ...], function: _Function, n_tasks: int, like: Tensor | None,
            inplace: bool, type: Type | None = None, ne: Dims | None = None) -> Tensor:  # fmt: skip
    if not callable(function.function):
        raise TypeError(f"{where}: fun must be a function, got {function.function!r}")
    if len(src) > MAX_SRC:
        raise ValueError(f"{where}: a node must have at most {MAX_SRC} sources, got {len(src)}")
    names = list(inspect.signature(function.function).parameters)
    if len(names) != 3 * len(src) + 5:
        want = ", ".join(_arguments(len(src)))
        raise TypeError(f"{where}: fun must take ({want}), got ({', '.join(names)})")
    if n_tasks != -1 and n_tasks < 1:
        raise ValueError(f"{where}: n_tasks must be positive, or -1 for all threads, got {n_tasks}")
    params = (function.number, n_tasks)
    if inplace:
        assert like is not None
        node = view_tensor(op, like, src, params)
    else:
        if like is not None:
            type, ne = like.type, like.ne
        assert type is not None and ne is not None
        node = new_node(op, type, ne, src, params)
    node.context.kept[id(function)] = function
    return node


@checked
def map_custom1(a: Tensor, fun: Callable[..., Any], n_tasks: int = -1, *, inplace: bool = False,
                reference: Callable[..., Any] | None = None,
                backward: Callable[..., Sequence[Tensor | None]] | None = None) -> Tensor:  # fmt: skip
    """Compute a tensor like `a` by a function of one source.

    Args:
        a: any type and layout; the function honours its strides.
        fun: (dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth); compiled by Numba, so it must keep to what that
            takes, and not raise.
        n_tasks: at most so many threads call it; -1: all.
        inplace: put the result where `a` lies.
        reference: (node, a) -> result, NumPy arrays as `Op.reference` takes.
        backward: (node, grad, need) -> gradients of the sources, as `Op.backward` takes.

    Returns:
        The type and shape of `a`.

    Raises:
        TypeError: `fun` is no function of these arguments.

    Source: ggml_map_custom1.
    """
    return _custom(MAP_CUSTOM1, "map_custom1", (a,), _Function(fun, reference, backward), n_tasks, a, inplace)


@checked
def map_custom2(a: Tensor, b: Tensor, fun: Callable[..., Any], n_tasks: int = -1, *, inplace: bool = False,
                reference: Callable[..., Any] | None = None,
                backward: Callable[..., Sequence[Tensor | None]] | None = None) -> Tensor:  # fmt: skip
    """Compute a tensor like `a` by a function of two sources; see `map_custom1`. Source: ggml_map_custom2."""
    return _custom(MAP_CUSTOM2, "map_custom2", (a, b), _Function(fun, reference, backward), n_tasks, a, inplace)


@checked
def map_custom3(a: Tensor, b: Tensor, c: Tensor, fun: Callable[..., Any], n_tasks: int = -1, *, inplace: bool = False,
                reference: Callable[..., Any] | None = None,
                backward: Callable[..., Sequence[Tensor | None]] | None = None) -> Tensor:  # fmt: skip
    """Compute a tensor like `a` by a function of three sources; see `map_custom1`. Source: ggml_map_custom3."""
    return _custom(MAP_CUSTOM3, "map_custom3", (a, b, c), _Function(fun, reference, backward), n_tasks, a, inplace)


@checked
def custom_4d(type: Type, ne0: int, ne1: int, ne2: int, ne3: int, args: Sequence[Tensor], fun: Callable[..., Any],
              n_tasks: int = -1, *, reference: Callable[..., Any] | None = None,
              backward: Callable[..., Sequence[Tensor | None]] | None = None) -> Tensor:  # fmt: skip
    """Compute a tensor of any type and shape by a function of up to 10 sources.

    Args:
        type: of the result.
        ne0: size of dimension 0.
        ne1: size of dimension 1.
        ne2: size of dimension 2.
        ne3: size of dimension 3.
        args: the sources.
        fun: (dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ..., ith, nth).
        n_tasks: at most so many threads call it; -1: all.
        reference: (node, *sources) -> result.
        backward: (node, grad, need) -> gradients of the sources.

    Returns:
        [ne0, ne1, ne2, ne3], of `type`.

    Raises:
        TypeError: `fun` is no function of these arguments.
        ValueError: there are more than 10 sources.

    Source: ggml_custom_4d.
    """
    ne = as_dims("custom_4d", type, ne0, ne1, ne2, ne3)
    function = _Function(fun, reference, backward)
    return _custom(CUSTOM, "custom_4d", tuple(args), function, n_tasks, None, False, type, ne)


@checked
def custom_inplace(a: Tensor, args: Sequence[Tensor], fun: Callable[..., Any], n_tasks: int = -1, *,
                   reference: Callable[..., Any] | None = None,
                   backward: Callable[..., Sequence[Tensor | None]] | None = None) -> Tensor:  # fmt: skip
    """Compute in the place of `a`, which is source 0, by a function of up to 10 sources; see `custom_4d`.

    Source: ggml_custom_inplace.
    """
    function = _Function(fun, reference, backward)
    return _custom(CUSTOM, "custom_inplace", (a, *args), function, n_tasks, a, True)


# --- reference, kernel, backward --------------------------------------------------------------------------------------


def _function(node: Tensor) -> _Function:
    return _functions[node.params.function]


def _reference(node, *sources):
    reference = _function(node).reference
    if reference is None:
        raise NotImplementedError(
            f"{node.op.name}: a reference must be given with the function, got none ('{node.name}')"
        )
    return reference(node, *sources)


def _arguments(n_src: int) -> list[str]:
    """Names of a function's arguments."""
    tensors = ["dst", *(f"src{i}" for i in range(n_src))]
    return [name + part for name in tensors for part in ("", "_ne", "_nb")] + ["ith", "nth"]


@functools.lru_cache(256)
def make_custom(function: Callable[..., Any], n_src: int, n_tasks: int) -> Kernel:
    """Kernel that calls a function of n_src sources in up to n_tasks threads (-1: all)."""
    compiled = function if isinstance(function, Jitted) else jitted(function)
    limit = n_tasks if n_tasks > 0 else 1 << 30
    names = _arguments(n_src)[:-2]
    # A kernel's sources stand in its signature, so that it is written out for their number.
    text = (
        f"def custom_function({', '.join(names)}, op_params, work, ith, nth):\n"
        f"    tasks = nth if nth < limit else limit\n"
        f"    if ith < tasks:\n"
        f"        call({', '.join(names)}, ith, tasks)\n"
    )
    scope: dict[str, Any] = {"call": compiled, "limit": limit}
    exec(text, scope)
    made: Kernel = kernel(counts_threads=True)(scope["custom_function"])  # it may keep something for each of them
    return made


def _select(node):
    return make_custom(_function(node).function, len(node.src), node.params.n_tasks)


def _backward(node, grad, need):
    backward = _function(node).backward
    if backward is None:
        refuse(node, "a backward rule must be given with the function, got none")
    return backward(node, grad, need)


for _op in (MAP_CUSTOM1, MAP_CUSTOM2, MAP_CUSTOM3, CUSTOM):
    _op.reference(_reference)
    _op.kernel(_select)
    _op.backward(_backward)


# --- cases ------------------------------------------------------------------------------------------------------------


def _double(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
    """Twice each value of contiguous f32."""
    n = dst_ne[0] * dst_ne[1]
    for i in range(n * ith // nth, n * (ith + 1) // nth):
        memory.store_f32(dst, 4 * i, 2 * memory.load_f32(src0, 4 * i))


def _mix(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, ith, nth):
    """a + b / 2, any strides of matrices."""
    for i1 in range(dst_ne[1] * ith // nth, dst_ne[1] * (ith + 1) // nth):
        for i0 in range(dst_ne[0]):
            b = memory.load_f32(src1, i0 * src1_nb[0] + i1 * src1_nb[1])
            a = memory.load_f32(src0, i0 * src0_nb[0] + i1 * src0_nb[1])
            memory.store_f32(dst, i0 * dst_nb[0] + i1 * dst_nb[1], a + b * np.float32(0.5))


def _choose(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, src2, src2_ne, src2_nb, ith, nth):
    """c > 0 ? a : b, contiguous f32."""
    for i in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
        c = memory.load_f32(src2, 4 * i)
        memory.store_f32(dst, 4 * i, memory.load_f32(src0, 4 * i) if c > 0 else memory.load_f32(src1, 4 * i))


def _count(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
    """Positive values of each row, as i32."""
    for row in range(dst_ne[0] * ith // nth, dst_ne[0] * (ith + 1) // nth):
        n = 0
        for i in range(src0_ne[0]):
            if memory.load_f32(src0, i * src0_nb[0] + row * src0_nb[1]) > 0:
                n += 1
        memory.store_i32(dst, 4 * row, n)


def _cases():
    from ggjit import types
    from ggjit.ops.scale import scale
    from ggjit.ops.views import transpose

    def doubled(node, grad, need):
        return (scale(grad, 2.0),)

    def halved(node, grad, need):
        return grad, scale(grad, 0.5)

    for name, n_tasks, inplace in (("all threads", -1, False), ("one task", 1, False), ("in place", 2, True)):
        MAP_CUSTOM1.case(name)(
            lambda t, n=n_tasks, i=inplace: map_custom1(
                t("F32", 33, 5), _double, n, inplace=i, reference=lambda node, a: 2 * a, backward=doubled
            )
        )
    MAP_CUSTOM2.case("strided")(
        lambda t: map_custom2(
            transpose(t("F32", 5, 33)), t("F32", 33, 5), _mix, reference=lambda node, a, b: a + b / 2, backward=halved
        )
    )
    MAP_CUSTOM3.case("three sources")(
        lambda t: map_custom3(
            t("F32", 65), t("F32", 65), t("F32", 65), _choose, reference=lambda node, a, b, c: np.where(c > 0, a, b)
        )
    )
    CUSTOM.case("another type and shape")(
        lambda t: custom_4d(
            types.I32,
            *(7, 1, 1, 1),
            [t("F32", 40, 7)],
            _count,
            reference=lambda node, a: (a > 0).sum(-1).reshape(1, 1, 1, -1),
        )
    )
    CUSTOM.case("in place")(
        lambda t: custom_inplace(t("F32", 33, 5), [t("F32", 33, 5)], _mix, reference=lambda node, a, b: a + b / 2)
    )


_cases()
