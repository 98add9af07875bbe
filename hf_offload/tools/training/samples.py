"""Samples of a text: features and needed budgets of every head at sampled decode steps (Fluxion, sections 5.2 and 7).

`capture` lets a model read a text and keeps the queries of sampled steps; `layer_samples` makes samples of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_offload.attention.merge import merge_partials
from hf_offload.blocks.digests import DIGESTS, DigestStore
from hf_offload.model.hooks import cache_argument
from hf_offload.policies.fluxion.block_attention import BLOCK, Tokens, attend, attend_blocks, join_blocks
from hf_offload.policies.fluxion.budgets import GRANULARITIES, deviation_limit
from hf_offload.policies.fluxion.features import FEATURES, PromptStatistics, prompt_statistics
from hf_offload.policies.fluxion.kernels.predictor import step_features
from hf_offload.scores import Scores
from hf_offload.tools.training.labels import needed_budgets

CAPTURED = "captured_queries"
CHUNK = 512  # tokens that the model takes in at a time
_BUDGETS = [FEATURES.index(f"anchor_budget_{size}") for size in GRANULARITIES[1:]]
_ANSWER = 24  # tokens behind a question that are taken for its answer
_TILE = 4096  # tokens of the host that prompt statistics read at a time


# --- queries, keys and values of a text ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedLayer:
    """One layer's queries at sampled positions of a text, and its keys and values.

    Args:
        layer: its number.
        queries: `[positions, Hq, D]`, as the attention function gets them.
        key, value: `[1, Hkv, T, D]`.
        scale: softmax scale.
    """

    layer: int
    queries: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


class _Capture:
    """An attention function that keeps the queries at some positions."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.scales: dict[int, float] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """sdpa for queries `[1, Hq, Q, D]` and keys `[1, Hkv, T, D]`, of which the last Q are the queries' own."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        if kwargs.get("sliding_window") is None:
            if odd := [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]:
                raise ValueError(f"layer {layer} of {type(module).__name__} has {odd[0]}, which budgets do not know of")
            past = key.shape[2] - query.shape[2]
            within = [p - past for p in self.positions if past <= p < key.shape[2]]
            self.queries.setdefault(layer, []).append(query[0, :, within].transpose(0, 1).clone())
            scaling = kwargs.get("scaling")
            self.scales[layer] = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@torch.inference_mode()
def capture(
    model: PreTrainedModel, ids: torch.Tensor, positions: Sequence[int], advance: Callable[[int], Any]
) -> Iterator[CapturedLayer]:
    """Let a model read a text; yields one full-attention layer after the other.

    Args:
        model: the model; its attention implementation is replaced meanwhile.
        ids: `[1, T]`.
        positions: of the queries to keep, ascending.
        advance: called after every chunk with the number of its tokens.

    Raises:
        ValueError: a model without such layers, or with attention that is more than a softmax over all keys.
    """
    taken, cache, before = _Capture(positions), DynamicCache(config=model.config), model.config._attn_implementation
    AttentionInterface.register(CAPTURED, taken.attend)
    AttentionMaskInterface.register(CAPTURED, sdpa_mask)
    model.set_attn_implementation(CAPTURED)
    try:
        for part in torch.split(ids.to(model.device), CHUNK, 1):
            model.base_model(part, **cache_argument(model.base_model, cache), use_cache=True)
            advance(part.shape[1])
    finally:
        model.set_attn_implementation(before)
    if not taken.queries:
        raise ValueError(f"{type(model).__name__} has no full-attention layer that its attention function is asked for")
    for layer, queries in sorted(taken.queries.items()):
        held: Any = cache.layers[layer]
        yield CapturedLayer(layer, torch.cat(queries), held.keys, held.values, taken.scales[layer])


# --- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """Which steps of a text are sampled, and the settings of their budgets.

    Args:
        interval: tokens between two anchors; a prompt ends at each multiple of it.
        steps: decode steps drawn at random between an anchor and the next.
        taus: deviations that budgets are computed for.
        digest: by whose scores blocks are chosen.
        sinks, local: first and newest tokens that are always attended, in whole blocks.
    """

    interval: int = 4096
    steps: int = 8
    taus: tuple[float, ...] = (0.1,)
    digest: str = "submean"
    sinks: int = 64
    local: int = 256

    def positions(self, tokens: int, seed: int, *, asked: bool = False) -> dict[int, list[int]]:
        """Positions of the decode steps in a text, by the length of the prompt before them.

        asked: whether answers follow the prompts: half of the steps are drawn from the first tokens behind each.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        positions = {}
        for length in range(self.interval, tokens - self.steps + 1, self.interval):
            left = min(self.interval, tokens - length)
            near = min(_ANSWER, left // 2) if asked else 0
            early = torch.randperm(near, generator=generator, device="cpu")[: self.steps // 2]
            late = near + torch.randperm(left - near, generator=generator, device="cpu")[: self.steps - len(early)]
            positions[length] = sorted((length + torch.cat((early, late))).tolist())
        return positions

    def host(self, length: int) -> tuple[int, int]:
        """The first of the host's tokens and the first behind them, with `length` tokens in all."""
        first = self.sinks
        return first, max(first, (length // BLOCK - self.local // BLOCK) * BLOCK)


class Samples(NamedTuple):
    """Samples of training, one for each head, layer and step.

    Args:
        features: fp32 `[N, 41]`, with the anchor's budgets for the first τ.
        anchor_budgets: fp32 `[N, taus, 4]`, these for every τ.
        budgets: fp32 `[N, granularities, taus]`, the labels; 0 throughout for a streaming head.
    """

    features: torch.Tensor
    anchor_budgets: torch.Tensor
    budgets: torch.Tensor

    def features_at(self, number: int) -> torch.Tensor:
        """Features `[N, 41]` with the anchor's budgets for another τ, by its number."""
        made = self.features.clone()
        made[:, _BUDGETS] = self.anchor_budgets[:, number]
        return made

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of several parts, one after the other."""
        return cls(*(torch.cat(x) for x in zip(*parts, strict=True)))


@torch.inference_mode()
def layer_samples(seen: CapturedLayer, plan: dict[int, list[int]], sampling: Sampling) -> Samples:
    """The samples of one layer.

    Args:
        seen: with the queries of each anchor (the last token of its prompt) and its steps, in the plan's order.
        plan: from `Sampling.positions`.
        sampling: the settings.
    """
    device, queries, made = seen.key.device, iter(seen.queries), []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where kernels are launched
        layer = _Layer(seen, sampling)
        for length, steps in plan.items():
            statistics = layer.statistics(next(queries)[None], length)
            made += [layer.sample(*statistics, next(queries)[None], position + 1) for position in steps]
    return Samples.joined(made)


class _Layer:
    """One layer of a text that was read."""

    def __init__(self, seen: CapturedLayer, sampling: Sampling) -> None:
        self.seen, self.sampling = seen, sampling
        self.valid = _all_valid(1, seen.key.shape[2], seen.key.device)
        self.store = _sealed(sampling.digest, seen.key)

    def tokens(self, first: int, stop: int) -> Tokens:
        return Tokens(self.seen.key[:, :, first:stop], self.seen.value[:, :, first:stop], self.valid[:, first:stop])

    def scores(self, query: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Log masses `[1, Hq, n]` of the host's blocks."""
        device = self.seen.key.device
        table = torch.arange(first // BLOCK, stop // BLOCK, dtype=torch.int32, device=device)[None]
        limits = torch.tensor([stop, table.shape[1]], dtype=torch.int32, device=device)
        return self.store.score(query.float(), table, limits, Scores(self.seen.scale))

    def statistics(self, anchor: torch.Tensor, length: int) -> tuple[PromptStatistics, torch.Tensor]:
        """Those of a prompt, and the anchor's budgets for each τ; anchor: `[1, Hq, D]`."""
        first, stop = self.sampling.host(length)
        tiles = (self.tokens(at, min(at + _TILE, stop)) for at in range(first, stop, _TILE))
        return prompt_statistics(
            self.seen.layer, anchor, self.tokens(0, first), self.tokens(stop, length), tiles,
            self.scores(anchor, first, stop), taus=self.sampling.taus, digest=self.sampling.digest,
            scale=self.seen.scale,
        )  # fmt: skip

    def sample(
        self, statistics: PromptStatistics, anchor_budgets: torch.Tensor, query: torch.Tensor, length: int
    ) -> Samples:
        """The samples of one step with `length` tokens in all, its own among them; query: `[1, Hq, D]`."""
        scale, query = self.seen.scale, query.float()
        first, stop = self.sampling.host(length)
        host = self.tokens(first, stop)
        sinks, local = (attend(query, self.tokens(*span), scale) for span in ((0, first), (stop, length)))
        blocks = attend_blocks(query, host, scale)
        kept = merge_partials([sinks, local])
        out, lse = join_blocks(blocks, -1)
        full = merge_partials([kept, (out[:, :, 0], lse[:, :, 0])])[0]
        budgets = needed_budgets(
            kept, query, host, blocks, self.scores(query, first, stop), full,
            deviation_limit(full, self.sampling.taus), scale=scale, digest=self.sampling.digest,
        )  # fmt: skip
        query_array, sink_out, sink_lse, local_out, local_lse = (
            x.contiguous().cpu().numpy() for x in (query, *sinks, *local)
        )
        lengths = [(stop - first, length - stop + first)]
        features = step_features(statistics.arrays, query_array, (sink_out, sink_lse), (local_out, local_lse), lengths)
        return Samples(*(x[0].cpu() for x in (torch.from_numpy(features), anchor_budgets.transpose(2, 3), budgets)))


def _sealed(digest: str, key: torch.Tensor) -> DigestStore:
    """The digests of all full blocks of keys `[1, Hkv, T, D]`."""
    _, heads, length, dim = key.shape
    count = length // BLOCK
    store = DIGESTS[digest](heads, dim, BLOCK, key.device)
    store.reserve(count)
    if not store.frozen:
        store.freeze(lambda: ((part, _all_valid(1, part.shape[2])) for part in torch.split(key, _TILE, 2)))
    for ids in torch.split(torch.arange(count, device=key.device), _TILE // BLOCK):
        part = key[0, :, int(ids[0]) * BLOCK : (int(ids[-1]) + 1) * BLOCK]
        blocks = torch.unflatten(part, 1, (-1, BLOCK)).transpose(0, 1).contiguous()
        store.seal(ids, blocks, _all_valid(len(blocks), BLOCK, key.device))
    return store


def _all_valid(rows: int, tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.ones(rows, tokens, dtype=torch.bool, device=device)
