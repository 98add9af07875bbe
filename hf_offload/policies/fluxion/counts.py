"""What each query head chose of a layer's host blocks: counts over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hf_offload.policies.base import LayerState
from hf_offload.policies.fluxion.kernels.retrieve import TALLIES, tally

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats


class SelectionCounts:
    """Counts of one layer since the last `reset` of the cache; a group is the query heads of a KV head."""

    def __init__(self) -> None:
        self._known: tuple[tuple[int, ...], int] = ((), 0)
        self.spans, self.totals = np.empty(0, np.int32), np.zeros(TALLIES)
        """Blocks a run that may be chosen; and the counts, as `tally` has them."""
        self._shared = False  # whether tasks were shared out, of which there may have been none
        self._tasks = self._device_tasks = 0
        self._busy = {"device": 0.0, "cpu": 0.0}
        self._idle = {"device": 0.0, "cpu": 0.0}

    def spans_for(self, granularities: tuple[int, ...], block_size: int) -> np.ndarray:
        """Blocks a run, int32 `[n]`: the same array as long as these are the same."""
        if self._known != (granularities, block_size):
            self._known = granularities, block_size
            self.spans = np.array([tokens // block_size for tokens in granularities], np.int32)
            self.totals = np.zeros(TALLIES + len(granularities))
        return self.spans

    def count(self, spans: np.ndarray, runs: np.ndarray, counts: np.ndarray, first: np.ndarray, end: int) -> None:
        """Take in a choice; arguments as in `tally`."""
        tally(spans, runs, counts, first, end, self.spans, self.totals)

    def count_shares(self, device_tasks: int, tasks: int, device: float, cpu: float, busy: float, threads: int) -> None:
        """Take in how a step's tasks were shared.

        Args:
            device_tasks, tasks: how many the device took, and how many there were.
            device, cpu: seconds after which the device and the CPU found none left.
            busy: seconds for which threads of the CPU were at them, all together; threads: how many there are.
        """
        self._shared = True
        self._tasks += tasks
        self._device_tasks += device_tasks
        last = max(device, cpu)
        for side, there, spent in (("device", last, max(device, 0.0)), ("cpu", threads * last, busy)):
            self._busy[side] += spent
            self._idle[side] += max(there - spent, 0.0)

    def as_dict(self, record_bytes: int, digest_bytes: float) -> dict[str, Any]:
        """Shares of streaming groups and heads, the mean budget, what was read, and runs by their tokens.

        Args:
            record_bytes: of a KV head's keys and values in a block; digest_bytes: of its digest.
        """
        groups, streaming, heads, idle, budget, chosen, there, scored = self.totals[:TALLIES].tolist()
        if not groups:
            return {}
        shares: dict[str, Any] = {}
        if self._shared:
            shares = {"device_tasks": self._device_tasks / max(self._tasks, 1)}
            shares |= {f"{side}_busy_seconds": seconds for side, seconds in self._busy.items()}
            shares |= {f"{side}_idle_seconds": seconds for side, seconds in self._idle.items()}
        by_tokens = zip(self._known[0], self.totals[TALLIES:].tolist(), strict=True)
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
    """What a method whose query heads choose among the host's blocks remembers of one layer: counts.

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
