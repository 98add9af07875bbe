"""A decode step in which each query head chooses among the host's blocks: what is local, the choice, attention to both.

Local are the sinks and the newest blocks, which are always attended and resident (Fluxion §5). With one memory all of
it is one queue of launches; with two the device attends what is local while the CPU chooses and attends.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from hf_offload.cache.device_mirror import sent
from hf_offload.gpu.merge import merge
from hf_offload.policies.base import EVER, Partial, Plan, Selection
from hf_offload.policies.fluxion.kernels.predict import predict_needs
from hf_offload.policies.fluxion.kernels.retrieve import count_choice
from hf_offload.policies.fluxion.local_blocks import LocalBlocks
from hf_offload.policies.fluxion.scheduled_part import selected_part
from hf_offload.policies.fluxion.selector import Foresees, Properties, Selector

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import HostStep
    from hf_offload.attention.step_split import TieredStep
    from hf_offload.policies.fluxion.selected_part import SelectedPart


class Local(NamedTuple):
    """What is always attended, in two partials: Fluxion's features are made of them.

    Args:
        query: `[B, Hq, D]` fp32, of this step.
        sinks, newest: out `[B, Hq, D]` and lse `[B, Hq]` fp32: the first tokens, and the newest with the tail.
    """

    query: torch.Tensor
    sinks: tuple[torch.Tensor, torch.Tensor]
    newest: tuple[torch.Tensor, torch.Tensor]


def attend_local(step: Step) -> Local:
    """Attend the sinks and the newest blocks with the step's query."""
    if step.layer.has_slots:
        return _attend_local_on_device(cast("TieredStep", step))
    host_step = cast("HostStep", step)
    return _buffers_of(host_step).attend_local(host_step)


def select(
    step: Step, needs: Properties | Foresees, granularities: tuple[int, ...], local: Local | None = None,
    schedule: str | None = "none",
) -> Any:  # fmt: skip
    """Start the CPU part: choose blocks for the step's query among those that are not local, and attend them.

    Each query head takes as many of its best runs of blocks as its needs say; the heads of a KV head share the length
    of a run and attend what any of them took.

    Args:
        step: of a layer whose policy has a digest and whose state counts choices.
        needs: what the heads need, or what tells it from the step's query and what is local.
        granularities: tokens of a run, multiples of the block size, of which each KV head gets the one that makes the
            fewest bytes (Fluxion, Eq. 3).
        local: what has been attended, for a foresight.
        schedule: with two memories, how the CPU and the device share the tasks (`SCHEDULES`); None decides.
    """
    if step.layer.has_slots:
        return _select_beside_device(cast("TieredStep", step), needs, granularities, local, schedule)
    host_step = cast("HostStep", step)
    buffers = _buffers_of(host_step)
    host_step.serve_this_block()
    if _reserve(step, buffers.selector, granularities):
        buffers.select(host_step, needs)
    else:
        buffers.selector.nothing()
    return buffers.selector


def join(step: Step, local: Local, selected: Any) -> Plan:
    """The plan that attends what is local and what `select` gave, or None."""
    if step.layer.has_slots:
        parts = (Partial(*local.sinks), Partial(*local.newest))
        return Plan(parts if selected is None else (*parts, *selected.assist(step), selected))
    parts = (Partial(*local.newest), Partial(*local.sinks))
    return Plan(parts if selected is None else (*parts, Partial(selected.out, selected.lse)), until=EVER)


def has_host_tokens(step: Step) -> bool:
    """Whether there are tokens that are not local, in any row."""
    return step.host_end > int(_sink_blocks(step)[1].min())


def anchor_of(step: Step) -> torch.Tensor:
    """`[B, Hq, D]` fp32, the last query of the last append; where nobody has kept it, this step's."""
    if step.layer.last_queries is not None:
        return step.layer.last_queries.values[:, :, -1].contiguous()
    return torch.as_tensor(step.query)


def _sink_blocks(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """First block and end of each row's sinks, `[B]` each."""
    return step.store.padding.sinks(step.layer.requirements.sinks)


def lengths_of(step: Step) -> torch.Tensor:
    """Tokens that count, of each row: those on the host, and the local ones; fp32 `[B, 2]` on the device."""
    padding, size, end = step.store.padding, step.block_size, step.host_end
    first = np.minimum(_sink_blocks(step)[1], end)
    host = (end - first) * size
    total = step.length - padding.first
    if padding.ragged:
        valid = padding.valid
        host = np.array([np.count_nonzero(valid[b, f * size : end * size]) for b, f in enumerate(first)])
        total = np.count_nonzero(valid[:, : step.length], axis=1)
    return sent(np.stack((host, total - host), 1).astype(np.float32), step.store.device)


def _reserve(step: Step, selector: Selector, granularities: tuple[int, ...]) -> bool:
    """Have room for this step's choice; whether there is anything to choose from."""
    digests = step.store.digests
    assert digests is not None, "a policy without a digest cannot choose"
    selector.reserve(step.state.counts.spans_for(granularities, step.block_size), _sink_blocks(step)[1], step.host_end)
    return digests.frozen and has_host_tokens(step)


# --- one memory ------------------------------------------------------------------------------------------------------


class HostBuffers:
    """The buffers of one layer, for queries of one shape.

    Args:
        step: of the layer.
    """

    def __init__(self, step: HostStep) -> None:
        query = step.buffers.query
        self.query = torch.from_numpy(query)
        self.selector = Selector(step.store, self.query, pin=False)
        with torch.inference_mode(False):
            self.sink_out, self.sink_lse = torch.empty(query.shape), torch.empty(query.shape[:2])
        self._sinks = Partial(self.sink_out.numpy(), self.sink_lse.numpy())
        self._local = LocalBlocks()

    def attend_local(self, step: HostStep) -> Local:
        """Queue attention to what is local."""
        buffers = step.buffers
        sinks, newest = self._local.parts(step.sinks, step.host_end, step.num_blocks, step.store.num_kv_heads)
        step.attention(sinks, "attention to the sinks", to=self._sinks)
        step.attention(newest, "CPU attention", to=buffers.partial(0))
        step.serve_this_block()
        return Local(self.query, (self.sink_out, self.sink_lse), (buffers.out_tensor, buffers.lse_tensor))

    def select(self, step: HostStep, needs: Properties | Foresees) -> None:
        """Queue the choice of host blocks, for which the selector has room, and attention to them.

        Args:
            step: of this layer.
            needs: of the heads; a foresight wants what is local.
        """
        selector, store, buffers, counts = self.selector, step.store, step.buffers, step.state.counts
        if isinstance(needs, tuple):
            selector.take(needs)
        else:
            padding = store.padding
            launch = predict_needs(
                needs.network, needs.known, buffers.query, self._sinks, (buffers.out, buffers.lse),
                selector.needs_arrays, first=selector.first, end=selector.end, begins=padding.first,
                valid=padding.valid, ragged=padding.ragged, block_size=step.block_size, length=step.length,
            )  # fmt: skip
            step.add(launch, "the needs of the heads", length=True)
        digests, totals = store.digests, counts.totals
        assert digests is not None, "a policy without a digest cannot choose"
        bundle = selector.bundle(digests, step.scores)
        if digests.of_query:
            step.then(lambda step: digests.fill(bundle, buffers.query, step.scores.scale))
        step.add(selector.choosing(store, bundle, step.scores), "the choice of host blocks")
        counting = count_choice(
            selector.spans, selector.runs, selector.counts, selector.first, selector.end, selector.granularities,
            totals,
        )  # fmt: skip
        step.add(counting, "counts of the choice")
        step.as_long_as(lambda: counts.totals is totals)
        chosen = Selection(selector.blocks, selector.counts)
        step.attention(chosen, "attention to the host", to=Partial(selector.out, selector.lse))


def _buffers_of(step: HostStep) -> HostBuffers:
    key = "fluxion", step.buffers.query.shape
    found: HostBuffers | None = step.layer.kernels.get(key)
    if found is None:
        found = step.layer.kernels[key] = HostBuffers(step)
    return found


# --- two memories ----------------------------------------------------------------------------------------------------


def _attend_local_on_device(step: TieredStep) -> Local:
    store = step.store
    local: LocalBlocks | None = step.layer.kernels.get("fluxion")
    if local is None:
        local = step.layer.kernels["fluxion"] = LocalBlocks(functools.partial(_sent, store.device))
    found = []
    for part in local.parts(_sink_blocks(step), step.host_end, step.num_blocks, store.num_kv_heads):
        out, lse = step.attend_device(replace(part, slots=step.resident.slot_of.gather(2, part.slots)))
        found.append(merge(out, lse, None, step.query, None, scale=step.scores.scale, dtype=torch.float32))
    return Local(step.query, *found)


def _sent(device: torch.device, selection: Selection) -> Selection:
    """A selection on the device; in place of slots the blocks, as an index."""
    blocks, counts = (sent(array, device) for array in (selection.blocks, selection.counts))
    return Selection(blocks, counts, blocks.long())


def _select_beside_device(
    step: TieredStep, needs: Properties | Foresees, granularities: tuple[int, ...], local: Local | None,
    schedule: str | None,
) -> SelectedPart | None:  # fmt: skip
    part: SelectedPart | None = step.layer.host_part
    if part is None or not part.fits(step.query, 0):
        part = step.layer.host_part = selected_part(step.layer, step.query, schedule)
    part.cancel()
    if not _reserve(step, part.selector, granularities):
        return None
    if not isinstance(needs, tuple):
        assert local is not None, "a foresight wants what is local"
        needs = needs.properties(local.query, local.sinks, local.newest, lengths_of(step))
    return part.select(step, needs)
