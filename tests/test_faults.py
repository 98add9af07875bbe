"""A fault in the n-th call of a kind, for every n and in every policy: an error, and no token is lost or wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from breaking import FAULTS, SETTINGS, Broken, Nth, tokens
from histories import History, check_books, empty
from tiny import begin, decode, forward, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache, WorkerError
from hf_offload.attention import prefill as dense
from hf_offload.attention import prefill_host
from hf_offload.blocks import block_store as store
from hf_offload.blocks import digests, host_pool
from hf_offload.blocks import prefill_tiles as tiles
from hf_offload.blocks import resident_set as resident
from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.resident_set import ResidentSet

LIFE = (190, 40, 1, 1, 1, "repeat", 1, 1, 8, "fork", "select", "reorder", "crop", 1, 60, 1, "reset", 30, 1)
"""A prompt, turns, steps that fill a block, and changes."""

CHANGES: dict[str, tuple[Callable[[HybridCache], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda x: x.repeat_interleave(2, 0)),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 0])), lambda x: x[[3, 0]]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), lambda x: x[[1, 0]]),
    "crop": (lambda cache: cache.crop(-101), lambda x: x[:, :-101]),
    "fork": (lambda cache: cache.fork(), lambda x: x),
    "reset": (lambda cache: cache.reset(), lambda x: x[:, :0]),
}
"""What is done to the cache, and what becomes of the ids and the mask that it holds."""


def note(history: History, kept: Callable[[torch.Tensor], torch.Tensor]) -> None:
    history.ids, history.mask = kept(history.ids), kept(history.mask)


def act(history: History, what: int | str) -> None:
    if isinstance(what, int):
        return history.feed(*tokens(history.rows, what, what))
    change, kept = CHANGES[what]
    change(history.caches[0])
    return note(history, kept)


def changed(history: History, what: int | str) -> bool:
    """Whether the cache holds what a change would leave."""
    if isinstance(what, int) or what == "fork":
        return False
    cache, want = history.caches[0], CHANGES[what][1](history.mask)
    if cache.get_seq_length() != want.shape[1]:
        return False
    held = torch.from_numpy(cache.settings.padding.valid[:, : want.shape[1]])
    return want.shape[1] == 0 or torch.equal(held, want.to("cpu", torch.uint8))


def mend(history: History, what: int | str) -> bool:
    """After an error: nothing was lost, or all is done, or the cache must begin anew; whether it is done."""
    cache = history.caches[0]
    try:
        cache.crop(0)
    except RuntimeError as error:
        if "call reset()" not in str(error):
            raise
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            history.feed(*tokens(history.rows, 1, 0))
        cache.reset()
        ids, mask = history.ids, history.mask
        note(history, CHANGES["reset"][1])
        if what == "reset":
            return True
        history.feed(ids, mask)
        return False
    if changed(history, what):
        note(history, CHANGES[str(what)][1])
        return True
    cache.crop(history.length - cache.get_seq_length())  # it may have failed behind the layers, in the model's head
    return False


LOUD = ("host_memory", "memory_of_lists", "torch_operations")
"""What always surfaces: threads are replaced, and what was to be read ahead is read again."""


def combinations() -> list[Any]:
    """Every fault in every memory: about a hundred of its calls (400 of interruptions); the quick ones: one call."""
    rows = [(fault, memory) for fault in FAULTS for memory in SETTINGS]
    many = [(400 if fault == "interruptions" else 100, fault, memory) for fault, memory in rows]
    return [*((1, *row) for row in rows[::5]), *(pytest.param(*row, marks=pytest.mark.slow) for row in many)]


@pytest.mark.parametrize(("most", "fault", "memory"), combinations())
def test_the_nth_fault(monkeypatch: pytest.MonkeyPatch, fault: str, memory: str, most: int) -> None:
    interrupted = fault == "interruptions"

    def once(n: int) -> int:
        """Live with the n-th call failing; returns how many calls there were."""
        history, nth, errors = empty(SETTINGS[memory], 2), Nth(n), []
        for what in LIFE:
            try:
                # A fork that is interrupted may leave its references behind.
                with (
                    monkeypatch.context() as patch,
                    nullcontext() if interrupted and what == "fork" else FAULTS[fault](patch, nth),
                ):
                    act(history, what)
            except (MemoryError, torch.OutOfMemoryError, Broken, WorkerError, KeyboardInterrupt) as error:
                errors.append(error)
                done = mend(history, what)
                check_books([history], leaks=interrupted)
                if not done:
                    act(history, what)
            check_books([history], leaks=interrupted)
        history.caches[0].drain()  # what is still in flight
        assert len(errors) <= 1
        assert errors or fault not in LOUD or nth.left > 0
        return n - nth.left

    total = once(10**9)
    assert total or memory == "one" or fault in ("divided_launches", "threads_before_a_job", "threads_at_a_job")
    stride = max(total // most, 1)
    for n in range(1 + stride // 2, total + 1, stride):
        once(n)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_memory_that_nobody_wrote_is_never_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every buffer starts as NaN; padded rows, chunks and partial blocks leave much of it unwritten."""
    make_set = ResidentSet.__init__

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        slab = host_empty(*args, **kwargs)
        return slab.fill_(float("nan") if slab.is_floating_point() else 255)

    def poisoned_set(self: ResidentSet, *args: Any) -> None:
        make_set(self, *args)
        self.pool.fill_(float("nan"))

    monkeypatch.setattr(host_pool, "host_empty", poisoned)
    monkeypatch.setattr(ResidentSet, "__init__", poisoned_set)
    history = empty(SETTINGS[name], 3)
    for what in (*LIFE[:5], "fork", 17, 1, "crop", *[1] * 12):
        act(history, what)


KNOBS: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 8, "prefill_tile": 64}
SPLIT: dict[str, Any] = {"tier": "split", "resident": 64}
TILES = r"no host memory left for tiles of cached.*a smaller prefill_tile"


def impossible(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Ask for more than any host has, for the same purpose."""
    return host_empty((1 << 60,), torch.uint8, **{key: kwargs[key] for key in ("what", "lower") if key in kwargs})


def device_full(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize(
    ("knobs", "module", "name", "broken", "told"),
    [
        ({}, host_pool, "host_empty", impossible, r'for cached tokens \(.*host_dtype="int8", fewer rows'),
        (SPLIT, digests, "host_empty", impossible, r"for digests \(.*a larger block_size"),
        ({**SPLIT, "host_dtype": "int8"}, digests, "host_empty", impossible, r"for digests \(.*a larger block_size"),
        ({}, store, "host_empty", impossible, TILES),
        (SPLIT, tiles, "host_empty", impossible, TILES),
        ({}, dense, "attend", device_full, r"no device memory left for attention of.*in chunks.*CUDA out"),
        (SPLIT, prefill_host, "prefill_attention", impossible, "no host memory left"),
        (
            SPLIT, resident.torch, "full", device_full,
            r"no device memory left for resident blocks \(.*\); a smaller resident or device_budget.*CUDA out",
        ),
    ],
)  # fmt: skip
def test_an_append_that_has_no_memory_names_the_purpose_and_can_be_repeated(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], module: Any, name: str,
    broken: Any, told: str,
) -> None:  # fmt: skip
    if module in (tiles, store, dense):  # as on a device, or for a dense mask
        monkeypatch.setattr(prefill_host, "serves", lambda *_: False)
    ids, mask = prompt(3, 250)
    first = 0 if module is resident.torch else 160  # three rows' blocks fill the first slab of 64 at token 168

    sound, cache = (HybridCache(model, "scout", **KNOBS, **knobs) for _ in range(2))
    for one in (sound, cache) if first else ():
        forward(model, one, ids, mask, 0, first)
    held = cache.stats().as_dict()["host_bytes"]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        with pytest.raises((MemoryError, torch.OutOfMemoryError), match=told):
            forward(model, cache, ids, mask, first, 250)
    assert {each.get_seq_length() for each in cache.layers} == {first}
    assert cache.stats().as_dict()["host_bytes"] == held
    assert torch.equal(*(forward(model, one, ids, mask, first, 250) for one in (cache, sound)))
    assert cache.stats().as_dict()["host_bytes"] == sound.stats().as_dict()["host_bytes"]


def test_a_worker_that_hangs_is_given_up_in_time(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "scout", **KNOBS, **SPLIT, lookahead="attend")
    token, mask = begin(model, cache, 1, 150, 1)
    cache.settings.worker.delay, cache.settings.worker.timeout = 5.0, 0.3
    with pytest.raises(WorkerError, match=r"layer \d+, step \d+: not done in time"):
        decode(model, cache, token, mask, 3)
