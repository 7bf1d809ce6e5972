"""Code for CPUs that are not at hand: the right instructions, all of it compiles; values of AArch64 by emulation."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggjit import cpu
from ggjit.dev import emulate

TESTS = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "GGJIT_CPU": ""}
MANY = "many columns"


@functools.cache
def reports(target, *arguments):
    command = [sys.executable, "-m", "ggjit.dev", "cross-compile", "--json", "--target", target, *arguments]
    out = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert out.stdout, out.stderr
    return {r["kernel"]: r for r in json.loads(out.stdout)}


def dots(target, type_name, tile):
    return reports(target, "--type", type_name)[f"mul_mat {type_name} {tile}"]["dots"]


def test_avx_vnni():
    """vpdpbusd with registers of 256 bits, nothing of AVX-512."""
    for tile, count in (("columns=1", 16), (MANY, 64)):
        report = reports("avxvnni", "--type", "Q4_0")[f"mul_mat Q4_0 {tile}"]
        assert report["dots"] == {"vpdpbusd": count} and report["width"] == 256


@pytest.mark.full
def test_aarch64_i8mm():
    """usdot for one column, usmmla for two and more; bfdot for BF16; few values go through the stack."""
    found = reports("aarch64-i8mm", "--type", "Q4_0", "BF16")
    assert not any(r["error"] for r in found.values())
    assert found["mul_mat Q4_0 columns=1"]["dots"] == {"usdot": 32}
    assert found[f"mul_mat Q4_0 {MANY}"]["dots"] == {"usmmla": 64}
    assert found[f"mul_mat Q4_0 {MANY}"]["stack"] <= 64
    assert set(found["mul_mat BF16 columns=1"]["dots"]) == set(found[f"mul_mat BF16 {MANY}"]["dots"]) == {"bfdot"}


@pytest.mark.full
def test_aarch64_dotprod_and_plain():
    assert dots("aarch64-dotprod", "Q8_0", "columns=1") == {"sdot": 32}
    assert dots("aarch64-dotprod", "Q8_0", MANY) == {"sdot": 128}
    assert dots("aarch64", "Q8_0", MANY) == {}


@pytest.mark.full
@pytest.mark.parametrize("target", ["avxvnni", "aarch64-dotprod", "aarch64-i8mm"])
def test_everything_compiles(target):
    """One type of each kind of panel; `python -m ggjit.dev cross-compile` without types is the whole of it: minutes."""
    found = reports(target, "--type", "F16", "Q8_0", "Q6_K", "IQ2_S")
    assert not [r for r in found.values() if r["error"]]
    allowed = {"avxvnni": {"vpdpbusd"}, "aarch64-dotprod": {"sdot"}}.get(target, {"usdot", "usmmla"})
    for name, report in found.items():
        words = name.split()
        if words[0] == "mul_mat" and words[1] in ("Q8_0", "Q6_K", "IQ2_S") and words[2] != "packing":
            assert report["dots"] and set(report["dots"]) <= allowed, name


def test_compile_for_refuses(monkeypatch):
    with pytest.raises(ValueError, match=r"compile_for: target must be one of avx2, .*got 'm1'"):
        cpu.compile_for("m1")
    monkeypatch.setattr(cpu, "_chosen", [cpu.TARGETS["aarch64"]])
    with pytest.raises(ValueError, match="a process compiles for one target"):
        cpu.compile_for("avx2")


PANELS = """
import sys
from ggjit import cpu
cpu.compile_for(sys.argv[1])
from ggjit.dev import emulate
emulate.install()
from test_panels import Product, error
for name in sys.argv[2:]:
    product = Product(name, 512, 21, 5)
    print(name, max(error(product.run(n), product.want()) for n in (1, 3, None)))
"""
OPS = """
import sys
from ggjit import cpu
cpu.compile_for(sys.argv[1])
from ggjit.dev import emulate
emulate.install()
from ggjit.dev.cases import run_case
from ggjit.op import by_name
for name in sys.argv[2:]:
    for case in by_name(name).cases:
        result = run_case(by_name(name), case)
        print(name + "/" + case, result.error if not result.passed else 0)
"""


def emulated(program, *arguments):
    out = subprocess.run([sys.executable, "-c", program, *arguments], env=ENV, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in out.stdout.splitlines()}


needs_emulator = pytest.mark.skipif(
    not emulate.available() or cpu.cpu_level() == "neon", reason="needs qemu-aarch64 and aarch64-linux-gnu-gcc"
)


@pytest.mark.full
@needs_emulator
@pytest.mark.parametrize("target", ["aarch64-dotprod", "aarch64-i8mm"])
def test_products_on_aarch64(target):
    """Products of panels give what float64 gives, whatever the dot product."""
    for name, err in emulated(PANELS, target, "BF16", "Q6_K").items():
        assert err < 1e-10, name


@pytest.mark.full
@needs_emulator
def test_ops_on_aarch64():
    """The cases of some ops agree with their float64 references."""
    names = ("rms_norm", "soft_max", "sum_rows")
    assert not {case: err for case, err in emulated(OPS, "aarch64-i8mm", *names).items() if err}
