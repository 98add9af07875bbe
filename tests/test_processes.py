"""Forks of the process with a live cache, and interpreter exit with work in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import DEVICE

TESTS = Path(__file__).parent
BEGIN = """
import os, sys, time
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from breaking import SETTINGS
from tiny import prompt
from hf_offload import HybridCache, WorkerError
setting = SETTINGS[{memory!r}]
torch.set_grad_enabled(False)

def begun():
    cache = HybridCache(setting.model, setting.policy, **setting.knobs)
    logits = setting.model(prompt(1, 150)[0], past_key_values=cache).logits
    return cache, steps(cache, logits, 6)

def steps(cache, logits, count):
    for _ in range(count):
        logits = setting.model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    return logits
"""
FORK = """
cache, logits = begun()
want = steps(cache, logits, 8)
for delay in (0.0, 0.05):
    cache, logits = begun()
    cache.settings.worker.delay = delay
    child = os.fork()
    try:
        try:
            got = steps(cache, logits, 8)
        except WorkerError as error:
            assert child == 0 and "every worker thread has died" in str(error), error
            assert cache.get_seq_length() == 156, cache.get_seq_length()
            got = steps(cache, logits, 8)
        assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()
    except BaseException as error:
        print("child" if child == 0 else "parent", repr(error), flush=True)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
EXIT = """
import numpy as np
from hf_offload.cpu.kernels import move_records
cache, logits = begun()
worker, memory = cache.settings.worker, np.zeros(1 << 26, np.uint8)
address = np.full(1 << 16, memory.ctypes.data)
def compute():
    while True:
        move_records.touch_records(address, 1 << 16)()
worker.submit(compute, "work", keep=memory)
worker.delay = 3600.0
worker.submit(lambda: None, "nothing")
time.sleep(0.2)
print("done")
"""
# Transformers 5.24 warns of the name `past_key_values`, Python 3.12 of `os.fork()` beside threads.
IGNORE = ["-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]


@pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
@pytest.mark.parametrize(
    ("script", "memory"),
    [
        pytest.param(FORK, "attend", id="fork-attend"),
        *(pytest.param(FORK, name, id=f"fork-{name}", marks=pytest.mark.slow) for name in ("hgca", "one", "split")),
        *(pytest.param(EXIT, name, id=f"exit-{name}", marks=pytest.mark.slow) for name in ("attend", "hgca", "one")),
    ],
)
def test_forks_go_on_and_interpreters_end_at_once(script: str, memory: str) -> None:
    """Also with a recall in flight, which a child has lost with the threads: an error, and then right.

    A job that sleeps and one that computes must not hold an interpreter's end up, nor end it in a crash.
    """
    code = BEGIN.format(tests=str(TESTS), root=str(TESTS.parent), memory=memory) + script
    command = [sys.executable, *IGNORE, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert (done.stdout, done.stderr) == ("done\n", "")
