"""The device in a child process: its protocol, that no pointer reaches it, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import ggjit as gg
from ggjit import types
from ggjit.backend import alloc_ctx_tensors, copy_tensor, devices, host_buffer_type, tensor_alloc
from ggjit.backends.process import Counts, ProcessDevice
from ggjit.compare_backends import compare_backends
from ggjit.context import aligned_bytes
from ggjit.graph import Graph
from ggjit.op import REGISTRY


@pytest.fixture(scope="module")
def device():
    device = ProcessDevice()
    yield device
    device.close()


@pytest.fixture(autouse=True)
def clear(device: ProcessDevice) -> None:
    device.channel.wait()
    device.counts.clear()


def is_alive(pid: int) -> bool:
    """Does a process run (an ended one that nobody waited for does not)?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def leafs(*shapes: tuple[int, ...], type: gg.Type = types.F32) -> tuple[gg.Context, list[gg.Tensor]]:
    with gg.Context(1 << 16, no_alloc=True) as context:
        return context, [gg.new_tensor(type, *ne, name=f"t{i}") for i, ne in enumerate(shapes)]


def chain(device: ProcessDevice) -> tuple[Graph, gg.Tensor]:
    """relu((a + a) * a) of [-2, 5], in the device's memory."""
    with gg.Context(1 << 18, no_alloc=True) as context:
        a = gg.new_tensor(types.F32, 8, name="a")
        graph = gg.build(gg.relu(gg.mul(gg.add(a, a), a)), 16)
    alloc_ctx_tensors(context, device.buffer_type())
    a.set(np.arange(-2, 6))
    return graph, a


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_s79_buffer_type(device: ProcessDevice) -> None:
    type = device.buffer_type()
    assert (type.name, type.is_host, type.alignment) == ("process0", False, 32) and device.buffer_type() is type
    assert device.weight_buffer_types() == (type,) and device.pid != os.getpid() and str(device.pid) in repr(device)
    one, two = type.new_buffer(100), type.new_buffer(100, "weights")
    assert one.size == 100 and one.array is None and two.usage == "weights"
    assert not one.contains(two.base, 1) and not one.contains(two.base - 1, 1)


def test_s79_bytes_go_in_and_out_by_the_protocol_alone(device: ProcessDevice) -> None:
    context, (a, b) = leafs((5, 3), (7,))
    with context:
        v = gg.view_1d(b, 3, 8)
    buffer = alloc_ctx_tensors(context, device.buffer_type())
    assert a.data == buffer.base and b.data == buffer.base + 64 and v.data == b.data + 8
    assert a.data >= 1 << 60  # no process has memory there
    assert not a.numpy().any()
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    a.set(values)
    values[:] = -1  # sent already
    assert np.array_equal(a.numpy().reshape(3, 5), np.arange(15).reshape(3, 5))
    b.set(np.arange(7))
    assert v.numpy().ravel().tolist() == [2, 3, 4]
    v.set([9, 9, 9])
    buffer.set_tensor(b, np.float32([5]), offset=24)
    assert b.numpy().ravel().tolist() == [0, 1, 9, 9, 9, 5, 5]
    assert buffer.get_tensor(b, 4, 4).view(np.float32).tolist() == [1]
    buffer.clear(0)
    assert not b.numpy().any()
    assert device.counts == Counts(4, 60 + 28 + 12 + 4, 6, 60 + 60 + 12 + 28 + 4 + 28)


def test_s96_places_are_checked(device: ProcessDevice) -> None:
    _, (a, b) = leafs((8,), (8,))
    buffer = device.buffer_type().new_buffer(32)
    with pytest.raises(ValueError, match="tensor_alloc: the tensor must lie inside the buffer of 32 bytes"):
        tensor_alloc(buffer, a, buffer.base + 8)
    tensor_alloc(buffer, a, buffer.base)
    with pytest.raises(ValueError, match="set_tensor: the bytes must lie inside the tensor of 32, got 8 at offset 28"):
        buffer.set_tensor(a, bytes(8), 28)
    other = device.buffer_type().new_buffer(32)
    with pytest.raises(ValueError, match="Buffer: the data must lie in this process0 buffer of 32 bytes, got 32 bytes"):
        other.get_tensor(a)
    with pytest.raises(ValueError, match="Tensor: data must be allocated"):
        b.numpy()
    assert device.buffer_from_array(aligned_bytes(64)) is None


def test_buffers_end_with_their_tensors(device: ProcessDevice) -> None:
    context, (a,) = leafs((1 << 20,))
    buffer = weakref.ref(alloc_ctx_tensors(context, device.buffer_type()))
    a.set(1.0)
    del context, a
    gc.collect()
    assert buffer() is None
    device.new_backend().synchronize()


def test_buffer_that_does_not_fit(device: ProcessDevice) -> None:
    with pytest.raises(MemoryError, match=r"memory: .* bytes must be available"):
        device.buffer_type().new_buffer(1 << 61)


@pytest.mark.parametrize(("src", "dst"), [("host", "far"), ("far", "host"), ("far", "far"), ("host", "host")])
def test_copy_tensor(device: ProcessDevice, src: str, dst: str) -> None:
    kinds = {"host": host_buffer_type(), "far": device.buffer_type()}
    (one, (a,)), (two, (b,)) = leafs((6, 4)), leafs((6, 4))
    alloc_ctx_tensors(one, kinds[src])
    alloc_ctx_tensors(two, kinds[dst])
    values = np.random.default_rng(0).standard_normal((1, 1, 4, 6)).astype(np.float32)
    a.set(values)
    device.counts.clear()
    copy_tensor(a, b)
    far = (src == "far", dst == "far")
    want = {(True, True): Counts(on_device=1), (False, True): Counts(1, 96), (True, False): Counts(0, 0, 1, 96)}
    assert device.counts == want.get(far, Counts())
    assert np.array_equal(b.numpy(), values)


def test_copy_tensor_to_an_arena_and_between_devices(device: ProcessDevice) -> None:
    other = ProcessDevice("process1")
    (one, (a,)), (two, (b,)) = leafs((6, 4)), leafs((6, 4))
    alloc_ctx_tensors(one, device.buffer_type())
    alloc_ctx_tensors(two, other.buffer_type())
    a.set(3.0)
    copy_tensor(a, b)
    with gg.Context(1 << 12):
        c = gg.new_tensor(types.F32, 6, 4)
    copy_tensor(b, c)
    assert (c.numpy() == 3).all() and (other.counts.to_device, other.counts.from_device) == (1, 1)
    with pytest.raises(ValueError, match=r"copy_tensor: the tensors must have one type and layout, got F32 \[6, 4"):
        copy_tensor(a, leafs((4, 6))[1][0])
    other.close()


# -- computing ---------------------------------------------------------------------------------------------------------


def test_computes_where_the_bytes_are(device: ProcessDevice) -> None:
    graph, a = chain(device)
    backend = device.new_backend()
    backend.compute(graph)
    backend.synchronize()
    x = np.arange(-2, 6)
    assert graph.nodes[-1].numpy().ravel().tolist() == (2 * x * x).tolist()
    a.set(x + 1)
    backend.compute(graph)
    assert graph.nodes[-1].numpy().ravel().tolist() == (2 * (x + 1) ** 2).tolist()
    assert (device.counts.graphs, device.counts.runs) == (1, 2)  # sent once


def test_graph_is_sent_again_when_its_tensors_move(device: ProcessDevice) -> None:
    graph, a = chain(device)
    backend = device.new_backend()
    backend.compute(graph)
    new = device.buffer_type().new_buffer(64)
    a.data, a.buffer = new.base, new
    a.set(1.0)
    backend.compute(graph)
    assert graph.nodes[-1].numpy().ravel().tolist() == [2.0] * 8 and device.counts.graphs == 2


def test_results_are_those_of_the_cpu(device: ProcessDevice) -> None:
    rng = np.random.default_rng(1)
    with gg.Context(1 << 20):
        w = gg.from_numpy(rng.standard_normal((48, 64)), types.Q8_0)
        x = gg.from_numpy(rng.standard_normal((3, 64)), types.F32)
        cur = gg.rms_norm(gg.mul_mat(w, x), 1e-5)
        graph = gg.build(gg.soft_max(gg.cont(gg.transpose(gg.silu(cur)))), 32)
    found = compare_backends(devices()[-1].new_backend(1), device.new_backend(), graph)
    assert [d.node.op.name for d in found] == ["mul_mat", "rms_norm", "unary", "cont", "soft_max"]
    assert all(d.nmse == 0 and d.largest == 0 for d in found)
    assert [graph.nodes[d.position] for d in found] == [d.node for d in found]


def test_compare_backends_tells_differences() -> None:
    """A second backend whose sums are too large by one."""
    cpu = devices()[-1].new_backend(1)

    class Wrong:
        name, device = "wrong", cpu.device
        supports, synchronize = cpu.supports, cpu.synchronize

        def compute(self, graph, fuse=None):
            cpu.compute(graph, fuse)
            if graph.nodes[0].op.name == "add":
                graph.nodes[0].set(graph.nodes[0].numpy() + 1)

    with gg.Context(1 << 18):
        a = gg.new_tensor(types.F32, 2).set([3.0, 4.0])
        graph = gg.build(gg.sqr(gg.add(gg.mul(a, a), a)), 16)
    found = compare_backends(cpu, Wrong(), graph)
    assert [round(d.nmse, 4) for d in found] == [
        0,
        round(2 / (12**2 + 20**2), 4),
        round((25**2 + 41**2) / (144**2 + 400**2), 4),
    ] and found[1].largest == 1
    seen = []
    compare_backends(cpu, Wrong(), graph, lambda d, a, b: seen.append((d, a, b)) or d.nmse == 0)
    assert [d.node.op.name for d, _, _ in seen] == ["mul", "add"] and seen[1][2].ravel().tolist() == [13, 21]
    assert [d.position for d in compare_backends(cpu, Wrong(), graph, nodes=graph.nodes[2:])] == [2]
    assert all(t.numpy().sum() == 0 for t in graph.nodes)  # the graph itself was not computed


def test_chosen_ops() -> None:
    device = ProcessDevice(ops={"add", "mul_mat"}, offload_columns=4)
    backend = device.new_backend()
    with gg.Context(1 << 18, no_alloc=True):
        a, b = gg.new_tensor(types.F32, 8, 8), gg.new_tensor(types.F32, 8, 3)
        assert backend.supports(gg.add(a, a)) and backend.supports(gg.mul_mat(a, b)) and backend.supports(a)
        assert not backend.supports(gg.mul(a, a)) and backend.supports(gg.transpose(a))
        assert backend.offloads(gg.mul_mat(a, a)) and not backend.offloads(gg.mul_mat(a, b))
    assert backend.supports_buffer_type(device.buffer_type()) and not backend.supports_buffer_type(host_buffer_type())
    device.close()


def test_what_the_child_does_not_know(device: ProcessDevice) -> None:
    backend = device.new_backend()

    def twice(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, ith, nth):
        pass

    with gg.Context(1 << 18, no_alloc=True):
        a = gg.new_tensor(types.F32, 8)
        own = gg.Op("own_of_the_host")
        try:
            assert not backend.supports(gg.new_node(own, a.type, a.ne, (a,)))
        finally:
            del REGISTRY["own_of_the_host"]
        assert not backend.supports(gg.map_custom1(a, twice))


def test_tensors_elsewhere_are_refused(device: ProcessDevice) -> None:
    with gg.Context(1 << 18):
        a = gg.new_tensor(types.F32, 8, name="a")
        graph = gg.build(gg.add(a, a), 16)
    text = r"process0: tensors must lie in a buffer of the device, got memory of the host \('a'\)"
    with pytest.raises(NotImplementedError, match=text):
        device.new_backend().compute(graph)
    graph, _ = chain(device)
    with pytest.raises(NotImplementedError, match="add: 'node_0' must lie in host memory, got a process0 buffer"):
        devices()[-1].new_backend(1).compute(graph)


def test_errors_of_the_child_come_here(device: ProcessDevice) -> None:
    with gg.Context(1 << 18, no_alloc=True) as context:
        a, i = gg.new_tensor(types.F32, 4, 4, name="a"), gg.new_tensor(types.I32, 2, name="ids")
        graph = gg.build(gg.get_rows(a, i), 16)
    alloc_ctx_tensors(context, device.buffer_type())
    i.set([1, 9])
    backend = device.new_backend()
    backend.compute(graph)
    with pytest.raises(IndexError, match="indices in source 'ids' must be valid rows, got 9 at position 1"):
        backend.synchronize()
    backend.synchronize()  # told once
    i.set([1, 3])
    backend.compute(graph)
    assert graph.nodes[0].numpy().shape == (1, 1, 2, 4)


# -- events ------------------------------------------------------------------------------------------------------------


def test_s79_events(device: ProcessDevice) -> None:
    backend, cpu = device.new_backend(), devices()[-1].new_backend(1)
    event = device.new_event()
    event.synchronize()  # never recorded
    graph, _ = chain(device)
    backend.compute(graph)
    backend.record_event(event)
    cpu.wait_event(event)
    assert event.channel._done >= event.number > 0
    ready = cpu.device.new_event()
    cpu.record_event(ready)
    backend.wait_event(ready)
    with pytest.raises(TypeError, match="process0: the event must be one of the device's, got"):
        backend.record_event(ready)


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_dead_child_is_an_error_and_nothing_hangs() -> None:
    device = ProcessDevice("lost")
    graph, a = chain(device)
    backend = device.new_backend()
    os.kill(device.pid, signal.SIGSTOP)
    backend.compute(graph)  # waits for nothing
    os.kill(device.pid, signal.SIGKILL)
    text = "lost: the child process must be alive, got exit status -9; what its buffers held is lost"
    for act in (backend.synchronize, a.numpy, backend.synchronize, lambda: device.buffer_type().new_buffer(8)):
        with pytest.raises(RuntimeError, match=text):
            act()
    with pytest.raises(RuntimeError, match=text):
        backend.compute(graph)
    del graph, a
    gc.collect()
    device.close()


def test_frame_that_was_broken_off_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ProcessDevice("cut")

    def cut(stream, fields, payload) -> None:
        stream.write(b"half")
        stream.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ggjit.backends.process.write_frame", cut)
        with pytest.raises(KeyboardInterrupt):
            device.buffer_type().new_buffer(8)
    with pytest.raises(RuntimeError, match="cut: the child process must be alive, got exit status -9"):
        device.buffer_type().new_buffer(8)
    device.close()


def test_close_ends_the_child() -> None:
    device = ProcessDevice()
    pid = device.pid
    assert is_alive(pid)
    device.close()
    device.close()
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="the child process must be alive, got exit status 0"):
        device.buffer_type().new_buffer(8)


def test_device_that_nobody_holds_ends() -> None:
    device = ProcessDevice()
    pid = device.pid
    del device
    gc.collect()
    assert not is_alive(pid)


@pytest.mark.parametrize("how", ["", "os.kill(os.getpid(), 9)", "raise KeyError"])
def test_child_ends_with_its_parent(how: str) -> None:
    code = "\n".join([
        "import os",
        "from ggjit.backends.process import ProcessDevice",
        "d = ProcessDevice()",
        "print(d.pid, flush=True)",
        how,
    ])  # fmt: skip
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    for _ in range(100):
        if not is_alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.skipif(sys.platform == "win32", reason="process groups of POSIX")
def test_ctrl_c_never_reaches_the_child(device: ProcessDevice) -> None:
    """It goes to the terminal's process group: the child is in another one from its start, not only once it runs."""
    assert os.getpgid(device.pid) == device.pid != os.getpgrp()
