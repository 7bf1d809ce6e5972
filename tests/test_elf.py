"""Object files in memory without LLVM: the same results as its linker gives, and only what is understood."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from ggjit import cpu, elf, kernel_cache, linking, object_code

pytestmark = pytest.mark.skipif(sys.platform != "linux" or cpu.cpu_level() == "neon", reason="other system")

MODULE = """target triple = "x86_64-unknown-linux-gnu"
@table = internal constant [4 x i64] [i64 3, i64 5, i64 {third}, i64 11], align 32
@pointers = internal constant [2 x i64 (i64)*] [i64 (i64)* @twice, i64 (i64)* @minus]
declare double @sin(double)
define internal i64 @twice(i64 %x) noinline optnone {{
  %y = mul i64 %x, 2
  ret i64 %y
}}
define internal i64 @minus(i64 %x) noinline optnone {{
  %y = sub i64 0, %x
  ret i64 %y
}}
define i64 @{entry}(i64 %i, i64 %j) {{
  %cell = getelementptr [4 x i64], [4 x i64]* @table, i64 0, i64 %i
  %value = load i64, i64* %cell
  %at = getelementptr [2 x i64 (i64)*], [2 x i64 (i64)*]* @pointers, i64 0, i64 %j
  %f = load i64 (i64)*, i64 (i64)** %at
  %a = call i64 %f(i64 %value)
  %b = sitofp i64 %value to double
  %c = call double @sin(double %b)
  %d = fmul double %c, 1.0e6
  %e = fptosi double %d to i64
  %g = add i64 %a, %e
  ret i64 %g
}}"""


def compiled(text: str, codemodel: str = "jitdefault", reloc: str = "static") -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        codemodel=codemodel, reloc=reloc, jit=True
    )
    return machine.emit_object(llvm.parse_assembly(text))


def expected(i: int, j: int, third: int) -> int:
    value = (3, 5, third, 11)[i]
    return (2 * value, -value)[j] + int(1e6 * math.sin(value))


@pytest.fixture
def pair():
    return {name: compiled(MODULE.format(entry=name, third=third)) for name, third in (("first", 7), ("second", 8))}


def loaded(objects: dict[str, bytes]) -> dict[str, elf.ElfObject]:
    elves = elf.loadable(objects)
    assert elves is not None
    return elves


def test_constants_functions_and_calls_find_each_other(pair):
    assert elf.loadable(pair) is not None
    ours, llvms = linking.link(pair), linking._link_by_llvm(pair)
    for addresses in (ours, llvms):
        for name, third in (("first", 7), ("second", 8)):
            call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(addresses[name])
            assert [call(i, j) for i in range(4) for j in range(2)] == [
                expected(i, j, third) for i in range(4) for j in range(2)
            ]


def test_code_can_be_executed_and_constants_only_be_read(pair):
    addresses = elf.load(loaded(pair), linking.c_address)
    with open("/proc/self/maps") as maps:
        pages = [(*(int(x, 16) for x in line.split()[0].split("-")), line.split()[1]) for line in maps]
    code = next(p for p in pages if p[0] <= addresses["first"] < p[1])
    assert code[0] <= addresses["second"] < code[1]
    behind = next(p for p in pages if p[0] == code[1])
    assert (code[2], behind[2]) == ("r-xp", "r--p")


def test_an_entry_must_be_there(pair):
    with pytest.raises(ValueError, match=r"objects must define their entries, got none for 'other'"):
        elf.load(loaded({"other": pair["first"]}), linking.c_address)


def test_what_is_not_understood_is_left_to_llvm(pair):
    writable = MODULE.format(entry="entry", third=1).replace("internal constant [4", "internal global [4")
    near = compiled(MODULE.format(entry="entry", third=1), codemodel="small", reloc="pic")
    others = [
        compiled(writable),
        near,
        b"\xcf\xfa\xed\xfe" + bytes(100),
        pair["first"][:18] + b"\xb7\0" + pair["first"][20:],
    ]
    assert all(elf.loadable({"first": pair["first"], "entry": code}) is None for code in others)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(linking.link({"entry": near})["entry"])
    assert call(2, 0) == expected(2, 0, 1)


def test_damaged_files_are_one_error(pair):
    whole = pair["first"]
    for end in range(20, len(whole), 7):
        try:
            found = object_code.undefined_symbols(whole[:end])
        except ValueError as error:
            assert "damaged symbol table" in str(error)
        else:
            assert set(found) <= {"sin"}


def test_no_memory_for_code_is_an_error(pair, monkeypatch):
    def refuse(number):
        def mmap(*args):
            ctypes.set_errno(number)
            return ctypes.c_void_p(-1).value

        return mmap

    class Libc:
        mmap = refuse(12)

    monkeypatch.setattr(elf.ctypes, "CDLL", lambda *args, **options: Libc)
    with pytest.raises(OSError, match=r"link: the system must give \d+ bytes for code, got 'Cannot allocate memory'"):
        elf.load(loaded(pair), lambda name: 0)


START = """
import sys
import numpy as np
import ggjit as gg
with gg.Context(1 << 20):
    a = gg.new_tensor(gg.F32, 8)
    a.numpy()[:] = 3
    b = gg.silu(a)
    gg.build(b).compute(n_threads=2)
assert np.allclose(b.numpy(), 3 / (1 + np.exp(-3)))
print("llvmlite.binding" in sys.modules, "numba" in sys.modules)
"""


def test_a_start_without_compiling_needs_no_llvm(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    said = [subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [s.stdout.split() for s in said] == [["True", "True"], ["False", "False"]]


def test_a_remembered_cpu_is_what_llvm_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    fresh = cpu._host.__wrapped__
    kernel_cache._folders.cache_clear()
    try:
        true, asked = cpu._host_by_llvm(), []
        monkeypatch.setattr(cpu, "_host_by_llvm", lambda: asked.append(1) or true)
        assert [fresh(), fresh()] == [true, true] and len(asked) == 1
        (file,) = tmp_path.glob("*.cpu")
        file.write_bytes(file.read_bytes()[:-1] + b"?")  # damaged: asked again
        assert fresh() == true and len(asked) == 2
        monkeypatch.setattr(cpu, "_appearance", lambda: b"another CPU")
        assert fresh() == true and len(asked) == 3
        monkeypatch.setattr(cpu, "_appearance", lambda: None)  # a system that does not tell
        assert [fresh(), fresh()] == [true, true] and len(asked) == 5
    finally:
        kernel_cache._folders.cache_clear()
