"""Sealing: equal digests from new keys and from stored keys, without needless reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from pairwise import covering

from hf_offload.blocks.block_store import KEEP_TOKENS, BlockStore
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.padding import Padding
from hf_offload.blocks.sealing import seal

ROWS, HEADS, DIM, SIZE, LENGTH, TILE = 2, 3, 32, 16, 24 * 16 + 5, 48
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def make_store(digest: str, device: str, packs: bool, padded: bool) -> BlockStore:
    padding, mask = Padding(SIZE), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[0, 100:103], mask[1, : 2 * SIZE + 3] = not padded, not padded
    padding.observe(mask, ROWS, LENGTH)
    return BlockStore(
        ROWS, HEADS, DIM, torch.bfloat16, block_size=SIZE, device=torch.device(device), digest=DIGESTS[digest],
        padding=padding, host_dtype="int8" if packs else None,
    )  # fmt: skip


def tokens(device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    k = torch.randn(ROWS, LENGTH, HEADS, DIM) * torch.linspace(0.1, 4, DIM) + 1
    return k.to(device, torch.bfloat16).transpose(1, 2)


def watched(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Which tokens are read back from now on."""
    found: list[range] = []

    def gather(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(range(first, first + count))
        return BlockStore.gather(store, first, count)

    monkeypatch.setattr(store, "gather", gather)
    return found


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("digest", "cuts", "padded", "packs"),
    covering(
        DIGESTS,
        [[], [7], [5, 9, 11, 300], [2 * SIZE, 2 * SIZE + 1], [130, 131, 132, 300], [64, 128]],
        [False, True],
        [False, True],
    ),
    ids=str,
)
def test_keys_at_hand_make_the_same_digests(
    digest: str, cuts: list[int], padded: bool, packs: bool, device: str
) -> None:
    k, found = tokens(device), []
    for at_hand in (False, True):
        store = make_store(digest, device, packs, padded)
        for first, stop in pairwise([0, *cuts, LENGTH]):
            new = k[:, :, first:stop]
            store.pack_old(first)
            store.append(new, -new)
            seal(store, TILE, new if at_hand else None)
            assert store.sealed == stop // SIZE
        assert store.digests is not None
        ids = torch.from_numpy(store.table[:, : store.sealed]).long()
        kept = [tensor[ids] for tensor in store.digests.blocks.tensors.values()]
        found.append([*kept, *(getattr(store.digests, name) for name in store.digests.statistics)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def test_only_the_block_that_began_before_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store, k = make_store("submean", "cpu", False, False), tokens()
    gathered = watched(store, monkeypatch)
    for first, stop in pairwise([0, 64, 64 + 5, 64 + 9, 200, LENGTH]):
        store.append(k[:, :, first:stop], k[:, :, first:stop])
        seal(store, TILE, k[:, :, first:stop])
    assert gathered == [range(64, 73), range(192, 200)]


def test_what_was_packed_on_the_way_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store, k = make_store("quest", "cpu", True, False), tokens()
    gathered = watched(store, monkeypatch)
    store.append(k, k)
    seal(store, 64, k)
    old = LENGTH // SIZE * SIZE - KEEP_TOKENS
    assert [x for part in gathered for x in part] == list(range(old))
    assert max(len(part) for part in gathered) == 64
