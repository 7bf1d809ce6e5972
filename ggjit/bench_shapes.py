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
from ggjit.ops.attention import causal_mask
from ggjit.ops.glu import GATES
from ggjit.ops.unary import FUNCTIONS
from ggjit.tensor import Tensor

__all__ = ["Shape", "shapes"]

Build = Callable[..., Tensor]
PLAIN = ("F32", "F16", "BF16")
COLUMNS = 4096
WHOLE: tuple[int, dict[int, int]] = (4, {})  # no dimension is sampled
_DEFAULT_UNARY = ("abs", "relu", "silu", "gelu", "gelu_erf", "sigmoid", "tanh", "exp", "softplus")
_DEFAULT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")


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
    every = [s for family in _FAMILIES for s in family(small)]
    names = {s.name for s in every} | set(_GROUPS)
    if op is not None and op not in names:
        raise ValueError(f"bench ops: op must be one of {', '.join(sorted(names))}, got {op!r}")
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
            lambda t, k=kind: ops.get_rows(t(k, n, r), t.array(ids)), (1, {1: 0}), kind in _DEFAULT_TYPES,
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


def _products(small: bool) -> Iterator[Shape]:
    k, m = (1024, 256) if small else (14336, 4096)
    for kind in [t.name for t in types.all_types() if t.name in PLAIN or t.is_quantized]:
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 512):
            default = kind in _DEFAULT_TYPES and n in (1, 8, 512)
            yield Shape(
                "mul_mat", f"{m} x {k}, {n} columns", kind,
                lambda t, f=kind, n=n: ops.mul_mat(t.weights(f, k, m), t("F32", k, n)), (0, {0: 1}), default,
            )  # fmt: skip
    k, m, experts = (256, 128, 4) if small else (2048, 1408, 32)
    for kind in ("F32", "F16", "Q4_0", "Q4_K"):
        for n in (1, 128):
            yield Shape(
                "mul_mat_id", f"4 of {experts} of {m} x {k}, {n} tokens", kind,
                lambda t, f=kind, n=n: ops.mul_mat_id(
                    t.weights(f, k, m, experts), t("F32", k, 1, n), t.array(_experts(experts, n))
                ),
                (0, {0: 1}), kind in ("F16", "Q4_0"),
            )  # fmt: skip
    n = 256 if small else 2048
    yield Shape(
        "out_prod",
        f"[{n}, 64] x [{n}, 64]",
        "F32",
        lambda t: ops.out_prod(t("F32", n, 64), t("F32", n, 64)),
        (1, {1: 0}),
    )
    n = 32 if small else 128
    yield Shape(
        "solve_tri", f"[{n}, {n}, 32] for {n} columns", "F32",
        lambda t: ops.solve_tri(
            t.array(t.rng.uniform(-1, 1, (32, n, n)).astype(np.float32) / n + np.eye(n, dtype=np.float32)),
            t("F32", n, n, 32), True, True, False,
        ),
    )  # fmt: skip
    for kind in (*PLAIN, "Q8_0", "Q4_0"):
        for n, n_kv in ((1, 64), (32, 64)) if small else ((1, 16384), (512, 4096)):
            yield Shape(
                "flash_attn_ext", f"32 heads of 128, 8 of KV, {n} queries, {n_kv} rows", kind,
                lambda t, f=kind, n=n, c=n_kv: ops.flash_attn_ext(
                    t("F32", 128, n, 32), t(f, 128, c, 8), t(f, 128, c, 8), t.array(causal_mask(n, c, c - n)), 0.088
                ),
                (2, {0: 1, 3: 1}), kind in ("F16", "Q8_0"),
            )  # fmt: skip


def _experts(n: int, tokens: int) -> Any:
    rng = np.random.default_rng(2)
    return np.array([rng.permutation(n)[:4] for _ in range(tokens)], np.int32)


def _images(small: bool) -> Iterator[Shape]:
    w, c = (32, 8) if small else (256, 64)
    image = f"[{w}, {w}, {c}]"
    for kind in ("F32", "F16"):
        yield Shape(
            "conv_2d_direct", f"3 x 3 on {image}", kind,
            lambda t, k=kind: ops.conv_2d_direct(t(k, 3, 3, c, c), t("F32", w, w, c), 1, 1, 1, 1, 1, 1), (2, {0: 3}),
        )  # fmt: skip
        yield Shape(
            "conv_2d_dw_direct", f"3 x 3 on [{w}, {w}, {8 * c}]", kind,
            lambda t, k=kind: ops.conv_2d_dw_direct(
                t(k, 3, 3, 1, 8 * c), t("F32", w, w, 8 * c), 1, 1, 1, 1, 1, 1
            ),
            (2, {0: 3, 1: 2}), kind == "F32",
        )  # fmt: skip
        yield Shape(
            "conv_transpose_2d_p0", f"2 x 2 on [{w // 2}, {w // 2}, {c}]", kind,
            lambda t, k=kind: ops.conv_transpose_2d_p0(t(k, 2, 2, c, c), t("F32", w // 2, w // 2, c), 2),
            (2, {0: 2}), kind == "F16",
        )  # fmt: skip
        yield Shape(
            "conv_transpose_1d", f"4 on [{8 * w}, {2 * c}]", kind,
            lambda t, k=kind: ops.conv_transpose_1d(t(k, 4, c, 2 * c), t("F32", 8 * w, 2 * c), 2, 0, 1),
            (1, {0: 1}), kind == "F32",
        )  # fmt: skip
        yield Shape(
            "im2col", f"3 x 3 on {image}", kind,
            lambda t, k=kind: ops.im2col(
                t(k, 3, 3, c, c), t("F32", w, w, c), 1, 1, 1, 1, 1, 1, True, types.by_name(k)
            ),
            WHOLE,
        )  # fmt: skip
    d = 8 if small else 32
    yield Shape(
        "im2col_back", f"3 x 3 on {image}", "F32",
        lambda t: ops.im2col_back(
            t("F32", 9 * c, w, w), t("F32", 3, 3, c, c), (w, w, c, 1), 1, 1, 1, 1, 1, 1, True
        ),
        WHOLE,
    )  # fmt: skip
    yield Shape(
        "im2col_3d", f"3 x 3 x 3 on [{d}, {d}, {d}, {c // 2}]", "F32",
        lambda t: ops.im2col_3d(
            t("F32", 3, 3, 3, c // 2), t("F32", d, d, d, c // 2), c // 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, types.F32
        ),
        WHOLE,
    )  # fmt: skip
    yield Shape(
        "conv_3d_direct", f"3 x 3 x 3 on [{d}, {d}, {d}, {c // 2}]", "F32",
        lambda t: ops.conv_3d_direct(
            t("F32", 3, 3, 3, c // 2 * 8), t("F32", d, d, d, c // 2), 1, 1, 1, 1, 1, 1, 1, 1, 1, c // 2, 1, 8
        ),
        WHOLE,
    )  # fmt: skip
    yield Shape(
        "col2im_1d", f"4 on [{8 * w}, {c}]", "F32",
        lambda t: ops.col2im_1d(t("F32", 4 * c, 8 * w), 2, c, 1), WHOLE,
    )  # fmt: skip
    for pool, name in ((0, "max"), (1, "avg")):
        yield Shape(
            "pool_2d", f"{name}, 2 x 2 on {image}", "F32",
            lambda t, p=pool: ops.pool_2d(t("F32", w, w, c), p, 2, 2, 2, 2, 0, 0),
        )  # fmt: skip
        yield Shape(
            "pool_1d", f"{name}, 2 on [{w}, {w * c}]", "F32",
            lambda t, p=pool: ops.pool_1d(t("F32", w, w * c), p, 2, 2, 0),
        )  # fmt: skip
        yield Shape(
            "pool_2d_back", f"{name}, 2 x 2 on {image}", "F32",
            lambda t, p=pool: ops.pool_2d_back(t("F32", w // 2, w // 2, c), t("F32", w, w, c), p, 2, 2, 2, 2, 0, 0),
        )  # fmt: skip
    for mode, name in ((0, "nearest"), (1, "bilinear"), (2, "bicubic")):
        yield Shape(
            "upscale", f"{name}, 2 on [{w // 2}, {w // 2}, {4 * c}]", "F32",
            lambda t, m=mode: ops.upscale(t("F32", w // 2, w // 2, 4 * c), 2, m),
        )  # fmt: skip
    yield Shape("win_part", f"14 of [{c}, {w}, {w}]", "F32", lambda t: ops.win_part(t("F32", c, w, w), 14), WHOLE)
    n = (-(-w // 14)) ** 2
    yield Shape(
        "win_unpart", f"14 to [{c}, {w}, {w}]", "F32",
        lambda t: ops.win_unpart(t("F32", c, 14, 14, n), w, w, 14), WHOLE,
    )  # fmt: skip
    yield Shape(
        "get_rel_pos", f"[{c}, {w}, {w}]", "F16", lambda t: ops.get_rel_pos(t("F16", c, 2 * w - 1), w, w), WHOLE
    )
    h = 16 if small else 64
    yield Shape(
        "add_rel_pos", f"[{h * h}, {h * h}, 4]", "F32",
        lambda t: ops.add_rel_pos(t("F32", h * h, h * h, 2), t("F32", h, h, h, 2), t("F32", h, h, h, 2)), WHOLE,
    )  # fmt: skip


def _recurrences(small: bool) -> Iterator[Shape]:
    heads, tokens = (2, 4) if small else (32, 256)
    ne, state = (64, heads, tokens), (64 * 64 * heads, 1)
    where = f"{heads} heads of 64, {tokens} tokens"
    d = 256 if small else 4096
    yield Shape(
        "ssm_conv", f"4 x {d}, {tokens} tokens", "F32",
        lambda t: ops.ssm_conv(t("F32", 3 + tokens, d), t("F32", 4, d)), (0, {0: 1, 1: 1}),
    )  # fmt: skip
    for name, n, dim, m, a in (("Mamba 1", 16, 1, d, 16), ("Mamba 2", 128, 64, heads, 1)):
        yield Shape(
            "ssm_scan", f"{name}, {m} heads of {dim}, {tokens} tokens", "F32",
            lambda t, n=n, dim=dim, m=m, a=a: ops.ssm_scan(
                t("F32", n, dim, m), t("F32", dim, m, tokens), t("F32", m, tokens, low=-3, high=3),
                t("F32", a, m, low=-2, high=0), t("F32", n, 1, tokens), t("F32", n, 1, tokens),
                t.array(np.zeros(1, np.int32)),
            ),
        )  # fmt: skip
    yield Shape(
        "rwkv_wkv6", where, "F32",
        lambda t: ops.rwkv_wkv6(
            t("F32", *ne), t("F32", *ne), t("F32", *ne), t("F32", 64, heads), t("F32", *ne, low=0), t("F32", *state)
        ),
        WHOLE,
    )  # fmt: skip
    yield Shape(
        "rwkv_wkv7", where, "F32",
        lambda t: ops.rwkv_wkv7(
            t("F32", *ne), t("F32", *ne, low=0), t("F32", *ne), t("F32", *ne), t("F32", *ne, low=-0.1, high=0.1),
            t("F32", *ne, low=-0.1, high=0.1), t("F32", *state),
        ),
        WHOLE,
    )  # fmt: skip
    yield Shape(
        "gated_linear_attn", where, "F32",
        lambda t: ops.gated_linear_attn(
            t("F32", *ne), t("F32", *ne), t("F32", *ne), t("F32", *ne, low=0, high=0.9), t("F32", *state), 0.125
        ),
        WHOLE,
    )  # fmt: skip
    delta = (128, heads // 2, tokens)
    yield Shape(
        "gated_delta_net", f"{heads // 2} heads of 128, {tokens} tokens", "F32",
        lambda t: ops.gated_delta_net(
            t("F32", *delta, low=-0.1, high=0.1), t("F32", *delta, low=-0.1, high=0.1), t("F32", *delta),
            t("F32", 1, *delta[1:], high=0), t("F32", 1, *delta[1:], low=0), t("F32", 128, 128, heads // 2),
        ),
        WHOLE,
    )  # fmt: skip
    n, c = (4, 128) if small else (128, 4096)
    yield Shape(
        "lightning_indexer", f"64 heads of 128, {n} tokens, {c} rows", "F16",
        lambda t: ops.lightning_indexer(
            t("F32", 128, 64, n), t("F16", 128, 1, c), t("F32", 64, n), t("F16", c, n, low=0, high=0)
        ),
    )  # fmt: skip
    n = 8 if small else 2048
    yield Shape(
        "dsv4_hc_comb", f"4 streams, {n} tokens", "F32",
        lambda t: ops.dsv4_hc_comb(t("F32", 24, n), t("F32", 3), t("F32", 24), 1e-2, 20), (2, {0: 1}),
    )  # fmt: skip
    yield Shape(
        "dsv4_hc_pre", f"4 streams of {COLUMNS}, {n} tokens", "F32",
        lambda t: ops.dsv4_hc_pre(t("F32", COLUMNS, 4, n), t("F32", 4, n)), (1, {0: 2, 1: 1}),
    )  # fmt: skip
    yield Shape(
        "dsv4_hc_post", f"4 streams of {COLUMNS}, {n} tokens", "F32",
        lambda t: ops.dsv4_hc_post(
            t("F32", COLUMNS, n), t("F32", COLUMNS, 4, n), t("F32", 4, n), t("F32", 4, 4, n)
        ),
        (2, {0: 1, 1: 2, 2: 1, 3: 2}),
    )  # fmt: skip


_FAMILIES = (_elementwise, _rowwise, _copies, _products, _images, _recurrences)
