"""Sealing: equal digests from new keys and from stored keys, without needless reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from pairwise import covering

from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.sealing import seal

from .stores import DIM, HEADS, LENGTH, ROWS, SIZE, make_store

TILE = 48
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def padded_mask() -> torch.Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[0, 100:103], mask[1, : 2 * SIZE + 3] = False, False
    return mask


def tokens(device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    k = torch.randn(ROWS, LENGTH, HEADS, DIM) * torch.linspace(0.1, 4, DIM) + 1
    return k.to(device, torch.bfloat16).transpose(1, 2)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("digest", "cuts", "padded", "packs"),
    covering(
        DIGESTS,
        [[], [5, 9, 11, 300], [2 * SIZE, 2 * SIZE + 1], [130, 131, 132, 300], [64, 128]],
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
        store = make_store(digest=digest, device=device, packs=packs, mask=padded_mask() if padded else None)
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
