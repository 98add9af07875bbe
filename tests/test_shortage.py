"""Allocation failures: errors name purpose and remedy, and the cache is unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention import prefill as dense
from hf_offload.attention import prefill_host
from hf_offload.blocks import block_store as store
from hf_offload.blocks import digests, host_pool
from hf_offload.blocks import prefill_tiles as tiles
from hf_offload.blocks import resident_set as resident
from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.padding import Padding

KNOBS: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 8, "prefill_tile": 64}
SPLIT: dict[str, Any] = {"tier": "split", "resident": 64}
ROWS, FIRST, LAST = 3, 160, 250  # three rows' blocks fill the first slab of 64 at token 168
DEVICE_TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB."


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def impossible(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Ask for more than any host has, for the same purpose."""
    return host_empty((1 << 60,), torch.uint8, **{key: kwargs[key] for key in ("what", "lower") if key in kwargs})


def device_full(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError(DEVICE_TEXT)


def after(calls: int, real: Callable[..., Any], broken: Callable[..., Any]) -> Callable[..., Any]:
    """Some calls as ever, then broken ones."""
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return (real if count[0] <= calls else broken)(*args, **kwargs)

    return call


TILES = r"no host memory left for tiles of cached.*a smaller prefill_tile"
HOST = [
    pytest.param(
        host_pool, "host_empty", r'no host memory left for cached tokens \(.*host_dtype="int8", fewer rows', id="slabs"
    ),
    pytest.param(digests, "host_empty", r"no host memory left for digests \(.*a larger block_size", id="digests"),
    pytest.param(store, "host_empty", TILES, id="gather"),
    pytest.param(tiles, "host_empty", TILES, id="tiles"),
]
ATTENTION = pytest.param(
    dense, "attend", r"no device memory left for attention of.*in chunks.*CUDA out", id="attention"
)
KERNEL = pytest.param(prefill_host, "prefill_attention", "no host memory left", id="kernel")


@pytest.mark.parametrize(
    ("memory", "calls"),
    [
        pytest.param({}, 0, id="one-0"),
        pytest.param(SPLIT, 2, id="split-2"),
        pytest.param({**SPLIT, "host_dtype": "int8"}, 0, id="int8-0", marks=pytest.mark.slow),
        pytest.param({}, 2, id="one-2", marks=pytest.mark.slow),
        pytest.param(SPLIT, 0, id="split-0", marks=pytest.mark.slow),
        pytest.param({**SPLIT, "host_dtype": "int8"}, 2, id="int8-2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("module", "name", "told"), [*HOST, ATTENTION, KERNEL])
def test_an_append_that_had_no_memory_can_be_repeated(
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    told: str,
    calls: int,
    memory: dict[str, Any],
) -> None:
    if module is tiles and not memory:
        pytest.skip("one memory gathers tile by tile")
    if module is store and memory:
        pytest.skip("with two, tiles come ahead, and digests are built from the keys at hand")
    if module in (tiles, store, dense):  # as on a device, or for a dense mask
        monkeypatch.setattr(prefill_host, "serves", lambda *_: False)
    ids, mask = prompt(ROWS, LAST)
    given = [{"attention_mask": mask[:, :stop]} for stop in (FIRST, LAST)]
    with torch.no_grad():
        sound, cache = (HybridCache(llama, "scout", **KNOBS, **memory) for _ in range(2))
        for each in (sound, cache):
            llama(ids[:, :FIRST], past_key_values=each, **given[0])
        want = llama(ids[:, FIRST:], past_key_values=sound, **given[1]).logits
        held = cache.stats().as_dict()["host_bytes"]
        broken = device_full if name == "attend" else impossible
        with monkeypatch.context() as patch:
            patch.setattr(module, name, after(calls, getattr(module, name), broken))
            with pytest.raises((MemoryError, torch.OutOfMemoryError), match=told):
                llama(ids[:, FIRST:], past_key_values=cache, **given[1])
        assert {each.get_seq_length() for each in cache.layers} == {FIRST}
        assert cache.stats().as_dict()["host_bytes"] == held
        assert torch.equal(llama(ids[:, FIRST:], past_key_values=cache, **given[1]).logits, want)
        step = torch.full((ROWS, 1), 7)
        assert torch.equal(llama(step, past_key_values=cache).logits, llama(step, past_key_values=sound).logits)
    assert cache.stats().as_dict()["host_bytes"] == sound.stats().as_dict()["host_bytes"]


@pytest.mark.parametrize("memory", [{}, SPLIT], ids=["one", "split"])
@pytest.mark.parametrize("calls", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("module", "name", "told"), HOST[:2])
def test_a_token_that_had_no_memory_can_be_repeated(
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    told: str,
    calls: int,
    memory: dict[str, Any],
) -> None:
    ids, _ = prompt(1, FIRST)
    ids = ids.expand(ROWS, -1)
    with torch.no_grad():
        sound, cache = (HybridCache(llama, "scout", **KNOBS, **memory) for _ in range(2))
        for each in (sound, cache):
            llama(ids, past_key_values=each)
        faults: list[str] = []
        for i in range(20):
            token = torch.full((ROWS, 1), 3 + i)
            with monkeypatch.context() as patch:
                patch.setattr(module, name, after(calls, getattr(module, name), impossible))
                try:
                    llama(token, past_key_values=cache)
                    cache.crop(-1)
                except MemoryError as error:
                    faults.append(str(error))
            assert cache.get_seq_length() == FIRST + i
            got, want = (llama(token, past_key_values=each).logits for each in (cache, sound))
            assert torch.allclose(got, want, atol=5e-5)
    assert len(faults) == 1
    assert re.search(told, faults[0])


def test_a_device_without_room_for_the_resident_blocks(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _ = prompt(1, 50)
    cache = HybridCache(llama, "full", tier="split", resident=64, block_size=8)
    told = r"no device memory left for resident blocks \(16\.0 KiB\); a smaller resident or device_budget.*CUDA out"
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(resident.torch, "full", after(4, torch.full, device_full))
            with pytest.raises(torch.OutOfMemoryError, match=told):
                llama(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
        got = llama(ids, past_key_values=cache).logits
        assert torch.allclose(got, llama(ids).logits, atol=5e-5)


def test_a_crop_that_had_no_memory_has_not_cropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was packed has to be opened again for what is appended to it, which takes memory."""
    padding = Padding(16)
    padding.observe(None, 2, 600)
    kept = BlockStore(
        2,
        2,
        16,
        torch.float32,
        block_size=16,
        device=torch.device("cpu"),
        digest=None,
        padding=padding,
        host_dtype="int8",
    )
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 2, 600, 16)
    kept.append(k, v)
    before, table, used = kept.gather(0, 600), kept.table.copy(), kept.host_bytes
    places = [(host_pool.HostPool, "allocate"), (store, "host_empty"), (store.movers, "write_tokens")]
    for module, name in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, impossible)
            with pytest.raises(MemoryError):
                kept.crop(99)
        assert kept.length == 600
        assert kept.host_bytes == used
        assert np.array_equal(kept.table, table)
    for got, want in zip(kept.gather(0, 600), before, strict=True):
        assert torch.equal(got, want)
    kept.crop(99)
    for got, want in zip(kept.gather(0, 99), before, strict=True):
        assert torch.equal(got, want[:, :, :99])
