"""`bench ops` and the comparison with ggml: they run, say what they measured, and notice wrong results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ggjit import bench_ops, cli, ops
from ggjit.bench_shapes import Shape, shapes
from ggjit.context import Context
from ggjit.limits import Meter
from ggjit.op import by_name

SMALL = 1 << 20


@pytest.fixture(scope="module")
def meter():
    return Meter(1, SMALL)


@pytest.fixture
def quick(monkeypatch):
    """Turns of no length on a small buffer."""
    turn = Meter.turn
    monkeypatch.setattr(Meter, "turn", lambda self, kind, seconds=0.0: turn(self, kind, 0.0))
    monkeypatch.setattr("ggjit.limits._buffer_nbytes", lambda: SMALL)
    monkeypatch.setattr(bench_ops, "turn", lambda work, seconds: (work(), 1e-3)[1])


def test_json_names_op_shape_rates_and_limit(quick, capsys):
    assert cli.main(["bench", "ops", "--op", "get_rows", "--type", "q4_0", "-t", "1", "--small", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["op"], row["type"], row["threads"], row["limit"]) == ("get_rows", "Q4_0", 1, "copy")
    n = 12 * 4096
    nbytes = n * 18 // 32 + 12 * 4 + 4 * n  # rows of blocks, ids, f32
    milliseconds = 1 / bench_ops.REPEATS
    assert row["milliseconds"] == pytest.approx(milliseconds)
    assert row["gb_per_second"] == pytest.approx(nbytes / milliseconds / 1e6)
    assert len(row["shares"]) == 5 and row["n_checked"] == n and row["error"] < 1e-7


@pytest.mark.full
def test_table_has_a_line_for_each_shape(quick, capsys):
    assert cli.main(["bench", "ops", "--op", "mul_mat", "--type", "Q8_0", "--small", "--turns", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 9 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert lines[2].startswith("| mul_mat | Q8_0 | 256 x 1024, 1 columns |")


def test_unknown_op_and_type_are_named(capsys):
    assert cli.main(["bench", "ops", "--op", "multiply"]) == 1
    assert "bench ops: op must be one of" in capsys.readouterr().err
    assert cli.main(["bench", "ops", "--type", "q3_7"]) == 1
    error = capsys.readouterr().err
    assert "bench ops: type must be one of" in error and "got 'q3_7'" in error
    assert cli.main(["bench", "ops", "--op", "norm", "--type", "Q8_0"]) == 1
    assert "there must be a shape" in capsys.readouterr().err


def test_wrong_result_is_an_error(quick, capsys, monkeypatch):
    monkeypatch.setattr(by_name("add"), "_reference", lambda node, a, b: a + b + 1e-3)
    assert cli.main(["bench", "ops", "--op", "add", "--type", "F32", "--small", "--turns", "1", "--json"]) == 1
    found = capsys.readouterr()
    assert found.err.count("must be within 1e-07 of its float64 reference") == 2
    assert json.loads(found.out) == []


def test_a_wrong_row_is_noticed_in_a_sample(monkeypatch):
    monkeypatch.setattr(bench_ops, "WHOLE_ELEMENTS", 100)
    bench = bench_ops.Bench(Shape("sqr", "", "F32", lambda t: ops.sqr(t("F32", 8, 60))))
    bench.run(1)
    assert bench.check()[1] == 8 * bench_ops.N_SAMPLES
    bench.node.numpy()[0, 0, 59, 7] += 1
    with pytest.raises(bench_ops.WrongResult, match="sqr"):
        bench.check()


@pytest.mark.parametrize("name", ["mul_mat", "get_rows", "cont", "rope_ext", "soft_max_ext", "argmax", "add_id"])
def test_samples_agree_with_the_whole(name, monkeypatch):
    """What a sample of the sources gives is the same sample of the whole reference."""
    shape = next(s for s in shapes(name, small=True) if s.is_default and s.type in ("F32", "Q4_0"))
    whole = bench_ops.Bench(shape)
    monkeypatch.setattr(bench_ops, "WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(bench_ops, "N_SAMPLES", 2)
    sampled = bench_ops.Bench(shape)
    n = sampled.want.size
    assert 0 < n < whole.want.size
    part = whole.want.take(sampled._indices, 3 - sampled._dim)
    np.testing.assert_allclose(part, sampled.want, rtol=1e-12, atol=1e-12)


def test_every_shape_builds():
    names = set()
    for shape in shapes(small=True):
        with Context(4 << 20, no_alloc=True):
            node = shape.build(_Headers())
        assert not node.is_empty and all(n >= 0 for n in node.op.traffic_for(node))
        if shape.name == "mul_mat":
            assert shape.label.startswith(f"{node.ne[0]} x {node.src[0].ne[0]}, {node.ne[1]} columns")
        names.add(node.op.name)
    assert len(names) > 80


class _Headers:
    """Makes leafs without data."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, type, *ne, **_):
        from ggjit import types
        from ggjit.tensor import new_tensor

        return new_tensor(types.by_name(type), *ne)

    ints = weights = __call__

    def array(self, values, type=None):
        from ggjit.tensor import from_numpy

        return from_numpy(values)


def test_traffic_counts_rows_that_move():
    with Context(1 << 20, no_alloc=True):
        t = _Headers()
        table, ids = t("Q8_0", 64, 1000), t("I32", 3)
        assert ops.get_rows(table, ids).op.traffic_for(ops.get_rows(table, ids)) == (3 * 68 + 12, 3 * 256)
        written = ops.set_rows(table, t("F32", 64, 3), ids)
        assert written.op.traffic_for(written) == (3 * 256 + 12, 3 * 68)
        copied = ops.cpy(t("F16", 8, 4), t("F32", 8, 4))
        assert copied.op.traffic_for(copied) == (64, 128)
        product = ops.mul(t("F32", 8, 4), t("F32", 8))
        assert product.op.traffic_for(product) == (128 + 32, 128)


def test_comparison_needs_the_libraries(tmp_path):
    from ggjit.dev.compare_ggml import Ggml

    with pytest.raises(FileNotFoundError, match="must hold libggml-base"):
        Ggml(tmp_path)


@pytest.mark.skipif("GGJIT_GGML" not in os.environ, reason="GGJIT_GGML names no folder of libggml-base and libggml-cpu")
@pytest.mark.parametrize("name", ["add", "cast", "mul_mat", "set_rows", "arange", "opt_step_sgd"])
def test_comparison_agrees(name, monkeypatch):
    from ggjit.dev import compare_ggml

    monkeypatch.setattr(compare_ggml, "turn", lambda work, seconds: (work(), 1e-3)[1])
    ggml = compare_ggml.Ggml(Path(os.environ["GGJIT_GGML"]))
    pair = compare_ggml.compare(next(s for s in shapes(name, small=True) if s.is_default), ggml, 1)
    assert pair.factor == 1
    assert pair.error is None or pair.error < 1e-5
