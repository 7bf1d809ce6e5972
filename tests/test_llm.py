"""Tiny models end to end against llama.cpp's numbers, and what must not change a bit: threads, batches, repacking."""

import os
import signal
import threading
from pathlib import Path

import gguf_bytes
import numpy as np
import pytest

import ggjit as gg
from ggjit import fetch
from ggjit.dev.cases import nmse
from ggjit.gguf import GgufFile
from ggjit.llm.context import DecodeContext
from ggjit.llm.memory import estimate

MODELS = Path(__file__).parent / "data" / "models"
# (file, largest difference of logits, NMSE of traces): what rounding the activations as llama.cpp does may cost
FLOAT = [("llama-headdim", 1e-4, 1e-9), ("llama-f16", 1e-2, 1e-6), ("llama-bf16", 1e-1, 1e-4)]
FLOAT += [("gpt2", 5e-3, 1e-6)]  # llama.cpp looks GELU up in a table of f16 values


def load(name, **options):
    return gg.LLM(
        MODELS / f"{name}.gguf", progress=False, **{"n_ctx": 256, "kv_type": "f32", "n_threads": 2, **options}
    )


def reference(name):
    return np.load(MODELS / f"{name}.npz")


@pytest.fixture(scope="module")
def llm():
    with load("llama-headdim") as model:
        yield model


@pytest.mark.parametrize(
    ("name", "limit", "trace_limit"),
    [FLOAT[0], *(pytest.param(*f, marks=pytest.mark.full) for f in FLOAT[1:])],
    ids=[f[0] for f in FLOAT],
)
def test_logits_and_traces_of_float_models(name, limit, trace_limit):
    want = reference(name)
    with load(name) as llm:
        assert np.abs(llm.logits(want["short_ids"]) - want["short_logits"]).max() <= limit
        assert np.abs(llm.logits(want["medium_ids"])[-1] - want["medium_logits"]).max() <= limit
        names = [k.removeprefix("trace__") for k in want.files if k.startswith("trace__")]
        assert len(names) > 20
        for key, got in llm.trace(want["short_ids"], names).items():
            expected = want[f"trace__{key}"]
            assert nmse(expected, got.reshape(expected.shape)) <= trace_limit, key
    with load(name, n_ubatch=16) as llm:
        assert np.abs(llm.logits(want["long_ids"])[-1] - want["long_logits"]).max() <= limit


def test_quantized_model_is_as_near_to_exact_as_llama_cpp():
    want = reference("llama-q.Q4_1")
    spread = 0.0005048052726522564  # llama.cpp's own relative squared distance, from the reference's JSON file
    with load("llama-q.Q4_1") as llm:
        got = llm.logits(want["short_ids"]).astype(np.float64)
    exact = want["short_logits_f32w"].astype(np.float64)
    assert np.sum((got - exact) ** 2) / np.sum(exact**2) <= 1.1 * spread


@pytest.mark.parametrize("name", [pytest.param("llama-headdim", marks=pytest.mark.full), "llama-q.Q4_1"])
def test_bits_do_not_depend_on_threads_batches_or_repacking(name):
    ids = reference(name)["long_ids"]
    with load(name, n_threads=1) as llm:
        want = llm.logits(ids)
    for options in (
        {"n_threads": 2, "n_ubatch": 1},
        {"n_threads": 4, "n_ubatch": 7},
        {"n_ubatch": 33},
        {"repack": False},
    ):
        with load(name, **options) as llm:
            assert np.array_equal(llm.logits(ids), want), options


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_cache_reuse_does_not_change_a_bit(kv_type):
    ids = reference("llama-headdim")["long_ids"].tolist()
    with load("llama-headdim", kv_type=kv_type) as llm:
        fresh = list(llm.raw_tokens(ids, 8, gg.llm.Sampler(temperature=0)))
        other = [*ids[:30], 5, 6, 7]
        list(llm.raw_tokens(other, 3, gg.llm.Sampler(temperature=0)))
        assert llm.n_shared(ids) == 30
        assert list(llm.raw_tokens(ids, 8, gg.llm.Sampler(temperature=0))) == fresh


@pytest.mark.parametrize("kind", ["short", "medium", "long"])
def test_greedy_continuation(llm, kind):
    want = reference("llama-headdim")
    tokens, gaps = want[f"{kind}_greedy"], want[f"{kind}_greedy_gap"]
    certain = int(np.argmax(gaps < 1e-3)) if (gaps < 1e-3).any() else len(gaps)
    assert certain > 8
    got = list(llm.raw_tokens(want[f"{kind}_ids"].tolist(), 32, gg.llm.Sampler(temperature=0)))
    assert got[:certain] == tokens[:certain].tolist()


def test_f16_cache_is_near_llama_cpp():
    want = reference("llama-headdim")
    with load("llama-headdim", kv_type="f16") as llm:
        got = llm.logits(want["long_ids"])[-1]
    assert np.abs(got - want["long_logits_kvf16_flash"]).max() <= 2e-2


def test_generate_stops_at_text_and_count(llm):
    text = "".join(llm.generate("Alice looked", 24, temperature=0))
    assert "".join(llm.generate("Alice looked", 24, temperature=0)) == text
    stop = text[5:8]
    assert "".join(llm.generate("Alice looked", 24, temperature=0, stop=stop)) == text[: text.index(stop)]
    assert len(list(llm.raw_tokens([1, 5, 6], 4, gg.llm.Sampler(temperature=0)))) == 4
    assert list(llm.raw_tokens([1, 5, 6], 0, gg.llm.Sampler(temperature=0))) == []


def test_generation_ends_with_the_context(llm):
    ids = [1] + [5] * 253
    assert len(list(llm.raw_tokens(ids, None, gg.llm.Sampler(temperature=0)))) == 256 - 254 + 1
    with pytest.raises(ValueError, match=r"the prompt must fit the context of 256 tokens, got 257"):
        llm.generate([5] * 257)
    with pytest.raises(ValueError, match="must have at least one token"):
        llm.generate([])


def test_bad_ids_leave_the_model_usable(llm):
    good = llm.logits([1, 5, 6])
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 509\), got 509"):
        llm.logits([1, 509])
    with pytest.raises(ValueError, match="got -1"):
        llm.logits([-1])
    with pytest.raises(ValueError, match="tokens must fit the context"):
        llm.logits([5] * 300)
    assert np.array_equal(llm.logits([1, 5, 6]), good)


def test_trace_names_what_is_missing(llm):
    with pytest.raises(KeyError, match="nonsense-7"):
        llm.trace([1, 2], ["nonsense-7"])


def test_two_threads_share_one_model(llm):
    a, b = [1, 5, 6, 7], [1, 9, 10, 11, 12]
    want = [llm.logits(a), llm.logits(b)]
    wrong = []

    def work(ids, expected):
        wrong.extend(1 for _ in range(20) if not np.array_equal(llm.logits(ids), expected))

    threads = [threading.Thread(target=work, args=x) for x in zip((a, b), want, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_an_interrupted_generator_says_so(llm):
    tokens = llm.raw_tokens([1, 5, 6], 8, gg.llm.Sampler(temperature=0))
    next(tokens)
    llm.logits([1, 2])
    with pytest.raises(RuntimeError, match="another call in between"):
        list(tokens)


def test_closed_model():
    model = load("llama-headdim")
    model.close()
    file = model.model.file
    for use in (
        lambda: model.logits([1]),
        model.warmup,
        lambda: model.tokenize("x"),
        lambda: model.generate("x"),
        lambda: file.data("token_embd.weight"),
        lambda: file.kv["general.name"],
    ):
        with pytest.raises(ValueError, match="must be open, got a closed one"):
            use()
    model.close()


@pytest.mark.parametrize("ids", [[1.5], ["1"], [None], [True], [[1, 2]], None, "ab", [1 << 33, 1.0]])
def test_ids_must_be_whole_numbers(llm, ids):
    with pytest.raises(TypeError, match="token ids must be a sequence of whole numbers, got dtype"):
        llm.logits(ids)


def test_ids_do_not_wrap_around(llm):
    for ids in ([1 << 32], [-(1 << 31) - 1], np.array([(1 << 32) + 1])):
        with pytest.raises(ValueError, match="token ids must fit 32 bits"):
            llm.logits(ids)
    assert llm.logits(np.array([1, 2], np.uint16)).shape == (2, llm.model.n_vocab)


def test_parameters_of_generate_are_checked(llm):
    with pytest.raises(ValueError, match="max_tokens must not be negative, got -1"):
        llm.generate("x", -1)
    with pytest.raises(ValueError, match="a stop text must not be empty"):
        llm.generate("x", stop=["a", ""])
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        llm.generate("x", seed=-1)
    both = ["".join(llm.generate(p, 4, temperature=0)) for p in ("Alice", b"Alice")]
    assert both[0] == both[1]


KINDS = {
    "prompt": "a text or token ids",
    "max_tokens": "a whole number or None",
    "stop": "a text or a list of texts",
    "on_token": "callable or None",
    "temperature": "a number",
    "top_k": "a whole number",
    "top_p": "a number",
    "min_p": "a number",
    "seed": "a whole number",
}
WRONG = [5, 2.5, "x", b"x", [5], ["x"], {}, None, True, gg.F16]
RIGHT = {
    "prompt": ("x", b"x", [5]), "max_tokens": (5, None), "stop": ("x", ["x"]), "on_token": (None,), "seed": (5, None),
    "top_k": (5,), "temperature": (5, 2.5), "top_p": (5, 2.5), "min_p": (5, 2.5),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_arguments_of_generate_are_of_a_kind(llm, name):
    wrong = [value for value in WRONG if not any(value is right or value == right for right in RIGHT[name])]
    for value in [*wrong, np.zeros(2), True]:
        with pytest.raises(TypeError) as raised:
            llm.generate(**{"prompt": "x", name: value})
        if name == "prompt" and isinstance(value, (list, np.ndarray)):
            assert str(raised.value).startswith("generate: token ids must be a sequence of whole numbers, got dtype")
        else:
            assert str(raised.value).split(": ", 1)[1] == f"{name} must be {KINDS[name]}, got {value!r}"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda llm: llm.tokens([1], 2.5, gg.llm.Sampler(0)),
         "generate: max_tokens must be a whole number or None, got 2.5"),
        (lambda llm: llm.raw_tokens([1], 2, None), "generate: sampler must be a Sampler, got None"),
        (lambda llm: llm.tokens("x", 2, gg.llm.Sampler(0)),
         "generate: token ids must be a sequence of whole numbers, got dtype"),
        (lambda llm: llm.logits([1], first=1.0), "logits: first must be a whole number, got 1.0"),
        (lambda llm: llm.trace([1], "l_out-0"), "trace: names must be a list of texts, got 'l_out-0'"),
        (lambda llm: llm.trace(5, ["l_out-0"]), "trace: token ids must be a sequence of whole numbers, got dtype"),
        (lambda llm: llm.tokenize(5), "tokenize: text must be str or bytes, got 5"),
        (lambda llm: llm.detokenize(5), "detokenize: ids must be token ids, got 5"),
        (lambda llm: llm.detokenize([1.5]), "tokenizer: id must be a whole number, got 1.5"),
        (lambda llm: llm.chat("hello"), "chat: messages must be a list of messages, got 'hello'"),
        (lambda llm: llm.chat({"role": "user"}), "chat: messages must be a list of messages, got {'role': 'user'}"),
        (lambda llm: llm.chat(["hello"]), "chat: messages[0] must be a mapping with role and content, got 'hello'"),
        (lambda llm: gg.LLM(5), "GgufFile: path must be a str or a path, got 5"),
        (lambda llm: gg.LLM(b"x.gguf"), "GgufFile: path must be a str or a path, got b'x.gguf'"),
        (lambda llm: estimate(None), "GgufFile: path must be a str or a path, got None"),
        (lambda llm: estimate(llm.model.path, n_ctx=2.5), "estimate: n_ctx must be a whole number, got 2.5"),
        (lambda llm: DecodeContext(llm.model, 64, 1.0), "DecodeContext: n_threads must be a whole number, got 1.0"),
    ],
)  # fmt: skip
def test_arguments_of_other_calls_are_of_a_kind(llm, call, text):
    with pytest.raises(TypeError) as raised:
        call(llm)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(("name", "given"), [("n_ctx", -1), ("n_ctx", 0), ("n_ubatch", 0), ("n_threads", 0)])
def test_only_the_wrong_size_is_named(llm, name, given):
    must = "1 to 512" if name == "n_threads" else "positive"
    for where, call in (("LLM", gg.LLM), ("estimate", estimate)):
        with pytest.raises(ValueError) as raised:
            call(llm.model.path, **{name: given})
        assert str(raised.value) == f"{where}: {name} must be {must}, got {given}"
    with pytest.raises(ValueError, match=rf"^DecodeContext: {name} must be {must}, got {given}$"):
        DecodeContext(llm.model, **{"n_ctx": 64, "n_threads": 1, name: given})


def test_a_model_is_named_as_for_the_commands(llm, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "pull", lambda name, progress: {"tiny": Path(llm.model.path)}[name])
    with gg.LLM("tiny", n_ctx=256, n_threads=1, progress=False) as found:
        assert found.model.path == llm.model.path
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"^pull: the model must be a file, hf:.* or one of \['smollm2', .*, got 'smol'"
    ):
        gg.LLM("smol")
    with pytest.raises(FileNotFoundError):
        gg.LLM(tmp_path / "smollm2")


def test_precision_f32_is_that_of_the_weights():
    """llama.cpp's logits for the same weights in F32; and a token alone and in a prompt has the same bits."""
    want = reference("llama-q.Q4_1")
    ids, exact = want["short_ids"], want["short_logits_f32w"]
    with load("llama-q.Q4_1", prec="f32") as precise, load("llama-q.Q4_1") as plain:
        got = precise.logits(ids)
        assert nmse(exact, got) < min(1e-6, 0.01 * nmse(exact, plain.logits(ids)))
        precise.logits(ids[:-1])
        assert np.array_equal(precise.logits(ids)[-1], got[-1])
    with load("llama-q.Q4_1", prec="f32", n_ubatch=1) as precise:
        assert np.array_equal(precise.logits(ids), got)
    for prec in ("f16", 10, ["f32"], None):
        with pytest.raises(ValueError) as raised:
            load("llama-q.Q4_1", prec=prec)
        assert str(raised.value) == f"LLM: prec must be one of ['default', 'f32'], got {prec!r}"
    for prec in (-1, 5, 2**31):
        with pytest.raises(ValueError, match=rf"^Context: prec must be 0 or 10, got {prec}$"):
            gg.Context(1024, prec=prec)
    assert gg.Context(1024, prec=np.int64(10)).prec == 10
    with pytest.raises(TypeError, match=r"^Context: prec must be a whole number, got True$"):
        gg.Context(1024, prec=True)
    with pytest.raises(TypeError, match=r"^Context: prec must be a whole number, got 'f32'$"):
        gg.Context(100, prec="f32")


@pytest.mark.parametrize("kv_type", [gg.F32, "f32", "F32"])
def test_the_cache_type_is_a_type_or_its_name(kv_type):
    with load("llama-headdim", kv_type=kv_type) as llm:
        assert llm.context.cache.type is gg.F32
        assert llm.context.memory()["cpu"].kv == estimate(llm.model.path, n_ctx=256, kv_type=kv_type).devices["cpu"].kv


@pytest.mark.parametrize("kv_type", [gg.Q8_0, "q8_0", "f15", 5, None, ["f16"]])
def test_other_cache_types_are_refused(llm, kv_type):
    kind = ValueError if isinstance(kv_type, (str, gg.Type)) else TypeError
    calls = {
        "LLM": lambda: load("llama-headdim", kv_type=kv_type),
        "estimate": lambda: estimate(llm.model.path, kv_type=kv_type),
        "DecodeContext": lambda: DecodeContext(llm.model, 64, 1, kv_type),
    }
    for where, call in calls.items():
        with pytest.raises(kind) as raised:
            call()
        want = f"{where}: kv_type must be f16 or f32, as a type or by its name, got {kv_type!r}"
        assert str(raised.value) == want


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_can_use_a_model_that_another_thread_was_using(llm):
    llm.logits([1, 2])
    with llm._lock:  # as in a thread that decodes
        child = []
        thread = threading.Thread(target=lambda: child.append(fork_and_generate(llm)))
        thread.start()
        thread.join()
    assert child == [0]


def fork_and_generate(llm):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a deadlock ends the child
        os._exit(0 if list(llm.raw_tokens([1, 5, 6], 2, gg.llm.Sampler(temperature=0))) else 1)
    return os.waitpid(pid, 0)[1]


def test_bad_options():
    with pytest.raises(ValueError, match="must be positive"):
        load("llama-headdim", n_ubatch=0)


def rewritten(path, drop=(), extra=(), **changes):
    """The tiny model with other metadata and tensors."""
    source = GgufFile(MODELS / "llama-headdim.gguf")
    entries, infos, data = [], [], b""
    for key, value in source.kv.items():
        kind, content = int(source.kv.value_type(key)), changes.get(key.rpartition(".")[2], value)
        if kind == gguf_bytes.ARRAY:
            content = int(source.kv.element_type(key)), [c.item() if hasattr(c, "item") else c for c in content]
        entries.append(gguf_bytes.entry(key, kind, content))
    found = source.tensors.values()
    tensors = {info.name: (info.ne[: info.n_dims], info.type_id, bytes(source.data(info.name))) for info in found}
    for name, (ne, type_id, content) in (tensors | dict(extra)).items():
        if name not in drop:
            infos.append(gguf_bytes.tensor(name, ne, type_id, len(data)))
            data += content + bytes(-len(content) % 32)
    path.write_bytes(gguf_bytes.gguf(entries, infos, data))
    return gg.LLM(path, n_ctx=64, n_threads=1, progress=False)


def test_a_file_with_other_tensors_than_the_graph_uses_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    with rewritten(path) as same, load("llama-headdim", n_ctx=64, kv_type="f16") as llm:
        assert np.array_equal(same.logits([1, 2]), llm.logits([1, 2]))
    norm = {"blk.0.attn_q_norm.weight": ((4,), 0, bytes(16))}
    with pytest.raises(gg.GgufError, match=r"got 1 others, first 'blk\.0\.attn_q_norm\.weight'"):
        rewritten(path, extra=norm)
    with pytest.raises(gg.GgufError, match=r"the architecture uses, got \d+ others, first 'blk\.1\."):
        rewritten(path, block_count=1)
    with pytest.raises(gg.GgufError, match=r"'output_norm\.weight' must be in the file"):
        rewritten(path, drop=["output_norm.weight"])


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    tokens = [*GgufFile(MODELS / "llama-headdim.gguf").kv["tokenizer.ggml.tokens"]]
    for wrong in (tokens[:-1], [*tokens, "more"]):
        with pytest.raises(gg.GgufError, match=r"tokenizer\.ggml\.tokens must have 509 elements, one a row"):
            rewritten(tmp_path / "x.gguf", tokens=wrong)
