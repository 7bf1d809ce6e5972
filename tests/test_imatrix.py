"""Importance matrices: sums against NumPy float64 from captured activations, the file's form against other readers."""

from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit.cli import main
from ggjit.graph import Graph
from ggjit.llm.imatrix import Collector, collect, write
from ggjit.llm.imatrix_file import read_imatrix
from ggjit.llm.perplexity import text_chunks
from ggjit.lower import lower

MODEL = Path(__file__).parent / "data" / "models" / "llama-f16.gguf"
TEXT = "In the beginning there was a text, and the text was long enough to be cut into some chunks of tokens. " * 3
N_CTX = 48
# what a matrix of a block is multiplied with, by its name in the graph
INPUTS = {
    "attn_q": "attn_norm", "attn_k": "attn_norm", "attn_v": "attn_norm", "attn_output": "kqv_out",
    "ffn_gate": "ffn_norm", "ffn_up": "ffn_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    with gg.LLM(MODEL, n_ctx=256, n_threads=2, kv_type="f32", progress=False) as model:
        yield model


@pytest.fixture(scope="module")
def collected(llm):
    return collect(llm, TEXT, N_CTX, 2)


def test_sums_are_those_of_the_activations(llm, collected):
    n_layer, chunks = llm.model.hparams.n_layer, text_chunks(llm, TEXT, N_CTX)[:2]
    names = [f"{inner}-{il}" for inner in set(INPUTS.values()) for il in range(n_layer)]
    traces = [llm.trace(chunk, names) for chunk in chunks]
    for name, inner in INPUTS.items():
        for il in range(n_layer):
            found = collected.sums[f"blk.{il}.{name}.weight"]
            x = np.concatenate([t[f"{inner}-{il}"].reshape(N_CTX, -1) for t in traces]).astype(np.float64)
            assert np.allclose(found.in_sum2, (x**2).sum(0)[None], rtol=1e-12)
            assert found.counts.tolist() == [2 * N_CTX]
    assert len(collected.sums) == 7 * n_layer  # and ffn_down; not the output matrix
    assert (collected.n_chunks, collected.chunk_size) == (2, N_CTX)


def test_the_output_matrix_on_request(llm):
    found = collect(llm, TEXT, N_CTX, 1, process_output=True).sums
    assert found["output.weight"].counts.tolist() == [N_CTX]


@pytest.mark.parametrize("n_b", [1, 2])
def test_experts_are_counted_apart(n_b):
    rng = np.random.default_rng(n_b)
    n_in, n_expert, n_used, n_tokens = 32, 5, 2, 9
    x = rng.normal(0, 1, (n_tokens, n_b, n_in)).astype(np.float32)
    ids = rng.integers(0, n_expert - 1, (n_tokens, n_used)).astype(np.int32)  # the last sees nothing
    weights = rng.normal(0, 1, (n_expert, 7, n_in)).astype(np.float32)
    with gg.Context(1 << 20):
        leaf = gg.from_numpy(weights, name="blk.0.ffn_up_exps.weight")
        node = gg.mul_mat_id(leaf, gg.from_numpy(x), gg.from_numpy(ids))
        other = gg.mul_mat(gg.from_numpy(weights[0], name="other"), gg.from_numpy(x))
        collector = Collector()
        executable = lower(Graph(16).build_forward_expand(node).build_forward_expand(other), 2)
        for _ in range(2):
            executable.run(collector)
    want, counts = np.zeros((n_expert, n_in)), np.zeros(n_expert)
    for t, u in np.ndindex(n_tokens, n_used):
        want[ids[t, u]] += 2 * x[t, u % n_b].astype(np.float64) ** 2
        counts[ids[t, u]] += 2
    (found,) = collector.sums.values()
    assert np.allclose(found.in_sum2, want, rtol=1e-12) and np.array_equal(found.counts, counts)


def test_the_file_is_what_quantize_reads(tmp_path, collected):
    path = tmp_path / "imatrix.gguf"
    write(path, collected, ["a.txt", "b.txt"])
    back = read_imatrix(str(path))
    assert (tuple(back.datasets), back.n_chunks) == (("a.txt", "b.txt"), 2)
    assert back.values.keys() == collected.sums.keys()
    for name, sums in collected.sums.items():
        assert np.allclose(back.values[name], sums.in_sum2 / sums.counts[:, None], rtol=1e-6)


def test_the_form_is_llama_cpp_s(tmp_path, llm):
    gguf = pytest.importorskip("gguf")
    text, path = tmp_path / "text.txt", tmp_path / "imatrix.gguf"
    text.write_text(TEXT)
    words = ["imatrix", str(MODEL), "-f", str(text), "-o", str(path), "-c", str(N_CTX), "--chunks", "1", "-t", "1"]
    assert main(words) == 0
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert values == {
        "general.type": "imatrix",
        "imatrix.datasets": [str(text)],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": N_CTX,
    }
    uint32 = gguf.GGUFValueType.UINT32
    assert all(reader.fields[f"imatrix.chunk_{what}"].types == [uint32] for what in ("count", "size"))
    hp = llm.model.hparams
    tensors = {t.name: t for t in reader.tensors}
    assert len(tensors) == 2 * 7 * hp.n_layer
    down = tensors["blk.0.ffn_down.weight.in_sum2"]
    assert (down.tensor_type.name, down.shape.tolist()) == ("F32", [hp.n_ff(0), 1])
    assert tensors["blk.0.ffn_down.weight.counts"].data.ravel().tolist() == [N_CTX]


def test_neither_model_nor_text_is_overwritten(tmp_path, capsys):
    model, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    model.write_bytes(MODEL.read_bytes())
    text.write_text("Alice was beginning to get very tired of sitting by her sister on the bank. " * 20)
    for out, what in ((model, "the model"), (text, "the text")):
        before = out.read_bytes()
        assert main(["imatrix", str(model), "-f", str(text), "-c", "16", "--chunks", "1", "-o", str(out)]) == 1
        assert f"imatrix: the result must be another file than {what}" in capsys.readouterr().err
        assert out.read_bytes() == before
