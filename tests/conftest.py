"""What all tests share: where the big reference sets are, and that the package was imported once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REFERENCE = os.environ.get("GGJIT_REFERENCE")


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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    module = sys.modules.get("ops")
    root = Path(__file__).resolve().parents[1]
    path = getattr(module, "__file__", None)
    if path and Path(path).resolve().is_relative_to(root):
        raise pytest.UsageError("ops was imported as a top-level package: import ggjit.ops")
