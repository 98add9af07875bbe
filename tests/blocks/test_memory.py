"""Host memory: alignment, lifetime of tensors, pages that are locked, errors that name the purpose."""

from __future__ import annotations

import errno
import gc
import mmap
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_offload.blocks import memory
from hf_offload.blocks.memory import host_empty, memory_for, trim_heap

FAR_TOO_MUCH = 1 << 60


def test_large_tensors_are_aligned_and_writable() -> None:
    dtype = torch.bfloat16
    tensor = host_empty((3, 1 << 20, 2), dtype)
    assert tensor.shape == (3, 1 << 20, 2)
    assert tensor.data_ptr() % (2 << 20) == 0
    part = tensor[2, 5:]
    part.fill_(7)
    del tensor
    gc.collect()
    assert (part == 7).all()
    assert host_empty((0, 4), dtype).shape == (0, 4)
    assert host_empty((3, 4), dtype).stride() == (4, 1)


@pytest.mark.skipif(memory._malloc_trim is None, reason="no malloc_trim in this C library")
def test_a_trimmed_heap_gives_back_what_lies_between_blocks_in_use() -> None:
    blocks = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(1000)]
    blocks = blocks[::2]
    before = psutil.Process().memory_info().rss
    trim_heap()
    assert before - psutil.Process().memory_info().rss > 35 << 20  # of 49 MiB
    assert all(bool((block == 1).all()) for block in blocks)


@pytest.mark.parametrize(("huge", "brief"), [(True, False), (False, False), (True, True)])
def test_what_the_host_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch, huge: bool, brief: bool) -> None:
    if not huge:  # a system that knows no huge pages leaves it to torch
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    told = r"no host memory left for a dream \(1048576\.0 TiB\); sleep less\."
    with pytest.raises(MemoryError, match=told) as caught:
        host_empty((FAR_TOO_MUCH,), torch.uint8, brief=brief, what="a dream", lower="sleep less")
    assert isinstance(caught.value, RuntimeError)
    assert "Cannot allocate memory" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_callers_who_know_torch_s_own_errors_know_these() -> None:
    """`accelerate` and the evaluation tools that use it try smaller batches after such errors."""
    with pytest.raises(MemoryError) as host, memory_for("blocks", "less"):
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8)
    told = r"no device memory left for blocks \(3\.0 KiB\); less\."
    with pytest.raises(torch.OutOfMemoryError, match=told) as device, memory_for("blocks", "less", 3072):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 KiB.")
    assert should_reduce_batch_size(host.value)
    assert should_reduce_batch_size(device.value)
    outer, inner = memory_for("the outer", "less"), memory_for("the inner", "less")
    with pytest.raises(MemoryError, match="left for the inner") as caught, outer, inner:
        raise MemoryError
    assert "outer" not in str(caught.value)
    with pytest.raises(OSError, match=r"^\[Errno 1\] no$"), memory_for("blocks", "less"):
        raise OSError(errno.EPERM, "no")


def test_without_pinned_memory_it_goes_on_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.empty

    def none_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`.")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", none_pinned)
    memory._tell_pageable.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"pinned host memory cannot be had \(CUDA error: out of memory\)") as told:
        tensors = [host_empty((size,), torch.uint8, pin=True) for size in (1000, 5 << 20)]
    assert len(told) == 1
    assert "pageable memory: the results are the same, but copies" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors.append(host_empty((1000,), torch.uint8, pin=True))
    for i, tensor in enumerate(tensors):
        assert (tensor.fill_(i) == i).all()


@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    assert host_empty((5 << 20,), torch.uint8, pin=True).is_pinned()


class Runtime:
    """Stands for `torch.cuda.cudart()`: locks pages where they lie."""

    def __init__(self) -> None:
        self.locked, self.events = dict[int, int](), list[str]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append("unlocked")
        del self.locked[address]
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_a_slab_is_locked_until_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    stream = SimpleNamespace(synchronize=lambda: runtime.events.append("waited"))
    monkeypatch.setattr(memory, "CAN_REGISTER", True)
    monkeypatch.setattr(memory, "_runtime", lambda: runtime)
    monkeypatch.setattr(memory, "stream_for", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: device.index)  # the first one is not used
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    slab = host_empty((3, 1 << 20), torch.float32, pin=True)
    assert runtime.locked == {slab.data_ptr(): slab.nbytes}
    part = slab[1:].fill_(1.0)
    del slab
    gc.collect()
    assert runtime.locked
    del part
    gc.collect()
    assert not runtime.locked
    assert runtime.events == ["waited", "waited", "unlocked"]  # first for what may still read it
