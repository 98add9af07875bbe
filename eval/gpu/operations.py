"""Times of the device's larger operations against the time that their bytes alone would take."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench_cpu import random_digests
from common import clock, percentiles, synchronize
from gpu import models
from gpu.models import Options
from gpu.supervise import Cases
from hf_offload.blocks.memory import host_empty
from hf_offload.gpu import block_topk, kv_copy
from hf_offload.gpu import paged_attention as attention
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.graph.graph_capture import Recorder, undisturbed
from hf_offload.scores import Scores

Call = Callable[[], Any]
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 32
SECONDS = 40
FLUSH_BYTES = 1 << 30  # many times the second-level cache of any GPU, and longer to read than a call to launch
LAUNCHES, ROUNDS = 20, 30


class Size(NamedTuple):
    """One size: of `context` blocks of a row, `chosen` ones of each KV head are attended or resident."""

    batch: int
    chosen: int = 64
    context: int = 4096

    def limits(self) -> torch.Tensor:
        """Tokens and sealed blocks: all but the last one."""
        return torch.tensor([self.context * BLOCK, self.context - 1], dtype=torch.int32)


def recorded(options: Options, step: Call) -> Call:
    """A replay of a CUDA graph of a step that has run before; without a GPU the step itself."""
    if not options.on_gpu:
        return step
    recorder = Recorder()
    with undisturbed():
        recorder.record(step)
    return recorder.replay


@functools.cache
def other_data(options: Options) -> torch.Tensor:
    """What fills the caches when it is read: what was written would go to memory during the call that is timed."""
    return torch.zeros(FLUSH_BYTES // 4 if options.on_gpu else 1, device=options.device)


def device_time(options: Options, call: Call, *, cold: bool = True) -> dict[str, float]:
    """Percentiles of the time on the device alone, from event to event, the caches filled with something else before
    each call (cold); microseconds. While the device fills them, the call and its events queue up behind it: no launch
    is in the time. Without a GPU the host's clock.
    """
    if not options.on_gpu:
        return wall_time(options, call)
    call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in pairs:
        if cold:
            other_data(options).sum()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return percentiles(1000 * start.elapsed_time(end) for start, end in pairs)


def wall_time(options: Options, call: Call) -> dict[str, float]:
    """Percentiles of the time on the host's clock until the device is through, from cold caches; microseconds."""
    call()
    seconds: list[float] = []
    for _ in range(3 if options.quick else ROUNDS):
        other_data(options).sum()
        with clock(seconds):
            call()
    return percentiles(1e6 * each for each in seconds)


@functools.cache  # again in a process that goes on behind another
def speeds(options: Options) -> list[dict[str, Any]]:
    """A row for each way that bytes take: "device" counts both the read and the write of a copy there, "link" is pinned
    to device, "back" the other way; "pin" is what torch pins, "pin, huge" the package's memory on huge pages, none of
    which has been pinned before.
    """
    size = 1 << (16 if options.quick else 30)
    source = torch.empty(size, dtype=torch.uint8, device=options.device).random_()
    target = torch.empty_like(source)
    host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=options.on_gpu).random_()
    there, back = target[: size // 4], torch.empty_like(host, pin_memory=options.on_gpu)
    copies = {"device": (target, source), "link": (there, host), "back": (back, there)}
    found = {}
    for way, (to, data) in copies.items():
        spread = device_time(options, functools.partial(to.copy_, data, non_blocking=True))
        found[way] = to.nbytes * (2 if way == "device" else 1) / 1000 / spread["p50"]
    pin = functools.partial(torch.empty, size, dtype=torch.uint8, pin_memory=options.on_gpu)
    pin_huge = functools.partial(host_empty, (size,), torch.uint8, pin=options.on_gpu)
    for way, make in ("pin", pin), ("pin, huge", pin_huge):
        if options.on_gpu:
            torch._C._host_emptyCache()  # torch keeps pinned memory for tensors of the same size
        with clock() as seconds:
            make()
        found[way] = size / 1e9 / seconds[0]
    return [{"operation": f"speed: {way}", "gb_per_s": speed} for way, speed in found.items()]


Operation = tuple[Call, int, int]
"""A call to be timed, and the bytes that it has to read or write in device memory and in pinned host memory."""


def pool_and_listing(options: Options, size: Size) -> tuple[torch.Tensor, ...]:
    """A pool `[B, Hkv, C, 2, block, D]`, and a listing of all its slots in any order: slots and blocks `[B, Hkv, C]`,
    the blocks ascending and spread over the context with the last one among them; counts `[B, Hkv]`.
    """
    lines, step = (size.batch, KV_HEADS), size.context // size.chosen
    pool = torch.randn(*lines, size.chosen, 2, BLOCK, DIM, dtype=options.dtype)
    slots = torch.rand(*lines, size.chosen).argsort(-1).int()
    blocks = torch.arange(step - 1, size.context, step, dtype=torch.int32).expand(*lines, -1).contiguous()
    return pool, slots, blocks, torch.full(lines, size.chosen, dtype=torch.int32)


def add_one(options: Options, size: Size) -> Operation:
    """Next to nothing: `in_graph` is what one more small kernel costs a captured step."""
    number = torch.zeros(1)
    return lambda: number.add_(1), 2 * number.nbytes, 0


def paged_attention(options: Options, size: Size) -> Operation:
    query, (pool, *listing) = torch.randn(size.batch, HEADS, DIM), pool_and_listing(options, size)
    call = functools.partial(attention.paged_attention, query, pool, *listing, size.limits(), None, scale=0.1)
    return call, query.nbytes + pool.nbytes + sum(part.nbytes for part in call()), 0


def score_submeans(options: Options, size: Size) -> Operation:
    blocks, query, limits = size.batch * size.context, torch.randn(size.batch, HEADS, DIM), size.limits()
    store = random_digests("submean", blocks, KV_HEADS, DIM, batch=size.batch, device=options.device)
    table = torch.arange(blocks, dtype=torch.int32).view(size.batch, -1)
    scores = 4 * size.batch * HEADS * size.context  # a float32 a query head and block
    nbytes = sum(part.nbytes for part in (query, table, *store.held())) + scores
    return lambda: store.score(query, table, limits, Scores(scale=0.1)), nbytes, 0


def select_blocks(options: Options, size: Size) -> Operation:
    score, limits = torch.randn(size.batch, KV_HEADS, size.context), size.limits()
    sinks = [torch.full((size.batch,), number, dtype=torch.int32) for number in (0, 1)]  # the first block of each row
    knobs = {"block_size": BLOCK, "recent": 1, "k": size.chosen, "capacity": size.chosen}
    chosen = 4 * size.batch * KV_HEADS * (size.chosen + 1)  # int32, and their number
    return lambda: block_topk.select_blocks(score, limits, *sinks, **knobs), score.nbytes + chosen, 0


def fetch_all(options: Options, size: Size) -> Operation:
    """A pinned slab `[P, Hkv, 2, block, D]`, of whose blocks one goes into each slot."""
    (pool, *moves), physical = pool_and_listing(options, size), min(size.context, 512)
    slab = torch.empty(
        physical, *pool[0, :, 0].shape, dtype=pool.dtype, device="cpu", pin_memory=options.on_gpu
    ).normal_()
    addresses = slab.data_ptr() + slab[0].nbytes * torch.arange(physical)
    table = torch.randint(physical, (size.batch, size.context), dtype=torch.int32)
    # The call keeps the slab, which is reached by its addresses alone.
    return lambda: (kv_copy.fetch(pool, *moves, addresses, table, packed=None), slab), pool.nbytes, pool.nbytes


def merge_with_host(options: Options, size: Size) -> Operation:
    """The merge of the device's shares with a partial of the CPU, which lies in pinned memory, where it is read."""
    splits = attention.count_splits(size.batch * KV_HEADS, size.chosen * BLOCK)
    query, predicted = torch.randn(2, size.batch, HEADS, DIM)
    out, lse = torch.randn(size.batch, HEADS, splits, DIM), torch.randn(size.batch, HEADS, splits)
    pinned = functools.partial(torch.zeros, device="cpu", pin_memory=options.on_gpu)
    there, kbar, mass = pinned(query.shape), pinned(query.shape), pinned(query.shape[:2])
    host = HostResult(there, mass, kbar, predicted)
    read = out.nbytes + lse.nbytes + 2 * query.nbytes + query.numel() * options.dtype.itemsize
    call = functools.partial(merge, out, lse, host, query, None, scale=0.1, dtype=options.dtype)
    return call, read, there.nbytes + mass.nbytes + kbar.nbytes


OPERATIONS = add_one, paged_attention, score_submeans, select_blocks, fetch_all, merge_with_host


def cases(options: Options) -> Cases:
    """The bandwidths, and each operation at each size."""
    sizes = [Size(2, chosen=4, context=16)] if options.quick else [Size(1), Size(16)]
    every = [(make, size) for size in sizes for make in OPERATIONS]
    if not options.quick:  # all of a context of 32k resident
        every += [(paged_attention, Size(batch, chosen=1024, context=1024)) for batch in (1, 16)]
    return {"bandwidths": (SECONDS, functools.partial(speeds, options))} | {
        f"{make.__name__}, batch {size.batch}, {size.chosen} of {size.context} blocks":
            (SECONDS, functools.partial(measure, options, make, size))
        for make, size in every
    }  # fmt: skip


def measure(options: Options, make: Callable[[Options, Size], Operation], size: Size) -> Iterator[dict[str, Any]]:
    """One row of results, microseconds."""
    models.free(options)  # what the case before has left
    device, link = (1000 * row["gb_per_s"] for row in speeds(options)[:2])  # bytes a microsecond
    torch.manual_seed(0)
    with torch.device(options.device):
        call, device_bytes, link_bytes = make(options, size)
    # Both ways are used at once: a kernel that reads the host's memory writes the device's meanwhile.
    floor = max(device_bytes / device, link_bytes / link)
    wall, spread = wall_time(options, call), device_time(options, call)

    def calls() -> None:
        for _ in range(LAUNCHES):
            call()

    synchronize()
    start = time.perf_counter()
    calls()
    launch = time.perf_counter() - start  # of the host's thread, which does not wait for the device
    synchronize()
    in_graph = device_time(options, recorded(options, calls), cold=False)["p50"] if options.on_gpu else None
    yield {
        "operation": make.__name__, "batch": size.batch, "tokens": size.chosen * BLOCK,
        "context": size.context * BLOCK, **spread, "floor": floor, "of_floor": spread["p50"] / floor,
        "wall": wall["p50"], "device_bytes": device_bytes, "link_bytes": link_bytes,
        "launch": 1e6 * launch / LAUNCHES, "in_graph": in_graph and in_graph / LAUNCHES,
    }  # fmt: skip
