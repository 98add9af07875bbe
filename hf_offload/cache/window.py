"""The window of a layer that keeps single tokens by their attention weights: how large, where, and what leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_offload.cache.budget import check_slots
from hf_offload.cache.near import NearAverages
from hf_offload.cache.resident import ResidentSet
from hf_offload.cache.salience import Salience

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


def make_salience(layer: HybridLayer) -> Salience | None:
    """What a layer that has just been opened learns of its tokens' attention; None if its policy asks for nothing."""
    rule = layer.policy.salience
    if rule is None:
        return None
    assert layer.store is not None
    salience = Salience(layer.store, rule, layer.settings.worker, layer.stats, layer.index)
    salience.window_blocks = window_blocks(layer)
    return salience


def window_blocks(layer: HybridLayer) -> int:
    """As many as the policy wants with the tokens that are there, or as the resident set has with one to spare."""
    size = layer.settings.block_size
    tokens = layer.policy.window_tokens(layer.past)
    slots = layer.settings.resident // size if layer.resident is None else layer.resident.slots
    return slots - 1 if tokens is None else -(-tokens // size)


def make_room(layer: HybridLayer) -> None:
    """Have slots for the window, and one for the block whose tokens are being looked at; nothing is resident."""
    salience, resident, store = layer.salience, layer.resident, layer.store
    if salience is None or resident is None or resident.slots == salience.window_blocks + 1:
        return
    assert store is not None
    slots = salience.window_blocks + 1
    check_slots(slots, store.block_size, f"the window of {salience.window_blocks * store.block_size} tokens")
    layer.resident = ResidentSet(store, slots, layer.mirror)
    layer.host_part = None


def load_averages(layer: HybridLayer) -> None:
    """The window has become resident: so do the averages of its tokens."""
    salience, resident = layer.salience, layer.resident
    if salience is None or resident is None:
        return
    salience.near = NearAverages(resident, salience)
    salience.near.load()
