"""Where the real models are that tests run on: they are fetched, never part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ggjit.fetch import models_folder


def real_model(name: str) -> Path:
    """A model's file in the folder that GGJIT_MODELS names, or where `ggjit pull` puts it; else the test is skipped."""
    for folder in (os.environ.get("GGJIT_MODELS"), models_folder()):
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"{name} is not here; `ggjit pull smollm2` fetches SmolLM2, GGJIT_MODELS names a folder")
