"""Draft tokens of a forward (speculative decoding), and the snapshots for a crop that rejects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_offload.blocks.host_pool import HostPool


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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one layer between two tokens, without K and V.

    Args:
        policy: the policy's state (`LayerState.snapshot`).
        packed: the packed blocks (`BlockStore.packed_so_far`).
        awaits_digests: `BlockStore.awaits_digests`; a token that is dropped may have made the statistics.
        resident: the resident set (`ResidentSet.state`), or None if it was not decided yet.
    """

    policy: Any
    packed: tuple[int, int]
    awaits_digests: bool
    resident: tuple[torch.Tensor, ...] | None


class Snapshots:
    """A layer's snapshots by their number of cached tokens."""

    def __init__(self) -> None:
        self._states: dict[int, Snapshot] = {}
        self._pool: HostPool | None = None

    def save(self, tokens: int, snapshot: Snapshot, pool: HostPool) -> None:
        """Keep the snapshot at a number of tokens; its packed blocks lie in `pool`."""
        self._pool = pool
        self._states[tokens] = snapshot

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
