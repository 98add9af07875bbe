"""The cache contract of Transformers and its users, through the public API alone.

`tests/generate` tests the tokens of every mode of `generate()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import DEVICE, ONE_MEMORY, SIZES, prompt, spread_weights, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    DynamicCache,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)

import hf_offload
from hf_offload import HybridCache
from hf_offload.attention import interface
from hf_offload.cache.layer import HybridLayer

CPU = pytest.mark.skipif(DEVICE != "cpu", reason="tried on the CPU")
COVERING: dict[str, tuple[str, dict[str, Any]]] = {
    "one memory": ("scout", {"budget": 512, "sinks": 8, "recent": 8, **ONE_MEMORY}),
    "two memories": (
        "scout",
        {"budget": 512, "sinks": 8, "recent": 8, "lookahead": "off", "tier": "split", "resident": 40},
    ),
    "two memories, full": ("full", {"tier": "split", "resident": 40}),
}
"""Caches under which decoding is full attention; with two memories most tokens lie on the host."""

every_cache = pytest.mark.parametrize("kind", COVERING)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def make(model: PreTrainedModel, kind: str) -> HybridCache:
    policy, knobs = COVERING[kind]
    return HybridCache(model, policy, block_size=8, **knobs)


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, after a forward with all of them."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits[:, -1]


def steps(rows: int, count: int, seed: int = 2) -> list[torch.Tensor]:
    """Single tokens `[rows, 1]`."""
    return list(prompt(rows, count, seed)[0].clamp(min=3).split(1, 1))


def same(model: PreTrainedModel, cache: Any, stock: PreTrainedModel, other: Any, count: int = 3, seed: int = 2) -> None:
    """Both caches hold the same tokens, and decoding goes on alike."""
    assert cache.get_seq_length() == other.get_seq_length()
    for token in steps(other.layers[0].keys.shape[0], count, seed):
        torch.testing.assert_close(feed(model, cache, token), feed(stock, other, token), atol=2e-4, rtol=1e-4)


def pair(model: PreTrainedModel, stock: PreTrainedModel, kind: str, rows: int = 3) -> tuple[HybridCache, DynamicCache]:
    """A cache and a stock one after a prompt and two decode steps."""
    mine, other = make(model, kind), DynamicCache(config=stock.config)
    for ids in (prompt(rows, 90)[0].clamp(min=3), *steps(rows, 2, seed=5)):
        feed(model, mine, ids)
        feed(stock, other, ids)
    return mine, other


# --- keys and values --------------------------------------------------------------------------------------------------


@every_cache
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layers_keys_and_values_are_what_is_cached(kind: str, family: str) -> None:
    """What other code reads; it takes empty tensors for an empty cache."""
    mine_model, theirs = tiny_model(family), tiny_model(family, "sdpa")
    mine, other = make(mine_model, kind), DynamicCache(config=theirs.config)
    assert [layer.keys for layer in mine.layers] == [layer.keys for layer in other.layers] == [None] * 4
    for ids in (prompt(3, 90)[0].clamp(min=3), *steps(3, 9)):  # a block of 8 is begun and filled
        feed(mine_model, mine, ids)
        feed(theirs, other, ids)
        for layer, twin in zip(mine.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                torch.testing.assert_close(getattr(layer, name), getattr(twin, name), atol=2e-5, rtol=1e-5)
    for (*both, window), (*twins, wanted) in zip(mine, other, strict=True):
        for got, want in zip(both, twins, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        assert window is wanted is None or torch.equal(window, wanted)
    assert len(mine) == len(other)
    for each in (mine, other):
        with pytest.raises(TypeError, match="not subscriptable"):
            each[0]
    same(mine_model, mine, theirs, other)  # nothing was disturbed


@every_cache
def test_keys_and_values_are_copies(model: PreTrainedModel, stock: PreTrainedModel, kind: str) -> None:
    mine, other = pair(model, stock, kind)
    keys = mine.layers[1].keys
    keys.fill_(torch.nan)
    assert not mine.layers[1].keys.isnan().any()
    with pytest.raises(AttributeError, match="from_cache"):
        mine.layers[1].values = keys
    same(model, mine, stock, other)


def test_a_hook_within_a_forward_reads_the_tokens_so_far(model: PreTrainedModel) -> None:
    """As compression by hooks on the attention does; also before the layer has attended."""
    for kind in COVERING:
        cache, seen = make(model, kind), list[tuple[int, torch.Tensor]]()
        hooks = [
            layer.self_attn.register_forward_hook(
                lambda module, *_, cache=cache, seen=seen: seen.append(
                    (cache.layers[module.layer_idx].get_seq_length(), cache.layers[module.layer_idx].keys)
                )
            )
            for layer in model.model.layers
        ]
        feed(model, cache, prompt(1, 50)[0])
        feed(model, cache, prompt(1, 1)[0])
        for hook in hooks:
            hook.remove()
        assert [(length, keys.shape[2]) for length, keys in seen] == [(50, 50)] * 4 + [(51, 51)] * 4
        assert all(torch.equal(keys, cache.layers[i].keys) for i, (_, keys) in enumerate(seen[4:]))


def test_keys_that_are_announced_are_there(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `update` and the attention function `get_seq_length` counts them, too."""
    cache, seen = make(model, "one memory"), list[tuple[int, torch.Size]]()

    def attend(layer: HybridLayer, *args: Any, **kwargs: Any) -> Any:
        seen.append((layer.get_seq_length(), layer.keys.shape))
        return real(layer, *args, **kwargs)

    real = interface.decode
    monkeypatch.setattr(interface, "decode", attend)
    feed(model, cache, prompt(1, 50)[0])
    feed(model, cache, prompt(1, 1)[0])
    assert seen == [(51, (1, 2, 51, 16))] * 4


def test_another_threads_reading_is_refused_while_the_cache_works(model: PreTrainedModel) -> None:
    cache, told = make(model, "one memory"), list[BaseException]()

    def read() -> None:
        try:
            _ = cache.layers[0].keys
        except RuntimeError as error:
            told.append(error)

    def run(*_: Any) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    feed(model, cache, prompt(1, 50)[0])
    run()
    assert not told
    with model.model.layers[2].mlp.register_forward_pre_hook(run):
        feed(model, cache, prompt(1, 1)[0])
    assert "one thread at a time" in str(told[0])


def test_int8_blocks_are_read_in_the_models_dtype(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "full", block_size=8, host_dtype="int8", **ONE_MEMORY)
    feed(model, cache, prompt(1, 200)[0])
    exact = make(model, "one memory")
    feed(model, exact, prompt(1, 200)[0])
    got, want = cache.layers[0].keys, exact.layers[0].keys
    assert got.dtype == want.dtype == torch.float32
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "mode",
    [
        {}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True},
        {"num_return_sequences": 2, "do_sample": True}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3},
    ],
)  # fmt: skip
def test_generate_reads_no_keys(model: PreTrainedModel, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading would copy the whole context."""
    monkeypatch.setattr(HybridLayer, "gather", lambda self: pytest.fail("keys or values were read"))
    cache = HybridCache(model, "full", block_size=8)
    model.generate(prompt(1, 60)[0], past_key_values=cache, max_new_tokens=6, **{"do_sample": False} | mode)
    assert cache.get_seq_length() > 60


# --- rows and lengths -------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], None]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "reorder, int32": lambda cache: cache.reorder_cache(torch.tensor([1, 2], dtype=torch.int32)),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "repeat, each": lambda cache: cache.batch_repeat_interleave(torch.tensor([2, 1, 1])),
    "select, tuple": lambda cache: cache.batch_select_indices((0, 2)),
    "select, list": lambda cache: cache.batch_select_indices([2, -3]),
    "select, array": lambda cache: cache.batch_select_indices(np.array([1])),
    "select, slice": lambda cache: cache.batch_select_indices(slice(1, None)),
    "mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "mask, list": lambda cache: cache.batch_select_indices([False, True, True]),
    "crop nothing": lambda cache: cache.crop(0),
    "crop": lambda cache: cache.crop(-20),
    "crop, tensor": lambda cache: cache.crop(torch.tensor(-1)),
}
"""What is done to both caches alike."""


@every_cache
def test_changes_are_those_of_stock_caches(model: PreTrainedModel, stock: PreTrainedModel, kind: str) -> None:
    for name, change in CHANGES.items():
        mine, other = pair(model, stock, kind)
        change(mine)
        change(other)
        assert mine.batch_size == other.layers[0].keys.shape[0], name
        same(model, mine, stock, other)


REFUSED: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "reorder, float": (lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0, 2.0])), TypeError, "float32"),
    "reorder, mask": (lambda cache: cache.reorder_cache(torch.tensor([True] * 3)), TypeError, "bool"),
    "reorder, beyond": (lambda cache: cache.reorder_cache(torch.tensor([0, 3])), IndexError, "rows 0 to 2"),
    "select, float": (lambda cache: cache.batch_select_indices([0.0, 1.0]), TypeError, "float32"),
    "select, bytes": (lambda cache: cache.batch_select_indices(torch.ones(3, dtype=torch.uint8)), TypeError, "uint8"),
    "select, text": (lambda cache: cache.batch_select_indices("02"), TypeError, "'02'"),
    "select, nothing": (lambda cache: cache.batch_select_indices(None), TypeError, "None"),
    "select, number": (lambda cache: cache.batch_select_indices(1), ValueError, r"\[rows\]"),
    "select, table": (lambda cache: cache.batch_select_indices([[0, 1]]), ValueError, r"\[1, 2\]"),
    "select, beyond": (lambda cache: cache.batch_select_indices((0, 3)), IndexError, r"\[0, 3\]"),
    "select, none": (lambda cache: cache.batch_select_indices([]), ValueError, "reset"),
    "mask, short": (lambda cache: cache.batch_select_indices([True, False]), ValueError, "2 rows.* holds 3"),
    "mask, long": (lambda cache: cache.batch_select_indices(torch.tensor([True] * 4)), ValueError, "4 rows.* holds 3"),
    "mask, none": (lambda cache: cache.batch_select_indices([False] * 3), ValueError, "reset"),
    "mask, sparse": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True]).to_sparse()),
        TypeError,
        "to_dense",
    ),
    "repeat, often": (lambda cache: cache.batch_repeat_interleave(10**12), ValueError, "from 1 to 715827882"),
    "repeat, half": (lambda cache: cache.batch_repeat_interleave(1.5), TypeError, r"1\.5"),
    "repeat, text": (lambda cache: cache.batch_repeat_interleave("2"), TypeError, "'2'"),
    "repeat, never": (lambda cache: cache.batch_repeat_interleave(0), ValueError, r"\(0\)"),
    "repeat, less": (lambda cache: cache.batch_repeat_interleave(-1), ValueError, r"\(-1\)"),
    "crop, half": (lambda cache: cache.crop(-1.5), TypeError, r"-1\.5"),
    "crop, float tensor": (lambda cache: cache.crop(torch.tensor(-2.0)), TypeError, "-2"),
    "crop, text": (lambda cache: cache.crop("-1"), TypeError, "'-1'"),
    "crop, more": (lambda cache: cache.crop(1), ValueError, "positive"),
    "two rows": (lambda cache: cache.update(*2 * [torch.zeros(2, 2, 1, 16)], 0), ValueError, "3 rows"),
}


@every_cache
def test_what_is_refused_leaves_the_cache_as_it_was(model: PreTrainedModel, stock: PreTrainedModel, kind: str) -> None:
    mine, other = pair(model, stock, kind)
    for change, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            change(mine)
        assert mine.get_seq_length() == 92
    same(model, mine, stock, other)


def test_an_empty_cache_has_no_rows_to_change(model: PreTrainedModel, stock: PreTrainedModel) -> None:
    mine, other = make(model, "one memory"), DynamicCache(config=stock.config)
    for cache in (mine, other):
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([True]))
        cache.batch_repeat_interleave(3)
    mine.crop(-5)  # Transformers 5.17 has no crop of an empty cache
    ids = prompt(2, 20)[0].clamp(min=3)
    torch.testing.assert_close(feed(model, mine, ids), feed(stock, other, ids), atol=2e-4, rtol=1e-4)


@every_cache
@pytest.mark.parametrize("empty", [HybridCache.reset, lambda cache: cache.crop(-1000)], ids=["reset", "crop"])
def test_an_emptied_cache_has_room_for_another_batch(
    model: PreTrainedModel, stock: PreTrainedModel, kind: str, empty: Callable[[Any], None]
) -> None:
    """A crop beyond the length empties, as it does in stock caches."""
    mine, _ = pair(model, stock, kind)
    empty(mine)
    assert (mine.get_seq_length(), mine.batch_size, mine.is_initialized) == (0, -1, False)
    other, ids = DynamicCache(config=stock.config), prompt(2, 50, seed=9)[0].clamp(min=3)
    feed(model, mine, ids)
    feed(stock, other, ids)
    same(model, mine, stock, other)


# --- elsewhere and back -----------------------------------------------------------------------------------------------


@every_cache
def test_a_fork_and_its_origin_go_on_alone(model: PreTrainedModel, stock: PreTrainedModel, kind: str) -> None:
    mine, other = pair(model, stock, kind)
    fork, twin = mine.fork(), mine.to_dynamic()
    same(model, fork, stock, twin, seed=3)
    same(model, mine, stock, other, seed=4)
    mine.reset()
    same(model, fork, stock, twin)


@every_cache
def test_saved_loaded_given_back_and_taken_over(
    model: PreTrainedModel, stock: PreTrainedModel, kind: str, tmp_path: Path
) -> None:
    policy, knobs = COVERING[kind]
    mine, other = pair(model, stock, kind)
    mine.save(tmp_path / "saved")
    loaded = HybridCache.load(tmp_path / "saved", model)
    dynamic = loaded.to_dynamic()
    for ours, theirs in zip(dynamic.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
    taken = HybridCache.from_cache(dynamic, model, policy, block_size=8, **knobs)
    same(model, taken, stock, dynamic)
    same(model, loaded, stock, other)


# --- generate ---------------------------------------------------------------------------------------------------------


def test_early_exit_of_an_enabled_model(stock: PreTrainedModel) -> None:
    """The model drafts with its first layers, of which Transformers tells by the config alone."""
    ids, mask = prompt(1, 40)
    greedy: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = stock.generate(ids, **greedy)
    model, (policy, knobs) = tiny_model("llama"), COVERING["two memories"]
    with hf_offload.enabled(model, policy, block_size=8, **knobs):
        out = model.generate(ids, assistant_early_exit=2, return_dict_in_generate=True, **greedy)
        assert torch.equal(out.sequences, want)
        assert type(out.past_key_values) is HybridCache
        assert out.past_key_values.get_seq_length() >= 51
        assert torch.equal(model.generate(ids, **greedy), want)


WITHOUT: dict[str, PreTrainedConfig] = {
    "gptj": GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8),
    "codegen": CodeGenConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8),
    "gpt_neo": GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    ),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
    "falcon": FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
}


@pytest.mark.parametrize("family", WITHOUT)
def test_models_that_ignore_the_setting_cannot_be_served(family: str) -> None:
    """They compute attention in code of their own: no call helps."""
    model = AutoModelForCausalLM.from_config(WITHOUT[family])
    if model._can_set_attn_implementation():
        pytest.skip("this version of Transformers has the setting for it")
    before = model.config._attn_implementation
    for attempt in (hf_offload.enable, HybridCache):
        with pytest.raises(ValueError, match=r"ignores attn_implementation.* cannot serve it; use DynamicCache"):
            attempt(model)
    assert model.config._attn_implementation == before


# --- compiled ---------------------------------------------------------------------------------------------------------


@CPU
def test_an_enabled_model_with_a_stock_cache_compiles_as_a_whole() -> None:
    """Also while a `HybridCache` of it lives, which a whole graph refuses."""
    torch.compiler.reset()
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, num_key_value_heads=2, head_dim=16)
    model = spread_weights(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    ids, mask = prompt(2, 24)
    later = torch.cat([mask, mask.new_ones(2, 1)], 1)

    def with_stock_caches(run: Callable[..., Any]) -> torch.Tensor:
        logits = []
        for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=32)):
            logits.append(run(ids, attention_mask=mask, past_key_values=cache).logits)
            logits.append(run(ids[:, -1:], attention_mask=later, past_key_values=cache).logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        want = with_stock_caches(model)
        with hf_offload.enabled(model, budget=256):
            alive = HybridCache(model, budget=256)
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            torch.testing.assert_close(with_stock_caches(compiled), want, atol=1e-5, rtol=1e-5)
            with pytest.raises(RuntimeError, match=r"without fullgraph=True"):
                compiled(ids, attention_mask=mask, past_key_values=alive)
    torch.compiler.reset()
