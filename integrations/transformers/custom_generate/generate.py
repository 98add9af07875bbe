"""`generate()` with a `HybridCache`, for `model.generate(..., custom_generate="integrations/transformers")`."""

from __future__ import annotations

import threading
from typing import Any

from hf_offload import enabled

_local = threading.local()
"""`model`: the model for which this thread is in `generate` already."""


def generate(*args: Any, model: Any, policy: str = "scout", knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Generate with a fresh `HybridCache`, or go on with the one that is given as `past_key_values`.

    The model may have been loaded with any attention function; it has that again afterwards.

    Args:
        model: the model.
        policy: as for `hf_offload.HybridCache`.
        knobs: the other arguments of `HybridCache`, such as `{"budget": 1024}`.
        args, kwargs: as for the model's own `generate()`.

    Returns:
        What the model's own `generate()` returns.

    Raises:
        ValueError: a knob that is not allowed, or a model that `HybridCache` does not support.
    """
    outer = getattr(_local, "model", None)
    if outer is model:  # the model was loaded with this file, so that its own `generate` is this function
        return type(model).generate(model, *args, **kwargs)
    _local.model = model
    try:
        with enabled(model, policy, **(knobs or {})):
            return model.generate(*args, **kwargs)
    finally:
        _local.model = outer
