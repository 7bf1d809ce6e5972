"""What ggml refuses or gets wrong by ignoring strides: here one exception, or the float64 reference's result.

tests/data/rejects.json holds (how, call) of each case tried with ggml: "abort" and "unsupported" ones it refuses,
"ignores-strides" ones it computes as if a source were contiguous. `f32[8x3]:t` is a tensor of that logical shape and a
layout: t transposed, p0213 permuted, r rows padded, s a part of a larger tensor.
"""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.dev.cases import nmse, reference_of, values_of
from ggjit.op import NONE
from ggjit.ops.lib.convert import is_encodable
from ggjit.ops.unary import FUNCTIONS

ROWS = json.loads(Path(__file__).with_name("data").joinpath("rejects.json").read_text())
TAKEN = {
    "add(f32[5x4]:t, f32[5x4])": "rows of a may have gaps",
    "rms_norm(f32[5x4]:t, 1e-05)": "rows may have gaps",
    "scale(f16[8x3], 2.0)": "f16 is scaled",
    "swiglu_oai(f16[8x3], None, 1.7, 7.0)": "f16 is gated",
    "swiglu_clamp(bf16[8x3], None, 7.0)": "bf16 is gated",
    "scale(f32[8x3]:r, 2.0)": "rows need only be equally far apart",
    "cpy(iq2_s[256x2], iq2_s[256x2])": "blocks of one type are moved",
    "mul_mat(q4_0[256x3], f16[256x2])": "activations may be f16",
    "mul_mat(f32[8x3], f16[8x2])": "activations may be f16",
    "rwkv_wkv7(f32[16x1x2], f32[16x1x2], f32[16x1x2], f32[16x1x2], f32[16x1x2], f32[16x1x2], f32[256x1])": "any size",
    "pool_2d(f32[9x4x3]:p0213, 1, 2, 2, 1, 1, 0.0, 0.0)": "strides are honoured",
}
"""Calls that ggml refuses and ggjit computes."""
ERRORS = (ValueError, TypeError, NotImplementedError, IndexError)


def leaf(spec: str, rng: np.random.Generator):
    """A tensor of random values from `type[n0xn1...]:layout`."""
    kind, sizes, layout = re.fullmatch(r"(\w+)\[([\dx]+)\](?::(\w+))?", spec).groups()
    type, ne = types.by_name(kind), [int(n) for n in sizes.split("x")] + [1, 1, 1]
    ne = ne[:4]

    def filled(*dims):
        t = gg.new_tensor(type, *dims)
        if (type.quant is None and type.is_quantized) or not is_encodable(type):
            return t  # zeros
        integers = type.dtype is not None and type.dtype.kind == "i"
        values = rng.integers(5, 9, t.ne[::-1]) if integers else rng.uniform(-1, 1, t.ne[::-1])
        return t.set(values)

    if layout is None:
        return filled(*ne)
    if layout == "t":
        return ops.transpose(filled(ne[1], ne[0], *ne[2:]))
    if layout == "p0213":
        return ops.permute(filled(ne[0], ne[2], ne[1], ne[3]), 0, 2, 1, 3)
    blck = type.blck_size
    larger = [ne[0] + 3 * blck, *ne[1:]] if layout == "r" else [ne[0] + 3 * blck, ne[1] + 1, ne[2] + 1, ne[3] + 1]
    whole = filled(*larger)
    offset = whole.nb[1] + whole.nb[0] if layout == "s" else 0
    return ops.view_4d(whole, *ne, *whole.nb[1:], offset)


def parse(call: str, rng: np.random.Generator):
    """Builder and arguments of `name(tensor, 3, [1, 2], 'f32')`, keywords of setters after it."""
    name, inner, setter = re.fullmatch(r"(\w+)\((.*?)\)( \w+\(.*\))?", call).groups()
    specs = re.findall(r"\w+\[[\dx]+\](?::\w+)?", inner)
    for i, spec in enumerate(specs):
        inner = inner.replace(spec, f"'@{i}'", 1)
    values = ast.literal_eval(f"({inner},)") if inner else ()
    leafs = [leaf(spec, rng) for spec in specs]
    args = []
    for v in values:
        if isinstance(v, str):
            v = leafs[int(v[1:])] if v.startswith("@") else types.by_name(v)
        args.append(v)
    if name == "unary":
        args[1] = FUNCTIONS[args[1]]
    if name == "opt_step_adamw":
        for t in args[2:]:
            t.set(np.abs(t.numpy()))
    return name, args, setter


@pytest.mark.parametrize(("how", "call"), ROWS, ids=[call for _, call in ROWS])
def test_row(how, call):
    with gg.Context(8 << 20):
        name, args, setter = parse(call, np.random.default_rng(0))
        builder = getattr(ops, name)
        keywords = {"prec": int(re.search(r"\d+", setter).group())} if setter else {}
        if how == "ignores-strides" and name.startswith("opt_step"):
            args[0].set_param()

        def error():
            node = builder(*args, **keywords)
            graph = gg.Graph(64).build_forward_expand(node)
            known = {t: values_of(t) for t in [*graph.leafs, *graph.nodes] if t.op is NONE}
            graph.compute(2)
            return nmse(reference_of(node, known), node.numpy()), max(1e-5, node.op.nmse)

        if how == "ignores-strides" or call in TAKEN:
            found, limit = error()
            assert found <= limit
        else:
            with pytest.raises(ERRORS, match=r"^\w+: "):
                error()
