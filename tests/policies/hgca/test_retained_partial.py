"""The host partial of HGCA with two memories: launches are kept from step to step, and made anew where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.cpu.launch import Launch
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.attend_tokens import RetainedHostPartial

BLOCK, PROMPT, APPEND = 16, 170, 40
STEPS = 3 * BLOCK


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, ...]]:
    """All launches, in the order in which they are made."""
    found: list[tuple[Launch, ...]] = []
    make = RetainedHostPartial.make_launches

    def noting(self: RetainedHostPartial, scores: Any) -> tuple[Launch, ...]:
        found.append(make(self, scores))
        return found[-1]

    monkeypatch.setattr(RetainedHostPartial, "make_launches", noting)
    return found


def converse(batch: int, turns: list[tuple[int, int]], **knobs: Any) -> tuple[torch.Tensor, int]:
    """Logits `[steps, B, V]` of decode steps, and the number of layers. Rows after the first are padded.

    A turn appends tokens first, or below 0 crops them, and then decodes steps.
    """
    model, length, logits = tiny_model("llama"), 0, []
    cache = HybridCache(model, "hgca", tier="split", window=60, block_size=BLOCK, **knobs)
    ids, padding = prompt(batch, PROMPT)
    mask = torch.nn.functional.pad(padding, (0, 500), value=1)
    ids = torch.cat([ids, prompt(batch, 500, 2)[0]], 1)
    for change, steps in turns:
        if change < 0:
            cache.crop(change)
        begin = length if change > 0 else length + change
        length += change
        found = feed(model, cache, ids, mask, sorted({begin, *range(length, length + steps + 1)}))
        logits += [out[:, -1] for out in found[-steps:]]
        length += steps
    return torch.stack(logits), len(list(hybrid_layers(cache)))


@pytest.mark.parametrize(("rescue", "beta"), [(0, 3.0), (24, 3.0), (24, 1e6)])
def test_kept_launches_compute_what_new_ones_do(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, rescue: int, beta: float
) -> None:
    """Whether some tokens are retained or none: behind a prompt, an append, a crop of steps, and one across the append.

    Lists grow, and a row is padded.
    """
    turns = [(PROMPT, STEPS), (APPEND, STEPS), (-9, 20), (-107, 20)]
    kept, layers = converse(2, turns, rescue=rescue, beta=beta)
    first = len(made)
    monkeypatch.setattr(RetainedHostPartial, "_launches", lambda self, scores, make: make(scores))
    new, _ = converse(2, turns, rescue=rescue, beta=beta)
    assert torch.equal(kept, new)
    assert 0 < 3 * first < len(made) - first <= layers * len(new)


def test_launches_are_made_when_a_block_comes_or_leaves(made: list[Any]) -> None:
    _, layers = converse(1, [(PROMPT, STEPS)], rescue=24, beta=3.0)
    assert layers * STEPS // BLOCK < len(made) <= layers * (2 * STEPS // BLOCK + 2)
