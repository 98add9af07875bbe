"""A `DynamicCache` prefilled elsewhere is taken over, and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_exactness import POLICIES, assert_equal, knobs_of
from tiny import ONE_MEMORY, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache

BLOCK = 16
PROMPT = 75
STEPS = 40
TIERS: dict[str, dict[str, Any]] = {"one": ONE_MEMORY, "split": {"tier": "split", "resident": 4 * BLOCK}}


def prefill(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run a prompt and return the next token `[B, 1]`."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    return out.logits[:, -1].argmax(-1, keepdim=True)


def decode(
    model: PreTrainedModel, cache: Any, token: torch.Tensor, mask: torch.Tensor, steps: int = STEPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and logits after `token`; `mask` covers what is cached."""
    tokens, logits = [], []
    with torch.no_grad():
        for _ in range(steps):
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            positions = mask.sum(-1, keepdim=True) - 1
            out = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            logits.append(out.logits[:, -1])
            token = logits[-1].argmax(-1, keepdim=True)
            tokens.append(token)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


@pytest.fixture(scope="module")
def oracle() -> dict[Any, Any]:
    return {}


def stock_run(oracle: dict[Any, Any], family: str, batch: int) -> Any:
    """A model, a filled DynamicCache of it, its next token and mask, and what the stock model says after it."""
    if (family, batch) not in oracle:
        ids, mask = prompt(batch, PROMPT)
        stock = tiny_model(family, "sdpa")
        filled = DynamicCache(config=stock.config)
        token = prefill(stock, filled, ids, mask)
        again = DynamicCache(config=stock.config)
        prefill(stock, again, ids, mask)
        oracle[family, batch] = tiny_model(family), filled, token, mask, decode(stock, again, token, mask)
    return oracle[family, batch]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_decoding_goes_on_exactly(oracle: dict[Any, Any], family: str, policy: str, batch: int, tier: str) -> None:
    model, filled, token, mask, want = stock_run(oracle, family, batch)
    name, knobs = knobs_of(policy)
    cache = HybridCache.from_cache(
        filled, model, name, attention_mask=mask, block_size=BLOCK, prefill_tile=32, **TIERS[tier], **knobs
    )
    assert cache.get_seq_length() == PROMPT
    assert_equal(decode(model, cache, token, mask), want)
    assert filled.get_seq_length() == PROMPT  # the cache that was taken over is as it was


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_and_back(oracle: dict[Any, Any], family: str, tier: str) -> None:
    model, filled, token, mask, want = stock_run(oracle, family, 3)
    knobs = {"budget": 256, "sinks": 16, "recent": 0, "block_size": BLOCK, "prefill_tile": 32, **TIERS[tier]}
    cache = HybridCache.from_cache(filled, model, attention_mask=mask, **knobs)
    back = cache.to_dynamic()
    for mine, theirs in zip(back.layers, filled.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert mine.get_seq_length() == theirs.get_seq_length()
    half = decode(model, cache, token, mask, STEPS // 2)
    longer = torch.cat([mask, torch.ones_like(half[0])], 1)
    back = cache.to_dynamic()
    stock = tiny_model(family, "sdpa")
    rest = decode(stock, back, half[0][:, -1:], longer, STEPS // 2)
    assert_equal((torch.cat([half[0], rest[0]], 1), torch.cat([half[1], rest[1]], 1)), want)
    more = decode(model, cache, half[0][:, -1:], longer, STEPS // 2)  # the cache itself goes on, too
    assert_equal((torch.cat([half[0], more[0]], 1), torch.cat([half[1], more[1]], 1)), want)
