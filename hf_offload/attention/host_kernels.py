"""The kernels of one layer with one memory, prepared: in most steps nothing but the length has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.attention.windowed import WindowKernels
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.launch import TAGS
from hf_offload.cpu.narrow import SHORT, narrow
from hf_offload.cpu.standing import ANYWHERE, Kept, Standing
from hf_offload.cpu.together import Row
from hf_offload.cpu.widen import widen
from hf_offload.policies.base import Selection


class HostKernels:
    """The buffers and the standing launches of one layer for queries of one shape.

    What a step returns lies in these buffers and is good until the next step that uses them.

    Args:
        layer: its number in the model.
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, layer: int, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # written in inference mode and out of it
            self.out_tensor, self.lse_tensor = torch.empty(shape), torch.empty(shape[:2])
        self.query = np.empty(shape, np.float32)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        self.masses = np.empty((*shape[:2], 0), np.float32)
        self.score = np.empty((shape[0], 0, 0), np.float32)
        """`[B, Hkv, N]`, of the last choice."""
        self.chosen: Selection | None = None
        """The last choice."""
        self.first, self.others = Row(6), Row(4)
        """What a step launches first, beginning with its token and query; what it launches then."""
        self.taking = Kept(f"the query of layer {layer}")
        self.choosing = Kept(f"the choice of blocks of layer {layer}")
        self.attending = Kept(f"CPU attention of layer {layer}")
        self.giving = Kept(f"what layer {layer} has attended")
        self.near: Any = None
        """What the layer has for policies whose CPU part chooses for itself (`attention.host_near.HostNear`)."""
        self.windowed: WindowKernels | None = None
        """For policies that keep tokens by their attention weights."""

    def take(self, query: torch.Tensor) -> tuple[Standing, tuple[int, ...], Any]:
        """The launch that brings a query `[B, Hq, D]` or `[B, Hq, 1, D]` as float32, its numbers, and what it reads."""
        strides = query.stride()
        if strides[-1] != 1 or query.dtype not in TAGS:
            query = query.float().contiguous()
            strides = query.stride()
        numbers = query.dtype, strides[0], strides[1]
        standing = self.taking.find((), numbers)
        if standing is None:
            standing = self.taking.keep(widen(query, self.query), (), numbers, source=ANYWHERE)
        return standing, (query.data_ptr(),), query

    def give(self, query: torch.Tensor) -> tuple[Standing, int, torch.Tensor] | None:
        """The launch that copies what was attended into a new tensor like the query's, its number, and that tensor.

        Returns:
            the tensor is `[B, 1, Hq, D]`; None where no launch covers the query's dtype.
        """
        dtype = query.dtype
        if dtype not in SHORT:
            return None
        batch, heads, dim = self.query.shape
        given = query.new_empty((batch, 1, heads, dim))
        standing = self.giving.find((), (dtype,))
        if standing is None:
            launch = narrow(self.out.reshape(batch, heads * dim), given)
            standing = self.giving.keep(launch, (), (dtype,), target=ANYWHERE)
        return standing, given.data_ptr(), given

    def make_room(self, kv_heads: int, blocks: int) -> None:
        """Have room for the masses and the score of so many blocks."""
        if self.score.shape[1] != kv_heads or self.score.shape[2] < blocks:
            width = (max(blocks * 5 // 4, 64) + 15) // 16 * 16
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)
            self.score = np.empty((self.score.shape[0], kv_heads, width), np.float32)


def kernels_of(layer: HybridLayer, shape: torch.Size) -> HostKernels:
    """What a layer has prepared for queries `[B, Hq, …, D]`."""
    found: HostKernels | None = layer.kernels.get(shape)
    if found is None:
        found = layer.kernels[shape] = HostKernels(layer.index, (*shape[:2], shape[-1]))
    return found
