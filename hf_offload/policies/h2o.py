"""H2O (Zhang et al. 2023): attention to heavy hitters by accumulated weight and to the newest tokens, with eviction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST, check_number, check_tokens
from hf_offload.policies.base import LayerState, Partial, Plan, Policy, Requirements
from hf_offload.scores import Scores, attend_tokens

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer

EMPTY = -1
_INTEGERS = ("recent", "taken")  # integers of `Kept`, the same for all rows


@dataclass(slots=True)
class Kept:
    """The tokens of one layer that are not evicted, unordered.

    Args:
        keys, values: `[B, Hkv, C, D]` in the model's dtype.
        score: fp32 `[B, Hkv, C]`, a token's attention weights so far, summed over queries and heads of the group.
        position: int64 `[B, Hkv, C]`, the token's number in the row; -1: an empty entry.
        recent: number of newest tokens that are never evicted.
        taken: number of the token added last.
    """

    keys: torch.Tensor
    values: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    recent: int
    taken: int = EMPTY

    def take_in(self, key: torch.Tensor, value: torch.Tensor, number: int, valid: torch.Tensor | None) -> None:
        """Store a token in an empty entry, or in place of the token with the lowest score that is not recent.

        Args:
            key, value: `[B, Hkv, D]`.
            number: the token's number in the row.
            valid: bool `[B]`, the rows in which it is no padding; None: all rows.
        """
        rank = self.score.masked_fill(self.position > number - self.recent, math.inf)
        entry = rank.masked_fill(self.position == EMPTY, -math.inf).argmin(-1, keepdim=True)
        index = entry[..., None].expand(*entry.shape, key.shape[-1])
        self.keys.scatter_(2, index, key[:, :, None])
        self.values.scatter_(2, index, value[:, :, None])
        self.score.scatter_(2, entry, 0.0)
        numbers = torch.full_like(entry, number)
        if valid is not None:
            numbers.masked_fill_(~valid.to(entry.device)[:, None, None], EMPTY)
        self.position.scatter_(2, entry, numbers)
        self.taken = number

    def attend(self, query: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend all kept tokens and add the weights to their scores.

        Args:
            query: fp32 `[B, Hq, D]`.
            scores: parameters of the model's scores.

        Returns:
            out `[B, Hq, D]`, lse `[B, Hq]`; fp32.
        """
        out, lse, weights = attend_tokens(query, self.keys, self.values, self.position != EMPTY, scores)
        self.score += weights.sum(2)
        return out, lse


class H2OState(LayerState):
    """H2O's state of one layer: the kept tokens, None before the first decode step."""

    def __init__(self) -> None:
        self.kept: Kept | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for name, tensor in self.tensors().items() if name not in _INTEGERS)

    def unplaced(self, layer: HybridLayer) -> None:
        self.kept = None

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        self.kept = None

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.kept is None:
            return {}
        parts = {part.name: getattr(self.kept, part.name) for part in dataclasses.fields(Kept)}
        return parts | {name: torch.tensor(parts[name], dtype=torch.int64, device="cpu") for name in _INTEGERS}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        with torch.inference_mode(False):
            parts: dict[str, Any] = {
                name: int(x) if name in _INTEGERS else x.to(layer.device, copy=True) for name, x in tensors.items()
            }
        self.kept = Kept(**parts) if parts else None


@dataclass(frozen=True)
class H2O(Policy):
    """Attend the newest tokens and the heavy hitters among the others; evicted tokens are not attended again.

    Source: H2O, algorithm 1. Each KV head keeps its tokens in a cache of its own on the model's device: the newest
    ones, and those with the largest attention weights, summed over all queries so far and the head's query heads. Each
    new token evicts the lightest one that is not among the newest.

    Unlike in H2O, prompts and appends are exact and every token stays on the host. After an append, heavy hitters are
    chosen among all tokens again. Only the last `prompt_queries` queries of a prompt count. The policy shows what
    eviction loses; it saves no host memory.

    Args:
        heavy: share of the tokens cached when decoding starts that is kept for its weights, 0 to 1.
        recent: share of them that is kept for being newest, 0 to 1. The paper has 20 % in all, half and half.
        prompt_queries: how many of a prompt's last queries choose the heavy hitters when decoding starts.

    Raises:
        ValueError: a knob has a value that is not allowed.
    """

    name = "h2o"
    heavy: float = 0.1
    recent: float = 0.1
    prompt_queries: int = 512

    def __post_init__(self) -> None:
        for knob in ("heavy", "recent"):
            check_number(knob, getattr(self, knob), "a share of the cached tokens", least=0, most=1)
        check_tokens("prompt_queries", self.prompt_queries)

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            leaves_out=True, attends_blocks=False, query_window=self.prompt_queries, learns_from_prompts=True
        )

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        lines = sizes.rows * sizes.kv_heads
        token = 2 * sizes.head_dim * sizes.dtype.itemsize + 4 + 8  # K and V, score, position
        return lines * self._capacity(sizes.tokens) * token, 0

    def _capacity(self, length: int) -> int:
        return self._heavy(length) + self._recent(length) + 1  # this step's own

    def _heavy(self, length: int) -> int:
        return math.ceil(self.heavy * length)

    def _recent(self, length: int) -> int:
        return max(math.ceil(self.recent * length), 1)

    def new_state(self, layer: HybridLayer) -> H2OState:
        return H2OState()

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        entries, newest = (*sizes.lines, "entries"), sizes.tokens - 1
        tokens = Field(sizes.dtype, (*entries, sizes.head_dim))
        return {
            "keys": tokens, "values": tokens, "score": Field(torch.float32, entries),
            "position": Field(torch.int64, entries, EMPTY, newest), "recent": Field(torch.int64, (), 1, MOST),
            "taken": Field(torch.int64, (), newest, newest),
        }  # fmt: skip

    def plan(self, step: Step) -> Plan:
        """Add this step's token and attend the kept tokens."""
        state: H2OState = step.state
        if state.kept is None:
            state.kept = self._choose(step)
        number, padding = step.length - 1, step.store.padding
        valid = torch.from_numpy(padding.valid[:, number] != 0) if padding.ragged else None
        if number > state.kept.taken:  # of layers that share keys and values the first adds it
            state.kept.take_in(*step.newest(), number, valid)
        query = torch.as_tensor(step.query, device=state.kept.keys.device)
        return Plan((Partial(*state.kept.attend(query, step.scores)),))

    def _choose(self, step: Step) -> Kept:
        """Return the heavy hitters and the newest of the tokens before this step's."""
        count, store = step.length - 1, step.store
        score = _summed_weights(step, count)
        recent, heavy = min(self._recent(count), count), min(self._heavy(count), count)
        valid = store.padding.on(store.device, count)
        rank = score.clone()
        rank[:, :, count - recent :] = math.inf
        best = rank.masked_fill(~valid[:, None], -math.inf).topk(min(heavy + recent, count), -1)
        shape, entries = score.shape[:2], self._capacity(count)
        with torch.inference_mode(False):
            size = (*shape, entries, store.head_dim)
            keys, values = (torch.zeros(size, dtype=store.dtype, device=store.device) for _ in range(2))
            kept_score = torch.zeros(*shape, entries, device=store.device, dtype=torch.float32)
            position = torch.full((*shape, entries), EMPTY, device=store.device, dtype=torch.int64)
        most = best.indices.shape[-1]
        position[:, :, :most] = best.indices.masked_fill(best.values == -math.inf, EMPTY)
        kept_score[:, :, :most] = score.gather(2, best.indices)
        for first, key, value in step.earlier():
            inside = (best.indices >= first) & (best.indices < first + key.shape[2])
            where = (best.indices - first).clamp(0, key.shape[2] - 1)[..., None].expand(-1, -1, -1, key.shape[3])
            for target, source in ((keys, key), (values, value)):
                target[:, :, :most] = torch.where(inside[..., None], source.gather(2, where), target[:, :, :most])
        return Kept(keys, values, kept_score, position, self._recent(count), count - 1)


def _summed_weights(step: Step, count: int) -> torch.Tensor:
    """Return the attention weights of `count` tokens, summed over the prompt's last queries: fp32 `[B, Hkv, count]`."""
    last_queries, store = step.layer.last_queries, step.store
    query = step.query[:, :, None] if last_queries is None else last_queries.values
    query = torch.as_tensor(query, dtype=torch.float32, device=store.device)
    start, end = (count, count + 1) if last_queries is None else (last_queries.start, last_queries.end)
    last_key = torch.arange(start, end, device=store.device)  # the last token that each query attends
    valid = store.padding.on(store.device, count)
    query_valid = valid[:, last_key.clamp(max=count - 1)]  # False for queries of padding
    grouped = query.reshape(store.batch, store.num_kv_heads, -1, query.shape[3])  # `[B, Hkv, G·n, D]`

    def tiles() -> Iterator[tuple[int, int, torch.Tensor]]:
        for first, key, _ in step.earlier():
            stop = first + key.shape[2]
            logits = step.scores.of(grouped @ key.float().transpose(2, 3))
            logits = logits.view(*logits.shape[:2], -1, query.shape[2], stop - first)
            seen = torch.arange(first, stop, device=store.device) <= last_key[:, None]
            seen = seen & valid[:, None, first:stop] & query_valid[..., None]
            yield first, stop, logits.masked_fill(~seen[:, None, None], -math.inf)

    lse = torch.full((*grouped.shape[:2], 1, 1), -math.inf, device=store.device, dtype=torch.float32)
    for _, _, logits in tiles():
        lse = torch.logaddexp(lse, logits.logsumexp(-1))
    score = torch.zeros(*grouped.shape[:2], count, device=store.device, dtype=torch.float32)
    for first, stop, logits in tiles():
        score[:, :, first:stop] = (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp().sum((2, 3))
    return score
