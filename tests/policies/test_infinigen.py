"""InfiniGen: speculated scores, fetched tokens, attention with the real query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache, InfiniGen
from hf_offload.attention.step import Step

LENGTH, STEPS = 300, 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def decode(model: PreTrainedModel, rows: int = 1, **options: Any) -> tuple[HybridCache, torch.Tensor]:
    """A cache that has generated some tokens, and these."""
    cache = HybridCache(model, "infinigen", block_size=16, **options)
    ids, mask = prompt(rows, LENGTH)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False)
    return cache, out[:, LENGTH:]


@pytest.fixture
def recalls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each recall: the step, scores of its query with all keys `[B, Hkv, G, T]`, numbers and counts."""
    seen, bring = [], Step.bring_tokens

    def record(step: Step, numbers: torch.Tensor, counts: torch.Tensor) -> Any:
        key = torch.cat([key for _, key, _ in step.earlier()], 2)
        query = torch.as_tensor(step.query).view(*key.shape[:2], -1, key.shape[3])
        scores = step.scores.of(query @ key.transpose(2, 3))
        scores = scores.masked_fill(
            torch.from_numpy(step.store.padding.valid[:, None, None, : key.shape[2]] == 0), -1e9
        )
        seen.append((step, scores, numbers, counts))
        return bring(step, numbers, counts)

    monkeypatch.setattr(Step, "bring_tokens", record)
    return seen


def test_with_all_channels_scores_are_real(model: PreTrainedModel, recalls: list[Any]) -> None:
    decode(model, 2, partial=1.0, share=1.0, alpha=0.7)
    assert len(recalls) == 4 * (STEPS - 1)
    for _, scores, numbers, counts in recalls:
        wanted = ((scores - scores.amax(-1, keepdim=True)).amax(2) > -0.7).long()
        got = torch.zeros_like(wanted)
        meant = (torch.arange(numbers.shape[2]) < counts[..., None]).long()
        got.scatter_add_(2, numbers, meant)
        assert (got != wanted).sum() <= 1  # at the very threshold
        assert len(set(counts.flatten().tolist())) > 1  # as many as each head takes


def test_few_channels_find_most_of_what_is_wanted(model: PreTrainedModel, recalls: list[Any]) -> None:
    decode(model, partial=0.5, share=0.2)
    found = []
    for _, scores, numbers, counts in recalls:
        best = scores.amax(2).topk(10, -1).indices
        assert int(counts.max()) <= 63  # a fifth of at most 311
        for line in range(2):
            chosen = set(numbers[0, line, : counts[0, line]].tolist())
            found.append(len(chosen & set(best[0, line].tolist())) / 10)
    assert sum(found) / len(found) > 0.6  # a fifth by chance


@pytest.mark.parametrize("host_dtype", [None, "int8"])
def test_two_memories_attend_what_one_does(model: PreTrainedModel, host_dtype: str | None) -> None:
    options = {"alpha": 1.0, "host_dtype": host_dtype, "prefill_tile": 64}
    one, want = decode(model, 3, tier="one", **options)
    two, got = decode(model, 3, tier="split", **options)
    assert torch.equal(got, want)
    assert one.stats().as_dict()["recall_bytes"] == 0
    total = two.stats().as_dict()
    assert total["cpu_ratio"] == 0
    assert total["recall_bytes"] > 0


@pytest.mark.parametrize("lookahead", [True, False])
def test_layers_behind_the_first_choose_one_ahead(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, recalls: list[Any], lookahead: bool
) -> None:
    early, before = set(), InfiniGen.before_layer
    monkeypatch.setattr(
        InfiniGen, "before_layer", lambda policy, step: early.add(step.layer.index) or before(policy, step)
    )
    decode(model, lookahead=lookahead)
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
