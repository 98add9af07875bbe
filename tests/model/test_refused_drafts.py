"""Drafts that cannot be attended one by one, and layers that share keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.test_drafts import BLOCK, SMALL, feed
from tiny import DEVICE, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention import interface as function


def test_what_cannot_be_attended_one_by_one_is_refused(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompt(1, 40)
    cache = HybridCache(llama, **SMALL)
    cache.activate_past_recording()
    feed(llama, cache, ids[:, :30], mask, 1)
    dense = torch.ones(1, 1, 4, 34, dtype=torch.bool, device=ids.device).tril(30)
    with torch.no_grad(), pytest.raises(ValueError, match="an attention mask of their own"):
        llama(ids[:, 30:34], attention_mask=dense, past_key_values=cache, logits_to_keep=4)
    assert cache.get_seq_length() == 30
    with torch.no_grad():  # without drafts such a mask is welcome
        llama(ids[:, 30:34], attention_mask=dense, past_key_values=cache)
    for argument in ("position_ids", "logits_to_keep"):
        monkeypatch.setattr(cache._watch, "arguments", cache._watch.arguments - {argument})
        with pytest.raises(ValueError, match=f"takes no {argument}"):
            cache.activate_past_recording()
        cache.reset()  # nothing is cached that a forward could repeat
    HybridCache(llama, "full").activate_past_recording()


class Shared:
    """Two layers that attend the same keys."""

    def __init__(self, llama: PreTrainedModel, policy: str, **knobs: Any) -> None:
        self.cache = HybridCache(llama, policy, **knobs)
        self.layer, self.module = self.cache.layers[0], llama.model.layers[0].self_attn
        generator = torch.Generator().manual_seed(0)
        self.qkv = [torch.randn(1, heads, 34, 16, generator=generator).to(DEVICE) for heads in (4, 2, 2)]

    def attend(self, first: int, stop: int, times: int = 2) -> list[torch.Tensor]:
        q, k, v = (x[:, :, first:stop] for x in self.qkv)
        tagged = self.layer.update(k, v)
        return [function.hybrid_sparse_attention(self.module, q, *tagged, None)[0] for _ in range(times)]


def test_drafts_of_layers_that_share_keys_and_values_are_refused(llama: PreTrainedModel) -> None:
    """Such a layer would attend when the layer that owns the blocks has gone through all drafts."""
    for policy, knobs in (("scout", SMALL), ("full", {})):
        shared = Shared(llama, policy, **knobs)
        shared.attend(0, 30, times=1)
        shared.layer.settings.drafts.count = 3
        if policy == "full":
            torch.testing.assert_close(*shared.attend(30, 34))
        else:
            with pytest.raises(ValueError, match="layers that share keys and values"):
                shared.attend(30, 34)


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize(
    ("policy", "knobs"), [("h2o", {"heavy": 0.5, "recent": 0.5}), ("infinigen", {"alpha": float("inf"), "share": 1})]
)
def test_a_shared_token_is_taken_in_once(llama: PreTrainedModel, policy: str, knobs: dict[str, Any], tier: str) -> None:
    """The second layer finds the token where the first one has put it."""
    shared = Shared(llama, policy, tier=tier, block_size=BLOCK, **knobs)
    shared.attend(0, 30, times=1)
    for at in range(30, 33):
        torch.testing.assert_close(*shared.attend(at, at + 1))
    if policy == "infinigen":
        assert shared.layer.state.count == 33
    else:
        numbers = shared.layer.state.kept.position[0, 0].tolist()
        assert len(set(numbers)) == len(numbers) == 31
