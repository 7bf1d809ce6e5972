"""Compiling and the cache: what a kernel is called with, keys, files on disk, symbols, Numba's settings."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from test_memory import TAIL, arg

from ggjit import cpu, jit, object_code
from ggjit.jit import compile_all, intrinsic, jitted, kernel, lazy_module, words
from ggjit.ops.lib import atomics, memory

ROOT = Path(__file__).parents[1]


def make_add(k):
    @kernel
    def add(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        for i1 in range(ith, dst_ne[1], nth):
            for i0 in range(dst_ne[0]):
                a = memory.load_f32(src0, i1 * src0_nb[1] + 4 * i0)
                b = memory.load_f32(src1, i1 % src1_ne[1] * src1_nb[1] + 4 * i0)
                memory.store_f32(dst, i1 * dst_nb[1] + 4 * i0, a + b + k)

    return add


def matrix(x):
    return x.view(np.uint8).reshape(-1), (x.shape[1], x.shape[0], 1, 1), (4, 4 * x.shape[1], x.nbytes, x.nbytes)


A, B = np.random.default_rng(0).random((3, 5), np.float32), np.random.default_rng(1).random((1, 5), np.float32)


def run(script, cache, check=True, **env):
    """A Python process with its own cache folder; returns its output."""
    env = {k: v for k, v in os.environ.items() if k != "GGJIT_CPU"} | {"GGJIT_CACHE_DIR": str(cache)} | env
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.split() if check else done


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_a_kernel_called_with_arrays():
    add, a, out = make_add(0), A.copy(), np.zeros_like(A)
    a.flags.writeable = False  # a source may be read-only: mapped files are
    assert add(*matrix(out), *matrix(a), *matrix(B), *TAIL) is None
    assert np.array_equal(out, A + B)
    part = np.zeros_like(A)
    add(*matrix(part), *matrix(a), *matrix(B), *TAIL[:2], 1, 2)  # thread 1 of 2 has row 1 only
    assert np.array_equal(part[1], (A + B)[1])
    assert not part[[0, 2]].any()


def test_wrong_arguments_are_named():
    add, out = make_add(0), np.zeros_like(A)
    good = [*matrix(out), *matrix(A), *matrix(B), *TAIL]

    def with_(i, value):
        return [*good[:i], value, *good[i + 1 :]]

    for args, error, text in (
        (good[:-1], TypeError, "takes 13 arguments, got 12"),
        (with_(3, A), TypeError, r"src0 must be a contiguous uint8 array .* got float32 \[3, 5\]"),
        (with_(6, good[0][::2]), TypeError, "src1 must be a contiguous"),
        (with_(3, b"abc"), TypeError, "got bytes"),
        (with_(9, np.zeros(16)), TypeError, "op_params must be at most 16 int32, got float64"),
        (with_(10, np.zeros(3)), TypeError, "work must be"),
    ):
        with pytest.raises(error, match=text):
            add(*args)
    good[0].flags.writeable = False
    with pytest.raises(ValueError, match="dst must be writable"):
        add(*good)


def test_a_status_is_an_index_error():
    @kernel
    def check(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, src1, src1_ne, src1_nb, op_params, work, ith, nth):
        for i in range(src1_ne[0]):
            if memory.load_i32(src1, 4 * i) >= 100:
                return (i << 4) | 2
        return 0

    x, indices = np.zeros(4, np.float32), np.array([1, 2, 100, 3], np.int32)
    with pytest.raises(IndexError, match="check: index out of range, got it in src1 at position 2"):
        check(*arg(x), *arg(x), *arg(indices), *TAIL)
    indices[2] = 99
    check(*arg(x), *arg(x), *arg(indices), *TAIL)


def test_an_exception_is_not_lost():
    @kernel
    def fails(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        if dst_ne[0] == 4:
            raise ValueError("on purpose")

    fails(*arg(np.zeros(3, np.uint8)), *TAIL)
    with pytest.raises(RuntimeError, match="status -1"):
        fails(*arg(np.zeros(4, np.uint8)), *TAIL)


def test_an_absent_source():
    @kernel
    def tell(dst, dst_ne, dst_nb, src0, src0_ne, src0_nb, op_params, work, ith, nth):
        memory.store_i64(dst, 0, memory.address(src0))
        memory.store_i64(dst, 8, src0_ne[0] + src0_ne[3] + src0_nb[0] + src0_nb[3])
        memory.store_i64(dst, 16, len(dst))
        memory.store_i64(dst, 24, op_params[15])
        memory.store_i64(dst, 32, len(work) + 1000 * ith + 10000 * nth)

    out = np.full(5, -1, np.int64)
    tell(*arg(out), None, None, None, np.arange(16, dtype=np.int32), np.zeros(64, np.uint8), 2, 3)
    assert list(out) == [0, 0, 40, 15, 64 + 2000 + 30000]


def test_signatures_are_checked():
    def short(dst, dst_ne, dst_nb, op_params, work, ith):
        pass

    def renamed(dst, dst_ne, dst_nb, a, a_ne, a_nb, op_params, work, ith, nth):
        pass

    for function in (short, renamed):
        with pytest.raises(TypeError, match="a kernel takes"):
            kernel(function)


def test_results_are_checked():
    @kernel
    def mixed(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        if dst_ne[0] > 3:
            return 1

    @kernel
    def real(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        return 1.5

    for k in (mixed, real):
        with pytest.raises(TypeError, match="must return None or an integer on every path"):
            k.address()


def test_words_are_plain_functions():
    @words
    def poly(a, b):
        return a * b + 1

    assert poly(3, -4) == -11
    assert poly.address() == poly.address() != 0
    assert poly.n_args == 2


def test_a_kernel_that_allocates_is_refused():
    @kernel
    def allocates(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        x = np.zeros(dst_ne[0])
        dst[0] = np.uint8(x.sum())

    with pytest.raises(Exception, match=r"(?i)allocat|nrt"):
        allocates.address()


def test_errors_of_compiling_name_the_kernel():
    @kernel
    def misspelled(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        memory.store_f32(dst, 0, nobody_knows_this)  # noqa: F821

    with pytest.raises(Exception, match="nobody_knows_this") as caught:
        misspelled.address()
    (note,) = caught.value.__notes__
    assert note.startswith("while kernel misspelled was compiled (") and "test_jit.py:" in note


def test_unknown_symbols_are_refused_and_maths_linked():
    @intrinsic
    def stranger(typingctx, x):
        from numba.core import cgutils
        from numba.core import types as numba_types

        def codegen(context, b, signature, args):
            function = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
            return b.call(cgutils.get_or_insert_function(b.module, function, "no_such_function"), args)

        return numba_types.int64(numba_types.int64), codegen

    @words
    def bad(x):
        return stranger(x)

    with pytest.raises(
        ValueError, match="bad: compiled code may call only memory and maths functions, got no_such_function"
    ):
        bad.address()

    @words
    def good(x):
        return int(1000 * math.pow(x, 0.3) + 1000 * math.sin(x))

    assert good(7) == int(1000 * math.pow(7, 0.3) + 1000 * math.sin(7))
    assert set(object_code.undefined_symbols(good.compile())) == {"pow", "sin"}


def test_undefined_symbols_of_a_mach_o_object():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = """target triple = "x86_64-apple-darwin"
    declare double @sin(double)
    declare i64 @other(i64)
    define i64 @entry(i64 %x) {
      %y = call i64 @other(i64 %x)
      %z = sitofp i64 %y to double
      %w = call double @sin(double %z)
      %v = fptosi double %w to i64
      ret i64 %v
    }"""
    machine = llvm.Target.from_triple("x86_64-apple-darwin").create_target_machine(codemodel="default")
    code = machine.emit_object(llvm.parse_assembly(text))
    assert sorted(object_code.undefined_symbols(code)) == ["other", "sin"]
    with pytest.raises(ValueError, match="ELF64 or Mach-O"):
        object_code.undefined_symbols(b"MZ")


def test_helpers_and_njit_work_from_python():
    @jitted
    def twice(x):
        return 2 * x

    @jitted(inline="always")
    def more(x):
        return twice(x) + 1

    @words
    def use(x):
        return more(x) + twice(x)

    assert use(5) == 21
    assert more(5) == 11
    assert twice.function(5) == 10
    out = np.zeros_like(A)
    i64 = [np.array(v, np.int64) if isinstance(v, tuple) else v for v in (*matrix(out), *matrix(A), *matrix(B))]
    make_add(0).njit(*i64, *TAIL)
    assert np.array_equal(out, A + B)


def test_a_lazy_module_loads_on_the_first_look(monkeypatch, tmp_path):
    (tmp_path / "looked_at.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = lazy_module("looked_at")
    assert "looked_at" not in sys.modules
    assert lazy.value == 7
    assert lazy_module("looked_at") is sys.modules.pop("looked_at")


def test_the_counter_must_be_announced():
    @kernel
    def forgot(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        atomics.fetch_add(work, 0, 1)

    with pytest.raises(TypeError, match="counter=True"):
        forgot.address()
    assert not make_add(0).uses_counter


def test_asm_is_of_the_kernel():
    text = make_add(0).asm()
    assert make_add(0).entry in text
    assert "ret" in text


def test_the_same_kernel_made_twice_is_linked_once():
    first, second, other = make_add(0), make_add(0), make_add(1)
    assert first.key == second.key != other.key
    one, two, three = compile_all([first, second, other])
    assert one == two != three


# --- processes and settings -------------------------------------------------------------------------------------------


def test_importing_needs_no_numba(tmp_path):
    names = ("jit", "program", "threadpool", "ops.lib.memory", "ops.lib.vec", "ops.lib.elementary", "ops.lib.atomics")
    lines = ["import sys", *(f"import ggjit.{name}" for name in names)]
    lines.append("print('numba' in sys.modules, 'llvmlite.ir' in sys.modules)")
    assert run("\n".join(lines), tmp_path) == ["False", "False"]


NUMBA_FIRST = """
import numba, numpy as np
@numba.njit
def first(x):
    return x + 1
first(1)
from ggjit.jit import kernel, jitted
from ggjit.ops.lib import vec
@kernel
def half(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    vec.store_f16(dst, 0, vec.load_f16(dst, 0) * 2)
@jitted
def helper(x):
    return x
x = np.arange(16, dtype=np.float16)
half(x.view(np.uint8), (16, 1, 1, 1), (2, 32, 32, 32), np.zeros(16, np.int32), np.zeros(0, np.uint8), 0, 1)
print(np.array_equal(x, np.arange(16) * 2), "zmm" in half.asm(), "vcvtph2ps" in half.asm())
try:
    print(helper(3))
except RuntimeError as error:
    print("refused" if "GGJIT_CPU" in str(error) else error)
"""


@pytest.mark.skipif(cpu.cpu_level() not in ("avx2", "avx512"), reason="needs AVX2")
def test_numba_imported_before_with_other_settings(tmp_path):
    """Our code does not depend on Numba's idea of the CPU."""
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    zmm = str(cpu.has("avx512f"))
    assert run(NUMBA_FIRST, tmp_path, **generic) == ["True", zmm, "True", "3"]
    assert run(NUMBA_FIRST, tmp_path, GGJIT_CPU="avx2") == ["True", "False", "True", "refused"]


def test_levels(monkeypatch):
    level = cpu.cpu_level.__wrapped__
    monkeypatch.setattr(cpu, "_host_level", lambda: "avx2")
    monkeypatch.setattr(cpu, "_host", lambda: ("haswell", ("avx2", "f16c", "fma")))
    for asked, want in (("", "avx2"), ("sse2", "sse2"), ("AVX2", "avx2")):
        monkeypatch.setenv("GGJIT_CPU", asked)
        assert level() == want
    for asked, text in (
        ("avx512", "this machine has avx2"), ("avxvnni", "this machine has avx2"),
        ("mmx", "must be one of sse2, avx2, avxvnni, avx512"),
    ):  # fmt: skip
        monkeypatch.setenv("GGJIT_CPU", asked)
        with pytest.raises(ValueError, match=text):
            level()


def test_avx_vnni_is_chosen_by_the_machine_or_asked_for(monkeypatch):
    level, target = cpu.cpu_level.__wrapped__, cpu.target.__wrapped__
    plain = ("avx2", "f16c", "fma")
    monkeypatch.setattr(cpu, "cpu_level", level)
    for host, have, asked, vnni in (
        ("avx2", (*plain, "avxvnni"), "", "+avxvnni"), ("avx2", (*plain, "avxvnni"), "avxvnni", "+avxvnni"),
        ("avx2", (*plain, "avxvnni"), "avx2", ""), ("avx512", (*plain, "avx512vnni"), "avxvnni", "+avx512vnni"),
        ("avx512", (*plain, "avx512vnni", "avxvnni"), "avxvnni", "+avxvnni"),
    ):  # fmt: skip
        monkeypatch.setattr(cpu, "_host_level", lambda host=host: host)
        monkeypatch.setattr(cpu, "_host", lambda have=have: ("some", have))
        monkeypatch.setenv("GGJIT_CPU", asked)
        features = target()[1].split(",")
        assert level() == "avx2" and (vnni in features if vnni else "vnni" not in target()[1])


def test_arm_features_are_those_of_all_cores(monkeypatch):
    text = "processor: 0\nFeatures : fp asimd asimddp i8mm bf16\nprocessor: 1\nFeatures : fp asimd asimddp asimdhp\n"
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: text)
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    assert cpu._arm_features() == {"dotprod"}


def test_features_of_levels(monkeypatch):
    features = ("avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "f16c", "fma")
    for have, want in (
        (features, "avx512"),
        (features[:1] + features[-2:], "avx2"),
        (features[:-1], "sse2"),
        (("sse2",), "sse2"),
    ):
        monkeypatch.setattr(cpu, "_host", lambda have=have: ("some", have))
        monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
        assert cpu._host_level.__wrapped__() == want
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert cpu._host_level.__wrapped__() == "neon"


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    quiet = jit._Progress(3)
    quiet.step()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(jit.progress, "bar_class", lambda: None)
    loud = jit._Progress(2)
    loud.step()
    loud.step()
    loud.close()
    assert "compiling kernels: 2/2\n" in capsys.readouterr().err


def test_a_progress_bar_starts_no_thread(monkeypatch):
    """Beside a thread that is no pool's worker kernels would not compile in several processes."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    before = threading.active_count()
    bar = jit._Progress(2)
    assert bar.bar is not None and threading.active_count() == before
    bar.close()


def test_what_is_wanted_soon_comes_with_what_is_asked_for():
    @words
    def one(x):
        return x + 1

    @words
    def two(x):
        return x + 2

    jit.soon(two)
    assert two._address == 0
    assert compile_all([one]) == [one.address()] and two._address != 0
    assert (one(1), two(1)) == (2, 3)
