"""The pieces of a decode step, each measured alone: merge, host time, pinned memory."""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu import models
from gpu.operations import Inputs, merge_with_host, size_of
from gpu.options import Options
from gpu.supervise import Cases, NotApplicable
from gpu.timing import Timer, recorded
from hf_offload import HybridCache, Scout
from hf_offload.gpu.handover import wait_for_flag
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.graph import cuda_graph
from hf_offload.graph.cuda_graph import StepGraph

SECONDS = 60
SHOWN = (
    "piece", "variant", "batch", "p50", "in_graph", "gb_per_s", "wrong", "mask", "prepare", "copies", "launch", "done",
)  # fmt: skip


def cases(options: Options) -> Cases:
    """Each case's name and the function that yields its rows."""
    found: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
    for batch in (2,) if options.quick else BATCHES:
        found[f"merge, batch {batch}"] = partial(merges, options, batch)
    found["replays of a merge"] = partial(replays, options)
    for policy in POLICIES:
        found[f"host time of a replay, {policy}"] = partial(replay, options, policy)
    for pages in ("ordinary", "huge"):
        found[f"pinned memory, {pages} pages"] = partial(pin, options, pages)
    return {name: (SECONDS, partial(_named, name.split(", ")[0], work)) for name, work in found.items()}


def _named(piece: str, work: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for row in work():
        yield {"piece": piece, **row}


# --- The merge with a host partial: its time, and whether a replayed one sees what the CPU wrote last ---

BATCHES = (1, 8, 16)
REPLAYS = 200
_LINE = 16  # int32 of a cache line: each flag has its own
_SPINS = 5_000_000  # looks at the flag, some seconds


def merges(options: Options, batch: int) -> Iterator[dict[str, Any]]:
    """Microseconds of one merge, whose kernel reads pinned memory."""
    timer, operation = Timer(options), merge_with_host(Inputs(options, size_of(options, batch)))
    spread, in_graph = timer.device_time(operation.call), timer.graph_time(operation.call)
    yield {"variant": "read", "batch": batch, **spread, "in_graph": in_graph, "link_bytes": operation.link_bytes}


def replays(options: Options) -> Iterator[dict[str, Any]]:
    """Replays of a wait and a merge whose partial the CPU changes each time, two of three while the device waits."""
    merged_by = _waiting_merge(options)
    count = 4 if options.quick else REPLAYS
    wrong = [number for number in range(1, count + 1) if merged_by(number) != {float(number)}]
    yield {"variant": "read", "batch": 2, "replays": count, "wrong": len(wrong)}
    if wrong:
        raise ArithmeticError(f"{len(wrong)} of {count} replays merged another partial, the first is {wrong[0]}")


def _waiting_merge(options: Options) -> Callable[[int], set[float]]:
    """A function that replays a wait for a flag and a merge, and returns what numbers are in the result.

    The CPU writes a number into all of the partial, and then into the flag.
    """
    size, pin, device = size_of(options, 2), options.on_gpu, options.device
    batch, heads = size.heads
    shares = torch.zeros(batch, heads, 1, size.dim, device=device), torch.full((batch, heads, 1), -1e30, device=device)
    query = torch.zeros(batch, heads, size.dim, device=device)
    host = HostResult(torch.zeros(batch, heads, size.dim, pin_memory=pin), torch.zeros(batch, heads, pin_memory=pin))
    flag, late = (torch.zeros(1, _LINE, dtype=torch.int32, pin_memory=pin)[:, 0] for _ in range(2))
    epoch = torch.zeros(1, dtype=torch.int32, device=device)
    merged = torch.empty_like(query)

    def step() -> None:
        epoch.add_(1)
        wait_for_flag(flag, epoch, late, spins=_SPINS)
        merged.copy_(merge(*shares, host, query, None, scale=1.0, dtype=torch.float32)[0])

    flag.fill_(1)
    step()  # compiles
    options.synchronize()
    epoch.zero_()
    flag.zero_()
    replay = recorded(options, step)

    def write(number: int) -> None:
        host.out.fill_(float(number))
        flag.fill_(number)

    def merged_by(number: int, kept: object = (shares, query, epoch)) -> set[float]:  # what a graph reads
        before = number % 3 == 0 or not options.on_gpu  # without a device the step would wait for this very thread
        if before:
            write(number)
        replay()
        if not before:
            write(number)
        options.synchronize()
        return set(merged.unique().tolist()) | {float("nan") for missed in late.tolist() if missed}

    return merged_by


# --- What a replayed step costs the host: the parts of its way to the launch ---

MARKS = ("mask", "prepare", "copies", "launch", "returned", "done")
"""Ends of: reading the arguments, the mask among them; preparing the step; copying its inputs; `replay()`; the model's
forward; the step on the device."""
POLICIES: dict[str, Any] = {"full": "full", "scout": Scout(budget=256, recall=1)}
LAYERS, PROMPT, BLOCK = 36, 1024, 32
WARM_UP, STEPS = 4, 24  # within a block


def marked_step(graph: StepGraph, step: Callable[[], Any], synchronize: Callable[[], None]) -> dict[str, float]:
    """Seconds from the start of a replayed step to the end of each of its parts."""
    at: dict[str, float] = {}

    def around(function: Callable[..., Any], before: str | None, behind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                at[before] = time.perf_counter()
            result = function(*args, **kwargs)
            at[behind] = time.perf_counter()
            return result

        return call

    parts = (
        (cuda_graph, "_split_arguments", None, "mask"),
        (StepGraph, "prepare", None, "prepare"),
        (type(graph._recorded), "replay", "copies", "launch"),
    )
    with ExitStack() as stack:
        for owner, name, before, behind in parts:
            stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), before, behind)))
        start = time.perf_counter()
        step()
        at["returned"] = time.perf_counter()
        synchronize()
        at["done"] = time.perf_counter()
    return {name: at[name] - start for name in MARKS}


def replay(options: Options, policy: str) -> Iterator[dict[str, Any]]:
    """Microseconds from a step's start to each of `MARKS`, medians; a small model with as many layers as a large one.

    What the host does depends on the layers, not on their width.
    """
    if not options.on_gpu:
        raise NotApplicable("a CUDA graph needs a GPU")
    model = small_model(options)
    resident = 2 * PROMPT if policy == "full" else 256
    cache = HybridCache(model, POLICIES[policy], block_size=BLOCK, resident=resident, cuda_graph=True)
    yield {"variant": policy, "layers": LAYERS, **marks_of(options, model, cache)}
    cache.drain()


def small_model(options: Options) -> PreTrainedModel:
    """A narrow model with random weights and the layers of a large one."""
    torch.manual_seed(0)
    with torch.device(options.device):
        config = models.narrow_config(LAYERS)
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation="hybrid_sparse")
    return model.eval()


def marks_of(options: Options, model: PreTrainedModel, cache: HybridCache, steps: int = STEPS) -> dict[str, float]:
    """Medians of the marks of replayed steps behind a prompt, microseconds; steps are called as `generate()` does."""
    length = PROMPT + 1  # the steps end within a block
    ids = torch.randint(model.config.vocab_size, (1, length + WARM_UP + steps), device=options.device)
    mask = torch.ones_like(ids)
    model(input_ids=ids[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
    found = []
    for place in range(length, ids.shape[1]):

        def step(place: int = place) -> None:
            model(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], past_key_values=cache)

        if place < length + WARM_UP:
            step()
            continue
        options.synchronize()
        assert cache.graph is not None
        found.append(marked_step(cache.graph, step, options.synchronize))
    return {name: 1e6 * median(each[name] for each in found) for name in MARKS}


# --- How fast memory is pinned, by the size of its pages ---

SLAB_BYTES = 4 << 30
_HUGE = 2 << 20


def pin(options: Options, pages: str) -> Iterator[dict[str, Any]]:
    """GB/s of pinning a slab; `huge_share`: of the slab, what the system counts as huge pages."""
    size = 1 << 24 if options.quick else SLAB_BYTES
    models.free_pinned(options)
    before, start = huge_bytes(), time.perf_counter()
    if pages == "huge":
        memory, let_go = pin_huge(options, size)
    else:
        memory, let_go = torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu), lambda: None
    spent = time.perf_counter() - start
    huge_share = max(huge_bytes() - before, 0) / size
    del memory
    let_go()
    yield {"variant": f"{pages}, pinning", "gb_per_s": size / spent / 1e9, "huge_share": huge_share}


def pin_huge(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Bytes on huge pages, which torch's threads touch before they are registered with CUDA, and their release."""
    region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    memory = whole[begin : begin + size].zero_()
    if not options.on_gpu:
        return memory, lambda: None
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if (code := int(runtime.cudaHostRegister(address, size, 0))) != 0:
        raise RuntimeError(f"cudaHostRegister of {size} bytes gave error {code}")
    return memory, lambda: (runtime.cudaHostUnregister(address), whole)


def huge_bytes() -> int:
    """Bytes of this process that lie on huge pages; 0 where the system does not tell."""
    try:
        told = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"AnonHugePages:\s+(\d+) kB", told)
    return 1024 * int(found[1]) if found else 0
