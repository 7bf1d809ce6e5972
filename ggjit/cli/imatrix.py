"""`ggjit imatrix MODEL -f TEXT -o OUT`: the importance matrix of a model for its quantization, as llama-imatrix's."""

from __future__ import annotations

import argparse
import sys

from ggjit.cli import at_least, check_output, model_options, read_text, tell_of_long
from ggjit.counts import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `imatrix`."""
    one = at_least(1)
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="the text; `-` is stdin")
    parser.add_argument("-o", "--output", default="imatrix.gguf", metavar="OUT", help="file to write (imatrix.gguf)")
    parser.add_argument("-c", "--ctx", type=at_least(4), default=512, metavar="CTX", help="tokens of a chunk (512)")
    parser.add_argument("--chunks", type=one, metavar="N", help="most chunks to compute (all)")
    parser.add_argument("-t", "--threads", type=one, metavar="T", help="threads (as many as `ggjit info` says)")
    parser.add_argument("--process-output", action="store_true", help="take the output matrix too")
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="compute from the mapped file")


def run(args: argparse.Namespace) -> int:
    """Compute the text and write the file; returns the exit status."""
    import ggjit as gg
    from ggjit.fetch import pull
    from ggjit.gguf import check_another
    from ggjit.llm.imatrix import collect, write

    check_output(args.output)
    check_another(args.output, args.file, "imatrix: the result", "the text")
    text, progress = read_text(args.file), sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        if progress:
            print(f"\rchunk {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    path = pull(args.model, progress=progress)
    with gg.LLM(path, n_ctx=args.ctx, n_threads=args.threads, repack=args.repack, progress=progress) as llm:
        for mapping in llm.model.file.mappings:
            check_another(args.output, mapping.path, "imatrix: the result", "the model")
        model_options.warn_of_context(llm)
        tell_of_long(text)
        found = collect(llm, text, args.ctx, args.chunks, process_output=args.process_output, progress=show)
    write(args.output, found, [args.file])
    counts = counted(len(found.sums), "matrix", "matrices"), counted(found.n_chunks, "chunk")
    print(f"{args.output}: {', '.join(counts)} of {found.chunk_size} tokens")
    return 0
