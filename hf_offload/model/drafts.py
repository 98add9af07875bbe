"""Verification of drafts: tokens of one forward that are attended one by one, as in decode steps."""

from __future__ import annotations

from typing import Any

import torch

from hf_offload.attention.decode import append, decode, look_ahead
from hf_offload.cache.layer import HybridLayer


def verify(
    layer: HybridLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    singles: int,
    **given: Any,
) -> torch.Tensor:
    """Attend with the tokens of a forward that ends with drafts.

    The tokens before the drafts are appended exactly. Each other token is a decode step with a plan of its own, and
    `crop` can go back to before any of them.

    Args:
        layer: the layer; `key` and `value` are its pending K and V, `[B, Hkv, Q, D]`.
        query: `[B, Hq, Q, D]`.
        mask: None, or `[B, past + Q - singles]`.
        singles: number of last tokens to attend one by one.
        given: scores and sinks, as in `decode`.

    Returns:
        `[B, Q, Hq, D]`.
    """
    first, length = query.shape[2] - singles, query.shape[2]
    predicted = layer.settings.drafts.queries.pop(layer.index, None)

    def part(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensors = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        layer.pending = tensors[1:]
        return tensors

    outs = [append(layer, *part(0, first), mask, **given)] if first else []
    for token in range(first, length):
        layer.take_snapshot()
        if predicted is not None and layer.scores is not None:  # scores are unknown after `from_cache`
            look_ahead(layer, predicted[:, :, token - first : token - first + 1])
        outs.append(decode(layer, *part(token, token + 1), **given))
    return torch.cat(outs, 1)


def predict_drafts(cache: Any, index: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Predict a layer's queries of drafts from the input of the layer before it.

    In a decode step the prediction runs one layer earlier, with another layer's arguments. With drafts it is needed
    only when the layer attends, so that it runs here, with the layer's own arguments.

    Args:
        cache: the `HybridCache`.
        index: number of the decoder layer, which is about to run.
        hidden: `[B, Q, hidden]`, the layer's input.
        args, kwargs: the other arguments of its forward.
    """
    drafts = cache.settings.drafts
    previous, drafts.hidden = drafts.hidden, hidden
    layer = cache.layers[index] if index < len(cache.layers) else None
    if previous is None or index not in cache.donors or not isinstance(layer, HybridLayer):
        return
    # `looks_ahead` may depend on the device, which a layer knows only after its first tokens.
    if layer.looks_ahead or (not layer.is_initialized and hidden.device.type != "cpu"):
        singles = drafts.singles(hidden.shape[-2], layer.past)
        drafts.queries[index] = cache.predict_query(index, previous, args, kwargs)[:, :, -singles:]
