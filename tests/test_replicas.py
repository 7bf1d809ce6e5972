"""Steps that every thread computes for itself: in any order of threads the same bits, and only where it is safe."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from quant_blocks import blocks

import ggjit as gg
from ggjit.alloc import GraphAllocator
from ggjit.backend import host_buffer_type
from ggjit.barriers import BARRIER, COUNTER, EACH, RECORDS
from ggjit.graph import Graph
from ggjit.lower import lower
from ggjit.threadpool import get_pool

ENTRY = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
K, FF = 96, 160


def word(address):
    return ctypes.c_int64.from_address(address)


def run_in_order(rows, n_threads, order):
    """Run a program by one thread that plays all: `order` gives, for n rows between barriers, whose turn it is."""
    at = 0
    while at < len(rows):
        end = at + 1 + next(i for i, flags in enumerate(rows[at:, 3]) if flags & BARRIER)
        for _, _, task, flags in rows[at:end].tolist():
            if flags & COUNTER:
                word(word(task).value).value = 0
        done = [at] * n_threads
        for ith in order(n_threads, end - at):
            entry, header, task, flags = rows[done[ith]].tolist()
            done[ith] += 1
            header = word(header + 8 * ith).value if flags & RECORDS else header
            assert ENTRY(entry)(header, task, *((0, 1) if flags & EACH else (ith, n_threads))) == 0
        at = end


def orders():
    rng = np.random.default_rng(0)
    yield lambda n, rows: [ith for ith in range(n) for _ in range(rows)]
    yield lambda n, rows: [ith for ith in reversed(range(n)) for _ in range(rows)]
    for _ in range(4):
        yield lambda n, rows: rng.permutation([ith for ith in range(n) for _ in range(rows)]).tolist()


def weight(name, k, m):
    x = np.random.default_rng(k + m).standard_normal((m, k)).astype(np.float32) / 8
    if name == "F32":
        return gg.from_numpy(x)
    t = gg.new_tensor(gg.types.by_name(name), k, m)
    t.bytes()[:] = blocks(name, x).reshape(-1)
    return t


def block(x, w, norm, prec):
    """A token's feed-forward block twice: norm, gated unit, residual."""
    for _ in range(2):
        cur = gg.mul(gg.rms_norm(x, 1e-5), norm)
        h = gg.swiglu_split(gg.mul_mat(w["gate"], cur, prec=prec), gg.mul_mat(w["up"], cur))
        x = gg.add(gg.mul_mat(w["down"], h), x)
    return x


def planned(build, n_columns=1):
    """The graph of what `build` makes of a leaf {K, n_columns}, in planned memory, with what it stands for."""
    with gg.Context(8 << 20):
        x = gg.from_numpy(np.random.default_rng(1).standard_normal((n_columns, K)).astype(np.float32))
        norm = gg.from_numpy(np.linspace(0.5, 1.5, K, dtype=np.float32))
        kinds = {
            kind: {n: weight(kind, k, m) for n, k, m in (("gate", K, FF), ("up", K, FF), ("down", FF, K))}
            for kind in ("Q8_0", "F32")
        }
    with gg.Context(4 << 20, no_alloc=True):
        out = build(x, kinds, norm).set_output()
        graph = Graph(256)
        graph.build_forward_expand(out)
    GraphAllocator(host_buffer_type()).alloc_graph(graph)
    return graph, out


def bits(t):
    return t.numpy().copy().view(np.uint32)


CASES = {
    "quantized": lambda x, w, norm: block(x, w["Q8_0"], norm, 0),
    "two forms of activations": lambda x, w, norm: block(x, w["Q8_0"], norm, 10),
    "floats": lambda x, w, norm: block(x, w["F32"], norm, 0),
    "norms that are added": lambda x, w, norm: gg.add(
        gg.rms_norm(gg.mul_mat(w["Q8_0"]["down"], gg.mul_mat(w["Q8_0"]["up"], x)), 1e-5), x
    ),
    "a view of a norm": lambda x, w, norm: gg.mul_mat(
        w["Q8_0"]["gate"], gg.cont(gg.transpose(gg.reshape_2d(gg.rms_norm(x, 1e-5), 1, K)))
    ),
    "a norm in place": lambda x, w, norm: gg.mul_mat(
        w["Q8_0"]["gate"], gg.rms_norm(gg.scale(x, 3.0), 1e-5, inplace=True)
    ),
    "a norm over its source": lambda x, w, norm: gg.mul_mat(w["Q8_0"]["gate"], gg.rms_norm(gg.scale(x, 3.0), 1e-5)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_same_bits_whoever_comes_first(name, n_threads):
    graph, out = planned(CASES[name])
    lower(graph, 1).run()
    want = bits(out)
    executable = lower(graph, n_threads)
    for order in orders():
        out.bytes()[:] = 0xFF
        run_in_order(executable.rows, n_threads, order)
        assert np.array_equal(bits(out), want)
    for _ in range(20):
        out.bytes()[:] = 0xFF
        assert executable.run()
        assert np.array_equal(bits(out), want)
    assert executable.program.run(get_pool(n_threads), alone=True) is None
    assert np.array_equal(bits(out), want)


def flags_of(build, n_columns=1, n_threads=2):
    executable = lower(planned(build, n_columns)[0], n_threads)
    return {f"{s.kernel.name} {i}": int(row[3]) for i, (s, row) in enumerate(zip(executable.steps, executable.rows))}


def test_threads_of_a_token_meet_behind_products_alone():
    flags = flags_of(CASES["quantized"])
    assert {name: (f & BARRIER, f & EACH, f & RECORDS) for name, f in [*flags.items()][:5]} == {
        "norm_rows 0": (0, EACH, RECORDS),
        "act_q8 1": (0, EACH, RECORDS),
        "mul_mat_few 2": (BARRIER, 0, RECORDS),  # with the gate
        "act_q8 3": (0, EACH, RECORDS),
        "mul_mat_few 4": (BARRIER, 0, RECORDS),  # with the residual
    }


def test_more_rows_one_thread_and_shared_memory_have_no_copies():
    assert not any(f & EACH for f in flags_of(CASES["quantized"], n_columns=4).values())
    assert not any(f & (EACH | RECORDS) for f in flags_of(CASES["quantized"], n_threads=1).values())
    for name in ("a norm in place", "a norm over its source", "a view of a norm"):
        assert not any(f & EACH for step, f in flags_of(CASES[name]).items() if step.startswith("norm")), name


@pytest.mark.parametrize("n_threads", [2, 3])
def test_what_a_callback_changes_counts_for_all_threads(n_threads):
    def run(n):
        graph, out = planned(CASES["quantized"])
        (norm,) = [t for t in graph.nodes if t.op.name == "rms_norm"][:1]

        def double(node):
            if node is norm:
                node.set(2 * node.numpy())
            return True

        assert lower(graph, n).run(double)
        return bits(out)

    assert np.array_equal(run(n_threads), run(1))


def test_a_callback_sees_what_a_node_holds():
    graph, out = planned(CASES["quantized"])
    lower(graph, 1, fuse=False).run()
    want, seen = bits(out), []

    def look(node):
        seen.append(np.isfinite(node.numpy()).all())
        return True

    assert lower(graph, 3, fuse=False).run(look)
    assert all(seen) and np.array_equal(bits(out), want)
