"""Models in several files, `NAME-00001-of-00003.gguf`: their names, and the metadata that each part repeats."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ggjit.errors import GgufError

if TYPE_CHECKING:
    from ggjit.gguf.reader import Metadata

__all__ = ["check_split", "part_names", "split_paths"]

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """Names of all parts if `name` is that of a part, else `name` alone."""
    match = _NAME.fullmatch(name)
    n = int(match[3]) if match else 0
    if match is None or not 1 <= int(match[2]) <= n:
        return [name]
    return [f"{match[1]}-{part:05d}-of-{n:05d}.gguf" for part in range(1, n + 1)]


def split_paths(path: str) -> list[str]:
    """Paths of all parts if the name is that of a part, else the path alone.

    Raises:
        GgufError: a part is missing.
    """
    paths = part_names(path)
    for part, name in enumerate(paths, 1):
        if not os.path.exists(name) and os.path.exists(path):
            raise GgufError(name, 0, f"part {part} of {len(paths)} must be there, got no such file")
    return paths


def check_split(kv: Metadata, paths: list[str], file: int = 0) -> list[str]:
    """Compare the metadata of part `file` with the names of the parts.

    Returns:
        The paths to open: one for a file that is no part, whatever its name.

    Raises:
        GgufError: they disagree.
    """
    count = kv.get("split.count", 1)
    if file == 0 and count == 1 and kv.get("split.no", 0) == 0:
        return paths[:1]
    if count != len(paths):
        hint = "; the name must end in -00001-of-0000N.gguf" if len(paths) == 1 else ""
        raise kv.fail("split.count", f"must be {len(paths)}, the number in the name, got {count}{hint}")
    if kv.get("split.no", 0) != file:
        raise kv.fail("split.no", f"must be {file}, got {kv.get('split.no', 0)}")
    return paths
