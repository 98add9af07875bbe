"""A step with one memory in which the CPU chooses blocks for each query head: what is near, the needs, the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_offload.attention.near_blocks import NearBlocks
from hf_offload.attention.retrieval import Foresight, Properties, Retrieval
from hf_offload.attention.step import Near
from hf_offload.cache.store import BlockStore
from hf_offload.cpu.join import count_choice, join_parts
from hf_offload.cpu.predict import predict_needs
from hf_offload.policies.base import Selection

if TYPE_CHECKING:
    from hf_offload.attention.host_step import HostStep


class HostNear:
    """The buffers of one layer, for queries of one shape.

    Args:
        store: of the layer's blocks.
        query: float32 `[B, Hq, D]`, the memory of the step's query.
    """

    def __init__(self, store: BlockStore, query: np.ndarray) -> None:
        self.query = torch.from_numpy(query)
        self.choice = Retrieval(store, self.query, pin=False)
        with torch.inference_mode(False):
            self.sink_out, self.sink_lse = torch.empty(query.shape), torch.empty(query.shape[:2])
        self._sinks = self.sink_out.numpy(), self.sink_lse.numpy()
        self._near = NearBlocks()

    def attend(self, step: HostStep) -> Near:
        """Queue attention to what is near."""
        buffers = step.buffers
        sinks, newest = self._near.parts(step.sinks, step.host_end, step.num_blocks, step.store.num_kv_heads)
        step.attention(sinks, "attention to the sinks", to=self._sinks)
        step.attention(newest, "CPU attention")
        step.serve_this_block()
        return Near(self.query, (self.sink_out, self.sink_lse), (buffers.out_tensor, buffers.lse_tensor))

    def retrieve(self, step: HostStep, needs: Properties | Foresight) -> None:
        """Queue the choice of host blocks, for which `choice` has room, and attention to them.

        Args:
            step: of this layer.
            needs: of the heads; a foresight wants what is near.
        """
        choice, store, layer, buffers = self.choice, step.store, step.layer, step.buffers
        if isinstance(needs, tuple):
            choice.take(needs)
        else:
            padding = store.padding
            launch = predict_needs(
                needs.network, needs.known, buffers.query, self._sinks, (buffers.out, buffers.lse),
                choice.needs_arrays, first=choice.first, end=choice.end, begins=padding.first, valid=padding.valid,
                ragged=padding.ragged, block_size=step.block_size, length=step.length,
            )  # fmt: skip
            step.add(launch, "the needs of the heads", length=True)
        digests, retrievals = store.digests, layer.retrievals
        totals = retrievals.totals
        assert digests is not None, "a policy without a digest cannot choose"
        bundle = choice.bundle(digests, step.scores)
        if digests.of_query:
            step.then(lambda step: digests.fill(bundle, buffers.query, step.scores.scale))
        step.add(choice.choosing(store, bundle, step.scores), "the choice of host blocks")
        counting = count_choice(
            choice.spans, choice.runs, choice.counts, choice.first, choice.end, choice.granularities, totals
        )
        step.add(counting, "counts of the choice")
        step.as_long_as(lambda: retrievals.totals is totals)
        chosen = Selection(choice.blocks, choice.counts)
        step.attention(chosen, "attention to the host", to=(choice.out, choice.lse))

    def join(self, step: HostStep, *, retrieved: bool) -> None:
        """Queue the join of what is near and, if any, what was retrieved, into the layer's `out` and `lse`."""
        buffers, choice = step.buffers, self.choice
        if not retrieved:
            choice.nothing()
        join = join_parts(buffers.out, buffers.lse, self._sinks, (choice.out, choice.lse))
        step.add(join, "the join of a step's parts")
