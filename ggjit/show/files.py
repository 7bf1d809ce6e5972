"""A GGUF file as a drawing: what its bytes are, and where a model's weights went from there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ggjit.show.svg import GREY, INK, LEGEND_HEIGHT, PALE, Svg, box, colours_of, document, legend, line, text

if TYPE_CHECKING:
    from ggjit.backend import Buffer
    from ggjit.gguf import GgufFile
    from ggjit.gguf.reader import TensorInfo
    from ggjit.tensor import Tensor

_WIDTH, _LEFT, _BAND = 800, 84, 34
_LETTER = 5.4  # width of a letter of size 9, about
_HEADER = 24  # magic, version, number of tensors, number of metadata


def sections(file: GgufFile) -> dict[str, tuple[int, int]]:
    """First and last byte (exclusive) of the parts of a file that is not split.

    Returns:
        "header", "metadata", "tensor list", "padding" and "data".
    """
    infos = file.tensors.values()
    first = min((i.info_offset for i in infos), default=file.data_offset)
    last = max((i.info_offset + 24 + len(i.name.encode()) + 8 * i.n_dims for i in infos), default=first)
    return {
        "header": (0, _HEADER),
        "metadata": (_HEADER, first),
        "tensor list": (first, last),
        "padding": (last, file.data_offset),
        "data": (file.data_offset, file.nbytes),
    }


def _check_one(where: str, file: GgufFile) -> None:
    if not hasattr(file, "mappings"):
        raise TypeError(f"{where}: file must be a GgufFile, got {file!r}; gg.GgufFile(path) opens one")
    if len(file.mappings) != 1:
        raise ValueError(f"{where}: the model must be one file to be drawn, got {len(file.mappings)} parts")


def gguf(file: GgufFile | str | os.PathLike[str]) -> Svg:
    """Draw a file that is not split: all of it, tensors coloured by type, and its head enlarged.

    Args:
        file: the open file, or its path.

    Raises:
        GgufError: the file at the path is not sound.
        OSError: it cannot be opened.
        TypeError: `file` is neither.
        ValueError: the model is split.
    """
    if isinstance(file, (str, os.PathLike)):
        from ggjit.gguf import GgufFile

        with GgufFile(file) as opened:
            return gguf(opened)
    _check_one("show.gguf", file)
    scale, parts = _WIDTH / file.nbytes, [text(6, 22 + _BAND / 2, "the file")]
    kinds = colours_of(i.type_name for i in file.tensors.values())
    parts += _file_band(file, 18, {i.name: kinds[i.type_name] for i in file.tensors.values()})
    places = sections(file)
    y, end = 18 + _BAND + 44, _LEFT + file.data_offset * scale
    parts.append(line(_LEFT, 18 + _BAND, _LEFT, y) + line(end, 18 + _BAND, _LEFT + _WIDTH, y))
    parts.append(text(6, y + _BAND / 2 + 4, "its head"))
    for k, name in enumerate(("header", "metadata", "tensor list", "padding")):
        first, last = (_LEFT + at / file.data_offset * _WIDTH for at in places[name])
        parts.append(box(first, y, max(last - first, 1.5), _BAND, "#ddd" if k % 2 else "#c8c8c8"))
        words = f"{name}: {places[name][1] - places[name][0]} bytes"
        if len(words) * _LETTER < last - first:
            parts.append(text((first + last) / 2, y + 21, words, 9, "middle"))
        else:  # below, the last ones in rows of their own
            parts.append(
                text(first if k == 0 else last, y + _BAND + 13 * max(k - 1, 1), words, 9, "end" if k else "start")
            )
    height = y + _BAND + 36
    parts.append(legend(_LEFT, height, kinds))
    return document(_LEFT + _WIDTH + 40, height + LEGEND_HEIGHT, parts)


def _file_band(file: GgufFile, y: float, colours: Mapping[str, str]) -> list[str]:
    scale, parts = _WIDTH / file.nbytes, []
    parts.append(box(_LEFT, y, file.data_offset * scale, _BAND, "#c8c8c8"))
    for info in file.tensors.values():
        parts.append(_tensor(_LEFT + info.offset * scale, y, info.nbytes * scale, info.name, colours[info.name]))
    for at, anchor in ((0, "end"), (file.data_offset, "start"), (file.nbytes, "end")):
        parts.append(text(_LEFT + at * scale, y - 5, str(at), 9, anchor, GREY))
    return parts


def _tensor(x: float, y: float, width: float, name: str, colour: str) -> str:
    """A tensor's box; its name if it has room, without "weight"."""
    drawn = box(x, y, width, _BAND, colour, "white" if width > 3 else colour)
    short = name.removesuffix(".weight")
    return drawn + (text(x + width / 2, y + 21, short, 9, "middle") if len(short) * _LETTER < width else "")


def loaded(file: GgufFile, weights: Iterable[Tensor]) -> Svg:
    """Draw where the weights of a file that is not split have their bytes: a band for each buffer below the file.

    A buffer on the mapping lies straight below its bytes, and is them. Other buffers are drawn to the same scale,
    with a line from each tensor in the file to its place.

    Args:
        file: the open file.
        weights: loaded from it, by the names in the file.

    Raises:
        TypeError: `file` is no open file.
        ValueError: the model is split.
    """
    _check_one("show.loaded", file)
    buffers: dict[Buffer, list[Tensor]] = {}
    for t in weights:
        if t.buffer is not None and t.name in file.tensors:
            buffers.setdefault(t.buffer, []).append(t)
    colours = colours_of(b.type.name for b in buffers)
    home = {t.name: colours[b.type.name] for b, mine in buffers.items() for t in mine}
    parts = [text(6, 22 + _BAND / 2, "the file")]
    parts += _file_band(file, 18, {i.name: home.get(i.name, PALE) for i in file.tensors.values()})
    y, width = 18.0 + _BAND, float(_WIDTH)
    for buffer, mine in sorted(buffers.items(), key=lambda b: (not _on_file(file, b[0]), b[0].type.name)):
        y += 50
        used, band = _buffer_band(file, buffer, mine, y, colours[buffer.type.name])
        parts, y, width = [*band, *parts], y + _BAND, max(width, used)
    parts.append(legend(_LEFT, y + 12, colours))
    return document(_LEFT + width + 40, y + 12 + LEGEND_HEIGHT, parts)


def _on_file(file: GgufFile, buffer: Buffer) -> bool:
    mapping = file.mappings[0]
    return mapping.address <= buffer.base < mapping.address + mapping.size


def _buffer_band(file: GgufFile, buffer: Buffer, mine: list[Tensor], y: float, colour: str) -> tuple[float, list[str]]:
    """Its width and parts."""
    scale = _WIDTH / file.nbytes
    start = _LEFT + (buffer.base - file.mappings[0].address if _on_file(file, buffer) else 0) * scale
    parts = [text(6, y + 21, f"{buffer.type.name} buffer"), box(start, y, buffer.size * scale, _BAND, PALE, INK)]
    for t in mine:
        x, info = start + (t.data - buffer.base) * scale, file.tensors[t.name]
        width = buffer.type.padded_size(t) * scale
        parts.append(_tensor(x, y, width, t.name, colour))
        if width > 6:
            parts.append(_way(info, scale, x + width / 2, y))
    return start - _LEFT + buffer.size * scale, parts


def _way(info: TensorInfo, scale: float, x: float, y: float) -> str:
    from_x = _LEFT + (info.offset + info.nbytes / 2) * scale
    return line(from_x, 18 + _BAND, x, y, GREY, 'stroke-width="1.2" marker-end="url(#a)"')
