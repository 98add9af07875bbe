"""The host partial of keys that are drawn by their estimated attention from blocks that are not resident."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.attention.draw import Draw
from hf_offload.attention.host_partial import BlockHostPartial, discard
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.kernels.draw_pairs import Resident
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job
from hf_offload.gpu.handover import hand_over
from hf_offload.policies.base import Estimate, Selection
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
        samples, join: as for `Draw`.
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
        self._draw = Draw(store, layer.stats, query.shape[1], samples, join, width, counts=self.drawn.numpy())
        self.selection = self._draw.selection
        self._drawing: Job | None = None
        self._is_drawn = False

    @classmethod
    def of(cls, step: Step, samples: int, join: str) -> DrawnHostPartial:
        """Return the partial of a step's layer, made again where sizes have changed."""
        return step.layer.host_partial_of(
            lambda kept: isinstance(kept, DrawnHostPartial) and kept.serves(step, samples, join),
            lambda: DrawnHostPartial(step.layer, step.query, samples, join),
        )

    def serves(self, step: Step, samples: int, join: str) -> bool:
        """Whether the buffers have a step's sizes."""
        return (
            self.form[0] == step.query.shape
            and (self.samples, self.join) == (samples, join)
            and self.width == step.store.table.shape[1]
        )

    def start(self, step: Step, host: Selection | None, *, correct: bool, label: str) -> DrawnHostPartial:
        """Start the draw, unless `read` has, and the attention, with the step's query."""
        self.predicted = step.query
        if self._is_drawn:
            self._is_drawn, send = False, functools.partial(self._send_real, step.query)
            make, after, before = self._make_real_attention, self.selection, self._drawing
            self._job = self._submit(step, send, make, label, after=after, before=before)
            return self
        self._drop()
        self._correct = correct
        self._job = self._submit(step, functools.partial(self._send_all, step), self.make_launches, label)
        return self

    def read(self, step: Step, host: Selection) -> None:
        """Start the draw alone, with a predicted query; `start` attends with the real one."""
        self._drop()
        self._correct, self._is_drawn = False, True
        send = functools.partial(self._send_all, step)
        self._drawing = self._submit(step, send, self._make_draw, "draw of pairs", key=self.selection)

    def rehearse(self, capture: Any) -> None:
        super().rehearse(capture)
        self._rehearse(capture, self._real)  # without a tail: another kernel

    def _send_all(self, step: Step, flag: torch.Tensor | None = None, epoch: torch.Tensor | None = None) -> None:
        self.mirror.pause()
        blocks, counts = step.sorted_residents()
        hand_over(self._inbox, step.query, blocks, counts, step.tail(), step.limits, flag=flag, epoch=epoch)

    def _send_real(
        self, query: torch.Tensor, flag: torch.Tensor | None = None, epoch: torch.Tensor | None = None
    ) -> None:
        self.mirror.pause()
        hand_over(self._real, query, *self._no_blocks, flag=flag, epoch=epoch)

    def make_launches(self, scores: Scores) -> tuple[Launch, ...]:
        return (*self._make_draw(scores), self._attention(scores, self.query))

    def _make_draw(self, scores: Scores) -> tuple[Launch, ...]:
        digests, query = self.store.digests, self.query.numpy()
        assert digests is not None
        resident = Resident(self.blocks.numpy(), self.counts.numpy(), self.score.numpy(), self._draw.portion)
        digest, limits = digests.arrays(query, scores.scale), self.limits.numpy()
        return (self._draw.launch(query, digest, resident, scores, limits=limits, tail=self.tail.numpy()),)

    def _make_real_attention(self, scores: Scores) -> tuple[Launch, ...]:
        return (self._attention(scores, self._real.query),)

    def _attention(self, scores: Scores, query: torch.Tensor) -> Launch:
        view, kbar = self.store.view(self.store.length), self.kbar.numpy() if self._correct else None
        return decode_attention(
            query.numpy(), view.blocks, self.selection.items, self.selection.counts, view.covered, self.out.numpy(),
            self.lse.numpy(), kbar, **scores._asdict(), pairs=self.selection.weights,
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

    def estimate(self, step: Step) -> Estimate:
        return Estimate(self.selection, self.real_lse(step))

    def _drop(self) -> None:
        super()._drop()
        drawing, self._drawing, self._is_drawn = self._drawing, None, False
        if drawing is not None:
            discard(drawing)
