"""Offline profiling of recall intervals: decode steps between two recalls of each layer (ScoutAttention §3.4)."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from hf_offload.cache.memory_budget import resident_tokens
from hf_offload.cache.settings import check_block_size
from hf_offload.cache.stats import KEEP_STEPS
from hf_offload.hybrid_cache import HybridCache
from hf_offload.knobs import MOST, check_count
from hf_offload.model.hooks import cache_argument
from hf_offload.policies.registry import Scout, make_policy
from hf_offload.tools.measuring import cut

VERSION = 1
Curves: TypeAlias = dict[int, list[float]]  # the CPU ratio of each step, by layer number
UNMEASURED = 1  # the interval of a layer that is not offloaded; such a layer never recalls


@dataclass(frozen=True)
class Profile:
    """Contents of a profile file.

    Args:
        model: name, model_type and sizes of the profiled model.
        budget, resident: attended and resident tokens of a row and KV head.
        block_size: tokens of a block.
        digest: the digest by which blocks were chosen.
        threshold: the largest allowed CPU ratio.
        steps: decode steps of a window; an interval of as many steps means that the ratio stayed below the threshold.
        windows: number of windows of the text; tokens: prompt tokens of each.
        layers: numbers of the measured layers. The others (sliding windows, linear attention) are not offloaded; they
            have the unused interval 1 and an empty list of ratios.
        intervals: steps between two recalls, for each layer of the model.
        ratio_by_step: for each layer, the CPU ratio at each step after placement, the mean over the windows.
    """

    model: dict[str, Any]
    budget: int
    resident: int
    block_size: int
    digest: str
    threshold: float
    steps: int
    windows: int
    tokens: int
    layers: list[int]
    intervals: list[int]
    ratio_by_step: list[list[float]]

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically.

        Raises:
            OSError: the file cannot be written; an older file is unchanged.
        """
        path = Path(path)
        new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        fields = {"version": VERSION, **asdict(self)}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        try:
            new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def check_profiling(
    *,
    tokens: int = 4096,
    steps: int = 64,
    windows: int = 3,
    resident: int | None = None,
    block_size: int = 32,
    **knobs: Any,
) -> tuple[Scout, int]:
    """Check the settings of a profiling run before a model is loaded.

    Args: as for `profile_intervals`.

    Returns:
        The policy to run, and the resident set in tokens.

    Raises:
        ValueError: a value that is not allowed, or a prompt that fits into the resident set or the budget.
    """
    for name, value, most in (("tokens", tokens, MOST), ("steps", steps, KEEP_STEPS), ("windows", windows, MOST)):
        check_count(name, value, what="a count", most=most)
    check_block_size(block_size)
    if "recall" in knobs:
        raise ValueError(f"recall={knobs['recall']!r} would hide what is measured; leave recall out")
    policy = cast(
        Scout, make_policy("scout", {"lookahead": "attend", **knobs, "recall": 0}).with_defaults(two_memories=True)
    )
    policy.check(block_size=block_size, two_memories=True)
    assert policy.budget is not None  # with two memories there is one
    resident = resident_tokens(resident, policy, block_size)
    if tokens <= max(resident, policy.budget):
        raise ValueError(
            f"tokens={tokens} of prompt all fit into resident={resident} or budget={policy.budget}: nothing is left to "
            "recall; use a longer prompt, or a smaller budget and resident set"
        )
    return policy, resident


def profile_intervals(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    tokens: int = 4096,
    steps: int = 64,
    windows: int = 3,
    resident: int | None = None,
    block_size: int = 32,
    progress: bool = False,
    **knobs: Any,
) -> Profile:
    """Measure for each layer the most steps between recalls that keep the CPU's share of the budget within a threshold.

    For each window of the text, the prompt is read, the resident set is placed as a recall would choose it, and the
    following tokens are decoded without recall. The CPU ratio rises from step to step. The interval of a layer is the
    number of steps until its ratio, averaged over the windows, passes the threshold.

    Args:
        model: a model with `attn_implementation="hybrid_sparse"`; on the CPU two memories are simulated.
        ids: token ids of a real text, int64 `[1, N]` or `[N]`; windows are spread evenly over it.
        tokens: prompt tokens of a window.
        steps: decode steps of a window, the longest interval that can be measured.
        windows: number of windows to average over; their decoded tokens do not overlap.
        resident: resident tokens of a row and KV head; by default the budget.
        block_size: tokens of a block.
        progress: whether to show a progress bar.
        knobs: knobs of `Scout`: `budget`, `threshold` (CPU ratio, §3.4: 0.12), `digest`, …; `lookahead` defaults to
            `"attend"`, which a GPU uses.

    Raises:
        ValueError: a value that is not allowed, a text that is too short, or a model that cannot work with the cache.
    """
    policy, resident = check_profiling(
        tokens=tokens, steps=steps, windows=windows, resident=resident, block_size=block_size, **knobs
    )
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids of shape {list(ids.shape)} are not one text; use token ids of shape [1, N]")
    parts = cut(ids, tokens + steps, windows, steps)  # no token is decoded in two of them
    _check_positions(model, tokens + steps)
    tier = "split" if model.device.type == "cpu" else None
    cache = HybridCache(model, policy, tier=tier, resident=resident, block_size=block_size)
    curves: list[Curves] = []
    with torch.inference_mode(), tqdm(total=windows * steps, unit="step", disable=not progress) as bar:
        for part in parts:
            bar.set_description(f"window {len(curves) + 1} of {windows}")
            curves.append(_run(model.base_model, cache, part.to(model.device), tokens, bar))
    means: dict[int, np.ndarray] = {layer: np.mean([curve[layer] for curve in curves], 0) for layer in curves[0]}
    every = range(len(cache.layers))
    assert policy.budget is not None
    return Profile(
        model=_fingerprint(model),
        budget=policy.budget,
        resident=resident,
        block_size=block_size,
        digest=policy.digest,
        threshold=policy.threshold,
        steps=steps,
        windows=windows,
        tokens=tokens,
        layers=sorted(means),
        intervals=[longest_interval(means[i], policy.threshold) if i in means else UNMEASURED for i in every],
        ratio_by_step=[np.round(means[i], 4).tolist() if i in means else [] for i in every],
    )


def longest_interval(ratios: Sequence[float] | np.ndarray, threshold: float) -> int:
    """Return the most steps for which a CPU ratio stays at or below a threshold, at least 1 (§3.4).

    The ratio at each step is compared, not its mean since the last recall; for a steadily rising ratio that mean stays
    well below the threshold (the paper: 8.2 % for 12 %). A single token that needs unusual blocks must not end the
    interval, so the comparison uses the rising trend of the measured curve.

    Args:
        ratios: CPU ratio at the first, second, … step after a recall.
        threshold: the largest allowed ratio.
    """
    below = int(np.count_nonzero(rising_trend(ratios) <= threshold + 1e-9))
    return max(below, 1)


def rising_trend(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the nondecreasing curve with the least squared distance to the values (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean and length of each constant part
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] >= mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return np.array([mean for mean, count in pools for _ in range(count)])


def _run(decoder: torch.nn.Module, cache: HybridCache, ids: torch.Tensor, tokens: int, bar: tqdm) -> Curves:
    """Return the CPU ratio at each step of each offloaded layer, for one window `[1, tokens + steps]`."""
    cache.reset()
    given = cache_argument(decoder, cache)
    decoder(ids[:, :tokens], **given, use_cache=True)
    for token in ids[0, tokens:]:
        decoder(token.view(1, 1), **given, use_cache=True)
        bar.update()
    rows = cache.stats().as_dict()["layers"]
    return {row["layer"]: row["cpu_ratio_by_step"] for row in rows if row["cpu_ratio_by_step"]}


def _check_positions(model: PreTrainedModel, length: int) -> None:
    """Warn if a window is longer than the model's positions, which scaled positions may allow."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        warnings.warn(
            f"windows of {length} tokens are longer than the {limit} that the model was made for; use fewer tokens "
            "unless its positions are scaled",
            stacklevel=3,
        )


def _fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return name, type, sizes and dtype of a model; of an absolute path only the last part."""
    config, name = model.config.get_text_config(decoder=True), str(model.config.name_or_path)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "name": Path(name).name if Path(name).is_absolute() else name,
        "model_type": config.model_type,
        **{size: getattr(config, size, None) for size in sizes},
        "dtype": str(model.dtype).removeprefix("torch."),
    }
