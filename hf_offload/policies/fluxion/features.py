"""The 41 features that a head's properties are predicted from (Fluxion, appendix A).

q is the query of a decode step, q′ the anchor, the prompt's last query. Sinks and local tokens are on the device, the
host has those in between; generated tokens count as local. z_i(q) = s · q·k_i / ‖q‖₂ over the host's keys, with s the
softmax scale, in most models 1/√D. Norms ‖·‖₂ of keys and values are taken token by token.

30 features are fixed by the prompt (`prompt_statistics`). 11 change with every step: `kernels.predictor` computes them
from the query, two partials and the prompt's statistics, in decode steps and for training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.policies.fluxion.block_attention import (
    Tokens,
    attend,
    attend_blocks,
    from_first_block,
    join_blocks,
    logits,
)
from hf_offload.policies.fluxion.budgets import GRANULARITIES, deviation_limit, largest_norm, needed_at_blocks
from hf_offload.policies.fluxion.kernels.predictor import PromptArrays

MOMENTS = ("mean", "variance", "skewness", "kurtosis")  # over tokens, of ‖K_cpu‖₂, ‖V_cpu‖₂ and z(q′)
PROMPT_FEATURES = (
    "layer",  # ℓ
    "head",  # h
    "sink_key_norm",  # MEAN ‖K_sink‖₂
    "sink_value_norm",  # MEAN ‖V_sink‖₂
    "host_mean_key_norm",  # ‖MEAN K_cpu‖₂
    "host_mean_value_norm",  # ‖MEAN V_cpu‖₂
    *(f"{of}_{moment}" for of in ("host_key_norm", "host_value_norm", "anchor_z") for moment in MOMENTS),
    "anchor_sink_lse",  # LSE(s_sink(q′))
    "anchor_host_lse",  # LSE(s_cpu(q′)), exact
    "anchor_local_lse",  # LSE(s_local(q′))
    "anchor_sink_out",  # ‖O_sink(q′)‖₂
    "anchor_host_out",  # ‖O_cpu(q′)‖₂
    "anchor_local_out",  # ‖O_local(q′)‖₂
    "anchor_norm",  # ‖q′‖₂
    *(f"anchor_budget_{size}" for size in GRANULARITIES[1:]),  # bgt*(size), the budgets that q′ needs by Eq. 2
    "anchor_largest_out",  # max over heads of ‖Õ_h(q′)‖₂, Õ over what is on the device
)
STEP_FEATURES = (
    "host_length",  # L_cpu
    "device_length",  # L_gpu
    "query_norm",  # ‖q‖₂
    "sink_out",  # ‖O_sink(q)‖₂
    "local_out",  # ‖O_local(q)‖₂
    "largest_out",  # max over heads of ‖Õ_h(q)‖₂
    "sink_lse",  # LSE(s_sink(q))
    "local_lse",  # LSE(s_local(q))
    "host_lse",  # log L_cpu + ‖q‖₂ μ + ½ ‖q‖₂² σ², with μ = mean_z and σ² = anchor_z_variance
    "mean_z",  # s · q · MEAN(K_cpu) / ‖q‖₂
    "query_cosine",  # q·q′ / (‖q‖₂ ‖q′‖₂)
)
FEATURES = (*PROMPT_FEATURES, *STEP_FEATURES)
"""Names of the features, in the order of their columns."""


class PromptStatistics(NamedTuple):
    """Statistics of a prompt in one layer; the first dimension of every tensor is rows.

    Args:
        fixed: fp32 `[B, Hq, 30]`, the features of the prompt.
        directions: fp32 `[B, Hq, 2, D]`: s · MEAN(K_cpu) and q′ / ‖q′‖₂.
        half_variance: fp32 `[B, Hq]`, ½ VAR(z(q′)).
    """

    fixed: torch.Tensor
    directions: torch.Tensor
    half_variance: torch.Tensor

    @property
    def arrays(self) -> PromptArrays:
        """The same for compiled code."""
        return PromptArrays(*(x.contiguous().cpu().numpy() for x in self))


class Moments:
    """Mean, variance, skewness and kurtosis of numbers that arrive in pieces, from their sums of powers in float64."""

    def __init__(self) -> None:
        self.count: torch.Tensor | int = 0
        self.sums: torch.Tensor | float = 0.0

    def add(self, values: torch.Tensor, valid: torch.Tensor) -> None:
        """Add the valid ones, `[B, T]` bool, of values `[B, H, T]`."""
        kept = values.double().masked_fill(~valid[:, None], 0.0)
        square = kept.square()
        powers = torch.stack((kept, square, square * kept, square.square()), -1)
        self.count = self.count + valid.sum(-1)[:, None]
        self.sums = self.sums + powers.sum(2)

    def mean_to_kurtosis(self) -> torch.Tensor:
        """fp32 `[B, H, 4]`: m, σ², E(x − m)³ / σ³, E(x − m)⁴ / σ⁴; the last two 0 where all values are equal."""
        assert isinstance(self.count, torch.Tensor), "no numbers were added"
        first, second, third, fourth = (self.sums / self.count.clamp(min=1)[..., None]).unbind(-1)
        variance = (second - first.square()).clamp(min=0.0)
        cube = third - 3 * first * second + 2 * first**3
        fourth = fourth - 4 * first * third + 6 * first.square() * second - 3 * first**4
        varied = variance > 1e-12 * second
        safe = torch.where(varied, variance, 1.0)
        skewness, kurtosis = cube / safe**1.5, fourth / safe.square()
        return torch.stack((first, variance, skewness * varied, kurtosis * varied), -1).float()


def mean_norm(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The mean over valid tokens of ‖x_t‖₂, fp32 `[B, Hkv]`, from `[B, Hkv, T, D]` and `[B, T]`."""
    norms: torch.Tensor = torch.linalg.vector_norm(x.float(), dim=-1).masked_fill(~valid[:, None], 0.0)
    return norms.sum(-1) / valid.sum(-1, keepdim=True).clamp(min=1)


def prompt_statistics(
    layer: int,
    anchor: torch.Tensor,
    sinks: Tokens,
    local: Tokens,
    host: Iterable[Tokens],
    scores: torch.Tensor,
    *,
    taus: Sequence[float],
    digest: str,
    scale: float,
) -> tuple[PromptStatistics, torch.Tensor]:
    """The statistics of a prompt in one layer; reads the host's keys and values once.

    Args:
        layer: its number.
        anchor: `[B, Hq, D]`, the prompt's last query, as the attention function gets it.
        sinks, local: tokens on the device.
        host: the tokens in between, in tiles of whole blocks of 16; only the last block may be shorter.
        scores: fp32 `[B, Hq, n]`, log masses for the anchor of the host's blocks by their digests.
        taus: the deviations that the anchor's budgets are for (Eq. 2).
        digest: the digest of `scores`.
        scale: softmax scale.

    Returns:
        The statistics, with the budgets for the first of the deviations; and those for all, fp32 `[B, Hq, 4, taus]`.
    """
    anchor = anchor.float()
    length = torch.linalg.vector_norm(anchor, dim=-1)
    keys, values, z, tiles = Moments(), Moments(), Moments(), []
    for tile in host:
        drop = ~tile.valid[:, None, :, None]
        key, value = (x.float().masked_fill(drop, 0.0) for x in tile[:2])
        clean = Tokens(key, value, tile.valid)
        products = logits(anchor, clean, scale).masked_fill(~tile.valid[:, None], 0.0)
        z.add(products / length.clamp(min=1e-12)[..., None], tile.valid)
        keys.add(torch.linalg.vector_norm(key, dim=-1), tile.valid)
        values.add(torch.linalg.vector_norm(value, dim=-1), tile.valid)
        tiles.append((*attend_blocks(anchor, clean, scale), tile.valid, torch.stack((key.sum(2), value.sum(2)), 2)))
    parts, lses, valids, totals = zip(*tiles, strict=True)
    sums = torch.stack(totals).sum(0)  # [B, Hkv, 2, D]
    blocks, valid, scores = from_first_block((torch.cat(parts, 2), torch.cat(lses, 2)), torch.cat(valids, 1), scores)
    group = anchor.shape[1] // sums.shape[1]
    means = sums / valid.sum(-1).clamp(min=1)[:, None, None, None]  # [B, Hkv, 2, D]
    sink, newest = (attend(anchor, tokens, scale) for tokens in (sinks, local))
    host_out, host_lse = (part[:, :, 0] for part in join_blocks(blocks, -1))
    device, whole = merge_partials([sink, newest]), merge_partials([sink, newest, (host_out, host_lse)])
    limit = deviation_limit(whole[0], taus)
    budgets = needed_at_blocks(device, blocks, scores, valid, whole[0], limit, digest=digest)
    kv = torch.cat(
        (
            torch.stack((mean_norm(sinks.key, sinks.valid), mean_norm(sinks.value, sinks.valid)), -1),
            torch.linalg.vector_norm(means, dim=-1),
            keys.mean_to_kurtosis(),
            values.mean_to_kurtosis(),
        ),
        -1,
    ).repeat_interleave(group, 1)
    shape, z_moments = length.shape, z.mean_to_kurtosis()
    heads = torch.arange(shape[1], device=anchor.device).expand(shape)
    outs = (torch.linalg.vector_norm(part, dim=-1) for part in (sink[0], host_out, newest[0]))
    columns = (
        torch.stack((torch.full_like(length, layer), heads.float()), -1), kv, z_moments,
        torch.stack((sink[1], host_lse, newest[1], *outs, length), -1), budgets[..., 0],
        largest_norm(device[0])[..., None],
    )  # fmt: skip
    mean_key = scale * means[:, :, 0].repeat_interleave(group, 1)
    directions = torch.stack((mean_key, anchor / length.clamp(min=1e-12)[..., None]), 2)
    return PromptStatistics(torch.cat(columns, -1), directions, z_moments[..., 1] / 2), budgets
