"""Compiling the kernels of many graphs together."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ggjit as gg
from ggjit import jit
from ggjit.dev import reference_ops, warm

SMALL = Path(__file__).parent / "data" / "reference" / "ops.npz"


def test_kernels_of_a_graph():
    with gg.Context(1 << 20):
        a = gg.from_numpy(np.ones(8, np.float32))
        found = warm.kernels_of(a * a)
        everything = [gg.build(a * a)._executable(1).steps[0].kernel]
    assert set(everything) <= set(found)


def test_no_kernel_is_no_error(monkeypatch):
    from ggjit import op

    monkeypatch.setattr(op.by_name("mul"), "_kernel", lambda node: None)
    with gg.Context(1 << 20):
        a = gg.from_numpy(np.ones(8, np.float32))
        assert warm.kernels_of(a * a) == []


def test_compiled_together_means_linked():
    kernels = reference_ops.kernels(SMALL, (1,))[:4]
    warm.compile_together(kernels)
    assert kernels and all(k.key in jit._linked for k in kernels)


def test_every_op_with_cases_gives_kernels():
    names = {k.name for k in warm.case_kernels()}
    assert len(names) > 20
