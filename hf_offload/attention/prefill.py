"""Exact attention of a prompt or append: new tokens attend themselves and, tile by tile, the cached tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.blocks.memory import memory_for
from hf_offload.scores import Scores

MASKED_QUERIES = 512
"""Queries of one attention call where a mask or scores are materialized."""


class MaskPieces:
    """The mask of an append, from which the pieces for attention calls are cut.

    Args:
        mask: None (plain causal); bool `[B, past + Q]`, validity of keys in addition to causality; or a dense mask
            `[B, 1 or Hq, Q, past + Q]` (bool, True = attend; or additive). A query that may attend nothing, by False or
            −inf, gives 0, as under sdpa; one whose keys all have the dtype's least value gives their mean (in float16
            their softmax).
        past: number of cached tokens before the new ones.
        dtype: dtype of the additive pieces.
    """

    def __init__(self, mask: torch.Tensor | None, past: int, dtype: torch.dtype) -> None:
        if mask is not None and mask.ndim not in (2, 4):
            raise ValueError(f"attention mask of shape {tuple(mask.shape)}; use [B, keys] or [B, heads, queries, keys]")
        self.mask, self.past, self.dtype = mask, past, dtype
        # Finite, so that no softmax is NaN. What a mask forbids lies so far below the least value that it can add that
        # it has weight 0 beside any key that it does not forbid.
        self.forbidden = torch.finfo(dtype).min
        self.least = self.forbidden / 2

    def piece(
        self, q0: int, q1: int, k0: int, k1: int, device: torch.device
    ) -> tuple[torch.Tensor | None, bool, torch.Tensor | None, torch.Tensor | None]:
        """The mask of new queries q0…q1-1 and keys k0…k1-1.

        Returns:
            The additive mask (None: no key is masked), is_causal, and for each query `[B or 1, Hq or 1, Q]`: bool,
            whether all of these keys are forbidden or have the least value (None: for no query); int64, how many have
            the least value then (None: no key has it).
        """
        if self.mask is not None and self.mask.ndim == 4:
            part = self.mask[:, :, q0:q1, k0:k1]
            if part.dtype == torch.bool:
                return self._additive(part)
            never = part == float("-inf")
            bias = part.clamp(min=self.least).to(self.dtype).masked_fill_(never, self.forbidden)
            if self.dtype == torch.float16:  # its least value leaves the differences of scores
                return bias, False, never.all(-1), None
            idle = (part <= self.least).all(-1)
            return bias, False, idle, (~never).sum(-1).masked_fill_(~idle, 0)
        all_visible = k1 <= self.past + q0 + 1
        if self.mask is None:
            if all_visible:
                return None, False, None, None
            if k0 == self.past + q0 and k1 - k0 == q1 - q0:
                return None, True, None, None
        visible = (
            torch.arange(k0, k1, device=device) <= torch.arange(self.past + q0, self.past + q1, device=device)[:, None]
        )
        if self.mask is not None:
            visible = visible & self.mask[:, None, None, k0:k1].to(device=device, dtype=torch.bool)
        return self._additive(visible if visible.ndim == 4 else visible[None, None])

    def _additive(self, visible: torch.Tensor) -> tuple[torch.Tensor, bool, torch.Tensor, None]:
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return bias.masked_fill_(~visible, self.forbidden), False, ~visible.any(-1), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dense attention and its log-sum-exp.

    Args:
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, T, D]`.
        bias: additive mask that broadcasts to `[B, Hq, Q, T]`, or None.
        causal: whether query i attends keys 0…i only (Q = T).
        scores: parameters of the model's scores.

    Returns:
        out `[B, Hq, Q, D]` and lse `[B, Hq, Q]` (natural log), fp32.
    """
    group = query.shape[1] // key.shape[1]
    fused = {"cpu": _attend_on_cpu, "cuda": _attend_on_cuda}.get(query.device.type)
    if scores.softcap is not None or fused is None:
        return _attend_by_matmul(query, key, value, bias, causal, scores)
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    return fused(query, key, value, bias, causal, scores.scale)


def _attend_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if bias is not None:
        bias = bias.expand(query.shape[0], -1, query.shape[2], key.shape[2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out.float(), lse.float().view(query.shape[:3])


def _attend_on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with torch's kernels that return the lse: FlashAttention for 16 bits without mask, else mem-efficient."""
    batch, heads, length = query.shape[:3]
    if bias is None and query.dtype != torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
        return out.float(), lse[:, :, :length].float()
    if bias is not None:
        keys = key.shape[2]  # the kernel requires rows aligned to 16 entries
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys].expand(batch, heads, length, keys)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )[:2]
    return out.float(), lse[:, :, :length].float()


def _attend_by_matmul(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    outs, lses = [], []
    for start in range(0, length, MASKED_QUERIES):
        stop = min(start + MASKED_QUERIES, length)
        grouped = query[:, :, start:stop].float().reshape(batch, kv_heads, -1, dim)
        logits = scores.of((grouped @ key.float().transpose(2, 3)).view(batch, heads, stop - start, keys))
        if causal:
            later = torch.arange(keys, device=key.device) > torch.arange(start, stop, device=key.device)[:, None]
            logits = logits.masked_fill(later, float("-inf"))
        if bias is not None:
            logits = logits + (bias[:, :, start:stop].float() if bias.shape[2] > 1 else bias.float())
        # The peak goes first: beside the least values of a mask float32 loses the logarithm of a sum.
        peak = logits.amax(-1, keepdim=True)
        weights = (logits - peak.masked_fill(peak == float("-inf"), 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        out = (weights / total.masked_fill(total == 0, 1.0)).view(batch, kv_heads, -1, keys) @ value.float()
        outs.append(out.view(batch, heads, stop - start, dim))
        lses.append((peak + total.log()).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _with_means(
    partial: tuple[torch.Tensor, torch.Tensor], means: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A partial in which queries without any other key have the mean of those with the mask's least value."""
    out, lse = partial
    if not means:
        return partial
    total, count = (sum(each) for each in zip(*means, strict=True))
    assert isinstance(total, torch.Tensor)
    assert isinstance(count, torch.Tensor)
    alone = ((lse == float("-inf")) & (count > 0)).unsqueeze(-1)
    return torch.where(alone, total / count.clamp(min=1).unsqueeze(-1), out), lse


def append_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: int,
    tiles: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
    mask: torch.Tensor | None,
    *,
    scores: Scores,
    sinks: torch.Tensor | None = None,
    tile: int = 4096,
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
    attended: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Attend cached and new tokens with the new tokens' queries, exactly.

    Args:
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, Q, D]`, the new tokens.
        past: number of cached tokens; tiles: their K and V in tiles, (first token, K, V `[B, Hkv, t, D]`).
        mask: see `MaskPieces`.
        scores: parameters of the model's scores.
        sinks: `[Hq]`, logits of the model's attention sinks, or None.
        tile: the most keys of a piece whose mask or scores are materialized.
        before: out `[B, Hq, Q, D]` and lse `[B, Hq, Q]` over the cached tokens that are not in `tiles`.
        attended: called after each tile and masked piece with the number of its keys.

    Returns:
        `[B, Q, Hq, D]` in the query's dtype.
    """
    length, pieces = query.shape[2], MaskPieces(mask, past, query.dtype)
    cut = mask is not None or scores.softcap is not None  # masks and scores are materialized
    step, span = (min(MASKED_QUERIES, length), tile) if cut else (length, length)
    total: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * -(-length // step)
    means: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in total]
    """For each piece of queries: sums of the values of keys with the mask's least value, and their numbers."""
    remedy = "a smaller prefill_tile, or the prompt in chunks (generate(prefill_chunk_size=...)), needs less"

    def add(first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        stop = first + k.shape[2]
        for i, q0 in enumerate(range(0, length, step)):
            q1 = min(q0 + step, length)
            if first > past + q1 - 1 and (mask is None or mask.ndim == 2):
                continue  # all of these keys are later than these queries
            bias, causal, idle, least = pieces.piece(q0, q1, first, stop, query.device)
            with memory_for(f"attention of {q1 - q0} queries to {stop - first} keys", remedy):
                partial = attend(query[:, :, q0:q1], k, v, bias, causal, scores)
                if least is not None:
                    means[i].append((partial[0] * least.unsqueeze(-1), least))
                if idle is not None:
                    out, lse = partial
                    partial = out.masked_fill(idle.unsqueeze(-1), 0.0), lse.masked_fill(idle, float("-inf"))
            done = total[i]
            total[i] = partial if done is None else merge_partials([done, partial])
        if attended is not None:
            attended(k.shape[2])

    if before is not None:
        for i, q0 in enumerate(range(0, length, step)):
            total[i] = before[0][:, :, q0 : q0 + step], before[1][:, :, q0 : q0 + step]
    for first, k, v in tiles:
        add(first, k, v)
    for first in range(0, length, span):
        add(past + first, key[:, :, first : first + span], value[:, :, first : first + span])
    parts = [_with_means(part, mean) for part, mean in zip(total, means, strict=True) if part is not None]
    out, lse = torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 2)
    if sinks is not None:
        out = merge_partials([(out, lse)], sinks.float().view(1, -1, 1))[0]
    return out.to(query.dtype).transpose(1, 2).contiguous()
