"""The cache contract of Transformers and its users, through the public API alone.

`tests/generate` tests the tokens of every mode of `generate()`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def make(model: PreTrainedModel, kind: str) -> HybridCache:
    policy, knobs = COVERING[kind]
    return HybridCache(model, policy, block_size=8, **knobs)


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, after a forward with all of them."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits[:, -1]


def text(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return prompt(rows, tokens, seed)[0].clamp(min=3)


class Pair:
    """A cache and a stock one that take the same tokens in."""

    def __init__(self, model: PreTrainedModel, stock: PreTrainedModel, kind: str, mine: Any = None, other: Any = None):
        self.models = model, stock
        self.mine = make(model, kind) if mine is None else mine
        self.other: Any = DynamicCache(config=stock.config) if other is None else other

    def begin(self) -> Pair:
        """A prompt of three rows and two decode steps."""
        for ids in (text(3, 90), *text(3, 2, seed=5).split(1, 1)):
            self.feed(ids)
        return self

    def feed(self, ids: torch.Tensor) -> list[torch.Tensor]:
        caches = self.mine, self.other
        return [feed(model, cache, ids) for model, cache in zip(self.models, caches, strict=True)]

    def go_on(self, count: int = 3, seed: int = 2) -> None:
        """Both hold the same tokens, and decoding goes on alike."""
        assert self.mine.get_seq_length() == self.other.get_seq_length()
        for token in text(self.other.layers[0].keys.shape[0], count, seed).split(1, 1):
            torch.testing.assert_close(*self.feed(token), atol=2e-4, rtol=1e-4)


@pytest.fixture
def both(model: PreTrainedModel, stock: PreTrainedModel, kind: str) -> Pair:
    return Pair(model, stock, kind).begin()


# --- keys and values --------------------------------------------------------------------------------------------------


@every_cache
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layers_keys_and_values_are_what_is_cached(kind: str, family: str) -> None:
    """What other code reads; it takes empty tensors for an empty cache."""
    both = Pair(tiny_model(family), tiny_model(family, "sdpa"), kind)
    mine, other = both.mine, both.other
    assert [layer.keys for layer in mine.layers] == [layer.keys for layer in other.layers] == [None] * 4
    for ids in (text(3, 90), *text(3, 9, seed=2).split(1, 1)):  # a block of 8 is begun and filled
        both.feed(ids)
        for layer, twin in zip(mine.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                torch.testing.assert_close(getattr(layer, name), getattr(twin, name), atol=2e-5, rtol=1e-5)
    for (*tensors, window), (*twins, wanted) in zip(mine, other, strict=True):
        for got, want in zip(tensors, twins, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        assert window is wanted is None or torch.equal(window, wanted)
    assert len(mine) == len(other)
    for each in (mine, other):
        with pytest.raises(TypeError, match="not subscriptable"):
            each[0]
    both.go_on()  # nothing was disturbed


@every_cache
def test_keys_and_values_are_copies(both: Pair) -> None:
    keys = both.mine.layers[1].keys
    keys.fill_(torch.nan)
    assert not both.mine.layers[1].keys.isnan().any()
    with pytest.raises(AttributeError, match="from_cache"):
        both.mine.layers[1].values = keys
    both.go_on()


def test_a_hook_within_a_forward_reads_the_tokens_so_far(model: PreTrainedModel) -> None:
    """As compression by hooks on the attention does; also before the layer has attended."""
    for kind in COVERING:
        cache, seen = make(model, kind), list[tuple[int, torch.Tensor]]()

        def read(module: Any, *_: Any, cache: HybridCache = cache, seen: list[Any] = seen) -> None:
            layer = cache.layers[module.layer_idx]
            seen.append((layer.get_seq_length(), layer.keys))

        hooks = [layer.self_attn.register_forward_hook(read) for layer in model.model.layers]
        feed(model, cache, text(1, 50))
        feed(model, cache, text(1, 1))
        for hook in hooks:
            hook.remove()
        assert [(length, keys.shape[2]) for length, keys in seen] == [(50, 50)] * 4 + [(51, 51)] * 4
        assert all(torch.equal(keys, cache.layers[i].keys) for i, (_, keys) in enumerate(seen[4:]))


def test_keys_that_are_announced_are_there(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `update` and the attention function `get_seq_length` counts them, too."""
    cache, seen, real = make(model, "one memory"), list[tuple[int, int]](), interface.decode

    def attend(layer: HybridLayer, *args: Any, **kwargs: Any) -> Any:
        seen.append((layer.get_seq_length(), layer.keys.shape[2]))
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(interface, "decode", attend)
    feed(model, cache, text(1, 50))
    feed(model, cache, text(1, 1))
    assert seen == [(51, 51)] * 4


def test_another_threads_reading_is_refused_while_the_cache_works(model: PreTrainedModel) -> None:
    cache, told = make(model, "one memory"), list[BaseException | None]()

    def run(*_: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            told.append(thread.submit(lambda: cache.layers[0].keys).exception())

    feed(model, cache, text(1, 50))
    run()
    with model.model.layers[2].mlp.register_forward_pre_hook(run):
        feed(model, cache, text(1, 1))
    assert told[0] is None
    assert "one thread at a time" in str(told[1])


def test_int8_blocks_are_read_in_the_models_dtype(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "full", block_size=8, host_dtype="int8", **ONE_MEMORY)
    feed(model, cache, text(1, 200))
    exact = make(model, "one memory")
    feed(model, exact, text(1, 200))
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
        both = Pair(model, stock, kind).begin()
        change(both.mine)
        change(both.other)
        assert both.mine.batch_size == both.other.layers[0].keys.shape[0], name
        both.go_on()


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
def test_what_is_refused_leaves_the_cache_as_it_was(both: Pair) -> None:
    for change, error, message in REFUSED.values():
        with pytest.raises(error, match=message):
            change(both.mine)
        assert both.mine.get_seq_length() == 92
    both.go_on()


def test_an_empty_cache_has_no_rows_to_change(model: PreTrainedModel, stock: PreTrainedModel) -> None:
    both = Pair(model, stock, "one memory")
    for cache in (both.mine, both.other):
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([True]))
        cache.batch_repeat_interleave(3)
    both.mine.crop(-5)  # Transformers 5.17 has no crop of an empty cache
    torch.testing.assert_close(*both.feed(text(2, 20)), atol=2e-4, rtol=1e-4)


@every_cache
def test_an_emptied_cache_has_room_for_another_text(both: Pair, kind: str) -> None:
    """A crop beyond the length empties, as it does in stock caches; a reset makes room for another batch, too."""
    for empty, rows in ((HybridCache.reset, 2), (lambda cache: cache.crop(-1000), 2), (HybridCache.reset, 3)):
        empty(both.mine)
        assert both.mine.get_seq_length() == 0
        another = Pair(*both.models, kind, both.mine)
        another.feed(text(rows, 50, seed=9))
        another.go_on()
    both.mine.reset()
    assert (both.mine.batch_size, both.mine.is_initialized, both.mine.layers[0].keys) == (-1, False, None)


# --- elsewhere and back -----------------------------------------------------------------------------------------------


@every_cache
def test_a_fork_and_its_origin_go_on_alone(both: Pair, kind: str) -> None:
    fork = Pair(*both.models, kind, both.mine.fork(), both.mine.to_dynamic())
    fork.go_on(seed=3)
    both.go_on(seed=4)
    both.mine.reset()
    fork.go_on()


@every_cache
def test_saved_loaded_given_back_and_taken_over(both: Pair, kind: str, tmp_path: Path) -> None:
    policy, knobs = COVERING[kind]
    both.mine.save(tmp_path / "saved")
    loaded = HybridCache.load(tmp_path / "saved", both.models[0])
    dynamic = loaded.to_dynamic()
    for ours, theirs in zip(dynamic.layers, both.other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
    taken = HybridCache.from_cache(dynamic, both.models[0], policy, block_size=8, **knobs)
    Pair(*both.models, kind, taken, dynamic).go_on()
    Pair(*both.models, kind, loaded, both.other).go_on()


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
