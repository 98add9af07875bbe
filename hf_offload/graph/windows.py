"""Transformers' layers with sliding windows in a captured step, which writes their next windows over the last ones.

Such a layer makes new tensors in each step. A replay runs no Python: the captured step copies them back, and the host
counts the token. That goes while the windows are full, and no row has padding within them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_offload.blocks.padding import Padding


def is_window(layer: Any) -> bool:
    """Whether a layer of a cache is one of Transformers' with a sliding window."""
    return type(layer) is DynamicSlidingWindowLayer


class Windows:
    """The layers with sliding windows of a cache.

    Args:
        layers: the cache's list of layers.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values that a captured step reads and writes, by the number of the layer."""
        self._written = False
        """Whether a replay has written them, so that the windows before it are gone."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((index, layer) for index, layer in enumerate(self._layers) if is_window(layer))

    def ready(self, padding: Padding) -> bool:
        """Whether a step can be captured or replayed whose token `padding` has seen.

        All windows are full, with the step's own token no hidden one is among theirs, and no drafts are recorded.
        """
        widest = 0
        for _, layer in self:
            if layer.record_past or layer.get_seq_length() < layer.sliding_window:
                return False
            widest = max(widest, layer.sliding_window)
        if not widest:
            return True
        newest = padding.valid[:, max(padding.seen - widest, 0) : padding.seen]
        return bool(newest.all())

    def prepare(self) -> None:
        """Move windows to where a captured step reads them, if they are elsewhere and have the same shape."""
        for index, layer in self:
            held = self._held.get(index)
            if held is None or held[0] is layer.keys:
                continue
            if held[0].shape == layer.keys.shape and held[0].dtype == layer.keys.dtype:
                for window, now in zip(held, (layer.keys, layer.values), strict=True):
                    window.copy_(now)
                layer.keys, layer.values = held

    def signature(self) -> list[tuple[torch.Size, bool]]:
        """The windows' shapes, and whether they lie where a captured step reads them: eager steps make new ones."""
        return [(layer.keys.shape, index in self._held and self._held[index][0] is layer.keys) for index, layer in self]

    def count(self) -> None:
        """Count the token of a replay."""
        for _, layer in self:
            layer.cumulative_length += 1

    def hold(self) -> None:
        """Before a capture: put the windows where its step reads and writes them."""
        with torch.inference_mode(False):
            self._held = {index: (layer.keys.clone(), layer.values.clone()) for index, layer in self}
        self._written = False
        for index, layer in self:
            layer.keys, layer.values = self._held[index]

    def write_back(self) -> None:
        """At the end of a captured forward: copy the windows that it made over those that it read."""
        for index, layer in self:
            for window, made in zip(self._held[index], (layer.keys, layer.values), strict=True):
                window.copy_(made)
            layer.keys, layer.values = self._held[index]

    def replayed(self) -> None:
        """A replay has begun."""
        self._written = True

    def undo(self, length: int) -> None:
        """After a capture or its first replay that failed: the windows are those of before, of `length` tokens."""
        if self._written or not self._held:
            return
        for index, layer in self:
            layer.keys, layer.values = self._held[index]
            layer.cumulative_length = length

    def forget(self) -> None:
        """Forget the captured graphs."""
        self._held.clear()
