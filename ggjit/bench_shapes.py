"""Shapes that ops are measured on: those of ggml's `test-backend-ops perf` and of models, larger than the last cache.

A shape is a function that builds one node from leafs, as a test case is (`ggjit.dev.cases`):

    Shape("mul_mat", "4096 x 14336, 8 columns", "Q4_0", lambda t: mul_mat(t.weights("Q4_0", 14336, 4096), ...))

`small` makes the same of data that stays in a core's own cache. Results of large shapes are checked on a sample: some
indices of one dimension of the result, for which some dimension of each source is cut in the same way. Without a word
about it these are the last dimension of the result and, of sources as long there, the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggjit import ops, types
from ggjit.name_hints import closest
from ggjit.ops.glu import GATES
from ggjit.ops.unary import FUNCTIONS
from ggjit.tensor import Tensor

__all__ = ["Shape", "shapes"]

Build = Callable[..., Tensor]
PLAIN = ("F32", "F16", "BF16")
COLUMNS = 4096
WHOLE: tuple[int, dict[int, int]] = (4, {})  # no dimension is sampled
_DEFAULT_UNARY = ("abs", "relu", "silu", "gelu", "gelu_erf", "sigmoid", "tanh", "exp", "softplus")
DEFAULT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")


@dataclass(frozen=True)
class Shape:
    """One thing to measure.

    Attributes:
        name: of the function that builds the node.
        label: sizes and layout.
        type: what `--type` selects: of weights, tables and caches, else of the first source.
        build: f(t) -> node; `t` makes the leafs.
        sample: dimension of the result that is sampled, and that of each leaf cut with it (by position, absent: whole).
        is_default: measured unless an op or a type is asked for.
    """

    name: str
    label: str
    type: str
    build: Build
    sample: tuple[int, Mapping[int, int]] | None = None
    is_default: bool = True


def builder_name(where: str, op: Any) -> str:
    """The name of a builder that a function was given, or its name.

    Raises:
        TypeError: `op` is neither.
    """
    if isinstance(op, str):
        return op
    if not callable(op) or not hasattr(op, "__name__"):
        raise TypeError(f"{where}: op must be a builder such as gg.add, or its name, got {op!r}")
    return str(op.__name__).rpartition(".")[2]  # `ops.norm` is a module


def shapes(op: str | None = None, type: str | None = None, small: bool = False) -> list[Shape]:
    """Shapes to measure.

    Args:
        op: only those that this function builds ("silu", "mul_mat"), or those of this op ("unary", "glu").
        type: only those of this type.
        small: data that fits a core's cache.

    Returns:
        A handful for each op; all of what `op` or `type` asks for.

    Raises:
        ValueError: no shape is of that op or type.
    """
    from ggjit.bench_products import FAMILIES

    every = [s for family in (*_FAMILIES, *FAMILIES) for s in family(small)]
    names = {s.name for s in every} | set(_GROUPS)
    if op is not None and op not in names:
        raise ValueError(f"bench ops: op must be one of {', '.join(sorted(names))}, got {op!r}{closest(op, names)}")
    if type is not None and type not in {s.type for s in every}:
        raise ValueError(f"bench ops: type must be one of {', '.join(sorted({s.type for s in every}))}, got {type!r}")
    wanted = {op, *_GROUPS.get(op or "", ())}
    found = [s for s in every if (op is None or s.name in wanted) and (type is None or s.type == type)]
    if not found:
        raise ValueError(f"bench ops: there must be a shape of that op and type, got {op!r} and {type!r}")
    return [s for s in found if s.is_default or op is not None or type is not None]


_GROUPS: dict[str, tuple[str, ...]] = {
    "unary": FUNCTIONS,
    "glu": (*(f"{f}_split" for f in GATES), *GATES, "swiglu_oai", "swiglu_clamp"),
    "cpy": ("cpy", "cast"),
}


def _rows(small: bool) -> int:
    return 12 if small else 4096


def _elementwise(small: bool) -> Iterator[Shape]:
    n, r = COLUMNS, _rows(small)
    where = f"[{n}, {r}]"
    for name in ("add", "sub", "mul", "div"):
        f = getattr(ops, name)
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", n, r), t("F32", n, r, low=0.5)))
        yield Shape(
            name,
            f"{where}, one row",
            "F32",
            lambda t, f=f: f(t("F32", n, r), t("F32", n, low=0.5)),
            None,
            name in "add mul",
        )
        for kind in ("F16", "BF16"):
            yield Shape(
                name, where, kind, lambda t, f=f, k=kind: f(t(k, n, r), t(k, n, r, low=0.5)), None, name == "add"
            )
    for name in ("sqr", "sqrt", "log", "sin", "cos"):
        f = getattr(ops, name)
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", n, r, low=0.1)))
    for name in FUNCTIONS:
        f = (lambda a: ops.xielu(a, 0.5, 0.7, 0.5, -1e-6)) if name == "xielu" else getattr(ops, name)
        for kind in PLAIN:
            default = name in _DEFAULT_UNARY and (kind == "F32" or name == "silu")
            yield Shape(name, where, kind, lambda t, f=f, k=kind: f(t(k, n, r, low=-4, high=4)), None, default)
    for name in GATES:
        f, g = getattr(ops, name), getattr(ops, f"{name}_split")
        default = name in ("swiglu", "geglu")
        yield Shape(f"{name}_split", where, "F32", lambda t, g=g: g(t("F32", n, r), t("F32", n, r)), None, default)
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", 2 * n, r)), None, False)
        yield Shape(f"{name}_split", where, "F16", lambda t, g=g: g(t("F16", n, r), t("F16", n, r)), None, False)
    yield Shape(
        "swiglu_oai", where, "F32", lambda t: ops.swiglu_oai(t("F32", n, r), t("F32", n, r), 1.702, 7.0), None, False
    )
    yield Shape(
        "swiglu_clamp", where, "F32", lambda t: ops.swiglu_clamp(t("F32", n, r), t("F32", n, r), 1.0), None, False
    )
    yield Shape("scale", where, "F32", lambda t: ops.scale(t("F32", n, r), 0.3))
    yield Shape("scale_bias", where, "F32", lambda t: ops.scale_bias(t("F32", n, r), 0.3, 1.0), None, False)
    yield Shape("clamp", where, "F32", lambda t: ops.clamp(t("F32", n, r), -0.5, 0.5))
    yield Shape("leaky_relu", where, "F32", lambda t: ops.leaky_relu(t("F32", n, r), 0.1))
    yield Shape("add1", where, "F32", lambda t: ops.add1(t("F32", n, r), t("F32", 1)))
    yield Shape(
        "add_id", where, "F32",
        lambda t: ops.add_id(t("F32", n, 4, r // 4), t("F32", n, 32), t.ints("I32", 4, r // 4, high=32)),
        (2, {0: 2, 2: 1}),
    )  # fmt: skip
    for name in ("acc", "set"):
        f = getattr(ops, name)
        yield Shape(
            name, where, "F32", lambda t, f=f: f(t("F32", n, r), t("F32", n // 2, r), 4 * n, 4 * n * r, 4 * n * r, 256)
        )
    yield Shape("silu_back", where, "F32", lambda t: ops.silu_back(t("F32", n, r), t("F32", n, r)))


def _rowwise(small: bool) -> Iterator[Shape]:
    n, r = COLUMNS, _rows(small)
    where = f"[{n}, {r}]"
    for name in ("norm", "rms_norm", "l2_norm"):
        f = getattr(ops, name)
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", n, r), 1e-5))
        yield Shape(name, f"[128, {32 * r}]", "F32", lambda t, f=f: f(t("F32", 128, 32 * r), 1e-5), None, False)
    yield Shape("rms_norm_back", where, "F32", lambda t: ops.rms_norm_back(t("F32", n, r), t("F32", n, r), 1e-5))
    yield Shape(
        "group_norm", f"[64, 64, {r}]", "F32", lambda t: ops.group_norm(t("F32", 64, 64, r), r // 4, 1e-5), WHOLE
    )
    yield Shape("soft_max", where, "F32", lambda t: ops.soft_max(t("F32", n, r, low=-8, high=8)))
    yield Shape(
        "soft_max_ext", f"[1024, {r // 4}, 16], f16 mask", "F32",
        lambda t: ops.soft_max_ext(t("F32", 1024, r // 4, 16), t("F16", 1024, r // 4), 0.1),
        (1, {0: 1, 1: 1}),
    )  # fmt: skip
    yield Shape(
        "soft_max_ext_back",
        where,
        "F32",
        lambda t: ops.soft_max_ext_back(t("F32", n, r), t("F32", n, r, low=0), 1.0, 0.0),
    )
    for name in ("sum", "sum_rows", "mean", "cumsum", "argmax"):
        f = getattr(ops, name)
        sample = (0, {0: 1}) if name == "argmax" else None
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", n, r)), sample)
    yield Shape("count_equal", where, "I32", lambda t: ops.count_equal(t.ints("I32", n, r), t.ints("I32", n, r)))
    yield Shape("argsort", f"[{n}, {r // 4}]", "F32", lambda t: ops.argsort(t("F32", n, r // 4), 0))
    yield Shape("top_k", f"[{n}, {r // 4}], 40", "F32", lambda t: ops.top_k(t("F32", n, r // 4), 40))
    for name in ("diag_mask_inf", "diag_mask_zero"):
        f = getattr(ops, name)
        yield Shape(name, where, "F32", lambda t, f=f: f(t("F32", n, r), 64), WHOLE)
    yield Shape("tri", "[512, 512, n]", "F32", lambda t: ops.tri(t("F32", 512, 512, max(1, r // 64)), 3))
    for name, mode, kind in (("NORMAL", 0, "F32"), ("NEOX", 2, "F32"), ("NORMAL", 0, "F16"), ("NEOX", 2, "F16")):
        for f in (ops.rope_ext, ops.rope_ext_back):
            yield Shape(
                f.__name__, f"[128, 32, {r}] {name}", kind,
                lambda t, m=mode, k=kind, f=f: f(
                    t(k, 128, 32, r), t.ints("I32", r, high=4096), None, 128, m, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0
                ),
                (2, {0: 2, 1: 0}), kind == "F32",
            )  # fmt: skip
    yield Shape(
        "cross_entropy_loss", where, "F32", lambda t: ops.cross_entropy_loss(t("F32", n, r), t("F32", n, r, low=0))
    )
    yield Shape(
        "cross_entropy_loss_back", where, "F32",
        lambda t: ops.cross_entropy_loss_back(t("F32", 1), t("F32", n, r), t("F32", n, r, low=0)), WHOLE,
    )  # fmt: skip
    adamw = np.array([0.1, 0.8, 0.95, 1e-5, 0.1, 1.2, 3.0], np.float32)
    yield Shape(
        "opt_step_adamw", where, "F32",
        lambda t: ops.opt_step_adamw(
            t("F32", n, r).set_param(), t("F32", n, r), t("F32", n, r), t("F32", n, r, low=0), t.array(adamw)
        ),
    )  # fmt: skip
    sgd = np.array([1e-3, 0.1], np.float32)
    yield Shape(
        "opt_step_sgd", where, "F32",
        lambda t: ops.opt_step_sgd(t("F32", n, r).set_param(), t("F32", n, r), t.array(sgd)),
    )  # fmt: skip


def _copies(small: bool) -> Iterator[Shape]:
    n, r = COLUMNS, _rows(small)
    where = f"[{n}, {r}]"
    quantized = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
    pairs = [(s, d) for s in PLAIN for d in PLAIN if s != d]
    for s, d in [
        *pairs,
        ("I32", "F32"),
        ("F32", "I32"),
        *((q, "F32") for q in quantized),
        ("F32", "Q8_0"),
        ("F32", "Q4_0"),
    ]:
        default = (s, d) in (
            ("F32", "F16"),
            ("F16", "F32"),
            ("F32", "BF16"),
            ("BF16", "F32"),
            ("F32", "Q8_0"),
            ("Q4_0", "F32"),
        )
        yield Shape(
            "cast",
            f"{where} to {d}",
            s,
            lambda t, s=s, d=d: ops.cast(_any(t, s, n, r), types.by_name(d)),
            None,
            default,
        )
    for kind in ("F32", "F16", "I8"):
        for name, f in (("dup", ops.dup), ("cont", ops.cont)):
            yield Shape(name, where, kind, lambda t, f=f, k=kind: f(_any(t, k, n, r)), None, kind == "F32")
        yield Shape(
            "cont", f"[128, 32, {r}] permuted 0 2 1 3", kind,
            lambda t, k=kind: ops.cont(ops.permute(_any(t, k, 128, 32, r), 0, 2, 1, 3)), (1, {0: 2}), kind != "I8",
        )  # fmt: skip
        yield Shape(
            "cont", f"{where} transposed", kind, lambda t, k=kind: ops.cont(ops.transpose(_any(t, k, n, r))),
            (0, {0: 1}), kind == "F32",
        )  # fmt: skip
    for s, d in (("F32", "F16"), ("F16", "F32"), ("F32", "BF16")):
        yield Shape(
            "cast", f"[128, 32, {r}] permuted 0 2 1 3 to {d}", s,
            lambda t, s=s, d=d: ops.cast(ops.permute(t(s, 128, 32, r), 0, 2, 1, 3), types.by_name(d)),
            (1, {0: 2}), s == "F32",
        )  # fmt: skip
        yield Shape(
            "cast", f"{where} transposed to {d}", s,
            lambda t, s=s, d=d: ops.cast(ops.transpose(t(s, n, r)), types.by_name(d)), (0, {0: 1}), False,
        )  # fmt: skip
    ids = np.random.default_rng(1).permutation(r).astype(np.int32)
    for kind in [t.name for t in types.all_types() if t.name in PLAIN or t.is_quantized]:
        yield Shape(
            "get_rows", f"{r} of [{n}, {r}]", kind,
            lambda t, k=kind: ops.get_rows(t(k, n, r), t.array(ids)), (1, {1: 0}), kind in DEFAULT_TYPES,
        )  # fmt: skip
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
        yield Shape(
            "set_rows", f"{r} of [1024, {4 * r}]", kind,
            lambda t, k=kind: ops.set_rows(t(k, 1024, 4 * r), t("F32", 1024, 4 * r), t.array(_numbers(4 * r))),
            WHOLE, kind in ("F32", "F16", "Q8_0"),
        )  # fmt: skip
    yield Shape(
        "get_rows_back", where, "F32", lambda t: ops.get_rows_back(t("F32", n, r), t.array(ids), t("F32", n, r)), WHOLE
    )
    yield Shape("repeat", f"{where} of one row", "F32", lambda t: ops.repeat_4d(t("F32", n, 1), n, r, 1, 1), WHOLE)
    yield Shape(
        "repeat", f"{where} of half rows", "F32", lambda t: ops.repeat_4d(t("F32", n // 2, r), n, r, 1, 1), WHOLE
    )
    yield Shape("repeat_back", f"{where} to one row", "F32", lambda t: ops.repeat_back(t("F32", n, r), t("F32", n)))
    for dim in range(2):
        sample = (1, {0: 1, 1: 1}) if dim == 0 else WHOLE
        yield Shape(
            "concat", f"2 of {where}, dimension {dim}", "F32",
            lambda t, d=dim: ops.concat(t("F32", n, r), t("F32", n, r), d), sample,
        )  # fmt: skip
    yield Shape("pad", f"{where}, 32 each side", "F32", lambda t: ops.pad_ext(t("F32", n, r), 32, 32, 0, 0, 0, 0, 0, 0))
    yield Shape("pad_reflect_1d", where, "F32", lambda t: ops.pad_reflect_1d(t("F32", n, r), 32, 32))
    yield Shape("roll", where, "F32", lambda t: ops.roll(t("F32", n, r), 100, 3, 0, 0), WHOLE)
    yield Shape("fill", where, "F32", lambda t: ops.fill(t("F32", n, r), 2.5))
    yield Shape("arange", f"{n * r}", "F32", lambda t: ops.arange(0, min(n * r, 1 << 24), 1))
    yield Shape("diag", "[512, 1, n]", "F32", lambda t: ops.diag(t("F32", 512, 1, max(1, r // 64))))
    yield Shape(
        "timestep_embedding", f"[320, {8 * r}]", "F32",
        lambda t: ops.timestep_embedding(t("F32", 8 * r, low=0, high=1000), 320, 10000), (1, {0: 0}),
    )  # fmt: skip


def _any(t: Any, kind: str, *ne: int) -> Tensor:
    made: Tensor = t.ints(kind, *ne, high=100) if kind[0] == "I" and kind[1:].isdigit() else t(kind, *ne)
    return made


def _numbers(n: int) -> Any:
    return np.random.default_rng(1).permutation(n).astype(np.int64)


_FAMILIES = (_elementwise, _rowwise, _copies)
