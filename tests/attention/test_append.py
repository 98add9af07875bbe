"""Short appends, which attend cached blocks in place, and longer ones, which gather them into tiles."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from breaking import UNDONE, broken_launch
from pairwise import covering
from test_families import build
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache

from hf_offload import HybridCache, WorkerError
from hf_offload.attention import decode, prefill_host
from hf_offload.attention.decode import FEW_QUERIES
from hf_offload.blocks.block_store import BlockStore
from hf_offload.cpu.launch import Launch

TILES: dict[str, Any] = {"block_size": 16, "prefill_tile": 48, "tier": "split", "resident": 96}


def turns(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of the tokens behind the first cut, taken in from cut to cut."""
    return torch.cat(feed(model, cache, ids, mask, [0, *cuts, ids.shape[1]])[1:], 1)


@pytest.mark.parametrize(
    ("family", "rows", "tier"), covering(["llama", "gemma3", "gemma2", "gpt_oss"], [1, 3], ["one", "split"])
)
def test_appends_of_any_length_are_exact(family: str, rows: int, tier: str) -> None:
    make = build if family in ("gemma2", "gpt_oss") else tiny_model
    ids, mask = prompt(rows, 170)
    cuts = [90, 92, 93, 93 + FEW_QUERIES, 94 + 2 * FEW_QUERIES, 130]
    eager, ours = make(family, "eager"), make(family, "hybrid_sparse")
    want = turns(eager, DynamicCache(config=eager.config), ids, mask, [90])
    memory: dict[str, Any] = {"tier": tier, **({"resident": 96} if tier == "split" else {})}
    cache = HybridCache(ours, "scout", budget=512, sinks=16, recent=0, block_size=16, **memory)
    got = turns(ours, cache, ids, mask, cuts)
    assert (got - want).abs().max() < 1e-5 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize(
    ("owner", "name", "sound", "knobs"),
    [
        (BlockStore, "gathering", 8, {"host_dtype": "int8", **TILES}),  # packed: in tiles
        (prefill_host, "prefill_attention", 2, {"block_size": 16, "tier": "one"}),
        (prefill_host, "prefill_attention", 2, {"block_size": 16, "tier": "split"}),
    ],
    ids=["gather", "one", "split"],
)
def test_an_append_that_fails_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, sound: int, knobs: dict[str, Any]
) -> None:
    """In a thread that gathers a tile, or in attention to blocks where they lie."""
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    cache, other = (HybridCache(model, "full", **knobs) for _ in range(2))
    real, calls = getattr(owner, name), itertools.count()

    def later(*args: Any, **kwargs: Any) -> Launch:
        return real(*args, **kwargs) if next(calls) != sound else broken_launch()

    with torch.no_grad():
        for each in (cache, other):
            model(ids[:, :200], past_key_values=each)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, later)
            with pytest.raises((WorkerError, MemoryError), match=UNDONE):
                model(ids[:, 200:], past_key_values=cache)
        assert cache.get_seq_length() == 200
        want = model(ids[:, 200:], past_key_values=other).logits
        assert torch.equal(model(ids[:, 200:], past_key_values=cache).logits, want)


def test_a_long_prompt_in_float16_is_told_of_bfloat16_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MANY_IN_HALF", 60)
    decode._warn_of_float16.cache_clear()
    for dtype, length, warned in ((torch.float16, 60, 0), (torch.float32, 61, 0), (torch.float16, 61, 1)):
        model, ids = tiny_model("llama").to(dtype), prompt(1, length)[0]
        with warnings.catch_warnings(record=True) as found, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                model(ids, past_key_values=HybridCache(model, "full"), logits_to_keep=1)
        told = [each for each in found if "several times as long to read a prompt in float16" in str(each.message)]
        assert len(told) == (warned if ids.device.type == "cpu" else 0)
