"""The GGUF writer: against PyPI gguf's reader and writer, ggjit's own reader, and what is left after errors."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, SCALARS, STRING, entry, tensor
from gguf_bytes import gguf as gguf_bytes

import ggjit as gg
from ggjit import types
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, GgufWriter, ValueType


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.gguf"


def test_bytes_of_every_value(path):
    """The file is the one that the format's description gives, packed by hand."""
    entries = [entry(f"scalar.{kind.name}", kind, content) for kind, content in SCALARS]
    entries += [entry(f"array.{kind.name}", ARRAY, (kind, [content] * 3)) for kind, content in SCALARS]
    nested = (ARRAY, [(ValueType.INT32, [1, -2]), (STRING, ["a", "bc"]), (ARRAY, [(ValueType.BOOL, [True])])])
    entries += [entry("nested", ARRAY, nested), entry("empty", ARRAY, (STRING, []))]
    entries += [entry("general.alignment", ValueType.UINT32, 64)]
    a, b, c = np.arange(24, dtype=np.float32).reshape(2, 3, 4), bytes(range(34)), np.arange(4, dtype=np.int8)
    tensors = [tensor("a", (4, 3, 2), 0, 0), tensor("b.weight", (32,), 8, 128), tensor("c", (4,), 24, 192)]
    want = gguf_bytes(entries, tensors, a.tobytes() + bytes(32) + b + bytes(30) + c.tobytes() + bytes(60), alignment=64)
    with GgufWriter(path) as writer:
        for kind, content in SCALARS:
            writer.add(f"scalar.{kind.name}", content, kind)
        for kind, content in SCALARS:
            writer.add(f"array.{kind.name}", [content] * 3, element=kind)
        writer.add("nested", [[1, -2], ["a", "bc"], [[True]]])
        writer.add("empty", [], element=ValueType.STRING)
        writer.add("general.alignment", 64)
        writer.add_tensor("a", a)
        writer.add_tensor("b.weight", b, "q8_0", (32,))
        writer.add_tensor("c", c)
        assert writer.nbytes == len(want)
    assert path.read_bytes() == want


@pytest.mark.parametrize(
    ("value", "kind", "element"),
    [
        ("x", "STRING", None), (True, "BOOL", None), (1.5, "FLOAT32", None), (7, "UINT32", None), (-7, "INT32", None),
        (1 << 40, "UINT64", None), (-(1 << 40), "INT64", None), (np.float64(1), "FLOAT64", None),
        (np.uint8(3), "UINT8", None), (np.arange(3, dtype=np.int16), "ARRAY", "INT16"), ([1, -1], "ARRAY", "INT32"),
        ([1, 2.5], "ARRAY", "FLOAT32"), (("a", b"b"), "ARRAY", "STRING"), ([[1], [2.5]], "ARRAY", "ARRAY"),
        (np.ones((2, 2), np.float32), "ARRAY", "ARRAY"), ([True, False], "ARRAY", "BOOL"),
    ],
)  # fmt: skip
def test_types_of_values(path, value, kind, element):
    with GgufWriter(path) as writer:
        writer.add("key", value)
    with GgufFile(path) as file:
        assert file.kv.value_type("key").name == kind
        found = file.kv.element_type("key")
        assert (None if found is None else found.name) == element


def test_gguf_reads_it(path):
    """PyPI gguf's reader finds the same values and tensors."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    a, h = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((3, 2, 8)).astype(np.float16)
    with GgufWriter(path) as writer:
        writer.add("general.architecture", "llama")
        for kind, content in SCALARS:
            writer.add(f"scalar.{kind.name}", content, kind)
        writer.add("tokens", [f"token {i}" for i in range(40)])
        writer.add("scores", np.arange(40, dtype=np.float32))
        writer.add_tensor("a", a)
        writer.add_tensor("h", h)
        writer.add_tensor("q", a, types.Q8_0)
    reader = gguf.GGUFReader(path)
    for kind, content in SCALARS:
        assert reader.get_field(f"scalar.{kind.name}").contents() == content
    assert reader.get_field("tokens").contents() == [f"token {i}" for i in range(40)]
    assert reader.get_field("scores").contents() == list(range(40))
    assert [(t.name, t.tensor_type.name, t.shape.tolist()) for t in reader.tensors] == [
        ("a", "F32", [64, 5]), ("h", "F16", [8, 2, 3]), ("q", "Q8_0", [64, 5])
    ]  # fmt: skip
    assert np.array_equal(reader.tensors[0].data, a) and np.array_equal(reader.tensors[1].data, h)
    assert np.array_equal(reader.tensors[2].data, gguf.quants.quantize(a, gguf.GGMLQuantizationType.Q8_0))


def test_bytes_as_gguf_writes(path, tmp_path):
    gguf = pytest.importorskip("gguf")
    x = np.random.default_rng(2).standard_normal((3, 32)).astype(np.float32)
    other = tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "grün"])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("x", x)
    writer.add_tensor("y.weight", x.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufWriter(path) as mine:
        mine.add("general.architecture", "llama")
        mine.add("llama.block_count", 3)
        mine.add("tokenizer.ggml.tokens", ["a", "", "grün"])
        mine.add("tokenizer.ggml.add_bos_token", True)
        mine.add_tensor("x", x)
        mine.add_tensor("y.weight", x.astype(np.float16))
    assert path.read_bytes() == other.read_bytes()


def test_copy_keeps_every_bit(path, tmp_path):
    nan = float("nan")
    entries = [entry("odd \xff", ARRAY, (STRING, [b"\xff", b"", b"\0"])), entry("f", ValueType.FLOAT32, nan)]
    source = tmp_path / "b.gguf"
    source.write_bytes(gguf_bytes(entries, [tensor("a", (2, 1), 1, 0)], b"\1\2\3\4" + bytes(28)))
    with GgufFile(source) as file, GgufWriter(path) as writer:
        writer.copy(file.kv)
        for info in file.tensors.values():
            writer.add_tensor(info.name, file.data(info.name), info.type, info.ne[: info.n_dims])
    assert path.read_bytes() == source.read_bytes()


def test_streams(path):
    """No more than a piece of a large tensor is in memory, and progress is told."""
    piece, n = 1 << 20, 64
    told = []
    with GgufWriter(path, progress=lambda done, total: told.append((done, total))) as writer:
        data = (np.full(piece, i, np.uint8) for i in range(n))
        writer.add_tensor("big", data, types.I8, (piece, n))
        tracemalloc.start()
        writer.write()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * piece
    assert told == [((i + 1) * piece, n * piece) for i in range(n)]
    with GgufFile(path) as file:
        assert np.array_equal(file.data("big").reshape(n, piece)[:, 5], np.arange(n))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(path, error):
    path.write_bytes(b"before")

    def pieces():
        yield bytes(32)
        raise error

    with pytest.raises(error), GgufWriter(path) as writer:
        writer.add_tensor("a", pieces(), types.F32, (16,))
    assert os.listdir(path.parent) == ["a.gguf"] and path.read_bytes() == b"before"
    with pytest.raises(error), GgufWriter(path) as writer:
        raise error
    assert os.listdir(path.parent) == ["a.gguf"] and path.read_bytes() == b"before"


def test_replaces_what_a_link_names(path, tmp_path):
    (tmp_path / "link.gguf").symlink_to(path)
    with GgufWriter(tmp_path / "link.gguf") as writer:
        writer.add("a", 1)
    assert (tmp_path / "link.gguf").is_symlink() and path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_folders_and_devices_are_refused(tmp_path):
    for name in (tmp_path, "/dev/null"):
        with pytest.raises(ValueError, match="path must name a file"), GgufWriter(name):
            pass
    with pytest.raises(OSError) as caught, GgufWriter(tmp_path / "none" / "a.gguf"):
        pass
    assert caught.value.filename == str(tmp_path / "none" / "a.gguf")


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("", 1, None, "a key must be 1 to 65535"), ("ü", 1, None, "a key must be"), (3, 1, None, "a key must be"),
        ("k" * 65536, 1, None, "a key must be"), ("a", 1, None, "keys must differ, got 'a' twice"),
        ("k", None, None, "k must be text, a number, a flag or an array of these, got NoneType"),
        ("k", {}, None, "got dict"), ("k", 1 << 64, None, "must fit in 64 bits"), ("k", 1j, None, "got complex"),
        ("k", np.complex64(1), None, "must have a dtype that GGUF has"), ("k", [], None, "empty array"),
        ("k", [1, "a"], None, "elements of one type, got STRING, UINT32"), ("k", 300, 0, "k must be UINT8, 0 to 255"),
        ("k", -1, 4, "k must be UINT32"), ("k", 1.5, 4, "k must be UINT32, got float64"),
        ("k", True, 4, "k must be UINT32, got bool"), ("k", 1, 7, "k must be BOOL"), ("k", "a", 4, "got str"),
        ("k", 1, 8, "k must be STRING"), ("k", 1, 9, "k must be ARRAY"), ("k", [1], 5, "k must be INT32, got list"),
        ("k", "\ud800", None, "Unicode text"), ("general.alignment", 48, None, "a power of two"),
        ("general.alignment", 4, None, "at least 8"), ("general.alignment", 32, ValueType.UINT64, "UINT32"),
    ],
)  # fmt: skip
def test_bad_metadata(path, key, value, kind, message):
    writer = GgufWriter(path)
    writer.add("a", 1)
    with pytest.raises(ValueError, match=message):
        writer.add(key, value, None if kind is None else ValueType(kind))
    assert not os.listdir(path.parent)


@pytest.mark.parametrize(
    ("name", "data", "kind", "ne", "message"),
    [
        ("", b"", "F32", (1,), "1 to 63 bytes"), ("ü" * 32, b"", "F32", (1,), "1 to 63 bytes"),
        ("a", np.ones(1, np.float32), None, None, "names must differ, got 'a' twice"),
        ("b", b"1234", None, (1,), "type of 'b'"), ("b", b"1234", "F32", None, "ne of 'b' must be given"),
        ("b", np.ones(3, bool), None, None, "dtype must be one of"), ("b", b"1234", "Q9", (1,), "name must be one of"),
        ("b", b"1234", "F32", (1, 1, 1, 1, 1), "1 to 4 dimensions"), ("b", b"", "F32", (0,), "must be positive"),
        ("b", b"1234", "F32", (2,), "'b' must have 8 bytes, got 4"),
        ("b", b"", "Q4_K", (128, 2), r"ne\[0\] of 'b' must be a multiple of 256, the block of Q4_K, got \[128, 2\]"),
        ("b", np.ones(4, np.float32), "F32", (5,), "must have the values of ne"),
        ("b", np.ones(4, np.int32), "F32", None, "must be F32 or floats, got int32"),
        ("b", np.ones(4, np.float32), "I8", None, "must be I8 or floats, got float32"),
    ],
)  # fmt: skip
def test_bad_tensors(path, name, data, kind, ne, message):
    writer = GgufWriter(path)
    writer.add_tensor("a", np.ones(1, np.float32))
    with pytest.raises(ValueError, match=message):
        writer.add_tensor(name, data, kind, ne)


@pytest.mark.parametrize("pieces", [[b"123"], [b"1234", b"5"]])
def test_wrong_number_of_bytes(path, pieces):
    with pytest.raises(ValueError, match="'a' must have 4 bytes, got"), GgufWriter(path) as writer:
        writer.add_tensor("a", iter(pieces), "F32", (1,))
    assert not os.listdir(path.parent)


def test_strides_and_conversions(path):
    x = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
    with GgufWriter(path) as writer:
        writer.add_tensor("t", x.T)
        writer.add_tensor("h", x[::2], types.F16)
        writer.add_tensor("b", x[:, ::2], types.BF16)
        writer.add_tensor("d", x.astype(np.float64))
        writer.add_tensor("s", np.float32(3))
    with GgufFile(path) as file:
        assert np.array_equal(file.data("t").view(np.float32).reshape(64, 6), x.T)
        assert np.array_equal(file.data("h").view(np.float16).reshape(3, 64), x[::2].astype(np.float16))
        back = (file.data("b").view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(6, 32)
        assert np.abs(back - x[:, ::2]).max() <= np.abs(x).max() / 256
        assert np.array_equal(file.data("d").view(np.float64).reshape(6, 64), x)
        assert file.tensors["s"].ne == (1, 1, 1, 1)


def test_described_types(path):
    """A file's own types are found by name and layout; unknown ones are listed with their sizes."""
    entries = [entry("ggjit.type.1000", STRING, "NEVER_SEEN 64 26"), entry("ggjit.type.1001", STRING, "q8_0 32 34")]
    tensors = [tensor("a", (64, 2), 1000, 0), tensor("b", (32,), 1001, 64), tensor("c", (3,), 1002, 128)]
    path.write_bytes(gguf_bytes(entries, tensors, bytes(160)))
    with GgufFile(path) as file:
        a, b, c = file.tensors.values()
        assert (a.type, a.type_name, a.nbytes) == (None, "NEVER_SEEN", 52)
        assert b.type is types.Q8_0
        assert (c.type, c.type_name, c.nbytes) == (None, "type 1002", 32)
        with pytest.raises(GgufError, match=r"type of tensor 'a' must be a known one, got NEVER_SEEN \(id 1000\)"):
            file.data("a")
    for text in ("", "a b c", "a 0 1", "a 1", 3):
        kind = STRING if isinstance(text, str) else ValueType.UINT32
        path.write_bytes(gguf_bytes([entry("ggjit.type.1000", kind, text)], [tensor("a", (64,), 1000, 0)], bytes(64)))
        with pytest.raises(GgufError, match=r"ggjit\.type\.1000 must"):
            GgufFile(path)


@pytest.mark.parametrize(("name", "n"), [("Q8_1", 32), ("Q8_K", 256)])
def test_forms_of_activations_are_in_no_file(tmp_path, path, name, n):
    """They are refused when they are written, and by a model whose file has them."""
    writer = GgufWriter(path)
    with pytest.raises(ValueError, match=f"type of 'w': it must be one of weights, got {name}, a form of activations"):
        writer.add_tensor("w", np.zeros((2, n), np.float32), name)
    model = Path(__file__).parent / "data" / "models" / "llama-q.Q4_1.gguf"
    block, copy, wrong = types.by_name(name), tmp_path / "model.gguf", "blk.0.ffn_down.weight"
    with GgufFile(model) as file, GgufWriter(copy) as out:
        out.copy(file.kv)
        for tensor_name, info in file.tensors.items():
            ne = info.ne[: info.n_dims]
            kind = "F32" if tensor_name == wrong else info.type
            data = np.zeros(ne[::-1], np.float32) if tensor_name == wrong else bytes(file.data(tensor_name))
            out.add_tensor(tensor_name, data, kind, None if tensor_name == wrong else ne)
    written = bytearray(copy.read_bytes())
    at = written.index(wrong.encode()) + len(wrong) + 4 + 8 * 2  # name, number of dimensions, sizes, type
    assert written[at : at + 4] == bytes(4)
    written[at] = block.id
    copy.write_bytes(written)
    with pytest.raises(GgufError, match=f"tensor '{wrong}' must have a type of weights, got {name}"):
        gg.LLM(copy, progress=False)
