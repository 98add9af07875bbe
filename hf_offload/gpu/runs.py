"""The choice of blocks by the query heads of one KV head, where the device takes over what the CPU would choose."""

from __future__ import annotations

import torch

from .require import require


def choose_runs(
    masses: torch.Tensor, wanted: list[int], *, span: int, sums: bool, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each query head take its best runs of `span` blocks; the union, ascending. Nothing waits for the device.

    Blocks are cut into runs from the first on. Of equal runs the first is taken; runs without valid tokens never are.

    Args:
        masses: fp32 `[G, n]`, log masses of the blocks; −inf for those without valid tokens.
        wanted: runs that each of the G heads takes.
        span: blocks a run.
        sums: a run's mass is the sum of its blocks'; otherwise its score is their largest.
        capacity: blocks that are returned at most; what is behind it is left out.

    Returns:
        blocks int32 `[capacity]`, of which `count` int32 `[]` are meant.

    Raises:
        ValueError: not as many numbers of runs as heads, or a span of no blocks.
        TypeError: another dtype.
    """
    heads, blocks = masses.shape
    require(masses.device, masses=(masses, (torch.float32,), (heads, blocks)))
    if len(wanted) != heads or span < 1:
        raise ValueError(f"{len(wanted)} numbers of runs of {span} blocks for {heads} heads; one for each is needed")
    joined = torch.nn.functional.pad(masses, (0, -blocks % span), value=-torch.inf).view(heads, -1, span)
    score = joined.logsumexp(-1) if sums and span > 1 else joined.amax(-1)
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    places = torch.arange(order.shape[1], device=masses.device)
    rank.scatter_(1, order, places.expand_as(order))
    best = torch.stack([line < runs for line, runs in zip(rank, wanted, strict=True)])  # a tensor of them would be sent
    taken = (best & (score > -torch.inf)).any(0)
    marks = taken.repeat_interleave(span)[:blocks]
    chosen = torch.sort(marks, descending=True, stable=True).indices[:capacity]
    return chosen.int(), marks.sum().clamp(max=capacity).int()
