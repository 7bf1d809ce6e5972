"""Batches, and what stops or refuses one: the cache holds what was computed and nothing else."""

import copy
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit.llm.batch import Batch
from ggjit.llm.placement import Placement
from ggjit.llm.sampling import Sampler

MODEL = Path(__file__).parent / "data" / "models" / "llama-q.Q4_1.gguf"
IDS = list(range(3, 30))


@pytest.fixture
def llm():
    with gg.LLM(MODEL, n_ctx=256, n_threads=1, n_ubatch=16, progress=False) as model:
        yield model


def batch(n=4, **changed):
    arrays = {
        "tokens": np.arange(1, n + 1, dtype=np.int32),
        "pos": np.arange(n, dtype=np.int32),
        "seq": np.zeros(n, np.int32),
        "output": np.ones(n, np.bool_),
    }
    return Batch(**{**arrays, **changed})


@pytest.mark.parametrize("name", ["tokens", "pos", "seq", "output"])
def test_arrays_of_other_lengths_are_refused(name):
    short = batch(1)
    with pytest.raises(ValueError, match="Batch: tokens, pos, seq and output must be equally long, got"):
        batch(**{name: getattr(short, name)})


@pytest.mark.parametrize(
    "pos", [[0, 1, 2, 3], np.arange(4), np.zeros((4, 1), np.int32), np.zeros(4, np.float32)], ids=str
)
def test_arrays_of_other_types_are_refused(pos):
    with pytest.raises(TypeError, match="Batch: pos must be an int32 array of one dimension, got"):
        batch(pos=pos)


@pytest.mark.parametrize("name", ["pos", "seq"])
@pytest.mark.parametrize("n", [1, 4])
def test_negative_places_are_refused(llm, name, n):
    with pytest.raises(ValueError, match="must not be negative, got -2"):
        llm.context.decode(batch(n, **{name: np.full(n, -2, np.int32)}))
    assert llm.context.cache.n_used == 0


@pytest.mark.parametrize("make", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))], ids=["deepcopy", "pickle"])
def test_a_copy_has_arrays_of_its_own(llm, make):
    want = llm.context.decode(batch())
    other = batch(tokens=np.full(4, 9, np.int32))
    made = make(other)
    made.tokens[:] = batch().tokens
    del other
    llm.context.cache.clear()
    assert np.array_equal(llm.context.decode(made), want)


def test_batches_are_told_apart():
    assert batch() != batch() and len({batch(), batch()}) == 2


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"outputs": "alll"}, "outputs must be 'last', 'all' or 'none', got 'alll'"),
        ({"first": 2**31 - 2}, "positions must fit 32 bits"),
        ({"seq": 2**31}, "sequences must fit 32 bits, got 2147483648"),
    ],
)
def test_numbers_that_fit_no_batch(arguments, text):
    with pytest.raises(ValueError, match=text):
        Batch.of([1, 2, 3], **arguments)
    with pytest.raises(TypeError, match="token ids must be a sequence of whole numbers"):
        Batch.of([[1], [2, 3]])


def test_logits_where_they_lie(llm):
    context = llm.context
    want = context.decode(batch())[-1].copy()
    context.cache.clear()
    assert np.array_equal(context.decode(batch(), copy=False), want)
    for wrong in (batch(0), batch(output=np.array([True, True, True, False]))):
        with pytest.raises(ValueError, match="the last token must have output=True if logits are not copied"):
            context.decode(wrong, copy=False)
    assert context.cache.n_used == 4
    assert context.decode(batch(pos=np.arange(4, 8, dtype=np.int32)), lambda node: False, copy=False).shape == (0,)
    assert context.cache.n_used == 4


@pytest.mark.parametrize("name", ["n_ctx", "n_threads", "n_ubatch"])
@pytest.mark.parametrize("value", [2.5, "5", True])
def test_numbers_of_a_model_are_whole(name, value):
    with pytest.raises(TypeError, match=f"LLM: {name} must be a whole number, got"):
        gg.LLM(MODEL, **{name: value})


def test_a_closed_model_gives_its_memory_back():
    with gg.LLM(MODEL, n_ctx=256, n_threads=1, progress=False) as model:
        list(model.generate([3, 4], max_tokens=2))
        arrays = [weakref.ref(t) for t in model.model.weights.values()]
    assert not any(a() is not None for a in arrays)


def test_arrays_with_gaps_between_their_elements(llm):
    want = llm.context.decode(batch())
    llm.context.cache.clear()
    wide = np.zeros((4, 3), np.int32)
    wide[:, 1] = np.arange(4)
    assert np.array_equal(llm.context.decode(batch(pos=wide[:, 1], seq=wide[:, 2])), want)


def test_a_run_that_the_callback_stops_leaves_nothing(llm):
    want = list(llm.raw_tokens(IDS, 5, Sampler(0)))
    calls = iter(range(1000))
    llm.observe(IDS, lambda node: next(calls) < 40)
    assert llm.context.cache.n_used == 0
    assert list(llm.raw_tokens(IDS, 5, Sampler(0))) == want
    llm.context.cache.clear()
    calls = iter(range(1000))
    got = llm.context.decode(Batch.of(IDS, outputs="all"), lambda node: next(calls) < 80)
    assert len(got) == llm.context.cache.n_used == 16, "whole ubatches only"


def test_devices_need_different_names():
    class Named:
        name = "a"

    with pytest.raises(ValueError, match="Placement: devices must have different names"):
        Placement(3, [Named(), Named()])


def test_a_model_of_more_blocks_than_tensors(tmp_path):
    data = MODEL.read_bytes()
    at = data.index(b"llama.block_count") + len("llama.block_count") + 4
    path = tmp_path / "many.gguf"
    path.write_bytes(data[:at] + (1 << 30).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(gg.GgufError, match=r"block_count.*must be at most"):
        gg.LLM(path, progress=False)


def test_a_token_that_cannot_be_is_never_chosen():
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = 1
    for temperature in (1e-300, 1.0, 1e300):
        assert Sampler(temperature, top_k=0, min_p=0, top_p=1, seed=1)(logits) == 7
    with pytest.raises(ValueError, match="temperature"):
        Sampler(float("inf"))


def test_logits_of_one_token(llm):
    """A batch's arrays are its own, also where it is made the short way."""
    want = llm.logits([5, 6])[:1]
    assert np.array_equal(llm.logits([5]), want)
    assert llm.logits([5], first=1).shape == (0, llm.context.model.n_vocab)
    with pytest.raises(ValueError, match="logits: first must not be negative, got -1"):
        llm.logits([5, 6], first=-1)


def test_a_trace_has_all_tokens_or_is_refused(llm):
    assert llm.trace(IDS[:16], ["l_out-0"])["l_out-0"].shape[2] == 16
    with pytest.raises(ValueError, match="trace: tokens must fit a ubatch of 16, got 27"):
        llm.trace(IDS, ["l_out-0"])


def test_a_closed_context_says_so():
    llm = gg.LLM(MODEL, n_ctx=64, progress=False)
    context = llm.context
    llm.close()
    context.close()
    with pytest.raises(ValueError, match="DecodeContext: the context must be open, got a closed one"):
        context.decode(Batch.of([1]))
    with pytest.raises(AttributeError, match="has no attribute 'cash'"):
        _ = context.cash
