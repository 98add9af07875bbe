"""Queries of a text at chosen positions, and the keys and values of all of it, while a model reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CAPTURED = "captured_queries"
CHUNK = 512  # tokens that the model takes in at a time


@dataclass(frozen=True)
class CapturedLayer:
    """What one layer saw of a text.

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
    """An attention function that keeps queries."""

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
            mine = [p - past for p in self.positions if past <= p < key.shape[2]]
            self.queries.setdefault(layer, []).append(query[0, :, mine].transpose(0, 1).clone())
            scaling = kwargs.get("scaling")
            self.scales[layer] = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@torch.inference_mode()
def capture(
    model: PreTrainedModel, ids: torch.Tensor, positions: Sequence[int], advance: Callable[[int], Any]
) -> Iterator[CapturedLayer]:
    """Let a model read a text, and hand out what its full-attention layers saw, one after the other.

    Args:
        model: the model; its attention implementation is another one meanwhile.
        ids: `[1, T]`.
        positions: of the queries that are wanted, ascending.
        advance: called with the tokens that were read, after every chunk.

    Raises:
        ValueError: a model without such layers, or with attention that is more than a softmax over all keys.
    """
    taken, cache = _Capture(positions), DynamicCache(config=model.config)
    with _attending_by(model, taken):
        for part in torch.split(ids.to(model.device), CHUNK, 1):
            model.base_model(part, past_key_values=cache, use_cache=True)
            advance(part.shape[1])
    if not taken.queries:
        raise ValueError(f"{type(model).__name__} has no full-attention layer that its attention function is asked for")
    for layer, queries in sorted(taken.queries.items()):
        held: Any = cache.layers[layer]
        yield CapturedLayer(layer, torch.cat(queries), held.keys, held.values, taken.scales[layer])


@contextmanager
def _attending_by(model: PreTrainedModel, taken: _Capture) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register(CAPTURED, taken.attend)
    AttentionMaskInterface.register(CAPTURED, sdpa_mask)
    model.set_attn_implementation(CAPTURED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
