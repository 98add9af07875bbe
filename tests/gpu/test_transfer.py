"""Which way records travel: what is asked for, else the one that is quicker on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_offload.gpu import transfer
from hf_offload.gpu.transfer import ROUNDS, WAYS, asked_for, quicker, way_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_chosen", {})


class Ways:
    """Two ways that take the seconds of a script, the first of them while they are compiled."""

    def __init__(self, **seconds: list[float]) -> None:
        self.seconds, self.calls, self._now = seconds, list[str](), ""
        self.made = 0

    def trials(self) -> dict[str, Callable[[], None]]:
        self.made += 1
        return {way: lambda way=way: setattr(self, "_now", way) for way in self.seconds}

    def clock(self, call: Callable[[], None]) -> float:
        call()
        self.calls.append(self._now)
        return self.seconds[self._now][(self.calls.count(self._now) - 1) % (ROUNDS + 1)]


@pytest.mark.parametrize(
    ("uva", "copy", "want"),
    [
        ([9, 1, 1, 1, 1, 1], [0, 2, 2, 2, 2, 2], "uva"),  # what compiles is not counted
        ([0, 2, 2, 2, 2, 2], [9, 1, 1, 1, 1, 1], "copy"),
        ([0, 1, 1, 1, 50, 50], [0, 2, 2, 2, 2, 2], "uva"),  # a mean would be misled
        ([0, 3, 3, 3, 0, 0], [0, 2, 2, 2, 2, 2], "copy"),
        ([1] * 6, [1] * 6, "uva"),
    ],
)
def test_the_lower_median_wins(uva: list[float], copy: list[float], want: str) -> None:
    ways = Ways(uva=uva, copy=copy)
    assert quicker(ways.trials(), ways.clock) == want
    assert ways.calls == [*WAYS] * (ROUNDS + 1)  # in turns: what disturbs one disturbs the other


def test_it_is_measured_once_for_each_device_and_size() -> None:
    ways, other = Ways(uva=[2.0] * 6, copy=[1.0] * 6), Ways(uva=[1.0] * 6, copy=[2.0] * 6)
    for _ in range(3):
        assert way_for(CPU, 4096, ways.trials, ways.clock) == "copy"
        assert way_for(CPU, 8192, other.trials, other.clock) == "uva"
        assert way_for(torch.device("cuda", 1), 4096, other.trials, other.clock) == "uva"
    assert (ways.made, other.made) == (1, 2)


def test_threads_that_ask_at_once_measure_once() -> None:
    ways, found = Ways(uva=[2.0] * 6, copy=[1.0] * 6), list[str]()

    def slow(call: Callable[[], None]) -> float:
        time.sleep(0.002)
        return ways.clock(call)

    threads = [threading.Thread(target=lambda: found.append(way_for(CPU, 4096, ways.trials, slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["copy"] * 4
    assert ways.made == 1


def test_a_trial_that_fails_is_told_and_tried_again() -> None:
    def broken() -> Any:
        raise MemoryError("no slab")

    with pytest.raises(MemoryError, match="no slab"):
        way_for(CPU, 4096, broken)
    ways = Ways(uva=[1.0] * 6, copy=[2.0] * 6)
    assert way_for(CPU, 4096, ways.trials, ways.clock) == "uva"


def test_the_environment_may_ask_for_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_OFFLOAD_TRANSFER", raising=False)
    assert asked_for() is None
    for way in WAYS:
        monkeypatch.setenv("HF_OFFLOAD_TRANSFER", way)
        assert asked_for() == way
    monkeypatch.setenv("HF_OFFLOAD_TRANSFER", "pigeon")
    with pytest.raises(ValueError, match=r"HF_OFFLOAD_TRANSFER='pigeon' .* use uva or copy"):
        asked_for()
