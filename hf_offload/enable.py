"""`enable`, `disable`, `enabled`: models whose `generate()` makes a `HybridCache` by default."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_offload.fast_linear import LinearHandle
from hf_offload.graph.cuda_graph import GraphedForward, graphed
from hf_offload.hybrid_cache import HybridCache
from hf_offload.model.hooks import CACHE_NAMES
from hf_offload.model.installing import installing
from hf_offload.model.model_support import NAME, check_attention, check_model, inside, on_device
from hf_offload.policies.base import Policy

_PREPARE = "_prepare_cache_for_generation"
"""The method in which `generate()` makes its cache, in every mode, after all arguments are known.

An instance attribute of this name overrides the class's method. The method is private, but the smallest to replace: a
wrapper of `generate` would have to repeat its decision on the cache, and a patched class would change other models.
"""


class _CacheMaker:
    """Replacement of a model's `_prepare_cache_for_generation`, which makes a `HybridCache` for each `generate()`."""

    def __init__(self, policy: str | Policy, knobs: dict[str, Any], fast_linear: bool, implementation: str) -> None:
        self.policy, self.knobs, self.fast_linear = policy, knobs, fast_linear
        self.implementation = implementation
        """The attention implementation to restore."""
        self.displaced: Any = None
        """The instance attribute of this name that another package had set, to restore."""
        self.blocks: list[int] = []
        """The threads within `enabled` blocks that use this object; a thread is there once a block."""
        self.outer: _CacheMaker | None = None
        """What this object displaced when an `enabled` block made it, to put back when its last block ends."""
        self.stays = True
        """Whether it stays when its last block ends: `enable` made it."""
        self.linear: LinearHandle | None = None
        self._graphed: GraphedForward | None = None
        """Held while the model is enabled, since each cache that `generate()` makes is freed before the next."""

    def bind(self, model: PreTrainedModel) -> None:
        """Install this object in a model."""
        _set_implementation(model, NAME)
        self.linear = LinearHandle(model) if self.fast_linear and not on_device(model) else None
        self._model = weakref.ref(model)
        self._layers = _layers(model)
        self.displaced = model.__dict__.get(_PREPARE)
        setattr(model, _PREPARE, self)
        self._graphed = graphed(model) if self.knobs.get("cuda_graph", on_device(model)) else None

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        model = self._model()
        assert model is not None, "only the model itself calls this"
        given = any(model_kwargs.get(name) is not None for name in CACHE_NAMES)
        original = self.displaced or getattr(type(model), _PREPARE).__get__(model)
        original(generation_config, model_kwargs, *args, **kwargs)
        caller_chose = given or generation_config.cache_implementation is not None
        if caller_chose or generation_config.use_cache is False:
            return
        if generation_config.is_assistant and _layers(model) < self._layers:  # early exit drafts with the first layers
            return
        name = next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAMES[0])
        made = model_kwargs.get(name)
        if type(made) is not DynamicCache:
            raise ValueError(
                f"{type(model).__name__} generates with a {type(made).__name__} in place of a DynamicCache, which a "
                "HybridCache cannot replace; call hf_offload.disable(model)"
            )
        cache = HybridCache(model, self.policy, **self.knobs)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache

    def asks_for(self, policy: str | Policy, fast_linear: bool, knobs: dict[str, Any]) -> bool:
        """Whether it was made of these arguments of `enable`."""
        return bool((self.policy, self.fast_linear, self.knobs) == (policy, fast_linear, knobs))

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled model is enabled too: its copy of this object refers to the copied model.
        return self.__dict__ | {"_model": self._model(), "_graphed": None, "blocks": [], "outer": None, "stays": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _model=weakref.ref(state["_model"]))


def enable(model: torch.nn.Module, policy: str | Policy = "scout", *, fast_linear: bool = True, **knobs: Any) -> None:
    """Make every `generate()` of a model use a fresh `HybridCache`, unless the caller passes a cache.

    It sets `attn_implementation="hybrid_sparse"`. Code that calls `generate()`, such as pipelines and lm-eval, works
    unchanged. `use_cache=False` and `cache_implementation=...` keep their effect. A forward without a cache is the
    stock one. Enabling an enabled model replaces policy and knobs. With `assistant_early_exit` the first layers
    draft with a `DynamicCache` of their own, and a `HybridCache` verifies.

    Args:
        model: a model with `generate()`, or a PEFT model around one.
        policy, knobs: as for `HybridCache`.
        fast_linear: whether `hf_offload.fast_linear` serves the layers of a model that computes on the CPU.

    Raises:
        TypeError: not a Transformers model with a `generate()`.
        ValueError: a knob that is not allowed, or a model that `HybridCache` does not support; the model is unchanged.
    """
    inner = _generating(model)
    with installing():
        _refuse_other_threads(inner, "enable", _cache_maker(inner))
        _enable(model, inner, policy, fast_linear, knobs)


def _enable(
    model: torch.nn.Module, inner: PreTrainedModel, policy: str | Policy, fast_linear: bool, knobs: dict[str, Any]
) -> _CacheMaker:
    """Put a new `_CacheMaker` into a model, in place of one that is there."""
    check_attention(inner)
    for name, default in (("cache_implementation", (None, "hybrid")), ("use_cache", (None, True))):
        value = getattr(inner.generation_config, name, None)
        if value not in default:  # generate() treats None as "hybrid"
            raise ValueError(
                f"model.generation_config.{name}={value!r} keeps generate() from making a cache of the usual kind; "
                f"set model.generation_config.{name} = None"
            )
    old = _cache_maker(inner)
    implementation = _attention_implementation(inner)
    try:
        _set_implementation(inner, NAME)
        HybridCache(inner, policy, **knobs)  # checks model and knobs now
        if inner is not model:
            check_model(model)  # type: ignore[arg-type]
    except BaseException:
        _set_implementation(inner, implementation)
        raise
    if old is not None:
        implementation = old.implementation
        _uninstall(inner, old)
    maker = _CacheMaker(policy, knobs, fast_linear, implementation)
    maker.bind(inner)
    return maker


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: restore `generate()` and the attention implementation; nothing for a model that is not enabled.

    Args:
        model: a model that was enabled, or a PEFT model around it.

    Raises:
        TypeError: not a Transformers model with a `generate()`.
        ValueError: another thread is within an `enabled` block of the model.
    """
    inner = _generating(model)
    with installing():
        _refuse_other_threads(inner, "disable", _cache_maker(inner))
        _disable(inner)


def _disable(model: PreTrainedModel) -> None:
    maker = _cache_maker(model)
    if maker is not None:
        _uninstall(model, maker)
        _set_implementation(model, maker.implementation)


@contextlib.contextmanager
def enabled(
    model: torch.nn.Module, policy: str | Policy = "scout", *, fast_linear: bool = True, **knobs: Any
) -> Iterator[None]:
    """Enable a model within a `with` block, and restore it afterwards.

    Threads may be within blocks of one model at the same time if their blocks ask for the same.

    Args:
        model, policy, fast_linear, knobs: as for `enable`.

    Raises:
        TypeError, ValueError: as `enable`; or another thread is within a block that asks for something else.
    """
    inner, me = _generating(model), threading.get_ident()
    with installing():
        maker = _cache_maker(inner)
        if maker is None or not maker.asks_for(policy, fast_linear, knobs):
            _refuse_other_threads(inner, "enable", maker)
            outer, maker = maker, _enable(model, inner, policy, fast_linear, knobs)
            maker.outer, maker.stays = outer, False
        else:
            _refuse_other_threads(inner, "enable", maker.outer)
        maker.blocks.append(me)
    try:
        yield
    finally:
        with installing():
            maker.blocks.remove(me)
            if not maker.blocks and not maker.stays:
                _disable(inner)
                if maker.outer is not None:
                    maker.outer.bind(inner)


def _refuse_other_threads(model: PreTrainedModel, what: str, maker: _CacheMaker | None) -> None:
    """Raise unless the `enabled` blocks that use a `_CacheMaker` are this thread's.

    Args:
        maker: the object, or None.

    Raises:
        ValueError: another thread is within one.
    """
    others = set() if maker is None else set(maker.blocks) - {threading.get_ident()}
    if maker is not None and others:
        raise ValueError(
            f"cannot {what} this {type(model).__name__}: thread {min(others)} is within hf_offload.enabled(model, "
            f"{maker.policy!r}) of it; ask for the same policy, fast_linear and knobs, or wait until that block ends"
        )


def _generating(model: Any) -> PreTrainedModel:
    """Return the model whose `generate()` is called: itself, or the base model of a PEFT wrapper.

    Raises:
        TypeError: not a Transformers model with a `generate()`.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrappers
    if not isinstance(inner, PreTrainedModel) or not hasattr(type(inner), _PREPARE):
        raise TypeError(f"{type(inner).__name__} is not a Transformers model with a generate(){inside(inner)}")
    return inner


def _cache_maker(model: PreTrainedModel) -> _CacheMaker | None:
    """Return the `_CacheMaker` of an enabled model, or None."""
    prepare: Any = model.__dict__.get(_PREPARE)
    kind = type(prepare)  # by name: the package may have been imported again since
    ours = (kind.__module__, kind.__qualname__) == (_CacheMaker.__module__, _CacheMaker.__qualname__)
    return prepare if ours else None


def _uninstall(model: PreTrainedModel, maker: _CacheMaker) -> None:
    if maker.linear is not None:
        maker.linear.close()
    delattr(model, _PREPARE)
    if maker.displaced is not None:
        setattr(model, _PREPARE, maker.displaced)


def _nested(config: Any, decoder: Any, implementation: str) -> Any:
    """Return an attention implementation for a decoder's config, in a dict for each config around it; None: no path."""
    if config is decoder:
        return implementation
    for name in config.sub_configs:
        below = getattr(config, name, None)
        wanted = None if below is None else _nested(below, decoder, implementation)
        if wanted is not None:
            return {name: wanted}
    return None


def _layers(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))


def _attention_implementation(model: PreTrainedModel) -> str:
    decoder: Any = model.config.get_text_config(decoder=True)
    return str(decoder._attn_implementation)


def _set_implementation(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation of the text decoder; vision and audio towers keep theirs."""
    wanted = _nested(model.config, model.config.get_text_config(decoder=True), implementation)
    model.set_attn_implementation(wanted if isinstance(wanted, dict) else {"": implementation})
