"""Compiling and the cache: what a kernel is called with, keys, files on disk, symbols, Numba's settings."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from test_memory import TAIL, arg

from ggjit import cpu, jit, kernel_cache, object_code, parallel_compile
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
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.split() if check else done


# --- kernels -------------------------------------------------------------------------------------------------------------------


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

    with pytest.raises(ValueError, match="bad: compiled code may call only memory and maths functions, got no_such_function"):
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


# --- keys ------------------------------------------------------------------------------------------------------------------------


def function_of(source, **scope):
    exec(source, scope)
    return scope["f"]


def key_of(source, **scope):
    return kernel_cache.kernel_key(function_of(source, **scope), "words")[0]


def test_keys_change_with_what_a_kernel_is_made_of():
    base = key_of("def f(x):\n return x + 1")
    assert base == key_of("# a comment\n\n\ndef f(x):\n  return x + 1"), "lines do not matter"
    assert base != key_of("def f(x):\n return x + 2")
    assert base != key_of("def f(x):\n return x - 1")
    assert base != kernel_cache.kernel_key(function_of("def f(x):\n return x + 1"), "kernel")[0]
    helper = "def f(x):\n return g(x)"
    one, two = (jitted(function_of(f"def f(x):\n return x + {k}")) for k in (1, 2))
    assert key_of(helper, g=one) != key_of(helper, g=two)
    assert key_of(helper, g=one) == key_of(helper, g=jitted(function_of("def f(x):\n return x + 1")))
    assert key_of(helper, g=one) != key_of(helper, g=jitted(inline="always")(one.function))
    constant = "def f(x):\n return x + K"
    keys = {key_of(constant, K=k) for k in (1, 2, 1.0, True, "1", (1, 2), (1, 3), np.float32(1), np.float32(2), np.arange(2), np.arange(3))}
    assert len(keys) == 11
    assert key_of("def f(x):\n return np.sqrt(x) + math.pi", np=np, math=math) == key_of("def f(x):\n return np.sqrt(x) + math.pi", np=np, math=math)


def test_keys_tell_factories_of_the_library_apart():
    source = "def f(x):\n return load(x, 0)"
    keys = [key_of(source, load=memory.loader(name)) for name in memory.SIZES]
    assert len(set(keys)) == len(keys)


def test_keys_change_with_cpu_and_compiler(monkeypatch):
    source = "def f(x):\n return x + 1"
    base = key_of(source)
    monkeypatch.setattr(kernel_cache.cpu, "target", lambda: ("other", "+some,-other"))
    kernel_cache._compiler.cache_clear()
    assert key_of(source) != base
    monkeypatch.undo()
    kernel_cache._compiler.cache_clear()
    monkeypatch.setattr(kernel_cache, "version", lambda name: "9.9")
    assert key_of(source) != base
    monkeypatch.undo()
    kernel_cache._compiler.cache_clear()
    assert key_of(source) == base


def test_a_kernel_may_not_capture_objects():
    with pytest.raises(TypeError, match="plain constants, got K = "):
        key_of("def f(x):\n return x + K", K=object())
    key_of("def f(x):\n return x.K", K=object())  # an attribute, not the global


FAMILY = """
from ggjit.jit import jitted, kernel, lazy_module
memory = lazy_module("ggjit.ops.lib.memory")
{use_other}

@jitted
def helper(x):
    return x + {constant}

@kernel
def family_kernel(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    {body}
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources with families of its own: a and d use ops/lib, b does not, c uses a module beside it."""
    for folder in ("ggjit", "ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
    use = "memory.store_i64(dst, 0, helper(1))"
    (tmp_path / "ops/fam_a.py").write_text(FAMILY.format(use_other="", constant=1, body=use))
    (tmp_path / "ops/fam_b.py").write_text(FAMILY.format(use_other="", constant=2, body="dst[0] = helper(1)"))
    (tmp_path / "ops/beside.py").write_text("from ggjit.jit import jitted\nLIMIT = 3\n\n@jitted\ndef scaled(x):\n    return 2 * x\n")
    other = "from ggjit.ops import beside"
    (tmp_path / "ops/fam_c.py").write_text(FAMILY.format(use_other=other, constant=3, body="dst[0] = beside.scaled(helper(1))"))
    vec = 'vec = lazy_module("ggjit.ops.lib.vec")'
    (tmp_path / "ops/fam_d.py").write_text(FAMILY.format(use_other=vec, constant=4, body="vec.store(dst, 0, vec.zero())"))
    return tmp_path


KEYS = """
import sys
from ggjit.ops import fam_a, fam_b, fam_c, fam_d
print(*(m.family_kernel.key for m in (fam_a, fam_b, fam_c, fam_d)), "numba" in sys.modules)
"""


def test_an_edit_recompiles_what_it_touches_and_no_more(tree):
    (tree / "ops/__init__.py").write_text("")

    def keys():
        out = subprocess.run([sys.executable, "-c", KEYS], cwd=tree, check=True, capture_output=True, text=True, timeout=120).stdout.split()
        assert out[4] == "False", "keys need no Numba"
        return out[:4]

    def edit(name, old, new):
        path = tree / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    def changed():
        nonlocal last
        now = keys()
        out = [a != b for a, b in zip(last, now, strict=True)]
        last = now
        return out

    last = keys()
    assert changed() == [False, False, False, False]
    edit("ops/fam_a.py", "x + 1", "x + 5")
    assert changed() == [True, False, False, False]
    edit("ops/fam_b.py", "from ggjit", "# a comment moves all lines\nfrom ggjit")
    assert changed() == [False, False, False, False]
    edit("ops/lib/memory.py", '"""Typed', '"""Typed and')
    assert changed() == [True, False, False, True]
    edit("ops/lib/elementary.py", '"""exp', '"""the exp')  # vec.py imports it
    assert changed() == [False, False, False, True]
    edit("ops/beside.py", "2 * x", "3 * x")
    assert changed() == [False, False, True, False]
    edit("ggjit/numba_entry.py", '"""From', '"""All from')
    assert changed() == [True, True, True, True]


# --- the folder ------------------------------------------------------------------------------------------------------------------

RUN = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import numpy as np
from ggjit.jit import compile_all, kernel, lazy_module
memory = lazy_module("ggjit.ops.lib.memory")

def make(k):
    @kernel
    def add(dst, dst_ne, dst_nb, op_params, work, ith, nth):
        for i in range(dst_ne[0]):
            memory.store_i64(dst, 8 * i, memory.load_i64(dst, 8 * i) + k)
    return add

kernels = [make(k) for k in range(1, 5)]
compile_all(kernels)
x = np.arange(10)
for k in kernels:
    k(x.view(np.uint8), (10, 1, 1, 1), (8, 80, 80, 80), np.zeros(16, np.int32), np.zeros(0, np.uint8), 0, 1)
print(np.array_equal(x, np.arange(10) + 10), "numba" in sys.modules)
"""


def test_two_cold_processes_a_warm_one_and_a_damaged_file(tmp_path):
    cache = tmp_path / "new" / "cache"
    env = {k: v for k, v in os.environ.items() if k != "GGJIT_CPU"} | {"GGJIT_CACHE_DIR": str(cache)}
    both = [subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=300)[0].split() for p in both] == [["True", "True"]] * 2
    files = sorted(cache.iterdir())
    assert [f.suffix for f in files] == [".o"] * 4, "no temporary file is left"
    assert run(RUN, cache) == ["True", "False"], "a warm process must not import Numba"
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(files[2].read_bytes()[:100])
    files[3].write_bytes(b"")
    assert run(RUN, cache) == ["True", "True"], "damaged files are compiled again"
    assert run(RUN, cache) == ["True", "False"]
    files[0].write_bytes(files[1].read_bytes())  # whole, but of another kernel
    assert run(RUN, cache) == ["True", "True"]


def test_a_home_that_cannot_be_written(tmp_path):
    """The cache goes to a private temporary folder, and a second process finds it."""
    blocked, temporary = tmp_path / "file", tmp_path / "tmp"
    blocked.write_text("")
    temporary.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("GGJIT_CPU", "XDG_CACHE_HOME", "GGJIT_CACHE_DIR")}
    env |= {"HOME": str(blocked), "TMPDIR": str(temporary)}
    for numba in ("True", "False"):
        done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
        assert done.stdout.split() == ["True", numba]
    (place,) = temporary.iterdir()
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty cache folder for this process."""
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache.folder.cache_clear()
    yield tmp_path / "cache"
    kernel_cache.folder.cache_clear()


def test_store_and_load(folder):
    assert kernel_cache.load("k1") is None
    kernel_cache.store("k1", b"code")
    assert kernel_cache.load("k1") == b"code"
    assert [f.name for f in folder.iterdir()] == ["k1.o"]
    (folder / "k2.o").write_bytes((folder / "k1.o").read_bytes())
    assert kernel_cache.load("k2") is None, "a file belongs to one key"


PARALLEL = """
import os, sys
from ggjit import jit, kernel_cache, parallel_compile
def make(k):
    @jit.words
    def f(x):
        return x * k
    return f
made = [make(k) for k in range(20)]
fork, store, children, stored = os.fork, kernel_cache.store, [], []
def count_fork():
    children.append(fork())
    return children[-1]
def count_store(key, code):
    stored.append(key)
    if not children or children[-1] == 0:
        if {broken}:
            raise OSError("this child fails")
    store(key, code)
os.fork, kernel_cache.store = count_fork, count_store
parallel_compile.processes = lambda n: 3
jit.compile_all(made)
print(len(children), len(stored) < 20, [f(3) for f in made] == [3 * k for k in range(20)])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_kernels_compile_in_several_processes(tmp_path):
    assert run(PARALLEL.format(broken=False), tmp_path / "good") == ["2", "True", "True"]
    assert run(PARALLEL.format(broken=True), tmp_path / "bad") == ["2", "False", "True"], "the parent does the rest"


def test_a_process_with_threads_does_not_fork(monkeypatch):
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(parallel_compile.threading, "active_count", lambda: 1)
    if sys.platform.startswith("linux"):
        assert [parallel_compile.processes(n) for n in (1, 5, 6, 30, 500)] == [1, 1, 2, 10, 16]
    monkeypatch.setattr(parallel_compile.threading, "active_count", lambda: 2)
    assert parallel_compile.processes(500) == 1


def test_the_files_used_longest_ago_go_first(folder):
    for i, name in enumerate("abcd"):
        kernel_cache.store(name, bytes(1000))
        os.utime(folder / f"{name}.o", (i, i))
    assert kernel_cache.load("a") == bytes(1000)  # used now
    size = (folder / "a.o").stat().st_size
    kernel_cache.trim(limit=2 * size)
    assert sorted(f.name for f in folder.iterdir()) == ["a.o", "d.o"]
    kernel_cache.trim(limit=2 * size)
    assert len(list(folder.iterdir())) == 2


def test_places_for_the_folder(monkeypatch, tmp_path):
    find = kernel_cache.folder.__wrapped__
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.delenv("GGJIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert find() == tmp_path / "xdg" / "ggjit"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert find() == tmp_path / "home" / ".cache" / "ggjit"
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(blocked / "x"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(temporary))
    place = find()
    assert place is not None
    assert place.parent == temporary
    if hasattr(os, "getuid"):
        place.chmod(0o777)  # others could put code there
        assert find() is None
        place.rmdir()
        place.symlink_to(tmp_path / "xdg")
        assert find() is None
        place.unlink()
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(blocked))
    assert find() is None


def test_kernels_compile_without_any_folder(monkeypatch):
    monkeypatch.setattr(kernel_cache, "folder", lambda: None)
    monkeypatch.setattr(kernel_cache, "_readable", lambda: iter(()))
    kernel_cache.trim()

    @words
    def lonely(x):
        return x * 12345

    assert lonely(2) == 24690


# --- processes and settings --------------------------------------------------------------------------------------------------------


def test_importing_needs_no_numba(tmp_path):
    names = "jit program threadpool shared_state ops.lib.memory ops.lib.vec ops.lib.elementary ops.lib.atomics".split()
    script = f"import sys\n{chr(10).join(f'import ggjit.{n}' for n in names)}\nprint('numba' in sys.modules, 'llvmlite.ir' in sys.modules)"
    assert run(script, tmp_path) == ["False", "False"]


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
    zmm = str(cpu.cpu_level() == "avx512")
    assert run(NUMBA_FIRST, tmp_path, **generic) == ["True", zmm, "True", "3"]
    assert run(NUMBA_FIRST, tmp_path, GGJIT_CPU="avx2") == ["True", "False", "True", "refused"]


def test_levels(monkeypatch):
    level = cpu.cpu_level.__wrapped__
    monkeypatch.setattr(cpu, "_host_level", lambda: "avx2")
    for asked, want in (("", "avx2"), ("sse2", "sse2"), ("AVX2", "avx2")):
        monkeypatch.setenv("GGJIT_CPU", asked)
        assert level() == want
    for asked, text in (("avx512", "this machine has avx2"), ("mmx", "must be one of sse2, avx2, avx512")):
        monkeypatch.setenv("GGJIT_CPU", asked)
        with pytest.raises(ValueError, match=text):
            level()


def test_features_of_levels(monkeypatch):
    features = ("avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "f16c", "fma")
    for have, want in ((features, "avx512"), (features[:1] + features[-2:], "avx2"), (features[:-1], "sse2"), (("sse2",), "sse2")):
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
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    loud = jit._Progress(2)
    loud.step()
    loud.step()
    loud.close()
    assert "compiling kernels: 2/2\n" in capsys.readouterr().err
