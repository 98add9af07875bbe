"""Tiles of a prompt gathered ahead: slow threads and streams, at most two in memory, errors, timeouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairwise import covering

from hf_offload import WorkerError
from hf_offload.blocks import memory
from hf_offload.blocks import prefill_tiles as tiles
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.cpu.thread_pool import Worker

from ._streams import Device
from .stores import DIM, HEADS, LENGTH, filled_store

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def assert_tiles(store: BlockStore, stop: int, tile: int) -> None:
    """All tokens come in order, as `gather` brings them, and are looked at only while they are there."""
    want = store.gather(0, stop)
    at = 0
    for first, k, v in read_tiles(store, stop, tile):
        assert first == at
        at += k.shape[2]
        assert k.shape[2] == min(tile, stop - first)
        for got, all_of_it in zip((k, v), want, strict=True):
            assert got.is_contiguous()
            assert got.dtype == all_of_it.dtype
            assert got.device == all_of_it.device
            assert torch.equal(got, all_of_it[:, :, first:at])
    assert at == stop


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("ends", "dtype", "packs", "threads", "delay"),
    covering(
        [(LENGTH, 64), (LENGTH, 50), (48, 16), (33, 16), (16, 16), (7, 4096), (1, 1), (0, 16)],
        [torch.bfloat16, torch.float32],
        [False, True],
        [1, 3],
        [0.0, 0.01],
    ),
    ids=str,
)
def test_tiles_are_what_gather_brings(
    ends: tuple[int, int], dtype: torch.dtype, packs: bool, threads: int, delay: float, device: str
) -> None:
    worker = Worker(threads)
    store = filled_store(worker, dtype=dtype, packs=packs, device=device)
    worker.delay = delay
    assert_tiles(store, *ends)


@pytest.mark.parametrize(("packs", "stop", "most"), [(False, LENGTH, 128), (True, LENGTH, 256), (False, 60, 60)])
def test_two_tiles_are_in_memory(monkeypatch: pytest.MonkeyPatch, packs: bool, stop: int, most: int) -> None:
    """Packed blocks are gathered as float32 first; a single tile needs no second."""
    made: list[int] = []
    real = tiles.host_empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(real(*args, **kwargs).nbytes)
        return real(*args, **kwargs)

    monkeypatch.setattr(tiles, "host_empty", counted)
    assert_tiles(filled_store(Worker(), packs=packs), stop, 64)
    assert sum(made) == most * 2 * 2 * HEADS * DIM * 2  # bytes of K and V of two rows


def test_a_gather_that_hangs_is_given_up_in_time() -> None:
    worker = Worker(timeout=0.2)
    store = filled_store(worker)
    worker.delay = 5.0
    with pytest.raises(WorkerError, match="gathering tokens 0 to 63: not done in time"):
        next(iter(read_tiles(store, LENGTH, 64)))


def test_what_is_left_half_way_hinders_nobody() -> None:
    """After an error in the attention the rest is never asked for, and the store changes while it is on its way."""
    worker = Worker()
    store = filled_store(worker)
    want = store.gather(0, 100)
    for _ in range(20):
        worker.delay = 0.002
        next(iter(read_tiles(store, LENGTH, 64)))
        reader = iter(read_tiles(store, LENGTH, 64))
        next(reader)
        store.crop(100)
        more = torch.full((2, 2, HEADS, LENGTH - 100, DIM), 3.0, dtype=torch.bfloat16)
        store.append(*more)
        worker.delay = 0.0
        for got, first in zip(store.gather(0, LENGTH), want, strict=True):
            assert torch.equal(got[:, :, :100], first)
            assert (got[:, :, 100:] == 3).all()


def on_streams(patch: pytest.MonkeyPatch, model: float, side: float, packs: bool) -> tuple[BlockStore, Device]:
    """A store on a device whose streams are that slow (seconds a piece of work)."""
    store, device = filled_store(Worker(2), packs=packs), Device(model, side)
    device.install(patch)
    patch.setattr(tiles, "host_empty", lambda shape, dtype, **kwargs: memory.host_empty(shape, dtype))
    store.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    return store, device


SPEEDS = [(0.005, 0.0), (0.0, 0.005), (0.002, 0.002)]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("model", "side"), SPEEDS)
def test_no_stream_reads_what_another_writes(
    monkeypatch: pytest.MonkeyPatch, model: float, side: float, packs: bool
) -> None:
    want = filled_store(None, packs=packs).gather(0, LENGTH)
    store, device = on_streams(monkeypatch, model, side, packs)
    got: list[torch.Tensor] = []
    with device:
        for _ in range(2):
            for _, k, v in read_tiles(store, LENGTH, 32):
                device.model.enqueue(lambda k=k, v=v: got.extend([k.clone(), v.clone()]))  # type: ignore[misc]
            device.reuse()
    device.synchronize()
    for i, tokens in enumerate(want):
        assert torch.equal(torch.cat(got[i::2], 2), torch.cat([tokens, tokens], 2))


@pytest.mark.parametrize("side", [0.0, 0.02])
def test_memory_is_given_back_when_nobody_writes_into_it(monkeypatch: pytest.MonkeyPatch, side: float) -> None:
    """Also when the reader was left half way, with a copy on its way."""
    store, device = on_streams(monkeypatch, 0.0, side, False)
    with device:
        for asked in (1, 2, 3):
            reader = iter(read_tiles(store, LENGTH, 32))
            for _ in range(asked):
                next(reader)
            del reader
            device.reuse()
    device.synchronize()
    assert len(device.taken) == 3
    assert all(tensor.isnan().all() for tensor in device.taken)


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [False, True])
def test_a_gpu_that_is_behind_reads_the_right_tiles(packs: bool) -> None:
    store = filled_store(Worker(3), packs=packs, device="cuda")
    want, got = store.gather(0, LENGTH), list[torch.Tensor]()
    for _, k, v in read_tiles(store, LENGTH, 64):
        torch.cuda._sleep(20_000_000)
        got.extend([k.clone(), v.clone()])
    torch.cuda.synchronize()
    for i, tokens in enumerate(want):
        assert torch.equal(torch.cat(got[i::2], 2), tokens)
