"""`generate()` with a `HybridCache`, for `model.generate(..., custom_generate="integrations/transformers")`."""

from __future__ import annotations

import functools
from typing import Any

from hf_offload import enabled


def generate(model: Any, policy: str = "scout", knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Generate with a fresh `HybridCache`, or go on with the one that is given as `past_key_values`.

    The model may have been loaded with any attention function; it has that again afterwards.

    Args:
        model: the model.
        policy: as for `hf_offload.HybridCache`.
        knobs: the other arguments of `HybridCache`, such as `{"budget": 1024}`.
        kwargs: as for the model's own `generate()`.

    Returns:
        What the model's own `generate()` returns.

    Raises:
        ValueError: a knob that is not allowed, or a model that `HybridCache` does not support.
    """
    loaded = model.__dict__.get("generate")
    own = isinstance(loaded, functools.partial) and loaded.func is generate  # the model was loaded with this file
    if own:
        del model.generate
    try:
        with enabled(model, policy, **(knobs or {})):
            return model.generate(**kwargs)
    finally:
        if own:
            model.generate = loaded
