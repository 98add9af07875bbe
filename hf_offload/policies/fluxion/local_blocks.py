"""Which blocks are always attended, as selections for all KV heads: the sinks, and the newest behind them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_offload.policies.base import Selection

Parts = tuple[Selection, Selection]


class LocalBlocks:
    """The sinks and the newest blocks of a layer: the same selections in most steps.

    Args:
        convert: makes what a step works with of a selection in arrays.
    """

    def __init__(self, convert: Callable[[Selection], Selection] = lambda selection: selection) -> None:
        self._convert = convert
        self._known: tuple[int, ...] = ()
        self._low: np.ndarray | None = None
        self._parts: Parts | None = None

    def parts(self, sinks: tuple[np.ndarray, np.ndarray], end: int, blocks: int, kv_heads: int) -> Parts:
        """The sinks, and the blocks end..blocks-1 behind them.

        Args:
            sinks: first block and end, int32 `[B]` each, as `Padding.sinks` has them: other arrays where they change.
            kv_heads: of the layer.
        """
        known = (end, blocks, kv_heads)
        if self._parts is None or self._known != known or self._low is not sinks[0]:
            low, high = sinks
            newest = np.maximum(low, end)  # padding behind which nothing but the newest blocks lies
            spans = (low, np.minimum(high, newest)), (newest, np.full_like(low, blocks))
            one, two = (self._convert(_consecutive(first, stop, blocks, kv_heads)) for first, stop in spans)
            self._known, self._low, self._parts = known, low, (one, two)
        return self._parts


def _consecutive(first: np.ndarray, stop: np.ndarray, blocks: int, kv_heads: int) -> Selection:
    """The blocks first..stop-1 of each row, `[B]` each, for all KV heads; there are so many blocks."""
    counts = np.maximum(stop - first, 0).astype(np.int32)
    listed = first[:, None] + np.arange(max(int(counts.max()), 1), dtype=np.int32)
    shape = (len(first), kv_heads, listed.shape[1])
    wide = np.broadcast_to(listed.clip(max=blocks - 1)[:, None].astype(np.int32), shape).copy()
    return Selection(wide, np.broadcast_to(counts[:, None], shape[:2]).copy())
