"""The layout of int4 sub-mean codes in memory, as torch operations on any device.

Codes [S, D] (S sub-means of a block) in -7..7 are stored as nibbles, 8 too large. A little-endian 32-bit word holds 8
consecutive dimensions of one sub-mean, the lowest in the lowest nibble; words are ordered [D / 8, S], sub-means
together. A kernel then has sub-means in its lanes and walks over dimensions: every lane meets the same query entry, and
nothing is ever summed across lanes.
"""

from __future__ import annotations

import torch

OFFSET = 8


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack int4 codes for `submeans.SubMeans`.

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


def unpack_codes(packed: torch.Tensor, S: int, D: int) -> torch.Tensor:
    """Undo `pack_codes`.

    Args:
        packed: uint8 [..., S * D / 2].
        S: number of sub-means.
        D: head dimension, a multiple of 8.

    Returns:
        int8 [..., S, D].

    Raises:
        ValueError: D is not a multiple of 8, or the last dimension is not S * D / 2.
    """
    if D % 8 or packed.shape[-1] * 2 != S * D:
        raise ValueError(f"codes of {packed.shape[-1]} bytes do not hold S {S} x D {D} nibbles, D a multiple of 8")
    outer = packed.shape[:-1]
    octets = packed.reshape(*outer, D // 8, S, 4).transpose(-3, -2)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1)
    return (nibbles.to(torch.int8) - OFFSET).reshape(*outer, S, D)
