"""Copies of blocks into slots: equal bytes at once and by a stage, waits, failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.blocks import copying, host_pool, resident_set
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.copying import Moves, copies, staged
from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.cpu.thread_pool import Worker, WorkerError

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


def test_what_a_failed_copy_carried_is_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = filled_store(), torch.ones(ROWS, HEADS, dtype=torch.int32)
    held = ResidentSet(store, SLOTS, DeviceMirror(store.padding, store.device, Worker()))
    held.reserve()
    held.block_of[:, :, 2], held.slot_of[:, :, 5] = 5, 2
    monkeypatch.setattr(resident_set, "copies", lambda *given: lambda: 1 / 0)
    held.fetch(Moves(2 * one[..., None], 5 * one[..., None], one), "a recall")
    with pytest.raises(WorkerError, match="a recall failed: ZeroDivisionError"):
        held.wait()
    assert (held.block_of == -1).all()
    assert (held.slot_of == -1).all()


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
