"""mul_mat_id beyond the cases of the op: panels, batches, routing, errors."""

import numpy as np
import pytest

import ggjit as gg
from ggjit import ops, types
from ggjit.backend import alloc_ctx_tensors
from ggjit.backends.cpu import PANEL
from ggjit.context import Context
from ggjit.graph import Graph
from ggjit.lower import lower
from ggjit.ops.lib import panel_kernels


@pytest.fixture(autouse=True)
def context():
    with Context(32 << 20) as ctx:
        yield ctx


def leaf(name, *ne, seed=0):
    values = np.random.default_rng(seed).uniform(-1, 1, ne[::-1]).astype(np.float32)
    return gg.new_tensor(types.by_name(name), *ne).set(values)


def numbers(n_used, n_tokens, high, seed=0):
    return gg.from_numpy(np.random.default_rng(seed).integers(0, high, (n_tokens, n_used)).astype(np.int32))


def compute(node, n_threads=2):
    gg.build(node).compute(n_threads)
    return node.numpy().copy()


@pytest.mark.parametrize(
    "name", ["F32", "Q4_0", *(pytest.param(n, marks=pytest.mark.full) for n in ("F16", "BF16", "Q6_K"))]
)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_panel_buffer(name, n_tokens):
    """Weights packed at load give the bits of weights packed on the way."""
    rows, b, ids = leaf(name, 256, 37, 4), leaf("F32", 256, 1, n_tokens, seed=1), numbers(2, n_tokens, 4)
    want = compute(ops.mul_mat_id(rows, b, ids))
    with Context(1 << 20, no_alloc=True) as weights:
        packed = gg.new_tensor(rows.type, *rows.ne)
    alloc_ctx_tensors(weights, PANEL)
    packed.buffer.set_tensor(packed, rows.bytes())
    got = compute(ops.mul_mat_id(packed, b, ids))
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0"])
def test_bits_do_not_depend_on_the_batch(name):
    """One token alone, in a batch, and as a product of mul_mat: the same bits."""
    weights, b, ids = leaf(name, 96, 20, 3), leaf("F32", 96, 2, 41, seed=1), numbers(2, 41, 3)
    ids.numpy()[0, 0, 2:] = 1  # many columns for one expert
    whole = compute(ops.mul_mat_id(weights, b, ids), 3)
    for t in (0, 7, 40):
        one_b = ops.cont(ops.view_3d(b, 96, 2, 1, b.nb[1], b.nb[2], t * b.nb[2]))
        one_ids = ops.view_2d(ids, 2, 1, ids.nb[1], t * ids.nb[1])
        alone = compute(ops.mul_mat_id(weights, one_b, one_ids), 1)
        assert np.array_equal(alone[0, 0].view(np.uint32), whole[0, t].view(np.uint32))
        for u in range(2):
            expert = int(ids.numpy()[0, 0, t, u])
            matrix = ops.view_2d(weights, 96, 20, weights.nb[1], expert * weights.nb[2])
            column = ops.view_2d(b, 96, 1, b.nb[1], t * b.nb[2] + u * b.nb[1])
            assert np.array_equal(compute(ops.mul_mat(matrix, column)).reshape(-1), whole[0, t, u])


def test_route_and_activations_are_shared():
    """Two products with the same experts sort and gather once."""
    b, ids = leaf("F32", 64, 1, 9), numbers(2, 9, 4)
    gate, up = (ops.mul_mat_id(leaf("Q4_0", 64, 16, 4, seed=s), b, ids) for s in (1, 2))
    graph = Graph(16).build_forward_expand(ops.add(gate, up))
    names = [s.kernel.name for s in lower(graph, 2).steps]
    assert names.count("route_pairs") == names.count("gather_pairs") == 1


@pytest.mark.parametrize("n_threads", [2, 4, 8])
@pytest.mark.parametrize(
    "columns", [[64] * 16, [1024], [512, 512], [300, 5, 1, 900, 2], [4096 // (e + 2) for e in range(64)]], ids=str
)
def test_threads_end_together_whatever_the_routing(columns, n_threads):
    """A free thread takes the next chunk of units; a unit costs its expert's columns and decoding the panel."""
    units = np.tile(np.array(columns) + 8, 44)  # experts within a panel, panel by panel
    busy, start = [0] * n_threads, 0
    while start < len(units):
        end = start + panel_kernels.chunk_size(len(units) - start, 1, n_threads)
        busy[busy.index(min(busy))] += int(units[start:end].sum())
        start = end
    assert max(busy) <= 1.1 * units.sum() / n_threads


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_number_out_of_range(n_tokens, wrong):
    values = np.zeros((n_tokens, 2), np.int32)
    values[-1, 1] = wrong
    node = ops.mul_mat_id(leaf("F32", 32, 8, 4), leaf("F32", 32, 1, n_tokens), gg.from_numpy(values, name="experts"))
    with pytest.raises(IndexError, match=rf"mul_mat_id: .*'experts'.* got {wrong} at position {2 * n_tokens - 1}"):
        compute(node)


def test_checks():
    a, b, ids = leaf("F32", 32, 8, 4), leaf("F32", 32, 2, 3), numbers(2, 3, 4)
    with pytest.raises(ValueError, match=r"mul_mat_id: b\.ne\[1\] must divide ids\.ne\[0\]"):
        ops.mul_mat_id(a, b, numbers(3, 3, 4))
    with pytest.raises(ValueError, match=r"mul_mat_id: ids\.ne\[1\] must equal b\.ne\[2\]"):
        ops.mul_mat_id(a, b, numbers(2, 4, 4))
    with pytest.raises(TypeError, match="mul_mat_id: ids must be I32, got F32"):
        ops.mul_mat_id(a, b, leaf("F32", 2, 3))
    with pytest.raises(ValueError, match="mul_mat_id: src0 must not be transposed"):
        ops.mul_mat_id(ops.transpose(leaf("F32", 8, 32, 4)), b, ids)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(
    "experts", [[2, 5, 2], [5, 4, 0, 8, 7, 8], [1, 2, 3, 7], [7, 6], [0, 1, 2], [3, 38, 34, 31, 13]]
)
def test_used_experts_whose_numbers_are_places_of_others(experts, n_threads):
    """Few of many experts are used: the table of their pairs overlaps that of all experts."""
    a, b = leaf("F32", 32, 5, 40), leaf("F32", 32, 1, len(experts), seed=1)
    got = compute(ops.mul_mat_id(a, b, gg.from_numpy(np.int32(experts)[:, None])), n_threads)
    want = np.einsum("tmk,tk->tm", a.numpy()[0][experts].astype(np.float64), b.numpy()[0, :, 0])
    assert np.allclose(got[0, :, 0], want, rtol=0, atol=1e-5)
