"""Block stores for tests."""

from __future__ import annotations

import torch

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.padding import Padding
from hf_offload.cpu.thread_pool import Worker

ROWS, HEADS, DIM, SIZE = 2, 3, 32, 16
LENGTH = 24 * SIZE + 5
BFLOAT16 = torch.bfloat16


def make_store(
    dtype: torch.dtype = BFLOAT16, *, packs: bool = False, device: str = "cpu", digest: str | None = None,
    worker: Worker | None = None, mask: torch.Tensor | None = None, length: int = LENGTH,
) -> BlockStore:  # fmt: skip
    """An empty store of two rows that knows the mask of its tokens."""
    padding = Padding(SIZE)
    padding.observe(mask, ROWS, length)
    return BlockStore(
        ROWS, HEADS, DIM, dtype, block_size=SIZE, device=torch.device(device), padding=padding, worker=worker,
        digest=None if digest is None else DIGESTS[digest], host_dtype="int8" if packs else None,
    )  # fmt: skip


def filled_store(
    worker: Worker | None = None, *, dtype: torch.dtype = BFLOAT16, packs: bool = False, device: str = "cpu"
) -> BlockStore:
    store = make_store(dtype, packs=packs, device=device, worker=worker)
    torch.manual_seed(0)
    store.append(*torch.randn(2, ROWS, HEADS, LENGTH, DIM, dtype=dtype, device=device))
    store.pack_old(LENGTH)
    return store
