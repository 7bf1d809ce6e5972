"""Shapes of ops that take many operations a byte: products, attention, images, recurrences (see `bench_shapes`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ggjit import ops, types
from ggjit.bench_shapes import COLUMNS, DEFAULT_TYPES, PLAIN, WHOLE, Shape
from ggjit.ops.attention import causal_mask

__all__ = ["FAMILIES"]

BEYOND_CACHES = 192 << 20  # bytes


def _mul_mat(small: bool) -> Iterator[Shape]:
    k, m = (1024, 256) if small else (14336, 4096)
    for kind in [t.name for t in types.all_types() if t.name in PLAIN or (t.quant is not None and t.quant.panel)]:
        rows = BEYOND_CACHES // types.row_size(types.by_name(kind), k) // 64 * 64
        if not small and rows > m:  # 4096 rows of few bits fit into large caches
            yield Shape(
                "mul_mat", f"{rows} x {k}, 1 columns", kind,
                lambda t, f=kind, m=rows: ops.mul_mat(t.weights(f, k, m), t("F32", k, 1)), (0, {0: 1}), False,
            )  # fmt: skip
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 512):
            default = kind in DEFAULT_TYPES and n in (1, 8, 512)
            yield Shape(
                "mul_mat", f"{m} x {k}, {n} columns", kind,
                lambda t, f=kind, n=n: ops.mul_mat(t.weights(f, k, m), t("F32", k, n)), (0, {0: 1}), default,
            )  # fmt: skip


def _mul_mat_id(small: bool) -> Iterator[Shape]:
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


def _matrices(small: bool) -> Iterator[Shape]:
    n = 256 if small else 2048
    yield Shape(
        "out_prod", f"[{n}, 64] x [{n}, 64]", "F32", lambda t: ops.out_prod(t("F32", n, 64), t("F32", n, 64)),
        (1, {1: 0}),
    )  # fmt: skip
    m = 32 if small else 128
    yield Shape(
        "solve_tri", f"[{m}, {m}, 32] for {m} columns", "F32",
        lambda t: ops.solve_tri(
            t.array(t.rng.uniform(-1, 1, (32, m, m)).astype(np.float32) / m + np.eye(m, dtype=np.float32)),
            t("F32", m, m, 32), True, True, False,
        ),
    )  # fmt: skip


def _attention(small: bool) -> Iterator[Shape]:
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


def _indexer(small: bool) -> Iterator[Shape]:
    n, c = (4, 128) if small else (128, 4096)
    yield Shape(
        "lightning_indexer", f"64 heads of 128, {n} tokens, {c} rows", "F16",
        lambda t: ops.lightning_indexer(
            t("F32", 128, 64, n), t("F16", 128, 1, c), t("F32", 64, n), t("F16", c, n, low=0, high=0)
        ),
        (1, {0: 2, 2: 1, 3: 1}),
    )  # fmt: skip


def _hyper_connections(small: bool) -> Iterator[Shape]:
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


FAMILIES = (_mul_mat, _mul_mat_id, _matrices, _attention, _images, _recurrences, _indexer, _hyper_connections)
