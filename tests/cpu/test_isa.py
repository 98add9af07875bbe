"""Kernels compiled for CPUs with fewer instructions: the same results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hf_offload.cpu import isa

NAMES = (
    "cpu/test_digest_scores.py::test_submeans[8-2-1.5-shapes1]",
    # vectors that end with their row, and bytes
    "policies/hgca/test_averages.py::test_averages_move[5-37-64-32-peak]",
    "cpu/test_decode_attention.py::test_blocks[(torch.float16, 4)-True-128-32-20.0]",  # float16 and int8
    "policies/hgca/test_averages.py::test_weights[7-64-128-torch.bfloat16-20-5.0-30-True]",
    "cpu/test_prefill.py::test_equals_attention_in_float64[products-(2, 6, 2, 48, 16, 75, 33, 20, 0.0)-dtype2]",
    "cpu/test_linear.py::test_products_of_every_size[4-torch.bfloat16]",
)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["plain", "avx2"])
def test_kernels(level: str) -> None:
    if level == "avx2" and platform.machine() != "x86_64":
        pytest.skip("AVX2 is for x86-64")
    tests = [str(Path(__file__).parent.parent / name) for name in NAMES]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(
        command, env={**os.environ, isa.VARIABLE: level}, capture_output=True, text=True, timeout=600, check=False
    )
    assert f"{len(NAMES)} passed" in result.stdout, result.stdout + result.stderr


def test_levels_that_cannot_be_had_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="'sse9' is not one of avx512, avx2, plain"):
        isa.choose_isa()
    monkeypatch.setenv(isa.VARIABLE, "avx512")
    with monkeypatch.context() as patch:
        patch.setattr(isa.binding, "get_host_cpu_features", lambda: {"avx2": True})
        with pytest.raises(ValueError, match=r"has no sse3.*avx512f"):
            isa.choose_isa()
    monkeypatch.setenv(isa.VARIABLE, "plain")
    assert isa.cpu_target.target_context.codegen().magic_tuple()[2]  # from here on the features are fixed
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(isa.numba.config, name, getattr(isa.numba.config, name))
    with pytest.raises(RuntimeError, match="import hf_offload first"):
        isa.choose_isa()
