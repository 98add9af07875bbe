"""A system limit on memory: every operation succeeds or raises in time; none hangs or ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import DEVICE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux"),
    pytest.mark.skipif(DEVICE != "cpu", reason="CUDA reserves more than any limit"),
]
TESTS = Path(__file__).parent
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"policy": "scout", "budget": 256, "tier": "one"},
    "split": {"policy": "scout", "budget": 256, "tier": "split", "resident": 256, "lookahead": "attend"},
    "int8": {"policy": "scout", "budget": 256, "tier": "split", "resident": 256, "host_dtype": "int8"},
    "hgca": {"policy": "hgca", "window": 32, "beta": 0.0, "tier": "split"},
}
ACTS = ("make", "prompt", "decode", "turn", "save", "load", "fork")
SCRIPT = """
import resource, sys, tempfile, warnings
sys.path[:0] = [{tests!r}, {root!r}]
import torch
from forks import in_fork
from tiny import prompt, tiny_model
from transformers import DynamicCache
from hf_offload import HybridCache

torch.set_num_threads(1)
torch.set_grad_enabled(False)
warnings.simplefilter("ignore")
model, ids = tiny_model("llama"), prompt(1, 700)[0]
folder, held = tempfile.mkdtemp(), dict()

def forward(cache, first, stop):
    model(ids[:, first:stop], past_key_values=cache)

def decode(cache):
    for i in range(20):
        forward(cache, i, i + 1)

def fork():
    held["fork"] = held["cache"].fork()
    decode(held["fork"])
    decode(held["cache"])

acts = dict(
    make=lambda: held.update(cache=HybridCache(model, **threads, block_size=16, prefill_tile=64, **{knobs!r})),
    prompt=lambda: forward(held["cache"], 0, 600),
    decode=lambda: decode(held["cache"]),
    turn=lambda: forward(held["cache"], 600, 700),
    save=lambda: held["cache"].save(folder + "/saved"),
    load=lambda: decode(held.setdefault("loaded", HybridCache.load(folder + "/saved", model, **threads))),
    fork=fork,
)
threads = dict(threads=3)

def of_memory(error):
    if isinstance(error, SystemError):  # NumPy, which has no memory for the error either
        return "exception" in str(error)
    while error is not None and not isinstance(error, MemoryError) and "memory" not in str(error).lower():
        error = error.__cause__
    return error is not None

def live(limited, mib):
    for name, act in acts.items():
        if name == limited:
            if "cache" in held:
                held["cache"].drain()  # a kernel that is being loaded has been found room for before the limit falls
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + int(mib * 2**20), -1))
        try:
            act()
        except (MemoryError, RuntimeError, SystemError) as error:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            told = repr(error)
            if not of_memory(error):
                raise
            return told
    return "done"

def apart(limited, mib):
    seconds = 1200 if limited == "nothing" else 120  # the first case compiles
    threads["timeout"] = seconds / 4
    status = in_fork(lambda: print(limited, mib, live(limited, mib), flush=True), seconds)
    assert status == 0, (limited, mib, status)

forward(DynamicCache(), 0, 700)  # what torch needs at its first call is none of ours
for case in {cases!r}:
    apart(*case)
"""


def run(setting: str, cases: list[tuple[str, float]]) -> list[str]:
    """What became of each act that was left so many MiB, a line each."""
    cases = [("nothing", 0), *cases]  # has all kernels compiled: that is slow, and wants more than most of the limits
    code = SCRIPT.format(tests=str(TESTS), root=str(TESTS.parent), knobs=SETTINGS[setting], cases=cases)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[act, str(mib)] for act, mib in cases], told
    assert lines[0] == "nothing 0 done", told
    return [line.split(maxsplit=2)[2] for line in lines[1:]]


def test_memory_that_ends_is_an_error_in_time() -> None:
    found = run("split", [("prompt", 0), ("prompt", 150), ("decode", 30), ("save", 0), ("fork", 4096)])
    assert [line == "done" for line in found] == [False, False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_memory_that_ends_anywhere(setting: str) -> None:
    cases = [(act, mib) for act in ACTS for mib in (0, 30, 100, 200, 500, 4096)]
    found = dict(zip(cases, run(setting, cases), strict=True))
    assert found["make", 0] != "done"
    assert found["fork", 4096] == "done"
