"""Seconds until the first token behind a prompt, which a cache has to take in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from common import Row, clock
from gpu import models
from gpu.options import STOCK, Options
from gpu.supervise import Cases, Stopped
from hf_offload import Scout

SECONDS = 90
SHOWN = ("row", "context", "first", "second")
ROWS = [Row("default", Scout()), *(Row(name, "dynamic", knobs) for name, knobs in STOCK.items())]


def cases(options: Options) -> Cases:
    """A case a row."""
    return {row.name: (SECONDS, partial(measure, options, row)) for row in ROWS}


def measure(options: Options, row: Row) -> Iterator[dict[str, Any]]:
    """One row: a new cache each time, the first with memory that nobody has had yet."""
    if "offloading" in row.options and not options.on_gpu:
        raise Stopped("not applicable", "offloading needs a GPU")
    tokens = 128 if options.quick else 32 << 10
    first_token(options, ROWS[1], tokens // 8)  # which loads libraries
    first, second = (first_token(options, row, tokens) for _ in range(2))
    layers = models.shape(options).layers
    yield {"row": row.name, "context": tokens, "first": first, "second": second, "layers": layers}
    models.free(options)


def first_token(options: Options, row: Row, tokens: int) -> float:
    """Seconds of a new cache and a prompt of one row, in one piece."""
    model = models.build(options)
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=options.device)
    gc.collect()
    with clock() as seconds:
        cache = models.make_cache(model, row)
        model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1).cpu()
    return seconds[0]
