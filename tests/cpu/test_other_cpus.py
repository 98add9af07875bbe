"""The same source compiles for CPUs with fewer instructions, and computes the same there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

AVX2 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16"
CPUS = {"plain": ("generic", ""), "avx2": ("haswell", AVX2)}
TESTS = ("test_decode.py::test_decode[12-64-32-torch.float16]", "test_scoring.py::test_submeans[8-80-3-5-max]")


@pytest.mark.parametrize("cpu", CPUS)
def test_kernels(cpu: str) -> None:
    if cpu == "avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 is for x86-64")
    name, features = CPUS[cpu]
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    tests = [str(Path(__file__).parent / test) for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert "2 passed" in result.stdout, result.stdout + result.stderr
