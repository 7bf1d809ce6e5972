"""The command line that the programs share: read a prompt in batches, then choose one token after the other."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ggjit.cli import EXPECTED, at_least, missing_package
from ggjit.counts import counted
from ggjit.examples.gpt2.model_file import ModelFile
from ggjit.llm.sampling import Sampler
from ggjit.llm.tokenizer import StreamDecoder
from ggjit.threadpool import default_threads


class Engine(Protocol):
    """What a program does with tokens."""

    def eval(self, n_past: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind `n_past`; their logits, [n, n_vocab]."""

    def facts(self) -> list[str]:
        """What the engine was given."""


Make = Callable[[ModelFile, argparse.Namespace], Engine]


def parser(program: str) -> argparse.ArgumentParser:
    """The arguments of all programs."""
    one = at_least(1)
    p = argparse.ArgumentParser(prog=f"python -m ggjit.examples.gpt2.{program}", description=f"GPT-2: {program}.")
    p.add_argument("-m", "--model", required=True, metavar="MODEL", help="a GGUF file of the architecture gpt2")
    p.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="the prompt")
    p.add_argument("-n", "--n-predict", type=one, default=32, metavar="N", help="tokens to generate (32)")
    p.add_argument("-b", "--n-batch", type=one, default=32, metavar="N", help="most tokens of a run (32)")
    p.add_argument("-t", "--threads", type=one, default=default_threads(), metavar="T", help="threads")
    p.add_argument("--temp", type=float, default=0.0, help="temperature; 0 takes the best token (0)")
    p.add_argument("--top-k", type=at_least(0), default=40, metavar="K", help="keep the K best tokens (40)")
    p.add_argument("--top-p", type=float, default=0.9, metavar="P", help="keep the best up to this probability (0.9)")
    p.add_argument("-s", "--seed", type=at_least(0), metavar="S", help="seed of the random numbers")
    return p


def sampler_of(args: argparse.Namespace, stream: int = 0) -> Sampler:
    """The sampler that the arguments ask for; streams have seeds of their own."""
    seed = None if args.seed is None else args.seed + stream
    return Sampler(args.temp, args.top_k, args.top_p, 0.0, seed)


def prompt_ids(file: ModelFile, text: str, n_predict: int) -> list[int]:
    """Ids of a prompt.

    Raises:
        ValueError: it is empty, or the context has no room behind it.
    """
    ids = file.tokenizer.tokenize(text)
    if not ids:
        raise ValueError("gpt2: the prompt must have at least one token, got none")
    if len(ids) + n_predict - 1 > file.sizes.n_ctx:  # the last token is not computed any more
        raise ValueError(
            f"gpt2: prompt and generated tokens must fit the context of {file.sizes.n_ctx}, got {len(ids)} and "
            f"{n_predict}"
        )
    return ids


def read_prompt(engine: Engine, ids: Sequence[int], n_batch: int) -> NDArray[np.float32]:
    """Compute a prompt in runs of at most `n_batch` tokens; logits of all of them, [n, n_vocab]."""
    return np.concatenate([engine.eval(i, ids[i : i + n_batch]) for i in range(0, len(ids), n_batch)])


def generate(engine: Engine, ids: Sequence[int], n_predict: int, n_batch: int, sampler: Sampler) -> Iterator[int]:
    """The tokens that follow a prompt."""
    logits = read_prompt(engine, ids, n_batch)
    for n_past in range(len(ids), len(ids) + n_predict):
        token = sampler(logits[-1])
        yield token
        if n_past + 1 < len(ids) + n_predict:
            logits = engine.eval(n_past, [token])


def converse(engine: Engine, file: ModelFile, args: argparse.Namespace) -> None:
    """Print the prompt, what follows it, and what the engine was given."""
    ids, decoder = prompt_ids(file, args.prompt, args.n_predict), StreamDecoder(file.tokenizer)
    start = time.perf_counter()
    print(args.prompt, end="", flush=True)
    for token in generate(engine, ids, args.n_predict, args.n_batch, sampler_of(args)):
        if token in file.tokenizer.eog:
            break
        print(decoder.push(token), end="", flush=True)
    print(decoder.flush(), flush=True)
    print(f"\n{counted(len(ids), 'token')} of prompt, {time.perf_counter() - start:.2f} s", file=sys.stderr)


def main(
    program: str,
    make: Make,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
    converse: Callable[[Engine, ModelFile, argparse.Namespace], None] = converse,
) -> int:
    """Run a program.

    Args:
        program: its name.
        make: makes its state.
        add_arguments: declares arguments of its own.
        argv: the words after the program's name; those of the process by default.
        converse: what it does with a prompt.

    Returns:
        The exit status.
    """
    p = parser(program)
    if add_arguments is not None:
        add_arguments(p)
    args = p.parse_args(argv)
    try:
        file = ModelFile(args.model)
        engine = make(file, args)
        converse(engine, file, args)
        for line in engine.facts():
            print(line, file=sys.stderr)
    except ModuleNotFoundError as error:
        hint = missing_package(error)
        if hint is None:
            raise
        print(f"{program}: error: {program} {hint}", file=sys.stderr)
        return 1
    except EXPECTED as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    return 0
