"""How many kernels a captured step has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MOST = {"full": 57, "scout, all resident": 57, "scout, all resident, chosen from": 69, "scout": 108}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or shutil.which("c++") is None, reason="simulates a device")
@pytest.mark.parametrize("row", MOST)
def test_a_layer_launches_no_more_kernels(row: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(__file__).with_name("nodes.py")), row]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= MOST[row]
