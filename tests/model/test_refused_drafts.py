"""Refusal of drafts that cannot be attended one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.test_drafts import BLOCK, SMALL, feed
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention import interface as function


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


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

    known = cache._watch.arguments
    monkeypatch.setattr(cache._watch, "arguments", known - {"position_ids"})
    with pytest.raises(ValueError, match="takes no position_ids"):
        cache.activate_past_recording()
    cache.reset()
    cache.activate_past_recording()  # nothing is cached that a forward could repeat
    monkeypatch.setattr(cache._watch, "arguments", known - {"logits_to_keep"})
    with pytest.raises(ValueError, match="takes no logits_to_keep"):
        cache.activate_past_recording()
    HybridCache(llama, "full").activate_past_recording()


def test_layers_that_share_keys_and_values_are_refused(llama: PreTrainedModel) -> None:
    """Such a layer would attend when the layer that owns the blocks has gone through all drafts."""
    module = llama.model.layers[0].self_attn
    for policy, knobs in (("scout", SMALL), ("full", {})):
        cache = HybridCache(llama, policy, **knobs)
        layer = cache.layers[0]
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 34, 16, generator=generator).to(prompt(1, 1)[0].device) for heads in (4, 2, 2))
        function.hybrid_sparse_attention(module, q[:, :, :30], *layer.update(k[:, :, :30], v[:, :, :30]), None)
        layer.settings.drafts.count = 3
        tagged = layer.update(k[:, :, 30:], v[:, :, 30:])
        own = function.hybrid_sparse_attention(module, q[:, :, 30:], *tagged, None)[0]
        if policy == "full":
            again = function.hybrid_sparse_attention(module, q[:, :, 30:], *tagged, None)[0]
            assert torch.allclose(again, own, atol=1e-5)
        else:
            with pytest.raises(ValueError, match="layers that share keys and values"):
                function.hybrid_sparse_attention(module, q[:, :, 30:], *tagged, None)


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize(
    ("policy", "knobs"), [("h2o", {"heavy": 0.5, "recent": 0.5}), ("infinigen", {"alpha": float("inf"), "share": 1})]
)
def test_a_shared_token_is_taken_in_once(llama: PreTrainedModel, policy: str, knobs: dict[str, Any], tier: str) -> None:
    """Two layers attend the same keys: the second one finds the token where the first one has put it."""
    module, device = llama.model.layers[0].self_attn, prompt(1, 1)[0].device
    cache = HybridCache(llama, policy, tier=tier, block_size=BLOCK, **knobs)
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 33, 16, generator=generator).to(device) for heads in (4, 2, 2))
    function.hybrid_sparse_attention(module, q[:, :, :30], *layer.update(k[:, :, :30], v[:, :, :30]), None)
    for at in range(30, 33):
        tagged = layer.update(k[:, :, at : at + 1], v[:, :, at : at + 1])
        own, again = (function.hybrid_sparse_attention(module, q[:, :, at : at + 1], *tagged, None)[0] for _ in "12")
        torch.testing.assert_close(again, own)
    if policy == "infinigen":
        assert layer.state.count == 33
        torch.testing.assert_close(layer.state.partial[:, :, :33], k @ layer.state.basis, atol=1e-5, rtol=1e-5)
    else:
        numbers = layer.state.kept.position[0, 0].tolist()
        assert len(set(numbers)) == len(numbers) == 31
