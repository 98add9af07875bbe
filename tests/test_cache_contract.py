"""Transformers' contract of a cache in any version: its properties and changes of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny import in_memory, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.cache.layer import HybridLayer

Models = dict[tuple[str, str], PreTrainedModel]

BLOCK = 8
TIERS: dict[str, dict[str, Any]] = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 48}}
SCOUT: dict[str, Any] = {"budget": 48, "sinks": 8, "recent": 8, "block_size": BLOCK}


@pytest.fixture(scope="module")
def models() -> Models:
    return {(f, a): tiny_model(f, a) for f in ("llama", "gemma3") for a in ("hybrid_sparse", "sdpa")}


ASKED: dict[str, Callable[[Any], Any]] = {
    "get_seq_length": lambda cache: [cache.get_seq_length(i) for i in (0, 1, 3, 99)],
    "get_max_length": lambda cache: [cache.get_max_length(i) for i in (None, 0, 1, 99)],
    "get_mask_sizes": lambda cache: [tuple(map(int, cache.get_mask_sizes(q, i))) for q in (1, 7) for i in (0, 1, 99)],
    "get_query_offset": lambda cache: [cache.get_query_offset(), cache.get_query_offset(1)],
    "is_croppable": lambda cache: cache.is_croppable,
    "is_initialized": lambda cache: cache.is_initialized,
    "is_sliding": lambda cache: cache.is_sliding,
    "is_linear": lambda cache: cache.is_linear,
    "is_dummy": lambda cache: cache.is_dummy,
    "is_recording_past": lambda cache: [cache.is_recording_past(0)],
    "get_max_cache_shape": lambda cache: cache.get_max_cache_shape(1),
    "max_cache_len": lambda cache: cache.max_cache_len,
}
"""What a `HybridCache` answers as `DynamicCache` does."""

DONE = {
    "update", "reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices",
    "activate_past_recording", "offload", "prefetch", "early_initialization", "is_compileable",
    "batch_size", "max_batch_size",
}  # fmt: skip
"""What is tried elsewhere here, or is asked of it below."""

LINEAR = {
    "has_previous_state", "get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state",
    "update_indexer",
}  # fmt: skip
"""What goes to stock layers alone."""


def test_every_name_of_the_contract_is_known() -> None:
    """A version that asks a cache for more fails here first."""
    names = {name for name in dir(Cache) if not name.startswith("_")}
    assert names <= set(ASKED) | DONE | LINEAR


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_answers_as_dynamic_cache_does(models: Models, family: str, tier: str) -> None:
    model, stock = models[family, "hybrid_sparse"], models[family, "sdpa"]
    ours, theirs = HybridCache(model, **SCOUT, **TIERS[tier]), DynamicCache(config=stock.config)
    ids, mask = prompt(2, 40)

    def compare(rows: int) -> None:
        assert ours.batch_size == rows  # of which DynamicCache knows nothing
        assert len(ours) == len(theirs) == 4
        assert not ours.is_compileable
        for name in sorted(set(ASKED) & set(dir(Cache))):
            assert ASKED[name](ours) == ASKED[name](theirs), name

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # names that are to go
        compare(-1)
        for start, stop in ((0, 30), (30, 31), (31, 40)):
            for each, cache in ((model, ours), (stock, theirs)):
                each(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            compare(2)
        for cache in (ours, theirs):
            cache.batch_repeat_interleave(2)
        compare(4)
        for cache in (ours, theirs):
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
        compare(3)
        if family == "llama":  # sliding windows that are full were not told to record
            for cache in (ours, theirs):
                cache.crop(-3)
                cache.crop(0)
            compare(3)
    for layer in ours.layers:
        if isinstance(layer, HybridLayer):  # blocks are moved by the policy alone
            layer.offload()
            layer.prefetch()
    ours.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    ours.reset()
    assert ours.get_seq_length() == 0
    assert not ours.is_initialized
    assert ours.batch_size == -1


FIXED: dict[str, Any] = {"budget": 0.3, "sinks": 16, "local": 32, "resident": None}
PREDICTOR = ConstantPredictor(budget0=0.2, slope=0.02, sinks=16, local=32)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"block_size": BLOCK}),
    "window": ("window", {"budget": 48, "sinks": 8, "block_size": BLOCK}),
    "submean": ("scout", SCOUT | {"lookahead": "off"}),
    "quest": ("scout", SCOUT | {"lookahead": "select", "digest": "quest", "synchronous_layers": (0,)}),
    "hgca": ("hgca", {"window": 40, "resident": None, "block_size": 16}),
    "hgca, int8": ("hgca", {"window": 40, "resident": None, "block_size": 16, "host_dtype": "int8"}),
    "fixed_hybrid": ("fixed_hybrid", FIXED | {"host_dtype": "int8"}),
    "fluxion": ("fluxion", {"predictor": PREDICTOR, "resident": None}),
    "h2o": ("h2o", {"heavy": 0.2, "recent": 0.2, "block_size": BLOCK, "resident": None}),
    "infinigen": ("infinigen", {"alpha": 1.0, "block_size": BLOCK, "resident": None}),
    "policy quest": ("quest", {"budget": 48, "sinks": 8, "resident": None}),
    "mean, int8": ("scout", SCOUT | {"lookahead": "off", "digest": "mean", "host_dtype": "int8"}),
}


def _crop(cache: HybridCache) -> list[int]:
    cache.crop(0)
    cache.crop(-1)
    cache.crop(torch.tensor(-1))
    return [0, 1, 2]


def _reorder(cache: HybridCache) -> list[int]:
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    return [2, 2, 0]


def _repeat(cache: HybridCache) -> list[int]:
    cache.batch_repeat_interleave(2)
    return [0, 0, 1, 1, 2, 2]


def _select(cache: HybridCache) -> list[int]:
    cache.batch_select_indices(torch.tensor([2, 0]))
    return [2, 0]


def _mask(cache: HybridCache) -> list[int]:
    cache.batch_select_indices(torch.tensor([False, True, True]))
    return [1, 2]


CHANGES = {"crop": _crop, "reorder": _reorder, "repeat": _repeat, "select": _select, "mask": _mask}


def combinations() -> list[Any]:
    """Every change with every tier; all kinds with all changes only in the long form."""
    rows = []
    for i, change in enumerate(CHANGES):
        for j, tier in enumerate(TIERS):
            for k, kind in enumerate(KINDS):
                if (change, kind) == ("crop", "h2o"):
                    continue  # it has evicted for good, and begins anew after a crop
                quick = k == (i + 2 * j) % len(KINDS) or (kind == "hgca" and (i + j) % 2)
                rows.append(pytest.param(change, kind, tier, marks=() if quick else pytest.mark.slow))
    return rows


def feed(model: PreTrainedModel, cache: HybridCache, ids: torch.Tensor, mask: torch.Tensor, stop: int) -> torch.Tensor:
    """Feed the tokens up to `stop` that are not cached yet: a prompt of 150, then one by one."""
    start = cache.get_seq_length()
    return torch.cat(tiny.feed(model, cache, ids, mask, (start, *range(max(start + 1, 150), stop + 1))), 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("change", "kind", "tier"), combinations())
def test_rows_go_on_as_they_would_have(models: Models, change: str, kind: str, tier: str) -> None:
    """Recalls are still on their way when the rows change; a row's blocks, digests and padding go where it goes."""
    model = models["llama", "hybrid_sparse"]
    (name, knobs), (ids, mask) = KINDS[kind], prompt(3, 166)
    extra: dict[str, Any] = {"recall": 1} if name == "scout" else {}
    if name == "hgca" and change == "crop":  # tokens that are cropped have been weights in averages
        extra["beta"] = 0.0
    alone, changed = (HybridCache(model, name, **(TIERS[tier] | in_memory(tier, knobs) | extra)) for _ in range(2))
    want = feed(model, alone, ids, mask, 166)[:, -6:]
    changed.settings.worker.delay = 0.005
    feed(model, changed, ids, mask, 162 if change == "crop" else 160)
    rows = CHANGES[change](changed)
    assert changed.get_seq_length() == 160
    assert changed.batch_size == len(rows)
    got = feed(model, changed, ids[rows], mask[rows], 166)
    # With two memories a block that comes to its slot anew comes from the host, where it may be packed by now; and what
    # was packed when a token came stays so when it goes: after a crop, rounding may choose another block in one step.
    off = (got - want[rows]).abs().amax(-1)
    if knobs.get("host_dtype") == "int8" and (tier == "split" or change == "crop"):
        assert (off > 0.05).sum() <= (change == "crop")
    else:
        assert off.max() < 1e-4


def test_a_positive_crop_is_refused_and_one_of_too_many_empties(models: Models) -> None:
    model = models["llama", "hybrid_sparse"]
    cache = HybridCache(model, **SCOUT)
    cache.crop(0)
    with torch.no_grad():
        model(prompt(1, 20)[0], past_key_values=cache)
    with pytest.raises(ValueError, match="positive"):
        cache.crop(3)
    assert cache.get_seq_length() == 20
    cache.crop(-21)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(prompt(1, 20)[0], past_key_values=cache).logits
        assert torch.allclose(again, model(prompt(1, 20)[0]).logits, atol=1e-4)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kept", [0, 5])
def test_another_text_after_a_crop_finds_nothing_of_the_first(models: Models, tier: str, kept: int) -> None:
    """Not in the digests' statistics either, by which blocks are chosen."""
    model = models["llama", "hybrid_sparse"]
    first, second = prompt(1, 90)[0], prompt(1, 90, seed=7)[0]
    first[:, :kept] = second[:, :kept]

    knobs = {**SCOUT, **TIERS[tier], "digest": "submean"}
    fresh, used = HybridCache(model, **knobs), HybridCache(model, **knobs)
    mask = torch.ones_like(first)
    tiny.feed(model, used, first, mask, (0, *range(80, 91)))
    used.crop(kept - used.get_seq_length())
    got, want = (
        tiny.feed(model, cache, second, mask, (cache.get_seq_length(), *range(80, 91))) for cache in (used, fresh)
    )
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", ["full", "quest"])
def test_rows_that_part_behind_a_full_block_write_into_blocks_of_their_own(
    models: Models, tier: str, kind: str
) -> None:
    """The block that their next tokens go to may be there already, and is then shared while it is empty."""
    name, knobs = KINDS[kind]
    knobs = TIERS[tier] | in_memory(tier, knobs) | ({"budget": 4096} if name == "scout" else {})
    ours = HybridCache(models["llama", "hybrid_sparse"], name, **knobs)
    theirs, rows = DynamicCache(), torch.tensor([2, 2, 0])
    ids, next_ids = prompt(3, 8 * BLOCK)[0], torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        for cache, model in ((ours, models["llama", "hybrid_sparse"]), (theirs, models["llama", "sdpa"])):
            for part in ids.split((7 * BLOCK, *BLOCK * [1]), 1):
                model(part, past_key_values=cache)
            cache.reorder_cache(rows)
            model(next_ids, past_key_values=cache)
    for mine, other in zip(ours.to_dynamic().layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys)
        torch.testing.assert_close(mine.values, other.values)
