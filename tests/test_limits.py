"""A system limit on memory: every operation succeeds or raises in time; none hangs or ends the process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import in_fork
from tiny import DEVICE, feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux"),
    pytest.mark.skipif(DEVICE != "cpu", reason="CUDA reserves more than any limit"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"policy": "scout", "budget": 256, "tier": "one"},
    "split": {"policy": "scout", "budget": 256, "tier": "split", "resident": 256, "lookahead": "attend"},
    "int8": {"policy": "scout", "budget": 256, "tier": "split", "resident": 256, "host_dtype": "int8"},
    "hgca": {"policy": "hgca", "window": 32, "beta": 0.0, "tier": "split"},
}
ACTS = ("make", "prompt", "decode", "turn", "save", "load", "fork", "steps")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny_model("llama")
    feed(made, DynamicCache(), *prompt(1, 700), (0, 700))  # what torch needs at its first call is none of ours
    return made


def of_memory(error: BaseException | None) -> bool:
    if isinstance(error, SystemError):  # NumPy, which has no memory for the error either
        return "exception" in str(error)
    while error is not None and not isinstance(error, MemoryError) and "memory" not in str(error).lower():
        error = error.__cause__
    return error is not None


def outcome(model: PreTrainedModel, setting: str, folder: Path, limited: str, mib: float) -> str:
    """What becomes of a cache if an act, and what follows it, is left so many MiB; in a fork, which ends in time."""
    import resource

    seconds, told = 1200.0 if limited == "nothing" else 120.0, folder / f"{limited}-{mib}"  # the first case compiles

    def live() -> None:
        warnings.simplefilter("ignore")
        running, held = {"threads": 3, "timeout": seconds / 4}, dict[str, HybridCache]()
        ids, mask = prompt(1, 740)

        def read(name: str, count: int, pieces: int = 1) -> None:
            start = held[name].get_seq_length()
            feed(model, held[name], ids, mask, range(start, start + count + 1, count // pieces))

        acts: dict[str, Callable[[], Any]] = {
            "make": lambda: HybridCache(model, block_size=16, prefill_tile=64, **running, **SETTINGS[setting]),
            "prompt": lambda: read("make", 588),
            "decode": lambda: read("make", 8, 8),
            "turn": lambda: read("make", 90),
            "save": lambda: held["make"].save(folder / "saved"),
            "load": lambda: HybridCache.load(folder / "saved", model, **running),
            "fork": lambda: held["load"].fork(),
            "steps": lambda: [read(name, 8, 8) for name in ("make", "load", "fork")],
        }
        for name, act in acts.items():
            if name == limited:
                for cache in held.values():
                    cache.drain()  # a kernel that is being loaded has been found room for before the limit falls
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + int(mib * 2**20), -1))
            try:
                if isinstance(made := act(), HybridCache):
                    held[name] = made
            except (MemoryError, RuntimeError, SystemError) as error:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
                if not of_memory(error):
                    raise
                told.write_text(repr(error))
                return
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        told.write_text("done")

    assert in_fork(live, seconds) == 0, (limited, mib)
    return told.read_text()


def test_memory_that_ends_is_an_error_in_time(model: PreTrainedModel, tmp_path: Path) -> None:
    cases = [("nothing", 0), ("make", 0), ("prompt", 30), ("save", 0), ("fork", 4096)]
    found = [outcome(model, "split", tmp_path, *case) == "done" for case in cases]
    assert found == [True, False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_memory_that_ends_anywhere(model: PreTrainedModel, tmp_path: Path, setting: str) -> None:
    cases = [("nothing", 0), *((act, mib) for act in ACTS for mib in (0, 30, 100, 200, 500, 4096))]
    found = {case: outcome(model, setting, tmp_path, *case) for case in cases}
    assert found["nothing", 0] == found["fork", 4096] == "done"
    assert found["make", 0] != "done"
