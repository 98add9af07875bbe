"""The host partial of HGCA with two memories: launches are kept from step to step, and made anew where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.attend_tokens import RetainedHostPartial

BLOCK, PROMPT, APPEND = 16, 170, 40
STEPS = 3 * BLOCK


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
def test_launches_are_kept_while_no_block_comes_or_leaves(
    monkeypatch: pytest.MonkeyPatch, rescue: int, beta: float
) -> None:
    """And compute what new ones do, whether some tokens are retained or none.

    Behind a prompt, an append, a crop of steps, and one across the append. Lists grow, and a row is padded.
    """
    made, make = [0], RetainedHostPartial.make_launches

    def counted(self: RetainedHostPartial, scores: Any) -> Any:
        made[0] += 1
        return make(self, scores)

    monkeypatch.setattr(RetainedHostPartial, "make_launches", counted)
    turns = [(PROMPT, STEPS), (APPEND, STEPS), (-9, 20), (-107, 20)]
    kept, layers = converse(2, turns, rescue=rescue, beta=beta)
    some = made[0]
    monkeypatch.setattr(RetainedHostPartial, "_launches", lambda self, scores, make: make(scores))
    new, _ = converse(2, turns, rescue=rescue, beta=beta)
    assert torch.equal(kept, new)
    assert 0 < 3 * some < made[0] - some <= layers * len(new)
