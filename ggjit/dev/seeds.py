"""The page `ggjit/docs/seeds.md`: what the descriptions of ggml promise, item by item, and the tests that hold it.

A test is of an item if its name says so: `test_s41_...`, `test_s43_s79_...`, `test_s32_to_s39_...`. The tests are read,
not run: what is in the table is what the test run checks.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[2] / "tests"
_NAME = re.compile(r"test((?:_s\d+(?:_to_s\d+)?)+)(?:_|$)")
_PART = re.compile(r"_s(\d+)(?:_to_s(\d+))?")

WIDTH = 120  # of a line
PAGE = """# Checklist

Made by `python -m ggjit.dev docs` from the names of the tests. Do not edit.

What three descriptions of ggml's inside promise (its memory layout and allocation, its core objects, a guide to it),
one line each, and the tests that hold it, with values measured on ggml 0.25.3 where there are some. Where the
descriptions and ggml differ, ggml is followed.

"""

ITEMS: dict[str, dict[int, str]] = {
    "Tensor headers and layout": {
        1: "all fields of ggml's header at its offsets; 336 bytes",
        2: "four dimensions, always; missing ones are 1",
        3: "`ne` counts, `nb` steps in bytes; dimension 0 is innermost, so shapes are NumPy's reversed",
        4: "strides of a fresh tensor, of block types too",
        5: "an element's address is a sum of steps",
        6: "strides of F32 {3, 2}",
        7: "what contiguous means; dimensions of one element do not count",
        8: "strides are bytes, so that blocks and mixed types work",
        9: "the innermost step is the type's size until a permutation",
        10: "transpose, reshape and view copy nothing",
        11: "a header with op and sources is the graph's node",
    },
    "mul_mat": {
        12: "{K, M} and {K, N} give {M, N}: rows by rows",
        13: "a worked product",
        14: "a linear layer is one product",
        15: "dimensions 2 and 3 are a batch over which the first source is repeated",
        16: "a transposed first source is refused when the graph is built",
        17: "rows must be dense inside; other steps are free",
        18: "weights of other frameworks keep their bytes, shapes are reversed",
    },
    "Views and copies": {
        19: "what view, reshape, permute and cont take and give",
        20: "views with given steps and offset; views of views show the owner",
        21: "the query columns of a joint projection keep its row step",
        22: "a flat cache, and where a layer's rows begin in it",
        23: "a copy into a view writes the cache; reading it copies nothing",
        24: "one row written, a prefix and one head read",
        25: "reshape needs contiguous memory and the same count",
        26: "queries must be copied before they are reshaped, keys need not",
        27: "permute moves sizes and steps, keeps data, and notes the axes",
        28: "2 x 2: permute and transpose agree",
        29: "cont always makes a new tensor",
        30: "cont copies whole rows where rows are dense, else elements",
        31: "cont with another shape is one op",
    },
    "Attention of GPT-2, tensor by tensor": {
        32: "queries as a strided view",
        33: "queries per head",
        34: "keys per head, from the cache",
        35: "values, turned",
        36: "values, copied into rows",
        37: "scores: keys by queries",
        38: "turned values are refused until copied",
        39: "heads merged again",
        40: "scale, causal mask and softmax stand between scores and values",
    },
    "Contexts": {
        41: "an arena of given or own memory, with or without data",
        42: "memory goes when the last user does; given memory is left",
        43: "alignment of objects, tensors and buffers",
        44: "objects in a list, added at its end",
        45: "a cursor moves forward by header and object",
        46: "a full arena is an error; it never grows",
        47: "the overhead of one tensor",
        48: "headers of a whole model take kilobytes",
        49: "the same code gives the same layout",
        50: "a layout planned in one memory serves another",
        51: "without data: headers only; with data: right behind the header",
        52: "views take no memory",
        53: "used bytes tell how large the next arena must be",
        54: "headers of a file's tensors in an arena of fitting size; a run's context goes after it",
        55: "a graph is made once and run often, without allocating",
    },
    "Graphs": {
        56: "define, expand, compute: nothing is computed before",
        57: "a x^2 + b",
        58: "a graph is a list without loops that stays as it is",
        59: "leafs are there before, nodes are made; parameters are nodes",
        60: "what a graph holds and how large it is",
        61: "every tensor has its place before anything runs",
        62: "weights, cache and intermediates live differently long",
        63: "tensor, context, graph, backend and buffer, and how they know each other",
    },
    "The GPT-2 programs, allocators, backends, scheduler": {
        64: "five programs, each leaving more to the engine, with the same tokens",
        65: "main_ctx: the context's size summed by hand",
        66: "main_ctx: one block for all runs, a context for each",
        67: "main_ctx: memory per token, measured once, then grown",
        68: "main_ctx: a place for every intermediate, many times what a plan needs",
        69: "main_alloc: headers in a context, data from an allocator",
        70: "main_alloc: planned for the worst case, with ggml's peaks or lower",
        71: "main_alloc: build, allocate, set inputs, compute; counts of nodes",
        72: "a prompt of 70 tokens in runs of 32",
        73: "a dry walk gives offsets, frees after the last reader, works in place, and knows the peak",
        74: "five intermediates of an MLP in two blocks",
        75: "a graph that does not fit is planned anew, or refused with several buffers",
        76: "when a plan serves another graph",
        77: "several buffers, grown where they are too small",
        78: "main_backend: one backend holds everything",
        79: "backend, buffer type and buffer",
        80: "a context's tensors in one buffer, cut in order",
        81: "the cache has a context and a buffer of its own",
        82: "main_sched: layers on a device by their names",
        83: "main_sched: a buffer for each backend; where the cache lies",
        84: "the scheduler reserves, allocates and computes",
        85: "five passes assign backends and cut the graph",
        86: "one graph on several devices",
        87: "which backend computes which op",
    },
    "Models and files": {
        88: "a model, its layers, and the blocks that graphs are built of",
        89: "one class for each architecture, with the same names of weights",
        90: "what a model knows about itself: sizes, mappings, buffers, devices",
        91: "each layer's cache lies on the layer's device",
        92: "a batch is decoded in ubatches: build, allocate, compute",
        93: "three reserves, because each replaces the plan before",
        94: "loading without a mapping reads tensor by tensor",
        95: "a mapped file is a buffer",
        96: "a tensor gets a given place, which is checked",
        97: "what a GGUF file tells about its tensors",
        98: "loading: offsets, mappings, a buffer around the used range, the rest given back",
        99: "pages are read when first touched",
    },
    "Gradients, types, the whole": {
        100: "gradients by a walk backwards: 12 for a x^2 + b at 2",
        101: "ADAM and L-BFGS",
        102: "a graph with gradients runs many times",
        103: "quantization works on whole blocks",
        104: "number and bits per weight of each type",
        105: "names and numbers are those of ggml and llama.cpp",
        106: "few dependencies, integer products, nothing allocated while running, gradients",
        107: "light headers, heavy data",
    },
}
NOTES = {
    101: "AdamW and SGD are ops; L-BFGS is not there yet",
}


class Test(NamedTuple):
    """A test by its place.

    Attributes:
        file: name of the file.
        name: of the function.
        full: does it run only when the long tests do?
    """

    file: str
    name: str
    full: bool


def items_of(name: str) -> list[int]:
    """The items that a test's name tells: `test_s43_s79_x` gives 43 and 79, `test_s32_to_s39_x` gives 32 to 39."""
    found = _NAME.match(name)
    if found is None:
        return []
    return [i for first, last in _PART.findall(found[1]) for i in range(int(first), int(last or first) + 1)]


def tests(folder: Path = TESTS) -> dict[int, list[Test]]:
    """All tests of items, by item."""
    by_item: dict[int, list[Test]] = {}
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for i in items_of(node.name):
                    by_item.setdefault(i, []).append(Test(path.name, node.name, any(_full(node))))
    return by_item


def _full(node: ast.FunctionDef) -> Iterator[bool]:
    return (ast.unparse(d) == "pytest.mark.full" for d in node.decorator_list)


def _status(item: int, found: list[Test]) -> str:
    if item in NOTES:
        return NOTES[item]
    if not found:
        return "no test"
    return "in long runs" if all(t.full for t in found) else "tested"


def _wrapped(text: str) -> list[str]:
    indent = " " * (text.index("- ") + 2)
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """The list."""
    by_item, lines = tests(), []
    for title, items in ITEMS.items():
        lines += [f"## {title}", ""]
        for i, text in items.items():
            found = by_item.get(i, [])
            lines += _wrapped(f"- **S{i}** {text}: *{_status(i, found)}*")
            for file in dict.fromkeys(t.file for t in found):
                lines += _wrapped(f"  - `{file}`: {', '.join(t.name for t in found if t.file == file)}")
        lines.append("")
    return PAGE + "\n".join(lines).rstrip("\n") + "\n"
