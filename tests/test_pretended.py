"""GPU tests on the simulated device of `tests/pretended`, in separate processes since it patches torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pretended
import pytest
import torch

EXACT, REPLAYS = "tests/test_exactness.py", "tests/graph/test_replays.py"
FAULTS = "nobody_wrote or names_the_purpose or hangs or (nth_fault and split and not torch_operations)"
COPIES = "not copies_of_a_model"  # their storages are looked at
UNMARKED = ["-m", "not gpu and not slow"]
QUICK = {
    "the device itself": (["tests/gpu/test_lagging.py"], 9),
    "memory that cannot be pinned": (["tests/gpu/test_lagging.py", "-m", "slow"], 15),
    "policies": ([EXACT, "-k", "covering and gemma3 and split and (select or all or hgca)"], 2),
    "graphs": ([f"{REPLAYS}::test_replays_give_the_logits_of_eager_steps[cuda-scout-attend-llama-1]"], 1),
}
LONG = {
    "policies": ([EXACT, *UNMARKED, "-k", "split"], 24),
    "graphs": ([REPLAYS, "-m", "gpu", "-k", "llama"], 12),
    "faults": (["tests/test_faults.py", *UNMARKED, "-k", FAULTS], 12),
    "odd cases": (["tests/test_int8.py", "tests/test_odd_cases.py", *UNMARKED, "-k", COPIES], 20),
    "memory": (["tests/blocks", "tests/attention", "tests/gpu/test_handover.py", "-m", "gpu"], 70),
}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("c++") is None, reason="takes a compiler"),
]


def passes(when: str, arguments: list[str], least: int) -> None:
    """Run tests in a process with a device that lags behind like this; so many at least have to pass, and all do."""
    pytest.importorskip("triton")
    environment = os.environ | {pretended.VARIABLE: when, "HF_OFFLOAD_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    told = ended.stdout[-4000:] + ended.stderr[-1000:]
    assert ended.returncode == 0, told
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= least, told


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_gpu_that_lags_behind(name: str) -> None:
    passes("late", *QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("when", pretended.WHEN)
def test_all_that_takes_a_gpu(when: str, name: str) -> None:
    passes(when, *LONG[name])
