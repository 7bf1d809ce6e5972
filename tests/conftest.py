"""What all tests share: where the big reference sets are, and that the package was imported once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from ggjit.dev import reference_ops, warm
from ggjit.jit import Kernel

REFERENCE = os.environ.get("GGJIT_REFERENCE")
SMALL_CASES = Path(__file__).parent / "data" / "reference"
MODEL_FILES = Path(__file__).parent / "data" / "models"
TESTS_OF_MODELS_AND_PRODUCTS = {"test_batch.py", "test_gpt2_examples.py", "test_llm.py", "test_mul_mat.py"}
FEW = (1, 2, 3, 4, 6, 8)
MODELS = (  # name, numbers of tokens, type of the cache, whether weights are packed
    ("llama-q.Q4_1", (1, 2, 4, 6, 8, 32), "f16", True),
    ("llama-headdim", (*FEW, 32), "f16", True),
    ("gpt2", FEW, "f32", False),
    ("gpt2", (32,), "f16", False),
    ("llama-headdim", (*FEW, 32), "f32", True),
    ("llama-headdim", (1, 32), "f16", False),
    ("llama-q.Q4_1", (1, 8, 32), "f16", False),
)
PRODUCTS: dict[str, list[tuple[int | None, bool]]] = {  # by type: columns, None for many, and whether they are packed
    "Q8_0": [(n, False) for n in (1, 3, 4, 6, 8, None)] + [(1, True)],
    "Q4_0": [(1, True), (2, False), (3, False), (None, False)],
    "Q4_1": [(3, False), (6, False), (3, True)],
    "F16": [(1, False), (2, False), (None, False), (1, True), (3, True)],
    "BF16": [(1, False), (1, True), (3, True)],
    "F32": [(6, False)],
    "Q6_K": [(3, True)],
}
BEHIND = pytest.StashKey[int]()
MANY = 25  # fewer tests compile what they need themselves


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "full: other CPU levels and long sweeps, run if GGJIT_FULL_TESTS is set (CI sets it)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("GGJIT_FULL_TESTS"):
        skip = pytest.mark.skip(reason="GGJIT_FULL_TESTS is not set")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(skip)


def pytest_report_header() -> str:
    if REFERENCE:
        return f"reference data: {REFERENCE}"
    return "reference data: none (GGJIT_REFERENCE is not set: only the cases in tests/data run)"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of the big reference sets (ops/, models/, vocab/)."""
    if not REFERENCE:
        pytest.skip("GGJIT_REFERENCE is not set")
    path = Path(REFERENCE)
    if not path.is_dir():
        pytest.fail(f"GGJIT_REFERENCE: must name a folder, got {REFERENCE!r}")
    return path


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the big tests need before any of them starts a thread: then all CPUs compile.

    Tests leave CPUs idle, so in the quick run of all half of it waits for that time, with what they need beside it.
    """
    collected = {Path(item.path).name for item in session.items}
    kernels: list[Kernel] = []
    if session.config.option.collectonly or len(session.items) < MANY:
        return
    if "test_ops.py" in collected:
        kernels += warm.case_kernels()
    full = os.environ.get("GGJIT_FULL_TESTS")
    if "test_reference_runner.py" in collected and full:
        for path in sorted(SMALL_CASES.glob("*.npz")):
            kernels += reference_ops.kernels(path, (1, 3))
    if "test_panels.py" in collected:
        panels = sys.modules["test_panels"]
        types = panels.TYPES if full else panels.QUICK_TYPES
        kernels += warm.product_kernels(types, {v[:2] for v in panels.VARIANTS})
    if full or not collected >= TESTS_OF_MODELS_AND_PRODUCTS:
        warm.compile_together(kernels)
        return
    kernels = [*dict.fromkeys(kernels)]
    n = len(kernels) // 2
    warm.compile_together(kernels[:n])
    later = kernels[n:][::-1]  # backwards: tests meet the first ones first, and compile what is not there
    session.config.stash[BEHIND] = warm.compile_behind(lambda: models_and_products() + later)


def models_and_products() -> list[Kernel]:
    """Kernels that tests of models and products need, about in the order in which they do."""
    found: list[Kernel] = []
    for name, n_tokens, kv_type, repack in MODELS:
        found += warm.model_kernels(MODEL_FILES / f"{name}.gguf", n_tokens, kv_type, repack)
    for name, variants in PRODUCTS.items():
        found += warm.product_kernels([name], variants)
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if child := session.config.stash.get(BEHIND, 0):
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    module = sys.modules.get("ops")
    root = Path(__file__).resolve().parents[1]
    path = getattr(module, "__file__", None)
    if path and Path(path).resolve().is_relative_to(root):
        raise pytest.UsageError("ops was imported as a top-level package: import ggjit.ops")
