"""Crops of a layer, and the snapshots that drafts leave for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.cache.host_pool import HostPool

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


@dataclass(slots=True)
class Drafts:
    """What the layers of a cache share about drafts.

    Args:
        recording: whether forwards may hold drafts, which `crop` may take back.
        fresh: whether no forward has begun since that was switched on.
        coming: drafts at the end of the forward that is about to reach the layers.
        count: drafts at the end of the forward that is running.
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
        """A forward reaches the layers."""
        self.end()
        self.count, self.coming, self.fresh = self.coming, 0, False

    def end(self) -> None:
        """It has left them."""
        self.count, self.hidden = 0, None
        self.queries.clear()

    def forget(self) -> None:
        """Expect none any more."""
        self.end()
        self.recording, self.fresh, self.coming = False, False, 0

    def singles(self, length: int, past: int) -> int:
        """How many of a forward's last tokens are attended one by one.

        Args:
            length: tokens of the forward.
            past: tokens cached before it.
        """
        drafts = min(self.count, length - 1)
        # The token before the drafts is a decode step too, where it comes alone: without drafts it would be one.
        return length if drafts and past and length - drafts == 1 else drafts


def crop(layer: HybridLayer, length: int) -> None:
    """Keep a layer's first `length` tokens, and what was known then; if that is not remembered, begin anew."""
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
    layer.store.crop(length)  # last: an interruption before its end is made up for by another crop
    if state is not None:
        state.put_back(layer)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one layer was like between two tokens; tokens are not part of it.

    Args:
        policy: what the policy remembered (`LayerState.snapshot`).
        packed: which blocks were packed (`BlockStore.packed_so_far`).
        frozen: whether the statistics of the digests were fixed, which the first full block does.
        resident: what was resident (`ResidentSet.state`); None if that was not decided yet.
    """

    policy: Any
    packed: tuple[int, int]
    frozen: bool
    resident: tuple[torch.Tensor, ...] | None

    def put_back(self, layer: HybridLayer) -> None:
        """Make the layer, whose blocks have been cropped, what it was."""
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
    """The states of a layer to which a crop may return, by the tokens that were cached then."""

    def __init__(self) -> None:
        self._states: dict[int, Snapshot] = {}
        self._pool: HostPool | None = None

    def save(self, layer: HybridLayer) -> None:
        """Remember what the layer is like now, between two tokens."""
        store = layer.store
        assert store is not None
        self._pool = store.pool
        policy = layer.state.snapshot()  # frees slots, maybe
        decided = layer.resident is not None and not layer.unplaced
        resident = layer.resident.state() if decided else None  # type: ignore[union-attr]
        frozen = store.digests is not None and store.digests.frozen
        self._states[layer.past] = Snapshot(policy, store.packed_so_far(), frozen, resident)

    def knows(self, length: int) -> bool:
        """Whether there is a state with `length` tokens."""
        return length in self._states

    def take(self, length: int) -> Snapshot | None:
        """The state with `length` tokens, if there is one; those with more are forgotten."""
        self._states = {tokens: state for tokens, state in self._states.items() if tokens <= length}
        return self._states.get(length)

    def clear(self) -> None:
        """Forget all of them: the tokens stay."""
        self._states.clear()
        if self._pool is not None:
            self._pool.let_go()
