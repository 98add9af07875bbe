"""Decisions on retained tokens beside the model: faults, threads, delays, statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from breaking import UNDONE, broken_launch
from pools import used_bytes
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache, WorkerError
from hf_offload.blocks import host_pool
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import DELAY
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca import retained_tokens, token_mass

BLOCK = 16
KNOBS: dict[str, Any] = {"window": 40, "block_size": BLOCK, "prefill_tile": 64}
TIERS = pytest.mark.parametrize("tier", ["one", "split"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def make(model: PreTrainedModel, tier: str, **knobs: Any) -> HybridCache:
    return HybridCache(model, "hgca", tier=tier, **(KNOBS | knobs))


def converse(
    model: PreTrainedModel, cache: Any, attempt: Callable[[Callable[[], Any]], Any] = lambda act: act()
) -> torch.Tensor:
    """Logits of a prompt, steps, a turn and more steps, with padding; `attempt` makes each forward."""
    ids, mask = prompt(2, 240)
    rows = []
    for piece in itertools.pairwise([0, *range(110, 151), *range(180, 241)]):
        rows.append(attempt(lambda piece=piece: feed(model, cache, ids, mask, piece)[-1])[:, -1])
    return torch.stack(rows, 1)


@pytest.mark.one_in(3)
@TIERS
@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (token_mass, "weigh_tokens", (0, 2, 5)),  # of the prompt in two layers, and of the turn
        (retained_tokens, "copy_records", (0, 10)),
    ],
)
def test_a_job_that_fails_is_told_with_its_layer_and_done_again(
    model: PreTrainedModel, stock: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, module: Any, name: str,
    calls: tuple[int, ...], tier: str,
) -> None:  # fmt: skip
    cache, real, count = make(model, tier, beta=0.0), getattr(module, name), [0]
    told: list[str] = []

    def sometimes(*args: Any, **kwargs: Any) -> Launch:
        count[0] += 1
        return (broken_launch if count[0] - 1 in calls else real)(*args, **kwargs)

    def attempt(act: Callable[[], Any]) -> Any:
        past = cache.get_seq_length()
        for _ in range(2 * len(calls)):
            try:
                return act()
            except WorkerError as error:
                told.append(str(error))
                assert {layer.get_seq_length() for layer in cache.layers} == {past}
        return act()

    monkeypatch.setattr(module, name, sometimes)
    got = converse(model, cache, attempt)
    want = converse(stock, DynamicCache(config=stock.config))
    assert torch.allclose(got, want, atol=5e-5)
    assert 2 <= len(told) <= len(calls)  # of layers that fail at once one tells
    assert all("of layer" in text or "in layer" in text for text in told)
    assert all("leave" in text and "to the CPU" in text and UNDONE in text for text in told)


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


@pytest.mark.slow
@TIERS
def test_threads_that_are_killed_are_replaced(model: PreTrainedModel, tier: str) -> None:
    cache, want, steps = make(model, tier, threads=2), converse(model, make(model, tier)), [0]
    worker = cache.settings.worker

    def attempt(act: Callable[[], Any]) -> Any:
        steps[0] += 1
        if steps[0] % 7 == 3:
            for _ in range(2):
                worker._queue.put(None)
            while worker.alive():
                time.sleep(0.01)
        return act()

    assert torch.equal(converse(model, cache, attempt), want)


def test_a_job_that_hangs_is_given_up_in_time(model: PreTrainedModel) -> None:
    cache, (ids, mask) = make(model, "split"), prompt(1, 191)
    feed(model, cache, ids, mask, (0, 150, 151))
    cache.settings.worker.delay, cache.settings.worker.timeout = 5.0, 0.3
    with pytest.raises(WorkerError, match=r"layer \d+.*: not done in time"):
        feed(model, cache, ids, mask, range(151, 192))


@pytest.mark.parametrize(
    ("tier", "host_dtype"),
    [
        ("one", None),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("split", "int8"), ("one", "int8"), ("split", None))),
    ],
)
def test_memory_that_nobody_wrote_is_never_read(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tier: str, host_dtype: str | None
) -> None:
    make_slab, make_set = host_pool.host_empty, ResidentSet.__init__

    def poisoned_slab(*args: Any, **kwargs: Any) -> torch.Tensor:
        slab = make_slab(*args, **kwargs)
        return slab.fill_(float("nan") if slab.is_floating_point() else 255)

    def poisoned_set(self: ResidentSet, *args: Any) -> None:
        make_set(self, *args)
        self.pool.fill_(float("nan"))

    want = converse(model, make(model, tier, host_dtype=host_dtype))
    for module in (host_pool, token_mass):
        monkeypatch.setattr(module, "host_empty", poisoned_slab)
    monkeypatch.setattr(ResidentSet, "__init__", poisoned_set)
    assert torch.equal(converse(model, make(model, tier, host_dtype=host_dtype)), want)


@TIERS
def test_sinks_that_are_padding_are_not_kept(model: PreTrainedModel, stock: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 140)
    mask[:, 30:40] = 0
    cuts, whole = (0, *range(110, 141)), DynamicCache(config=stock.config)
    got = feed(model, make(model, tier, beta=0.0, sinks=20), ids, mask, cuts)
    want = feed(stock, whole, ids, mask, cuts)
    assert all(torch.allclose(one, other, atol=5e-5) for one, other in zip(got[1:], want[1:], strict=True))
    strict = make(model, tier, beta=1e9, sinks=20)
    feed(model, strict, ids, mask, (0, 110))
    strict.drain()
    lists = hybrid_layers(strict)[0].state.now.retained
    for row, first in enumerate((0, int(mask[1].argmax()))):
        kept = [t for t in range(first, first + 20) if mask[row, t] and t < 64]
        assert lists.positions[2 * row, : lists.counts[2 * row]].tolist() == kept


@pytest.mark.parametrize("tier", ["one", pytest.param("split", marks=pytest.mark.slow)])
def test_an_answer_may_outgrow_what_there_was_room_for(
    model: PreTrainedModel, stock: PreTrainedModel, tier: str
) -> None:
    """Averages have room for 1024 tokens at first."""
    given, cuts = prompt(1, 1065), (0, *range(990, 1066))
    cache = make(model, tier, beta=0.0, window=16)
    got = torch.cat(feed(model, cache, *given, cuts)[1:], 1)
    want = torch.cat(feed(stock, DynamicCache(config=stock.config), *given, cuts)[1:], 1)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert all(layer.state.now.evicted * BLOCK > 1024 for layer in hybrid_layers(cache))


# --- what it reports --------------------------------------------------------------------------------------------------


@TIERS
def test_statistics_are_those_of_the_lists(model: PreTrainedModel, tier: str) -> None:
    cache, short = make(model, tier), make(model, tier)
    assert cache.stats().as_dict()["kept_share"] is None
    feed(model, short, *prompt(2, 30), (0, 30))
    short.drain()
    assert short.stats().as_dict()["kept_share"] is None  # nothing has left the window
    converse(model, cache)
    cache.drain()
    stats, valid = cache.stats(), cache.settings.padding.valid
    for layer, row in zip(hybrid_layers(cache), stats.layers, strict=True):
        lists, stop = layer.state.now.retained, layer.state.now.evicted * BLOCK
        counts = lists.counts.reshape(2, 2).sum(0)
        assert row.kept_share_by_head == pytest.approx((counts / (valid[:, :stop] != 0).sum()).tolist())
        assert 0 < min(row.kept_share_by_head) <= max(row.kept_share_by_head) < 1
        left = [(tokens - layer.index) // BLOCK for tokens in (110, 150, 180, 240)]  # layers take turns
        assert (row.reevaluations, row.evictions) == (2, left[1] - left[0] + left[3] - left[2])
        assert min(row.eviction_seconds, row.reevaluation_seconds) > 0
        assert row.context_bytes == used_bytes(lists.pool) == int(lists.block_counts.sum()) * 2 * BLOCK * 16 * 4
        assert row.salience_bytes > 2 * 4 * 240 * 4
    whole, table = stats.as_dict(), stats.table()
    for name in ("evictions", "context_bytes"):
        assert whole[name] == sum(getattr(row, name) for row in stats.layers)
    kept = [share for row in stats.layers for share in row.kept_share_by_head]
    assert whole["kept_share"] == pytest.approx(sum(kept) / len(kept))
    assert whole["layers"][0]["kept_share_by_head"] == stats.layers[0].kept_share_by_head
    assert "kept" in "".join(table.splitlines()[2:5])
    p99 = f"p99 {1000 * whole['time_between_tokens']['p99']:.1f}"
    for text in (f"{whole['kept_share']:.3f}", f"{min(kept):.2f}–{max(kept):.2f}"):
        assert text in table
    for text in (p99, f"{whole['evictions']} evictions", "8 reevaluations"):
        assert text in table.splitlines()[-1]
    cache.reset()
    assert cache.stats().as_dict()["context_bytes"] == 0


def test_times_are_those_of_decisions(model: PreTrainedModel) -> None:
    """And not of what happens until the next token arrives."""
    cache = make(model, "one")
    feed(model, cache, *prompt(1, 150), (0, 150))
    for layer in hybrid_layers(cache):
        layer.state._job[0].result()
    seconds = [layer.state._job[1].seconds for layer in hybrid_layers(cache)]
    cache.drain()
    assert [row.reevaluation_seconds for row in cache.stats().layers] == seconds
    assert min(seconds) > 0


def test_beams_share_lists(model: PreTrainedModel) -> None:
    (ids, mask), cache = prompt(1, 330), make(model, "one", beta=0.0)
    feed(model, cache, ids, mask, (0, 300))
    cache.drain()
    one = cache.stats().as_dict()["context_bytes"]
    cache.batch_repeat_interleave(3)
    assert cache.stats().as_dict()["context_bytes"] == one
    feed(model, cache, ids + torch.arange(3)[:, None], mask.expand(3, -1), range(300, 331))
    assert one < cache.stats().as_dict()["context_bytes"] < 2 * one
