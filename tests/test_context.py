from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import ggjit as gg
from ggjit import types
from ggjit.context import OBJECT_SIZE, TENSOR_SIZE, Object, aligned_bytes, current


def test_s41_own_or_given_memory() -> None:
    own = gg.Context(1000)
    assert own.mem_buffer_owned and own.base % 64 == 0 and own.array.nbytes == 1000
    memory = aligned_bytes(4096)
    given = gg.Context(2048, memory)
    assert not given.mem_buffer_owned and given.base == memory.ctypes.data and given.mem_size == 2048
    t = given.new_tensor(types.F32, 4)
    t.set([1, 2, 3, 4])
    assert memory[368:384].view(np.float32).tolist() == [1, 2, 3, 4]


def test_s41_bytearray_is_used_in_place() -> None:
    memory = bytearray(8192)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 16
    context = gg.Context(4096, memoryview(memory)[start:])
    context.new_tensor(types.I32, 1).set(7)
    assert memory[start + 368] == 7


@pytest.mark.parametrize("bad", ["small", "read-only", "unaligned"])
def test_s41_bad_memory(bad: str) -> None:
    memory = aligned_bytes(1024)
    if bad == "small":
        memory = memory[:512]
    elif bad == "read-only":
        memory.flags.writeable = False
    else:
        memory = memory[8:]
    with pytest.raises(
        ValueError, match="Context: mem_buffer must be writable, hold 1000 bytes and lie at a multiple of 16, got"
    ):
        gg.Context(1000, memory)


def test_s42_freed_when_the_last_handle_goes() -> None:
    context = gg.Context(4096)
    t = context.new_tensor(types.F32, 8).set(3.0)
    values, gone = t.numpy(), weakref.ref(context)
    del context
    gc.collect()
    assert gone() is not None  # the handle holds the arena
    del t
    gc.collect()
    assert gone() is None
    assert values.tolist() == [[[[3.0] * 8]]]  # and a NumPy view holds the bytes


def test_s43_alignment() -> None:
    with gg.Context(1 << 16) as context:
        for n in (1, 3, 7, 33):
            t = gg.new_tensor(types.I8, n)
            assert t.data % 16 == 0 and t.address % 16 == 0
    assert all(o.offset % 16 == 0 and o.size % 16 == 0 for o in context.objects())


def test_s44_object_list() -> None:
    with gg.Context(1 << 20) as context:
        assert list(context.objects()) == []
        gg.new_tensor(types.F32, 1)
        gg.Graph(16)
        gg.new_tensor(types.F32, 3, 2)
    graph = gg.graph_overhead(16) - OBJECT_SIZE
    assert context.n_objects == 3
    assert list(context.objects()) == [
        Object(32, TENSOR_SIZE + 16, "tensor"),
        Object(384 + 32, graph, "graph"),
        Object(384 + 32 + graph + 32, TENSOR_SIZE + 32, "tensor"),
    ]
    header = context.array[:32].view(np.int64)
    assert header.tolist() == [32, 352, 384, 0]  # offset, size, next, kind


def test_s45_bump() -> None:
    with gg.Context(1 << 16) as context:
        assert context.used_mem() == 0
        gg.new_tensor(types.F32, 1)
        assert context.used_mem() == 384
        gg.new_tensor(types.F32, 3, 2)
        assert context.used_mem() == 784


def test_s46_full_arena_is_an_error_and_never_grows() -> None:
    with gg.Context(800) as context:
        gg.new_tensor(types.F32, 4)
        gg.new_tensor(types.F32, 4)
        used, count = context.used_mem(), context.n_objects
        text = r"Context: an object of 384 bytes must fit, got 32 bytes left of 800 \(352 too few\)"
        with pytest.raises(gg.OutOfArena, match=text):
            gg.new_tensor(types.F32, 1)
        with pytest.raises(MemoryError):
            gg.Graph(4)
    assert (context.used_mem(), context.n_objects, context.array.nbytes) == (used, count, 800)


def test_s46_exact_fit() -> None:
    with gg.Context(784):
        gg.new_tensor(types.F32, 1)
        gg.new_tensor(types.F32, 3, 2)


def test_s47_tensor_overhead() -> None:
    assert gg.tensor_overhead() == 368


def test_s49_same_code_same_layout() -> None:
    def build() -> tuple[list[Object], list[tuple[int, int]]]:
        with gg.Context(1 << 18) as context:
            a, b = gg.new_tensor(types.F32, 5, 3), gg.new_tensor(types.Q4_0, 64)
            gg.Graph(100)
            c = gg.new_tensor(types.F16, 7)
        return list(context.objects()), [(t.offset, t.data - context.base) for t in (a, b, c)]

    assert build() == build()


def test_s51_no_alloc_headers_only() -> None:
    with gg.Context(4096, no_alloc=True) as context:
        t = gg.new_tensor(types.F32, 1000, 1000)
    assert t.data == 0 and context.used_mem() == 368
    with gg.Context(4096):
        t = gg.new_tensor(types.F32, 8)
    assert t.data == t.address + 336


def test_s53_used_mem_sizes_the_next_arena() -> None:
    def build(size: int) -> gg.Context:
        with gg.Context(size) as context:
            for n in range(1, 20):
                gg.new_tensor(types.F32, n)
            gg.Graph(32)
        return context

    need = build(1 << 20).used_mem()
    assert build(need).used_mem() == need
    with pytest.raises(gg.OutOfArena):
        build(need - 1)


def test_reset_begins_anew() -> None:
    with gg.Context(4096) as context:
        first = gg.new_tensor(types.F32, 4).set(5.0)
        offset = first.offset
        context.reset()
        assert context.used_mem() == 0 and list(context.objects()) == []
        second = gg.new_tensor(types.F32, 4)
        assert second.offset == offset and second.numpy().sum() == 0
        second.set(1.0)
    assert first.numpy().ravel().tolist() == [5.0] * 4  # the former block, which lives as long as its tensors


def test_a_graph_from_before_a_reset_still_computes() -> None:
    with gg.Context(1 << 16) as context:
        x = gg.new_tensor(types.F32, 4).set(1.0)
        y = gg.mul(x, x)
        graph = gg.build(y, 8)
        context.reset()
        gg.new_tensor(types.I64, 4000).set(0x4141414141414141)  # would be addresses, were the old records read here
    x.set(3.0)
    graph.compute(1)
    assert y.numpy().ravel().tolist() == [9.0] * 4


def test_tensors_from_before_a_reset_of_given_memory_are_refused() -> None:
    with gg.Context(1 << 16, aligned_bytes(1 << 16)) as context:
        x = gg.new_tensor(types.F32, 4).set(1.0)
        graph = gg.build(gg.mul(x, x), 8)
        context.reset()
        gg.new_tensor(types.I64, 4000).set(0x4141414141414141)
    for use in (x.numpy, lambda: x.name, lambda: x.set(2.0), lambda: graph.compute(1)):
        with pytest.raises(RuntimeError, match="from before the reset"):
            use()


def test_reset_clears_given_memory() -> None:
    memory = aligned_bytes(4096)
    context = gg.Context(4096, memory)
    context.new_tensor(types.F32, 4).set(5.0)
    context.reset()
    assert not memory.any()


def test_nesting_and_reuse() -> None:
    with gg.Context(4096) as outer:
        with gg.Context(4096) as inner:
            assert current("x") is inner
            a = gg.new_tensor(types.F32, 1)
            with outer:
                b = gg.new_tensor(types.F32, 1)
            c = gg.new_tensor(types.F32, 1)
        d = gg.new_tensor(types.F32, 1)
    assert [t.context for t in (a, b, c, d)] == [inner, outer, inner, outer]


def test_no_context_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"new_tensor: a context must be open, got none; build inside"):
        gg.new_tensor(types.F32, 1)
    with pytest.raises(RuntimeError, match="Graph: a context must be open"):
        gg.Graph()


def test_context_is_left_after_an_error() -> None:
    with pytest.raises(KeyError), gg.Context(64):
        raise KeyError
    with pytest.raises(RuntimeError):
        current("x")


def test_threads_have_their_own_contexts() -> None:
    found: dict[int, object] = {}
    barrier = threading.Barrier(2)

    def work(i: int) -> None:
        try:
            current("thread")
        except RuntimeError as error:
            found[10 + i] = str(error)
        with gg.Context(4096) as context:
            barrier.wait()
            found[i] = gg.new_tensor(types.F32, 1).context is context
            barrier.wait()

    with gg.Context(4096):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert found[0] is True and found[1] is True
    assert str(found[10]).startswith("thread: a context must be open") and found[11] == found[10]


def test_s106_no_numba_at_import() -> None:
    code = (
        "import sys, ggjit, ggjit.ops, ggjit.alloc, ggjit.backend, ggjit.backends.cpu\n"
        "with ggjit.Context(1 << 18):\n    ggjit.build(ggjit.new_tensor(ggjit.F32, 2).set(1.0))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('numba', 'llvmlite')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gg.Context("a"), "Context: mem_size must be a whole number of bytes, got 'a'"),
        (lambda: gg.Context(2.5), "Context: mem_size must be a whole number of bytes, got 2.5"),
        (lambda: gg.Context(True), "Context: mem_size must be a whole number of bytes, got True"),
        (lambda: gg.Context(100, "a"), "Context: mem_buffer must be bytes without gaps, got str"),
        (lambda: gg.Context(8, np.zeros(16, np.uint8)[::2]), "Context: mem_buffer must be bytes without gaps, got"),
    ],
)
def test_sizes_and_memory_of_the_wrong_kind(call, text) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(text)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="Context: mem_size must not be negative, got -1"):
        gg.Context(-1)
    for size in (1 << 60, 1 << 63, 1 << 70):
        with pytest.raises(MemoryError, match=f"memory: {size} bytes must be available"):
            gg.Context(size)
    with gg.Context(1 << 12):
        for size in (-1, 1 << 40):
            with pytest.raises(ValueError, match=f"Graph: size must be 0 to 536870913, got {size}"):
                gg.Graph(size)
