"""The reference runner: its reader and comparisons, what it counts as failed or unsupported, and the small cases."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggjit import types
from ggjit.dev import reference as reference_module
from ggjit.dev.reference_cases import Case, compare, decode, elements, nmse, read_cases

SMALL = Path(__file__).parent / "data" / "reference"


def header(type="f32", ne=(4, 2, 1, 1)):
    t = types.by_name(type)
    n1 = types.row_size(t, ne[0])
    nb = [t.type_size, n1, n1 * ne[1], n1 * ne[1] * ne[2]]
    return {"type": type, "ne": list(ne), "nb": nb, "nbytes": nb[3] * ne[3], "contiguous": True}


def scale_case(path: Path, result, **changes) -> Path:
    """A file with one case of `scale`, x * 2."""
    x = np.arange(8, dtype=np.float32)
    params = np.zeros(16, np.int32)
    params[:2] = np.float32([2, 0]).view(np.int32)
    meta = {
        "id": "c1", "op": "SCALE", "sub": None, "call": {"fn": "ggml_scale", "args": [{"src": 0}, 2.0], "post": []},
        "op_params": params.tolist(), "srcs": [{**header(), "storage": 0, "offset": 0}], "storages": [{**header()}],
        "dst": header(), "dst_alias": None, "compare": "nmse", "nmse_max": 1e-7, "tags": [], **changes,
    }  # fmt: skip
    arrays = {
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
        "s0": x.view(np.uint8),
        "dst": np.float32(result).view(np.uint8),
    }
    np.savez(path, **{f"c1.{name}": a for name, a in arrays.items()})
    return path


def run(path: Path, capsys) -> tuple[int, str, reference_module.Tally]:
    tally = reference_module.run_paths([path])
    return tally.failed, capsys.readouterr().out, tally


def test_a_right_result_passes(tmp_path, capsys):
    failed, out, tally = run(scale_case(tmp_path / "scale.npz", np.arange(8) * 2), capsys)
    assert (failed, out, tally.passed) == (0, "", 1)


def test_a_wrong_result_fails_with_error_and_limit(tmp_path, capsys):
    failed, out, _ = run(scale_case(tmp_path / "scale.npz", np.arange(8) * 3), capsys)
    assert failed == 1 and out.startswith(
        "FAILED scale c1 scale(f32[4x2]): 1 thread: result: nmse: error 0.111, limit 1e-07"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dst": header(ne=(8, 1, 1, 1))}, "ne [4, 2, 1, 1], not [8, 1, 1, 1]"),
        ({"op_params": [0] * 16}, "op_params"),
        ({"dst_alias": {"storage": 0, "offset": 0}}, "must lie at byte 0 of storage 0"),
    ],
)
def test_a_wrong_header_fails(tmp_path, capsys, changes, text):
    failed, out, _ = run(scale_case(tmp_path / "scale.npz", np.arange(8) * 2, **changes), capsys)
    assert failed == 1 and text in out


def test_a_storage_that_must_not_change(tmp_path, capsys):
    call = {"fn": "ggml_scale_inplace", "args": [{"src": 0}, 2.0], "post": []}
    failed, out, _ = run(
        scale_case(tmp_path / "scale.npz", np.arange(8) * 2, call=call, dst_alias={"storage": 0, "offset": 0}), capsys
    )
    assert failed == 1 and "storage 0 afterwards" in out


def test_an_unknown_op_is_unsupported(tmp_path, capsys):
    path = scale_case(tmp_path / "x.npz", np.arange(8), op="NO_SUCH_OP")
    failed, out, tally = run(path, capsys)
    assert (failed, out) == (0, "")
    assert tally.lines() == ["0 passed, 0 failed, 1 unsupported", "unsupported ops: no_such_op (1)"]


def test_a_type_without_code_is_unsupported(capsys, tmp_path, monkeypatch):
    path = scale_case(tmp_path / "scale.npz", np.arange(8) * 2)
    from ggjit import op

    monkeypatch.setattr(op.by_name("scale"), "_kernel", lambda node: None)
    _, _, tally = run(path, capsys)
    assert tally.lines()[1] == "unsupported ops: scale(F32) -> F32 (1)"


def test_a_case_that_raises_has_failed(tmp_path, capsys):
    call = {"fn": "ggml_scale", "args": [{"src": 0}, "f16", 3, 4], "post": []}
    failed, out, _ = run(scale_case(tmp_path / "scale.npz", np.arange(8), call=call), capsys)
    assert failed == 1 and "TypeError" in out


def test_exit_status_and_closing_line(tmp_path):
    scale_case(tmp_path / "good.npz", np.arange(8) * 2)
    command = [sys.executable, "-m", "ggjit.dev", "reference", str(tmp_path)]
    good = subprocess.run(command, capture_output=True, text=True)
    assert (good.returncode, good.stdout) == (0, "1 passed, 0 failed, 0 unsupported\n"), good.stderr
    scale_case(tmp_path / "wrong.npz", np.arange(8))
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stdout.splitlines()[-1] == "1 passed, 1 failed, 0 unsupported"


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        reference_module.run_paths([tmp_path / "nothing"])


@pytest.mark.full
def test_small_cases(capsys):
    """What has code must agree; the cases cover every op and every block type."""
    tally = reference_module.run_paths([SMALL])
    out = capsys.readouterr().out
    assert tally.failed == 0, out
    assert tally.passed + tally.n_unsupported == 360


# -- reader and comparisons ---------------------------------------------------------------------------------


def test_every_op_is_in_the_small_cases():
    found = {case.meta["op"] for case in read_cases(SMALL / "ops.npz")}
    assert len(found) == 95


def test_elements_follow_strides():
    memory = np.arange(24, dtype=np.int16).view(np.uint8)
    view = elements(memory, {"type": "i16", "ne": [2, 3, 1, 1], "nb": [6, 2, 12, 12]}, 12)
    assert view.shape == (1, 1, 3, 2) and view[0, 0].tolist() == [[6, 9], [7, 10], [8, 11]]


def test_elements_of_blocks_and_empty_tensors():
    memory = np.arange(68, dtype=np.uint8)
    view = elements(memory, {"type": "q8_0", "ne": [32, 2, 1, 1], "nb": [34, 34, 68, 68]})
    assert view.shape == (1, 1, 2, 1, 34) and view[0, 0, 1, 0, 0] == 34
    assert elements(memory[:0], {"type": "f32", "ne": [0, 2, 1, 1], "nb": [4, 0, 0, 0]}).size == 0


def test_nmse():
    want = np.array([3.0, 4.0, np.inf])
    assert nmse(want, want) == 0
    assert nmse(np.array([3.0, 5.0, np.inf]), want) == pytest.approx(1 / 25)
    assert nmse(np.array([3.0, 4.0, 9.0]), want) == np.inf
    assert nmse(np.array([3.0, np.nan, np.inf]), want) == np.inf
    assert nmse(np.ones(2), np.zeros(2)) == np.inf


@pytest.mark.parametrize(
    ("rule", "got", "want", "passes"),
    [
        ("exact", [1, 2], [1, 2], True),
        ("exact", [1, np.nan], [1, np.nan], True),
        ("exact", [1, 2], [1, 3], False),
        ("set", [2, 1], [1, 2], True),
        ("set", [2, 2], [1, 2], False),
        ("nmse", [1, 1.0001], [1, 1], True),
        ("nmse", [1, 1.1], [1, 1], False),
        ("close", [1, 1.0001], [1, 1], True),
        ("close", [1, 1.1], [1, 1], False),
        ("close", [np.inf, np.nan], [np.inf, np.nan], True),
        ("close", [np.inf, 0], [np.inf, np.nan], False),
    ],
)
def test_compare(rule, got, want, passes):
    case = Case("c", {"compare": rule, "nmse_max": 1e-6, "close": {"rtol": 1e-3, "atol": 0}}, {})
    assert (compare(case, "x", np.float32(got), np.float32(want), types.F32) is None) == passes


def test_compare_int64_is_exact():
    case = Case("c", {"compare": "exact"}, {})
    assert compare(case, "x", np.int64([2**60 + 1]), np.int64([2**60]), types.I64) is not None


def test_decode_bf16():
    assert decode(np.uint16([0x3F80, 0xC000]), types.BF16).tolist() == [1, -2]


@pytest.fixture
def model(reference, tmp_path):
    """A copy of a tiny model's files, and a function that changes its references."""
    for suffix in ("gguf", "json", "npz"):
        shutil.copy(reference / "models" / f"llama.{suffix}", tmp_path)

    def change(facts=None, **arrays):
        path = tmp_path / "llama.json"
        if facts is not None:
            known = json.loads(path.read_text())
            facts(known)
            path.write_text(json.dumps(known))
        with np.load(path.with_suffix(".npz")) as file:
            data = {key: file[key] for key in file.files}
        np.savez(path.with_suffix(".npz"), **{**data, **{key: f(data[key]) for key, f in arrays.items()}})
        return path

    return change


def test_a_model_passes(model, capsys):
    tally = reference_module.run_paths([model()])
    assert (tally.failed, tally.n_unsupported) == (0, 0), capsys.readouterr().out
    assert tally.passed == 914


def test_wrong_references_of_a_model_fail(model, capsys):
    def facts(known):
        known["tokenize"] = [{**known["tokenize"][1], "ids": [1]}]
        known["detokenize"] = [{**known["detokenize"][-1], "text": "nonsense"}]
        known["pieces"]["attr"][5] += 1
        known["vocab"]["eog"] = [7]

    def swap(tokens):
        return tokens[::-1]

    path = model(
        facts, short_logits=lambda x: x + 2e-4, long_logits=lambda x: x + 2e-4, medium_greedy=swap,
        long_logits_kvf16=lambda x: x + 1, long_logits_kvf16_flash=lambda x: x + 1,
        **{"trace__Kcur-1": lambda x: x * 1.0001},
    )  # fmt: skip
    tally = reference_module.run_paths([path])
    found = {line.split(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert found == {f"FAILED llama {what}" for what in (
        "vocabulary", "tokenize 0", "detokenize 0", "piece 5", "short", "short, not repacked", "long",
        "long, f16 cache", "greedy medium", "trace Kcur-1",
    )}  # fmt: skip
    assert tally.failed == len(found)


def test_an_unknown_architecture_is_unsupported(reference):
    tally = reference_module.run_paths([reference / "models" / "mamba.npz"])
    assert tally.failed == 0 and list(tally.unsupported) == ["architectures"]
    assert list(tally.unsupported["architectures"]) == ["mamba"]


def test_whole_files(reference_sample):
    """A few whole files of the big set, if it is there."""
    tally = reference_module.run_paths(reference_sample)
    assert tally.failed == 0 and tally.passed > 0


@pytest.fixture
def reference_sample(reference):
    return [reference / "ops" / f"{name}.npz" for name in ("permute", "view", "scale")]
