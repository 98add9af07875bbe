"""Exactness with every hand-over delayed, which reveals reads of an earlier step's data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_offload.cpu.thread_pool import DELAY

HERE = Path(__file__).parent


@pytest.mark.slow
def test_exactness_with_every_hand_over_late() -> None:
    """All of `test_exactness.py`, its slow cases too, each job of the worker and each copy two milliseconds late."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", str(HERE / "test_exactness.py")]
    found = subprocess.run(
        command, cwd=HERE.parent, env=os.environ | {DELAY: "2"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
