"""The pages made from the registries: what is tried, and how it is put into words."""

import pytest

from ggjit import types
from ggjit.dev import docs, probe
from ggjit.op import by_name
from ggjit.types import BF16, F16, F32, I32, I64


def words(found):
    return sorted([docs.names(part) for part in box] for box in docs.boxes(found))


@pytest.mark.parametrize(
    ("found", "want"),
    [
        ([(F32, F32)], [["F32", "F32"]]),
        ([(a, b, F32) for a in (F32, F16) for b in (F32, BF16)], [["F32 F16", "F32 BF16", "F32"]]),
        ([(t, t) for t in types.all_types()], [["all", "as src0"]]),
        ([(t, t, t) for t in types.all_types()], [["all", "as src0", "as src0"]]),
        ([(F32, i, t, t) for i in (I32, I64) for t in (F32, F16)], [["F32", "I32 I64", "F32 F16", "as src2"]]),
        ([(F32, None, F32), (F32, F32, F32), (F32, F32)], [["F32", "F32"], ["F32", "F32 -", "F32"]]),
    ],
)
def test_combinations_as_boxes(found, want):
    assert words(found) == want


def test_types_and_layouts_of_an_op():
    found = probe.Probe(by_name("rms_norm")).found[""]
    assert list(found.types) == [(F32, F32)] and found.gradients == {0}
    assert found.layouts == {0: {"contiguous", "rows apart", "permuted", "transposed"}}


def test_quantized_sources_are_found():
    found = probe.Probe(by_name("get_rows")).found[""]
    quantized = {t for t in types.all_types() if t.quant is not None}
    assert set(found.types) == {(t, I32, F32) for t in {F32, F16, BF16} | quantized} | {(I32, I32, I32)}


def test_refused_types_are_not_found():
    found = probe.Probe(by_name("mul")).found[""]
    assert (F16, F32, F16) in found.types and (F32, F16, F32) not in found.types


def test_types_page_has_every_type():
    page = docs.types_page()
    assert all(
        f"| {t.id} | {t.name} | {t.blck_size} | {t.type_size} |" in page for t in types.all_types() if t.id < 1000
    )
    assert "| 21 | IQ3_S | 256 | 110 | 3.4375 |" in page


def test_stale_pages_are_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    monkeypatch.setattr(docs, "PAGES", {"a.md": lambda: "new\n", "b.md": lambda: "same\n"})
    (tmp_path / "a.md").write_text("old\n")
    (tmp_path / "b.md").write_text("same\n")
    arguments = type("Arguments", (), {"check": True})
    assert docs.run(arguments) == 1 and "stale a.md;" in capsys.readouterr().err
    arguments.check = False
    assert docs.run(arguments) == 0 and docs.stale() == []
