"""The granularity-budget selector: a layer's buffers and launches for the choice of host blocks (Fluxion, section 5.3).

The CPU chooses runs of blocks by their digests and attends them. `kernels.selector` holds Eq. 1 and Eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hf_offload.attention.host_partial import BlockHostPartial, all_pinned
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.digests import DigestStore
from hf_offload.blocks.memory import host_empty
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.kernels.digest_scores import Digest
from hf_offload.cpu.launch import Array, Launch
from hf_offload.gpu.merge import HostResult
from hf_offload.policies.base import LayerState, Partial
from hf_offload.policies.fluxion.kernels.predictor import Rows, predict_properties
from hf_offload.policies.fluxion.kernels.selector import (
    TALLIES,
    Budgets,
    Chosen,
    count_runs,
    rank_tasks,
    retrieve_blocks,
    tally,
)
from hf_offload.policies.fluxion.predictor import LayerPredictor
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_split import SplitStep
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats

Properties: TypeAlias = tuple[float, float, bool]
"""bgt₀, k and streaming (`predictor.HeadProperties`), the same for all query heads."""


class Local(NamedTuple):
    """Attention to what is local, in two partials, of which the features are made.

    Args:
        query: `[B, Hq, D]` fp32, of this step.
        sinks, newest: out `[B, Hq, D]` and lse `[B, Hq]` fp32: the first tokens, and the newest with the tail.
    """

    query: torch.Tensor
    sinks: tuple[torch.Tensor, torch.Tensor]
    newest: tuple[torch.Tensor, torch.Tensor]


def digests_of(store: BlockStore) -> DigestStore:
    """The digests by which a layer's blocks are chosen."""
    assert store.digests is not None, "a policy without a digest cannot choose"
    return store.digests


class Selector:
    """Buffers of one layer for queries of one shape: properties, choice, and partial; good until the next step.

    Args:
        store: of the layer's blocks.
        query: `[B, Hq, D]` fp32 on the host, the buffer of every step's query.
        pin: whether a device reads out and lse.
    """

    def __init__(self, store: BlockStore, query: torch.Tensor, *, pin: bool) -> None:
        batch, heads, _ = query.shape
        groups = (batch, store.num_kv_heads)

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            with torch.inference_mode(False):
                return host_empty(shape, dtype, pin=pin, brief=True, what="a host partial")

        self.query = query.numpy()
        self.out_tensor, self.lse_tensor = buffer(*query.shape), buffer(batch, heads)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        budget0, slope = np.empty((2, batch, heads), np.float32)
        self.properties: tuple[Array, Array, Array] = budget0, slope, np.empty((batch, heads), np.uint8)
        """bgt₀, k and streaming of every head."""
        self.granularities = np.empty(0, np.int32)
        self.masses = np.empty((batch, heads, 0), np.float32)
        self.chosen = Chosen(
            np.empty(0, np.int32), 0, np.empty(groups, np.int32), np.empty((batch, heads), np.int32),
            np.empty((*groups, 0), np.int32), np.zeros(groups, np.int32),
        )  # fmt: skip
        self._order = np.empty(self.chosen.counts.size, np.int32)
        self.volumes = np.zeros(self.chosen.counts.size)
        """Bytes that each task reads (Eq. 3)."""
        self.digest: Digest | None = None
        """What the last choice scores with: the same object as long as the digests' arrays are the same."""

    def set_properties(self, properties: Properties) -> None:
        """Give all heads the same properties."""
        for array, value in zip(self.properties, properties, strict=True):
            array.fill(value)

    def predict(
        self, step: Step, predictor: LayerPredictor, sinks: tuple[Array, Array], newest: tuple[Array, Array]
    ) -> Launch:
        """Prepare the prediction of all heads' properties.

        Args:
            step: of the layer.
            predictor: of the layer.
            sinks, newest: attention of the query to them, in host memory when the launch runs.
        """
        padding, chosen = step.store.padding, self.chosen
        rows = Rows(chosen.first, chosen.end, padding.first, padding.valid, int(padding.ragged), step.block_size)
        return predict_properties(
            predictor.network, predictor.prompt, self.query, sinks, newest, rows, self.properties, length=step.length
        )

    def reserve(self, granularities: np.ndarray, first: np.ndarray, end: int) -> None:
        """Make room for a choice among the blocks first..end-1 of each row, in runs of `granularities` blocks."""
        self.granularities, self.chosen = granularities, self.chosen._replace(first=first, end=end)
        # By the length alone: attention cuts the blocks into parts by the width, and rounds accordingly.
        width = (end + 63) // 64 * 64
        if self.masses.shape[2] != width:
            blocks = np.empty((*self.chosen.counts.shape, width), np.int32)
            self.chosen = self.chosen._replace(blocks=blocks)
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)

    def rank(self, store: BlockStore) -> np.ndarray:
        """Find the tasks, int32 `[n]`, largest V(blk) first, and clear the results of all."""
        first, end, spans, runs, _, counts = self.chosen
        for part in (spans, runs, counts):
            part.fill(0)
        self.lse.fill(-np.inf)
        count = rank_tasks(self._budgets(store), first, end, spans, self.volumes, self._order)
        return self._order[:count]

    def _budgets(self, store: BlockStore) -> Budgets:
        return Budgets(
            *self.properties, self.granularities, store.block_size,
            digests_of(store).block_bytes / store.num_kv_heads, float(store.pool.record_bytes),
        )  # fmt: skip

    def runs_of(self, store: BlockStore, row: int, head: int) -> tuple[int, list[int], int]:
        """Of a ranked task: the first host block, the runs that each query head takes, and the blocks of a run."""
        runs, span = self.chosen.runs, int(self.chosen.spans[row, head])
        low = count_runs(self._budgets(store), self.chosen, row, head, span)
        group = runs.shape[1] // self.chosen.counts.shape[1]
        return low, runs[row, head * group : (head + 1) * group].tolist(), span

    def make_choice(self, store: BlockStore, scores: Scores) -> Launch:
        """Prepare the choice of blocks, with the query that is there: some digests are made of it."""
        digests = digests_of(store)
        self.digest = digests.arrays(self.query, scores.scale, self.digest)
        return retrieve_blocks(
            self.query, self.digest, store.table, self._budgets(store), self.masses, self.chosen, sums=digests.sums,
            **scores._asdict(),
        )  # fmt: skip

    def make_attention(self, store: BlockStore, scores: Scores) -> Launch:
        """Prepare attention to the chosen blocks; blocks on the host are full."""
        blocks, chosen = store.host_blocks, self.chosen
        return decode_attention(
            self.query, blocks, chosen.blocks, chosen.counts, blocks.valid.shape[1], self.out, self.lse,
            **scores._asdict(),
        )  # fmt: skip


class SelectedHostPartial(BlockHostPartial):
    """The heads' properties, choice of host blocks and attention to them; the device attends what is local.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, gives the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        super().__init__(layer, query, 0)
        assert layer.store is not None
        pin = layer.store.device.type == "cuda"
        self.selector = Selector(layer.store, self.query, pin=pin)
        self._local = self.out, self.lse, self.kbar, self._buffer(*query.shape[:2])
        """Attention to sinks and newest tokens, for a predictor: buffers that nothing else uses here."""
        self.out, self.lse = self.selector.out_tensor, self.selector.lse_tensor
        self._counts = SelectionCounts()
        """Of the layer whose step is running."""
        self._predictor: LayerPredictor | None = None
        """Of the layer whose step is running; None: the properties are known."""
        self._sent: torch.cuda.Event | None = None
        """After query and attention to what is local, on a CUDA device."""
        self.reachable = not pin or all_pinned((self.out, self.lse, self.kbar))

    def select(self, step: Step, properties: Properties | LayerPredictor, local: Local | None) -> SelectedHostPartial:
        """Start prediction, choice and attention, for which the selector has room; no job uses the buffers."""
        self._counts, self._predictor = step.state.counts, None
        self.mirror.pause()
        self.query.copy_(step.query, non_blocking=True)
        if isinstance(properties, tuple):
            self.selector.set_properties(properties)
        else:
            assert local is not None, "a predictor needs the attention to what is local"
            self._predictor = properties
            for to, part in zip(self._local, (*local.sinks, *local.newest), strict=True):
                to.copy_(part, non_blocking=True)
        self._sent, label = self._arrived(), step.label("choice of blocks and attention")
        self._job = self.worker.submit(lambda: self._work(step), label, keep=(step.store.pool, self))
        return self

    def _predict(self, step: Step, run: Callable[[Launch], Any]) -> None:
        """Wait for the device, and let `run` run the prediction, if there is one."""
        if self._sent is not None:
            self._sent.synchronize()
        if self._predictor is not None:
            sink_out, sink_lse, out, lse = (tensor.numpy() for tensor in self._local)
            run(self.selector.predict(step, self._predictor, (sink_out, sink_lse), (out, lse)))

    def _work(self, step: Step) -> None:
        """The job: the prediction, the choice, and the attention to what it chose."""
        self._predict(step, self.worker.divide)
        for make in (self.selector.make_choice, self.selector.make_attention):
            self.worker.divide(make(step.store, step.scores))

    def assist(self, step: SplitStep) -> tuple[Partial, ...]:
        """What the device attends of the chosen blocks."""
        return ()

    def share(self, step: Step) -> float:
        counts = self.selector.chosen.counts
        return float(counts.sum() / (counts.size * step.num_blocks))

    def result(self) -> HostResult:
        """Wait for the job; what the merge needs."""
        result = super().result()
        self._counts.count(self.selector.chosen)
        return result


# --- statistics ------------------------------------------------------------------------------------------------------


class SelectionCounts:
    """Counts of one layer since the last `reset` of the cache; a group is the query heads of a KV head."""

    def __init__(self) -> None:
        self._runs: tuple[tuple[int, ...], int] = ((), 0)
        """Granularities in tokens, and the block size."""
        self.spans, self.totals = np.empty(0, np.int32), np.zeros(TALLIES)
        """Granularities in blocks; and the counts, as `tally` orders them."""
        self._shares: dict[str, float] = {}
        """How tasks were shared out: those of the device and all, and seconds; empty where they were not."""

    def spans_for(self, granularities: tuple[int, ...], block_size: int) -> np.ndarray:
        """Granularities in blocks, int32 `[n]`: the same array as long as the arguments are the same."""
        if self._runs != (granularities, block_size):
            self._runs = granularities, block_size
            self.spans = np.array([tokens // block_size for tokens in granularities], np.int32)
            self.totals = np.zeros(TALLIES + len(granularities))
        return self.spans

    def count(self, chosen: Chosen) -> None:
        """Add a choice."""
        tally(chosen, self.spans, self.totals)

    def count_shares(self, device_tasks: int, tasks: int, device: float, cpu: float, busy: float, threads: int) -> None:
        """Add how a step's tasks were shared.

        Args:
            device_tasks, tasks: how many the device took, and how many there were.
            device, cpu: seconds after which the device and the CPU had none left.
            busy: seconds that the CPU's threads spent on tasks, all together; threads: how many there are.
        """
        last = max(device, cpu)
        shares: dict[str, float] = {"device_tasks": device_tasks, "tasks": tasks}
        for side, there, spent in (("device", last, max(device, 0.0)), ("cpu", threads * last, busy)):
            shares |= {f"{side}_busy_seconds": spent, f"{side}_idle_seconds": max(there - spent, 0.0)}
        self._shares = {name: self._shares.get(name, 0) + share for name, share in shares.items()}

    def as_dict(self, record_bytes: int, digest_bytes: float) -> dict[str, Any]:
        """Shares of streaming groups and heads, the mean budget, bytes read, and shares of the granularities.

        Args:
            record_bytes: of a KV head's keys and values in a block; digest_bytes: of its digest.
        """
        groups, streaming, heads, idle, budget, chosen, there, scored = self.totals[:TALLIES].tolist()
        if not groups:
            return {}
        shares = dict(self._shares)
        if shares:
            shares["device_tasks"] /= max(shares.pop("tasks"), 1)
        by_tokens = zip(self._runs[0], self.totals[TALLIES:].tolist(), strict=True)
        return {
            "streaming_groups": streaming / groups,
            "streaming_heads": idle / heads,
            "head_budget": budget / heads,
            "retrieved_share": chosen / there,
            "scored_share": scored / there,
            "retrieved_bytes": int(chosen) * record_bytes,
            "scored_bytes": int(scored * digest_bytes),
            "granularities": {str(tokens): number / groups for tokens, number in by_tokens},
            **shares,
        }


class SelectorState(LayerState):
    """State of a layer whose query heads choose among the host's blocks: counts for the statistics.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: HybridLayer) -> None:
        assert layer.store is not None
        self._store, self.counts = layer.store, SelectionCounts()

    def report(self, stats: LayerStats) -> None:
        digests = self._store.digests
        digest_bytes = 0 if digests is None else digests.block_bytes / self._store.num_kv_heads
        stats.retrievals = self.counts.as_dict(self._store.pool.record_bytes, digest_bytes)
