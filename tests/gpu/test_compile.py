"""Compilation of every kernel for real GPUs: no spilled registers, shared memory within its limit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_offload

FOLDER = Path(__file__).parent
SUBJECTS = [path.stem.removeprefix("cases_") for path in sorted(FOLDER.glob("cases_*.py"))]
pytestmark = pytest.mark.slow  # all is compiled, for four GPUs
TARGETS = ["80", "86", "89", "90"]
LAUNCH = re.compile(r"\b(\w+_kernel)\[")


def run_apart(folder: str, *arguments: str) -> str:
    """What another Python prints that has no interpreter of kernels and keeps what it compiles in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": folder, "PYTHONPATH": f"{Path(hf_offload.__file__).parents[1]}:{FOLDER}"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def compiled(target: str, folder: str) -> list[dict[str, Any]]:
    """What compiling the cases for a GPU tells, one entry for each case."""
    return [json.loads(line) for line in run_apart(folder, str(FOLDER / "compiling.py"), target).splitlines()]


@pytest.fixture
def told(target: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    return compiled(target, str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit(target: str, told: list[dict[str, Any]]) -> None:
    assert sorted({case["case"].split(":")[0] for case in told}) == SUBJECTS
    for case in told:
        assert case["spilled"] == 0, case
        assert case["shared"] <= case["limit"], case


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_that_is_launched_has_a_case(target: str, told: list[dict[str, Any]]) -> None:
    sources = Path(hf_offload.__file__).parent.rglob("*.py")
    launched = {name for path in sources for name in LAUNCH.findall(path.read_text(encoding="utf-8"))}
    assert len(launched) > 10
    assert {case["kernel"] for case in told} == launched


@pytest.mark.parametrize("target", TARGETS)
def test_attention_reads_ahead_of_its_arithmetic(target: str, told: list[dict[str, Any]]) -> None:
    attention = [case for case in told if case["case"].startswith("paged_attention:")]
    assert attention
    for case in attention:
        assert case["buffers"] == [case["stages"] - 1] * 2, case  # for K and for V


def test_spilled_registers_are_noticed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = (
        "import cases_merge, compiling; _, *case, options = cases_merge.cases()[-1]; options['maxnreg'] = 24;"
        "print(compiling.compile_case(80, *case, options)['spilled'])"
    )
    assert int(run_apart(str(tmp_path), "-c", code)) > 0
