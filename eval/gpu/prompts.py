"""Seconds until the first token behind a prompt, which a cache has to take in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from common import clock
from gpu import models
from gpu.options import Options
from gpu.supervise import Cases, NotApplicable
from hf_offload import HybridCache

SECONDS = 90
TOKENS, QUICK_TOKENS = 32 << 10, 128
ROWS = ("default", "offloading", "dynamic")
SHOWN = ("row", "context", "first", "second", "note")


def cases(options: Options) -> Cases:
    """A case a row."""
    return {name: (SECONDS, partial(measure, options, name)) for name in ROWS}


def measure(options: Options, name: str) -> Iterator[dict[str, Any]]:
    """One row: a new cache each time, the first with memory that nobody has had yet."""
    if name == "offloading" and not options.on_gpu:
        raise NotApplicable("offloading needs a GPU")
    tokens = QUICK_TOKENS if options.quick else TOKENS
    _first_token(options, "dynamic", tokens // 8)  # which loads libraries
    first, second = (_first_token(options, name, tokens) for _ in range(2))
    yield {"row": name, "context": tokens, "first": first, "second": second, "layers": options.layers}
    models.free(options)


def _first_token(options: Options, name: str, tokens: int) -> float:
    """Seconds of a new cache and a prompt of one row, in one piece."""
    model, ours = models.build(options), name == "default"
    model.set_attn_implementation("hybrid_sparse" if ours else "sdpa")
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=options.device)
    gc.collect()
    with clock() as seconds:
        cache: Any = (
            HybridCache(model, "scout") if ours else DynamicCache(config=model.config, offloading=name == "offloading")
        )
        model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1).cpu()
    return seconds[0]
