"""Run reference cases of ops and of quantizers through builder, plan and compiled program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ggjit as gg
from ggjit import op as op_registry
from ggjit import ops, types
from ggjit.context import Context, aligned_bytes
from ggjit.counts import counted
from ggjit.dev.reference_cases import Array, Case, Difference, compare, decode, elements, elements_of_rows, read_cases
from ggjit.dev.warm import kernels_of
from ggjit.jit import Kernel
from ggjit.op import NONE
from ggjit.tensor import Tensor, new_node
from ggjit.tensor_values import encode
from ggjit.types import Type

ARENA = 1 << 20
F16_MAX = 65504.0


class Unsupported(Exception):
    """No code for a case is registered.

    Args:
        kind: "ops", "types", "architectures" or "vocabularies".
        name: what is missing.
    """

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, name)
        self.kind, self.name = kind, name


# Functions of ggml whose name or arguments are not those of the builder: C function -> f(case, arguments) -> the
# builder's name, its arguments, its keywords.
_Call = tuple[str, list[Any], dict[str, Any]]
_FORMS: dict[str, Callable[[Case, list[Any]], _Call]] = {
    "ggml_unary": lambda case, a: (case.meta["sub"].lower(), a[:1], {}),
    "ggml_glu": lambda case, a: (case.meta["sub"].lower(), a[:1], {"swapped": True} if a[2] else {}),
    "ggml_glu_split": lambda case, a: (case.meta["sub"].lower(), a[:2], {}),
}
# Functions called on a finished node -> keyword of the builder.
_SETTERS = {
    "ggml_soft_max_add_sinks": "sinks",
    "ggml_flash_attn_ext_add_sinks": "sinks",
    "ggml_rope_set_offset": "offset",
    "ggml_prec_set_acc": "prec",
    "ggml_mul_mat_set_hint": "hint",
}


def _leaf(header: dict[str, Any], storages: Sequence[Array]) -> Tensor:
    """A header over a storage, with the case's own strides."""
    t = new_node(NONE, types.by_name(header["type"]), tuple(header["ne"]), nb=tuple(header["nb"]))
    memory = storages[header["storage"]]
    t.context.keep(memory)
    t.data = memory.ctypes.data + header["offset"]
    if header.get("param"):
        t.set_param()
    return t


def _argument(value: Any, sources: Sequence[Tensor | None]) -> Any:
    if isinstance(value, dict):
        if "src" in value:
            return sources[value["src"]]
        return gg.new_tensor(types.by_name(value["like"]["type"]), *value["like"]["ne"])
    if isinstance(value, str):
        return types.by_name(value)
    return tuple(value) if isinstance(value, list) else value


def _builder(name: str) -> Callable[..., Tensor]:
    if name not in ops.__all__:
        raise Unsupported("ops", name)
    return ops.builder(name)  # type: ignore[no-any-return]


def _call(case: Case, sources: Sequence[Tensor | None]) -> Tensor:
    """Call the builder as the case called ggml's."""
    call = case.meta["call"]
    arguments = [_argument(a, sources) for a in call["args"]]
    plain = call["fn"].removesuffix("_inplace")
    form = _FORMS.get(plain)
    name, args, keywords = form(case, arguments) if form else (plain.removeprefix("ggml_"), arguments, {})
    if call["fn"] != plain:
        keywords["inplace"] = True
    for setter, _, value in call.get("post") or []:
        keywords[_SETTERS[setter]] = _argument(value, sources)
    return _builder(name)(*args, **keywords)


def _missing(node: Tensor) -> Unsupported:
    """What a node lacks that no kernel takes: the code of a type, else a kernel of the op for its types."""
    tensors = [node, *(s for s in node.src if s is not None)]
    for t in tensors:
        if t.type.is_quantized and t.type.quant is None:
            return Unsupported("types", t.type.name)
    return Unsupported("ops", f"{node.op.name}({', '.join(s.type.name for s in tensors[1:])}) -> {node.type.name}")


def _check_header(case: Case, node: Tensor) -> Iterator[Difference]:
    want = case.meta["dst"]
    pairs = [
        ("type", node.type, types.by_name(want["type"])),
        ("ne", list(node.ne), want["ne"]),
        ("nb", list(node.nb), want["nb"]),
    ]
    params = np.frombuffer(node.op_params, np.int32).tolist()
    for what, got, expected in [*pairs, ("op_params", params, case.meta["op_params"])]:
        if got != expected:
            yield Difference(f"{what} {got}, not {expected}", float("inf"), 0)


def _check_result(case: Case, node: Tensor, storages: Sequence[Array]) -> Iterator[Difference]:
    header = case.meta["dst"]
    alias = case.meta["dst_alias"]
    if alias and 0 not in node.ne:
        offset = node.data - storages[alias["storage"]].ctypes.data
        if offset != alias["offset"]:
            yield Difference(
                f"the result must lie at byte {alias['offset']} of storage {alias['storage']}, not {offset}",
                float("inf"),
                0,
            )
            return
    want = case.arrays["dst"].copy()
    got = np.zeros_like(want) if 0 in node.ne else node.bytes().copy()
    if got.size != want.size:
        yield Difference(f"nbytes {got.size}, not {want.size}", float("inf"), 0)
        return
    for start, end in case.meta.get("dst_undefined", []):
        got[start:end] = want[start:end]
    result, expected = elements(got, header), elements(want, header)
    if case.meta["sub"] == "GELU_QUICK" and node.type is types.F32:
        # ggml looks it up in a table indexed by f16, in which larger values are infinite.
        beyond = np.abs(elements(storages[0], case.meta["srcs"][0], case.meta["srcs"][0]["offset"])) > F16_MAX
        result[beyond] = expected[beyond]
    difference = _compare_coded(case, "result", result, expected, node.type)
    if difference:
        yield difference
    for k, storage in enumerate(case.meta["storages"]):
        kind = types.by_name(storage["type"])
        nb = [
            kind.type_size,
            *np.multiply.accumulate([types.row_size(kind, storage["ne"][0]), *storage["ne"][1:3]]).tolist(),
        ]
        layout = {"type": storage["type"], "ne": storage["ne"], "nb": nb}
        after = case.arrays.get(f"s{k}_after", case.arrays[f"s{k}"])
        difference = _compare_coded(
            case, f"storage {k} afterwards", elements(storages[k], layout), elements(after, layout), kind
        )
        if difference:
            yield difference


def _compare_coded(case: Case, what: str, got: Array, want: Array, kind: Type) -> Difference | None:
    """As `compare`; where the type's coder searches, a result no further from the source than ggml's is right too."""
    difference = compare(case, what, got, want, kind)
    if difference is None or kind.quant is None or not kind.quant.searches or got.shape != want.shape:
        return difference
    values = [decode(x, kind) for x in (got, want)]
    source = _unrounded(case, values[1])
    if source is None:
        return difference
    errors = [float(np.square(x - source).sum()) for x in values]
    return None if errors[0] <= errors[1] else Difference(f"{what}: squared error", *errors)


def _unrounded(case: Case, old: Array) -> Array | None:
    """What an op that copies or adds would give without rounding, rows that it leaves as they are; None: another op."""
    op, values = case.meta["op"], []
    if op not in ("CPY", "DUP", "CONT", "SET_ROWS", "ADD", "ADD1"):
        return None
    for header in case.meta["srcs"]:
        if header is None or header.get("self"):
            continue
        source = elements(case.arrays[f"s{header['storage']}"], header, header["offset"])
        values.append(decode(source, types.by_name(header["type"])))
    if op in ("ADD", "ADD1"):
        return values[0] + values[1]
    if op != "SET_ROWS":
        return values[0].reshape(old.shape) if values[0].size == old.size else None
    if values[2].shape != old.shape:
        return None
    rows, indices, out = values[0], values[1][0].astype(np.int64), old.copy()
    for i3, i2, i1 in np.ndindex(rows.shape[:3]):
        out[i3, i2, indices[i3 % indices.shape[0], i2 % indices.shape[1], i1]] = rows[i3, i2, i1]
    return out


def run_op(case: Case, threads: Sequence[int]) -> list[Difference]:
    """Build, plan, compile and compute one op case with each number of threads.

    Returns:
        What misses the reference; empty if the case passes.

    Raises:
        Unsupported: no code for it is registered.
    """
    if case.meta["op"].lower() not in {op.name for op in op_registry.all_ops()}:
        raise Unsupported("ops", case.meta["op"].lower())
    found: list[Difference] = []
    first: Array | None = None
    for n_threads in threads:
        with Context(ARENA, no_alloc=True):
            node, storages = _build(case)
            found += _check_header(case, node)
            if not node.op.supported(node):
                raise _missing(node)
            if found:
                return found
            gg.build(node).compute(n_threads=n_threads)
            found += _check_result(case, node, storages)
            bits = np.zeros(0, np.uint8) if 0 in node.ne else node.bytes().copy()
        if found:
            return [d._replace(what=f"{counted(n_threads, 'thread')}: {d.what}") for d in found]
        if first is not None and not np.array_equal(bits, first):
            return [
                Difference(
                    f"{counted(n_threads, 'thread')}: bits differ from {threads[0]}", float((bits != first).sum()), 0
                )
            ]
        first = bits
    return found


def _build(case: Case) -> tuple[Tensor, list[Array]]:
    """The case's node in the innermost context, over fresh copies of its storages."""
    storages = []
    for k in range(len(case.meta["storages"])):
        data = case.arrays[f"s{k}"]
        memory = aligned_bytes(max(data.size, 1))[: data.size]
        memory[:] = data
        storages.append(memory)
    sources = [None if h is None or h.get("self") else _leaf(h, storages) for h in case.meta["srcs"]]
    try:
        return _call(case, sources), storages
    except NotImplementedError as error:
        raise Unsupported("ops", str(error)) from None


def run_quant(case: Case, threads: Sequence[int]) -> list[Difference]:
    """Check one quantizer case: NumPy coder and decoder bit for bit, then the compiled ones through a graph.

    A coder that searches (always, or for an importance matrix) may give other bytes of no larger error.

    Raises:
        Unsupported: no code for the type is registered.
    """
    kind = types.by_name(case.meta["type"])
    if kind.is_quantized and kind.quant is None:
        raise Unsupported("types", kind.name)
    arrays, found = case.arrays, []
    exact = case.meta.get("q_exact", True)
    coded = [arrays[name] for name in ("q", "q_cpu") if name in arrays]
    searches = case.meta["kind"] == "quantize" and kind.quant is not None and kind.quant.searches
    missing: Unsupported | None = None
    if case.meta["kind"] == "quantize":
        try:
            made = _quantize(kind, case)
        except Unsupported as error:
            missing = error
        else:
            if searches or case.meta["imatrix"]:
                found += _no_worse("quantize", made, arrays["q"], case, kind)
            else:
                found += _equal("quantize", made, coded, kind, exact)
    if "y" in arrays:
        found += _equal("dequantize", _values(arrays["q"], kind), [arrays["y"]], types.F32, True)
    for n_threads in threads:
        if "y" in arrays:
            found += _equal(
                f"{counted(n_threads, 'thread')}: get_rows",
                _decode_by_graph(arrays["q"], kind, n_threads),
                [arrays["y"]],
                types.F32,
                True,
            )
        if case.meta["kind"] == "quantize" and not case.meta["imatrix"]:
            copied = _encode_by_graph(arrays["x"], kind, n_threads)
            if copied is not None and searches:
                if not exact and "q_cpu" not in arrays:
                    continue  # what the run-time coder, which searches less, gave was not recorded
                found += _no_worse(f"{counted(n_threads, 'thread')}: cpy", copied, coded[-1], case, kind)
            elif copied is not None:
                found += _equal(f"{counted(n_threads, 'thread')}: cpy", copied, coded, kind, exact)
    if missing is not None and not found:  # all that is there was right
        raise missing
    return found


def _values(coded: Array, kind: Type) -> Array:
    return decode(elements_of_rows(coded, kind), kind).astype(np.float32)


def _quantize(kind: Type, case: Case) -> Array:
    x = case.arrays["x"]
    if kind.quant is None:
        return encode(x, kind)
    quantize: Callable[..., Array] = kind.quant.quantize
    keywords = {"imatrix": case.arrays["imatrix"]} if case.meta["imatrix"] else {}
    if keywords and "imatrix" not in inspect.signature(quantize).parameters:
        raise Unsupported("types", f"quantizing to {kind.name} with an importance matrix")
    try:
        return quantize(x, **keywords)
    except NotImplementedError:
        raise Unsupported("types", f"quantizing to {kind.name}") from None


def _equal(what: str, got: Array, allowed: Sequence[Array], kind: Type, exact: bool) -> list[Difference]:
    """Bits equal to one of the allowed results; where codes are unspecified, their values equal."""
    got = np.ascontiguousarray(got).reshape(allowed[0].shape)
    if any(np.array_equal(got.view(np.uint8), want.view(np.uint8)) for want in allowed):
        return []
    if not exact or kind is types.F32:  # a NaN may have any bits
        pairs = [(got, want) if kind is types.F32 else (_values(got, kind), _values(want, kind)) for want in allowed]
        if any(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
            return []
    wrong = min(int((got.view(np.uint8) != want.view(np.uint8)).sum()) for want in allowed)
    return [Difference(f"{what}: unequal bytes", wrong, 0)]


def _no_worse(what: str, got: Array, want: Array, case: Case, kind: Type) -> list[Difference]:
    """Squared error, weighted by the importance matrix if there is one, at most that of the reference."""
    x = case.arrays["x"].astype(np.float64)
    weights = case.arrays.get("imatrix", np.ones(x.shape[-1], np.float32)).astype(np.float64)
    coded = np.ascontiguousarray(got).view(np.uint8).reshape(want.shape)
    errors = [float((weights * np.square(_values(q, kind) - x)).sum()) for q in (coded, want)]
    return [] if errors[0] <= errors[1] else [Difference(f"{what}: weighted squared error", *errors)]


def _decode_by_graph(coded: Array, kind: Type, n_threads: int) -> Array:
    with Context(ARENA, no_alloc=True):
        node = _decoding(coded, kind)
        if not node.op.supported(node):
            raise _missing(node)
        gg.build(node).compute(n_threads=n_threads)
        return np.array(node.numpy()).reshape(len(coded), -1)


def _decoding(coded: Array, kind: Type) -> Tensor:
    n = coded.nbytes // len(coded) // kind.type_size * kind.blck_size
    header = {"type": kind.name, "ne": (n, len(coded), 1, 1), "storage": 0, "offset": 0}
    header["nb"] = (kind.type_size, coded.nbytes // len(coded), coded.nbytes, coded.nbytes)
    memory = aligned_bytes(coded.nbytes)
    memory[:] = np.ascontiguousarray(coded).view(np.uint8).reshape(-1)
    indices = gg.from_numpy(np.arange(len(coded), dtype=np.int32))
    return _builder("get_rows")(_leaf(header, [memory]), indices)


def _encode_by_graph(x: Array, kind: Type, n_threads: int) -> Array | None:
    """Rows converted by the compiled program; None where run-time conversion to the type is not offered."""
    with Context(ARENA, no_alloc=True):
        try:
            node = _encoding(x, kind)
        except NotImplementedError:
            return None
        if not node.op.supported(node):
            return None
        gg.build(node).compute(n_threads=n_threads)
        return node.bytes().copy()


def _encoding(x: Array, kind: Type) -> Tensor:
    return _builder("cpy")(gg.from_numpy(x), gg.new_tensor(kind, *x.shape[::-1]))


def kernels(path: Path, threads: Sequence[int]) -> list[Kernel]:
    """The kernels that the cases of a file need, to compile them together; none for cases that cannot be built."""
    found: list[Kernel] = []
    for case in read_cases(path):
        with Context(ARENA, no_alloc=True):
            for make in _nodes(case):
                try:
                    found += kernels_of(make(), threads)
                except Exception:  # the run of the case tells
                    continue
    return found


def _nodes(case: Case) -> list[Callable[[], Tensor]]:
    if "call" in case.meta:
        return [lambda: _build(case)[0]]
    kind, arrays = types.by_name(case.meta["type"]), case.arrays
    made: list[Callable[[], Tensor]] = []
    if "y" in arrays:
        made.append(lambda: _decoding(arrays["q"], kind))
    if "x" in arrays:
        made.append(lambda: _encoding(arrays["x"], kind))
    return made


def _described(case: Case) -> str:
    """What a case does, in short: `scale(f32[8x3])`."""
    if "call" not in case.meta:
        return f"{case.meta['kind']} {case.meta['pattern']} [{case.meta['n']}x{case.meta['rows']}]"
    sources = []
    for h in case.meta["srcs"]:
        if h is not None and "ne" in h:
            ne = [n for i, n in enumerate(h["ne"]) if i == 0 or any(m != 1 for m in h["ne"][i:])]
            sources.append(f"{h['type']}[{'x'.join(map(str, ne))}]" + ("" if h["contiguous"] else "*"))
    return f"{case.meta['call']['fn'].removeprefix('ggml_')}({', '.join(sources)})"


def run_file(path: Path, threads: Sequence[int]) -> Iterator[tuple[str, Callable[[], list[Difference]]]]:
    """The cases of a file: (id, function that runs it)."""
    run = run_quant if path.stem.startswith("quantize_") else run_op
    for case in read_cases(path):
        yield f"{path.stem} {case.id} {_described(case)}", lambda case=case: run(case, threads)  # type: ignore[misc]
