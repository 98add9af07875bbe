"""The layout of key pairs in memory, means in int4 and half differences in 2 bits, as torch operations on any device.

Codes [S, D] (S sub-means of a block) in -7..7 are stored as nibbles, 8 too large. A little-endian 32-bit word holds 8
consecutive dimensions of one sub-mean, the lowest in the lowest nibble; words are ordered [D / 8, S], sub-means
together. A kernel then has sub-means in its lanes and walks over dimensions: every lane meets the same query entry, and
nothing is ever summed across lanes. Half differences take two bits: a word holds 16
dimensions, laid out so that the bits 2k and 2k + 1 of its four bytes belong to the dimensions of the nibbles k % 2 (of
four bytes) of the k // 2-th word of codes.
"""

from __future__ import annotations

import torch

OFFSET = 8


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack int4 codes.

    Args:
        codes: int8 [..., S, D], values -7..7 (not checked), D a multiple of 8.

    Returns:
        uint8 [..., S * D / 2].

    Raises:
        ValueError: D is not a multiple of 8.
    """
    *outer, count, dim = codes.shape
    if dim % 8:
        raise ValueError(f"D {dim} is not a multiple of 8")
    nibbles = (codes + OFFSET).view(torch.uint8).reshape(*outer, count, dim // 8, 4, 2)
    octets = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return octets.transpose(-3, -2).reshape(*outer, count * dim // 2)


def level_shifts(device: torch.device) -> torch.Tensor:
    """The lowest bit of each of 16 dimensions in a word, `[2 (group of 8), 4, 2]`."""
    group, octet, odd = torch.meshgrid(*(torch.arange(n, device=device) for n in (2, 4, 2)), indexing="ij")
    return 8 * octet + 4 * group + 2 * odd


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit levels.

    Args:
        levels: integers 0..3 (not checked), [..., S, D], D a multiple of 16.

    Returns:
        int32 [..., D / 16, S].

    Raises:
        ValueError: D is not a multiple of 16.
    """
    *outer, count, dim = levels.shape
    if dim % 16:
        raise ValueError(f"D {dim} is not a multiple of 16")
    parts = levels.long().view(*outer, count, dim // 16, 2, 4, 2) << level_shifts(levels.device)
    packed = parts.sum((-3, -2, -1))
    return (packed - ((packed >> 31) << 32)).to(torch.int32).transpose(-2, -1).contiguous()


def pack_halves(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Two float32 tensors of one shape as the halves of int32 words, rounded to bfloat16."""
    return torch.stack((low.bfloat16(), high.bfloat16()), -1).view(torch.int32).squeeze(-1)
