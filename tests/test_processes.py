"""Forks of the process with a live cache, and interpreter exit with work in flight."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny import DEVICE

TESTS = Path(__file__).parent
BEGIN = """
import os, sys, time, warnings
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from tiny import prompt, tiny_model
from hf_offload import HybridCache
from hf_offload import WorkerError
model = tiny_model("llama")
knobs = dict(budget=64, sinks=16, recent=0, block_size=16, tier={tier!r}, lookahead={lookahead!r},
             synchronous_layers=(0,), recall=1)
if {tier!r} == "split":
    knobs["resident"] = 96
if {lookahead!r} == "hgca":
    knobs = dict(policy="hgca", window=4, beta=0.0, block_size=8, tier={tier!r})
torch.set_grad_enabled(False)

def begun():
    cache = HybridCache(model, **knobs)
    logits = model(prompt(1, 150)[0], past_key_values=cache).logits
    return cache, steps(cache, logits, 6)

def steps(cache, logits, count):
    for _ in range(count):
        logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    return logits
"""


IGNORE = ["-W", "ignore::FutureWarning", "-W", "ignore::DeprecationWarning"]


def run(code: str, tier: str, lookahead: str, limit: float = 300.0) -> str:
    """Run a script; what it prints."""
    begin = BEGIN.format(tests=str(TESTS), root=str(TESTS.parent), tier=tier, lookahead=lookahead)
    done = subprocess.run(
        # Transformers 5.24 warns of the name `past_key_values`, Python 3.12 of `os.fork()` beside threads.
        [sys.executable, *IGNORE, "-c", begin + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout


CASES = [
    ("split", "attend"),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (("split", "hgca"), ("one", "off"), ("split", "select"), ("split", "off"))
    ),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="CUDA does not survive a fork")
@pytest.mark.parametrize(("tier", "lookahead"), CASES)
def test_a_forked_child_goes_on_and_its_parent_too(tier: str, lookahead: str) -> None:
    """Also with a recall in flight, which the child has lost with the threads: an error, and then right."""
    out = run(
        """
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
        """,
        tier,
        lookahead,
    )
    assert out == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "lookahead"),
    [
        CASES[0],
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("split", "hgca"), ("one", "off"), ("split", "off"))),
    ],
)
def test_an_interpreter_ends_at_once_with_work_in_flight(tier: str, lookahead: str) -> None:
    """A job that sleeps and one that computes must not hold it up, nor end in a crash."""
    run(  # in less than its limit
        """
        import numpy as np
        from hf_offload.cpu import pool as movers
        cache, logits = begun()
        worker, memory = cache.settings.worker, np.zeros(1 << 26, np.uint8)
        address = np.full(1 << 16, memory.ctypes.data)
        def compute():
            while True:
                movers.touch_records(address, 1 << 16)()
        worker.submit(compute, "work", keep=memory)
        worker.delay = 3600.0
        worker.submit(lambda: None, "nothing")
        time.sleep(0.2)
        """,
        tier,
        lookahead,
    )
