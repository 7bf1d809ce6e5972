"""`python -m ggjit.dev make-model OUT`: a random llama of about 0.5 B parameters in any mix, for sizes and speeds.

Rows of 2048 and 5632 are whole blocks of every type, which those of the small real models are not. The weights are
normal, with some columns and rows larger than others, as in trained models; the vocabulary is one of syllables in
SentencePiece's form. The file is written as a stream, and the same arguments give the same file.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggjit import types
from ggjit.cli import at_least
from ggjit.gguf import GgufWriter
from ggjit.llm.quantize_mixes import NEEDS_IMATRIX, ModelFacts, TensorFacts, choose_types, find_mix
from ggjit.progress import ByteBar
from ggjit.types import Type

_PIECE = 1 << 22  # values made at once
_STD = 0.02
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # kinds of tokens


class Shape(NamedTuple):
    """Sizes of the model."""

    n_layer: int = 11
    n_embd: int = 2048
    n_ff: int = 5632
    n_head: int = 32
    n_head_kv: int = 4
    n_vocab: int = 8192


DEFAULT = Shape()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `make-model`."""
    parser.add_argument("out", metavar="OUT", help="the file to make")
    parser.add_argument(
        "--mix", default="F16", metavar="M", help="F32, F16, or a mix that `ggjit quantize` knows (F16)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of the weights (0)")
    parser.add_argument("--layers", type=at_least(1), default=DEFAULT.n_layer, metavar="N", help="blocks (11)")
    parser.add_argument("-t", "--threads", type=at_least(1), metavar="T", help="threads (as many as `ggjit info` says)")


def run(args: argparse.Namespace) -> int:
    """Make the model."""
    from ggjit.threadpool import default_threads

    with ByteBar("making a model") as bar:
        n = make_model(args.out, args.mix, args.seed, Shape(args.layers), args.threads or default_threads(), bar)
    print(f"{args.out}: {n:,} weights", file=sys.stderr)
    return 0


def make_model(
    path: str,
    mix: str = "F16",
    seed: int = 0,
    shape: Shape = DEFAULT,
    n_threads: int = 1,
    progress: ByteBar | None = None,
) -> int:
    """Write a random model and return the number of its weights.

    Args:
        path: the file to make.
        mix: a name of `quantize_mixes.MIXES`.
        seed: of the weights.
        shape: its sizes.
        n_threads: that code weights.
        progress: is told how far it is.

    Raises:
        ValueError: there is no such mix, or the sizes do not fit it.
        OSError: the file cannot be written.
    """
    chosen = find_mix(mix)
    facts = [TensorFacts(name, types.F32 if len(ne) == 1 else types.F16, ne) for name, ne in _tensors(shape)]
    model = ModelFacts("llama", shape.n_layer, shape.n_head // shape.n_head_kv)
    with GgufWriter(path, progress) as writer:
        for key, value in _metadata(shape).items():
            writer.add(key, value)
        writer.add("general.quantization_version", 2)
        writer.add("general.file_type", chosen.ftype)
        tokens, scores, kinds = _vocabulary(shape.n_vocab)
        writer.add("tokenizer.ggml.tokens", tokens)
        writer.add("tokenizer.ggml.scores", np.array(scores, np.float32))
        writer.add("tokenizer.ggml.token_type", np.array(kinds, np.int32))
        sizes = {tensor.name: tensor.ne for tensor in facts}
        for name, kind in choose_types(facts, chosen, model).items():
            writer.add_tensor(name, _data(name, kind, sizes[name], seed, n_threads), kind, sizes[name])
    return sum(int(np.prod(ne)) for ne in sizes.values())


def _metadata(shape: Shape) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": "random llama",
        "llama.block_count": shape.n_layer,
        "llama.context_length": 4096,
        "llama.embedding_length": shape.n_embd,
        "llama.feed_forward_length": shape.n_ff,
        "llama.attention.head_count": shape.n_head,
        "llama.attention.head_count_kv": shape.n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.dimension_count": shape.n_embd // shape.n_head,
        "llama.rope.freq_base": np.float32(10000),
        "llama.vocab_size": shape.n_vocab,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _vocabulary(n: int) -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and kinds of n tokens: three special ones, the bytes, and syllables, short ones first."""
    special = ["<unk>", "<s>", "</s>"]
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    starts, vowels, ends = (
        ("", *"bcdfghjklmnprstvwyz", "st", "th", "ch", "sh", "tr"),
        (*"aeiou", "ea", "ou"),
        ("", *"nrstld"),
    )
    made: list[str] = ["▁", *letters, *(f"▁{letter}" for letter in letters)]
    for end, vowel, start, space in itertools.product(ends, vowels, starts, ("", "▁")):
        made.append(space + start + vowel + end)
    for end, vowel, one, two, space in itertools.product(ends, vowels, starts[1:], starts[1:], ("▁", "")):
        if len(made) >= 2 * n:
            break
        made.append(f"{space}{one}a{two}{vowel}{end}")
    pieces = list(dict.fromkeys(made))[: n - 259]
    if len(pieces) + 259 != n:
        raise ValueError(f"make_model: n_vocab must be 312 to {len(pieces) + 259}, got {n}")
    texts = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return texts, scores, [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes."""
    n_embd, n_ff = shape.n_embd, shape.n_ff
    n_kv = n_embd // shape.n_head * shape.n_head_kv
    yield "token_embd.weight", (n_embd, shape.n_vocab)
    yield "output_norm.weight", (n_embd,)
    yield "output.weight", (n_embd, shape.n_vocab)
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,), "attn_q": (n_embd, n_embd), "attn_k": (n_embd, n_kv), "attn_v": (n_embd, n_kv),
        "attn_output": (n_embd, n_embd), "ffn_norm": (n_embd,), "ffn_gate": (n_embd, n_ff), "ffn_up": (n_embd, n_ff),
        "ffn_down": (n_ff, n_embd),
    }  # fmt: skip
    for il in range(shape.n_layer):
        yield from ((f"blk.{il}.{name}.weight", ne) for name, ne in block.items())


def _data(name: str, kind: Type, ne: tuple[int, ...], seed: int, n_threads: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor, some rows at a time."""
    from ggjit.quantize import quantize_rows

    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if len(ne) == 1:
        yield (1 + np.float32(0.1) * rng.standard_normal(ne[0], np.float32)).view(np.uint8)
        return
    n, n_rows = ne
    columns = _STD * np.exp(np.float32(0.25) * rng.standard_normal(n, np.float32))
    imatrix = np.ones(n, np.float32) if kind.name in NEEDS_IMATRIX else None
    at_once = max(1, _PIECE // n)
    for first in range(0, n_rows, at_once):
        rows = min(at_once, n_rows - first)
        x = rng.standard_normal((rows, n), np.float32)
        x *= columns
        x *= np.exp(np.float32(0.15) * rng.standard_normal((rows, 1), np.float32))
        yield quantize_rows(kind, x, imatrix, n_threads)
