"""`ggjit run MODEL -p PROMPT`: generate text, or chat.

Text goes to stdout as it comes, timings to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ggjit.cli import at_least, model_options, read_text
from ggjit.counts import counted

if TYPE_CHECKING:
    from ggjit.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or a name that `ggjit pull` knows")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", help="the prompt")
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, - is stdin")
    one = at_least(1)
    parser.add_argument(
        "-n", "--n-predict", type=at_least(1, -1, "no limit"), metavar="N",
        help="most tokens to generate (what CTX leaves, as with -1)",
    )  # fmt: skip
    model_options.add_context(parser)
    parser.add_argument("-b", "--batch", type=one, default=512, metavar="BATCH", help="tokens computed together (512)")
    parser.add_argument("-t", "--threads", type=one, metavar="T", help="threads (as many as `ggjit info` says)")
    parser.add_argument("--kv-type", choices=("f16", "f32"), default="f16", help="type of the KV cache")
    parser.add_argument(
        "--prec", choices=("default", "f32"), default="default",
        help="f32: activations of 16 bits in all products but experts'; a prompt takes 1.5 times as long (default)",
    )  # fmt: skip
    parser.add_argument("--temp", type=float, default=0.8, help="temperature; 0 takes the best token (0.8)")
    parser.add_argument("--top-k", type=at_least(0), default=40, help="keep the K best tokens; 0 keeps all (40)")
    parser.add_argument("--top-p", type=float, default=0.95, help="keep the best tokens up to this probability (0.95)")
    parser.add_argument("--min-p", type=float, default=0.05, help="drop tokens below this share of the best's (0.05)")
    parser.add_argument("--seed", type=at_least(0), help="seed of the random numbers (another one each time)")
    parser.add_argument("--chat", action="store_true", help="use the chat template; without -p read turns until Ctrl-D")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message (with --chat)")
    parser.add_argument("--no-repack", dest="repack", action="store_false", help="compute from the mapped file")
    parser.add_argument("--mlock", action="store_true", help="keep the weights from being paged out")
    model_options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print; returns the exit status."""
    import ggjit as gg
    from ggjit.fetch import pull

    prompt = _prompt(args)
    if prompt is None and not args.chat:
        raise ValueError("run: a prompt must be given by -p or -f (or --chat to type turns), got none")
    if args.system is not None and not args.chat:
        raise ValueError("run: --system must come with --chat, got it alone")
    progress = sys.stderr.isatty()
    path = pull(args.model, progress=progress)
    start = time.perf_counter()
    with gg.LLM(
        path, n_ctx=model_options.context_length(args, path), n_threads=args.threads, kv_type=args.kv_type,
        n_ubatch=args.batch, repack=args.repack, prec=args.prec, progress=progress, mlock=args.mlock,
        **model_options.options(args),
    ) as llm:  # fmt: skip
        model_options.warn_of_context(llm)
        model_options.warn_of_overrides(args, llm.model.weights)
        report = _Report(time.perf_counter() - start)
        if args.chat:
            _chat(llm, args, prompt, report)
        else:
            assert prompt is not None
            report.turn(llm, llm.tokenize(prompt), args)
        report.print(llm)
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    if args.file is None:
        prompt: str | None = args.prompt
        return prompt
    return read_text(args.file)


def _chat(llm: LLM, args: argparse.Namespace, prompt: str | None, report: _Report) -> None:
    """One turn for a prompt, else turns from the terminal until its end; there Ctrl-C stops an answer alone."""
    stoppable = prompt is None and sys.stdin.isatty()
    if stoppable:
        print("Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    while True:
        text = prompt if prompt is not None else _ask()
        if text is None:
            return
        messages.append({"role": "user", "content": text})
        ids = _fit(llm, messages)
        messages.append({"role": "assistant", "content": report.turn(llm, ids, args, stoppable)})
        if prompt is not None:
            return


def _fit(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation; where it has become longer than the context, without its oldest turns."""
    first = 1 if messages[0]["role"] == "system" else 0
    n_dropped = 0
    while True:
        ids = llm.tokenize(llm.render_chat(messages), add_special=False)
        if len(ids) < llm.n_ctx or len(messages) - first < 3:  # the last message must fit, or generate says so
            break
        del messages[first : first + 2]
        n_dropped += 1
    if n_dropped:
        print(f"the context is full: {n_dropped} of the oldest turns dropped", file=sys.stderr)
    return ids


def _ask() -> str | None:
    """One line of the user's, None at the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if line.strip():
            return line


class _Report:
    """Times and counts of a run."""

    def __init__(self, load: float) -> None:
        self.load, self.compile = load, 0.0
        self.n_prefill, self.prefill, self.n_decode, self.decode = 0, 0.0, 0, 0.0

    def turn(self, llm: LLM, ids: list[int], args: argparse.Namespace, stoppable: bool = False) -> str:
        """Generate from ids, print as it comes, and return the text, if stoppable up to where Ctrl-C was pressed."""
        from ggjit.jit import compile_seconds

        known = llm.n_shared(ids)
        marks = [(time.perf_counter(), compile_seconds())]
        pieces = []
        try:
            for piece in self._pieces(llm, ids, args, marks):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not stoppable:
                raise
        print(flush=True)
        self.compile += compile_seconds() - marks[0][1]
        if len(marks) > 1:
            start, first, last = (at - compiled for at, compiled in (marks[0], marks[1], marks[-1]))
            self.n_prefill += len(ids) - known
            self.prefill += first - start
            self.n_decode += len(marks) - 2
            self.decode += last - first
        return "".join(pieces)

    @staticmethod
    def _pieces(llm: LLM, ids: list[int], args: argparse.Namespace, marks: list[tuple[float, float]]) -> Iterator[str]:
        from ggjit.jit import compile_seconds

        sampling: dict[str, Any] = {
            "temperature": args.temp,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "seed": args.seed,
        }

        def mark(_: int) -> None:
            marks.append((time.perf_counter(), compile_seconds()))

        return llm.generate(ids, None if args.n_predict == -1 else args.n_predict, on_token=mark, **sampling)

    def print(self, llm: LLM) -> None:
        """Print a summary to stderr."""
        parts = [f"load {self.load:.2f} s", f"compile {self.compile:.2f} s"]
        if self.prefill > 0:
            parts.append(f"prefill {counted(self.n_prefill, 'token')}, {self.n_prefill / self.prefill:.1f} t/s")
        if self.decode > 0:
            parts.append(f"decode {counted(self.n_decode, 'token')}, {self.n_decode / self.decode:.1f} t/s")
        parts.append(f"peak memory {peak_memory() / 2**20:.0f} MiB")
        print(f"\n{', '.join(parts)} ({counted(llm.context.n_threads, 'thread')})", file=sys.stderr)


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
