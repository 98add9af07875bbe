"""The instruction set that kernels are compiled for: the CPU's own, or less by the variable HF_OFFLOAD_ISA."""

# mypy: allow-untyped-calls
from __future__ import annotations

import os
from typing import Any

import numba
from llvmlite import binding
from numba.core.registry import cpu_target

VARIABLE = "HF_OFFLOAD_ISA"
_AVX2 = [
    "sse3",
    "ssse3",
    "sse4.1",
    "sse4.2",
    "popcnt",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "bmi",
    "bmi2",
    "lzcnt",
    "movbe",
    "cx16",
]
# The CPU name that LLVM compiles for, and the features that this CPU must have; no name: compile for this CPU.
_LEVELS: dict[str, tuple[str, list[str]]] = {
    "avx512": ("", [*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"]),
    "avx2": ("haswell", _AVX2),
    "plain": ("generic", []),
}


def choose_isa() -> None:
    """Apply the environment variable HF_OFFLOAD_ISA (`avx512`, `avx2` or `plain`) to all Numba code of this process.

    Numba keys its disk cache by CPU name and features, so code for one instruction set is never loaded for another.

    Raises:
        ValueError: the value is unknown, or this CPU lacks its instructions.
        RuntimeError: Numba was already set up for another CPU.
    """
    level = os.environ.get(VARIABLE)
    if not level:
        return
    if level not in _LEVELS:
        raise ValueError(f"{VARIABLE}={level!r} is not one of {', '.join(_LEVELS)}")
    name, needed = _LEVELS[level]
    host = binding.get_host_cpu_features()
    if missing := [feature for feature in needed if not host.get(feature)]:
        raise ValueError(f"{VARIABLE}={level!r}, but this CPU has no {', '.join(missing)}; use one that it has")
    if not name:
        return
    settings: Any = numba.config
    settings.CPU_NAME, settings.CPU_FEATURES = name, ",".join("+" + feature for feature in needed)
    if cpu_target.target_context.codegen().magic_tuple()[2] != settings.CPU_FEATURES:
        raise RuntimeError(
            f"{VARIABLE}={level!r}, but Numba has begun to compile for this CPU; import hf_offload first"
        )
