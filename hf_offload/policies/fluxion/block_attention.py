"""Attention of one query over tokens, block by block, in torch: partials of blocks can be joined or left out."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from hf_offload.scores import Scores, softmax

BLOCK = 16
"""Tokens of the smallest block."""

Partial: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""out `[…, D]` and lse `[…]`, fp32, natural logarithm; 0 and −inf where nothing was attended."""


class Tokens(NamedTuple):
    """Consecutive tokens of a layer.

    Args:
        key, value: `[B, Hkv, T, D]`, of any float dtype.
        valid: `[B, T]` bool; the others are padding.
    """

    key: torch.Tensor
    value: torch.Tensor
    valid: torch.Tensor


def logits(query: torch.Tensor, tokens: Tokens, scale: float) -> torch.Tensor:
    """scale · q·k of every token, fp32 `[B, Hq, T]`; −inf for padding. query: `[B, Hq, D]`."""
    return Scores(scale).of_tokens(query.float().contiguous(), tokens.key, tokens.valid[:, None]).flatten(1, 2)


def attend(query: torch.Tensor, tokens: Tokens, scale: float) -> Partial:
    """Attention over all valid tokens, as out `[B, Hq, D]` and lse `[B, Hq]`; query: `[B, Hq, D]`."""
    out, lse = join_blocks(attend_blocks(query, tokens, scale), -1)
    return out[..., 0, :], lse[..., 0]


def attend_blocks(query: torch.Tensor, tokens: Tokens, scale: float) -> Partial:
    """Attention over each block of 16 tokens alone.

    Args:
        query: `[B, Hq, D]`.
        tokens: `[B, Hkv, T, D]`; the last block may have fewer.
        scale: softmax scale.

    Returns:
        out `[B, Hq, n, D]` and lse `[B, Hq, n]`.
    """
    short = -tokens.valid.shape[1] % BLOCK
    if short:
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in tokens[:2])
        tokens = Tokens(key, value, torch.nn.functional.pad(tokens.valid, (0, short)))
    batch, heads, length, dim = tokens.key.shape
    count = length // BLOCK
    group = query.shape[1] // heads
    scores = logits(query, tokens, scale).view(batch, heads, group, count, BLOCK)
    weights, lse = softmax(scores)
    # Padding may hold anything.
    value = tokens.value.float().masked_fill(~tokens.valid[:, None, :, None], 0.0)
    out = weights.transpose(2, 3) @ value.view(batch, heads, count, BLOCK, dim)
    return out.transpose(2, 3).flatten(1, 2), lse.flatten(1, 2)


def in_runs(x: torch.Tensor, run: int, fill: float = 0) -> torch.Tensor:
    """The last dimension in runs of `run`, at least one, the last one filled up: `[…, ⌈n / run⌉, run]` of `[…, n]`."""
    count = max(-(-x.shape[-1] // run), 1)
    return torch.unflatten(torch.nn.functional.pad(x, (0, count * run - x.shape[-1]), value=fill), -1, (count, run))


def join_blocks(parts: Partial, run: int) -> Partial:
    """Partials of `run` consecutive blocks each, from those of single blocks.

    Args:
        parts: out `[…, n, D]` and lse `[…, n]`.
        run: blocks to join; −1: all.

    Returns:
        out `[…, ⌈n / run⌉, D]` and lse `[…, ⌈n / run⌉]`; one of no tokens where n is 0.
    """
    out, lse = parts
    run = max(lse.shape[-1], 1) if run == -1 else run
    runs = in_runs(lse, run, -torch.inf)
    out = torch.nn.functional.pad(out, (0, 0, 0, runs.shape[-2] * run - lse.shape[-1]))
    weights, total = softmax(runs)
    return (weights[..., None, :] @ torch.unflatten(out, -2, runs.shape[-2:]))[..., 0, :], total


def from_first_block(
    blocks: Partial, valid: torch.Tensor, scores: torch.Tensor
) -> tuple[Partial, torch.Tensor, torch.Tensor]:
    """Rotate every row to begin with its first block that has a token, as its runs do.

    Args:
        blocks: out `[B, Hq, n, D]` and lse `[B, Hq, n]`.
        valid: `[B, T]` bool, of their tokens.
        scores: `[B, Hq, n]`.
    """
    filled = in_runs(valid, BLOCK)
    first = filled.any(-1).int().argmax(1)
    if not first.any():
        return blocks, valid, scores
    order = (torch.arange(filled.shape[1], device=valid.device) + first[:, None]) % filled.shape[1]
    heads = order[:, None].expand(scores.shape)
    out = blocks[0].take_along_dim(heads[..., None], 2)
    rows = filled.take_along_dim(order[..., None], 1).flatten(1)
    return (out, blocks[1].gather(2, heads)), rows, scores.gather(2, heads)
