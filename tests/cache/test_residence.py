"""`resident="auto"`: how much is resident on a card of so much memory, pretended on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import feed, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache, Scout
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.cache import layer as layers
from hf_offload.cache import residence

BLOCK = 16
SPLIT: dict[str, Any] = {"tier": "split", "block_size": BLOCK}
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
LEAST = 144 // BLOCK  # slots: one and a half budgets
SLOT = 4 * 2 * 2 * BLOCK * 16 * 4  # bytes of a slot, all layers and KV heads, one row
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "scout": SCOUT,
    "quest": {"budget": 96},
    "fixed_hybrid": {"sinks": 16, "local": 32},
}


class Card:
    """A card of so many bytes, some of which other programs have.

    Args:
        nbytes: all of its memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.others = nbytes, 0
        self.caches: list[HybridCache] = []

    def free(self, device: torch.device) -> int:
        """As `free_device_memory`."""
        sets = [layer.resident for cache in self.caches for layer in cache.transaction.hybrid]
        return self.nbytes - self.others - sum(each.nbytes for each in sets if each is not None)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Card]:
    """A function that puts in a card with room for so many slots of one row."""

    def put_in(slots: float) -> Card:
        there = Card(residence.ROOM + int(slots * SLOT / residence.SHARE))
        monkeypatch.setattr(residence, "free_device_memory", there.free)
        return there

    return put_in


def cache_on(card: Card, model: PreTrainedModel, policy: Any = "scout", **knobs: Any) -> HybridCache:
    if policy == "scout":
        knobs = SCOUT | knobs
    made = HybridCache(model, policy, **SPLIT, **knobs)
    card.caches.append(made)
    return made


def run(model: PreTrainedModel, cache: HybridCache, length: int, steps: int, first: int = 0) -> torch.Tensor:
    """Logits `[1, steps, V]` of steps behind a prompt or append; tokens from `first` on are new."""
    ids, mask = prompt(1, length + steps)
    return torch.cat(feed(model, cache, ids, mask, [first, *range(length, length + steps + 1)])[1:], 1)


def full(model: PreTrainedModel, length: int, steps: int) -> torch.Tensor:
    """Logits of full attention, all of which is resident."""
    return run(model, HybridCache(model, "full", **SPLIT, resident=512), length, steps)


def step(model: PreTrainedModel, cache: HybridCache, at: int = 204, rows: int = 1) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(prompt(1, 208)[0][:, at : at + 1].expand(rows, 1), past_key_values=cache).logits
    return logits


def slots(cache: HybridCache) -> set[int]:
    found = [layer.resident for layer in cache.transaction.hybrid]
    return {each.slots for each in found if each is not None}


def dense(cache: HybridCache) -> float:
    share = cache.stats().as_dict()["dense_share"]
    assert share is not None
    return float(share)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_is_resident_and_attended_where_it_fits(
    policy: str, llama: PreTrainedModel, card: Callable[[float], Card]
) -> None:
    """Far beyond every budget, and bit for bit what `full` gives."""
    there = card(100)
    want = full(llama, 200, 20)
    made = cache_on(there, llama, policy, **POLICIES[policy])
    assert torch.equal(run(llama, made, 200, 20), want)
    assert slots(made) == {128 if policy == "full" else 14 + 14 // 4}
    assert dense(made) == 1.0
    assert made.stats().as_dict()["recalls"] == 0
    assert not made.stats().as_dict()["cpu_ratio"]


@pytest.mark.parametrize("policy", ["scout", "quest"])
def test_all_is_resident_but_chosen_from(policy: str, llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    """With `dense=False`; what is chosen does not depend on where it lies."""
    there = card(100)
    knobs = POLICIES[policy] | ({"attend_resident": "selected", "lookahead": "off"} if policy == "scout" else {})
    want = run(llama, HybridCache(llama, policy, **{**SPLIT, "resident": 144}, **knobs), 200, 20)
    made = cache_on(there, llama, policy, **knobs, dense=False)
    assert torch.allclose(run(llama, made, 200, 20), want, atol=1e-4)
    assert slots(made) == {17}
    assert dense(made) == 0.0
    assert made.stats().as_dict()["recalls"] == 0


@pytest.mark.parametrize("policy", ["scout", "quest"])
def test_beyond_the_card_it_is_as_without_one(
    policy: str, llama: PreTrainedModel, card: Callable[[float], Card]
) -> None:
    knobs = POLICIES[policy]
    want = run(llama, HybridCache(llama, policy, **SPLIT, **knobs), 200, 20)
    made = cache_on(card(10), llama, policy, **knobs)
    assert torch.equal(run(llama, made, 200, 20), want)
    assert slots(made) == {LEAST}
    assert dense(made) == 0.0


def test_others_on_the_card(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    there = card(100)
    there.others = 112 * SLOT
    made = cache_on(there, llama)
    run(llama, made, 200, 4)
    assert slots(made) == {LEAST}
    there.others = 0  # they have gone: the next turn asks again
    run(llama, made, 220, 4, first=204)
    assert slots(made) == {15 + 15 // 4}


def test_a_choice_begins_where_attending_takes_longer(
    llama: PreTrainedModel, card: Callable[[float], Card], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_offload.policies.base.DENSE_BYTES", 208 * SLOT // 4 // BLOCK)
    made = cache_on(card(100), llama, lookahead="off")
    run(llama, made, 200, 20)
    assert dense(made) == 8 / 20


def test_growing_past_the_slots(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    want = full(llama, 150, 70)
    made = cache_on(card(100), llama)
    assert torch.equal(run(llama, made, 150, 70), want)
    assert slots(made) == {15 + 15 // 4}  # of 13 slots the last is full with 208 tokens
    assert dense(made) == 1.0


def test_growing_past_the_card(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    """Exact as long as all fits, then near to that."""
    made = cache_on(card(14), llama, lookahead="off")
    want = full(llama, 150, 70)
    found = run(llama, made, 150, 70)
    exact = int(dense(made) * 70)
    assert 40 < exact < 70
    assert torch.equal(found[:, :exact], want[:, :exact])
    assert slots(made) == {LEAST}
    assert torch.cosine_similarity(found, want, dim=-1).min() > 0.5


def test_more_rows_ask_again(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    made = cache_on(card(40), llama)
    run(llama, made, 200, 4)
    assert slots(made) == {17}
    for rows, resident in ((2, {17}), (4, {LEAST})):
        made.batch_repeat_interleave(2)
        found = step(llama, made, rows=rows)
        made.crop(-1)
        assert slots(made) == resident
        assert torch.equal(found, found[:1].expand_as(found))
    made.reset()
    run(llama, made, 200, 4)
    assert slots(made) == {17}


@pytest.mark.parametrize("failing", [0, 3])
@pytest.mark.parametrize(("times", "left"), [(1, 12), (2, LEAST), (3, LEAST)])
def test_memory_that_runs_out(
    times: int, left: int, failing: int, llama: PreTrainedModel, card: Callable[[float], Card],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In each layer: half of it, then one and a half budgets; where those lack it is an error, and may go on later."""
    want = full(llama, 300, 12)
    cache, failures = cache_on(card(200), llama, lookahead="off"), [times]

    def runs_out(store: Any, wanted: int, mirror: Any, made: Any = ResidentSet) -> ResidentSet:
        large = sum(layer.resident.slots > LEAST for layer in cache.transaction.hybrid if layer.resident is not None)
        if wanted and failures[0] and (large >= failing or failures[0] < times):
            failures[0] -= 1
            raise torch.OutOfMemoryError("no memory")
        result: ResidentSet = made(store, wanted, mirror)
        return result

    monkeypatch.setattr(layers, "ResidentSet", runs_out)
    told = pytest.raises(torch.OutOfMemoryError, match="no memory") if times > 2 else nullcontext()
    with pytest.warns(RuntimeWarning, match=r"device memory ran out with .* resident tokens"), told:
        found = run(llama, cache, 300, 12)
    assert failures == [0]
    if times > 2:
        found = run(llama, cache, 301, 11, first=300)
    assert slots(cache) == {left}
    assert torch.cosine_similarity(found, want[:, -found.shape[1] :], dim=-1).min() > 0.3


def test_a_fork_takes_what_is_there(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    """A copy of all blocks where there is room for it, else one and a half budgets."""
    for size, resident in ((40, {17}), (20, {LEAST})):
        there = card(size)
        made = cache_on(there, llama)
        run(llama, made, 200, 4)
        there.caches.append(made.fork())
        rows = [step(llama, cache) for cache in there.caches]
        assert slots(there.caches[1]) == resident
        assert torch.equal(*rows) == (resident == {17})


@pytest.mark.parametrize("before", [100, 5])
def test_a_loaded_cache_asks_its_own_card(
    before: int, llama: PreTrainedModel, card: Callable[[float], Card], tmp_path: Any
) -> None:
    made = cache_on(card(before), llama)
    run(llama, made, 200, 4)
    made.save(tmp_path / "saved")
    want = step(llama, made)
    for size, resident in ((100, {17}), (5, {LEAST})):
        there = card(size)
        loaded = HybridCache.load(tmp_path / "saved", llama)
        there.caches.append(loaded)
        found = step(llama, loaded)
        assert slots(loaded) == resident
        assert before < 100 or torch.equal(found, want) == (size == 100)


def test_an_append_takes_the_memory_that_it_needs(llama: PreTrainedModel, card: Callable[[float], Card]) -> None:
    there = card(30)
    made = cache_on(there, llama)
    want = full(llama, 200, 4)
    assert torch.equal(run(llama, made, 200, 4), want)
    there.caches = [made]
    there.others = there.free(torch.device("cpu"))  # nothing is left
    given_back: list[set[int]] = []
    hook = llama.model.layers[2].register_forward_pre_hook(lambda *_: given_back.append(slots(made)))
    ids, _ = prompt(1, 240)
    with torch.no_grad():
        llama(ids[:, 204:230], past_key_values=made)
    hook.remove()
    assert given_back == [{0}]


def test_numbers_decide_alone_and_some_policies_have_no_use_for_more(
    llama: PreTrainedModel, card: Callable[[float], Card]
) -> None:
    for knobs in ({"resident": 144}, {"device_budget": "9 blocks"}):
        made = cache_on(card(100), llama, **knobs)
        run(llama, made, 200, 2)
        assert slots(made) == {9}
    for policy in ("hgca", "h2o", "infinigen", "window"):
        assert cache_on(card(100), llama, policy).settings.residence is None
    with pytest.raises(ValueError, match="resident='all' is no number of tokens; use one, or \"auto\""):
        HybridCache(llama, "scout", tier="split", resident="all")
    with pytest.raises(ValueError, match=r'dense=.* is not True, False or "auto"'):
        Scout(dense="yes")
