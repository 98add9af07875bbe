"""Decode steps with two memories: placement of the resident set, attention on both sides, closing of full blocks."""

from __future__ import annotations

import time

import torch

from hf_offload.attention.checking import Outcome, check
from hf_offload.attention.step_split import SplitStep
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.blocks.sealing import seal, seal_waiting
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory_budget import check_slots
from hf_offload.gpu import kv_copy
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.policies.base import Partial, Plan
from hf_offload.scores import Scores


def place(layer: HybridLayer, query: torch.Tensor) -> None:
    """Decide and load the resident set, at the first decode step after a prompt or append.

    Args:
        layer: the layer.
        query: `[B, Hq, 1, D]` of the next step, used if the prompt's last queries were not kept.
    """
    store, resident = layer.store, layer.resident
    assert store is not None
    assert resident is not None
    resident.clear()
    seal_waiting(store, layer.settings.prefill_tile)
    resident = _resized(layer)
    store.reserve_table(store.num_blocks + 2)  # includes the next block
    resident.reserve()
    starts_block = store.length % store.block_size == 0
    slots = resident.slots - starts_block
    queries = query if layer.last_queries is None else layer.last_queries.values
    assert layer.scores is not None
    step = SplitStep(layer, queries, store.length, layer.scores)
    all_fit = layer.requirements.holds_all and layer.fits_device(store.length + 1)
    chosen = step.recent(slots) if all_fit else layer.policy.place(step, slots)
    # The tail must have a slot and comes last in ascending order: surplus blocks are dropped from the front.
    counts = chosen.counts.clamp(max=slots)
    skipped = (chosen.counts - counts)[..., None]
    width = min(slots, chosen.items.shape[2])
    kept = (skipped + torch.arange(width, device=store.device)).clamp(max=chosen.items.shape[2] - 1)
    resident.load(chosen.items.gather(2, kept.long()), counts, step.label("placement"))
    layer.stats.placement_bytes += int(counts.sum()) * store.pool.record_bytes
    layer.stats.placements += 1
    layer.state.placed(layer, query.shape[1])
    if starts_block:
        _open_block(layer)
    # A pool without a free block grows by a quarter here, since growth in a step delays it and invalidates a graph.
    store.pool.release(store.pool.allocate(store.batch))
    store.reserve_digests()
    layer.note_placed()


def _resized(layer: HybridLayer) -> ResidentSet:
    """The layer's resident set, in another size where its policy or `resident="auto"` wants one.

    Raises:
        torch.OutOfMemoryError: there is no room for the least number of slots.
    """
    resident, residence = layer.resident, layer.settings.residence
    assert resident is not None
    slots = layer.state.slots
    if slots is not None:
        check_slots(slots, layer.settings.block_size, f"the window of {layer.policy}")
    elif residence is not None:
        slots = residence.slots(layer)
    while slots is not None and slots != resident.slots:
        if residence is not None and resident.slots:
            residence.release()
        try:
            return layer.resize_resident(slots)
        except torch.OutOfMemoryError:
            lower = None if residence is None else residence.lower(layer, slots)
            if lower is None:
                raise
            slots = lower
    return resident


def _open_block(layer: HybridLayer) -> None:
    """Give the block that the next token starts the slot of the block with the lowest worth."""
    store, resident, requirements = layer.store, layer.resident, layer.requirements
    assert store is not None
    assert resident is not None
    store.reserve(store.length + 1)
    store.reserve_table(store.num_blocks + 2)
    resident.reserve()
    limits = layer.mirror.limits("opened", store.length, store.sealed)
    recent = -(-requirements.recent // store.block_size)
    resident.open_block(limits, layer.mirror.sinks(requirements.sinks), recent)
    layer.state.block_opened(layer, store.length // store.block_size)


def decode(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one token on device and CPU; arguments and result as in `attention.decode.decode`."""
    store, stats = layer.store, layer.stats
    assert store is not None
    fresh = layer.take_pending()
    layer.state.before_token(layer)
    if layer.unplaced:
        place(layer, query)
    resident = layer.resident
    assert resident is not None
    began = time.perf_counter()
    resident.wait()  # blocks that the last step recalled are visible from here on
    stats.wait_seconds += time.perf_counter() - began
    if fresh:
        store.reserve(store.length + 1)
        store.length += 1
    step = SplitStep(layer, query[:, :, 0], store.length, scores, fresh=fresh)
    if fresh:
        kv_copy.write_token(resident.pool, resident.slot_of, key[:, :, 0], value[:, :, 0], step.limits)
    plan = step.make_plan()
    splits = [step.checked(partial, splits=True) for partial in plan.partials if isinstance(partial, Partial)]
    if not splits:
        raise ValueError(
            f"policy {layer.policy.name!r} attends nothing on the device, where the newest token lies; its plan must "
            "attend the newest block"
        )
    out, lse = splits[0] if len(splits) == 1 else (torch.cat(parts, 2) for parts in zip(*splits, strict=True))
    host = None
    if plan.host is not None:
        began = time.perf_counter()
        host = plan.host.result()
        stats.wait_seconds += time.perf_counter() - began
    logits = None if sinks is None else sinks.float()
    merged, _ = merge(out, lse, host, step.query, logits, scale=scores.scale, dtype=query.dtype)
    checks = layer.settings.checks
    if checks is not None and layer.mirror.capture is None and checks.due(layer.index, stats.steps):
        _check(step, plan, (out, lse, host), sinks)
    stats.count_step(dense=step.dense)
    step.cpu_ratio = 0.0 if plan.host is None else plan.host.share(step)
    layer.count("cpu_ratio", step.cpu_ratio)
    if plan.host is not None and plan.host is layer.ahead and layer.mirror.capture is None:
        assert plan.host.predicted is not None
        layer.count("cosine", torch.cosine_similarity(plan.host.predicted, step.query, dim=-1).mean())
    layer.start_ahead(None)
    if not step.dense:
        layer.policy.after_layer(step, plan)
    if layer.mirror.capture is None:
        close_step(layer)
        if fresh:
            layer.state.token(layer)
    return merged.unsqueeze(1)


def _check(
    step: SplitStep, plan: Plan, parts: tuple[torch.Tensor, torch.Tensor, HostResult | None], sinks: torch.Tensor | None
) -> None:
    """Compare the step with full attention on the CPU, for the statistics; `parts` are what its merge joined."""
    scale, logits = step.scores.scale, None if sinks is None else sinks.float()
    merged, total = merge(*parts, step.query, None, scale=scale, dtype=torch.float32)
    if logits is not None:
        merged, _ = merge(*parts, step.query, logits, scale=scale, dtype=torch.float32)
    step.layer.write_back()
    estimate = None if plan.host is None else plan.host.estimate(step)
    outcome = Outcome(step.query.cpu().numpy(), merged.cpu().numpy(), total.cpu().numpy(), estimate)
    check(step.layer, outcome, step.length, step.scores, sinks, step.label("the check"))


def close_step(layer: HybridLayer) -> None:
    """Do the host's work after a step: pack old blocks; store a full block on the host and seal it."""
    store, resident = layer.store, layer.resident
    assert store is not None
    assert resident is not None
    if store.format.packs:
        layer.pack_old(store.length - 1)  # the new token may be undone
    if store.length % store.block_size or store.sealed == store.num_blocks:
        return
    resident.store_block(store.sealed, store.length)
    seal(store, store.block_size, resident.keys(store.sealed), wait=False)
    if layer.outgrown:
        layer.unplace()
    else:
        _open_block(layer)
