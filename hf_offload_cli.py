"""The command line `hf-offload`: `plan`, `tune`, `profile`, `train-fluxion`, `serve`, `store`.

It is a module beside the package because `import hf_offload` imports torch and Transformers, which takes seconds: help
and wrong options must not wait for that. Each command imports what it runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_offload.files.entries import Listed
    from hf_offload.serving.app import Service
    from hf_offload.tools.profile import Profile

DTYPES = ("auto", "float32", "bfloat16", "float16")
SERVING = ("fastapi", "uvicorn")
SHOWN_STEPS = (1, 8, 32)
UNREAD = 400_000
"""Characters at the beginning of each text of Python's that are not trained on: evaluation scripts read there."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None)

store_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(store_app, name="store", help="List and remove the caches that a PrefixStore has saved.")

Folder = Annotated[Path, typer.Option(help="Folder of the store.", file_okay=False)]
PREFIXES = Path("~/.cache/hf_offload/prefixes")
Model = Annotated[str | None, typer.Option(help="Hub name, folder or GGUF file.", show_default="SmolLM2-135M-Instruct")]
Dtype = Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}.")]
Text = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Text file, UTF-8.", show_default="Python's documentation"),
]


def _example(*lines: str) -> str:
    """The end of a help page; `\\b` keeps the lines as they are."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("hf-offload"))
        raise typer.Exit


@app.callback(epilog=_example("hf-offload plan --context 128k --policy scout --device-memory 24GiB"))
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Tools for hf_offload, the KV cache with a few blocks on the device and the rest in host memory."""


@app.command(
    short_help="Measure each layer's recall interval for policy scout.",
    epilog=_example("hf-offload profile --model Qwen/Qwen3-4B --text book.txt --out profile.json"),
)
def profile(
    model: Model = None,
    text: Text = None,
    tokens: Annotated[int, typer.Option(help="Prompt tokens of a window.")] = 4096,
    steps: Annotated[int, typer.Option(help="Decoded tokens of a window; the longest interval.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows of the text.")] = 3,
    budget: Annotated[int, typer.Option(help="Tokens that a step attends.")] = 2048,
    resident: Annotated[int | None, typer.Option(help="Tokens on the device.", show_default="budget")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 32,
    threshold: Annotated[float, typer.Option(help="Share of the budget that the CPU may attend, 0 to 1.")] = 0.12,
    dtype: Dtype = "auto",
    out: Annotated[Path, typer.Option(dir_okay=False, help="Profile to write.")] = Path("profile.json"),
) -> None:
    """Measure how many decode steps each layer can run between two recalls.

    The file goes into HybridCache(model, "scout", recall=FILE), with two memories: a GPU, or tier="split". The CPU's
    share is a number of tokens, not a time, so a model on the CPU gives a GPU's intervals: two memories are simulated.
    """
    with _mistakes():
        _check_dtype(dtype)
        if not out.parent.is_dir():
            raise ValueError(f"out={str(out)!r} lies in a folder that does not exist; make it first")
        _check_writable(out.parent)
        from hf_offload.tools.profile import check_profiling, profile_intervals

        check_profiling(
            tokens=tokens, steps=steps, windows=windows, resident=resident, block_size=block_size, budget=budget,
            threshold=threshold,
        )  # fmt: skip
        content = _text(text)
        language_model, tokenizer = _load(model, dtype, attn_implementation="hybrid_sparse")
        profile = profile_intervals(
            language_model, _ids(tokenizer, content), tokens=tokens, steps=steps, windows=windows, resident=resident,
            block_size=block_size, progress=True, budget=budget, threshold=threshold,
        )  # fmt: skip
        profile.write(out)
        simulated = language_model.device.type == "cpu"
    _print(profile_table(profile))
    if simulated:
        typer.echo(
            "The model is on the CPU, where two memories were simulated. The intervals are for a GPU: ratios count "
            'tokens, not time. Here the line below needs tier="split", because one memory recalls nothing.'
        )
    typer.echo(f"wrote {out}; use it with\n\n    {usage(profile, out)}\n")


@app.command(
    short_help="Compute the memory that caches take, from a config.",
    epilog=_example(
        "hf-offload plan --model Qwen/Qwen3-4B --context 128k --batch 4 \\",
        "    --policy full --policy scout:budget=1024 --device-memory 24GiB",
    ),
)
def plan(
    model: Model = None,
    context: Annotated[str, typer.Option(help="Tokens of a row; 1k is 1,024.")] = "32k",
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy, such as scout:budget=1024; repeatable.", show_default="all")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Show what fits into it, such as 24GiB.")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Compute the device and host memory that caches take, from the model's config alone."""
    with _mistakes(), _no_garbage_collection():
        _check_dtype(dtype)
        import torch

        from hf_offload.cache.memory_budget import parse_bytes
        from hf_offload.tools import assets
        from hf_offload.tools.plan import DEFAULTS, parse_setting, parse_tokens, plan_table, shape_of

        tokens = parse_tokens(context)
        device = None if device_memory is None else parse_bytes("device-memory", device_memory)
        settings = [parse_setting(text) for text in policy or DEFAULTS]
        with _loading(model):
            config = assets.load_config(model)
        kept = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
        table = plan_table(shape_of(config, kept), settings, context=tokens, batch=batch, device=device)
    _print(table)
    typer.echo("The model's activations and the runtime's own memory come on top.")


@app.command(
    short_help="Find the fastest setting near full attention.",
    epilog=_example("hf-offload tune --model Qwen/Qwen3-4B --text book.txt --target-kl 0.01"),
)
def tune(
    model: Model = None,
    text: Text = None,
    target_kl: Annotated[float, typer.Option(help="KL to full attention, nats a token.")] = 0.02,
    tokens: Annotated[int, typer.Option(help="Context tokens of a window.")] = 4096,
    steps: Annotated[int, typer.Option(help="Decoded tokens of a window.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows of the text.")] = 2,
    tier: Annotated[str | None, typer.Option(help="Memories: one, or split.", show_default="by device")] = None,
    predictor: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of train-fluxion: try fluxion, too.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text file to check the chosen setting on.")
    ] = None,
    dtype: Dtype = "auto",
) -> None:
    """Find the fastest policy, budget, block size and recall whose output stays near full attention on a text."""
    with _mistakes():
        _check_dtype(dtype)
        from hf_offload.tools.tune import check_tuning
        from hf_offload.tools.tune import tune as find_setting

        check_tuning(target_kl, tokens=tokens, steps=steps, windows=windows, tier=tier)
        content = _text(text)
        other = None if held_out is None else _read("held_out", held_out)
        language_model, tokenizer = _load(model, dtype, attn_implementation="hybrid_sparse")
        tuning = find_setting(
            language_model, _ids(tokenizer, content), target_kl, tokens=tokens, steps=steps, windows=windows, tier=tier,
            predictor=predictor, held_out=None if other is None else _ids(tokenizer, other), progress=True,
        )  # fmt: skip
    _print(tuning.table())
    typer.echo(f"{tuning.why}\n\n    {tuning.chosen.line}\n")


@app.command(
    short_help="Train the predictor of policy fluxion.",
    epilog=_example("hf-offload train-fluxion --model Qwen/Qwen3-4B --text book.txt --out fluxion"),
)
def train_fluxion(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for samples and predictor.")],
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Text file, UTF-8; repeatable.", show_default="Python's own"),
    ] = None,
    tau: Annotated[list[float] | None, typer.Option(help="Deviation; repeatable.", show_default="0.1")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows of a text, at most.")] = 4,
    asked: Annotated[int, typer.Option(min=0, help="Windows repeated with hidden facts and questions.")] = 4,
    interval: Annotated[int, typer.Option(help="Tokens between two sampled prompt lengths.")] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps sampled in each interval.")] = 8,
    digest: Annotated[str, typer.Option(help="Block digest: submean, quest or mean.")] = "submean",
    epochs: Annotated[int, typer.Option(help="Passes over the samples, at most.")] = 30,
    under: Annotated[float, typer.Option(help="Loss weight of budgets that are too low.")] = 1.0,
    streaming_at: Annotated[float, typer.Option(help="Probability from which a head is a streaming head.")] = 0.9,
    fit: Annotated[str, typer.Option(help="Block sizes the budget line is fitted to: online or paper.")] = "online",
    dtype: Dtype = "auto",
) -> None:
    """Train the predictor of policy fluxion; the same command continues a run that was stopped.

    The file goes into HybridCache(model, "fluxion", predictor=FILE).
    """
    with _mistakes():
        _check_dtype(dtype)
        from hf_offload.tools import assets
        from hf_offload.tools.training.fitting import Fitting
        from hf_offload.tools.training.samples import Sampling
        from hf_offload.tools.training.train import (
            PREDICTOR,
            REPORT,
            ask_again,
            check_sampling,
            collect,
            cut_windows,
            train,
        )

        sampling = Sampling(interval=interval, steps=steps, taus=tuple(sorted(tau or [0.1])), digest=digest)
        check_sampling(sampling, context)
        fitting = Fitting(epochs=epochs, under=under, streaming_at=streaming_at, fit=fit)
        contents = [_read("text", path) for path in text or []]
        out.mkdir(parents=True, exist_ok=True)
        _check_writable(out)
        contents = contents or [assets.demo_text(kind)[UNREAD:] for kind in assets.KINDS]
        language_model, tokenizer = _load(model, dtype)
        ids = [tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"] for content in contents]
        cut = ask_again(cut_windows(ids, context, windows), asked, tokenizer, sampling)
        collect(language_model, cut, sampling, out, progress=True)
        report = train(language_model, cut, sampling, fitting, out, progress=True)
    if report is not None:
        _print(quality_table(report))
        typer.echo(f"wrote {out / PREDICTOR} and {out / REPORT}")


@app.command(
    short_help="Serve a model as OpenAI does; what was read is kept.",
    epilog=_example(
        "hf-offload serve Qwen/Qwen3-0.6B",
        "hf-offload serve model.gguf --max-context 32k --policy scout:budget=1024",
    ),
)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Hub name, folder or GGUF file.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    store: Annotated[Path, typer.Option(help="Folder of what was read.", file_okay=False)] = PREFIXES,
    store_size: Annotated[str, typer.Option(help="Most bytes of it.")] = "20GiB",
    store_memory: Annotated[str, typer.Option(help="Most bytes in memory.")] = "4GiB",
    policy: Annotated[str, typer.Option(help="A policy, such as scout:budget=1024.")] = "scout",
    dtype: Dtype = "auto",
    max_context: Annotated[
        str | None, typer.Option(help="Tokens of prompt and answer; 1k is 1,024.", show_default="the model's")
    ] = None,
    chats: Annotated[int, typer.Option(min=1, help="Requests that take turns.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 32,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which requests may ask; repeatable.", show_default="localhost")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that may ask; repeatable.", envvar="HF_OFFLOAD_API_KEY", show_envvar=True),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of such keys, one a line.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="A page that browsers may ask from; repeatable.", show_default="none")
    ] = None,
) -> None:
    """Serve a model over OpenAI's API. Prompts and answers are kept: none is read twice, also after a restart.

    Whoever can read the folder can read the prompts. Each API key has prefixes of its own.
    """
    with _mistakes():
        _check_dtype(dtype)
        if missing := [name for name in SERVING if importlib.util.find_spec(name) is None]:
            raise ValueError(f"serve needs {', '.join(missing)}; run `pip install 'hf-offload[serve]'`")
        from hf_offload.blocks.memory import available_bytes
        from hf_offload.cache.memory_budget import parse_bytes
        from hf_offload.tools.plan import most_context, parse_setting, parse_tokens

        name, knobs = parse_setting(policy)
        wanted = None if max_context is None else parse_tokens(max_context)
        parse_bytes("store-size", store_size), parse_bytes("store-memory", store_memory)
        keys = [*(api_key or []), *(() if api_key_file is None else _read("api-key-file", api_key_file).split())]
        if not all(keys) or (api_key_file is not None and not keys):
            raise ValueError("an API key is empty, which lets everybody ask; give one, or leave the option out")
        from hf_offload import PrefixStore, fast_linear
        from hf_offload.serving.app import LOCAL, Service

        language_model, tokenizer = _load(model, dtype, attn_implementation="hybrid_sparse")
        if language_model.device.type == "cpu":
            fast_linear(language_model)
        own = getattr(language_model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        context, remedy = wanted or own or 8192, "a larger --max-context"
        if own and context > own:
            typer.echo(f"Warning: the model was made for {own:,} tokens, not {context:,}", err=True)
        fits = most_context(language_model.config, language_model.dtype, (name, knobs), available_bytes())
        if fits < context:
            typer.echo(f"Warning: memory holds {fits:,} tokens, not {context:,}", err=True)
            context, remedy = fits, "more memory, a smaller --dtype or --policy …:host_dtype=int8"
        made = PrefixStore(
            store, language_model, name, max_bytes=store_size, max_ram=store_memory, tokenizer=tokenizer, **knobs
        )
        shown = "SmolLM2-135M-Instruct" if model is None else Path(model).name if os.path.exists(model) else model
        service = Service(
            language_model, tokenizer, made, shown, context, remedy, keys, chats=chats, queue=queue,
            hosts=LOCAL | {host.lower(), f"[{host.lower()}]", *map(str.lower, allow_host or ())},
        )  # fmt: skip
        if cors:
            from fastapi.middleware.cors import CORSMiddleware

            service.app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])
        typer.echo(f"{shown} at http://{host}:{port}/v1, prefixes in {store}", err=True)
        _answer_until_signal(service, host, port)


def _answer_until_signal(service: Service, host: str, port: int) -> None:
    """Serve until a signal comes, then end the answers and save what was computed. A second signal ends the process.

    Raises:
        OSError: it cannot be saved.
    """
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                os._exit(128 + sig)  # entries of the store are whole at every moment
            self.should_exit = True

        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            service.engine.stop()
            await super().shutdown(sockets)

    server = Server(uvicorn.Config(service.app, host, port, log_level="warning", timeout_graceful_shutdown=30))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # also while the store is closed
    server.run()
    service.engine.close()
    service.store.close()


@store_app.command(epilog=_example("hf-offload store ls --folder ~/.cache/hf_offload/prefixes"))
def ls(folder: Folder = PREFIXES) -> None:
    """List the entries, the least recently used one first: the next to be removed where room is needed."""
    from hf_offload.blocks.memory import size_text
    from hf_offload.tools.tables import make_table

    rows = [
        {
            "entry": _entry_id(entry.path),
            "model": str(entry.about.get("model", "?")),
            "policy": str(entry.about.get("policy", {}).get("name", "?")),
            "tokens": f"{entry.tokens:,}" if entry.tokens else "left behind",
            "own": size_text(entry.own),
            "shared": size_text(entry.shared),
            "last use": time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) if entry.used else "",
            "begins with": " ".join(entry.words.split()),
        }
        for entry in _listed(folder)
    ]
    if rows:
        _print(make_table(str(folder), rows))
    else:
        typer.echo(f"{folder} holds no entries")


@store_app.command(epilog=_example("hf-offload store du"))
def du(folder: Folder = PREFIXES) -> None:
    """Print the bytes on disk of each model and policy; files that several entries share are counted once."""
    from hf_offload.blocks.memory import size_text
    from hf_offload.files.entries import used_bytes
    from hf_offload.tools.tables import make_table

    entries = _listed(folder)
    rows = []
    for namespace in sorted({entry.path.parent for entry in entries}):
        listed = [entry for entry in entries if entry.path.parent == namespace]
        about = listed[0].about
        rows.append({
            "model": str(about.get("model", "?")), "policy": str(about.get("policy", {}).get("name", "?")),
            "entries": str(sum(bool(entry.tokens) for entry in listed)), "bytes": size_text(used_bytes(namespace)),
            "of killed processes": size_text(sum(entry.own for entry in listed if not entry.tokens)),
        })  # fmt: skip
    if rows:
        _print(make_table(str(folder), rows))
    typer.echo(f"{size_text(used_bytes(*{entry.path.parent for entry in entries}))} in {folder}")


@store_app.command(epilog=_example("hf-offload store rm 4f0c2a", "hf-offload store rm --all"))
def rm(
    entry: Annotated[list[str] | None, typer.Argument(help="Entries, as `ls` names them.")] = None,
    folder: Folder = PREFIXES,
    everything: Annotated[bool, typer.Option("--all", help="Remove all entries.")] = False,
) -> None:
    """Remove entries; bytes that others share stay as long as these."""
    from hf_offload.files.entries import clean, locked, remove

    with _mistakes():
        entries = {_entry_id(each.path): each.path for each in _listed(folder) if each.tokens}
        names = list(entries) if everything else entry or []
        if not names and not everything:
            raise ValueError("name entries, as `hf-offload store ls` does, or use --all")
        if unknown := [name for name in names if name not in entries]:
            raise ValueError(f"{folder} has no entry {unknown[0]!r}; `hf-offload store ls` names them")
        if not folder.expanduser().exists():
            return
        with locked(folder.expanduser(), patience=30.0) as alone:
            if not alone:
                raise OSError(f"another process is saving in {folder}; try again")
            clean(folder.expanduser())
            for name in names:
                remove(entries[name])
    typer.echo(f"removed {len(names)}")


def _listed(folder: Path) -> list[Listed]:
    from hf_offload.files.entries import check_folder, list_entries

    with _mistakes():
        check_folder(folder.expanduser())
        return list_entries(folder.expanduser())


def _entry_id(path: Path) -> str:
    """How `ls` names an entry: the first digits of its namespace and its own."""
    return f"{path.parent.name[:4]}{path.name[:8]}"


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """Report what a user can mend as one line on stderr, and end with exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, MemoryError) as error:
        typer.echo(f"Error: {_line(error)}", err=True)
        raise typer.Exit(2) from error


def _line(error: BaseException) -> str:
    """The message of an error in one line; its type where there is none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _loading(model: str | None) -> Iterator[None]:
    """Name the model in errors of Transformers; what a missing package or a damaged folder raises is one of them.

    Raises:
        ValueError: the model cannot be loaded.
    """
    if model == "":
        raise ValueError("model='' names nothing; use a hub name or a folder, or leave it out")
    try:
        yield
    except FileNotFoundError as error:
        if model is None:  # the wheel is not installed; the message has the command
            raise
        raise ValueError(f"model={model!r} cannot be loaded: {_line(error)}") from error
    except Exception as error:  # Transformers has no type for a config that it cannot read
        raise ValueError(f"model={model or 'SmolLM2-135M-Instruct'!r} cannot be loaded: {_line(error)}") from error


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Import and load faster: looking for garbage takes a sixth of `plan`'s time, a third of a GGUF file's loading."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")


def _check_writable(folder: Path) -> None:
    """Find out before hours of work whether files can be written.

    Raises:
        OSError: they cannot.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def _load(model: str | None, dtype: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer.

    Raises:
        ValueError, FileNotFoundError: the model cannot be loaded.
    """
    import torch

    from hf_offload.tools import assets

    typer.echo(f"loading {model or 'SmolLM2-135M-Instruct'} …", err=True)
    with _loading(model), _no_garbage_collection():
        return assets.load_demo_model(model, dtype="auto" if dtype == "auto" else getattr(torch, dtype), **options)


def _text(path: Path | None) -> str:
    """The text that an option names, or Python's documentation."""
    from hf_offload.tools import assets

    return assets.demo_text("documentation") if path is None else _read("text", path)


def _read(option: str, path: Path) -> str:
    """A text file that an option names.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}={str(path)!r} is not UTF-8 ({error}); convert it first") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids `[1, N]` of a text, nothing added."""
    import torch

    return torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])


def _print(table: Table) -> None:
    """Print a table on stdout."""
    from rich.console import Console

    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def quality_table(report: dict[str, Any]) -> Table:
    """What a training reports, a row for each τ."""
    from hf_offload.tools.tables import make_table

    title = f"{report['held_out']:,} held-out samples; budgets at blocks of 32 tokens, in % of the host's"
    rates = {
        "R² bgt₀": "r2_budget0", "R² k": "r2_slope", "streaming": "streaming_share", "precision": "streaming_precision",
        "recall": "streaming_recall",
    }  # fmt: skip
    rows = []
    for tau, figures in report["quality"].items():
        budgets = figures["budgets"]["32"]
        row = {"τ": tau} | {column: f"{figures[rate]:.3f}" for column, rate in rates.items()}
        for name in ("needed", "predicted", "too_little", "too_much"):
            row[name.replace("_", " ")] = f"{100 * budgets[name]:.2f}"
        rows.append(row)
    return make_table(title, rows)


def profile_table(profile: Profile) -> Table:
    """Interval and CPU ratio of each measured layer, and the mean over them."""
    from rich.table import Table

    at = [step for step in SHOWN_STEPS if step < profile.steps] + [profile.steps]
    table = Table(title=f"steps between recalls, CPU ratio ≤ {profile.threshold:g}")
    for title in ("layer", "interval", *(f"ratio at {step}" for step in at)):
        table.add_column(title, justify="right")
    for layer in profile.layers:
        interval, ratios = profile.intervals[layer], profile.ratio_by_step[layer]
        most = "≥ " if interval == profile.steps and ratios[-1] <= profile.threshold else ""
        table.add_row(str(layer), f"{most}{interval}", *(f"{ratios[step - 1]:.3f}" for step in at))
    count = len(profile.layers)
    means = [sum(profile.ratio_by_step[layer][step - 1] for layer in profile.layers) / count for step in at]
    mean = sum(profile.intervals[layer] for layer in profile.layers) / count
    table.add_section()
    table.add_row("mean", f"{mean:.1f}", *(f"{value:.3f}" for value in means))
    return table


def usage(profile: Profile, out: Path) -> str:
    """The line of Python that makes a cache with these intervals."""
    size = "" if profile.block_size == 32 else f"block_size={profile.block_size}, "
    sizes = f"budget={profile.budget}, resident={profile.resident}, {size}"
    return f'HybridCache(model, "scout", {sizes}recall={json.dumps(str(out))})'


def script() -> None:
    """The console script `hf-offload`. `plan` ends without freeing what it imported, which takes up to a second."""
    try:
        app()
    except OSError as error:  # what was found cannot be printed
        with contextlib.suppress(OSError):
            print(f"Error: {_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    except SystemExit as ended:
        if sys.argv[1:2] != ["plan"]:
            raise
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))


if __name__ == "__main__":
    script()
