"""Decode steps of a model with trained weights, behind a real text, whose blocks the model itself chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import common
from gpu import decoding, models
from gpu.options import Options
from gpu.supervise import NotApplicable, Report
from hf_offload import HybridCache

SECONDS = 180  # the prompt is computed
CHUNK = 8192  # tokens of a prompt at once
APART = 1024  # tokens from the beginning of one row's text to that of the next
CASES = ((32 << 10, 1, decoding.FULL), (32 << 10, 1, "scout"), (32 << 10, 8, "scout"))
QUICK = ((256, 1, decoding.FULL), (256, 2, "scout"))
SHOWN = decoding.SHOWN


def names(options: Options) -> list[str]:
    """The cases; none without a model."""
    return [] if options.model is None else list(_cases(options))


def _cases(options: Options) -> dict[str, tuple[int, int, str]]:
    """Context, batch and row of every case."""
    graph = "-graph" if options.on_gpu else ""
    cases = QUICK if options.quick else CASES
    return {
        f"{row}{graph}, {context} tokens, batch {batch}": (context, batch, row + graph) for context, batch, row in cases
    }


def run(options: Options, todo: Sequence[str], report: Report) -> None:
    """Measure row after row; the model is loaded within the first one."""
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
    found = _cases(options)
    for name in todo:
        context, batch, row = found[name]
        if report.seconds_left < 20 and not options.quick:
            return
        with torch.no_grad(), report.case(name, SECONDS):
            loaded = loaded or common.load(options.model, _dtype(options), 0, torch.device(options.device))
            facts = {"context": context, "batch": batch, "row": row, "replay": "none"}
            report.row(**facts, **measure(options, *loaded, context, batch, row))
        models.free(options)


def _dtype(options: Options) -> str:
    return str(options.dtype).removeprefix("torch.")


def measure(
    options: Options, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int, batch: int, name: str
) -> dict[str, object]:
    """One row of results.

    Raises:
        NotApplicable: it does not fit, or the model has not so many positions.
    """
    block = decoding.block_of(options)
    positions = getattr(model.config, "max_position_embeddings", context)
    if positions < context:
        raise NotApplicable(f"the model has {positions} positions, {context} are needed")
    row = decoding.make_row(options, name, None, block, context)
    models.check_room(options, model, row, batch, context)
    row.activate(model)
    cache = HybridCache(model, row.policy, **row.options)
    lengths = [decoding.filled_tokens(context, block), decoding.steps_of(options)]
    prompt, tokens = texts(tokenizer, batch, sum(lengths)).to(options.device).split(lengths, 1)
    common.prefill(model, cache, prompt, CHUNK)
    return decoding.time_cache(options, model, cache, tokens.T[..., None])


def texts(tokenizer: PreTrainedTokenizerBase, batch: int, tokens: int) -> torch.Tensor:
    """Token ids `[B, tokens]` of one book, which each row begins elsewhere."""
    whole = common.window(common.text_of("prose"), tokenizer, 0, tokens + APART * (batch - 1))[0]
    return whole.unfold(0, tokens, APART)
