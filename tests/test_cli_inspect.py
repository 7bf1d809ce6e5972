"""`ggjit inspect`: the text, the JSON, and errors in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf_bytes import ARRAY, STRING, entry, gguf, tensor

from ggjit.cli import main
from ggjit.gguf import ValueType


@pytest.fixture
def file(tmp_path):
    entries = [
        entry("general.architecture", STRING, "llama"),
        entry("long", STRING, "x" * 500),
        entry("numbers", ARRAY, (ValueType.FLOAT32, [0.5, float("nan"), 2.0, 3.0, 4.0, 5.0])),
        entry("words", ARRAY, (STRING, ["a", "b" * 60, b"\xff"])),
        entry("nested", ARRAY, (ARRAY, [(ValueType.INT32, [1, 2]), (STRING, [])])),
        entry("bad\x1bname", ValueType.BOOL, True),
    ]
    tensors = [tensor("a.weight", (4, 2), 0, 0), tensor("b.weight", (64,), 2, 32), tensor("new", (3,), 99, 96)]
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf(entries, tensors, np.arange(32, dtype=np.float32).tobytes()))
    return path


def test_text(file, capsys):
    assert main(["inspect", str(file)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"{file}: GGUF version 3, {file.stat().st_size:,} bytes, alignment 32"
    row = {line.split()[0]: line.split() for line in lines[1:] if line}
    assert row["general.architecture"] == ["general.architecture", "STRING", "'llama'"]
    assert row["long"][-2:] == ["500", "characters"] and len(next(line for line in lines if "500 ch" in line)) < 150
    assert row["numbers"][-6:] == ["[0.5,", "nan,", "2,", "3,", "...]", "(6)"]
    assert "['a', 'bbb" in out and "60 characters, '\ufffd'] (3)" in out
    assert row["nested"][-5:] == ["[[1,", "2]", "(2),", "[]", "(0)]"] or "[[1, 2] (2), [] (0)] (2)" in out
    assert "\x1b" not in out and "'bad\\x1bname'" in row
    assert row["a.weight"][1:5] == ["F32", "4", "x", "2"] and row["a.weight"][-1] == "32"
    assert row["b.weight"][1:3] == ["Q4_0", "64"] and row["b.weight"][-1] == "36"
    assert row["new"][1:4] == ["type", "99", "3"]
    assert row["Q4_0"] == ["Q4_0", "1", "64", "36", "4.500"] and row["F32"] == ["F32", "1", "8", "32", "32.000"]


def test_json(file, capsys):
    assert main(["inspect", "--json", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["version"], facts["alignment"]) == (str(file), 3, 32)
    assert facts["metadata"]["long"] == {"type": "STRING", "value": "x" * 500}
    assert facts["metadata"]["numbers"] == {"type": "ARRAY of FLOAT32", "value": [0.5, "nan", 2, 3, 4, 5]}
    assert facts["metadata"]["words"]["value"] == ["a", "b" * 60, "\ufffd"]
    assert facts["metadata"]["nested"] == {"type": "ARRAY of ARRAY", "value": [[1, 2], []]}
    assert [one["name"] for one in facts["tensors"]] == ["a.weight", "b.weight", "new"]
    first = facts["tensors"][0]
    assert (first["type"], first["ne"], first["nbytes"], first["offset"]) == ("F32", [4, 2], 32, facts["data_offset"])
    assert facts["totals"]["Q4_0"] == {"tensors": 1, "values": 64, "bytes": 36}
    assert next(iter(facts["totals"])) == "Q4_0" and "type 99" in facts["totals"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0: magic must fit in the file, got 4 bytes with 0 left"),
        (b"nonsense", "byte 0: magic must be b'GGUF', got b'nons'"),
        (gguf([], [tensor("t", (1 << 20,), 0, 0)], bytes(32)), "byte 24: data of 't' must lie in the file"),
        (gguf([], [tensor("t", (1,), 0, 0)], bytes(32))[:50], "byte 49: offset of 't' must fit in the file"),
    ],
)
def test_errors(tmp_path, capsys, data, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"ggjit: error: {path}, {message}") and len(err.splitlines()) == 1


def test_no_file(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none.gguf")]) == 1
    assert capsys.readouterr().err == f"ggjit: error: {tmp_path / 'none.gguf'}: No such file or directory\n"
