"""Which tensor gets which type when a model is quantized: llama.cpp's mixes, as data.

A mix has a base type. Of the tensors that are quantized at all (matrices whose names end in "weight", `KEPT` apart)
most get it; those that matter more, or are cheap, get another one by the rules of their kind: the first row that fits
decides. If the rows of a tensor are no multiple of the type's block it falls back to a type with a smaller one.

Each row of a rule table reads

    mixes | type | conditions

where all conditions must hold; one with a "!" must not. Conditions:

    gqa        at least 4 query heads share a key head
    shared     gqa, or at least 4 experts
    experts    8 experts
    imatrix    an importance matrix is given
    falcon     the architecture is falcon
    big        a model of 70 B parameters: an architecture of `BIG` with 80 blocks
    ragged     rows are no multiple of the block of the mix's base type
    matrices   more than two dimensions: the matrices of all experts in one tensor
    first_N    one of the first n / N of the n tensors of the kind
    early      the same for an eighth, but tensors are counted where others go by the number of their block
    middle     neither in the first nor in the last eighth
    bits       in the first or last eighth, or every third between
    below_N    one of the first N

The i of a tensor among those of its kind is its place in the order of `sort_key`; for a feed-forward tensor of a model
with experts the number of its block. The n is the number of blocks for these, else of the tensors of the kind.

Source: observed from llama.cpp's llama_model_quantize (tests/data/quantize_mixes.json).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ggjit import types
from ggjit.types import Type

__all__ = [
    "COPY",
    "MIXES",
    "Choices",
    "Mix",
    "ModelFacts",
    "TensorFacts",
    "choose_types",
    "find_mix",
    "is_quantized",
    "sort_key",
]


class Mix(NamedTuple):
    """A way to quantize a model.

    Attributes:
        name: as llama.cpp's tools take it.
        ftype: its number, the value of `general.file_type`.
        base: name of the type that most tensors get.
    """

    name: str
    ftype: int
    base: str


MIXES = {
    name: Mix(name, ftype, base)
    for name, ftype, base in (
        ("F32", 0, "F32"), ("F16", 1, "F16"), ("BF16", 32, "BF16"), ("Q4_0", 2, "Q4_0"), ("Q4_1", 3, "Q4_1"),
        ("Q5_0", 8, "Q5_0"), ("Q5_1", 9, "Q5_1"), ("Q8_0", 7, "Q8_0"), ("Q2_K", 10, "Q2_K"), ("Q2_K_S", 21, "Q2_K"),
        ("Q3_K_S", 11, "Q3_K"), ("Q3_K_M", 12, "Q3_K"), ("Q3_K_L", 13, "Q3_K"), ("Q4_K_S", 14, "Q4_K"),
        ("Q4_K_M", 15, "Q4_K"), ("Q5_K_S", 16, "Q5_K"), ("Q5_K_M", 17, "Q5_K"), ("Q6_K", 18, "Q6_K"),
        ("IQ1_S", 24, "IQ1_S"), ("IQ1_M", 31, "IQ1_M"), ("IQ2_XXS", 19, "IQ2_XXS"), ("IQ2_XS", 20, "IQ2_XS"),
        ("IQ2_S", 28, "IQ2_XS"), ("IQ2_M", 29, "IQ2_S"), ("IQ3_XXS", 23, "IQ3_XXS"), ("IQ3_XS", 22, "IQ3_S"),
        ("IQ3_S", 26, "IQ3_S"), ("IQ3_M", 27, "IQ3_S"), ("IQ4_NL", 25, "IQ4_NL"), ("IQ4_XS", 30, "IQ4_XS"),
        ("TQ1_0", 36, "TQ1_0"), ("TQ2_0", 37, "TQ2_0"), ("MXFP4_MOE", 38, "MXFP4"), ("NVFP4", 39, "NVFP4"),
        ("Q1_0", 40, "Q1_0"), ("Q2_0", 41, "Q2_0"),
    )
}  # fmt: skip
COPY = Mix("COPY", 0, "F32")  # all tensors stay as they are
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# Names that hold one of these (or are one) stay as they are: small, or read by ops that take no quantized type.
KEPT = (
    "_norm.weight", "ffn_gate_inp.weight", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d",
    "shortconv.conv.weight", "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight",
    "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight",
    "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd",
    "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger",
)  # fmt: skip
KEPT_NAMES = ("position_embd.weight", "token_types.weight")

# What a part of a name says of a tensor; the first that fits.
KINDS = (
    ("attn_v.weight", "attn_v"), ("attn_qkv.weight", "attn_v"), ("attn_kv_b.weight", "attn_v"),
    ("attn_k.weight", "attn_k"), ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip

RULES = {
    "output": """
        MXFP4_MOE                                       | Q8_0    |
        *                                               | Q8_0    | falcon
        *                                               | Q8_0    | ragged
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS  | Q5_K    |
        Q8_0                                            | Q8_0    |
        *                                               | Q6_K    |
    """,
    "token_embd": """
        IQ1_S IQ1_M IQ2_XXS IQ2_XS                      | Q2_K    |
        IQ2_S IQ2_M IQ3_XXS                             | IQ3_S   |
        TQ1_0 TQ2_0 Q2_0                                | Q4_K    |
        MXFP4_MOE                                       | Q8_0    |
    """,
    "attn_v": """
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M          | Q4_K    | shared
        IQ2_S IQ2_M                                     | IQ3_S   |
        IQ1_S IQ1_M IQ2_XXS IQ2_XS                      | Q2_K    |
        MXFP4_MOE                                       | Q8_0    |
        *                                               | Q8_0    | experts
        Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S                | Q5_K    | gqa big
        Q2_K                                            | Q5_K    | big
        Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S                | Q4_K    | gqa
        Q2_K                                            | Q3_K    |
        IQ3_XXS                                         | IQ3_S   | !imatrix
        Q3_K_M                                          | Q5_K    | below_2
        Q3_K_L                                          | Q5_K    |
        IQ4_NL IQ4_XS                                   | Q5_K    | gqa
        Q4_K_M Q5_K_M                                   | Q6_K    | bits
        Q4_K_S                                          | Q5_K    | below_4
        IQ3_M Q3_K_M Q3_K_S Q4_K_S Q4_K_M               | Q5_K    | big
        IQ3_M Q3_K_M                                    | Q4_K    |
    """,
    "attn_k": """
        MXFP4_MOE                                       | Q8_0    |
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M          | Q4_K    | experts
        *                                               | Q8_0    | experts
        IQ3_XS                                          | IQ3_XXS |
        IQ3_XXS                                         | IQ2_S   |
    """,
    "attn_q": """
        MXFP4_MOE                                       | Q8_0    |
        IQ3_XS                                          | IQ3_XXS |
        IQ3_XXS                                         | IQ2_S   |
    """,
    "attn_output": """
        MXFP4_MOE                                       | Q8_0    |
        IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M          | Q5_K    | experts
        IQ1_S IQ1_M                                     | IQ2_XXS |
        IQ2_S IQ2_M                                     | IQ3_S   |
        Q3_K_L                                          | Q4_K    | falcon
        *                                               | *       | falcon
        Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S | Q5_K    | experts
        Q4_K_M IQ3_S IQ3_M IQ4_XS                       | Q5_K    | experts
        *                                               | *       | experts
        Q2_K                                            | Q3_K    |
        IQ3_XXS                                         | IQ3_S   |
        Q3_K_M IQ3_M                                    | Q4_K    |
        Q3_K_L                                          | Q5_K    |
    """,
    "ffn_up": """
        IQ3_XS                                          | IQ3_XXS | middle
        MXFP4_MOE                                       | MXFP4   | matrices
        MXFP4_MOE                                       | Q8_0    |
    """,
    "ffn_gate": """
        IQ3_XS                                          | IQ3_XXS | middle
        MXFP4_MOE                                       | MXFP4   | matrices
        MXFP4_MOE                                       | Q8_0    |
    """,
    "ffn_down": """
        MXFP4_MOE                                       | MXFP4   | matrices
        MXFP4_MOE                                       | Q8_0    |
        IQ2_S IQ2_M                                     | IQ3_S   | early
        IQ1_S IQ1_M IQ2_XXS IQ2_XS                      | Q2_K    | early
        Q2_K                                            | Q3_K    |
        Q2_K_S                                          | Q4_K    | first_8
        IQ3_XXS                                         | Q4_K    | first_8 !imatrix
        IQ3_XXS                                         | Q3_K    | !imatrix
        Q3_K_M                                          | Q5_K    | first_16
        Q3_K_M                                          | Q3_K    | falcon !bits
        Q3_K_M                                          | Q4_K    |
        IQ3_M                                           | Q4_K    | first_8
        IQ3_M                                           | Q4_K    | experts bits
        Q3_K_L                                          | Q4_K    | falcon
        Q3_K_L                                          | Q5_K    |
        Q4_K_M                                          | Q6_K    | falcon first_16
        Q4_K_M                                          | Q5_K    | falcon bits
        Q4_K_M                                          | Q4_K    | falcon
        Q4_K_M Q5_K_M                                   | Q6_K    | bits
        IQ4_NL IQ4_XS                                   | Q5_K    | first_8 !imatrix
        Q4_K_S                                          | Q5_K    | first_8 !falcon
        Q4_0                                            | Q4_1    | first_8 imatrix
        Q5_0                                            | Q5_1    | first_8 imatrix
    """,
    "other": """
        MXFP4_MOE                                       | MXFP4   | matrices
        MXFP4_MOE                                       | Q8_0    |
    """,
}

# Where a row is no multiple of the block; F16 if it is none of that either.
FALLBACKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q2_0", "TQ1_0", "TQ2_0"), "Q4_0"), "Q4_K": "Q5_0", "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}  # fmt: skip
# Architectures whose models of 80 blocks have 70 B parameters, unless so many query heads share a key head.
BIG: dict[str, tuple[int, ...]] = {"llama": (1,), "llama-embed": (1,), "qwen2": (), "deci": ()}
NEEDS_IMATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")


class ModelFacts(NamedTuple):
    """What rules ask of a model.

    Attributes:
        arch: `general.architecture`.
        n_layer: blocks.
        n_gqa: query heads that share a key head, 0 if there are no key heads.
        n_expert: experts, 0 for none.
        has_imatrix: an importance matrix is given.
    """

    arch: str
    n_layer: int
    n_gqa: int = 1
    n_expert: int = 0
    has_imatrix: bool = False


class TensorFacts(NamedTuple):
    """What rules ask of a tensor: name, type and sizes without trailing ones."""

    name: str
    type: Type
    ne: tuple[int, ...]


class Choices(NamedTuple):
    """What a user may decide instead of the mix.

    Attributes:
        pure: the base type for all, no rules.
        output: type of the output matrix, or of the token embedding where it serves as one.
        token_embedding: type of the token embedding.
        keep_output: leave output.weight as it is.
        by_name: a pattern that is searched for in the name, and the type it gives; the first that is found.
    """

    pure: bool = False
    output: Type | None = None
    token_embedding: Type | None = None
    keep_output: bool = False
    by_name: Sequence[tuple[re.Pattern[str], Type]] = ()


DEFAULT = Choices()


@dataclasses.dataclass
class _Place:
    """A tensor in its model: the i-th of n of its kind, `count` of which came before."""

    model: ModelFacts
    mix: Mix
    tensor: TensorFacts
    i: int
    n: int
    count: int

    def holds(self, condition: str) -> bool:
        word = condition.lstrip("!")
        name, _, number = word.partition("_")
        found = CONDITIONS[name](self, int(number)) if number.isdigit() else CONDITIONS[word](self, 0)
        return found is not condition.startswith("!")


CONDITIONS: dict[str, Callable[[_Place, int], bool]] = {
    "gqa": lambda p, _: p.model.n_gqa >= 4,
    "shared": lambda p, _: p.model.n_gqa >= 4 or p.model.n_expert >= 4,
    "experts": lambda p, _: p.model.n_expert == 8,
    "imatrix": lambda p, _: p.model.has_imatrix,
    "falcon": lambda p, _: p.model.arch == "falcon",
    "big": lambda p, _: p.model.n_layer == 80 and p.model.n_gqa not in BIG.get(p.model.arch, (p.model.n_gqa,)),
    "ragged": lambda p, _: p.tensor.ne[0] % types.by_name(p.mix.base).blck_size != 0,
    "matrices": lambda p, _: len(p.tensor.ne) > 2,
    "first": lambda p, parts: p.i < p.n // parts,
    "early": lambda p, _: p.count < p.n // 8,
    "middle": lambda p, _: p.n // 8 <= p.i < 7 * p.n // 8,
    "bits": lambda p, _: p.i < p.n // 8 or p.i >= 7 * p.n // 8 or (p.i - p.n // 8) % 3 == 2,
    "below": lambda p, limit: p.i < limit,
}
_LAYER = re.compile(r"blk\.(\d+)\.")


def find_mix(name: str) -> Mix:
    """The mix with a name, whatever its case, or with a number, as llama.cpp's tools take it.

    Raises:
        ValueError: there is none.
    """
    upper = name.upper()
    if upper == COPY.name:
        return COPY
    found = MIXES.get(ALIASES.get(upper, upper)) or next((m for m in MIXES.values() if str(m.ftype) == name), None)
    if found is None:
        raise ValueError(f"quantize: type must be one of {', '.join(MIXES)}, COPY, or a mix's number, got {name!r}")
    return found


def sort_key(name: str) -> tuple[int, str]:
    """Order of tensors in a quantized file: those of no block, then block after block, each by name."""
    layer = _LAYER.match(name)
    return (int(layer[1]) if layer else -1, name)


def is_quantized(tensor: TensorFacts) -> bool:
    """Whether quantizing a model changes a tensor's type."""
    name = tensor.name
    return (
        len(tensor.ne) > 1
        and name.endswith("weight")
        and name not in KEPT_NAMES
        and not any(part in name for part in KEPT)
    )


@functools.cache
def _rules(kind: str) -> tuple[tuple[frozenset[str], str, tuple[str, ...]], ...]:
    rows = [[cell.split() for cell in row.split("|")] for row in RULES[kind].strip().splitlines()]
    return tuple((frozenset(mixes), type[0], tuple(conditions)) for mixes, type, conditions in rows)


def _by_rules(kind: str, place: _Place) -> str:
    mix = place.mix
    for mixes, type, conditions in _rules(kind):
        if (mix.name in mixes or "*" in mixes) and all(map(place.holds, conditions)):
            return mix.base if type == "*" else type
    return mix.base


def _kind(name: str, tied: bool) -> str:
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((kind for part, kind in KINDS if part in name), "other")


def fitting(type: Type, tensor: TensorFacts) -> Type:
    """A type whose block divides the rows of a tensor: the given one or what takes its place.

    Raises:
        ValueError: nothing does.
    """
    ne0 = tensor.ne[0]
    if ne0 % type.blck_size == 0:
        return type
    other = types.by_name(FALLBACKS.get(type.name, "F16"))
    if type.blck_size > 32 and other is types.F16:
        raise ValueError(
            f"quantize: ne[0] of {tensor.name!r} must be a multiple of {type.blck_size}, the block of {type.name}, "
            f"got {list(tensor.ne)}; no other type takes its place"
        )
    return other if ne0 % other.blck_size == 0 else types.F16


def _chosen(tensor: TensorFacts, kind: str, choices: Choices, plain: bool) -> Type | None:
    """The type that the user decided on, None if it is left to the mix."""
    if choices.token_embedding is not None and tensor.name == "token_embd.weight":
        return choices.token_embedding
    tied_output = tensor.name != "output.weight" and (plain or choices.pure)
    if choices.output is not None and kind == "output" and not tied_output:
        return choices.output
    if plain:  # llama.cpp takes no notice of patterns then either
        return None
    return next((type for pattern, type in choices.by_name if pattern.search(tensor.name)), None)


def choose_types(
    tensors: Iterable[TensorFacts], mix: Mix, model: ModelFacts, choices: Choices = DEFAULT
) -> dict[str, Type]:
    """The type that each tensor of a model gets.

    Args:
        tensors: of the model, in any order.
        mix: how it is quantized.
        model: what rules ask of it.
        choices: what is not left to the mix.

    Returns:
        Name to type, in the order of a quantized file.

    Raises:
        ValueError: a type does not fit the rows of a tensor and none takes its place.
    """
    ordered = sorted(tensors, key=lambda tensor: sort_key(tensor.name))
    tied = all(tensor.name != "output.weight" for tensor in ordered)
    kinds = {tensor.name: _kind(tensor.name, tied) for tensor in ordered}
    n_attn_v = sum(kinds[tensor.name] == "attn_v" and is_quantized(tensor) for tensor in ordered)
    plain = not types.by_name(mix.base).is_quantized
    found: dict[str, Type] = {}
    counts: dict[str, int] = {}
    for tensor in ordered:
        kind, type = kinds[tensor.name], tensor.type
        if is_quantized(tensor) and not (choices.keep_output and tensor.name == "output.weight"):
            chosen = _chosen(tensor, kind, choices, plain)
            if chosen is None and (plain or choices.pure):
                chosen = types.by_name(mix.base)
            elif chosen is None:
                count = counts[kind] = counts.get(kind, -1) + 1
                i = sort_key(tensor.name)[0] if model.n_expert > 1 and kind.startswith("ffn_") else count
                n = model.n_layer if kind.startswith("ffn_") else n_attn_v
                chosen = types.by_name(_by_rules(kind, _Place(model, mix, tensor, i, n, count)))
            type = fitting(chosen, tensor)
        found[tensor.name] = type
    return found
