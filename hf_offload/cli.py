"""The command line: `hf-offload plan`, `tune`, `profile`, `train-fluxion`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from hf_offload import assets
from hf_offload.cache.budget import parse_bytes
from hf_offload.fluxion.fitting import Fitting
from hf_offload.fluxion.samples import Sampling
from hf_offload.plan import DEFAULTS, parse_setting, parse_tokens, plan_table, shape_of
from hf_offload.profile import Profile, check_profiling, profile_intervals
from hf_offload.train_fluxion import PREDICTOR, REPORT, ask_again, check_sampling, collect, cut_windows, train
from hf_offload.tune import check_tuning
from hf_offload.tune import tune as find_setting

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHOWN_STEPS = (1, 8, 32)
UNREAD = 400_000
"""Characters at the beginning of each text of Python's that are not trained on: evaluation scripts read there."""

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
        content = assets.demo_text("documentation") if text is None else _read("text", text)
        language_model, tokenizer = assets.load_demo_model(
            model, attn_implementation="hybrid_sparse", dtype=DTYPES[dtype]
        )
        found = profile_intervals(
            language_model, _ids(tokenizer, content), tokens=tokens, steps=steps, windows=windows, resident=resident,
            block_size=block_size, progress=True, budget=budget, threshold=threshold,
        )  # fmt: skip
        found.write(out)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    show(found)
    typer.echo(f"wrote {out}; use it with\n\n    {usage(found, out)}\n")


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="SmolLM2-135M-Instruct")] = None,
    context: Annotated[str, typer.Option(help="Tokens of a row; k is 1,024.")] = "32k",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    policy: Annotated[
        list[str] | None,
        typer.Option(help='A policy with options, "scout:budget=1024"; may be repeated.', show_default="all"),
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help='Of the device, "24GiB": what fits there.')] = None,
    dtype: Annotated[str, typer.Option(help=f"Weights and activations: {', '.join(DTYPES)}.")] = "auto",
) -> None:
    """Say what caches take of device and host memory, from the model's config alone."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    try:
        tokens = parse_tokens(context)
        device = None if device_memory is None else parse_bytes("device-memory", device_memory)
        config = assets.load_config(model)
        kept = DTYPES[dtype] if dtype != "auto" else getattr(config, "dtype", None) or torch.float32
        assert isinstance(kept, torch.dtype)
        shape = shape_of(config, kept)
        settings = [parse_setting(text) for text in policy or DEFAULTS]
        table = plan_table(shape, settings, context=tokens, batch=batch, device=device)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    typer.echo("The model's activations and the runtime's own memory come on top.")


@app.command()
def tune(
    model: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="SmolLM2-135M-Instruct")] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text to read (UTF-8).", show_default="Python's documentation"),
    ] = None,
    target_kl: Annotated[float, typer.Option(help="KL to full attention, a token, that is accepted.")] = 0.02,
    tokens: Annotated[int, typer.Option(help="Tokens of context in each window.")] = 4096,
    steps: Annotated[int, typer.Option(help="Tokens decoded in each window.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows of the text.")] = 2,
    tier: Annotated[
        str | None, typer.Option(help='"one" or "split" memory.', show_default="as the model's device says")
    ] = None,
    predictor: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Of train-fluxion: try fluxion, too.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Another text, to check the chosen setting on.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Weights and activations: {', '.join(DTYPES)}.")] = "auto",
) -> None:
    """Find the quickest policy, budget, block size and recall that stay near full attention on a text."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    try:
        check_tuning(target_kl, tokens=tokens, steps=steps, windows=windows, tier=tier)
        content = assets.demo_text("documentation") if text is None else _read("text", text)
        other = None if held_out is None else _read("held_out", held_out)
        language_model, tokenizer = assets.load_demo_model(
            model, attn_implementation="hybrid_sparse", dtype=DTYPES[dtype]
        )
        found = find_setting(
            language_model, _ids(tokenizer, content), target_kl, tokens=tokens, steps=steps, windows=windows, tier=tier,
            predictor=predictor, held_out=None if other is None else _ids(tokenizer, other), progress=True,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 140).print(found.table())
    typer.echo(f"{found.why}\n\n    {found.chosen.line}\n")


@app.command()
def train_fluxion(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for samples, predictor and report.")],
    model: Annotated[str | None, typer.Option(help="Hub name or folder.", show_default="SmolLM2-135M-Instruct")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Text (UTF-8); may be repeated.", show_default="Python's own"),
    ] = None,
    tau: Annotated[list[float] | None, typer.Option(help="Deviation; may be repeated.", show_default="0.1")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window of text.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows of each text, at most.")] = 4,
    asked: Annotated[
        int, typer.Option(min=0, help="Windows of each text that are read again, with facts hidden and asked for.")
    ] = 4,
    interval: Annotated[int, typer.Option(help="Tokens between two prompt lengths.")] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps sampled in each interval.")] = 8,
    digest: Annotated[str, typer.Option(help="What blocks are chosen by: submean or quest.")] = "submean",
    epochs: Annotated[int, typer.Option(help="Passes over the samples, at most.")] = 30,
    under: Annotated[float, typer.Option(help="Weight of budgets predicted too low, against too high.")] = 1.0,
    streaming_at: Annotated[float, typer.Option(help="Probability from which a head needs no retrieval.")] = 0.9,
    fit: Annotated[
        str, typer.Option(help='"online", or "paper": the line of budgets meets that of single tokens.')
    ] = "online",
    dtype: Annotated[str, typer.Option(help=f"Weights and activations: {', '.join(DTYPES)}.")] = "auto",
) -> None:
    """Train a predictor of what attention heads need of the host, for policy fluxion; goes on where it was stopped."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
    sampling = Sampling(interval=interval, steps=steps, taus=tuple(sorted(tau or [0.1])), digest=digest)
    try:
        check_sampling(sampling, context)
        fitting = Fitting(epochs=epochs, under=under, streaming_at=streaming_at, fit=fit)
        contents = [_read("text", path) for path in text or []]
        contents = contents or [assets.demo_text(kind)[UNREAD:] for kind in assets.KINDS]
        language_model, tokenizer = assets.load_demo_model(model, dtype=DTYPES[dtype])
        ids = [tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"] for content in contents]
        cut = ask_again(cut_windows(ids, context, windows), asked, tokenizer, sampling)
        collect(language_model, cut, sampling, out, progress=True)
        report = train(language_model, cut, sampling, fitting, out, progress=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if report is not None:
        show_quality(report)
        typer.echo(f"wrote {out / PREDICTOR} and {out / REPORT}")


def _read(option: str, path: Path) -> str:
    """A text file that an option names.

    Raises:
        typer.BadParameter: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{option}={str(path)!r} is not UTF-8 ({error}); convert it first") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids `[1, N]` of a text, nothing added."""
    return torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])


def show_quality(report: dict[str, Any]) -> None:
    """Print what a training reports, a row for each τ."""
    table = Table(title=f"{report['held_out']:,} held-out samples; budgets at blocks of 32 tokens, in % of the host's")
    titles = (
        "τ",
        "R² bgt₀",
        "R² k",
        "streaming",
        "precision",
        "recall",
        "needed",
        "predicted",
        "too little",
        "too much",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for tau, found in report["quality"].items():
        rates = ("r2_budget0", "r2_slope", "streaming_share", "streaming_precision", "streaming_recall")
        budgets = (found["budgets"]["32"][name] for name in ("needed", "predicted", "too_little", "too_much"))
        table.add_row(tau, *(f"{found[name]:.3f}" for name in rates), *(f"{100 * value:.2f}" for value in budgets))
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


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
