"""Compiling the kernels of many graphs together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import jit, kernel_cache
from ggjit.dev import reference_ops, warm

MODEL = Path(__file__).parent / "data" / "models" / "llama-headdim.gguf"
SMALL = Path(__file__).parent / "data" / "reference" / "ops.npz"


def test_kernels_of_a_graph():
    with gg.Context(1 << 20):
        a = gg.from_numpy(np.ones(8, np.float32))
        found = warm.kernels_of(a * a)
        everything = [gg.build(a * a)._executable(1).steps[0].kernel]
    assert set(everything) <= set(found)


@gg.kernel
def nothing_done(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    pass


@pytest.mark.parametrize("n", [1, 40])
def test_kernels_of_a_model(n):
    found = set(warm.model_kernels(MODEL, (n,)))
    with gg.LLM(MODEL, n_ctx=256, n_threads=2, progress=False) as llm:
        graph = llm.context.graph(n, 256, 1)
        assert {step.kernel for step in graph.executable.steps} <= found


def test_what_is_compiled_behind_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    kernel_cache._folders.cache_clear()
    try:
        child = warm.compile_behind(lambda: [nothing_done])
        if child:  # several CPUs, and no threads of others
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert kernel_cache.load(nothing_done.key)
    finally:
        kernel_cache._folders.cache_clear()


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


_UNWARMED = """
import ggjit as gg
from ggjit import jit
with gg.LLM({model!r}, n_ctx=700, n_threads=2, n_ubatch=16, progress=False) as llm:
    llm.warmup()
    known = set(jit._linked)
    for n in (1, 2, 3, 5, 15, 16, 17, 40, 600):
        list(llm.generate([1 + i % 50 for i in range(n)], 2, seed=0))
    print(*(set(jit._linked) - known), sep="\\n")
"""


def test_nothing_is_compiled_after_a_warmup():
    done = subprocess.run([sys.executable, "-c", _UNWARMED.format(model=str(MODEL))], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr
