"""A decode step with one memory: Numba kernels over the pool itself, nothing copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.attention.ahead import Ahead
from hf_offload.attention.step import Step, fp32
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu import choose as choosing
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu import pool as movers
from hf_offload.cpu import select as selecting
from hf_offload.cpu.selections import common_blocks, split_blocks
from hf_offload.policies.base import Plan, Selection


class HostStep(Step):
    """A step of a layer whose blocks all lie in the memory that the model computes in.

    Args:
        layer: the layer.
        query: `[B, Hq, D]`, the real or the predicted query.
        length, scale, softcap: as in `Step`.
    """

    query: np.ndarray

    def __init__(
        self, layer: HybridLayer, query: torch.Tensor, length: int, scale: float, softcap: float | None = None
    ) -> None:
        super().__init__(layer, length, scale, softcap)
        self.query = fp32(query).numpy()

    # --- choosing blocks ---------------------------------------------------------------------------------------------

    @property
    def sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of each row's sinks, `[B]` each."""
        return self.store.padding.sinks(self.layer.policy.sink_tokens)

    def _buffer(self, name: str, *shape: int) -> np.ndarray:
        """An fp32 buffer that lives for this step only: the next step of any mode overwrites it."""
        found = self.layer.scratch.get(name)
        if found is None or found.shape[:-1] != shape[:-1] or found.shape[-1] < shape[-1]:
            found = np.empty((*shape[:-1], (max(shape[-1] * 5 // 4, 64) + 15) // 16 * 16), np.float32)
            self.layer.scratch[name] = found
        return found

    def score(self, join: str) -> np.ndarray:
        return self._score(join)

    def choose(self, join: str, blocks: int) -> tuple[np.ndarray, Selection]:
        selection, bounds = self._room(blocks, self.recent_blocks)
        select = (*bounds, self.recent_blocks, self.num_blocks, blocks, selection.blocks, selection.counts)
        return self._score(join, select), selection

    def _score(self, join: str, select: Any = None) -> np.ndarray:
        store, sealed, query = self.store, self.store.sealed, self.query
        assert store.digests is not None, "a policy without a digest cannot score"
        batch, heads, _ = query.shape
        masses = self._buffer("masses", batch, heads, sealed)
        score = self._buffer("score", batch, store.num_kv_heads, sealed)
        if not store.digests.frozen or sealed == 0:  # no block has a digest, or all are padding
            score[:, :, :sealed] = -np.inf
            if select is not None:
                self._run_select(score, *select)
            return score
        tail, unsealed = np.full((batch, heads), -np.inf, np.float32), None
        # What is there: a layer ahead, this step's own token is not.
        if join != "raw" and sealed * self.block_size < store.length:
            padding = store.padding
            unsealed = (store.pool.block_ptr, padding.holes, padding.valid, store.length, self.block_size)
        launch = choosing.choose_blocks(
            query, store.digests.arrays(query, self.scale), store.table, sealed, masses, tail, score, join=join,
            scale=self.scale, kv_dtype=store.dtype, unsealed=unsealed, select=select,
        )  # fmt: skip
        launch.run(self.label("scoring"))
        return score

    def select(self, score: np.ndarray, blocks: int) -> Selection:
        return self._select(score, blocks, self.recent_blocks)

    def recent(self, blocks: int) -> Selection:
        unsealed, sinks = self.num_blocks - self.store.sealed, -(-self.layer.policy.sink_tokens // self.block_size)
        score = self._buffer("score", self.store.batch, self.store.num_kv_heads, self.store.sealed)
        return self._select(score, 0, max(blocks - unsealed - sinks, 0))

    def _room(self, blocks: int, recent: int) -> tuple[Selection, tuple[np.ndarray, np.ndarray]]:
        """An empty selection for `blocks` blocks or those that are always kept, and the bounds of the sinks."""
        low, high = self.sinks
        always = max((high - low).tolist(), default=0) + recent + self.num_blocks - self.store.sealed
        shape = (self.store.batch, self.store.num_kv_heads)
        width = min(max(blocks, always), self.num_blocks)
        return Selection(np.empty((*shape, width), np.int32), np.empty(shape, np.int32)), (low, high)

    def _select(self, score: np.ndarray, blocks: int, recent: int) -> Selection:
        selection, bounds = self._room(blocks, recent)
        self._run_select(score, *bounds, recent, self.num_blocks, blocks, selection.blocks, selection.counts)
        return selection

    def _run_select(
        self, score: np.ndarray, low: np.ndarray, high: np.ndarray, recent: int, n_blocks: int, k: int,
        blocks: np.ndarray, counts: np.ndarray,
    ) -> None:  # fmt: skip
        launch = selecting.select_blocks(score, self.store.sealed, n_blocks, low, high, recent, k, blocks, counts)
        launch.run(self.label("selection"))

    def all_blocks(self) -> Selection:
        shape = (self.store.batch, self.store.num_kv_heads)
        known = self.layer.everything
        if known is None or known.blocks.shape != (*shape, self.num_blocks):
            blocks = np.broadcast_to(np.arange(self.num_blocks, dtype=np.int32), (*shape, self.num_blocks))
            known = Selection(blocks.copy(), np.full(shape, self.num_blocks, np.int32))
            self.layer.everything = known
        return known

    def resident_blocks(self) -> None:
        return None

    def split(self, selection: Selection) -> tuple[None, Selection]:
        return None, selection

    def split_early(self, selection: Selection) -> tuple[Selection, Selection]:
        low, high = self.sinks
        number = np.arange(self.num_blocks, dtype=np.int32)
        newest = self.store.sealed - self.recent_blocks
        always = (number >= newest) | ((number >= low[:, None]) & (number < high[:, None]))
        mark = np.where(always, np.int32(0), np.int32(-1))[:, None].repeat(self.store.num_kv_heads, 1)
        (here, _, here_counts), (there, there_counts) = split_blocks(selection.blocks, selection.counts, mark)
        return Selection(here, here_counts), Selection(there, there_counts)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _launch(self, host: Selection, out: np.ndarray, lse: np.ndarray, kbar: np.ndarray | None) -> Any:
        store = self.store
        store.check_selected(host.blocks, host.counts)
        return cpu_decode.sparse_decode(
            self.query, store.pool.block_ptr, store.table, host.blocks, host.counts, store.padding.holes,
            store.padding.valid, self.length, out, lse, kbar, kv_dtype=store.dtype, block_size=self.block_size,
            scale=self.scale, softcap=self.softcap, packed=store.packs,
        )  # fmt: skip

    def attend_host(self, host: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend blocks now with this step's query: (out `[B, Hq, D]`, lse `[B, Hq]`) fp32."""
        out, lse = np.empty_like(self.query), np.empty(self.query.shape[:2], np.float32)
        launch = self._launch(host, out, lse, None)
        launch.run(self.label("CPU attention"))
        return torch.from_numpy(out), torch.from_numpy(lse)

    def attend_early(self, host: Selection, *, correct: bool) -> Ahead | None:
        if host.total == 0:
            return None
        ahead = Ahead(self.query, host, self.scale, correct)
        # Blocks are read off the critical path: the arguments are checked here, where an error is the caller's.
        launch = self._launch(host, ahead.out, ahead.lse, ahead.kbar)
        worker = self.layer.settings.worker
        launch.ticket[2] = shares = min(worker.threads, launch.tasks)
        ahead.job = worker.submit(launch, self.label("early CPU attention"), shares=shares, keep=self.store.pool)
        self.layer.ahead = ahead
        return ahead

    def read_ahead(self, host: Selection) -> None:
        if host.total == 0:
            return
        # The tail is being written, and may not even exist before this step's token arrives.
        meant = (np.arange(host.blocks.shape[2]) < host.counts[:, :, None]) & (host.blocks < self.store.sealed)
        rows, head, _ = np.nonzero(meant)
        store = self.store
        addresses = store.pool.addresses(store.table[rows, host.blocks[meant]], head) & ~1
        launch = movers.touch_records(
            addresses, store.pool.packed_record_bytes if store.packs else store.pool.record_bytes
        )
        self.layer.settings.worker.submit(launch, self.label("read-ahead"), keep=store.pool)

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: np.ndarray, smoothing: float) -> None:
        """There is no resident set to tell."""

    def recall(self, plan: Plan, clock: Any) -> None:
        """There is nothing to exchange."""

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        common = common_blocks(predicted.blocks, predicted.counts, wanted.blocks, wanted.counts)
        self.layer.stats.selection_overlap += common / max(wanted.total, 1)
        self.layer.stats.selections += 1
