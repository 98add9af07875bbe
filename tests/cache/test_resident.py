"""Blocks on their way into slots: by a kernel or by copies, with the same bytes, and waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.cache import copying, resident
from hf_offload.cache.copying import Moves, copies, staged, trials
from hf_offload.cache.mirror import DeviceMirror
from hf_offload.cache.padding import Padding
from hf_offload.cache.resident import ResidentSet
from hf_offload.cache.store import BlockStore
from hf_offload.cpu.worker import Worker, WorkerError
from hf_offload.gpu import backend, move, transfer

from ._streams import Device

BATCH, HEADS, SIZE, DIM, BLOCKS, SLOTS = 2, 3, 8, 16, 20, 6


def make_store(dtype: torch.dtype = torch.bfloat16, *, packs: bool = False, device: str = "cpu") -> BlockStore:
    torch.manual_seed(0)
    store = BlockStore(
        BATCH, HEADS, DIM, dtype, block_size=SIZE, device=torch.device(device), digest=None, padding=Padding(SIZE),
        packs=packs,
    )  # fmt: skip
    store.append(*torch.randn(2, BATCH, HEADS, BLOCKS * SIZE, DIM).to(device, dtype))
    return store


def make_moves(seed: int, slots: int = SLOTS, device: str = "cpu") -> Moves:
    """Ragged lists, with garbage behind the counts."""
    rng = np.random.default_rng(seed)
    into, chosen = (torch.full((BATCH, HEADS, slots), 10**8, dtype=torch.int32) for _ in range(2))
    counts = torch.from_numpy(rng.integers(0, slots + 1, (BATCH, HEADS), np.int32))
    for b in range(BATCH):
        for h in range(HEADS):
            count = int(counts[b, h])
            into[b, h, :count] = torch.from_numpy(rng.permutation(slots)[:count].astype(np.int32))
            chosen[b, h, :count] = torch.from_numpy(rng.permutation(BLOCKS)[:count].astype(np.int32))
    return Moves(*(part.to(device) for part in (into, chosen, counts)))


def moved(store: BlockStore, pool: torch.Tensor, moves: Moves) -> torch.Tensor:
    """The pool as it should be after some moves; the store's blocks are not packed."""
    k, v = store.gather(0, BLOCKS * SIZE)
    want, blocks = pool.clone(), torch.stack((k, v), 2).unflatten(3, (BLOCKS, SIZE))
    for b in range(BATCH):
        for h in range(HEADS):
            for m in range(int(moves.counts[b, h])):
                want[b, h, moves.slots[b, h, m]] = blocks[b, h, :, moves.blocks[b, h, m]]
    return want


def empty_pool(store: BlockStore) -> torch.Tensor:
    return torch.full((BATCH, HEADS, SLOTS, 2, SIZE, DIM), 7.0, dtype=store.dtype)


# --- the ways ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch", "interpreted"])
@pytest.mark.parametrize("piece", [1, 3 * 2 * SIZE * DIM * 2, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_way_brings_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, form: str, piece: int, dtype: torch.dtype
) -> None:
    store, moves = make_store(dtype), make_moves(1)
    want = moved(store, empty_pool(store), moves)
    assert not torch.equal(want, empty_pool(store))
    pools = [empty_pool(store) for _ in range(3)]
    copies(store, pools[0], moves)()
    # By the stage, as where the slots lie on a device; `piece` makes it several.
    monkeypatch.setattr(copying, "PIECE_BYTES", piece)
    rows, heads, column = (torch.arange(SLOTS) < moves.counts[..., None]).numpy().nonzero()
    block = store.table[rows, moves.blocks.numpy()[rows, heads, column]]
    index = (rows * HEADS + heads) * SLOTS + moves.slots.numpy()[rows, heads, column]
    staged(store, pools[1].flatten(0, 2), store.pool.addresses(block, heads), index)()
    if form == "interpreted":
        pytest.importorskip("triton")
        if dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter has no bfloat16")
        if torch.cuda.is_available():
            pytest.skip("with a CUDA device Triton compiles")
        monkeypatch.setattr(backend, "FORCED", True)
    move.fetch(pools[2], *moves, store.tables.block_ptr(), store.tables.table(), packed=None)
    for pool in pools:
        assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knobs", "way"),
    [
        ({}, "uva"),
        ({"host_dtype": "int8"}, "copy"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (({}, "copy"), ({"host_dtype": "int8"}, "uva"))),
    ],
)
def test_tokens_do_not_depend_on_the_way(monkeypatch: pytest.MonkeyPatch, way: str, knobs: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(2, 150)
    scout = {"budget": 64, "sinks": 8, "recent": 16, "block_size": 8, "resident": 64, "tier": "split", "recall": 2}

    def logits(asked_for: str | None) -> tuple[torch.Tensor, dict[str, Any]]:
        with monkeypatch.context() as patch:
            patch.delenv(transfer.VARIABLE, raising=False)
            if asked_for is not None:
                patch.setenv(transfer.VARIABLE, asked_for)
            cache = HybridCache(model, "scout", **scout, **knobs)
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return torch.stack(out.logits), cache.stats().as_dict()

    want, _ = logits(None)
    got, told = logits(way)
    assert torch.equal(got, want)
    assert told["recalls"] > 0
    assert told["transfer"] == [way]


def test_a_way_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(transfer.VARIABLE, "dma")
    store = make_store()
    with pytest.raises(ValueError, match="HF_OFFLOAD_TRANSFER='dma'"):
        ResidentSet(store, SLOTS, DeviceMirror(store.padding, store.device, Worker()))


def test_a_trial_is_a_recall_of_the_same_records(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = make_store(torch.float32), list[tuple[Any, ...]]()
    monkeypatch.setattr(copying, "copies", lambda *given: lambda: seen.append(given))
    monkeypatch.setattr(
        copying.move, "fetch", lambda pool, *given, **packed: seen.append((None, pool, Moves(*given[:3])))
    )
    ways = trials(store)
    assert tuple(ways) == transfer.WAYS
    for _ in range(transfer.ROUNDS):
        for call in ways.values():
            call()
    blocks = torch.stack([moves.blocks for _, _, moves in seen])
    assert len(blocks[:, 0, 0].unique()) == blocks[:, 0, 0].numel()  # none twice, none in a cache
    for _, pool, moves in seen:
        assert pool[0, 0, 0].nbytes == store.pool.record_bytes
        assert pool.shape[1] == HEADS
        assert (moves.counts == moves.blocks.shape[2]).all()


def test_a_trial_with_a_single_kv_head_is_no_cause_for_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of arrays that nobody may write into, and what is spread over one head is still the array itself."""
    wrapped = torch.from_numpy

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        assert array.flags.writeable
        return wrapped(array)

    store = BlockStore(
        1, 1, DIM, torch.float32, block_size=SIZE, device=torch.device("cpu"), digest=None, padding=Padding(SIZE)
    )
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    assert tuple(trials(store)) == transfer.WAYS


def test_a_kernel_is_not_tried_on_memory_that_could_not_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    for slabs in (store.pool._plain, store.pool._packed):
        monkeypatch.setattr(slabs, "pinned", True)
    assert tuple(trials(store)) == ("copy",)


# --- the way of a device, on stand-ins for streams --------------------------------------------------------------------


def on_streams(patch: pytest.MonkeyPatch, model: float, side: float) -> tuple[ResidentSet, Device]:
    """A resident set on a device whose streams are that slow (seconds a piece of work)."""
    device, worker = Device(model, side), Worker(2)
    device.install(patch)
    patch.setenv(transfer.VARIABLE, "copy")
    store = make_store()
    store.pool._plain.pinned = store.pool._packed.pinned = True
    mirror = DeviceMirror(store.padding, store.device, worker)
    held = ResidentSet(store, SLOTS, mirror)
    held.reserve()
    held.pool.fill_(7.0)
    mirror.stream = device.make_stream(None)  # type: ignore[assignment]
    store.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for module in (resident, copying):
        patch.setattr(module, "host_empty", lambda shape, dtype, **kwargs: torch.full(shape, 5, dtype=dtype))
    return held, device


SPEEDS = [(0.0, 0.0), (0.02, 0.0), (0.0, 0.02), (0.004, 0.004)]


@pytest.mark.parametrize("delay", [0.0, 0.01])
@pytest.mark.parametrize(("model", "side"), SPEEDS)
def test_copies_beside_the_model_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, model: float, side: float, delay: float
) -> None:
    plain, (held, device) = make_store(), on_streams(monkeypatch, model, side)
    held.mirror.worker.delay = delay
    want, got = [empty_pool(plain)], list[torch.Tensor]()
    with device:
        for seed in range(4):
            moves = make_moves(seed)
            want.append(moved(plain, want[-1], moves))
            device.model.enqueue(lambda: got.append(held.pool.clone()))  # reads the slots before they change hands
            held.fetch(moves, "a recall")
            held.wait()
        device.model.enqueue(lambda: got.append(held.pool.clone()))
    device.synchronize()
    assert held.came_by == "copy"
    assert len(got) == len(want)
    for now, then in zip(got, want, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize(("model", "side"), SPEEDS)
def test_a_placement_is_copied_at_once(monkeypatch: pytest.MonkeyPatch, model: float, side: float) -> None:
    plain, (held, device) = make_store(), on_streams(monkeypatch, model, side)
    blocks = torch.tensor([1, 4, 9, 13, 19], dtype=torch.int32).expand(BATCH, HEADS, -1).contiguous()
    counts, got = torch.tensor([[5, 3, 1], [0, 2, 4]], dtype=torch.int32), list[torch.Tensor]()
    slots = torch.arange(5, dtype=torch.int32).expand_as(blocks)
    with device:
        held.load(blocks, counts, "placement")
        assert held._transfer is None
        device.model.enqueue(lambda: got.append(held.pool.clone()))
    device.synchronize()
    assert torch.equal(got[0], moved(plain, empty_pool(plain), Moves(slots, blocks, counts)))


def test_what_a_failed_copy_carried_is_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    held, device = on_streams(monkeypatch, 0.0, 0.01)
    blocks = torch.tensor([3, 8], dtype=torch.int32).expand(BATCH, HEADS, -1).contiguous()
    slots = torch.tensor([0, 2], dtype=torch.int32).expand_as(blocks).contiguous()
    with device:
        held.load(blocks, torch.full((BATCH, HEADS), 2, dtype=torch.int32), "placement")
        held.block_of[:, :, 2], held.slot_of[:, :, 8], held.slot_of[:, :, 5] = 5, -1, 2
        with monkeypatch.context() as patch:
            patch.setattr(copying, "staged", lambda *given: lambda: 1 / 0)
            held.fetch(
                Moves(slots[:, :, 1:], torch.full_like(blocks[:, :, 1:], 5), torch.ones_like(held.block_of[:, :, 0])),
                "a recall",
            )
            with pytest.raises(WorkerError, match="a recall failed: ZeroDivisionError"):
                held.wait()
        held.wait()
    device.synchronize()
    assert (held.block_of[:, :, 2] == -1).all()
    assert (held.slot_of[:, :, 5] == -1).all()
    assert (held.slot_of[:, :, 3] == 0).all()


def test_which_way_a_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    held, device = on_streams(monkeypatch, 0.0, 0.0)
    measured = list[int]()
    monkeypatch.setattr(transfer, "way_for", lambda device, record, trials: measured.append(record) or "measured")
    with device:
        for capture, asked_for, packs, pinned, want in (
            (None, "uva", False, True, "uva"),
            (None, "copy", False, True, "copy"),
            (None, "uva", False, False, "copy"),  # kernels cannot read what is not pinned
            (None, "copy", True, True, "uva"),  # copies would carry what the link need not
            (
                SimpleNamespace(keep=lambda *given: None),
                "copy",
                False,
                True,
                "uva",
            ),  # a graph asks the host for nothing
        ):
            held.mirror.capture, held._asked_for, held.store.packs = capture, asked_for, packs
            held.store.pool._plain.pinned = pinned
            assert held._way() == want
        held.mirror.capture, held._asked_for = None, None
        assert held._way() == "measured"
    assert measured == [held.store.pool.record_bytes]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", transfer.WAYS)
def test_a_gpu_gets_the_same_bytes_by_either_way(monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype) -> None:
    monkeypatch.setenv(transfer.VARIABLE, way)
    store = make_store(dtype, device="cuda")
    held = ResidentSet(store, SLOTS, DeviceMirror(store.padding, store.device, Worker()))
    held.mirror.worker.delay = 0.002
    want = held.pool.cpu()
    for seed in range(4):
        moves = make_moves(seed, device="cuda")
        want = moved(make_store(dtype), want, Moves(*(part.cpu() for part in moves)))
        torch.cuda._sleep(20_000_000)
        held.fetch(moves, "a recall")
        held.wait()
        assert torch.equal(held.pool.cpu(), want)


@pytest.mark.gpu
def test_a_gpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(transfer.VARIABLE, raising=False)
    monkeypatch.setattr(transfer, "_chosen", {})
    store = make_store(device="cuda")
    held = ResidentSet(store, SLOTS, DeviceMirror(store.padding, store.device, Worker()))
    held.fetch(make_moves(1, device="cuda"), "a recall")
    held.wait()
    (found,) = transfer._chosen.items()
    assert found == ((held.pool.device, store.pool.record_bytes), held.came_by)
