"""Drafts, which a forward may hold, and the snapshots to which a crop goes back when they are rejected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_offload.cache.host_pool import HostPool


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


class Snapshots:
    """The states of a layer to which a crop may return, by the tokens that were cached then."""

    def __init__(self) -> None:
        self._states: dict[int, Snapshot] = {}
        self._pool: HostPool | None = None

    def save(self, tokens: int, snapshot: Snapshot, pool: HostPool) -> None:
        """Remember what the layer is like with so many tokens, whose packed blocks keep their places in a pool."""
        self._pool = pool
        self._states[tokens] = snapshot

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
