"""`HybridCache(device_budget=...)`: amounts of memory and the resulting resident blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_exactness import assert_equal, decode_logits
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.cache.memory_budget import parse_bytes

BLOCK = 16
SPLIT: dict[str, Any] = {"tier": "split", "block_size": BLOCK}
SCOUT: dict[str, Any] = {"budget": 128, "sinks": 16, "recent": 0}
SLOT = 2 * 2 * BLOCK * 16 * 4  # bytes of a slot of both KV heads of one row, one layer


def take_in(model: PreTrainedModel, cache: HybridCache, rows: int, length: int) -> None:
    ids, mask = prompt(rows, length)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)


def test_amounts() -> None:
    for given, nbytes in (
        (1, 1), ("4096B", 4096), ("3KiB", 3 << 10), ("512MiB", 512 << 20), (" 1.5 GiB ", 3 << 29), ("2gib", 2 << 30),
        ("1TiB", 1 << 40), ("5kB", 5000), ("2.5GB", 2_500_000_000),
    ):  # fmt: skip
        assert parse_bytes("device_budget", given) == nbytes
    for wrong in (0, -5, True, 2e9, None, "", "2", "GiB", "-1GiB", "0MiB", "2 G", "1e9B", "2PiB", "2GiBs"):
        with pytest.raises(ValueError, match=r"device_budget=.* is not an amount of memory.*\"2GiB\""):
            parse_bytes("device_budget", wrong)


def test_contradictions_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="resident=256 and device_budget='1MiB'"):
        HybridCache(llama, device_budget="1MiB", resident=256, tier="split")
    for tier in (None, "one"):
        with pytest.raises(ValueError, match="device_budget='1MiB': with one memory nothing is resident"):
            HybridCache(llama, device_budget="1MiB", tier=tier)
    for few in ("1 block", "100000 blocks"):
        with pytest.raises(ValueError, match=f"device_budget='{few}' is not within"):
            HybridCache(llama, device_budget=few, tier="split")
    with pytest.raises(ValueError, match="device_budget='1MiBi' is not an amount"):
        HybridCache(llama, device_budget="1MiBi", tier="split")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_of_it_is_used_and_no_more(family: str, rows: int) -> None:
    """Half of Gemma's layers are sliding windows, which have no resident set."""
    model, layers = tiny_model(family), 4 if family == "llama" else 2
    for nbytes in (400_000, 400_000 + layers * rows * SLOT):
        cache = HybridCache(model, "full", device_budget=nbytes, **SPLIT)
        take_in(model, cache, rows, 200)
        taken = cache.stats().as_dict()["resident_bytes"]
        assert nbytes - layers * rows * SLOT < taken <= nbytes


def test_digests_of_the_first_tokens_come_out_of_it(llama: PreTrainedModel) -> None:
    for length in (20, 500, 1000):
        cache = HybridCache(llama, "scout", device_budget="400KiB", **SPLIT, **SCOUT)
        take_in(llama, cache, 2, length)
        take_in(llama, cache, 2, 1)  # a token, for which there is more room made
        total = cache.stats().as_dict()
        assert total["digest_bytes"] > 0
        assert total["device_bytes"] == total["resident_bytes"] + total["digest_bytes"]
        assert (400 << 10) - 4 * 2 * SLOT < total["device_bytes"] <= 400 << 10


def test_too_little_names_the_least_and_that_is_enough(llama: PreTrainedModel) -> None:
    ids, mask = prompt(2, 75)
    cache = HybridCache(llama, "scout", device_budget="1KiB", **SPLIT, **SCOUT)
    with pytest.raises(
        ValueError, match=r"device_budget='1KiB'.*lower block_size, sinks, recent or the batch"
    ) as caught:
        take_in(llama, cache, 2, 75)
    assert "4 resident blocks of 16 tokens for each of 2 rows and 2 KV heads" in str(caught.value)
    assert "of digests of 75 tokens" in str(caught.value)
    assert cache.get_seq_length() == 0
    least = int(str(caught.value).partition(" bytes)")[0].rpartition("(")[2])
    with pytest.raises(ValueError, match="is less than"):
        take_in(llama, HybridCache(llama, "scout", device_budget=least - 4, **SPLIT, **SCOUT), 2, 75)
    cache = HybridCache(llama, "scout", device_budget=least, **SPLIT, **(SCOUT | {"budget": 256}))
    stock = tiny_model("llama", "sdpa")
    want = decode_logits(stock, DynamicCache(config=stock.config), ids, mask, None)
    assert_equal(decode_logits(llama, cache, ids, mask, None), want)
    assert cache.layers[0].resident.slots == 4
