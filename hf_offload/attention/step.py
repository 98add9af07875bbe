"""One decode step of one layer, and the services that a policy may use in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.attention.ahead import Ahead
from hf_offload.attention.exchange import recall
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu import choose as choosing
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu import pool as movers
from hf_offload.cpu import select as selecting
from hf_offload.cpu.scoring import LogMasses
from hf_offload.cpu.selections import common_blocks, split_blocks
from hf_offload.gpu.paged import paged_attention
from hf_offload.policies.base import Plan, Selection


class Step:
    """What a policy sees of one decode step of one layer.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32 on the CPU (for `place`: `[B, Hq, n, D]`), the real or the predicted query.
        length: tokens of a row, this step's own included.
        scale: softmax scale.
        softcap: bound of the scores, or None.
    """

    def __init__(
        self, layer: HybridLayer, query: np.ndarray, length: int, scale: float, softcap: float | None = None
    ) -> None:
        assert layer.store is not None
        self.layer, self.store = layer, layer.store
        self.query, self.length, self.scale, self.softcap = query, length, scale, softcap
        self.block_size = self.store.block_size
        self.num_blocks = -(-length // self.block_size)

    @property
    def state(self) -> Any:
        """What the policy remembers of this layer."""
        return self.layer.state

    # --- choosing blocks ---------------------------------------------------------------------------------------------

    def sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of each row's sinks, `[B]` each."""
        return self.store.padding.sinks(self.layer.policy.sink_tokens)

    def _buffer(self, name: str, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """A buffer that lives for this step only: the next step of any mode overwrites it."""
        found = self.layer.scratch.get(name)
        if found is None or found.shape[:-1] != shape[:-1] or found.shape[-1] < shape[-1]:
            found = np.empty((*shape[:-1], (max(shape[-1] * 5 // 4, 64) + 15) // 16 * 16), dtype)
            self.layer.scratch[name] = found
        return found

    def score(self, join: str) -> np.ndarray:
        """Score the sealed blocks with this step's query (or queries: the mean over them).

        Args:
            join: how a group's heads are joined: `"max"`, `"mean"` (of the softmax of each) or `"raw"`.

        Returns:
            `[B, Hkv, N]` fp32, −inf for blocks without valid tokens; good until the next score of this layer.
        """
        if self.query.ndim == 3:
            return self._score(self.query, join)
        total, sealed = np.zeros(()), self.store.sealed
        for i in range(self.query.shape[2]):
            total = total + self._score(np.ascontiguousarray(self.query[:, :, i]), join)[:, :, :sealed]
        score = self._buffer("score", self.store.batch, self.store.num_kv_heads, sealed)
        score[:, :, :sealed] = total / self.query.shape[2]
        return score

    def choose(self, join: str, blocks: int) -> tuple[np.ndarray, Selection]:
        """`score` and `select` in one: the scores, and the sinks, recent blocks, tail and best others."""
        recent = -(-self.layer.policy.recent_tokens // self.block_size)
        selection, bounds = self._room(blocks, recent)
        select = (*bounds, recent, self.num_blocks, blocks, selection.blocks, selection.counts)
        return self._score(self.query, join, select), selection

    def _score(self, query: np.ndarray, join: str, select: Any = None) -> np.ndarray:
        store, sealed = self.store, self.store.sealed
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
            if self.layer.resident is None or self.layer.unplaced:
                padding = store.padding
                unsealed = (
                    store.pool.block_ptr, padding.holes, padding.valid, store.length, self.block_size
                )  # fmt: skip
            else:
                tail = self._resident_tail(query)
        if store.device.type == "cpu":
            digest: Any = store.digests.arrays(query, self.scale)
        else:
            table = torch.from_numpy(store.table[:, :sealed].astype(np.int64)).to(store.device)
            ready = torch.from_numpy(query).to(store.device)
            digest = LogMasses(store.digests.score(ready, table, self.scale).cpu().numpy())
        launch = choosing.choose_blocks(
            query, digest, store.table, sealed, masses, tail, score, join=join, scale=self.scale, kv_dtype=store.dtype,
            unsealed=unsealed, select=select,
        )  # fmt: skip
        launch.run(self.label("scoring"))
        return score

    def _resident_tail(self, query: np.ndarray) -> np.ndarray:
        """Log mass `[B, Hq]` of the tokens that have no digest yet and lie on the device."""
        store = self.store
        tail = np.arange(store.sealed, store.num_blocks, dtype=np.int32)
        blocks = np.broadcast_to(tail, (store.batch, store.num_kv_heads, len(tail))).copy()
        counts = np.full(blocks.shape[:2], len(tail), np.int32)
        # No softcap: digests know none either, and the two are compared.
        return self.attend_device(Selection(blocks, counts), query, store.length)[1].cpu().numpy()

    def select(self, score: np.ndarray, blocks: int) -> Selection:
        """The sinks, the recent blocks, the tail, and the best of the others: `blocks` in all."""
        return self._select(score, blocks, -(-self.layer.policy.recent_tokens // self.block_size))

    def recent(self, blocks: int) -> Selection:
        """The sinks and the newest blocks: `blocks` in all."""
        unsealed, sinks = self.num_blocks - self.store.sealed, -(-self.layer.policy.sink_tokens // self.block_size)
        score = self._buffer("score", self.store.batch, self.store.num_kv_heads, self.store.sealed)
        return self._select(score, 0, max(blocks - unsealed - sinks, 0))

    def _room(self, blocks: int, recent: int) -> tuple[Selection, tuple[np.ndarray, np.ndarray]]:
        """An empty selection for `blocks` blocks or those that are always kept, and the bounds of the sinks."""
        low, high = self.sinks()
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
        """Every block."""
        shape = (self.store.batch, self.store.num_kv_heads)
        known = self.layer.everything
        if known is None or known.blocks.shape != (*shape, self.num_blocks):
            blocks = np.broadcast_to(np.arange(self.num_blocks, dtype=np.int32), (*shape, self.num_blocks))
            known = Selection(blocks.copy(), np.full(shape, self.num_blocks, np.int32))
            self.layer.everything = known
        return known

    def resident_blocks(self) -> Selection:
        """Every resident block."""
        resident = self.layer.resident
        assert resident is not None
        held = np.sort(np.where(resident.block_of < 0, np.iinfo(np.int32).max, resident.block_of), -1)
        return Selection(held, (resident.block_of >= 0).sum(-1, dtype=np.int32))

    def split(self, selection: Selection) -> tuple[Selection | None, Selection | None]:
        """Part a selection into (on the device, on the host); with one memory the host has all."""
        resident = self.layer.resident
        if resident is None:
            return None, selection
        (here, _, here_counts), (there, there_counts) = split_blocks(
            selection.blocks, selection.counts, resident.slot_of
        )
        return Selection(here, here_counts), Selection(there, there_counts)

    def split_always(self, selection: Selection) -> tuple[Selection, Selection]:
        """Part a selection into what is always attended (sinks, recent blocks, the tail) and the rest."""
        low, high = self.sinks()
        number = np.arange(self.num_blocks, dtype=np.int32)
        newest = self.store.sealed - -(-self.layer.policy.recent_tokens // self.block_size)
        always = (number >= newest) | ((number >= low[:, None]) & (number < high[:, None]))
        mark = np.where(always, np.int32(0), np.int32(-1))[:, None].repeat(self.store.num_kv_heads, 1)
        (here, _, here_counts), (there, there_counts) = split_blocks(selection.blocks, selection.counts, mark)
        return Selection(here, here_counts), Selection(there, there_counts)

    # --- computing ---------------------------------------------------------------------------------------------------

    def _launch(
        self, query: np.ndarray, host: Selection, out: np.ndarray, lse: np.ndarray, kbar: np.ndarray | None
    ) -> Any:
        store = self.store
        return cpu_decode.sparse_decode(
            query, store.pool.block_ptr, store.table, host.blocks, host.counts, store.padding.holes,
            store.padding.valid, self.length, out, lse, kbar, kv_dtype=store.dtype, block_size=self.block_size,
            scale=self.scale, softcap=self.softcap, packed=store.packs,
        )  # fmt: skip

    def attend_early(self, host: Selection | None, *, correct: bool) -> Ahead | None:
        """Start the CPU part now, with this step's (predicted) query; None if there is nothing to attend."""
        if host is None or host.total == 0:
            return None
        ahead = Ahead(self.query, host, self.scale, correct)
        # Blocks are read off the critical path: the arguments are checked here, where an error is the caller's.
        store = self.store
        launch = self._launch(self.query, host, ahead.out, ahead.lse, ahead.kbar)
        worker = self.layer.settings.worker
        launch.ticket[2] = shares = min(worker.threads, launch.tasks)
        ahead.job = worker.submit(launch, self.label("early CPU attention"), shares=shares, keep=store.pool)
        self.layer.ahead = ahead
        return ahead

    def read_ahead(self, host: Selection | None) -> None:
        """Bring host blocks nearer, off the critical path: their memory is read once, into the caches."""
        if host is None or host.total == 0:
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

    def attend_host(self, host: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend host blocks on the CPU with this step's query: (out `[B, Hq, D]`, lse `[B, Hq]`) fp32."""
        out, lse = np.empty_like(self.query), np.empty(self.query.shape[:2], np.float32)
        launch = self._launch(self.query, host, out, lse, None)
        launch.run(self.label("CPU attention"))
        return torch.from_numpy(out), torch.from_numpy(lse)

    def attend_device(
        self, device: Selection, query: np.ndarray | torch.Tensor, length: int, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend resident blocks on the device: (out `[B, Hq, D]`, lse `[B, Hq]`) fp32 there."""
        store, resident = self.store, self.layer.resident
        assert resident is not None
        width = max(int(device.counts.max()), 1)
        blocks = device.blocks[:, :, :width]
        meant = np.arange(width) < device.counts[:, :, None]
        blocks = np.where(meant, blocks, 0)
        slots = np.where(meant, np.take_along_axis(resident.slot_of, blocks, 2), 0)
        position = blocks[..., None] * self.block_size + np.arange(self.block_size)
        mask = meant[..., None] & (position < length)
        if store.padding.ragged:
            rows = np.arange(store.batch)[:, None, None, None]
            mask &= store.padding.valid[rows, np.minimum(position, length - 1)] != 0
        ready = torch.from_numpy(query) if isinstance(query, np.ndarray) else query
        target = resident.pool.device
        return paged_attention(
            ready.to(target), resident.pool, torch.from_numpy(slots.astype(np.int64)).to(target),
            torch.from_numpy(mask).to(target), scale=self.scale, softcap=softcap,
        )  # fmt: skip

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: np.ndarray, smoothing: float) -> None:
        """Let the resident set know how much each sealed block is wanted (`[B, Hkv, N]`), mixed with what it knew."""
        if self.layer.resident is not None:
            self.layer.resident.reserve(self.num_blocks)
            self.layer.resident.learn(score, self.store.sealed, smoothing)

    def recall(self) -> None:
        """Exchange the least wanted resident blocks for the most wanted ones, to be used from the next step on."""
        recall(self)

    def cpu_ratio(self, plan: Plan) -> float:
        """Tokens that the CPU attends, as a share of the budget (of everything, without one)."""
        host = plan.host if plan.ahead is None else plan.ahead.host
        far = 0 if host is None else host.total
        budget = self.layer.policy.budget_tokens
        within = self.num_blocks if budget is None else min(budget // self.block_size, self.num_blocks)
        return far / (within * self.store.batch * self.store.num_kv_heads)

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        """Count how much of what was wanted had been predicted."""
        common = common_blocks(predicted.blocks, predicted.counts, wanted.blocks, wanted.counts)
        self.layer.stats.selection_overlap += common / max(wanted.total, 1)
        self.layer.stats.selections += 1

    def label(self, what: str) -> str:
        """What an error message calls a piece of this step's work."""
        return f"{what} of layer {self.layer.index}, step {self.layer.stats.steps}"


def query_array(query: torch.Tensor) -> np.ndarray:
    """A query tensor as contiguous fp32 on the CPU."""
    array: np.ndarray = query.detach().to("cpu", torch.float32, memory_format=torch.contiguous_format).numpy()
    return array
