"""Other tests again, in processes of their own: hand-overs late, other defaults of torch, a simulated GPU."""

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
from test_defaults import DEFAULTS

from hf_offload.cpu.thread_pool import DELAY

pytestmark = pytest.mark.slow
EXACT, REPLAYS, LAGGING = "tests/test_exactness.py", "tests/graph/test_replays.py", "tests/gpu/test_lagging.py"
FAULTS = "nobody_wrote or names_the_purpose or hangs or (nth_fault and split and not torch_operations)"
ODD = "int8 or group_sizes or masks or visible or tower or padding"
UNMARKED = ["-m", "not gpu and not slow"]
ON_A_DEVICE = {
    "the device itself": ([LAGGING], 9),
    "memory that cannot be pinned": ([LAGGING, "-m", "slow"], 15),
    "policies": ([EXACT, *UNMARKED, "-k", "split"], 24),
    "graphs": ([REPLAYS, "-m", "gpu", "-k", "llama"], 12),
    "faults": (["tests/test_faults.py", *UNMARKED, "-k", FAULTS], 12),
    "odd cases": (["tests/test_int8.py", "tests/test_hybrid_cache.py", *UNMARKED, "-k", ODD], 12),
    "memory": (["tests/blocks", "tests/attention", "tests/gpu/test_handover.py", "-m", "gpu"], 70),
}


def passes(arguments: list[str], least: int, **environment: str) -> None:
    """Run tests; so many at least have to pass, and all do."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, env=os.environ | environment, capture_output=True, text=True, check=False)
    told = ended.stdout[-4000:] + ended.stderr[-1000:]
    assert ended.returncode == 0, told
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= least, told


def test_exactness_with_every_hand_over_late() -> None:
    """Each job of the worker and each copy two milliseconds late, which reveals reads of an earlier step's data."""
    passes([EXACT, "-x", "-m", "slow or not slow"], 100, **{DELAY: "2"})


@pytest.mark.parametrize("suite", [EXACT, "tests/test_released.py"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_under_other_defaults(suite: str, name: str) -> None:
    # Transformers' own layers with a window make a tensor on the default device.
    passes([suite, *(("-k", "not gemma3") if name == "meta" else ())], 4, HF_OFFLOAD_TEST_DEFAULT=name)


@pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux" or shutil.which("c++") is None,
    reason="there is a GPU, or no compiler",
)
@pytest.mark.parametrize("name", ON_A_DEVICE)
@pytest.mark.parametrize("when", pretended.WHEN)
def test_a_gpu_that_lags_behind(when: str, name: str) -> None:
    pytest.importorskip("triton")
    device = {pretended.VARIABLE: when, "HF_OFFLOAD_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    passes(*ON_A_DEVICE[name], **device)
