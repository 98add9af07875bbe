"""`enable`, `disable`, `enabled`: a HybridCache in every `generate()`, and complete restoration."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hybrid_cache import COVERING, hooks_on, llava
from tiny import prompt, tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

import hf_offload
from hf_offload import HybridCache, disable, enable, enabled
from hf_offload.graph.cuda_graph import graphed

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def traces(model: PreTrainedModel) -> tuple[Any, ...]:
    """What `enable` may touch in a model, as it is now."""
    gc.collect()
    return sorted(vars(model)), model.config.to_dict(), model.config._attn_implementation, hooks_on(model)


def generate(model: PreTrainedModel, batch: int = 2, **arguments: Any) -> Any:
    ids, mask = prompt(batch, 40)
    return model.generate(ids, attention_mask=mask, **(GREEDY | arguments))


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3, "do_sample": True, "top_k": 8}, {"prefill_chunk_size": 16}])
def test_generate_uses_a_fresh_cache(model: PreTrainedModel, mode: dict[str, Any]) -> None:
    before, caches, wanted = traces(model), [], []
    for _ in range(2):
        torch.manual_seed(3)
        wanted.append(generate(model, **mode).sequences)
    enable(model, **COVERING)
    for want in wanted:
        torch.manual_seed(3)
        out = generate(model, **mode)
        assert torch.equal(out.sequences, want)
        caches.append(out.past_key_values)
    assert all(type(cache) is HybridCache and cache.stats().as_dict()["steps"] for cache in caches)
    assert caches[0] is not caches[1]
    del caches, out
    disable(model)
    assert traces(model) == before


def test_what_the_caller_asks_for_is_respected(model: PreTrainedModel) -> None:
    enable(model, **COVERING)
    mine = HybridCache(model, "full")
    assert generate(model, past_key_values=mine).past_key_values is mine
    stock = DynamicCache(config=model.config)
    assert generate(model, past_key_values=stock).past_key_values is stock
    assert generate(model, use_cache=False).past_key_values is None
    assert type(generate(model, cache_implementation="dynamic").past_key_values) is DynamicCache
    assert type(generate(model, cache_implementation="static").past_key_values) is StaticCache
    assert type(model(prompt(1, 8)[0], use_cache=True).past_key_values) is DynamicCache


def test_enabling_again_replaces(model: PreTrainedModel) -> None:
    before = traces(model)
    enable(model, **COVERING)
    enable(model, "window", budget=64)
    assert generate(model).past_key_values.policy == hf_offload.Window(budget=64)
    with enabled(model, hf_offload.Full(), block_size=16):
        assert generate(model).past_key_values.policy.name == "full"
        assert generate(model).past_key_values.settings.block_size == 16
    assert generate(model).past_key_values.policy.name == "window"
    disable(model)
    assert traces(model) == before
    disable(model)  # a second time: nothing
    with pytest.raises(ValueError, match="max_length"), enabled(model):
        generate(model, max_length=-1, max_new_tokens=None)
    with enabled(model):
        disable(model)
    assert traces(model) == before


def test_threads_share_a_block_or_are_refused(model: PreTrainedModel) -> None:
    before, entered, leave = traces(model), threading.Barrier(3), threading.Event()

    def request() -> Any:
        with enabled(model, **COVERING):
            entered.wait(10)
            found = generate(model)
            leave.wait(10)
        return found

    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(request) for _ in range(2)]
        entered.wait(10)
        for refused in (lambda: disable(model), lambda: enable(model), lambda: enabled(model, "full").__enter__()):
            with pytest.raises(ValueError, match=r"cannot (en|dis)able this LlamaForCausalLM: thread \d+ is within"):
                refused()
        with enabled(model, **COVERING):  # beside theirs
            leave.set()
            found = [done.result(10) for done in requests]
            assert type(generate(model).past_key_values) is HybridCache
    assert all(type(one.past_key_values) is HybridCache for one in found)
    assert torch.equal(found[0].sequences, found[1].sequences)
    del found, requests
    assert traces(model) == before


def test_threads_that_make_a_models_first_caches_share_its_hooks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.set_attn_implementation("hybrid_sparse")
    together = threading.Barrier(2)

    def hesitant(method: Any) -> Any:
        """What the other thread gets its turn before."""

        def called(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.05)
            return method(*args, **kwargs)

        return called

    def make(_: int) -> HybridCache:
        together.wait(10)
        return HybridCache(model, "full")

    for name in ("get_decoder", "register_forward_pre_hook"):
        monkeypatch.setattr(model, name, hesitant(getattr(model, name)))
    with ThreadPoolExecutor(2) as pool:
        caches = list(pool.map(make, range(2)))
    both = hooks_on(model)
    caches.pop()
    gc.collect()
    assert hooks_on(model) == both > 0


def test_a_cache_of_a_thread_that_begins_as_the_last_one_goes_leaves_the_models_methods(model: PreTrainedModel) -> None:
    first, held = graphed(model), list[Any]()

    def begin() -> None:
        thread = threading.Thread(target=lambda: held.append(graphed(model)))
        thread.start()
        thread.join()

    weakref.finalize(first, begin)  # the newest one runs first, before the methods are put back
    del first
    assert len(held) == 1
    held.clear()
    assert not {"forward", "generate"} & vars(model).keys()


def test_knobs_are_checked_at_once_and_failures_leave_no_trace(model: PreTrainedModel) -> None:
    before = traces(model)
    with pytest.raises(ValueError, match="'best'"):
        enable(model, "best")
    assert traces(model) == before
    enable(model, "window", budget=64)
    with pytest.raises(ValueError, match="budget=8"):
        enable(model, budget=8)
    assert generate(model).past_key_values.policy == hf_offload.Window(budget=64)


def test_models_that_have_no_use_for_it_are_refused(model: PreTrainedModel) -> None:
    bart = AutoModelForSeq2SeqLM.from_config(
        BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    )
    for unsuited, message in (
        (model.model, "LlamaModel is not a Transformers model with a generate"),
        (torch.nn.Linear(2, 2), "Linear is not a Transformers model"),
        (torch.nn.DataParallel(model), r"use the model inside \(model.module\)"),
        (torch.compile(model), r"use the model inside \(model._orig_mod\)"),
        (bart, "encoder-decoder"),
    ):
        for attempt in (enable, HybridCache) if unsuited is bart else (enable,):
            with pytest.raises((TypeError, ValueError), match=message):
                attempt(unsuited)
    for name, value in (("use_cache", False), ("cache_implementation", "static")):
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"model.generation_config.{name} = None"):
            enable(model)
        setattr(model.generation_config, name, None)


def test_copies_of_an_enabled_model_are_enabled_and_one_that_is_let_go_is_gone(model: PreTrainedModel) -> None:
    want = generate(model).sequences
    enable(model, **COVERING)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        out = generate(twin)
        assert type(out.past_key_values) is HybridCache
        assert torch.equal(out.sequences, want)
        disable(twin)
        assert twin.config._attn_implementation == "sdpa"
        assert type(generate(twin).past_key_values) is DynamicCache
    twin = copy.deepcopy(model)
    generate(twin)
    gone = weakref.ref(twin)
    gc.collect()
    gc.disable()
    try:
        del twin
        assert gone() is None
    finally:
        gc.enable()


def test_an_enabled_model_is_saved_like_any_other(model: PreTrainedModel, tmp_path: Path) -> None:
    enable(model, **COVERING)
    model.save_pretrained(tmp_path)
    assert "hybrid" not in json.dumps([json.loads(path.read_text()) for path in tmp_path.glob("*.json")])
    out = generate(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert type(out.past_key_values) is DynamicCache
    assert torch.equal(out.sequences, generate(model).sequences)


def test_towers_keep_their_attention() -> None:
    model = llava({"text_config": "sdpa", "vision_config": "eager"})
    want, parts = generate(model).sequences, (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    with enabled(model, **COVERING):
        assert [part._attn_implementation for part in parts] == [before[0], "hybrid_sparse", "eager"]
        out = generate(model)
        assert type(out.past_key_values) is HybridCache
        assert torch.equal(out.sequences, want)
    assert [part._attn_implementation for part in parts] == before
