"""The cache of compiled kernels: what keys depend on, and the folder on disk."""

from __future__ import annotations

import enum
import importlib
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
from test_jit import ROOT, run

from ggjit import kernel_cache, parallel_compile
from ggjit.jit import jitted, words
from ggjit.ops.lib import memory
from ggjit.threadpool import get_pool

# --- keys -------------------------------------------------------------------------------------------------------------


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
    keys = {
        key_of(constant, K=k)
        for k in (1, 2, 1.0, True, "1", (1, 2), (1, 3), np.float32(1), np.float32(2), np.arange(2), np.arange(3))
    }
    assert len(keys) == 11
    assert key_of("def f(x):\n return np.sqrt(x) + math.pi", np=np, math=math) == key_of(
        "def f(x):\n return np.sqrt(x) + math.pi", np=np, math=math
    )


def test_keys_change_with_members_fields_and_what_a_module_computed(tmp_path, monkeypatch):
    source = "def f(x):\n return x + K.RED"
    colors = [enum.IntEnum("K", {"RED": k}) for k in (1, 2)]
    assert key_of(source, K=colors[0]) != key_of(source, K=colors[1])
    assert key_of("def f(x):\n return x + K", K=colors[0].RED) != key_of("def f(x):\n return x + K", K=colors[1].RED)
    pairs = [namedtuple("K", names) for names in ("a b", "b a")]
    assert key_of("def f(x):\n return K(x, 1).a", K=pairs[0]) != key_of("def f(x):\n return K(x, 1).a", K=pairs[1])
    (tmp_path / "settings_of_mine.py").write_text("N = 1\nimport settings_of_mine as me")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("settings_of_mine")
    source = "def f(x):\n return x + module.N + module.me.N + module.append"
    base = key_of(source, module=module)
    module.N = 2
    assert key_of(source, module=module) != base
    module.append = object()  # a name of something else: no error of the key's
    key_of(source, module=module)


def test_a_source_that_changed_while_the_process_lives_has_a_key_of_its_own(tmp_path, monkeypatch):
    file = tmp_path / "vec.py"
    file.write_text("x = 1")
    before = kernel_cache.file_hash.__wrapped__
    monkeypatch.setattr(kernel_cache, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernel_cache, "_began", time.time() - 100)
    os.utime(file, (1, 1))
    known = before(str(file))
    assert known == before(str(file))
    os.utime(file)
    assert before(str(file)) != known, "what runs may be the code of an older file"
    os.utime(file, (time.time() + 1e6,) * 2)
    assert before(str(file)) == known, "a clock that is wrong"


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
    monkeypatch.setattr(kernel_cache, "_version", lambda package: "9.9")
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
        shutil.copytree(
            ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.gguf")
        )
    use = "memory.store_i64(dst, 0, helper(1))"
    (tmp_path / "ops/fam_a.py").write_text(FAMILY.format(use_other="", constant=1, body=use))
    (tmp_path / "ops/fam_b.py").write_text(FAMILY.format(use_other="", constant=2, body="dst[0] = helper(1)"))
    (tmp_path / "ops/beside.py").write_text(
        "from ggjit.jit import jitted\nLIMIT = 3\n\n@jitted\ndef scaled(x):\n    return 2 * x\n"
    )
    other = "from ggjit.ops import beside"
    (tmp_path / "ops/fam_c.py").write_text(
        FAMILY.format(use_other=other, constant=3, body="dst[0] = beside.scaled(helper(1))")
    )
    vec = 'vec = lazy_module("ggjit.ops.lib.vec")'
    (tmp_path / "ops/fam_d.py").write_text(
        FAMILY.format(use_other=vec, constant=4, body="vec.store(dst, 0, vec.zero())")
    )
    return tmp_path


KEYS = """
import sys
import threading
from ggjit.ops import fam_a, fam_b, fam_c, fam_d
print(*(m.family_kernel.key for m in (fam_a, fam_b, fam_c, fam_d)), "numba" in sys.modules)
"""


def test_an_edit_recompiles_what_it_touches_and_no_more(tree):
    (tree / "ops/__init__.py").write_text("")

    def keys():
        out = subprocess.run(
            [sys.executable, "-B", "-c", KEYS], cwd=tree, check=True, capture_output=True, text=True, timeout=120
        ).stdout.split()
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


# --- the folder -------------------------------------------------------------------------------------------------------

RUN = f"""
import sys
import threading
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
    both = [
        subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [p.communicate(timeout=300)[0].split() for p in both] == [["True", "True"]] * 2
    assert sorted(f.suffix for f in cache.iterdir()) == [".cpu"] + [".o"] * 4, "no temporary file is left"
    files = sorted(cache.glob("*.o"))
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


PRODUCTS = """
import sys
import numpy as np
import ggjit as gg
with gg.Context(1 << 22):
    x = gg.from_numpy(np.ones((1, 256), np.float32))
    w = [gg.from_numpy(np.ones((32, 256), np.float32), t) for t in (gg.types.F16, gg.types.Q4_0)]
    graph = gg.Graph(8)
    for t in w:
        graph.build_forward_expand(gg.mul_mat(t, x))
    graph.compute(1)
print("numba" in sys.modules, "llvmlite" in sys.modules)
"""


def test_a_warm_process_imports_neither_numba_nor_llvm(tmp_path):
    """Kernels of products are made of emitted tiles; their keys are found without a look at what emits them."""
    assert run(PRODUCTS, tmp_path) == ["True", "True"]
    assert run(PRODUCTS, tmp_path) == ["False", "False"]


def test_a_home_that_cannot_be_written(tmp_path):
    """The cache goes to a private temporary folder, and a second process finds it."""
    blocked, temporary = tmp_path / "file", tmp_path / "tmp"
    blocked.write_text("")
    temporary.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("GGJIT_CPU", "XDG_CACHE_HOME", "GGJIT_CACHE_DIR")}
    env |= {"HOME": str(blocked), "TMPDIR": str(temporary)}
    for numba in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", RUN], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300
        )
        assert done.stdout.split() == ["True", numba]
    (place,) = temporary.iterdir()
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty cache folder for this process."""
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache._folders.cache_clear()
    yield tmp_path / "cache"
    kernel_cache._folders.cache_clear()


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
from ggjit.threadpool import get_pool
def make(k):
    @jit.words
    def f(x):
        return x * k
    return f
get_pool(3)  # its workers sleep while processes are forked
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
os.sched_getaffinity = lambda pid: range(3)
jit.compile_all(made)
print(len(children), len(stored) < 20, [f(3) for f in made] == [3 * k for k in range(20)])
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_kernels_compile_in_several_processes(tmp_path):
    assert run(PARALLEL.format(broken=False), tmp_path / "good") == ["2", "True", "True"]
    assert run(PARALLEL.format(broken=True), tmp_path / "bad") == ["2", "False", "True"], "the parent does the rest"


REAPED = (
    """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped as they end
"""
    + PARALLEL
)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_children_that_nobody_can_wait_for(tmp_path):
    assert run(REAPED.format(broken=False), tmp_path) == ["2", "True", "True"]


FORKED = """
import os, sys, threading
from ggjit import jit
@jit.words
def f(x):
    return x * 7
if sys.argv[1:] == ["store"]:
    f.address()
    sys.exit()
held = threading.Event()
def hold():
    with jit._lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(f(6))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path):
    run(FORKED.replace("sys.argv[1:]", "['store']"), tmp_path)
    assert run(FORKED, tmp_path) == ["42"]


STREAMING = """
from ggjit import jit
@jit.jitted
def helper(x):
    return x + 1
@jit.kernel(streams=True)
def stream(dst, dst_ne, dst_nb, op_params, work, ith, nth):
    for i in range(dst_ne[0]):
        dst[i] = helper(dst[i])
stream.address()
"""


@pytest.mark.full
def test_variables_for_numba_do_not_change_what_is_kept(tmp_path):
    kept = []
    for name in ("", "NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO"):
        run(STREAMING, tmp_path / (name or "none"), **({name: "1"} if name else {}))
        kept.append({f.name: f.read_bytes() for f in (tmp_path / (name or "none")).iterdir() if f.suffix == ".o"})
    assert len(kept[0]) == 1 and kept[1] == kept[0] == kept[2]


def test_a_process_with_threads_of_others_does_not_fork(monkeypatch):
    threads = [threading.current_thread()]
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(parallel_compile.threading, "enumerate", lambda: threads)
    if sys.platform.startswith("linux"):
        assert [parallel_compile.processes(n) for n in (0, 1, 5, 500)] == [1, 1, 5, 16]
        threads += get_pool(2)._threads
        assert parallel_compile.processes(500) == 16
    threads.append(threading.Thread())
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
    def find():
        return kernel_cache._folders.__wrapped__()[1]

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
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(temporary))
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
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(blocked))
    assert find() is None

    def gettempdir():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", gettempdir)
    assert find() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GGJIT_CACHE_DIR", "here")
    assert find() == tmp_path / "here", "also where the process goes later"


def test_a_folder_that_somebody_removed(folder):
    kernel_cache.store("k1", b"code")
    shutil.rmtree(folder)
    kernel_cache.store("k2", b"code")
    kernel_cache.trim()
    assert kernel_cache.load("k1") is None


def test_kernels_compile_without_any_folder(monkeypatch):
    monkeypatch.setattr(kernel_cache, "folder", lambda: None)
    monkeypatch.setattr(kernel_cache, "_readable", list)
    kernel_cache.trim()

    @words
    def lonely(x):
        return x * 12345

    assert lonely(2) == 24690
