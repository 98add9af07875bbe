"""Decisions on retained tokens beside the model: faults, threads, delays, statistics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from breaking import broken_launch
from tiny import feed, prompt
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache, WorkerError
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import DELAY
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca import retained_tokens, token_mass

BLOCK = 16
KNOBS: dict[str, Any] = {"window": 40, "block_size": BLOCK, "prefill_tile": 64}
TIERS = pytest.mark.parametrize("tier", ["one", "split"])


def make(model: PreTrainedModel, tier: str, **knobs: Any) -> HybridCache:
    return HybridCache(model, "hgca", tier=tier, **(KNOBS | knobs))


def converse(
    model: PreTrainedModel, cache: Any, attempt: Callable[[Callable[[], Any]], Any] = lambda act: act()
) -> torch.Tensor:
    """Logits of a prompt, steps, a turn and more steps, with padding; `attempt` makes each forward."""
    ids, mask = prompt(2, 210)
    rows = []
    for piece in itertools.pairwise([0, *range(110, 141), *range(170, 211)]):
        rows.append(attempt(lambda piece=piece: feed(model, cache, ids, mask, piece)[-1])[:, -1])
    return torch.stack(rows, 1)


@pytest.mark.one_in(2)
@TIERS
def test_blocks_whose_tokens_cannot_be_copied_are_copied_later(
    model: PreTrainedModel, stock: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Of a prompt in the first layer, and of a block that leaves the window."""
    cache, real, calls = make(model, tier, beta=0.0), retained_tokens.copy_records, itertools.count()
    told: list[str] = []

    def sometimes(*args: Any, **kwargs: Any) -> Launch:
        return (broken_launch if next(calls) in (0, 10) else real)(*args, **kwargs)

    def attempt(act: Callable[[], Any]) -> Any:
        past = cache.get_seq_length()
        try:
            return act()
        except WorkerError as error:
            told.append(str(error))
            assert {layer.get_seq_length() for layer in cache.layers} == {past}
            return act()

    monkeypatch.setattr(retained_tokens, "copy_records", sometimes)
    got = converse(model, cache, attempt)
    assert torch.allclose(got, converse(stock, DynamicCache(config=stock.config)), atol=5e-5)
    assert "what 110 tokens leave to the CPU in layer" in told[0]
    assert re.match(r"what block \d of layer \d leaves to the CPU", told[1])


@TIERS
def test_what_nobody_could_decide_is_kept_until_the_next_append(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    cache, (ids, mask) = make(model, tier), prompt(1, 211)
    with monkeypatch.context() as patch:
        patch.setattr(token_mass, "weigh_tokens", broken_launch)
        feed(model, cache, ids, mask, (0, 150))
        with pytest.raises(WorkerError, match="what 150 tokens leave to the CPU in layer 0"):
            feed(model, cache, ids, mask, (150, 151))
    feed(model, cache, ids, mask, range(150, 191))
    assert [row.kept_share_by_head for row in cache.stats().layers] == [[1.0, 1.0]] * 4
    feed(model, cache, ids, mask, (190, 211))
    cache.drain()
    assert max(max(row.kept_share_by_head) for row in cache.stats().layers) < 1.0


@pytest.mark.one_in(2)
@TIERS
def test_tokens_are_the_same_however_late_and_by_however_many_threads(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    def run(**knobs: Any) -> tuple[torch.Tensor, list[Any]]:
        cache = make(model, tier, **knobs)
        logits = converse(model, cache)
        cache.drain()
        rows = cache.stats().layers
        return logits, [(row.kept_share_by_head, row.evictions, row.context_bytes) for row in rows]

    want = run()
    for knobs in ({"threads": 3}, {"threads": 1}):
        monkeypatch.setenv(DELAY, "3" if knobs["threads"] == 1 else "0")
        got = run(**knobs)
        assert torch.equal(got[0], want[0])
        assert got[1] == want[1]


@TIERS
def test_sinks_that_are_padding_are_not_kept(model: PreTrainedModel, tier: str) -> None:
    (ids, mask), cache = prompt(2, 110), make(model, tier, beta=1e9, sinks=20)
    mask[:, 30:40] = 0
    feed(model, cache, ids, mask, (0, 110))
    cache.drain()
    kept = hybrid_layers(cache)[0].state.tensors()["kept"]
    for row, first in enumerate(mask.int().argmax(1).tolist()):
        want = [t for t in range(first, first + 20) if mask[row, t] and t < 64]
        assert kept[row, 0].nonzero()[:, 0].tolist() == want


@pytest.mark.parametrize("tier", [pytest.param("one", marks=pytest.mark.slow), "split"])
def test_an_answer_may_outgrow_what_there_was_room_for(
    model: PreTrainedModel, stock: PreTrainedModel, tier: str
) -> None:
    """Averages have room for 1024 tokens at first. A crop across a turn keeps every token."""
    given, cache, whole = prompt(1, 1065), make(model, tier, beta=0.0, window=16), DynamicCache(config=stock.config)
    for cuts in ((0, *range(990, 1011), 1020, *range(1021, 1031)), range(1005, 1066)):
        got = torch.cat(feed(model, cache, *given, cuts)[1:], 1)
        want = torch.cat(feed(stock, whole, *given, cuts)[1:], 1)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        for each in (cache, whole):
            each.crop(1005 - each.get_seq_length())
    cache.drain()


@TIERS
def test_statistics_are_those_of_the_lists(model: PreTrainedModel, tier: str) -> None:
    cache = make(model, tier)
    feed(model, cache, *prompt(2, 30), (0, 30))
    cache.drain()
    assert cache.stats().as_dict()["kept_share"] is None  # nothing has left the window
    cache.reset()
    converse(model, cache)
    cache.drain()
    stats, valid = cache.stats(), cache.settings.padding.valid
    for layer, row in zip(hybrid_layers(cache), stats.layers, strict=True):
        lists, stop = layer.state.now.retained, layer.state.now.outside
        counts = lists.counts.reshape(2, 2).sum(0)
        assert row.kept_share_by_head == pytest.approx((counts / (valid[:, :stop] != 0).sum()).tolist())
        left = [(tokens - layer.index) // BLOCK for tokens in (110, 140, 170, 210)]  # layers take turns
        assert (row.reevaluations, row.evictions) == (2, left[1] - left[0] + left[3] - left[2])
        assert min(row.eviction_seconds, row.reevaluation_seconds) > 0
        assert row.context_bytes == int(lists.block_counts.sum()) * 2 * BLOCK * 16 * 4
        assert row.salience_bytes > 2 * 4 * 210 * 4
    whole, table = stats.as_dict(), stats.table()
    kept = [share for row in stats.layers for share in row.kept_share_by_head]
    assert whole["kept_share"] == pytest.approx(sum(kept) / len(kept))
    assert whole["evictions"] == sum(row.evictions for row in stats.layers)
    for text in (f"{whole['kept_share']:.3f}", f"{min(kept):.2f}–{max(kept):.2f}", f"{whole['evictions']} evictions"):
        assert text in table
