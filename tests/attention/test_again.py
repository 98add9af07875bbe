"""Steps whose launches are made again: the very bits of steps that ask the policy, whatever happens between them."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention.again import AGAIN, Again, EarlyAgain
from hf_offload.policies.base import Policy
from hf_offload.policies.full import Full

pytestmark = pytest.mark.slow

BLOCK = 8
SMALL: dict[str, Any] = {"budget": 48, "sinks": 8, "recent": 8}
AHEAD: dict[str, Any] = SMALL | {"synchronous_layers": (0,)}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "window": ("window", {"budget": 48, "sinks": 8}),
    "scout": ("scout", SMALL),
    "scout, raw": ("scout", SMALL | {"join": "raw"}),
    "scout, covering": ("scout", SMALL | {"budget": 512}),
    "scout, int8": ("scout", SMALL | {"host_dtype": "int8"}),
    "scout, select": ("scout", AHEAD | {"lookahead": "select"}),
    "scout, attend": ("scout", AHEAD | {"lookahead": "attend"}),
    "scout, attend, int8": ("scout", AHEAD | {"lookahead": "attend", "host_dtype": "int8"}),
}


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("llama").to(getattr(torch, request.param))


class Counted:
    """How many steps were made again, and how many were not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.others, self.early = 0, 0, 0
        real, begin = Again.step, EarlyAgain.begin

        def step(again: Again, *args: Any) -> torch.Tensor | None:
            given = real(again, *args)
            self.made += given is not None
            self.others += given is None
            return given

        def begin_again(again: EarlyAgain, *args: Any) -> bool:
            begun = begin(again, *args)
            self.early += begun
            return begun

        monkeypatch.setattr(Again, "step", step)
        monkeypatch.setattr(EarlyAgain, "begin", begin_again)


def history(model: PreTrainedModel, policy: str, knobs: dict[str, Any]) -> list[torch.Tensor]:
    """The logits of steps between everything that may come between two steps."""
    cache = HybridCache(model, policy, **{"block_size": BLOCK, "tier": "one"} | knobs)
    mask = prompt(3, 90)[1]
    logits, at = list[torch.Tensor](), [0]

    def feed(cache: HybridCache, count: int, rows: Any = slice(None), hide: int | None = None) -> None:
        past = cache.get_seq_length()
        told = torch.nn.functional.pad(mask, (0, 400), value=1)[:, : past + count]
        if hide is not None:
            told[1, hide] = 0
        told = told[rows]
        new = prompt(3, 400, seed=at[0])[0][rows][:, :count]
        at[0] += 1
        positions = (told.cumsum(-1) - 1).clamp(min=0)[:, -count:]
        with torch.no_grad():
            out = model(
                input_ids=new, attention_mask=told, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
        logits.append(out.logits[:, -1])

    def steps(count: int, cache: HybridCache = cache, **how: Any) -> None:
        for _ in range(count):
            feed(cache, 1, **how)

    feed(cache, 90)
    steps(21)
    cache.crop(-3)
    steps(2)  # back within the same block
    cache.crop(-11)
    steps(9)
    feed(cache, 5)  # a turn that ends within a block
    steps(6)
    other = cache.fork()
    steps(3)  # blocks are shared: they become the caches' own as they are written
    steps(5, other)
    steps(4)
    del other
    steps(4)
    steps(3, hide=100)  # a token that was there becomes padding, and is one again
    steps(3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    steps(7, rows=[2, 0])
    cache.reorder_cache(torch.tensor([1, 0]))
    steps(7, rows=[0, 2])
    return logits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_made_again_has_the_bits_of_any_other(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, policy: str
) -> None:
    name, knobs = POLICIES[policy]
    counted = Counted(monkeypatch)
    got = history(model, name, knobs)
    layers = model.config.num_hidden_layers
    if "lookahead" in knobs:
        assert counted.early > 0.3 * (layers - 1) * len(got)
    assert counted.made > 0.3 * layers * len(got), (counted.made, counted.others)
    policy_type = type(HybridCache(model, name, block_size=BLOCK, **knobs).policy)
    for method in ("repeats", "begun"):
        monkeypatch.setattr(policy_type, method, getattr(Policy, method))
    counted.made = counted.early = 0
    want = history(model, name, knobs)
    assert counted.made == counted.early == 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_other_queries_and_scales_are_steps_of_their_own(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "full", block_size=BLOCK, tier="one")
    with torch.no_grad():
        for count in (83, 1, 1):
            model(prompt(1, count)[0], past_key_values=cache)
    layer: Any = cache.layers[0]
    again: Again = layer.kernels[AGAIN]
    store, past = layer.store, layer.past
    shape = 1, store.num_kv_heads, 1, store.head_dim
    query = torch.randn(1, model.config.num_attention_heads, 1, store.head_dim, dtype=store.dtype)
    key, value = torch.randn(shape, dtype=store.dtype), torch.randn(shape, dtype=store.dtype)
    changes: list[Callable[[], tuple[torch.Tensor, ...]]] = [
        lambda: (query.half(), key, value),
        lambda: (query[:, ::2], key, value),
        lambda: (query, key.repeat(1, 1, 2, 1)[:, :, ::2], value),
        lambda: (query, key, value.expand(2, -1, -1, -1).transpose(0, 1)[:, :1]),
    ]
    for change in changes:
        assert again.step(layer, *change()) is None
        assert layer.past == past
    layer.scale *= 2
    assert again.step(layer, query, key, value) is None


@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("digest", ["submean", "quest"])
@pytest.mark.parametrize("lookahead", ["select", "attend"])
def test_short_contexts_begin_early_without_a_choice(
    model: PreTrainedModel, lookahead: str, digest: str, block_size: int
) -> None:
    """Before any block is full there is nothing to choose by."""
    knobs: dict[str, Any] = {"lookahead": lookahead, "digest": digest, "synchronous_layers": (0,), "tier": "one"}
    ids = prompt(1, 10)[0]
    caches = [HybridCache(model, "scout", block_size=block_size, **knobs), HybridCache(model, "full", tier="one")]
    told = [
        model.generate(ids, past_key_values=cache, max_new_tokens=80, min_new_tokens=80, do_sample=False)
        for cache in caches
    ]
    if model.dtype == torch.float32:
        assert torch.equal(*told)


@pytest.mark.parametrize("lookahead", ["select", "attend"])
def test_masks_and_inputs_that_change_meanwhile_do_not_depend_on_the_worker(lookahead: str) -> None:
    """What is begun early goes on with what was there when it began."""
    model = tiny_model("llama")
    ids, changed = prompt(3, 260)[0], list[torch.utils.hooks.RemovableHandle]()
    position_ids = torch.arange(260).expand(3, -1)

    def grow(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].mul_(1.01)

    def run(delay: float) -> list[torch.Tensor]:
        cache = HybridCache(model, "scout", **AHEAD | {"budget": 96}, lookahead=lookahead, block_size=32, tier="one")
        cache.settings.worker.delay = delay
        logits = []
        for start, stop in ((0, 200), *((i, i + 1) for i in range(200, 240))):
            mask = torch.ones(3, stop, dtype=torch.long)
            begun = (stop - 1) // 32 * 32
            if stop % 2 and stop - 5 > begun:
                mask[:, begun : stop - 2] = 0
            with torch.no_grad():
                out = model(
                    ids[:, start:stop], attention_mask=mask, position_ids=position_ids[:, start:stop],
                    past_key_values=cache,
                )  # fmt: skip
            logits.append(out.logits[:, -1])
            if not changed:  # behind our own hooks
                for layer in model.model.layers:
                    changed.append(layer.register_forward_pre_hook(grow))
        for handle in changed:
            handle.remove()
        changed.clear()
        return logits

    for a, b in zip(run(0.0), run(0.003), strict=True):
        assert torch.equal(a, b)


def test_a_policy_with_a_plan_of_its_own_is_asked_for_it(model: PreTrainedModel) -> None:
    asked = []

    class Mine(Full):
        def plan(self, step: Any) -> Any:
            asked.append(step.layer.index)
            return super().plan(step)

    cache = HybridCache(model, Mine(), block_size=BLOCK, tier="one")
    model.generate(prompt(1, 20)[0], past_key_values=cache, max_new_tokens=17, min_new_tokens=17)
    assert len(asked) == 16 * model.config.num_hidden_layers


@pytest.mark.parametrize("lookahead", ["select", "attend"])
def test_memory_is_free_when_a_cache_is_gone(model: PreTrainedModel, lookahead: str) -> None:
    cache = HybridCache(model, "scout", **AHEAD, lookahead=lookahead, block_size=BLOCK, tier="one")
    model.generate(prompt(1, 90)[0], past_key_values=cache, max_new_tokens=20, min_new_tokens=20)
    pools = [weakref.ref(layer.store.pool) for layer in cache.layers]
    cache.drain()
    gc.disable()
    try:
        cache.reset()
        until = time.monotonic() + 300
        while any(pool() is not None for pool in pools):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        gc.enable()
