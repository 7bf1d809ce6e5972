"""A type of one's own, of 3 bits with a scale per 64 weights: conversions, products, rows, files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_bytes import STRING, entry, tensor
from gguf_bytes import gguf as gguf_bytes

import ggjit as gg
from ggjit import types
from ggjit.backend import alloc_ctx_tensors
from ggjit.backends.cpu import PANEL
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, GgufWriter
from ggjit.ops.lib import memory, panel

# ---- the type: 64 weights in 26 bytes: d f16 | 16 bytes: 2 low bits of each code | 8 bytes: the third ----


@gg.jitted
def quantize(x, x_offs, block, offs):
    top = np.float32(0)
    for k in range(64):
        v = memory.load_f32(x, x_offs + 4 * k)
        top = v if abs(v) > abs(top) else top
    d = top / np.float32(-4)
    inverse = np.float32(1) / d if d != 0 else np.float32(0)
    for i in range(24):
        memory.store_u8(block, offs + 2 + i, 0)
    memory.store_f16(block, offs, d)
    for k in range(64):
        q = min(max(int(np.floor(memory.load_f32(x, x_offs + 4 * k) * inverse + np.float32(4.5))), 0), 7)
        low, high = offs + 2 + k // 4, offs + 18 + k // 8
        memory.store_u8(block, low, memory.load_u8(block, low) | (q & 3) << 2 * (k % 4))
        memory.store_u8(block, high, memory.load_u8(block, high) | q >> 2 << k % 8)


@gg.jitted
def scale(block, offs, group):
    return memory.load_f16(block, offs)


@gg.jitted
def code(block, offs, k):
    low = memory.load_u8(block, offs + 2 + k // 4) >> 2 * (k % 4) & 3
    return low | (memory.load_u8(block, offs + 18 + k // 8) >> k % 8 & 1) << 2


def register():
    return gg.register_type(
        "Q3_64", 64, 26, bits=3, offset=4, scale_type="F16", quantize=quantize, scale=scale, code=code
    )


# ---- what NumPy says of it ----


def quantize_np(x):
    blocks = x.reshape(len(x), -1, 64)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(2)[..., None], 2)
    d = (top / np.float32(-4)).astype(np.float32)
    inverse = np.where(d != 0, 1 / np.where(d != 0, d, 1), 0).astype(np.float32)
    q = np.clip(np.floor(blocks * inverse + np.float32(4.5)), 0, 7).astype(np.uint8)
    low = (q & 3).reshape(*q.shape[:2], 16, 4) << np.array([0, 2, 4, 6], np.uint8)
    high = np.packbits(q >> 2, axis=2, bitorder="little")
    return np.concatenate([d.astype(np.float16).view(np.uint8), low.sum(3, dtype=np.uint8), high], 2).reshape(
        len(x), -1
    )


def dequantize_np(b):
    blocks = b.reshape(len(b), -1, 26)
    low = (blocks[..., 2:18, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(*blocks.shape[:2], 64)
    high = np.unpackbits(blocks[..., 18:], axis=2, bitorder="little")
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return (d * ((low | high << 2).astype(np.float32) - 4)).reshape(len(b), -1)


OTHERS = [(1, False), (3, True), (3, False), (40, True)]


@pytest.fixture(scope="module", autouse=True)
def q3_64():
    """The type; the registry is as it was when the tests of this file have run."""
    yield register()
    for t in types.all_types():
        if t.id >= types.FIRST_USER_ID:
            del types._BY_ID[t.id], types._BY_NAME[t.name.upper()]


@pytest.fixture(autouse=True)
def arena():
    with gg.Context(16 << 20):
        yield


def values(rows, n, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


def compute(node, n_threads=2):
    gg.build(node).compute(n_threads)
    return node.numpy()


def error(want, got):
    return np.square(want - got).sum() / np.square(want).sum()


def test_registered(q3_64):
    assert q3_64.id >= 1000 and types.by_name("q3_64") is q3_64 and gg.Q3_64 is q3_64
    panel.check_panel("Q3_64")
    assert q3_64.quant.panel.nbytes == 16 * 26  # no bit more than the type has


def test_conversions(q3_64):
    x = values(5, 192)
    x[1, :64] = 0
    b = q3_64.quant.quantize(x)
    assert np.array_equal(b, quantize_np(x))
    assert np.array_equal(q3_64.quant.dequantize(b), dequantize_np(b))
    with pytest.raises(ValueError, match="multiple of 64"):
        q3_64.quant.quantize(values(2, 32))


@pytest.mark.parametrize(
    ("n", "packed"), [(1, True), (40, False), *(pytest.param(n, p, marks=pytest.mark.full) for n, p in OTHERS)]
)
def test_mul_mat(q3_64, n, packed):
    x, y = values(37, 192), values(n, 192, 1)
    b = quantize_np(x)
    w = gg.new_tensor(q3_64, 192, 37)
    if packed:
        with gg.Context(1 << 16, no_alloc=True) as weights:
            w = gg.new_tensor(q3_64, 192, 37)
        alloc_ctx_tensors(weights, PANEL)
    w.buffer.set_tensor(w, b.reshape(-1)) if packed else w.bytes().__setitem__(slice(None), b.reshape(-1))
    got = compute(gg.mul_mat(w, gg.from_numpy(y)))[0, 0]
    assert error(y.astype(np.float64) @ dequantize_np(b).T.astype(np.float64), got) < 1e-4


def test_rows(q3_64):
    x = values(9, 128)
    w = gg.new_tensor(q3_64, 128, 9).set(x)
    assert np.array_equal(w.bytes(), quantize_np(x).reshape(-1))
    ids = gg.from_numpy(np.int32([8, 0, 3]))
    assert np.array_equal(compute(gg.get_rows(w, ids))[0, 0], dequantize_np(quantize_np(x))[[8, 0, 3]])
    to = gg.new_tensor(q3_64, 128, 9)
    compute(gg.cpy(gg.from_numpy(x), to))
    assert np.array_equal(to.bytes(), quantize_np(x).reshape(-1))
    compute(gg.set_rows(to, gg.from_numpy(x[:2] * 2), gg.from_numpy(np.int64([4, 1]))))
    assert np.array_equal(to.bytes().reshape(9, -1)[[4, 1]], quantize_np(x[:2] * 2))


def test_files(q3_64, tmp_path):
    x, path = values(4, 128), tmp_path / "a.gguf"
    with GgufWriter(path) as writer:
        writer.add_tensor("w", quantize_np(x), q3_64, (128, 4))
    with GgufFile(path) as file:
        info = file.tensors["w"]
        assert file.kv[f"ggjit.type.{q3_64.id}"] == "Q3_64 64 26"
        assert (info.type, info.type_id, info.nbytes) == (q3_64, q3_64.id, 4 * 52)
        assert np.array_equal(file.data("w"), quantize_np(x).reshape(-1))


def test_ids_are_those_of_the_file(q3_64, tmp_path):
    """Another program may have numbered the types otherwise; a layout that differs is another type."""
    path = tmp_path / "a.gguf"
    tensors = [tensor("a", (64,), 1777, 0), tensor("b", (32,), 1778, 32)]
    entries = [entry("ggjit.type.1777", STRING, "Q3_64 64 26"), entry("ggjit.type.1778", STRING, "Q3_64 32 14")]
    path.write_bytes(gguf_bytes(entries, tensors, bytes(64)))
    with GgufFile(path) as file:
        assert file.tensors["a"].type is q3_64 and file.tensors["b"].type is None
        assert file.tensors["b"].type_name == "Q3_64" and file.tensors["b"].nbytes == 14
        with pytest.raises(GgufError, match=r"must be a known one, got Q3_64 \(id 1778\)"):
            file.data("b")


# ---- other layouts ----


@gg.jitted
def byte_scale(block, offs, group):
    return np.float32(memory.load_u8(block, offs + group)) / np.float32(64)


@gg.jitted
def byte_minimum(block, offs, group):
    return -np.float32(memory.load_u8(block, offs + 4 + group)) / np.float32(8)


@gg.jitted
def byte_code(block, offs, k):
    return memory.load_u8(block, offs + 8 + k)


@gg.jitted
def no_quantize(x, x_offs, block, offs):
    memory.store_u8(block, offs, 0)


CURVE = tuple(int(v) for v in np.linspace(-120, 127, 16))
LAYOUTS = {
    "group_16": ({"bits": 6, "offset": 32, "group": 16}, lambda q, d, m: d * (q - 32)),
    "minimum": ({"bits": 5, "group": 32, "minimum": byte_minimum}, lambda q, d, m: d * q + m),
    "minimum_16": ({"bits": 7, "group": 16, "minimum": byte_minimum, "scale_type": "F16"}, lambda q, d, m: d * q + m),
    "table": ({"bits": 4, "group": 32, "table": CURVE}, lambda q, d, m: d * np.float32(CURVE)[q.astype(int)]),
    "bytes": ({"bits": 8, "offset": 128, "group": 64}, lambda q, d, m: d * (q - 128)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [n if n == "minimum_16" else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS])
def test_layouts(name):
    """One byte a code, at most 4 scales and minimums of a byte: 72 bytes for 64 weights, packed to so many bits."""
    layout, value = LAYOUTS[name]
    t = gg.register_type(name, 64, 72, quantize=no_quantize, scale=byte_scale, code=byte_code, **layout)
    panel.check_panel(name)
    n_groups = 64 // layout["group"]
    per_group = 32 * (1 if layout.get("scale_type") == "F16" else 2) * (2 if "minimum" in layout else 1)
    assert t.quant.panel.nbytes == n_groups * per_group + 2 * 64 * layout["bits"]
    rng = np.random.default_rng(5)
    b = rng.integers(1, 256, (18, 2, 72), np.uint8)
    b[..., 8:] &= np.uint8((1 << layout["bits"]) - 1)
    d, m = (b[..., at : at + n_groups].repeat(64 // n_groups, 2).astype(np.float32) for at in (0, 4))
    want = value(b[..., 8:].astype(np.float32), d / 64, -m / 8).reshape(18, 128)
    assert np.allclose(t.quant.dequantize(b.reshape(18, -1)), want, rtol=1e-6)
    w = gg.new_tensor(t, 128, 18)
    w.bytes()[:] = b.reshape(-1)
    for n in (1, 20):
        y = values(n, 128, n)
        got = compute(gg.mul_mat(w, gg.from_numpy(y)))[0, 0]
        assert error(y.astype(np.float64) @ want.T, got) < 1e-3


@pytest.mark.full
def test_a_name_again_replaces_the_type():
    kind = {"bits": 8, "offset": 128, "quantize": no_quantize, "code": byte_code}
    first = gg.register_type("AGAIN", 64, 72, scale=byte_scale, **kind)
    y = gg.from_numpy(values(1, 64))

    def product():
        w = gg.new_tensor(types.by_name("AGAIN"), 64, 16)
        w.bytes()[:] = 100
        return compute(gg.mul_mat(w, y)).copy()

    before = product()

    @gg.jitted
    def twice(block, offs, group):
        return np.float32(memory.load_u8(block, offs + group)) / np.float32(32)

    assert gg.register_type("AGAIN", 64, 72, scale=twice, **kind) is first
    assert np.allclose(product(), 2 * before, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Q4_0"}, "must not be that of a type of ggml, got 'Q4_0'"), ({"name": "a b"}, "name must be a word"),
        ({"blck_size": 48}, "blck_size must be one of"), ({"type_size": 0}, "type_size must be positive"),
        ({"bits": 9}, "bits must be 1 to 8"), ({"group": 24}, "group must be 16 or a multiple of 32"),
        ({"offset": 3}, "offset must be 0 or a power of two"), ({"scale_type": "F64"}, "scale_type must be"),
        ({"table": (1, 2)}, "table must be 8 int8 values"), ({"table": (0,) * 8, "offset": 4}, "and no offset"),
    ],
)  # fmt: skip
def test_bad_layouts(change, message):
    good = {"name": "BAD", "blck_size": 64, "type_size": 26, "bits": 3}
    functions = {"quantize": quantize, "scale": scale, "code": code}
    with pytest.raises(ValueError, match=message):
        gg.register_type(**{**good, **functions, **change})


@gg.jitted
def quantize_wrong_offsets(x, x_offs, block, offs):
    memory.store_f16(block, offs, np.float32(x[x_offs]))
    for i in range(24):
        memory.store_u8(block, offs + 2 + i, x[x_offs + i])


@gg.jitted
def quantize_part(x, x_offs, block, offs):
    memory.store_f16(block, offs, memory.load_f32(x, x_offs) / np.float32(4))


@gg.jitted
def code_outside(block, offs, k):
    return code(block, offs, k) ^ memory.load_u8(block, offs + 26) & 1


def test_check_of_a_sound_type():
    report = gg.check_type("Q3_64")
    assert report.passed and 0.01 < report.error < 0.05 and str(report).endswith("all passed")
    assert gg.check_type(gg.Q4_K).passed
    with pytest.raises(ValueError, match="type must be a quantized one with both conversions, got F16"):
        gg.check_type(gg.F16)
    with pytest.raises(TypeError, match="type must be a Type or the name of one, got 3"):
        gg.check_type(3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quantize": quantize_wrong_offsets}, "nearer to the quantized than zeros"),
        ({"quantize": quantize_part}, "quantize: must set every byte and read its blocks alone, got byte 2"),
        ({"type_size": 10}, "quantize: must write the 20 bytes of 2 blocks, got a write at byte 20"),
        ({"code": code_outside}, "decoding: must set every byte and read its blocks alone"),
        ({"bits": 2}, "products: must be those of the decoded weights"),
    ],
)
def test_check_of_a_type_that_goes_wrong(change, problem):
    good = {"blck_size": 64, "type_size": 26, "bits": 3, "offset": 4, "scale_type": "F16"}
    functions = {"quantize": quantize, "scale": scale, "code": code}
    name = f"WRONG_{problem[:3]}_{len(problem)}"
    report = gg.check_type(gg.register_type(name, **{**good, **functions, **change}))
    assert not report.passed and problem in str(report)


def test_bad_functions():
    with pytest.raises(TypeError, match=r"scale must be a @gg.jitted function"):
        gg.register_type("BAD", 64, 26, bits=3, quantize=quantize, scale=lambda b, o, g: 1, code=code)
    with pytest.raises(TypeError, match=r"code must take \(block, offs, k\), got \(x, x_offs, block, offs\)"):
        gg.register_type("BAD", 64, 26, bits=3, quantize=quantize, scale=scale, code=quantize)


def test_layout_of_a_name_stays(q3_64):
    with pytest.raises(ValueError, match="Q3_64 must keep its layout, 64 weights in 26 bytes"):
        gg.register_type("Q3_64", 32, 14, bits=3, quantize=quantize, scale=scale, code=code)
