"""What rounding does to drawn keys: a text decoded again in ways that round otherwise.

    python eval/rounding.py
    python eval/rounding.py --contexts 6k --kinds prose --row scout:samples=512

Each way decodes the same tokens as plain decoding does: with noise of 1e-7 on queries, in drafts of eight tokens, in a
fork beside another, after tokens that were dropped, from a file, and as a row of a batch, behind two blocks of padding.
The table has the share of steps whose log probabilities are within 1e-3 of plain decoding, and the median and the
largest of the steps' largest differences. For comparison `other` decodes after another first token.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

import common
from hf_offload import HybridCache
from hf_offload.model.model_support import NAME
from hf_offload.tools import measuring

DRAFTS, NOISE = 8, 1e-7
Way = Callable[[PreTrainedModel, common.Row, measuring.Reading, HybridCache], torch.Tensor]
"""Log probabilities `[steps, V]` of what follows a reading; its last argument holds the reading's context."""


def plain(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    return measuring.follow(model, cache, reading.following)[0]


@contextlib.contextmanager
def noisy() -> Iterator[None]:
    """Multiply queries by 1 + `NOISE` · normal."""
    attend, generator = AttentionInterface()[NAME], torch.Generator().manual_seed(0)

    def disturbed(module: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        normal = torch.randn(query.shape, generator=generator, dtype=torch.float32).to(query.device)
        return attend(module, (query.float() * (1 + NOISE * normal)).to(query.dtype), *rest, **named)

    AttentionInterface.register(NAME, disturbed)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)


def noise(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    with noisy():
        return plain(model, row, reading, cache)


def drafts(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    cache.activate_past_recording()
    given = measuring.cache_argument(model, cache)
    parts = reading.following.split(DRAFTS, 1)  # type: ignore[no-untyped-call]
    logits = [model(part, **given, logits_to_keep=part.shape[1]).logits[0] for part in parts]
    return torch.cat(logits).float().log_softmax(-1).cpu()


def fork(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    other = cache.fork()
    measuring.follow(model, cache, reading.context[:, :40])
    return plain(model, row, reading, other)


def crop(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    measuring.follow(model, cache, reading.context[:, :40])
    cache.crop(-40)
    return plain(model, row, reading, cache)


def load(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        cache.save(folder)
        return plain(model, row, reading, HybridCache.load(folder, model))


def batch(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    """The first row begins behind padding, the second one is another text."""
    padding, start = 2 * row.options.get("block_size", 32), reading.context.shape[1]
    mine = reading.ids[0]
    padded, second = torch.cat([mine[:padding], mine]), torch.cat([mine.roll(padding), mine[:padding]])
    ids = torch.stack([padded, second])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions, both = (mask.cumsum(1) - 1).clamp(min=0), HybridCache(model, row.policy, **row.options)
    found, given = [], measuring.cache_argument(model, both)
    stops = range(start + padding, ids.shape[1] + 1)  # one piece, as statistics of digests come from the first
    for first, stop in zip([0, *stops], stops, strict=False):
        now = {"attention_mask": mask[:, :stop], "position_ids": positions[:, first:stop]}
        found.append(model(ids[:, first:stop], **given, **now, logits_to_keep=1).logits[0, -1])
    return torch.stack(found[-reading.following.shape[1] :]).float().log_softmax(-1).cpu()


def other(model: PreTrainedModel, row: common.Row, reading: measuring.Reading, cache: HybridCache) -> torch.Tensor:
    ids = reading.ids.clone()
    ids[0, 0] = (ids[0, 0] + 1) % model.config.vocab_size
    changed = measuring.read(model, ids, reading.following.shape[1])
    return plain(model, row, changed, measuring.hold(model, row.policy, row.options, changed))


WAYS: tuple[Way, ...] = (noise, drafts, fork, crop, load, batch, other)


def compared(found: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Share of steps within 1e-3, median and largest difference, of log probabilities `[steps, V]`."""
    worst = (found - want).abs().amax(-1)
    within = float((worst <= 1e-3).float().mean())
    return {"within": within, "median": float(worst.median()), "largest": float(worst.max())}


def main(
    rows: common.RowsOption = ["scout:samples=512", "scout:samples=128"],  # noqa: B006
    contexts: common.ContextsOption = "4k",
    kinds: common.KindsOption = common.KINDS,
    steps: common.StepsOption = 256,
    *,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Compare ways to decode the same tokens."""
    chosen = common.rows_of(rows)
    places = [{"context": n, "kind": kind} for n in common.numbers(contexts) for kind in common.kinds_of(kinds)]
    model, tokenizer = setting.load()
    common.check_rows(chosen, model)

    def read(place: dict[str, Any]) -> measuring.Reading:
        kind = place["kind"]
        ids = setting.window(tokenizer, kind, common.OFFSETS[kind][0], place["context"] + steps)
        return measuring.read(model, ids.to(model.device), steps)

    def measure(reading: measuring.Reading, row: common.Row) -> list[dict[str, Any]]:
        held = partial(measuring.hold, model, row.policy, row.options, reading)
        want = plain(model, row, reading, held())
        found = {way.__name__: compared(way(model, row, reading, held()), want) for way in WAYS}
        return [{"steps": steps, "way": name} | each for name, each in found.items()]

    common.over_texts(setting, chosen, places, read, measure, steps=steps, prose=setting.source)


if __name__ == "__main__":
    common.command(main)()
