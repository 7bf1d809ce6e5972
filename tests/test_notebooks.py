"""Every notebook runs from top to bottom; what it shows it also asserts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
LIMIT = 600  # seconds a cell may take, compiling
LARGEST = 300_000  # bytes of a file with its outputs

pytestmark = pytest.mark.filterwarnings("default")  # Jupyter's own


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[notebooks]'")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources).execute()


@pytest.mark.skipif("nbformat" in MISSING, reason="nbformat is not installed: pip install -e '.[notebooks]'")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_executed_and_small(path):
    import nbformat

    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), "run all cells in order and save"
    assert not [o for c in cells for o in c.outputs if o.output_type == "error"]
    assert path.stat().st_size <= LARGEST
