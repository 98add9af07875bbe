"""Drafts are verified as the policy would decode them: the tokens and all that is remembered, whatever is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache

BLOCK = 8
NEW = 34
PROMPT = 70
SMALL: dict[str, Any] = {"budget": 48, "sinks": 8, "recent": 8, "block_size": BLOCK}
AHEAD = SMALL | {"lookahead": "attend", "synchronous_layers": (0,)}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"block_size": BLOCK}),
    "window": ("window", {"budget": 48, "sinks": 8, "block_size": BLOCK}),
    "off": ("scout", SMALL | {"lookahead": "off"}),
    "select": ("scout", SMALL | {"lookahead": "select", "synchronous_layers": (0, 1)}),
    "attend": ("scout", AHEAD | {"recent": 0, "recall": 1}),
    "attend, all resident": ("scout", AHEAD | {"attend_resident": "all"}),
    "int8": ("scout", AHEAD | {"host_dtype": "int8"}),
    "the paper's": ("scout", AHEAD | {"digest": "quest", "join": "raw", "smoothing": 0.0, "recall": 3}),
}
TIERS = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 48}}


class Drafter:
    """In place of an assistant: the right continuation, with mistakes, in pieces of many lengths."""

    requires_model_outputs = False

    def __init__(self, right: torch.Tensor, most: int = 12, mistakes: float = 0.2) -> None:
        self.right, self.most, self.mistakes = right, most, mistakes
        self.generator = torch.Generator().manual_seed(3)
        self.drafted: list[int] = []

    def get_candidates(self, ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        have, total = ids.shape[1], self.right.shape[1]
        count = min(int(torch.randint(0, self.most + 1, (1,), generator=self.generator)), total - 1 - have)
        drafts = self.right[:, have : have + max(count, 0)].clone()
        wrong = torch.rand(drafts.shape, generator=self.generator) < self.mistakes
        drafts[wrong.to(drafts.device)] += 1
        self.drafted.append(drafts.shape[1])
        return torch.cat([ids, drafts % 150], 1), None

    def update_candidate_strategy(self, *_: Any) -> None:
        """Nothing is learnt."""


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def generate(model: PreTrainedModel, cache: Any, ids: torch.Tensor, new: int = NEW, **options: Any) -> Any:
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


def drafted(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, cache: Any, ids: torch.Tensor, right: torch.Tensor
) -> tuple[Any, Drafter]:
    """Generate with drafts that are mostly those of `right`."""
    drafter = Drafter(right)
    with monkeypatch.context() as patch:
        patch.setattr(model, "_get_candidate_generator", lambda **_: drafter, raising=False)
        out = generate(model, cache, ids, right.shape[1] - ids.shape[1], prompt_lookup_num_tokens=3)
    return out, drafter


def remembered(cache: HybridCache) -> list[dict[str, Any]]:
    """All that later tokens may depend on, beside K and V."""
    rows = []
    for layer in cache.layers:
        store, resident, clock = layer.store, layer.resident, getattr(layer.state, "clock", None)
        row = {"length": store.length, "sealed": store.sealed, "packed": store._packed, "unplaced": layer.unplaced}
        if clock is not None:
            row |= {"since": clock.since, "ratio": clock.ratio, "steps": layer.state.steps}
        if resident is not None:
            known = store.num_blocks
            row |= {"block_of": resident.block_of, "slot_of": resident.slot_of[:, :, :known], "known": resident.known}
            row |= {"worth": resident.worth[:, :, : int(resident.known)]}
        rows.append(row)
    return rows


def assert_same(got: HybridCache, want: HybridCache, atol: float) -> None:
    for a, b in zip(remembered(got), remembered(want), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(value.float(), b[name].float(), atol=atol, equal_nan=True), name
            else:
                assert value == b[name], name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_change_nothing(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, policy: str, tier: str) -> None:
    name, knobs = POLICIES[policy]
    ids, _ = prompt(1, PROMPT if policy != "int8" else 160)  # none but old blocks are packed
    # A block that has lost its slot to a rejected draft comes back from the host, where it may be packed by now.
    atol = 1e-2 if policy == "int8" and tier == "split" else 1e-4
    alone, helped = (HybridCache(llama, name, **knobs, **TIERS[tier]) for _ in range(2))
    want = generate(llama, alone, ids)
    got, drafter = drafted(monkeypatch, llama, helped, ids, want.sequences)
    assert torch.equal(got.sequences, want.sequences)
    assert torch.allclose(torch.cat(got.logits), torch.cat(want.logits), atol=atol)
    assert sum(drafter.drafted) > NEW  # some were rejected
    assert len(drafter.drafted) < NEW - 8  # most were not
    if name != "full":  # which takes drafts in like any other tokens: they decide nothing
        assert_same(helped, alone, atol)
