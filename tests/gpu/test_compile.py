"""Compilation of every kernel for real GPUs: registers, shared memory, and flags in the PTX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_offload

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # all is compiled, for four GPUs
LAUNCH = re.compile(r"\b(\w+_kernel)\[")


@cache
def compiled(target: str) -> dict[str, dict[str, Any]]:
    """By name, what compiling the cases for a GPU tells."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (Path(hf_offload.__file__).parents[1], TESTS, TESTS / "gpu")
    command = [sys.executable, str(TESTS / "gpu/compiling.py"), target]
    with tempfile.TemporaryDirectory() as folder:  # where Triton keeps what it compiles
        environment |= {"TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(map(str, places))}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    return {case["case"]: case for case in map(json.loads, told)}


@pytest.mark.parametrize("target", ["80", "86", "89", "90"])
def test_every_kernel_that_is_launched_fits(target: str) -> None:
    sources = Path(hf_offload.__file__).parent.rglob("*.py")
    launched = {name for path in sources for name in LAUNCH.findall(path.read_text(encoding="utf-8"))}
    assert len(launched) > 10
    assert {case["kernel"] for case in compiled(target).values()} == launched
    for name, case in compiled(target).items():
        assert case["spilled"] == 0, name
        assert case["shared"] <= case["limit"], name


def test_waiting_reads_and_never_writes_the_flag() -> None:
    waiting = compiled("90")["wait"]["ptx"]
    assert "ld.global.sys.acquire.b32" in waiting
    assert "atom." not in waiting


def test_every_program_arrives_before_the_flag() -> None:
    """All threads of a program meet, one orders what they wrote and counts it; the flag follows in release order.

    The flag itself takes no atomic operation: not every bus between a GPU and its host carries them.
    """
    announced, plain = (
        [
            line.split("//")[0].strip()
            for line in compiled("90")[name]["ptx"].splitlines()
            if "st.global" in line or "st.release" in line or "atom" in line or "bar." in line
        ]
        for name in ("hand_over 4 128 flag", "hand_over 4 128")
    )
    arrival, flag = (next(i for i, line in enumerate(announced) if kind in line) for kind in ("acq_rel", "st.release"))
    assert "sys.acq_rel.add" in announced[arrival]
    assert announced[arrival - 1].startswith("bar.sync")
    assert "st.release.sys.global.b32" in announced[flag]
    assert flag == len(announced) - 1
    assert sum("atom." in line for line in announced) == 1
    assert sum("st.release" in line for line in announced) == 1
    assert sum("st.global" in line for line in announced[arrival:flag]) == 1  # the count's return to 0
    assert any("st.global.v4" in line for line in announced[:arrival])
    assert not any("atom" in line for line in plain)
