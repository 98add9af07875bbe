"""What Fluxion's prediction costs: features and network, as a share of a decode step.

    python eval/predictor_share.py --predictor predictor.safetensors
    python eval/predictor_share.py --predictor predictor.safetensors --contexts 2k,8k --batches 1,4 --steps 64

With one memory every layer predicts in one launch of compiled code, which is timed by itself here: microseconds a
layer, median over layers and steps. `share` is its part of the step: the sum over the layers against the time of the
whole forward, the median over the steps; `attention_share` the same of the time in the attention function. `statistics`
is what the first step takes longer than the others, in seconds: the prompt's features are made then, once. Rows of a
batch hold the same text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel

from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    command,
    kinds_of,
    load,
    numbers,
    percentiles,
    prefill,
    show,
    text_of,
    window,
    write_csv,
)
from context_attention import Watch
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.policies.fluxion.kernels.predictor import predict_kernel

WARM_UP = 4


class Stopwatch:
    """Times the prediction of every layer.

    Attributes:
        seconds: of each launch.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Launches that follow one another are run one by one inside, and predictions are timed."""
        together = LaunchSequence.run

        def run(sequence: LaunchSequence) -> None:
            for launch in sequence.launches:
                alone, start = LaunchSequence((launch,)), time.perf_counter()
                together(alone)
                if launch.kernel is predict_kernel:
                    self.seconds.append(time.perf_counter() - start)

        LaunchSequence.run = run
        try:
            yield
        finally:
            LaunchSequence.run = together


def measure(model: PreTrainedModel, row: Row, ids: torch.Tensor, steps: int, batch: int) -> dict[str, Any]:
    """One line of the table, after the context ids `[1, N]`."""
    cache = row.make_cache(model)
    rows = ids.expand(batch, -1)
    token = prefill(model, cache, rows, chunk=2048).argmax(-1)[:, None]
    times: dict[str, list[float]] = {name: [] for name in ("step", "attention", "predict", "share", "attention_share")}
    watch, first = Watch(), 0.0
    with watch.watching(model.config._attn_implementation, cache):
        for number in range(WARM_UP + steps):
            stopwatch, watch.seconds, start = Stopwatch(), 0.0, time.perf_counter()
            with stopwatch.watching():
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            step, predicting = time.perf_counter() - start, sum(stopwatch.seconds)
            if number == 0:
                first = step
            if number >= WARM_UP:
                times["step"].append(1e3 * step)
                times["attention"].append(1e3 * watch.seconds)
                times["predict"] += [1e6 * seconds for seconds in stopwatch.seconds]
                times["share"].append(predicting / step)
                times["attention_share"].append(predicting / watch.seconds)
    found = {name: percentiles(values) for name, values in times.items()}
    return {
        "context": ids.shape[1],
        "batch": batch,
        **{name: found[name]["p50"] for name in times},
        "statistics": first - np.median(times["step"]) / 1e3,
        **{f"{name}_{part}": found[name][part] for name in ("predict", "share") for part in ("p20", "p80")},
    }


def main(
    predictor: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Of hf-offload train-fluxion.")],
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated; k is 1,024.")] = "8k",
    batches: Annotated[str, typer.Option(help="Rows, comma-separated.")] = "1",
    tau: Annotated[float, typer.Option(help="One of those that the predictor was trained for.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 64,
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "code",
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "predictor_share.csv",
) -> None:
    """Measure what Fluxion's prediction costs."""
    lengths, sizes, (name,) = sorted(numbers(contexts)), numbers(batches), kinds_of(kind)
    language_model, tokenizer = load(model, dtype, threads)
    ids = window(text_of(name, prose), tokenizer, 0, max(lengths))
    row = Row("fluxion", "fluxion", {"predictor": predictor, "tau": tau, "tier": "one"})
    records = []
    with torch.inference_mode():
        for length, batch in tqdm([(length, batch) for length in lengths for batch in sizes]):
            line = measure(language_model, row, ids[:, :length], steps, batch)
            records.append(line | {"tau": tau, "steps": steps, "kind": name, "dtype": dtype})
            write_csv(out, records)
    show(
        "the prediction: microseconds a layer, and shares of a step in ms", [dict(list(r.items())[:8]) for r in records]
    )


if __name__ == "__main__":
    command(main)()
