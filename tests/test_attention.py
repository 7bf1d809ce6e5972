"""flash_attn_ext: the same bits for any split of queries, threads, padding and layout; masks; errors; instructions."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.cpu import cpu_level
from ggjit.dev import reference as runner
from ggjit.dev.cases import nmse, reference_of, run_case
from ggjit.op import by_name

attention = importlib.import_module("ggjit.ops.attention")
ROWS, LANES = 1000, 0  # values of FEW that force a layout


class Heads:
    """Random q, k, v of some heads with a causal mask (or another) and what attention makes of them."""

    def __init__(self, n, n_kv, heads, heads_kv, dk, dv, kind="F16", mask=None, sinks=False, **options):
        rng = np.random.default_rng(n * n_kv + dk)
        self.kind, self.options = types.by_name(kind), options
        self.q = rng.standard_normal((1, heads, n, dk), np.float32)
        self.k = rng.standard_normal((1, heads_kv, n_kv, dk), np.float32)
        self.v = rng.standard_normal((1, heads_kv, n_kv, dv), np.float32)
        self.mask = attention.causal_mask(n, n_kv, n_kv - n) if mask is None else mask
        self.sinks = rng.standard_normal(heads).astype(np.float32) if sinks else None

    def node(self, queries=slice(None), pad=0):
        """The node for some queries; `pad` KV rows are added and masked."""
        mask = self.mask[..., queries, :]
        mask = np.concatenate([mask, np.full((*mask.shape[:-1], pad), -np.inf, np.float16)], axis=-1)
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0)), constant_values=0.5) for x in (self.k, self.v))
        return ops.flash_attn_ext(
            gg.from_numpy(self.q[:, :, queries]), gg.from_numpy(k, self.kind), gg.from_numpy(v, self.kind),
            gg.from_numpy(mask), 0.3, sinks=None if self.sinks is None else gg.from_numpy(self.sinks), **self.options,
        )  # fmt: skip

    def compute(self, queries=slice(None), pad=0, n_threads=1):
        with gg.Context(64 << 20):
            node = self.node(queries, pad)
            gg.Graph(8).build_forward_expand(node).compute(n_threads)
            return node.numpy().copy()

    def truth(self):
        with gg.Context(64 << 20):
            return reference_of(self.node(), {})


_SIZES = ("n", "n_kv", "heads", "heads_kv", "dk", "dv")
CONFIGS = {
    "grouped": {**dict(zip(_SIZES, (21, 45, 6, 2, 64, 64)))},
    "long": {**dict(zip(_SIZES, (18, 1100, 6, 2, 64, 64))), "sinks": True},
    "odd sizes": {**dict(zip(_SIZES, (17, 70, 5, 1, 40, 24))), "kind": "F32", "max_bias": 8.0, "sinks": True},
    "softcap": {**dict(zip(_SIZES, (19, 600, 2, 2, 128, 128))), "kind": "BF16", "logit_softcap": 6.0},
}


@pytest.fixture(scope="module", params=CONFIGS, ids=list(CONFIGS))
def heads(request):
    return Heads(**CONFIGS[request.param])


def same(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_bits_do_not_depend_on_threads_splits_padding_or_layout(heads, few, monkeypatch):
    monkeypatch.setattr(attention, "FEW", LANES)
    whole = heads.compute()
    monkeypatch.setattr(attention, "FEW", few)
    for n_threads in (1, 2, 3, 4):
        assert same(heads.compute(n_threads=n_threads), whole)
    for begin, end in ((0, 1), (0, 7), (7, 8), (7, 17), (16, 17)):
        assert same(heads.compute(slice(begin, end), pad=17), whole[:, begin:end])
    for pad in (1, 16, 600):
        assert same(heads.compute(pad=pad, n_threads=2), whole)


def test_error_against_float64(heads):
    assert nmse(heads.truth(), heads.compute()) < 1e-11


@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_masked_rows_change_nothing(few, monkeypatch):
    """A sliding window closes whole tiles on both sides; what K and V hold there must not matter."""
    monkeypatch.setattr(attention, "FEW", few)
    i, j = np.arange(20)[:, None], np.arange(100)
    mask = np.where((j > i + 30) & (j <= i + 50), 0, -np.inf).astype(np.float16)
    h = Heads(20, 100, 6, 2, 64, 64, mask=mask)
    before = h.compute()
    assert nmse(h.truth(), before) < 1e-11
    h.k[:, :, :30], h.v[:, :, :30], h.k[:, :, 80:], h.v[:, :, 80:] = 7, -7, 100, 100
    assert same(h.compute(), before)


@pytest.mark.parametrize("heads_kv, mask_heads", [(2, 1), (6, 6)])
@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_tiles_closed_anywhere_are_not_read(few, heads_kv, mask_heads, monkeypatch):
    monkeypatch.setattr(attention, "FEW", few)
    rng = np.random.default_rng(few)
    is_open = rng.random((mask_heads, 9, 13)) < 0.5  # tiles of a query
    is_open[:, :, 5] = False
    mask = np.where(np.repeat(is_open, 16, axis=-1)[..., :200], 0, -np.inf).astype(np.float16)
    h = Heads(9, 200, 6, heads_kv, 64, 64, mask=mask if mask_heads > 1 else mask[0])
    before = h.compute()
    assert nmse(h.truth(), before) < 1e-11
    h.k[:, :, 80:96], h.v[:, :, 80:96] = np.nan, np.nan
    assert same(h.compute(), before)


@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_a_row_that_is_masked_everywhere_is_zero(few, monkeypatch):
    monkeypatch.setattr(attention, "FEW", few)
    h = Heads(**CONFIGS["grouped"])
    h.mask[3] = -np.inf
    assert not h.compute()[:, 3].any() and h.compute()[:, 2].all()


@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_keys_without_elements_weigh_all_rows_alike(few, monkeypatch):
    monkeypatch.setattr(attention, "FEW", few)
    v = np.random.default_rng(1).standard_normal((2, 5, 24)).astype(np.float32)
    with gg.Context(1 << 20):
        q, k = gg.new_tensor(types.F32, 0, 3, 4), gg.new_tensor(types.F16, 0, 5, 2)
        node = ops.flash_attn_ext(q, k, gg.from_numpy(v))
        gg.Graph(8).build_forward_expand(node).compute(2)
        got = node.numpy()[0]  # [n][head][24]
    assert np.allclose(got, np.repeat(v.mean(1), 2, axis=0)[None], atol=1e-6)


def test_mask_and_scale_may_be_left_out():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, 64), np.float32) for n in (3, 5, 5))
    with gg.Context(1 << 20):
        node = gg.flash_attn_ext(*map(gg.from_numpy, (q, k, v)))
        gg.Graph(8).build_forward_expand(node).compute(1)
        scores = np.exp(np.einsum("hqd,hkd->hqk", q, k).astype(np.float64) / 8)
        want = np.einsum("hqk,hkd->qhd", scores / scores.sum(-1, keepdims=True), v)
        assert nmse(want, node.numpy()[0]) < 1e-6


@pytest.mark.parametrize("few", [LANES, ROWS], ids=["lanes", "rows"])
def test_without_kv_rows_the_result_is_zero(few, monkeypatch):
    monkeypatch.setattr(attention, "FEW", few)
    with gg.Context(1 << 20):
        k, v = (gg.new_tensor(types.F16, 64, 0, 2) for _ in range(2))
        node = ops.flash_attn_ext(gg.from_numpy(np.ones((6, 3, 64), np.float32)), k, v, None, 1.0)
        node.set(5)
        gg.Graph(8).build_forward_expand(node).compute(2)
        assert not node.numpy().any()


def test_values_in_the_mask_and_masks_by_head(monkeypatch):
    h = Heads(18, 48, 6, 2, 64, 64, max_bias=4.0)
    mask = np.random.default_rng(1).standard_normal((1, 6, 18, 48)).astype(np.float16)
    mask[:, 1, :, 16:32] = -np.inf
    results = []
    for few in (LANES, ROWS):
        monkeypatch.setattr(attention, "FEW", few)
        with gg.Context(1 << 22):
            q, k, v = (gg.from_numpy(x) for x in (h.q, h.k, h.v))
            node = ops.flash_attn_ext(q, k, v, gg.from_numpy(mask), 0.3, 4.0)
            gg.Graph(8).build_forward_expand(node).compute(2)
            assert nmse(reference_of(node, {}), node.numpy()) < 1e-11
            results.append(node.numpy().copy())
    assert same(*results)


def test_infinite_scores_give_nan_and_stay_in_their_row():
    h = Heads(**CONFIGS["grouped"])
    before = h.compute()
    h.q[0, 0, 4, 0] = np.inf
    after = h.compute()
    assert np.isnan(after[0, 4, 0]).all()
    after[0, 4, 0] = before[0, 4, 0]
    assert same(after, before)


def shapes(**changes):
    given = {"q": ("F32", 32, 3, 4), "k": ("F16", 32, 8, 2), "v": ("F16", 16, 8, 2), "mask": ("F16", 8, 3), **changes}
    return {name: None if s is None else gg.new_tensor(types.by_name(s[0]), *s[1:]) for name, s in given.items()}


@pytest.mark.parametrize(
    ("changes", "options", "error", "text"),
    [
        ({"q": ("F16", 32, 3, 4)}, {}, TypeError, "q must be F32, got F16"),
        ({"k": ("F16", 16, 8, 2)}, {}, ValueError, "the same ne"),
        ({"v": ("F16", 16, 9, 2)}, {}, ValueError, "the same ne"),
        ({"q": ("F32", 32, 3, 3)}, {}, ValueError, "must divide q's"),
        ({"mask": ("F32", 8, 3)}, {}, TypeError, "mask must be F16, got F32"),
        ({"mask": ("F16", 8, 2)}, {}, ValueError, "at least 3 rows"),
        ({"mask": ("F16", 7, 3)}, {}, ValueError, "of 8 columns"),
        ({"mask": ("F16", 8, 3, 3)}, {}, ValueError, "dividing 4"),
        ({"mask": None}, {"max_bias": 8.0}, ValueError, "max_bias must be 0 without a mask"),
        ({}, {"prec": 20}, ValueError, "prec must be 0 or 10"),
        ({}, {"sinks": 3}, ValueError, r"sinks must be contiguous f32 \[4\]"),
    ],
)
def test_errors(changes, options, error, text):
    with gg.Context(1 << 16):
        t = shapes(**changes)
        if "sinks" in options:
            options = {"sinks": gg.new_tensor(types.F32, options["sinks"])}
        with pytest.raises(error, match=f"flash_attn_ext: .*{text}"):
            ops.flash_attn_ext(t["q"], t["k"], t["v"], t["mask"], 1.0, **options)


def test_rows_of_k_must_be_contiguous():
    with gg.Context(1 << 16):
        t = shapes(k=("F16", 8, 32, 2))
        with pytest.raises(ValueError, match="rows of k must be contiguous"):
            ops.flash_attn_ext(t["q"], ops.transpose(t["k"]), t["v"], t["mask"], 1.0)


def test_result_is_permuted():
    with gg.Context(1 << 16):
        t = shapes()
        r = ops.flash_attn_ext(*t.values(), 0.5, prec=10)
        assert (r.ne, r.type, r.params.prec) == ((16, 4, 3, 1), types.F32, 10)


@pytest.mark.skipif(cpu_level() not in ("avx512", "avx2"), reason="other instructions")
def test_inner_loops_are_fused_multiply_adds():
    """Broadcasts from memory are operands of the multiply-adds (AVX-512), and nothing calls a library."""
    from ggjit.ops.lib import attention_lanes, attention_rows

    lanes = attention_lanes.make_kernel(64, 64, "F16", "F16", 3, False).asm()
    rows = attention_rows.make_kernel(64, 64, "F16", "F16", 3, False).asm()
    if cpu_level() == "avx512":
        assert sum("vfmadd" in line and "{1to16}" in line for line in lanes.splitlines()) >= 300
        assert sum("vfmadd" in line and "%zmm" in line for line in rows.splitlines()) >= 150
        assert len(re.findall(r"vmov\w+\s+%zmm\d+, \S*\(%rsp", rows)) < 8  # sums of values stay in registers
    for text in (lanes, rows):
        assert text.count("vfmadd") > 150 and "vcvtph2ps" in text


BITS = """
import zlib
from ggjit.dev.cases import run_case
from ggjit.op import by_name
from ggjit import ops
for op, case in CASES:
    print(op, case, zlib.crc32(run_case(by_name(op), case, 2).result.tobytes()))
"""
SOME = [("flash_attn_ext", "prompt"), ("flash_attn_ext", "token, long"), ("flash_attn_ext", "a few queries"),
        ("rope", "normal, part, yarn"), ("rope", "imrope"), ("soft_max", "f16 mask, slopes, sinks")]  # fmt: skip


@pytest.mark.full
@pytest.mark.skipif(cpu_level() != "avx512", reason="compares AVX-512 with AVX2")
def test_avx2_gives_the_same_bits():
    script = BITS.replace("CASES", repr(SOME))
    env = {**os.environ, "GGJIT_CPU": "avx2", "PYTHONPATH": str(Path(gg.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    want = [f"{op} {case} {zlib.crc32(run_case(by_name(op), case, 1).result.tobytes())}" for op, case in SOME]
    assert found.splitlines() == want


def test_reference_cases(reference, capsys):
    tally = runner.run_paths([reference / "ops" / "flash_attn_ext.npz"])
    assert (tally.failed, capsys.readouterr().out) == (0, "") and tally.passed >= 43
