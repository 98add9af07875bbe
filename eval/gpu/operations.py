"""Times of the device's larger operations against the time that their bytes alone would take."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench_cpu import random_digests
from common import clock, percentiles, synchronize
from gpu import models
from gpu.options import Options
from gpu.supervise import Cases
from hf_offload.blocks.memory import host_empty
from hf_offload.gpu import block_topk, kv_copy
from hf_offload.gpu import paged_attention as attention
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.graph.graph_capture import Recorder, undisturbed
from hf_offload.scores import Scores

Call = Callable[[], Any]
SECONDS = 40
FLUSH_BYTES = 1 << 30  # many times the second-level cache of any GPU, and longer to read than a call to launch
LAUNCHES = 20
SHOWN = (
    "operation", "batch", "tokens", "context", "p50", "floor", "of_floor", "wall", "launch", "in_graph", "gb_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """One size: of `context` blocks of a row, `chosen` ones of each KV head are attended or resident."""

    batch: int
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    block: int = 32
    chosen: int = 64
    context: int = 4096


QUICK = [Size(2, kv_heads=2, group=2, dim=16, block=8, chosen=4, context=16)]
SIZES = [Size(1), Size(16)]
LONG = {"chosen": 1024, "context": 1024}  # all of a context of 32k resident


def recorded(options: Options, step: Call) -> Call:
    """A replay of a CUDA graph of a step that has run before; without a GPU the step itself."""
    if not options.on_gpu:
        return step
    recorder = Recorder()
    with undisturbed():
        recorder.record(step)
    return recorder.replay


class Timer:
    """Times calls on a device; microseconds everywhere."""

    def __init__(self, options: Options) -> None:
        self.options, self.rounds = options, 3 if options.quick else 30
        # Read before a call, to fill the caches: what was written would go to memory during the call.
        self._other = torch.zeros(FLUSH_BYTES // 4 if options.on_gpu else 1, device=options.device)

    def device_time(self, call: Call, *, cold: bool = True) -> dict[str, float]:
        """Time on the device alone, from event to event, the caches filled with something else before each call (cold).

        While the device fills them, the call and its events queue up behind it: no launch is in the time.
        """
        if not self.options.on_gpu:
            return self.wall_time(call)
        call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.rounds)]
        for start, end in pairs:
            if cold:
                self._other.sum()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return percentiles(1000 * start.elapsed_time(end) for start, end in pairs)

    def wall_time(self, call: Call) -> dict[str, float]:
        """Time on the host's clock until the device is through, the caches filled with something else before."""
        call()
        seconds: list[float] = []
        for _ in range(self.rounds):
            self._other.sum()
            with clock(seconds):
                call()
        return percentiles(1e6 * each for each in seconds)

    def launch_time(self, call: Call) -> float:
        """What a call costs the host's thread, which does not wait for the device."""
        synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        spent = time.perf_counter() - start
        synchronize()
        return 1e6 * spent / LAUNCHES

    def graph_time(self, call: Call) -> float | None:
        """Time of a call among `LAUNCHES` in a CUDA graph, with warm caches; None without a GPU."""
        if not self.options.on_gpu:
            return None
        replay = recorded(self.options, lambda: [call() for _ in range(LAUNCHES)])
        return self.device_time(replay, cold=False)["p50"] / LAUNCHES


@functools.cache  # again in a process that goes on behind another
def bandwidths(options: Options) -> dict[str, float]:
    """Bytes a microsecond: "device" counts both the read and the write of a copy there, "link" is pinned to device,
    "back" the other way; "pin" is what torch pins, "pin, huge" the package's memory on huge pages, none of which has
    been pinned before.
    """
    timer, size = Timer(options), 1 << (16 if options.quick else 30)
    source = torch.empty(size, dtype=torch.uint8, device=options.device).random_()
    target = torch.empty_like(source)
    pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=options.on_gpu).random_()
    there, back = target[: size // 4], torch.empty_like(pinned, pin_memory=options.on_gpu)
    found = {
        "device": 2 * size / timer.device_time(lambda: target.copy_(source))["p50"],
        "link": size / 4 / timer.device_time(lambda: there.copy_(pinned, non_blocking=True))["p50"],
        "back": size / 4 / timer.device_time(lambda: back.copy_(there, non_blocking=True))["p50"],
    }
    ways: dict[str, Call] = {
        "pin": lambda: torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu),
        "pin, huge": lambda: host_empty((size,), torch.uint8, pin=options.on_gpu),
    }
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    for way, make in ways.items():
        if options.on_gpu and empty_cache is not None:
            empty_cache()  # torch keeps pinned memory for tensors of the same size
        with clock() as seconds:
            make()
        found[way] = size / 1e6 / seconds[0]
    return found


@dataclass(frozen=True)
class Operation:
    """One call to be timed, what it has to read or write in device memory and in pinned host memory, and what it
    reaches only by address.
    """

    call: Call
    device_bytes: int
    link_bytes: int = 0
    keep: Any = None


class Inputs:
    """Makes tensors for one size on the device."""

    def __init__(self, options: Options, size: Size) -> None:
        self.options, self.size = options, size
        self.lines, self.heads = (size.batch, size.kv_heads), (size.batch, size.kv_heads * size.group)
        torch.manual_seed(0)
        self.limits = self.ints([size.context * size.block, size.context - 1])  # the last block is not sealed
        self.scores_bytes = 4 * self.heads[0] * self.heads[1] * size.context  # a float32 a query head and block

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=dtype, device=self.options.device)

    def ints(self, values: Any) -> torch.Tensor:
        """int32."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.options.device)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of that shape and dtype in the host's memory."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.options.on_gpu)

    def query(self) -> torch.Tensor:
        """`[B, Hq, D]`."""
        return self.floats(*self.heads, self.size.dim)

    def pool(self) -> torch.Tensor:
        """`[B, Hkv, R, 2, block, D]`, as many slots as blocks are chosen."""
        size = self.size
        return self.floats(*self.lines, size.chosen, 2, size.block, size.dim, dtype=self.options.dtype)

    def slots(self) -> torch.Tensor:
        """`[B, Hkv, C]`: all slots, in any order."""
        return torch.rand(*self.lines, self.size.chosen, device=self.options.device).argsort(-1).int()

    def blocks(self) -> torch.Tensor:
        """`[B, Hkv, C]`: chosen blocks, ascending, spread over the context, the last one among them."""
        step = self.size.context // self.size.chosen
        return self.ints(torch.arange(step - 1, self.size.context, step)).expand(*self.lines, -1).contiguous()

    def counts(self, number: int) -> torch.Tensor:
        """`[B, Hkv]`."""
        return self.ints([number]).expand(self.lines).contiguous()


def paged_attention(x: Inputs) -> Operation:
    query, pool = x.query(), x.pool()
    listing = pool, x.slots(), x.blocks(), x.counts(x.size.chosen), x.limits, None
    out, lse = attention.paged_attention(query, *listing, scale=0.1)
    nbytes = query.nbytes + pool.nbytes + out.nbytes + lse.nbytes
    return Operation(lambda: attention.paged_attention(query, *listing, scale=0.1), nbytes)


def merge_with_host(x: Inputs) -> Operation:
    """The merge of the device's shares with a partial of the CPU, which lies in pinned memory, where it is read."""
    splits = attention.count_splits(x.size.batch * x.size.kv_heads, x.size.chosen * x.size.block)
    out, lse = x.floats(*x.heads, splits, x.size.dim), x.floats(*x.heads, splits)
    there, kbar, mass = x.pinned(x.query()), x.pinned(x.query()), x.pinned(x.query()[..., 0])
    query, host = x.query(), HostResult(there, mass, kbar, x.query())
    read = out.nbytes + lse.nbytes + 2 * query.nbytes + query.numel() * x.options.dtype.itemsize
    call = functools.partial(merge, out, lse, host, query, None, scale=0.1, dtype=x.options.dtype)
    return Operation(call, read, there.nbytes + mass.nbytes + kbar.nbytes)


def score_submeans(x: Inputs) -> Operation:
    size, query = x.size, x.query()
    blocks = size.batch * size.context
    store = random_digests(
        "submean", blocks, size.kv_heads, size.dim, block_size=size.block, batch=size.batch, device=x.options.device
    )
    table = x.ints(torch.arange(blocks)).view(size.batch, -1)
    nbytes = sum(part.nbytes for part in (query, table, *store.held())) + x.scores_bytes
    return Operation(lambda: store.score(query, table, x.limits, Scores(scale=0.1)), nbytes)


def select_blocks(x: Inputs) -> Operation:
    score, chosen = x.floats(*x.lines, x.size.context), x.size.chosen
    sinks = x.ints([0] * x.size.batch), x.ints([1] * x.size.batch)  # the first block of each row
    knobs = {"block_size": x.size.block, "recent": 1, "k": chosen, "capacity": chosen}
    nbytes = score.nbytes + x.blocks().nbytes + x.counts(0).nbytes
    return Operation(lambda: block_topk.select_blocks(score, x.limits, *sinks, **knobs), nbytes)


def fetch_all(x: Inputs) -> Operation:
    """A pinned slab `[P, Hkv, 2, block, D]`, of whose blocks one goes into each slot."""
    size, pool, physical = x.size, x.pool(), min(x.size.context, 512)
    slab = x.pinned(pool[0, 0, :1].expand(physical, size.kv_heads, *pool.shape[3:])).normal_()
    addresses = (slab.data_ptr() + slab[0].nbytes * torch.arange(physical)).to(x.options.device)
    moves = x.slots(), x.blocks(), x.counts(size.chosen)
    table = x.ints(torch.randint(physical, (size.batch, size.context)))
    moved = moves[0].numel() * pool[0, 0, 0].nbytes
    return Operation(lambda: kv_copy.fetch(pool, *moves, addresses, table, packed=None), moved, moved, keep=slab)


def add_one(x: Inputs) -> Operation:
    """Next to nothing: `in_graph` is what one more small kernel costs a captured step."""
    number = x.floats(1)
    return Operation(lambda: number.add_(1), 2 * number.nbytes)


OPERATIONS: dict[str, Callable[[Inputs], Operation]] = {
    made.__name__: made
    for made in (add_one, paged_attention, score_submeans, select_blocks, fetch_all, merge_with_host)
}


def cases(options: Options) -> Cases:
    """The bandwidths, and each operation at each size."""
    sizes = QUICK if options.quick else SIZES
    every = [(name, size) for size in sizes for name in OPERATIONS]
    if not options.quick:
        every += [("paged_attention", Size(size.batch, **LONG)) for size in sizes]
    return {"bandwidths": (SECONDS, functools.partial(speeds, options))} | {
        f"{name}, batch {size.batch}, {size.chosen} of {size.context} blocks":
            (SECONDS, functools.partial(measure, options, name, size))
        for name, size in every
    }  # fmt: skip


def speeds(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each way that bytes take."""
    for way, speed in bandwidths(options).items():
        yield {"operation": f"speed: {way}", "gb_per_s": speed / 1000}


def measure(options: Options, name: str, size: Size) -> Iterator[dict[str, Any]]:
    """One row of results, microseconds."""
    timer, operation, speed = Timer(options), OPERATIONS[name](Inputs(options, size)), bandwidths(options)
    call = operation.call
    # Both ways are used at once: a kernel that reads the host's memory writes the device's meanwhile.
    floor = max(operation.device_bytes / speed["device"], operation.link_bytes / speed["link"])
    wall, spread = timer.wall_time(call), timer.device_time(call)
    yield {
        "operation": name, "batch": size.batch, "tokens": size.chosen * size.block,
        "context": size.context * size.block, **spread, "floor": floor, "of_floor": spread["p50"] / floor,
        "wall": wall["p50"], "device_bytes": operation.device_bytes, "link_bytes": operation.link_bytes,
        "launch": timer.launch_time(call), "in_graph": timer.graph_time(call),
    }  # fmt: skip
    del operation, call
    models.free(options)
