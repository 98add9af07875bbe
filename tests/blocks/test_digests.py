"""Digests: the CPU kernels against the torch forms, the bound of Quest, outliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload.blocks.digests import DIGESTS, DigestStore
from hf_offload.cpu.kernels.block_topk import choose_blocks
from hf_offload.scores import Scores

HEADS, GROUP, DIM = 2, 2, 32


def sealed(name: str, block: int, blocks: int = 12, spread: float = 1.0):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(blocks, HEADS, block, DIM, generator=generator) * spread + 2.0
    valid = torch.ones(blocks, block, dtype=torch.bool)
    valid[1, : block // 2 + 1] = False
    valid[4] = False
    poisoned = k.masked_fill(~valid[:, None, :, None], float("nan"))
    store = DIGESTS[name](HEADS, DIM, block, torch.device("cpu"))
    store.reserve(blocks + 5)
    if not store.frozen:
        store.freeze(lambda: [(poisoned.transpose(0, 1).reshape(1, HEADS, -1, DIM), valid.reshape(1, -1))])
    store.seal(torch.arange(blocks) + 2, poisoned, valid)
    query = torch.randn(1, HEADS * GROUP, DIM, generator=generator)
    table = np.arange(2, blocks + 2, dtype=np.int32)[None]
    return store, k, valid, query, table


def log_masses(store: DigestStore, query: torch.Tensor, table: np.ndarray, *scores: Any) -> torch.Tensor:
    limits = torch.tensor([0, table.shape[1]], dtype=torch.int32)
    return store.score(query, torch.from_numpy(table), limits, Scores(*scores))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("block", [8, 32, 64, 128])
@pytest.mark.parametrize("name", DIGESTS)
def test_launch_equals_torch(name: str, block: int, softcap: float | None) -> None:
    store, k, _, query, table = sealed(name, block)
    masses, score = np.full((1, HEADS * GROUP, 16), np.nan, np.float32), np.full((1, HEADS, 16), np.nan, np.float32)
    tail = np.zeros((1, HEADS * GROUP), np.float32)
    arrays = store.arrays(query.numpy(), 0.2)
    choose_blocks(
        query.numpy(), arrays, table, k.shape[0], masses, tail, score, join="raw", scale=0.2, softcap=softcap,
        kv_dtype=torch.float32,
    )()  # fmt: skip
    want = log_masses(store, query, table, 0.2, softcap).view(HEADS, GROUP, -1).mean(1)
    got = torch.from_numpy(score)[0, :, : k.shape[0]]
    assert torch.equal(got.isneginf(), want.isneginf())
    assert want.isneginf()[:, 4].all()
    # For sub-means the kernel rounds the query to 8 bits.
    assert torch.allclose(got, want, atol=0.03 if name == "submean" else 1e-4, rtol=1e-4)


def test_quest_bounds_every_token() -> None:
    store, k, valid, query, table = sealed("quest", 32)
    bound = log_masses(store, query, table, 1.0)
    grouped = query.view(1, HEADS, GROUP, DIM)
    scores = torch.einsum("bhgd,nhtd->bhgnt", grouped, k).masked_fill(~valid, float("-inf"))
    assert (bound >= scores.amax(-1).flatten(1, 2) - 1e-3).all()


@pytest.mark.parametrize("tile", [16, 512])
def test_a_key_unlike_the_others_is_an_outlier(tile: int) -> None:
    """One row is padded; statistics do not depend on the tiles that they are made from, nor on other rows."""
    block, blocks = 32, 60
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(2, HEADS, blocks * block, DIM, generator=generator)
    k[1, 1, 1001, :3] = 12.0  # the other channels' codes are rounded by so large a scale
    k[1, 1, 1001, 3:6] = 5.0
    valid = torch.ones(2, blocks * block, dtype=torch.bool)
    valid[0, :700] = False
    store = DIGESTS["submean"](HEADS, DIM, block, torch.device("cpu"))
    store.reserve(2 * blocks)
    store.freeze(lambda: [(k, valid)])
    usual = {name: getattr(store, name) for name in store.statistics}
    store.freeze(lambda: zip(k.split(tile, 2), valid.split(tile, 1), strict=True))
    for name, values in usual.items():
        torch.testing.assert_close(getattr(store, name), values)
    for row, first in enumerate((700, 0)):
        one = DIGESTS["submean"](HEADS, DIM, block, torch.device("cpu"))
        mine, some = slice(row, row + 1), slice(first, None)
        one.freeze(lambda mine=mine, some=some: [(k[mine, :, some], valid[mine, some])])
        for name, values in usual.items():
            torch.testing.assert_close(getattr(one, name)[0], values[row])
    keys = k.view(2, HEADS, blocks, block, DIM).transpose(1, 2).flatten(0, 1)
    store.seal(torch.arange(2 * blocks), keys, valid.view(-1, block))
    marked = store.blocks.tensors["sizes"] & 0x8000 != 0
    place = blocks + 1001 // block, 1, 1001 % block // 2
    assert marked[place]
    assert marked.sum() < 0.003 * marked.numel()
    assert not marked[:21].any()  # padding
