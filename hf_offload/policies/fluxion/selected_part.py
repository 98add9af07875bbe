"""The CPU's part of a step with two memories, where the CPU chooses among the host's blocks and attends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hf_offload.attention.cpu_partial import HostPart, all_pinned
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.merge import HostPartial
from hf_offload.policies.base import Partial
from hf_offload.policies.fluxion.counts import SelectionCounts
from hf_offload.policies.fluxion.selector import Properties, Selector

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_split import TieredStep
    from hf_offload.cache.layer import HybridLayer


class SelectedPart(HostPart):
    """A part for which the query and what the heads need come from the device.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, tells the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        super().__init__(layer, query, 0)
        assert layer.store is not None
        pin = layer.store.device.type == "cuda"
        self.selector = Selector(layer.store, self.query, pin=pin)
        self.out, self.lse = self.selector.out_tensor, self.selector.lse_tensor
        self._counts = SelectionCounts()
        """Of the layer whose step is running."""
        self.reachable = not pin or all_pinned((self.out, self.lse, self.kbar))

    def select(self, step: Step, properties: Properties) -> SelectedPart:
        """Start the choice, for which there is room, and the attention to it; nobody is at work in the buffers."""
        self._counts = step.state.counts
        self.layer.mirror.pause()
        self.query.copy_(step.query, non_blocking=True)
        self.selector.take(properties)
        arrived, worker = self._arrived(), self.layer.settings.worker

        def work() -> None:
            if arrived is not None:
                arrived.synchronize()
            for launch in self._stages(step):
                worker.divide(launch)

        label = step.label("choice of blocks and attention")
        self._job = worker.submit(work, label, keep=(step.store.pool, self))
        return self

    def assist(self, step: TieredStep) -> tuple[Partial, ...]:
        """What the device attends of the CPU's part."""
        return ()

    def share(self, step: Step) -> float:
        return float(self.selector.counts.sum() / (self.selector.counts.size * step.num_blocks))

    def _stages(self, step: Step) -> Iterator[Launch]:
        """The choice, and the attention to what it chose."""
        digests = step.store.digests
        assert digests is not None
        yield self.selector.choosing(step.store, self.selector.bundle(digests, step.scores), step.scores)
        yield self.selector.attending(step.store, step.scores)

    def partial(self) -> HostPartial:
        """Wait for the job; what the merge needs."""
        found = super().partial()
        selector = self.selector
        self._counts.count(selector.spans, selector.runs, selector.counts, selector.first, selector.end)
        return found
