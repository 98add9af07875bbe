"""Seconds until the first token behind a prompt, which a cache has to take in."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from gpu import models
from gpu.options import Options
from gpu.supervise import NotApplicable, Report
from hf_offload import HybridCache

SECONDS = 90
TOKENS, QUICK_TOKENS = 32 << 10, 128
ROWS = ("default", "offloading", "dynamic")
SHOWN = ("row", "context", "first", "second", "note")


def names(options: Options) -> list[str]:
    """The cases."""
    return list(ROWS)


def run(options: Options, todo: Sequence[str], report: Report) -> None:
    """Measure row after row; the model is built within the first one."""
    model: PreTrainedModel | None = None
    tokens = QUICK_TOKENS if options.quick else TOKENS
    for name in todo:
        if report.seconds_left < 10 and not options.quick:
            return
        with torch.no_grad(), report.case(name, SECONDS):
            if name == "offloading" and not options.on_gpu:
                raise NotApplicable("offloading needs a GPU")
            if model is None:
                model = models.build(options)
                _first_token(options, model, "dynamic", tokens // 8)  # which loads libraries
            times = [_first_token(options, model, name, tokens) for _ in range(2)]
            report.row(row=name, context=tokens, first=times[0], second=times[1], layers=options.layers)
        models.free(options)


def _first_token(options: Options, model: PreTrainedModel, name: str, tokens: int) -> float:
    """Seconds of a new cache and a prompt of one row, in one piece."""
    model.set_attn_implementation("hybrid_sparse" if name == "default" else "sdpa")
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=options.device)
    gc.collect()
    options.synchronize()
    start = time.perf_counter()
    offloading = {"offloading": True} if name == "offloading" else {}
    cache: Any = HybridCache(model, "scout") if name == "default" else DynamicCache(config=model.config, **offloading)
    model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1).cpu()
    return time.perf_counter() - start
