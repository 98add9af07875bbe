"""The layout of sub-means in memory, int4 codes and signs, as torch operations on any device.

Codes [S, D] (S sub-means of a block) in -7..7 are stored as nibbles, 8 too large. A little-endian 32-bit word holds 8
consecutive dimensions of one sub-mean, the lowest in the lowest nibble; words are ordered [D / 8, S], sub-means
together. A kernel then has sub-means in its lanes and walks over dimensions: every lane meets the same query entry, and
nothing is ever summed across lanes. A sign is one bit; a word holds 32 dimensions, laid out so that the bits k of its
four bytes belong to the dimensions of the nibbles k % 2 (of four bytes) of the k // 2-th word of codes.
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


def sign_words(dim: int) -> int:
    """32-bit words that hold one bit a dimension."""
    return -(-dim // 32)


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """Pack signs for `submeans.SubMeans`.

    Args:
        signs: bool [..., S, D], True for +.

    Returns:
        int32 [..., W, S], W = `sign_words(D)`.
    """
    *outer, count, dim = signs.shape
    words = sign_words(dim)
    padded = torch.nn.functional.pad(signs.long(), (0, 32 * words - dim))
    group, octet, odd = torch.meshgrid(*(torch.arange(n, device=signs.device) for n in (4, 4, 2)), indexing="ij")
    weights = 1 << (8 * octet + 2 * group + odd)
    packed = (padded.view(*outer, count, words, 4, 4, 2) * weights).sum((-3, -2, -1))
    return (packed - ((packed >> 31) << 32)).to(torch.int32).transpose(-2, -1).contiguous()


def unpack_signs(packed: torch.Tensor, D: int) -> torch.Tensor:
    """Undo `pack_signs`: int8 [..., S, D], +1 or -1."""
    group, octet, odd = torch.meshgrid(*(torch.arange(n, device=packed.device) for n in (4, 4, 2)), indexing="ij")
    bits = packed.transpose(-2, -1)[..., None, None, None].long() >> (8 * octet + 2 * group + odd) & 1
    return (2 * bits.flatten(-4)[..., :D] - 1).to(torch.int8)


def pack_halves(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Two float32 tensors of one shape as the halves of int32 words, rounded to bfloat16."""
    return torch.stack((low.bfloat16(), high.bfloat16()), -1).view(torch.int32).squeeze(-1)


def unpack_halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack_halves`: (high, low) float32."""
    low, high = packed.unsqueeze(-1).view(torch.bfloat16).float().unbind(-1)
    return high, low
