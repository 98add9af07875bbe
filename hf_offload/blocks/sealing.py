"""Building the digests of full blocks (sealing) on the model's device; those of the host are copied down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hf_offload.blocks import digests as statistics
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.device_mirror import sent


def seal(store: BlockStore, tile: int, newest: torch.Tensor | None = None, *, wait: bool = True) -> None:
    """Build the digests of all full blocks that have none, `tile` tokens at a time.

    Digests with statistics begin when the full blocks of a row hold `STATISTICS_TOKENS`: no block of any row has a
    digest before that.

    Args:
        store: the blocks.
        tile: tokens of a piece.
        newest: keys `[B, Hkv, T, D]` of the last T tokens, on the model's device; other keys are gathered.
        wait: whether every row must hold enough tokens, as while a prompt is read; else one row is enough.
    """
    if store.device.type == "cuda":  # kernels launch on the current device, and a model may be on several
        with torch.cuda.device(store.device):
            _seal(store, tile, newest, wait)
    else:
        _seal(store, tile, newest, wait)


def seal_waiting(store: BlockStore, tile: int) -> None:
    """At a decode step: build the digests for which the prompt has waited for a row with fewer tokens, if any."""
    digests = store.digests
    if digests is not None and not digests.frozen and store.length >= statistics.STATISTICS_TOKENS:
        seal(store, tile, wait=False)


def _seal(store: BlockStore, tile: int, newest: torch.Tensor | None, wait: bool) -> None:
    digests, size, full = store.digests, store.block_size, store.length // store.block_size
    if digests is None:
        store.sealed = full
        return
    if newest is None:
        newest = torch.empty(store.batch, store.num_kv_heads, 0, store.head_dim, dtype=store.dtype, device="cpu")
    start = store.length - newest.shape[2]
    packed = store.packed_on_arrival(start, store.length)
    if packed:  # digests of packed blocks are built from the packed keys
        newest = newest[:, :, packed.stop * size - start :]
    start_block = store.sealed
    if not digests.frozen:
        start_block = full
        if _holds_enough(store, full * size, wait):
            store.own(range(full))  # other holders of these blocks may have other statistics
            digests.freeze(lambda: _token_tiles(store, newest, full * size, tile))
            start_block = 0
    step = max(tile // size, 1)
    for first in range(start_block, full, step):
        count = min(step, full - first)
        k = _keys(store, newest, first * size, count * size)
        k = k.view(store.batch, store.num_kv_heads, count, size, store.head_dim).transpose(1, 2)
        valid = store.padding.valid[:, first * size : (first + count) * size].reshape(-1, size) != 0
        ids = store.table[:, first : first + count].astype(np.int64).ravel()
        with digests.lock:
            digests.seal_from(sent(ids, digests.device), k.flatten(0, 1), sent(valid, k.device))
    store.sealed = full


def _holds_enough(store: BlockStore, stop: int, wait: bool) -> bool:
    """Whether the first `stop` tokens are enough for statistics; `wait` as in `seal`."""
    if stop < statistics.STATISTICS_TOKENS:
        return False
    enough = np.count_nonzero(store.padding.valid[:, :stop], axis=1) >= statistics.STATISTICS_TOKENS
    return bool(enough.all() if wait else enough.any())


def _keys(store: BlockStore, newest: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Keys of `count` tokens from `first` on, `[B, Hkv, count, D]` contiguous, on the model's device."""
    device = store.device
    start = store.length - newest.shape[2]
    cached = min(max(start - first, 0), count)
    if cached == count:
        return store.gather(first, count)[0].to(device)
    at_hand = newest[:, :, first + cached - start : first + count - start]
    keys = torch.cat([store.gather(first, cached)[0], at_hand], 2) if cached else at_hand.contiguous()
    return keys.to(device)


def _token_tiles(
    store: BlockStore, newest: torch.Tensor, stop: int, tile: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `stop` tokens in pieces of at most `tile`: keys, and validity on the host."""
    tile = max(tile - tile % 2, 2)
    for first in range(0, stop, tile):
        count = min(tile, stop - first)
        yield _keys(store, newest, first, count), torch.from_numpy(store.padding.valid[:, first : first + count] != 0)
