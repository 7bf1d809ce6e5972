"""Fusion: every rule against the unfused graph and the float64 references; what must not be fused is not."""

import zlib

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops
from ggjit.alloc import GraphAllocator
from ggjit.backend import host_buffer_type
from ggjit.dev.cases import ARENA, CaseInputs, nmse, reference_of, values_of
from ggjit.graph import Graph
from ggjit.lower import lower
from ggjit.op import all_ops

QUICK = ("bias, Q4_0, 1 columns", "gated unit, Q4_0, 1 columns", "bias and residual")  # of the products' cases


def case_of(op, name):
    """A test parameter; most products are for the full run, since their kernels take long to compile."""
    slow = op.name == "mul_mat" and name not in QUICK
    return pytest.param(op, name, id=f"{op.name}-{name}", marks=[pytest.mark.full] if slow else [])


CASES = [case_of(op, name) for op in all_ops() for name in op.fused_cases]


class Planned:
    """A graph whose leafs have data and whose nodes lie in a planner's memory."""

    def __init__(self, build):
        self.leafs = gg.Context(ARENA)
        self.context = gg.Context(1 << 20, no_alloc=True)

        class Inputs(CaseInputs):
            def __call__(inputs, *args, **options):
                with self.leafs:
                    return super().__call__(*args, **options)

            def ints(inputs, *args, **options):
                with self.leafs:
                    return super().ints(*args, **options)

            def array(inputs, *args, **options):
                with self.leafs:
                    return super().array(*args, **options)

        with self.context:
            self.node = build(Inputs(1))
            self.graph = Graph(64).build_forward_expand(self.node)
        self.allocator = GraphAllocator(host_buffer_type())
        self.allocator.alloc_graph(self.graph)

    def run(self, n_threads, fuse=None):
        """Bytes of the result, and the chains that were fused."""
        executable = lower(self.graph, n_threads, fuse=fuse)
        executable.run()
        return self.node.numpy().copy(), executable.fused


@pytest.mark.parametrize(("op", "name"), CASES)
def test_fused_as_unfused(op, name):
    def build(t):
        t.rng = np.random.default_rng(zlib.crc32(f"{op.name}/{name}".encode()))
        return op.fused_cases[name](t)

    planned = Planned(build)
    known = {t: values_of(t) for t in planned.graph.leafs}
    kept = {t: t.numpy().copy() for t in planned.graph.leafs}
    want = reference_of(planned.node, dict(known))
    apart, none = planned.run(1, fuse=False)
    assert not none
    for n_threads in (1, 2, 3):
        for t, values in kept.items():  # a cache that the graph writes to begins as it was
            t.numpy()[...] = values
        together, fused = planned.run(n_threads)
        assert any(op is chain[0].op for chain in fused), "the rule must apply"
        assert np.array_equal(apart.view(np.uint8), together.view(np.uint8)), f"{n_threads} threads: other bits"
    assert nmse(want, together) <= max(op.nmse, planned.node.op.nmse)


@pytest.mark.parametrize("op", [op for op in all_ops() if op.fusions], ids=lambda op: op.name)
def test_every_rule_has_cases(op):
    assert op.fused_cases


def scaled(t):
    x = ops.scale(t("F32", 64, 3), 2.0)
    norm = ops.rms_norm(x, 1e-5)
    return x, norm, ops.mul(norm, t("F32", 64))


def test_what_is_seen_is_not_fused():
    planned = Planned(lambda t: scaled(t)[2])
    assert len(planned.run(1)[1]) == 1

    def marked(t):
        _, norm, mul = scaled(t)
        norm.set_output()
        return mul

    assert not Planned(marked).run(1)[1]

    def read_twice(t):
        _, norm, mul = scaled(t)
        return ops.add(mul, norm)

    planned = Planned(read_twice)
    assert not any(chain[0].op.name == "rms_norm" for chain in planned.run(1)[1])


def test_memory_of_the_users_own_is_always_written():
    with gg.Context(1 << 20):
        t = CaseInputs(0)
        _, norm, mul = scaled(t)
        graph = gg.build(mul)
        executable = lower(graph, 1)
        executable.run()
        assert not executable.fused
        assert np.isclose(np.square(norm.numpy()[0, 0, 0]).mean(), 1, atol=1e-3)


def test_a_source_that_is_overwritten_in_between_is_not_read_late():
    """x is changed in place after the norm and before the product."""

    def build(t):
        x, norm, _ = scaled(t)
        other = ops.scale(x, 3.0, inplace=True)
        build.extra = other
        return ops.mul(norm, t("F32", 64))

    planned = Planned(build)
    with planned.context:
        graph = Graph(64)
        graph.build_forward_expand(planned.node.src[0])
        graph.build_forward_expand(build.extra)
        graph.build_forward_expand(planned.node)
    GraphAllocator(host_buffer_type())
    planned.allocator.alloc_graph(graph)
    planned.graph = graph
    assert not any(chain[0].op.name == "rms_norm" for chain in planned.run(1)[1])


def test_the_switch(monkeypatch):
    planned = Planned(lambda t: scaled(t)[2])
    monkeypatch.setenv("GGJIT_FUSE", "abc")
    with pytest.raises(ValueError, match="GGJIT_FUSE: must be 0 or 1, got 'abc'"):
        planned.run(1)
    monkeypatch.setenv("GGJIT_FUSE", "0")
    assert not planned.run(1)[1]
    assert planned.run(1, fuse=True)[1]


def test_a_callback_sees_every_node():
    planned = Planned(lambda t: scaled(t)[2])
    executable = lower(planned.graph, 1)
    assert executable.fused
    seen = []

    def look(node):
        seen.append((node.op.name, float(np.abs(node.numpy()).sum())))
        return True

    executable.run(look)
    assert [name for name, _ in seen] == ["scale", "rms_norm", "mul"]
    assert all(total > 0 for _, total in seen)
