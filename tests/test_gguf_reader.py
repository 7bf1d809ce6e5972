"""The GGUF reader: every value type, laziness, split files, and that no damage does more than raise GgufError."""

from __future__ import annotations

import gc
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import ARRAY, SCALARS, STRING, entry, gguf, string, tensor

from ggjit import types
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile, Mapping, ValueType
from ggjit.gguf import open as open_gguf
from ggjit.gguf.strings import StringArray, string_starts


@pytest.fixture
def write(tmp_path):
    def write(data: bytes, name: str = "a.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def small() -> bytes:
    """A file with every kind of value and three tensors."""
    entries = [entry(f"scalar.{kind.name}", kind, content) for kind, content in SCALARS]
    entries += [entry(f"array.{kind.name}", ARRAY, (kind, [content] * 3)) for kind, content in SCALARS]
    entries += [
        entry("nested", ARRAY, (ARRAY, [(ValueType.INT32, [1, 2]), (STRING, ["a", "bc"]), (ARRAY, [])])),
        entry("tokens", ARRAY, (STRING, [f"token {i}" for i in range(40)])),
        entry("general.alignment", ValueType.UINT32, 64),
    ]
    data = np.arange(24, dtype=np.float32).tobytes() + bytes(32) + bytes(range(34)) + bytes(30) + b"\1\2\3\4"
    tensors = [tensor("a", (4, 3, 2), 0, 0), tensor("b.weight", (32,), 8, 128), tensor("c", (4,), 24, 192)]
    return gguf(entries, tensors, data, alignment=64)


def test_s97_values(write):
    with open_gguf(write(small())) as file:
        assert (file.version, file.alignment) == (3, 64)
        for kind, content in SCALARS:
            assert file.kv.value_type(f"scalar.{kind.name}") is kind
            assert file.kv[f"scalar.{kind.name}"] == content
            assert type(file.kv[f"scalar.{kind.name}"]) is type(content)
            assert file.kv.element_type(f"array.{kind.name}") is kind
            assert list(file.kv[f"array.{kind.name}"]) == [content] * 3
        assert file.kv["array.INT16"].dtype == np.int16
        one, two, three = file.kv["nested"]
        assert (one.tolist(), list(two), three) == ([1, 2], ["a", "bc"], [])
        tokens = file.kv["tokens"]
        assert len(tokens) == 40 and tokens[3] == tokens[-37] == "token 3" and tokens[38:] == ["token 38", "token 39"]
        assert list(tokens) == [f"token {i}" for i in range(40)] and tokens.raw(1) == b"token 1"
        with pytest.raises(IndexError):
            tokens.raw(40)
        assert "absent" not in file.kv and file.kv.get("absent", 7) == 7
        with pytest.raises(KeyError):
            file.kv["absent"]


def test_numeric_arrays_are_views(write):
    file = open_gguf(write(small()))
    array = file.kv["array.UINT64"]
    assert not array.flags.writeable and not array.flags.owndata
    first, size = file.mappings[0].address, file.mappings[0].size
    assert first < array.ctypes.data < first + size


def test_s97_tensors(write):
    file = open_gguf(write(small()))
    a, b, c = file.tensors.values()
    assert (a.name, a.type, a.ne, a.n_dims, a.nbytes, a.offset) == (
        "a",
        types.F32,
        (4, 3, 2, 1),
        3,
        96,
        file.data_offset,
    )
    assert (b.type, b.nbytes, c.type, c.nbytes, c.nelements) == (types.Q8_0, 34, types.I8, 4, 4)
    assert file.data_offset % 64 == 0
    assert file.data("a").view(np.float32).tolist() == list(range(24))
    assert file.data("b.weight").tolist() == list(range(34))
    assert not file.data("c").flags.writeable
    assert file.used_range() == (a.offset, c.offset + 4)
    with pytest.raises(GgufError, match="'d' must be in the file"):
        file.data("d")


def test_arrays_outlive_the_file(write):
    path = write(small())
    file = open_gguf(path)
    data, array = file.data("a"), file.kv["array.FLOAT64"]
    file.close()
    del file
    gc.collect()
    assert data.view(np.float32)[5] == 5 and array[0] == 1e300


def test_version_2_and_no_tensors(write):
    file = open_gguf(write(gguf([entry("a", ValueType.UINT32, 1)], version=2)))
    assert file.version == 2 and not file.tensors and file.used_range() == (0, 0)


def test_unknown_tensor_type_is_opaque(write):
    data = bytes(64) + bytes(20)
    file = open_gguf(write(gguf([], [tensor("new", (7,), 77, 0), tensor("old", (5,), 0, 64)], data)))
    info = file.tensors["new"]
    assert (info.type, info.type_id, info.type_name, info.nbytes) == (None, 77, "type 77", 64)
    assert file.data("old").nbytes == 20
    with pytest.raises(GgufError, match="'new' must be a known one, got id 77"):
        file.data("new")


def u32(x: int) -> bytes:
    return struct.pack("<I", x)


def u64(x: int) -> bytes:
    return struct.pack("<Q", x)


TEN = bytes(64)
WRONG = {
    "empty": (b"", 0, "magic must fit"),
    "magic": (b"GGML" + bytes(100), 0, "magic must be b'GGUF', got b'GGML'"),
    "version 1": (gguf(version=1), 4, "version must be 2 or 3, got 1; convert"),
    "version 4": (gguf(version=4), 4, "version must be 2 or 3, got 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), 4, "little-endian"),
    "short header": (b"GGUF" + u32(3) + u64(0), 16, "number of metadata entries must fit"),
    "many tensors": (b"GGUF" + u32(3) + u64(1 << 60) + u64(0), 8, "number of tensors must fit"),
    "many entries": (b"GGUF" + u32(3) + u64(0) + u64(1 << 63), 16, "number of metadata entries must fit"),
    "long key": (b"GGUF" + u32(3) + u64(0) + u64(1) + u64(1 << 62) + bytes(9), 24, "length of metadata key must fit"),
    "key not UTF-8": (gguf([entry(b"a\xff", 4, 1)]), 24, "metadata key must be UTF-8, got byte 0xff"),
    "key twice": (gguf([entry("a", 4, 1), entry("a", 4, 2)]), 41, "keys must differ, got 'a' twice"),
    "value type": (gguf([string("a") + u32(13) + bytes(8)]), 33, "type of a must be one of 0 to 12, got 13"),
    "bool": (gguf([string("a") + u32(7) + b"\2"]), 37, "a must be 0 or 1, got 2"),
    "bool array": (gguf([string("a") + u32(9) + u32(7) + u64(2) + b"\1\2"]), 49, "a must hold 0 and 1 only"),
    "long string": (gguf([string("a") + u32(8) + u64(99)]), 37, "length of a must fit in the file, got 99 with 0"),
    "long array": (gguf([string("a") + u32(9) + u32(10) + u64(1 << 61)]), 41, "length of a must fit"),
    "element type": (gguf([string("a") + u32(9) + u32(99) + u64(0)]), 37, "element type of a must be one of"),
    "string array": (gguf([string("a") + u32(9) + u32(8) + u64(2) + string("x") + u64(7) + b"1"]), 58, "strings of a"),
    "string count": (gguf([string("a") + u32(9) + u32(8) + u64(1 << 60)]), 41, "length of a must fit"),
    "nesting": (gguf([string("a") + u32(9) + (u32(9) + u64(1)) * 12 + u32(0) + u64(0)]), 133, "nested deeper than 8"),
    "alignment 0": (gguf([entry("general.alignment", 4, 0)]), 24, "power of two and at least 8, got 0"),
    "alignment 24": (gguf([entry("general.alignment", 4, 24)]), 24, "power of two and at least 8, got 24"),
    "alignment type": (gguf([entry("general.alignment", 8, "x")]), 24, "general.alignment must be UINT32, got STRING"),
    "long name": (gguf([], [tensor("n" * 64, (1,), 0, 0)], TEN), 24, "tensor name must be at most 63 bytes, got 64"),
    "name twice": (gguf([], [tensor("n", (1,), 0, 0)] * 2, TEN), 57, "names must differ, got 'n' twice"),
    "no dims": (gguf([], [tensor("n", (), 0, 0)], TEN), 33, "n_dims of 'n' must be 1 to 4, got 0"),
    "5 dims": (gguf([], [tensor("n", (1,) * 5, 0, 0)], TEN), 33, "n_dims of 'n' must be 1 to 4, got 5"),
    "ne 0": (gguf([], [tensor("n", (0,), 0, 0)], TEN), 37, "ne of 'n' must be positive"),
    "ne overflow": (gguf([], [tensor("n", (1 << 33, 1 << 33), 0, 0)], TEN), 37, "product below"),
    "block": (gguf([], [tensor("n", (33,), 2, 0)], TEN), 45, "multiple of 32, the block of Q4_0, got [33]"),
    "beyond the end": (gguf([], [tensor("n", (17,), 0, 0)], TEN), 24, "data of 'n' must lie in the file, got 68 bytes"),
    "far offset": (gguf([], [tensor("n", (1,), 0, 1 << 62)], TEN), 24, "data of 'n' must lie in the file"),
    "overlap": (
        gguf([], [tensor("n", (16,), 0, 0), tensor("m", (8,), 0, 32)], bytes(64)), 57,
        "data of 'n' must end before the next begins, got 64 bytes at 96 and 'm' at 128",
    ),
    "unaligned": (gguf([], [tensor("n", (1,), 0, 4)], TEN), 24, "offset of 'n' must be a multiple of 32, got 4"),
    "unknown type far away": (gguf([], [tensor("n", (1,), 99, 1 << 40)], TEN), 24, "must lie in the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_s97_wrong_files(write, name):
    data, offset, message = WRONG[name]
    path = write(data)
    with pytest.raises(GgufError) as caught:
        open_gguf(path)
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{path}, byte {offset}: ")


def test_file_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "none.gguf")


def part(no: int, count: int, names: list[str], total: int | None = None) -> bytes:
    entries = [entry("split.no", 2, no), entry("split.count", 2, count)]
    entries += [entry("split.tensors.count", 5, total)] if total is not None else []
    entries += [entry("only.in", 5, no)]
    data = b"".join(np.full(8, i + 10 * no, np.float32).tobytes() for i in range(len(names)))
    return gguf(entries, [tensor(name, (8,), 0, 32 * i) for i, name in enumerate(names)], data)


def test_split_files(write):
    names = [["a", "b"], ["c"], ["d"]]
    paths = [write(part(i, 3, names[i], 4), f"m-0000{i + 1}-of-00003.gguf") for i in range(3)]
    for path in paths:
        file = GgufFile(path)
        assert list(file.tensors) == ["a", "b", "c", "d"] and file.path == str(paths[0]) and len(file.mappings) == 3
        assert [info.file for info in file.tensors.values()] == [0, 0, 1, 2] and file.kv["only.in"] == 0
        assert file.data("b").view(np.float32)[0] == 1 and file.data("d").view(np.float32)[0] == 20
        assert file.used_range(1) == (file.tensors["c"].offset, file.tensors["c"].offset + 32)
    paths[1].unlink()
    with pytest.raises(GgufError, match=r"m-00002-of-00003\.gguf, byte 0: part 2 of 3 must be there"):
        GgufFile(paths[0])


def test_wrong_splits(write):
    one = write(part(0, 2, ["a"], 2), "m-00001-of-00002.gguf")
    write(part(0, 2, ["b"]), "m-00002-of-00002.gguf")
    with pytest.raises(GgufError, match=r"split\.no must be 1, got 0"):
        GgufFile(one)
    write(part(1, 2, ["a"]), "m-00002-of-00002.gguf")
    with pytest.raises(GgufError, match="'a' must be in one part only"):
        GgufFile(one)
    write(part(1, 3, ["b"]), "m-00002-of-00002.gguf")
    with pytest.raises(GgufError, match=r"split\.count must be 2, the number in the name, got 3"):
        GgufFile(one)
    write(part(1, 2, ["b", "c"]), "m-00002-of-00002.gguf")
    with pytest.raises(GgufError, match=r"split\.tensors\.count must be 3, the sum of the parts, got 2"):
        GgufFile(one)
    with pytest.raises(GgufError, match=r"must be 1, the number in the name, got 2; the name must end in"):
        GgufFile(write(part(0, 2, ["a"]), "other.gguf"))
    # A name alone makes no part.
    assert len(GgufFile(write(small(), "x-00001-of-00001.gguf")).mappings) == 1


def walk(data: bytes, offset: int, n: int) -> list[int]:
    starts = [offset]
    for _ in range(n):
        offset += 8 + struct.unpack_from("<Q", data, offset)[0]
        starts.append(offset)
    return starts


@pytest.mark.parametrize("seed", range(8))
def test_string_starts_is_the_plain_walk(seed):
    r = random.Random(seed)
    kinds = [
        lambda: r.randbytes(r.randint(1, 12)),
        lambda: b"",
        lambda: bytes(r.randint(1, 30)),  # looks like a length
        lambda: r.randbytes(r.choice([255, 256, 257, 70_000])),
        lambda: struct.pack("<Q", r.randint(0, 20)) + b"abc",
    ]
    weights = [1, 0.01, 0.01, 0.002, 0.01] if seed % 2 else [1, 1, 1, 0.01, 1]
    texts = [r.choices(kinds, weights)[0]() for _ in range(20_000 if seed % 2 else 300)]
    data = b"head" + b"".join(map(string, texts)) + b"tail, which is longer than a length"
    array = np.frombuffer(data, np.uint8)
    starts = string_starts(array, 4, len(texts))
    assert starts.tolist() == walk(data, 4, len(texts))
    strings = StringArray(array, starts)
    assert strings.raw_all() == texts
    assert [strings.raw(i) for i in range(0, len(texts), 97)] == texts[::97]
    # Cut anywhere, the first string that does not fit is found.
    for _ in range(20):
        end = r.randrange(4, len(data) - 40)
        first = int(starts[np.flatnonzero(starts[1:] > end)[0]])
        assert string_starts(array[:end], 4, len(texts)) == first


def test_advice(write):
    path = write(bytes(range(256)) * 256)
    with Mapping(path) as mapping:
        mapping.advise_willneed(5, 100)
        mapping.advise_willneed(60_000, 1 << 20)
        before = mapping.data.copy()
        for offset, nbytes in ((0, 65536), (100, 5000), (65000, 536), (4095, 2), (0, 0)):
            mapping.advise_dontneed(offset, nbytes)
        assert (mapping.data == before).all()
        assert mapping.address == mapping.data.ctypes.data


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
def test_s98_s99_pages_come_when_touched_and_go_when_given_back(write):
    def resident(address: int) -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
        return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    with Mapping(write(bytes(4 << 20))) as mapping:
        mapping.data.sum()
        assert resident(mapping.address) == 4096
        mapping.advise_dontneed(1 << 20, 2 << 20)
        assert resident(mapping.address) <= 2048
        mapping.advise_dontneed(0, mapping.size)
        assert resident(mapping.address) == 0


DAMAGE = """
import random, sys, tracemalloc
from ggjit.errors import GgufError
from ggjit.gguf import GgufFile

path, seed, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
good = open(path, "rb").read()
r = random.Random(seed)
damaged = path + ".damaged"
loaded = refused = 0
GgufFile(path)
tracemalloc.start()
for i in range(n):
    data = bytearray(good)
    if i % 4 == 0:
        del data[r.randrange(len(data)):]
    else:
        for _ in range(r.choice((1, 1, 2, 8))):
            data[r.randrange(min(len(data), 3000))] = r.choice((0, 1, 127, 128, 255, r.randrange(256)))
    with open(damaged, "wb") as file:
        file.write(data)
    base = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        with GgufFile(damaged) as file:
            for value in file.kv.values():
                list(value) if hasattr(value, "__len__") else value
            for name, info in file.tensors.items():
                if info.type is not None:
                    file.data(name).sum()
        loaded += 1
    except GgufError as error:
        assert str(error).startswith(damaged) and "\\n" not in str(error)
        refused += 1
    file = value = None
    used = tracemalloc.get_traced_memory()[1] - base
    assert used < 2 * len(good) + 100_000, (i, used)
print(loaded, refused)
"""


@pytest.mark.parametrize("name", ["small", pytest.param("llama", marks=pytest.mark.full)])
def test_damage(write, name):
    data = small() if name == "small" else (Path(__file__).parent / "data/vocab/llama.gguf").read_bytes()
    path = write(data)
    # One subprocess, so that a crash is seen as such; the two files together are 2,000 changes.
    command = [sys.executable, "-c", DAMAGE, str(path), "7", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    loaded, refused = map(int, done.stdout.split())
    assert loaded + refused == 1000 and loaded > 20 and refused > 250


def test_opening_does_not_decode_the_vocabulary(write):
    n = 262_144
    texts = b"".join(string(f"token{i}") for i in range(n))
    tokens = string("tokens") + u32(9) + u32(8) + u64(n) + texts
    path = write(gguf([tokens, entry("after", 5, 1)]))
    best = 1.0
    for _ in range(3):
        start = time.perf_counter()
        file = open_gguf(path)
        best = min(best, time.perf_counter() - start)
    assert file.kv["after"] == 1 and file.kv["tokens"][n - 1] == f"token{n - 1}"
    assert best < 0.1, f"{best * 1e3:.0f} ms"  # 6 ms on the machine where it was written; string by string takes 50 ms
