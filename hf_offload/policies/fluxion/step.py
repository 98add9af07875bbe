"""A decode step in which each query head chooses among the host's blocks (Fluxion, section 4, figure 6).

Sinks and newest blocks are local: always attended and resident. Their attention gives the features of the prediction;
then blocks of the host are chosen and attended, and the partials joined. With one memory all of it is one queue of
launches. With two memories the device attends local blocks, then the CPU predicts, chooses and attends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from hf_offload.blocks.device_mirror import sent
from hf_offload.gpu.merge import merge
from hf_offload.policies.base import EVER, Partial, Plan, Selection
from hf_offload.policies.fluxion.block_attention import Tokens
from hf_offload.policies.fluxion.kernels.selector import count_choice
from hf_offload.policies.fluxion.predictor import LayerPredictor
from hf_offload.policies.fluxion.scheduler import ScheduledHostPartial
from hf_offload.policies.fluxion.selector import Local, Properties, SelectedHostPartial, Selector, digests_of

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import CpuStep
    from hf_offload.attention.step_split import SplitStep


def attend_local(step: Step) -> Local:
    """Attend the sinks and the newest blocks with the step's query."""
    if step.layer.two_memories:
        return _attend_local_on_device(cast("SplitStep", step))
    host_step = cast("CpuStep", step)
    return _buffers_of(host_step).attend_local(host_step)


def select(
    step: Step, properties: Properties | LayerPredictor, granularities: tuple[int, ...], local: Local | None = None,
    schedule: str | None = "none",
) -> Any:  # fmt: skip
    """Start the host partial: choose blocks for the step's query among the host's, and attend them.

    Each query head takes its budget of runs, by its own scores. The heads of a KV head share the granularity and attend
    the union.

    Args:
        step: of a layer whose policy has a digest and whose state is a `SelectorState`.
        properties: of the heads, or the predictor of them.
        granularities: tokens of a run, multiples of the block size; each KV head takes the one with the least V(blk)
            (Eq. 3).
        local: attention to what is local, for a predictor.
        schedule: with two memories, how the CPU and the device share the tasks (`scheduler.SCHEDULES`); None: see
            there.

    Returns:
        What `join` takes; None: no token is on the host.
    """
    two_memories = step.layer.two_memories
    chooser: Any = (
        _partial_of(cast("SplitStep", step), schedule) if two_memories else _buffers_of(cast("CpuStep", step))
    )
    spans = step.state.counts.spans_for(granularities, step.block_size)
    chooser.selector.reserve(spans, _sink_blocks(step)[1], step.host_end)
    if not has_host_tokens(step):
        return None
    return chooser.select(step, properties, local)


def join(step: Step, local: Local, selected: Any) -> Plan:
    """The plan that joins the local partials with `selected`, which `select` returned; None: nothing was selected."""
    sinks, newest = Partial(*local.sinks), Partial(*local.newest)
    if step.layer.two_memories:
        return Plan((sinks, newest) if selected is None else (sinks, newest, *selected.assist(step), selected))
    return Plan((newest, sinks) if selected is None else (newest, sinks, selected), until=EVER)


def has_host_tokens(step: Step) -> bool:
    """Whether there are tokens that are not local, in any row."""
    return step.host_end > int(_sink_blocks(step)[1].min())


def anchor_of(step: Step) -> torch.Tensor:
    """`[B, Hq, D]` fp32, the last query of the last append, or this step's where that was not kept."""
    if step.layer.last_queries is not None:
        return step.layer.last_queries.values[:, :, -1].contiguous()
    return torch.as_tensor(step.query, device=step.layer.device)


def _sink_blocks(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """First block and end of each row's sinks, `[B]` each."""
    return step.store.padding.sinks(step.layer.requirements.sinks)


class LocalBlocks:
    """The sinks and the newest blocks of a layer as selections, kept from step to step while they are the same.

    Args:
        size: tokens of a block.
        convert: makes of a selection in arrays what a step works with.
    """

    def __init__(self, size: int, convert: Callable[[Selection], Any] = lambda selection: selection) -> None:
        self._size, self._convert = size, convert
        self._made: tuple[tuple[int, ...], np.ndarray, tuple[Any, Any]] | None = None

    def parts(self, sinks: tuple[np.ndarray, np.ndarray], end: int, blocks: int, kv_heads: int) -> tuple[Any, Any]:
        """The sinks, and the blocks end..blocks-1 behind them.

        Args:
            sinks: first block and end, int32 `[B]` each, as `Padding.sinks` has them: other arrays where they change.
            kv_heads: of the layer.
        """
        low, high = sinks
        sizes = (end, blocks, kv_heads)
        if self._made is None or self._made[0] != sizes or self._made[1] is not low:
            newest = np.maximum(low, end)  # a row may begin behind `end`
            spans = (low, np.minimum(high, newest)), (newest, np.full_like(low, blocks))
            one, two = (self._convert(_consecutive(first, stop, blocks, kv_heads, self._size)) for first, stop in spans)
            self._made = sizes, low, (one, two)
        return self._made[2]


def _consecutive(first: np.ndarray, stop: np.ndarray, blocks: int, kv_heads: int, size: int) -> Selection:
    """The blocks first..stop-1 of each row, `[B]` each, of `blocks` blocks of `size` tokens, for all KV heads."""
    counts = np.maximum(stop - first, 0).astype(np.int32)
    listed = first[:, None] + np.arange(max(int(counts.max()), 1), dtype=np.int32)
    shape = (len(first), kv_heads, listed.shape[1])
    wide = np.broadcast_to(listed.clip(max=blocks - 1)[:, None].astype(np.int32), shape).copy()
    return Selection(wide, np.broadcast_to(counts[:, None], shape[:2]).copy(), size)


class Segments(NamedTuple):
    """The tokens before a step's own, by where they are attended.

    Args:
        sinks, newest: local tokens.
        host: the tokens in between, in tiles of whole blocks, read one by one.
        scores: fp32 `[B, Hq, n]`, log masses of the host's blocks for a query, by their digests.
    """

    sinks: Tokens
    newest: Tokens
    host: Iterator[Tokens]
    scores: torch.Tensor


def segments_of(step: Step, query: torch.Tensor) -> Segments:
    """The segments of the tokens before a step's own, some of which are on the host.

    Args:
        step: of a layer; blocks that only the device holds are written to the host.
        query: `[B, Hq, D]` fp32, which scores the blocks.
    """
    step.begin()
    layer, length, end, scores = step.layer, step.length - 1, step.host_end, step.scores
    layer.write_back()
    store, size, tile = layer.store, layer.settings.block_size, layer.settings.prefill_tile
    assert store is not None
    padding, digests = store.padding, digests_of(store)
    behind = torch.from_numpy(padding.sinks(layer.requirements.sinks)[1]).long().clamp(max=end) * size  # [B]
    begin, stop = int(behind.min()), end * size

    def piece(first: int, last: int, sinks: bool | None) -> Tokens:
        key, value = store.gather(first, last - first)
        valid = torch.from_numpy(padding.valid[:, first:last] != 0)
        if sinks is not None:
            valid &= (torch.arange(first, last, device="cpu") < behind[:, None]) == sinks
        return Tokens(key, value, valid.to(key.device))

    stride = max(tile // size, 1) * size
    host = (piece(first, min(first + stride, stop), False) for first in range(begin, stop, stride))
    limits = torch.tensor([stop, end], dtype=torch.int32, device=digests.device)
    table = torch.from_numpy(store.table[:, :end].copy()).to(digests.device)
    masses = digests.score(query.to(digests.device).contiguous(), table, limits, scores)
    masses = masses[:, :, begin // size :].to(query.device)
    return Segments(piece(0, int(behind.max()), True), piece(stop, length, None), host, masses)


# --- one memory ------------------------------------------------------------------------------------------------------


class HostBuffers:
    """The buffers of one layer, for queries of one shape.

    Args:
        step: of the layer.
    """

    def __init__(self, step: CpuStep) -> None:
        query = step.buffers.query
        self.query = torch.from_numpy(query)
        self.selector = Selector(step.store, self.query, pin=False)
        with torch.inference_mode(False):
            self.sink_out = torch.empty(query.shape, dtype=torch.float32, device="cpu")
            self.sink_lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cpu")
        self._sinks = Partial(self.sink_out.numpy(), self.sink_lse.numpy())
        self._local = LocalBlocks(step.block_size)

    def attend_local(self, step: CpuStep) -> Local:
        """Queue attention to what is local."""
        buffers = step.buffers
        sinks, newest = self._local.parts(step.sinks, step.host_end, step.num_blocks, step.store.num_kv_heads)
        step.attention(sinks, "attention to the sinks", to=self._sinks)
        step.attention(newest, "CPU attention", to=buffers.partial(0))
        step.serve_this_block()
        return Local(self.query, (self.sink_out, self.sink_lse), (buffers.out_tensor, buffers.lse_tensor))

    def select(self, step: CpuStep, properties: Properties | LayerPredictor, local: Local | None) -> Partial:
        """Queue the prediction, behind attention to what is local, the choice of host blocks, and attention to them.

        Args:
            step: of this layer; the selector has room for it.
            properties: of the heads, or the predictor of them.
            local: from `attend_local`, for a predictor.
        """
        selector, store, buffers, counts = self.selector, step.store, step.buffers, step.state.counts
        if isinstance(properties, tuple):
            selector.set_properties(properties)
        else:
            launch = selector.predict(step, properties, self._sinks, (buffers.out, buffers.lse))
            step.add(launch, "the properties of the heads", length=True)
        digests, totals, choice = digests_of(store), counts.totals, selector.make_choice(store, step.scores)
        digest = selector.digest
        assert digest is not None
        if digests.of_query:
            step.then(lambda step: digests.fill(digest, buffers.query, step.scores.scale))
        step.add(choice, "the choice of host blocks")
        step.add(count_choice(selector.chosen, selector.granularities, totals), "counts of the choice")
        step.as_long_as(lambda: counts.totals is totals)
        blocks = Selection(selector.chosen.blocks, selector.chosen.counts, step.block_size)
        return step.attention(blocks, "attention to the host", to=Partial(selector.out, selector.lse))


def _buffers_of(step: CpuStep) -> HostBuffers:
    key = "fluxion", step.buffers.query.shape
    buffers: HostBuffers | None = step.layer.step_buffers.get(key)
    if buffers is None:
        buffers = step.layer.step_buffers[key] = HostBuffers(step)
    return buffers


# --- two memories ----------------------------------------------------------------------------------------------------


def _attend_local_on_device(step: SplitStep) -> Local:
    store = step.store
    local: LocalBlocks | None = step.layer.step_buffers.get("fluxion")
    if local is None:
        local = step.layer.step_buffers["fluxion"] = LocalBlocks(
            step.block_size, functools.partial(_sent, store.device)
        )
    partials = []
    for selection, index in local.parts(_sink_blocks(step), step.host_end, step.num_blocks, store.num_kv_heads):
        out, lse = step.attend_device(replace(selection, slots=step.resident.slot_of.gather(2, index)))
        partials.append(merge(out, lse, None, step.query, None, scale=step.scores.scale, dtype=torch.float32))
    return Local(step.query, *partials)


def _sent(device: torch.device, selection: Selection) -> tuple[Selection, torch.Tensor]:
    """A selection on the device, and its blocks as an index, int64."""
    blocks, counts = (sent(array, device) for array in (selection.items, selection.counts))
    return Selection(blocks, counts, selection.unit), blocks.long()


def _partial_of(step: SplitStep, schedule: str | None) -> SelectedHostPartial:
    """The layer's host partial, with no work in flight; schedule None: `"priority"` on a GPU, else `"none"`."""
    layer, query = step.layer, step.query
    schedule = schedule or ("priority" if layer.device.type == "cuda" else "none")
    alone = schedule == "none"
    partial: SelectedHostPartial = layer.host_partial_of(
        lambda kept: kept.form == (query.shape, 0),
        lambda: SelectedHostPartial(layer, query) if alone else ScheduledHostPartial(layer, query, schedule),
    )
    partial.cancel()
    return partial
