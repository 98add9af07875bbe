"""Detection of drafts in assisted decoding: `generate()` asks for the logits of all drafts and the token before."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_offload.model.hooks import find_cache
from hf_offload.model.installing import installing
from hf_offload.policies.base import Policy

_TOKEN_AXES = {"input_ids": 1, "position_ids": -1, "token_type_ids": 1, "mm_token_type_ids": 1, "inputs_embeds": 1}
"""Arguments of a forward with one entry for each token, and their token axis."""


class Watch:
    """A pre-forward hook of a model that reads `logits_to_keep`; it is removed when the last reference goes.

    Args:
        model: the model to hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.arguments = frozenset(inspect.signature(model.forward).parameters)
        hook = model.register_forward_pre_hook(_BeforeModel(weakref.ref(self)), with_kwargs=True)
        weakref.finalize(self, hook.remove)


def watch(model: nn.Module) -> Watch:
    """Return the model's `Watch`, an existing or a new one."""
    with installing():
        for key, hook in list(model._forward_pre_hooks.items()):
            watch = hook.watch() if isinstance(hook, _BeforeModel) else None
            if watch is not None and watch.model() is model:
                return watch
            if isinstance(hook, _BeforeModel):  # of the model that this one is a copy of
                model._forward_pre_hooks.pop(key, None)
        return Watch(model)


def check_drafts(watch: Watch, policy: Policy, past: int) -> None:
    """Check that drafts can be distinguished from other tokens in the forwards of a model.

    Args:
        watch: the model's watch.
        policy: the cache's policy; one that leaves out no token needs no distinction.
        past: number of cached tokens, which the first forward may repeat.

    Raises:
        ValueError: the model's forward lacks `logits_to_keep` or `position_ids`.
    """
    arguments = watch.arguments
    if policy.requirements.leaves_out and "logits_to_keep" not in arguments:
        raise ValueError(
            "this model's forward takes no logits_to_keep, which tells how many tokens are drafts; for assisted "
            "decoding use policy='full' or DynamicCache"
        )
    if past and "position_ids" not in arguments:
        raise ValueError(
            "this model's forward takes no position_ids, which tell whether a first forward repeats cached tokens; "
            "start assisted decoding with an empty cache"
        )


def _no_watch() -> None:
    """Return None: the watch of a hook that was copied or unpickled with its model."""


class _BeforeModel:
    def __init__(self, watch: Callable[[], Watch | None]) -> None:
        self.watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_no_watch,)  # caches of the copied model make a watch of their own

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = find_cache(args, kwargs)
        if self.watch() is None or cache is None or not cache.settings.drafts.recording:
            return None
        drafts = cache.settings.drafts
        keep, past = kwargs.get("logits_to_keep"), cache.get_seq_length()
        drafts.coming = keep - 1 if isinstance(keep, int) and keep > 1 else 0
        cached = past - int((cache.settings.padding.valid[0, :past] == 0).sum()) if past and drafts.fresh else 0
        if cached and _repeats_cached(kwargs, cached):
            return args, _without_cached(kwargs, past)
        _check_mask(kwargs, past)
        return None


def _repeats_cached(kwargs: dict[str, Any], cached: int) -> bool:
    """Whether a forward repeats the whole conversation, of which `cached` tokens are cached."""
    positions = kwargs.get("position_ids")
    # The first token, or padding before it, has position 0 or 1.
    return isinstance(positions, torch.Tensor) and int(positions.flatten()[0]) in {0, 1} - {cached}


def _check_mask(kwargs: dict[str, Any], past: int) -> None:
    """Raise ValueError if the mask has fewer columns than the `past` cached tokens and the forward's together."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    total = past + positions.shape[-1]
    if mask.shape[1] < total:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} columns for {total} tokens: assisted decoding cuts the mask where it "
            "does not get all ids; pass the ids of the whole conversation"
        )


def _without_cached(kwargs: dict[str, Any], past: int) -> dict[str, Any]:
    """Return the arguments of a forward without the first `past` tokens, which are cached.

    The first forward of assisted decoding feeds all ids, even those that are cached; a stock cache stores them twice.

    Raises:
        ValueError: the ids are not those of the whole conversation, or other inputs than text are given.
    """
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    unknown = sorted(set(tensors) - set(_TOKEN_AXES) - {"attention_mask"})
    short = [name for name in _TOKEN_AXES if name in tensors and tensors[name].shape[_TOKEN_AXES[name]] <= past]
    if unknown or short:
        raise ValueError(
            f"assisted decoding goes on with a cache of {past} tokens, but {', '.join(unknown + short)} cannot be "
            "continued: pass the ids of the whole conversation and nothing else, or start with an empty cache"
        )
    parts = {
        name: value.narrow(_TOKEN_AXES[name], past, value.shape[_TOKEN_AXES[name]] - past)
        for name, value in tensors.items()
        if name in _TOKEN_AXES
    }
    return kwargs | parts
