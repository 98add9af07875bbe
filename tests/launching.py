"""Scripts started on several local ranks, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def torchrun(ranks: int, *arguments: str, limit: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script with its arguments on so many ranks, on the CPU; seconds after which it is given up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
