"""The buffers of one layer's steps with one memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_offload.cache.layer import HybridLayer

if TYPE_CHECKING:
    from hf_offload.attention.host_near import HostNear
    from hf_offload.attention.windowed import WindowBuffers


class StepBuffers:
    """Where the launches of one layer read queries of one shape and write what they attend, good until the next step.

    Args:
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # written in inference mode and out of it
            self.out_tensor, self.lse_tensor = torch.empty(shape), torch.empty(shape[:2])
        self.query = np.empty(shape, np.float32)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        self.masses = np.empty((*shape[:2], 0), np.float32)
        self.score = np.empty((shape[0], 0, 0), np.float32)
        """`[B, Hkv, N]`, of the last choice."""
        self.near: HostNear | None = None
        """For policies whose CPU part chooses for itself."""
        self.window: WindowBuffers | None = None
        """For policies that keep tokens by their attention weights."""

    def make_room(self, kv_heads: int, blocks: int) -> None:
        """Have room for the masses and the score of so many blocks."""
        if self.score.shape[1] != kv_heads or self.score.shape[2] < blocks:
            width = (max(blocks * 5 // 4, 64) + 15) // 16 * 16
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)
            self.score = np.empty((self.score.shape[0], kv_heads, width), np.float32)


def buffers_of(layer: HybridLayer, shape: torch.Size) -> StepBuffers:
    """A layer's buffers for queries `[B, Hq, …, D]`."""
    found: StepBuffers | None = layer.kernels.get(shape)
    if found is None:
        found = layer.kernels[shape] = StepBuffers((*shape[:2], shape[-1]))
    return found
