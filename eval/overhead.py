"""What a decode step costs outside the kernels, a layer: hooks, checks, plans, tables, statistics, Python.

    python eval/overhead.py
    python eval/overhead.py --rows scout,scout-attend --rounds 200

Three steps take turns, round after round, all with the same weights:

- bare: the model with a cache that keeps nothing and an attention function that returns zeros; no hooks. Off the clock
  it reads as much memory as the keys and values that the row attends: what they drive out of the caches, and what the
  model then waits for, goes with any attention. Digests and all else that a row reads beyond that are not made up for.
- plain: with a `HybridCache`, as users run it. Plain − bare is all that it adds (`added`).
- metered: the same with the CPU part off. The work of each kernel is done off the clock just before the kernel is
  launched, and then it is launched with no task left: arguments are checked and handed over, threads are woken and
  waited for, but nothing is computed. Metered − bare − the time off the clock is what is added outside kernels
  (`outside`); the time off the clock itself is `kernels`.

The query that layer-ahead predicts (norm, projection and rotation of the next layer) is the model's own arithmetic, but
nobody would compute it without a cache that looks ahead: it counts. With two memories the work of a GPU is done by
torch operators where there is none, and they count too: such rows show the logic, not what a GPU would take.

All numbers are microseconds a layer and token, over the steps that fill no block. A block that is full is summarised,
once in `block_size` tokens: `sealing` is what that adds to `outside` in such a step, divided by `block_size`.
`cpu_time` is `outside` in CPU time of the whole process: the better number where other programs want the cores too.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel

from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    Row,
    choose,
    command,
    load,
    numbers,
    percentiles,
    prefill,
    show,
    write_csv,
)
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.project import project_kernel
from hf_offload.cpu.standing import Standing
from hf_offload.cpu.together import Row as Launches
from hf_offload.cpu.worker import Job, Worker

BARE = "bare"
BLOCK_SIZE = 32
WARM_UP = 4  # rounds
NAMES = ("bare", "added", "outside", "cpu", "kernels", "full")
LIMITS = {"full": 100, "scout": 100, "scout-select": 250, "scout-attend": 250}
"""Microseconds a layer that one memory may take outside kernels."""


def make_rows(budget: int) -> list[Row]:
    """The rows to choose from; where a row looks ahead, all of its layers do but the first."""
    rows = [Row("full", "full", {"tier": "one"})]
    for tier, prefix in (("one", ""), ("split", "split-")):
        for lookahead, suffix in (("off", ""), ("select", "-select"), ("attend", "-attend")):
            knobs = {"budget": budget, "lookahead": lookahead, "synchronous_layers": (0,), "tier": tier}
            rows.append(Row(f"{prefix}scout{suffix}", "scout", {**knobs, "block_size": BLOCK_SIZE}))
        rows.append(Row(f"{prefix}fixed", "fixed_hybrid", {"tier": tier, "sinks": 32, "local": 128}))
    return rows


class BareCache(DynamicCache):
    """A cache that keeps nothing and says that it holds `length` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.length + query_length, 0


class BareAttention:
    """Zeros in place of attention.

    Attributes:
        memory: float32 `[layers, n]`, read off the clock in steps of one token.
        wall, cpu: seconds off the clock, as a `Meter` has them.
    """

    def __init__(self) -> None:
        self.memory = torch.zeros(0, 0)
        self.wall = self.cpu = 0.0

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        batch, heads, length, dim = query.shape
        if length == 1:
            wall, cpu = time.perf_counter(), time.process_time()
            self.memory[module.layer_idx].sum()  # type: ignore[index]
            self.cpu += time.process_time() - cpu
            self.wall += time.perf_counter() - wall
        return query.new_zeros(batch, length, heads, dim), None


def attended_memory(cache: Any, length: int) -> torch.Tensor:
    """Float32 `[layers, n]`: as much as the keys and values that a step after `length` tokens always attends."""
    store = cache.layers[0].store
    policy = cache.policy
    least = policy.sink_tokens + policy.recent_tokens if policy.retrieves else length
    tokens = min(length, policy.budget_tokens or least)
    nbytes = 2 * tokens * store.batch * store.num_kv_heads * store.head_dim * store.dtype.itemsize
    return torch.zeros(len(cache.layers), nbytes // 4)


def bare_copy(model: PreTrainedModel, attention: BareAttention) -> PreTrainedModel:
    """A model over the very same weights that attends to nothing, and whose modules get no hooks of a cache."""
    AttentionInterface.register(BARE, attention.attend)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation(BARE)
    return twin


class Meter:
    """Does the work of kernels off the clock.

    Attributes:
        wall, cpu: seconds off the clock, of wall time and of the process's CPU time.
    """

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Let launches inside do their work off the clock, to be made without tasks then.

        Between the clock's readings stands all that the measurement itself does.
        """
        once, again, together, submit = Launch.run, Standing.run, Launches.run, Worker.submit
        now, used = time.perf_counter, time.process_time

        def metered_once(launch: Launch, label: str = "a kernel") -> None:
            wall, cpu = now(), used()
            once(launch, label)
            launch.ticket[:2] = 0
            idle = replace(launch, tasks=0)
            self.cpu += used() - cpu
            self.wall += now() - wall
            once(idle, label)

        def metered_again(standing: Standing, *numbers: int) -> None:
            wall, cpu = now(), used()
            again(standing, *numbers)
            tasks = standing.tasks
            standing.set("tasks", 0)
            self.cpu += used() - cpu
            self.wall += now() - wall
            again(standing, *numbers)
            wall, cpu = now(), used()
            standing.set("tasks", tasks)
            self.cpu += used() - cpu
            self.wall += now() - wall

        def metered_together(row: Launches, launches: tuple[Standing, ...], numbers: tuple[int, ...]) -> None:
            wall, cpu = now(), used()
            tasks, at = [standing.tasks for standing in launches], 0
            for standing in launches:
                if standing.launch.kernel is project_kernel:  # a predicted query counts
                    self.cpu += used() - cpu
                    self.wall += now() - wall
                    again(standing, *numbers[at : at + len(standing.changing)])
                    wall, cpu = now(), used()
                    standing.set("tasks", 0)
                at += len(standing.changing)
            together(row, launches, numbers)
            for standing in launches:
                standing.set("tasks", 0)
            self.cpu += used() - cpu
            self.wall += now() - wall
            together(row, launches, numbers)
            wall, cpu = now(), used()
            for standing, count in zip(launches, tasks, strict=True):
                standing.set("tasks", count)
            self.cpu += used() - cpu
            self.wall += now() - wall

        def metered_submit(worker: Worker, work: Callable[[], Any], *args: Any, **kwargs: Any) -> Job:
            wall, cpu = now(), used()
            work()
            self.cpu += used() - cpu
            self.wall += now() - wall
            return submit(worker, bool, *args, **kwargs)

        Launch.run, Standing.run, Worker.submit = metered_once, metered_again, metered_submit
        Launches.run = metered_together
        try:
            yield
        finally:
            Launch.run, Standing.run, Worker.submit, Launches.run = once, again, submit, together


def time_step(model: PreTrainedModel, cache: Cache, token: torch.Tensor) -> tuple[float, float]:
    """Decode one token `[1, 1]`: seconds of wall time and of CPU time."""
    cpu, wall = time.process_time(), time.perf_counter()
    model(token, past_key_values=cache)
    return time.perf_counter() - wall, time.process_time() - cpu


class Series:
    """The steps of one row, in turns with bare ones.

    Args:
        model: with `hybrid_sparse` attention.
        bare: its `bare_copy`; attention: how that one attends.
        row: what to measure.
        ids: `[1, N]`, the context.
    """

    def __init__(
        self, model: PreTrainedModel, bare: PreTrainedModel, attention: BareAttention, row: Row, ids: torch.Tensor
    ) -> None:
        self.model, self.bare, self.attention, self.row = model, bare, attention, row
        self.cache, self.empty, self.meter = row.make_cache(model), BareCache(ids.shape[1]), Meter()
        prefill(model, self.cache, ids, chunk=1024)
        self.memory = attended_memory(self.cache, ids.shape[1])
        self.micro = 1e6 / len(self.cache.layers)
        self.clear()

    def clear(self) -> None:
        """Forget what was measured: it was a warm-up."""
        self.found: dict[str, list[float]] = {name: [] for name in NAMES}

    def round(self, token: torch.Tensor, dice: random.Random) -> None:
        """One step of each kind; in an order that changes, so that the step that fills a block is of any kind."""
        wall, cpu = {}, {}
        full = ""
        for kind in dice.sample(("bare", "plain", "metered"), 3):
            if kind == "bare":
                self.attention.memory, self.attention.wall, self.attention.cpu = self.memory, 0.0, 0.0
                wall[kind], cpu[kind] = time_step(self.bare, self.empty, token)
                wall[kind] -= self.attention.wall
                cpu[kind] -= self.attention.cpu
            elif kind == "plain":
                wall[kind], cpu[kind] = time_step(self.model, self.cache, token)
            else:
                self.meter.wall = self.meter.cpu = 0.0
                with self.meter.metering():
                    wall[kind], cpu[kind] = time_step(self.model, self.cache, token)
            if kind != "bare" and self.cache.get_seq_length() % BLOCK_SIZE == 0:
                full = kind
        outside = wall["metered"] - wall["bare"] - self.meter.wall
        values = {"bare": wall["bare"], "kernels": self.meter.wall}
        if full != "plain":
            values["added"] = wall["plain"] - wall["bare"]
        if full != "metered":
            values |= {"outside": outside, "cpu": cpu["metered"] - cpu["bare"] - self.meter.cpu}
        else:
            values["full"] = outside
        for name, value in values.items():
            self.found[name].append(value * self.micro)

    def record(self) -> dict[str, Any]:
        """Medians; of what is added, the 20th and 80th percentile too."""
        found = {name: percentiles(values or [float("nan")]) for name, values in self.found.items()}
        outside = found["outside"]
        return {
            "row": self.row.name,
            "added": found["added"]["p50"],
            "added_p20": found["added"]["p20"],
            "added_p80": found["added"]["p80"],
            "outside": outside["p50"],
            "outside_p20": outside["p20"],
            "outside_p80": outside["p80"],
            "limit": LIMITS.get(self.row.name),
            "cpu_time": found["cpu"]["p50"],
            "sealing": (found["full"]["p50"] - outside["p50"]) / BLOCK_SIZE,
            "kernels": found["kernels"]["p50"],
            "bare": found["bare"]["p50"],
        }


def main(
    context: Annotated[str, typer.Option(help="Tokens in the cache; k is 1,024.")] = "2k",
    rows: Annotated[str | None, typer.Option(help="By name, comma-separated; a wrong one lists them.")] = None,
    budget: Annotated[int, typer.Option(help="Tokens a step attends.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each kind and row that count.")] = 100,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 1,
    out: OutOption = RESULTS / "overhead.csv",
) -> None:
    """Measure what a decode step costs outside the kernels."""
    chosen, (length,) = choose(make_rows(budget), rows), numbers(context)[:1]
    language_model, _ = load(model, dtype, threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, language_model.config.vocab_size, (1, length + WARM_UP + rounds), generator=generator)
    attention, dice = BareAttention(), random.Random(0)
    bare = bare_copy(language_model, attention)
    with torch.inference_mode():
        series = [Series(language_model, bare, attention, row, ids[:, :length]) for row in tqdm(chosen, desc="prompts")]
        tokens = ids[:, length:].split(1, 1)
        for number, token in enumerate(tqdm(tokens, desc="steps")):
            for one in series:
                one.round(token, dice)
                if number < WARM_UP:
                    one.clear()
    records = [one.record() | {"context": length, "budget": budget, "rounds": rounds, "dtype": dtype} for one in series]
    write_csv(out, records)
    show("microseconds a layer and token", [dict(list(r.items())[:12]) for r in records])


if __name__ == "__main__":
    command(main)()
