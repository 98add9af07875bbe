"""One decode step of one layer as a policy sees it; where the blocks lie decides who provides its services."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_offload.attention.token_fetch import TokenFetch
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.prefill_tiles import read_tiles
from hf_offload.knobs import shown
from hf_offload.policies.base import Partial, Plan, RunningPartial, Selection
from hf_offload.scores import Scores


class Step(ABC):
    """What a policy sees of one decode step of one layer, and the services that it may use in it.

    Scores and selections are arrays with one memory and tensors on the device with two; a policy hands them on and does
    not look inside: with one memory they may be still to be made (`begin`). With two memories everything that is
    decided in a step is decided on the device.

    Args:
        layer: the layer.
        length: tokens of a row, this step's own included.
        scores: the model's.
    """

    query: Any
    """`[B, Hq, D]` fp32 (for `place`: `[B, Hq, n, D]`), the real or the predicted query."""

    def __init__(self, layer: HybridLayer, length: int, scores: Scores) -> None:
        assert layer.store is not None
        self.layer, self.store = layer, layer.store
        self.length, self.scores = length, scores
        self.block_size = self.store.block_size
        self.num_blocks = -(-length // self.block_size)

    @property
    def state(self) -> Any:
        """What the policy remembers of this layer."""
        return self.layer.state

    @property
    def recent_blocks(self) -> int:
        """The newest sealed blocks that are always attended."""
        return -(-self.layer.requirements.recent // self.block_size)

    @property
    def host_end(self) -> int:
        """The end of the blocks that are neither sinks nor newest: this one and those behind it are always attended."""
        return max(self.store.sealed - self.recent_blocks, 0)

    def begin(self) -> None:
        """Have this step's token and query where everything reads them; whoever asks for the query need not."""
        return

    def _listed(self, numbers: Sequence[int]) -> np.ndarray:
        """Block numbers, int32 `[n]`, as `blocks` wants them."""
        listed = np.asarray(numbers, np.int64)
        ascending = listed.ndim == 1 and np.all(np.diff(listed) > 0)
        if not ascending or (len(listed) and not 0 <= listed[0] <= listed[-1] < self.num_blocks):
            raise ValueError(
                f"blocks {shown(numbers)} are not distinct, ascending and within 0..{self.num_blocks - 1}; sort them"
            )
        return listed.astype(np.int32)

    def label(self, what: str) -> str:
        """What an error message calls a piece of this step's work."""
        return f"{what} of layer {self.layer.index}, step {self.layer.stats.steps}"

    @abstractmethod
    def score(self, join: str) -> Any:
        """Score the sealed blocks with this step's query (or queries: the mean over them).

        Args:
            join: how a group's heads are joined: `"max"`, `"mean"` (of the softmax of each) or `"raw"`.

        Returns:
            `[B, Hkv, N]` fp32, −inf for blocks without valid tokens; good until the next score of this layer.
        """

    @abstractmethod
    def select(self, score: Any, blocks: int) -> Selection:
        """The sinks, the recent blocks, the tail, and the best of the others: `blocks` in all."""

    @abstractmethod
    def choose(self, join: str, blocks: int) -> tuple[Any, Selection]:
        """`score` and `select` in one: the scores, and the sinks, recent blocks, tail and best others."""

    @abstractmethod
    def recent(self, blocks: int) -> Selection:
        """The sinks and the newest blocks: `blocks` in all."""

    @abstractmethod
    def all_blocks(self) -> Selection:
        """Every block."""

    @abstractmethod
    def resident_blocks(self) -> Selection | None:
        """Every resident block; None with one memory."""

    @abstractmethod
    def blocks_from(self, first: int) -> Selection:
        """All blocks from number `first` on, the tail included; with two memories at most as many as are resident."""

    @abstractmethod
    def blocks(self, numbers: Sequence[int]) -> Selection:
        """Blocks by their numbers, the same in all rows and KV heads, each once and ascending.

        Raises:
            ValueError: they are not, or one is not there.
        """

    def as_long_as(self, holds: Callable[[], bool]) -> None:
        """Let the plan of this step serve later ones only where this is true; with two memories none does."""
        return

    @abstractmethod
    def split(self, selection: Selection) -> tuple[Selection | None, Selection]:
        """Part a selection into (on the device, on the host); with one memory the host has all."""

    def attend(self, selection: Selection) -> tuple[Partial | RunningPartial, ...]:
        """Attend blocks where they lie: resident ones on the device, the others on the CPU, which works beside it."""
        return self.attend_split(*self.split(selection))

    @abstractmethod
    def attend_split(self, device: Selection | None, host: Selection | None) -> tuple[Partial | RunningPartial, ...]:
        """Attend the two parts of a selection, or of two, as `split` gives them."""

    def fetch(self, score: Any, chosen: Selection) -> tuple[Partial | RunningPartial, ...]:
        """Attend all that was chosen on the device: what is not resident becomes so at once.

        With one memory there is nothing to fetch.

        Args:
            score: by which it was chosen, as `score` returns it.
            chosen: the best blocks by it, and those that are always attended.
        """
        return self.attend(chosen)

    def attend_fetched(self, host: Selection) -> Partial:
        """Copy blocks of the host to the device, tile by tile, and attend them there; with two memories alone."""
        raise RuntimeError("with one memory nothing is fetched; ask step.layer.has_slots")

    def attend_early(self, host: Selection, *, correct: bool) -> Any:
        """Start the CPU part now, with this step's (predicted) query; with two memories alone.

        Args:
            host: the blocks.
            correct: whether the result is corrected to the real query, to first order.
        """
        raise RuntimeError("with one memory nothing is attended early; ask step.layer.has_slots")

    def share_of(self, host: Selection) -> torch.Tensor:
        """Blocks of a selection, as a share of the budget (of everything, without one): fp32 `[]`.

        With two memories alone.
        """
        raise RuntimeError("with one memory nothing is shared; ask step.layer.has_slots")

    def read_ahead(self, host: Selection) -> None:
        """Read host blocks into the CPU's caches, off the critical path; with two memories alone."""
        raise RuntimeError("with one memory nothing is read ahead; ask step.layer.has_slots")

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[B, Hkv, D]` of this step's own token."""
        self.begin()
        key, value = self.store.gather(self.length - 1, 1)
        return key[:, :, 0], value[:, :, 0]

    def earlier(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """All tokens before this step's own, in tiles: the first token, K and V `[B, Hkv, T, D]`, until the next."""
        self.begin()
        self.layer.write_back()
        return read_tiles(self.store, self.length - 1, self.layer.settings.prefill_tile)

    def bring_tokens(self, numbers: torch.Tensor, counts: torch.Tensor) -> TokenFetch:
        """Start to bring single tokens from the host to the device.

        Args:
            numbers: `[B, Hkv, M]` int64, tokens before this step's own; entries from `counts` on mean nothing.
            counts: `[B, Hkv]` int64.
        """
        self.begin()
        self.layer.drain_ahead()
        self.layer.write_back()
        self.layer.ahead = fetch = TokenFetch(self.layer, numbers, counts, self.label("tokens"))
        return fetch

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        """Count how much of what was wanted had been predicted; with two memories alone."""
        raise RuntimeError("with one memory nothing is predicted; ask step.layer.has_slots")

    @abstractmethod
    def learn(self, score: Any, smoothing: float) -> None:
        """Let the resident set know how much each sealed block is wanted (`[B, Hkv, N]`), mixed with what it knew."""

    @abstractmethod
    def recall(self, plan: Plan, clock: Any) -> None:
        """Exchange the least wanted resident blocks for the most wanted ones, to be used from the next step on.

        Args:
            plan: of this step; the clock is told the share of it that the CPU attended.
            clock: a `RecallClock`, which says whether it is time.
        """


def fp32(query: torch.Tensor) -> torch.Tensor:
    """A query tensor as contiguous fp32 where it is."""
    return query.detach().float().contiguous()
