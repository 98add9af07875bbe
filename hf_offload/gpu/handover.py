"""What the CPU attends with, on its way to the host: the query, the blocks and their counts, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import flags
from .backend import on_triton
from .require import require

F32, I32 = (torch.float32,), (torch.int32,)
_CHUNK = 512  # what the 128 threads of a program write at a time, 16 bytes each


@dataclass(frozen=True)
class Inbox:
    """Host memory that takes in one hand-over after the other.

    Args:
        query: `[B, Hq, D]` fp32.
        blocks: `[B, Hkv, C]` int32.
        counts: `[B, Hkv]` int32.
        arrived: `[1]` int32 on the device, 0, for this inbox alone; None: the memory is not pinned, so that kernels
            cannot reach it and copies do the work.
    """

    query: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor
    arrived: torch.Tensor | None


def hand_over(
    to: Inbox,
    query: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    *,
    flag: torch.Tensor | None = None,
    epoch: torch.Tensor | None = None,
) -> None:
    """Bring a query and the blocks to attend into host memory, and announce them there if there is a flag.

    The host may read the inbox when it has waited for the stream, or has seen the epoch in the flag.

    Args:
        to: written; entries of `blocks` from the counts on may be anything afterwards.
        query: `[B, Hq, D]` fp32.
        blocks: `[B, Hkv, C]` int32; entries from the counts on may be anything.
        counts: `[B, Hkv]` int32.
        flag, epoch: as in `flags.signal`, or None: nobody is told.

    Raises:
        ValueError: shapes, devices or layouts that do not fit, or one of `flag` and `epoch` without the other.
        TypeError: another dtype.
    """
    batch, heads = counts.shape
    kinds = {
        "query": (F32, query.shape),
        "blocks": (I32, (batch, heads, blocks.shape[-1])),
        "counts": (I32, counts.shape),
    }
    require(
        query.device,
        query=(query, *kinds["query"]),
        blocks=(blocks, *kinds["blocks"]),
        counts=(counts, *kinds["counts"]),
    )
    require(None, **{f"to.{name}": (getattr(to, name), *kind) for name, kind in kinds.items()})
    if query.ndim != 3 or query.shape[0] != batch or query.shape[1] % heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit counts {tuple(counts.shape)}")
    if (flag is None) != (epoch is None):
        raise ValueError("flag and epoch belong together: the one is stored in the other, or neither is given")
    if to.arrived is None or not on_triton(query):
        _by_copies(to, query, blocks, counts, flag, epoch)
        return
    from . import handover_kernels

    if flag is not None and epoch is not None:
        flags.check(flag, epoch)
    handover_kernels.hand_over_kernel[(batch * heads,)](
        query, blocks, counts, to.query, to.blocks, to.counts, None if flag is None else to.arrived, flag, epoch,
        blocks.shape[2], NUMBERS=query.shape[1] // heads * query.shape[2], CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip


def _by_copies(
    to: Inbox, query: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, flag: torch.Tensor | None,
    epoch: torch.Tensor | None,
) -> None:  # fmt: skip
    for target, source in ((to.query, query), (to.blocks, blocks), (to.counts, counts)):
        target.copy_(source, non_blocking=True)
    if flag is not None and epoch is not None:
        flags.signal(flag, epoch)
