"""Decode steps with two memories: block choice, split and recall on the device, attention on device and CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_offload.attention.drawn_host_partial import DrawnHostPartial
from hf_offload.attention.host_partial import BlockHostPartial
from hf_offload.attention.step import Step
from hf_offload.blocks.copying import Moves
from hf_offload.blocks.device_mirror import sent
from hf_offload.blocks.memory import LOWER_TILE, TILE, memory_for
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.kernels.block_topk import choose_blocks
from hf_offload.gpu.block_topk import select_blocks, split_blocks
from hf_offload.gpu.digest_scores import join_heads
from hf_offload.gpu.merge import merge
from hf_offload.gpu.paged_attention import paged_attention
from hf_offload.policies.base import HostPartial, Partial, Plan, Selection
from hf_offload.scores import Scores

COMPARE_EVERY = 8  # steps between two comparisons of predicted and wanted blocks


class SplitStep(Step):
    """A decode step of a layer with blocks in device slots and on the host.

    No service waits for the device, and no shape depends on a tensor's values, so that a step can be captured as a CUDA
    graph.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` (for `place`: `[B, Hq, n, D]`), the real or the predicted query.
        length, scores: as in `Step`.
        fresh: whether the step has stored a token; not if layers share keys and values and another one has.
    """

    query: torch.Tensor

    def __init__(
        self, layer: HybridLayer, query: torch.Tensor, length: int, scores: Scores, *, fresh: bool = False
    ) -> None:
        super().__init__(layer, length, scores)
        self.fresh = fresh
        assert layer.resident is not None
        self.query, self.resident, self.mirror = query.detach().float().contiguous(), layer.resident, layer.mirror
        self.query_shape = query.shape[0], query.shape[1]
        self.limits, self.valid = self.mirror.limits("step", length, self.store.sealed), self.mirror.valid()
        self.cpu_ratio: Any = None
        """The host partial's tokens as a share of the budget (without one: of all tokens), once it has its result: fp32
        `[]` or a float."""

    @cached_property
    def sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First block and end of each row's sinks, int32 `[B]` each."""
        return self.mirror.sinks(self.layer.requirements.sinks)

    @cached_property
    def dense(self) -> bool:
        """Whether the step attends all tokens on the device, without its policy's choice."""
        return self.layer.is_dense(self.length)

    def make_plan(self) -> Plan:
        return Plan(self.attend(self.all_blocks())) if self.dense else super().make_plan()

    def score(self, join: str, query: torch.Tensor | None = None) -> torch.Tensor:
        query = self.query if query is None else query
        if query.ndim == 4:
            scores = [self.score(join, query[:, :, i].contiguous()) for i in range(query.shape[2])]
            return torch.stack(scores).mean(0)
        digests, store = self.digests, self.store
        kv_heads = store.num_kv_heads
        if store.awaits_digests:
            return query.new_full((store.batch, kv_heads, store.table.shape[1]), float("-inf"))
        if store.scored_on_host:
            return self._score_on_host(query, join)
        masses = digests.score(query, self.resident.tables.table(), self.limits, self.scores)
        return join_heads(masses, self.tail(query), self.limits, kv_heads=kv_heads, join=join)

    def _score_on_host(self, query: torch.Tensor, join: str) -> torch.Tensor:
        """Score on the CPU, whose digests these are; this waits for the device."""
        digests, store = self.digests, self.store
        width = store.table.shape[1]
        asked, tail = query.cpu().numpy(), self.tail(query).cpu().numpy()
        shape = store.batch, store.num_kv_heads, width
        score = torch.full(shape, float("-inf"), dtype=torch.float32, device="cpu")
        choose_blocks(
            asked, digests.arrays(asked, self.scores.scale), store.table, store.sealed,
            np.empty((*query.shape[:2], width), np.float32), tail, score.numpy(), join=join,
            **self.scores._asdict(), kv_dtype=store.dtype,
        ).run(self.label("the scores of blocks"))  # fmt: skip
        return score.to(query.device)

    def tail(self, query: torch.Tensor | None = None) -> torch.Tensor:
        query, store = self.query if query is None else query, self.store
        if self.layer.unplaced:
            return query.new_full(query.shape[:2], float("-inf"))
        shape = (store.batch, store.num_kv_heads, 1)
        block = self.limits[1:].expand(shape).contiguous()
        slot = self.resident.slot_of.index_select(2, self.limits[1:])
        limits = self.limits  # the token of a predicted query is not stored yet
        if store.length != self.length:
            limits = self.mirror.limits("ahead", store.length, store.sealed)
        one = self.mirror.every_slot(*shape)[1]
        _, lse = paged_attention(
            query, self.resident.pool, slot, block, one, limits, self.valid, **self.scores._asdict()
        )
        return lse[:, :, 0] if lse.shape[2] == 1 else lse.logsumexp(-1)

    def select(self, score: torch.Tensor, blocks: int, recent: int | None = None) -> Selection:
        recent = self.recent_blocks if recent is None else recent
        low, high = self.sinks
        sink_blocks = -(-self.layer.requirements.sinks // self.block_size) + 1
        always = sink_blocks + recent + self.num_blocks - self.store.sealed
        capacity = min(max(blocks, always), self.store.table.shape[1])
        return self._selection(
            *select_blocks(
                score, self.limits, low, high, block_size=self.block_size, recent=recent, k=blocks, capacity=capacity
            )
        )

    def choose(self, join: str, blocks: int) -> tuple[torch.Tensor, Selection]:
        score = self.score(join)
        return score, self.select(score, blocks)

    def recent(self, blocks: int) -> Selection:
        sinks = -(-self.layer.requirements.sinks // self.block_size)
        newest = max(blocks - (self.num_blocks - self.store.sealed) - sinks, 0)
        return self.select(torch.zeros_like(self.resident.worth), 0, newest)

    def draw(self, join: str, samples: int) -> Selection:
        if self.all_resident:
            return self.all_blocks()
        partial = DrawnHostPartial.of(self, samples, join)
        partial.cancel()
        return partial.selection

    def all_blocks(self) -> Selection:
        shape, device = (self.store.batch, self.store.num_kv_heads, self.store.table.shape[1]), self.query.device
        if self.all_resident:
            return self.resident_blocks()
        blocks = torch.arange(shape[2], dtype=torch.int32, device=device).expand(shape).contiguous()
        count = (self.limits[:1] + self.block_size - 1) // self.block_size
        return self._selection(blocks, count.expand(shape[:2]).contiguous())

    def blocks_from(self, first: int) -> Selection:
        shape, device = (self.store.batch, self.store.num_kv_heads), self.query.device
        blocks = torch.arange(first, first + self.resident.slots, dtype=torch.int32, device=device)
        counts = torch.full(shape, self.num_blocks - first, dtype=torch.int32, device=device)
        blocks = blocks.clamp(max=self.store.table.shape[1] - 1)
        return self._selection(blocks.expand(*shape, -1).contiguous(), counts)

    def blocks(self, numbers: Sequence[int]) -> Selection:
        listed = sent(self._listed(numbers), self.query.device)
        shape = (self.store.batch, self.store.num_kv_heads)
        counts = torch.full(shape, len(listed), dtype=torch.int32, device=self.query.device)
        return self._selection(listed.expand(*shape, -1).contiguous(), counts)

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        block, offset = divmod(self.length - 1, self.block_size)
        key, value = self.resident.block(block)[:, :, :, offset].unbind(2)
        return key, value

    def _selection(self, blocks: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor | None = None) -> Selection:
        return Selection(blocks, counts, self.block_size, slots=slots)

    @property
    def all_resident(self) -> bool:
        return self.layer.holds_all(self.length)

    def resident_blocks(self) -> Selection:
        """As in `Step`: in the order of their slots; free ones, -1, come last while all blocks are resident."""
        slots, counts = self.mirror.every_slot(*self.resident.block_of.shape)
        return self._selection(self.resident.block_of, counts, slots)

    def sorted_residents(self) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.resident.block_of
        blocks = torch.where(held < 0, torch.iinfo(torch.int32).max, held).sort(-1)[0]
        return blocks, (held >= 0).sum(-1, dtype=torch.int32)

    def split(self, selection: Selection) -> tuple[Selection, Selection | None]:
        if selection.slots is not None:
            return selection, None
        if selection.weights is not None:
            return self.resident_blocks(), selection
        parts = split_blocks(selection.items, selection.counts, self.resident.slot_of)
        near = self._selection(parts.near, parts.near_counts, parts.near_slots)
        return near, None if self.all_resident else self._selection(parts.far, parts.far_counts)

    # --- computing ---------------------------------------------------------------------------------------------------

    def attend_device(self, device: Selection) -> Partial:
        """Attend resident blocks on the device; the partial has splits."""
        out, lse = paged_attention(
            self.query, self.resident.pool, device.slots, device.items, device.counts, self.limits,
            self.valid, **self.scores._asdict(),
        )  # fmt: skip
        return Partial(out, lse)

    def attend_split(self, device: Selection | None, host: Selection | None) -> tuple[Partial | HostPartial, ...]:
        partial = None
        if host is not None:  # first, so that CPU and device work at once
            partial = self._host_partial(host).start(self, host, correct=False, label="CPU attention")
        partials = () if device is None else (self.attend_device(device),)
        return partials if partial is None else (*partials, partial)

    def fetch(self, score: torch.Tensor, chosen: Selection) -> tuple[Partial | HostPartial, ...]:
        resident = self.resident
        if self.all_resident:
            return self.attend(chosen)
        if resident.slots > chosen.items.shape[2]:  # other resident blocks stay while there are slots
            score = torch.where(self._marks(chosen) | (resident.slot_of >= 0), score, -torch.inf)
        self.learn(score, 0.0)
        moves = resident.exchange(self.limits, self.sinks, self.recent_blocks, None)
        resident.bring(moves)
        self.layer.count("moves", moves.counts)
        device, missing = self.split(chosen)
        attended, fits = self.attend_device(device), chosen.items.shape[2] <= resident.slots
        return (attended,) if missing is None or fits else (attended, self.attend_fetched(missing))

    def attend_fetched(self, host: Selection) -> Partial:
        resident, shape, most = self.resident, host.items.shape[:2], host.items.shape[2]
        size = min(max(self.layer.settings.prefill_tile // self.block_size, 1), most)
        with memory_for(TILE, LOWER_TILE):
            tile = resident.pool.new_empty(*shape, size, *resident.pool.shape[3:])
        slots = torch.arange(size, dtype=torch.int32, device=self.query.device).expand(*shape, size).contiguous()
        listed, parts = torch.nn.functional.pad(host.items, (0, -most % size)), []
        for first in range(0, most, size):
            blocks, counts = listed[:, :, first : first + size].contiguous(), (host.counts - first).clamp(0, size)
            resident.bring(Moves(slots, blocks, counts), tile)
            out, lse = paged_attention(
                self.query, tile, slots, blocks, counts, self.limits, self.valid,
                **self.scores._asdict(),
            )  # fmt: skip
            parts.append(merge(out, lse, None, self.query, None, scale=self.scores.scale, dtype=torch.float32))
        self.layer.count("moves", host.counts)
        return Partial(torch.stack([out for out, _ in parts], 2), torch.stack([lse for _, lse in parts], 2))

    def attend_early(self, host: Selection, *, correct: bool) -> BlockHostPartial:
        partial = self._host_partial(host)
        return self.layer.start_ahead(partial.start(self, host, correct=correct, label="early CPU attention"))

    def read_ahead(self, host: Selection) -> None:
        self._host_partial(host).read(self, host)

    def _host_partial(self, host: Selection) -> BlockHostPartial:
        """Return the layer's host partial, a new one where sizes have changed; `draw` has made that of pairs.

        Raises:
            ValueError: pairs that another draw or other work on the host has replaced.
        """
        form = self.query.shape, host.items.shape[2]
        if host.weights is not None:
            partial: DrawnHostPartial | None = self.layer.host_partial
            if not isinstance(partial, DrawnHostPartial) or partial.selection is not host:
                raise ValueError(
                    "these pairs are of an earlier draw: with two memories a layer holds one list of pairs; attend a "
                    "draw before the next one, and before other blocks on the host"
                )
            return partial
        return self.layer.host_partial_of(
            lambda kept: type(kept) is BlockHostPartial and kept.form == form,
            lambda: BlockHostPartial(self.layer, self.query, form[1]),
        )

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: torch.Tensor, smoothing: float) -> None:
        self.resident.learn(score, self.limits, smoothing)

    def recall(self, clock: Any) -> None:
        if self.all_resident:
            return
        due = clock.due(self.cpu_ratio)
        if due is None:
            return
        capture = self.mirror.capture
        if capture is not None:
            capture.keep(due)
        # A captured step ends with the recalls. After an eager step the next layer-ahead step reads slots at once.
        with nullcontext() if capture is None else self.mirror.beside():
            moves = self.resident.exchange(self.limits, self.sinks, self.recent_blocks, due)
            self.resident.fetch(moves, self.label("recall"))
            self.layer.count("moves", moves.counts)

    def share_of(self, host: Selection) -> torch.Tensor:
        budget = self.layer.requirements.budget
        most = self.store.table.shape[1] if budget is None else budget // self.block_size
        within: torch.Tensor | int = most
        if self.num_blocks < most:  # blocks may be fewer than the budget: a replay computes their number
            within = ((self.limits[0] + self.block_size - 1) // self.block_size).clamp(max=most)
        ratio: torch.Tensor = host.counts.sum(dtype=torch.float32) / (
            within * self.store.batch * self.store.num_kv_heads
        )
        return ratio

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        if self.layer.stats.steps % COMPARE_EVERY or self.mirror.capture is not None:
            return
        valid = torch.arange(wanted.items.shape[2], device=self.query.device) < wanted.counts[..., None]
        hits = self._marks(predicted).gather(2, torch.where(valid, wanted.items, 0).long()) & valid
        self.layer.count("overlap", hits.sum(dtype=torch.float32) / valid.sum().clamp(min=1))

    def _marks(self, selection: Selection) -> torch.Tensor:
        """Return a selection as a mask over blocks, bool `[B, Hkv, N]`."""
        width, device = self.store.table.shape[1], self.query.device
        valid = torch.arange(selection.items.shape[2], device=device) < selection.counts[..., None]
        marks = torch.zeros(*selection.items.shape[:2], width + 1, dtype=torch.bool, device=device)
        return marks.scatter_(2, torch.where(valid, selection.items, width).long(), True)[:, :, :width]
