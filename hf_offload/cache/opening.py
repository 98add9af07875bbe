"""Making what holds a layer's tokens, once their sizes are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_offload.cache.digests import DIGESTS
from hf_offload.cache.resident import ResidentSet
from hf_offload.cache.store import BlockStore
from hf_offload.policies.base import LayerState

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


def open_layer(
    layer: HybridLayer, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, tokens: int = 0
) -> None:
    """Make store, resident set and state of a layer: of these sizes, for a model that computes in `dtype` on `device`.

    Args:
        layer: the layer, which holds nothing yet.
        batch: rows; heads: KV heads; dim: of a head.
        dtype, device: of the model's keys and values.
        tokens: how many arrive first; the device's budget is divided accordingly, unless `layer.slots` is set.

    Raises:
        ValueError: one memory is asked for, but the model lies on a device.
        MemoryError: no memory is left for threads, or for what holds the tokens.
    """
    settings, policy = layer.settings, layer.policy
    layer.dtype, layer.device, layer.device_type = dtype, device, device.type
    layer.has_slots = settings.tier == "split" or (settings.tier is None and device.type != "cpu")
    layer.keys = layer.values = torch.empty(batch, heads, 0, dim, dtype=dtype, device=device)  # Mllama looks here
    if settings.tier == "one" and device.type != "cpu":
        raise ValueError(f'tier="one" is for models on the CPU, but this one is on {device}; leave tier out')
    if layer.has_slots:
        settings.worker.ready()
    name = policy.digest_name
    layer.store = store = BlockStore(
        batch, heads, dim, dtype, block_size=settings.block_size, device=device, digest=DIGESTS[name] if name else None,
        padding=settings.padding, host_dtype=settings.host_dtype, worker=settings.worker if layer.has_slots else None,
        scored_on_host=policy.retrieves,
    )  # fmt: skip
    if layer.has_slots:
        budget = settings.device_budget if layer.slots is None else None
        slots = layer.slots or settings.resident // settings.block_size
        layer.mirror = settings.mirror(device)
        layer.tally.record_bytes = store.pool.record_bytes
        if budget is not None:
            slots = budget.slots(store, tokens)
        layer.resident = ResidentSet(store, slots, layer.mirror)
    state = policy.new_state(layer)
    if not isinstance(state, LayerState):
        raise TypeError(f"{type(policy).__name__}.new_state gave {state!r}, which is no LayerState")
    layer.state = state
    layer.is_initialized = True
