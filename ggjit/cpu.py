"""The CPU that code is compiled for: its level, and LLVM's name and feature list.

Three levels on x86-64: "avx512" (AVX-512 F/BW/VL/DQ and VNNI), "avx2" (AVX2, FMA, F16C; AVX-VNNI's dot product where
the CPU has it), and "sse2", the portable level, which uses no instruction that only some machines have. AArch64 has one
level, "neon", with the dot products that the CPU has (dotprod, i8mm, bf16).
The environment variable GGJIT_CPU chooses a lower level than the machine's: one of NAMES.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

LEVELS = ("sse2", "avx2", "avx512")
NAMES = ("sse2", "avx2", "avxvnni", "avx512")  # what GGJIT_CPU may be on x86-64, from the lowest
_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}
# What a lower level than the machine's is compiled for: a plain CPU of that level and nothing of the host.
_PLAIN = {
    "avx2": ("x86-64-v3", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,-avx512f"),
    "sse2": ("x86-64", "+sse2,+cx8,+cmov,+fxsr,+mmx,-sse3,-avx"),
}
_PLAIN["avxvnni"] = _PLAIN["avx2"][0], _PLAIN["avx2"][1] + ",+avxvnni"
# The same 256-bit dot product on a CPU that has it as a part of AVX-512 alone: the encoding differs.
_VNNI_OF_AVX512 = _PLAIN["avx2"][1].replace(",-avx512f", "") + ",+avx512f,+avx512vl,+avx512vnni,+prefer-256-bit"
# Names that Linux and macOS have for what LLVM does not report of AArch64.
_ARM = {
    "dotprod": ("asimddp", "FEAT_DotProd"),
    "i8mm": ("i8mm", "FEAT_I8MM"),
    "bf16": ("bf16", "FEAT_BF16"),
    "fullfp16": ("asimdhp", "FEAT_FP16"),
}


class Target(NamedTuple):
    """A kind of CPU to compile for.

    Attributes:
        level: as `cpu_level` gives it.
        triple: LLVM's name of the system.
        name: LLVM's name of the CPU.
        features: "+avx2,-avx512f,...".
    """

    level: str
    triple: str
    name: str
    features: str


_X86, _AARCH64 = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# What `compile_for` knows besides this machine.
TARGETS = {
    **{name: Target("avx2" if name == "avxvnni" else name, _X86, *plain) for name, plain in _PLAIN.items()},
    "aarch64": Target("neon", _AARCH64, "generic", "+neon,+fp-armv8"),
    "aarch64-dotprod": Target("neon", _AARCH64, "neoverse-n1", "+neon,+fp-armv8,+dotprod,+fullfp16,+lse"),
    "aarch64-i8mm": Target("neon", _AARCH64, "neoverse-v1", "+neon,+dotprod,+i8mm,+bf16,+fullfp16,+lse,-sve"),
}
_chosen: list[Target] = []  # by `compile_for`


def _arm_features() -> set[str]:
    """What this AArch64 machine has of `_ARM`: on Linux, what all its cores have."""
    if sys.platform == "darwin":
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        ask = ctypes.CDLL(None).sysctlbyname
        keys = {name: f"hw.optional.arm.{key}".encode() for name, (_, key) in _ARM.items()}
        return {
            name
            for name, key in keys.items()
            if ask(key, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value
        }
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    cores = [set(line.partition(":")[2].split()) for line in lines if line.startswith("Features")]
    return {name for name, (key, _) in _ARM.items() if cores and all(key in core for core in cores)}


_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")  # lines of a CPU in /proc/cpuinfo


def _appearance() -> bytes | None:
    """What Linux tells about an x86-64 CPU, quickly read; None where it does not."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(8192).partition(b"\n\n")[0].decode()
    except (OSError, UnicodeDecodeError):
        return None
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() in _TELLING]
    return "\n".join(lines).encode() if len(lines) == len(_TELLING) else None


@functools.cache
def _host() -> tuple[str, tuple[str, ...]]:
    """LLVM's name of this machine's CPU and the features it has, sorted.

    Remembered beside the kernels for CPUs that look the same, so that a start without compiling needs no LLVM.
    """
    from ggjit import kernel_cache

    appearance = _appearance()
    if appearance is None:
        return _host_by_llvm()
    key = kernel_cache.host_key(appearance)
    known = kernel_cache.load(key, kernel_cache.CPU)
    if known is None:
        name, features = _host_by_llvm()
        kernel_cache.store(key, "\n".join((name, *features)).encode(), kernel_cache.CPU)
        return name, features
    name, *rest = known.decode().split("\n")
    return name, tuple(rest)


def _host_by_llvm() -> tuple[str, tuple[str, ...]]:
    import llvmlite.binding as llvm

    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # the system does not tell
        features = {}
    found = {name for name, on in features.items() if on}
    if platform.machine().lower() in ("aarch64", "arm64"):
        found |= _arm_features()
    return llvm.get_host_cpu_name(), tuple(sorted(found))


@functools.cache
def _host_level() -> str:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    features = _host()[1]
    return next((level for level in ("avx512", "avx2") if all(f in features for f in _NEEDS[level])), "sse2")


def _asked() -> str:
    """The name that GGJIT_CPU gives, checked; "" if it asks for no less than the machine has."""
    host, asked = _host_level(), os.environ.get("GGJIT_CPU", "").lower()
    if host == "avx2" and "avxvnni" in _host()[1]:
        host = "avxvnni"
    if not asked or asked == host:
        return ""
    if host == "neon" or asked not in NAMES:
        names = (host,) if host == "neon" else NAMES
        raise ValueError(f"GGJIT_CPU: must be one of {', '.join(names)}, got {asked!r}")
    if NAMES.index(asked) > NAMES.index(host):
        raise ValueError(f"GGJIT_CPU: this machine has {host}, got {asked!r}")
    return asked


@functools.cache
def cpu_level() -> str:
    """Return the level that code is compiled for: "avx512", "avx2", "sse2" or "neon".

    Raises:
        ValueError: GGJIT_CPU names no level, or one that this machine does not have.
    """
    if _chosen:
        return _chosen[0].level
    return (_asked() or _host_level()).replace("avxvnni", "avx2")


@functools.cache
def target() -> tuple[str, str]:
    """Return LLVM's CPU name and feature list ("+avx2,-avx512f,...") for the level."""
    if _chosen:
        return _chosen[0].name, _chosen[0].features
    asked, (name, features) = _asked(), _host()
    if asked == "avxvnni" and "avxvnni" not in features:
        return _PLAIN[asked][0], _VNNI_OF_AVX512
    if asked or cpu_level() == "sse2":
        return _PLAIN[asked or "sse2"]
    extra = ["-prefer-256-bit"] if cpu_level() == "avx512" else []  # some CPU models prefer to split 512-bit vectors
    return name, ",".join([f"+{f}" for f in features] + extra)


def triple() -> str:
    """Return LLVM's name of the system that code is compiled for."""
    import llvmlite.binding as llvm

    return _chosen[0].triple if _chosen else llvm.get_process_triple()


@functools.cache
def has(feature: str) -> bool:
    """Has the CPU that code is compiled for a feature, by LLVM's name ("avxvnni", "i8mm")?"""
    return f"+{feature}" in target()[1].split(",")


def has_int8_dot() -> bool:
    """Has that CPU an instruction that adds four products of bytes to each i32?"""
    level = cpu_level()
    return level == "avx512" or (level == "avx2" and (has("avxvnni") or has("avx512vnni"))) or has("dotprod")


def has_bf16_dot() -> bool:
    """Has that CPU an instruction that adds two products of bf16 to each f32?"""
    return has("avx512bf16") if cpu_level() == "avx512" else cpu_level() == "neon" and has("bf16")


def compile_for(name: str) -> Target:
    """Compile for a kind of CPU of `TARGETS` from here on: to look at, since what is compiled cannot be called here.

    To be called in a process that compiles nothing else, before it compiles anything.

    Raises:
        ValueError: there is no such target, or one is chosen already.
    """
    if name not in TARGETS:
        raise ValueError(f"compile_for: target must be one of {', '.join(TARGETS)}, got {name!r}")
    if _chosen and _chosen[0] != TARGETS[name]:
        raise ValueError(f"compile_for: a process compiles for one target, got {name!r} after {_chosen[0].name!r}")
    _chosen[:] = [TARGETS[name]]
    for cached in (cpu_level, target, has):
        cached.cache_clear()
    return TARGETS[name]
