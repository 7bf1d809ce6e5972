"""`ggjit quantize IN OUT TYPE`: a model with smaller weights, by llama.cpp's mixes."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ggjit.cli import at_least, check_output, warn, warn_of_unfound
from ggjit.counts import counted
from ggjit.llm.quantize_model import Plan, plan, quantize_model, result_nbytes, tensor_rule, totals, weight_type

if TYPE_CHECKING:
    from ggjit.gguf import GgufFile
    from ggjit.llm.quantize_mixes import Choices

_MIXES = """
TYPE is the name of a mix, or llama.cpp's number of it, which says what each tensor becomes:
  F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_0 Q5_1 Q4_K_M Q4_K_S Q4_0 Q4_1 IQ4_NL IQ4_XS MXFP4_MOE NVFP4
  Q3_K_L Q3_K_M Q3_K_S Q2_K Q2_0 TQ1_0 TQ2_0 Q1_0 IQ3_S IQ3_M
  COPY (all as they are, the parts of a split model in one file)
  with an importance matrix: Q2_K_S IQ3_XS IQ3_XXS IQ2_M IQ2_S IQ2_XS IQ2_XXS IQ1_M IQ1_S
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `quantize`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _MIXES
    parser.add_argument("model", metavar="IN", help="a GGUF file, any part of a split one, or a name that `pull` knows")
    parser.add_argument("out", metavar="OUT", help="the file to make")
    parser.add_argument("type", metavar="TYPE", help="what to make of it")
    parser.add_argument("--imatrix", metavar="F", help="importance matrix of the columns of weights")
    parser.add_argument(
        "--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="type of the tensors in whose names REGEX is found; of several rules the first that fits counts",
    )  # fmt: skip
    parser.add_argument("--pure", action="store_true", help="one type for all: no mix")
    parser.add_argument("--output-tensor-type", metavar="TYPE", help="type of the output matrix")
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="type of the token embedding")
    parser.add_argument("--leave-output-tensor", action="store_true", help="keep output.weight as it is")
    parser.add_argument("--allow-requantize", action="store_true", help="take a model that is quantized already")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be made")
    parser.add_argument("-t", "--threads", type=at_least(1), metavar="N", help="threads (as many as `ggjit info` says)")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Quantize the model and print what it became."""
    from ggjit.fetch import pull
    from ggjit.gguf import GgufFile
    from ggjit.llm.imatrix_file import read_imatrix
    from ggjit.llm.quantize_mixes import Choices
    from ggjit.progress import ByteBar
    from ggjit.threadpool import default_threads

    choices = Choices(
        args.pure,
        weight_type(args.output_tensor_type) if args.output_tensor_type else None,
        weight_type(args.token_embedding_type) if args.token_embedding_type else None,
        args.leave_output_tensor,
        [tensor_rule(text) for text in args.tensor_type],
    )
    if not args.dry_run:
        check_output(args.out)
    path = pull(args.model, progress=not args.no_progress)
    with GgufFile(path) as file:
        _warn(args, choices, file)
    start = time.perf_counter()
    if args.dry_run:
        matrix = read_imatrix(args.imatrix) if args.imatrix else None
        with GgufFile(path) as file:
            made = plan(file, args.type, matrix, choices, args.allow_requantize)
            _print(made)
            print(f"the file would have {result_nbytes(file, made):,} bytes")
        return 0
    with ByteBar("quantizing", not args.no_progress) as bar:
        n_threads = args.threads or default_threads()
        made = quantize_model(path, args.out, args.type, args.imatrix, choices, args.allow_requantize, n_threads, bar)
    _print(made)
    print(f"{args.out} made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0


def _warn(args: argparse.Namespace, choices: Choices, file: GgufFile) -> None:
    """Warn of rules for tensors that change nothing."""
    from ggjit import types
    from ggjit.llm.quantize_mixes import find_mix

    warn_of_unfound("--tensor-type", [pattern.pattern for pattern, _ in choices.by_name], file.tensors)
    if choices.by_name and not types.by_name(find_mix(args.type).base).is_quantized:
        warn(f"--tensor-type: TYPE must be quantized for rules to count, got {args.type}")


def _print(made: Plan) -> None:
    """Tensors and bytes of the result by type."""
    n_values = sum(step.info.nelements for step in made.steps)
    nbytes = sum(step.nbytes for step in made.steps)
    for name, (n, size) in totals(made).items():
        print(f"{name:8} {_tensors(n)} {size:16,} bytes")
    bits = f"{8 * nbytes / max(1, n_values):.2f} bits a weight"
    print(f"{'total':8} {_tensors(len(made.steps))} {nbytes:16,} bytes, {bits}")


def _tensors(n: int) -> str:
    number, noun = counted(n, "tensor").split()
    return f"{number:>5} {noun:7}"
