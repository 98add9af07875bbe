"""Unpacking of what `hf_offload.gpu.packing` packs, for tests."""

from __future__ import annotations

import torch

from hf_offload.gpu.packing import OFFSET, level_shifts


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


def unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_levels`: int8 [..., S, D]."""
    words = packed.transpose(-2, -1)[..., None, None, None]
    return (words >> level_shifts(packed.device).int() & 3).to(torch.int8).flatten(-4)


def unpack_halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `pack_halves`: (high, low) float32."""
    low, high = packed.unsqueeze(-1).view(torch.bfloat16).float().unbind(-1)
    return high, low
