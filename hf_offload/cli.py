"""The command line: `hf-offload profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_offload import assets
from hf_offload.profile import Profile, check_profiling, profile_intervals

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHOWN_STEPS = (1, 8, 32)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Tools for hf_offload, the KV cache with a few blocks on the GPU and the rest in host memory."""


@app.command()
def profile(
    model: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="SmolLM2-135M-Instruct")] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text to read (UTF-8).", show_default="Python's documentation"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of prompt in each window.")] = 4096,
    steps: Annotated[int, typer.Option(help="Tokens decoded in each window: the longest interval to find.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows of the text to average over.")] = 3,
    budget: Annotated[int, typer.Option(help="Tokens that each step attends.")] = 2048,
    resident: Annotated[int | None, typer.Option(help="Tokens kept on the device.", show_default="the budget")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 32,
    threshold: Annotated[float, typer.Option(help="Share of the budget that the CPU may attend, 0 to 1.")] = 0.12,
    dtype: Annotated[str, typer.Option(help=f"Weights and activations: {', '.join(DTYPES)}.")] = "auto",
    out: Annotated[Path, typer.Option(dir_okay=False, help="The profile file to write.")] = Path("profile.json"),
) -> None:
    """Find how many decode steps each layer can go between two recalls, and write them to a file for recall=."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"out={str(out)!r} lies in a folder that does not exist; make it first")
    try:
        check_profiling(
            tokens=tokens, steps=steps, windows=windows, resident=resident, block_size=block_size, budget=budget,
            threshold=threshold,
        )  # fmt: skip
        content = assets.texts("documentation") if text is None else text.read_text(encoding="utf-8")
        language_model, tokenizer = assets.load_model(model, attn_implementation="hybrid_sparse", dtype=DTYPES[dtype])
        ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        found = profile_intervals(
            language_model, torch.tensor([ids]), tokens=tokens, steps=steps, windows=windows, resident=resident,
            block_size=block_size, progress=True, budget=budget, threshold=threshold,
        )  # fmt: skip
        found.write(out)
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"text={str(text)!r} is not UTF-8 ({error}); convert it first") from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    show(found)
    typer.echo(f"wrote {out}; use it with\n\n    {usage(found, out)}\n")


def show(found: Profile) -> None:
    """Print interval and CPU ratio of each measured layer, and the mean over them."""
    at = [step for step in SHOWN_STEPS if step < found.steps] + [found.steps]
    table = Table(title=f"steps between recalls, CPU ratio ≤ {found.threshold:g}")
    for title in ("layer", "interval", *(f"ratio at {step}" for step in at)):
        table.add_column(title, justify="right")
    for layer in found.layers:
        interval, ratios = found.intervals[layer], found.ratio_by_step[layer]
        most = "≥ " if interval == found.steps and ratios[-1] <= found.threshold else ""
        table.add_row(str(layer), f"{most}{interval}", *(f"{ratios[step - 1]:.3f}" for step in at))
    count = len(found.layers)
    means = [sum(found.ratio_by_step[layer][step - 1] for layer in found.layers) / count for step in at]
    mean = sum(found.intervals[layer] for layer in found.layers) / count
    table.add_section()
    table.add_row("mean", f"{mean:.1f}", *(f"{value:.3f}" for value in means))
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def usage(found: Profile, out: Path) -> str:
    """The line of Python that makes a cache with these intervals."""
    size = "" if found.block_size == 32 else f"block_size={found.block_size}, "
    sizes = f"budget={found.budget}, resident={found.resident}, {size}"
    return f'HybridCache(model, "scout", {sizes}recall={json.dumps(str(out))})'


if __name__ == "__main__":
    app()
