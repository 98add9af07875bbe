"""Policies that fetch to the device what a step wants: `infinigen`, `quest`, and `full` with `host="fetch"`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache, InfiniGen
from hf_offload.attention.step import Step
from hf_offload.attention.step_split import SplitStep
from hf_offload.blocks.resident_set import ResidentSet

LENGTH, STEPS = 300, 12


def decode(model: PreTrainedModel, policy: str, rows: int = 1, **options: Any) -> tuple[HybridCache, torch.Tensor]:
    """A cache that has generated some tokens, and these."""
    cache = HybridCache(model, policy, block_size=16, **options)
    ids, mask = prompt(rows, LENGTH)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False)
    return cache, out[:, LENGTH:]


# --- infinigen -------------------------------------------------------------------------------------------------------


@pytest.fixture
def recalls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each recall: scores of its step's query with all keys `[B, Hkv, G, T]`, numbers and counts."""
    seen, bring = [], Step.bring_tokens

    def record(step: Step, numbers: torch.Tensor, counts: torch.Tensor) -> Any:
        key = torch.cat([key for _, key, _ in step.earlier()], 2)
        query = torch.as_tensor(step.query).view(*key.shape[:2], -1, key.shape[3])
        padding = torch.from_numpy(step.store.padding.valid[:, None, None, : key.shape[2]] == 0)
        seen.append((step.scores.of(query @ key.transpose(2, 3)).masked_fill(padding, -1e9), numbers, counts))
        return bring(step, numbers, counts)

    monkeypatch.setattr(Step, "bring_tokens", record)
    return seen


def test_with_all_channels_scores_are_real(model: PreTrainedModel, recalls: list[Any]) -> None:
    decode(model, "infinigen", 2, partial=1.0, share=1.0, alpha=0.7)
    assert len(recalls) == 4 * (STEPS - 1)
    for scores, numbers, counts in recalls:
        wanted = ((scores - scores.amax(-1, keepdim=True)).amax(2) > -0.7).long()
        got = torch.zeros_like(wanted)
        meant = (torch.arange(numbers.shape[2]) < counts[..., None]).long()
        got.scatter_add_(2, numbers, meant)
        assert (got != wanted).sum() <= 1  # at the very threshold
        assert len(set(counts.flatten().tolist())) > 1  # as many as each head takes


def test_few_channels_find_most_of_what_is_wanted(model: PreTrainedModel, recalls: list[Any]) -> None:
    decode(model, "infinigen", partial=0.5, share=0.2)
    found = []
    for scores, numbers, counts in recalls:
        assert int(counts.max()) <= 63  # a fifth of at most 311
        for line, best in enumerate(scores.amax(2).topk(10, -1).indices[0].tolist()):
            found.append(len({*numbers[0, line, : counts[0, line]].tolist()} & {*best}) / 10)
    assert sum(found) / len(found) > 0.6  # a fifth by chance


@pytest.mark.parametrize("host_dtype", [None, "int8"])
def test_infinigen_attends_with_two_memories_what_it_does_with_one(
    model: PreTrainedModel, host_dtype: str | None
) -> None:
    options = {"alpha": 1.0, "host_dtype": host_dtype, "prefill_tile": 64}
    (one, want), (two, got) = (decode(model, "infinigen", 3, tier=tier, **options) for tier in ("one", "split"))
    assert torch.equal(got, want)
    assert one.stats().as_dict()["recall_bytes"] == two.stats().as_dict()["cpu_ratio"] == 0
    assert two.stats().as_dict()["recall_bytes"] > 0


@pytest.mark.parametrize("lookahead", [True, False])
def test_layers_behind_the_first_choose_one_ahead(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, recalls: list[Any], lookahead: bool
) -> None:
    early, before = set(), InfiniGen.before_layer
    monkeypatch.setattr(
        InfiniGen, "before_layer", lambda policy, step: early.add(step.layer.index) or before(policy, step)
    )
    decode(model, "infinigen", lookahead=lookahead)
    assert early == ({1, 2, 3} if lookahead else set())
    assert len(recalls) == 4 * (STEPS - 1)  # what came early was not asked for again


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_step_that_fails_leaves_no_directions(tier: str) -> None:
    """Of a layer that was looked ahead to: they would be those of a token that is taken back."""
    model, given, found = tiny_model("llama"), prompt(1, 101), []
    for fails in (False, True):
        cache = HybridCache(model, "infinigen", tier=tier, block_size=16)
        feed(model, cache, *given, (0, 100, 101))
        for layer in cache.layers:
            layer.last_queries = None  # as in a cache that was taken over: a step's own query gives the directions
        cache.crop(-1)
        if fails:
            handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError), torch.no_grad():
                model(torch.full((1, 1), 149), past_key_values=cache)
            handle.remove()
        found += feed(model, cache, *given, (100, 101))
    assert torch.equal(*found)


# --- quest, and full with host="fetch" -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "resident"), [({}, 96), ({"sinks": 16, "recent": 32, "join": "max"}, 112), ({"host_dtype": "int8"}, 64)]
)
def test_quest_attends_with_two_memories_what_it_does_with_one(
    model: PreTrainedModel, knobs: dict[str, Any], resident: int
) -> None:
    """Also with more slots than the budget, and where what is chosen has no room: the rest passes by."""
    _, want = decode(model, "quest", 3, budget=96, tier="one", **knobs)
    two, got = decode(model, "quest", 3, budget=96, tier="split", resident=resident, prefill_tile=32, **knobs)
    assert torch.equal(got, want)
    assert two.stats().as_dict()["cpu_ratio"] == 0


def test_each_step_of_quest_attends_the_budget_and_fetches_what_is_not_resident(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, attend, moved = [], SplitStep.attend_device, []

    def count(step: SplitStep, device: Any) -> Any:
        seen.append(bool((device.counts == 6).all() and (device.slots >= 0).all()))
        return attend(step, device)

    monkeypatch.setattr(SplitStep, "attend_device", count)
    for resident in (256, 96):
        cache, _ = decode(model, "quest", 2, budget=96, tier="split", resident=resident)
        moved.append(cache.stats().as_dict()["recall_blocks"])
    assert seen == [True] * 2 * 4 * (STEPS - 1)
    assert 0 < moved[0] < moved[1]


@pytest.mark.parametrize(("by_kernel", "tile"), [(True, 32), (False, 4096)])
def test_full_fetches_every_byte(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, by_kernel: bool, tile: int
) -> None:
    if by_kernel:
        monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    _, want = decode(model, "full", 2, tier="one")
    cache, got = decode(model, "full", 2, host="fetch", tier="split", resident=64, prefill_tile=tile)
    assert torch.equal(got, want)
    total = cache.stats().as_dict()
    blocks = sum(-(-length // 16) - 4 for length in range(LENGTH + 1, LENGTH + STEPS))
    assert total["recall_blocks"] == 4 * 2 * 2 * blocks  # layers, rows, KV heads
    assert total["cpu_ratio"] == 0
