"""The CPU that code is compiled for: its level, and LLVM's name and feature list.

Three levels on x86-64: "avx512" (AVX-512 F/BW/VL/DQ and VNNI), "avx2" (AVX2, FMA, F16C), and "sse2", the portable
level, which uses no instruction that only some machines have. AArch64 has one level, "neon", with the portable code.
The environment variable GGJIT_CPU chooses a lower level than the machine's.
"""

from __future__ import annotations

import functools
import os
import platform

LEVELS = ("sse2", "avx2", "avx512")
_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
}
# What a lower level than the machine's is compiled for: a plain CPU of that level and nothing of the host.
_PLAIN = {
    "avx2": ("x86-64-v3", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,-avx512f"),
    "sse2": ("x86-64", "+sse2,+cx8,+cmov,+fxsr,+mmx,-sse3,-avx"),
}


@functools.cache
def _host() -> tuple[str, tuple[str, ...]]:
    """LLVM's name of this machine's CPU and the features it has, sorted."""
    import llvmlite.binding as llvm

    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # the system does not tell
        features = {}
    return llvm.get_host_cpu_name(), tuple(sorted(name for name, on in features.items() if on))


@functools.cache
def _host_level() -> str:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    features = _host()[1]
    return next((level for level in ("avx512", "avx2") if all(f in features for f in _NEEDS[level])), "sse2")


@functools.cache
def cpu_level() -> str:
    """Return the level that code is compiled for: "avx512", "avx2", "sse2" or "neon".

    Raises:
        ValueError: GGJIT_CPU names no level, or one that this machine does not have.
    """
    host, asked = _host_level(), os.environ.get("GGJIT_CPU", "").lower()
    if not asked or asked == host:
        return host
    if host == "neon" or asked not in LEVELS:
        names = (host,) if host == "neon" else LEVELS
        raise ValueError(f"GGJIT_CPU: must be one of {', '.join(names)}, got {asked!r}")
    if LEVELS.index(asked) > LEVELS.index(host):
        raise ValueError(f"GGJIT_CPU: this machine has {host}, got {asked!r}")
    return asked


@functools.cache
def target() -> tuple[str, str]:
    """Return LLVM's CPU name and feature list ("+avx2,-avx512f,...") for the level."""
    level = cpu_level()
    name, features = _host()
    if level == "sse2" or level != _host_level():
        return _PLAIN[level]
    extra = ["-prefer-256-bit"] if level == "avx512" else []  # some CPU models prefer to split 512-bit vectors
    return name, ",".join([f"+{f}" for f in features] + extra)
