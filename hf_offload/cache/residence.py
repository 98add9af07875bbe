"""`resident="auto"`: all blocks are resident while the device has room for them, else one and a half budgets."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_offload.blocks.memory import free_device_memory
from hf_offload.cache.memory_budget import most_blocks
from hf_offload.gpu.block_topk import MOST_BLOCKS

Layer = Any
"""A `HybridLayer`, which gets its settings from a module that imports this one."""
SHARE = 0.8
"""Of the free device memory: what resident blocks may take."""
SPARE, LEAST_SPARE = 4, 16
"""One in 4 blocks is spare, for tokens to come; where memory is short, one in 16."""
ROOM = 512 << 20
"""Bytes that stay free for a step's own tensors and its graph."""


class Residence:
    """How many blocks are resident on each device, asked when resident sets are placed.

    The layers of one device get the same number. A set that is full is placed again, which asks again. An append that
    needs the memory takes it: resident sets are placed after it.

    Args:
        slots: of a row and KV head where not all blocks fit, one and a half budgets.
        token_bytes: device memory that an append takes for each token: activations, and logits.
    """

    def __init__(self, slots: int, token_bytes: int) -> None:
        self.fallback, self.token_bytes = slots, token_bytes
        self._release: weakref.WeakMethod[Callable[[], None]] | None = None
        self._layers: list[weakref.ref[Layer]] = []
        self._slots: dict[torch.device, int] = {}
        self._most: dict[torch.device, int] = {}
        """Slots with which memory ran out."""
        self._served: dict[torch.device, set[int]] = {}

    def serve(self, layers: list[Layer], release: weakref.WeakMethod[Callable[[], None]] | None) -> None:
        """Take the layers that share the devices, and what frees a captured step, which holds their tensors."""
        self._layers, self._release = [layer.tag for layer in layers], release

    def release(self) -> None:
        """Free what holds tensors of resident sets beside their layers: a captured step."""
        release = None if self._release is None else self._release()
        if release is not None:
            release()

    def forget(self) -> None:
        """Forget the sizes; the next rows are others."""
        self._slots.clear()
        self._most.clear()
        self._served.clear()

    @staticmethod
    def decides(device: torch.device) -> bool:
        """Whether a device tells its memory; on others the least number of slots is kept."""
        return free_device_memory(device) is not None

    def slots(self, layer: Layer) -> int:
        """The slots with which a layer is placed now; the first layer of a forward asks for all of its device."""
        served = self._served.setdefault(layer.device, set())
        if layer.index in served or layer.device not in self._slots:
            served.clear()
            self._slots[layer.device] = self._ask(layer)
        served.add(layer.index)
        return self._slots[layer.device]

    def _ask(self, layer: Layer) -> int:
        assert layer.store is not None
        assert layer.resident is not None
        device, peers = layer.device, self._peers(layer.device)
        now = blocks_soon(layer.store.length, layer.settings.block_size)
        held = {peer.resident.slots for peer in peers if peer.resident is not None}
        if len(held) == 1 and (have := min(held)) >= now:
            return int(have)
        free = free_device_memory(device)
        if free is None:
            return self.fallback
        block = spare = 0
        for peer in peers:
            store = peer.store
            assert store is not None
            block += store.batch * store.num_kv_heads * store.pool.record_bytes
            if store.digests is not None and not store.scored_on_host:
                spare += store.batch * store.digests.block_bytes  # those of the blocks that are there are not free
            free += 0 if peer.resident is None else peer.resident.nbytes
        slots = fitting_slots(free, now, block, spare, self.fallback)
        most = self._most.get(device)
        return slots if most is None or slots <= most else self.fallback

    def lower(self, layer: Layer, slots: int) -> int | None:
        """The slots to try after memory has run out: half of them, then one and a half budgets; None: it was those.

        The sets of the other layers on the device give theirs back, and are placed with the new number.
        """
        device, half = layer.device, slots // 2
        if slots <= self.fallback:
            return None
        halved = device in self._most
        allowed = min(half, most_blocks(layer.policy))
        lower = self.fallback if halved else max(allowed, self.fallback)
        self._most[device], self._slots[device] = half, lower
        self._served[device] = {layer.index}
        self.give_back(device, beside=layer)
        size = layer.settings.block_size
        warnings.warn(
            f"device memory ran out with {slots * size} resident tokens for each row and KV head; {lower * size} are "
            "tried now; resident= or device_budget= sets a number that fits",
            RuntimeWarning,
            stacklevel=2,
        )
        return lower

    def make_room(self, layer: Layer, tokens: int) -> None:
        """Give all slots of a device back before an append that needs more memory than is free.

        Args:
            layer: that is about to take the append; the first one of its device asks.
            tokens: of each row.
        """
        if not self._slots.get(layer.device) or self._peers(layer.device)[0] is not layer:
            return
        free = free_device_memory(layer.device)
        if free is not None and layer.batch_size * tokens * self.token_bytes > free:
            self.give_back(layer.device)

    def give_back(self, device: torch.device, beside: Layer | None = None) -> None:
        """Empty the resident sets of a device and free their memory; the host has all blocks.

        Args:
            device: the device.
            beside: a layer whose set stays.
        """
        for peer in self._peers(device):
            if peer is not beside and peer.resident is not None and peer.resident.slots:
                peer.unplace()
                peer.resize_resident(0)
        self.release()

    def _peers(self, device: torch.device) -> list[Layer]:
        """The layers that hold tokens on a device."""
        layers = [layer() for layer in self._layers]
        return [layer for layer in layers if layer is not None and layer.is_initialized and layer.device == device]

    @staticmethod
    def admits(layers: list[Layer]) -> bool:
        """Whether the devices have room for copies of the resident sets of these layers."""
        need: dict[torch.device, int] = {}
        for layer in layers:
            if layer.resident is not None:
                need[layer.device] = need.get(layer.device, 0) + layer.resident.nbytes
        frees = {device: free_device_memory(device) for device in need}
        return all(free is None or need[device] <= SHARE * (free - ROOM) for device, free in frees.items())


def blocks_soon(tokens: int, block_size: int) -> int:
    """The blocks of rows with this number of tokens, with that of the next token and its successor."""
    return tokens // block_size + 2


def fitting_slots(free: int, blocks: int, slot_bytes: int, digest_bytes: int, least: int) -> int:
    """The slots of a row and KV head in so much memory: for all blocks and some to come, or the least.

    Args:
        free: bytes of device memory.
        blocks: of a row.
        slot_bytes: bytes of a slot in all layers, rows and KV heads; digest_bytes: of a digest on the device.
        least: the least number.
    """
    fit = math.floor((SHARE * (free - ROOM) + blocks * digest_bytes) / (slot_bytes + digest_bytes))
    fit = min(fit, MOST_BLOCKS)
    if fit < blocks + max(blocks // LEAST_SPARE, 1):
        return least
    return max(min(blocks + max(blocks // SPARE, 1), fit), least)


def append_bytes(config: Any) -> int:
    """Device memory that an append takes for each token, roughly: activations, and logits in fp32."""
    return int(getattr(config, "hidden_size", 0)) * 8 + int(getattr(config, "vocab_size", 0)) * 4
