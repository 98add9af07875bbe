"""Which kernels does a decode step with two memories launch in each layer, on GPU and CPU, and in which order?

    python eval/launches.py
    python eval/launches.py --row scout:budget=96,lookahead=select --row quest:budget=96

The device is simulated on the CPU (`tier="split"`). A call of a function of the package that would launch a Triton
kernel on a GPU counts as a launch of that kernel; torch's own kernels are not counted. The model is a random one with
four layers.

Layers are the `first` one, one in the `middle` and the `last` one; `between` are launches outside of them. What a
layer's hooks launch for the next one, and what jobs launch that it starts, counts as its own. Steps are the `first` one
after a prompt, one that `fills` a block, one that `recalls` blocks in this layer, or a `usual` one. A row of the CSV is
a launch; `steps` of this kind launched the same in the same order. `by` is the GPU, the CPU (the model's thread waits),
or the CPU `beside` the model.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from types import FunctionType
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import nn
from transformers import PreTrainedModel

import common
import hf_offload
import hf_offload.gpu
from hf_offload.cpu.launch import Launch, LaunchSequence
from hf_offload.cpu.thread_pool import Worker
from hf_offload.policies.hgca.kernels import resident_weights
from records import RESULTS, show, write_csv

BLOCK_SIZE, STEPS = 16, 40
LAYERS = {0: "first", 2: "middle", 3: "last", None: "between"}
SCOUT: dict[str, Any] = {"sinks": 16, "recent": 16}
DRAWN = {**SCOUT, "samples": 60, "resident": 96}
ROWS = {
    "full": {"resident": 96},
    "window": {"budget": 96},
    "quest": {"budget": 96},
    **{name: {} for name in ("h2o", "infinigen", "fixed_hybrid")},
    "fluxion": {"predictor": hf_offload.ConstantPredictor()},
    "hgca": {"window": 96, "rescue": 0},
    "hgca rescue": {"window": 96, "rescue": 60},
    **{f"scout budget {mode}": {**SCOUT, "budget": 96, "lookahead": mode} for mode in ("off", "select", "attend")},
    **{f"scout samples {mode}": {**DRAWN, "lookahead": mode} for mode in ("off", "select", "attend")},
}
"""Knobs by name of the row, which begins with the policy's."""
KNOWN: dict[str, Any] = {name: common.Row(name, name.split()[0], knobs) for name, knobs in ROWS.items()}
KNOWN["all"] = list(ROWS)

Place = tuple[int, int | None]
"""A step and a layer; None: outside of the layers."""
PLACE: ContextVar[Place] = ContextVar("place", default=(-1, None))
"""Where the model is, or was when it submitted the job that runs here."""
Found = dict[Place, dict[str, list[str]]]
"""Launches by place and by who launched them, in their order."""


def kernel_of(function: FunctionType, own: dict[str, FunctionType]) -> str | None:
    """The Triton kernel that a function launches by itself or by private ones of the `own` functions of its module."""
    names = function.__code__.co_names
    if found := next((name for name in names if name.endswith("_kernel")), None):
        return found
    inner = (kernel_of(own[name], own) for name in names if name.startswith("_") and name in own)
    return next(filter(None, inner), None)


def all_kernels() -> dict[FunctionType, str]:
    """The public functions of the package that launch a Triton kernel, and its name."""
    names = [f"hf_offload.gpu.{found.name}" for found in pkgutil.iter_modules(hf_offload.gpu.__path__)]
    kernels = {}
    for module in [*map(importlib.import_module, names), resident_weights]:
        functions = {name: f for name, f in vars(module).items() if isinstance(f, FunctionType)}
        own = {name: f for name, f in functions.items() if f.__module__ == module.__name__}
        kernels |= {f: kernel for name, f in own.items() if name[0] != "_" and (kernel := kernel_of(f, own))}
    return kernels


@contextmanager
def watching(layers: list[nn.Module]) -> Iterator[Found]:
    """Note all launches, and in which of these layers they are."""
    found: Found = defaultdict(lambda: defaultdict(list))
    numbers = {layer: number for number, layer in enumerate(layers)}

    def noting(by: str, function: Callable[..., Any], kernels: Callable[..., list[str]]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            beside = by == "CPU" and threading.current_thread() is not threading.main_thread()
            found[PLACE.get()]["beside" if beside else by] += kernels(*args)
            return function(*args, **kwargs)

        return noted

    def numbered(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = PLACE.set((PLACE.get()[0], numbers[layer]))
        try:
            return call(layer, *args, **kwargs)
        finally:
            PLACE.reset(before)

    def placed(worker: Worker, work: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return submit(worker, functools.partial(copy_context().run, work), *args, **kwargs)

    run, launch, submit, call = LaunchSequence.run, Launch.__call__, Worker.submit, type(layers[0]).__call__
    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (LaunchSequence, "run", noting("CPU", run, lambda this: [one.kernel.__name__ for one in this.launches])),
        (Launch, "__call__", noting("CPU", launch, lambda this: [this.kernel.__name__])),
        (Worker, "submit", placed),
        (type(layers[0]), "__call__", numbered),
    ]
    for function, kernel in all_kernels().items():
        noted = noting("GPU", function, lambda *_, kernel=kernel: [kernel])
        homes = [module for name, module in sys.modules.items() if name.startswith("hf_offload")]
        changes += [(home, name, noted) for home in homes for name, value in vars(home).items() if value is function]
    with ExitStack() as patches:
        for change in changes:
            patches.enter_context(mock.patch.object(*change))
        yield found


def measure(row: common.Row, model: PreTrainedModel, ids: torch.Tensor, context: int) -> list[dict[str, Any]]:
    """The launches of each kind of step and layer, as records."""
    cache: Any = row.make_cache(model)
    kinds = {}
    with torch.inference_mode(), watching(list(model.model.layers)) as found:
        model(ids[:, :context], past_key_values=cache)
        recalls = [layer.recalls for layer in cache.stats().layers]
        for step, token in enumerate(ids[:, context:].split(1, 1)):
            place = PLACE.set((step, None))
            model(token, past_key_values=cache)
            PLACE.reset(place)
            before, recalls = recalls, [layer.recalls for layer in cache.stats().layers]
            for number in LAYERS:
                recalled = number is not None and recalls[number] > before[number]
                full = (context + step + 1) % BLOCK_SIZE == 0
                kinds[step, number] = "first" if not step else "fills" if full else "recalls" if recalled else "usual"
        cache.drain()
    alike: Counter[Any] = Counter()
    for place, kind in kinds.items():
        launched = sorted((by, tuple(kernels)) for by, kernels in found[place].items())
        alike[place[1], kind, tuple(launched)] += 1
    return [
        {"row": row.name, "layer": LAYERS[number], "step": kind, "steps": steps, "by": by, "order": i, "kernel": kernel}
        for (number, kind, launched), steps in alike.items()
        for by, kernels in launched
        for i, kernel in enumerate(kernels)
    ]


def main(
    rows: common.RowsOption = ["all"],  # noqa: B006
    context: Annotated[str, typer.Option(help="Tokens of the prompt; k is 1,024.")] = "2k",
    out: common.OutOption = RESULTS / "launches.csv",
) -> None:
    """List the kernels that a decode step with two memories launches."""
    (length,) = common.numbers(context)
    knobs = {"tier": "split", "block_size": BLOCK_SIZE, "threads": 1}  # one thread: jobs in the order of submission
    chosen = [common.Row(row.name, row.policy, knobs | row.options) for row in common.rows_of(rows, known=KNOWN)]
    model = common.random_llama()
    common.check_rows(chosen, model)
    ids = torch.randint(3, 150, (1, length + STEPS), generator=torch.Generator().manual_seed(0))
    records = [record for row in chosen for record in measure(row, model, ids, length)]
    write_csv(out, records)
    show("launches of a layer in the middle in most steps", [summary(row.name, records) for row in chosen])


def summary(row: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """A row's numbers of launches in the steps that most of its steps are like."""
    mine = [record for record in records if (record["row"], record["layer"]) == (row, "middle")]
    steps = max(record["steps"] for record in mine)
    counts = Counter(record["by"] for record in mine if record["steps"] == steps)
    return {"row": row, "steps": steps, **{by: counts[by] for by in ("GPU", "CPU", "beside")}}


if __name__ == "__main__":
    common.command(main)()
