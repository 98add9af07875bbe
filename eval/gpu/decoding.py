"""Time per token of a large model's shape at several contexts and batches, within a cap of KV on the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from common import Row, percentiles
from gpu import aims, models, timeline
from gpu.options import Options
from gpu.replay import Replay, Script, parse, write_script
from gpu.supervise import NotApplicable, Report
from hf_offload import HybridCache, Scout

BLOCK = 32
WARM_UP = 5  # a graph is captured in the second step
PROFILED = 6
SECONDS, SECONDS_A_GIB = 60, 1.5  # a row, its filling included: memory is pinned at a GiB a second or so
COLD_SECONDS = 90  # of a process's first row, which builds the model and compiles
TIMEOUT = 30  # seconds that a step may wait for the CPU, which may have to compile a kernel first
FULL_BLOCK = 128  # tokens a block where all of a context is resident: a row has so many slots at most
STEP_SECONDS = 15  # of it for the steps that count, if there have been a few

SHOWN = (
    "context", "batch", "row", "replay", "p50", "tokens_per_s", "busy", "waiting", "moving", "gaps", "between",
    "launches", "profiled", "cpu_ratio", "dense_share", "device_kv_gib", "note",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "scout": {},
    "scout-no-recall": {"recall": 0},
    "scout-off": {"lookahead": "off"},
    "scout-quest": {"digest": "quest"},
}
FULL = "full-resident"
FREE: dict[str, dict[str, Any]] = {"default": {}, "chosen": {"dense": False}, "drawn": {"samples": 512}}
"""Rows without a script: a cache as it is by default, whose blocks are all on the device where they fit; one that
chooses among them; and keys that are drawn, with few blocks on the device."""
ROWS = ("dynamic", "offloading", *(f"{name}{graph}" for name in (FULL, *FREE, *VARIANTS) for graph in ("", "-graph")))
DEFAULT_ROWS = (
    "scout-graph", f"{FULL}-graph", "default-graph", "scout", "dynamic", "offloading", "chosen-graph", "drawn-graph",
    "scout-no-recall-graph", "scout-off-graph", "scout-quest-graph",
)  # fmt: skip
CONTEXTS, BATCHES = (32 << 10, 64 << 10), (1, 8, 16)
# Those that tell most come first: time may be up before the last.
FIRST = [(32, 1), (32, 8), (64, 8), (32, 16), (64, 1)]


def cases(options: Options) -> dict[str, tuple[int, int, str, str | None]]:
    """Context, batch, row and script of every case, in the order of their worth; what aims compare comes first.

    What chooses blocks does so by a script: choices of random weights change nearly all in each step.
    """
    whole = (options.contexts, options.batches, options.replay) == (CONTEXTS, BATCHES, None)
    script = options.replay or aims.FEW
    chosen = [case for case in aims.CASES if case[2] in options.rows] if whole else []
    pairs = [(context, batch) for context in options.contexts for batch in options.batches]
    order = {(context << 10, batch): place for place, (context, batch) in enumerate(FIRST)}
    pairs.sort(key=lambda pair: (order.get(pair, len(order)), pair))
    chosen += [
        (context, batch, row, script if chooses(row) else None) for context, batch in pairs for row in options.rows
    ]
    return {
        f"{row}, {context} tokens, batch {batch}{f', {replay}' if replay else ''}": (context, batch, row, replay)
        for context, batch, row, replay in chosen
    }


def chooses(row: str) -> bool:
    """Whether a row chooses blocks."""
    return row.removesuffix("-graph") in VARIANTS


def names(options: Options) -> list[str]:
    """The cases."""
    return list(cases(options))


def run(options: Options, todo: Sequence[str], report: Report) -> None:
    """Measure row after row; the model is built within the first one."""
    model: PreTrainedModel | None = None
    chosen = cases(options)
    for name in todo:
        context, batch, row, script = chosen[name]
        if report.seconds_left < 20 and not options.quick:
            return
        gib = models.kv_bytes(models.config_of(options), context * batch, options.dtype.itemsize) / 2**30
        cold = COLD_SECONDS if model is None else 0
        with torch.no_grad(), report.case(name, cold + SECONDS + SECONDS_A_GIB * gib):
            model = model or models.build(options)
            facts = {"context": context, "batch": batch, "row": row, "replay": script or "none"}
            try:
                found = measure(options, model, context, batch, row, script)
                report.row(**facts, **found, layers=options.layers)
            except (NotApplicable, torch.OutOfMemoryError) as reason:
                report.row(**facts, note=str(reason).splitlines()[0], layers=options.layers)
                raise
        models.free(options)


def filled_tokens(context: int, block: int = BLOCK) -> int:
    """Tokens before the first step. The third fills a block: what closes one is compiled before steps count. The run
    ends within the context, where memory that is pinned in powers of two would double.
    """
    return context - 2 * block - 3


def make_row(options: Options, name: str, script: Script | None, block: int, context: int) -> Row:
    """The cache of a row."""
    if name in ("dynamic", "offloading"):
        return Row(name, "dynamic", {"offloading": True} if name == "offloading" else {})
    memory = {"timeout": TIMEOUT} if options.on_gpu else {"tier": "split"}
    graph = {"cuda_graph": name.endswith("-graph")}
    knobs: dict[str, Any] = {"resident": options.budget, "block_size": block, **memory, **graph}
    if name.startswith(FULL):
        return Row(name, "full", {**knobs, "resident": context, "block_size": block if options.quick else FULL_BLOCK})
    kind = name.removesuffix("-graph")
    if kind in FREE:
        attended = {} if "samples" in FREE[kind] else {"budget": options.budget}
        if kind != "drawn" and options.on_gpu:
            knobs.pop("resident")
        return Row(name, Scout(**attended, **_small(options), **FREE[kind]), knobs)
    policy: dict[str, Any] = {"budget": options.budget, "dense": False, **_small(options), **VARIANTS[kind]}
    if script is None:
        return Row(name, Scout(**policy), knobs)
    return Row(name, Replay(**{"recall": script.interval, **policy}, script=script), knobs)


def _small(options: Options) -> dict[str, Any]:
    return {"sinks": 8, "recent": 8, "synchronous_layers": (0,)} if options.quick else {}


@functools.cache
def script_of(options: Options, replay: str, heads: int, context: int, batch: int, block: int) -> Script:
    """The script of these numbers for a context and batch."""
    numbers, scout = parse(replay), Scout(**_small(options))
    first = filled_tokens(context, block)
    # A step attends itself too; the last ones are there for a profile.
    at = [-(-(first + step + 1) // block) for step in range(2 * block)]
    newest = -(-scout.recent // block) + 1
    return write_script(
        (batch, heads), at, options.budget // block, (-(-scout.sinks // block), newest), **numbers,
        device=options.device,
    )  # fmt: skip


_kv = functools.lru_cache(maxsize=1)(models.random_kv)  # filled into cache after cache


def measure(
    options: Options, model: PreTrainedModel, context: int, batch: int, name: str, replay: str | None
) -> dict[str, Any]:
    """One row of results.

    Args:
        replay: numbers of the script by which the row chooses, or None.

    Raises:
        NotApplicable: it does not fit.
    """
    check_row(options, name)
    block = block_of(options)
    heads, dim = model.config.num_key_value_heads, models.head_dim(model.config)
    script = None if replay is None else script_of(options, replay, heads, context, batch, block)
    row = make_row(options, name, script, block, context)
    models.check_room(options, model, row, batch, context)
    start = time.perf_counter()
    kv = _kv(options, heads, dim, filled_tokens(context, block) - models.PROMPT)
    cache = models.fill(options, model, row, batch, kv)
    filled = time.perf_counter() - start
    tokens = torch.randint(model.config.vocab_size, (steps_of(options), batch, 1), device=options.device)
    found = time_cache(options, model, cache, tokens) | {"fill_s": filled}
    if script is not None:
        found |= {"script_miss": script.miss, "script_drift": script.drift}
    return found


def check_row(options: Options, name: str) -> None:
    """Refuse a row that cannot be had without a GPU.

    Raises:
        NotApplicable: there is none.
    """
    if name.endswith("-graph") and not options.on_gpu:
        raise NotApplicable("a CUDA graph needs a GPU")
    if name == "offloading" and not options.on_gpu:
        raise NotApplicable("offloading needs a GPU")


def block_of(options: Options) -> int:
    """Tokens a block."""
    return 8 if options.quick else BLOCK


def steps_of(options: Options) -> int:
    """Decode steps of a row at most."""
    return WARM_UP + options.steps + PROFILED


def time_cache(options: Options, model: PreTrainedModel, cache: Cache, tokens: torch.Tensor) -> dict[str, Any]:
    """Time decode steps of a cache that is full, then profile some; milliseconds.

    Args:
        tokens: `[steps, B, 1]`, as many as `steps_of` says.
    """
    batch, coming = tokens.shape[1], iter(tokens)
    mask = torch.ones(batch, cache.get_seq_length(), dtype=torch.long, device=options.device)

    def step() -> None:
        nonlocal mask
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)  # as `generate()` does it
        model(input_ids=next(coming), attention_mask=mask, past_key_values=cache)

    times = time_steps(options, step)
    spread, mean = percentiles(times), sum(times) / len(times)
    found: dict[str, Any] = {
        "tokens_per_s": 1000 * batch / mean, **spread, "mean": mean, "steps": len(times),
        **(counted(cache) if isinstance(cache, HybridCache) else {"device_kv_gib": _stock_gib(cache)}),
    }  # fmt: skip
    if options.on_gpu:
        slow = max(times) * PROFILED > 20_000
        events = [] if slow else timeline.profile(step, PROFILED)
        shares = timeline.shares(events, PROFILED)
        found |= shares | {"between": timeline.between(spread["p50"], shares)}
        found |= {"kernels": timeline.by_kernel(events, PROFILED)}
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(cache, HybridCache):
        cache.drain()
    return found


def time_steps(options: Options, step: Any) -> list[float]:
    """Milliseconds of each step behind the warm-up; as many as time allows, three at least."""
    begun = time.perf_counter()
    for number in range(WARM_UP):
        step()
        options.synchronize()
        if number >= 2 and time.perf_counter() - begun > STEP_SECONDS / 3:
            break
    times: list[float] = []
    for _ in range(options.steps):
        options.synchronize()
        start = time.perf_counter()
        step()
        options.synchronize()
        times.append(1000 * (time.perf_counter() - start))
        if sum(times) > 1000 * STEP_SECONDS and len(times) >= 3:
            break
    return times


def counted(cache: HybridCache) -> dict[str, Any]:
    """What the cache has counted over all its steps."""
    total = cache.stats().as_dict()
    steps = total["steps"]
    return {
        "cpu_ratio": total["cpu_ratio"], "recall_mib_per_step": total["recall_bytes"] / steps / 2**20,
        "host_wait_ms": 1000 * total["wait_seconds"] / steps, "query_cosine": total["query_cosine"],
        "dense_share": total["dense_share"], "device_kv_gib": total["device_bytes"] / 2**30,
        "host_kv_gib": total["host_bytes"] / 2**30,
    }  # fmt: skip


def _stock_gib(cache: Any) -> float:
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "cpu") / 2**30
