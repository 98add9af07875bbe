"""Memory that is page-locked where it lies, with CUDA's functions replaced."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_offload.blocks import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")


class Runtime:
    """Stands for `torch.cuda.cudart()`.

    Args:
        refuses: whether it locks nothing.
    """

    def __init__(self, refuses: bool) -> None:
        self.code, self.locked = (2 if refuses else 0), {}
        self.events: list[str] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append("unlocked")
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Runtime:
    made = Runtime(getattr(request, "param", False))
    stream = SimpleNamespace(synchronize=lambda: made.events.append("waited"))
    monkeypatch.setattr(memory, "CAN_REGISTER", True)
    monkeypatch.setattr(memory, "_runtime", lambda: made)
    monkeypatch.setattr(memory, "stream_for", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: device.index)  # the first one is not used
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    memory._tell_pageable.cache_clear()
    return made


def test_a_slab_is_locked_until_nobody_holds_it(runtime: Runtime) -> None:
    slab = memory.host_empty((3, 1 << 20), torch.float32, pin=True)
    assert runtime.locked == {slab.data_ptr(): slab.nbytes}
    assert slab.data_ptr() % (2 << 20) == 0
    part = slab[1:]
    del slab
    gc.collect()
    assert runtime.locked
    del part
    gc.collect()
    assert not runtime.locked
    assert runtime.events == ["waited", "waited", "unlocked"]  # first for what may still read it


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_memory_that_cannot_be_locked_is_told_and_used(runtime: Runtime) -> None:
    with pytest.warns(RuntimeWarning, match="pinned host memory cannot be had .cudaHostRegister: 2."):
        slab = memory.host_empty((1 << 20,), torch.float32, pin=True)
    slab.fill_(1.0)
    del slab
    gc.collect()
    assert not runtime.events
