"""Quantizing files: types and sizes as llama.cpp's (tests/data/quantize_mixes.json), bytes as the coders', errors."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from real_models import real_model

from ggjit import types
from ggjit.cli import main
from ggjit.dev.make_model import Shape, make_model
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, GgufWriter
from ggjit.llm.imatrix_file import read_imatrix
from ggjit.llm.quantize_mixes import MIXES, Choices, ModelFacts, TensorFacts, choose_types, find_mix
from ggjit.llm.quantize_model import plan, quantize_model, result_nbytes, tensor_rule
from ggjit.quantize import dequantize_rows, quantize_rows

DATA = json.loads((Path(__file__).parent / "data" / "quantize_mixes.json").read_text("utf-8"))
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = Shape(n_layer=2, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_vocab=384)


def facts(model):
    _, n_layer, _, _, n_expert, tied, n, names = DATA["models"][model]
    found = {"token_embd.weight": (n, 4), "output_norm.weight": (n,)}
    if not tied:
        found["output.weight"] = (n, 4)
    for il in range(n_layer):
        found |= {f"blk.{il}.{name}.weight": (n, 2, n_expert) if "exps" in name else (n, 2) for name in names}
    return [TensorFacts(name, types.F16 if len(ne) > 1 else types.F32, ne) for name, ne in found.items()]


def choices(name):
    given = DATA["choices"].get(name, {})
    kinds = [
        types.by_name(given[key]) if key in given else None for key in ("output_tensor_type", "token_embedding_type")
    ]
    rules = [(re.compile(pattern), types.by_name(kind)) for pattern, kind in given.get("names", ())]
    return Choices(given.get("pure", False), *kinds, not given.get("quantize_output_tensor", True), rules)


def by_kind(found):
    kinds = {}
    for name, kind in found.items():
        kinds.setdefault(re.sub(r"^blk\.\d+\.|\.weight$", "", name), []).append(kind.name)
    return kinds


def unpacked(text):
    return [kind for word in text.split() for kind, n in [word.split("*")] for _ in range(int(n))]


@pytest.mark.parametrize("model", DATA["models"])
def test_types_as_llama_cpp(model):
    arch, n_layer, n_head, n_head_kv, n_expert, *_ = DATA["models"][model]
    tensors, n = facts(model), 0
    for name, mix, choice, has_imatrix, want in DATA["mixes"]:
        if name != model:
            continue
        n += 1
        model_facts = ModelFacts(arch, n_layer, n_head // n_head_kv, n_expert, bool(has_imatrix))
        if want is None:
            with pytest.raises(ValueError, match=r"must be a multiple of \d+, the block of Q1_0"):
                choose_types(tensors, find_mix(mix), model_facts, choices(choice))
            continue
        found = by_kind(choose_types(reversed(tensors), find_mix(mix), model_facts, choices(choice)))
        assert found == {key: unpacked(text) for key, text in want.items()}, (mix, choice, has_imatrix)
    assert n >= len(MIXES) - 1


@pytest.fixture(scope="module")
def smollm2():
    with GgufFile(real_model(SMOLLM2)) as file:
        yield file


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "NVFP4"])
def test_sizes_as_llama_cpp(smollm2, mix):
    """The file of SmolLM2 would have the bytes of llama.cpp's; what that refuses is refused."""
    if DATA["smollm2"][mix] is None:
        with pytest.raises(ValueError, match=r"importance matrix|must be a multiple of"):
            plan(smollm2, mix, allow_requantize=True)
        return
    assert result_nbytes(smollm2, plan(smollm2, mix, allow_requantize=True)) == DATA["smollm2"][mix]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    make_model(str(path), "F16", 1, TINY)
    return path


def test_bytes_are_those_of_the_coders(model, tmp_path):
    out = tmp_path / "out.gguf"
    told = []
    quantize_model(model, out, "q4_0", n_threads=2, progress=lambda done, total: told.append((done, total)))
    with GgufFile(model) as old, GgufFile(out) as new:
        assert [key for key in old.kv if key not in new.kv] == []
        assert (new.kv["general.file_type"], new.kv["general.quantization_version"]) == (2, 2)
        assert list(new.tensors)[:3] == ["output.weight", "output_norm.weight", "token_embd.weight"]
        for name, info in new.tensors.items():
            data = old.data(name)
            if info.ne[1] > 1:
                x = data.view(np.float16).astype(np.float32).reshape(-1, info.ne[0])
                assert info.type.name == ("Q6_K" if name == "output.weight" else "Q4_0")
                data = info.type.quant.quantize(x).reshape(-1)
            assert np.array_equal(new.data(name), data), name
        assert told[-1][0] == told[-1][1] == sum(info.nbytes for info in new.tensors.values())


def test_threads_change_nothing(model, tmp_path):
    for n in (1, 3):
        quantize_model(model, tmp_path / f"{n}.gguf", "Q5_1", n_threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_split_input(model, tmp_path):
    """Parts of a split model become one file, the same as that of the whole."""
    with GgufFile(model) as file:
        names = list(file.tensors)
        for no, part in enumerate((names[:7], names[7:])):
            with GgufWriter(tmp_path / f"m-{no + 1:05d}-of-00002.gguf") as writer:
                writer.copy(file.kv if no == 0 else {})
                for key, value in (("split.no", no), ("split.count", 2)):
                    writer.add(key, np.uint16(value))
                writer.add("split.tensors.count", np.int32(len(names)))
                for name in part:
                    info = file.tensors[name]
                    writer.add_tensor(name, file.data(name), info.type, info.ne[: info.n_dims])
    quantize_model(model, tmp_path / "whole.gguf", "Q8_0")
    quantize_model(tmp_path / "m-00002-of-00002.gguf", tmp_path / "parts.gguf", "Q8_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()


# ---- importance matrices ----


def imatrix(path, model, skip=()):
    rng = np.random.default_rng(2)
    with GgufFile(model) as file, GgufWriter(path) as writer:
        writer.add("general.type", "imatrix")
        writer.add("imatrix.datasets", ["text.txt"])
        writer.add("imatrix.chunk_count", 7)
        for name, info in file.tensors.items():
            if info.ne[1] > 1 and name not in skip:
                writer.add_tensor(f"{name}.in_sum2", rng.random((1, info.ne[0])).astype(np.float32) * 10)
                writer.add_tensor(f"{name}.counts", np.full((1, 1), 5, np.float32))
    return str(path)


def test_imatrix(model, tmp_path):
    path = imatrix(tmp_path / "imatrix.gguf", model)
    found = read_imatrix(path)
    assert (found.datasets, found.n_chunks) == (("text.txt",), 7)
    name = "blk.0.attn_q.weight"
    with GgufFile(path) as file:
        assert np.allclose(found.values[name], file.data(f"{name}.in_sum2").view(np.float32) / 5)
    out = tmp_path / "out.gguf"
    quantize_model(model, out, "Q5_0", path, n_threads=2)
    with GgufFile(model) as old, GgufFile(out) as new:
        assert new.kv["quantize.imatrix.file"] == path and new.kv["quantize.imatrix.dataset"] == "text.txt"
        assert (new.kv["quantize.imatrix.entries_count"], new.kv["quantize.imatrix.chunks_count"]) == (16, 7)
        x = old.data(name).view(np.float16).astype(np.float32).reshape(256, 256)
        assert np.array_equal(new.data(name), types.Q5_0.quant.quantize(x, found.values[name][0]).reshape(-1))


def test_older_imatrix(tmp_path):
    path, values = tmp_path / "imatrix.dat", np.arange(6, dtype=np.float32)
    data = struct.pack("<ii", 1, 3) + b"a.w" + struct.pack("<ii", 2, 6) + values.tobytes()
    path.write_bytes(data + struct.pack("<ii", 9, 4) + b"text")
    found = read_imatrix(str(path))
    assert np.array_equal(found.values["a.w"][0], values / 2) and (found.n_chunks, found.datasets) == (9, ("text",))
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(GgufError, match="importance matrix"):
            read_imatrix(str(path))


def test_q2_k_s_needs_none_of_an_embedding(model, tmp_path):
    found = read_imatrix(imatrix(tmp_path / "a.gguf", model, skip=("token_embd.weight",)))
    with GgufFile(model) as file:
        kinds = {s.info.name: s.type.name for s in plan(file, "Q2_K_S", imatrix=found).steps}
    assert kinds["token_embd.weight"] == "Q2_K"  # as llama_model_quantize does


@pytest.mark.parametrize("mix", ["IQ1_S", "IQ2_XXS", "IQ2_M", "IQ3_XXS", "Q2_K_S"])
def test_needs_an_imatrix(model, mix, tmp_path):
    with GgufFile(model) as file:
        with pytest.raises(
            ValueError, match=r"must have an importance matrix, got none for '.*'; give one by --imatrix"
        ):
            plan(file, mix)
        whole = read_imatrix(imatrix(tmp_path / "a.gguf", model))
        plan(file, mix, whole)
        part = read_imatrix(imatrix(tmp_path / "b.gguf", model, ("blk.1.ffn_up.weight",)))
        with pytest.raises(ValueError, match=r"got none for 'blk\.1\.ffn_up\.weight'"):
            plan(file, mix, part)
        whole.values["blk.0.attn_q.weight"] = np.ones((1, 128), np.float32)
        with pytest.raises(ValueError, match=r"'blk\.0\.attn_q\.weight' must have 256 values, got 128"):
            plan(file, mix, whole)


def test_the_matrix_is_not_overwritten(model, tmp_path):
    path = imatrix(tmp_path / "a.gguf", model)
    before = (tmp_path / "a.gguf").read_bytes()
    with pytest.raises(ValueError, match="the result must be another file than the importance matrix"):
        quantize_model(model, path, "Q8_0", imatrix=path)
    assert (tmp_path / "a.gguf").read_bytes() == before


# ---- the command ----


def test_command(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(model), str(out), "q8_0", "--tensor-type", "ffn_.*=q5_0", "-t", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"Q5_0 +6 tensors", text) and re.search(r"total +21 tensors .* bits a weight", text)
    with GgufFile(out) as file:
        assert file.tensors["blk.1.ffn_up.weight"].type_name == "Q5_0"
        assert file.tensors["blk.1.attn_q.weight"].type_name == "Q8_0"
    size = out.stat().st_size
    assert main(["quantize", str(model), "none", "q8_0", "--tensor-type", "ffn_.*=q5_0", "--dry-run"]) == 0
    assert f"the file would have {size:,} bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Q9_K"], "type must be one of F32, F16"), (["Q8_0", "--tensor-type", "a"], "must be REGEX=TYPE, got 'a'"),
        (["Q8_0", "--tensor-type", "(=q8_0"], "must be a regular expression"),
        (["Q8_0", "--tensor-type", "a=q9"], "quantize: the type of a tensor must be one of F32, F16, "),
        (["Q8_0", "--tensor-type", "a="], ", got ''"), (["Q8_0", "--tensor-type", "a=q8_1"], ", got 'q8_1'"),
        (["Q8_0", "--output-tensor-type", "i32"], ", got 'i32'"),
        (["Q8_0", "--token-embedding-type", "q9"], ", got 'q9'"),
        (["Q8_0", "--imatrix", "/none"], "/none: No such file"), (["99"], "COPY, or a mix's number, got '99'"),
        (["Q8_0", "--imatrix", "MODEL"], "must be a whole importance matrix (GGUF, or the older .dat), got a GGUF"),
        (["Q8_0", "--imatrix", __file__], "must be a whole importance matrix (GGUF, or the older .dat), got a length"),
    ],
)  # fmt: skip
def test_command_errors(model, tmp_path, capsys, words, message):
    words = [str(model) if word == "MODEL" else word for word in words]
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_rules_that_fit_no_tensor_are_named(model, tmp_path, capsys, dry):
    rules = ["--tensor-type", "ffn_.*=q5_0", "--tensor-type", "atn_q=q8_0", "--tensor-type", "^blk$=q8_0"]
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_0", *rules, *dry]) == 0
    must = "--tensor-type: a regular expression must be found in the name of a tensor"
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [f"ggjit: warning: {must}, got '{rule}', found in none" for rule in ("atn_q", "^blk$")]


def test_types_by_number_and_copies(model, tmp_path, capsys):
    by_name, by_number, copy = (str(tmp_path / name) for name in ("name", "number", "copy"))
    assert [main(["quantize", str(model), *words]) for words in ((by_name, "Q4_0"), (by_number, "2"))] == [0, 0]
    assert Path(by_name).read_bytes() == Path(by_number).read_bytes()
    assert main(["quantize", by_name, copy, "copy"]) == 0
    with GgufFile(by_name) as old, GgufFile(copy) as new:
        assert list(old.kv) == list(new.kv) and list(old.tensors) == list(new.tensors)
        assert old.kv["general.file_type"] == new.kv["general.file_type"] == 2
        assert all(np.array_equal(old.data(name), new.data(name)) for name in old.tensors)
    assert main(["quantize", str(model), f"{tmp_path}/new/", "2"]) == 1
    assert f"{tmp_path}/new/: No such file or directory" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_rules_without_a_mix_are_named(model, capsys):
    assert main(["quantize", str(model), "none", "f16", "--tensor-type", "ffn_.*=q5_0", "--dry-run"]) == 0
    warning = "--tensor-type: TYPE must be quantized for rules to count, got f16"
    assert capsys.readouterr().err == f"ggjit: warning: {warning}\n"


def test_requantizing_must_be_allowed(model, tmp_path, capsys):
    quantized, out = str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")
    assert main(["quantize", str(model), quantized, "Q8_0"]) == 0
    assert main(["quantize", quantized, out, "Q4_0"]) == 1
    assert "must not be quantized already" in capsys.readouterr().err and not os.path.exists(out)
    assert main(["quantize", quantized, out, "Q4_0", "--allow-requantize"]) == 0
    with GgufFile(quantized) as old, GgufFile(out) as new:
        x = types.Q8_0.quant.dequantize(old.data("blk.0.attn_q.weight").reshape(256, -1))
        assert np.array_equal(new.data("blk.0.attn_q.weight"), types.Q4_0.quant.quantize(x).reshape(-1))
    assert main(["quantize", str(model), str(model), "Q8_0"]) == 1
    assert "must be another file than the model" in capsys.readouterr().err


def test_rules():
    pattern, kind = tensor_rule("a=b=q4_k")
    assert pattern.pattern == "a=b" and kind is types.Q4_K


# ---- rows ----


@pytest.mark.parametrize(
    "name", ["F32", "F16", "BF16", "Q4_0", *(pytest.param(n, marks=pytest.mark.full) for n in ("Q6_K", "Q4_K"))]
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rows(name, n_threads):
    kind, x = types.by_name(name), np.random.default_rng(4).standard_normal((7, 512)).astype(np.float32)
    b = quantize_rows(kind, x, n_threads=n_threads)
    assert b.shape == (7, types.row_size(kind, 512))
    y = dequantize_rows(kind, b, n_threads)
    if kind.quant is not None:
        assert np.array_equal(b, kind.quant.quantize(x)) and np.array_equal(y, kind.quant.dequantize(b))
    else:
        assert np.abs(y - x).max() <= {"F32": 0, "F16": 2e-3, "BF16": 2e-2}[name]
        if name == "BF16":
            gguf = pytest.importorskip("gguf")
            assert np.array_equal(b, gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16))


def test_rows_errors():
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_rows(types.Q4_0, np.zeros((1, 33), np.float32))
    with pytest.raises(ValueError, match="imatrix must have 32 elements"):
        quantize_rows(types.Q4_0, np.zeros((1, 32), np.float32), np.zeros(16, np.float32))
    with pytest.raises(ValueError, match="multiple of 18"):
        dequantize_rows(types.Q4_0, np.zeros((1, 17), np.uint8))
    with pytest.raises(NotImplementedError, match="nothing here can make I8"):
        quantize_rows(types.I8, np.zeros((1, 256), np.float32))


@pytest.mark.full
def test_made_model_runs(tmp_path):
    import ggjit as gg

    path = tmp_path / "model.gguf"
    make_model(str(path), "Q8_0", 3, TINY)
    first = path.read_bytes()
    make_model(str(path), "Q8_0", 3, TINY, n_threads=2)
    assert path.read_bytes() == first
    with gg.LLM(path, n_ctx=64, progress=False) as llm:
        ids = llm.tokenize("Hello, the world")
        assert llm.logits(ids).shape == (len(ids), TINY.n_vocab)
