"""A step with one memory in which the CPU chooses blocks for each query head: what is near, the needs, the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_offload.attention.near_blocks import NearBlocks
from hf_offload.attention.retrieval import Foresight, Properties, Retrieval
from hf_offload.attention.step import Near
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.join import count_choice, join_parts
from hf_offload.cpu.network import Network
from hf_offload.cpu.predict import Known, predict_needs
from hf_offload.cpu.standing import Kept, Standing
from hf_offload.cpu.together import Row
from hf_offload.policies.base import Plan, Selection

if TYPE_CHECKING:
    from hf_offload.attention.host_step import HostStep


class HostNear:
    """The buffers and the standing launches of one layer, for queries of one shape.

    Args:
        layer: the layer.
        query: float32 `[B, Hq, D]`, the memory of the step's query.
    """

    def __init__(self, layer: HybridLayer, query: np.ndarray) -> None:
        assert layer.store is not None
        self.query = torch.from_numpy(query)
        self.choice = Retrieval(layer.store, self.query, pin=False)
        with torch.inference_mode(False):
            self.sink_out, self.sink_lse = torch.empty(query.shape), torch.empty(query.shape[:2])
        self._sinks = self.sink_out.numpy(), self.sink_lse.numpy()
        name = f"of layer {layer.index}"
        self._sinking, self._attending = Kept(f"attention to the sinks {name}"), Kept(f"attention to the host {name}")
        self._predicting, self._choosing = Kept(f"the needs of the heads {name}"), Kept(f"the choice of blocks {name}")
        self._counting, self._joining = Kept(f"counts of the choice {name}"), Kept(f"the join of a step's parts {name}")
        self._rows = Row(2), Row(3)
        self._near = NearBlocks()
        self._chosen: Selection | None = None

    def attend(self, step: HostStep) -> Near:
        """Attend what is near."""
        kernels, store = step.kernels, step.store
        sinks, newest = self._near.parts(step.sinks, step.host_end, step.num_blocks, store.num_kv_heads)
        launches = (
            step.attention(self._sinking, sinks, None, to=self._sinks),
            step.attention(kernels.attending, newest, None),
        )
        self._rows[0].run(launches, (step.length, step.length))
        return Near(self.query, (self.sink_out, self.sink_lse), (kernels.out_tensor, kernels.lse_tensor))

    def retrieve(self, step: HostStep, properties: Properties | Foresight) -> None:
        """Choose blocks of the host, for which `choice` has room, and attend them; a foresight wants what is near."""
        launches: tuple[Standing, ...] = self._choice(step), self._count(step)
        numbers: tuple[int, ...] = ()
        if isinstance(properties, tuple):
            self.choice.take(properties)
        else:
            launches = self._prediction(step, properties.network, properties.known), *launches
            numbers = (step.length,)
        self._rows[1].run(launches, numbers)
        choice = self.choice
        if self._chosen is None or self._chosen.blocks is not choice.blocks:
            self._chosen = Selection(choice.blocks, choice.counts)
        step.attention(self._attending, self._chosen, None, to=(choice.out, choice.lse)).run(step.length)

    def join(self, step: HostStep, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """What the plan has attended: out `[B, Hq, D]` and lse `[B, Hq]`, until the next step."""
        kernels = step.kernels
        if plan.retrieved is None:
            self.choice.nothing()
        self._join(step).run()
        return kernels.out_tensor, kernels.lse_tensor

    def _prediction(self, step: HostStep, network: Network, known: Known) -> Standing:
        padding, choice, kernels = step.store.padding, self.choice, step.kernels
        arrays = (network, known, choice.first, padding.first, padding.valid)
        numbers = (choice.end, padding.ragged)
        standing = self._predicting.find(arrays, numbers)
        if standing is None:
            launch = predict_needs(
                network, known, step.query, self._sinks, (kernels.out, kernels.lse), choice.needs_arrays,
                first=choice.first, end=choice.end, begins=padding.first, valid=padding.valid, ragged=padding.ragged,
                block_size=step.block_size, length=step.length,
            )  # fmt: skip
            standing = self._predicting.keep(launch, arrays, numbers, length=padding.valid.shape[1])
        return standing

    def _choice(self, step: HostStep) -> Standing:
        store, choice = step.store, self.choice
        assert store.digests is not None, "a policy without a digest cannot choose"
        bundle = choice.bundle(store.digests, step.scale)
        arrays = (bundle, store.table, choice.granularities, choice.first, choice.blocks)
        numbers = (choice.end, step.scale)
        standing = self._choosing.find(arrays, numbers)
        if standing is None:
            launch = choice.choosing(store, bundle, step.scale)
            standing = self._choosing.keep(launch, arrays, numbers)
        return standing

    def _count(self, step: HostStep) -> Standing:
        choice, totals = self.choice, step.layer.retrievals.totals
        arrays, numbers = (choice.first, choice.granularities, totals), (choice.end,)
        standing = self._counting.find(arrays, numbers)
        if standing is None:
            launch = count_choice(
                choice.spans, choice.runs, choice.counts, choice.first, choice.end, choice.granularities, totals
            )
            standing = self._counting.keep(launch, arrays, numbers)
        return standing

    def _join(self, step: HostStep) -> Standing:
        standing = self._joining.find((), ())
        if standing is None:
            kernels, choice = step.kernels, self.choice
            launch = join_parts(kernels.out, kernels.lse, self._sinks, (choice.out, choice.lse))
            standing = self._joining.keep(launch, (), ())
        return standing
