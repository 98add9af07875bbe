"""The attention function and the mask function that Transformers knows as `"hybrid_sparse"`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_offload.attention.decode import append, decode
from hf_offload.attention.prefill import append_attention
from hf_offload.cache.layer import HybridLayer, HybridLength
from hf_offload.cache.torch_modes import uncast, uncompiled
from hf_offload.model import lookahead
from hf_offload.model.drafts import verify
from hf_offload.model.fallback import first_mask, note_changed
from hf_offload.model.model_support import NAME
from hf_offload.scores import Scores

_UNSUPPORTED = ("position_bias", "indices")  # additive biases, indexed sparse attention
_SPECIAL_ARGUMENTS = frozenset((*_UNSUPPORTED, "cache", "sliding_window"))
"""Keyword arguments that may ask for something unsupported; many models pass them as None."""
_PLAIN = {"mask_function": causal_mask_function, "local_size": None, "allow_is_causal_skip": True, "use_vmap": False}
"""The arguments of a mask of plain causal attention; `sdpa_mask` has the same defaults."""


def register() -> None:
    """Register `attn_implementation="hybrid_sparse"` with Transformers: attention function and mask function."""
    AttentionInterface.register(NAME, hybrid_sparse_attention)
    AttentionMaskInterface.register(NAME, hybrid_sparse_mask)


def hybrid_sparse_mask(*, kv_length: int, **kwargs: Any) -> torch.Tensor | None:
    """Return the mask of an attention call: sdpa's, or a compact one for plain causal attention of a `HybridLayer`.

    Returns:
        For a `HybridLayer` with plain causality: None, or bool `[B, kv_length]`, False for padding; 32 kB for 32k keys,
        where a dense mask of 4,096 queries takes 128 MiB. In all other cases: `sdpa_mask`'s result.
    """
    if torch.compiler.is_compiling() and not isinstance(kv_length, HybridLength):
        return sdpa_mask(kv_length=kv_length, **kwargs)
    return _mask(kv_length=kv_length, **kwargs)


@uncompiled
def _mask(*, kv_length: int, **kwargs: Any) -> torch.Tensor | None:
    plain = all(kwargs.get(name, default) == default for name, default in _PLAIN.items())
    if isinstance(kv_length, HybridLength) and plain:
        mask = kwargs.get("attention_mask")
        return None if mask is None else _padding_mask(mask, kv_length)
    return sdpa_mask(kv_length=int(kv_length), **kwargs)


def hybrid_sparse_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a `HybridCache`; without one, Transformers' sdpa with the same arguments.

    Args:
        module: the attention module.
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, Q, D]`, the new tokens, tagged by `HybridLayer.update`.
        attention_mask: from `hybrid_sparse_mask`, or the user's own dense mask.
        dropout, scaling: as for sdpa; scaling is D ** -0.5 by default.
        kwargs: may hold softcap, s_aux (logits of attention sinks), sliding_window, is_causal.

    Returns:
        `[B, Q, Hq, D]`, and None in place of attention weights.

    Raises:
        ValueError: the model asks for something that a `HybridCache` does not support.
    """
    if torch.compiler.is_compiling() and not _tagged(key, value, attention_mask):
        return _attend_stock(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return _attend(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _tagged(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the tensors of a compiled model's attention come from a `HybridCache`."""
    compact = mask is not None and mask.ndim == 2
    return compact or hasattr(key, "_hybrid_layer") or hasattr(value, "_hybrid_layer")


def _attend_stock(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend the K and V of another cache with Transformers' sdpa.

    With softcap or sinks, which sdpa does not support (Gemma 2, GPT-OSS), in torch operations.
    """
    scores, sinks = _scores(query, scaling, kwargs), kwargs.get("s_aux")
    if scores.softcap is None and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise ValueError(f"dropout={dropout} with a softcap or attention sinks; put the model in eval mode")
    if attention_mask is None and query.shape[2] > 1:  # plain causal: keys after the queries' own are unused
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    past = key.shape[2] - query.shape[2]
    tiles = [(0, key[:, :, :past], value[:, :, :past])] if past else []
    new_k, new_v = key[:, :, past:], value[:, :, past:]
    return append_attention(query, new_k, new_v, past, tiles, attention_mask, scores=scores, sinks=sinks), None


def _scores(query: torch.Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Scores:
    """Return the parameters of the model's scores from the arguments of an attention call."""
    return Scores(query.shape[-1] ** -0.5 if scaling is None else float(scaling), kwargs.get("softcap"))


@uncompiled
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if lookahead.PROBING:
        lookahead.intercept(query)
    tag = getattr(key, "_hybrid_layer", None)
    tagged = tag is not None and getattr(value, "_hybrid_layer", None) is tag
    layer: HybridLayer | None = tag() if tagged else None  # type: ignore[misc]
    if layer is None:
        layer = _layer_of(key, value)
    if layer is None:
        note_changed(module, query, key)
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = first_mask(module, query, key, attention_mask)
        return _attend_stock(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if type(layer) is not HybridLayer:
        raise ValueError(
            "this HybridCache is of an earlier import: hf_offload was imported again, which replaced the attention "
            "function; make a new cache, or call hf_offload.enable(model) again"
        )
    scores, sinks = _scores(query, scaling, kwargs), kwargs.get("s_aux")
    dense = attention_mask is not None and attention_mask.ndim == 4
    batch, _, length, _ = query.shape
    special = not _SPECIAL_ARGUMENTS.isdisjoint(kwargs)
    special = special and (kwargs.get("sliding_window") is not None or bool(_unsupported(kwargs)))
    if special or dropout or length > 1 or query.requires_grad or layer.last_module() is not module:
        _check(layer, module, query, attention_mask, dropout, kwargs)
    if torch.is_autocast_enabled(layer.device_type):  # `update` has cast K and V; nothing else may be cast
        with uncast(layer.device_type):
            query = query.to(key.dtype)
            out: torch.Tensor = _attend(module, query, key, value, attention_mask, dropout, scaling, **kwargs)[0]
            return out, None
    total, padding = layer.total, layer.settings.padding
    decoding = length == 1 and total > 1
    if length != key.shape[2]:
        layer.take_pending()
        raise ValueError(
            f"{type(module).__name__} passes {length} queries for {key.shape[2]} new tokens, but HybridCache needs one "
            "for each; use DynamicCache for this model"
        )
    if dense and attention_mask.shape[-1] < total:  # type: ignore[union-attr]
        layer.take_pending()
        raise ValueError(
            f"{type(module).__name__} has a mask for {attention_mask.shape[-1]} of {total} keys: it asks the cache for "  # type: ignore[union-attr]
            "more than attention, or the mask given is too short; use DynamicCache, or a mask for all keys"
        )
    if not layer.two_memories or layer.mirror.capture is None:  # a capture reads no mask: it was observed before
        if attention_mask is not None or total != padding.seen or batch != len(padding.first):
            padding.observe(_key_mask(attention_mask, decoding), batch, total, dense=dense)
        if layer.revision != padding.revision:
            layer.heed_padding()
    if decoding:
        return decode(layer, query, key, value, scores=scores, sinks=sinks), None
    singles = _singles(layer, module, length, dense)
    if not dense:  # the mask is made from all masks so far: padding stays padding
        seen = padding.valid[:, : total - singles]
        attention_mask = torch.from_numpy(seen != 0).to(query.device) if padding.ragged else None
    if singles:
        out = verify(layer, query, key, value, attention_mask, singles, scores=scores, sinks=sinks)
    else:
        out = append(layer, query, key, value, attention_mask, scores=scores, sinks=sinks)
    return out, None


def _singles(layer: HybridLayer, module: torch.nn.Module, length: int, dense: bool) -> int:
    """Return how many of a forward's last tokens are attended one by one; 0 if the policy leaves out no token.

    Raises:
        ValueError: drafts that cannot be attended one by one.
    """
    if not layer.requirements.leaves_out:
        return 0
    singles = layer.settings.drafts.singles(length, layer.past)
    shared = layer.pending is None
    if singles and (dense or shared):
        layer.take_pending()
        reason = "layers that share keys and values" if shared else "an attention mask of their own"
        raise ValueError(
            f"drafts for {type(module).__name__} come with {reason}, so that they cannot be attended one by one; use "
            "policy='full' or DynamicCache"
        )
    return singles


def _layer_of(key: torch.Tensor, value: torch.Tensor) -> HybridLayer | None:
    """Find the layer of keys and values whose tags are missing, different or of a freed layer; None: no layer.

    Raises:
        ValueError: the layer is gone, or only one of the two is tagged in a later forward.
    """
    tags = [getattr(tensor, "_hybrid_layer", None) for tensor in (key, value)]
    layers: list[HybridLayer | None] = [None if tag is None else tag() for tag in tags]
    if any(tag is not None and layer is None for tag, layer in zip(tags, layers, strict=True)):
        raise ValueError("the HybridCache of this forward is gone; keep a reference to it while the model runs")
    if layers[0] is layers[1]:
        return layers[0]
    if any(layer is not None and layer.past for layer in layers):
        raise ValueError("the model changes keys or values after the cache; use DynamicCache for this model family")
    return None  # in a first forward the changed K and V are all keys and values


def _padding_mask(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """Return a padding mask as bool `[B, keys]`; missing columns are masked, as in Transformers' own masks."""
    missing = keys - mask.shape[1]
    return (torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask[:, :keys]).to(torch.bool)


def _key_mask(mask: torch.Tensor | None, decoding: bool) -> torch.Tensor | None:
    """Return bool `[B, keys]`, the keys that the newest query may attend, from a compact or a dense mask.

    Raises:
        ValueError: a dense mask of a decode step that has other values, or differs between heads.
    """
    if mask is None or mask.ndim == 2:
        return mask
    last = mask[:, 0, -1]
    if last.dtype == torch.bool:
        visible = last
    else:
        visible = last > torch.finfo(last.dtype).min / 2
        if decoding and bool((last.masked_fill(~visible, 0) != 0).any()):
            raise ValueError("HybridCache cannot add a mask's values to scores of single tokens; use a bool mask")
    if decoding and mask.shape[1] > 1:
        raise ValueError(f"attention mask of shape {tuple(mask.shape)}: a mask for each head; use one for all heads")
    return visible


def _unsupported(kwargs: dict[str, Any]) -> list[str]:
    """Return the keyword arguments of an attention call that ask for something unsupported.

    A `cache` is a paged one, which holds the keys, unless it is a cache of the kind that was updated before the call.
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    return unsupported if isinstance(kwargs.get("cache"), Cache | None) else [*unsupported, "cache"]


def _check(
    layer: HybridLayer, module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    served, window, reasons = layer.serves(module), kwargs.get("sliding_window"), _unsupported(kwargs)
    beyond_window = window is not None and layer.get_seq_length() > window
    causal = query.shape[2] > 1 and mask is None  # `is_causal` matters only for several queries without a mask
    non_causal = causal and False in (kwargs.get("is_causal"), getattr(module, "is_causal", True))
    if served and not (beyond_window or non_causal or dropout or reasons or query.requires_grad):
        return
    if beyond_window:
        reasons.append(f"sliding_window={window} in a layer that is full attention by the model's config")
    if non_causal:
        reasons.append("attention that is not causal")
    if dropout:
        reasons.append(f"dropout={dropout} (put the model in eval mode)")
    if query.requires_grad:
        reasons.append("gradients of queries (run the model under torch.no_grad())")
    if not served:
        reasons.append("a model other than the one that the cache was made for (make a cache for this one)")
    layer.take_pending()
    raise ValueError(f"HybridCache cannot serve {type(module).__name__}: {', '.join(reasons)}; or use DynamicCache")
