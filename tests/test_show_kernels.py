"""`gg.show.asm` and `gg.bench`: loops are found, tables and errors say what was asked for. No times are judged."""

from __future__ import annotations

import importlib.util

import pytest

import ggjit as gg
from ggjit import bench_ops
from ggjit.bench_shapes import Shape, shapes
from ggjit.cpu import cpu_level
from ggjit.limits import Meter, read_kernel
from ggjit.show.machine_code import loops_of

NESTED = """
	.globl	f
f:
	testq	%rax, %rax
	je	.LBB0_9
.LBB0_1:
	movq	%rdi, %rsi
	.p2align	4
.LBB0_2:
	vmovups	(%rsi), %zmm0
	vfmadd231ps	64(%rsi), %zmm0, %zmm1
	addq	$128, %rsi
	cmpq	%rsi, %rdx
	jne	.LBB0_2
	cmpq	%rcx, %rdi
	jb	.LBB0_7
.LBB0_3:
	incq	%rdi
	jne	.LBB0_1
.LBB0_9:
	xorl	%eax, %eax
	ret
.LBB0_7:
	movb	$1, (%rdi)
	jmp	.LBB0_3
.LBB0_8:
	decq	%rax
	jne	.LBB0_8
	jmp	.LBB0_9
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Turns of no length on a small buffer."""
    turn = Meter.turn
    monkeypatch.setattr(Meter, "turn", lambda self, kind, seconds=0.0: turn(self, kind, 0.0))
    monkeypatch.setattr("ggjit.limits._buffer_nbytes", lambda: 1 << 20)
    monkeypatch.setattr(bench_ops, "turn", lambda work, seconds: (work(), 1e-3)[1])


def test_innermost_loops_vector_arithmetic_first():
    hot, other = loops_of(NESTED)
    assert hot.lines[0] == ".LBB0_2:" and hot.lines[-1].split() == ["jne", ".LBB0_2"] and len(hot.lines) == 6
    assert (hot.depth, hot.width, hot.n_vector, hot.n_memory) == (2, 512, 1, 2)
    assert "5 instructions, 1 of them vector arithmetic of 512 bits, 2 with memory" in hot.text
    assert other.lines[0] == ".LBB0_8:" and (other.depth, other.width) == (1, 0)
    assert loops_of("") == [] and loops_of("f:\n\tret\n") == []


def test_arithmetic_on_one_lane_is_no_vector():
    scalar = NESTED.replace("vfmadd231ps\t64(%rsi), %zmm0, %zmm1", "vfmadd231ss\t(%rsi), %xmm0, %xmm1").replace(
        "vmovups\t(%rsi), %zmm0", "vmovss\t(%rsi), %xmm0"
    )
    assert [(loop.n_vector, loop.width) for loop in loops_of(scalar)] == [(0, 0)] * 2
    dot = NESTED.replace("vfmadd231ps\t64(%rsi), %zmm0, %zmm1", "vpdpbusd\t(%rsi), %zmm0, %zmm1")
    assert loops_of(dot)[0].n_vector == 1


def test_cold_blocks_belong_to_their_loop():
    without_inner = NESTED.replace("\tjne\t.LBB0_2\n", "")
    loop = loops_of(without_inner)[0]
    assert loop.n_vector == 1 and any(".LBB0_7:" in line for line in loop.lines) and "ret" not in " ".join(loop.lines)


@pytest.mark.skipif(cpu_level() == "neon", reason="reads x86 assembly")
def test_source_stands_beside_hot_loops():
    (code,) = gg.show.asm(read_kernel)
    width = {"avx512": 512, "avx2": 256, "sse2": 128}[cpu_level()]
    assert code.loops[0].width == width and code.loops[0].n_memory >= 512 * 8 // width
    assert code.source.startswith("@kernel\ndef read_kernel(")
    shown = gg.show.asm(read_kernel)._repr_html_()
    assert "def read_kernel(" in shown and code.loops[0].lines[0] in shown and "<details>" in shown
    assert code.loops[0].lines[1] in str(code)


@pytest.mark.skipif(cpu_level() != "avx512", reason="looks for AVX-512 VNNI")
def test_kernels_of_ops_by_type_and_label():
    few, plain = gg.show.asm(gg.mul_mat, ["Q4_0", "F32"], "1 columns")
    assert few.kernel.name == "mul_mat_few" and any("vpdpbusd" in line for line in few.loops[0].lines)
    assert any("vfmadd" in line and "ps" in line for line in plain.loops[0].lines)
    assert "next_chunk" in few.helpers and "def next_chunk(" in few.helpers["next_chunk"]


def test_kernels_of_a_node_and_unknown_labels():
    with gg.Context(1 << 16):
        node = gg.sqr(gg.new_tensor(gg.F32, 8))
    (code,) = gg.show.asm(node)
    assert code.kernel is node.op.kernel_for(node)
    with pytest.raises(ValueError, match="label must be a part of one of these: 256 x 1024, 1 columns; "):
        gg.show.asm("mul_mat", "Q4_0", "1000 columns")
    with pytest.raises(ValueError, match="type must be one of"):
        gg.show.asm("mul_mat", "Q9_9")


def test_tables_of_types_sizes_and_functions():
    by_type = gg.bench("get_rows", ["q4_0"], threads=1, turns=1, small=True)
    assert [(r.op, r.type) for r in by_type.rows] == [("get_rows", "Q4_0")]
    sized = gg.bench(gg.add, [(64, 3), (7,)], threads=1, turns=1)
    assert [r.shape for r in sized.rows] == ["[64, 3]", "[7]"] and all(r.n_checked for r in sized.rows)
    product = gg.bench(gg.mul_mat, [(32, 64, 2)], type="Q8_0", threads=2, turns=2)
    assert (product.rows[0].shape, product.rows[0].threads) == ("32 x 64, 2 columns", 2)
    own = gg.bench("mine", {"a row": lambda t: gg.sqr(t("F32", 100))}, threads=1, turns=1)
    shape = next(s for s in shapes("sqr", small=True))
    known = gg.bench("sqr", [Shape(shape.name, "known", "F32", shape.build)], threads=1, turns=1)
    every = by_type + sized + product + own + known
    assert len(every.rows) == 6 and len(repr(every).splitlines()) == 7
    html = every._repr_html_()
    assert html.count("<tr>") == 7 and "a row" in html and "known" in html
    if importlib.util.find_spec("matplotlib") is not None:
        import matplotlib

        matplotlib.use("agg")
        assert len(every.plot().get_yticklabels()) == 6


def test_what_cannot_be_measured_is_said():
    with pytest.raises(ValueError, match=r"sizes alone must be enough for scale, got other arguments \(s\)"):
        gg.bench(gg.scale, [(4, 4)], turns=1)
    with pytest.raises(ValueError, match="rows, columns and tokens"):
        gg.bench("mul_mat", [(4, 4)], turns=1)
    with pytest.raises(ValueError, match="op must be a builder or its name"):
        gg.bench("multiply", [(4, 4)], turns=1)
    with pytest.raises(ValueError, match=r"op must be one of"):
        gg.bench("multiply")
    for call in (gg.bench, gg.show.asm):
        with pytest.raises(ValueError, match=r"op must be one of .*, got 'softmax'; closest: soft_max$"):
            call("softmax")
    with pytest.raises(TypeError, match=r"^show.asm: op must be a builder such as gg.add, or its name, got 5$"):
        gg.show.asm(5)
    with pytest.raises(TypeError, match=r"^show.asm: types must be names of types, got 5$"):
        gg.show.asm("sqr", 5)
    for given, text in (
        ({"op": 5}, "op must be a builder such as gg.add, or its name, got 5"),
        ({"op": "sqr", "shapes": 5}, "shapes must be types, sizes or functions by their labels, got 5"),
        ({"op": "sqr", "shapes": [5]}, "a shape must be a type, sizes or a Shape, got 5"),
        ({"op": "sqr", "threads": 2.5}, "threads must be a whole number, got 2.5"),
    ):
        with pytest.raises(TypeError) as raised:
            gg.bench(**given)
        assert str(raised.value) == f"bench: {text}"
    with pytest.raises(ValueError, match=r"^bench: turns must be positive, got 0$"):
        gg.bench("sqr", turns=0)


def test_an_op_of_one_s_own_by_its_sizes():
    def twice(a):  # no annotations, as in a notebook
        return gg.add(a, a)

    (row,) = gg.bench(twice, [(64, 3)], turns=1, threads=1).rows
    assert (row.op, row.shape) == ("twice", "[64, 3]")
