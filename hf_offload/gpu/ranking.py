"""What choosing and exchanging blocks share, in torch operations: the best of a row, and bringing entries together."""

from __future__ import annotations

import torch

MOST_BLOCKS = 16384
"""Blocks of a row that a kernel ranks: it holds them all in registers."""


def check_width(blocks: int) -> None:
    """Raise ValueError unless a kernel can rank a row of so many blocks."""
    if not 1 <= blocks <= MOST_BLOCKS:
        raise ValueError(f"{blocks} blocks a row are not within 1..{MOST_BLOCKS}; use a larger block_size")


def spare_width(blocks: int) -> int:
    """A quarter more blocks, for a table that grows; but no more than can be ranked, as long as they can."""
    wide = blocks * 5 // 4
    return min(wide, MOST_BLOCKS) if blocks < MOST_BLOCKS else wide


def padded_width(blocks: int) -> dict[str, int]:
    """Compile-time sizes and warps of a kernel that holds so many blocks in registers."""
    width = 1 << (blocks - 1).bit_length()
    warps = min(max(width // 1024, 4), 16)
    return {"WIDTH": width, "CHUNK": min(width, 128 * warps), "num_warps": warps}


def best(worth: torch.Tensor, want: torch.Tensor, most: int) -> torch.Tensor:
    """Mark the `want` largest entries of each row; ties go to the lower index, -inf and NaN are never marked.

    Args:
        worth: fp32 `[..., N]`.
        want: integers `[...]`, at most `most`.
        most: bound of `want`, above 0.

    Returns:
        bool `[..., N]`.
    """
    worth = torch.where(worth > -torch.inf, worth, -torch.inf)  # NaN
    want = want.clamp(min=0)[..., None]
    least = worth.topk(min(most, worth.shape[-1]), -1).values
    bound = least.gather(-1, (want - 1).clamp(0, least.shape[-1] - 1))
    above, ties = worth > bound, (worth == bound) & (bound > -torch.inf)
    room = want - above.sum(-1, keepdim=True)
    return (want > 0) & (above | (ties & (ties.cumsum(-1) <= room)))


def together(entries: torch.Tensor, keep: torch.Tensor, width: int) -> torch.Tensor:
    """Bring the kept entries of each row to its front, in order; what lies behind them means nothing.

    Args:
        entries: `[..., n]`.
        keep: bool `[..., n]`; what does not fit into `width` is dropped.
        width: entries of a row of the result.

    Returns:
        `[..., width]`.
    """
    place = torch.where(keep, keep.cumsum(-1) - 1, width).clamp(max=width)
    front = entries.new_zeros(*entries.shape[:-1], width + 1)  # the last place is for what is not kept
    return front.scatter_(-1, place, entries)[..., :width].contiguous()
