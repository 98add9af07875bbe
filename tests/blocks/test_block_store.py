"""The block store with int8 blocks: all ways to store tokens, and unpacked recent blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pools import used_blocks
from references import cpu as reference

from hf_offload.blocks.block_store import KEEP_TOKENS, BlockStore
from hf_offload.blocks.sealing import seal

from .stores import DIM, HEADS, LENGTH, ROWS, SIZE, make_store


def packing(dtype: torch.dtype = torch.bfloat16) -> BlockStore:
    return make_store(dtype, packs=True, length=LENGTH + 64)


def tokens(count: int = LENGTH, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    k, v = (torch.randn(ROWS, count, HEADS, DIM, dtype=dtype).transpose(1, 2) for _ in range(2))  # strided
    return k, v


def fill(store: BlockStore, k: torch.Tensor, v: torch.Tensor, steps: list[int]) -> None:
    for first, stop in zip([0, *steps], [*steps, k.shape[2]], strict=True):
        store.append(k[:, :, first:stop], v[:, :, first:stop])
        seal(store, 64)
        store.pack_old(store.length)


def expected(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with the old blocks as their codes say."""
    old = (k.shape[2] // SIZE - -(-KEEP_TOKENS // SIZE)) * SIZE
    shape = (ROWS, HEADS, -1, SIZE, DIM)
    packed = reference.pack_block(*(x[:, :, :old].double().reshape(shape) for x in (k, v)))
    return tuple(  # type: ignore[return-value]
        torch.cat([p.flatten(2, 3).float().to(x.dtype), x[:, :, old:]], 2) for p, x in zip(packed, (k, v), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [[], [SIZE * 9, SIZE * 9 + 1], [130, 131, 132, 300], list(range(1, LENGTH))], ids=len)
def test_every_way_in_keeps_the_same(steps: list[int], dtype: torch.dtype) -> None:
    store, (k, v) = packing(dtype), tokens(dtype=dtype)
    fill(store, k, v, steps)
    for got, want in zip(store.gather(0, LENGTH), expected(k, v), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(store.gather(SIZE + 3, 2 * SIZE), expected(k, v), strict=True):
        assert torch.equal(got, want[:, :, SIZE + 3 : 3 * SIZE + 3])


def test_old_blocks_take_half_the_memory() -> None:
    k, v = tokens(200 * SIZE)
    plain, packed = make_store(length=LENGTH + 64), packing()
    for store in (plain, packed):
        fill(store, k, v, [100 * SIZE])
    young = KEEP_TOKENS // SIZE * ROWS * plain.pool.block_bytes
    assert packed.host_bytes - young < 0.6 * (plain.host_bytes - young)
    held = sum(slab.nbytes for slab in [*packed.pool.slabs, *packed.pool.packed_slabs])
    assert held < 0.85 * plain.host_bytes  # what is allocated shrinks with it


def test_a_crop_within_the_young_blocks_loses_nothing() -> None:
    store, (k, v) = packing(), tokens()
    fill(store, k, v, [])
    want = expected(k, v)
    store.crop(LENGTH - KEEP_TOKENS + SIZE)
    fill(store, k[:, :, store.length :], v[:, :, store.length :], [])
    for got, kept in zip(store.gather(0, LENGTH), want, strict=True):
        assert torch.equal(got, kept)


def test_a_crop_into_packed_blocks_can_be_appended_to() -> None:
    store, (k, v) = packing(), tokens()
    fill(store, k, v, [])
    before = store.gather(0, LENGTH)
    store.crop(5 * SIZE + 3)
    assert used_blocks(store.pool) == ROWS * 6
    for got, want in zip(store.gather(0, store.length), before, strict=True):
        assert torch.equal(got, want[:, :, : store.length])
    fill(store, k[:, :, store.length :], v[:, :, store.length :], [])
    packed = store.pool.block_ptr[store.table[:, : LENGTH // SIZE]] & 1 == 1
    assert packed[:, : store.packed_blocks].all()
    got, want = store.gather(0, LENGTH)[0], expected(k, v)[0]
    again = slice(5 * SIZE, 6 * SIZE)  # packed twice
    assert torch.equal(got[:, :, : 5 * SIZE], want[:, :, : 5 * SIZE])
    assert torch.equal(got[:, :, 6 * SIZE :], want[:, :, 6 * SIZE :])
    assert (got[:, :, again].float() - k[:, :, again].float()).abs().max() < 0.06


def test_rows_that_share_blocks_part_where_they_differ() -> None:
    store, (k, v) = packing(), tokens()
    fill(store, k, v, [])
    store.select_rows(np.array([1, 1, 0]))
    more = torch.randn(3, HEADS, 20 * SIZE, DIM, dtype=torch.bfloat16)
    store.append(more, -more)
    store.padding.observe(None, ROWS, store.length)
    seal(store, 64)
    store.pack_old(store.length)
    got = store.gather(0, store.length)[0]
    for row, source in enumerate((1, 1, 0)):
        whole = torch.cat([k[source], more[row]], 1)
        assert (got[row].float() - whole.float()).abs().max() < 0.03
        tail = got[row, :, -KEEP_TOKENS:]
        assert torch.equal(tail, more[row, :, -KEEP_TOKENS:])


def test_the_largest_numbers_stay_finite() -> None:
    store, (k, v) = packing(torch.float16), tokens(dtype=torch.float16)
    k[0, 0, 5, 3], v[1, 2, 9, 7] = 65504, -65504
    fill(store, k, v, [])
    for got in store.gather(0, LENGTH):
        assert got.isfinite().all()
