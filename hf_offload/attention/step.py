"""`Step`: a decode step of one layer as policies see it; subclasses provide its services for one or two memories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_offload.attention.token_fetch import TokenFetch
from hf_offload.blocks.digests import DigestStore
from hf_offload.blocks.prefill_tiles import read_tiles
from hf_offload.cache.layer import HybridLayer
from hf_offload.knobs import shown
from hf_offload.policies.base import HostPartial, Partial, Plan, Selection
from hf_offload.scores import Scores


class Step(ABC):
    """One decode step of one layer: its sizes, and the services for a policy's plan.

    Scores and selections are NumPy arrays with one memory and device tensors with two. A policy passes them on without
    reading them: with one memory they may not be computed yet (`begin`), with two memories a read would wait for the
    device.

    Args:
        layer: the layer.
        length: tokens of a row, including this step's.
        scores: parameters of the model's scores.
    """

    query: Any
    """fp32 `[B, Hq, D]` (in `place`: `[B, Hq, n, D]`), the real or the predicted query."""
    query_shape: tuple[int, int]
    """Rows and query heads."""
    limits: Any
    """With two memories: int32 `[2]` on the device, the tokens of a row and the number of full blocks."""

    def __init__(self, layer: HybridLayer, length: int, scores: Scores) -> None:
        assert layer.store is not None
        self.layer, self.store = layer, layer.store
        self.state: Any = layer.state
        """The policy's state of this layer."""
        self.length, self.scores = length, scores
        self.block_size = self.store.block_size
        self.num_blocks = -(-length // self.block_size)
        self.recent_blocks = -(-layer.requirements.recent // self.block_size)
        """Number of newest sealed blocks that are always attended."""

    @property
    def all_resident(self) -> bool:
        """Whether all blocks are resident, so that the CPU has no part in the step; False with one memory."""
        return False

    @property
    def host_end(self) -> int:
        """Number of the first of the newest blocks that are always attended."""
        return max(self.store.sealed - self.recent_blocks, 0)

    def make_plan(self) -> Plan:
        """Ask the layer's policy for its plan.

        Raises:
            TypeError: it gives something else.
        """
        policy = self.layer.policy
        plan = policy.plan_without_digests(self) if self.store.awaits_digests else policy.plan(self)
        if not isinstance(plan, Plan):
            name = type(self.layer.policy).__name__
            raise TypeError(f"{name}.plan gave a {type(plan).__name__}, not a hf_offload.Plan")
        return plan

    def checked(self, partial: Partial, *, splits: bool) -> Partial:
        """Return a partial as contiguous fp32 tensors on the model's device.

        Args:
            partial: tensors, or arrays that a tensor can be made of.
            splits: whether it may have splits; the result then has: one where the partial has none.

        Raises:
            TypeError: neither tensors nor arrays, not dense, or no real floating-point numbers.
            ValueError: other shapes than out `[B, Hq, D]` and lse `[B, Hq]`, or with splits `[B, Hq, S, D]` and
                `[B, Hq, S]`.
        """
        out, lse = _fp32(partial, self.store.device)
        batch, heads, dim = (*self.query_shape, self.store.head_dim)
        parts = out.shape[2:-1] if splits else ()
        if out.shape != (batch, heads, *parts, dim) or lse.shape != out.shape[:-1] or len(parts) > 1:
            raise ValueError(
                f"Partial(out, lse) has shapes {list(out.shape)} and {list(lse.shape)}; expected "
                f"{[batch, heads, dim]} and {[batch, heads]}"
            )
        if splits and not parts:
            out, lse = out.unsqueeze(2), lse.unsqueeze(2)
        return Partial(out, lse)

    @property
    def digests(self) -> DigestStore:
        """The digests of the layer's blocks.

        Raises:
            ValueError: the policy's requirements name none.
        """
        if self.store.digests is None:
            raise ValueError(
                f"policy {self.layer.policy.name!r} scores blocks, but its requirements name no digest; use "
                "Requirements(digest=...)"
            )
        return self.store.digests

    def begin(self) -> None:
        """Run the launches queued so far, such as the write of the token. Reading `query` implies it."""
        return

    def _listed(self, numbers: Sequence[int]) -> np.ndarray:
        """Return block numbers for `blocks` as int32 `[n]`.

        Raises:
            ValueError: they are not distinct, ascending and within the row.
        """
        listed = np.asarray(numbers, np.int64)
        ascending = listed.ndim == 1 and np.all(np.diff(listed) > 0)
        if not ascending or (len(listed) and not 0 <= listed[0] <= listed[-1] < self.num_blocks):
            raise ValueError(
                f"blocks {shown(numbers)} are not distinct, ascending and within 0..{self.num_blocks - 1}; sort them"
            )
        return listed.astype(np.int32)

    def label(self, what: str) -> str:
        """Return the name of a piece of this step's work in error messages."""
        return f"{what} of layer {self.layer.index}, step {self.layer.stats.steps}"

    @abstractmethod
    def score(self, join: str) -> Any:
        """Score the sealed blocks with this step's query (with several queries: the mean over them).

        Args:
            join: how the query heads of a KV head are joined: `"max"` or `"mean"` of each head's softmax, or `"raw"`:
                the mean of the scores.

        Returns:
            fp32 `[B, Hkv, N]`, −inf for blocks without valid tokens; valid until the layer's next score.
        """

    @abstractmethod
    def select(self, score: Any, blocks: int) -> Selection:
        """Select `blocks` blocks: sinks, recent blocks, tail, and those of the others with the highest scores."""

    @abstractmethod
    def choose(self, join: str, blocks: int) -> tuple[Any, Selection]:
        """Score and select in one operation; return the scores and the selection, as `score` and `select` do."""

    @abstractmethod
    def recent(self, blocks: int) -> Selection:
        """Select `blocks` blocks: the sinks and the newest blocks."""

    @abstractmethod
    def draw(self, join: str, samples: int) -> Selection:
        """Select pairs of keys by their estimated attention (`cpu.kernels.draw_pairs`); few blocks are all selected.

        With one memory sinks, newest tokens and what has no digest are always listed. With two the CPU draws from what
        is not resident, once the selection is attended or read ahead, and the device attends all that is resident.

        Args:
            join: how the query heads of a KV head are joined, `"max"` or `"mean"`.
            samples: a pair with more than 1 / samples of a head's attention is always listed.
        """

    @abstractmethod
    def all_blocks(self) -> Selection:
        """Select every block."""

    @abstractmethod
    def resident_blocks(self) -> Selection | None:
        """Select every resident block; None with one memory."""

    def sorted_residents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the resident blocks, ascending, int32 `[B, Hkv, R]`, and their count, `[B, Hkv]`.

        With two memories only.
        """
        raise RuntimeError("sorted_residents needs two memories; check step.layer.two_memories first")

    @abstractmethod
    def blocks_from(self, first: int) -> Selection:
        """Select all blocks from number `first` on, including the tail; with two memories no more than slots."""

    @abstractmethod
    def blocks(self, numbers: Sequence[int]) -> Selection:
        """Select blocks by number, the same for all rows and KV heads.

        Args:
            numbers: distinct block numbers in ascending order.

        Raises:
            ValueError: they are not distinct and ascending, or a block does not exist.
        """

    def as_long_as(self, holds: Callable[[], bool]) -> None:
        """Reuse this step's plan in later steps only while `holds()` is true; with two memories no plan is reused."""
        return

    def tail(self) -> torch.Tensor:
        """Return the log mass `[B, Hq]` of the tail for this step's query; with two memories only."""
        raise RuntimeError("tail needs two memories; check step.layer.two_memories first")

    @abstractmethod
    def split(self, selection: Selection) -> tuple[Selection | None, Selection | None]:
        """Split a selection into (resident blocks, blocks or pairs on the host); with one memory (None, all).

        With two memories the second is None where all blocks are resident.
        """

    def attend(self, selection: Selection) -> tuple[Partial | HostPartial, ...]:
        """Attend a selection in place: resident blocks on the device, concurrently the rest on the CPU."""
        return self.attend_split(*self.split(selection))

    @abstractmethod
    def attend_split(self, device: Selection | None, host: Selection | None) -> tuple[Partial | HostPartial, ...]:
        """Attend a selection in the two parts that `split` returns; None: nothing."""

    def fetch(self, score: Any, chosen: Selection) -> tuple[Partial | HostPartial, ...]:
        """Attend all chosen blocks on the device, fetching those that are not resident; with one memory as `attend`.

        Args:
            score: the scores of the choice, as `score` returns them.
            chosen: the selection, as `select` returns it.
        """
        return self.attend(chosen)

    def attend_fetched(self, host: Selection) -> Partial:
        """Copy host blocks to the device, tile by tile, and attend them there; with two memories only."""
        raise RuntimeError("attend_fetched needs two memories; check step.layer.two_memories first")

    def attend_early(self, host: Selection, *, correct: bool) -> Any:
        """Start the host partial with this step's (predicted) query; with two memories only.

        Args:
            host: what to attend on the host, as returned by `split`.
            correct: whether the merge corrects the result to the real query, to first order.
        """
        raise RuntimeError("attend_early needs two memories; check step.layer.two_memories first")

    def share_of(self, host: Selection) -> torch.Tensor:
        """Return a selection's blocks as a share of the budget (without one: of all blocks), fp32 `[]`.

        With two memories only.
        """
        raise RuntimeError("share_of needs two memories; check step.layer.two_memories first")

    def read_ahead(self, host: Selection) -> None:
        """Start to read host blocks into the CPU's caches, or to draw, beside the model; with two memories only."""
        raise RuntimeError("read_ahead needs two memories; check step.layer.two_memories first")

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V `[B, Hkv, D]` of this step's token."""
        self.begin()
        key, value = self.store.gather(self.length - 1, 1)
        return key[:, :, 0], value[:, :, 0]

    def earlier(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the tokens before this step's in tiles: (first token, K, V `[B, Hkv, T, D]`), valid until the next."""
        self.begin()
        self.layer.write_back()
        return read_tiles(self.store, self.length - 1, self.layer.settings.prefill_tile)

    def bring_tokens(self, numbers: torch.Tensor, counts: torch.Tensor) -> TokenFetch:
        """Start to fetch single tokens from the host to the device.

        Args:
            numbers: `[B, Hkv, M]` int64, numbers of tokens before this step's; entries from `counts` on are ignored.
            counts: `[B, Hkv]` int64.
        """
        self.begin()
        self.layer.drain_ahead()
        self.layer.write_back()
        return self.layer.start_ahead(TokenFetch(self.layer, numbers, counts, self.label("tokens")))

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        """Count the share of the wanted blocks that was predicted (`selection_overlap`); with two memories only."""
        raise RuntimeError("compare needs two memories; check step.layer.two_memories first")

    @abstractmethod
    def learn(self, score: Any, smoothing: float) -> None:
        """Update the worth of each sealed block for the resident set.

        Args:
            score: fp32 `[B, Hkv, N]`.
            smoothing: weight of the previous worth, in [0, 1).
        """

    @abstractmethod
    def recall(self, clock: Any) -> None:
        """Exchange resident blocks of low worth for host blocks of high worth, for the next step on, if it is due.

        Args:
            clock: a `RecallClock`, which decides by the step's CPU ratio whether a recall is due.
        """


def _fp32(partial: Partial, device: torch.device) -> list[torch.Tensor]:
    """Return dense floating-point tensors or arrays as contiguous fp32 tensors on a device.

    Raises:
        TypeError: anything else.
    """
    tensors = []
    for x in partial:
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            x = torch.from_numpy(np.ascontiguousarray(x, np.float32))
        tensor = isinstance(x, torch.Tensor)
        if not (tensor and x.layout is torch.strided and x.is_floating_point()) or x.is_meta or x.is_nested:
            what = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
            if tensor:
                what = f"a tensor of {x.dtype}, {x.layout}, on {x.device}"
            raise TypeError(
                f"Partial(out, lse) is made of tensors or arrays, not of {what}; use float32, strided, with memory"
            )
        tensors.append(x.to(device, torch.float32).contiguous())
    return tensors
