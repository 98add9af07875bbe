"""Time per token of a large model's shape at several contexts and batches, and until the first token."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from common import Row, clock, listed, numbers, percentiles
from gpu import models
from gpu.models import FREE, FULL, ROWS, STOCK, VARIANTS, Options
from gpu.replay import Replay, parse, write_script
from gpu.supervise import Cases, Stopped
from hf_offload import HybridCache, Scout

BLOCK = 32
BUDGET, TINY_BUDGET = 2048, 256  # tokens that a sparse row attends and keeps on the device; the second with `quick`
WARM_UP = 5  # a graph is captured in the second step
SECONDS = 240  # a row, its filling included
TIMEOUT = 30  # seconds that a step may wait for the CPU, which may have to compile a kernel first
FULL_BLOCK = 128  # tokens a block where all of a context is resident: a row has so many slots at most
STEP_SECONDS = 15  # of a row for the steps that count, if there have been a few
PROMPTED = [Row("default", Scout()), *(Row(name, "dynamic", knobs) for name, knobs in STOCK.items())]
K = 1 << 10

SHOWN = (
    "context", "batch", "row", "replay", "p50", "tokens_per_s", "cpu_ratio", "dense_share", "device_kv_gib", "note",
)  # fmt: skip
FEW, MANY = "miss=0.1,drift=0.15,recall=4", "miss=0.2,drift=0.2,recall=1"
"""Scripts (`gpu.replay`) of choices like a trained model's with 1.5 budgets and with one budget resident."""


class Case(NamedTuple):
    """A row of results: tokens, rows that are decoded at once, and what the cache and its script are called."""

    context: int
    batch: int
    row: str
    replay: str = "none"


# Those that tell most come first: time may be up before the last.
FIRST = [
    Case(32 * K, 1, "default-graph"), Case(32 * K, 1, f"{FULL}-graph"), Case(32 * K, 1, "scout-graph", FEW),
    Case(32 * K, 8, f"{FULL}-graph"), Case(32 * K, 8, "default-graph"), Case(32 * K, 8, "scout-graph", FEW),
    Case(64 * K, 8, "scout-graph", FEW), Case(64 * K, 8, "default-graph"), Case(32 * K, 8, "chosen-graph"),
    Case(32 * K, 1, "dynamic"), Case(32 * K, 1, "drawn-graph"), Case(32 * K, 8, "scout-graph", MANY),
    Case(64 * K, 8, f"{FULL}-graph"), Case(32 * K, 1, "scout", FEW),
    Case(32 * K, 8, "offloading"),  # of one row, what launches and weights take would hide the cache
]  # fmt: skip


def cases(options: Options) -> Cases:
    """A case a row, context, batch and script, in the order of their worth."""
    contexts = [2048] if options.quick else numbers(options.contexts)
    batches = [2] if options.quick else numbers(options.batches)
    every = []
    for context, batch, row in itertools.product(contexts, batches, listed(options.rows, ROWS, "rows")):
        chosen = (FEW, MANY) if row == "scout-graph" else (FEW,)
        scripts = chosen if row.removesuffix("-graph") in VARIANTS else ("none",)
        every += [Case(context, batch, row, script) for script in scripts]
    every.sort(key=lambda case: FIRST.index(case) if case in FIRST else len(FIRST))
    return {
        f"{case.row}, {case.context} tokens, batch {case.batch}, {case.replay}".removesuffix(", none"):
            (SECONDS, partial(measure, options, case))
        for case in every
    }  # fmt: skip


def measure(options: Options, case: Case) -> Iterator[dict[str, Any]]:
    """One row of results; with a note alone where it does not fit."""
    facts = case._asdict() | {"layers": models.shape(options).layers}
    try:
        if (case.row.endswith("-graph") or case.row == "offloading") and not options.on_gpu:
            raise Stopped("not applicable", f"{case.row} needs a GPU")
        model, row = models.build(options), make_row(options, case)
        models.check_memory(options, row, case.batch, case.context)
        with clock() as filling:
            kv = models.random_kv(options, filled_tokens(case.context) - models.PROMPT)
            cache = models.fill(options, model, row, case.batch, kv)
        facts |= time_cache(options, model, cache, case.batch) | {"fill_s": filling[0]}
        if isinstance(row.policy, Replay):
            facts |= {"script_miss": row.policy.script.miss, "script_drift": row.policy.script.drift}
        yield facts
    except (Stopped, torch.OutOfMemoryError) as reason:
        yield facts | {"note": str(reason.args[-1]).splitlines()[0]}
        raise
    finally:
        models.free(options)


def filled_tokens(context: int) -> int:
    """Tokens before the first step. The third fills a block: what closes one is compiled before steps count. The run
    ends within the context, where memory that is pinned in powers of two would double.
    """
    return context - 2 * BLOCK - 3


def make_row(options: Options, case: Case) -> Row:
    """The cache of a case."""
    name, kind = case.row, case.row.removesuffix("-graph")
    if name in STOCK:
        return Row(name, "dynamic", STOCK[name])
    knobs: dict[str, Any] = {"timeout": TIMEOUT} if options.on_gpu else {"tier": "split"}
    knobs["cuda_graph"] = kind != name
    if kind == FULL:
        return Row(name, "full", knobs | {"resident": case.context, "block_size": FULL_BLOCK})
    budget = TINY_BUDGET if options.quick else BUDGET
    if kind not in ("default", "chosen"):
        knobs["resident"] = budget
    policy = {} if kind == "drawn" else {"budget": budget}
    if kind in FREE:
        return Row(name, Scout(**policy, **FREE[kind]), knobs)
    steps = range(1, 2 * BLOCK + 1)  # a step attends itself, too
    blocks_at = [-(-(filled_tokens(case.context) + step) // BLOCK) for step in steps]
    lines, fixed = (case.batch, models.shape(options).kv_heads), (1, 2)  # Scout's usual sinks and recent tokens
    aims = parse(case.replay)
    script = write_script(lines, blocks_at, budget // BLOCK, fixed, **aims, device=options.device)
    policy |= {"dense": False, "recall": aims["recall"]} | VARIANTS[kind]
    return Row(name, Replay(**policy, script=script), knobs)


def time_cache(options: Options, model: PreTrainedModel, cache: Cache, batch: int) -> dict[str, Any]:
    """Time decode steps of a cache that is full; milliseconds."""
    coming = iter(torch.randint(model.config.vocab_size, (WARM_UP + options.steps, batch, 1), device=options.device))
    mask = torch.ones(batch, cache.get_seq_length(), dtype=torch.long, device=options.device)

    def step() -> None:
        nonlocal mask
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)  # as `generate()` does it
        model(input_ids=next(coming), attention_mask=mask, past_key_values=cache)

    time_steps(step, WARM_UP, STEP_SECONDS / 3)
    times = [1000 * seconds for seconds in time_steps(step, options.steps, STEP_SECONDS)]
    mean = sum(times) / len(times)
    found: dict[str, Any] = {"tokens_per_s": 1000 * batch / mean, **percentiles(times)}
    found |= {"mean": mean, "steps": len(times)}
    if options.on_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if not isinstance(cache, HybridCache):
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        near = sum(tensor.nbytes for tensor in tensors if tensor.device.type != "cpu")
        return found | {"device_kv_gib": near / 2**30}
    told = cache.stats().as_dict()
    cache.drain()
    return found | {
        "cpu_ratio": told["cpu_ratio"], "recall_mib_per_step": told["recall_bytes"] / told["steps"] / 2**20,
        "host_wait_ms": 1000 * told["wait_seconds"] / told["steps"], "query_cosine": told["query_cosine"],
        "dense_share": told["dense_share"], "device_kv_gib": told["device_bytes"] / 2**30,
        "host_kv_gib": told["host_bytes"] / 2**30,
    }  # fmt: skip


def time_steps(step: Callable[[], None], most: int, seconds: float) -> list[float]:
    """Seconds of each step; as many as time allows, three at least."""
    times: list[float] = []
    while len(times) < most and (len(times) < 3 or sum(times) < seconds):
        with clock(times):
            step()
    return times


def prompts(options: Options) -> Cases:
    """A case a row whose cache has to take in a prompt."""
    return {row.name: (SECONDS, partial(measure_prompt, options, row)) for row in PROMPTED}


def measure_prompt(options: Options, row: Row) -> Iterator[dict[str, Any]]:
    """One row: a new cache each time, the first with memory that nobody has had yet."""
    if row.name == "offloading" and not options.on_gpu:
        raise Stopped("not applicable", "offloading needs a GPU")
    tokens = 128 if options.quick else 32 * K
    model, seconds = models.build(options), list[float]()
    for one, count in (PROMPTED[1], tokens // 8), (row, tokens), (row, tokens):  # the first loads libraries
        ids = torch.randint(model.config.vocab_size, (1, count), device=options.device)
        gc.collect()
        with clock(seconds):
            cache = models.make_cache(model, one)
            model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1).cpu()
        del cache
    facts = {"row": row.name, "context": tokens, "first": seconds[1], "second": seconds[2]}
    yield facts | {"layers": models.shape(options).layers}
    models.free(options)
