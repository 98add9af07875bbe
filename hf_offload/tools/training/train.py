"""A training run of `hf-offload train-fluxion`: windows of texts, a file of samples each, then the fit (§5.2, §7)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload.blocks.digests import DIGESTS
from hf_offload.files import tensor_file
from hf_offload.files.fingerprint import fingerprint, likeness
from hf_offload.knobs import check_choice, check_count
from hf_offload.model.hooks import find_layers
from hf_offload.policies.fluxion.block_attention import BLOCK
from hf_offload.policies.fluxion.predictor import save_predictors
from hf_offload.tools.measuring import cut
from hf_offload.tools.training.fitting import Fitting, fit_predictor
from hf_offload.tools.training.needle_samples import ask
from hf_offload.tools.training.report import quality
from hf_offload.tools.training.samples import Samples, Sampling, capture, layer_samples

PREDICTOR, REPORT, SETTINGS = "predictor.safetensors", "report.json", "settings.json"


@dataclass(frozen=True)
class Window:
    """A stretch of a text that the model reads.

    Args:
        ids: token ids `[1, context]`.
        text: the number of the text.
        held_out: whether it is for measuring and stopping only.
        asked: whether facts are hidden in it, with questions for them.
    """

    ids: torch.Tensor
    text: int
    held_out: bool
    asked: bool = False


def cut_windows(texts: Sequence[Sequence[int]], context: int, most: int) -> list[Window]:
    """Cut texts into windows, and hold out the last quarter of each text's windows, at least one.

    Where no text has two windows, the last text is held out.

    Args:
        texts: token ids.
        context: tokens of a window.
        most: windows of a text, spread evenly over it.

    Returns:
        The windows, held-out ones last.

    Raises:
        ValueError: texts that are too short, or too few.
    """
    parts = []
    for ids in texts:
        count = min(len(ids) // context, most)
        if not count:
            raise ValueError(f"a text has {len(ids)} tokens, fewer than context={context}; use longer texts or less")
        parts.append(cut(torch.tensor([ids], dtype=torch.int64, device="cpu"), context, count, 0))
    kept = [max(len(part) // 4, 1) if len(part) > 1 else 0 for part in parts]
    if not any(kept):
        kept[-1] = len(parts[-1])
    windows = [
        Window(window, text, held_out=place >= len(part) - kept[text])
        for text, part in enumerate(parts)
        for place, window in enumerate(part)
    ]
    if all(one.held_out for one in windows):
        raise ValueError(f"the texts make one window of context={context} tokens; use more text or a shorter context")
    return _held_out_last(windows)


def _held_out_last(windows: list[Window]) -> list[Window]:
    return sorted(windows, key=lambda one: one.held_out)


def ask_again(windows: list[Window], most: int, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> list[Window]:
    """Add some windows of each text once more, with hidden facts, and questions where prompts end.

    Args:
        windows: from `cut_windows`.
        most: how many of a text's windows; from two on, the first and the last are among them.
        tokenizer: the model's.
        sampling: the settings; its prompts end with questions.

    Returns:
        All windows, held-out ones last.

    Raises:
        ValueError: the interval is too short.
    """
    chosen = set()
    for text in {one.text for one in windows}:
        own = [number for number, one in enumerate(windows) if one.text == text]
        numbers = torch.linspace(0, len(own) - 1, min(most, len(own)), dtype=torch.float32, device="cpu")
        chosen |= {own[int(i)] for i in numbers}
    first, local = sampling.sinks, sampling.local + 2 * BLOCK
    asked = []
    for number in sorted(chosen):
        tokens = windows[number].ids[0].tolist()
        ids = ask(tokens, tokenizer, interval=sampling.interval, first=first, local=local, seed=number)
        asked.append(replace(windows[number], ids=ids, asked=True))
    return _held_out_last(windows + asked)


def check_sampling(sampling: Sampling, context: int) -> None:
    """Check settings before a model is loaded for them.

    Raises:
        ValueError: a value that is not allowed, with the remedy.
    """
    check_choice("digest", sampling.digest, tuple(DIGESTS))
    for name in ("sinks", "local"):
        value = getattr(sampling, name)
        if value < BLOCK or value % BLOCK:
            raise ValueError(f"{name}={value} is not a number of blocks; use a multiple of {BLOCK}")
    if not sampling.taus or not all(0 < tau < 1 for tau in sampling.taus) or len({*sampling.taus}) < len(sampling.taus):
        raise ValueError(f"tau={list(sampling.taus)} are no deviations; use different numbers between 0 and 1")
    least = sampling.sinks + sampling.local + 2 * BLOCK
    if sampling.interval < least:
        raise ValueError(
            f"interval={sampling.interval} leaves the host nothing beside sinks and local tokens; use at least {least}"
        )
    what = f"a count of tokens in an interval of {sampling.interval}"
    check_count("steps", sampling.steps, what=what, most=sampling.interval)
    if context < sampling.interval + sampling.steps:
        raise ValueError(f"context={context} ends before the steps after interval={sampling.interval}; raise it")


def collect(
    model: PreTrainedModel, windows: list[Window], sampling: Sampling, folder: Path, *, progress: bool = False
) -> None:
    """Write the samples of every window to a file; existing files are kept, so that a stopped run continues.

    Under a launcher the windows are divided among its processes.

    Args:
        model: the model.
        windows: to read.
        sampling: which steps are sampled.
        folder: for the files.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the folder holds samples of other settings, or the model cannot be sampled.
    """
    state = PartialState()
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    context = windows[0].ids.shape[1]
    if isinstance(limit, int) and context > limit:
        raise ValueError(f"context={context} is longer than the model's {limit} positions; use {limit}")
    if state.is_main_process:
        _claim(folder, _settings(model, windows, sampling))
    state.wait_for_everyone()
    own = [number for number in range(len(windows)) if number % state.num_processes == state.process_index]
    total = context * len(own)
    with tqdm(total=total, unit="token", disable=not progress or not state.is_main_process) as bar:
        for number in own:
            window, path = windows[number], _shard(folder, number)
            if path.exists():
                bar.update(context)
                continue
            bar.set_description(f"window {number + 1} of {len(windows)}")
            plan = sampling.positions(context, number, asked=window.asked)
            positions = [p for length, steps in plan.items() for p in (length - 1, *steps)]
            parts = [layer_samples(seen, plan, sampling) for seen in capture(model, window.ids, positions, bar.update)]
            tensor_file.replace(path, tensor_file.pack("{}", Samples.joined(parts)._asdict()))
    state.wait_for_everyone()


def train(
    model: PreTrainedModel, windows: list[Window], sampling: Sampling, fitting: Fitting, folder: Path, *,
    progress: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """Fit a predictor for each τ to the collected samples, and write both the file and its report.

    Args:
        model: the model that the samples are from.
        windows, sampling: as they were collected.
        fitting: how the network is trained.
        folder: of the samples; `predictor.safetensors` and `report.json` go there.
        progress: whether to show a progress bar.

    Returns:
        The report; None in processes of a launcher other than the first.
    """
    if not PartialState().is_main_process:
        return None
    trained, held_out = (
        Samples.joined(
            [Samples(**load_file(_shard(folder, i))) for i, one in enumerate(windows) if one.held_out is kept]
        )
        for kept in (False, True)
    )
    count = sum(not one.held_out for one in windows)
    predictors, qualities = {}, {}
    for number, tau in enumerate(sampling.taus):
        features, targets = trained.features_at(number), trained.budgets[..., number]
        measured, wanted = held_out.features_at(number), held_out.budgets[..., number]
        made, epochs = fit_predictor(
            features, targets, measured, wanted, fitting, tau=tau, digest=sampling.digest, sinks=sampling.sinks,
            local=sampling.local, progress=progress,
        )  # fmt: skip
        predictors[tau] = made
        qualities[str(tau)] = {"epochs": epochs, **quality(made, measured, wanted, fitting.fit)}
    report = {
        "samples": len(trained.features), "held_out": len(held_out.features), "windows": count,
        "held_out_windows": len(windows) - count, "asked_windows": sum(one.asked for one in windows),
        "context": windows[0].ids.shape[1], **asdict(sampling), "fitting": asdict(fitting), "quality": qualities,
    }  # fmt: skip
    save_predictors(folder / PREDICTOR, likeness(*_decoder(model)), predictors, report)
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _decoder(model: PreTrainedModel) -> tuple[Any, nn.Module]:
    return model.config.get_text_config(decoder=True), find_layers(model)[0]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"samples-{number:05}.safetensors"


def _settings(model: PreTrainedModel, windows: Sequence[Window], sampling: Sampling) -> dict[str, Any]:
    """What samples of the same run share."""
    texts = [zlib.crc32(one.ids.numpy().tobytes()) for one in windows]
    return dict(json.loads(json.dumps({**asdict(sampling), "texts": texts, "model": fingerprint(*_decoder(model))})))


def _claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of the samples to a folder, or compare them with those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists():
        path.write_text(json.dumps(settings), encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for key, value in settings.items():
        if before.get(key) != value:
            raise ValueError(f"{folder} holds samples with another {key}; name another folder, or empty this one")
