"""A layer's two operations: exact attention of a prompt or append, and a decode step by the policy's plan."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from hf_offload.attention import decode_split, prefill_host
from hf_offload.attention.prefill import append_attention
from hf_offload.attention.step_cpu import CpuStep, Form
from hf_offload.attention.step_split import SplitStep
from hf_offload.blocks.last_queries import joined
from hf_offload.blocks.memory import trim_heap_by_turns
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.blocks.sealing import seal, seal_waiting
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.torch_modes import uncast
from hf_offload.scores import Scores

FEW_QUERIES = 16
"""Appends of at most this many tokens attend the cached blocks as decode steps do."""
LONG = 1024
"""Tokens of an append to a model on the CPU from which on the heap is trimmed."""
MANY_IN_HALF = 1000
"""Appends of more tokens in float16 to a model on the CPU are warned of."""


def append(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with a prompt, a chunk of one, or a new turn, exactly, and store its tokens on the host.

    Args:
        layer: the layer; `key` and `value` are its pending K and V, unless another layer has stored them.
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, Q, D]`.
        mask: None, `[B, past + Q]` or dense (see `MaskPieces`).
        scores: parameters of the model's scores.
        sinks: `[Hq]`, logits of the model's attention sinks, or None.

    Returns:
        `[B, Q, Hq, D]` in the query's dtype.
    """
    store = layer.store
    assert store is not None
    layer.unplace()
    fresh = layer.pending is not None
    past = store.length if fresh else store.length - key.shape[2]
    store.pack_old(past)
    if fresh:
        layer.state.before_append(layer)
    tile = layer.settings.prefill_tile
    few = fresh and 0 < query.shape[2] <= FEW_QUERIES and past > 0 and (mask is None or mask.ndim == 2)
    attended = _progress(layer, past, query.shape[2]) if fresh else None
    if not few and prefill_host.serves(query, mask, scores):
        out = prefill_host.attend_append(
            store, query, key, value, past, mask, scores=scores, sinks=sinks, tile=tile, attended=attended
        )
    else:
        attended_past = _attend_past(layer, query, scores) if few and store.device.type == "cpu" else None
        tiles = read_tiles(store, past, tile) if attended_past is None else ()
        out = append_attention(
            query, key, value, past, tiles, mask, scores=scores, sinks=sinks, tile=tile, before=attended_past,
            attended=attended,
        )  # fmt: skip
    if layer.take_pending():
        store.append(key, value)
        seal(store, tile, key)
        layer.state.append(layer, query, scores)
    queries, window = layer.last_queries, layer.requirements.query_window
    # Of layers that share keys and values, only the layer that stored them keeps queries, in chunks as in one prompt.
    if fresh and window and (layer.two_memories or layer.requirements.learns_from_prompts):
        queries = joined(queries, query, past, window)
    layer.remember(scores, queries)
    if query.device.type == "cpu" and query.shape[2] >= LONG:
        trim_heap_by_turns()
    if query.dtype == torch.float16 and query.shape[2] > MANY_IN_HALF and query.device.type == "cpu":
        _warn_of_float16()
    return out


@functools.cache  # once
def _warn_of_float16() -> None:
    warnings.warn(
        "on a CPU torch takes several times as long to read a prompt in float16 as in bfloat16; load the model with "
        "dtype=torch.bfloat16",
        stacklevel=2,
    )


def _progress(layer: HybridLayer, past: int, tokens: int) -> Callable[[int], None] | None:
    """Return the callback of the progress bar of a prompt; None for single tokens and drafts."""
    progress, drafts = layer.settings.progress, past and layer.settings.drafts.count
    return None if progress is None or tokens == 1 or drafts else progress.attend(past, tokens)


def _attend_past(layer: HybridLayer, query: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend all cached tokens in place: the queries `[B, Hq, Q, D]` become Hq·Q heads.

    Returns:
        out `[B, Hq, Q, D]`, lse `[B, Hq, Q]`; fp32.
    """
    store = layer.store
    assert store is not None
    batch, heads, length, dim = query.shape
    step = lone_step(layer, query.reshape(batch, heads * length, dim), store.length, scores)
    out, lse = step.attend_host(step.all_blocks())
    return out.view(query.shape), lse.view(query.shape[:3])


def look_ahead(layer: HybridLayer, query: torch.Tensor) -> None:
    """Start the policy's layer-ahead work (`before_layer`) with a predicted query `[B, Hq, 1, D]`."""
    store = layer.store
    assert layer.scores is not None
    assert store is not None
    seal_waiting(store, layer.settings.prefill_tile)
    if store.awaits_digests:
        return
    if layer.ahead is not None or layer.host_partial is not None:
        layer.drain_ahead()
    if not layer.two_memories:  # one memory: no operation that autocast would change
        layer.policy.before_layer(lone_step(layer, query, store.length + 1, layer.scores))
        return
    if query.dtype is not layer.dtype:  # under autocast
        query = query.to(layer.dtype)
    with uncast(layer.device_type), layer.mirror.current():
        if layer.unplaced:
            decode_split.place(layer, query)
        if not layer.may_begin_early(layer.past + 1):
            return
        step = SplitStep(layer, query[:, :, 0], layer.past + 1, layer.scores)
        layer.policy.before_layer(step)


def decode(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one token: append it and run the policy's plan.

    Args:
        layer: the layer, with at least one token cached.
        query: `[B, Hq, 1, D]`; key, value: `[B, Hkv, 1, D]`.
        scores: parameters of the model's scores.
        sinks: `[Hq]`, logits of the model's attention sinks, or None.

    Returns:
        `[B, 1, Hq, D]` in the query's dtype.
    """
    layer.scores = scores
    if layer.two_memories:
        with layer.mirror.current():
            return decode_split.decode(layer, query, key, value, scores=scores, sinks=sinks)
    store = layer.store
    assert store is not None
    fresh = layer.take_pending()
    layer.state.before_token(layer)
    seal_waiting(store, layer.settings.prefill_tile)
    length = store.length + fresh
    view = store.view(length)
    store.length = length
    query_form = query.shape, query.stride(), query.dtype
    form = query_form, key.stride(), value.stride(), scores, fresh, sinks is not None
    step: CpuStep | None = layer.steps.get(fresh)
    if step is None or step.view is not view or step.form != form:
        step = layer.steps[fresh] = CpuStep(layer, view, Form(*form), query, length, key, value)
    out = step.run(query, key, value, sinks, length)
    assert step.plan is not None
    checks = layer.settings.checks
    if checks is not None and checks.due(layer.index, layer.stats.steps):
        step.check()
    layer.start_ahead(None)
    layer.stats.count_step(dense=False)
    if store.format.packs:
        store.pack_old(length - 1)  # before the next read; without the new token, which may be undone
    layer.policy.after_layer(step, step.plan)
    if length % store.block_size == 0 and store.sealed < store.num_blocks:
        seal(store, layer.settings.prefill_tile, wait=False)
    if fresh:
        layer.state.token(layer)
    return out


def lone_step(layer: HybridLayer, query: torch.Tensor, length: int, scores: Scores) -> CpuStep:
    """Return a step with one memory for a query `[B, Hq, D]` or `[B, Hq, 1, D]` that writes no token."""
    assert layer.store is not None
    form = Form((query.shape, query.stride(), query.dtype), (), (), scores)
    return CpuStep(layer, layer.store.view(layer.store.length), form, query, length)
