"""The CPU's part of a step with two memories, where it attends single tokens that were kept for each KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_offload.attention.host_part import HostPart
from hf_offload.cache.context import Context
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.merge import HostPartial
from hf_offload.policies.base import Selection
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


class KeptPart(HostPart):
    """A part whose tokens the host knows: the query alone comes from the device.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, tells the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        super().__init__(layer, query, 0)
        self.context: Context | None = None

    def attend(self, step: Step, context: Context) -> KeptPart:
        """Start to attend the kept tokens with the step's query."""
        self.cancel()
        self.context = context
        self.start(step, None, correct=False, label="attention to kept tokens")
        return self

    def partial(self) -> HostPartial:
        """Wait for the job; what the merge needs."""
        found = super().partial()
        self.context = None
        return found

    def cancel(self) -> None:
        """Let the job end, whatever comes of it."""
        super().cancel()
        self.context = None

    def _send(
        self,
        query: torch.Tensor,
        host: Selection | None,
        flag: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        self.layer.mirror.pause()
        self.query.copy_(query, non_blocking=True)

    def launch(self, scores: Scores) -> Launch:
        return self.make_launch(scores)  # lists may have grown at any step

    def make_launch(self, scores: Scores) -> Launch:
        context = self.context
        assert context is not None
        lists, dim = context.lists, self.shape[2]
        rows = (lists, self.shape[0] * self.shape[1] // lists)
        return cpu_decode.sparse_decode(
            self.query.numpy().reshape(*rows, dim), context.pool.block_ptr, context.table, context.blocks,
            context.block_counts, context.holes, context.valid, context.capacity, self.out.numpy().reshape(*rows, dim),
            self.lse.numpy().reshape(rows), None, kv_dtype=context.dtype, block_size=context.block_size,
            **scores._asdict(),
        )  # fmt: skip
