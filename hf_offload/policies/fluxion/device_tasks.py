"""The device's way with a task: its digests and chosen blocks come there, which scores, chooses and attends."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.cache.copying import bring
from hf_offload.gpu import kv_copy
from hf_offload.gpu.block_topk import choose_runs
from hf_offload.gpu.merge import merge
from hf_offload.gpu.paged_attention import paged_attention
from hf_offload.gpu.streams import TASKS, stream_for
from hf_offload.policies.fluxion.selector import Selector

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


class DeviceTasks:
    """What the device attends of the tasks of one layer's step; on a CUDA device on a stream beside the model's.

    Args:
        layer: the layer.
        query: `[B, Hq, D]`, tells the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        self._layer = weakref.ref(layer)  # which holds these
        with torch.inference_mode(False):
            self.out = torch.zeros(query.shape, device=layer.device)
            self.lse = torch.zeros(query.shape[:2], device=layer.device)
        self._stream: Any = None
        if layer.device.type == "cuda":
            self._stream = stream_for(TASKS, layer.device)

    def _beside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """Have attended nothing, behind what the model's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.lse.device))
        with self._beside():
            self.lse.fill_(float("-inf"))

    def run(self, step: Step, choice: Selector, task: int) -> None:
        """Do a task and wait for it.

        Args:
            step: of the layer.
            choice: what is needed; how coarse each task's runs are is known. Runs and counts of the task are written.
            task: row · Hkv + KV head.
        """
        row, head = divmod(task, step.store.num_kv_heads)
        with self._beside():
            count = self._attend(step, choice, row, head)
            choice.counts[row, head] = int(count)  # waits for all that was launched for the task

    def end(self) -> None:
        """Let the model's stream see what was attended."""
        if self._stream is not None:
            torch.cuda.current_stream(self.lse.device).wait_stream(self._stream)

    def _attend(self, step: Step, choice: Selector, row: int, head: int) -> torch.Tensor:
        """Attend for the query heads of a KV head; how many blocks, int32 `[]` on the device."""
        store, device = step.store, self.lse.device
        low, wanted, span = choice.wanted(row, head, store.block_size)
        group = len(wanted)
        heads = slice(head * group, (head + 1) * group)
        query = step.query[row : row + 1, heads]
        digests, blocks = store.digests, choice.end - low
        assert digests is not None, "a policy without a digest cannot choose"
        mine = digests.of_head(store.table[row, low : choice.end], head, device)
        places = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        masses = mine.score(query, places, places.new_full((2,), blocks), step.scores)[0]
        capacity = min(sum(wanted) * span, blocks)
        chosen, count = choose_runs(masses, wanted, span=span, sums=digests.sums, capacity=capacity)
        chosen += low
        slots, listed = places[None, :, :capacity], chosen[None, None]
        shape = (1, 1, capacity, 2, store.block_size, store.head_dim)
        pool = torch.empty(shape, dtype=store.dtype, device=device)
        layer = self._layer()
        assert layer is not None, "a task is done within its layer's step"
        self._fetch(layer, pool, row, head, slots, listed, count)
        valid = layer.mirror.valid()
        limits = layer.mirror.limits("step", step.length, store.sealed)
        shares = paged_attention(
            query, pool, slots.contiguous(), listed, count.view(1, 1), limits,
            None if valid is None else valid[row : row + 1], **step.scores._asdict(),
        )  # fmt: skip
        out, lse = merge(*shares, None, query, None, scale=step.scores.scale, dtype=torch.float32)
        self.out[row, heads], self.lse[row, heads] = out[0], lse[0]
        return count

    def _fetch(
        self, layer: HybridLayer, pool: torch.Tensor, row: int, head: int, slots: torch.Tensor, blocks: torch.Tensor,
        count: torch.Tensor,
    ) -> None:  # fmt: skip
        """Bring blocks of a row and KV head into `pool`: read where they lie, or else brought together by the CPU."""
        store = layer.store
        assert store is not None
        assert layer.resident is not None
        if not layer.resident.read_by_kernels:
            bring(store, pool[0, 0], row, head, blocks[0, 0, : int(count)].cpu().numpy())
            return
        addresses, packed = store.tables.block_ptr()[store.tables.table()[row].long()], store.format.device_layout
        record: int | torch.Tensor = store.pool.record_bytes
        if packed is not None:
            record = torch.where(addresses & 1 == 1, packed.record_bytes, record)
        addresses += head * record
        places = torch.arange(len(addresses), dtype=torch.int32, device=pool.device)[None]
        kv_copy.fetch(pool, slots.contiguous(), blocks, count.view(1, 1), addresses, places, packed=packed)
