"""The attention weights of some queries of a text, exact, from the model's own q and k."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

RECORDED = "recorded_weights"


class Recorder:
    """An attention function that keeps the weights of some queries.

    Args:
        positions: of the queries, ascending.
        layers: numbers of the layers.
    """

    def __init__(self, positions: list[int], layers: list[int]) -> None:
        self.positions, self.layers = positions, set(layers)
        self.weights: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        """For each layer and query, in their order: `[Hq, position + 1]` float32 on the CPU."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """sdpa for queries `[1, Hq, Q, D]` and keys `[1, Hkv, T, D]`, of which the last Q are the queries' own."""
        if int(module.layer_idx) in self.layers:
            self.record(int(module.layer_idx), module, query, key, scaling, kwargs)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )

    def record(
        self,
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Keep the weights of the queries that are wanted.

        Raises:
            ValueError: attention that is more than a softmax over all keys.
        """
        if odd := [name for name in ("softcap", "s_aux", "sliding_window") if kwargs.get(name) is not None]:
            raise ValueError(f"layer {layer} of {type(module).__name__} has {', '.join(odd)}: give other --layers")
        first = key.shape[2] - query.shape[2]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        keys = key[0].float()
        for position in self.positions:
            if first <= position < key.shape[2]:
                mine = query[0, :, position - first].float().view(len(keys), -1, query.shape[-1])
                scores = scale * mine @ keys[:, : position + 1].transpose(1, 2)
                self.weights[layer].append(scores.flatten(0, 1).softmax(-1).cpu())

    @contextmanager
    def recording(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the model attend by this function inside."""
        before = model.config._attn_implementation
        AttentionInterface.register(RECORDED, self.attend)
        AttentionMaskInterface.register(RECORDED, sdpa_mask)
        model.set_attn_implementation(RECORDED)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def record(
    model: PreTrainedModel, ids: torch.Tensor, positions: list[int], layers: list[int], chunk: int
) -> dict[int, list[torch.Tensor]]:
    """Weights of the queries at some positions of a text `[1, N]`: for each layer, `[Hq, position + 1]` a query."""
    recorder, cache = Recorder(positions, layers), DynamicCache(config=model.config)
    with recorder.recording(model):
        for part in tqdm(ids.split(chunk, 1), desc="attention weights", unit="chunk", delay=5, leave=False):
            model(part, past_key_values=cache, logits_to_keep=1)
    return recorder.weights
