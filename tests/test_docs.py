"""The pages made from the registries: what is tried, and how it is put into words."""

import pytest

from ggjit import types
from ggjit.dev import builders, docs, probe, seeds
from ggjit.op import NONE, all_ops, by_name
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


def test_s87_every_op_says_which_backend_computes_it():
    rows = [line.split(" | ") for line in (docs.FOLDER / "ops.md").read_text().splitlines() if line.startswith("| ")]
    head, rows = rows[0], rows[1:]
    column = head.index("backend")
    listed = {row[0].removeprefix("| ").split(":")[0] for row in rows}
    assert listed == {op.name for op in all_ops() if op.cases and op is not NONE and op.id < 2000}
    assert {row[column] for row in rows if by_name(row[0].removeprefix("| ").split(":")[0]).view} == {"view"}
    assert all("CPU" in row[column] for row in rows if not by_name(row[0].removeprefix("| ").split(":")[0]).view)


def test_items_of_a_test_s_name():
    names = ("test_s41_x", "test_s43_s79_x", "test_s3_to_s6_x", "test_s23_s24", "test_sums_s3", "test_s3x", "other_s3")
    assert [seeds.items_of(n) for n in names] == [[41], [43, 79], [3, 4, 5, 6], [23, 24], [], [], []]


def test_every_item_of_the_checklist_has_a_test():
    items = [i for part in seeds.ITEMS.values() for i in part]
    found = seeds.tests()
    assert items == list(range(1, 108)) and set(found) <= set(items)
    assert [i for i in items if i not in found and i not in seeds.NOTES] == []
    assert "no test" not in seeds.page() and "- **S70** " in seeds.page()


def test_builders_of_ops():
    """Every function of an op is listed with it; what makes several nodes belongs to none."""
    assert builders.builders_of(by_name("rope")) == ["rope", "rope_ext", "rope_multi"]
    assert builders.builders_of(by_name("unary"), "silu") == ["silu"]
    assert builders.builders_of(by_name("unary"), "exp") == ["exp"]
    assert builders.builders_of(by_name("glu"), "reglu") == ["reglu", "reglu_split"]
    assert builders.builders_of(by_name("conv_2d")) == ["conv_2d_direct"] and builders.builders()["conv_2d"] == ""
    unnamed = {op.name for op in all_ops() if op.cases and op is not NONE and not builders.builders_of(op)}
    assert unnamed == {"dsv4_hc_comb_back", "get_rel_pos_back", "mul_mat_id_back", "recurrence_back"}


def test_lines_of_the_checklist_fit_a_window():
    assert max(map(len, seeds.page().splitlines())) <= seeds.WIDTH
