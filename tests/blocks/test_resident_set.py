"""Copies of blocks into slots: equal bytes at once and by a stage, waits, failures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_offload.blocks import copying, host_pool
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.copying import Moves, copies, staged
from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu import kv_copy

from ._streams import Device
from .stores import DIM, HEADS, LENGTH, ROWS, SIZE, filled_store

SLOTS, BLOCKS = 6, LENGTH // SIZE


def make_moves(seed: int, slots: int = SLOTS, device: str = "cpu") -> Moves:
    """Ragged lists, with garbage behind the counts."""
    rng = np.random.default_rng(seed)
    into, chosen = (torch.full((ROWS, HEADS, slots), 10**8, dtype=torch.int32) for _ in range(2))
    counts = torch.from_numpy(rng.integers(0, slots + 1, (ROWS, HEADS), np.int32))
    for b in range(ROWS):
        for h in range(HEADS):
            count = int(counts[b, h])
            into[b, h, :count] = torch.from_numpy(rng.permutation(slots)[:count].astype(np.int32))
            chosen[b, h, :count] = torch.from_numpy(rng.permutation(BLOCKS)[:count].astype(np.int32))
    return Moves(*(part.to(device) for part in (into, chosen, counts)))


def moved(store: BlockStore, pool: torch.Tensor, moves: Moves) -> torch.Tensor:
    """The pool as it should be after some moves; the store's blocks are not packed."""
    k, v = store.gather(0, BLOCKS * SIZE)
    want, blocks = pool.clone(), torch.stack((k, v), 2).unflatten(3, (BLOCKS, SIZE))
    for b in range(ROWS):
        for h in range(HEADS):
            for m in range(int(moves.counts[b, h])):
                want[b, h, moves.slots[b, h, m]] = blocks[b, h, :, moves.blocks[b, h, m]]
    return want


def empty_pool(store: BlockStore) -> torch.Tensor:
    return torch.full((ROWS, HEADS, SLOTS, 2, SIZE, DIM), 7.0, dtype=store.dtype)


@pytest.mark.parametrize(
    ("piece", "dtype"),
    [(1, torch.float32), (3 * 2 * SIZE * DIM * 2, torch.float16), (1 << 20, torch.bfloat16)],
)
def test_copies_bring_the_same_bytes_at_once_and_by_a_stage(
    monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype
) -> None:
    """A stage, as where the slots lie on a device, in pieces."""
    store, moves = filled_store(dtype=dtype), make_moves(1)
    want, pools = moved(store, empty_pool(store), moves), [empty_pool(store) for _ in range(2)]
    assert not torch.equal(want, pools[0])
    copies(store, pools[0], moves)()
    monkeypatch.setattr(copying, "PIECE_BYTES", piece)
    rows, heads, column = (torch.arange(SLOTS) < moves.counts[..., None]).numpy().nonzero()
    block = store.table[rows, moves.blocks.numpy()[rows, heads, column]]
    index = (rows * HEADS + heads) * SLOTS + moves.slots.numpy()[rows, heads, column]
    staged(store, pools[1].flatten(0, 2), store.pool.addresses(block, heads), index)()
    for pool in pools:
        assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))


def on_streams(patch: pytest.MonkeyPatch, model: float, side: float, *, pinned: bool) -> tuple[ResidentSet, Device]:
    """A resident set on a device whose streams are that slow (seconds a piece of work)."""
    device = Device(model, side)
    device.install(patch)
    store = filled_store()
    store.pool._plain.pinned = store.pool._packed.pinned = pinned
    mirror = DeviceMirror(store.padding, store.device, Worker(2))
    held = ResidentSet(store, SLOTS, mirror)
    held.reserve()
    held.pool.fill_(7.0)
    mirror.stream = device.make_stream(None)  # type: ignore[assignment]
    store.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    tables = torch.from_numpy(store.pool.block_ptr), torch.from_numpy(store.table)
    held.tables = SimpleNamespace(block_ptr=lambda: tables[0], table=lambda: tables[1])  # type: ignore[assignment]
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    fetch = kv_copy.fetch
    patch.setattr(kv_copy, "fetch", lambda *args, **packed: device.current.enqueue(lambda: fetch(*args, **packed)))
    return held, device


SPEEDS = [(0.02, 0.0), (0.0, 0.02), (0.004, 0.004)]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("model", "side"), SPEEDS)
def test_what_is_on_its_way_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, model: float, side: float, pinned: bool
) -> None:
    plain, (held, device) = filled_store(), on_streams(monkeypatch, model, side, pinned=pinned)
    want, got = [empty_pool(plain)], list[torch.Tensor]()
    with device:
        for seed in range(4):
            moves = make_moves(seed)
            want.append(moved(plain, want[-1], moves))
            device.model.enqueue(lambda: got.append(held.pool.clone()))  # reads the slots before they change hands
            held.fetch(moves, "a recall")
            held.wait()
        device.model.enqueue(lambda: got.append(held.pool.clone()))
    device.synchronize()
    assert len(got) == len(want)
    for now, then in zip(got, want, strict=True):
        assert torch.equal(now, then)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:pinned host memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpu_gets_the_same_bytes_from_either_memory(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, dtype: torch.dtype
) -> None:
    with monkeypatch.context() as patch:
        if not pinned:
            patch.setattr(host_pool, "host_empty", lambda *args, pin, **kwargs: host_empty(*args, **kwargs))
        store = filled_store(dtype=dtype, device="cuda")
    assert store.pool.pinned == pinned
    held = ResidentSet(store, SLOTS, DeviceMirror(store.padding, store.device, Worker()))
    held.mirror.worker.delay = 0.002
    want = held.pool.cpu()
    for seed in range(4):
        moves = make_moves(seed, device="cuda")
        want = moved(filled_store(dtype=dtype), want, Moves(*(part.cpu() for part in moves)))
        torch.cuda._sleep(20_000_000)
        held.fetch(moves, "a recall")
        held.wait()
        assert torch.equal(held.pool.cpu(), want)
