"""`crop` of a layer, and the snapshots taken before draft tokens (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.cache.host_pool import HostPool

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


@dataclass(slots=True)
class Drafts:
    """The state of draft tokens that all layers of a cache share.

    Args:
        recording: whether forwards may contain drafts, which `crop` may remove.
        fresh: whether no forward has begun since `recording` was set.
        coming: number of drafts at the end of the next forward.
        count: number of drafts at the end of the running forward.
        hidden: `[B, Q, hidden]`, the input of the decoder layer that the running forward reached last.
        queries: `[B, Hq, n, D]` by layer, predicted for the last n tokens of the running forward.
    """

    recording: bool = False
    fresh: bool = False
    coming: int = 0
    count: int = 0
    hidden: torch.Tensor | None = None
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a forward."""
        self.end()
        self.count, self.coming, self.fresh = self.coming, 0, False

    def end(self) -> None:
        """End a forward."""
        self.count, self.hidden = 0, None
        self.queries.clear()

    def forget(self) -> None:
        """Stop recording drafts."""
        self.end()
        self.recording, self.fresh, self.coming = False, False, 0

    def singles(self, length: int, past: int) -> int:
        """The number of a forward's last tokens that are attended one by one.

        Args:
            length: tokens of the forward.
            past: tokens cached before it.
        """
        drafts = min(self.count, length - 1)
        # If one token precedes the drafts, it is a decode step too, as it would be without drafts.
        return length if drafts and past and length - drafts == 1 else drafts


def crop(layer: HybridLayer, length: int) -> None:
    """Keep a layer's first `length` tokens; restore that length's snapshot or, without one, drop the resident set."""
    assert layer.store is not None
    layer.drain()
    state = layer.snapshots.take(length)
    if state is None:
        layer.snapshots.clear()
        layer.unplace()
    else:
        layer.store.unpack(state.packed)
    if layer.last_queries is not None:
        layer.last_queries = layer.last_queries.cropped(length)
    if state is None:
        layer.state.crop(layer, length)
    layer.store.crop(length)  # last: after an interruption, another crop completes it
    if state is not None:
        state.put_back(layer)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one layer between two tokens, without K and V.

    Args:
        policy: the policy's state (`LayerState.snapshot`).
        packed: the packed blocks (`BlockStore.packed_so_far`).
        frozen: whether the statistics of the digests were fixed; the first full block fixes them.
        resident: the resident set (`ResidentSet.state`), or None if it was not decided yet.
    """

    policy: Any
    packed: tuple[int, int]
    frozen: bool
    resident: tuple[torch.Tensor, ...] | None

    def put_back(self, layer: HybridLayer) -> None:
        """Restore a layer whose blocks have been cropped."""
        layer.state.restore(layer, self.policy)
        layer.unplaced = self.resident is None
        if layer.store is not None and layer.store.digests is not None:
            layer.store.digests.frozen = self.frozen
        if layer.resident is None:
            return
        if self.resident is None:
            layer.resident.clear()
        else:
            layer.resident.restore(self.resident, f"a crop of layer {layer.index}")


class Snapshots:
    """A layer's snapshots by their number of cached tokens."""

    def __init__(self) -> None:
        self._states: dict[int, Snapshot] = {}
        self._pool: HostPool | None = None

    def save(self, layer: HybridLayer) -> None:
        """Take a snapshot of the layer now."""
        store = layer.store
        assert store is not None
        self._pool = store.pool
        policy = layer.state.snapshot()  # may free slots
        decided = layer.resident is not None and not layer.unplaced
        resident = layer.resident.state() if decided else None  # type: ignore[union-attr]
        frozen = store.digests is not None and store.digests.frozen
        self._states[layer.past] = Snapshot(policy, store.packed_so_far(), frozen, resident)

    def knows(self, length: int) -> bool:
        """Whether there is a snapshot with `length` tokens."""
        return length in self._states

    def take(self, length: int) -> Snapshot | None:
        """Return the snapshot with `length` tokens, or None; drop those with more tokens."""
        self._states = {tokens: state for tokens, state in self._states.items() if tokens <= length}
        return self._states.get(length)

    def clear(self) -> None:
        """Drop all snapshots."""
        self._states.clear()
        if self._pool is not None:
            self._pool.let_go()
