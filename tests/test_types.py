from __future__ import annotations

import pickle

import numpy as np
import pytest

from ggjit import types
from ggjit.types import Type

# name, id, bits a weight: the cheat sheet of the guide (IQ3_S as the format has it: 3.4375).
CHEAT_SHEET = [
    ("F32", 0, 32), ("F16", 1, 16), ("Q4_0", 2, 4.5), ("Q4_1", 3, 5), ("Q5_0", 6, 5.5), ("Q5_1", 7, 6),
    ("Q8_0", 8, 8.5), ("Q2_K", 10, 2.625), ("Q3_K", 11, 3.4375), ("Q4_K", 12, 4.5), ("Q5_K", 13, 5.5),
    ("Q6_K", 14, 6.5625), ("IQ2_XXS", 16, 2.0625), ("IQ2_XS", 17, 2.3125), ("IQ3_XXS", 18, 3.0625),
    ("IQ1_S", 19, 1.5625), ("IQ4_NL", 20, 4.5), ("IQ3_S", 21, 3.4375), ("IQ2_S", 22, 2.5625), ("IQ4_XS", 23, 4.25),
    ("IQ1_M", 29, 1.75), ("BF16", 30, 16), ("Q1_0", 41, 1.125),
]  # fmt: skip


@pytest.mark.parametrize(("name", "id", "bits"), CHEAT_SHEET)
def test_s104_cheat_sheet(name: str, id: int, bits: float) -> None:
    t = types.by_name(name)
    assert (t.id, 8 * t.type_size / t.blck_size) == (id, bits)


def test_s105_numbers_and_sizes_are_those_of_the_format() -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {int(k): v for k, v in gguf.GGML_QUANT_SIZES.items()}
    names = {int(t): t.name for t in gguf.GGMLQuantizationType}
    known = {t.id: t for t in types.all_types()}
    assert len(known) == 35
    del sizes[types.Q8_1.id]  # never in a file; the package still has the size of an older layout
    for id in sizes.keys() & known.keys():
        t = known[id]
        assert (t.name, t.blck_size, t.type_size) == (names[id], *sizes[id])
    assert len(sizes.keys() & known.keys()) >= 30


def test_lookup() -> None:
    assert types.by_id(12) is types.Q4_K is types.by_name("q4_k")
    assert types.all_names()[:3] == ["F32", "F16", "Q4_0"]
    with pytest.raises(ValueError, match=r"types.by_id: id must be one of \[0, 1, .*\], got 4$"):
        types.by_id(4)
    with pytest.raises(ValueError, match=r"types.by_name: name must be one of .*, got 'Q4_2'$"):
        types.by_name("Q4_2")
    with pytest.raises(ValueError, match=r"got 7$"):
        types.by_name(7)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="Q4_2"):
        _ = types.Q4_2


def test_row_size() -> None:
    assert types.row_size(types.F32, 768) == 3072
    assert types.row_size(types.Q4_K, 768) == 432
    assert types.row_size(types.Q8_0, 0) == 0
    with pytest.raises(ValueError, match=r"row_size: ne0 must be a multiple of 256, the block of Q4_K, got 100$"):
        types.row_size(types.Q4_K, 100)


def test_from_dtype() -> None:
    assert types.from_dtype(np.float16) is types.F16
    assert types.from_dtype("int64") is types.I64
    for bad in (np.uint16, np.complex64, np.dtype(">f4")):
        with pytest.raises(TypeError, match="from_dtype: dtype must be one of"):
            types.from_dtype(bad)


def test_plain_and_block_types() -> None:
    assert types.F32.dtype == np.float32 and not types.F32.is_quantized and types.F32.quant is None
    assert types.BF16.dtype == np.uint16 and not types.BF16.is_quantized
    assert types.Q4_0.dtype is None and types.Q4_0.is_quantized
    assert repr(types.IQ4_NL) == "IQ4_NL"


def test_one_object_a_type() -> None:
    assert pickle.loads(pickle.dumps(types.Q6_K)) is types.Q6_K
    with pytest.raises(ValueError, match=r"types.register: id and name must be free, got id 12 and name 'OTHER'"):
        types.register(Type("OTHER", 12, 32, 18))
    with pytest.raises(ValueError, match="got id 999 and name 'q4_k'"):
        types.register(Type("q4_k", 999, 32, 18))
    assert types.register(types.Q6_K) is types.Q6_K
