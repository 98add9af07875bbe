"""The two things that a layer does: take in many tokens exactly, or attend with one by the policy's plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hf_offload.attention.dense import append_attention
from hf_offload.attention.exchange import exchangeable, least_wanted, transfer
from hf_offload.attention.partial import merge_partials
from hf_offload.attention.step import Step, query_array
from hf_offload.cache.layer import HybridLayer

FEW_QUERIES = 16
"""Appends of at most so many tokens read the cached blocks where they lie; more are worth bringing them together."""


def append(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Take in a prompt, a chunk of one, or a new turn: exact attention, then the tokens go to the host.

    Args:
        layer: the layer; its announced K and V are `key` and `value` `[B, Hkv, Q, D]`.
        query: `[B, Hq, Q, D]`.
        mask: None, `[B, past + Q]` or dense (see `MaskPieces`).
        scale, softcap, sinks: as the model gives them.

    Returns:
        `[B, Q, Hq, D]`.
    """
    store = layer.store
    assert store is not None
    layer.unplace()
    fresh = layer.pending is not None
    past = store.length if fresh else store.length - key.shape[2]
    store.pack_old(past)
    tile = layer.settings.prefill_tile
    few = fresh and 0 < query.shape[2] <= FEW_QUERIES and past > 0 and (mask is None or mask.ndim == 2)
    before = _attend_past(layer, query, scale, softcap) if few and store.device.type == "cpu" else None
    tiles = store.tiles(past, tile) if before is None else ()
    out = append_attention(
        query, key, value, past, tiles, mask, scale=scale, softcap=softcap, sinks=sinks, tile=tile, before=before
    )
    layer.pending = None
    if fresh:
        store.append(key, value)
        store.seal(tile)
    layer.scale, layer.softcap = scale, softcap
    window = layer.policy.query_window
    if window and layer.has_slots:
        queries = query[:, :, -window:].float()
        if layer.last_queries is not None and queries.shape[2] < window:
            queries = torch.cat([layer.last_queries, queries], 2)[:, :, -window:]
        layer.last_queries = queries.clone()
    return out


def _attend_past(
    layer: HybridLayer, query: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend all cached tokens where they lie, with a few queries `[B, Hq, Q, D]` as more heads of each group."""
    store = layer.store
    assert store is not None
    batch, heads, length, dim = query.shape
    step = Step(layer, query_array(query).reshape(batch, heads * length, dim), store.length, scale, softcap)
    out, lse = step.attend_host(step.all_blocks())
    return out.view(query.shape), lse.view(query.shape[:3])


def place(layer: HybridLayer) -> None:
    """Decide and load what is resident, at the first decode after a prompt or append; otherwise nothing."""
    store, resident = layer.store, layer.resident
    if resident is None or not layer.unplaced:
        return
    assert store is not None
    resident.clear()
    resident.reserve(store.num_blocks + 1)
    starts_block = store.length % store.block_size == 0
    slots = resident.slots - starts_block
    queries = layer.last_queries
    window = np.empty((0,), np.float32) if queries is None else query_array(queries)
    step = Step(layer, window, store.length, layer.scale, layer.softcap)
    chosen = layer.policy.place(step, slots)
    counts = np.minimum(chosen.counts, slots)
    width = chosen.blocks.shape[2]
    # Ascending order ends with the tail, which must have a slot: what does not fit is left out from the front.
    meant = (np.arange(width) >= (chosen.counts - counts)[..., None]) & (np.arange(width) < chosen.counts[..., None])
    rows, heads, column = np.nonzero(meant)
    slot = column - (chosen.counts - counts)[rows, heads]
    layer.stats.placement_bytes += transfer(step, rows, heads, slot, chosen.blocks[meant], "placement")
    resident.wait()
    layer.unplaced = False
    layer.stats.placements += 1
    if starts_block:
        _open_block(layer, step)


def _open_block(layer: HybridLayer, step: Step) -> None:
    """Give the block that the next token starts a slot, in place of the least wanted block."""
    store, resident = layer.store, layer.resident
    assert store is not None
    assert resident is not None
    block = store.length // store.block_size
    resident.reserve(block + 1)
    rows, heads = np.indices((store.batch, store.num_kv_heads)).reshape(2, -1)
    slots = [least_wanted(step, b, h, exchangeable(step, b, h))[0] for b, h in zip(rows, heads, strict=True)]
    resident.assign(rows, heads, np.array(slots), np.full(len(rows), block, np.int32))


def decode(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one token: append it, run the policy's plan on both sides, merge.

    Args:
        layer: the layer, with at least one token cached.
        query: `[B, Hq, 1, D]`; key, value: `[B, Hkv, 1, D]`.
        scale, softcap, sinks: as the model gives them.

    Returns:
        `[B, 1, Hq, D]` in the query's dtype.
    """
    store, resident, stats = layer.store, layer.resident, layer.stats
    assert store is not None
    layer.scale, layer.softcap = scale, softcap
    fresh, layer.pending = layer.pending is not None, None
    place(layer)
    if resident is not None:
        with waiting(layer):
            resident.wait()  # what the last step recalled is visible from here on
    if fresh:
        _append_token(layer, key, value)
    array = query_array(query[:, :, 0])
    step = Step(layer, array, store.length, scale, softcap)
    plan = layer.policy.plan(step)
    partials = []
    if plan.device is not None and plan.device.total:
        partials.append(step.attend_device(plan.device, query[:, :, 0], store.length, softcap))
    if plan.host is not None and (resident is None or plan.host.total):
        partials.append(_to(query.device, step.attend_host(plan.host)))
    if plan.ahead is not None:
        with waiting(layer):
            partials.append(_to(query.device, plan.ahead.partial(array)))
        stats.query_cosine += _cosine(plan.ahead.query, array)
        stats.queries += 1
    layer.ahead = None
    logits = None if sinks is None else sinks.float().view(1, -1)
    out = merge_partials(partials, logits)[0]
    stats.steps += 1
    if resident is not None:
        stats.cpu_ratio_by_step.append(step.cpu_ratio(plan))
    store.pack_old(store.length - 1)  # before anything reads this layer's blocks again; the new token may be undone
    layer.policy.after_layer(step, plan)
    _close_block(layer, step)
    return out.to(query.dtype).unsqueeze(1)


def _append_token(layer: HybridLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    store, resident = layer.store, layer.resident
    assert store is not None
    if resident is None:
        store.append(key, value)
        return
    resident.write_token(key[:, :, 0], value[:, :, 0], store.length)
    store.reserve(store.length + 1)
    store.length += 1


def _close_block(layer: HybridLayer, step: Step) -> None:
    """When the newest block is full: store it on the host, build its digest, open the next one."""
    store, resident = layer.store, layer.resident
    assert store is not None
    if store.length % store.block_size or store.sealed == store.num_blocks:
        return
    if resident is not None:
        resident.store_blocks(store.sealed, store.num_blocks, store.length)
    store.seal(layer.settings.prefill_tile)
    if resident is not None:
        _open_block(layer, step)


def _to(device: torch.device, partial: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return partial if device.type == "cpu" else (partial[0].to(device), partial[1].to(device))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(((a * b).sum(-1) / np.maximum(norms, 1e-12)).mean())


@contextmanager
def waiting(layer: HybridLayer) -> Iterator[None]:
    """Count the time inside as time that the model's thread waited."""
    start = time.perf_counter()
    try:
        yield
    finally:
        layer.stats.wait_seconds += time.perf_counter() - start
