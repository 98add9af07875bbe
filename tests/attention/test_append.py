"""Short appends, which attend cached blocks in place, and longer ones, which gather them into tiles."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from breaking import UNDONE, broken_launch
from pairwise import covering
from test_families import build
from tiny import prompt, tiny_model
from transformers import DynamicCache

from hf_offload import HybridCache, WorkerError
from hf_offload.attention import decode, prefill_host
from hf_offload.attention.decode import FEW_QUERIES, LONG
from hf_offload.blocks import memory
from hf_offload.blocks.block_store import BlockStore
from hf_offload.cpu.launch import Launch

TILES: dict[str, Any] = {"block_size": 16, "prefill_tile": 48, "tier": "split", "resident": 96}


def turns(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of the tokens behind the first cut, taken in from cut to cut."""
    found = []
    with torch.no_grad():
        for first, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
            positions = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, first:]
            given: dict[str, Any] = {"attention_mask": mask[:, :stop], "position_ids": positions}
            found.append(model(ids[:, first:stop], past_key_values=cache, **given).logits)
    return torch.cat(found[1:], 1)


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


@pytest.mark.parametrize("host_dtype", [None, "int8"])
def test_slow_threads_change_no_logit(host_dtype: str | None) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(3, 400)
    found = []
    for delay in (0.0, 0.003):
        cache = HybridCache(model, "full", host_dtype=host_dtype, **TILES)
        cache.settings.worker.delay = delay
        found.append(turns(model, cache, ids, mask, [150, 270, 271, 272, 330]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "tokens", "trims"), [("llama", LONG - 1, 0), ("llama", LONG, 2), ("gemma3", LONG, 1)]
)
def test_long_appends_trim_the_heap(monkeypatch: pytest.MonkeyPatch, family: str, tokens: int, trims: int) -> None:
    """In one of four layers that a cache holds in blocks; of Gemma 3's four layers these are two."""
    model, found = tiny_model(family), []
    monkeypatch.setattr(memory, "trim_heap", lambda: found.append(1))
    with torch.no_grad():
        for _ in range(2):
            model(prompt(1, tokens)[0], past_key_values=HybridCache(model, "scout", tier="one"))
    assert len(found) == trims


def test_a_gather_that_fails_in_a_thread_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, _ = prompt(1, 300)
    cache, sound = (HybridCache(model, "full", host_dtype="int8", **TILES) for _ in range(2))  # packed: in tiles
    real, calls = BlockStore.gathering, [0]

    def later(*args: Any) -> Launch:
        calls[0] += 1
        return real(*args) if calls[0] < 9 else broken_launch()

    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        model(ids[:, :200], past_key_values=sound)
        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, "gathering", later)
            with pytest.raises(WorkerError, match=r"gathering tokens \d+ to \d+ failed: .*" + UNDONE):
                model(ids[:, 200:], past_key_values=cache)
        assert cache.get_seq_length() == 200
        got = model(ids[:, 200:], past_key_values=cache).logits
        assert torch.equal(got, model(ids[:, 200:], past_key_values=sound).logits)


@pytest.mark.parametrize("tier", ["one", "split"])
def test_attention_that_leaves_tasks_undone_can_be_repeated(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    model = tiny_model("llama")
    ids, _ = prompt(1, 300)
    cache = HybridCache(model, "full", block_size=16, tier=tier)
    real, calls = prefill_host.prefill_attention, [0]

    def later(*args: Any, **kwargs: Any) -> Launch:
        calls[0] += 1
        return real(*args, **kwargs) if calls[0] != 3 else broken_launch()

    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(prefill_host, "prefill_attention", later)
            with pytest.raises(MemoryError, match=UNDONE):
                model(ids[:, 200:], past_key_values=cache)
        assert cache.get_seq_length() == 200
        got = model(ids[:, 200:], past_key_values=cache).logits
        assert torch.allclose(got, model(ids).logits[:, 200:], atol=5e-5)


@pytest.mark.slow
def test_a_short_append_reads_packed_blocks() -> None:
    model = tiny_model("llama")
    ids, mask = prompt(2, 400)
    found = []
    for host_dtype in (None, "int8"):
        cache = HybridCache(model, "full", block_size=16, host_dtype=host_dtype)
        found.append(turns(model, cache, ids, mask, [390, 395]))
    assert 0 < (found[1] - found[0]).abs().max() < 0.05 * found[0].abs().max()


def test_a_long_prompt_in_float16_is_told_of_bfloat16_once() -> None:
    decode._warn_of_float16.cache_clear()
    for dtype, length, warned in ((torch.float16, 1000, 0), (torch.bfloat16, 1001, 0), (torch.float16, 1001, 1)):
        model, ids = tiny_model("llama").to(dtype), prompt(1, length)[0]
        with warnings.catch_warnings(record=True) as found, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                model(ids, past_key_values=HybridCache(model, "full"), logits_to_keep=1)
        told = [each for each in found if "several times as long to read a prompt in float16" in str(each.message)]
        assert len(told) == (warned if ids.device.type == "cpu" else 0)
