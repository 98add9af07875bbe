"""Blocks that a stream is writing: the host neither reads nor frees them before they are written."""

from __future__ import annotations

import contextlib
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pretended
import pytest
import torch

from hf_offload.blocks import block_store as store
from hf_offload.blocks import host_pool, memory
from hf_offload.blocks import prefill_tiles as tiles
from hf_offload.blocks.block_store import KEEP_TOKENS, BlockStore
from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu.kv_copy import store_tokens

from ._streams import Device, Event
from .stores import DIM, HEADS, LENGTH, ROWS, make_store


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a CUDA device."""

    is_cuda = True


def tokens(count: int, device: str = "stand-in") -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    both = torch.randn(2, ROWS, count, HEADS, DIM, dtype=torch.bfloat16).transpose(2, 3)
    k, v = both.as_subclass(OnDevice) if device == "stand-in" else both.to(device)
    return k, v


def host_tokens(blocks: BlockStore, first: int, count: int) -> list[torch.Tensor]:
    """K and V as the host reads them."""
    shape = (ROWS, HEADS, count, DIM)
    both = [torch.full(shape, 7.0, dtype=blocks.format.gather_dtype) for _ in range(2)]
    blocks.gathering(*both, first)()
    return [blocks.narrowed(x) for x in both]


def assert_same(got: list[torch.Tensor], want: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A stand-in for a CUDA device, whose stream writes new tokens when somebody waits for it and no earlier."""
    device, awaited = Device(0.0, 0.0), threading.Event()
    device.install(monkeypatch)

    class Awaited(Event):
        def synchronize(self) -> None:
            if self.reached is not None:
                awaited.set()
            super().synchronize()

    def later(*args: Any) -> None:
        awaited.clear()
        device.model.enqueue(lambda: awaited.wait(20) and store_tokens(*args))

    def pageable(shape: Any, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
        return memory.host_empty(shape, dtype).zero_()

    monkeypatch.setattr(torch.cuda, "Event", Awaited)

    monkeypatch.setattr(store, "store_tokens", later)
    for module in (host_pool, tiles):
        monkeypatch.setattr(module, "host_empty", pageable)
    monkeypatch.setattr(store, "sent", lambda array, where, old=None: torch.from_numpy(array.copy()))
    monkeypatch.setattr(HostPool, "pinned", True)
    monkeypatch.setattr(torch.cuda, "device", lambda where: contextlib.nullcontext())
    return device


def test_an_append_does_not_wait_and_a_reader_does(device: Device) -> None:
    """So does who copies a block that two rows share."""
    blocks, (k, v), (more, other) = make_store(device="cuda"), tokens(LENGTH), tokens(3)
    for first, stop in pairwise([0, 37, 38, LENGTH]):
        blocks.append(k[:, :, first:stop], v[:, :, first:stop])
        records = blocks.pool.slabs[0]
        assert int((records != 0).sum()) <= 2 * first * ROWS * HEADS * DIM
        assert_same(host_tokens(blocks, 0, stop), [k[:, :, :stop], v[:, :, :stop]])
    blocks.append(more, more)
    blocks.select_rows(np.array([1, 1]))
    blocks.append(other, other)
    want = [torch.cat([torch.cat([x, more], 2)[[1, 1]], other], 2) for x in (k, v)]
    assert_same(host_tokens(blocks, 0, LENGTH + 6), want)


def test_blocks_are_packed_when_they_are_there(device: Device) -> None:
    (k, v), found = tokens(KEEP_TOKENS + 32), []
    for kind in ("cuda", "cpu"):
        blocks = make_store(packs=True, device=kind)
        for part in (slice(0, KEEP_TOKENS), slice(KEEP_TOKENS, KEEP_TOKENS + 7), slice(KEEP_TOKENS + 7, None)):
            blocks.append(*(x[:, :, part].as_subclass(OnDevice if kind == "cuda" else torch.Tensor) for x in (k, v)))
            blocks.pack_old(blocks.length)
        found.append(host_tokens(blocks, 0, blocks.length))
    assert_same(*found)


def test_memory_is_given_back_when_nobody_writes_into_it(device: Device) -> None:
    blocks, (k, v) = make_store(device="cuda"), tokens(LENGTH)
    blocks.append(k, v)
    slabs = list(blocks.pool.slabs)
    assert not slabs[0].any()
    del blocks
    assert slabs[0].any()  # or whoever had it next would find these tokens in it


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [False, True])
def test_a_gpu_that_is_behind_holds_nobody_up_until_its_blocks_are_read(packs: bool) -> None:
    blocks = make_store(packs=packs, device="cuda", worker=Worker(2))
    k, v = tokens(KEEP_TOKENS, "cuda")
    make_store(device="cuda").append(k, v)  # compiles the kernel, which takes longer than the stream sleeps
    blocks.reserve(KEEP_TOKENS)
    torch.cuda.synchronize()
    for count in (37, 1, 90):
        first = blocks.length
        torch.cuda._sleep(200_000_000)
        blocks.append(k[:, :, first : first + count], v[:, :, first : first + count])
        assert not (pretended.LAGS and torch.cuda.current_stream().query())
        assert_same(host_tokens(blocks, 0, blocks.length), [x[:, :, : blocks.length] for x in (k, v)])
    torch.cuda._sleep(200_000_000)
    blocks.append(k, v)
    parts = [(a.clone(), b.clone()) for _, a, b in read_tiles(blocks, blocks.length, 64)]
    assert_same([torch.cat(part, 2) for part in zip(*parts, strict=True)], [torch.cat([x, x], 2) for x in (k, v)])
