"""Batches of mixed lengths: each row as if alone, and only its own blocks read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tiny import tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import ConstantPredictor
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadProperties

SINKS, LOCAL = 16, 32
LENGTHS = (512, 64, 40, 304)
"""Of the rows: much on the host, one block, none, some; the padding of all but the third are whole blocks."""


@dataclass(frozen=True)
class Watched(ConstantPredictor):
    """A constant predictor that keeps the features that it gets, where they are made by torch: with two memories."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def predict(self, features: torch.Tensor) -> HeadProperties:
        self.seen.append(features.clone())
        return super().predict(features)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def batch_of(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, longest]` of rows that end together; a row holds the same ids in every batch."""
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest)
    for row, length in enumerate(lengths):
        words = torch.randint(3, 150, (1024,), generator=torch.Generator().manual_seed(length))
        ids[row, longest - length :], mask[row, longest - length :] = words[:length], 1
    return ids, mask.long()


def decode(model: PreTrainedModel, cache: object, lengths: tuple[int, ...], steps: int = 4) -> torch.Tensor:
    """Logits `[B, steps, V]` of the last tokens, one by one."""
    ids, mask = batch_of(lengths)
    positions, prompt = (mask.cumsum(-1) - 1).clamp(min=0), max(lengths) - steps
    logits = []
    with torch.no_grad():
        for first, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, max(lengths)))]:
            out = model(
                input_ids=ids[:, first:stop], attention_mask=mask[:, :stop], position_ids=positions[:, first:stop],
                past_key_values=cache,
            )  # fmt: skip
            logits.append(out.logits[:, -1:])
    return torch.cat(logits[1:], 1)


@pytest.mark.parametrize("knobs", [{"tier": "one"}, {"tier": "split"}, {"tier": "split", "schedule": "priority"}])
def test_a_budget_of_one_is_full_attention_for_every_row(llama: PreTrainedModel, knobs: dict[str, str]) -> None:
    full = decode(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config), LENGTHS)
    predictor = ConstantPredictor(sinks=SINKS, local=LOCAL)
    got = decode(llama, hf_offload.HybridCache(llama, "fluxion", predictor=predictor, **knobs), LENGTHS)
    torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


def test_features_of_a_row_are_those_that_it_has_alone(llama: PreTrainedModel) -> None:
    together = Watched(digest="quest", sinks=SINKS, local=LOCAL)
    decode(llama, hf_offload.HybridCache(llama, "fluxion", predictor=together, tier="split"), LENGTHS)
    for row in (0, 3):  # the others alone have nothing to predict
        alone = Watched(digest="quest", sinks=SINKS, local=LOCAL)
        decode(llama, hf_offload.HybridCache(llama, "fluxion", predictor=alone, tier="split"), LENGTHS[row : row + 1])
        for mine, theirs in zip(together.seen, alone.seen, strict=True):
            torch.testing.assert_close(mine[row], theirs[0], rtol=1e-3, atol=1e-3)
    hosts = torch.stack(together.seen)[..., FEATURES.index("host_length")][:, :, 0]
    assert hosts[0].tolist() == [448.0, 0.0, 0.0, 240.0]


def test_only_the_blocks_of_a_row_are_looked_at(llama: PreTrainedModel) -> None:
    predictor = ConstantPredictor(0.5, sinks=SINKS, local=LOCAL)
    cache = hf_offload.HybridCache(llama, "fluxion", predictor=predictor, granularities=(16,), tier="split")
    decode(llama, cache, (512, 64, 512, 112), steps=1)
    choice = cache.layers[0].host_partial.selector.chosen
    there = choice.end - choice.first.clip(max=choice.end)
    assert there.tolist() == [28, 0, 28, 3]
    for row, blocks in enumerate(there.tolist()):
        assert (choice.runs[row] == -(-blocks // 2)).all()
        for head, count in enumerate(choice.counts[row].tolist()):
            chosen = choice.blocks[row, head, :count]
            assert -(-blocks // 2) <= count <= blocks
            assert ((chosen >= choice.first[row]) & (chosen < choice.end)).all()
