"""The host partial of keys that are drawn by their estimated attention from blocks that are not resident."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.attention.host_partial import BlockHostPartial, discard
from hf_offload.cpu.kernels import draw_pairs
from hf_offload.cpu.kernels.pair_decode import attend_pairs
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job
from hf_offload.gpu.handover import hand_over
from hf_offload.policies.base import Drawn
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


class DrawnHostPartial(BlockHostPartial):
    """Draw and attention on the CPU. The device hands over the query, what is resident, the tail's log mass, and how
    many tokens there are.

    The CPU returns what the device cannot know: the shares of the blocks, by which blocks are recalled, and the number
    of drawn pairs.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, a tensor with the sizes of the queries.
        samples, join: as for `draw_pairs.draw_missing`.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor, samples: int, join: str) -> None:
        assert layer.store is not None
        assert layer.resident is not None
        super().__init__(layer, query, layer.resident.slots)
        store = layer.store
        batch, kv_heads, width = store.batch, store.num_kv_heads, store.table.shape[1]
        self.samples, self.join, self.width = samples, join, width
        self.tail, self.limits = self._buffer(*query.shape[:2]), self._buffer(2, dtype=torch.int32)
        self.score = self._buffer(batch, kv_heads, width)
        self.score.fill_(-torch.inf)
        self.drawn = self._buffer(batch, kv_heads, dtype=torch.int32)
        self.drawn.zero_()
        shapes = (batch, kv_heads, 0), (batch, kv_heads)
        with torch.inference_mode(False):
            none = [torch.zeros(shape, dtype=torch.int32, device=store.device) for shape in shapes]
        self._no_blocks = none
        real = self._buffer(*query.shape), *(self._buffer(*shape, dtype=torch.int32) for shape in shapes)
        self._inbox = self._make_inbox(self.query, self.blocks, self.counts, self.tail, self.limits)
        self._real = self._make_inbox(*real)
        """Takes in the real query, where a predicted one has drawn."""
        pairs = store.block_size // 2
        most = width * pairs
        room = draw_pairs.most_pairs(samples, query.shape[1] // kv_heads, most)
        self._lists = draw_pairs.PairLists.of(batch, kv_heads, room)._replace(counts=self.drawn.numpy())
        heads = batch, query.shape[1]
        self._masses = np.empty((*heads, draw_pairs.kept_masses(width, pairs)), draw_pairs.MASSES)
        self._portion, self._errors = np.zeros(heads, np.float32), np.zeros(heads, np.float32)
        self._drawing: Job | None = None
        self.awaits_query = False
        """Whether pairs are drawn, and attended with a query that comes later."""

    @classmethod
    def of(cls, step: Step, samples: int, join: str) -> DrawnHostPartial:
        """Return the partial of a step's layer, made anew where sizes have changed."""
        layer = step.layer
        partial = layer.host_partial
        if not isinstance(partial, DrawnHostPartial) or not partial.serves(step, samples, join):
            partial = layer.host_partial = DrawnHostPartial(layer, step.query, samples, join)
        return partial

    def serves(self, step: Step, samples: int, join: str) -> bool:
        """Whether the buffers have a step's sizes."""
        return (
            self.form[0] == step.query.shape
            and (self.samples, self.join) == (samples, join)
            and self.width == step.store.table.shape[1]
        )

    def attend(self, step: Step, *, correct: bool, label: str) -> DrawnHostPartial:
        """Start the draw and the attention with the step's query.

        Args:
            step: the step.
            correct: whether to compute k̄ for the first-order correction.
            label: the job's name in error messages.
        """
        self._drop()
        self.predicted, self._correct = step.query, correct
        self._job = self._submit(step, functools.partial(self._send_all, step), self.make_launches, label)
        return self

    def draw(self, step: Step) -> DrawnHostPartial:
        """Start the draw alone, with a predicted query; `attend_drawn` follows."""
        self._drop()
        self._correct, self.awaits_query = False, True
        send = functools.partial(self._send_all, step)
        self._drawing = self._submit(step, send, self._make_draw, "draw of pairs", key=self._lists)
        return self

    def attend_drawn(self, step: Step) -> DrawnHostPartial:
        """Start the attention of what was drawn, with the step's real query."""
        self.predicted, self.awaits_query, before = step.query, False, self._drawing
        send = functools.partial(self._send_real, step.query)
        self._job = self._submit(
            step, send, self._make_real_attention, "CPU attention", after=self._lists, before=before
        )
        return self

    def rehearse(self, capture: Any) -> None:
        super().rehearse(capture)
        self._rehearse(capture, self._real)  # without a tail: another kernel

    def _send_all(self, step: Step, flag: torch.Tensor | None = None, epoch: torch.Tensor | None = None) -> None:
        self.mirror.pause()
        held = step.resident_blocks()
        assert held is not None, "with two memories"
        hand_over(self._inbox, step.query, held.blocks, held.counts, step.tail(), step.limits, flag=flag, epoch=epoch)

    def _send_real(
        self, query: torch.Tensor, flag: torch.Tensor | None = None, epoch: torch.Tensor | None = None
    ) -> None:
        self.mirror.pause()
        hand_over(self._real, query, *self._no_blocks, flag=flag, epoch=epoch)

    def make_launches(self, scores: Scores) -> tuple[Launch, ...]:
        return (*self._make_draw(scores), self._attention(scores, self.query))

    def _make_draw(self, scores: Scores) -> tuple[Launch, ...]:
        store = self.store
        assert store.digests is not None
        resident = draw_pairs.Resident(self.blocks.numpy(), self.counts.numpy(), self.score.numpy())
        most, first = self.width * store.block_size // 2, store.padding.first
        thresholds = draw_pairs.Thresholds.of(self.stats.layer, first, most, self.limits.numpy())
        return (
            draw_pairs.draw_missing(
                self.query.numpy(), store.digests.arrays(self.query.numpy(), scores.scale), store.table, resident,
                thresholds, self.tail.numpy(), self._masses, *self._lists, self._portion, samples=self.samples,
                join=self.join, **scores._asdict(), tally=self.stats.drawn,
            ),
        )  # fmt: skip

    def _make_real_attention(self, scores: Scores) -> tuple[Launch, ...]:
        return (self._attention(scores, self._real.query),)

    def _attention(self, scores: Scores, query: torch.Tensor) -> Launch:
        store, view = self.store, self.store.view(self.store.length)
        return attend_pairs(
            query.numpy(), view.block_ptr, view.table, *self._lists, view.holes, view.valid, view.covered,
            self.out.numpy(), self.lse.numpy(), self.kbar.numpy() if self._correct else None, kv_dtype=store.dtype,
            block_size=store.block_size, **scores._asdict(), packed=store.format.packed, portion=self._portion,
            errors=self._errors, tally=self.stats.errors,
        )  # fmt: skip

    def share(self, step: Step) -> torch.Tensor:
        """Return the drawn tokens as a share of all that were attended: fp32 `[]` on the device, after `result`."""
        drawn = 2 * self.drawn.to(step.query.device, non_blocking=True).sum(dtype=torch.float32)
        resident = step.layer.resident
        assert resident is not None
        here: torch.Tensor = (resident.block_of >= 0).sum(dtype=torch.float32) * step.block_size
        return drawn / (drawn + here)

    def block_shares(self) -> torch.Tensor:
        """Return the shares of the blocks, fp32 `[B, Hkv, N]` on the device, after `result`."""
        return self.score.to(self.store.device, non_blocking=True)

    def drawn_part(self, step: Step) -> Drawn:
        return Drawn(self._lists, self.real_lse(step), self._errors)

    def _drop(self) -> None:
        super()._drop()
        drawing, self._drawing, self.awaits_query = self._drawing, None, False
        if drawing is not None:
            discard(drawing)
