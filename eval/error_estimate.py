"""Does the error that drawn keys tell of themselves agree with the true one?

    python eval/error_estimate.py
    python eval/error_estimate.py --samples 128,512 --contexts 6k --kinds prose --steps 300

With `check_every=1` each step compares one layer with full attention. For each query head of it a point shows the
relative error of the softmax's sum: estimated from the drawn keys alone, and true. The table has the share of points
whose true error is within three times the estimate, and both errors in the mean square.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

import common
from hf_offload.tools import measuring
from plotting import plot

FACTOR = 3.0


def points_of(model: Any, samples: int, reading: measuring.Reading) -> list[dict[str, float]]:
    """The errors of the checked heads after one reading."""
    cache = measuring.hold(model, "scout", {"samples": samples, "check_every": 1}, reading)
    measuring.follow(model, cache, reading.following)
    return [
        {"layer": layer["layer"], "estimated": estimated, "true": true}
        for layer in cache.stats().as_dict()["layers"]
        for estimated, true in layer["checked_errors"]
    ]


def summary(points: list[dict[str, float]]) -> dict[str, float]:
    """The share within `FACTOR` of the estimate, and root mean squares."""
    within = sum(point["true"] <= FACTOR * point["estimated"] for point in points)
    roots = {x: math.sqrt(sum(point[x] ** 2 for point in points) / len(points)) for x in ("estimated", "true")}
    return {"points": len(points), "within": within / len(points), **roots}


def main(
    samples: Annotated[str, typer.Option(help="Values of samples, comma-separated.")] = "128,512",
    contexts: common.ContextsOption = "6k",
    kinds: common.KindsOption = common.KINDS,
    steps: common.StepsOption = 300,
    *,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Compare estimated with true errors."""
    places = [(length, kind) for length in common.numbers(contexts) for kind in common.kinds_of(kinds)]
    numbers = common.numbers(samples)
    model, tokenizer = setting.load()
    model.set_attn_implementation("hybrid_sparse")
    found: list[dict[str, Any]] = []
    with tqdm(total=len(places) * len(numbers)) as bar, torch.inference_mode():
        for length, kind in places:
            ids = setting.window(tokenizer, kind, common.OFFSETS[kind][0], length + steps)
            reading = measuring.read(model, ids.to(model.device), steps)
            for number in numbers:
                size = {"samples": number, "context": length, "kind": kind, "steps": steps}
                found += [size | point for point in points_of(model, number, reading)]
                bar.update()
    lines = []
    for number in numbers:
        mine = [point for point in found if point["samples"] == number]
        lines.append({"samples": number, "layer": "all", **summary(mine)})
        for layer in sorted({point["layer"] for point in mine}):
            lines.append({"samples": number, "layer": layer} | summary([p for p in mine if p["layer"] == layer]))
    size = {"contexts": contexts.replace(",", " "), "kinds": kinds.replace(",", " "), "steps": steps}
    setting.write([line | size for line in lines])
    with plot(setting.beside(".png"), 1, len(numbers), figsize=(5.5 * len(numbers), 5), squeeze=False) as axes:
        for one, number in zip(axes.flat, numbers, strict=True):
            mine = [point for point in found if point["samples"] == number]
            drawn = one.scatter(*([max(p[x], 1e-6) for p in mine] for x in ("estimated", "true")),
                                c=[p["layer"] for p in mine], s=2)  # fmt: skip
            ends = [1e-5, 1.0]
            one.plot(ends, ends, color="black", linewidth=1)
            one.plot(ends, [FACTOR * end for end in ends], color="black", linewidth=1, linestyle="dashed")
            one.set(xscale="log", yscale="log", xlabel="estimated error of the sum", title=f"samples={number}")
            one.figure.colorbar(drawn, ax=one, label="layer")
        axes[0, 0].set(ylabel="true error")
    common.show("errors of the softmax's sum", [line for line in lines if line["layer"] == "all"])


if __name__ == "__main__":
    common.command(main)()
