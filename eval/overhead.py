"""What a decode step costs outside the kernels, a layer: hooks, checks, plans, tables, statistics, Python.

    python eval/overhead.py
    python eval/overhead.py --rows scout,split-scout-attend --rounds 200

Three steps take turns, round after round, all with the same weights:

- bare: the model with a cache that keeps nothing and an attention function that returns zeros; no hooks.
- plain: with a `HybridCache`, as users run it. Plain − bare is all that it adds (`added`).
- off: the same with the CPU part off. Every launch is made, its arguments checked and handed over, threads woken and
  waited for, but it finds no task: nothing is scored, chosen or attended. Off − bare is what is added outside kernels
  (`outside`); what plain steps take beyond is `kernels`, and what their memory traffic drives out of the caches.

Two things stay on and count: the kernel that writes a token's keys and values, without which later steps would not be
those of a model; and the query that layer-ahead predicts (norm, projection and rotation of the next layer), which is
the model's own arithmetic, but which nobody would compute without a cache that looks ahead. With two memories the work
of a GPU is done by torch operators where there is none, and they count too: such rows show the logic, not what a GPU
would take.

All numbers are microseconds a layer and token. A step that begins a block or fills one is never off. Who fills a block
summarises it, once in `block_size` tokens: `sealing` is what that adds to `added` in such a step, divided by
`block_size`. `cpu_time` is `outside` in CPU time of the whole process: the better number where other programs want the
cores too.
"""

from __future__ import annotations

import copy
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from hf_offload.cpu.kernels.move_records import move_kernel
from hf_offload.cpu.launch import Launch, LaunchSequence
from hf_offload.cpu.thread_pool import Job, Worker

BARE = "bare"
BLOCK_SIZE = 32
WARM_UP = 4  # rounds
NAMES = ("bare", "added", "outside", "cpu", "full")
LIMITS = {"full": 100, "scout": 100}
"""Microseconds a layer that one memory may take outside kernels."""


def make_rows(budget: int) -> list[Row]:
    """The rows to choose from; where a row looks ahead, all of its layers do but the first."""
    rows = [Row("full", "full", {"tier": "one"})]
    for tier, prefix in (("one", ""), ("split", "split-")):
        for lookahead in ("off", "select", "attend") if tier == "split" else ("off",):
            knobs = {"budget": budget, "lookahead": lookahead, "synchronous_layers": (0,), "tier": tier}
            suffix = "" if lookahead == "off" else f"-{lookahead}"
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


def attend_to_nothing(
    module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Zeros in place of attention."""
    batch, heads, length, dim = query.shape
    return query.new_zeros(batch, length, heads, dim), None


def bare_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model over the very same weights that attends to nothing, and whose modules get no hooks of a cache."""
    AttentionInterface.register(BARE, attend_to_nothing)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation(BARE)
    return twin


class Switch:
    """Turns the kernels off. All that is planned while it `watches` is known to it."""

    def __init__(self) -> None:
        self.known: list[weakref.ref[LaunchSequence]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Get to know the sequences of launches that are made inside."""
        real = LaunchSequence.__init__

        def make(sequence: LaunchSequence, launches: Iterable[Launch]) -> None:
            real(sequence, launches)
            self.known.append(weakref.ref(sequence))

        LaunchSequence.__init__ = make  # type: ignore[method-assign]
        try:
            yield
        finally:
            LaunchSequence.__init__ = real  # type: ignore[method-assign]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have nothing computed inside."""
        sequences = [sequence for known in self.known if (sequence := known()) is not None]
        for sequence in sequences:
            sequence.set_tasks(lambda launch: launch.tasks if launch.kernel is move_kernel else 0)
        submit = Worker.submit

        def idle(worker: Worker, work: Callable[[], Any], *args: Any, **kwargs: Any) -> Job:
            return submit(worker, bool, *args, **kwargs)

        Worker.submit = idle  # type: ignore[method-assign]
        try:
            yield
        finally:
            Worker.submit = submit  # type: ignore[method-assign]
            for sequence in sequences:
                sequence.set_tasks(lambda launch: launch.tasks)


def time_step(model: PreTrainedModel, cache: Cache, token: torch.Tensor) -> tuple[float, float]:
    """Decode one token `[1, 1]`: seconds of wall time and of CPU time."""
    cpu, wall = time.process_time(), time.perf_counter()
    model(token, past_key_values=cache)
    return time.perf_counter() - wall, time.process_time() - cpu


class Series:
    """The steps of one row, in turns with bare ones.

    Args:
        model: with `hybrid_sparse` attention.
        bare: its `bare_copy`.
        row: what to measure.
        ids: `[1, N]`, the context.
    """

    def __init__(self, model: PreTrainedModel, bare: PreTrainedModel, row: Row, ids: torch.Tensor) -> None:
        self.model, self.bare, self.row = model, bare, row
        self.empty, self.switch = BareCache(ids.shape[1]), Switch()
        with self.switch.watching():
            self.cache = row.make_cache(model)
            prefill(model, self.cache, ids, chunk=1024)
            for _ in range(2 + ids.shape[1] % 2):  # an even number of tokens: see `round`
                time_step(model, self.cache, ids[:, :1])
        self.micro = 1e6 / len(self.cache.layers)
        self.block_size = self.cache.layers[0].store.block_size
        self.clear()

    def clear(self) -> None:
        """Forget what was measured: it was a warm-up."""
        self.found: dict[str, list[float]] = {name: [] for name in NAMES}

    def round(self, token: torch.Tensor, dice: random.Random) -> None:
        """One step of each kind, in an order that changes."""
        wall, cpu, full = {}, {}, False
        order = dice.sample(("bare", "plain", "off"), 3)
        filled = self.cache.get_seq_length() % self.block_size
        if filled in (0, self.block_size - 2):  # what begins a block or fills one is plain
            order = ["bare", "plain", "off"] if filled == 0 else ["off", "plain", "bare"]
        for kind in order:
            if kind == "bare":
                wall[kind], cpu[kind] = time_step(self.bare, self.empty, token)
            elif kind == "plain":
                wall[kind], cpu[kind] = time_step(self.model, self.cache, token)
                full = self.cache.get_seq_length() % self.block_size == 0
            else:
                worker = self.cache.settings.worker
                worker.settle()  # what is read ahead may still be going on
                with self.switch.off():
                    wall[kind], cpu[kind] = time_step(self.model, self.cache, token)
                    worker.settle()
        values = {
            "bare": wall["bare"],
            "outside": wall["off"] - wall["bare"],
            "cpu": cpu["off"] - cpu["bare"],
            "full" if full else "added": wall["plain"] - wall["bare"],
        }
        for name, value in values.items():
            self.found[name].append(value * self.micro)

    def record(self) -> dict[str, Any]:
        """Medians; of what is added, the 20th and 80th percentile too."""
        found = {name: percentiles(values or [float("nan")]) for name, values in self.found.items()}
        added, outside = found["added"], found["outside"]
        return {
            "row": self.row.name,
            "added": added["p50"],
            "added_p20": added["p20"],
            "added_p80": added["p80"],
            "outside": outside["p50"],
            "outside_p20": outside["p20"],
            "outside_p80": outside["p80"],
            "limit": LIMITS.get(self.row.name),
            "cpu_time": found["cpu"]["p50"],
            "sealing": (found["full"]["p50"] - added["p50"]) / self.block_size,
            "kernels": added["p50"] - outside["p50"],
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
    dice, bare = random.Random(0), bare_copy(language_model)
    with torch.inference_mode():
        series = [Series(language_model, bare, row, ids[:, :length]) for row in tqdm(chosen, desc="prompts")]
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
