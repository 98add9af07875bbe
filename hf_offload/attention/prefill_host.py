"""Exact attention of a prompt or append in host memory: the cached blocks where they lie, and the new tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.memory import memory_for
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.cpu.kernels.prefill import faster_than_torch, pieces_of, prefill_attention
from hf_offload.scores import Scores

_REMEDY = "the prompt in chunks (generate(prefill_chunk_size=...)) needs less"


def serves(query: torch.Tensor, mask: torch.Tensor | None, scores: Scores) -> bool:
    """Whether the compiled kernel attends these queries: it reads host memory and no dense mask, and is the faster."""
    dim = query.shape[3]
    fits = query.device.type == "cpu" and dim % 16 == 0 and 16 <= dim <= 256 and scores.scale > 0
    return fits and (mask is None or mask.ndim == 2) and faster_than_torch(query.dtype)


def attend_append(
    store: BlockStore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: int,
    mask: torch.Tensor | None,
    *,
    scores: Scores,
    sinks: torch.Tensor | None,
    tile: int,
    attended: Callable[[int], None] | None,
) -> torch.Tensor:
    """Attend cached and new tokens with the new tokens' queries; causal.

    Args:
        store: the cached tokens.
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, Q, D]`, the new tokens.
        past: number of cached tokens.
        mask: bool `[B, past + Q]`, validity of keys; None: all are valid.
        scores: parameters of the model's scores.
        sinks: `[Hq]`, logits of the model's attention sinks, or None.
        tile: cached tokens that are unpacked at a time, where blocks are packed.
        attended: called after each piece with a number of keys, `past + Q` in all.

    Returns:
        `[B, Q, Hq, D]` in the query's dtype.

    Raises:
        MemoryError: no memory for the result, or for the kernel's tiles.
    """
    batch, heads, length, dim = query.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    valid = None if mask is None else mask.contiguous().view(torch.uint8).numpy()
    logits = None if sinks is None else sinks.float().contiguous().numpy()
    done = 0

    def attend(
        k: torch.Tensor, v: torch.Tensor, cached: int, first: int, sinks: np.ndarray | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal done
        buffer = functools.partial(torch.empty, dtype=torch.float32, device="cpu")
        with memory_for(f"attention of {length} queries", _REMEDY, query.numel() * dtype.itemsize):
            out, lse = buffer(batch, length, heads, dim, dtype=dtype), buffer(batch, heads, length)
        keys, begun = cached + k.shape[2], done
        for start, count in pieces_of(length, keys, batch * heads, dim):
            piece = slice(start, start + count)
            with memory_for(f"attention of {count} queries", _REMEDY):
                sums, masses = buffer(batch, count, heads, dim), buffer(batch, heads, count)
            prefill_attention(
                query[:, :, piece], k, v, store.pool.block_ptr, store.table, valid, sums, masses,
                block_size=store.block_size, cached=cached, fresh_first=first, position=past + start, sinks=sinks,
                **scores._asdict(),
            ).run()  # fmt: skip
            out[:, piece], lse[:, :, piece] = sums, masses
            share = begun + keys * (start + count) // length - done
            done += share
            if attended is not None:
                attended(share)
        return out, lse

    store.wait()
    if not store.any_packed(past):
        return attend(key, value, past, past, logits, query.dtype)[0]
    total: tuple[torch.Tensor, torch.Tensor] | None = None
    # One by one: a tile is valid until the next one is taken.
    for first, k, v in itertools.chain(read_tiles(store, past, tile), [(past, key, value)]):
        out, lse = attend(k, v, 0, first, logits if total is None else None, torch.float32)
        partial = out, lse.transpose(1, 2)
        total = partial if total is None else merge_partials([total, partial])
    assert total is not None
    return total[0].to(query.dtype)
