from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from gpt2_headers import f16_matrices, gpt2

import ggjit as gg
from ggjit import types
from ggjit.backend import (
    Buffer,
    BufferType,
    alloc_ctx_tensors,
    buffer_from_array,
    ctx_tensors_size,
    devices,
    host_buffer_type,
    init_view,
    tensor_alloc,
)  # fmt: skip
from ggjit.backends.cpu import PANEL, pack_tensors
from ggjit.context import aligned_bytes
from ggjit.gguf.mapping import Mapping
from ggjit.tensor_values import encode


class Remote(BufferType):
    """Memory that cannot be reached by pointers: bytes go in and out by the protocol alone."""

    name, is_host, alignment = "remote", False, 128

    def new_buffer(self, size: int, usage: str = "any") -> Buffer:
        return RemoteBuffer(self, None, usage, 1 << 20, size)  # type: ignore[arg-type]


class RemoteBuffer(Buffer):
    __slots__ = ("far",)

    def init_tensor(self, tensor: gg.Tensor) -> None:
        super().init_tensor(tensor)
        self.far = getattr(self, "far", {})

    def set_tensor(self, tensor, data, offset=0):
        self.far[tensor.name] = bytes(data)

    def get_tensor(self, tensor, offset=0, nbytes=None):
        return np.frombuffer(self.far[tensor.name], np.uint8)


def headers(*shapes: tuple[int, ...], type: gg.Type = types.F32) -> tuple[gg.Context, list[gg.Tensor]]:
    with gg.Context(1 << 16, no_alloc=True) as context:
        return context, [gg.new_tensor(type, *ne, name=f"t{i}") for i, ne in enumerate(shapes)]


def test_s43_s79_host_buffer_type() -> None:
    host = host_buffer_type()
    assert (host.name, host.alignment, host.is_host) == ("host", 32, True)
    buffer = host.new_buffer(100, "weights")
    assert buffer.base % 64 == 0 and buffer.size == 100 and buffer.usage == "weights" and not buffer.array.any()
    _, (t,) = headers((3, 3))
    assert (host.alloc_size(t), host.padded_size(t)) == (36, 64) and host.supports(t)
    assert repr(host) == "BufferType(host)" and repr(buffer).startswith("Buffer(host, 100 bytes at 0x")


def test_s80_one_buffer_cut_in_order() -> None:
    context, (a, b, c) = headers((3,), (8, 4), (5,))
    with context:
        v = gg.view_1d(b, 8, 32)
    assert ctx_tensors_size(context, host_buffer_type()) == 32 + 128 + 32
    buffer = alloc_ctx_tensors(context, host_buffer_type(), "weights")
    assert buffer.size == 192 and [t.data - buffer.base for t in (a, b, c)] == [0, 32, 160]
    assert v.data == b.data + 32 and all(t.buffer is buffer for t in (a, b, c, v))
    b.set(np.arange(32).reshape(4, 8))
    assert v.numpy().ravel().tolist() == list(range(8, 16))


def test_s80_sizes_of_gpt2() -> None:
    host = host_buffer_type()
    model = gpt2(f16_matrices)
    assert ctx_tensors_size(model.weights, host) == 327889920
    assert ctx_tensors_size(model.kv, host) == 75497472


def test_s80_tensors_with_data_are_left_alone() -> None:
    context, (a, b) = headers((8,), (8,))
    own = buffer_from_array(aligned_bytes(64))
    tensor_alloc(own, a, own.base)
    buffer = alloc_ctx_tensors(context, host_buffer_type())
    assert a.buffer is own and buffer.size == 32 and b.buffer is buffer
    assert alloc_ctx_tensors(context, host_buffer_type()) is None


def test_s96_tensor_alloc() -> None:
    _, (a,) = headers((8, 2))
    buffer = host_buffer_type().new_buffer(128)
    tensor_alloc(buffer, a, buffer.base + 64)
    assert a.data == buffer.base + 64 and a.buffer is buffer
    assert a.record["buffer"] == id(buffer)


def test_s96_asserts() -> None:
    context, (a, b) = headers((8, 2), (8, 2))
    with context:
        v = gg.view_1d(a, 8, 0).set_name("v")
    buffer = host_buffer_type().new_buffer(128)
    for offset in (-32, 96):
        text = (
            rf"tensor_alloc: the tensor must lie inside the buffer of 128 bytes, got 64 bytes at offset {offset} \('t0'"
        )
        with pytest.raises(ValueError, match=text):
            tensor_alloc(buffer, a, buffer.base + offset)
    assert a.data == 0 and a.buffer is None
    with pytest.raises(ValueError, match=r"tensor_alloc: the tensor must not be a view, got a view of 't0' \('v'\)"):
        tensor_alloc(buffer, v, buffer.base)
    tensor_alloc(buffer, a, buffer.base)
    with pytest.raises(ValueError, match=r"tensor_alloc: the tensor must have no data, got data at 0x.* \('t0'\)"):
        tensor_alloc(buffer, a, buffer.base)
    b.data = 4096
    with pytest.raises(ValueError, match="tensor_alloc: the tensor must have no data"):
        tensor_alloc(buffer, b, buffer.base)


def test_s96_the_buffer_is_asked() -> None:
    class NoIntegers(type(host_buffer_type())):
        def supports(self, tensor: gg.Tensor) -> bool:
            return tensor.type is not types.I32

    context, (a,) = headers((8,), type=types.I32)
    text = r"host buffer: the tensor must be of a type and shape that it supports, got I32\[8, 1, 1, 1\] \('t0'\)"
    with pytest.raises(NotImplementedError, match=text):
        alloc_ctx_tensors(context, NoIntegers())
    assert a.data == 0 and a.buffer is None


def test_init_view_needs_data() -> None:
    context, (a,) = headers((8,))
    with context:
        v = gg.view_1d(a, 4, 16).set_name("v")
    with pytest.raises(ValueError, match=r"init_view: the viewed tensor must have data, got none \('v'\)"):
        init_view(v)


def test_set_and_get_bytes() -> None:
    context, (a, b) = headers((4,), (4,))
    alloc_ctx_tensors(context, host_buffer_type())
    data = np.arange(4, dtype=np.float32)
    a.buffer.set_tensor(a, data.tobytes())
    assert a.numpy().ravel().tolist() == [0, 1, 2, 3]
    a.buffer.set_tensor(a, np.float32([7]), offset=8)
    got = a.buffer.get_tensor(a)
    assert got.view(np.float32).tolist() == [0, 1, 7, 3]
    got[:] = 0  # a copy
    assert a.buffer.get_tensor(a, 8, 4).view(np.float32).tolist() == [7]
    assert not b.numpy().any()
    text = r"set_tensor: the bytes must lie inside the tensor of 16, got 8 at offset 12 \('t0'\)"
    with pytest.raises(ValueError, match=text):
        a.buffer.set_tensor(a, bytes(8), offset=12)
    with pytest.raises(ValueError, match="get_tensor: the bytes must lie inside the tensor of 16, got 4 at offset -4"):
        a.buffer.get_tensor(a, -4, 4)
    other = host_buffer_type().new_buffer(64)
    with pytest.raises(
        ValueError, match=r"Buffer: the data must lie in this host buffer of 64 bytes, got 16 bytes at offset"
    ):
        other.get_tensor(a)


def test_clear() -> None:
    context, (a,) = headers((4,), type=types.I8)
    buffer = alloc_ctx_tensors(context, host_buffer_type())
    buffer.clear(3)
    assert a.numpy().ravel().tolist() == [3] * 4
    buffer.reset()
    assert a.numpy().ravel().tolist() == [3] * 4  # of tensors, not of bytes


def test_s95_mapped_file(tmp_path) -> None:
    path = tmp_path / "data"
    path.write_bytes(np.arange(64, dtype=np.float32).tobytes())
    mapping = Mapping(path)
    array = mapping.data
    buffer = buffer_from_array(array[32:224])
    assert (buffer.type.name, buffer.type.is_host, buffer.usage, buffer.size) == ("mapped", True, "weights", 192)
    _, (a, b) = headers((8, 2), (8,))
    tensor_alloc(buffer, a, buffer.base + 32)
    assert a.data == array.ctypes.data + 64 and a.numpy().ravel().tolist() == list(range(16, 32))
    with pytest.raises(
        ValueError, match="tensor_alloc: the tensor must lie inside the buffer of 192 bytes, got 32 bytes at offset 192"
    ):
        tensor_alloc(buffer, b, buffer.base + 192)
    with pytest.raises(
        ValueError, match=r"set_tensor: the buffer must be writable, got a read-only mapped buffer \('t0'\)"
    ):
        buffer.set_tensor(a, bytes(64))
    with pytest.raises(ValueError, match="clear: the buffer must be writable host memory, got a mapped buffer"):
        buffer.clear()
    with pytest.raises(ValueError, match=r"Tensor.set: the data must be writable"):
        a.set(0)
    with pytest.raises(
        NotImplementedError, match="mapped buffer type: memory must come from outside, got a wish for 10 bytes"
    ):
        buffer.type.new_buffer(10)
    del mapping, array, buffer
    gc.collect()
    assert a.numpy().ravel().tolist() == list(range(16, 32))


def test_buffer_from_array_shares() -> None:
    memory = np.zeros((4, 4), np.float32)
    buffer = buffer_from_array(memory)
    _, (t,) = headers((4, 4))
    tensor_alloc(buffer, t, buffer.base)
    t.set(2.0)
    assert memory.sum() == 32 and buffer.type is host_buffer_type()
    with pytest.raises(
        ValueError, match=r"buffer_from_array: the array must be contiguous, got shape \(4, 2\) and strides \(16, 8\)"
    ):
        buffer_from_array(memory[:, ::2])


def test_handles_keep_buffers_alive() -> None:
    def make() -> tuple[gg.Tensor, weakref.ref[Buffer]]:
        context, (a,) = headers((1024,))
        buffer = alloc_ctx_tensors(context, host_buffer_type())
        with gg.Context(4096, no_alloc=True):
            v = gg.view_1d(a.set(np.arange(1024)), 4, 4080)
        return v, weakref.ref(buffer)

    v, buffer = make()
    gc.collect()
    assert v.numpy().ravel().tolist() == [1020, 1021, 1022, 1023]
    values = v.numpy()
    del v
    gc.collect()
    assert buffer() is None and values.ravel().tolist() == [1020, 1021, 1022, 1023]


def test_memory_that_is_not_host_is_never_read_by_pointer() -> None:
    context, (a, b) = headers((8,), (4, 4))
    buffer = alloc_ctx_tensors(context, Remote())
    assert buffer.base == 1 << 20 and b.data == (1 << 20) + 128
    a.set(np.arange(8))
    assert buffer.far["t0"] == np.arange(8, dtype=np.float32).tobytes()
    assert a.numpy().ravel().tolist() == list(range(8)) and a.bytes().nbytes == 32
    with pytest.raises(ValueError, match="clear: the buffer must be writable host memory, got a remote buffer"):
        buffer.clear()
    with pytest.raises(ValueError, match="Buffer: the data must lie in this remote buffer"):
        Buffer.get_tensor(buffer, a)
    with context:
        t = gg.transpose(b)
    with pytest.raises(
        ValueError, match=r"Tensor.set: a tensor outside host memory must be contiguous, got nb \[16, 4, 64, 64\]"
    ):
        t.set(0)


def test_devices() -> None:
    cpu = devices()[-1]
    assert cpu.name == "cpu" and cpu.description and cpu.buffer_type() is host_buffer_type()
    backend = cpu.new_backend()
    assert (
        backend.device is cpu
        and backend.supports_buffer_type(host_buffer_type())
        and not backend.supports_buffer_type(Remote())
    )
    memory = aligned_bytes(64)
    assert cpu.buffer_from_array(memory).base == memory.ctypes.data
    with gg.Context(1 << 16):
        a = gg.new_tensor(types.F32, 4)
        assert backend.supports(gg.transpose(a)) and backend.supports(gg.add(a, a))


def test_backend_computes() -> None:
    pytest.importorskip("numba")
    backend = devices()[-1].new_backend()
    with gg.Context(1 << 20):
        a = gg.new_tensor(types.F32, 4).set(2.0)
        graph = gg.build(gg.add(a, a), 16)
    backend.compute(graph)
    backend.synchronize()
    assert graph.nodes[0].numpy().ravel().tolist() == [4.0] * 4


# -- panels ------------------------------------------------------------------------------------------------------------


def panel_tensor(type: gg.Type, *ne: int, seed: int = 0) -> tuple[gg.Tensor, np.ndarray]:
    """A tensor in a panel buffer, not yet packed, and the bytes of its rows."""
    context, (t,) = headers(ne, type=type)
    alloc_ctx_tensors(context, PANEL, "weights")
    values = np.random.default_rng(seed).standard_normal(t.ne[::-1]).astype(np.float32)
    return t, encode(values, type).reshape(-1)


def packed_bytes(t: gg.Tensor) -> np.ndarray:
    return t.buffer.bytes_of(t, PANEL.alloc_size(t)).copy()


@pytest.mark.parametrize("type", [types.F32, types.F16, types.BF16, types.Q4_0, types.Q8_0, types.Q6_K])
def test_panels(type: gg.Type) -> None:
    t, rows = panel_tensor(type, 512, 40, 2)
    assert t.buffer.type.name == "panel" and not t.buffer.type.is_host and t.data % 64 == 0
    t.buffer.set_tensor(t, rows)
    panels = packed_bytes(t)
    # The second matrix begins where the first one's padded rows end.
    one, _ = panel_tensor(type, 512, 40)
    one.buffer.set_tensor(one, rows[rows.nbytes // 2 :])
    half = PANEL.alloc_size(one)
    assert panels.nbytes == 2 * half and np.array_equal(panels[half:], packed_bytes(one))
    padded, _ = panel_tensor(type, 512, 48)
    padded.buffer.set_tensor(padded, np.concatenate([rows[rows.nbytes // 2 :], np.zeros(8 * t.nb[1], np.uint8)]))
    whole = half // 3 * 2  # the first two of three panels; the last one may hold its absent rows in another way
    assert PANEL.alloc_size(padded) == half and np.array_equal(packed_bytes(padded)[:whole], packed_bytes(one)[:whole])


def test_panel_layout_of_floats() -> None:
    t, _ = panel_tensor(types.F32, 8, 16)
    values = np.arange(128, dtype=np.float32).reshape(16, 8)
    t.set(values)
    assert np.array_equal(packed_bytes(t).view(np.float32).reshape(8, 16), values.T)


def test_panels_are_the_same_for_any_number_of_threads() -> None:
    results, seen = [], []
    for n_threads in (1, 2, 3):
        items = [
            panel_tensor(type, 256, n, seed=n) for type, n in ((types.Q4_0, 33), (types.F16, 100), (types.Q4_0, 16))
        ]
        seen.clear()
        pack_tensors(items, n_threads, lambda done, total: seen.append((done, total)), lambda t, *_: seen.append(t))
        results.append([packed_bytes(t) for t, _ in items])
        sizes = np.cumsum([rows.nbytes for _, rows in items]).tolist()
        assert seen == [x for (t, _), n in zip(items, sizes, strict=True) for x in (t, (n, sizes[-1]))]
        for t, _ in items:
            assert packed_bytes(t).any()
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))
    pack_tensors([])


def test_s99_packing_from_a_mapped_file_gives_its_pages_back(tmp_path) -> None:
    items = [panel_tensor(types.Q8_0, 256, n, seed=n) for n in (64, 48)]
    path = tmp_path / "weights"
    path.write_bytes(b"".join(rows.tobytes() for _, rows in items))
    pack_tensors(items, 1)
    want = [packed_bytes(t) for t, _ in items]
    offsets, given = {items[0][0]: 0, items[1][0]: items[0][1].nbytes}, []
    with Mapping(path) as mapping:

        def give_back(t: gg.Tensor, first: int, end: int) -> None:
            given.append((t, first, end))
            mapping.advise_dontneed(offsets[t] + first, end - first)

        for t, _ in items:
            t.buffer.clear()
        pack_tensors([(t, mapping.data[offsets[t] : offsets[t] + t.nbytes]) for t, _ in items], 2, on_packed=give_back)
    assert given == [(t, 0, t.nbytes) for t, _ in items]
    assert all(np.array_equal(packed_bytes(t), w) for (t, _), w in zip(items, want, strict=True))


def test_panels_cannot_be_read_back() -> None:
    t, rows = panel_tensor(types.Q4_0, 32, 16)
    t.buffer.set_tensor(t, rows)
    text = r"get_tensor: the tensor must lie in a host or mapped buffer to be read, got a panel buffer of .* \('t0'\)"
    for act in (t.numpy, t.bytes, lambda: t.buffer.get_tensor(t)):
        with pytest.raises(NotImplementedError, match=text):
            act()
    with t.context:
        v = gg.view_1d(t, 32, 0)
    with pytest.raises(NotImplementedError, match="get_tensor: the tensor must lie in a host or mapped buffer"):
        v.numpy()


def test_panel_errors() -> None:
    t, rows = panel_tensor(types.Q4_0, 32, 16)
    with pytest.raises(
        ValueError, match="set_tensor: a panel buffer must get all 288 bytes of a tensor at once, got 18 at offset 18"
    ):
        t.buffer.set_tensor(t, rows[:18], 18)
    context, (plain,) = headers((32, 2))
    alloc_ctx_tensors(context, host_buffer_type())
    with pytest.raises(
        ValueError, match=r"pack_tensors: the tensor must lie in a panel buffer, got Buffer\(host.*\('t0'\)"
    ):
        pack_tensors([(plain, rows)])
    with pytest.raises(ValueError, match=r"pack_tensors: rows must be contiguous and of 288 bytes, got 144 \('t0'\)"):
        pack_tensors([(t, rows[::2])])
    context, _ = headers((32, 2), type=types.I32)
    text = r"panel buffer: the tensor must be of a type and shape that it supports, got I32\[32, 2, 1, 1\] \('t0'\)"
    with pytest.raises(NotImplementedError, match=text):
        alloc_ctx_tensors(context, PANEL)


def test_weights_go_to_the_first_type_that_supports_them() -> None:
    order = devices()[-1].weight_buffer_types()
    assert [t.name for t in order] == ["panel", "host"]
    context, (w, i) = headers((32, 4), (7,))
    with context:
        k = gg.new_tensor(types.I32, 7)
    assert order[0].supports(w) and not order[0].supports(k) and order[1].supports(k) and i.ne[0] == 7
