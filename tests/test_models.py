"""Models as llama.cpp describes them: the parts of a model, one class for each architecture, loading, ubatches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import models
from ggjit.barriers import BARRIER
from ggjit.gguf import GgufFile
from ggjit.llm.model import Model
from ggjit.models import layers

MODELS = Path(__file__).parent / "data" / "models"
LLAMA = MODELS / "llama-headdim.gguf"

# Names of a block's weights that all architectures of llama.cpp share, as far as those here have them.
LAYER_NAMES = {
    "attn_norm", "attn_norm_b", "attn_post_norm", "attn_q_norm", "attn_k_norm", "q_norm", "k_norm", "wq", "wk", "wv",
    "wqkv", "wo", "bq", "bk", "bv", "bqkv", "bo", "ffn_norm", "ffn_norm_b", "ffn_post_norm", "ffn_gate_inp",
    "ffn_gate", "ffn_up", "ffn_down", "ffn_up_b", "ffn_down_b", "ffn_gate_b",
}  # fmt: skip


def test_s88_model_layers_and_building_blocks() -> None:
    model = Model(LLAMA)
    hp, arch = model.hparams, model.architecture
    assert (hp.arch, len(arch.layers)) == ("llama", hp.n_layer)
    assert arch.tok_embd.ne == (hp.n_embd, model.n_vocab, 1, 1) and arch.output_norm.ne[0] == hp.n_embd
    for il, layer in enumerate(arch.layers):
        assert layer.wq.name == f"blk.{il}.attn_q.weight" and layer.wq.ne[:2] == (
            hp.n_embd,
            hp.head_dim * hp.n_head(il),
        )
        assert layer.ffn_down.ne[:2] == (hp.n_ff(il), hp.n_embd)
    model.close()
    with gg.Context(1 << 16):
        x = gg.from_numpy(np.float32([[3, 4], [0, 2]]))
        norm = layers.rms_norm(x, gg.from_numpy(np.float32([1, 2])), 0.0)
        out = layers.linear(norm, gg.from_numpy(np.float32([[1, 1]])), gg.from_numpy(np.float32([0.5])))
        gg.build(out, 64).compute(1)
    assert np.allclose(out.numpy().ravel(), [11 / np.sqrt(12.5) + 0.5, 4 / np.sqrt(2) + 0.5])


def test_s89_a_class_for_each_architecture_with_shared_names() -> None:
    names = models.names()
    assert {"gemma3", "gpt2", "llama"} <= set(names)
    for name in names:
        module = __import__(f"ggjit.models.{name}", fromlist=["Layer"])
        assert callable(models.get(name).build)
        fields = {f.name for f in dataclasses.fields(module.Layer)}
        assert fields <= LAYER_NAMES, (name, fields - LAYER_NAMES)
    with pytest.raises(
        NotImplementedError, match=r"models: the architecture must be one of \[.*'llama'.*\], got 'nope'"
    ):
        models.get("nope")


def test_s90_what_a_model_knows_about_itself() -> None:
    file = GgufFile(LLAMA)
    for repack in (True, False):
        model = Model(LLAMA, repack=repack)
        assert [m.path for m in model.file.mappings] == [str(LLAMA)] and set(file.tensors) <= set(model.weights)
        assert {t.buffer for t in model.weights.values()} == set(model.buffers)
        kinds = {b.type.name for b in model.buffers}
        assert kinds == ({"host", "mapped", "panel"} if repack else {"mapped"})
        if not repack:
            assert model.nbytes == sum(t.nbytes for t in model.weights.values())
        assert repr(model).startswith(f"Model('llama-headdim.gguf', llama, {model.hparams.n_layer} layers, ")
        model.close()


def test_s92_a_batch_is_decoded_in_ubatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """17 tokens by 7: three runs, of which two share one graph; the logits are those of one run."""
    ids = np.load(LLAMA.with_suffix(".npz"))["medium_ids"][:17]
    with gg.LLM(LLAMA, n_ctx=256, n_threads=1, progress=False) as llm:
        want = llm.logits(ids)
    with gg.LLM(LLAMA, n_ctx=256, n_threads=1, n_ubatch=7, progress=False) as llm:
        shapes = []
        graph = llm.context.graph
        monkeypatch.setattr(llm.context, "graph", lambda *key: shapes.append(key[0]) or graph(*key))
        got = llm.logits(ids)
        assert shapes == [7, 7, 3]
    assert np.array_equal(got, want)


def test_threads_do_not_meet_between_products_of_one_source() -> None:
    """Nor between what follows them: the stores of keys and of values, and the rope of queries."""
    with gg.LLM(MODELS / "llama-q.Q4_1.gguf", n_ctx=256, n_threads=2, progress=False) as llm:
        run = llm.context.graph(1, 256, 1).executable
        ops = [s.node.op.name for s in run.steps]
        meet = (run.rows[:, 3] & BARRIER).tolist()
        at = next(i for i, s in enumerate(run.steps) if s.kernel.name.startswith("mul_mat"))
        assert [t.src[0].name for t in (s.node for s in run.steps[at : at + 3])] == [
            f"blk.0.attn_{name}.weight" for name in "qkv"
        ]
        attention = ops.index("flash_attn_ext")
        assert ops[attention - 3 : attention] == ["set_rows", "set_rows", "rope"]
        assert meet[at : at + 2] == [0, 0] and meet[attention - 3 : attention] == [0, 0, BARRIER]
        assert sum(meet[at:attention]) == 2, "one more after the products, or what is computed beside them"
        idle = llm.context.graph(2, 256, 0).executable
        weights = [s.node.src[0].name for s in idle.steps if s.node.src[0] is not None]
        assert "blk.1.attn_v.weight" in weights and "blk.1.attn_q.weight" not in weights, "no queries for nobody"


def test_s98_weights_lie_where_the_mapping_has_them() -> None:
    """Offsets of the file, the mapping, a buffer around the used range: no byte is copied."""
    model, file = Model(LLAMA, repack=False), GgufFile(LLAMA)
    mapping, (first, last) = model.file.mappings[0], model.file.used_range()
    buffer = model.weights["token_embd.weight"].buffer
    assert buffer.type.name == "mapped" and (buffer.base, buffer.size) == (mapping.address + first, last - first)
    for name, t in model.weights.items():
        info = file.tensors.get(name) or file.tensors["token_embd.weight"]
        assert t.data == mapping.address + info.offset and info.offset >= file.data_offset
        assert np.array_equal(t.bytes(), file.data(info.name))
    model.close()
