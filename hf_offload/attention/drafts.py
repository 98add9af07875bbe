"""Drafts being verified: tokens that arrive together and are attended one by one, as if they were decoded."""

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

    What comes before them is taken in as without them. Each of the others gets the policy's plan for it and sees the
    tokens before it, so that it is attended as in a decode step of its own. `crop` can go back to before any of them.

    Args:
        layer: the layer; its announced K and V are `key` and `value` `[B, Hkv, Q, D]`.
        query: `[B, Hq, Q, D]`.
        mask: None, or `[B, past + Q - singles]`.
        singles: how many of the last tokens are attended one by one.
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
        if predicted is not None and layer.scores is not None:  # one that was taken over has not attended yet
            look_ahead(layer, predicted[:, :, token - first : token - first + 1])
        outs.append(decode(layer, *part(token, token + 1), **given))
    return torch.cat(outs, 1)


def predict_drafts(cache: Any, index: int, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Decoder layer `index` is about to run with drafts: predict their queries from the input of the layer before.

    In a decode step that happens one layer earlier, with another layer's arguments; here the result is not wanted
    before the layer attends, and its own arguments are at hand.

    Args:
        cache: the `HybridCache`.
        index: number of the decoder layer.
        hidden: `[B, Q, hidden]`, its input.
        args, kwargs: the other arguments of its forward.
    """
    drafts = cache.settings.drafts
    before, drafts.hidden = drafts.hidden, hidden
    layer = cache.layers[index] if index < len(cache.layers) else None
    if before is None or index not in cache.donors or not isinstance(layer, HybridLayer):
        return
    # Until its first tokens arrive, a layer does not know that there is a device, which some policies ask for.
    if layer.looks_ahead or (not layer.is_initialized and hidden.device.type != "cpu"):
        singles = drafts.singles(hidden.shape[-2], layer.past)
        drafts.queries[index] = cache.predict_query(index, before, args, kwargs)[:, :, -singles:]
