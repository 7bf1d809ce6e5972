"""Record which types and sizes llama.cpp's llama_model_quantize gives: quantize_mixes.json.

    python tests/data/quantize_mixes.py [SMOLLM2.gguf]      (needs ggjit and a source-built llama-cpp-python)

Models are made with tensors of two rows and quantized by a dry run, whose log names the types. Given the file of
SmolLM2, its sizes in every mix are recorded too.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

from ggjit import types
from ggjit.gguf import GgufWriter
from ggjit.llm.quantize_mixes import MIXES

OUT = Path(__file__).with_suffix(".json")
ATTN = ["attn_q", "attn_k", "attn_v", "attn_output"]
DENSE = [*ATTN, "ffn_gate", "ffn_up", "ffn_down"]
EXPERTS = [*ATTN, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
ODD = [
    *DENSE, *EXPERTS[4:], "attn_qkv", "attn_kv_b", "ffn_up_shexp", "ffn_gate_up", "attn_k_b", "attn_v_b",
    "cross_attn_v", "ffn_gate_inp", "ssm_conv1d", "attn_norm", "foo_exps", "ssm_in",
]  # fmt: skip
# architecture, blocks, heads, key heads, experts, output tied to the embedding, values in a row, tensors of a block
MODELS = {
    "mha": ("llama", 16, 8, 8, 0, False, 256, DENSE),
    "gqa": ("llama", 9, 8, 2, 0, True, 256, DENSE),
    "experts4": ("llama", 9, 8, 4, 4, False, 256, EXPERTS),
    "experts8": ("llama", 20, 8, 2, 8, False, 256, EXPERTS),
    "falcon": ("falcon", 33, 8, 1, 0, False, 256, [*DENSE, "attn_qkv"]),
    "80 blocks": ("llama", 80, 8, 1, 0, False, 256, ["attn_v", "ffn_down"]),
    "80 blocks, gqa 2": ("llama", 80, 8, 4, 0, False, 256, ["attn_v"]),
    "80 blocks, mha": ("llama", 80, 8, 8, 0, False, 256, ["attn_v"]),
    "80 blocks, qwen2": ("qwen2", 80, 8, 8, 0, False, 256, ["attn_v"]),
    "80 blocks, phi3": ("phi3", 80, 8, 2, 0, False, 256, ["attn_v"]),
    "gemma3": ("gemma3", 18, 4, 1, 0, True, 640, DENSE),
    "odd": ("llama", 9, 8, 4, 8, False, 256, ODD),
    "rows of 576": ("llama", 8, 9, 3, 0, False, 576, DENSE),
    "rows of 96": ("llama", 8, 8, 4, 0, True, 96, DENSE),
    "rows of 48": ("llama", 8, 8, 4, 0, False, 48, DENSE),
}  # fmt: skip
CHOICES = {
    "pure": {"pure": True},
    "output": {"output_tensor_type": "Q8_0"},
    "embedding": {"token_embedding_type": "Q5_0", "output_tensor_type": "Q8_0"},
    "keep output": {"quantize_output_tensor": False},
    "names": {"names": [["attn_q", "Q8_0"], [r"blk\.[0-3]\.ffn_.*", "Q5_1"], ["OUTPUT", "Q5_0"], ["ffn_up", "Q4_0"]]},
    "pure names": {"pure": True, "names": [["attn_v", "BF16"]]},
}
CHOICE_MODELS, CHOICE_MIXES = ("gqa", "experts4", "rows of 576"), ("F16", "Q4_K_M", "IQ3_M", "Q8_0")


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    """Names and sizes of a model's tensors."""
    _, n_layer, _, _, n_expert, tied, n, names = MODELS[model]
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (n, 4), "output_norm.weight": (n,)}
    if not tied:
        found["output.weight"] = (n, 4)
    for il, name in itertools.product(range(n_layer), names):
        found[f"blk.{il}.{name}.weight"] = (n, 2, n_expert) if "exps" in name else (n, 2)
    return found


def write(path: Path, model: str) -> None:
    """A model's file, all zeros."""
    arch, n_layer, n_head, n_head_kv, n_expert, _, n, _ = MODELS[model]
    with GgufWriter(path) as writer:
        writer.add("general.architecture", arch)
        writer.add("tokenizer.ggml.model", "no_vocab")
        counts = {
            "context_length": 128, "embedding_length": n, "block_count": n_layer, "feed_forward_length": n,
            "attention.head_count": n_head, "attention.head_count_kv": n_head_kv,
        }  # fmt: skip
        if n_expert:
            counts |= {"expert_count": n_expert, "expert_used_count": 2}
        for key, value in counts.items():
            writer.add(f"{arch}.{key}", value)
        for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
            writer.add(f"{arch}.{key}", np.float32(1e-5))
        for name, ne in tensors(model).items():
            kind = types.F16 if len(ne) > 1 else types.F32
            writer.add_tensor(name, bytes(kind.type_size * int(np.prod(ne))), kind, ne)


def params(mix: str, choices: dict, imatrix: dict[str, int]) -> tuple[object, list]:
    """Parameters of llama_model_quantize and what they point to."""
    p, kept = llama_cpp.llama_model_quantize_default_params(), []
    p.nthread, p.ftype, p.allow_requantize = 2, MIXES[mix].ftype, True
    for key, value in choices.items():
        if key == "names":
            rules = (llama_cpp.llama_model_tensor_override * (len(value) + 1))()
            for rule, (pattern, name) in zip(rules, value):
                rule.pattern, rule.type = pattern.encode(), types.by_name(name).id
            p.tt_overrides = rules
            kept.append(rules)
        else:
            setattr(p, key, types.by_name(value).id if isinstance(value, str) else value)
    if imatrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
        for entry, (name, n) in zip(entries, imatrix.items()):
            data = (ctypes.c_float * n)(*([1.0] * n))
            entry.name, entry.data, entry.size = name.encode(), data, n
            kept.append(data)
        p.imatrix = entries
        kept.append(entries)
    return p, kept


LOG: list[str] = []
callback = llama_cpp.llama_log_callback(lambda level, text, data: LOG.append(text.decode("utf-8", "replace")))
LINE = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- \[.*?\], type = *(\S+), size = .*?(?:-> .*?\((\S+)\))?\n")


def found_types(path: Path, mix: str, choices: dict, imatrix: dict[str, int]) -> dict[str, str] | None:
    """Name to type by a dry run, None if llama.cpp refuses."""
    LOG.clear()
    p, _kept = params(mix, choices, imatrix)
    p.dry_run = True
    if llama_cpp.llama_model_quantize(str(path).encode(), b"unused", ctypes.byref(p)):
        return None
    return {m[1]: (m[3] or m[2]).upper() for m in LINE.finditer("".join(LOG))}


def packed(found: dict[str, str] | None) -> dict[str, str] | None:
    """Types by what follows the block's number, equal neighbours counted: "Q6_K*1 Q4_K*2"."""
    if found is None:
        return None
    kinds: dict[str, list[str]] = {}
    for name, kind in found.items():
        kinds.setdefault(re.sub(r"^blk\.\d+\.|\.weight$", "", name), []).append(kind)
    return {
        key: " ".join(f"{kind}*{len(list(same))}" for kind, same in itertools.groupby(all_))
        for key, all_ in kinds.items()
    }


def main() -> None:
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    data: dict = {"models": MODELS, "choices": CHOICES, "mixes": [], "smollm2": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for model in MODELS:
            write(path, model)
            imatrix = {name: ne[0] * (ne[2] if len(ne) > 2 else 1) for name, ne in tensors(model).items()}
            for mix in MIXES:
                if mix == "NVFP4":  # llama.cpp makes none
                    continue
                without, with_it = (packed(found_types(path, mix, {}, m)) for m in ({}, imatrix))
                data["mixes"].append([model, mix, "", 0, without])
                if with_it != without:
                    data["mixes"].append([model, mix, "", 1, with_it])
            if model in CHOICE_MODELS:
                for choice, mix in itertools.product(CHOICES, CHOICE_MIXES):
                    data["mixes"].append([model, mix, choice, 0, packed(found_types(path, mix, CHOICES[choice], {}))])
        for mix in MIXES if len(sys.argv) > 1 else ():
            out = Path(folder) / "out.gguf"
            p, _kept = params(mix, {}, {})
            refused = llama_cpp.llama_model_quantize(sys.argv[1].encode(), str(out).encode(), ctypes.byref(p))
            data["smollm2"][mix] = None if refused else out.stat().st_size
    lines = [json.dumps(row, separators=(",", ":")) for row in data.pop("mixes")]
    head = json.dumps(data, indent=1)[:-2]
    OUT.write_text(f'{head},\n "mixes": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n", "utf-8")


if __name__ == "__main__":
    main()
