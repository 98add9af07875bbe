"""What a CPU part works with that chooses its blocks itself: needs of the heads, the choice, and what is attended."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import torch

from hf_offload.cache.block_store import BlockStore
from hf_offload.cache.digests import DigestStore
from hf_offload.cache.memory import host_empty
from hf_offload.cpu.kernels import sparse_decode as cpu_decode
from hf_offload.cpu.kernels.digest_scores import Digest
from hf_offload.cpu.launch import Launch
from hf_offload.policies.fluxion.kernels.needs import Needs, budget_of, rank_tasks, runs_wanted
from hf_offload.policies.fluxion.kernels.network import Network
from hf_offload.policies.fluxion.kernels.predict import Known
from hf_offload.policies.fluxion.kernels.retrieve import retrieve_blocks
from hf_offload.scores import Scores

Properties: TypeAlias = tuple[torch.Tensor | float, torch.Tensor | float, torch.Tensor | bool]
"""What the query heads need of the host: budget0 and slope of the share budget0 + slope · log₂(tokens of a run), which
is cut to [0, 1], and whether a head needs nothing at all; each `[B, Hq]`, or one value for all heads."""


class Foresees(Protocol):
    """What tells the needs of the heads from a step's query and from attention to what is near."""

    @property
    def network(self) -> Network:
        """For compiled code; the same object at every step."""

    @property
    def known(self) -> Known:
        """Of the layer's prompt, for compiled code; the same object at every step. Wants it in host memory."""

    def properties(
        self,
        query: torch.Tensor,
        sinks: tuple[torch.Tensor, torch.Tensor],
        newest: tuple[torch.Tensor, torch.Tensor],
        lengths: torch.Tensor,
    ) -> Properties:
        """The needs where these tensors are, without compiled code.

        Args:
            query: fp32 `[B, Hq, D]`.
            sinks, newest: out `[B, Hq, D]` and lse `[B, Hq]` fp32.
            lengths: fp32 `[B, 2]`, tokens on the host and near.
        """


class Selector:
    """The arrays of one layer, for queries of one shape; good until the next step.

    Args:
        store: of the layer's blocks.
        query: `[B, Hq, D]` fp32 on the host, the memory that every step's query comes to.
        pin: whether a device writes the needs, and reads out and lse.
    """

    def __init__(self, store: BlockStore, query: torch.Tensor, *, pin: bool) -> None:
        batch, heads, _ = query.shape
        groups = (batch, store.num_kv_heads)

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            with torch.inference_mode(False):
                return host_empty(shape, dtype, pin=pin, brief=True, what="the CPU's part of a step")

        self.query = query.numpy()
        self.needs = buffer(2, batch, heads), buffer(batch, heads, dtype=torch.uint8)
        self.out_tensor, self.lse_tensor = buffer(*query.shape), buffer(batch, heads)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        (self._budget0, self._slope), self._streaming = self.needs[0].numpy(), self.needs[1].numpy()
        self.granularities = np.empty(0, np.int32)
        self.spans, self.runs = np.empty(groups, np.int32), np.empty((batch, heads), np.int32)
        self.counts, self.blocks = np.zeros(groups, np.int32), np.empty((*groups, 0), np.int32)
        self.masses = np.empty((batch, heads, 0), np.float32)
        self.first, self.end = np.empty(0, np.int32), 0
        self._order = np.empty(self.counts.size, np.int32)
        self.volumes = np.zeros(self.counts.size)
        """What each task reads, in bytes; 0: nothing."""
        self._bundle: Digest | None = None
        self._constants: Properties | None = None

    @property
    def needs_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """budget0, slope and streaming of every head, for whoever writes them on the host."""
        return self._budget0, self._slope, self._streaming

    def take(self, properties: Properties) -> None:
        """Have these needs, in the order of the device's stream."""
        constant = not isinstance(properties[0], torch.Tensor)
        if constant and properties == self._constants:
            return
        (budget0, slope), streaming = self.needs
        for to, given in ((budget0, properties[0]), (slope, properties[1]), (streaming, properties[2])):
            if isinstance(given, torch.Tensor):
                to.copy_(given, non_blocking=True)
            else:
                to.fill_(given)
        self._constants = properties if constant else None

    def reserve(self, granularities: np.ndarray, first: np.ndarray, end: int) -> None:
        """Have room for a choice among the blocks first..end-1 of each row, in runs of so many blocks."""
        self.granularities, self.first, self.end = granularities, first, end
        # Known from the length alone: what is attended is cut into parts by it, and rounded.
        width = (end + 63) // 64 * 64
        if self.blocks.shape[2] != width:
            self.blocks = np.empty((*self.counts.shape, width), np.int32)
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)

    def wanted(self, row: int, head: int, block_size: int) -> tuple[int, list[int], int]:
        """What a KV head takes, whose runs' length is known: its first block, runs of each query head, blocks a run."""
        group = self.runs.shape[1] // self.counts.shape[1]
        low, span = min(int(self.first[row]), self.end), int(self.spans[row, head])
        for g in range(head * group, (head + 1) * group):
            budget = budget_of(self._budget0[row, g], self._slope[row, g], self._streaming[row, g], span * block_size)
            self.runs[row, g] = runs_wanted(budget, self.end - low, span)
        return low, self.runs[row, head * group : (head + 1) * group].tolist(), span

    def rank(self, store: BlockStore) -> np.ndarray:
        """The tasks, int32 `[n]`, those first that read most; what has none has attended nothing, until it is done."""
        self.nothing()
        digests = store.digests
        assert digests is not None, "a policy without a digest cannot choose"
        found = rank_tasks(
            self._budget0, self._slope, self._streaming, self.granularities, store.block_size,
            digests.block_bytes / store.num_kv_heads, store.pool.record_bytes, self.first, self.end, self.spans,
            self.volumes, self._order,
        )  # fmt: skip
        return self._order[:found]

    def nothing(self) -> None:
        """Have chosen and attended no block."""
        self.counts.fill(0)
        self.spans.fill(0)
        self.runs.fill(0)
        self.lse.fill(-np.inf)

    def bundle(self, digests: DigestStore, scores: Scores) -> Digest:
        """What this step's query is scored with: the same object as long as the digests' arrays are the same."""
        self._bundle = digests.arrays(self.query, scores.scale, self._bundle)
        return self._bundle

    def choosing(self, store: BlockStore, bundle: Digest, scores: Scores) -> Launch:
        """Prepare the choice."""
        digests = store.digests
        assert digests is not None, "a policy without a digest cannot choose"
        needs = Needs(
            self._budget0, self._slope, self._streaming, self.granularities, store.block_size,
            digests.block_bytes / store.num_kv_heads, store.pool.record_bytes,
        )  # fmt: skip
        return retrieve_blocks(
            self.query, bundle, store.table, self.first, self.end, needs, self.masses, self.spans, self.runs,
            self.blocks, self.counts, sums=digests.sums, **scores._asdict(),
        )  # fmt: skip

    def attending(self, store: BlockStore, scores: Scores) -> Launch:
        """Prepare attention to what will have been chosen; blocks on the host are full."""
        padding = store.padding
        return cpu_decode.sparse_decode(
            self.query, store.pool.block_ptr, store.table, self.blocks, self.counts, padding.holes, padding.valid,
            padding.valid.shape[1], self.out, self.lse, None, kv_dtype=store.dtype, block_size=store.block_size,
            **scores._asdict(), packed=store.format.packs,
        )  # fmt: skip
