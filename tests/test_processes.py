"""Forks of the process with a live cache, and interpreter exit with work in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breaking import SETTINGS
from forks import exit_status, forked, in_fork
from tiny import DEVICE, begin, decode

from hf_offload import HybridCache, WorkerError
from hf_offload.cpu.kernels import move_records

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")


def begun(memory: str) -> tuple[HybridCache, Callable[[], torch.Tensor]]:
    """A cache, and what gives the logits of its next eight steps."""
    setting = SETTINGS[memory]
    cache = HybridCache(setting.model, setting.policy, **setting.knobs)
    token, mask = begin(setting.model, cache, 1, 150, 6)
    return cache, lambda: decode(setting.model, cache, token, mask, 8)[1]


@pytest.mark.parametrize(
    "memory", ["attend", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hgca", "one", "split"))]
)
def test_parent_and_child_go_on_after_a_fork(memory: str) -> None:
    """Also with a recall in flight, which a child has lost with the threads: an error, and then right."""

    def fork_with_a_cache() -> None:
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        want = begun(memory)[1]()
        for delay in (0.0, 0.05):
            cache, steps = begun(memory)
            cache.settings.worker.delay = delay

            def go_on(steps: Any = steps) -> None:
                torch.testing.assert_close(steps(), want, atol=1e-4, rtol=0)

            def go_on_in_the_child(cache: HybridCache = cache, go_on: Any = go_on) -> None:
                try:
                    return go_on()
                except WorkerError as error:
                    told = str(error)
                assert "every worker thread has died" in told
                assert cache.get_seq_length() == 156
                go_on()

            child = forked(go_on_in_the_child)
            go_on()
            assert exit_status(child) == 0

    assert in_fork(fork_with_a_cache) == 0


def leave_work_behind(memory: str) -> None:
    """A job that computes and one that sleeps are on their way when the interpreter ends."""
    worker, buffer = begun(memory)[0].settings.worker, np.zeros(1 << 26, np.uint8)
    address = np.full(1 << 16, buffer.ctypes.data)

    def compute() -> None:
        while True:
            move_records.touch_records(address, 1 << 16)()

    worker.submit(compute, "work", keep=buffer)
    worker.delay = 3600.0
    worker.submit(lambda: None, "nothing")
    time.sleep(0.2)
    print("done")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["attend", "hgca", "one"])
def test_an_interpreter_ends_at_once_and_in_no_crash(memory: str) -> None:
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent)))}
    # Transformers 5.24 warns of the name `past_key_values`.
    code = f"import test_processes; test_processes.leave_work_behind({memory!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", code], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
